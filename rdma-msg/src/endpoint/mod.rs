//! Endpoints: what a program holds, posts to and receives from.

mod batch;
mod open;
pub(crate) mod state;
mod watchdog;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rdma_core_rs::{Access, RemoteRegion, SharedRegion};

pub use self::batch::{Batch, PostedBatch, Unposted};
pub use self::open::{Incoming, Listener, Opening, Prepared};
use self::state::Rules;
use crate::config::EndpointConfig;
use crate::error::{
    Addrs, Cause, CloseError, Closed, OpKind, OpenError, PostError, PostErrorKind, RecvError,
};
use crate::lifecycle;
use crate::op::{Operation, Payload, Received};
use crate::pool::{Buf, PoolError};
use crate::post::{Flags, Posted, Poster, Verb};
use crate::stats::{EndpointStats, OpStats};
use crate::tracker::Claim;
use crate::wait::{self, Watch, new_key};
use crate::worker::{State, Worker, WorkerInner};

/// A reliable connection to one peer.
///
/// Operations are **posted** and **waited for** apart. Posting never blocks: it gives an [`Operation`]
/// or, if a rule or a full queue refuses it, an error that has the buffer. An operation that was
/// accepted ends exactly once; see [`Outcome`](crate::Outcome) for what a failure says about the peer.
///
/// Operations of one endpoint are started in the order in which they were posted. Sends and writes
/// take effect at the peer in that order; a read or an atomic may still be under way when later ones
/// take effect, unless those are posted with a [fence](OpOptions::fence).
///
/// # Threads
///
/// All methods take `&self` and may be called from several threads at once.
///
/// # Dropping
///
/// Dropping it ends the connection at once and does not wait for the peer: what is in flight ends
/// with an error, and its buffers return. To let sends finish, [`close`](Endpoint::close) it.
pub struct Endpoint {
    worker: Worker,
    index: u32,
    rules: Rules,
    addrs: Addrs,
    qp_num: u32,
    peer_data: Bytes,
}

/// How an operation is posted; see [`Endpoint::with`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpOptions {
    /// Starts only once all reads and atomics posted before it have ended. For whatever depends on
    /// what they read; it does not wait for writes and sends, which need no fence among themselves.
    pub fence: bool,
    /// The receive that it completes raises an event at a peer that asked for solicited events only.
    /// Peers of this library do not.
    pub solicited: bool,
    /// Carries the bytes in the work request although a buffer was given: the device need not fetch
    /// them. Only up to [`Endpoint::max_inline`] bytes, of sends and writes.
    pub inline: bool,
}

impl Endpoint {
    /// Connects to a listener, on a worker of its own, and waits until that is done.
    ///
    /// # Errors
    ///
    /// [`OpenError::Cm`] if the peer refuses, rejects or cannot be reached, or the deadline of the
    /// configuration passes; [`OpenError::Config`] if the configuration is not possible;
    /// [`OpenError::Verbs`] and others if the resources are not there.
    #[doc(alias = "rdma_connect")]
    pub fn connect(peer: SocketAddr, config: &EndpointConfig) -> Result<Endpoint, OpenError> {
        Opening::connect_alone(peer, config)?.wait()
    }

    /// Starts to connect on a worker that is there; wait for the result, or await it.
    ///
    /// # Errors
    ///
    /// Those that are known at once; the others come from the [`Opening`].
    #[doc(alias = "rdma_connect")]
    pub fn connect_with(
        worker: &Worker,
        peer: SocketAddr,
        config: &EndpointConfig,
    ) -> Result<Opening, OpenError> {
        Opening::connect(worker, peer, config)
    }

    /// Resolves the peer, and waits for that, but does not connect yet: so that receives can be
    /// posted before the peer can send ([`Receive::Manual`](crate::Receive::Manual)).
    ///
    /// # Errors
    ///
    /// As for [`connect`](Endpoint::connect).
    pub fn prepare(
        worker: &Worker,
        peer: SocketAddr,
        config: &EndpointConfig,
    ) -> Result<Prepared, OpenError> {
        Prepared::connect(worker, peer, config)
    }

    pub(crate) fn new(worker: Worker, index: u32, state: &State) -> Endpoint {
        let ep = &state.endpoints[index as usize];
        let peer_data = Bytes::copy_from_slice(&ep.peer_data);
        Endpoint {
            worker,
            index,
            rules: ep.rules,
            addrs: ep.addrs,
            qp_num: ep.qp_num,
            peer_data,
        }
    }

