//! Safe libibverbs: devices, memory, queues and completions.
//!
//! Each object of the C library is a type that owns it and holds what it needs, so that it can be
//! kept in structs, moved to threads and dropped in any order: queue pairs go before completion
//! queues, regions before their domain, the device last. The names are those of the man pages, and
//! the C names find the items in the search of this documentation.
//!
//! # Memory
//! Registered memory belongs to this crate, in two kinds that do not mix:
//! - [`RegionSlice`]: a unique range of memory that only the local device reaches. It derefs to
//!   `[u8]`, is split and moved like a `Vec`, and is what sends and receives use.
//! - [`SharedRegion`]: memory that peers may read or write at any time. There is never a reference
//!   to it; bytes are copied in and out. Its [`RemoteRegion`] is what a peer needs to know.
//!
//! # Posting
//! [`QueuePair::post_send`] and its kin are `unsafe`: the device uses the memory after the call has
//! returned, and only a protocol between poster and poller can say until when. Their contract is
//! two lines long. The crate `rdma-msg` fulfils it for you: there buffers are moved into an
//! operation and come back with its outcome.
//!
//! # Errors
//! An [`Error`] names the C call that failed, or the field of a configuration, what was asked and
//! what is allowed. Ends of posted requests are not errors of this kind but
//! [`WorkCompletion`]s.
//!
//! # Threads and processes
//! Everything is `Send` and `Sync`. After a `fork` the child's objects refuse to work: they would
//! act on the parent's.

mod access;
mod ah;
mod async_event;
mod attr;
mod comp_channel;
mod context;
mod cq;
mod device;
mod dmabuf;
mod error;
mod fd;
mod fork;
mod gid;
mod memory;
mod mr;
mod mw;
mod pd;
mod qp;
mod remote;
mod shared;
mod slice;
mod srq;
mod sys;
mod wc;
mod wr;

pub use access::Access;
pub use ah::{AddressHandle, AddressVector};
pub use async_event::{AsyncEvent, AsyncEvents, ObjectId};
pub use attr::{AtomicCap, DeviceAttr, DeviceCap, LinkLayer, Mtu, PortAttr, PortState};
pub use comp_channel::{CompletionChannel, CqEvent};
pub use context::Context;
pub use cq::CompletionQueue;
pub use device::{Device, Guid, NodeType, devices};
pub use dmabuf::DmaBufRegion;
pub use error::{Allowed, Error, OutOfRange, Result};
pub use gid::{GidEntry, GidType};
pub use memory::Pages;
pub use mw::MemoryWindow;
pub use pd::ProtectionDomain;
pub use qp::attr::{QpAttr, QpState};
pub use qp::post::{PostError, PostListError};
pub use qp::{QpCaps, QpConfig, QpInfo, QpType, QueuePair};
pub use remote::RemoteRegion;
pub use shared::{SharedRegion, SharedSlice};
pub use slice::{RegionOptions, RegionSlice};
pub use srq::{Srq, SrqLimits};
pub use wc::{Failure, Success, WcOpcode, WcStatus, WorkCompletion};
pub use wr::{RecvWr, SendWr, Sge};
