//! Set-up, lab, ping-pong and tests: `cargo xtask help`.
//!
//! Depends on none of the RDMA crates, so that it builds on a machine where nothing is installed yet.

mod bench;
mod cargo;
mod interrupt;
mod lab;
mod lock;
mod native;
mod pingpong;
mod process;
mod scratch;
mod setup;
mod test;
mod workspace;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};
use setup::{Consent, Purpose};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;
use test::Step;

/// Set-up, lab, ping-pong and tests of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    /// Agree to what would be asked: installing packages, and with --native loading a module
    #[arg(long, global = true)]
    yes: bool,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Find out what the system lacks, and install it
    Setup,
    /// Measure a ping-pong between two RDMA hosts
    Pingpong(PingPongArgs),
    /// Run every test where it can run
    Test(TestArgs),
    /// Run a command where two RDMA hosts exist; without a command, a shell
    Lab(LabArgs),
    /// Measure ours beside a C floor and the C tools
    Bench(BenchArgs),
    /// Process 1 of the lab's guest
    #[command(hide = true)]
    LabInit,
    /// Run the tests of a plan next to the devices
    #[command(hide = true)]
    RxeTests { plan: PathBuf, patience: u64 },
}

#[derive(Args)]
struct PingPongArgs {
    /// The operation that carries the data [default: send]
    #[arg(long, value_enum)]
    op: Option<Op>,
    /// Message sizes in bytes [default: 64,4096,65536,1048576]
    #[arg(long, value_name = "BYTES", value_delimiter = ',')]
    size: Vec<u64>,
    /// Iterations of each size
    #[arg(long, value_name = "N")]
    iters: Option<u64>,
    /// How to wait for completions [default: hybrid]
    #[arg(long, value_enum)]
    wait: Option<Wait>,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// Use this machine's own device; put soft-RoCE on it if none is up (with --yes)
    #[arg(long)]
    native: bool,
    #[command(flatten)]
    kernel: KernelArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Op {
    Send,
    Write,
    Read,
}

#[derive(Clone, Copy, ValueEnum)]
enum Wait {
    Event,
    Spin,
    Hybrid,
}

#[derive(Args)]
struct TestArgs {
    /// Only tests whose title contains this; a title is the crate, the target and the test's name
    filter: Option<String>,
    /// Name every test with where it runs, and run none
    #[arg(long)]
    list: bool,
    /// The kernel of the RDMA tests' guest: a series that apt offers, or `both` for 6.1 and 6.12
    /// [default: both if CI=true, else 6.1]
    #[arg(long, value_name = "SERIES")]
    kernel: Option<String>,
    /// Run the RDMA tests on this machine's own devices
    #[arg(long, conflicts_with = "kernel")]
    native: bool,
    /// Leave the RDMA tests out
    #[arg(long, group = "steps")]
    host_only: bool,
    /// Run the RDMA tests alone
    #[arg(long, group = "steps")]
    rxe_only: bool,
    /// Run the host's tests under AddressSanitizer alone (nightly)
    #[arg(long, group = "steps")]
    asan: bool,
    /// Run tests under Miri alone (nightly)
    #[arg(long, group = "steps")]
    miri: bool,
    /// How long an RDMA test may take, in seconds [default: 600 if CI=true, else 300]
    #[arg(long, value_name = "S")]
    timeout: Option<u64>,
}

#[derive(Args)]
struct BenchArgs {
    /// All sizes, depths, batches and ways of waiting: two to three hours under emulation
    #[arg(long, conflicts_with = "counts")]
    full: bool,
    /// Only the cases whose name contains this, as latency/send/64/event
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Rounds, of which the first is dropped [default: 6]
    #[arg(long, value_name = "N", conflicts_with = "counts")]
    rounds: Option<u32>,
    /// Exact counts, held against benches/baselines.json if those are of the same kernel: the status is 1 if one is
    /// more than 3 % worse
    #[arg(long)]
    counts: bool,
    /// Instructions of ours an operation takes on the fake fabric, by function; needs valgrind, no guest
    #[arg(long, conflicts_with_all = ["counts", "full", "only", "rounds", "plot"])]
    instructions: bool,
    /// Make the counts the new baselines
    #[arg(long, requires = "counts", conflicts_with = "only")]
    update: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Draw latency and rate over size
    #[arg(long, value_name = "FILE.svg", conflicts_with = "counts")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    kernel: KernelArgs,
}

#[derive(Args)]
struct LabArgs {
    #[command(flatten)]
    kernel: KernelArgs,
    /// Stop the command after this many seconds, with exit status 124
    #[arg(long, value_name = "S")]
    timeout: Option<u64>,
    /// Processors of the guest
    #[arg(long, value_name = "N", default_value_t = 2)]
    smp: u32,
    /// Memory of the guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory: u32,
    /// One processor, and one nanosecond of guest time for each instruction: repeatable figures
    #[arg(long)]
    icount: bool,
    /// A folder of this machine that the command may write to; $LAB_OUT names it in the guest
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// No guest: next to this machine's own device; put soft-RoCE on it if none is up (with --yes)
    #[arg(long, conflicts_with_all = ["kernel", "kernel_image", "timeout", "icount", "out"])]
    native: bool,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Args)]
