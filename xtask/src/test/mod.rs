//! `cargo xtask test`: every test of the workspace, each where it can run, counted together.

mod host;
mod kernel_log;
mod libtest;
mod resources;
pub(crate) mod rxe;
mod sanitize;
mod suite;

use crate::cargo::cargo;
use crate::lab::{Lab, Shape, Source};
use crate::scratch::Scratch;
use crate::setup::{self, Consent, Purpose};
use crate::workspace;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::time::Duration;
use suite::{Place, Suite};

/// What to run.
pub(crate) struct Run {
    /// Only tests whose title contains this.
    pub(crate) filter: Option<String>,
    /// The steps, in the order to run them.
    pub(crate) steps: Vec<Step>,
    /// The series of the guest's kernels; `None` is the usual one.
    pub(crate) kernels: Vec<Option<String>>,
    /// Use this machine's own devices.
    pub(crate) native: bool,
    /// How long an RDMA test may take.
    pub(crate) patience: Duration,
    pub(crate) consent: Consent,
}

/// A part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Unit, fake-verbs and doc tests on this machine.
    Host,
    /// Tests with RDMA devices.
    Rxe,
    /// The host's tests under AddressSanitizer.
    AddressSanitizer,
    /// Some of the host's tests under Miri.
    Miri,
}

/// Counts over all steps.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl Run {
    /// Runs the steps and prints the count; the exit status is 1 if anything failed or nothing ran.
    pub(crate) fn run(&self) -> Result<i32> {
        let mut tally = Tally::default();
        if let Err(error) = self.take_steps(&mut tally) {
            tally.fail(format!("{error:#}"));
        }
        Ok(tally.close())
    }

    /// Prints every test with the place where it runs.
    pub(crate) fn list(&self) -> Result<i32> {
        setup::ensure_installed(&[Purpose::Build], self.consent)?;
        for test in self.suite()?.tests {
            let place = match &test.place {
                Place::Host => "host".to_owned(),
                Place::Rxe => "rxe".to_owned(),
                Place::Nowhere(reason) => format!("skipped ({reason})"),
            };
            println!("{}: {place}", test.title());
        }
        for name in doc_test_names(self.filter.as_deref())? {
            println!("doc {name}: host");
        }
        Ok(0)
    }

    fn take_steps(&self, tally: &mut Tally) -> Result<()> {
        let mut purposes = vec![Purpose::Build];
        if self.steps.contains(&Step::Rxe) {
            purposes.extend([Purpose::Lab, Purpose::Test]);
        }
        setup::ensure_installed(&purposes, self.consent)?;
        let needs_suite = |step: &Step| matches!(step, Step::Host | Step::Rxe);
        let suite = match self.steps.iter().any(needs_suite) {
            true => self.suite()?,
            false => Suite::default(),
        };
        for reason in suite.nowhere() {
            tally.skip(reason);
        }
        for step in &self.steps {
            let result = match step {
                Step::Host => self.host(&suite, tally),
                Step::Rxe => self.rxe(&suite.on_rxe(), tally),
                Step::AddressSanitizer => sanitize::address(self.filter.as_deref(), tally),
                Step::Miri => sanitize::miri(self.filter.as_deref(), tally),
            };
            // One step that fails must not hide the others.
            if let Err(error) = result {
                tally.fail(format!("{step:?}: {error:#}"));
            }
        }
        if !self.steps.contains(&Step::Rxe) {
            for test in suite.on_rxe() {
                tally.skip(format!("{}: --host-only", test.title()));
            }
        }
        Ok(())
    }

    fn suite(&self) -> Result<Suite> {
        let mut suite = Suite::build()?;
        if let Some(filter) = &self.filter {
            suite.retain(filter);
        }
        Ok(suite)
    }

    fn host(&self, suite: &Suite, tally: &mut Tally) -> Result<()> {
        for (executable, names) in suite.on_host() {
            host::run(executable, &names, tally)?;
        }
        let mut doc_tests = cargo("test --workspace --doc --all-features --no-fail-fast --");
        doc_tests.args(&self.filter);
        host::run_all("doc tests", doc_tests, host::PATIENCE, tally)
    }

    fn rxe(&self, tests: &[rxe::Test], tally: &mut Tally) -> Result<()> {
        if tests.is_empty() {
            return Ok(());
        }
        if self.native {
            return self.rxe_natively(tests, tally);
        }
        for series in &self.kernels {
            // A kernel that cannot be had must not hide what the other shows.
            if let Err(error) = self.rxe_in_lab(series, tests, tally) {
                let place = series.as_deref().unwrap_or("the usual kernel");
                tally.fail(format!("rxe on {place}: {error:#}"));
            }
        }
        Ok(())
    }

    /// One boot, and another for what is left after a test that the guest did not survive.
    fn rxe_in_lab(
        &self,
        series: &Option<String>,
        tests: &[rxe::Test],
        tally: &mut Tally,
    ) -> Result<()> {
        let place = series
            .as_deref()
            .map_or("rxe".to_owned(), |series| format!("rxe {series}"));
        println!("\n{place}: {} tests", tests.len());
        let mut left = tests.to_vec();
        for _ in 0..BOOTS {
            let mut progress = rxe::Progress::new(&place, &left);
            let folder = scratch()?;
            let lab = Lab {
                kernel: Source::Archive(series.clone()),
                shape: Shape::default(),
                timeout: None,
                // Longer than the inside waits for a test: if that says nothing either, the guest is dead.
                silence: Some(self.patience + Duration::from_secs(60)),
                stdin: false,
                consent: self.consent,
            };
            let ended = match lab.run_with(&self.inside(&left, &folder)?, &mut progress) {
                Ok(0) => "the tests' runner ended before the test".to_owned(),
                Ok(status) => format!("the guest's test runner ended with status {status}"),
                Err(error) => format!("{error:#}"),
            };
            progress.end(&ended);
            left = progress.left();
            let stuck = left.len() == progress.asked();
            if stuck {
                progress.abandon(&ended);
                left.clear();
            }
            tally.passed += progress.passed;
            tally.failed.append(&mut progress.failed);
            if left.is_empty() {
                return Ok(());
            }
            println!("{place}: {} tests left: booting again", left.len());
        }
        for test in left {
            tally.fail(format!(
                "{place}: {}: not run: {BOOTS} guests died before",
                test.title()
            ));
        }
        Ok(())
    }

    fn rxe_natively(&self, tests: &[rxe::Test], tally: &mut Tally) -> Result<()> {
        println!("\nrxe on this machine's devices: {} tests", tests.len());
        let mut progress = rxe::Progress::new("native", tests);
        let folder = scratch()?;
        let argv = self.inside(tests, &folder)?;
        let ended = crate::native::run_with(&argv, self.consent, &mut progress)?;
        progress.end(&format!("the test runner ended with {ended}"));
        progress.abandon("not run: the test runner ended before");
        tally.passed += progress.passed;
        tally.failed.append(&mut progress.failed);
        Ok(())
    }

    /// This program, as the runner of the tests next to the devices.
    fn inside(&self, tests: &[rxe::Test], folder: &Scratch) -> Result<Vec<OsString>> {
        let plan = folder.path().join("plan");
        fs::write(&plan, rxe::plan(tests))?;
        let program = folder.own_program()?.into();
        let patience = self.patience.as_secs().to_string();
        Ok(vec![
            program,
            "rxe-tests".into(),
            plan.into(),
            patience.into(),
        ])
    }
}

