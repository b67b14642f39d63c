//! Memory that peers may read and write while we look at it.
//!
//! A Rust reference promises that nobody else writes (or, if mutable, even reads) meanwhile. A peer
//! knows nothing of that promise, so no `&[u8]` to such memory ever exists (I3): bytes are copied
//! in and out, with atomic loads and stores, so that threads of this process that meet here do not
//! race either.
//!
//! Atomics of different sizes on the same bytes count as a race in Rust, so there is one size: the
//! aligned 8-byte word. Bytes at the ends of a copy that do not fill a word are read with all of
//! it, and written by compare-and-swap: a peer's write to the neighbours is not undone, as it would
//! be by a load and a store.

#![allow(unsafe_code)] // turns the region's pointer into atomics

use std::fmt;
use std::ops::RangeBounds;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::access::Access;
use crate::error::{Error, OutOfRange, Result};
use crate::memory::{Memory, Pages};
use crate::mr::Region;
use crate::pd::ProtectionDomain;
use crate::remote::RemoteRegion;
use crate::slice::checked_range;
use crate::wr::Sge;

/// Registered memory that peers may access.
///
/// A handle; clones mean the same memory, which is deregistered and freed with the last of them:
/// a peer's access fails from then on. Bytes are read and written by copying. A copy is not a
/// snapshot: a peer that writes at the same time may be seen halfway.
///
/// ```
/// use rdma_core_rs::{Access, SharedRegion};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// let region = SharedRegion::alloc(&pd, 4096, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
/// region.write_at(0, b"for the peer")?;
/// let tell_the_peer: [u8; 20] = region.descriptor().to_bytes();
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[derive(Clone)]
pub struct SharedRegion {
    region: Arc<Region>,
}

impl SharedRegion {
    /// Allocates `len` zeroed bytes on pages of their own and registers them with `access`.
    ///
    /// Remote write and remote atomic bring local write along.
    ///
    /// # Errors
    /// As for [`RegionSlice::alloc`](crate::RegionSlice::alloc).
    #[doc(alias = "ibv_reg_mr")]
    pub fn alloc(pd: &ProtectionDomain, len: usize, access: Access) -> Result<SharedRegion> {
        SharedRegion::alloc_with(pd, len, access, Pages::Normal)
    }

    /// As [`alloc`](Self::alloc), with the kind of pages chosen.
    ///
    /// # Errors
    /// As for [`RegionSlice::alloc_with`](crate::RegionSlice::alloc_with).
    pub fn alloc_with(
        pd: &ProtectionDomain,
        len: usize,
        access: Access,
        pages: Pages,
    ) -> Result<SharedRegion> {
        let memory = Memory::zeroed(len, pages)?;
        Ok(SharedRegion {
            region: Region::register(pd, memory, access)?,
        })
    }

    /// The number of bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // a region is never empty
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// What the device and the peers may do with it.
    pub fn access(&self) -> Access {
        self.region.access()
    }

    /// The protection domain it is registered in.
    pub fn pd(&self) -> &ProtectionDomain {
        self.region.pd()
    }

    /// The local key.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// The remote key.
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    /// What a peer needs to know to access all of it.
    pub fn descriptor(&self) -> RemoteRegion {
        let addr = self.region.ptr().as_ptr().addr() as u64;
        RemoteRegion::new(addr, self.len() as u64, self.rkey())
    }