struct KernelArgs {
    /// The guest's kernel: the newest of this series that apt offers [default: 6.1]
    #[arg(long, value_name = "SERIES", conflicts_with = "kernel_image")]
    kernel: Option<String>,
    /// The guest's kernel: an image (bzImage) on this machine
    #[arg(long, value_name = "FILE", requires = "modules")]
    kernel_image: Option<PathBuf>,
    /// The folder with the modules of --kernel-image
    #[arg(long, value_name = "DIR", requires = "kernel_image")]
    modules: Option<PathBuf>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let consent = Consent::new(cli.yes);
    let (result, on_error) = match cli.task {
        Task::Setup => (set_up(consent), 1),
        Task::Pingpong(args) => (args.run(consent), 1),
        Task::Test(args) => (args.run(consent), 1),
        Task::Bench(args) => (args.run(consent), 1),
        // 125 as docker and timeout have it: not a status of the command.
        Task::Lab(args) => (args.run(consent), 125),
        Task::LabInit => lab::init::main(),
        Task::RxeTests { plan, patience } => (
            test::rxe::run(&plan, Duration::from_secs(patience)).map(|()| 0),
            1,
        ),
    };
    match result {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(on_error)
        }
    }
}

fn set_up(consent: Consent) -> Result<i32> {
    setup::ensure_installed(Purpose::ALL, consent)?;
    eprintln!("setup: nothing is missing");
    Ok(0)
}

/// As a shell gives it: 128 and the signal's number for a process that was killed.
fn exit_status(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

impl PingPongArgs {
    fn run(self, consent: Consent) -> Result<i32> {
        let options = self.options();
        let kernel = self.kernel.source();
        pingpong::PingPong {
            options,
            kernel,
            native: self.native,
            consent,
        }
        .run()
    }

    /// What was asked for; the rest is left to the program.
    fn options(&self) -> Vec<OsString> {
        let sizes = self.size.iter().map(|size| ("--size", size.to_string()));
        let options = [
            ("--op", self.op.and_then(name_of)),
            ("--wait", self.wait.and_then(name_of)),
            ("--iters", self.iters.map(|iters| iters.to_string())),
        ];
        let options = options
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        let mut words: Vec<OsString> = options
            .chain(sizes)
            .flat_map(|(name, value)| [name.into(), value.into()])
            .collect();
        words.extend(self.json.then(|| "--json".into()));
        words
    }
}

/// The word on the command line for a value.
fn name_of(value: impl ValueEnum) -> Option<String> {
    Some(value.to_possible_value()?.get_name().to_owned())
}

impl TestArgs {
    fn run(self, consent: Consent) -> Result<i32> {
        let run = test::Run {
            steps: self.steps(),
            kernels: self.kernels(),
            native: self.native,
            patience: self.patience(setup::is_ci()),
            consent,
            filter: self.filter,
        };
        if self.list { run.list() } else { run.run() }
    }

    fn steps(&self) -> Vec<Step> {
        if self.host_only {
            vec![Step::Host]
        } else if self.rxe_only {
            vec![Step::Rxe]
        } else if self.asan {
            vec![Step::AddressSanitizer]
        } else if self.miri {
            vec![Step::Miri]
        } else if setup::is_ci() {
            vec![Step::Host, Step::AddressSanitizer, Step::Miri, Step::Rxe]
        } else {
            vec![Step::Host, Step::Rxe]
        }
    }

    /// By default longer than the tests' own limits, which say more: up to four minutes.
    fn patience(&self, ci: bool) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(if ci { 600 } else { 300 }))
    }

    fn kernels(&self) -> Vec<Option<String>> {
        let both = || vec![Some("6.1".to_owned()), Some("6.12".to_owned())];
        match self.kernel.as_deref() {
            Some("both") => both(),
            Some(series) => vec![Some(series.to_owned())],
            None if setup::is_ci() => both(),
            None => vec![None],
        }
    }
}

