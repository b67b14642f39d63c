//! The unit of progress: one completion queue, one tracker, one pool, and the endpoints on them.
//!
//! All state lies under one mutex. A single thread never finds it taken; several threads share it for
//! the length of a post or of one batch of completions; opening and ending an endpoint holds it for the
//! kernel calls these take. It is never held while a thread waits for events, and never while a waker
//! runs: wakers are collected and woken after it was released, each guarded, so that one that panics
//! takes nothing with it.
//!
//! Order of work: completions first, so data that arrived is delivered; then the news of the
//! connection manager; then timers. What a completion means for the *life* of its endpoint is only
//! noted while the batch is handled, and acted upon after it.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
#[cfg(feature = "tokio")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use rdma_core_rs::{
    Access, CompletionChannel, CompletionQueue, Context, ProtectionDomain, RegionSlice,
    SharedRegion, WcOpcode, WorkCompletion,
};
use slab::Slab;

use crate::config::WorkerConfig;
use crate::device_watch::Membership;
use crate::endpoint::state::{Ep, Link};
use crate::error::{Cause, OpenError};
use crate::lifecycle;
use crate::op::Payload;
use crate::poller::{Batch, Poller, Ready};
use crate::pool::{self, Buf, Pool, PoolError};
use crate::stats::WorkerStats;
use crate::tracker::{Ending, Matched, News, Success, Tracker};
use crate::wait::{self, Waiters, Watch};

/// Progress, memory and completion queue of one or many endpoints.
///
/// A worker made for an endpoint ([`Endpoint::connect`](crate::Endpoint::connect),
/// [`Incoming::accept`](crate::Incoming::accept)) is private to it. A server of many connections makes
/// one for all of them, or one per thread, and gives it to
/// [`connect_with`](crate::Endpoint::connect_with) and [`accept_with`](crate::Incoming::accept_with).
///
/// It is a cheap handle: clones are the same worker. It lives until the last of them, of its
/// endpoints and of their operations is dropped.
///
/// # Threads
///
/// Everything may be used from any thread at any time. Whoever waits for anything on a worker makes
/// progress for all of it; nothing happens while nobody waits, polls or posts.
///
/// # Wakers
///
/// A waker that was left with a future of this crate runs on whichever thread makes progress, with no
/// lock held: it may use the worker. It must not wait, least of all for something on the same worker:
/// the wakers behind it run when it has returned, and one of them may be what it waits for.
///
/// # Events of the device
///
/// Workers read the asynchronous events of their context, those on the same context for each other.
/// `QP_FATAL`, `QP_REQ_ERR` and `QP_ACCESS_ERR` end the endpoint with the failed operation behind them,
/// or else [`Cause::QueuePairError`]; `CQ_ERR` ends all endpoints of the worker
/// ([`Cause::CompletionQueueError`]), `DEVICE_FATAL` those of all workers on the context
/// ([`Cause::DeviceRemoved`]), and such a worker takes no more endpoints. All events are logged, and
/// counted in [`WorkerStats::device_events`]; a port that goes down ends nothing by itself.
///
/// The kernel gives each event to one reader. A program with an `AsyncEvents` of the same context
/// takes some from the workers, which then find out as they would without events, and they take some
/// from it. To see the events of ports and of the device, open the device once more
/// (`rdma_core_rs::Device::open`): each open device has its own.
///
/// If the events cannot be watched, or reading them fails, that is logged and the worker goes on
/// without.
#[doc(alias = "ibv_get_async_event")]
#[derive(Clone)]
pub struct Worker {
    pub(crate) inner: Arc<WorkerInner>,
}

pub(crate) struct WorkerInner {
    state: Mutex<State>,
    pool: Pool,
    /// Eight bytes each, for what the atomics bring back.
    cells: Pool,
    pd: ProtectionDomain,
    poller: Arc<Poller>,
    spin_time: Duration,
    /// A task of a runtime polls it.
    #[cfg(feature = "tokio")]
    driven: AtomicBool,
}

/// What a foreign event loop has to do, see [`Worker::prepare_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// There is something to do: [`poll`](Worker::poll).
    Ready,
    /// The loop may sleep until the worker's descriptor is readable; for ever, for the worker's own
    /// timers make it readable as well.
    MayWait,
}

