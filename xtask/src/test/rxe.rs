//! The tests that need RDMA devices: each in a process of its own, one after the other.
//!
//! Two halves. [`run`] is inside, next to the devices (in the lab's guest or, with `--native`, on this
//! machine): it runs the tests of a plan, stops those that hang, and looks after each whether the kernel
//! complained or kept something. What it finds it prints as [`Event`]s, one a line, which [`Progress`],
//! outside, turns into results.

use super::kernel_log::KernelLog;
use super::libtest::Report;
use super::resources::Resources;
use crate::interrupt::at_interrupt;
use crate::process::{end_group, kill_group};
use anyhow::{Context, Result};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A test, and where to find it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Test {
    /// The executable's label.
    pub(crate) label: String,
    pub(crate) executable: PathBuf,
    /// Where to run it.
    pub(crate) folder: PathBuf,
    pub(crate) name: String,
}

impl Test {
    /// As it is shown to people.
    pub(crate) fn title(&self) -> String {
        format!("{} {}", self.label, self.name)
    }

    fn to_line(&self) -> String {
        let Test {
            label,
            executable,
            folder,
            name,
        } = self;
        format!(
            "{label}\t{}\t{}\t{name}\n",
            executable.display(),
            folder.display()
        )
    }

    fn parse(line: &str) -> Option<Test> {
        let [label, executable, folder, name] = line.split('\t').collect::<Vec<_>>()[..] else {
            return None;
        };
        let (label, name) = (label.to_owned(), name.to_owned());
        Some(Test {
            label,
            executable: executable.into(),
            folder: folder.into(),
            name,
        })
    }
}

/// The plan for [`run`] as a file.
pub(crate) fn plan(tests: &[Test]) -> String {
    tests.iter().map(Test::to_line).collect()
}

// ---- inside ----------------------------------------------------------------------------------------

/// Runs the tests of the plan and prints events. Each may take `patience`.
pub(crate) fn run(plan: &Path, patience: Duration) -> Result<()> {
    let plan =
        fs::read_to_string(plan).with_context(|| format!("cannot read {}", plan.display()))?;
    let mut watch = Watch::start()?;
    for test in plan.lines().filter_map(Test::parse) {
        Event::Begin.print()?;
        let attempt = Attempt::run(&test, patience)?;
        match attempt.failure {
            None => Event::Pass(attempt.took).print()?,
            Some(reason) => {
                for line in attempt.output.lines() {
                    Event::Output(line.to_owned()).print()?;
                }
                Event::Fail(attempt.took, reason).print()?;
            }
        }
        for complaint in watch.complaints() {
            Event::Complaint(complaint).print()?;
        }
    }
    Event::Done.print()
}

/// How one test went.
struct Attempt {
    took: Duration,
    failure: Option<String>,
    output: String,
}

impl Attempt {
    fn run(test: &Test, patience: Duration) -> Result<Attempt> {
        let log = std::env::temp_dir().join(format!("rxe-test-{}", std::process::id()));
        let begun = Instant::now();
        let failure = match start(test, &File::create(&log)?) {
            Err(error) => Some(format!("cannot run {}: {error}", test.executable.display())),
            Ok(mut child) => {
                let leader = child.id();
                let _at_interrupt = at_interrupt(move || end_group(leader))?;
                let status = wait(&mut child, begun + patience)?;
                let hung = status.is_none().then(|| where_it_hangs(child.id()));
                kill_group(&mut child); // also what the test has started and left behind
                let output = read_lossy(&log);
                match status {
                    None => Some(format!(
                        "not over after {} s: killed\n{}",
                        patience.as_secs(),
                        hung.unwrap_or_default()
                    )),
                    Some(status) => judge(status, &output, &test.name),
                }
            }
        };
        let output = read_lossy(&log);
        fs::remove_file(&log)?;
        Ok(Attempt {
            took: begun.elapsed(),
            failure,
            output,
        })
    }
}

/// The executable with this test alone, in a process group of its own.
fn start(test: &Test, log: &File) -> io::Result<Child> {
    Command::new(&test.executable)
        .args([
            "--exact",
            &test.name,
            "--include-ignored",
            "--test-threads=1",
        ])
        .current_dir(&test.folder)
        .env("CARGO_MANIFEST_DIR", &test.folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log.try_clone()?)
        .process_group(0)
        .spawn()
}

