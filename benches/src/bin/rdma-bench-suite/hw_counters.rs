//! What the devices say about lost packets and receivers that were not ready. A run with either measures the recovery,
//! not the operation, and is marked.

use std::fs;
use std::ops::Sub;
use std::path::Path;

/// Sums over all devices since they were made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HwCounters {
    pub(crate) retries: u64,
    pub(crate) rnr: u64,
}

impl Sub for HwCounters {
    type Output = HwCounters;

    fn sub(self, before: HwCounters) -> HwCounters {
        HwCounters {
            retries: self.retries - before.retries,
            rnr: self.rnr - before.rnr,
        }
    }
}

/// Reads them; a counter that a device does not have counts as 0.
pub(crate) fn read() -> HwCounters {
    let mut sum = HwCounters::default();
    let Ok(devices) = fs::read_dir("/sys/class/infiniband") else {
        return sum;
    };
    for device in devices.flatten() {
        let folder = device.path().join("ports/1/hw_counters");
        sum.retries += counter(&folder, "completer_retry_err");
        sum.rnr += counter(&folder, "rcvd_rnr_err");
    }
    sum
}

fn counter(folder: &Path, name: &str) -> u64 {
    fs::read_to_string(folder.join(name))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}