impl Worker {
    /// Makes a worker on a device.
    ///
    /// # Errors
    ///
    /// [`OpenError::Verbs`] if the device cannot make a completion queue of that depth or register
    /// the pool (the error then names the limit on locked memory); [`OpenError::Io`] if the process
    /// has no descriptors left.
    pub fn new(context: &Context, config: &WorkerConfig) -> Result<Worker, OpenError> {
        let poller = Arc::new(Poller::new()?);
        let pd = ProtectionDomain::new(context)?;
        let channel = CompletionChannel::new(context)?;
        let cq = CompletionQueue::new(context, config.max_in_flight.max(1), Some(&channel))?;
        poller.add_completions(channel.as_fd())?;
        let kick = Arc::clone(&poller);
        let pool = Pool::new(&pd, config.buf_size, config.buf_count, move || kick.kick())?;
        let cells = Pool::new(
            &pd,
            size_of::<u64>(),
            CELLS.min(config.max_in_flight as usize),
            || (),
        )?;
        let mut state = State::new(
            config.max_in_flight,
            cq,
            channel,
            Arc::clone(&poller),
            &pool,
            pd.clone(),
        );
        state.device = Membership::new(context, &state.cq, &state.poller);
        let spin_time = config.wait.spin_time();
        let state = Mutex::new(state);
        Ok(Worker {
            inner: Arc::new(WorkerInner {
                state,
                pool,
                cells,
                pd,
                poller,
                spin_time,
                #[cfg(feature = "tokio")]
                driven: AtomicBool::new(false),
            }),
        })
    }

    /// Makes a worker on the device that has the local address `local`.
    ///
    /// # Errors
    ///
    /// [`OpenError::Cm`] if no RDMA device has it; those of [`Worker::new`].
    pub fn for_addr(local: SocketAddr, config: &WorkerConfig) -> Result<Worker, OpenError> {
        Worker::new(&rdma_cm::context_for(local)?, config)
    }

    /// The device.
    pub fn context(&self) -> &Context {
        self.inner.pd.context()
    }

    /// A buffer with `len` bytes in use: from the pool, or, if `len` is more than the pool's buffers
    /// have, registered on its own (which is slow, and freed on drop).
    ///
    /// The bytes are what was there before, of another peer perhaps: fill all of them before sending.
    ///
    /// # Errors
    ///
    /// [`PoolError::Empty`] if the pool has none left, [`PoolError::Register`].
    #[inline]
    pub fn alloc(&self, len: usize) -> Result<Buf, PoolError> {
        self.inner.alloc(len)
    }

    /// How many buffers the pool has left.
    pub fn available(&self) -> usize {
        self.inner.pool.available()
    }

    /// How many buffers the pool has altogether, and the bytes of each.
    pub fn pool_size(&self) -> (usize, usize) {
        (self.inner.pool.count(), self.inner.pool.slot_size())
    }

    /// Zeroed memory that peers may access as `access` says, once they have its
    /// [`descriptor`](SharedRegion::descriptor): any peer of any endpoint of this worker.
    ///
    /// # Errors
    ///
    /// See [`SharedRegion::alloc`].
    pub fn expose(&self, len: usize, access: Access) -> rdma_core_rs::Result<SharedRegion> {
        SharedRegion::alloc(&self.inner.pd, len, access)
    }

    /// Makes progress without waiting; how many completions there were.
    ///
    /// Only for programs that never wait through this library: a foreign event loop, or a loop that
    /// looks at many endpoints in turn. Completions are looked at each time; the connection manager
    /// and the timers once in a while, and always in [`prepare_wait`](Worker::prepare_wait).
    pub fn poll(&self) -> usize {
        let caller = wait::thread_key();
        self.inner.with(|state| {
            let count = state.poll_step();
            if state.looper == caller {
                state.news = false; // the loop looks now
            }
            count
        })
    }

    /// A poll by the driver, which needs no news: all who wait on its worker have wakers.
    #[cfg(feature = "tokio")]
    pub(crate) fn turn(&self) {
        self.inner.with(|state| {
            state.poll_step();
            state.tend_for_loop();
            state.news = false;
        });
    }