/// The exit status, `None` if the deadline came first.
fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Why the test has not passed. That the process ended well is not enough: it may have run no test.
fn judge(status: ExitStatus, output: &str, name: &str) -> Option<String> {
    if !status.success() {
        return Some(status.to_string());
    }
    let ran = output.contains("test result: ok. 1 passed") || Report::read(output).passed == [name];
    (!ran).then(|| "ended well without having run the test".to_owned())
}

/// The kernel's side of each thread, as far as it may be read.
fn where_it_hangs(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let describe = |folder: PathBuf| {
        let read = |name| fs::read_to_string(folder.join(name)).unwrap_or_default();
        format!(
            "thread {} in:\n{}",
            read("comm").trim(),
            read("stack").trim_end()
        )
    };
    tasks
        .map(|task| describe(task.path()))
        .collect::<Vec<_>>()
        .join("\n")
}

fn read_lossy(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// Compares the kernel's state with what it was before.
struct Watch {
    log: KernelLog,
    before: Resources,
}

impl Watch {
    fn start() -> Result<Watch> {
        Ok(Watch {
            log: KernelLog::from_here()?,
            before: Resources::now()?,
        })
    }

    /// What the kernel has warned of and kept since the last call.
    fn complaints(&mut self) -> Vec<String> {
        let mut complaints = self.log.alarms();
        match self.leak() {
            Ok(None) => {}
            Ok(Some((text, now))) => {
                complaints.push(text);
                self.before = now; // named once, after the first test that has left it
            }
            Err(error) => complaints.push(format!("{error:#}")),
        }
        complaints
    }

    /// The kernel frees some objects a little after the process has ended. Looks are counted, not seconds: a machine
    /// that stood still has done nothing in the meantime.
    fn leak(&self) -> Result<Option<(String, Resources)>> {
        let mut leak = None;
        for _ in 0..LOOKS {
            let now = Resources::now()?;
            let Some(text) = self.before.growth(&now) else {
                return Ok(None);
            };
            leak = Some((format!("left in the kernel: {text}"), now));
            thread::sleep(Duration::from_millis(100));
        }
        Ok(leak)
    }
}

/// So often an object must have been seen after a test to be left over.
const LOOKS: usize = 150;

// ---- between ---------------------------------------------------------------------------------------

/// What the inside says to the outside.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Event {
    /// The next test of the plan starts.
    Begin,
    /// A line that a failed test has printed.
    Output(String),
    Pass(Duration),
    Fail(Duration, String),
    /// Found after the test: a warning of the kernel, or an object it still holds.
    Complaint(String),
    /// All tests of the plan are over.
    Done,
}

impl Event {
    fn print(&self) -> Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", self.to_line())?;
        Ok(out.flush()?)
    }

    fn to_line(&self) -> String {
        let one_line = |text: &str| text.replace('\n', "\u{2028}");
        match self {
            Event::Begin => "begin".to_owned(),
            Event::Output(text) => format!("output {text}"),
            Event::Pass(took) => format!("pass {}", took.as_millis()),
            Event::Fail(took, reason) => format!("fail {} {}", took.as_millis(), one_line(reason)),
            Event::Complaint(text) => format!("complaint {}", one_line(text)),
            Event::Done => "done".to_owned(),
        }
    }

    fn parse(line: &str) -> Option<Event> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let lines = |text: &str| text.replace('\u{2028}', "\n");
        let took = |text: &str| Some(Duration::from_millis(text.parse().ok()?));
        Some(match word {
            "begin" => Event::Begin,
            "output" => Event::Output(rest.to_owned()),
            "pass" => Event::Pass(took(rest)?),
            "fail" => {
                let (millis, reason) = rest.split_once(' ')?;
                Event::Fail(took(millis)?, lines(reason))
            }
            "complaint" => Event::Complaint(lines(rest)),
            "done" => Event::Done,
            _ => return None,
        })
    }
}

// ---- outside ---------------------------------------------------------------------------------------

/// Follows a run from outside and keeps the results.
pub(crate) struct Progress {
    place: String,
    asked: usize,
    waiting: VecDeque<Test>,
    running: Option<Test>,
    last: Option<Test>,
    pub(crate) passed: usize,
    /// Titles of what has failed, each with the reason in one line.
    pub(crate) failed: Vec<String>,
    pending: Vec<u8>,
}

impl Progress {
    /// `place` names the kernel in what is shown.
    pub(crate) fn new(place: &str, tests: &[Test]) -> Progress {
        Progress {
            place: place.to_owned(),
            asked: tests.len(),
            waiting: tests.iter().cloned().collect(),
            running: None,
            last: None,
            passed: 0,
            failed: Vec::new(),
            pending: Vec::new(),
        }
    }

