//! The clock and the counters of the measured part.

use std::time::Instant;

use rdma_bench::record::Figures;
use rdma_bench::stats::{median, quantile};
use rdma_msg::WorkerStats;

use crate::link::Link;
use crate::sys;

/// Runs from the first measured operation to the last.
pub(crate) struct Yardstick<'a> {
    link: &'a Link,
    stats: WorkerStats,
    allocations: u64,
    start: Instant,
    last: Instant,
    /// Nanoseconds of each operation, if they are wanted.
    samples: Vec<u64>,
    /// The time after each so many operations.
    marks: Vec<Instant>,
}

/// Operations between two marks.
const MARK_EVERY: u64 = 64;

impl<'a> Yardstick<'a> {
    pub(crate) fn start(link: &'a Link, with_samples: bool) -> Yardstick<'a> {
        let iters = link.spec.iters as usize;
        let samples = Vec::with_capacity(if with_samples { iters } else { 0 });
        let mut marks = Vec::with_capacity(iters / MARK_EVERY as usize + 1);
        let stats = link.worker.stats();
        let allocations = sys::allocations();
        let start = Instant::now();
        marks.push(start);
        Yardstick {
            link,
            stats,
            allocations,
            start,
            last: start,
            samples,
            marks,
        }
    }

    /// One operation is over, or a batch was posted: `measured` so far.
    #[inline]
    pub(crate) fn mark(&mut self, measured: u64) {
        if measured >= self.marks.len() as u64 * MARK_EVERY {
            self.marks.push(Instant::now());
        }
        if self.samples.len() < self.samples.capacity() {
            let now = Instant::now();
            self.samples.push((now - self.last).as_nanos() as u64);
            self.last = now;
        }
    }

    pub(crate) fn stop(self, verified: bool) -> Figures {
        let total = self.start.elapsed();
        let allocations = sys::allocations() - self.allocations;
        let stats = self.link.worker.stats();
        let spec = &self.link.spec;
        let (seconds, iters) = (total.as_secs_f64(), f64::from(spec.iters));
        let samples: Vec<f64> = self.samples.iter().map(|ns| *ns as f64 / 1e3).collect();
        Figures {
            p50_us: median(&samples),
            p99_us: quantile(&samples, 0.99),
            steady_us: median(&self.stretches()),
            mean_us: Some(seconds * 1e6 / iters),
            ops_per_s: Some(iters / seconds),
            mb_per_s: Some(iters / seconds * f64::from(spec.size) / 1e6),
            total_ns: Some(total.as_nanos() as u64),
            doorbells: Some(stats.ops.doorbells - self.stats.ops.doorbells),
            completions: Some(stats.completions - self.stats.completions),
            arms: Some(stats.arms - self.stats.arms),
            wakeups: Some(stats.sleeps - self.stats.sleeps),
            allocations: Some(allocations),
            verified: Some(verified),
            ..Figures::default()
        }
    }

    /// Microseconds of an operation between each two marks.
    fn stretches(&self) -> Vec<f64> {
        self.marks
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_nanos() as f64 / 1e3 / MARK_EVERY as f64)
            .collect()
    }
}
