//! The `ibv_*` and `rdma_*` symbols in Rust: an RDMA fabric inside the test process.
//!
//! A test binary that uses this crate gets these definitions instead of those of libibverbs and librdmacm: what is
//! linked in statically wins over a shared library. So production code needs no seam for tests, and its unsafe code
//! runs under Miri and AddressSanitizer. Two devices, `fake0` (10.9.0.1, fd09::1) and `fake1` (10.9.0.2, fd09::2), lie
//! on one network; queue pairs of both reach each other, and the connection manager introduces them.
//!
//! ```
//! use fake_verbs::Fabric;
//!
//! let fabric = Fabric::new(); // first, so that it is dropped last
//! // ... code under test: ibv_open_device, rdma_connect ...
//! # let channel = unsafe { rdma_sys::rdma_create_event_channel() };
//! assert_eq!(fabric.live_objects().event_channels, 1);
//! # unsafe { rdma_sys::rdma_destroy_event_channel(channel) };
//! drop(fabric); // panics if a rule was broken or something is left
//! ```
//!
//! To let each call of a program fail once:
//!
//! ```
//! # use fake_verbs::Fabric;
//! # fn program() -> Result<(), ()> {
//! #     let channel = unsafe { rdma_sys::rdma_create_event_channel() };
//! #     if channel.is_null() { return Err(()) }
//! #     unsafe { rdma_sys::rdma_destroy_event_channel(channel) };
//! #     Ok(())
//! # }
//! for number in 0.. {
//!     let fabric = Fabric::new();
//!     fabric.fail_call_number(number, libc::EIO);
//!     let result = program();
//!     if fabric.failed_calls().is_empty() {
//!         assert!(result.is_ok());
//!         break; // the program makes fewer calls than this
//!     }
//!     assert!(result.is_err(), "{:?} failed unnoticed", fabric.failed_calls());
//! }
//! ```
//!
//! # What the fabric does
//!
//! Posted work is executed as a NIC would: in order, with all checks of keys, domains, rights, bounds and lengths, into
//! and out of the registered memory itself, so that a buffer freed too early is seen by the sanitizers. Where devices
//! differ, [`Config`] chooses; the default is the strict side.
//!
//! # What it does not do
//!
//! No clock: nothing times out by itself, the test says when ([`Fabric::expire_retries`],
//! [`Fabric::expire_connects`]...). No extended verbs beyond the device query, no XRC, flows, device memory or
//! enhanced atomics. No queue pairs on cm ids (`rdma_create_qp`, `rdma_create_ep`) and no synchronous ids.
//! Work of one queue pair is never executed out of order, so a fence has nothing to do.

mod ah;
mod async_event;
mod cbox;
mod cm;
mod config;
mod cq;
mod deliver;
mod device;
mod device_ex;
mod fabric;
mod fault;
mod inet;
mod link;
#[cfg(miri)]
mod miri_poll;
mod mr;
mod packet;
mod pd;
mod post;
mod qp;
mod queue;
mod srq;
mod text;
mod transition;
mod unmodelled;
mod world;

pub use config::{
    Config, Delivery, EarlySend, ErrorFields, Limits, Misaligned, RecvInError, SendSlots,
    SilentPeer,
};
pub use cq::Completion;
pub use fabric::{CqId, CqInfo, Fabric, IdInfo, IdName, LiveObjects, QpInfo};
