//! Slices of local memory regions: the buffers of sends and receives.

#![allow(unsafe_code)] // turns the region's pointer into slices

use std::fmt;
use std::ops::{Bound, Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::BytesMut;

use crate::access::Access;
use crate::error::{OutOfRange, Result};
use crate::memory::{Memory, Pages};
use crate::mr::Region;
use crate::pd::ProtectionDomain;
use crate::wr::Sge;

/// A range of registered memory that nobody else owns, and that no peer can reach.
///
/// It derefs to `[u8]` and can be split into smaller ones; the memory is deregistered and freed
/// with the last of them. To give it to the device, take its [`Sge`] and keep the slice, without
/// touching it, until the completion: that is the contract of
/// [`QueuePair::post_send`](crate::QueuePair::post_send).
///
/// ```
/// use rdma_core_rs::RegionSlice;
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// let mut first = RegionSlice::alloc(&pd, 8192)?;
/// let second = first.split_off(4096);
/// first[..5].copy_from_slice(b"hello");
/// assert_eq!((first.len(), second.len()), (4096, 4096));
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
pub struct RegionSlice {
    ptr: NonNull<u8>,
    len: usize,
    lkey: u32,
    region: Arc<Region>,
}

// SAFETY: the slice is the only owner of its range (I9: ranges are only made by splitting), and
// bytes can be used from any thread.
unsafe impl Send for RegionSlice {}
// SAFETY: through `&RegionSlice` the bytes can only be read.
unsafe impl Sync for RegionSlice {}

/// How [`RegionSlice::alloc_with`] allocates and registers.
///
/// ```
/// use rdma_core_rs::{Error, Pages, RegionOptions, RegionSlice};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// let huge = RegionOptions { pages: Pages::Huge, ..RegionOptions::default() };
/// let slice = match RegionSlice::alloc_with(&pd, 1 << 21, &huge) {
///     Err(Error::Call { call: "mmap", .. }) => RegionSlice::alloc(&pd, 1 << 21)?, // none free
///     other => other?,
/// };
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct RegionOptions {
    /// Which pages to use.
    pub pages: Pages,
    /// Register for on-demand paging: pages are not pinned. `NotSupported` where the device
    /// cannot.
    pub on_demand: bool,
    /// Let the device reorder its writes ([`Access::RELAXED_ORDERING`]).
    pub relaxed_ordering: bool,
}

impl RegionOptions {
    fn access(&self) -> Access {
        let mut access = Access::LOCAL_WRITE;
        access.set(Access::ON_DEMAND, self.on_demand);
        access.set(Access::RELAXED_ORDERING, self.relaxed_ordering);
        access
    }
}

impl RegionSlice {
    /// Allocates `len` zeroed bytes on pages of their own and registers them for local use.
    ///
    /// # Errors
    /// - [`Config`](crate::Error::Config) naming `len` if it is 0.
    /// - [`Memlock`](crate::Error::Memlock) if the limit on locked memory does not allow it.
    /// - [`Call`](crate::Error::Call) naming the allocation or `ibv_reg_mr` for anything else.
    #[doc(alias = "ibv_reg_mr")]
    pub fn alloc(pd: &ProtectionDomain, len: usize) -> Result<RegionSlice> {
        RegionSlice::alloc_with(pd, len, &RegionOptions::default())
    }

    /// As [`alloc`](Self::alloc), with huge pages or other kinds of registration.
    ///
    /// With huge pages the length is rounded up to whole pages.
    ///
    /// # Errors
    /// As for `alloc`; [`Call`](crate::Error::Call) naming `mmap` with `ENOMEM` if the pool of huge
    /// pages is too small; [`NotSupported`](crate::Error::NotSupported) for on-demand paging.
    pub fn alloc_with(
        pd: &ProtectionDomain,
        len: usize,
        options: &RegionOptions,
    ) -> Result<RegionSlice> {
        let memory = Memory::zeroed(len, options.pages)?;
        Ok(RegionSlice::whole(Region::register(
            pd,
            memory,
            options.access(),
        )?))
    }

    /// Takes over the bytes of a `Vec` and registers them where they are.
    ///
    /// ```compile_fail,E0382
    /// # use rdma_core_rs::{ProtectionDomain, RegionSlice};
    /// # fn example(pd: &ProtectionDomain) -> rdma_core_rs::Result<()> {
    /// let mut bytes = vec![1, 2, 3];
    /// let slice = RegionSlice::from_vec(pd, bytes)?;
    /// bytes.push(4); // not ours any more: the device may be reading them
    /// # Ok(()) }
    /// ```
    ///
    /// Allocate with [`alloc`](Self::alloc) where you can: a `Vec` shares its first and last page
    /// with other data.
    ///
    /// # Errors
    /// As for `alloc`; the bytes are then freed.
    pub fn from_vec(pd: &ProtectionDomain, vec: Vec<u8>) -> Result<RegionSlice> {
        RegionSlice::adopt(pd, Memory::from_vec(vec))
    }

    /// Takes over the bytes of a `BytesMut` (its length, not its capacity) and registers them
    /// where they are.
    ///
    /// # Errors
    /// As for `alloc`; the bytes are then freed.
    pub fn from_bytes(pd: &ProtectionDomain, bytes: BytesMut) -> Result<RegionSlice> {
        RegionSlice::adopt(pd, Memory::from_bytes(bytes))
    }

    fn adopt(pd: &ProtectionDomain, memory: Memory) -> Result<RegionSlice> {
        crate::error::at_least("len", memory.len() as u64, 1)?;
        Ok(RegionSlice::whole(Region::register(
            pd,
            memory,
            Access::LOCAL_WRITE,
        )?))
    }

    fn whole(region: Arc<Region>) -> RegionSlice {
        RegionSlice {
            ptr: region.ptr(),
            len: region.len(),
            lkey: region.lkey(),
            region,
        }
    }

    /// Keeps `[0, at)` and returns `[at, len)`.
    ///
    /// # Panics
    /// If `at` is past the end.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> RegionSlice {
        assert!(
            at <= self.len,
            "split_off at {at} of a slice of {}",
            self.len
        );
        // SAFETY: `at` is at most the length, so the result points into the region or one past it.
        let ptr = unsafe { self.ptr.add(at) };
        let len = self.len - at;
        self.len = at;
        RegionSlice {
            ptr,
            len,
            lkey: self.lkey,
            region: self.region.clone(),
        }
    }

    /// Joins this slice with the one right behind it in the same region.
    ///
    /// # Errors
    /// Gives `next` back if it is not the neighbour; nothing has changed then.
    pub fn unsplit(&mut self, next: RegionSlice) -> Result<(), RegionSlice> {
        let end = self.ptr.as_ptr().addr() + self.len;
        if !Arc::ptr_eq(&self.region, &next.region) || next.ptr.as_ptr().addr() != end {
            return Err(next);
        }
        self.len += next.len;
        Ok(())
    }

    /// The protection domain it is registered in.
    pub fn pd(&self) -> &ProtectionDomain {
        self.region.pd()
    }

    /// The local key of its region.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// All of it as a scatter/gather element.
    ///
    /// An element holds at most 2^32 - 1 bytes; of a longer slice it covers that many, which is
    /// more than any device takes in one message.
    #[inline]
    pub fn sge(&self) -> Sge {
        Sge::new(
            self.ptr,
            u32::try_from(self.len).unwrap_or(u32::MAX),
            self.lkey,
        )
    }

    /// A part of it as a scatter/gather element.
    ///
    /// # Errors
    /// [`OutOfRange`] if the range is backwards, does not lie inside, or is longer than 2^32 - 1.
    #[inline]
    pub fn sge_range(&self, range: impl RangeBounds<usize>) -> Result<Sge, OutOfRange> {
        let (start, len) = checked_range(range, self.len)?;
        let short = u32::try_from(len).map_err(|_| out_of_range(start, len, self.len))?;
        // SAFETY: `start` is at most the length, so the result points into the region.
        let ptr = unsafe { self.ptr.add(start) };
        Ok(Sge::new(ptr, short, self.lkey))
    }

    /// The address of the first byte.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }
}

