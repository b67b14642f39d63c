//! Knowing that we are in a child of `fork`.
//!
//! A child shares the open device file with its parent, so a destroy or a modify issued there acts
//! on the parent's objects, and a poll or an event read there is lost to the parent. Memory that was
//! registered may be missing from its address space. Objects therefore remember in which generation
//! of the process they were made; safe calls refuse to work in another, and `Drop` leaves the
//! parent's objects, and registered memory, alone. Posting makes no such check: it is `unsafe`, and
//! its contract covers it.

#![allow(unsafe_code)] // registers the fork handler

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// In which process an object was made: for crates above this one, whose objects must not be used in
/// a child either.
///
/// It notices children of `fork`, by a handler that `fork` runs; not those of a bare `clone` system call.
#[derive(Debug, Clone, Copy)]
pub struct Birth(u32);

impl Birth {
    /// This process.
    pub fn now() -> Birth {
        count_forks();
        Birth(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this is still the process in which the object was made.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    /// An error if this is a child of the process in which the object was made.
    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_here() {
            Ok(())
        } else {
            Err(Error::Forked)
        }
    }
}

#[cfg(not(miri))]
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

fn count_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[cfg(not(miri))] // Miri cannot fork
        // SAFETY: the handler is a function of this program that lives as long as it does, and it
        // only touches an atomic, which is allowed between fork and exec.
        let ret = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        #[cfg(miri)]
        let ret = 0;
        if ret != 0 {
            log::warn!("pthread_atfork: error {ret}; use after a fork will not be noticed");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot fork")]
    fn child_sees_that_it_is_not_the_parent() {
        let birth = Birth::now();
        assert!(birth.is_here());
        // SAFETY: the child only loads an atomic and calls _exit, both async-signal-safe.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = i32::from(birth.is_here());
            // SAFETY: ends the child without running destructors.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `pid` is our child and `status` a local.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!((waited, status), (pid, 0));
        assert!(birth.is_here());
    }
}
