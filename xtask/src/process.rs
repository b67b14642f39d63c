//! Ending processes that we started.
#![allow(unsafe_code)] // kill(2) and waitpid(2): std kills and waits for one child by its owner only

use std::process::Child;

/// Kills a child that leads a process group of its own, with all that it has started and that is still in it.
pub(crate) fn kill_group(leader: &mut Child) {
    let group = -(leader.id() as libc::pid_t);
    // SAFETY: kill(2) takes no pointers. `leader` is borrowed and not yet waited for by us, or was waited for just
    // now: at worst nobody is left in the group.
    unsafe { libc::kill(group, libc::SIGKILL) };
    let _ = leader.wait();
}

/// The same by the leader's number, before this process exits.
pub(crate) fn end_group(leader: u32) {
    // SAFETY: kill(2) takes no pointers. If the group is gone already, the call fails: this process exits next, so
    // the number cannot have been given to another of ours.
    unsafe { libc::kill(-(leader as libc::pid_t), libc::SIGKILL) };
}

/// Kills a child by its number, from another thread than its owner's, before this process exits.
pub(crate) fn end(pid: u32) {
    let pid = pid as libc::pid_t;
    // SAFETY: kill(2) takes no pointers. If the owner has waited for the process already, the call fails: the
    // number cannot have been given to another process of ours in between, and this process exits next.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    // SAFETY: waitpid(2) accepts null for the status.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
}