    /// Prepares for a sleep of a foreign event loop: handles what the connection manager, the timers
    /// and the device have, arms the completion queue and polls it again.
    ///
    /// The loop is: [`poll`](Worker::poll) and do what is to be done; then this; if it says
    /// [`MayWait`](Readiness::MayWait), sleep until the worker's descriptor
    /// ([`AsFd`](Worker::as_fd)) is readable; again. The descriptor can be watched level- or
    /// edge-triggered. It must not be read.
    ///
    /// Whatever looks at an endpoint or operation may handle news of *another* one that the loop has
    /// looked at before in the same turn; this says [`Ready`](Readiness::Ready) then, for one more.
    ///
    /// A worker has one such loop, which may move from thread to thread. Other threads may post,
    /// [`poll`](Worker::poll) and close meanwhile, and the loop hears of what they handled. If one of
    /// them *waits* on the worker, the loop hears of that when the wait ends; its wakers are woken at
    /// once.
    pub fn prepare_wait(&self) -> Readiness {
        let caller = wait::thread_key();
        self.inner.with(|state| {
            // Not in `poll`, which anybody may call while the loop sleeps.
            state.tend_for_loop();
            state.foreign = true;
            state.looper = caller;
            let may_sleep = state.prepare_sleep();
            // What came since the loop looked may be about something it had already looked at.
            if mem::take(&mut state.news) || !may_sleep {
                return Readiness::Ready;
            }
            Readiness::MayWait
        })
    }

    /// The worker's counters.
    pub fn stats(&self) -> WorkerStats {
        self.inner.with(|state| {
            WorkerStats::new(
                &state.tracker.total(),
                state.tracker.stale(),
                &state.counters,
                state.device.as_ref().map_or(0, Membership::count),
            )
        })
    }

    /// Operations that are in flight, or have ended without their result having been fetched.
    pub fn open_operations(&self) -> usize {
        self.inner.with(|state| state.tracker.records())
    }
}

impl AsFd for Worker {
    /// Readable when [`poll`](Worker::poll) has something to do, after
    /// [`prepare_wait`](Worker::prepare_wait). It is an epoll set.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.poller.as_fd()
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("pool", &self.pool_size())
            .finish_non_exhaustive()
    }
}

/// Cells for atomics in flight; more of them wait for a cell.
const CELLS: usize = 1024;

impl WorkerInner {
    /// Runs `work` on the state; then, with the lock released, wakes who is to be woken and drops what
    /// takes long to drop.
    #[inline(always)]
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = work(&mut state);
        self.release(state);
        result
    }

    #[inline(always)]
    fn release(&self, state: MutexGuard<'_, State>) {
        if !state.wakers.is_empty() {
            self.clean_up(state);
        }
    }

    /// Looks at `watch`, after a poll unless it is there.
    #[inline(always)]
    pub(crate) fn look<W: Watch>(&self, watch: &mut W) -> Option<W::Output> {
        // Not by `with`: what is looked for is built where the caller wants it.
        let mut state = self.lock();
        if !watch.is_there(&state) {
            state.poll_step();
        }
        let output = watch.check(&mut state);
        self.release(state);
        output
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code but the logger, which must not panic, runs under the lock: another panic there
        // would be a broken invariant of ours.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    fn clean_up(&self, mut state: MutexGuard<'_, State>) {
        let mut wakers = mem::take(&mut state.wakers);
        let _dropped_last = mem::take(&mut state.dead);
        drop(state);
        for waker in wakers.drain(..) {
            if !wait::run_foreign(|| waker.wake()) {
                log::error!(
                    "a waker panicked; the operation it waits for has its result all the same"
                );
            }
        }
        // Gives the allocation back.
        let mut state = self.lock();
        if state.wakers.capacity() < wakers.capacity() && state.wakers.is_empty() {
            state.wakers = wakers;
        }
    }

    #[inline]
    pub(crate) fn alloc(&self, len: usize) -> Result<Buf, PoolError> {
        if len <= self.pool.slot_size() {
            return self.pool.take(len);
        }
        Ok(Buf::from_slice(RegionSlice::alloc(&self.pd, len)?))
    }

    /// Registers the bytes of a `Vec` where they are.
    pub(crate) fn adopt(&self, bytes: Vec<u8>) -> Result<Buf, PoolError> {
        Ok(Buf::from_slice(RegionSlice::from_vec(&self.pd, bytes)?))
    }

    /// Whether the buffer is registered for the endpoints of this worker.
    #[inline]
    pub(crate) fn can_use(&self, buf: &Buf) -> bool {
        buf.is_of(&self.pd)
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    #[inline]
    pub(crate) fn cell(&self) -> Result<Buf, PoolError> {
        self.cells.take(size_of::<u64>())
    }

    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    pub(crate) fn spin_time(&self) -> Duration {
        self.spin_time
    }
}

