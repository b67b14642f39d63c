//! Registered buffers, and the pool they come from and return to.
//!
//! Registering memory pins pages and costs microseconds to milliseconds, so it is done once: the pool
//! is one region, cut into slots. A [`Buf`] is the right to one slot. It moves into an operation,
//! comes back with its result, and its slot returns to the pool on drop, from whatever thread.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rdma_core_rs::{ProtectionDomain, RegionSlice};

/// An owned, registered buffer.
///
/// It derefs to its first [`len`](Buf::len) bytes, has room for [`capacity`](Buf::capacity), and can
/// be sent to other threads. While it belongs to an operation nobody can touch it; so there is never
/// a Rust reference to memory that the NIC is writing.
///
/// What lies behind the length is what the slot's former user left there.
pub struct Buf {
    /// `None` only while it is being dropped. A pointer, so that moving a buffer moves eight bytes.
    slot: Option<Box<Slot>>,
}

/// What a buffer is the right to. Allocated once, with the pool.
struct Slot {
    slice: RegionSlice,
    len: usize,
    /// Where it returns to. None while it is there, and for memory that was registered on its own.
    home: Option<Arc<Shared>>,
}

impl Buf {
    /// Wraps memory that was registered on its own; all of it is in use.
    pub(crate) fn from_slice(slice: RegionSlice) -> Buf {
        let len = slice.len();
        let home = None;
        Buf {
            slot: Some(Box::new(Slot { slice, len, home })),
        }
    }

    /// The right to a slot of the pool `home`.
    #[inline]
    fn of_pool(mut slot: Box<Slot>, len: usize, home: Arc<Shared>) -> Buf {
        slot.len = len;
        slot.home = Some(home);
        Buf { slot: Some(slot) }
    }

    /// The number of bytes in use: what is sent, or what was received.
    #[inline]
    pub fn len(&self) -> usize {
        self.slot().len
    }

    /// Whether no byte is in use.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of bytes there is room for.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.slice().len()
    }

    /// Sets how many bytes are in use.
    ///
    /// # Panics
    /// If that is more than the capacity.
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity(),
            "{len} bytes in a buffer of {}",
            self.capacity()
        );
        self.slot_mut().len = len;
    }

    /// Copies `bytes` to the start and makes them the content.
    ///
    /// # Panics
    /// If they are more than the capacity.
    #[inline]
    pub fn fill_from(&mut self, bytes: &[u8]) {
        self.set_len(bytes.len());
        self.copy_from_slice(bytes);
    }

    /// Turns it into [`Bytes`], without a copy. The slot returns to the pool when the last clone and
    /// slice of it is dropped.
    ///
    /// A receive buffer that is kept for long is one that cannot receive: copy small messages.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// The registered memory, for its whole capacity.
    #[inline]
    pub(crate) fn slice(&self) -> &RegionSlice {
        &self.slot().slice
    }

    /// Whether it is registered in that domain.
    #[inline]
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.slice().pd().is_same(pd)
    }

    #[inline]
    fn slot(&self) -> &Slot {
        match &self.slot {
            Some(slot) => slot,
            None => unreachable!("only drop takes the slot"),
        }
    }

    #[inline]
    fn slot_mut(&mut self) -> &mut Slot {
        match &mut self.slot {
            Some(slot) => slot,
            None => unreachable!("only drop takes the slot"),
        }
    }
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let slot = self.slot();
        &slot.slice[..slot.len]
    }
}

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let slot = self.slot_mut();
        &mut slot.slice[..slot.len]
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Buf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for Buf {
    /// Shows the sizes, never the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buf")
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .finish()
    }
}

impl Drop for Buf {
    #[inline]
    fn drop(&mut self) {
        if let Some(mut slot) = self.slot.take()
            && let Some(home) = slot.home.take()
        {
            home.put_back(slot);
        }
    }
}

/// No buffer could be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// All buffers of the pool are in use: by operations in flight, by results that were not fetched,
    /// or by the program.
    #[error("all {count} buffers of the pool are in use")]
    Empty {
        /// How many the pool has.
        count: usize,
    },
    /// Memory could not be registered on its own.
    #[error(transparent)]
    Register(#[from] rdma_core_rs::Error),
}

/// A fixed number of slots of one size.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    free: Mutex<Free>,
    slot_size: usize,
    count: usize,
    /// Called, with no lock held, when a slot comes back that somebody waits for.
    refilled: Box<dyn Fn() + Send + Sync>,
}

struct Free {
    #[allow(clippy::vec_box)] // they leave as they are, without an allocation
    slots: Vec<Box<Slot>>,
    /// Somebody waits for a slot to come back.
    wanted: bool,
}

impl Pool {
    /// Registers `count` slots of `slot_size` bytes, each on a multiple of 64.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        slot_size: usize,
        count: usize,
        refilled: impl Fn() + Send + Sync + 'static,
    ) -> rdma_core_rs::Result<Pool> {
        // Sizes beyond the address space are what no region can have, and are refused as such.
        let stride = slot_size.max(1).checked_next_multiple_of(SLOT_ALIGN);
        let stride = stride.unwrap_or(usize::MAX);
        let mut slots = Vec::new();
        if count > 0 {
            let mut rest = RegionSlice::alloc(pd, stride.saturating_mul(count))?;
            slots.reserve_exact(count);
            for _ in 0..count {
                let mut slice = rest;
                rest = slice.split_off(stride);
                drop(slice.split_off(slot_size));
                let (len, home) = (0, None);
                slots.push(Box::new(Slot { slice, len, home }));
            }
        }
        let shared = Arc::new(Shared {
            free: Mutex::new(Free {
                slots,
                wanted: false,
            }),
            slot_size,
            count,
            refilled: Box::new(refilled),
        });
        Ok(Pool { shared })
    }

    /// Takes a slot, with `len` bytes in use.
    #[inline]
    pub(crate) fn take(&self, len: usize) -> Result<Buf, PoolError> {
        debug_assert!(len <= self.shared.slot_size);
        match self.shared.lock().slots.pop() {
            Some(slot) => Ok(Buf::of_pool(slot, len, Arc::clone(&self.shared))),
            None => Err(PoolError::Empty {
                count: self.shared.count,
            }),
        }
    }

    /// The pool itself, for those who take from it while they hold nothing else of the worker.
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    pub(crate) fn slot_size(&self) -> usize {
        self.shared.slot_size
    }

    pub(crate) fn count(&self) -> usize {
        self.shared.count
    }

    /// How many slots are in the pool now.
    pub(crate) fn available(&self) -> usize {
        self.shared.lock().slots.len()
    }
}

impl Shared {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Free> {
        // Nothing that is done under this lock can panic half-way.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// As [`Pool::take`]; if there is none, the pool calls `refilled` once one comes back.
    #[inline]
    pub(crate) fn take_or_call_back(self: &Arc<Shared>, len: usize) -> Option<Buf> {
        let mut free = self.lock();
        let slot = free.slots.pop();
        free.wanted |= slot.is_none();
        drop(free);
        slot.map(|slot| Buf::of_pool(slot, len, Arc::clone(self)))
    }

    #[inline]
    fn put_back(&self, slot: Box<Slot>) {
        let mut free = self.lock();
        free.slots.push(slot);
        if std::mem::take(&mut free.wanted) {
            drop(free);
            (self.refilled)();
        }
    }
}

/// Slots start on cache lines of their own.
const SLOT_ALIGN: usize = 64;
