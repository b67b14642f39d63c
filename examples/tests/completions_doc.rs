//! The code blocks of `docs/completions.md` are cut out of code that runs; here they are compared.
//!
//! `UPDATE_DOCS=1 cargo test -p rdma-examples --test completions_doc` writes them anew.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The lines between `// region: NAME` and the next `// endregion`, without their common indentation.
fn region(path: &str, name: &str) -> String {
    let source = fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let start = format!("// region: {name}");
    let lines: Vec<&str> = source
        .lines()
        .skip_while(|line| line.trim() != start)
        .skip(1)
        .take_while(|line| line.trim() != "// endregion")
        .collect();
    assert!(!lines.is_empty(), "{path} has no region {name}");
    let indent = |line: &&str| line.len() - line.trim_start().len();
    let common = lines
        .iter()
        .filter(|line| !line.is_empty())
        .map(indent)
        .min()
        .unwrap_or(0);
    lines
        .iter()
        .map(|line| format!("{}\n", line.get(common..).unwrap_or("")))
        .collect()
}

/// The page with every block replaced by the code it names.
fn renewed(page: &str) -> String {
    let mut renewed = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        renewed += &format!("{line}\n");
        let Some(marker) = line.strip_prefix("<!-- region: ") else {
            continue;
        };
        let marker = marker
            .strip_suffix(" -->")
            .expect("the marker ends on its line");
        let (name, path) = marker.split_once(" of ").expect("NAME of PATH");
        assert_eq!(lines.next(), Some("```rust"), "a block follows {line}");
        assert!(
            lines.by_ref().any(|line| line == "```"),
            "the block after {line} ends"
        );
        renewed += &format!("```rust\n{}```\n", region(path, name));
    }
    renewed
}

#[test]
fn the_page_shows_the_code_that_runs() {
    let path = root().join("docs/completions.md");
    let page = fs::read_to_string(&path).unwrap();
    let renewed = renewed(&page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, renewed).unwrap();
    } else {
        assert!(
            page == renewed,
            "docs/completions.md is behind the code: see the head of this test"
        );
    }
}

#[test]
fn the_page_has_no_code_of_its_own() {
    let page = fs::read_to_string(root().join("docs/completions.md")).unwrap();
    let blocks = page.lines().filter(|line| *line == "```rust").count();
    let markers = page
        .lines()
        .filter(|line| line.starts_with("<!-- region: "))
        .count();
    assert_eq!(blocks, markers, "a block without its source");
    assert!(markers >= 10);
}
