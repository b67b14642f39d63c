//! What an operation can end with, and why a connection ended.
//!
//! Three questions decide what an application does after a failure, and each has a type of its own:
//! *may the peer have executed it?* ([`Outcome`]), *what broke the connection?* ([`Cause`], the same
//! for every operation of the endpoint), and *where is my buffer?* (in the error, always).

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use rdma_core_rs::WcStatus;

use crate::pool::{Buf, PoolError};

/// What kind of operation was posted.
///
/// It is remembered when the operation is posted and never read from a completion: on a failed
/// completion the opcode is not valid, and soft-RoCE says "send" for everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpKind {
    /// A message to a receive of the peer.
    Send,
    /// A message with 32 bits of immediate data.
    SendImm,
    /// A write to the peer's memory; the peer is not told.
    Write,
    /// A write to the peer's memory that consumes a receive there and so tells the peer.
    WriteImm,
    /// A read of the peer's memory.
    Read,
    /// An atomic compare-and-swap of eight bytes in the peer's memory.
    CompareSwap,
    /// An atomic fetch-and-add of eight bytes in the peer's memory.
    FetchAdd,
    /// A receive.
    Receive,
    /// A zero-length write that the endpoint posts by itself: the keepalive, or the marker that
    /// retires unsignaled operations.
    Probe,
}

impl OpKind {
    /// How many kinds there are.
    pub(crate) const COUNT: usize = 9;

    /// Every kind, in the order of the counters.
    pub const ALL: [OpKind; 9] = [
        OpKind::Send,
        OpKind::SendImm,
        OpKind::Write,
        OpKind::WriteImm,
        OpKind::Read,
        OpKind::CompareSwap,
        OpKind::FetchAdd,
        OpKind::Receive,
        OpKind::Probe,
    ];

    /// Whether it waits in the receive queue; all others wait in the send queue.
    #[inline]
    pub fn is_receive(self) -> bool {
        matches!(self, OpKind::Receive)
    }

    /// Whether its result travels back from the peer: reads and atomics.
    #[inline]
    pub fn is_fetching(self) -> bool {
        matches!(self, OpKind::Read | OpKind::CompareSwap | OpKind::FetchAdd)
    }

    /// Whether it is one of the two atomics.
    #[inline]
    pub fn is_atomic(self) -> bool {
        matches!(self, OpKind::CompareSwap | OpKind::FetchAdd)
    }

    fn name(self) -> &'static str {
        match self {
            OpKind::Send => "send",
            OpKind::SendImm => "send with immediate",
            OpKind::Write => "write",
            OpKind::WriteImm => "write with immediate",
            OpKind::Read => "read",
            OpKind::CompareSwap => "compare-and-swap",
            OpKind::FetchAdd => "fetch-and-add",
            OpKind::Receive => "receive",
            OpKind::Probe => "probe",
        }
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is known about a failed operation: may the peer have executed it?
///
/// This is what a decision to repeat the operation rests on. The rules, for a reliable connection,
/// whose responder executes requests strictly in order:
///
/// | the operation | its outcome |
/// |---|---|
/// | failed itself, and the peer or the own device refused it | [`Failed`](Outcome::Failed) |
/// | failed itself because the peer never acknowledged it (`RETRY_EXC_ERR`, a lost link) | [`Unknown`](Outcome::Unknown): the acknowledgement may be what was lost |
/// | failed itself with a status that does not tell (a bad answer, an abort, a fatal or general error; for an atomic any error on this side, which may be one of taking the answer in) | `Unknown` |
/// | stood in the send queue behind a send or write that the *peer* refused (access error, invalid request, operation error, receiver not ready) | [`NotSent`](Outcome::NotSent): the responder does not go past a refused request |
/// | stood in the send queue behind anything else that failed | `Unknown`: its packets may have gone out already; behind a failed read or atomic too, since a responder may start on later requests before it has answered a read |
/// | was in the send queue when the connection ended for another reason (disconnected, peer died, closed) | `Unknown` |
/// | a receive, when the connection ended | `NotSent`: no message arrived in it (bytes of an unfinished message may have) |
/// | a receive, when the connection was closed or dropped on this side | [`Cancelled`](Outcome::Cancelled) |
///
/// A failed write never changes memory outside the range it was given, but a `Failed` or `Unknown`
/// one may have written a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It was provably not executed at the peer, not even in part; for a receive: no message arrived.
    NotSent,
    /// It was refused, by the peer or by the own device: it did not take effect as a whole, and
    /// would be refused again.
    Failed,
    /// It was in flight when the connection ended: the peer may or may not have executed it.
    Unknown,
    /// It was withdrawn by a close on this side before anything happened.
    Cancelled,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::NotSent => "not executed",
            Outcome::Failed => "refused",
            Outcome::Unknown => "may have been executed",
            Outcome::Cancelled => "cancelled",
        })
    }
}