#[cfg(feature = "tokio")]
impl WorkerInner {
    pub(crate) fn poller_arc(&self) -> Arc<Poller> {
        Arc::clone(&self.poller)
    }

    /// Takes note whether a task polls it; what it was before.
    pub(crate) fn set_driven(&self, driven: bool) -> bool {
        self.driven.swap(driven, Ordering::AcqRel)
    }
}

impl Drop for WorkerInner {
    fn drop(&mut self) {
        // Whoever still watches the descriptor comes round, and sees that the worker is gone.
        self.poller.kick();
    }
}

/// Counters of what is not about one operation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) completions: u64,
    pub(crate) polls: u64,
    pub(crate) empty_polls: u64,
    pub(crate) sleeps: u64,
    pub(crate) arms: u64,
    pub(crate) events: u64,
    pub(crate) kicks: u64,
    pub(crate) leaked: u64,
}

/// Everything that the mutex protects.
pub(crate) struct State {
    /// Before `tracker`: queue pairs go before the buffers that their NIC may use (I1).
    pub(crate) endpoints: Slab<Ep>,
    pub(crate) tracker: Tracker<Payload>,
    pub(crate) cq: CompletionQueue,
    /// Where a poll puts what it fetches.
    batch: [WorkCompletion; BATCH],
    channel: CompletionChannel,
    poller: Arc<Poller>,
    pub(crate) pool: Arc<pool::Shared>,
    pub(crate) pd: ProtectionDomain,
    /// Endpoints whose life has to be looked at after the batch.
    pub(crate) attention: Vec<u32>,
    /// Endpoints that lack receives since the pool was dry, the one whose turn it is first.
    pub(crate) dry: VecDeque<u32>,
    timers: BTreeSet<(Instant, Timer)>,
    /// When the poller reports an alarm: never later than the first timer. (It can be earlier, when
    /// that timer is gone; then there is nothing to do.)
    alarm: Option<Instant>,
    pub(crate) wakers: Vec<Waker>,
    /// To be dropped once the lock is released. Only looked at if there are wakers as well.
    dead: Vec<Link>,
    /// An event will be raised by the next completion, or one was and has not been fetched.
    armed: bool,
    has_leader: bool,
    followers: Waiters,
    /// A foreign loop looks at the descriptor, or may sleep on it: what makes it readable is the loop's
    /// to take, or it has to be kicked.
    foreign: bool,
    /// The thread of the foreign loop, as far as is known.
    looper: u64,
    /// Something came, of any endpoint, since the foreign loop was last told to look.
    pub(crate) news: bool,
    /// Grows with each poll; the connection manager and the timers are looked at when it is due.
    untended: u32,
    pub(crate) counters: Counters,
    pub(crate) device: Option<Membership>,
    /// What has broken all of it, so that nothing can be begun any more.
    pub(crate) failed: Option<Cause>,
}

/// What has its time, and of which endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// The endpoint is to be looked at.
    Life(u32),
    /// Its connection manager is to be asked again.
    AskAgain(u32),
}

/// Completions that are fetched at once.
const BATCH: usize = 16;

/// Batches that are handled in one step, so that a busy queue does not keep a thread for ever.
const BATCHES_PER_STEP: usize = 16;

/// Polls after which the connection manager is asked for news although nobody slept. An empty poll
/// counts more, since then there is time for it.
const TEND_AFTER: u32 = 1 << 14;
const EMPTY_POLL: u32 = 16;

