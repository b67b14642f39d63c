//! The exact counts: printed, held against the baselines, or written as the new ones.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use rdma_bench::record::{Bed, Count};
use serde::{Deserialize, Serialize};

/// The file that `--update` writes.
#[derive(Serialize, Deserialize)]
struct Baselines {
    /// Major and minor number of the kernel: its instructions are counted too.
    kernel: String,
    counts: Vec<Count>,
}

/// How much worse a count may be before it fails.
const SLACK: f64 = 0.03;

/// Prints them as a table, a row for each case; pairs are ours and the floor's.
pub(crate) fn print(counts: &[Count]) {
    if counts.is_empty() {
        return;
    }
    println!(
        "| per operation | instructions, ours | floor | ours/floor | ours/floor that watches the CM | {} |",
        PAIRS.join(" | ")
    );
    println!("| --- |{}", " --: |".repeat(4 + PAIRS.len()));
    for case in cases(counts) {
        let find = |what: &str, suffix: &str| {
            let name = format!("{what}/{case}{suffix}");
            counts.iter().find(|count| count.name == name)
        };
        let instructions = find("instructions", "");
        let watching = find("instructions", WATCHING);
        let pairs: Vec<String> = PAIRS
            .iter()
            .map(|what| match find(what, "") {
                Some(count) => format!("{:.2} / {:.2}", count.ours, count.floor),
                None => ABSENT.to_owned(),
            })
            .collect();
        println!(
            "| {case} | {} | {} | {} | {} | {} |",
            whole(instructions.map(|count| count.ours)),
            whole(instructions.map(|count| count.floor)),
            ratio(instructions),
            ratio(watching),
            pairs.join(" | ")
        );
    }
    println!();
}

/// The names behind the first slash, each once.
fn cases(counts: &[Count]) -> Vec<&str> {
    let mut cases = Vec::new();
    for count in counts {
        if let Some((_, case)) = count.name.split_once('/')
            && !case.ends_with(WATCHING)
            && !cases.contains(&case)
        {
            cases.push(case);
        }
    }
    cases
}

fn whole(value: Option<f64>) -> String {
    value.map_or(ABSENT.to_owned(), |value| format!("{value:.0}"))
}

fn ratio(count: Option<&Count>) -> String {
    let ratio = count.and_then(|count| count.ratio);
    ratio.map_or(ABSENT.to_owned(), |ratio| format!("{ratio:.3}"))
}

/// What is exact by itself.
const PAIRS: [&str; 5] = [
    "syscalls",
    "doorbells",
    "completions",
    "wakeups",
    "allocations",
];
const WATCHING: &str = " (floor watching the CM)";
const ABSENT: &str = "–";

