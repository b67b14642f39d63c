//! Regions on dma-bufs: memory of other devices, such as GPUs.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::access::Access;
use crate::error::{self, OutOfRange, Result};
use crate::pd::ProtectionDomain;
use crate::remote::RemoteRegion;
use crate::sys;
use crate::wr::Sge;

/// A memory region on a dma-buf: memory that the device reaches and the CPU perhaps not.
///
/// Nothing of it can be read or written here; it serves as buffer and as target of transfers. It is
/// deregistered on drop.
#[doc(alias = "ibv_reg_dmabuf_mr")]
pub struct DmaBufRegion {
    mr: NonNull<sys::ibv_mr>,
    iova: u64,
    len: usize,
    lkey: u32,
    rkey: u32,
    pd: ProtectionDomain,
}

// SAFETY: libibverbs allows its objects to be used from any thread; `mr` is only given to it and
// deregistered once.
unsafe impl Send for DmaBufRegion {}
// SAFETY: as for Send.
unsafe impl Sync for DmaBufRegion {}

impl DmaBufRegion {
    /// Registers `range` of the dma-buf `fd`; its first byte gets the address `iova` in requests.
    ///
    /// `iova` must have the same offset in a page as the start of `range`. The descriptor can be
    /// closed afterwards.
    ///
    /// # Errors
    /// - [`NotSupported`](crate::Error::NotSupported) if the device or its driver cannot.
    /// - [`Config`](crate::Error::Config) naming `len` if `range` is empty.
    /// - [`Call`](crate::Error::Call) naming `ibv_reg_dmabuf_mr` for anything else, such as
    ///   `EBADF` when the descriptor is no dma-buf.
    pub fn new(
        pd: &ProtectionDomain,
        fd: BorrowedFd<'_>,
        range: Range<u64>,
        iova: u64,
        access: Access,
    ) -> Result<DmaBufRegion> {
        pd.context().check_process()?;
        let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        error::at_least("len", len as u64, 1)?;
        let flags = access.for_region().bits() as i32; // flags, not a number
        let (pd_raw, fd) = (pd.as_raw().as_ptr(), fd.as_raw_fd());
        // SAFETY: `pd` lives during the call, and `fd` is open; the memory is not ours to free.
        let mr = unsafe { sys::ibv_reg_dmabuf_mr(pd_raw, range.start, len, iova, fd, flags) };
        let mr = sys::check_null("ibv_reg_dmabuf_mr", mr)
            .map_err(|error| error.or_not_supported("registering a dma-buf"))?;
        // SAFETY: the region was just made and is ours; the field does not change.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*mr.as_ptr()).rkey };
        Ok(DmaBufRegion {
            mr,
            iova,
            len,
            lkey,
            rkey,
            pd: pd.clone(),
        })
    }

    /// The number of bytes.
    #[allow(clippy::len_without_is_empty)] // a region is never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// A part of it as a scatter/gather element.
    ///
    /// # Errors
    /// [`OutOfRange`] if the range is backwards, does not lie inside, or is longer than 2^32 - 1.
    pub fn sge_range(&self, range: Range<u64>) -> Result<Sge, OutOfRange> {
        let part = self.descriptor().slice(range.clone())?;
        let outside = OutOfRange {
            start: range.start,
            end: range.end,
            len: self.len as u64,
        };
        let len = u32::try_from(part.len()).map_err(|_| outside)?;
        Ok(Sge::at(part.addr(), len, self.lkey))
    }

    /// What a peer needs to know to access it.
    pub fn descriptor(&self) -> RemoteRegion {
        RemoteRegion::new(self.iova, self.len as u64, self.rkey)
    }

    /// The protection domain it is registered in.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }
}

impl Drop for DmaBufRegion {
    fn drop(&mut self) {
        if self.pd.context().is_foreign_process() {
            return;
        }
        // SAFETY: ours, and deregistered once.
        let ret = unsafe { sys::ibv_dereg_mr(self.mr.as_ptr()) };
        if let Err(error) = sys::check("ibv_dereg_mr", ret) {
            log::error!("{error}; the region on a dma-buf is leaked");
        }
    }
}

impl fmt::Debug for DmaBufRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaBufRegion")
            .field("iova", &format_args!("{:#x}", self.iova))
            .field("len", &self.len)
            .field("rkey", &self.rkey)
            .finish_non_exhaustive()
    }
}
