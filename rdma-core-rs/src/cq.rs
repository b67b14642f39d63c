//! Completion queues.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::comp_channel::{CompletionChannel, CqEvents};
use crate::context::Context;
use crate::error::{self, Error, Result};
use crate::sys;
use crate::wc::WorkCompletion;

/// A completion queue: where the ends of posted requests show up.
///
/// A handle; clones mean the same queue, which is destroyed with its last user. It can be used
/// from any thread, and each completion goes to one poll; have one thread poll it, or the
/// completions of one request and the next may be seen out of order.
///
/// Make it at least as deep as the queues that feed it together: when it overflows, completions
/// are lost, some devices tell it only by an asynchronous event, and the queue pairs go on (I7).
///
/// ```
/// use rdma_core_rs::{CompletionQueue, WorkCompletion};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// let cq = CompletionQueue::new(&context, 128, None)?;
/// let mut room = [WorkCompletion::default(); 16]; // made once, used for every poll
/// for wc in cq.poll(&mut room)? {
///     println!("{} ended: {}", wc.wr_id(), wc.status());
/// }
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
///
/// What a poll returns lies in the room it was given, which cannot be used again before:
///
/// ```compile_fail,E0499
/// # fn example(cq: rdma_core_rs::CompletionQueue) -> rdma_core_rs::Result<()> {
/// let mut room = [rdma_core_rs::WorkCompletion::default(); 16];
/// let first = cq.poll(&mut room)?;
/// let second = cq.poll(&mut room[..])?;
/// println!("{first:?}");
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_cq")]
#[derive(Clone)]
pub struct CompletionQueue {
    inner: Arc<Inner>,
}

struct Inner {
    cq: NonNull<sys::ibv_cq>,
    /// The context of `cq` in C, which points here.
    events: Arc<CqEvents>,
    /// 0 when a resize has lost the queue.
    capacity: AtomicU32,
    /// Held while the queue is resized, which changes its capacity in C.
    resizing: Mutex<()>,
    channel: Option<CompletionChannel>,
    context: Context,
}

// SAFETY: libibverbs allows its objects to be used from any thread (providers lock their queues);
// `cq` is only given to it, or read in `cqe`, and destroyed once, by the last owner.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

impl CompletionQueue {
    /// Creates a queue for at least `cqe` completions on the device's first completion vector.
    ///
    /// With a channel, the queue can be [armed](Self::req_notify) to tell of completions there.
    ///
    /// # Errors
    /// - [`Config`](Error::Config) naming `cqe`, if it is 0 or above the device's `max_cqe`.
    /// - [`Foreign`](Error::Foreign), if the channel was made on another context.
    /// - [`Call`](Error::Call) naming `ibv_create_cq` for anything else.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(
        context: &Context,
        cqe: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue> {
        CompletionQueue::on_vector(context, cqe, channel, 0)
    }

    /// As [`new`](Self::new), on a completion vector of choice: its interrupts go to the CPU to
    /// which the system has assigned that vector.
    ///
    /// # Errors
    /// As for `new`; [`Config`](Error::Config) naming `comp_vector`, if the device has fewer.
    pub fn on_vector(
        context: &Context,
        cqe: u32,
        channel: Option<&CompletionChannel>,
        comp_vector: u32,
    ) -> Result<CompletionQueue> {
        context.check_process()?;
        check_cqe(context, cqe)?;
        let last_vector = context.num_comp_vectors().saturating_sub(1);
        error::at_most("comp_vector", comp_vector.into(), last_vector.into())?;
        if channel.is_some_and(|channel| !channel.context().is_same_device(context)) {
            return Err(Error::Foreign {
                what: "the completion channel",
                of: "context",
            });
        }
        let events = Arc::new(CqEvents::new());
        // SAFETY: `context` and `channel` live during the call; the queue's context pointer stays
        // valid until the queue is destroyed, since `Inner` owns what it points to.
        let cq = unsafe {
            sys::ibv_create_cq(
                context.as_raw().as_ptr(),
                cqe as i32, // at most max_cqe, which came from an i32
                Arc::as_ptr(&events).cast_mut().cast(),
                channel.map_or(ptr::null_mut(), |channel| channel.as_raw().as_ptr()),
                comp_vector as i32, // below num_comp_vectors, which came from an i32
            )
        };
        let cq = sys::check_null("ibv_create_cq", cq)?;
        let inner = Inner {
            cq,
            events,
            // SAFETY: the queue was just made and is ours.
            capacity: AtomicU32::new(unsafe { capacity(cq) }),
            resizing: Mutex::new(()),
            channel: channel.cloned(),
            context: context.clone(),
        };
        Ok(CompletionQueue {
            inner: Arc::new(inner),
        })
    }

