//! The only door to librdmacm: what the other files use of it, and the one conversion of its
//! return values.
//!
//! Every `rdma_*` function that returns an `int` answers 0, or -1 with `errno` set (librdmacm
//! manual pages). No other file repeats that rule.
#![allow(unsafe_code)] // poll(2) and fcntl(2), on descriptors that the caller has borrowed; sets errno

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::raw::c_int;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rdma_core_rs::Birth;

pub(crate) use rdma_sys::{
    RAI_NOROUTE, RAI_NUMERICHOST, RAI_PASSIVE, ibv_access_flags, ibv_ah_attr, ibv_context,
    ibv_event_type, ibv_get_device_name, ibv_gid, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state,
    rdma_accept, rdma_ack_cm_event, rdma_addrinfo, rdma_bind_addr, rdma_cm_event,
    rdma_cm_event_type, rdma_cm_id, rdma_cm_join_mc_attr_ex, rdma_cm_join_mc_attr_mask,
    rdma_cm_mc_join_flags, rdma_conn_param, rdma_connect, rdma_create_event_channel,
    rdma_create_id, rdma_destroy_event_channel, rdma_destroy_id, rdma_disconnect, rdma_establish,
    rdma_event_channel, rdma_free_devices, rdma_freeaddrinfo, rdma_get_cm_event, rdma_get_devices,
    rdma_getaddrinfo, rdma_init_qp_attr, rdma_join_multicast_ex, rdma_leave_multicast, rdma_listen,
    rdma_migrate_id, rdma_notify, rdma_port_space, rdma_reject, rdma_resolve_addr,
    rdma_resolve_route, rdma_set_option, rdma_ud_param,
};

// The header's `#define`s and anonymous enums do not reach the bindings.
pub(crate) const RDMA_OPTION_ID: c_int = 0;
pub(crate) const RDMA_OPTION_ID_TOS: c_int = 0;
pub(crate) const RDMA_OPTION_ID_REUSEADDR: c_int = 1;
pub(crate) const RDMA_OPTION_ID_AFONLY: c_int = 2;
pub(crate) const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;

/// The result of a librdmacm call: 0 is success, everything else has its reason in `errno`.
pub(crate) fn check(ret: c_int) -> io::Result<()> {
    if ret == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether librdmacm may be used: not in a child of the process that used it first. It keeps the devices
/// that it has opened, so an id made in the child would share an open device, and its asynchronous
/// events, which hold addresses of the one process, with the parent.
pub(crate) fn is_usable() -> bool {
    static FIRST_USE: OnceLock<Birth> = OnceLock::new();
    FIRST_USE.get_or_init(Birth::now).is_here()
}

/// Sets `errno` to 0, so that what stands there later comes from the calls between.
pub(crate) fn clear_errno() {
    // SAFETY: takes nothing.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the calling thread's own errno, which nobody else touches.
    unsafe { errno.write(0) };
}

/// Waits until `fd` is readable or `deadline` has passed; `Ok(false)` means it has passed.
///
/// `None` waits for as long as it takes. Interrupted calls are resumed.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let mut entry = libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `entry` is one pollfd that lives across the call, and the count says one.
        match unsafe { libc::poll(&mut entry, 1, poll_timeout(left)) } {
            1 => return Ok(true),
            0 if left == Some(Duration::ZERO) => return Ok(false),
            0 => {}
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// Milliseconds for poll(2), rounded up so that a short wait does not turn into a busy loop.
fn poll_timeout(left: Option<Duration>) -> c_int {
    match left {
        None => -1,
        Some(left) => c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX),
    }
}

/// Makes `fd` non-blocking and closed on exec.
pub(crate) fn set_nonblocking_cloexec(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_GETFL takes no pointer, and `fd` is open for as long as it is borrowed.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: F_SETFL takes an integer and no pointer; `fd` is borrowed, so it is open.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    if cfg!(miri) {
        return Ok(()); // Miri has no F_SETFD, and no exec either
    }
    // SAFETY: as above, F_SETFD takes an integer.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_of_less_than_a_millisecond_is_rounded_up() {
        assert_eq!(poll_timeout(Some(Duration::from_nanos(1))), 1);
        assert_eq!(poll_timeout(Some(Duration::ZERO)), 0);
    }

    #[test]
    fn a_wait_without_end_and_one_beyond_poll_are_both_possible() {
        assert_eq!(poll_timeout(None), -1);
        assert_eq!(
            poll_timeout(Some(Duration::from_secs(u64::MAX))),
            c_int::MAX
        );
    }
}
