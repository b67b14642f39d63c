//! What a machine without RDMA is told. On a machine with RDMA the same test sees its devices.
#![allow(clippy::unwrap_used)] // a test may panic

use std::path::Path;

use rdma_core_rs::{Error, devices};

#[test]
fn missing_support_is_told_with_its_cure() {
    let supported = Path::new("/sys/class/infiniband_verbs/abi_version").exists();
    match devices() {
        Ok(devices) => assert!(supported, "{devices:?}"),
        Err(error @ Error::NoKernelSupport { .. }) => {
            assert!(!supported);
            assert_eq!(error.errno(), Some(38)); // ENOSYS
            assert!(error.to_string().contains("CONFIG_INFINIBAND"), "{error}");
        }
        Err(error @ Error::ModuleMissing { .. }) => {
            assert!(!supported);
            assert!(error.to_string().contains("modprobe ib_uverbs"), "{error}");
        }
        Err(error) => panic!("{error}"),
    }
}
