//! The one descriptor behind a worker: an epoll set of the completion channel, the connection
//! manager's channel of each endpoint, the device's asynchronous events, an eventfd with which other
//! threads end a sleep, and a timerfd for the worker's timers. With that a sleep has no timeout of its
//! own: no clock is read for it, and the kernel starts no timer for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rdma_core_rs::{AsyncEvents, Birth};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
#[cfg(not(miri))]
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

/// What became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The completion queue raised an event.
    Completions,
    /// Somebody called [`Poller::kick`].
    Kick,
    /// The time has come that was given to [`Poller::set_alarm`].
    Alarm,
    /// The connection manager has news of this endpoint.
    Endpoint(u32),
    /// The device has asynchronous events.
    Device,
}

/// What became ready during one wait.
pub(crate) struct Batch {
    events: [epoll::Event; Batch::CAPACITY],
    count: usize,
}

impl Batch {
    const CAPACITY: usize = 8;

    pub(crate) fn iter(&self) -> impl Iterator<Item = Ready> {
        self.events[..self.count]
            .iter()
            .map(|event| match event.data.u64() {
                COMPLETIONS => Ready::Completions,
                KICK => Ready::Kick,
                DEVICE => Ready::Device,
                ALARM => Ready::Alarm,
                endpoint => Ready::Endpoint(endpoint as u32),
            })
    }

    /// Whether there may be more.
    pub(crate) fn is_full(&self) -> bool {
        self.count == Batch::CAPACITY
    }
}

/// Level-triggered, so that a kick which one thread sees is still there for the one it is meant for.
/// Miri knows edges only; they do as long as one thread waits.
const FLAGS: epoll::EventFlags = if cfg!(miri) {
    epoll::EventFlags::IN.union(epoll::EventFlags::ET)
} else {
    epoll::EventFlags::IN
};

const COMPLETIONS: u64 = u64::MAX;
const KICK: u64 = u64::MAX - 1;
const DEVICE: u64 = u64::MAX - 2;
const ALARM: u64 = u64::MAX - 3;

/// See the [module's documentation](self).
///
/// A child of `fork` shares all of it with its parent, so nothing is changed there: its drops would take
/// the parent's descriptors out of the set.
pub(crate) struct Poller {
    birth: Birth,
    epoll: OwnedFd,
    kick: OwnedFd,
    alarm: Alarm,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Poller> {
        let poller = Poller {
            birth: Birth::now(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            alarm: Alarm::new()?,
        };
        poller.add(poller.kick.as_fd(), KICK)?;
        #[cfg(not(miri))]
        poller.add(poller.alarm.0.as_fd(), ALARM)?;
        Ok(poller)
    }

    /// Whether this is still the process that made it.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    pub(crate) fn add_completions(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.add(fd, COMPLETIONS)
    }

    pub(crate) fn add_endpoint(&self, fd: BorrowedFd<'_>, index: u32) -> io::Result<()> {
        self.add(fd, index.into())
    }

    /// Whether anything is reported of an endpoint's descriptor, which stays in the set.
    pub(crate) fn watch_endpoint(&self, fd: BorrowedFd<'_>, index: u32, watched: bool) {
        if !self.birth.is_here() {
            return;
        }
        let data = epoll::EventData::new_u64(index.into());
        let flags = match watched {
            true => FLAGS,
            false => FLAGS.difference(epoll::EventFlags::IN),
        };
        if let Err(error) = epoll::modify(&self.epoll, fd, data, flags) {
            log::warn!("epoll_ctl: {error}");
        }
    }

    pub(crate) fn add_device(&self, events: &AsyncEvents) -> io::Result<()> {
        self.add(events.as_fd(), DEVICE)
    }

    pub(crate) fn remove_device(&self, events: &AsyncEvents) {
        self.remove(events.as_fd());
    }

    fn add(&self, fd: BorrowedFd<'_>, data: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(data);
        Ok(epoll::add(&self.epoll, fd, data, FLAGS)?)
    }

    /// Nobody hears of this descriptor any more.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        if !self.birth.is_here() {
            return;
        }
        if let Err(error) = epoll::delete(&self.epoll, fd) {
            log::warn!("epoll_ctl: {error}");
        }
    }

    /// Waits until something is ready or `timeout` (`None`: for ever) has passed.
    ///
    /// An interrupted wait, or one that cannot be done, looks like one in which nothing happened: the
    /// callers go round their loops.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Batch {
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [none; Batch::CAPACITY];
        #[cfg(miri)]
        let timeout = self.alarm.bound(timeout);
        let timeout = timeout.and_then(whole_milliseconds);
        let count = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => {
                log::error!("epoll_wait: {error}");
                0
            }
        };
        #[cfg(miri)]
        let count = self.alarm.report(&mut events, count);
        Batch { events, count }
    }

    /// Has [`Ready::Alarm`] reported from `at` on, in place of the time before.
    pub(crate) fn set_alarm(&self, at: Instant) {
        if self.birth.is_here() {
            self.alarm.set(at);
        }
    }

    /// Ends the report of the alarm.
    pub(crate) fn calm_alarm(&self) {
        if self.birth.is_here() {
            self.alarm.calm();
        }
    }

    /// Ends the sleep of whoever waits, or the next one if nobody does.
    pub(crate) fn kick(&self) {
        if !self.birth.is_here() {
            return;
        }
        match rustix::io::write(&self.kick, &1u64.to_ne_bytes()) {
            // Full: it is readable, which is all that matters.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => log::error!("eventfd write: {error}"),
        }
    }

    /// Takes the kicks back.
    pub(crate) fn calm(&self) {
        if !self.birth.is_here() {
            return;
        }
        let mut count = [0; 8];
        match rustix::io::read(&self.kick, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => log::error!("eventfd read: {error}"),
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A timerfd.
#[cfg(not(miri))]
struct Alarm(OwnedFd);

#[cfg(not(miri))]
impl Alarm {
    fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Alarm(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    fn set(&self, at: Instant) {
        let left = at.saturating_duration_since(Instant::now());
        let once = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: left.as_secs().min(MAX_SLEEP_SECS) as i64,
                tv_nsec: i64::from(left.subsec_nanos()).max(1), // all zero would stop the timer
            },
        };
        if let Err(error) = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once) {
            log::error!("timerfd_settime: {error}");
        }
    }

    fn calm(&self) {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => log::error!("timerfd read: {error}"),
        }
    }
}