/// Fails naming each row that is worse than its baseline, or writes the baselines anew. Counts of another kernel than
/// the baselines' are not judged: which one there is depends on the machine, not on us.
pub(crate) fn judge(
    file: &Path,
    bed: &Bed,
    counts: &[Count],
    update: bool,
) -> Result<ExitCode, Box<dyn Error>> {
    let kernel = major_minor(&bed.kernel);
    if update {
        let baselines = Baselines {
            kernel,
            counts: counts.to_vec(),
        };
        fs::write(file, serde_json::to_string_pretty(&baselines)? + "\n")?;
        eprintln!("wrote {} baselines to {}", counts.len(), file.display());
        return Ok(ExitCode::SUCCESS);
    }
    let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let baselines: Baselines = serde_json::from_str(&text)?;
    if baselines.kernel != kernel {
        eprintln!(
            "counts: 0 passed, 0 failed, {} skipped: the baselines are those of Linux {}, this was counted on {kernel}",
            baselines.counts.len(),
            baselines.kernel
        );
        return Ok(ExitCode::SUCCESS);
    }
    let verdicts = verdicts(&baselines.counts, counts);
    for verdict in &verdicts {
        eprintln!("worse: {verdict}");
    }
    let kept = baselines.counts.len().saturating_sub(verdicts.len());
    eprintln!("counts: {kept} passed, {} failed", verdicts.len());
    Ok(if verdicts.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn verdicts(baselines: &[Count], counts: &[Count]) -> Vec<String> {
    let mut verdicts: Vec<String> = baselines
        .iter()
        .filter_map(
            |baseline| match counts.iter().find(|count| count.name == baseline.name) {
                Some(count) => worse(baseline, count),
                None => Some(format!("{}: was not counted", baseline.name)),
            },
        )
        .collect();
    let unknown = counts
        .iter()
        .filter(|count| !baselines.iter().any(|baseline| baseline.name == count.name))
        .map(|count| format!("{}: has no baseline yet, run with --update", count.name));
    verdicts.extend(unknown);
    verdicts
}

/// Instructions are compared as a multiple of the floor's, which has the kernel's and the compiler's changes in it too;
/// everything else is exact and compared as it is.
fn worse(baseline: &Count, count: &Count) -> Option<String> {
    let (was, is) = if baseline.name.starts_with("instructions/") {
        (baseline.ratio?, count.ratio?)
    } else {
        (baseline.ours, count.ours)
    };
    // A hundredth of an operation: what falls on the edges of the measured part.
    (is > was * (1.0 + SLACK) + 0.01)
        .then(|| format!("{}: {was:.3} before, {is:.3} now", baseline.name))
}

/// `6.1.0-57-amd64` is `6.1`.
fn major_minor(release: &str) -> String {
    release.split('.').take(2).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(name: &str, ours: f64, floor: f64) -> Count {
        Count::new(name.to_owned(), ours, floor)
    }

    #[test]
    fn a_worse_count_is_named() {
        let found = verdicts(
            &[count("syscalls/a", 3.0, 3.0)],
            &[count("syscalls/a", 4.0, 3.0)],
        );
        assert_eq!(found, ["syscalls/a: 3.000 before, 4.000 now"]);
    }

    #[test]
    fn a_slower_kernel_is_not_our_fault() {
        let before = [count("instructions/a", 1020.0, 1000.0)];
        assert!(verdicts(&before, &[count("instructions/a", 2040.0, 2000.0)]).is_empty());
        assert_eq!(
            verdicts(&before, &[count("instructions/a", 1100.0, 1000.0)]).len(),
            1
        );
    }

    #[test]
    fn one_allocation_where_there_was_none_fails() {
        let found = verdicts(
            &[count("allocations/a", 0.0, 0.0)],
            &[count("allocations/a", 1.0, 0.0)],
        );
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn counts_of_another_kernel_than_the_baselines_are_not_judged() {
        let file = std::env::temp_dir().join(format!("counts-test-{}", std::process::id()));
        let baselines = Baselines {
            kernel: "6.1".to_owned(),
            counts: vec![count("syscalls/a", 3.0, 3.0)],
        };
        fs::write(&file, serde_json::to_string(&baselines).unwrap()).unwrap();
        let worse = [count("syscalls/a", 4.0, 3.0)];
        let status = |kernel: &str| {
            let bed = Bed {
                kernel: kernel.to_owned(),
                cpus: 1,
                rounds: 1,
            };
            format!("{:?}", judge(&file, &bed, &worse, false).unwrap())
        };
        assert_eq!(
            status("6.12.9+deb12-amd64"),
            format!("{:?}", ExitCode::SUCCESS)
        );
        assert_eq!(status("6.1.0-57-amd64"), format!("{:?}", ExitCode::FAILURE));
        fs::remove_file(file).unwrap();
    }

    #[test]
    fn a_row_that_vanished_or_is_new_fails() {
        assert_eq!(verdicts(&[count("syscalls/a", 1.0, 1.0)], &[]).len(), 1);
        assert_eq!(verdicts(&[], &[count("syscalls/a", 1.0, 1.0)]).len(), 1);
    }
}