    /// A part of it, for use as a local buffer of posts.
    ///
    /// # Errors
    /// [`OutOfRange`] if the range is backwards or does not lie inside.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<SharedSlice, OutOfRange> {
        let (offset, len) = checked_range(range, self.len())?;
        Ok(SharedSlice {
            region: self.clone(),
            offset,
            len,
        })
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// [`OutOfRange`] if `into` is longer than what follows `offset`; nothing is copied then.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), OutOfRange> {
        let from = self.at(offset, into.len())?;
        // SAFETY: `at` checked that the bytes lie inside the region, which `self` keeps alive.
        unsafe { copy_out(from, into) };
        Ok(())
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// [`OutOfRange`] if `from` is longer than what follows `offset`; nothing is copied then.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        let into = self.at(offset, from.len())?;
        // SAFETY: `at` checked that the bytes lie inside the region, which `self` keeps alive.
        unsafe { copy_in(from, into) };
        Ok(())
    }

    /// Reads the 8-byte word at `offset` at once, in the host's byte order, as devices do in
    /// atomics.
    ///
    /// What a peer wrote before it wrote the word is visible afterwards, on devices that place
    /// data in order (acquire).
    ///
    /// # Errors
    /// [`OutOfRange`] if the word does not lie inside or `offset` is not a multiple of 8.
    pub fn load_u64(&self, offset: usize) -> Result<u64, OutOfRange> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Writes the 8-byte word at `offset` at once (release).
    ///
    /// # Errors
    /// As for [`load_u64`](Self::load_u64).
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), OutOfRange> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Adds to the word at `offset` and returns what it was.
    ///
    /// Atomic towards the threads of this host. Towards the device only if it reports
    /// [`AtomicCap::Glob`](crate::AtomicCap::Glob); most do not.
    ///
    /// # Errors
    /// As for [`load_u64`](Self::load_u64).
    pub fn fetch_add_u64(&self, offset: usize, add: u64) -> Result<u64, OutOfRange> {
        Ok(self.word(offset)?.fetch_add(add, Ordering::AcqRel))
    }

    /// Stores `swap` in the word at `offset` if it is `compare`; returns what it was.
    ///
    /// Atomic as far as [`fetch_add_u64`](Self::fetch_add_u64) is.
    ///
    /// # Errors
    /// As for [`load_u64`](Self::load_u64).
    pub fn compare_swap_u64(
        &self,
        offset: usize,
        compare: u64,
        swap: u64,
    ) -> Result<u64, OutOfRange> {
        let word = self.word(offset)?;
        let (ok, failed) = (Ordering::AcqRel, Ordering::Acquire);
        Ok(word
            .compare_exchange(compare, swap, ok, failed)
            .unwrap_or_else(|found| found))
    }

    /// Changes what the peers may do, without moving the memory. Both keys may change.
    ///
    /// # Errors
    /// - [`InUse`](Error::InUse) if there is another handle or slice of the region. Nothing has
    ///   changed.
    /// - [`NotSupported`](Error::NotSupported) if the device cannot. Nothing has changed.
    /// - [`Call`](Error::Call) naming `ibv_rereg_mr`: unless the errno is `EINVAL`, peers and
    ///   device may have lost access; drop the region then.
    #[doc(alias = "ibv_rereg_mr")]
    pub fn set_access(&mut self, access: Access) -> Result<()> {
        let in_use = Error::InUse { what: "the region" };
        Arc::get_mut(&mut self.region)
            .ok_or(in_use)?
            .reregister(access)
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The address of `len` bytes at `offset`, if they lie inside.
    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, OutOfRange> {
        let end = offset.saturating_add(len);
        checked_range(offset..end, self.len())?;
        // SAFETY: `offset` is at most the length of the region, so the result points into it.
        Ok(unsafe { self.region.ptr().add(offset) })
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64, OutOfRange> {
        let ptr = self.at(offset, 8)?;
        if !ptr.cast::<AtomicU64>().is_aligned() {
            let (start, len) = (offset as u64, self.len() as u64);
            return Err(OutOfRange {
                start,
                end: start + 8,
                len,
            });
        }
        // SAFETY: an aligned word inside the region, which lives as long as `self`; and an atomic
        // may be changed from outside.
        Ok(unsafe { word_at(ptr.as_ptr()) })
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRegion")
            .field("addr", &self.region.ptr())
            .field("len", &self.len())
            .field("rkey", &self.rkey())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}

/// A range of a [`SharedRegion`], checked once.
///
/// ```
/// use rdma_core_rs::{Access, SharedRegion};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// let region = SharedRegion::alloc(&pd, 4096, Access::REMOTE_WRITE)?;
/// let slot = region.slice(128..256)?;
/// let (for_our_reads, for_the_peer) = (slot.sge(), slot.descriptor());
/// let mut seen = [0; 128];
/// slot.read_at(0, &mut seen)?;
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
///
/// It keeps the region alive. Unlike a [`RegionSlice`](crate::RegionSlice) it is not unique: the
/// bytes are shared with the peers anyway.
#[derive(Debug, Clone)]
pub struct SharedSlice {
    region: SharedRegion,
    offset: usize,
    len: usize,
}

impl SharedSlice {
    /// The number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it starts in its region.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The region it is a part of.
    pub fn region(&self) -> &SharedRegion {
        &self.region
    }

    /// It as a scatter/gather element; at most 2^32 - 1 bytes, as for
    /// [`RegionSlice::sge`](crate::RegionSlice::sge).
    #[inline]
    pub fn sge(&self) -> Sge {
        // SAFETY: the offset was checked against the region's length when the slice was cut.
        let ptr = unsafe { self.region.region.ptr().add(self.offset) };
        Sge::new(
            ptr,
            u32::try_from(self.len).unwrap_or(u32::MAX),
            self.region.lkey(),
        )
    }

    /// A part of it, `range` counted from its start.
    ///
    /// # Errors
    /// [`OutOfRange`] if the range is backwards or does not lie inside.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<SharedSlice, OutOfRange> {
        let (start, len) = checked_range(range, self.len)?;
        Ok(SharedSlice {
            region: self.region.clone(),
            offset: self.offset + start,
            len,
        })
    }

    /// What a peer needs to know to access this part.
    pub fn descriptor(&self) -> RemoteRegion {
        let whole = self.region.descriptor();
        let addr = whole.addr() + self.offset as u64;
        RemoteRegion::new(addr, self.len as u64, whole.rkey())
    }

    /// Copies bytes out, from `offset` (counted from the slice's start) on.
    ///
    /// # Errors
    /// [`OutOfRange`] if `into` is longer than what follows `offset`; nothing is copied then.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), OutOfRange> {
        checked_range(offset..offset.saturating_add(into.len()), self.len)?;
        self.region.read_at(self.offset + offset, into)
    }

    /// Copies bytes in, from `offset` (counted from the slice's start) on.
    ///
    /// # Errors
    /// [`OutOfRange`] if `from` is longer than what follows `offset`; nothing is copied then.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        checked_range(offset..offset.saturating_add(from.len()), self.len)?;
        self.region.write_at(self.offset + offset, from)
    }
}

