//! Holds ARCHITECTURE.md against the tree.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose files may opt in to unsafe code without a line in ARCHITECTURE.md: they are never shipped.
const TEST_CODE: [&str; 2] = ["tests/", "benches/"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn rust_files(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            rust_files(&path, into);
        } else if name.ends_with(".rs") {
            into.push(path);
        }
    }
}

fn files_that_opt_in() -> BTreeSet<String> {
    let mut files = Vec::new();
    rust_files(&root(), &mut files);
    files.retain(|file| opts_in(file));
    files
        .iter()
        .map(|file| relative(file))
        .filter(|name| !is_test_code(name))
        .collect()
}

fn opts_in(file: &Path) -> bool {
    let text = fs::read_to_string(file).expect("a source file");
    text.lines()
        .any(|line| line.trim_start().starts_with("#![allow(unsafe_code)]"))
}

fn relative(file: &Path) -> String {
    file.strip_prefix(root())
        .expect("below the root")
        .to_string_lossy()
        .into_owned()
}

fn is_test_code(file: &str) -> bool {
    TEST_CODE.iter().any(|folder| file.starts_with(folder)) || file.contains("/tests/")
}

/// The code-quoted `.rs` paths of the section "Unsafe".
fn files_listed() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let section = text
        .split("\n## Unsafe\n")
        .nth(1)
        .expect("a section Unsafe");
    let section = section.split("\n## ").next().unwrap_or_default();
    let quoted = section
        .lines()
        .filter(|line| line.starts_with('-'))
        .flat_map(|line| line.split('`').nth(1));
    quoted
        .filter(|name| name.ends_with(".rs"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn files_with_unsafe_code_are_those_listed() {
    let (listed, found) = (files_listed(), files_that_opt_in());
    let missing: Vec<_> = found.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&found).collect();
    assert!(
        missing.is_empty(),
        "not listed in ARCHITECTURE.md: {missing:?}"
    );
    assert!(
        stale.is_empty(),
        "listed in ARCHITECTURE.md but without unsafe code: {stale:?}"
    );
}

#[test]
fn unsafe_code_is_never_allowed_for_a_single_item() {
    let mut files = Vec::new();
    rust_files(&root(), &mut files);
    for file in files
        .into_iter()
        .filter(|file| !is_test_code(&relative(file)))
    {
        let text = fs::read_to_string(&file).expect("a source file");
        let item = text
            .lines()
            .any(|line| line.trim_start().starts_with("#[allow(unsafe_code)]"));
        assert!(
            !item,
            "{}: opt in for the whole file, at its top",
            file.display()
        );
    }
}

#[test]
fn libraries_depend_one_way() {
    let manifest =
        |name: &str| fs::read_to_string(root().join(name).join("Cargo.toml")).expect("a manifest");
    let dependencies = |name: &str| {
        manifest(name)
            .split("[dev-dependencies]")
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    for (library, above) in [
        ("rdma-core-rs", &["rdma-cm", "rdma-msg"][..]),
        ("rdma-cm", &["rdma-msg"]),
        (
            "xtask",
            &["rdma-core-rs", "rdma-cm", "rdma-msg", "rdma-sys"],
        ),
    ] {
        for name in above {
            assert!(
                !dependencies(library).contains(&format!("{name}.workspace")),
                "{library} → {name}"
            );
        }
    }
}
