//! What keeps a device open while somebody uses it without an id.
//!
//! librdmacm opens each device once, hands the same context to every id on it, and counts who uses
//! it. An id counts while it lives; but queue pairs and memory outlive ids. The list of
//! `rdma_get_devices` counts as well, so whoever holds it, the *lease*, may keep using the contexts
//! in it. All leases of a process are one list, as long as it has the device that is wanted.
#![allow(unsafe_code)] // rdma_get_devices and its counterpart

use std::any::Any;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rdma_core_rs::Context;

use crate::error::{CmError, Result, Step};
use crate::sys;

/// The list of devices, held until it drops.
#[derive(Debug)]
pub(crate) struct DeviceLease {
    list: NonNull<*mut sys::ibv_context>,
    len: usize,
}

// SAFETY: the list is an array that nobody writes to, and rdma_free_devices, which takes a lock of
// its own, may be called from any thread.
unsafe impl Send for DeviceLease {}
// SAFETY: through `&DeviceLease` the array is only read.
unsafe impl Sync for DeviceLease {}

static CURRENT: Mutex<Weak<DeviceLease>> = Mutex::new(Weak::new());

impl DeviceLease {
    /// A lease on the device of `verbs`; `None` if librdmacm does not list it any more.
    fn on(verbs: NonNull<sys::ibv_context>) -> Result<Option<Arc<Self>>> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lease) = current.upgrade().filter(|lease| lease.holds(verbs)) {
            return Ok(Some(lease));
        }
        let lease = Arc::new(Self::new()?);
        if !lease.holds(verbs) {
            return Ok(None);
        }
        *current = Arc::downgrade(&lease);
        Ok(Some(lease))
    }

    fn new() -> Result<Self> {
        if !sys::is_usable() {
            return Err(CmError::Forked);
        }
        let mut len = 0;
        // SAFETY: `len` is an int that the function sets; it may be called from any thread.
        let list = unsafe { sys::rdma_get_devices(&mut len) };
        let list = NonNull::new(list)
            .ok_or_else(io::Error::last_os_error)
            .map_err(CmError::call("rdma_get_devices", Step::Device, None))?;
        Ok(Self {
            list,
            len: usize::try_from(len).unwrap_or(0),
        })
    }

    fn holds(&self, verbs: NonNull<sys::ibv_context>) -> bool {
        // SAFETY: rdma_get_devices returned an array of `len` pointers, which stays as it is until
        // `Drop` frees it.
        let contexts = unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.len) };
        contexts.contains(&verbs.as_ptr())
    }
}

impl Drop for DeviceLease {
    fn drop(&mut self) {
        // SAFETY: the list came from rdma_get_devices and is freed here only.
        unsafe { sys::rdma_free_devices(self.list.as_ptr()) }
    }
}

/// The context of an id for general use, with a lease that keeps it open.
///
/// # Safety
///
/// `verbs` must be the context of an id that lives until this function returns.
pub(crate) unsafe fn lease_context(verbs: NonNull<sys::ibv_context>) -> Result<Context> {
    let Some(lease) = DeviceLease::on(verbs)? else {
        return Err(CmError::DeviceRemoved {
            step: Step::Device,
            // SAFETY: the id keeps the context open by contract.
            device: unsafe { device_name(verbs) },
        });
    };
    let lease: Arc<dyn Any + Send + Sync> = lease;
    // SAFETY: the lease holds this very context (`DeviceLease::on` looked it up in its list), and
    // librdmacm closes a context only after everyone who counts on it has let go.
    Ok(unsafe { Context::from_raw(verbs, lease) })
}

/// The name of the device of `verbs`, for messages.
///
/// # Safety
///
/// `verbs` must be the context of an id that lives until this function returns.
pub(crate) unsafe fn device_name(verbs: NonNull<sys::ibv_context>) -> String {
    // SAFETY: the id keeps the context open by contract, and its first field, the device, is set
    // once when it is opened.
    let device = unsafe { (*verbs.as_ptr()).device };
    // SAFETY: an open context has a device, whose name is a field of it.
    let name = unsafe { sys::ibv_get_device_name(device) };
    // SAFETY: the name is a C string inside the device, which the open context keeps alive.
    unsafe { std::ffi::CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned()
}
