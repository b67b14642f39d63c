//! How threads and futures wait, whatever they wait for.
//!
//! Everything one can wait for is a [`Watch`]: a look at the worker's state, and a place for a waker.
//! On top of it lie a blocking wait and a `poll` for futures, and nothing else.
//!
//! # Threads: leader and followers
//!
//! A thread that finds nothing polls for a while (as its worker's [`Wait`](crate::Wait) says) and
//! sleeps then. One thread, the *leader*, sleeps in `epoll_wait` for all; others that come to sleep
//! park until their own watch is woken by whoever handles their completion. A leader that leaves
//! wakes a follower to take its place, so nobody is left without one.
//!
//! Before the leader sleeps it arms the completion queue **and then polls it again**: a completion
//! that came in between raises no event. One arm raises one event, so one event is fetched for it,
//! and the channel is never read until it would block. A wake-up costs three system calls: the sleep,
//! fetching the event, arming. Nothing else is asked of the kernel: timers of the worker's own are
//! one alarm in what the leader sleeps on, which is set when one becomes the earliest.

use std::cell::OnceCell;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use crate::poller::Poller;
use crate::worker::{State, WorkerInner};

/// Something that can be waited for.
pub(crate) trait Watch {
    type Output;

    /// Whether a check would succeed, if that is cheap to tell: then nothing is polled for it.
    #[inline]
    fn is_there(&self, _state: &State) -> bool {
        false
    }

    /// Whether it is there.
    fn check(&mut self, state: &mut State) -> Option<Self::Output>;

    /// Has `waker` woken when a check may succeed; what is not needed (any more) comes back, to be
    /// dropped where no lock is held.
    fn register(&mut self, state: &mut State, key: u64, waker: Waker) -> Option<Waker>;

    /// Takes the waker of `key` back.
    fn unregister(&mut self, state: &mut State, key: u64) -> Option<Waker>;
}

/// One poll of a future.
pub(crate) fn poll<W: Watch>(
    worker: &WorkerInner,
    watch: &mut W,
    key: u64,
    cx: &mut Context<'_>,
) -> Poll<W::Output> {
    if let Some(output) = worker.look(watch) {
        return Poll::Ready(output);
    }
    let mut waker = Some(cx.waker().clone());
    let (output, old) = worker.with(|state| match watch.check(state) {
        Some(output) => (Some(output), None),
        None => (
            None,
            waker
                .take()
                .and_then(|waker| watch.register(state, key, waker)),
        ),
    });
    drop((old, waker)); // where no lock is held
    output.map_or(Poll::Pending, Poll::Ready)
}

/// Waits until `watch` is there (`Some`) or `deadline` has passed (`None`).
#[inline(always)] // each caller is compiled once, and what it waits for is moved less
pub(crate) fn wait<W: Watch>(
    worker: &WorkerInner,
    watch: &mut W,
    deadline: Option<Instant>,
) -> Option<W::Output> {
    if let Some(output) = worker.look(watch) {
        return Some(output);
    }
    wait_long(worker, watch, deadline)
}

#[inline(never)]
fn wait_long<W: Watch>(
    worker: &WorkerInner,
    watch: &mut W,
    deadline: Option<Instant>,
) -> Option<W::Output> {
    match spin(worker, watch, deadline) {
        Spun::Found(output) => Some(output),
        Spun::TimedOut => None,
        Spun::Tired => PARKER.with(|parker| {
            let parker = parker.get_or_init(Parker::new);
            sleep(worker, watch, deadline, parker)
        }),
    }
}

enum Spun<T> {
    Found(T),
    TimedOut,
    Tired,
}

/// Polls for as long as the worker's setting says. The clock is read once in a while only.
fn spin<W: Watch>(
    worker: &WorkerInner,
    watch: &mut W,
    deadline: Option<Instant>,
) -> Spun<W::Output> {
    let spin_time = worker.spin_time();
    if spin_time.is_zero() {
        return Spun::Tired;
    }
    let start = Instant::now();
    let end = start.checked_add(spin_time);
    loop {
        for _ in 0..LOOKS_PER_CLOCK {
            if let Some(output) = worker.look(watch) {
                return Spun::Found(output);
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Spun::TimedOut;
        }
        if end.is_none_or(|end| now >= end) {
            return Spun::Tired;
        }
    }
}

const LOOKS_PER_CLOCK: usize = 16;

/// What a thread that wants to sleep has to do.
enum Turn<T> {
    Done(Option<T>),
    Again,
    /// Sleep in `epoll_wait`, for all.
    Lead,
    /// Park until woken.
    Follow,
}

fn sleep<W: Watch>(
    worker: &WorkerInner,
    watch: &mut W,
    deadline: Option<Instant>,
    parker: &Arc<Parker>,
) -> Option<W::Output> {
    loop {
        let (turn, old) = worker.with(|state| {
            let mut old = None;
            (next_turn(state, watch, deadline, parker, &mut old), old)
        });
        drop_guarded(old);
        match turn {
            Turn::Done(output) => return output,
            Turn::Again => {}
            Turn::Lead => {
                if let Some(output) = lead(worker, watch, deadline, parker) {
                    return Some(output);
                }
            }
            Turn::Follow => {
                parker.park(deadline);
                let (output, old) = worker.with(|state| stop_following(state, watch, parker));
                drop(old);
                if output.is_some() {
                    return output;
                }
            }
        }
    }
}

/// Runs foreign code; whether it did not panic. What it panicked with is not dropped, for that could panic,
/// too.
pub(crate) fn run_foreign(code: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(code))
        .map_err(mem::forget)
        .is_ok()
}