/// The folder for what the runner next to the devices needs.
fn scratch() -> Result<Scratch> {
    Scratch::new(&workspace::target().join("xtask"))
}

/// So many guests may die before the rest is given up.
const BOOTS: usize = 5;

fn doc_test_names(filter: Option<&str>) -> Result<Vec<String>> {
    let list = "test --quiet --workspace --doc --all-features -- --list --format terse";
    let mut command = cargo(list);
    let output = command.args(filter).output().context("cannot run cargo")?;
    Ok(libtest::names(&String::from_utf8_lossy(&output.stdout)))
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.failed.push(what);
    }

    pub(crate) fn skip(&mut self, what: String) {
        self.skipped.push(what);
    }

    /// Prints the lists and the count.
    fn close(&self) -> i32 {
        println!();
        for skipped in &self.skipped {
            println!("skipped: {skipped}");
        }
        for failed in &self.failed {
            println!("failed: {failed}");
        }
        let ran = self.passed + self.failed.len();
        if ran == 0 {
            println!("no test ran");
        }
        println!("{self}");
        i32::from(ran == 0 || !self.failed.is_empty())
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (failed, skipped) = (self.failed.len(), self.skipped.len());
        write!(
            f,
            "{} passed, {failed} failed, {skipped} skipped",
            self.passed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_has_the_form_that_others_read() {
        let tally = Tally {
            passed: 3,
            failed: vec!["x".into()],
            skipped: vec![],
        };
        assert_eq!(tally.to_string(), "3 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_run_without_tests_or_with_a_failure_does_not_end_well() {
        assert_eq!(Tally::default().close(), 1);
        assert_eq!(
            Tally {
                passed: 1,
                ..Tally::default()
            }
            .close(),
            0
        );
        assert_eq!(
            Tally {
                passed: 1,
                failed: vec!["x".into()],
                skipped: vec![]
            }
            .close(),
            1
        );
    }
}
