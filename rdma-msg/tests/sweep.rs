//! Each call of the C libraries fails once, over a whole connection: it ends with an error, without a
//! hang, and leaves nothing behind.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod common;

use common::program::{run, run_failing};
use fake_verbs::Fabric;

const EIO: i32 = 5;

#[test]
fn every_call_that_fails_ends_in_an_error_and_leaves_nothing() {
    let calls = {
        let fabric = Fabric::new();
        run().unwrap();
        fabric.calls_made()
    };
    assert!(calls > 40, "only {calls} calls were made");
    for number in 0..calls + 5 {
        let fabric = Fabric::new();
        fabric.fail_call_number(number, EIO);
        // It may succeed in spite of the failure, where there is another way; it may not hang, and
        // the end of the fabric sees to it that nothing is left.
        if number < calls {
            let _ = run_failing();
            continue;
        }
        let outcome = run();
        if fabric.failed_calls().is_empty() {
            outcome.unwrap_or_else(|error| panic!("nothing failed, but {error}"));
        }
    }
}
