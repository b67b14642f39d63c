//! Memory windows: remote keys that can be given and taken back quickly.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::ptr::NonNull;

use crate::access::Access;
use crate::error::{Error, Result};
use crate::pd::ProtectionDomain;
use crate::remote::RemoteRegion;
use crate::shared::SharedSlice;
use crate::sys::{self, ibv_mw_type};
use crate::wr::SendWr;

/// A memory window of type 2: a remote key for a part of a [`SharedRegion`](crate::SharedRegion)
/// that was registered with [`Access::MW_BIND`].
///
/// It is bound by posting a request, and unbound by [`SendWr::local_invalidate`] or a peer's send
/// with invalidate; both are much cheaper than registering. It is bound to one part at a time.
///
/// ```no_run
/// use rdma_core_rs::{Access, MemoryWindow, QueuePair, SharedRegion};
///
/// # fn example(qp: &mut QueuePair, region: &SharedRegion) -> rdma_core_rs::Result<()> {
/// let mut window = MemoryWindow::new(qp.pd())?;
/// let mut bind = window.bind(1, &region.slice(0..64)?, Access::REMOTE_READ)?;
/// // SAFETY: binding uses no buffer.
/// unsafe { qp.post_send(&mut bind) }.expect("room in the queue");
/// let for_the_peer = window.descriptor(); // once the bind has completed
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_mw")]
pub struct MemoryWindow {
    mw: NonNull<sys::ibv_mw>,
    rkey: u32,
    bound: Option<(SharedSlice, Access)>,
    pd: ProtectionDomain,
}

// SAFETY: libibverbs allows its objects to be used from any thread; `mw` is only given to it and
// freed once.
unsafe impl Send for MemoryWindow {}
// SAFETY: as for Send; through `&MemoryWindow` only our own fields are read.
unsafe impl Sync for MemoryWindow {}

impl MemoryWindow {
    /// Allocates a window that is bound to nothing.
    ///
    /// # Errors
    /// [`NotSupported`](Error::NotSupported) if the device has no windows of type 2;
    /// [`Call`](Error::Call) naming `ibv_alloc_mw` for anything else.
    #[doc(alias = "ibv_alloc_mw")]
    pub fn new(pd: &ProtectionDomain) -> Result<MemoryWindow> {
        pd.context().check_process()?;
        // SAFETY: `pd` lives during the call.
        let mw = unsafe { sys::ibv_alloc_mw(pd.as_raw().as_ptr(), ibv_mw_type::IBV_MW_TYPE_2) };
        let mw = mw.unwrap_or(std::ptr::null_mut()); // no such function, with errno set
        let mw = sys::check_null("ibv_alloc_mw", mw)
            .map_err(|error| error.or_not_supported("a memory window of type 2"))?;
        // SAFETY: the window was just made and is ours.
        let rkey = unsafe { (*mw.as_ptr()).rkey };
        Ok(MemoryWindow {
            mw,
            rkey,
            bound: None,
            pd: pd.clone(),
        })
    }

    /// The request that binds the window to `slice`, giving peers `access` to it. Post it on a
    /// queue pair of the same protection domain.
    ///
    /// The window has a new key from then on, whether or not the request is posted; a binding made
    /// before must have been invalidated. It holds the region of `slice`.
    ///
    /// # Errors
    /// - [`Foreign`](Error::Foreign), if the region is of another protection domain.
    /// - [`NotSupported`](Error::NotSupported), if the region was registered without
    ///   [`Access::MW_BIND`].
    #[doc(alias = "IBV_WR_BIND_MW")]
    pub fn bind(&mut self, wr_id: u64, slice: &SharedSlice, access: Access) -> Result<SendWr<'_>> {
        if !slice.region().pd().is_same(&self.pd) {
            return Err(Error::Foreign {
                what: "the region",
                of: "protection domain",
            });
        }
        if !slice.region().access().contains(Access::MW_BIND) {
            return Err(Error::NotSupported {
                what: "a window on a region without MW_BIND",
            });
        }
        self.rkey = next_key(self.rkey);
        self.bound = Some((slice.clone(), access));
        let info = sys::ibv_mw_bind_info {
            mr: slice.region().region().as_raw().as_ptr(),
            addr: slice.sge().addr(),
            length: slice.len() as u64,
            mw_access_flags: access.bits(),
        };
        let bind = sys::bind_mw_t {
            mw: self.mw.as_ptr(),
            rkey: self.rkey,
            bind_info: info,
        };
        Ok(SendWr::bind_mw(wr_id, bind))
    }

    /// The remote key of the last binding.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// What a peer needs to know to use the last binding. Empty if there is none.
    pub fn descriptor(&self) -> RemoteRegion {
        match &self.bound {
            None => RemoteRegion::new(0, 0, self.rkey),
            Some((slice, access)) if access.contains(Access::ZERO_BASED) => {
                RemoteRegion::new(0, slice.len() as u64, self.rkey)
            }
            Some((slice, _)) => slice.descriptor().with_rkey(self.rkey),
        }
    }
}

/// The key with the part that the user may choose, its low 8 bits, counted on.
#[doc(alias = "ibv_inc_rkey")]
fn next_key(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        if self.pd.context().is_foreign_process() {
            return;
        }
        // SAFETY: ours, and freed once; the region it may be bound to is dropped after it.
        let ret = unsafe { sys::ibv_dealloc_mw(self.mw.as_ptr()) };
        if let Err(error) = sys::check("ibv_dealloc_mw", ret) {
            std::mem::forget(self.bound.take());
            log::error!("{error}; the memory window is leaked"); // last: a logger may panic
        }
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("rkey", &self.rkey)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_low_byte_of_the_key_is_counted_on() {
        assert_eq!(next_key(0x1234_5600), 0x1234_5601);
        assert_eq!(next_key(0x1234_56ff), 0x1234_5600);
        assert_eq!(next_key(u32::MAX), 0xffff_ff00);
    }
}
