//! Exact counts: instructions, system calls, allocations, doorbells and completions per operation, ours and the floor's.
//!
//! The guest's clock counts the instructions of its one processor, of both processes and the kernel together, so the
//! nanoseconds of a measurement are instructions. System calls are counted in runs of their own, since counting costs
//! instructions; two runs of different length give the calls of an operation without those of the set-up.

use std::io;
use std::time::Duration;

use rdma_bench::record::{Count, Figures, Record};
use rdma_bench::spec::{Mode, Wait};
use rdma_bench::stats::median;

use crate::case::Case;
use crate::pair::Pair;
use crate::syscalls::Trace;
use crate::{Options, peer, write};

/// Counts each case and writes the records.
pub(crate) fn run(options: &Options, cases: &[Case]) -> io::Result<()> {
    let mut counter = Counter {
        options,
        port: 20_000,
    };
    for case in cases {
        eprintln!("{}", case.name());
        let ours = match &options.ours {
            Some(program) => Some(counter.count(&program.to_string_lossy(), case)?),
            None => None,
        };
        let floor = counter.count(&options.floor.to_string_lossy(), case)?;
        let ours = ours.as_ref().unwrap_or(&floor);
        for record in compare(&case.name(), ours, &floor) {
            write(&Record::Count(record))?;
        }
        if case.mode == Mode::Latency && case.op.consumes_receive() {
            let watching = Case {
                wait: Wait::Watch,
                ..*case
            };
            let floor = counter.count(&options.floor.to_string_lossy(), &watching)?;
            let name = format!("{} (floor watching the CM)", case.name());
            for record in compare(&name, ours, &floor).into_iter().take(2) {
                write(&Record::Count(record))?;
            }
        }
    }
    Ok(())
}

/// One processor runs both sides. Under the usual policy a process that is woken may take it from the one that woke it,
/// or not: which, hangs on a few instructions, and with it how often each side sleeps. In a batch it never does.
const RUN_UNTIL_IT_SLEEPS: [&str; 3] = ["chrt", "--batch", "0"];

/// Seconds of this guest are no measure: its clock leaps to the next timer while it waits for a file of the machine.
/// Who starts the guest limits its time by a clock of his own.
const LIMIT: Duration = Duration::from_secs(100_000);

/// The kernel finds a queue pair by its number, which takes a few instructions more or less for each: hence the median
/// of so many connections.
const CONNECTIONS: usize = 3;

/// Per operation; a round trip is one operation. `None`: the program does not say.
struct PerOperation {
    instructions: Option<f64>,
    syscalls: Option<f64>,
    allocations: Option<f64>,
    doorbells: Option<f64>,
    completions: Option<f64>,
    wakeups: Option<f64>,
}

struct Counter<'a> {
    options: &'a Options,
    port: u16,
}

impl Counter<'_> {
    fn count(&mut self, program: &str, case: &Case) -> io::Result<PerOperation> {
        let iters = 1024;
        let mut runs = Vec::new();
        for _ in 0..CONNECTIONS {
            runs.push(self.run(program, case, iters)?.0);
        }
        let middle = |value: fn(&Figures) -> Option<f64>| {
            median(&runs.iter().filter_map(value).collect::<Vec<_>>())
        };
        let per = |total: Option<f64>| total.map(|total| total / f64::from(iters));
        Ok(PerOperation {
            instructions: middle(|run| run.steady_us.map(|us| us * 1e3)),
            syscalls: Some(self.syscalls(program, case)?),
            allocations: per(middle(|run| whole(run.allocations))),
            doorbells: per(middle(|run| whole(run.doorbells))),
            completions: per(middle(|run| whole(run.completions))),
            wakeups: per(middle(|run| whole(run.wakeups))),
        })
    }

    /// The calls of a longer run less those of a shorter one.
    fn syscalls(&mut self, program: &str, case: &Case) -> io::Result<f64> {
        let (short, long) = (256, 768);
        let trace = Trace::start()?;
        let mut calls = |iters| -> io::Result<u64> {
            let (_, pid) = self.run(program, case, iters)?;
            Ok(trace.of(pid)?.values().sum())
        };
        let (few, many) = (calls(short)?, calls(long)?);
        Ok((many - few) as f64 / f64::from(long - short))
    }

    fn run(&mut self, program: &str, case: &Case, iters: u32) -> io::Result<(Figures, u32)> {
        self.port += 1;
        let mut contender = peer::own("counted", program, self.options, case);
        let commands = contender
            .commands
            .as_mut()
            .map_err(|error| io::Error::other(*error))?;
        for side in [&mut commands.server, &mut commands.client] {
            side.splice(0..0, RUN_UNTIL_IT_SLEEPS.map(str::to_owned));
            side.extend(["--no-samples", "--iters"].map(str::to_owned));
            side.push(iters.to_string());
            side.push("--limit".to_owned());
            side.push(LIMIT.as_secs().to_string());
        }
        let finished = Pair::new(commands, self.port, contender.ready)
            .looked_at_every(Duration::from_millis(200))
            .run(LIMIT)
            .map_err(|error| io::Error::other(format!("{}: {program}: {error}", case.name())))?;
        let figures = (contender.parse)(&finished, case)
            .ok_or_else(|| io::Error::other(finished.not_understood()))?;
        Ok((figures, finished.client_pid))
    }
}

fn whole(total: Option<u64>) -> Option<f64> {
    total.map(|total| total as f64)
}

fn compare(case: &str, ours: &PerOperation, floor: &PerOperation) -> Vec<Count> {
    type Column = (&'static str, fn(&PerOperation) -> Option<f64>);
    let columns: [Column; 6] = [
        ("instructions", |per| per.instructions),
        ("syscalls", |per| per.syscalls),
        ("allocations", |per| per.allocations),
        ("doorbells", |per| per.doorbells),
        ("completions", |per| per.completions),
        ("wakeups", |per| per.wakeups),
    ];
    columns
        .iter()
        .filter_map(|(what, value)| {
            let name = format!("{what}/{case}");
            Some(Count::new(name, value(ours)?, value(floor)?))
        })
        .collect()
}