    /// Takes as many completions as there are and fit into `room`, oldest first, and returns them: the
    /// beginning of `room`. Never sleeps.
    ///
    /// Providers write only what is valid of a completion, so what lay in `room` shows through in the
    /// rest: the methods of [`Success`](crate::Success) say for which requests they mean something. Keep
    /// one array and use it again and again.
    ///
    /// # Errors
    /// - [`Call`](Error::Call) naming `ibv_poll_cq`: the queue is broken, and what it held is lost; `EIO`
    ///   after [`resize`](Self::resize) has lost it.
    /// - [`Forked`](Error::Forked) in a child, where it would take the parent's completions.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn poll<'a>(&self, room: &'a mut [WorkCompletion]) -> Result<&'a [WorkCompletion]> {
        self.inner.context.check_process()?;
        if self.capacity() == 0 {
            return Err(lost("ibv_poll_cq"));
        }
        let entries = i32::try_from(room.len()).unwrap_or(i32::MAX);
        let first = room.as_mut_ptr().cast();
        // SAFETY: `self` keeps the queue alive, no resize has lost it, and none is under way (contract of
        // `resize`); there is room for `entries` completions, which are laid out as C's and for which any
        // bytes will do.
        let count = unsafe { sys::ibv_poll_cq(self.inner.cq.as_ptr(), entries, first) };
        let Ok(count) = usize::try_from(count) else {
            return Err(poll_error(count));
        };
        Ok(&room[..count.min(room.len())])
    }

    /// Arms the queue: the next completion puts an event on the channel. One event for one arming.
    ///
    /// With `solicited_only`, only receives that the peer marked as solicited, and failures,
    /// count. Completions that are already there cause no event: poll **after** arming.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_req_notify_cq`; [`Forked`](Error::Forked) in a child.
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn req_notify(&self, solicited_only: bool) -> Result<()> {
        self.inner.context.check_process()?;
        // SAFETY: `self` keeps the queue alive.
        let ret = unsafe { sys::ibv_req_notify_cq(self.inner.cq.as_ptr(), solicited_only.into()) };
        sys::check("ibv_req_notify_cq", ret)
    }

    /// How many completions it holds: at least what was asked for; 0 if [`resize`](Self::resize) has lost it.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.inner.capacity.load(Ordering::Relaxed)
    }

    /// Makes it hold at least `cqe` completions; those in it stay.
    ///
    /// # Errors
    /// - [`Config`](Error::Config) naming `cqe`, if it is 0 or above the device's `max_cqe`.
    /// - [`NotSupported`](Error::NotSupported) if the device cannot.
    /// - [`Call`](Error::Call) naming `ibv_resize_cq`: `EINVAL` if more completions are in it, and nothing
    ///   has changed. After any other errno the queue counts as lost, and can only be dropped: soft-RoCE's
    ///   provider has given the old ring back before it finds that it cannot map the new one.
    ///
    /// # Safety
    /// Nobody polls the queue meanwhile, on any thread: soft-RoCE's provider does not keep a poll away from
    /// a ring that it has lost. (Afterwards `poll` refuses.)
    #[doc(alias = "ibv_resize_cq")]
    pub unsafe fn resize(&self, cqe: u32) -> Result<()> {
        self.inner.context.check_process()?;
        check_cqe(&self.inner.context, cqe)?;
        let gate = self
            .inner
            .resizing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // With the lock held, for another resize may just have lost it.
        if self.capacity() == 0 {
            return Err(lost("ibv_resize_cq"));
        }
        let cq = self.inner.cq.as_ptr();
        // SAFETY: `self` keeps the queue alive, no resize has lost it, and nobody polls it meanwhile, by
        // contract.
        let ret = unsafe { sys::ibv_resize_cq(cq, cqe as i32) };
        let resized = sys::check("ibv_resize_cq", ret);
        // SAFETY: `self` keeps the queue alive, and with the lock held nobody resizes it.
        let mut capacity = unsafe { capacity(self.inner.cq) };
        if let Err(error) = &resized {
            // The kernel refused; it says how many it holds once it has agreed.
            let refused = matches!(
                error.errno(),
                Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS)
            );
            if !refused || capacity != self.capacity() {
                capacity = 0;
            }
        }
        self.inner.capacity.store(capacity, Ordering::Relaxed);
        drop(gate);
        resized.map_err(|error| error.or_not_supported("resizing a completion queue"))
    }

    /// Makes the device hold events back until `count` completions have come, or `period_us` have
    /// passed since the first of them.
    ///
    /// # Errors
    /// [`NotSupported`](Error::NotSupported) if the device cannot; [`Call`](Error::Call) naming
    /// `ibv_modify_cq` for anything else.
    #[doc(alias = "ibv_modify_cq")]
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<()> {
        self.inner.context.check_process()?;
        let mut attr = sys::ibv_modify_cq_attr {
            attr_mask: sys::ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0,
            moderate: sys::ibv_moderate_cq {
                cq_count: count,
                cq_period: period_us,
            },
        };
        // SAFETY: `self` keeps the queue alive; `attr` is a local.
        let ret = unsafe { sys::modify_cq(self.inner.cq.as_ptr(), &raw mut attr) };
        sys::check("ibv_modify_cq", ret.unwrap_or(libc::EOPNOTSUPP))
            .map_err(|error| error.or_not_supported("moderating a completion queue"))
    }

    /// The device context it was created on.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The channel it was created with.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.inner.channel.as_ref()
    }

    /// Whether both handles mean the same queue.
    #[inline]
    pub fn is_same(&self, other: &CompletionQueue) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The C object. It lives as long as this handle or a clone of it.
    #[inline]
    pub fn as_raw(&self) -> NonNull<sys::ibv_cq> {
        self.inner.cq
    }

    pub(crate) fn id(&self) -> u64 {
        self.inner.events.cq_id
    }
}