/// Copies out of shared memory.
///
/// # Safety
/// `from` must be the start of `into.len()` bytes of a shared region that is alive.
unsafe fn copy_out(from: NonNull<u8>, into: &mut [u8]) {
    let (mut word, skip) = word_of(from);
    let (head, rest) = into.split_at_mut(head_len(skip, into.len()));
    if !head.is_empty() {
        // SAFETY: the word that `from` lies in.
        let bytes = unsafe { load(word) };
        head.copy_from_slice(&bytes[skip..skip + head.len()]);
        word = word.wrapping_add(WORD);
    }
    let mut chunks = rest.chunks_exact_mut(WORD);
    for chunk in &mut chunks {
        // SAFETY: the words follow each other, and those so far began below `into.len()`.
        chunk.copy_from_slice(&unsafe { load(word) });
        word = word.wrapping_add(WORD);
    }
    let tail = chunks.into_remainder();
    if !tail.is_empty() {
        // SAFETY: the word that the last of the bytes lie in.
        let bytes = unsafe { load(word) };
        tail.copy_from_slice(&bytes[..tail.len()]);
    }
}

/// Copies into shared memory, as [`copy_out`] does the other way.
///
/// # Safety
/// `into` must be the start of `from.len()` bytes of a shared region that is alive.
unsafe fn copy_in(from: &[u8], into: NonNull<u8>) {
    let (mut word, skip) = word_of(into);
    let (head, rest) = from.split_at(head_len(skip, from.len()));
    if !head.is_empty() {
        // SAFETY: the word that `into` lies in.
        unsafe { merge(word, skip, head) };
        word = word.wrapping_add(WORD);
    }
    let chunks = rest.chunks_exact(WORD);
    let tail = chunks.remainder();
    for chunk in chunks {
        let mut bytes = [0; WORD];
        bytes.copy_from_slice(chunk);
        // SAFETY: the words follow each other, and those so far began below `from.len()`.
        unsafe { word_at(word) }.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        word = word.wrapping_add(WORD);
    }
    if !tail.is_empty() {
        // SAFETY: the word that the last of the bytes lie in.
        unsafe { merge(word, 0, tail) };
    }
}

