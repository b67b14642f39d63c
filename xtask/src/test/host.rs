//! The tests that run on this machine.

use super::Tally;
use super::libtest::Report;
use super::suite::NEEDS_RXE;
use crate::cargo::Executable;
use crate::interrupt::at_interrupt;
use crate::process::{end_group, kill_group};
use anyhow::{Context, Result};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// An executable that is silent for so long hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Runs these tests of one executable.
pub(crate) fn run(executable: &Executable, names: &[&str], tally: &mut Tally) -> Result<()> {
    println!("\nhost: {}", executable.label);
    let mut command = Command::new(&executable.path);
    command
        .arg("--exact")
        .args(names)
        .current_dir(&executable.folder)
        .env("CARGO_MANIFEST_DIR", &executable.folder);
    let run = follow(command, PATIENCE)?;
    let report = Report::read(&run.output);
    tally.passed += report.passed.len();
    for name in names {
        if report.failed.iter().any(|failed| failed == name) {
            tally.fail(format!("host: {} {name}", executable.label));
        } else if !report.passed.iter().any(|passed| passed == name) {
            tally.fail(format!(
                "host: {} {name}: no result: {}",
                executable.label, run.end
            ));
        }
    }
    if names
        .iter()
        .all(|name| report.passed.iter().any(|passed| passed == name))
        && !run.success
    {
        tally.fail(format!(
            "host: {}: all tests passed, but: {}",
            executable.label, run.end
        ));
    }
    Ok(())
}

/// Runs a command that drives test executables by itself (doc tests, Miri) and counts what it prints.
pub(crate) fn run_all(
    what: &str,
    command: Command,
    patience: Duration,
    tally: &mut Tally,
) -> Result<()> {
    println!("\n{what}");
    let run = follow(command, patience)?;
    let report = Report::read(&run.output);
    tally.passed += report.passed.len();
    for name in &report.failed {
        tally.fail(format!("{what}: {name}"));
    }
    for (name, reason) in report
        .ignored
        .iter()
        .filter(|(_, reason)| !reason.starts_with(NEEDS_RXE))
    {
        tally.skip(format!("{what}: {name}: {reason}"));
    }
    if !run.success && report.failed.is_empty() {
        tally.fail(format!("{what}: {}", run.end));
    }
    Ok(())
}

/// A command that has run.
struct Run {
    output: String,
    success: bool,
    /// How it ended, in words.
    end: String,
}

/// Shows and keeps what the command prints, and stops it when it has been silent for too long.
fn follow(mut command: Command, patience: Duration) -> Result<Run> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    let leader = child.id();
    let _at_interrupt = at_interrupt(move || end_group(leader))?;
    let (send, lines) = mpsc::channel();
    let stdout = child.stdout.take().context("no standard output")?;
    thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        while let Ok(1..) = reader.read_until(b'\n', &mut line) {
            if send
                .send(String::from_utf8_lossy(&line).into_owned())
                .is_err()
            {
                return;
            }
            line.clear();
        }
    });
    let mut output = String::new();
    loop {
        match lines.recv_timeout(patience) {
            Ok(line) => {
                print!("{line}");
                output.push_str(&line);
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                kill_group(&mut child);
                let end = format!("silent for {} s: killed", patience.as_secs());
                return Ok(Run {
                    output,
                    success: false,
                    end,
                });
            }
        }
    }
    let status = child.wait()?;
    Ok(Run {
        output,
        success: status.success(),
        end: status.to_string(),
    })
}