fn check_cqe(context: &Context, cqe: u32) -> Result<()> {
    error::at_least("cqe", cqe.into(), 1)?;
    error::at_most("cqe", cqe.into(), context.device_attr()?.max_cqe.into())
}

/// # Safety
/// `cq` must be alive, and nobody may resize it meanwhile.
unsafe fn capacity(cq: NonNull<sys::ibv_cq>) -> u32 {
    // SAFETY: alive by contract; the field only changes when the queue is resized.
    let cqe = unsafe { (*cq.as_ptr()).cqe };
    u32::try_from(cqe).unwrap_or(0)
}

#[cold]
fn lost(call: &'static str) -> Error {
    let source = io::Error::from_raw_os_error(libc::EIO);
    Error::Call { call, source }
}

#[cold]
fn poll_error(ret: i32) -> Error {
    // The man page promises only "negative"; providers return -1, -2 (CQ_POLL_ERR of mlx4 and mlx5) or
    // -errno, few set errno.
    match ret {
        -1 | -2 => lost("ibv_poll_cq"),
        _ => Error::Call {
            call: "ibv_poll_cq",
            source: io::Error::from_raw_os_error(-ret),
        },
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.is_foreign_process() {
            return;
        }
        // With the gate held no event is read, so all that were are counted, and are settled now:
        // the destroy does not wait.
        let gate = self.channel.as_ref().map(CompletionChannel::gate);
        self.events.settle(self.cq.as_ptr());
        // SAFETY: we are the last owner, and every queue pair that feeds it holds an owner.
        let ret = unsafe { sys::ibv_destroy_cq(self.cq.as_ptr()) };
        drop(gate);
        if let Err(error) = sys::check("ibv_destroy_cq", ret) {
            // Its events may still come: keep what they point to, and what they come from.
            mem::forget(self.events.clone());
            mem::forget(self.channel.clone());
            mem::forget(self.context.clone());
            log::error!("{error}; the completion queue is leaked"); // last: a logger may panic
        }
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("id", &self.id())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_error_has_an_errno_whatever_the_provider_returns() {
        assert_eq!(poll_error(-1).errno(), Some(libc::EIO));
        assert_eq!(poll_error(-2).errno(), Some(libc::EIO));
        assert_eq!(poll_error(-libc::EINVAL).errno(), Some(libc::EINVAL));
    }
}
