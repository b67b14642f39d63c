//! What an open endpoint is looked after for once in a while, by its timer.
//!
//! - **A lost RTU.** The last message of a connect can get lost; then the passive side hears of the
//!   connection by the first message on it, and its kernel repeats the answer for seconds unless it is
//!   told (`rdma_notify`). It is told only if the event is still missing after a while: told in the
//!   instant before the event, and disconnected then, the kernel keeps the id busy for a minute.
//! - **An idle peer that vanished**: the keepalive.
//! - **A peer that is there and takes nothing**: `stall_timeout`.

use std::time::{Duration, Instant};

use crate::endpoint::state::Link;
use crate::error::{Cause, OpKind};
use crate::lifecycle;
use crate::worker::State;

/// How long after the first message the event that announces the connection may be missing. It takes
/// about a millisecond unless it is lost, and seconds if it is.
const CONFIRM_TIME: Duration = Duration::from_millis(200);

/// When to look next, and what was seen last.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    confirm_at: Option<Instant>,
    probe_at: Option<Instant>,
    progress_at: Option<Instant>,
    /// Posted at the last look of the keepalive.
    posted: u64,
    /// Completed at the last look at the progress.
    completed: u64,
    /// Since when nothing has completed, although something is in flight.
    stalled_since: Option<Instant>,
}

impl Watchdog {
    fn next(&self) -> Option<Instant> {
        [self.confirm_at, self.probe_at, self.progress_at]
            .into_iter()
            .flatten()
            .min()
    }
}

fn due(at: Option<Instant>, now: Instant) -> bool {
    at.is_some_and(|at| at <= now)
}

impl State {
    /// The endpoint is open.
    pub(super) fn start_watchdog(&mut self, index: u32) {
        let now = Instant::now();
        let ep = &mut self.endpoints[index as usize];
        let unconfirmed = matches!(&ep.link, Link::Up(connection) if !connection.is_established());
        ep.watchdog.confirm_at = unconfirmed.then(|| now + CONFIRM_TIME);
        ep.watchdog.probe_at = ep.config.keepalive.map(|interval| now + interval);
        ep.watchdog.progress_at = ep.config.stall_timeout.map(|limit| now + limit / 2);
        let next = ep.watchdog.next();
        self.set_timer(index, next);
    }

    /// The timer of an open endpoint ran out.
    pub(super) fn look_after(&mut self, index: u32, now: Instant) {
        let watchdog = &self.endpoints[index as usize].watchdog;
        let (confirm, probe, progress) = (
            due(watchdog.confirm_at, now),
            due(watchdog.probe_at, now),
            due(watchdog.progress_at, now),
        );
        if confirm {
            self.confirm(index);
        }
        if probe {
            self.keep_alive(index, now);
        }
        if progress {
            self.check_progress(index, now);
        }
        let ep = &self.endpoints[index as usize];
        if ep.life == lifecycle::State::Open {
            let next = ep.watchdog.next();
            self.set_timer(index, next);
        }
    }

    /// Tells the connection manager that messages arrive, if it does not know yet.
    fn confirm(&mut self, index: u32) {
        self.endpoints[index as usize].watchdog.confirm_at = None;
        self.link_news(index);
        let ep = &self.endpoints[index as usize];
        if ep.life == lifecycle::State::Open
            && let Link::Up(connection) = &ep.link
            && !connection.is_established()
            && let Err(error) = connection.notify_comm_est()
        {
            log::debug!("queue pair {}: rdma_notify: {error}", ep.qp_num);
        }
    }

    /// Probes the peer, if nothing else did since the last time.
    fn keep_alive(&mut self, index: u32, now: Instant) {
        let Some((posted, in_flight)) = self.sends(index) else {
            return;
        };
        let ep = &mut self.endpoints[index as usize];
        ep.watchdog.probe_at = ep.config.keepalive.map(|interval| now + interval);
        let idle = std::mem::replace(&mut ep.watchdog.posted, posted) == posted;
        if idle && in_flight == 0 {
            self.probe(index);
        }
    }

    /// Ends the endpoint if what is in flight makes no progress.
    fn check_progress(&mut self, index: u32, now: Instant) {
        self.poll_completions();
        let Some((posted, in_flight)) = self.sends(index) else {
            return;
        };
        let ep = &mut self.endpoints[index as usize];
        let Some(limit) = ep.config.stall_timeout else {
            return;
        };
        ep.watchdog.progress_at = Some(now + limit / 2);
        let completed = posted - in_flight;
        let moved = std::mem::replace(&mut ep.watchdog.completed, completed) != completed;
        if moved || in_flight == 0 {
            ep.watchdog.stalled_since = (in_flight > 0).then_some(now);
            return;
        }
        let since = *ep.watchdog.stalled_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= limit {
            self.bad_news(index, Cause::Stalled);
        }
    }

    /// Operations of the send queue: posted so far, and in flight.
    fn sends(&self, index: u32) -> Option<(u64, u64)> {
        let lane = self.endpoints[index as usize].lane?;
        let tally = self.tracker.tally(lane);
        let posted = tally.posted.iter().sum::<u64>() - tally.posted[OpKind::Receive as usize];
        Some((posted, self.tracker.in_flight(lane).0.into()))
    }
}
