//! Runs every program of the benchmark in turn on a machine with two RDMA devices and a wire between them, and writes
//! one line of JSON for each run to its standard output. What it is doing goes to standard error.
//!
//! `cargo xtask bench` starts it in the lab's guest. It can be started by hand on any machine with two devices.

mod case;
mod count;
mod hw_counters;
mod pair;
mod peer;
mod syscalls;

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use rdma_bench::record::{Bed, Record, Run, is_own};

use case::Case;
use pair::Pair;
use peer::Contender;

#[derive(Parser)]
#[command(about, version)]
pub(crate) struct Options {
    /// The program on rdma-msg; without it, only the floor and the peers run.
    #[arg(long)]
    ours: Option<PathBuf>,
    /// The C floor.
    #[arg(long)]
    floor: PathBuf,
    /// The TCP peer.
    #[arg(long)]
    tcp: PathBuf,
    /// The address of the server's device.
    #[arg(long, default_value = "192.168.99.2")]
    server: IpAddr,
    /// The address of the client's device.
    #[arg(long, default_value = "192.168.99.1")]
    client: IpAddr,
    /// The server's device.
    #[arg(long, default_value = "rxe1")]
    server_dev: String,
    /// The client's device.
    #[arg(long, default_value = "rxe0")]
    client_dev: String,
    /// Rounds, of which the first is cold and dropped from the tables.
    #[arg(long, default_value_t = 6)]
    rounds: u32,
    /// All sizes, depths, batches and ways of waiting.
    #[arg(long)]
    full: bool,
    /// Only the cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Exact counts instead of times; meant for a guest whose clock counts instructions.
    #[arg(long)]
    counts: bool,
    /// Print the names of the cases and end.
    #[arg(long)]
    list: bool,
}

fn main() -> io::Result<()> {
    let options = Options::parse();
    let cases = chosen(&options);
    if options.list {
        for case in &cases {
            println!("{}", case.name());
        }
        return Ok(());
    }
    write(&Record::Bed(bed(&options)?))?;
    if options.counts {
        return count::run(&options, &cases);
    }
    let mut ports = 20_000..;
    for (index, case) in cases.iter().enumerate() {
        eprintln!("[{}/{}] {}", index + 1, cases.len(), case.name());
        rounds(&options, case, &mut ports)?;
    }
    Ok(())
}

fn chosen(options: &Options) -> Vec<Case> {
    let cases = match (options.counts, options.full) {
        (true, _) => case::counted(),
        (false, true) => case::full(),
        (false, false) => case::quick(),
    };
    cases
        .into_iter()
        .filter(|case| case.name().contains(&options.only))
        .collect()
}

fn bed(options: &Options) -> io::Result<Bed> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    Ok(Bed {
        kernel: kernel.trim().to_owned(),
        cpus: std::thread::available_parallelism()?.get(),
        rounds: options.rounds,
    })
}

/// A B A B ...: each round runs every contender once, so that a slow minute of the machine hits all of them.
fn rounds(options: &Options, case: &Case, ports: &mut impl Iterator<Item = u16>) -> io::Result<()> {
    let mut contenders = peer::contenders(options, case);
    for round in 0..options.rounds {
        let mut failed = Vec::new();
        for contender in &contenders {
            let Some(port) = ports.next() else {
                return Ok(());
            };
            let run = run_once(case, contender, round, port);
            if let Some(error) = &run.error {
                eprintln!("  {} failed in round {round}: {error}", run.who);
                failed.push(contender.name);
            }
            write(&Record::Run(Box::new(run)))?;
        }
        // What cannot run is said once; asking again would only cost its timeout each round.
        contenders.retain(|contender| !failed.contains(&contender.name));
    }
    Ok(())
}

fn run_once(case: &Case, contender: &Contender, round: u32, port: u16) -> Run {
    let before = hw_counters::read();
    let outcome = match &contender.commands {
        Ok(commands) => {
            let pair = Pair::new(commands, port, contender.ready);
            let seconds = if is_own(contender.name) {
                case.limit_s()
            } else {
                PEER_LIMIT_S
            };
            let limit = Duration::from_secs(seconds);
            let finished = match contender.killed_after {
                Some(lead) => pair.kill_the_server_after(lead, limit),
                None => pair.run(limit),
            };
            finished.and_then(|finished| {
                (contender.parse)(&finished, case).ok_or_else(|| finished.not_understood())
            })
        }
        Err(reason) => Err((*reason).to_owned()),
    };
    let spent = hw_counters::read() - before;
    let (figures, error) = match outcome {
        Ok(figures) => (Some(figures), None),
        Err(error) => (None, Some(error)),
    };
    Run {
        case: case.name(),
        who: contender.name.to_owned(),
        round,
        figures,
        error,
        retries: spent.retries,
        rnr: spent.rnr,
    }
}

/// Some of the tools hang on soft-RoCE now and then, and are not waited for as long as ours.
const PEER_LIMIT_S: u64 = 15;

pub(crate) fn write(record: &Record) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, record)?;
    writeln!(out)?;
    out.flush()
}
