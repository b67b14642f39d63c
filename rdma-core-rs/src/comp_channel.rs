//! Completion channels: sleeping until a completion queue has something.
//!
//! libibverbs demands that every event that was read is acknowledged before its queue can be
//! destroyed: `ibv_destroy_cq` waits for it, for ever. So each event is counted for its queue the
//! moment it is read, acknowledgements are made in batches (each takes a mutex), and what is left
//! is settled when the queue is destroyed (I5). Reading-and-counting and settling-and-destroying
//! exclude each other by the channel's gate: an event that one thread has read is always counted
//! before another thread destroys the queue, and its queue is alive while it is counted.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::context::Context;
use crate::cq::CompletionQueue;
use crate::error::Result;
use crate::fd;
use crate::sys;

/// A descriptor that becomes readable when an armed completion queue gets a completion.
///
/// A handle; clones mean the same channel. Several queues can share it. It can be used from any
/// thread; each event goes to one of them.
///
/// The order that misses nothing: [arm](CompletionQueue::req_notify) the queue, poll it **again**
/// until it is empty, and only then wait. An event without a completion is normal.
///
/// ```
/// use rdma_core_rs::{CompletionChannel, CompletionQueue};
///
/// # let fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// let channel = CompletionChannel::new(&context)?;
/// let cq = CompletionQueue::new(&context, 16, Some(&channel))?;
/// cq.req_notify(false)?;
/// // ... poll until empty ...
/// # fabric.spurious_cq_event(fabric.cqs()[0].id);
/// let event = channel.wait(None)?.expect("no deadline");
/// assert!(event.is_for(&cq));
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[doc(alias = "ibv_comp_channel")]
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<Inner>,
}

struct Inner {
    channel: NonNull<sys::ibv_comp_channel>,
    gate: Mutex<()>,
    context: Context,
}

// SAFETY: libibverbs allows its objects to be used from any thread; `channel` is only given to it
// and freed once, by the last owner.
unsafe impl Send for Inner {}
// SAFETY: as for Send; reading events and destroying queues are serialized by `gate`.
unsafe impl Sync for Inner {}

impl CompletionChannel {
    /// Creates a channel. Its descriptor is non-blocking.
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_create_comp_channel`, such as `EMFILE`, or `fcntl`.
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn new(context: &Context) -> Result<CompletionChannel> {
        context.check_process()?;
        // SAFETY: `context` keeps the ibv_context open during the call.
        let channel = unsafe { sys::ibv_create_comp_channel(context.as_raw().as_ptr()) };
        let channel = sys::check_null("ibv_create_comp_channel", channel)?;
        let inner = Inner {
            channel,
            gate: Mutex::new(()),
            context: context.clone(),
        };
        let channel = CompletionChannel {
            inner: Arc::new(inner),
        };
        fd::set_nonblocking(channel.as_fd())?;
        Ok(channel)
    }

    /// The next event, if there is one. Never sleeps.
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_get_cq_event`, if the channel is broken;
    /// [`Forked`](crate::Error::Forked) in a child, where it would take the parent's event.
    #[doc(alias = "ibv_get_cq_event")]
    pub fn try_event(&self) -> Result<Option<CqEvent>> {
        self.inner.context.check_process()?;
        let _gate = self.gate();
        loop {
            let mut cq = ptr::null_mut();
            let mut cq_context = ptr::null_mut();
            let channel = self.inner.channel.as_ptr();
            // SAFETY: `self` keeps the channel alive; the two pointers are locals to fill in.
            let ret = unsafe { sys::ibv_get_cq_event(channel, &raw mut cq, &raw mut cq_context) };
            match sys::check_minus_one("ibv_get_cq_event", ret) {
                Ok(()) => {
                    let events: *const CqEvents = cq_context.cast();
                    // SAFETY: every queue on this channel was made by `CompletionQueue` with its
                    // `CqEvents` as context, and the gate is held: the queue is not destroyed.
                    let events = unsafe { &*events };
                    events.count(cq);
                    return Ok(Some(CqEvent {
                        cq_id: events.cq_id,
                    }));
                }
                Err(error) if fd::would_block(&error) => return Ok(None),
                Err(error) if fd::interrupted(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next event; sleeps until there is one or the deadline has come. `None` for the latter.
    ///
    /// # Errors
    /// As for [`try_event`](Self::try_event); [`Call`](crate::Error::Call) naming `poll`.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Option<CqEvent>> {
        self.inner.context.check_process()?;
        while fd::wait_readable(self.as_fd(), deadline)? {
            if let Some(event) = self.try_event()? {
                return Ok(Some(event)); // else another reader was faster
            }
        }
        Ok(None)
    }

    /// The device context it was created on.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object. It lives as long as this handle or a clone of it.
    ///
    /// Do not read events from it: they would not be counted.
    pub fn as_raw(&self) -> NonNull<sys::ibv_comp_channel> {
        self.inner.channel
    }

    /// While the guard lives, no event is read and no other queue of this channel is destroyed.
    pub(crate) fn gate(&self) -> MutexGuard<'_, ()> {
        self.inner
            .gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `self` keeps the channel alive; the field does not change.
        let fd = unsafe { (*self.inner.channel.as_ptr()).fd };
        // SAFETY: the descriptor belongs to the channel, which `self` keeps alive.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.is_foreign_process() {
            return;
        }
        // SAFETY: we are the last owner, and every queue on the channel holds an owner.
        let ret = unsafe { sys::ibv_destroy_comp_channel(self.channel.as_ptr()) };
        if let Err(error) = sys::check("ibv_destroy_comp_channel", ret) {
            log::error!("{error}; the completion channel is leaked");
        }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel")
            .field("fd", &self.as_fd())
            .finish_non_exhaustive()
    }
}

/// An armed completion queue got a completion (or had one and lost it to a poll meanwhile).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqEvent {
    cq_id: u64,
}