    /// How many tests there were at the start.
    pub(crate) fn asked(&self) -> usize {
        self.asked
    }

    /// The tests that have not begun.
    pub(crate) fn left(&self) -> Vec<Test> {
        self.waiting.iter().cloned().collect()
    }

    /// The run is over; a test that is still running did not survive it.
    pub(crate) fn end(&mut self, why: &str) {
        if let Some(test) = self.running.take() {
            self.fail(&test, why);
        }
        self.pending.clear();
    }

    /// Gives up on those that have not begun.
    pub(crate) fn abandon(&mut self, why: &str) {
        while let Some(test) = self.waiting.pop_front() {
            self.fail(&test, why);
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Begin => self.running = self.waiting.pop_front(),
            Event::Output(line) => println!("    {line}"),
            Event::Pass(took) => {
                if let Some(test) = self.running.take() {
                    self.passed += 1;
                    self.show(&test, &format!("ok ({:.1} s)", took.as_secs_f64()));
                    self.last = Some(test);
                }
            }
            Event::Fail(took, reason) => {
                if let Some(test) = self.running.take() {
                    self.fail(&test, &format!("{reason} ({:.1} s)", took.as_secs_f64()));
                    self.last = Some(test);
                }
            }
            Event::Complaint(text) => {
                if let Some(test) = self.last.clone() {
                    self.fail(&test, &format!("after it: {text}"));
                }
            }
            Event::Done => {}
        }
    }

    fn fail(&mut self, test: &Test, reason: &str) {
        self.show(test, &format!("FAILED: {reason}"));
        let first = reason.lines().next().unwrap_or_default();
        self.failed
            .push(format!("{}: {}: {first}", self.place, test.title()));
    }

    fn show(&self, test: &Test, outcome: &str) {
        println!("{}: {} ... {outcome}", self.place, test.title());
    }
}

impl crate::lab::Output for Progress {
    fn stdout(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.pending.extend_from_slice(bytes);
        while let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            match Event::parse(String::from_utf8_lossy(&line).trim_end_matches('\n')) {
                Some(event) => self.apply(event),
                None => print!("    {}", String::from_utf8_lossy(&line)),
            }
        }
        Ok(())
    }

    fn stderr(&mut self, bytes: &[u8]) -> io::Result<()> {
        io::stderr().write_all(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Output;

    fn test(name: &str) -> Test {
        Test {
            label: "l".into(),
            executable: "/e".into(),
            folder: "/f".into(),
            name: name.into(),
        }
    }

    #[test]
    fn a_plan_is_read_as_it_was_written() {
        let tests = [test("a::b"), test("c")];
        let read: Vec<Test> = plan(&tests).lines().filter_map(Test::parse).collect();
        assert_eq!(read, tests);
    }

    #[test]
    fn events_are_read_as_they_were_written() {
        for event in [
            Event::Begin,
            Event::Output("  two  words ".into()),
            Event::Pass(Duration::from_millis(12)),
            Event::Fail(Duration::from_millis(3), "line\nand line".into()),
            Event::Complaint("a\nb".into()),
            Event::Done,
        ] {
            assert_eq!(Event::parse(&event.to_line()), Some(event));
        }
    }

    #[test]
    fn the_test_that_was_running_when_the_guest_died_has_failed_and_the_others_are_left() {
        let mut progress = Progress::new("6.1", &[test("a"), test("b"), test("c")]);
        progress.stdout(b"begin\npass 5\nbeg").unwrap();
        progress.stdout(b"in\n").unwrap();
        progress.end("the guest died");

        assert_eq!(progress.passed, 1);
        assert_eq!(progress.failed, ["6.1: l b: the guest died"]);
        assert_eq!(progress.left(), [test("c")]);
    }

    #[test]
    fn a_complaint_names_the_test_after_which_it_appeared() {
        let mut progress = Progress::new("6.1", &[test("a"), test("b")]);
        progress
            .stdout(b"begin\npass 5\ncomplaint left in the kernel: mr\n")
            .unwrap();
        assert_eq!(
            progress.failed,
            ["6.1: l a: after it: left in the kernel: mr"]
        );
    }

    #[test]
    fn a_process_that_ran_no_test_has_not_passed() {
        let well = ExitStatus::default();
        assert_eq!(judge(well, "test a ... ok\n", "a"), None);
        assert!(judge(well, "running 0 tests\n", "a").is_some());
    }
}
