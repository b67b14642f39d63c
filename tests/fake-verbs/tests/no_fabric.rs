//! Calls while no fabric exists. One test: a fabric of another would be in its way.
#![allow(unsafe_code)] // calls the C interface
#![allow(clippy::undocumented_unsafe_blocks)]

use std::ptr::null_mut;

use fake_verbs::Fabric;

#[test]
fn without_a_fabric_the_machine_has_no_rdma() {
    let errno = || std::io::Error::last_os_error().raw_os_error();
    assert!(unsafe { rdma_sys::ibv_get_device_list(null_mut()) }.is_null());
    assert_eq!(errno(), Some(libc::ENOSYS));
    assert!(unsafe { rdma_sys::rdma_create_event_channel() }.is_null());
    drop(Fabric::new());
    assert!(unsafe { rdma_sys::ibv_get_device_list(null_mut()) }.is_null());
}