impl CqEvent {
    /// Whether it is about this queue.
    pub fn is_for(&self, cq: &CompletionQueue) -> bool {
        self.cq_id == cq.id()
    }
}

/// The events of one queue that were read: the queue's context in C.
///
/// Touched only with the channel's gate held.
pub(crate) struct CqEvents {
    pub(crate) cq_id: u64,
    unacked: AtomicU32,
}

/// How many events are acknowledged together.
const ACK_BATCH: u32 = 64;

impl CqEvents {
    pub(crate) fn new() -> CqEvents {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        CqEvents {
            cq_id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            unacked: AtomicU32::new(0),
        }
    }

    /// Counts one event of `cq` and acknowledges when enough have come together.
    fn count(&self, cq: *mut sys::ibv_cq) {
        let unacked = self.unacked.load(Ordering::Relaxed) + 1;
        self.unacked.store(unacked, Ordering::Relaxed);
        if unacked >= ACK_BATCH {
            self.settle(cq);
        }
    }

    /// Acknowledges all events that were counted. `cq` must be the queue they are counted for.
    pub(crate) fn settle(&self, cq: *mut sys::ibv_cq) {
        let unacked = self.unacked.swap(0, Ordering::Relaxed);
        if unacked > 0 {
            // SAFETY: the gate is held, so the queue is not destroyed yet, and exactly `unacked`
            // of its events were read and not acknowledged.
            unsafe { sys::ibv_ack_cq_events(cq, unacked) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use fake_verbs::Fabric;

    use super::*;
    use crate::devices;

    #[test]
    fn each_queue_has_its_own_id() {
        assert_ne!(CqEvents::new().cq_id, CqEvents::new().cq_id);
    }

    /// One thread has read an event and not counted it yet; another drops the queue. The destroy
    /// must come after the count: else the real library waits for ever, and the fake reports it.
    #[test]
    fn event_being_read_is_counted_before_its_queue_is_destroyed() {
        let fabric = Fabric::new();
        let context = devices().unwrap()[0].open().unwrap();
        let channel = CompletionChannel::new(&context).unwrap();
        let cq = CompletionQueue::new(&context, 8, Some(&channel)).unwrap();
        fabric.spurious_cq_event(fabric.cqs()[0].id);

        let gate = channel.gate();
        let (mut raw, mut events) = (ptr::null_mut(), ptr::null_mut());
        let from = channel.inner.channel.as_ptr();
        // SAFETY: the channel lives; the two pointers are locals to fill in.
        let ret = unsafe { sys::ibv_get_cq_event(from, &raw mut raw, &raw mut events) };
        assert_eq!(ret, 0);
        let dropping = thread::spawn(move || drop(cq));
        thread::sleep(Duration::from_millis(50)); // time to go wrong, not needed to go right
        assert_eq!(fabric.count_of("ibv_destroy_cq"), 0);
        // SAFETY: the queue's context, and the queue waits for the gate.
        unsafe { &*events.cast::<CqEvents>() }.count(raw);
        drop(gate);
        dropping.join().unwrap();
        assert_eq!(fabric.count_of("ibv_destroy_cq"), 1);
    }
}