/// A panic in a foreign waker's drop must not take the leader away from the others.
fn drop_guarded(old: Option<Waker>) {
    if old.is_some() && !run_foreign(|| drop(old)) {
        log::error!("a waker panicked while it was dropped");
    }
}

/// `old` gets the waker that was registered before, which may be a task's, to be dropped where no lock
/// is held.
/// Whoever comes here has polled, and who goes on to sleep polls again once the queue is armed.
fn next_turn<W: Watch>(
    state: &mut State,
    watch: &mut W,
    deadline: Option<Instant>,
    parker: &Arc<Parker>,
    old: &mut Option<Waker>,
) -> Turn<W::Output> {
    if let Some(output) = watch.check(state) {
        state.pass_the_lead();
        return Turn::Done(Some(output));
    }
    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
        state.pass_the_lead();
        return Turn::Done(None);
    }
    if state.has_leader() {
        parker.arm(None);
        *old = watch.register(state, parker.key, parker.waker());
        state.add_follower(parker.key, parker.waker());
        return Turn::Follow;
    }
    if !state.prepare_sleep() {
        return Turn::Again;
    }
    // The arming poll may have brought it.
    if let Some(output) = watch.check(state) {
        state.pass_the_lead();
        return Turn::Done(Some(output));
    }
    parker.arm(Some(state.poller()));
    *old = watch.register(state, parker.key, parker.waker());
    state.start_leading();
    Turn::Lead
}

/// Sleeps for everybody, and handles what woke it.
fn lead<W: Watch>(
    worker: &WorkerInner,
    watch: &mut W,
    deadline: Option<Instant>,
    parker: &Parker,
) -> Option<W::Output> {
    let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let batch = worker.poller().wait(timeout);
    parker.disarm();
    worker.with(|state| {
        let _own = watch.unregister(state, parker.key);
        state.stop_leading();
        state.handle(&batch);
        let output = watch.check(state);
        // What is dropped once the lock is released takes long: another one leads meanwhile.
        if output.is_some() || state.has_dead() {
            state.pass_the_lead();
        }
        output
    })
}

fn stop_following<W: Watch>(
    state: &mut State,
    watch: &mut W,
    parker: &Parker,
) -> (Option<W::Output>, Option<Waker>) {
    state.remove_follower(parker.key);
    let old = watch.unregister(state, parker.key);
    let output = watch.check(state);
    if output.is_some() {
        state.pass_the_lead();
    }
    (output, old)
}

/// A key for a waker that is registered in a list.
pub(crate) fn new_key() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

thread_local! {
    static PARKER: OnceCell<Arc<Parker>> = const { OnceCell::new() };
}

/// The key of the calling thread; no two threads ever have the same.
pub(crate) fn thread_key() -> u64 {
    PARKER.with(|parker| parker.get_or_init(Parker::new).key)
}

/// The waker of a thread, made once per thread. It ends the thread's parking, or its sleep in
/// `epoll_wait` if it leads.
struct Parker {
    thread: Thread,
    key: u64,
    woken: AtomicBool,
    leads: Mutex<Option<Arc<Poller>>>,
}

impl Parker {
    fn new() -> Arc<Parker> {
        Arc::new(Parker {
            thread: thread::current(),
            key: new_key(),
            woken: AtomicBool::new(false),
            leads: Mutex::new(None),
        })
    }

    fn waker(self: &Arc<Parker>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    /// From here on a wake is remembered.
    fn arm(&self, leads: Option<Arc<Poller>>) {
        self.woken.store(false, Ordering::Relaxed);
        *self.leads.lock().unwrap_or_else(PoisonError::into_inner) = leads;
    }

    fn disarm(&self) {
        *self.leads.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Parks until woken or `deadline`.
    fn park(&self, deadline: Option<Instant>) {
        while !self.woken.load(Ordering::Acquire) {
            match deadline {
                None => thread::park(),
                Some(deadline) => {
                    let now = Instant::now();
                    if now >= deadline {
                        return;
                    }
                    thread::park_timeout(deadline - now);
                }
            }
        }
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        match &*self.leads.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(poller) => poller.kick(),
            None => self.thread.unpark(),
        }
    }
}

/// Wakers of those who wait for one thing.
#[derive(Default)]
pub(crate) struct Waiters(Vec<(u64, Waker)>);

impl Waiters {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn set(&mut self, key: u64, waker: Waker) -> Option<Waker> {
        match self.0.iter_mut().find(|(other, _)| *other == key) {
            Some((_, old)) => Some(std::mem::replace(old, waker)),
            None => {
                self.0.push((key, waker));
                None
            }
        }
    }

    pub(crate) fn remove(&mut self, key: u64) -> Option<Waker> {
        let index = self.0.iter().position(|(other, _)| *other == key)?;
        Some(self.0.swap_remove(index).1)
    }

    pub(crate) fn pop(&mut self) -> Option<Waker> {
        self.0.pop().map(|(_, waker)| waker)
    }

    #[inline]
    pub(crate) fn wake_all(&mut self, wakers: &mut Vec<Waker>) {
        wakers.extend(self.0.drain(..).map(|(_, waker)| waker));
    }
}
