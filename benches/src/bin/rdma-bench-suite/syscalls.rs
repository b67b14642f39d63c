//! System calls of one process, counted by the kernel's own trace points: exact, and far cheaper than stopping the
//! process at each, which would change when it sleeps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// A histogram of (process, system call) that runs while this value lives.
pub(crate) struct Trace {
    event: PathBuf,
}

const HISTOGRAM: &str = "hist:keys=common_pid,id:size=4096";

impl Trace {
    /// Starts counting; needs root and mounts tracefs if it is not there.
    pub(crate) fn start() -> io::Result<Trace> {
        let root = Path::new("/sys/kernel/tracing");
        if !root.join("events").exists() {
            Command::new("mount")
                .args(["-t", "tracefs", "tracefs"])
                .arg(root)
                .status()?;
        }
        let event = root.join("events/raw_syscalls/sys_enter");
        fs::write(event.join("trigger"), HISTOGRAM)?;
        Ok(Trace { event })
    }

    /// Calls of the process so far, by number. Those of its threads other than the first are not seen.
    pub(crate) fn of(&self, pid: u32) -> io::Result<BTreeMap<u32, u64>> {
        let text = fs::read_to_string(self.event.join("hist"))?;
        Ok(text
            .lines()
            .filter_map(entry)
            .filter(|(owner, ..)| *owner == pid)
            .map(|(_, id, hits)| (id, hits))
            .collect())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = fs::write(self.event.join("trigger"), format!("!{HISTOGRAM}"));
    }
}

/// `{ common_pid:  123, id:  1 } hitcount:  45`
fn entry(line: &str) -> Option<(u32, u32, u64)> {
    let words: Vec<&str> = line
        .split([' ', ',', ':', '{', '}'])
        .filter(|word| !word.is_empty())
        .collect();
    match words.as_slice() {
        ["common_pid", pid, "id", id, "hitcount", hits] => {
            Some((pid.parse().ok()?, id.parse().ok()?, hits.parse().ok()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_histogram_is_understood() {
        let line = "{ common_pid:       3151, id:         16 } hitcount:       2004";
        assert_eq!(entry(line), Some((3151, 16, 2004)));
        assert_eq!(entry("Totals:"), None);
    }
}