    /// The worker it is on.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// A buffer with `len` bytes in use, which are what was there before, of another peer perhaps: fill
    /// all of them before sending. See [`Worker::alloc`].
    ///
    /// # Errors
    ///
    /// As there.
    #[inline]
    pub fn alloc(&self, len: usize) -> Result<Buf, PoolError> {
        self.worker.alloc(len)
    }

    /// Memory for the peer; see [`Worker::expose`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn expose(&self, len: usize, access: Access) -> rdma_core_rs::Result<SharedRegion> {
        self.worker.expose(len, access)
    }

    /// The local address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.addrs.local
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.addrs.peer
    }

    /// What the peer's program said while connecting
    /// ([`EndpointConfig::private_data`]). From a peer that does not use this library it is padded
    /// with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.peer_data
    }

    /// The number of the local queue pair.
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// Bytes that travel in a work request, as the device granted it: at least what was asked for.
    pub fn max_inline(&self) -> usize {
        self.rules.max_inline as usize
    }

    /// The longest message that can be sent: what the device takes, and the peer's receives if it
    /// said so.
    pub fn max_message(&self) -> usize {
        self.rules
            .peer_max_message
            .map_or(self.rules.max_msg, |peer| peer.min(self.rules.max_msg)) as usize
    }

    /// Reads and atomics that can be under way at once; 0 if none are possible.
    pub fn initiator_depth(&self) -> u8 {
        self.rules.initiator_depth
    }

    /// Sends, writes, reads and atomics that can be posted now.
    pub fn send_capacity(&self) -> u32 {
        self.worker.inner.with(|state| capacity(state, self.index))
    }

    /// Waits until `count` operations can be posted, or until `deadline` (`None`: for ever).
    /// Other threads may post them first. False if the deadline passed.
    ///
    /// Room is made by operations that end, whether or not their results are fetched: who holds all
    /// results waits for the device alone.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the endpoint has ended. More than the queue's depth is treated as the depth.
    pub fn wait_capacity(&self, count: u32, deadline: Option<Instant>) -> Result<bool, Closed> {
        let mut watch = CapacityWatch {
            index: self.index,
            count,
        };
        wait::wait(&self.worker.inner, &mut watch, deadline)
            .map_or(Ok(false), |result| result.map(|()| true))
    }

    /// Sends the content of `buf` into a receive of the peer.
    ///
    /// # Errors
    ///
    /// [`PostError`] with the buffer; see [`PostErrorKind`] for each.
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn send(&self, buf: Buf) -> Result<Operation, PostError<Buf>> {
        self.with(OpOptions::default()).send(buf)
    }

    /// As [`send`](Endpoint::send), with a number for the peer.
    ///
    /// # Errors
    ///
    /// As for `send`.
    #[inline]
    pub fn send_imm(&self, buf: Buf, imm: u32) -> Result<Operation, PostError<Buf>> {
        self.with(OpOptions::default()).send_imm(buf, imm)
    }

    /// Sends bytes: in the work request if they fit ([`max_inline`](Endpoint::max_inline)), and else
    /// copied into a buffer. The slice is free when this returns.
    ///
    /// # Errors
    ///
    /// As for [`send`](Endpoint::send), and [`PostErrorKind::Pool`].
    #[inline]
    pub fn send_slice(&self, bytes: &[u8]) -> Result<Operation, PostError<()>> {
        self.with(OpOptions::default()).send_slice(bytes)
    }

    /// Sends the bytes of a `Vec`: copied if they fit into a buffer of the pool, and else where they
    /// are, registered for this one operation (which costs microseconds, and more for many pages).
    /// The bytes come back as a [`Buf`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Endpoint::send), and [`PostErrorKind::Pool`]; the bytes are then lost if they
    /// were to be registered and could not.
    pub fn send_vec(&self, bytes: Vec<u8>) -> Result<Operation, PostError<Option<Buf>>> {
        let buf = self
            .import(bytes)
            .map_err(|error| PostError::new(error, None))?;
        self.send(buf).map_err(|error| error.map(Some))
    }

    /// As [`send_vec`](Endpoint::send_vec). Bytes that nobody else refers to are not copied if they
    /// are registered; shared ones are.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn send_bytes(&self, bytes: Bytes) -> Result<Operation, PostError<Option<Buf>>> {
        let inner = &self.worker.inner;
        let buf = if bytes.len() <= inner.pool().slot_size() {
            inner.alloc(0).map(|mut buf| {
                buf.fill_from(&bytes);
                buf
            })
        } else {
            inner.adopt(bytes.into())
        };
        let buf = buf.map_err(|error| PostError::new(error, None))?;
        self.send(buf).map_err(|error| error.map(Some))
    }

    fn import(&self, bytes: Vec<u8>) -> Result<Buf, PoolError> {
        let inner = &self.worker.inner;
        if bytes.len() > inner.pool().slot_size() {
            return inner.adopt(bytes);
        }
        let mut buf = inner.alloc(0)?;
        buf.fill_from(&bytes);
        Ok(buf)
    }

    /// Sends the contents of several buffers as one message.
    ///
    /// # Errors
    ///
    /// As for [`send`](Endpoint::send); [`PostErrorKind::TooManyBuffers`] above
    /// [`EndpointConfig::max_sge`], [`PostErrorKind::NoBuffer`] for none.
    pub fn send_gather(&self, bufs: Vec<Buf>) -> Result<Operation, PostError<Vec<Buf>>> {
        self.with(OpOptions::default()).send_gather(bufs)
    }

    /// Writes the content of `buf` to the start of the peer's `remote`. The peer is not told.
    ///
    /// Success means that the peer's device has acknowledged it: a later send tells the peer's
    /// program, and it then sees the data.
    ///
    /// # Errors
    ///
    /// As for [`send`](Endpoint::send); [`PostErrorKind::OutOfBounds`] if the content is longer than
    /// the range. Whether the range and the key are good only the peer knows.
    #[inline]
    pub fn write(&self, buf: Buf, remote: RemoteRegion) -> Result<Operation, PostError<Buf>> {
        self.with(OpOptions::default()).write(buf, remote)
    }

    /// As [`write`](Endpoint::write); consumes a receive of the peer and so tells it `imm`.
    ///
    /// # Errors
    ///
    /// As for `write`.
    #[inline]
    pub fn write_imm(
        &self,
        buf: Buf,
        remote: RemoteRegion,
        imm: u32,
    ) -> Result<Operation, PostError<Buf>> {
        self.with(OpOptions::default()).write_imm(buf, remote, imm)
    }

    /// Reads all of the peer's `remote` to the start of `buf`, whose length becomes that of the range.
    ///
    /// # Errors
    ///
    /// As for [`send`](Endpoint::send); [`PostErrorKind::OutOfBounds`] if the buffer has no room for
    /// it; [`PostErrorKind::DepthZero`] if the connection allows no reads.
    #[inline]
    pub fn read(&self, buf: Buf, remote: RemoteRegion) -> Result<Operation, PostError<Buf>> {
        self.with(OpOptions::default()).read(buf, remote)
    }

    /// Stores `swap` into the peer's word `remote` if it is `compare`; what it was is the
    /// [`value`](crate::Completion::value) of the result. Atomic among the operations of the peer's
    /// device.
    ///
    /// # Errors
    ///
    /// As for [`send`](Endpoint::send); [`PostErrorKind::Misaligned`] unless the range is 8 bytes at
    /// a multiple of 8; [`PostErrorKind::DepthZero`] if the connection allows no atomics.
    pub fn compare_swap(
        &self,
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    ) -> Result<Operation, PostError<()>> {
        self.with(OpOptions::default())
            .compare_swap(remote, compare, swap)
    }

    /// Adds to the peer's word `remote`, wrapping; what it was is the
    /// [`value`](crate::Completion::value) of the result. Atomic among the operations of the peer's
    /// device.
    ///
    /// # Errors
    ///
    /// As for [`compare_swap`](Endpoint::compare_swap).
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Result<Operation, PostError<()>> {
        self.with(OpOptions::default()).fetch_add(remote, add)
    }

    /// Posts a receive for the whole capacity of `buf`, with [`Receive::Manual`](crate::Receive::Manual).
    /// Messages come in the order in which receives were posted.
    ///
    /// # Errors
    ///
    /// [`PostError`] with the buffer: [`PostErrorKind::WrongMode`] on an endpoint whose receives are
    /// managed, [`PostErrorKind::QueueFull`], [`PostErrorKind::ForeignBuffer`],
    /// [`PostErrorKind::Verbs`], [`PostErrorKind::Closed`], [`PostErrorKind::Ending`].
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn post_recv(&self, buf: Buf) -> Result<Operation, PostError<Buf>> {
        post_recv(&self.worker.inner, self.index, buf)
    }

    /// The posting methods, with options.
    ///
    /// ```no_run
    /// # use rdma_msg::{Buf, Endpoint, OpOptions, RemoteRegion};
    /// # fn example(endpoint: &Endpoint, flag: Buf, remote: RemoteRegion) {
    /// let after_reads = OpOptions { fence: true, ..Default::default() };
    /// let operation = endpoint.with(after_reads).write(flag, remote);
    /// # }
    /// ```
    #[inline]
    pub fn with(&self, options: OpOptions) -> With<'_> {
        With {
            endpoint: self,
            options,
        }
    }

    /// Collects operations that are posted together, with one doorbell.
    pub fn batch(&self) -> Batch<'_> {
        Batch::new(self)
    }

    /// Takes the next message, waiting for it.
    ///
    /// Messages that had arrived when the connection ended are handed out before the error.
    ///
    /// # Errors
    ///
    /// [`RecvError::Closed`] once the endpoint has ended; [`RecvError::Manual`].
    pub fn recv(&self) -> Result<Received, RecvError> {
        match wait::wait(
            &self.worker.inner,
            &mut RecvWatch { index: self.index },
            None,
        ) {
            Some(result) => result,
            None => unreachable!("a wait without a deadline does not time out"),
        }
    }

    /// As [`recv`](Endpoint::recv), until `deadline`: `None` if there was no message by then.
    ///
    /// # Errors
    ///
    /// As for `recv`.
    #[inline]
    pub fn recv_deadline(&self, deadline: Instant) -> Result<Option<Received>, RecvError> {
        let mut watch = RecvWatch { index: self.index };
        wait::wait(&self.worker.inner, &mut watch, Some(deadline)).transpose()
    }

    /// As [`recv`](Endpoint::recv), without waiting: `None` if there is no message.
    ///
    /// # Errors
    ///
    /// As for `recv`.
    #[inline]
    pub fn try_recv(&self) -> Result<Option<Received>, RecvError> {
        self.worker
            .inner
            .look(&mut RecvWatch { index: self.index })
            .transpose()
    }

    /// As [`recv`](Endpoint::recv), to be awaited.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing: a message is taken only when it is returned.
    pub fn recv_async(&self) -> impl Future<Output = Result<Received, RecvError>> + Send + '_ {
        WatchFuture::new(&self.worker.inner, RecvWatch { index: self.index })
    }

    /// Waits until `count` operations can be posted; see [`wait_capacity`](Endpoint::wait_capacity).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub fn capacity_async(
        &self,
        count: u32,
    ) -> impl Future<Output = Result<(), Closed>> + Send + '_ {
        WatchFuture::new(
            &self.worker.inner,
            CapacityWatch {
                index: self.index,
                count,
            },
        )
    }

    /// Ends the connection in good order: nothing new is accepted, operations in flight have `limit`
    /// to finish, then the peer is told and what is left is flushed. Takes a little longer than
    /// `limit` at most (half a second, with a device that forgets to flush).
    ///
    /// Operations accepted before keep their results, to be fetched as before. Closing again, or
    /// from another thread, waits for the same end.
    ///
    /// # Errors
    ///
    /// [`CloseError::TimedOut`] if operations were in flight when `limit` was up;
    /// [`CloseError::Broken`] if the connection had ended for another reason. It is closed either way.
    #[doc(alias = "rdma_disconnect")]
    pub fn close(&self, limit: Duration) -> Result<(), CloseError> {
        self.start_close(limit);
        match wait::wait(
            &self.worker.inner,
            &mut CloseWatch { index: self.index },
            None,
        ) {
            Some(result) => result,
            None => unreachable!("a wait without a deadline does not time out"),
        }
    }

    /// As [`close`](Endpoint::close), to be awaited. The close starts when this is called.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not take the close back; it goes on as the worker is polled.
    pub fn close_async(
        &self,
        limit: Duration,
    ) -> impl Future<Output = Result<(), CloseError>> + Send + '_ {
        self.start_close(limit);
        WatchFuture::new(&self.worker.inner, CloseWatch { index: self.index })
    }

    fn start_close(&self, limit: Duration) {
        let deadline = far_future(Instant::now(), limit);
        self.worker
            .inner
            .with(|state| state.close(self.index, deadline));
    }

    /// Why the endpoint has ended; `None` while it has not, and for up to half a second after the end
    /// while the cause is not known yet ([`is_open`](Endpoint::is_open) is false then). The same for
    /// everyone who asks.
    pub fn closed(&self) -> Option<Arc<Cause>> {
        self.worker
            .inner
            .look(&mut ClosedWatch { index: self.index })
    }

    /// Waits until the endpoint has ended, and tells why.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub fn closed_async(&self) -> impl Future<Output = Arc<Cause>> + Send + '_ {
        WatchFuture::new(&self.worker.inner, ClosedWatch { index: self.index })
    }

    /// Whether operations are accepted.
    pub fn is_open(&self) -> bool {
        self.worker
            .inner
            .with(|state| life(state, self.index) == lifecycle::State::Open)
    }

    /// The endpoint's counters. They can be read at any time, also after it has ended.
    pub fn stats(&self) -> EndpointStats {
        self.worker.inner.with(|state| {
            let ops = OpStats::new(&state.tally(self.index));
            let ep = &state.endpoints[self.index as usize];
            EndpointStats {
                ops,
                inbox: ep.inbox.len(),
                receives_delayed: ep.receives_delayed,
            }
        })
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("addrs", &format_args!("{}", self.addrs))
            .field("qp_num", &self.qp_num)
            .finish_non_exhaustive()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // What comes out holds buffers and wakers: it is dropped after the lock was released.
        drop(self.worker.inner.with(|state| state.remove(self.index)));
    }
}

