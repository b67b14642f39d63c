//! What is left when destroying is refused: never freed, since the device may still reach it.
//!
//! These tests leak on purpose, so they are on their own, without the leak check of sanitizers
//! (Miri: `-Zmiri-ignore-leaks`).
#![allow(unsafe_code)] // tells the leak sanitizer

mod program;
mod verbs;

use fake_verbs::Fabric;
use program::program;
use rdma_core_rs::{
    Access, CompletionQueue, ProtectionDomain, QpConfig, QpType, QueuePair, SendWr, SharedRegion,
    Srq, WcOpcode,
};
use verbs::Bed;

const A: (&str, &str) = ("fake0", "10.9.0.1");
const B: (&str, &str) = ("fake1", "10.9.0.2");

/// Asked by the leak sanitizer, where there is one.
// SAFETY: no other function of the program has this name.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> i32 {
    1
}

#[test]
fn any_destroy_may_fail_without_panic_or_double_free() {
    for number in 0.. {
        let fabric = Fabric::new(); // what a failed destroy leaves is allowed, a second one is not
        fabric.fail_destroy_number(number, libc::EBUSY);
        let outcome = program();
        let [failed] = fabric.failed_calls()[..] else {
            outcome.expect("nothing failed");
            break;
        };
        if let Err(error) = outcome {
            assert!(
                error.to_string().contains(failed),
                "{failed} failed, but: {error}"
            );
        }
    }
}

#[test]
fn queue_pair_refused_by_drop_keeps_what_the_device_may_reach() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let cq = || CompletionQueue::new(&bed.a.context, 8, None).unwrap();
    let pd = ProtectionDomain::new(&bed.a.context).unwrap();
    let mut config = QpConfig::rc(&cq(), &cq());
    config.srq = Some(Srq::new(&pd, 8, 1).unwrap());
    let qp = QueuePair::new(&pd, &config).unwrap();
    fabric.fail_nth("ibv_destroy_qp", 0, libc::EBUSY);

    drop((qp, config, pd));

    let left = fabric.live_objects();
    assert_eq!((left.qps, left.cqs, left.srqs, left.pds), (1, 2, 1, 3));
    for call in ["ibv_destroy_cq", "ibv_destroy_srq", "ibv_dealloc_pd"] {
        assert_eq!(
            fabric.count_of(call),
            0,
            "{call} while the queue pair lives"
        );
    }
    assert_eq!(fabric.take_violations(), Vec::<String>::new());
}

#[test]
fn region_that_cannot_be_deregistered_keeps_its_memory() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let (mut a, b) = bed.pair(QpType::Rc);
    let region = SharedRegion::alloc(&bed.b.pd, 64, Access::REMOTE_WRITE).unwrap();
    let descriptor = region.descriptor();
    fabric.fail_nth("ibv_dereg_mr", 0, libc::EBUSY);
    drop(region);
    // The device may still write there, and under a sanitizer this would show freed memory.
    a.post(SendWr::write(
        1,
        &[a.local.sge_range(..64).unwrap()],
        descriptor,
    ));
    a.expect(1, WcOpcode::RdmaWrite);
    drop(b);
}
