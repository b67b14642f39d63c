//! Tests that look at the same code through other eyes: AddressSanitizer and Miri.
//!
//! Both need the nightly toolchain; without it they are skipped, and counted as skipped.

use super::Tally;
use super::host;
use super::suite::{Place, Suite};
use crate::cargo::{self, nightly_cargo};
use crate::workspace;
use anyhow::{Result, ensure};
use std::panic::resume_unwind;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Tests to run under Miri.
struct UnderMiri {
    package: &'static str,
    /// Cargo's options that choose the targets.
    targets: &'static [&'static str],
    /// Options of the test executables that choose the tests.
    tests: &'static [&'static str],
}

/// What Miri runs: all that stays in Rust, the fake fabric included. It cannot call the C libraries, so what
/// needs one is marked at the test with `cfg_attr(miri, ignore = "…")`, or skipped here. What takes longest comes first.
const MIRI: &[UnderMiri] = &[
    UnderMiri {
        package: "fake-verbs",
        targets: &["--tests"],
        tests: &[],
    },
    UnderMiri {
        package: "rdma-core-rs",
        // Not `refused`, which leaks on purpose, and of `scenarios` some: all take half an hour.
        targets: &["--lib", "--test", "faults"],
        tests: &[
            // These look at files of the machine.
            "--skip",
            "any_call_may_fail",
            "--skip",
            "missing_permission_and_missing_support",
        ],
    },
    UnderMiri {
        package: "rdma-core-rs",
        targets: &["--test", "scenarios"],
        tests: &["send", "write"],
    },
    UnderMiri {
        package: "rdma-cm",
        targets: &["--lib"],
        tests: &[
            "--skip",
            "the_loopback_address",
            "--skip",
            "any_order_of_events",
        ],
    },
    UnderMiri {
        package: "rdma-msg",
        targets: &["--lib"],
        tests: &["tracker::", "lifecycle::", "device_watch::"],
    },
    UnderMiri {
        package: "rdma-msg",
        // Each takes some seconds, so of those that do the same in other words one.
        targets: &["--test", "basic", "--test", "edges", "--test", "failures"],
        tests: &[
            "several_buffers_are_sent_as_one_message",
            "memory_is_written_read_and_changed_atomically",
            "a_batch_is_posted_with_one_doorbell",
            "a_read_with_the_option_inline_is_a_read",
            "dropping_an_endpoint_ends_its_operations",
            "nobody_is_told_a_cause_before_it_is_known",
        ],
    },
];

/// Miri is some hundred times slower than the processor.
const MIRI_PATIENCE: Duration = Duration::from_secs(900);

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Runs the host's tests of executables built with AddressSanitizer.
pub(crate) fn address(filter: Option<&str>, tally: &mut Tally) -> Result<()> {
    let Some(mut command) = nightly_cargo(
        "test --workspace --exclude xtask --exclude rdma-examples --no-run --lib --tests --all-features",
    ) else {
        skip("AddressSanitizer", tally);
        return Ok(());
    };
    println!("\nAddressSanitizer");
    command
        .args(["--target", TARGET])
        .env("RUSTFLAGS", "-Zsanitizer=address");
    command.env("CARGO_TARGET_DIR", workspace::target().join("asan"));
    let mut suite = Suite::of(cargo::build(command)?)?;
    if let Some(filter) = filter {
        suite.retain(filter);
    }
    suite.tests.retain(|test| test.place == Place::Host);
    for test in &mut suite.tests {
        test.executable.label.insert_str(0, "AddressSanitizer ");
    }
    for (executable, names) in suite.on_host() {
        host::run(executable, &names, tally)?;
    }
    Ok(())
}

/// Runs the listed tests under Miri.
pub(crate) fn miri(filter: Option<&str>, tally: &mut Tally) -> Result<()> {
    if nightly_cargo("").is_none() {
        skip("Miri", tally);
        return Ok(());
    }
    add_components()?;
    let next = Mutex::new(MIRI.iter());
    let tally = Mutex::new(tally);
    let lane = || -> Result<()> {
        loop {
            let Some(part) = locked(&next).next() else {
                return Ok(());
            };
            let mut own = Tally::default();
            part.run(filter, &mut own)?;
            locked(&tally).add(own);
        }
    };
    // Miri uses one processor, whatever the program does.
    thread::scope(|scope| {
        let other = scope.spawn(lane);
        lane()?;
        other.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

impl UnderMiri {
    fn run(&self, filter: Option<&str>, tally: &mut Tally) -> Result<()> {
        let Some(mut command) = nightly_cargo("miri test --package") else {
            return Ok(());
        };
        command.arg(self.package).args(self.targets).arg("--");
        // Several filters mean any of them, so the user's takes the place of ours.
        match filter {
            Some(filter) => command.arg(filter),
            None => command.args(self.tests),
        };
        // A file that Miri keeps from the test is one that cannot be opened, not the end of the run.
        command.env("MIRIFLAGS", "-Zmiri-isolation-error=hide");
        command.env("CARGO_TARGET_DIR", workspace::target().join("miri"));
        let title = format!("Miri {} {}", self.package, self.targets.join(" "));
        host::run_all(&title, command, MIRI_PATIENCE, tally)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn add_components() -> Result<()> {
    let status = Command::new("rustup")
        .args([
            "component",
            "add",
            "miri",
            "rust-src",
            "--toolchain",
            "nightly",
        ])
        .status()?;
    ensure!(
        status.success(),
        "rustup cannot add Miri to the nightly toolchain"
    );
    // Once, before two of them find that it is missing.
    let ready = nightly_cargo("miri setup").is_none_or(|mut setup| {
        let status = setup.stdin(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    });
    ensure!(ready, "cargo miri setup failed");
    Ok(())
}

fn skip(what: &str, tally: &mut Tally) {
    let reason = format!("{what}: no nightly toolchain (rustup toolchain install nightly)");
    println!("\nskipped: {reason}");
    tally.skip(reason);
}
