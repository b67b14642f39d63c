//! Verbs between two soft-RoCE devices: the scenarios of `rdma-core-rs`, and what only a real
//! kernel can show.
//!
//! Each test leaves the kernel's objects as it found them; they are counted for the whole host, so
//! the tests take turns.
#![allow(unsafe_code)] // posts

#[path = "../../rdma-core-rs/tests/verbs/mod.rs"]
mod verbs;

use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use verbs::{Bed, scenarios};

/// The lab's two hosts.
const A: (&str, &str) = ("rxe0", "192.168.99.1");
const B: (&str, &str) = ("rxe1", "192.168.99.2");

/// Runs a scenario between the two hosts and sees that nothing is left of it.
fn on_rxe(scenario: impl FnOnce(&Bed)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = kernel_objects();
    let bed = Bed::open(A, B);
    scenario(&bed);
    drop(bed);
    let until = Instant::now() + Duration::from_secs(10); // the kernel frees some a little later
    while kernel_objects() != before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(kernel_objects(), before);
}

fn kernel_objects() -> String {
    let output = Command::new("rdma").args(["resource", "show"]).output();
    let output = output.expect("needs the rdma tool of iproute2");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

macro_rules! tests {
    ($($name:ident)*) => {$(
        #[test]
        #[ignore = "needs an RDMA device: cargo xtask test"]
        fn $name() {
            on_rxe(scenarios::$name);
        }
    )*};
}

for_all_scenarios!(tests);