/// The posting methods of an [`Endpoint`], with [`OpOptions`]. They are described there.
#[derive(Clone, Copy, Debug)]
pub struct With<'a> {
    endpoint: &'a Endpoint,
    options: OpOptions,
}

#[allow(missing_docs)] // described at Endpoint
impl With<'_> {
    #[inline]
    pub fn send(&self, buf: Buf) -> Result<Operation, PostError<Buf>> {
        self.one(Verb::Send, buf)
    }

    #[inline]
    pub fn send_imm(&self, buf: Buf, imm: u32) -> Result<Operation, PostError<Buf>> {
        self.one(Verb::SendImm(imm), buf)
    }

    #[inline]
    pub fn send_slice(&self, bytes: &[u8]) -> Result<Operation, PostError<()>> {
        self.slice(Verb::Send, bytes)
    }

    pub fn send_gather(&self, bufs: Vec<Buf>) -> Result<Operation, PostError<Vec<Buf>>> {
        self.gather(Verb::Send, bufs)
    }

    #[inline]
    pub fn write(&self, buf: Buf, remote: RemoteRegion) -> Result<Operation, PostError<Buf>> {
        self.one(Verb::Write(remote), buf)
    }

    /// Writes bytes: in the work request if they fit, and else copied into a buffer.
    #[inline]
    pub fn write_slice(
        &self,
        bytes: &[u8],
        remote: RemoteRegion,
    ) -> Result<Operation, PostError<()>> {
        self.slice(Verb::Write(remote), bytes)
    }

    #[inline]
    pub fn write_imm(
        &self,
        buf: Buf,
        remote: RemoteRegion,
        imm: u32,
    ) -> Result<Operation, PostError<Buf>> {
        self.one(Verb::WriteImm(remote, imm), buf)
    }

    pub fn write_gather(
        &self,
        bufs: Vec<Buf>,
        remote: RemoteRegion,
    ) -> Result<Operation, PostError<Vec<Buf>>> {
        self.gather(Verb::Write(remote), bufs)
    }

    #[inline]
    pub fn read(&self, mut buf: Buf, remote: RemoteRegion) -> Result<Operation, PostError<Buf>> {
        if let Err(kind) = fit_read(&mut buf, remote) {
            return Err(PostError::new(kind, buf));
        }
        self.one(Verb::Read(remote), buf)
    }

    pub fn compare_swap(
        &self,
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    ) -> Result<Operation, PostError<()>> {
        self.atomic(Verb::CompareSwap {
            remote,
            compare,
            swap,
        })
    }

    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Result<Operation, PostError<()>> {
        self.atomic(Verb::FetchAdd { remote, add })
    }

    #[inline]
    fn one(&self, verb: Verb, buf: Buf) -> Result<Operation, PostError<Buf>> {
        let mut payload = Payload::One(buf);
        match self.post(verb, &mut payload, None) {
            Ok(operation) => Ok(operation),
            Err(kind) => Err(PostError::new(kind, refused(payload))),
        }
    }

    fn gather(&self, verb: Verb, bufs: Vec<Buf>) -> Result<Operation, PostError<Vec<Buf>>> {
        if bufs.is_empty() {
            return Err(PostError::new(PostErrorKind::NoBuffer, bufs));
        }
        let mut payload = Payload::Many(bufs);
        match self.post(verb, &mut payload, None) {
            Ok(operation) => Ok(operation),
            Err(kind) => Err(PostError::new(kind, refused_many(payload))),
        }
    }

    #[inline]
    fn slice(&self, verb: Verb, bytes: &[u8]) -> Result<Operation, PostError<()>> {
        let refused = |kind| PostError::new(kind, ());
        if bytes.len() <= self.endpoint.max_inline() {
            let posted = self.post(verb, &mut Payload::None, Some(bytes));
            return posted.map_err(refused);
        }
        let buf = self.endpoint.alloc(bytes.len());
        let mut buf = buf.map_err(|error| refused(error.into()))?;
        buf.copy_from_slice(bytes);
        let posted = self.post(verb, &mut Payload::One(buf), None);
        posted.map_err(refused)
    }

    fn atomic(&self, verb: Verb) -> Result<Operation, PostError<()>> {
        let refused = |kind| PostError::new(kind, ());
        let cell = self.endpoint.worker.inner.cell();
        let cell = cell.map_err(|error| refused(error.into()))?;
        let posted = self.post(verb, &mut Payload::One(cell), None);
        posted.map_err(refused)
    }

    /// Posts one operation. The payload stays where it is unless the operation is accepted.
    #[inline]
    fn post(
        &self,
        verb: Verb,
        payload: &mut Payload,
        data: Option<&[u8]>,
    ) -> Result<Operation, PostErrorKind> {
        let Endpoint { worker, index, .. } = self.endpoint;
        let flags = self
            .endpoint
            .check(&verb, payload, data, self.options, true)?;
        let id = worker.inner.with(|state| {
            let mut sender = state.sender(*index)?;
            let posted = sender.send(verb, flags, payload, data, Claim::Ticket)?;
            Ok::<_, PostErrorKind>(state.accept(*index, posted))
        })?;
        Ok(Operation::new(Arc::clone(&worker.inner), id, verb.kind()))
    }
}

