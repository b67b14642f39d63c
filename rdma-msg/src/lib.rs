//! Endpoints whose operations always end, with the right buffer and the true cause.
//!
//! An [`Endpoint`] is a reliable RDMA connection to one peer. What is posted to it is an
//! [`Operation`], and the promise of this crate is about those: each ends **exactly once**, in
//! **bounded time**, with its **buffer**, and on failure with the **cause** and with what is known
//! about the peer ([`Outcome`]) - whether the peer is killed, the wire is cut, the endpoint is closed by
//! another thread, a future is dropped or a queue is full.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! # let _fabric = fake_verbs::Fabric::new(); // without RDMA hardware
//! use rdma_msg::{Access, Endpoint, EndpointConfig, Listener, RemoteRegion};
//!
//! let listener = Listener::bind("10.9.0.2:0".parse()?, &EndpointConfig::default())?;
//! let addr = listener.local_addr();
//!
//! let server = std::thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let endpoint = listener.accept()?.accept()?;
//!     // Memory that the peer may write; what it has to know goes to it in a message.
//!     let region = endpoint.expose(4096, Access::REMOTE_WRITE)?;
//!     endpoint.send_slice(&region.descriptor().to_bytes())?.wait()?;
//!     // The write is before this message in the same connection, so its bytes are there.
//!     let message = endpoint.recv()?;
//!     let mut bytes = [0; 7];
//!     region.read_at(0, &mut bytes)?;
//!     assert_eq!((&message.buf[..], &bytes), (&b"look"[..], b"written"));
//!     Ok(())
//! });
//!
//! let endpoint = Endpoint::connect(addr, &EndpointConfig::default())?;
//! let remote = RemoteRegion::from_bytes(endpoint.recv()?.buf[..].try_into()?);
//! let mut buf = endpoint.alloc(7)?;
//! buf.copy_from_slice(b"written");
//! let completion = endpoint.write(buf, remote)?.wait()?; // the buffer is in the completion
//! assert_eq!(completion.byte_len, 7);
//! endpoint.send_slice(b"look")?.wait()?;
//! endpoint.close(EndpointConfig::default().close_deadline)?;
//! server.join().expect("the server does not panic")?;
//! # Ok(()) }
//! ```
//!
//! # The parts
//!
//! - [`Worker`]: the unit of progress. One completion queue, one pool of registered buffers, any
//!   number of endpoints. [`Endpoint::connect`] and [`Incoming::accept`] make a private one.
//! - [`Buf`]: an owned, registered buffer. It moves into an operation and comes back with the result;
//!   [`Buf::freeze`] makes [`Bytes`] of it without a copy.
//! - [`SharedRegion`]: memory that the peer may access, as [`RemoteRegion`] on its side. There is never
//!   a Rust reference to it.
//! - [`Operation`]: wait for it, await it, look at it, or drop it.
//! - [`Received`]: a message. An endpoint keeps its receives posted by itself ([`Receive::Managed`]),
//!   or leaves them to the program ([`Receive::Manual`]).
//!
//! # What happens when...
//!
//! | ... | operations in flight | the endpoint | bound |
//! |---|---|---|---|
//! | the peer closes, or its process is killed | end; sends `Unknown`, receives `NotSent` | [`Cause::Disconnected`], after what has arrived was delivered | the kernel tells within tens of milliseconds; the rest is immediate |
//! | the peer's process is stopped, its machine hangs | sends it need not answer itself go on; those it has no receive for wait | lives, up to [`stall_timeout`](EndpointConfig::stall_timeout); [`close`](Endpoint::close) does not wait for the peer | the limit given to `close` |
//! | the wire is cut, the machine loses power | the first ends by itself (`RETRY_EXC_ERR`, `Unknown`), the others with it | [`Cause::Operation`] | `(retry_count + 1)` times the [`ack_timeout`](EndpointConfig::ack_timeout): about 2 s |
//! | the same, nothing in flight | - | nothing is noticed, unless [`keepalive`](EndpointConfig::keepalive) is set | its interval and the above |
//! | the peer refuses an operation (bad key, range, rights) | that one `Failed`, those behind it `NotSent` (behind a read: `Unknown`) | [`Cause::Operation`] with kind, status, vendor error, addresses | a round trip |
//! | the peer accesses what it may not | end as with a disconnect | [`Cause::QueuePairError`] or `Disconnected`: nothing of ours has failed | |
//! | a message is longer than the peer's receives | refused at the post if the peer said its limit; else `Failed` | | |
//! | the peer has no receive posted | repeated by the device, see [`rnr_retry_count`](EndpointConfig::rnr_retry_count) | [`Cause::Stalled`] if nothing completes for too long | [`stall_timeout`](EndpointConfig::stall_timeout), 30 s |
//! | a queue is full | not accepted, [`PostErrorKind::QueueFull`], the buffer in the error | unchanged | at once |
//! | the device refuses a post | not accepted, buffer back; of a batch exactly the rest | unchanged | at once |
//! | [`close`](Endpoint::close) is called, on any thread | sends have the given time; receives end `Cancelled` | [`Cause::ClosedLocally`] | the limit, and at most 0.5 s |
//! | the endpoint is dropped | end at once; sends `Unknown`, receives `Cancelled` | gone | the time to destroy a queue pair |
//! | an [`Operation`] or its future is dropped | takes place all the same; the buffer returns to the pool when the NIC is done | unchanged | |
//! | a deadline of a wait passes | goes on | unchanged | |
//! | the device is removed, or says that it failed for good | end | [`Cause::DeviceRemoved`], all of all workers on it | 0.5 s |
//! | the device says that a queue pair failed | end | [`Cause::Operation`] if one of its operations fails, else [`Cause::QueuePairError`] | 0.5 s |
//! | the device says that a completion queue failed | end | [`Cause::CompletionQueueError`], all of the worker | 0.5 s |
//! | the connection manager's events cannot be fetched | end | [`Cause::ConnectionManagerError`] | at once; a second if there is no memory for them |
//! | a queue pair cannot be destroyed | end; buffers the NIC may still use are leaked, counted ([`WorkerStats::leaked`]) and logged | gone | |
//! | nobody listens, or the listener says no | - | [`OpenError::Cm`] with `Refused` or `Rejected` | a round trip |
//! | nobody answers a connect | - | [`OpenError::Cm`], timed out, with the step | `connect_deadline` (the connection manager alone: 100 s) |
//! | a completion matches no operation | nothing | unchanged; counted ([`WorkerStats::stale`]) and logged | |
//!
//! # What a completion promises
//!
//! A send, write or atomic that ended well was acknowledged by the peer's *device*: a send's bytes are
//! in a receive of the peer, a write's are in its memory, or will be before anything later of this
//! connection is. It does not say that the peer's *program* has seen them: only an answer says that.
//! A read or an atomic that ended well has its value here.
//!
//! # Waiting
//!
//! By a call ([`Operation::wait`], [`Endpoint::recv`]), which polls for a while and then sleeps, as
//! [`Wait`] says; by `.await`, if something drives the worker; or by an event loop of one's own, on the
//! worker's descriptor ([`Worker::prepare_wait`]). A wake-up from sleep costs three system calls,
//! polling costs none.
//!
//! Futures know no runtime. With the feature `tokio` the module `tokio` drives workers in one.
//!
//! # Cancel safety
//!
//! Every future of this crate can be dropped at any time without losing a message, a buffer or an
//! operation; each method says what that means for it.
//!
//! # Threads
//!
//! Everything is `Send`, and everything but [`Batch`] can be used from several threads at once. A
//! worker's state lies under one lock, which is never held while a thread waits for events or a waker
//! runs. A post or a batch of completions holds it for a moment; opening and ending an endpoint
//! holds it for the kernel calls these take (making, moving and destroying the queue pair, connecting,
//! accepting and disconnecting), and the other endpoints of the worker wait meanwhile. Of the threads
//! that wait on one worker one sleeps for all, and whoever handles a completion wakes the one it is
//! for. For the best speed give each thread a worker of its own.
//!
//! What goes wrong is logged (crate `log`) with that lock held: a logger must neither use this crate, nor
//! wait for a thread that does, nor panic. One that sends its records over an endpoint hands them to a
//! thread of its own.
//!
//! # Costs
//!
//! Posting and completing an operation allocates nothing, takes one uncontended lock each way, and
//! makes no system call besides the provider's own. Counters are kept under that lock.

#![allow(clippy::result_large_err)] // what was refused comes back in the error, not on the heap

mod config;
mod device_watch;
mod endpoint;
mod error;
mod handshake;
mod lifecycle;
mod op;
mod poller;
mod pool;
mod post;
mod stats;
#[cfg(feature = "tokio")]
pub mod tokio;
mod tracker;
mod wait;
mod worker;
mod wr_id;

pub use bytes::Bytes;
pub use rdma_cm::CmError;
pub use rdma_core_rs::{
    Access, Context, OutOfRange, RemoteRegion, SharedRegion, SharedSlice, WcStatus,
};

pub use config::{EndpointConfig, MAX_SGE, Receive, Wait, WorkerConfig};
pub use endpoint::{
    Batch, Endpoint, Incoming, Listener, OpOptions, Opening, PostedBatch, Prepared, Unposted, With,
};
pub use error::{
    Addrs, Cause, CloseError, Closed, Failure, OpError, OpKind, OpenError, Outcome, PostError,
    PostErrorKind, Queue, RecvError, WaitError,
};
pub use op::{Completion, Operation, Received};
pub use pool::{Buf, PoolError};
pub use stats::{EndpointStats, KindStats, OpStats, WorkerStats};
pub use worker::{Readiness, Worker};