impl Deref for RegionSlice {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in initialized memory that `region` keeps; nobody else owns it,
        // no peer reaches it, and the device only during a post, whose contract forbids this call.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for RegionSlice {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for RegionSlice {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for RegionSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the bytes: printing them may happen while the device writes them, and tells secrets.
        f.debug_struct("RegionSlice")
            .field("addr", &self.ptr)
            .field("len", &self.len)
            .field("lkey", &self.lkey)
            .finish_non_exhaustive()
    }
}

/// Start and length of `range` if it lies inside `0..len`.
#[inline]
pub(crate) fn checked_range(
    range: impl RangeBounds<usize>,
    len: usize,
) -> Result<(usize, usize), OutOfRange> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if start > end || end > len {
        return Err(OutOfRange {
            start: start as u64,
            end: end as u64,
            len: len as u64,
        });
    }
    Ok((start, end - start))
}

#[cold]
fn out_of_range(start: usize, count: usize, len: usize) -> OutOfRange {
    let start = start as u64;
    OutOfRange {
        start,
        end: start.saturating_add(count as u64),
        len: len as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_every_kind_are_checked() {
        assert_eq!(checked_range(.., 10), Ok((0, 10)));
        assert_eq!(checked_range(3.., 10), Ok((3, 7)));
        assert_eq!(checked_range(..=9, 10), Ok((0, 10)));
        assert_eq!(checked_range(10..10, 10), Ok((10, 0)));
        assert!(checked_range(..11, 10).is_err());
        assert!(checked_range(..=usize::MAX, 10).is_err());
        assert!(checked_range(11.., 10).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 5..4;
        assert!(checked_range(backwards, 10).is_err());
    }
}
