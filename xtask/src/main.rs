//! Set-up, lab, ping-pong and tests: `cargo xtask help`.
//!
//! Depends on none of the RDMA crates, so that it builds on a machine where nothing is installed yet.

mod lab;
mod workspace;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Set-up, lab, ping-pong and tests of this workspace.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_help_subcommand = false
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a command where two RDMA hosts exist; without a command, a shell
    Lab(LabArgs),
    /// Process 1 of the lab's guest
    #[command(hide = true)]
    LabInit,
}

#[derive(Args)]
struct LabArgs {
    #[command(flatten)]
    kernel: KernelArgs,
    /// Stop the command after this many seconds, with exit status 124
    #[arg(long, value_name = "S")]
    timeout: Option<u64>,
    /// Processors of the guest
    #[arg(long, value_name = "N", default_value_t = 2)]
    smp: u32,
    /// Memory of the guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory: u32,
    /// One processor, and one nanosecond of guest time for each instruction: repeatable figures
    #[arg(long)]
    icount: bool,
    /// A folder of this machine that the command may write to; $LAB_OUT names it in the guest
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Args)]
struct KernelArgs {
    /// The guest's kernel: the newest of this series that apt offers
    #[arg(long, value_name = "SERIES", conflicts_with = "kernel_image")]
    kernel: Option<String>,
    /// The guest's kernel: an image (bzImage) on this machine
    #[arg(long, value_name = "FILE", requires = "modules")]
    kernel_image: Option<PathBuf>,
    /// The folder with the modules of --kernel-image
    #[arg(long, value_name = "DIR", requires = "kernel_image")]
    modules: Option<PathBuf>,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Lab(args) => args.run(),
        Task::LabInit => lab::init::main(),
    };
    match result {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl LabArgs {
    fn run(self) -> Result<i32> {
        if let Some(out) = &self.out {
            std::fs::create_dir_all(out)?;
        }
        let shape = lab::Shape {
            processors: self.smp,
            memory_mib: self.memory,
            counting: self.icount,
            out: self.out.map(|out| out.canonicalize()).transpose()?,
        };
        let timeout = self.timeout.map(Duration::from_secs);
        lab::Lab {
            kernel: self.kernel.source(),
            shape,
            timeout,
        }
        .run(&self.command)
    }
}

impl KernelArgs {
    fn source(self) -> lab::Source {
        match (self.kernel_image, self.modules) {
            (Some(image), Some(modules)) => lab::Source::Files { image, modules },
            _ => lab::Source::Archive(self.kernel),
        }
    }
}
