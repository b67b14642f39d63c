//! This machine's own RDMA devices, instead of the lab's.
//!
//! A device that is up is used as it is. Without one, soft-RoCE is loaded and put on a network device, which
//! changes the machine: only with consent, and undone at the end.

use crate::interrupt::{AtInterrupt, at_interrupt};
use crate::lab::Output;
use crate::process;
use crate::setup::{self, Consent};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// A device to use. Dropping it undoes what was done to have it.
pub(crate) struct Native {
    /// The address of the device's network interface.
    pub(crate) address: IpAddr,
    _undo: Vec<Undo>,
}

/// The name of the link that is added to a machine without any.
const LINK: &str = "rxe_xtask";

impl Native {
    /// Whether the machine has a device that is up.
    pub(crate) fn is_up() -> bool {
        active_device().is_some()
    }

    /// Finds a device that is up, or makes one.
    pub(crate) fn prepare(consent: Consent) -> Result<Native> {
        if let Some(device) = active_device() {
            return Ok(Native {
                address: address_of(&device)?,
                _undo: Vec::new(),
            });
        }
        let Some(interface) = first_interface() else {
            bail!("this machine has no network interface that is up to put soft-RoCE on");
        };
        if consent == Consent::Ask {
            bail!(
                "no RDMA device is up; with --yes the module rdma_rxe is loaded, a link {LINK} put on \
                 {interface}, and both undone at the end"
            );
        }
        let mut undo = Vec::new();
        if !Path::new("/sys/module/rdma_rxe").exists() {
            run_as_root("modprobe", &["rdma_rxe"])?;
            undo.push(Undo::by("modprobe", &["-r", "rdma_rxe"])?);
        }
        run_as_root(
            "rdma",
            &["link", "add", LINK, "type", "rxe", "netdev", &interface],
        )?;
        undo.insert(0, Undo::by("rdma", &["link", "del", LINK])?);
        Ok(Native {
            address: address_of(LINK)?,
            _undo: undo,
        })
    }
}

/// A command that takes back a change of this machine, on drop or when this process is told to end.
struct Undo {
    name: &'static str,
    arguments: &'static [&'static str],
    _at_interrupt: AtInterrupt,
}

impl Undo {
    fn by(name: &'static str, arguments: &'static [&'static str]) -> Result<Undo> {
        let _at_interrupt = at_interrupt(move || undo(name, arguments))?;
        Ok(Undo {
            name,
            arguments,
            _at_interrupt,
        })
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        undo(self.name, self.arguments);
    }
}

fn undo(name: &str, arguments: &[&str]) {
    if let Err(error) = run_as_root(name, arguments) {
        eprintln!("native: not undone: {error:#}");
    }
}

/// Runs a command next to the machine's devices with this process's streams.
pub(crate) fn run(argv: &[OsString], consent: Consent) -> Result<i32> {
    let _native = Native::prepare(consent)?;
    let Some((program, arguments)) = argv.split_first() else {
        bail!("a shell needs no --native: this is the machine itself");
    };
    let child = Command::new(program).args(arguments).spawn();
    let mut child = child.with_context(|| format!("cannot run {}", program.to_string_lossy()))?;
    let pid = child.id();
    let _at_interrupt = at_interrupt(move || process::end(pid))?;
    Ok(crate::exit_status(child.wait()?))
}

/// Runs a command next to the machine's devices and gives what it writes to `output`.
pub(crate) fn run_with(
    argv: &[OsString],
    consent: Consent,
    output: &mut dyn Output,
) -> Result<ExitStatus> {
    let _native = Native::prepare(consent)?;
    let mut child = Command::new(&argv[0])
        .args(&argv[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", argv[0].to_string_lossy()))?;
    let pid = child.id();
    let _at_interrupt = at_interrupt(move || process::end(pid))?;
    let mut stdout = child.stdout.take().context("no standard output")?;
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stdout.read(&mut buffer) {
        output.stdout(&buffer[..length])?;
    }
    Ok(child.wait()?)
}

/// The first device with a port that is up.
fn active_device() -> Option<String> {
    let mut devices: Vec<String> = fs::read_dir("/sys/class/infiniband")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    devices.sort();
    devices.into_iter().find(|device| {
        let state = Path::new("/sys/class/infiniband")
            .join(device)
            .join("ports/1/state");
        fs::read_to_string(state).is_ok_and(|state| state.contains("ACTIVE"))
    })
}

/// The first address of the network interface behind a device.
fn address_of(device: &str) -> Result<IpAddr> {
    let interface = Path::new("/sys/class/infiniband")
        .join(device)
        .join("ports/1/gid_attrs/ndevs/0");
    let interface = fs::read_to_string(interface)
        .with_context(|| format!("{device} has no network interface"))?;
    let interface = interface.trim();
    let output = Command::new("ip")
        .args(["-brief", "address", "show", "dev", interface])
        .output();
    let output = output.context("cannot run ip, of the package iproute2")?;
    first_address(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("{interface}, the interface of {device}, has no address"))
}

/// A line such as `eth0@if3 UP 192.0.2.1/24 fe80::1/64`.
fn first_address(brief: &str) -> Option<IpAddr> {
    let words = brief.split_whitespace().skip(2);
    words
        .filter_map(|word| word.split('/').next()?.parse().ok())
        .next()
}

fn first_interface() -> Option<String> {
    let mut names: Vec<String> = fs::read_dir("/sys/class/net")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name != "lo")
        .collect();
    names.sort();
    names.into_iter().find(|name| {
        let state = Path::new("/sys/class/net").join(name).join("operstate");
        fs::read_to_string(state).is_ok_and(|state| state.trim() == "up")
    })
}

fn run_as_root(name: &str, arguments: &[&str]) -> Result<()> {
    eprintln!("native: {name} {}", arguments.join(" "));
    let output = setup::as_root(name)?.args(arguments).output();
    let output = output.with_context(|| format!("cannot run {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{name} {}: {}",
        arguments.join(" "),
        said.trim()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_address_is_taken_from_ips_brief_line() {
        let line = "eth0@if3         UP             192.0.2.1/24 fe80::1/64 \n";
        assert_eq!(first_address(line), Some("192.0.2.1".parse().unwrap()));
        assert_eq!(first_address("eth0 UP \n"), None);
    }
}
