//! What the real libraries have and the fake has not: a call is a mistake of the test, and recorded as one.
#![allow(unsafe_code)] // defines C symbols

use libc::{c_int, c_void};
use rdma_sys::*;

use crate::world::{enter, minus_one};

fn unmodelled(call: &'static str) -> c_int {
    minus_one(enter(call, |w| {
        w.violation("not modelled by the fake");
        Err(libc::ENOSYS)
    }))
}

/// `rdma_create_qp(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_create_qp(
    _id: *mut rdma_cm_id,
    _pd: *mut ibv_pd,
    _init: *mut ibv_qp_init_attr,
) -> c_int {
    unmodelled("rdma_create_qp")
}

/// `rdma_destroy_qp(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_destroy_qp(_id: *mut rdma_cm_id) {
    unmodelled("rdma_destroy_qp");
}

/// `rdma_create_ep(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_create_ep(
    _id: *mut *mut rdma_cm_id,
    _res: *mut rdma_addrinfo,
    _pd: *mut ibv_pd,
    _init: *mut ibv_qp_init_attr,
) -> c_int {
    unmodelled("rdma_create_ep")
}

/// `rdma_destroy_ep(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_destroy_ep(_id: *mut rdma_cm_id) {
    unmodelled("rdma_destroy_ep");
}

/// `rdma_create_srq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_create_srq(
    _id: *mut rdma_cm_id,
    _pd: *mut ibv_pd,
    _init: *mut ibv_srq_init_attr,
) -> c_int {
    unmodelled("rdma_create_srq")
}

/// `rdma_destroy_srq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_destroy_srq(_id: *mut rdma_cm_id) {
    unmodelled("rdma_destroy_srq");
}

/// `rdma_get_request(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_get_request(
    _listen: *mut rdma_cm_id,
    _id: *mut *mut rdma_cm_id,
) -> c_int {
    unmodelled("rdma_get_request")
}

/// `rdma_reject_ece(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_reject_ece(
    _id: *mut rdma_cm_id,
    _private_data: *const c_void,
    _private_data_len: u8,
) -> c_int {
    unmodelled("rdma_reject_ece")
}
