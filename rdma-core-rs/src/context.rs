//! An open device.

#![allow(unsafe_code)] // calls C

use std::any::Any;
use std::ffi::CStr;
use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use crate::async_event::AsyncEvents;
use crate::attr::{DeviceAttr, PortAttr};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::Birth;
use crate::sys;

/// An open device: what every other object is made on.
///
/// A handle; clones mean the same open device. It is closed with its last user, or, if it was
/// borrowed from a connection identifier, given back then. All methods can be called from any
/// thread.
///
/// ```
/// use rdma_core_rs::{PortState, devices};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// let context = devices()?.first().expect("a device").open()?;
/// let limits = context.device_attr()?;
/// println!("at most {} requests in a queue", limits.max_qp_wr);
/// for port in 1..=limits.phys_port_cnt {
///     let attr = context.port_attr(port)?;
///     if attr.state == PortState::Active {
///         println!("port {port}: {} Mbit/s", attr.speed_mbps());
///     }
/// }
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[doc(alias = "ibv_context")]
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    verbs: NonNull<sys::ibv_context>,
    origin: Origin,
    birth: Birth,
    attr: OnceLock<DeviceAttr>,
}

/// Who closes the device.
enum Origin {
    Opened,
    Borrowed {
        _keep_alive: Arc<dyn Any + Send + Sync>,
    },
}

// SAFETY: libibverbs allows an ibv_context to be used from any thread; `verbs` is only given to
// libibverbs, or read in fields that do not change after opening.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

impl Context {
    pub(crate) fn open(device: &Device) -> Result<Context> {
        // SAFETY: `device` keeps the ibv_device alive during the call; the context takes its own
        // reference to it.
        let verbs = unsafe { sys::ibv_open_device(device.as_raw().as_ptr()) };
        let verbs = sys::check_null("ibv_open_device", verbs)
            .map_err(|error| explain_failed_open(error, device.file()))?;
        Ok(Context::new(verbs, Origin::Opened))
    }

