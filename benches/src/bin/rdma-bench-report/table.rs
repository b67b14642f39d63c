//! Tables for people, as Markdown: readable as they are, and ready for docs/performance.md.

use std::collections::BTreeMap;

use rdma_bench::record::{Bed, FLOOR_WATCHING, Figures};

use crate::row::{Entry, Row};

/// Prints all tables that have rows.
pub(crate) fn print(bed: &Bed, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!(
        "Linux {}, {} processors, medians of {} rounds (one more, the first, was dropped).\n",
        bed.kernel,
        bed.cpus,
        bed.rounds.saturating_sub(1)
    );
    latency(rows);
    rates(rows);
    connections(rows);
    truth(rows);
    absent(rows);
}

fn of<'a>(rows: &'a [Row], prefix: &str) -> Vec<&'a Row> {
    rows.iter()
        .filter(|row| row.case.starts_with(prefix))
        .collect()
}

fn heading(title: &str, columns: &[&str]) {
    println!("### {title}\n");
    println!("| {} |", columns.join(" | "));
    let rule: Vec<&str> = columns
        .iter()
        .enumerate()
        .map(|(index, _)| if index == 0 { "---" } else { "--:" })
        .collect();
    println!("| {} |", rule.join(" | "));
}

fn latency(rows: &[Row]) {
    let rows = of(rows, "latency/");
    if rows.is_empty() {
        return;
    }
    heading(
        "Latency: microseconds (median, 99 % in brackets)",
        &[
            "operation / bytes / wait",
            "ours",
            "floor",
            "ours/floor",
            "ours/floor that watches the CM",
            "best peer",
            "ours/best peer",
            "±",
        ],
    );
    for row in rows {
        let best = row.peers().first().copied();
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            row.case.trim_start_matches("latency/"),
            time(row.entry("ours")),
            time(row.entry("floor")),
            ratio(row.entry("ours"), row.entry("floor")),
            ratio(row.entry("ours"), row.entry(FLOOR_WATCHING)),
            named(best, time),
            ratio(row.entry("ours"), best),
            percent(
                row.entry("ours")
                    .or(row.entry("floor"))
                    .and_then(|entry| entry.spread)
            ),
        );
    }
    println!();
}

fn rates(rows: &[Row]) {
    let rows = of(rows, "rate/");
    if rows.is_empty() {
        return;
    }
    heading(
        "Rate: operations a second (10^6 bytes a second in brackets); ratios are of time, so below 1 is faster",
        &[
            "operation / bytes / wait / depth, batch, signaled every",
            "ours",
            "floor",
            "ours/floor",
            "best peer",
            "ours/best peer",
            "±",
        ],
    );
    for row in rows {
        let best = row.peers().first().copied();
        println!(
            "| {} | {} | {} | {} | {} | {} | {} |",
            row.case.trim_start_matches("rate/"),
            rate(row.entry("ours")),
            rate(row.entry("floor")),
            ratio(row.entry("ours"), row.entry("floor")),
            named(best, rate),
            ratio(row.entry("ours"), best),
            percent(
                row.entry("ours")
                    .or(row.entry("floor"))
                    .and_then(|entry| entry.spread)
            ),
        );
    }
    println!();
}

fn connections(rows: &[Row]) {
    let rows = of(rows, "connect");
    if rows.is_empty() {
        return;
    }
    heading(
        "A connection: microseconds a phase",
        &[
            "program",
            "resolve",
            "create",
            "connect",
            "disconnect",
            "destroy",
            "all",
        ],
    );
    for entry in rows.iter().flat_map(|row| &row.entries) {
        let Some(figures) = &entry.figures else {
            continue;
        };
        let phases = phases(figures);
        let all: f64 = phases.iter().flatten().sum();
        let cells: Vec<String> = phases.iter().map(|phase| number(*phase)).collect();
        println!("| {} | {} | {all:.0} |", entry.who, cells.join(" | "));
    }
    println!();
}

fn phases(figures: &Figures) -> [Option<f64>; 5] {
    [
        figures.resolve_us,
        figures.create_us,
        figures.connect_us,
        figures.disconnect_us,
        figures.destroy_us,
    ]
}

