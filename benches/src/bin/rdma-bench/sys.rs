//! What the benchmark needs of the system: a count of allocations, a watchdog, a way to kill its peer.

#![allow(unsafe_code)] // an allocator is one by definition; alarm(2) and kill(2) are C functions

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, and a count of the calls.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this process so far, those that grow something included.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: our caller keeps the contract of this same function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: our caller keeps the contract of this same function.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: our caller keeps the contract of this same function, and `old` came from the system's allocator.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: our caller keeps the contract of this same function, and `memory` came from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Has this process killed after so many seconds: a measurement that hangs ends.
pub(crate) fn alarm(seconds: u32) {
    // SAFETY: it takes a number and has no precondition; no handler of ours runs.
    unsafe { libc::alarm(seconds) };
}

/// Kills a process, at once.
pub(crate) fn kill(pid: u32) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    // SAFETY: it takes two numbers and has no precondition.
    match unsafe { libc::kill(pid, libc::SIGKILL) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
