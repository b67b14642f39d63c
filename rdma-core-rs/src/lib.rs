//! Safe libibverbs: devices, memory, queues and completions.
//!
//! Each object of the C library is a type that owns it and holds what it needs, so that it can be
//! kept in structs, moved to threads and dropped in any order: queue pairs go before completion
//! queues, regions before their domain, the device last. The names are those of the man pages, and
//! the C names find the items in the search of this documentation.
//!
//! # Example
//! Two queue pairs of one device, brought up by hand, and a message from one to the other. (Between
//! hosts, `rdma-cm` finds the peer and exchanges what is exchanged here in variables.)
//!
//! ```
//! use rdma_core_rs::{
//!     Access, AddressVector, CompletionQueue, ProtectionDomain, QpAttr, QpConfig, QpState,
//!     QueuePair, RecvWr, RegionSlice, SendWr, WorkCompletion, devices,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let _fabric = fake_verbs::Fabric::new();
//! for device in devices()? {
//!     println!("{} {}", device.name(), device.guid());
//! }
//! let context = devices()?.first().ok_or("no device")?.open()?;
//! let gid = context.gid_table(1)?.pop().ok_or("port 1 has no address")?;
//! let mtu = context.port_attr(1)?.active_mtu;
//!
//! let pd = ProtectionDomain::new(&context)?;
//! let cq = CompletionQueue::new(&context, 64, None)?;
//! let mut message = RegionSlice::alloc(&pd, 4096)?; // before the queue pairs: freed after them
//! let room = message.split_off(2048);
//! let mut sender = QueuePair::new(&pd, &QpConfig::rc(&cq, &cq))?;
//! let mut receiver = QueuePair::new(&pd, &QpConfig::rc(&cq, &cq))?;
//!
//! let path = AddressVector::global(1, gid.gid, gid.index.try_into()?);
//! let numbers = [sender.qp_num(), receiver.qp_num()];
//! for (qp, peer) in [(&mut sender, numbers[1]), (&mut receiver, numbers[0])] {
//!     let init = QpAttr::new().state(QpState::Init).port(1).pkey_index(0);
//!     qp.modify(&init.access(Access::empty()))?;
//!     let rtr = QpAttr::new().state(QpState::Rtr).path(&path).path_mtu(mtu).dest_qp_num(peer);
//!     qp.modify(&rtr.rq_psn(0).max_dest_rd_atomic(1).min_rnr_timer(12))?;
//!     let rts = QpAttr::new().state(QpState::Rts).sq_psn(0).timeout(14).retry_cnt(6);
//!     qp.modify(&rts.rnr_retry(6).max_rd_atomic(1))?;
//! }
//!
//! message[..5].copy_from_slice(b"hello");
//! let (out, into) = ([message.sge_range(..5)?], [room.sge()]);
//! // SAFETY: `room` is of the same domain, lives longer than the queue pairs (it was made before
//! // them) and is looked at after the completion.
//! unsafe { receiver.post_recv(&mut RecvWr::new(1, &into)) }?;
//! // SAFETY: so it is with `message`, which is not written to any more.
//! unsafe { sender.post_send(&mut SendWr::send(2, &out)) }?;
//!
//! let mut ended = 0;
//! let mut entries = [WorkCompletion::default(); 16];
//! while ended < 2 {
//!     for wc in cq.poll(&mut entries)? {
//!         println!("{} ended: {:?}", wc.wr_id(), wc.success()?.opcode());
//!         ended += 1;
//!     }
//! }
//! assert_eq!(&room[..5], b"hello");
//! # Ok(()) }
//! ```
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
pub use fork::Birth;
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
