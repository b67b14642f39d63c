//! `cargo xtask bench`: ours, a C floor and the C tools, side by side in one boot of the lab.
//!
//! The programs are in `benches/`; this builds them, runs the suite in a guest and the report here.

use crate::cargo::{self, Executable, cargo};
use crate::lab::{Lab, Output, Shape, Source};
use crate::lock::Lock;
use crate::setup::{self, Consent, Purpose};
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What to measure.
pub(crate) struct Bench {
    /// Exact counts in a guest whose clock counts instructions, instead of times.
    pub(crate) counts: bool,
    /// Hold all counts against the baselines.
    pub(crate) judge: bool,
    /// Further options of the suite.
    pub(crate) suite: Vec<OsString>,
    /// Further options of the report.
    pub(crate) report: Vec<OsString>,
    /// Make the counts the new baselines.
    pub(crate) update: bool,
    pub(crate) kernel: Source,
    pub(crate) consent: Consent,
}

impl Bench {
    /// Returns 0, or 1 if a count is worse than its baseline.
    pub(crate) fn run(&self) -> Result<i32> {
        setup::ensure_installed(
            &[Purpose::Build, Purpose::Lab, Purpose::Test, Purpose::Bench],
            self.consent,
        )?;
        let folder = workspace::target().join("bench");
        let _alone = alone(&folder)?;
        let programs = Programs::build(&folder)?;
        let records = folder.join(if self.counts {
            "counts.jsonl"
        } else {
            "runs.jsonl"
        });
        self.measure(&programs, &records)?;
        self.report(&programs, &records)
    }

    fn measure(&self, programs: &Programs, records: &Path) -> Result<()> {
        let mut argv: Vec<OsString> = vec![programs.suite.clone().into()];
        for (option, program) in [
            ("--ours", &programs.ours),
            ("--floor", &programs.floor),
            ("--tcp", &programs.tcp),
        ] {
            argv.extend([option.into(), program.into()]);
        }
        if self.counts {
            argv.push("--counts".into());
        }
        argv.extend(self.suite.iter().cloned());
        let lab = Lab {
            kernel: self.kernel.clone(),
            shape: Shape {
                counting: self.counts,
                ..Shape::default()
            },
            timeout: None,
            // The suite names each case as it begins; none takes that long.
            silence: Some(Duration::from_secs(600)),
            stdin: false,
            consent: self.consent,
        };
        let mut records = Records(File::create(records)?);
        match lab.run_with(&argv, &mut records)? {
            0 => Ok(()),
            status => bail!("the suite ended with status {status}"),
        }
    }

    fn report(&self, programs: &Programs, records: &Path) -> Result<i32> {
        let mut report = Command::new(&programs.report);
        report.arg(records).args(&self.report);
        if self.judge {
            report
                .arg("--baselines")
                .arg(workspace::root().join("benches/baselines.json"));
        }
        if self.update {
            report.arg("--update");
        }
        let status = report.status().context("cannot run the report")?;
        Ok(crate::exit_status(status))
    }
}

/// Counts the instructions of ours an operation takes on the fake fabric, with valgrind and without a guest.
pub(crate) fn instructions(options: &[OsString], consent: Consent) -> Result<i32> {
    setup::ensure_installed(&[Purpose::Build, Purpose::Instructions], consent)?;
    let command = cargo(
        "build --release --package rdma-bench --bin rdma-bench-instructions --example fake_path",
    );
    let built = cargo::build(command)?;
    let status = Command::new(named("rdma-bench-instructions", &built)?)
        .arg(named("fake_path", &built)?)
        .args(options)
        .status()
        .context("cannot run the count")?;
    Ok(crate::exit_status(status))
}

/// Waits for another benchmark of this folder: both have files of the same names there, and times of two that
/// run at once are of no use. On a file system without locks there is nothing to wait by.
fn alone(folder: &Path) -> Result<Option<Lock>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let file = folder.join("lock");
    if let Ok(None) = Lock::try_on(&file) {
        eprintln!("bench: another one is running: waiting for its end");
    }
    Ok(Lock::wait_on(&file).ok())
}

/// Keeps what the suite writes, and passes on what it says.
struct Records(File);

impl Output for Records {
    fn stdout(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn stderr(&mut self, bytes: &[u8]) -> io::Result<()> {
        io::stderr().write_all(bytes)
    }
}

/// All programs of the benchmark, built for speed.
struct Programs {
    ours: PathBuf,
    suite: PathBuf,
    report: PathBuf,
    floor: PathBuf,
    tcp: PathBuf,
}

impl Programs {
    /// The programs in C go into `folder`.
    fn build(folder: &Path) -> Result<Programs> {
        let benches = workspace::root().join("benches");
        let floor = compile(
            &benches.join("floor"),
            &folder.join("rdma-floor"),
            &["-libverbs", "-lrdmacm"],
        )?;
        let tcp = compile(&benches.join("peers"), &folder.join("rdma-tcp"), &[])?;
        let built = cargo::build(cargo("build --release --package rdma-bench --bins"))?;
        Ok(Programs {
            ours: named("rdma-bench", &built)?,
            suite: named("rdma-bench-suite", &built)?,
            report: named("rdma-bench-report", &built)?,
            floor,
            tcp,
        })
    }
}

fn named(name: &str, built: &[Executable]) -> Result<PathBuf> {
    let wanted = format!("::{name}");
    let found = built
        .iter()
        .find(|executable| executable.label.ends_with(&wanted));
    Ok(found
        .with_context(|| format!("cargo built no {name}"))?
        .path
        .clone())
}

/// Makes one program of the C files of a folder, with the system's compiler.
fn compile(folder: &Path, program: &Path, libraries: &[&str]) -> Result<PathBuf> {
    let mut sources: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<_>>()?;
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "c"));
    sources.sort();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler)
        .args(["-O2", "-Wall", "-Wextra", "-o"])
        .arg(program)
        .args(sources)
        .args(libraries)
        .status()
        .with_context(|| format!("cannot run {compiler:?}"))?;
    if !status.success() {
        bail!("{} does not compile", folder.display());
    }
    Ok(program.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn a_benchmark_waits_for_the_one_before() {
        let name = format!("bench-test-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let first = alone(&folder).unwrap();
        let (entered, has_entered) = mpsc::channel();
        let second = thread::spawn({
            let folder = folder.clone();
            move || {
                let second = alone(&folder).unwrap();
                assert!(second.is_some());
                entered.send(()).unwrap();
            }
        });
        let early = has_entered.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "two at once");
        drop(first);
        second.join().unwrap();
        fs::remove_dir_all(folder).unwrap();
    }
}
