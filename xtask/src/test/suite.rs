//! All tests of the workspace, and where each of them runs.

use super::libtest::{self, Report};
use super::rxe;
use crate::cargo::{self, Executable, cargo};
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::process::{Command, Stdio};

/// The tests of the built executables. Doc tests are not in it: only rustdoc knows them.
#[derive(Default)]
pub(crate) struct Suite {
    pub(crate) tests: Vec<Test>,
}

/// One test.
#[derive(Debug, Clone)]
pub(crate) struct Test {
    pub(crate) executable: Executable,
    pub(crate) name: String,
    pub(crate) place: Place,
}

/// Where a test runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// On this machine.
    Host,
    /// Where RDMA devices are.
    Rxe,
    /// Nowhere, for this reason.
    Nowhere(String),
}

/// How the reason of an ignored test begins that needs RDMA devices.
pub(crate) const NEEDS_RXE: &str = "needs an RDMA device";

impl Suite {
    /// Builds everything that tests use and asks the executables for their tests.
    pub(crate) fn build() -> Result<Suite> {
        // Tests of the whole stack start the examples.
        cargo::build(cargo(
            "build --workspace --exclude xtask --bins --examples --all-features",
        ))?;
        let tests = cargo("test --workspace --no-run --all-features");
        Suite::of(cargo::build(tests)?)
    }

    pub(crate) fn of(executables: Vec<Executable>) -> Result<Suite> {
        let mut tests = Vec::new();
        for executable in executables
            .into_iter()
            .filter(|executable| executable.is_test)
        {
            let all = listed(&executable, &[])?;
            let ignored = listed(&executable, &["--ignored"])?;
            let reasons = reasons(&executable, &ignored)?;
            for name in all {
                let place = place_of(ignored.contains(&name), reasons.get(&name));
                tests.push(Test {
                    executable: executable.clone(),
                    name,
                    place,
                });
            }
        }
        Ok(Suite { tests })
    }

    /// Keeps the tests whose title contains the filter.
    pub(crate) fn retain(&mut self, filter: &str) {
        self.tests.retain(|test| test.title().contains(filter));
    }

    /// Those that run on this machine, by executable.
    pub(crate) fn on_host(&self) -> Vec<(&Executable, Vec<&str>)> {
        let mut groups: Vec<(&Executable, Vec<&str>)> = Vec::new();
        for test in self.tests.iter().filter(|test| test.place == Place::Host) {
            match groups.last_mut() {
                Some((executable, names)) if **executable == test.executable => {
                    names.push(&test.name)
                }
                _ => groups.push((&test.executable, vec![&test.name])),
            }
        }
        groups
    }

    /// Those that need RDMA devices.
    pub(crate) fn on_rxe(&self) -> Vec<rxe::Test> {
        let chosen = self.tests.iter().filter(|test| test.place == Place::Rxe);
        let planned = |test: &Test| rxe::Test {
            label: test.executable.label.clone(),
            executable: test.executable.path.clone(),
            folder: test.executable.folder.clone(),
            name: test.name.clone(),
        };
        chosen.map(planned).collect()
    }

    /// Titles and reasons of those that run nowhere.
    pub(crate) fn nowhere(&self) -> Vec<String> {
        let reason = |test: &Test| match &test.place {
            Place::Nowhere(reason) => Some(format!("{}: {reason}", test.title())),
            _ => None,
        };
        self.tests.iter().filter_map(reason).collect()
    }
}

impl Test {
    pub(crate) fn title(&self) -> String {
        format!("{} {}", self.executable.label, self.name)
    }
}

fn place_of(ignored: bool, reason: Option<&String>) -> Place {
    match reason {
        _ if !ignored => Place::Host,
        Some(reason) if reason.starts_with(NEEDS_RXE) => Place::Rxe,
        Some(reason) => Place::Nowhere(reason.clone()),
        None => Place::Nowhere("ignored".to_owned()),
    }
}

fn listed(executable: &Executable, more: &[&str]) -> Result<Vec<String>> {
    let mut arguments = vec!["--list", "--format", "terse"];
    arguments.extend(more);
    Ok(libtest::names(&output(executable, &arguments)?))
}

/// The reasons of ignored tests. The executable tells them when it is asked to run those tests but not to
/// include the ignored ones, so that nothing runs.
fn reasons(executable: &Executable, ignored: &[String]) -> Result<HashMap<String, String>> {
    if ignored.is_empty() {
        return Ok(HashMap::new());
    }
    let mut arguments = vec!["--exact"];
    arguments.extend(ignored.iter().map(String::as_str));
    let report = Report::read(&output(executable, &arguments)?);
    Ok(report.ignored.into_iter().collect())
}

fn output(executable: &Executable, arguments: &[&str]) -> Result<String> {
    let output = Command::new(&executable.path)
        .args(arguments)
        .current_dir(&executable.folder)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", executable.path.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}: {said}",
        executable.path.display(),
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_decides_where_an_ignored_test_runs() {
        let rxe = "needs an RDMA device: cargo xtask test".to_owned();
        let slow = "takes an hour".to_owned();
        assert_eq!(place_of(false, None), Place::Host);
        assert_eq!(place_of(true, Some(&rxe)), Place::Rxe);
        assert_eq!(place_of(true, Some(&slow)), Place::Nowhere(slow.clone()));
        assert_eq!(place_of(true, None), Place::Nowhere("ignored".to_owned()));
    }
}
