//! Running programs as a user would, each with a limit on its time.

#![allow(clippy::unwrap_used)] // a helper of tests: what goes wrong here is to fail the test
#![allow(dead_code)] // every test program uses a part of it

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The lab's two hosts.
pub(crate) const SERVER: &str = "192.168.99.2";
/// Enough for anything here, on a loaded machine under emulation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// One test at a time: they listen on the same ports.
pub(crate) fn serial() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a program did.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

/// A started program; killed and reaped when dropped.
pub(crate) struct Running {
    child: Child,
    start: Instant,
    stdout: Option<Collector>,
    stderr: Option<Collector>,
}

type Collector = thread::JoinHandle<String>;

impl Running {
    /// Starts `program`; its output is collected while it runs.
    pub(crate) fn start<S: AsRef<OsStr>>(
        program: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Running {
        let mut child = spawn(program, args);
        let stdout = child.stdout.take().map(collect);
        Running::collecting(child, stdout)
    }

    /// Starts an example's server and waits until it listens; the rest of its stdout is collected.
    pub(crate) fn server<S: AsRef<OsStr>>(
        program: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Running {
        let mut child = spawn(program, args);
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let running = Running::collecting(child, Some(collect(stdout)));
        if !line.starts_with("listening on ") {
            panic!(
                "{program} does not listen: {line:?} {:?}",
                running.end_within(PATIENCE)
            );
        }
        running
    }

    fn collecting(mut child: Child, stdout: Option<Collector>) -> Running {
        let stderr = child.stderr.take().map(collect);
        Running {
            child,
            start: Instant::now(),
            stdout,
            stderr,
        }
    }

    /// Stops it (SIGSTOP): it is there, and does nothing any more.
    pub(crate) fn stop(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    }

    /// Waits until it ends.
    ///
    /// # Panics
    /// If it has not after `limit`; it is killed then.
    pub(crate) fn end_within(mut self, limit: Duration) -> Ended {
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if self.start.elapsed() > limit => break None,
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        let took = self.start.elapsed();
        let _ = self.child.kill(); // it may be over
        let stdout = self.stdout.take().unwrap().join().unwrap();
        let stderr = self.stderr.take().unwrap().join().unwrap();
        let ended = Ended {
            status: status.and_then(|status| status.code()),
            stdout,
            stderr,
            took,
        };
        assert!(status.is_some(), "not over after {limit:?}: {ended:?}");
        ended
    }
}

fn spawn<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Child {
    Command::new(program)
        .args(args)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"))
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(mut from: impl Read + Send + 'static) -> Collector {
    thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// Runs `program` to its end.
pub(crate) fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Ended {
    Running::start(program, args).end_within(PATIENCE)
}

impl Ended {
    /// Fails unless it ended with status 0; gives its stdout.
    pub(crate) fn succeeded(self) -> String {
        assert_eq!(self.status, Some(0), "{self:?}");
        self.stdout
    }

    /// Fails unless it ended with status 1 in `limit`, with one line on stderr that has all of `parts`.
    pub(crate) fn failed_with(&self, limit: Duration, parts: &[&str]) {
        assert_eq!(self.status, Some(1), "{self:?}");
        assert!(self.took < limit, "took {:?}: {self:?}", self.took);
        let lines: Vec<&str> = self.stderr.lines().collect();
        assert_eq!(lines.len(), 1, "one line, not {self:?}");
        for part in parts {
            assert!(
                lines[0].contains(part),
                "{part:?} is missing in {:?}",
                lines[0]
            );
        }
        assert!(!self.stderr.contains("panicked"), "{self:?}");
    }
}