impl State {
    fn new(
        cq_depth: u32,
        cq: CompletionQueue,
        channel: CompletionChannel,
        poller: Arc<Poller>,
        pool: &Pool,
        pd: ProtectionDomain,
    ) -> State {
        State {
            endpoints: Slab::new(),
            tracker: Tracker::new(cq_depth.min(cq.capacity())),
            cq,
            batch: [WorkCompletion::default(); BATCH],
            channel,
            poller,
            pool: pool.shared(),
            pd,
            attention: Vec::new(),
            dry: VecDeque::new(),
            timers: BTreeSet::new(),
            alarm: None,
            wakers: Vec::new(),
            dead: Vec::new(),
            armed: false,
            has_leader: false,
            followers: Waiters::default(),
            foreign: false,
            looper: 0,
            news: false,
            untended: 0,
            counters: Counters::default(),
            device: None,
            failed: None,
        }
    }

    /// Makes room for what one more endpoint can put into the lists, so that nothing is allocated
    /// while completions are handled.
    pub(crate) fn make_room(&mut self, operations: usize) {
        let endpoints = self.endpoints.len() + 1;
        self.attention.reserve(endpoints);
        self.dry.reserve(endpoints);
        let wanted = self.tracker.records_reserved() + operations + 4 * endpoints;
        self.wakers.reserve(wanted);
    }

    /// One step of progress: completions, and once in a while everything else.
    #[inline]
    pub(crate) fn poll_step(&mut self) -> usize {
        let count = self.poll();
        self.untended += if count == 0 { EMPTY_POLL } else { 1 };
        if self.untended >= TEND_AFTER {
            self.tend();
        }
        count
    }

    /// Handles the completions that are there, then what they mean for their endpoints.
    #[inline]
    pub(crate) fn poll(&mut self) -> usize {
        let count = self.poll_completions();
        if !self.attention.is_empty() {
            self.attend();
        }
        count
    }

    /// Handles completions; endpoints are only marked. Safe to be called from whatever is done about
    /// an endpoint.
    #[inline(never)] // the one frame below whoever looks for something
    pub(crate) fn poll_completions(&mut self) -> usize {
        let mut total = 0;
        self.counters.polls += 1;
        for _ in 0..BATCHES_PER_STEP {
            let count = match self.cq.poll(&mut self.batch) {
                Ok(batch) => batch.len(),
                Err(error) => {
                    self.queue_failed("polling it", &error);
                    0
                }
            };
            for i in 0..count {
                self.dispatch(i);
            }
            total += count;
            if count < BATCH {
                break;
            }
        }
        self.counters.completions += total as u64;
        self.counters.empty_polls += u64::from(total == 0);
        total
    }

    /// Handles every completion that is there, however many they are: what ends an endpoint must not
    /// leave some behind, and a place in the queue is free only once its entry was fetched (I7).
    #[cold]
    pub(crate) fn poll_until_empty(&mut self) {
        let mut left = self.cq.capacity() as usize;
        loop {
            let count = self.poll_completions();
            // More than the queue can hold has come in meanwhile: that is others' traffic.
            if count < BATCH * BATCHES_PER_STEP || left < count {
                return;
            }
            left -= count;
        }
    }

    /// Hands the completion with that place in the batch to its record. Nothing in here can fail or run
    /// foreign code, the logger excepted, so a batch is always handled to its end.
    #[inline]
    fn dispatch(&mut self, place: usize) {
        self.news = true;
        let wc = &self.batch[place];
        let (wr_id, qp_num, wakers) = (wc.wr_id(), wc.qp_num(), &mut self.wakers);
        match wc.success() {
            Ok(success) => {
                let ending = Ending::Success(Success {
                    byte_len: success.byte_len(),
                    imm: success.imm_data(),
                    written: success.opcode() == WcOpcode::RecvRdmaWithImm,
                });
                let matched = self.tracker.complete(wr_id, qp_num, ending, wakers);
                self.matched(matched, place);
            }
            Err(failure) => self.dispatch_failure(place, &failure),
        }
    }

    #[cold]
    fn dispatch_failure(&mut self, place: usize, failure: &rdma_core_rs::Failure) {
        let ending = if failure.is_flush() {
            Ending::Flushed
        } else {
            Ending::Failed {
                status: failure.status,
                vendor_err: failure.vendor_err,
            }
        };
        let (wr_id, qp_num) = (failure.wr_id, failure.qp_num);
        let matched = self
            .tracker
            .complete(wr_id, qp_num, ending, &mut self.wakers);
        self.matched(matched, place);
    }