/// The first failed operation of an endpoint, with what is needed to find out why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The operation that failed, from the endpoint's own record.
    pub op: OpKind,
    /// Its completion status; never the flush error, which only says that something else failed.
    pub status: WcStatus,
    /// The vendor's error code, for the vendor's documentation.
    pub vendor_err: u32,
    /// Number of the local queue pair.
    pub qp_num: u32,
    /// The two ends of the connection.
    pub addrs: Addrs,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} failed: {} (vendor error {:#x}, queue pair {}, {})",
            self.op, self.status, self.vendor_err, self.qp_num, self.addrs
        )
    }
}

/// The addresses of a connection, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addrs {
    /// This end.
    pub local: Option<SocketAddr>,
    /// The other end.
    pub peer: Option<SocketAddr>,
}

impl fmt::Display for Addrs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |f: &mut fmt::Formatter<'_>, addr: Option<SocketAddr>| match addr {
            Some(addr) => write!(f, "{addr}"),
            None => f.write_str("?"),
        };
        show(f, self.local)?;
        f.write_str(" → ")?;
        show(f, self.peer)
    }
}

/// Why an endpoint ended: the first thing that went wrong, once, and the same for everyone who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// An operation failed; all others were flushed because of it.
    Operation(Failure),
    /// The peer closed the connection, or its process ended.
    Disconnected,
    /// The connection manager lost the peer; `status` is its code, a negative errno.
    Unreachable {
        /// As reported by the connection manager.
        status: i32,
    },
    /// The connection manager's events could not be fetched (out of memory: for more than a second),
    /// so that an end of the connection would not have been noticed.
    #[doc(alias = "rdma_get_cm_event")]
    ConnectionManagerError {
        /// What the call said, or 0.
        errno: i32,
    },
    /// The RDMA device went away, or failed for good.
    #[doc(alias = "IBV_EVENT_DEVICE_FATAL")]
    DeviceRemoved,
    /// [`Endpoint::close`](crate::Endpoint::close) was called, or the endpoint was dropped.
    ClosedLocally,
    /// The connection was not established by its deadline, or the listener turned it down.
    NotEstablished,
    /// The queue pair went to its error state, and no failed operation told why. The peer having
    /// broken the protocol (an access outside of what was exposed to it) looks like this. If the device
    /// said why by an asynchronous event, that is in the log.
    #[doc(alias = "IBV_EVENT_QP_FATAL")]
    #[doc(alias = "IBV_EVENT_QP_REQ_ERR")]
    #[doc(alias = "IBV_EVENT_QP_ACCESS_ERR")]
    QueuePairError,
    /// The completion queue reported an error, so completions may be lost. It takes all endpoints of
    /// the worker with it.
    #[doc(alias = "IBV_EVENT_CQ_ERR")]
    CompletionQueueError,
    /// Operations were in flight for [`stall_timeout`](crate::EndpointConfig::stall_timeout), and
    /// none completed: the peer is there, and posts no receives.
    Stalled,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Operation(failure) => failure.fmt(f),
            Cause::Disconnected => f.write_str("disconnected by the peer"),
            Cause::Unreachable { status } => write!(f, "the peer is unreachable (status {status})"),
            Cause::ConnectionManagerError { errno } => write!(
                f,
                "the connection manager's events could not be fetched (errno {errno})"
            ),
            Cause::DeviceRemoved => f.write_str("the RDMA device was removed or failed"),
            Cause::ClosedLocally => f.write_str("closed on this side"),
            Cause::NotEstablished => f.write_str("the connection was not established"),
            Cause::QueuePairError => f.write_str(
                "the queue pair went to the error state without a failed operation of ours",
            ),
            Cause::CompletionQueueError => f.write_str("the completion queue failed"),
            Cause::Stalled => f.write_str("no operation completed for too long (stall_timeout)"),
        }
    }
}

