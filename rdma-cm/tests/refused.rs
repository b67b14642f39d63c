//! What is left when destroying is refused: never freed, since the device may still reach it.
//!
//! Leaks on purpose, so it is on its own, without the leak check of sanitizers.
#![allow(unsafe_code)] // tells the leak sanitizer
#![allow(clippy::unwrap_used)] // a test may panic

mod fake;
mod program;

use fake_verbs::Fabric;
use program::program;

/// Asked by the leak sanitizer, where there is one.
// SAFETY: no other function of the program has this name.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> i32 {
    1
}

#[test]
fn each_destroy_may_fail_without_a_panic() {
    for number in 0.. {
        let fabric = Fabric::new();
        fabric.fail_destroy_number(number, libc::EBUSY);
        let outcome = program();
        if fabric.failed_calls().is_empty() {
            outcome.unwrap();
            break;
        }
        fabric.abandon(); // what could not be destroyed is left
    }
}
