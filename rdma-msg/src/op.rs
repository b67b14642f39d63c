//! An operation that was accepted, and what it ends with.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::slice;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::Bytes;

use crate::error::{OpError, OpKind, WaitError};
use crate::pool::Buf;
use crate::tracker::Finished;
use crate::wait::{self, Watch};
use crate::worker::{State, WorkerInner};
use crate::wr_id::WrId;

/// The buffers of an operation, owned by its record while it is in flight (I1).
#[derive(Debug, Default)]
#[repr(u8)] // a tag of its own is cheaper to look at than one hidden in the capacity of a Vec
pub(crate) enum Payload {
    /// What is sent lies in the work request itself.
    #[default]
    None,
    One(Buf),
    /// Those of a gathered operation, at least one, in the order in which they are sent.
    Many(Vec<Buf>),
}

impl Payload {
    #[inline]
    pub(crate) fn bufs(&self) -> &[Buf] {
        match self {
            Payload::None => &[],
            Payload::One(buf) => slice::from_ref(buf),
            Payload::Many(bufs) => bufs,
        }
    }

    /// Bytes in use of all of them.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        match self {
            Payload::One(buf) => buf.len() as u64,
            _ => self.bufs().iter().map(|buf| buf.len() as u64).sum(),
        }
    }

    /// The first buffer, and the further ones.
    #[inline]
    pub(crate) fn split(self) -> (Option<Buf>, Vec<Buf>) {
        match self {
            Payload::None => (None, Vec::new()),
            Payload::One(buf) => (Some(buf), Vec::new()),
            Payload::Many(mut bufs) => (Some(bufs.remove(0)), bufs),
        }
    }

    /// The buffers become unreachable for ever: the NIC may still use them.
    pub(crate) fn leak(&mut self) -> usize {
        let count = self.bufs().len();
        mem::forget(mem::take(self));
        count
    }
}

/// The success of an operation.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// What succeeded.
    pub op: OpKind,
    /// The buffer, given back; with the received or read bytes in it. `None` for operations that have
    /// none (inline sends, atomics).
    pub buf: Option<Buf>,
    /// The further buffers of an operation with several, in the order they were given.
    pub more: Vec<Buf>,
    /// Bytes sent, written, read or received.
    pub byte_len: usize,
    /// For a receive: the immediate data of the peer.
    pub imm: Option<u32>,
    /// For an atomic: what the word was before.
    pub value: Option<u64>,
    /// For a receive: it was consumed by a write with immediate, which put `byte_len` bytes into an
    /// exposed region; nothing is in the buffer.
    pub written: bool,
}

/// A message that a managed receive got.
#[derive(Debug)]
pub struct Received {
    /// The message. Empty if `written` is set.
    pub buf: Buf,
    /// The peer's immediate data.
    pub imm: Option<u32>,
    /// The peer used a write with immediate: that many bytes were written into an exposed region.
    pub written: Option<usize>,
}

impl Received {
    /// The message as [`Bytes`], without a copy.
    pub fn freeze(self) -> Bytes {
        self.buf.freeze()
    }
}

/// Turns a record that has ended into what its owner gets.
#[inline(always)]
pub(crate) fn finish(finished: Finished<Payload>) -> Result<Completion, OpError> {
    let Finished {
        kind: op,
        buf: payload,
        result,
    } = finished;
    let (mut buf, more) = payload.split();
    let value = if op.is_atomic() {
        buf.take().as_deref().and_then(word)
    } else {
        None
    };
    match result {
        Ok(success) => {
            let byte_len = success.byte_len as usize;
            if op.is_receive()
                && let Some(buf) = &mut buf
            {
                // The device cannot have received more than the buffer holds.
                buf.set_len(if success.written {
                    0
                } else {
                    byte_len.min(buf.capacity())
                });
            }
            let (imm, written) = (success.imm, success.written);
            Ok(Completion {
                op,
                buf,
                more,
                byte_len,
                imm,
                value,
                written,
            })
        }
        Err(failed) => Err(OpError {
            op,
            outcome: failed.outcome,
            cause: failed.cause,
            buf,
            more,
        }),
    }
}

fn word(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_ne_bytes)
}

