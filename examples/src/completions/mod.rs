//! What `docs/completions.md` explains, as code that runs: how to know that a read or write is complete.
//!
//! The code blocks of that page are the parts of these files between `// region: NAME` and
//! `// endregion`; `tests/completions_doc.rs` compares them, and writes them anew with `UPDATE_DOCS=1`.
//!
//! - `verbs`: with rdma-core-rs (and rdma-cm for the connection)
//! - `endpoint`: with rdma-msg
//! - `flag`: the memory flag that tutorials poll
//! - `peer`: the other side, which does nothing but expose memory

pub mod endpoint;
pub mod flag;
pub mod peer;
pub mod verbs;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cli::Result;

/// How long the examples wait for anything before they say that it did not come.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// The two operations the question is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// From the peer's memory into a buffer of ours.
    Read,
    /// From a buffer of ours into the peer's memory.
    Write,
}

/// Three ways to wait for the same completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Look again and again.
    Poll,
    /// Sleep on a file descriptor, in an event loop of one's own.
    Epoll,
    /// Await a future.
    Await,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 3] = [Way::Poll, Way::Epoll, Way::Await];
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Op::Read => "read",
            Op::Write => "write",
        })
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Way::Poll => "polling",
            Way::Epoll => "epoll",
            Way::Await => "awaiting",
        })
    }
}

/// Sleeps until one of `fds` is readable, at most until `deadline`; whether one is.
fn readable<const N: usize>(fds: [BorrowedFd<'_>; N], deadline: Instant) -> Result<bool> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    Ok(poll(&mut polled, Some(&left))? > 0)
}
