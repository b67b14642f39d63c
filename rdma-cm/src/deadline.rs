//! One deadline for a whole connect, whatever its steps are.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::error::{CmError, Step};

/// When it began, and when it has to be over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    start: Instant,
    end: Instant,
}

/// The longest wait that is honoured: the clock cannot represent all times of a `Duration`.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl Deadline {
    /// From now on, for `time` (at most a year).
    pub(crate) fn after(time: Duration) -> Self {
        let start = Instant::now();
        Self {
            start,
            end: start + time.min(LONGEST),
        }
    }

    /// Until `end`, from now on.
    pub(crate) fn at(end: Instant) -> Self {
        Self {
            start: Instant::now(),
            end,
        }
    }

    pub(crate) fn end(self) -> Instant {
        self.end
    }

    pub(crate) fn left(self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    pub(crate) fn has_passed(self) -> bool {
        self.left().is_zero()
    }

    /// The error for a deadline that has passed during `step`.
    pub(crate) fn timed_out(self, step: Step, peer: Option<SocketAddr>) -> CmError {
        CmError::TimedOut {
            step,
            peer,
            after: self.end.saturating_duration_since(self.start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wait_is_too_long_to_be_represented() {
        assert!(Deadline::after(Duration::MAX).left() > LONGEST / 2);
        assert!(Deadline::after(Duration::ZERO).has_passed());
    }

    #[test]
    fn the_error_tells_the_whole_time_and_not_what_was_left() {
        let error = Deadline::after(Duration::from_secs(5)).timed_out(Step::Connect, None);
        assert!(
            matches!(error, CmError::TimedOut { after, .. } if after == Duration::from_secs(5))
        );
    }
}
