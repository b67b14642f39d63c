//! The libraries' words for their numbers.
#![allow(unsafe_code)] // defines C symbols

use std::ffi::CStr;

use libc::{c_char, c_int};
use rdma_sys::*;

const WC_STATUS: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

const EVENTS: [&CStr; 20] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

const CM_EVENTS: [&CStr; 16] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
];

fn pick(texts: &[&'static CStr], index: usize, otherwise: &'static CStr) -> &'static CStr {
    texts.get(index).copied().unwrap_or(otherwise)
}

pub(crate) fn cm_event(event: u32) -> &'static CStr {
    pick(&CM_EVENTS, event as usize, c"UNKNOWN EVENT")
}

/// `ibv_wc_status_str(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_wc_status_str(status: ibv_wc_status::Type) -> *const c_char {
    pick(&WC_STATUS, status as usize, c"unknown").as_ptr()
}

/// `ibv_event_type_str(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    pick(&EVENTS, event as usize, c"unknown").as_ptr()
}

/// `ibv_node_type_str(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_node_type_str(node_type: ibv_node_type::Type) -> *const c_char {
    let texts = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
    ];
    pick(&texts, usize::try_from(node_type).unwrap_or(0), c"unknown").as_ptr()
}

/// `ibv_port_state_str(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_port_state_str(state: ibv_port_state::Type) -> *const c_char {
    let texts = [
        c"no state change",
        c"down",
        c"init",
        c"armed",
        c"active",
        c"active defer",
    ];
    pick(&texts, state as usize, c"unknown").as_ptr()
}

/// `ibv_rate_to_mbps(3)`, for the rates 2.5, 10, 20, 40 and 100 Gb/s.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_rate_to_mbps(rate: ibv_rate::Type) -> c_int {
    match rate {
        ibv_rate::IBV_RATE_2_5_GBPS => 2500,
        ibv_rate::IBV_RATE_10_GBPS => 10_000,
        ibv_rate::IBV_RATE_20_GBPS => 20_000,
        ibv_rate::IBV_RATE_40_GBPS => 40_000,
        ibv_rate::IBV_RATE_100_GBPS => 103_125,
        _ => -1,
    }
}