#[cold]
fn refused(payload: Payload) -> Buf {
    match payload {
        Payload::One(buf) => buf,
        _ => unreachable!("the payload that was refused has its buffer"),
    }
}

#[cold]
fn refused_many(payload: Payload) -> Vec<Buf> {
    match payload {
        Payload::Many(bufs) => bufs,
        _ => unreachable!("the payload that was refused has its buffers"),
    }
}

/// Sets the length of the buffer to that of the range it is to be read from.
#[inline]
fn fit_read(buf: &mut Buf, remote: RemoteRegion) -> Result<(), PostErrorKind> {
    let (local, remote) = (buf.capacity() as u64, remote.len());
    if remote > local {
        return Err(PostErrorKind::OutOfBounds { local, remote });
    }
    buf.set_len(remote as usize);
    Ok(())
}

impl Endpoint {
    /// Checks what can be known before the device sees the operation: of one that is posted alone,
    /// and of one in a batch.
    #[inline]
    fn check(
        &self,
        verb: &Verb,
        payload: &Payload,
        data: Option<&[u8]>,
        options: OpOptions,
        signaled: bool,
    ) -> Result<Flags, PostErrorKind> {
        let len = data.map_or_else(|| payload.len(), |data| data.len() as u64);
        self.rules.check(verb, len, payload.bufs().len(), options)?;
        let OpOptions {
            fence,
            solicited,
            inline,
        } = options;
        Ok(Flags {
            fence,
            solicited,
            inline,
            signaled,
        })
    }
}