impl std::error::Error for Cause {}

/// An accepted operation failed.
///
/// The buffer is in it. `cause` is the first failure of the endpoint: of this very operation, if
/// [`outcome`](OpError::outcome) is `Failed`, or of another one that took this one with it.
#[derive(thiserror::Error)]
#[error("{op}: {outcome}: {cause}")]
#[non_exhaustive]
pub struct OpError {
    /// The operation that this is about.
    pub op: OpKind,
    /// May the peer have executed it?
    pub outcome: Outcome,
    /// What broke the connection.
    pub cause: Arc<Cause>,
    /// The buffer, given back; `None` for operations that have none (inline sends, atomics).
    pub buf: Option<Buf>,
    /// The further buffers of an operation with several, in the order they were given.
    pub more: Vec<Buf>,
}

impl fmt::Debug for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpError")
            .field("op", &self.op)
            .field("outcome", &self.outcome)
            .field("cause", &self.cause)
            .finish_non_exhaustive()
    }
}

/// Waiting for an operation ended without its success.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline passed. The operation goes on, and can be waited for again.
    #[error("the deadline passed while the operation was in flight")]
    TimedOut,
    /// The operation ended with an error.
    #[error(transparent)]
    Operation(#[from] OpError),
}

/// The endpoint has ended, so nothing more will be received, posted or waited for.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the endpoint is closed: {0}")]
pub struct Closed(
    /// Why.
    pub Arc<Cause>,
);

/// An operation was not accepted: nothing was posted, nothing changed, and what was given is back.
#[derive(thiserror::Error)]
#[error("{kind}")]
#[non_exhaustive]
pub struct PostError<B> {
    /// Which rule refused it.
    pub kind: PostErrorKind,
    /// What was given.
    pub buf: B,
}

impl<B> PostError<B> {
    pub(crate) fn new(kind: impl Into<PostErrorKind>, buf: B) -> PostError<B> {
        PostError {
            kind: kind.into(),
            buf,
        }
    }

    /// Puts something else in the place of the buffer.
    pub(crate) fn map<C>(self, change: impl FnOnce(B) -> C) -> PostError<C> {
        PostError {
            kind: self.kind,
            buf: change(self.buf),
        }
    }

    /// Whether the queue was full, so that the same post can succeed once something completed.
    pub fn is_full(&self) -> bool {
        matches!(self.kind, PostErrorKind::QueueFull { .. })
    }
}

impl<B> fmt::Debug for PostError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostError")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// Which rule refused an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostErrorKind {
    /// The queue holds as many operations as it was made for. Wait for one of them, or for
    /// [`Endpoint::wait_capacity`](crate::Endpoint::wait_capacity).
    #[error("the {queue} queue is full ({depth} operations in flight)")]
    QueueFull {
        /// Which of the two.
        queue: Queue,
        /// How many operations it holds.
        depth: u32,
    },
    /// The endpoint has ended or is being closed.
    #[error("the endpoint is closed: {cause}")]
    Closed {
        /// Why. [`Cause::ClosedLocally`] while a close waits for what is in flight, whatever that
        /// comes to.
        cause: Arc<Cause>,
    },
    /// The connection is broken, and why is not known yet: operations were flushed, and the failure
    /// behind it has not been reported. It is known within half a second, to all who wait:
    /// [`wait_capacity`](crate::Endpoint::wait_capacity) and
    /// [`closed_async`](crate::Endpoint::closed_async) among them.
    #[error("the endpoint is ending, and the cause is not known yet")]
    Ending,
    /// The connection is not established yet.
    #[error("the connection is not established yet")]
    NotOpen,
    /// The message or transfer is longer than something allows.
    #[error("{len} bytes are more than {limit}, {what}")]
    TooLong {
        /// Bytes asked for.
        len: u64,
        /// Bytes allowed.
        limit: u64,
        /// What sets the limit.
        what: &'static str,
    },
    /// The local buffer is shorter than the remote range, or the other way round.
    #[error("a range of {remote} bytes does not fit the buffer of {local} bytes")]
    OutOfBounds {
        /// Bytes of the buffer.
        local: u64,
        /// Bytes of the remote range.
        remote: u64,
    },
    /// Atomics work on eight bytes at an address that is a multiple of eight.
    #[error("an atomic needs 8 bytes at a multiple of 8, not {len} bytes at {addr:#x}")]
    Misaligned {
        /// The remote address.
        addr: u64,
        /// The length of the remote range.
        len: u64,
    },
    /// Reads and atomics need a depth that both ends granted when they connected; it is 0, and the
    /// operation would never complete.
    #[error("the connection grants no {op}: its {what} is 0")]
    DepthZero {
        /// What was asked for.
        op: OpKind,
        /// Which depth.
        what: &'static str,
    },
    /// The buffer belongs to another device or worker than the endpoint.
    #[error("the buffer is not registered with this endpoint's worker")]
    ForeignBuffer,
    /// The endpoint posts its receives itself (or leaves them to its user), and this is for the other.
    #[error("{what}")]
    WrongMode {
        /// What to do instead.
        what: &'static str,
    },
    /// More buffers than a work request of this endpoint can have.
    #[error("{count} buffers are more than the {limit} of max_sge")]
    TooManyBuffers {
        /// Buffers given.
        count: usize,
        /// Buffers allowed.
        limit: u32,
    },
    /// The operation cannot be posted without any buffer.
    #[error("no buffer was given")]
    NoBuffer,
    /// The pool has no free buffer, or none could be registered.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// This is a child of the process that made the worker. Posted here, a request could reach the parent's
    /// device, which would use the parent's memory.
    #[error("the worker was made before a fork and cannot be used in the child")]
    Forked,
    /// The device refused the request although the rules above allowed it.
    #[error("the device refused the request: {0}")]
    Verbs(#[source] rdma_core_rs::PostError),
}

