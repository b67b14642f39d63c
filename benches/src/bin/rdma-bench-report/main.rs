//! Makes of the suite's lines what people read: tables with ratios, a plot, or the verdict on the counts.

mod counts;
mod plot;
mod row;
mod table;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rdma_bench::record::{Bed, Count, Record, Run};

#[derive(Parser)]
#[command(about, version)]
struct Options {
    /// What the suite wrote; several files are read as one.
    #[arg(required = true)]
    records: Vec<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Draw latency and rate over size into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Hold the counts against this file; the exit status is 1 if one is more than 3 % worse.
    #[arg(long)]
    baselines: Option<PathBuf>,
    /// Write the counts to the file of `--baselines` instead.
    #[arg(long, requires = "baselines")]
    update: bool,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let options = Options::parse();
    let records = Records::read(&options.records)?;
    let rows = row::rows(&records.runs);
    if options.json {
        println!("{}", json(&rows, &records.counts)?);
    } else {
        table::print(&records.bed, &rows);
        counts::print(&records.counts);
    }
    if let Some(file) = &options.plot {
        plot::draw(file, &rows)?;
    }
    match &options.baselines {
        Some(file) => counts::judge(file, &records.bed, &records.counts, options.update),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn json(rows: &[row::Row], counts: &[Count]) -> serde_json::Result<String> {
    if rows.is_empty() {
        serde_json::to_string_pretty(counts)
    } else {
        serde_json::to_string_pretty(rows)
    }
}

struct Records {
    bed: Bed,
    runs: Vec<Run>,
    counts: Vec<Count>,
}

impl Records {
    fn read(files: &[PathBuf]) -> Result<Records, Box<dyn Error>> {
        let (mut bed, mut runs, mut counts) = (None, Vec::new(), Vec::new());
        for file in files {
            let text =
                fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            // A guest's console may add lines of its own.
            for line in text.lines().filter(|line| line.starts_with('{')) {
                match serde_json::from_str(line)? {
                    Record::Bed(found) => bed = Some(found),
                    Record::Run(run) => runs.push(*run),
                    Record::Count(count) => counts.push(count),
                }
            }
        }
        let bed = bed.ok_or("the suite wrote nothing: see its messages above")?;
        Ok(Records { bed, runs, counts })
    }
}
