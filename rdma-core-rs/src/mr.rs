//! Memory regions: memory that the device may use, tied to its registration.
//!
//! A region is never handed out as such. It is seen through unique [slices](crate::RegionSlice),
//! if only the local device reaches it, or as a [shared region](crate::SharedRegion), if peers do.

#![allow(unsafe_code)] // calls C

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::access::Access;
use crate::error::{Error, Result};
use crate::memory::{Memory, page_size};
use crate::pd::ProtectionDomain;
use crate::sys::{self, ibv_rereg_mr_flags};

/// Registered memory. Deregistered first and freed then, with the last owner.
pub(crate) struct Region {
    mr: NonNull<sys::ibv_mr>,
    lkey: u32,
    rkey: u32,
    access: Access,
    memory: ManuallyDrop<Memory>,
    pd: ProtectionDomain,
}

// SAFETY: libibverbs allows its objects to be used from any thread; the bytes are only reached
// through `RegionSlice` (unique ranges) or `SharedRegion` (atomic access).
unsafe impl Send for Region {}
// SAFETY: as for Send; through `&Region` only addresses and keys can be read.
unsafe impl Sync for Region {}

impl Region {
    /// Registers `memory`. If it fails, the memory is freed.
    #[doc(alias = "ibv_reg_mr")]
    pub(crate) fn register(
        pd: &ProtectionDomain,
        memory: Memory,
        access: Access,
    ) -> Result<Arc<Region>> {
        pd.context().check_process()?;
        let access = access.for_region();
        if access.contains(Access::ON_DEMAND) && !pd.context().on_demand_paging()? {
            return Err(Error::NotSupported {
                what: "on-demand paging",
            });
        }
        let (ptr, len) = (memory.ptr().as_ptr(), memory.len());
        let flags = access.bits() as i32; // flags, not a number
        // SAFETY: `pd` lives during the call, and `memory` is owned memory of `len` bytes that
        // is freed only after the region was deregistered.
        let mr = unsafe { sys::ibv_reg_mr(pd.as_raw().as_ptr(), ptr.cast(), len, flags) };
        let mr = sys::check_null("ibv_reg_mr", mr).map_err(|error| explain(error, len))?;
        // SAFETY: the region was just made and is ours; the field does not change.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*mr.as_ptr()).rkey };
        let memory = ManuallyDrop::new(memory);
        Ok(Arc::new(Region {
            mr,
            lkey,
            rkey,
            access,
            memory,
            pd: pd.clone(),
        }))
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.memory.ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    pub(crate) fn as_raw(&self) -> NonNull<sys::ibv_mr> {
        self.mr
    }

    /// Registers the same memory with other access. The keys may change.
    ///
    /// If it fails, the region may have lost its registration; it is then good for dropping only.
    pub(crate) fn reregister(&mut self, access: Access) -> Result<()> {
        self.pd.context().check_process()?;
        let access = access.for_region();
        let change = ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS.0 as i32;
        let (mr, flags) = (self.mr.as_ptr(), access.bits() as i32);
        // SAFETY: the region is ours, and with only the access changed neither the domain nor the
        // address is looked at.
        let ret =
            unsafe { sys::ibv_rereg_mr(mr, change, ptr::null_mut(), ptr::null_mut(), 0, flags) };
        if ret != 0 {
            return Err(Error::last("ibv_rereg_mr").or_not_supported("re-registration"));
        }
        // SAFETY: the region is ours, and `&mut self` means that nobody reads its keys meanwhile.
        self.lkey = unsafe { (*mr).lkey };
        // SAFETY: as above.
        self.rkey = unsafe { (*mr).rkey };
        self.access = access;
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.pd.context().is_foreign_process() {
            // Its pages, and what the allocator keeps beside it, may be missing here
            // (`MADV_DONTFORK`), so that freeing would fault.
            return;
        }
        // SAFETY: we are the last owner; what was posted on the region has completed, or its
        // queue pair is destroyed (contract of posting).
        let ret = unsafe { sys::ibv_dereg_mr(self.mr.as_ptr()) };
        if let Err(error) = sys::check("ibv_dereg_mr", ret) {
            log::error!(
                "{error}; {} bytes are leaked: the device may use them",
                self.len()
            );
            return;
        }
        // SAFETY: dropped here and nowhere else; the device can no longer reach the memory.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

/// Finds the reason for a failed registration that the errno alone does not tell.
fn explain(error: Error, len: usize) -> Error {
    let Error::Call { call, source } = error else {
        return error;
    };
    let asked = len as u64;
    match memlock_limit() {
        Some(limit) if is_memlock(&source, limit) && exceeds_memlock(asked, limit) => {
            Error::Memlock {
                asked,
                limit,
                source,
            }
        }
        _ => Error::Call { call, source },
    }
}

/// Whether an error can come from a limit on locked memory: `EPERM` comes only from a limit of 0.
fn is_memlock(source: &io::Error, limit: u64) -> bool {
    match source.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN) => true,
        Some(libc::EPERM) => limit == 0,
        _ => false,
    }
}

/// The soft limit in bytes; `None` if there is none.
fn memlock_limit() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    parse_memlock_limit(&limits)
}

fn parse_memlock_limit(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok() // "unlimited" is no number
}

/// Whether `asked` more bytes would have exceeded the limit, on as many pages as they can lie on.
fn exceeds_memlock(asked: u64, limit: u64) -> bool {
    let asked = asked.saturating_add(2 * page_size() as u64);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let exempt = has_cap_ipc_lock(&status) && is_initial_user_namespace();
    !exempt && pinned(&status).saturating_add(asked) > limit
}

/// Capabilities in another user namespace, as a container's root has them, lift no limit.
fn is_initial_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The bytes that the process has pinned, which the kernel counts against the limit.
fn pinned(status: &str) -> u64 {
    let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    pinned
        .and_then(|kib| kib.trim().strip_suffix("kB")?.trim().parse().ok())
        .map_or(0, |kib: u64| kib.saturating_mul(1024))
}

/// Whether a process has CAP_IPC_LOCK, to which the limit does not apply.
fn has_cap_ipc_lock(status: &str) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities & CAP_IPC_LOCK != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_error_is_memlock_only_when_the_limit_is_zero() {
        let error = io::Error::from_raw_os_error;
        assert!(is_memlock(&error(libc::ENOMEM), 65536));
        assert!(is_memlock(&error(libc::EAGAIN), 65536));
        assert!(is_memlock(&error(libc::EPERM), 0));
        assert!(!is_memlock(&error(libc::EPERM), 65536));
        assert!(!is_memlock(&error(libc::EINVAL), 0));
    }

    #[test]
    fn limit_is_the_soft_one() {
        let limits =
            "Max processes 1 2 processes\nMax locked memory         65536   8388608  bytes\n";
        assert_eq!(parse_memlock_limit(limits), Some(65536));
        assert_eq!(
            parse_memlock_limit("Max locked memory  unlimited unlimited bytes"),
            None
        );
        assert_eq!(parse_memlock_limit(""), None);
    }

    #[test]
    fn pinned_bytes_are_read_from_the_status() {
        assert_eq!(pinned("VmLck:\t 8 kB\nVmPin:\t      64 kB\n"), 65536);
        assert_eq!(pinned(""), 0);
    }

    #[test]
    fn capability_is_read_from_the_effective_set() {
        assert!(has_cap_ipc_lock("CapInh:\t0\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_cap_ipc_lock(
            "CapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffbfff\n"
        ));
        assert!(!has_cap_ipc_lock(""));
    }
}
