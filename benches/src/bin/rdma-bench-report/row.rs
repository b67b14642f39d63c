//! From single runs to rows: medians over the rounds, and who comes closest.

use rdma_bench::record::{Figures, Run, is_own};
use rdma_bench::stats::{median, spread};
use serde::Serialize;

/// All that was measured of one case.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) entries: Vec<Entry>,
}

/// One program's part of a row: medians over the rounds but the first.
#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) who: String,
    pub(crate) figures: Option<Figures>,
    /// Of the figure that the row compares, ± this share of the median.
    pub(crate) spread: Option<f64>,
    pub(crate) error: Option<String>,
    pub(crate) retries: u64,
    pub(crate) rnr: u64,
}

impl Row {
    pub(crate) fn entry(&self, who: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.who == who)
    }

    /// The size in bytes that the name of the case says.
    pub(crate) fn size(&self) -> Option<u32> {
        self.case.split('/').nth(2)?.parse().ok()
    }

    /// The tools that do the same as the row, the best first.
    pub(crate) fn peers(&self) -> Vec<&Entry> {
        let mut peers: Vec<_> = self
            .entries
            .iter()
            .filter(|entry| entry.is_peer() && entry.figures.is_some())
            .collect();
        peers.sort_by(|a, b| {
            f64::total_cmp(&a.time().unwrap_or(f64::MAX), &b.time().unwrap_or(f64::MAX))
        });
        peers
    }
}

impl Entry {
    /// A tool that does the same as the row.
    fn is_peer(&self) -> bool {
        !is_own(&self.who) && !self.who.contains("a cycle of")
    }

    /// Microseconds of an operation: the median where the program says it, else the mean.
    pub(crate) fn time(&self) -> Option<f64> {
        let figures = self.figures.as_ref()?;
        figures.p50_us.or(figures.mean_us)
    }

    /// This one's time as a multiple of the other's; medians if both say one, else means.
    pub(crate) fn ratio(&self, other: &Entry) -> Option<f64> {
        let (a, b) = (self.figures.as_ref()?, other.figures.as_ref()?);
        match (a.p50_us, b.p50_us) {
            (Some(a), Some(b)) => Some(a / b),
            _ => Some(a.mean_us? / b.mean_us?),
        }
    }
}

/// One row a case, in the order of the runs.
pub(crate) fn rows(runs: &[Run]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for case in distinct(runs.iter().map(|run| run.case.as_str())) {
        let of_case: Vec<&Run> = runs.iter().filter(|run| run.case == case).collect();
        let entries = distinct(of_case.iter().map(|run| run.who.as_str()))
            .into_iter()
            .map(|who| entry(who, &of_case))
            .collect();
        rows.push(Row {
            case: case.to_owned(),
            entries,
        });
    }
    rows
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

fn entry(who: &str, runs: &[&Run]) -> Entry {
    let own: Vec<&Run> = runs.iter().copied().filter(|run| run.who == who).collect();
    let warm: Vec<&Figures> = own
        .iter()
        .filter(|run| run.round > 0)
        .filter_map(|run| run.figures.as_ref())
        .collect();
    let error = own.iter().find_map(|run| run.error.clone());
    let times: Vec<f64> = warm
        .iter()
        .filter_map(|figures| figures.p50_us.or(figures.mean_us))
        .collect();
    let counted = own.iter().filter(|run| run.round > 0);
    Entry {
        who: who.to_owned(),
        figures: (!warm.is_empty()).then(|| medians(&warm)),
        spread: spread(&times),
        error,
        retries: counted.clone().map(|run| run.retries).sum(),
        rnr: counted.map(|run| run.rnr).sum(),
    }
}

/// The median of each figure by itself.
fn medians(all: &[&Figures]) -> Figures {
    let number = |value: fn(&Figures) -> Option<f64>| {
        median(
            &all.iter()
                .filter_map(|figures| value(figures))
                .collect::<Vec<_>>(),
        )
    };
    let whole = |value: fn(&Figures) -> Option<u64>| {
        let values: Vec<f64> = all
            .iter()
            .filter_map(|figures| value(figures))
            .map(|value| value as f64)
            .collect();
        median(&values).map(|value| value as u64)
    };
    Figures {
        p50_us: number(|f| f.p50_us),
        p99_us: number(|f| f.p99_us),
        mean_us: number(|f| f.mean_us),
        steady_us: number(|f| f.steady_us),
        ops_per_s: number(|f| f.ops_per_s),
        mb_per_s: number(|f| f.mb_per_s),
        total_ns: whole(|f| f.total_ns),
        doorbells: whole(|f| f.doorbells),
        completions: whole(|f| f.completions),
        arms: whole(|f| f.arms),
        wakeups: whole(|f| f.wakeups),
        allocations: whole(|f| f.allocations),
        verified: all.iter().map(|f| f.verified).min().flatten(),
        resolve_us: number(|f| f.resolve_us),
        create_us: number(|f| f.create_us),
        connect_us: number(|f| f.connect_us),
        disconnect_us: number(|f| f.disconnect_us),
        destroy_us: number(|f| f.destroy_us),
        truth_ms: number(|f| f.truth_ms),
        ok: whole(|f| f.ok),
        failed: whole(|f| f.failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(who: &str, round: u32, p50_us: f64) -> Run {
        Run {
            case: "latency/send/64/event".to_owned(),
            who: who.to_owned(),
            round,
            figures: Some(Figures {
                p50_us: Some(p50_us),
                ..Figures::default()
            }),
            error: None,
            retries: 0,
            rnr: 0,
        }
    }

    #[test]
    fn the_cold_round_does_not_count() {
        let rows = rows(&[
            run("ours", 0, 900.0),
            run("ours", 1, 10.0),
            run("ours", 2, 12.0),
        ]);
        assert_eq!(rows[0].entries[0].time(), Some(12.0));
    }

    #[test]
    fn the_best_peer_is_the_fastest_that_is_neither_ours_nor_the_floor() {
        let rows = rows(&[
            run("ours", 1, 10.0),
            run("floor", 1, 9.0),
            run("rping (a cycle of 6)", 1, 1.0),
            run("slow", 1, 20.0),
            run("fast", 1, 11.0),
        ]);
        assert_eq!(rows[0].peers()[0].who, "fast");
    }
}