/// Miri has no timerfd: here each wait is bounded. (A foreign loop does not hear of it.)
#[cfg(miri)]
struct Alarm(std::sync::Mutex<Option<Instant>>);

#[cfg(miri)]
impl Alarm {
    fn new() -> io::Result<Alarm> {
        Ok(Alarm(std::sync::Mutex::new(None)))
    }

    fn at(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn set(&self, at: Instant) {
        *self.at() = Some(at);
    }

    fn calm(&self) {
        *self.at() = None;
    }

    fn bound(&self, timeout: Option<Duration>) -> Option<Duration> {
        let left = self
            .at()
            .map(|at| at.saturating_duration_since(Instant::now()));
        match (left, timeout) {
            (Some(left), Some(timeout)) => Some(left.min(timeout)),
            (left, timeout) => left.or(timeout),
        }
    }

    fn report(&self, events: &mut [epoll::Event], count: usize) -> usize {
        if count == events.len() || self.at().is_none_or(|at| at > Instant::now()) {
            return count;
        }
        events[count].data = epoll::EventData::new_u64(ALARM);
        count + 1
    }
}

/// Rounded up, for a deadline shall have passed when the wait ends. A time too long to express is
/// none.
fn whole_milliseconds(timeout: Duration) -> Option<Timespec> {
    if timeout.as_secs() > MAX_SLEEP_SECS {
        return None;
    }
    let nanos = timeout.subsec_nanos().next_multiple_of(1_000_000);
    let tv_sec = timeout.as_secs() as i64 + i64::from(nanos / 1_000_000_000);
    Some(Timespec {
        tv_sec,
        tv_nsec: (nanos % 1_000_000_000).into(),
    })
}

/// What epoll_wait(2) takes is a number of milliseconds in an `int`.
const MAX_SLEEP_SECS: u64 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kick_before_the_wait_ends_it() {
        let poller = Poller::new().unwrap();
        poller.kick();
        let batch = poller.wait(None);
        assert_eq!(batch.iter().collect::<Vec<_>>(), [Ready::Kick]);
        poller.calm();
        assert_eq!(poller.wait(Some(Duration::ZERO)).iter().count(), 0);
    }

    #[test]
    fn an_alarm_is_reported_from_its_time_on_until_it_is_calmed() {
        let poller = Poller::new().unwrap();
        poller.set_alarm(Instant::now() + Duration::from_secs(1000));
        assert_eq!(poller.wait(Some(Duration::ZERO)).iter().count(), 0);
        poller.set_alarm(Instant::now());
        for _ in 0..2 {
            let batch = poller.wait(None);
            assert_eq!(batch.iter().collect::<Vec<_>>(), [Ready::Alarm]);
        }
        poller.calm_alarm();
        assert_eq!(poller.wait(Some(Duration::ZERO)).iter().count(), 0);
    }

    #[test]
    fn a_descriptor_that_is_not_watched_is_not_reported_until_it_is_again() {
        let (poller, source) = (
            Poller::new().unwrap(),
            eventfd(1, EventfdFlags::CLOEXEC).unwrap(),
        );
        poller.add_endpoint(source.as_fd(), 7).unwrap();
        let reported = || {
            let batch = poller.wait(Some(Duration::ZERO));
            batch.iter().collect::<Vec<_>>()
        };
        poller.watch_endpoint(source.as_fd(), 7, false);
        assert_eq!(reported(), []);
        poller.watch_endpoint(source.as_fd(), 7, true);
        assert_eq!(reported(), [Ready::Endpoint(7)]);
    }

    #[test]
    fn a_timeout_is_rounded_up() {
        let rounded = whole_milliseconds(Duration::from_nanos(1_999_000_001)).unwrap();
        assert_eq!((rounded.tv_sec, rounded.tv_nsec), (2, 0));
        let zero = whole_milliseconds(Duration::ZERO).unwrap();
        assert_eq!((zero.tv_sec, zero.tv_nsec), (0, 0));
        assert!(whole_milliseconds(Duration::MAX).is_none());
    }
}