impl Rules {
    #[inline]
    fn check(
        &self,
        verb: &Verb,
        len: u64,
        count: usize,
        options: OpOptions,
    ) -> Result<(), PostErrorKind> {
        if count > self.max_sge as usize {
            return Err(PostErrorKind::TooManyBuffers {
                count,
                limit: self.max_sge,
            });
        }
        let too_long = |limit: u32, what| {
            if len > u64::from(limit) {
                return Err(PostErrorKind::TooLong {
                    len,
                    limit: limit.into(),
                    what,
                });
            }
            Ok(())
        };
        too_long(self.max_msg, "the longest message of the device")?;
        if options.inline && !verb.kind().is_fetching() {
            too_long(
                self.max_inline,
                "the bytes a work request of this endpoint can carry",
            )?;
        }
        match verb {
            Verb::Send | Verb::SendImm(_) => too_long(
                self.peer_max_message.unwrap_or(u32::MAX),
                "what the peer's receives take",
            ),
            Verb::Write(remote) | Verb::WriteImm(remote, _) if len > remote.len() => {
                Err(PostErrorKind::OutOfBounds {
                    local: len,
                    remote: remote.len(),
                })
            }
            Verb::Write(_) | Verb::WriteImm(..) | Verb::Probe => Ok(()),
            Verb::Read(_) => self.check_depth(OpKind::Read),
            Verb::CompareSwap { remote, .. } | Verb::FetchAdd { remote, .. } => {
                if remote.len() != 8 || remote.addr() % 8 != 0 {
                    return Err(PostErrorKind::Misaligned {
                        addr: remote.addr(),
                        len: remote.len(),
                    });
                }
                self.check_depth(verb.kind())
            }
        }
    }