/// An accepted operation, in flight or ended.
///
/// It ends exactly once, in bounded time: with a [`Completion`] or an [`OpError`], either of which
/// holds the buffer. Wait for it with [`wait`](Operation::wait), by `.await`, or look with
/// [`try_result`](Operation::try_result); from any thread.
///
/// A result that is not fetched keeps its buffer, and some hundred bytes.
///
/// # Dropping
///
/// Dropping it gives up the result, not the operation: it takes place all the same, and its buffer
/// stays with it until the NIC is done, and returns to the pool then.
///
/// # Cancel safety
///
/// As a future it can be dropped at any point with the effect above. It can also be polled through
/// `&mut`, so that a `select!` that took another branch loses nothing: the operation can be awaited
/// again.
#[must_use = "without its Operation the outcome of an operation is not known"]
pub struct Operation {
    worker: Arc<WorkerInner>,
    ticket: Ticket,
    kind: OpKind,
}

/// What the result is had for; `None` once it was handed out.
struct Ticket(Option<WrId>);

impl Operation {
    #[inline]
    pub(crate) fn new(worker: Arc<WorkerInner>, id: WrId, kind: OpKind) -> Operation {
        Operation {
            worker,
            ticket: Ticket(Some(id)),
            kind,
        }
    }

    /// What was posted.
    pub fn kind(&self) -> OpKind {
        self.kind
    }

    /// Waits until it has ended. That is bounded by the endpoint's settings, not by this call.
    ///
    /// # Errors
    ///
    /// [`OpError`], with the buffer.
    ///
    /// # Panics
    ///
    /// If the result was handed out before.
    pub fn wait(mut self) -> Result<Completion, OpError> {
        self.assert_not_taken();
        match wait::wait(&self.worker, &mut self.ticket, None) {
            Some(result) => result,
            None => unreachable!("a wait without a deadline does not time out"),
        }
    }

    /// Waits until it has ended or `deadline` has passed.
    ///
    /// # Errors
    ///
    /// [`WaitError::TimedOut`]: nothing has changed, the operation goes on, and can be waited for
    /// again or dropped. [`WaitError::Operation`]: it has ended.
    ///
    /// # Panics
    ///
    /// If the result was handed out before.
    pub fn wait_deadline(&mut self, deadline: Instant) -> Result<Completion, WaitError> {
        self.assert_not_taken();
        match wait::wait(&self.worker, &mut self.ticket, Some(deadline)) {
            Some(result) => Ok(result?),
            None => Err(WaitError::TimedOut),
        }
    }

    /// Looks whether it has ended, without waiting. `None`: not yet, or the result was handed out.
    #[inline]
    pub fn try_result(&mut self) -> Option<Result<Completion, OpError>> {
        self.ticket.0?;
        self.worker.look(&mut self.ticket)
    }

    /// Whether the result was handed out.
    pub fn is_taken(&self) -> bool {
        self.ticket.0.is_none()
    }

    /// Here, so that nothing panics under the worker's lock.
    #[inline]
    fn assert_not_taken(&self) {
        assert!(
            !self.is_taken(),
            "the result of an operation can be had once"
        );
    }
}

impl Watch for Ticket {
    type Output = Result<Completion, OpError>;

    #[inline]
    fn is_there(&self, state: &State) -> bool {
        self.0.is_some_and(|id| state.tracker.has_ended(id))
    }

    #[inline(always)] // the result is built where it goes
    fn check(&mut self, state: &mut State) -> Option<Self::Output> {
        let finished = state.tracker.take(self.0?)?;
        self.0 = None;
        Some(finish(finished))
    }

    fn register(&mut self, state: &mut State, _key: u64, waker: Waker) -> Option<Waker> {
        match self.0 {
            Some(id) => state.tracker.wake_on_end(id, waker),
            None => Some(waker),
        }
    }

    fn unregister(&mut self, state: &mut State, _key: u64) -> Option<Waker> {
        self.0.and_then(|id| state.tracker.unwake(id))
    }
}

impl Future for Operation {
    type Output = Result<Completion, OpError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.assert_not_taken();
        let Operation { worker, ticket, .. } = &mut *self;
        wait::poll(worker, ticket, 0, cx)
    }
}

impl Operation {
    #[cold]
    fn give_up(&self, id: WrId) {
        // What comes out is dropped after the lock is released: a waker is foreign code.
        drop(self.worker.with(|state| state.tracker.forget(id)));
    }
}

impl Drop for Operation {
    #[inline]
    fn drop(&mut self) {
        if let Some(id) = self.ticket.0 {
            self.give_up(id);
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("kind", &self.kind)
            .field("id", &self.ticket.0)
            .finish()
    }
}
