//! The objects that the kernel holds for each RDMA device, as `rdma resource show` counts them.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::process::Command;

/// Counts by device and kind of object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Resources(BTreeMap<(String, String), u64>);

impl Resources {
    pub(crate) fn now() -> Result<Resources> {
        let output = Command::new("rdma").args(["resource", "show"]).output();
        let output = output.context("cannot run rdma, of the package iproute2")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "rdma resource show: {}",
            said.trim()
        );
        Ok(Resources::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Lines such as `0: rxe0: pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0`.
    fn parse(text: &str) -> Resources {
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            let mut parts = line.splitn(3, ": ");
            let (Some(_), Some(device), Some(list)) = (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let words: Vec<&str> = list.split_whitespace().collect();
            for pair in words.chunks_exact(2) {
                if let Ok(count) = pair[1].parse() {
                    counts.insert((device.to_owned(), pair[0].to_owned()), count);
                }
            }
        }
        Resources(counts)
    }

    /// What there is more of in `later`; devices that have come since are not counted.
    pub(crate) fn growth(&self, later: &Resources) -> Option<String> {
        let mut grown = Vec::new();
        for ((device, kind), now) in &later.0 {
            match self.0.get(&(device.clone(), kind.clone())) {
                Some(before) if now > before => {
                    grown.push(format!("{device} {kind} {now} instead of {before}"));
                }
                _ => {}
            }
        }
        (!grown.is_empty()).then(|| grown.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: &str =
        "0: rxe0: pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0 \n1: rxe1: pd 1 cq 1 qp 1 cm_id 0 \n";

    #[test]
    fn growth_is_named_by_device_and_kind() {
        let before = Resources::parse(IDLE);
        let later = Resources::parse(&IDLE.replace("rxe1: pd 1 cq 1", "rxe1: pd 1 cq 3"));
        assert_eq!(
            before.growth(&later).as_deref(),
            Some("rxe1 cq 3 instead of 1")
        );
        assert_eq!(later.growth(&before), None, "less is no leak");
    }

    #[test]
    fn a_device_that_has_come_since_is_no_growth() {
        let before = Resources::parse("0: rxe0: pd 1 \n");
        assert_eq!(before.growth(&Resources::parse(IDLE)), None);
    }
}