    #[inline]
    fn check_depth(&self, op: OpKind) -> Result<(), PostErrorKind> {
        if self.initiator_depth == 0 {
            let what = "initiator depth, or the peer's responder resources,";
            return Err(PostErrorKind::DepthZero { op, what });
        }
        Ok(())
    }
}

pub(crate) fn post_recv(
    worker: &Arc<WorkerInner>,
    index: u32,
    buf: Buf,
) -> Result<Operation, PostError<Buf>> {
    let mut payload = Payload::One(buf);
    let posted = worker.with(|state| {
        state.takes_receives(index)?;
        let posted = state.poster(index)?.recv(&mut payload, Claim::Ticket)?;
        Ok::<_, PostErrorKind>(state.accept(index, posted))
    });
    match posted {
        Ok(id) => Ok(Operation::new(Arc::clone(worker), id, OpKind::Receive)),
        Err(kind) => Err(PostError::new(kind, refused(payload))),
    }
}

impl State {
    /// What posting sends, writes, reads and atomics needs, if the endpoint accepts them now.
    #[inline]
    fn sender(&mut self, index: u32) -> Result<Poster<'_>, PostErrorKind> {
        if life(self, index).takes_sends() {
            self.poster(index)
        } else {
            Err(self.refusal(index))
        }
    }

    #[inline]
    fn takes_receives(&mut self, index: u32) -> Result<(), PostErrorKind> {
        if self.endpoints[index as usize].rules.managed {
            let what = "this endpoint posts its receives itself: take messages with recv, or open it \
                        with Receive::Manual";
            return Err(PostErrorKind::WrongMode { what });
        }
        if life(self, index).takes_receives() {
            Ok(())
        } else {
            Err(self.refusal(index))
        }
    }

    #[cold]
    fn refusal(&mut self, index: u32) -> PostErrorKind {
        if life(self, index) == lifecycle::State::Opening {
            return PostErrorKind::NotOpen;
        }
        if self.why_refused(index).is_none() {
            // The failure behind the first flushes is mostly right behind them.
            self.poll();
        }
        self.why_refused(index)
            .map_or(PostErrorKind::Ending, |cause| PostErrorKind::Closed {
                cause,
            })
    }

    /// Why an endpoint that was open takes nothing any more, if that is known.
    fn why_refused(&self, index: u32) -> Option<Arc<Cause>> {
        match (life(self, index), self.known_cause(index)) {
            (lifecycle::State::Draining, None) => Some(Arc::new(Cause::ClosedLocally)),
            (_, cause) => cause.cloned(),
        }
    }

    /// Takes note of what was posted.
    #[inline]
    fn accept(&mut self, index: u32, posted: Posted) -> crate::wr_id::WrId {
        match posted {
            Posted::Yes(id) => id,
            Posted::Perhaps(id) => {
                self.doorbell_failed(index);
                self.attend();
                id
            }
        }
    }
}

