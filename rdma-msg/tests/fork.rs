//! A child of `fork` must leave its parent's endpoints alone. Alone in its binary, since it forks.
#![allow(unsafe_code)] // forks
#![allow(clippy::unwrap_used)] // a failure is the test's
#![cfg(not(miri))] // Miri cannot fork

mod common;

use std::time::{Duration, Instant};

use common::{any_port, connect_on, small};
use fake_verbs::Fabric;
use rdma_msg::{PostErrorKind, RecvError, Worker, WorkerConfig};

#[test]
fn a_child_that_drops_endpoints_does_not_make_its_parent_deaf() {
    let _fabric = Fabric::new();
    let worker = Worker::for_addr(any_port(1), &WorkerConfig::default()).unwrap();
    let (a, server) = connect_on(&worker, &small());
    let (b, _other) = connect_on(&worker, &small());

    // SAFETY: the test's only other threads are the harness's, which hold no lock we take.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child, should it not end by itself.
        unsafe { libc::alarm(20) };
        // Its device is the parent's, which would take what it finds at these addresses there.
        let refused = a.send_slice(b"to nobody").unwrap_err();
        let refused = matches!(refused.kind, PostErrorKind::Forked);
        // While `b` is there, for polling fails in a child, and that is told to all that are left.
        drop(a);
        drop((b, worker));
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child and `status` a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));

    // Only the connection manager tells it, through the descriptor that the child also had.
    server.close(Duration::from_secs(1)).unwrap();
    let heard = a.recv_deadline(Instant::now() + Duration::from_secs(10));
    assert!(matches!(heard, Err(RecvError::Closed(_))), "{heard:?}");
}