/// One of the two queues of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Sends, writes, reads and atomics.
    Send,
    /// Receives.
    Receive,
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Queue::Send => "send",
            Queue::Receive => "receive",
        })
    }
}

/// An endpoint, a listener or a worker could not be made. Nothing is left of the attempt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Connecting, listening or accepting failed: refused, rejected, unreachable, timed out...
    #[error(transparent)]
    Cm(#[from] rdma_cm::CmError),
    /// The device refused an object or a size.
    #[error(transparent)]
    Verbs(#[from] rdma_core_rs::Error),
    /// The system has no descriptor left.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A setting is outside what is possible.
    #[error("{field} = {value} is not possible: {min} to {max} is allowed")]
    Config {
        /// The field of the configuration.
        field: &'static str,
        /// What it was set to.
        value: u64,
        /// The least that is possible.
        min: u64,
        /// The most that is possible.
        max: u64,
    },
    /// The worker's completion queue has no room for another endpoint of this size.
    #[error(
        "the worker has room for {free} more operations in flight, the endpoint asks for {asked}: \
         raise WorkerConfig::max_in_flight"
    )]
    WorkerFull {
        /// What the endpoint needs: both depths and one.
        asked: u32,
        /// What is left.
        free: u32,
    },
    /// The pool of the worker could not provide the receives.
    #[error("no buffers for the receives: {0}")]
    Pool(#[from] PoolError),
    /// The receives could not be posted.
    #[error("the receives could not be posted: {0}")]
    Post(#[source] PostErrorKind),
    /// The peer is reached by another device than the worker's.
    #[error("the connection runs over {wanted}, the worker is on {worker}")]
    OtherDevice {
        /// The device the address leads to.
        wanted: String,
        /// The device of the worker.
        worker: String,
    },
    /// The connection ended before it was established.
    #[error("the connection ended before it was established: {0}")]
    Ended(Arc<Cause>),
}

/// A close that did not go as it should. The endpoint is closed all the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// The time was up while sends were in flight; they ended with an error.
    #[error("{unfinished} operations were still in flight when the time to close was up")]
    TimedOut {
        /// How many.
        unfinished: u32,
    },
    /// The connection had ended, or ended meanwhile, for another reason.
    #[error("the connection ended before it was closed: {0}")]
    Broken(Arc<Cause>),
}

/// Nothing can be received.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// The endpoint has ended, and all that had arrived was handed out.
    #[error("the endpoint is closed: {0}")]
    Closed(Arc<Cause>),
    /// The endpoint has [`Receive::Manual`](crate::Receive::Manual): its messages come with the
    /// operations of [`post_recv`](crate::Endpoint::post_recv).
    #[error("this endpoint's receives are posted by the program (Receive::Manual)")]
    Manual,
}
