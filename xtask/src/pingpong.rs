//! `cargo xtask pingpong`: builds the ping-pong, finds devices for it, runs it.
//!
//! The program itself, in `examples/`, measures and prints; see there for what its figures mean.

use crate::cargo::{self, cargo};
use crate::lab::{Lab, Shape, Source};
use crate::native::{self, Native};
use crate::setup::{self, Consent, Purpose};
use anyhow::{Context, Result};
use std::ffi::OsString;

/// What to measure, and where.
pub(crate) struct PingPong {
    /// Options for the program: operation, sizes, iterations, way of waiting, output.
    pub(crate) options: Vec<OsString>,
    pub(crate) kernel: Source,
    /// On this machine's devices even if none is up yet.
    pub(crate) native: bool,
    pub(crate) consent: Consent,
}

impl PingPong {
    pub(crate) fn run(&self) -> Result<i32> {
        let native = self.native || Native::is_up();
        let lab: &[Purpose] = if native { &[] } else { &[Purpose::Lab] };
        setup::ensure_installed(&[&[Purpose::Build], lab].concat(), self.consent)?;
        let mut argv = vec![build()?, "both".into()];
        if native {
            let device = Native::prepare(self.consent)?;
            argv.extend(["--server-addr".into(), device.address.to_string().into()]);
            argv.extend(self.options.iter().cloned());
            return native::run(&argv, self.consent);
        }
        argv.extend(["--server-addr", "192.168.99.2"].map(OsString::from));
        argv.extend(["--client-addr", "192.168.99.1"].map(OsString::from));
        argv.extend(self.options.iter().cloned());
        let lab = Lab {
            kernel: self.kernel.clone(),
            shape: Shape::default(),
            timeout: None,
            silence: None,
            stdin: false,
            consent: self.consent,
        };
        lab.run(&argv)
    }
}

/// Builds the program for speed and returns its path.
fn build() -> Result<OsString> {
    let built = cargo::build(cargo(
        "build --release --package rdma-examples --bin pingpong",
    ))?;
    let found = built
        .into_iter()
        .find(|executable| executable.label.ends_with("::pingpong"));
    Ok(found.context("cargo built no pingpong")?.path.into())
}