fn truth(rows: &[Row]) {
    let rows = of(rows, "truth/");
    if rows.is_empty() {
        return;
    }
    heading(
        "Time to truth: the peer is killed, milliseconds until every operation has its outcome",
        &["program", "ms", "had succeeded", "ended with an error"],
    );
    for entry in rows.iter().flat_map(|row| &row.entries) {
        let Some(figures) = &entry.figures else {
            continue;
        };
        println!(
            "| {} | {} | {} | {} |",
            entry.who,
            number(figures.truth_ms),
            whole(figures.ok),
            whole(figures.failed)
        );
    }
    println!();
}

/// Who is missing, and why; and which runs lost packets or met a receiver that was not ready.
fn absent(rows: &[Row]) {
    let mut cases_of: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for row in rows {
        for entry in &row.entries {
            for mark in marks(row, entry) {
                let cases = cases_of
                    .entry(format!("{}: {mark}", entry.who))
                    .or_default();
                cases.push(&row.case);
            }
        }
    }
    if cases_of.is_empty() {
        return;
    }
    println!("### What did not run, and what * means\n");
    for (mark, cases) in cases_of {
        println!("- {mark} ({})", cases.join(", "));
    }
    println!();
}

fn marks(row: &Row, entry: &Entry) -> Vec<String> {
    let mut marks: Vec<String> = entry.error.iter().cloned().collect();
    let killed = row.case.starts_with("truth/");
    if !killed && entry.retries + entry.rnr > 0 {
        marks.push("**not clean**: packets were sent again, or the receiver was not ready, so it measures the recovery too".to_owned());
    }
    if entry
        .figures
        .as_ref()
        .is_some_and(|figures| figures.verified == Some(false))
    {
        marks.push("**wrong data**".to_owned());
    }
    marks
}

fn time(entry: Option<&Entry>) -> String {
    let Some((entry, us)) = entry.and_then(|entry| Some((entry, entry.time()?))) else {
        return ABSENT.to_owned();
    };
    let unclean = unclean(entry);
    match entry.figures.as_ref().and_then(|figures| figures.p99_us) {
        Some(p99) => format!("{us:.1}{unclean} ({p99:.0})"),
        None => format!("{us:.1}{unclean}"),
    }
}

fn rate(entry: Option<&Entry>) -> String {
    let figures = entry.and_then(|entry| Some((entry, entry.figures.as_ref()?)));
    let Some((entry, figures)) = figures else {
        return ABSENT.to_owned();
    };
    let unclean = unclean(entry);
    match (figures.ops_per_s, figures.mb_per_s) {
        (Some(ops), Some(mb)) => format!("{ops:.0}{unclean} ({mb:.1})"),
        (Some(ops), None) => format!("{ops:.0}{unclean}"),
        (None, _) => ABSENT.to_owned(),
    }
}

/// A mark for a figure with packets that were sent again in it.
fn unclean(entry: &Entry) -> &'static str {
    if entry.retries + entry.rnr > 0 {
        "*"
    } else {
        ""
    }
}

fn named(entry: Option<&Entry>, value: fn(Option<&Entry>) -> String) -> String {
    match entry {
        Some(found) => format!("{} {}", found.who, value(entry)),
        None => ABSENT.to_owned(),
    }
}

fn ratio(ours: Option<&Entry>, other: Option<&Entry>) -> String {
    match ours.zip(other).and_then(|(ours, other)| ours.ratio(other)) {
        Some(ratio) => format!("{ratio:.2}"),
        None => ABSENT.to_owned(),
    }
}

fn percent(share: Option<f64>) -> String {
    match share {
        Some(share) => format!("{:.0} %", share * 100.0),
        None => ABSENT.to_owned(),
    }
}

fn number(value: Option<f64>) -> String {
    match value {
        Some(value) if value < 100.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
        None => ABSENT.to_owned(),
    }
}

fn whole(value: Option<u64>) -> String {
    value.map_or(ABSENT.to_owned(), |value| value.to_string())
}

const ABSENT: &str = "–";
