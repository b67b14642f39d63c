//! The extended device query, for callers that find `verbs_context` by themselves.
#![allow(unsafe_code)] // an operation of the context, called through a C function pointer

use libc::c_int;
use rdma_sys::*;

use crate::cbox::put;
use crate::device::attributes;
use crate::world::{enter, positive};

/// The `query_device_ex` operation: the plain attributes; all extended ones are zero.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    positive(enter("ibv_query_device_ex", |w| {
        let limits = w.config.limits;
        let orig = attributes(w.device_of(context)?, limits);
        // SAFETY: C requires `size` writable bytes at `attr`.
        unsafe { attr.cast::<u8>().write_bytes(0, size) };
        put!(attr, orig_attr, orig);
        Ok(())
    }))
}