#[inline]
fn life(state: &State, index: u32) -> lifecycle::State {
    state.endpoints[index as usize].life
}

fn capacity(state: &State, index: u32) -> u32 {
    match (life(state, index), state.endpoints[index as usize].lane) {
        (lifecycle::State::Open, Some(lane)) => state.tracker.send_capacity(lane),
        _ => 0,
    }
}

/// `now + limit`, or as far as the clock goes.
pub(crate) fn far_future(now: Instant, limit: Duration) -> Instant {
    now.checked_add(limit)
        .unwrap_or_else(|| now + Duration::from_secs(1 << 31))
}

struct RecvWatch {
    index: u32,
}

impl Watch for RecvWatch {
    type Output = Result<Received, RecvError>;

    #[inline]
    fn is_there(&self, state: &State) -> bool {
        !state.endpoints[self.index as usize].inbox.is_empty()
    }

    #[inline(always)] // the message is moved once
    fn check(&mut self, state: &mut State) -> Option<Self::Output> {
        if let Some(received) = state.take_message(self.index) {
            return Some(Ok(received));
        }
        if !state.endpoints[self.index as usize].rules.managed {
            return Some(Err(RecvError::Manual));
        }
        // While it is flushing, a message that came before the end can still come out of the queue.
        if life(state, self.index) != lifecycle::State::Closed {
            return None;
        }
        ended(state, self.index).map(|cause| Err(RecvError::Closed(cause)))
    }

