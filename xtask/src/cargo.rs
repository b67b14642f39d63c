//! The cargo that builds the workspace.

use crate::setup::Libclang;
use crate::workspace;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// `cargo` in the workspace's folder, set to a libclang that works. `arguments` are words between blanks.
pub(crate) fn cargo(arguments: &str) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    prepared(Command::new(program), arguments)
}

/// The nightly toolchain's cargo, `None` if there is none.
pub(crate) fn nightly_cargo(arguments: &str) -> Option<Command> {
    let mut probe = Command::new("rustup");
    let found = probe
        .args(["run", "nightly", "cargo", "--version"])
        .output();
    if !found.is_ok_and(|output| output.status.success()) {
        return None;
    }
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]);
    Some(prepared(command, arguments))
}

fn prepared(mut command: Command, arguments: &str) -> Command {
    command.args(arguments.split_whitespace());
    if let Libclang::Beside(folder) = Libclang::here() {
        command.env("LIBCLANG_PATH", folder);
    }
    // Set by the cargo that runs us, for us alone.
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command.env_remove("RUSTC").env_remove("CARGO");
    command.current_dir(workspace::root());
    command
}

/// An executable that cargo has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Executable {
    /// Its package and target, as `rdma-cm`, `rdma-cm::tests/connect` or `rdma-examples::echo`.
    pub(crate) label: String,
    pub(crate) path: PathBuf,
    /// The folder of its package, where cargo would run it.
    pub(crate) folder: PathBuf,
    /// Whether it holds tests; cargo builds examples and programs along with them.
    pub(crate) is_test: bool,
}

/// Builds and returns the executables; the compiler's messages go to standard error.
pub(crate) fn build(mut command: Command) -> Result<Vec<Executable>> {
    command.arg("--message-format=json-render-diagnostics");
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("the build failed");
    }
    executables(&String::from_utf8_lossy(&output.stdout))
}

fn executables(messages: &str) -> Result<Vec<Executable>> {
    let mut executables = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("cargo's message is no JSON")?;
        executables.extend(executable(&message));
    }
    Ok(executables)
}

fn executable(message: &Value) -> Option<Executable> {
    let path = PathBuf::from(message.get("executable")?.as_str()?);
    let folder = PathBuf::from(message["manifest_path"].as_str()?)
        .parent()?
        .to_path_buf();
    let target = &message["target"];
    let (kind, name) = (target["kind"][0].as_str()?, target["name"].as_str()?);
    let package = package_name(message["package_id"].as_str()?);
    let label = match kind {
        "test" => format!("{package}::tests/{name}"),
        "bin" | "example" | "bench" => format!("{package}::{name}"),
        _ => package.to_owned(),
    };
    Some(Executable {
        label,
        path,
        folder,
        is_test: message["profile"]["test"] == true,
    })
}

/// `path+file:///x/rdma-cm#0.1.0` is rdma-cm, as is `path+file:///x/y#rdma-cm@0.1.0`.
fn package_name(id: &str) -> &str {
    let (place, rest) = id.rsplit_once('#').unwrap_or((id, ""));
    match rest.split_once('@') {
        Some((name, _)) => name,
        None => place.rsplit('/').next().unwrap_or(place),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_taken_from_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/rdma-cm#0.1.0","manifest_path":"/w/rdma-cm/Cargo.toml","target":{"kind":["lib"],"name":"rdma_cm"},"executable":null}
{"reason":"compiler-artifact","package_id":"path+file:///w/rdma-cm#0.1.0","manifest_path":"/w/rdma-cm/Cargo.toml","target":{"kind":["lib"],"name":"rdma_cm"},"profile":{"test":true},"executable":"/t/rdma_cm-1"}
{"reason":"compiler-artifact","package_id":"path+file:///w/tests#rdma-tests@0.1.0","manifest_path":"/w/tests/Cargo.toml","target":{"kind":["test"],"name":"echo"},"profile":{"test":false},"executable":"/t/echo-1"}
{"reason":"build-finished","success":true}
"#;
        let found = executables(messages).unwrap();
        let labels: Vec<&str> = found.iter().map(|e| e.label.as_str()).collect();
        assert_eq!(labels, ["rdma-cm", "rdma-tests::tests/echo"]);
        assert_eq!(found[1].folder, PathBuf::from("/w/tests"));
        assert!(found[0].is_test && !found[1].is_test);
    }
}
