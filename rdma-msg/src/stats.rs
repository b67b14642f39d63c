//! Counters: kept under the lock that is held anyway, and copied out when asked for.

use std::fmt;

use crate::error::OpKind;
use crate::tracker::Tally;
use crate::worker::Counters;

/// How operations of one kind went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindStats {
    /// Accepted.
    pub posted: u64,
    /// Ended with success.
    pub succeeded: u64,
    /// Ended with an error of their own.
    pub failed: u64,
    /// Ended because something else did.
    pub flushed: u64,
}

/// How often things happened to operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpStats {
    kinds: [KindStats; OpKind::COUNT],
    /// Bytes of successful sends and writes.
    pub bytes_out: u64,
    /// Bytes received, and read from the peer.
    pub bytes_in: u64,
    /// Posts that were refused because a queue was full.
    pub queue_full: u64,
    /// Times the device was told of new work in a send queue, one for each post or chain.
    pub doorbells: u64,
}

impl OpStats {
    pub(crate) fn new(tally: &Tally) -> OpStats {
        let mut stats = OpStats {
            bytes_out: tally.bytes_out,
            bytes_in: tally.bytes_in,
            queue_full: tally.queue_full,
            doorbells: tally.doorbells,
            ..OpStats::default()
        };
        for (index, kind) in stats.kinds.iter_mut().enumerate() {
            kind.posted = tally.posted[index];
            kind.succeeded = tally.succeeded[index];
            kind.failed = tally.failed[index];
            kind.flushed = tally.flushed[index];
        }
        stats
    }

    /// The operations of one kind.
    pub fn of(&self, kind: OpKind) -> KindStats {
        self.kinds[kind as usize]
    }

    /// The operations of all kinds.
    pub fn all(&self) -> KindStats {
        self.kinds
            .iter()
            .fold(KindStats::default(), |sum, kind| KindStats {
                posted: sum.posted + kind.posted,
                succeeded: sum.succeeded + kind.succeeded,
                failed: sum.failed + kind.failed,
                flushed: sum.flushed + kind.flushed,
            })
    }

    /// Operations that have not ended.
    pub fn in_flight(&self) -> u64 {
        let all = self.all();
        all.posted - all.succeeded - all.failed - all.flushed
    }
}

impl fmt::Display for OpStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for kind in OpKind::ALL {
            let KindStats {
                posted,
                succeeded,
                failed,
                flushed,
            } = self.of(kind);
            if posted > 0 {
                writeln!(
                    f,
                    "{kind}: {posted} posted, {succeeded} ok, {failed} failed, {flushed} flushed"
                )?;
            }
        }
        let OpStats {
            bytes_out,
            bytes_in,
            queue_full,
            doorbells,
            ..
        } = self;
        write!(
            f,
            "{bytes_out} bytes out, {bytes_in} bytes in, queue full {queue_full} times, \
             {doorbells} doorbells"
        )
    }
}

/// Counters of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointStats {
    /// Its operations.
    pub ops: OpStats,
    /// Messages that have arrived and were not taken yet.
    pub inbox: usize,
    /// Times that a receive could not be posted again at once, since the pool was empty.
    pub receives_delayed: u64,
}

impl fmt::Display for EndpointStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EndpointStats {
            ops,
            inbox,
            receives_delayed,
        } = self;
        write!(
            f,
            "{ops}\n{inbox} messages waiting, receives delayed {receives_delayed} times"
        )
    }
}

/// Counters of a worker, for all endpoints it ever had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStats {
    /// The operations.
    pub ops: OpStats,
    /// Completions that matched no operation and were ignored. Anything but 0 is worth a look.
    pub stale: u64,
    /// Completions taken from the completion queue.
    pub completions: u64,
    /// Polls of the completion queue.
    pub polls: u64,
    /// Polls that found nothing.
    pub empty_polls: u64,
    /// Times a thread went to sleep, all threads' and not a foreign loop's.
    pub sleeps: u64,
    /// Times the completion queue was armed.
    pub arms: u64,
    /// Completion events fetched.
    pub events: u64,
    /// Times a kick was seen: another thread ends a sleep with it, or has something for this worker.
    pub kicks: u64,
    /// Buffers that had to be given up, since the device refused to destroy a queue pair that may
    /// still use them.
    pub leaked: u64,
    /// Asynchronous events of the device that concerned this worker: its queue pairs, its completion
    /// queue, or all of the device. Each is in the log.
    pub device_events: u64,
}

impl WorkerStats {
    pub(crate) fn new(
        tally: &Tally,
        stale: u64,
        counters: &Counters,
        device_events: u64,
    ) -> WorkerStats {
        WorkerStats {
            ops: OpStats::new(tally),
            stale,
            completions: counters.completions,
            polls: counters.polls,
            empty_polls: counters.empty_polls,
            sleeps: counters.sleeps,
            arms: counters.arms,
            events: counters.events,
            kicks: counters.kicks,
            leaked: counters.leaked,
            device_events,
        }
    }
}

impl fmt::Display for WorkerStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkerStats {
            ops,
            stale,
            polls,
            empty_polls,
            sleeps,
            arms,
            events,
            ..
        } = self;
        writeln!(f, "{ops}")?;
        write!(
            f,
            "{polls} polls ({empty_polls} empty), {sleeps} sleeps, {arms} arms, {events} events, \
             {stale} stale completions"
        )
    }
}