    #[inline(always)]
    fn matched(&mut self, matched: Matched<Payload>, place: usize) {
        match matched {
            Matched::Kept { owner, news } => self.note(owner, news),
            Matched::Inbox {
                owner,
                news,
                buf,
                ending,
            } => {
                if let Ending::Success(success) = ending {
                    self.deliver(owner, buf, success);
                }
                self.note(owner, news);
            }
            Matched::Stale => stale(&self.batch[place]),
        }
    }

    /// Marks an endpoint whose life may change by what has just completed.
    #[inline]
    fn note(&mut self, owner: u32, news: News) {
        let Some(ep) = self.endpoints.get_mut(owner as usize) else {
            return;
        };
        ep.broken |= news != News::Fine;
        // Nothing but receives is posted while it opens.
        ep.first_receive |= news == News::Fine && ep.life == lifecycle::State::Opening;
        if (ep.broken || ep.is_watched()) && !mem::replace(&mut ep.marked, true) {
            self.attention.push(owner);
        }
    }

    /// Has a connection dropped where no lock is held: it takes milliseconds. From here on nobody hears
    /// of it any more.
    pub(crate) fn bury(&mut self, link: Link) {
        if let Some(fd) = link.fd() {
            self.poller.remove(fd);
        }
        self.dead.push(link);
        self.wakers.push(Waker::noop().clone());
    }

    pub(crate) fn has_dead(&self) -> bool {
        !self.dead.is_empty()
    }

    /// Has an endpoint looked at after the batch.
    pub(crate) fn mark(&mut self, index: u32) {
        if let Some(ep) = self.endpoints.get_mut(index as usize)
            && !mem::replace(&mut ep.marked, true)
        {
            self.attention.push(index);
        }
    }

    #[cold]
    pub(crate) fn attend(&mut self) {
        while let Some(index) = self.attention.pop() {
            self.review(index);
        }
    }

    /// Without its completion queue the worker is of no use: no outcome could be known.
    #[cold]
    fn queue_failed(&mut self, what: &str, error: &rdma_core_rs::Error) {
        if self.failed.is_none() {
            log::error!("the completion queue failed: {what}: {error}");
        }
        self.fail_for_good(Cause::CompletionQueueError);
    }

    /// Ends every endpoint that is not over; the worker takes no more. (Those that are over would be
    /// looked at for ever, if polling went on to fail.)
    pub(crate) fn fail_for_good(&mut self, cause: Cause) {
        let cause = self.failed.get_or_insert(cause).clone();
        for (index, ep) in &mut self.endpoints {
            if ep.life.is_over() {
                continue;
            }
            ep.bad_news.get_or_insert_with(|| cause.clone());
            if !mem::replace(&mut ep.marked, true) {
                self.attention.push(index as u32);
            }
        }
    }

    /// As `tend`, by the loop that may have slept on the descriptor.
    fn tend_for_loop(&mut self) {
        if mem::take(&mut self.foreign) {
            self.tend();
        }
    }

    /// Looks at everything that is not a completion, without waiting.
    #[cold]
    pub(crate) fn tend(&mut self) {
        let mut calmed = false;
        loop {
            let batch = self.poller.wait(Some(Duration::ZERO));
            calmed |= !self.has_leader && batch.iter().any(|ready| ready == Ready::Kick);
            self.handle(&batch);
            if !batch.is_full() {
                break;
            }
        }
        // The event that would have woken a sleeper, or the kick that was meant for it, may just have
        // been fetched here: it has to come round and arm again, or it would sleep for ever. So may what
        // a foreign loop has to look at.
        let others = self.foreign || self.has_leader;
        if (!self.armed || calmed) && others || self.foreign && self.news {
            self.poller.kick();
        }
    }

    /// Handles what a wait brought: completions first, timers last.
    pub(crate) fn handle(&mut self, batch: &Batch) {
        self.untended = 0;
        for ready in batch.iter() {
            if ready == Ready::Completions {
                self.fetch_event();
            }
        }
        self.poll();
        let mut alarm = false;
        for ready in batch.iter() {
            match ready {
                Ready::Completions => {}
                Ready::Alarm => alarm = true,
                Ready::Kick => {
                    self.counters.kicks += 1;
                    // A kick may be meant for the leader, who would go on sleeping without it.
                    if !self.has_leader {
                        self.poller.calm();
                    }
                    self.refill_dry();
                    self.device_mail();
                }
                Ready::Device => self.device_news(),
                Ready::Endpoint(index) => self.link_news(index),
            }
        }
        if alarm {
            self.alarm_rang();
        }
        if !self.attention.is_empty() {
            self.attend();
        }
    }

