//! File descriptors that C owns: making them non-blocking and waiting on them.

#![allow(unsafe_code)] // fcntl and poll on descriptors that C owns

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Makes reads from `fd` return at once when there is nothing.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<()> {
    let flags = fcntl(fd.as_raw_fd(), libc::F_GETFL, 0)?;
    if flags & libc::O_NONBLOCK == 0 {
        fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK)?;
    }
    Ok(())
}

fn fcntl(fd: RawFd, command: i32, argument: i32) -> Result<i32> {
    // SAFETY: the two commands used take an int and return an int; they touch no memory of ours.
    let ret = unsafe { libc::fcntl(fd, command, argument) };
    if ret < 0 {
        Err(Error::last("fcntl"))
    } else {
        Ok(ret)
    }
}

/// Sleeps until `fd` can be read. `Ok(false)` if the deadline came first.
///
/// A deadline in the past makes this a look without sleeping.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> Result<bool> {
    loop {
        let timeout = match deadline {
            None => -1,
            Some(at) => poll_millis(at.saturating_duration_since(Instant::now())),
        };
        match poll(fd, timeout) {
            1.. => return Ok(true),
            0 if deadline.is_some_and(|at| at <= Instant::now()) => return Ok(false),
            0 => {}
            _ => {
                let source = io::Error::last_os_error();
                if source.kind() != io::ErrorKind::Interrupted {
                    return Err(Error::Call {
                        call: "poll",
                        source,
                    });
                }
            }
        }
    }
}

#[cfg(not(miri))]
fn poll(fd: BorrowedFd<'_>, timeout: i32) -> i32 {
    let mut entry = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: `entry` is one pollfd on our stack, and the count says so.
    unsafe { libc::poll(&raw mut entry, 1, timeout) }
}

/// Miri has no poll(2). Callers look again after every wake-up, so a wake-up for nothing will do.
#[cfg(miri)]
fn poll(_fd: BorrowedFd<'_>, timeout: i32) -> i32 {
    std::thread::yield_now();
    i32::from(timeout != 0)
}

/// Milliseconds for poll(2), rounded up so that it does not return just before the deadline and
/// spin.
fn poll_millis(left: Duration) -> i32 {
    let millis = left.as_nanos().div_ceil(1_000_000);
    i32::try_from(millis).unwrap_or(i32::MAX)
}

/// Whether an error only says that there is nothing to read.
pub(crate) fn would_block(error: &Error) -> bool {
    error.errno() == Some(libc::EAGAIN)
}

/// Whether a call was interrupted by a signal and is to be made again.
pub(crate) fn interrupted(error: &Error) -> bool {
    error.errno() == Some(libc::EINTR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_rounded_up_and_clamped() {
        assert_eq!(poll_millis(Duration::ZERO), 0);
        assert_eq!(poll_millis(Duration::from_nanos(1)), 1);
        assert_eq!(poll_millis(Duration::from_millis(7)), 7);
        assert_eq!(poll_millis(Duration::MAX), i32::MAX);
    }
}