impl BenchArgs {
    fn run(self, consent: Consent) -> Result<i32> {
        let (suite, report) = (self.suite_options(), self.report_options());
        if self.instructions {
            return bench::instructions(&report, consent);
        }
        bench::Bench {
            counts: self.counts,
            judge: self.counts && self.only.is_none(),
            suite,
            report,
            update: self.update,
            kernel: self.kernel.source(),
            consent,
        }
        .run()
    }

    fn suite_options(&self) -> Vec<OsString> {
        let mut options: Vec<OsString> = Vec::new();
        if self.full {
            options.push("--full".into());
        }
        if let Some(only) = &self.only {
            options.extend(["--only".into(), only.into()]);
        }
        if let Some(rounds) = self.rounds {
            options.extend(["--rounds".into(), rounds.to_string().into()]);
        }
        options
    }

    fn report_options(&self) -> Vec<OsString> {
        let mut options: Vec<OsString> = Vec::new();
        if self.json {
            options.push("--json".into());
        }
        if let Some(plot) = &self.plot {
            options.extend(["--plot".into(), plot.into()]);
        }
        options
    }
}

impl LabArgs {
    fn run(self, consent: Consent) -> Result<i32> {
        if self.native {
            return native::run(&self.command, consent);
        }
        setup::ensure_installed(&[Purpose::Lab], consent)?;
        if let Some(out) = &self.out {
            std::fs::create_dir_all(out)?;
        }
        let shape = lab::Shape {
            processors: self.smp,
            memory_mib: self.memory,
            counting: self.icount,
            out: self.out.map(|out| out.canonicalize()).transpose()?,
        };
        let timeout = self.timeout.map(Duration::from_secs);
        let kernel = self.kernel.source();
        lab::Lab {
            kernel,
            shape,
            timeout,
            silence: None,
            stdin: true,
            consent,
        }
        .run(&self.command)
    }
}

impl KernelArgs {
    fn source(self) -> lab::Source {
        match (self.kernel_image, self.modules) {
            (Some(image), Some(modules)) => lab::Source::Files { image, modules },
            _ => lab::Source::Archive(self.kernel),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_behind_two_dashes_is_the_labs_command() {
        let cli = Cli::try_parse_from(["xtask", "lab", "--timeout", "3", "--", "sh", "-c", "a b"]);
        let Task::Lab(args) = cli.unwrap().task else {
            panic!("not the lab")
        };
        assert_eq!(args.command, ["sh", "-c", "a b"]);
        assert_eq!(args.timeout, Some(3));
    }

    #[test]
    fn a_test_has_minutes_unless_the_command_line_says_otherwise() {
        let patience = |words: &[&str], ci| {
            let cli = Cli::try_parse_from([&["xtask", "test"], words].concat());
            let Task::Test(args) = cli.unwrap().task else {
                panic!("not the tests")
            };
            args.patience(ci).as_secs()
        };
        assert_eq!(patience(&[], false), 300);
        assert_eq!(patience(&[], true), 600);
        assert_eq!(patience(&["--timeout", "7"], true), 7);
    }

    #[test]
    fn the_ping_pong_is_told_what_was_asked_for_and_no_more() {
        let words = [
            "xtask", "pingpong", "--size", "64,128", "--size", "1", "--json", "--op", "read",
        ];
        let Task::Pingpong(args) = Cli::try_parse_from(words).unwrap().task else {
            panic!("not the ping-pong")
        };
        let options = args.options();
        assert_eq!(
            options,
            [
                "--op", "read", "--size", "64", "--size", "128", "--size", "1", "--json"
            ]
        );
    }
}
