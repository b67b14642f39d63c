//! The rows of the tables: which measurements there are, and how long each runs.

use rdma_bench::spec::{Mode, Op, Wait};

/// One row: a measurement that every contender makes in its own way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) mode: Mode,
    pub(crate) op: Op,
    pub(crate) wait: Wait,
    pub(crate) size: u32,
    pub(crate) depth: u32,
    pub(crate) batch: u32,
    pub(crate) signal: u32,
}

impl Case {
    fn latency(op: Op, size: u32, wait: Wait) -> Case {
        Case {
            mode: Mode::Latency,
            op,
            wait,
            size,
            depth: 1,
            batch: 1,
            signal: 1,
        }
    }

    fn rate(op: Op, size: u32, depth: u32, batch: u32, signal: u32) -> Case {
        Case {
            mode: Mode::Rate,
            op,
            wait: Wait::Event,
            size,
            depth,
            batch,
            signal,
        }
    }

    fn connect() -> Case {
        Case {
            mode: Mode::Connect,
            ..Case::latency(Op::Send, 64, Wait::Event)
        }
    }

    fn truth() -> Case {
        Case {
            mode: Mode::Truth,
            depth: 128,
            ..Case::latency(Op::Write, 1 << 20, Wait::Watch)
        }
    }

    /// `latency/send/64/event`, `rate/send/64/event/d16b1s1`, `connect`, `truth/write/1048576/d128`.
    pub(crate) fn name(&self) -> String {
        let Case {
            mode,
            op,
            wait,
            size,
            depth,
            batch,
            signal,
        } = self;
        match mode {
            Mode::Latency => format!("latency/{op}/{size}/{wait}"),
            Mode::Rate => format!("rate/{op}/{size}/{wait}/d{depth}b{batch}s{signal}"),
            Mode::Connect => "connect".to_owned(),
            Mode::Truth => format!("truth/{op}/{size}/d{depth}"),
        }
    }

    /// Enough operations for a steady median, few enough that an emulated machine does a run in about a second.
    pub(crate) fn iters(&self) -> u32 {
        match (self.mode, self.size) {
            (Mode::Connect, _) => 20,
            (Mode::Truth, _) => self.depth,
            (Mode::Latency, ..=1024) => 1000,
            (Mode::Latency, ..=16_384) => 500,
            (Mode::Latency, ..=131_072) => 100,
            (Mode::Latency, _) => 10,
            (Mode::Rate, ..=1024) => 4096,
            (Mode::Rate, ..=16_384) => 2048,
            (Mode::Rate, ..=131_072) => 256,
            (Mode::Rate, _) => 32,
        }
    }

    /// Operations before the measured ones.
    pub(crate) fn warmup(&self) -> u32 {
        match self.mode {
            Mode::Connect => 2,
            Mode::Truth => 0,
            // A multiple of every batch and signaling period, so that the measured part starts with a fresh one.
            Mode::Latency | Mode::Rate => (self.iters() / 10).next_multiple_of(16),
        }
    }

    /// Seconds that a run of ours or the floor may take: many times what it takes on a quiet emulated machine.
    pub(crate) fn limit_s(&self) -> u64 {
        match self.mode {
            Mode::Truth => 30, // what has not heard of its peer's death by then never will
            Mode::Latency | Mode::Rate | Mode::Connect => 60,
        }
    }

    /// The options of `rdma-bench` and the floor, but for addresses and port.
    pub(crate) fn args(&self) -> Vec<String> {
        let values = [
            ("--mode", self.mode.to_string()),
            ("--op", self.op.to_string()),
            ("--wait", self.wait.to_string()),
            ("--size", self.size.to_string()),
            ("--iters", self.iters().to_string()),
            ("--warmup", self.warmup().to_string()),
            ("--depth", self.depth.to_string()),
            ("--batch", self.batch.to_string()),
            ("--signal", self.signal.to_string()),
            ("--limit", self.limit_s().to_string()),
        ];
        values
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value])
            .collect()
    }
}

const SIZES: [u32; 5] = [8, 64, 4096, 65_536, 1 << 20];

/// What a default run measures: every operation, and every size, depth and way of waiting at least once.
pub(crate) fn quick() -> Vec<Case> {
    use Op::{Cas, Faa, Read, Send, Write, WriteImm};
    use Wait::{Event, Hybrid, Spin};
    let mut cases = vec![
        Case::latency(Send, 64, Event),
        Case::latency(Send, 64, Hybrid),
        Case::latency(Send, 64, Spin),
    ];
    cases.extend([4096, 65_536, 1 << 20].map(|size| Case::latency(Send, size, Event)));
    cases.extend([Write, WriteImm, Read].map(|op| Case::latency(op, 64, Event)));
    cases.extend([Write, Read].map(|op| Case::latency(op, 65_536, Event)));
    cases.extend([Cas, Faa].map(|op| Case::latency(op, 8, Event)));
    cases.extend([
        Case::rate(Send, 64, 16, 1, 1),
        Case::rate(Send, 64, 128, 16, 16),
        Case::rate(Write, 64, 128, 1, 1),
        Case::rate(Write, 64, 128, 16, 16),
        Case::rate(Write, 64, 16, 1, 1),
        Case::rate(Write, 4096, 16, 1, 1),
        Case::rate(Write, 65_536, 16, 1, 1),
        Case::rate(Write, 1 << 20, 16, 1, 1),
        Case::rate(Read, 65_536, 16, 1, 1),
        Case::connect(),
        Case::truth(),
    ]);
    cases
}

/// Everything.
pub(crate) fn full() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in Op::ALL {
        for size in sizes_of(op) {
            for wait in [Wait::Event, Wait::Hybrid, Wait::Spin] {
                cases.push(Case::latency(op, size, wait));
            }
            cases.extend(rates(op, size));
        }
    }
    cases.extend([Case::connect(), Case::truth()]);
    cases
}

fn sizes_of(op: Op) -> Vec<u32> {
    if op.is_atomic() {
        vec![8]
    } else {
        SIZES.to_vec()
    }
}

fn rates(op: Op, size: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for depth in [1, 16, 128] {
        for batch in [1, 16] {
            for signal in [1, 16] {
                let fits = batch <= depth && signal <= depth;
                // Receive buffers of both sides must fit into the guest's memory.
                let small = u64::from(size) * u64::from(depth) <= 32 << 20;
                if fits && small {
                    cases.push(Case::rate(op, size, depth, batch, signal));
                }
            }
        }
    }
    cases
}

/// The few whose counts are asserted.
pub(crate) fn counted() -> Vec<Case> {
    use Op::{Cas, Faa, Read, Send, Write, WriteImm};
    let mut cases = vec![Case::latency(Send, 64, Wait::Event)];
    cases.extend([Write, WriteImm, Read].map(|op| Case::latency(op, 64, Wait::Event)));
    cases.extend([Cas, Faa].map(|op| Case::latency(op, 8, Wait::Event)));
    cases.extend([
        Case::rate(Send, 64, 16, 1, 1),
        Case::rate(Send, 64, 128, 16, 16),
        Case::rate(Write, 64, 128, 16, 16),
    ]);
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for cases in [quick(), full(), counted()] {
            let mut names: Vec<_> = cases.iter().map(Case::name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), cases.len());
        }
    }

    #[test]
    fn no_case_signals_or_batches_more_than_may_be_in_flight() {
        for case in full().iter().chain(&quick()).chain(&counted()) {
            assert!(
                case.batch <= case.depth && case.signal <= case.depth,
                "{case:?}"
            );
        }
    }
}
