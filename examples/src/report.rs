//! What a ping-pong measured: as a table for people, as JSON for programs.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies from 1 ns to a minute, to three digits.
#[derive(Debug)]
pub struct Latencies {
    nanoseconds: Histogram<u64>,
    total: Duration,
}

/// Percentiles of a run, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LatencyUs {
    /// The quickest.
    pub min: f64,
    /// The middle one.
    pub median: f64,
    /// 99 of 100 were no slower.
    pub p99: f64,
    /// 999 of 1000 were no slower.
    pub p999: f64,
    /// The slowest.
    pub max: f64,
}

/// The result for one message size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Bytes a message.
    pub size_bytes: usize,
    /// How many were measured.
    pub iterations: u64,
    /// Whether every byte of every iteration was compared with the pattern, at both ends.
    pub verified: bool,
    /// Latency of one message, as the operation defines it.
    pub latency_us: LatencyUs,
    /// Messages a second, over the timed sections.
    pub msgs_per_s: f64,
    /// Megabytes (10^6) of payload a second, over the timed sections.
    pub mb_per_s: f64,
}

impl Latencies {
    const MAX_NS: u64 = 60_000_000_000;

    /// An empty record.
    pub fn new() -> Latencies {
        let nanoseconds = Histogram::new_with_bounds(1, Self::MAX_NS, 3)
            .expect("1 < MAX_NS and 3 digits are within the histogram's bounds");
        Latencies {
            nanoseconds,
            total: Duration::ZERO,
        }
    }

    /// Records that `messages` messages, one after the other, took `elapsed`: each is counted with
    /// an equal share of it. A round trip is two messages.
    pub fn record(&mut self, elapsed: Duration, messages: u32) {
        let each = (elapsed / messages).as_nanos();
        let each = u64::try_from(each)
            .unwrap_or(u64::MAX)
            .clamp(1, Self::MAX_NS);
        self.nanoseconds
            .saturating_record_n(each, u64::from(messages));
        self.total += elapsed;
    }

    /// Sums up: `iterations` were run with messages of `size_bytes`.
    pub fn row(&self, size_bytes: usize, iterations: u64, verified: bool) -> Row {
        let us = |nanoseconds: u64| nanoseconds as f64 / 1000.0;
        let at = |quantile| us(self.nanoseconds.value_at_quantile(quantile));
        let messages = self.nanoseconds.len() as f64;
        let seconds = self.total.as_secs_f64().max(1e-9);
        Row {
            size_bytes,
            iterations,
            verified,
            latency_us: LatencyUs {
                min: us(self.nanoseconds.min()),
                median: at(0.5),
                p99: at(0.99),
                p999: at(0.999),
                max: us(self.nanoseconds.max()),
            },
            msgs_per_s: messages / seconds,
            mb_per_s: messages * size_bytes as f64 / seconds / 1e6,
        }
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies::new()
    }
}

/// The table's heading, ended by a newline.
pub fn heading() -> String {
    let names = [
        "min µs",
        "median µs",
        "p99 µs",
        "p99.9 µs",
        "max µs",
        "msg/s",
        "MB/s",
    ];
    let rest: String = names.iter().map(|name| format!(" {name:>10}")).collect();
    format!("{:>10} {:>10}{rest}\n", "size", "iterations")
}

/// The row as a line under [`heading`], ended by a newline.
pub fn line(row: &Row) -> String {
    let LatencyUs {
        min,
        median,
        p99,
        p999,
        max,
    } = row.latency_us;
    let times: String = [min, median, p99, p999, max]
        .iter()
        .map(|time| format!(" {time:>10.1}"))
        .collect();
    format!(
        "{:>10} {:>10}{times} {:>10.0} {:>10.2}\n",
        size(row.size_bytes),
        row.iterations,
        row.msgs_per_s,
        row.mb_per_s,
    )
}

/// The rows as a JSON array of objects, ended by a newline.
pub fn json(rows: &[Row]) -> String {
    let text = serde_json::to_string_pretty(rows);
    text.expect("numbers and booleans under string keys always serialise") + "\n"
}

/// `4096` as `4 KiB`: exact multiples only.
fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thousand() -> Row {
        let mut latencies = Latencies::new();
        for us in 1..=1000 {
            latencies.record(Duration::from_micros(us * 2), 2);
        }
        latencies.row(4096, 1000, true)
    }

    #[test]
    fn a_round_trip_counts_as_two_messages_of_half_the_time() {
        let row = thousand();
        let near = |found: f64, expected: f64| (found - expected).abs() <= expected * 0.002;
        assert!(near(row.latency_us.min, 1.0), "{row:?}");
        assert!(near(row.latency_us.median, 500.0), "{row:?}");
        assert!(near(row.latency_us.p99, 990.0), "{row:?}");
        assert!(near(row.latency_us.p999, 999.0), "{row:?}");
        assert!(near(row.latency_us.max, 1000.0), "{row:?}");
        // 2000 messages in 1.001 s.
        assert!(near(row.msgs_per_s, 2000.0 / 1.001), "{row:?}");
        assert!(near(row.mb_per_s, 2000.0 / 1.001 * 4096.0 / 1e6), "{row:?}");
    }

    #[test]
    fn the_json_has_the_promised_fields_and_nothing_else() {
        let parsed: serde_json::Value = serde_json::from_str(&json(&[thousand()])).unwrap();
        let row = parsed[0].as_object().unwrap();
        let names: Vec<&str> = row.keys().map(String::as_str).collect();
        let promised = [
            "iterations",
            "latency_us",
            "mb_per_s",
            "msgs_per_s",
            "size_bytes",
            "verified",
        ];
        assert_eq!(names, promised);
        assert_eq!(row["size_bytes"], 4096);
        assert_eq!(row["verified"], true);
        let percentiles: Vec<&str> = row["latency_us"]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(percentiles, ["max", "median", "min", "p99", "p999"]);
    }

    #[test]
    fn a_line_of_the_table_is_as_wide_as_its_heading() {
        let line = line(&thousand());
        assert_eq!(line.chars().count(), heading().chars().count());
        assert!(line.contains("4 KiB"), "{line}");
    }
}