const WORD: usize = size_of::<u64>();

/// The aligned word that `ptr` points into, and how far into it.
fn word_of(ptr: NonNull<u8>) -> (*mut u8, usize) {
    let skip = ptr.as_ptr().addr() % WORD;
    (ptr.as_ptr().wrapping_sub(skip), skip)
}

/// How many of `len` bytes lie in a first word that does not begin with them.
fn head_len(skip: usize, len: usize) -> usize {
    if skip == 0 { 0 } else { len.min(WORD - skip) }
}

/// # Safety
/// As for [`word_at`].
unsafe fn load(word: *mut u8) -> [u8; WORD] {
    // SAFETY: as by contract.
    unsafe { word_at(word) }
        .load(Ordering::Relaxed)
        .to_ne_bytes()
}

/// Writes a part of a word and leaves the rest as it is, even if a peer or another thread is just
/// changing that.
///
/// # Safety
/// As for [`word_at`]; `at + from.len()` must be at most [`WORD`].
unsafe fn merge(word: *mut u8, at: usize, from: &[u8]) {
    // SAFETY: as by contract.
    let word = unsafe { word_at(word) };
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let mut bytes = old.to_ne_bytes();
        bytes[at..at + from.len()].copy_from_slice(from);
        let new = u64::from_ne_bytes(bytes);
        match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(found) => old = found,
        }
    }
}

/// # Safety
/// `ptr` must point to an aligned word that holds bytes of a shared region that outlives the
/// result.
unsafe fn word_at<'a>(ptr: *mut u8) -> &'a AtomicU64 {
    // SAFETY: the memory of a shared region is made of whole pages (`Memory::zeroed`), so a word
    // that holds bytes of it lies in it; this process touches it by such words only.
    unsafe { AtomicU64::from_ptr(ptr.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies in and out at every alignment and length around a word, with the neighbours checked.
    #[test]
    fn copies_are_exact_at_every_alignment_and_length() {
        for offset in 0..9 {
            for len in 0..26 {
                let mut memory = [0u64; 6];
                let start = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
                let data: Vec<u8> = (1..=len).collect();
                // SAFETY: 9 + 26 bytes fit into 48.
                let at = unsafe { start.add(offset) };
                // SAFETY: `at` is followed by at least `len` bytes of `memory`.
                unsafe { copy_in(&data, at) };
                let mut whole = [0; 48];
                // SAFETY: `memory` has 48 bytes.
                unsafe { copy_out(start, &mut whole) };
                let mut back = vec![0; data.len()];
                // SAFETY: `at` is followed by at least `len` bytes of `memory`.
                unsafe { copy_out(at, &mut back) };

                assert_eq!(back, data);
                assert_eq!(whole[offset..offset + data.len()], data);
                assert!(whole[..offset].iter().all(|&byte| byte == 0));
                assert!(whole[offset + data.len()..].iter().all(|&byte| byte == 0));
            }
        }
    }
    /// Nothing orders the threads, so Miri reports a race if a word is accessed in two sizes.
    #[test]
    fn threads_may_meet_in_a_word_and_lose_nothing() {
        let memory = [const { AtomicU64::new(0) }; 2];
        let start = || NonNull::new(memory.as_ptr().cast_mut().cast::<u8>()).unwrap();
        std::thread::scope(|scope| {
            for i in 0..11 {
                scope.spawn(move || {
                    // SAFETY: 11 bytes fit into two words.
                    let at = unsafe { start().add(i) };
                    for value in 1..=9 {
                        // SAFETY: `at` is one byte of `memory`.
                        unsafe { copy_in(&[value], at) };
                    }
                });
            }
            scope.spawn(|| {
                let mut whole = [0; 13];
                // SAFETY: `memory` has 16 bytes.
                unsafe { copy_out(start(), &mut whole) };
                memory[0].load(Ordering::Relaxed);
            });
        });
        let mut whole = [0; 16];
        // SAFETY: `memory` has 16 bytes.
        unsafe { copy_out(start(), &mut whole) };
        assert_eq!(whole, [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0, 0, 0, 0, 0]);
    }
}
