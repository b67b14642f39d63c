//! Instructions of ours for one operation: runs a program on the fake fabric under callgrind, without what the fabric
//! itself spends.
//!
//! Callgrind can be told to toggle collecting at the begin and the end of some functions. Three runs are made: one
//! collects in the measured function only; one toggles there and at the functions of the fabric that ours call, so it
//! collects ours inside and the fabric outside the measured function; the last one collects the fabric everywhere. The
//! first and the second less the third are ours twice.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::{env, fs};

use clap::Parser;

#[derive(Parser)]
#[command(about, version)]
struct Options {
    /// The program `fake_path`, built for speed with line tables.
    program: PathBuf,
    /// Operations that are measured.
    #[arg(long, default_value_t = 1000)]
    count: u64,
    /// Functions that are listed for each path.
    #[arg(long, default_value_t = 12)]
    top: usize,
    /// Print JSON: instructions by path.
    #[arg(long)]
    json: bool,
}

/// The paths, and how many operations each run of one does.
const PATHS: [(&str, u64); 6] = [
    ("write", 1),
    ("send", 1),
    ("recv", 1),
    ("read", 1),
    ("faa", 1),
    ("batch", 16),
];

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut totals = BTreeMap::new();
    for (path, operations) in PATHS {
        let profile = profile(&options, path)?;
        let per = |cost: u64| cost as f64 / (options.count * operations) as f64;
        totals.insert(path, per(profile.total()));
        if !options.json {
            println!(
                "{path}: {:.1} instructions of ours an operation",
                per(profile.total())
            );
            for (function, cost) in profile.dearest(options.top) {
                println!("  {:7.1}  {function}", per(cost));
            }
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&totals)?);
    }
    Ok(())
}

fn profile(options: &Options, path: &str) -> Result<Profile, Box<dyn Error>> {
    let measured = format!("*measured_{path}*");
    let all = run(options, path, &[&measured])?;
    let entries = all.entries();
    if let Some(nested) = entries
        .iter()
        .find(|entry| all.is_called_by_the_fabric(entry))
    {
        return Err(
            format!("{nested} is called by ours and by the fabric: it cannot be left out").into(),
        );
    }
    let both = run(
        options,
        path,
        &[&[measured.as_str()], entries.as_slice()].concat(),
    )?;
    let fabric = run(options, path, &entries)?;
    Ok(all.plus(&both).minus(&fabric).halved())
}

/// Toggles collecting at the functions, which is off at first.
fn run(options: &Options, path: &str, toggles: &[&str]) -> Result<Profile, Box<dyn Error>> {
    let out = env::temp_dir().join(format!("callgrind-{path}-{}", std::process::id()));
    let status = Command::new("valgrind")
        .args([
            "--quiet",
            "--tool=callgrind",
            "--compress-strings=no",
            "--compress-pos=no",
        ])
        .args(
            toggles
                .iter()
                .map(|function| format!("--toggle-collect={function}")),
        )
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(&options.program)
        .args([path, &options.count.to_string()])
        .stdout(Stdio::null())
        .status()
        .map_err(|error| format!("valgrind cannot be started: {error}"))?;
    if !status.success() {
        return Err(format!("{path} failed under valgrind").into());
    }
    let profile = Profile::parse(&fs::read_to_string(&out)?);
    fs::remove_file(&out)?;
    Ok(profile)
}

/// What callgrind collected, by the names of functions.
#[derive(Default)]
struct Profile {
    own: BTreeMap<String, u64>,
    /// Caller and callee.
    calls: BTreeSet<(String, String)>,
}

impl Profile {
    fn parse(text: &str) -> Profile {
        let mut profile = Profile::default();
        let (mut function, mut in_call) = ("", false);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("fn=") {
                function = name;
            } else if let Some(callee) = line.strip_prefix("cfn=") {
                profile
                    .calls
                    .insert((function.to_owned(), callee.to_owned()));
            } else if line.starts_with("calls=") {
                in_call = true;
            } else if let Some(cost) = cost(line) {
                // The line after a call says what the call cost: it is in the callee's own lines too.
                if !in_call {
                    *profile.own.entry(function.to_owned()).or_default() += cost;
                }
                in_call = false;
            }
        }
        profile
    }

    fn total(&self) -> u64 {
        self.own.values().sum()
    }

    fn plus(mut self, other: &Profile) -> Profile {
        for (function, cost) in &other.own {
            *self.own.entry(function.clone()).or_default() += cost;
        }
        self
    }

    fn minus(mut self, other: &Profile) -> Profile {
        for (function, cost) in &other.own {
            let own = self.own.entry(function.clone()).or_default();
            *own = own.saturating_sub(*cost);
        }
        self
    }

    fn halved(mut self) -> Profile {
        self.own.values_mut().for_each(|cost| *cost /= 2);
        self
    }

    /// The functions of the fabric that functions of ours call.
    fn entries(&self) -> Vec<&str> {
        let entries: BTreeSet<&str> = self
            .calls
            .iter()
            .filter(|(caller, callee)| is_ours(caller) && is_fabric(callee))
            .map(|(_, callee)| callee.as_str())
            .collect();
        entries.into_iter().collect()
    }

    fn is_called_by_the_fabric(&self, function: &str) -> bool {
        self.calls
            .iter()
            .any(|(caller, callee)| callee == function && is_fabric(caller))
    }

    /// The functions that cost most by themselves.
    fn dearest(&self, count: usize) -> Vec<(&str, u64)> {
        let mut functions: Vec<(&str, u64)> = self
            .own
            .iter()
            .map(|(function, cost)| (function.as_str(), *cost))
            .collect();
        functions.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
        functions.truncate(count);
        functions
    }
}

/// `LINE COST`, as all lines that begin with a digit are without compression.
fn cost(line: &str) -> Option<u64> {
    let (position, cost) = line.split_once(' ')?;
    position.parse::<u64>().ok()?;
    cost.parse().ok()
}

fn is_fabric(function: &str) -> bool {
    function.contains("fake_verbs::")
        || function.starts_with("ibv_")
        || function.starts_with("rdma_get_")
}

fn is_ours(function: &str) -> bool {
    ["rdma_msg::", "rdma_cm::", "rdma_core_rs::", "fake_path::"]
        .iter()
        .any(|krate| function.contains(krate))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "fn=rdma_msg::post
10 5
cfn=fake_verbs::post
calls=1 0
11 100

fn=fake_verbs::post
3 60
cfn=fake_verbs::deliver
calls=1 0
4 40

fn=fake_verbs::deliver
1 40
";

    #[test]
    fn only_own_costs_are_summed() {
        assert_eq!(Profile::parse(PROFILE).total(), 105);
    }

    #[test]
    fn the_ways_into_the_fabric_are_found() {
        let profile = Profile::parse(PROFILE);
        assert_eq!(profile.entries(), ["fake_verbs::post"]);
        assert!(!profile.is_called_by_the_fabric("fake_verbs::post"));
        assert!(profile.is_called_by_the_fabric("fake_verbs::deliver"));
    }
}
