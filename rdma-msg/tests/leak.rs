//! Alone in its process: what is leaked here on purpose would be found by every other test.

#![allow(clippy::unwrap_used)] // a failure is the test's
#![allow(unsafe_code)] // tells the leak sanitizer

mod common;

use common::program::{run, run_failing};
use common::{filled, manual, pair_with, small};
use fake_verbs::{Delivery, Fabric};
use rdma_msg::Outcome;

const EIO: i32 = 5;

/// Asked by the leak sanitizer, where there is one.
// SAFETY: no other function of the program has this name.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> i32 {
    1
}
const EBUSY: i32 = 16;

#[test]
fn a_queue_pair_that_cannot_be_destroyed_is_leaked_with_its_buffers() {
    let fabric = Fabric::new();
    let (client, server) = pair_with(&manual(), &small());
    let worker = client.worker().clone();
    let full = worker.available();
    fabric.set_delivery(Delivery::Manual);
    let send = client.send(filled(&client, b"never freed")).unwrap();
    fabric.fail_nth("ibv_destroy_qp", 0, EBUSY);
    fabric.hold_completions();

    drop(client);

    let error = send.wait().unwrap_err();
    assert_eq!(error.outcome, Outcome::Unknown);
    assert!(error.buf.is_none(), "the NIC may still read it");
    assert_eq!(worker.available(), full - 1);
    assert_eq!(worker.stats().leaked, 1);
    drop((server, worker));
    fabric.abandon();
}

#[test]
fn every_destroy_that_is_refused_leaves_the_process_usable() {
    let destroys = {
        let fabric = Fabric::new();
        run().unwrap();
        fabric.destroys_made()
    };
    assert!(destroys > 10, "only {destroys} objects were destroyed");
    for number in 0..destroys {
        let fabric = Fabric::new();
        fabric.fail_destroy_number(number, EIO);
        let _ = run_failing();
        fabric.abandon();
    }
}