    /// Wraps an open device that somebody else owns, such as the `verbs` of an `rdma_cm_id`.
    ///
    /// It is not closed; `keep_alive` is dropped after the last object made on it.
    ///
    /// # Safety
    /// `verbs` must be an open device and stay so until `keep_alive` has been dropped.
    pub unsafe fn from_raw(
        verbs: NonNull<sys::ibv_context>,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Context {
        Context::new(
            verbs,
            Origin::Borrowed {
                _keep_alive: keep_alive,
            },
        )
    }

    fn new(verbs: NonNull<sys::ibv_context>, origin: Origin) -> Context {
        let inner = Inner {
            verbs,
            origin,
            birth: Birth::now(),
            attr: OnceLock::new(),
        };
        Context {
            inner: Arc::new(inner),
        }
    }

    /// The C object. It stays open as long as this handle, a clone, or an object made on it.
    #[inline]
    pub fn as_raw(&self) -> NonNull<sys::ibv_context> {
        self.inner.verbs
    }

    /// Whether both are the same open device, so that objects of the one can be used with objects
    /// of the other.
    ///
    /// Opening a device twice gives two contexts that cannot be mixed; two identifiers of the
    /// connection manager on one device share one.
    #[inline]
    pub fn is_same_device(&self, other: &Context) -> bool {
        self.inner.verbs == other.inner.verbs
    }

    /// The device's name in the kernel.
    pub fn device_name(&self) -> &str {
        // SAFETY: the context is open, and reads of `device` race with nothing: it never changes.
        let device = unsafe { (*self.inner.verbs.as_ptr()).device };
        // SAFETY: an open context holds a reference to its device.
        let name = unsafe { sys::ibv_get_device_name(device) };
        // SAFETY: a NUL-terminated array inside the device, which lives as long as the context.
        unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?")
    }

    /// The device's limits and properties. They do not change, so they are asked for once.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_device`.
    #[doc(alias = "ibv_query_device")]
    pub fn device_attr(&self) -> Result<&DeviceAttr> {
        if let Some(attr) = self.inner.attr.get() {
            return Ok(attr);
        }
        self.check_process()?;
        let mut attr = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and `attr` is room for what the function writes.
        let ret = unsafe { sys::ibv_query_device(self.as_raw().as_ptr(), attr.as_mut_ptr()) };
        sys::check("ibv_query_device", ret)?;
        // SAFETY: zeroed before the call, and every field is an integer or an array of them.
        let attr = unsafe { attr.assume_init() };
        Ok(self.inner.attr.get_or_init(|| DeviceAttr::from_raw(&attr)))
    }

    /// Whether the device can fault pages in, so that they need not be pinned
    /// ([`Access::ON_DEMAND`](crate::Access::ON_DEMAND)).
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_device_ex`.
    #[doc(alias = "ibv_query_device_ex")]
    #[doc(alias = "IBV_ODP_SUPPORT")]
    pub fn on_demand_paging(&self) -> Result<bool> {
        self.check_process()?;
        let mut attr = MaybeUninit::<sys::ibv_device_attr_ex>::zeroed();
        // SAFETY: the context is open, and `attr` is zeroed.
        let ret = unsafe { sys::query_device_ex(self.as_raw().as_ptr(), attr.as_mut_ptr()) };
        match ret {
            None | Some(libc::EOPNOTSUPP) => return Ok(false),
            Some(ret) => sys::check("ibv_query_device_ex", ret)?,
        }
        // SAFETY: zeroed before the call, and every field is an integer or an array of them.
        let attr = unsafe { attr.assume_init() };
        let support = u64::from(sys::ibv_odp_general_caps::IBV_ODP_SUPPORT.0);
        Ok(attr.odp_caps.general_caps & support != 0)
    }

    /// The present state of a port. Ports are numbered from 1.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_port`, such as `EINVAL` for a port that does not
    /// exist.
    #[doc(alias = "ibv_query_port")]
    pub fn port_attr(&self, port: u8) -> Result<PortAttr> {
        self.check_process()?;
        let mut attr = MaybeUninit::<sys::ibv_port_attr>::zeroed();
        // The exported function fills in the first fields of the struct and leaves the rest at 0.
        let compat = attr.as_mut_ptr().cast();
        // SAFETY: the context is open, and `attr` is larger than the part that is written.
        let ret = unsafe { sys::ibv_query_port(self.as_raw().as_ptr(), port, compat) };
        sys::check("ibv_query_port", ret)?;
        // SAFETY: zeroed before the call, and every field is an integer.
        Ok(PortAttr::from_raw(&unsafe { attr.assume_init() }))
    }

    /// The GID at an index of a port's table; `::` where the entry is empty.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_gid`, when there is no such port or index.
    #[doc(alias = "ibv_query_gid")]
    pub fn gid(&self, port: u8, index: u32) -> Result<Ipv6Addr> {
        self.check_process()?;
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        let at = i32::try_from(index).unwrap_or(i32::MAX);
        // SAFETY: the context is open, and `gid` is room for one GID.
        let ret = unsafe { sys::ibv_query_gid(self.as_raw().as_ptr(), port, at, &raw mut gid) };
        sys::check_minus_one("ibv_query_gid", ret)?;
        // SAFETY: both variants of the union are 16 plain bytes.
        Ok(Ipv6Addr::from(unsafe { gid.raw }))
    }

    /// The partition key at an index of a port's table, in host order.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_pkey`, when there is no such port or index.
    #[doc(alias = "ibv_query_pkey")]
    pub fn pkey(&self, port: u8, index: u16) -> Result<u16> {
        self.check_process()?;
        let mut pkey = 0;
        // SAFETY: the context is open, and `pkey` is a local that the function fills in.
        let ret = unsafe {
            sys::ibv_query_pkey(self.as_raw().as_ptr(), port, index.into(), &raw mut pkey)
        };
        sys::check_minus_one("ibv_query_pkey", ret)?;
        Ok(u16::from_be(pkey))
    }

    /// The stream of the device's asynchronous events. Its descriptor is made non-blocking.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `fcntl`.
    #[doc(alias = "ibv_get_async_event")]
    pub fn async_events(&self) -> Result<AsyncEvents> {
        AsyncEvents::new(self)
    }

    /// How many completion vectors the device has.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: the context is open; the field does not change.
        let vectors = unsafe { (*self.inner.verbs.as_ptr()).num_comp_vectors };
        u32::try_from(vectors).unwrap_or(0)
    }

    /// The descriptor that is readable when there is an asynchronous event.
    pub(crate) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open; the field does not change.
        let fd = unsafe { (*self.inner.verbs.as_ptr()).async_fd };
        // SAFETY: the descriptor belongs to the context, which stays open while `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Refuses to go on in a child of the process that opened the device.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        self.inner.birth.check()
    }

    /// Whether this is a child of the process that opened the device.
    pub(crate) fn is_foreign_process(&self) -> bool {
        !self.inner.birth.is_here()
    }
}

/// Tells a missing permission from other reasons.
///
/// libibverbs tries other ways after EACCES and reports how the last of them failed, so the file is
/// asked.
fn explain_failed_open(error: Error, file: PathBuf) -> Error {
    let opened = OpenOptions::new().read(true).write(true).open(&file);
    let denied = opened
        .err()
        .filter(|source| source.kind() == io::ErrorKind::PermissionDenied);
    match (denied, error) {
        (Some(source), _) => Error::PermissionDenied { path: file, source },
        (None, Error::Call { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Error::PermissionDenied { path: file, source }
        }
        (None, error) => error,
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if matches!(self.origin, Origin::Borrowed { .. }) || !self.birth.is_here() {
            return;
        }
        // SAFETY: we opened it, and everything made on it held an owner of `self` and is gone.
        let ret = unsafe { sys::ibv_close_device(self.verbs.as_ptr()) };
        if let Err(error) = sys::check("ibv_close_device", ret) {
            log::error!("{error}; the device stays open");
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device_name())
            .finish_non_exhaustive()
    }
}