    fn register(&mut self, state: &mut State, key: u64, waker: Waker) -> Option<Waker> {
        state.endpoints[self.index as usize]
            .receivers
            .set(key, waker)
    }

    fn unregister(&mut self, state: &mut State, key: u64) -> Option<Waker> {
        state.endpoints[self.index as usize].receivers.remove(key)
    }
}

/// Why the endpoint has ended, if it has and that is known.
#[inline]
fn ended(state: &State, index: u32) -> Option<Arc<Cause>> {
    if life(state, index).is_over() {
        state.known_cause(index).cloned()
    } else {
        None
    }
}

struct CapacityWatch {
    index: u32,
    count: u32,
}

impl Watch for CapacityWatch {
    type Output = Result<(), Closed>;

    fn check(&mut self, state: &mut State) -> Option<Self::Output> {
        if !life(state, self.index).takes_sends() {
            return state
                .why_refused(self.index)
                .map(|cause| Err(Closed(cause)));
        }
        let lane = state.endpoints[self.index as usize].lane?;
        let count = self.count.min(state.tracker.limits(lane).send_depth);
        if state.tracker.send_capacity(lane) >= count {
            return Some(Ok(()));
        }
        None
    }

    fn register(&mut self, state: &mut State, key: u64, waker: Waker) -> Option<Waker> {
        state.endpoints[self.index as usize].posters.set(key, waker)
    }

    fn unregister(&mut self, state: &mut State, key: u64) -> Option<Waker> {
        state.endpoints[self.index as usize].posters.remove(key)
    }
}

struct CloseWatch {
    index: u32,
}

impl Watch for CloseWatch {
    type Output = Result<(), CloseError>;

    fn check(&mut self, state: &mut State) -> Option<Self::Output> {
        let ep = &state.endpoints[self.index as usize];
        if ep.life != lifecycle::State::Closed {
            return None;
        }
        let cause = ep.cause.clone()?;
        Some(match *cause {
            Cause::ClosedLocally if ep.unfinished == 0 => Ok(()),
            Cause::ClosedLocally => Err(CloseError::TimedOut {
                unfinished: ep.unfinished,
            }),
            _ => Err(CloseError::Broken(cause)),
        })
    }

    fn register(&mut self, state: &mut State, key: u64, waker: Waker) -> Option<Waker> {
        state.endpoints[self.index as usize]
            .watchers
            .set(key, waker)
    }

    fn unregister(&mut self, state: &mut State, key: u64) -> Option<Waker> {
        state.endpoints[self.index as usize].watchers.remove(key)
    }
}

struct ClosedWatch {
    index: u32,
}

impl Watch for ClosedWatch {
    type Output = Arc<Cause>;

    fn check(&mut self, state: &mut State) -> Option<Self::Output> {
        ended(state, self.index)
    }

    fn register(&mut self, state: &mut State, key: u64, waker: Waker) -> Option<Waker> {
        state.endpoints[self.index as usize]
            .watchers
            .set(key, waker)
    }

    fn unregister(&mut self, state: &mut State, key: u64) -> Option<Waker> {
        state.endpoints[self.index as usize].watchers.remove(key)
    }
}

/// A [`Watch`] that is awaited.
struct WatchFuture<'a, W: Watch> {
    worker: &'a WorkerInner,
    watch: W,
    key: u64,
    registered: bool,
}

impl<'a, W: Watch> WatchFuture<'a, W> {
    fn new(worker: &'a WorkerInner, watch: W) -> WatchFuture<'a, W> {
        WatchFuture {
            worker,
            watch,
            key: new_key(),
            registered: false,
        }
    }
}

impl<W: Watch + Unpin> Future for WatchFuture<'_, W> {
    type Output = W::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<W::Output> {
        let WatchFuture {
            worker,
            watch,
            key,
            registered,
        } = &mut *self;
        let polled = wait::poll(worker, watch, *key, cx);
        *registered = polled.is_pending();
        polled
    }
}

impl<W: Watch> Drop for WatchFuture<'_, W> {
    fn drop(&mut self) {
        if self.registered {
            let WatchFuture {
                worker, watch, key, ..
            } = self;
            drop(worker.with(|state| watch.unregister(state, *key)));
        }
    }
}
