//! Whether this machine's KVM can be used.
//!
//! That `/dev/kvm` opens proves nothing: inside some virtual machines it does, and the guest then hangs in
//! the boot loader, or later. Only a guest whose init has spoken is proof. The verdict is kept until the machine
//! boots anew.

use std::fs;
use std::path::{Path, PathBuf};

/// What is known about KVM here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kvm {
    /// A guest has come up under it.
    Works,
    /// No device, or no guest has come up under it.
    Fails,
    /// The device is there, and has not been tried since the machine's boot.
    Untried,
}

impl Kvm {
    /// What is to be noted: whether KVM works, if nothing was `noted`. (If a guest has come up under it since the
    /// machine's boot, one that does not had an accident.) That it fails is certain only if a guest `started` without
    /// it: it may be the kernel that does not boot.
    pub(crate) fn news(self, noted: Kvm, started: bool) -> Option<bool> {
        match self {
            _ if noted != Kvm::Untried => None,
            Kvm::Works => Some(true),
            Kvm::Fails if started => Some(false),
            Kvm::Fails | Kvm::Untried => None,
        }
    }
}

/// The note in the cache with the verdict.
pub(crate) struct Verdict {
    note: PathBuf,
    boot: String,
}

impl Verdict {
    pub(crate) fn in_cache(cache: &Path) -> Verdict {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Verdict {
            note: cache.join("kvm"),
            boot: boot.trim().to_owned(),
        }
    }

    pub(crate) fn read(&self) -> Kvm {
        let device = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm");
        if device.is_err() {
            return Kvm::Fails;
        }
        judge(
            &fs::read_to_string(&self.note).unwrap_or_default(),
            &self.boot,
        )
    }

    pub(crate) fn write(&self, works: bool) {
        let verdict = if works { "works" } else { "fails" };
        // Without the note the next lab tries again: slower, not wrong.
        let _ = fs::write(&self.note, format!("{verdict} {}\n", self.boot));
    }
}

fn judge(note: &str, boot: &str) -> Kvm {
    match note.trim().split_once(' ') {
        Some(("works", noted)) if noted == boot => Kvm::Works,
        Some(("fails", noted)) if noted == boot => Kvm::Fails,
        _ => Kvm::Untried,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_boot_has_shown_is_noted_once_and_a_failure_only_beside_a_success() {
        assert_eq!(Kvm::Works.news(Kvm::Untried, true), Some(true));
        assert_eq!(Kvm::Works.news(Kvm::Untried, false), Some(true));
        assert_eq!(Kvm::Works.news(Kvm::Works, true), None);
        assert_eq!(Kvm::Fails.news(Kvm::Untried, true), Some(false));
        assert_eq!(Kvm::Fails.news(Kvm::Works, true), None);
        assert_eq!(Kvm::Fails.news(Kvm::Untried, false), None);
        assert_eq!(Kvm::Fails.news(Kvm::Fails, true), None);
    }

    #[test]
    fn a_verdict_holds_for_one_boot_of_the_machine() {
        assert_eq!(judge("works a\n", "a"), Kvm::Works);
        assert_eq!(judge("fails a\n", "a"), Kvm::Fails);
        assert_eq!(judge("works a\n", "b"), Kvm::Untried);
        assert_eq!(judge("", "a"), Kvm::Untried);
    }
}