    /// Fetches the event that an arm raised. There is one for each arm, so the channel need not be
    /// read until it would block.
    fn fetch_event(&mut self) {
        match self.channel.try_event() {
            Ok(Some(_)) => {
                self.armed = false;
                self.counters.events += 1;
            }
            Ok(None) => {}
            Err(error) => self.queue_failed("fetching its event", &error),
        }
    }

    /// Arms the completion queue and polls it again. Whether one may sleep then.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        if !self.armed {
            self.counters.arms += 1;
            match self.cq.req_notify(false) {
                Ok(()) => self.armed = true,
                Err(error) => self.queue_failed("arming it", &error),
            }
        }
        self.poll() == 0 && self.attention.is_empty()
    }

    /// Sets when an endpoint has to be looked at, in place of the time before.
    pub(crate) fn set_timer(&mut self, index: u32, at: Option<Instant>) {
        let old = mem::replace(&mut self.endpoints[index as usize].timer, at);
        self.change_timer(Timer::Life(index), old, at);
    }

    /// Sets when its connection manager has to be asked again, in place of the time before.
    pub(crate) fn set_ask_again(&mut self, index: u32, at: Option<Instant>) {
        let old = mem::replace(&mut self.endpoints[index as usize].ask_again, at);
        self.change_timer(Timer::AskAgain(index), old, at);
    }

    fn change_timer(&mut self, timer: Timer, old: Option<Instant>, at: Option<Instant>) {
        if let Some(old) = old {
            self.timers.remove(&(old, timer));
        }
        if let Some(at) = at {
            self.timers.insert((at, timer));
            self.set_alarm();
        }
    }

    /// Has whoever sleeps woken for the first timer.
    fn set_alarm(&mut self) {
        if let Some(&(first, _)) = self.timers.first()
            && self.alarm.is_none_or(|alarm| first < alarm)
        {
            self.alarm = Some(first);
            self.poller.set_alarm(first);
        }
    }

    #[cold]
    fn alarm_rang(&mut self) {
        self.poller.calm_alarm();
        self.alarm = None;
        self.run_timers(Instant::now());
        self.set_alarm();
    }

    fn run_timers(&mut self, now: Instant) {
        while let Some(&(at, timer)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let (Timer::Life(index) | Timer::AskAgain(index)) = timer;
            let Some(ep) = self.endpoints.get_mut(index as usize) else {
                continue;
            };
            match timer {
                Timer::Life(_) => {
                    ep.timer = None;
                    self.timer_ran_out(index, now);
                }
                Timer::AskAgain(_) => {
                    ep.ask_again = None;
                    self.connection_news(index);
                }
            }
        }
    }

    pub(crate) fn poller(&self) -> Arc<Poller> {
        Arc::clone(&self.poller)
    }

    pub(crate) fn poller_ref(&self) -> &Poller {
        &self.poller
    }
}

#[cold]
fn stale(wc: &WorkCompletion) {
    log::warn!("a completion that matches no operation was ignored: {wc:?}");
}

/// Leader and followers, see [`wait`](crate::wait).
impl State {
    pub(crate) fn has_leader(&self) -> bool {
        self.has_leader
    }

    pub(crate) fn start_leading(&mut self) {
        self.counters.sleeps += 1;
        self.has_leader = true;
    }

    pub(crate) fn stop_leading(&mut self) {
        self.has_leader = false;
    }

    pub(crate) fn add_follower(&mut self, key: u64, waker: Waker) {
        drop(self.followers.set(key, waker)); // a thread's waker: dropping it runs nothing foreign
    }

    pub(crate) fn remove_follower(&mut self, key: u64) {
        drop(self.followers.remove(key));
    }

    /// Called by a thread that waits no longer: somebody else has to sleep for the rest.
    #[inline]
    pub(crate) fn pass_the_lead(&mut self) {
        if self.has_leader {
            return;
        }
        if let Some(next) = self.followers.pop() {
            self.wakers.push(next);
        } else if self.foreign {
            // A foreign loop has left the events and the timers to the leader.
            self.poller.kick();
        }
    }
}
