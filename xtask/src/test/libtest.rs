//! What a test executable says, read.

/// What one run of a test executable has said.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) passed: Vec<String>,
    pub(crate) failed: Vec<String>,
    /// Names, and the reason given in the source.
    pub(crate) ignored: Vec<(String, String)>,
    /// Whether the closing line came: without it, the executable died on the way.
    pub(crate) complete: bool,
}

impl Report {
    /// Reads what a run has printed on its standard output.
    pub(crate) fn read(output: &str) -> Report {
        let mut report = Report::default();
        for line in output.lines() {
            match Line::parse(line) {
                Some(Line::Result {
                    name,
                    outcome: "ok",
                }) => report.passed.push(name.to_owned()),
                Some(Line::Result {
                    name,
                    outcome: "FAILED",
                }) => report.failed.push(name.to_owned()),
                Some(Line::Result { name, outcome }) => {
                    if let Some(rest) = outcome.strip_prefix("ignored") {
                        let reason = rest.strip_prefix(", ").unwrap_or("no reason given");
                        report.ignored.push((name.to_owned(), reason.to_owned()));
                    }
                }
                Some(Line::Summary) => report.complete = true,
                None => {}
            }
        }
        report
    }
}

/// A line of a test executable that means something.
enum Line<'a> {
    Result { name: &'a str, outcome: &'a str },
    Summary,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Line<'a>> {
        if line.starts_with("test result: ") {
            return Some(Line::Summary);
        }
        let (name, outcome) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
        // " - should panic" is said of a test, not part of its name.
        let name = name.strip_suffix(" - should panic").unwrap_or(name);
        Some(Line::Result {
            name,
            outcome: outcome.trim_end(),
        })
    }
}

/// The names in what `--list --format terse` prints.
pub(crate) fn names(list: &str) -> Vec<String> {
    list.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_reasons_and_the_closing_line_are_read() {
        let report = Report::read(
            "\nrunning 4 tests\n\
             test a::passes ... ok\n\
             test a::panics - should panic ... ok\n\
             test b ... FAILED\n\
             test c ... ignored\n\
             test d ... ignored, needs an RDMA device: cargo xtask test\n\
             noise ... ok\n\
             \ntest result: FAILED. 2 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(report.passed, ["a::passes", "a::panics"]);
        assert_eq!(report.failed, ["b"]);
        assert_eq!(report.ignored[0], ("c".into(), "no reason given".into()));
        assert_eq!(
            report.ignored[1].1,
            "needs an RDMA device: cargo xtask test"
        );
        assert!(report.complete);
    }

    #[test]
    fn doc_tests_are_read_like_others() {
        let report = Report::read("test src/a.rs - x (line 3) - compile fail ... ok\n");
        assert_eq!(report.passed, ["src/a.rs - x (line 3) - compile fail"]);
        assert!(!report.complete);
    }

    #[test]
    fn a_list_gives_tests_but_not_benchmarks() {
        assert_eq!(names("a::b: test\nc: benchmark\n"), ["a::b"]);
    }
}
