//! `poll(2)` for Miri, which has epoll but no poll.
#![allow(unsafe_code)] // defines a C symbol; calls epoll

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::{c_int, epoll_event, nfds_t, pollfd};

const NO_EVENT: epoll_event = epoll_event { events: 0, u64: 0 };

/// `poll(2)` by an epoll made for the call. Negative descriptors are left out, as there.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: C requires `count` valid entries at `fds`, and nobody else to use them meanwhile.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    // SAFETY: no memory is involved.
    let raw = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if raw < 0 {
        return -1;
    }
    // SAFETY: just made, and owned by nobody else.
    let epoll = unsafe { OwnedFd::from_raw_fd(raw) };
    for (index, fd) in fds.iter_mut().enumerate() {
        fd.revents = 0;
        if fd.fd < 0 {
            continue;
        }
        // Edge-triggered is all Miri has; a descriptor that is ready when it is added is an edge too.
        let events = fd.events as u32 | libc::EPOLLET as u32;
        let mut event = epoll_event {
            events,
            u64: index as u64,
        };
        // SAFETY: `event` lives through the call.
        let added = unsafe {
            libc::epoll_ctl(
                epoll.as_raw_fd(),
                libc::EPOLL_CTL_ADD,
                fd.fd,
                &raw mut event,
            )
        };
        if added != 0 {
            return -1;
        }
    }
    let mut events = vec![NO_EVENT; fds.len().max(1)];
    // SAFETY: `events` has room for as many events as are told.
    let ready = unsafe {
        libc::epoll_wait(
            epoll.as_raw_fd(),
            events.as_mut_ptr(),
            events.len() as c_int,
            timeout,
        )
    };
    for event in events.iter().take(ready.max(0) as usize) {
        fds[event.u64 as usize].revents = event.events as i16;
    }
    ready
}
