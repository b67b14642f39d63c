//! Safe librdmacm: finding the device for an address, connecting, listening, and ending.
//!
//! RDMA queue pairs know no IP addresses. The connection manager lends them some: it finds the
//! device and the path for an address, carries the queue pair numbers to and fro, and tells when a
//! peer comes or goes. The data path has no part in it; it belongs to the queue pair, which this
//! crate moves through its states and otherwise leaves alone.
//!
//! # The active side
//!
//! | Step | Call | What happens | Then |
//! |---|---|---|---|
//! | 1 | [`Connector::start`] | the kernel looks for the device and the path | [`Resolving::advance`] |
//! | 2 | [`Resolved::context`] | make a queue pair on that device | |
//! | 3 | [`Resolved::init_qp`] | the queue pair goes to INIT | post receives |
//! | 4 | [`Resolved::connect`] | the request goes out | [`Connecting::advance`] |
//! | 5 | (the answer arrives) | the queue pair goes to RTR and RTS, the peer is told | [`Connection`] |
//!
//! # The passive side
//!
//! | Step | Call | What happens | Then |
//! |---|---|---|---|
//! | 1 | [`Listener::bind`] | the port is taken | [`Listener::try_accept`] |
//! | 2 | [`Request::context`] | make a queue pair on that device | |
//! | 3 | [`Request::init_qp`] | the queue pair goes to INIT | post receives |
//! | 4 | [`Request::accept`] | RTR, RTS, and the answer goes out | [`Connection`] |
//! | 5 | (the peer confirms) | [`ConnectionEvent::Established`] | send |
//!
//! A message of the peer may arrive before its confirmation. If the confirmation does not follow soon
//! it was lost; then call [`Connection::notify_comm_est`], and it is no longer waited for.
//!
//! # Waiting
//!
//! No step waits by itself. Each has a descriptor ([`AsFd`](std::os::fd::AsFd)) that becomes
//! readable when something happened, a method that goes on as far as it can (`advance`,
//! [`Listener::try_accept`], [`Connection::try_event`]), and one that blocks, with a deadline
//! (`wait`, [`Listener::accept`], [`Connection::wait_event`]). A whole connect has **one** deadline,
//! 5 s unless told otherwise, that holds even against a listener that never answers: the kernel by
//! itself would wait for 102 s.
//!
//! With the feature `tokio` the steps can be awaited as well, see the module `tokio`.
//!
//! Dropping a step, a request, a listener or a connection at any time is safe, takes milliseconds,
//! and tells the peer what it has to know.
//!
//! # What an event means
//!
//! | Event | For whom | What to do |
//! |---|---|---|
//! | [`Established`](ConnectionEvent::Established) | passive side | it may send now |
//! | [`Disconnected`](ConnectionEvent::Disconnected) | both | collect what was received, move the queue pair to the error state, drop |
//! | [`DisconnectUnanswered`](ConnectionEvent::DisconnectUnanswered) | who disconnected | the same; the peer is probably gone |
//! | [`Rejected`](ConnectionEvent::Rejected) | passive side, after accepting | the connection did not come about: drop |
//! | [`Unreachable`](ConnectionEvent::Unreachable) | both | the network lost the peer: as for disconnected |
//! | [`ConnectError`](ConnectionEvent::ConnectError) | both | this host failed: drop |
//! | [`TimewaitExit`](ConnectionEvent::TimewaitExit) | both | nothing, if already disconnected; otherwise the connection is over |
//! | [`DeviceRemoval`](ConnectionEvent::DeviceRemoval) | both | drop all that was made on the device, which its removal waits for |
//! | [`AddrChange`](ConnectionEvent::AddrChange) | both | the path is stale: reconnect when convenient |
//! | [`Other`](ConnectionEvent::Other) | both | a newer kernel; ignore |
//!
//! # What is seen when the peer goes
//!
//! | What happened to the peer | Event here | When |
//! |---|---|---|
//! | it disconnected, or dropped its connection | `Disconnected` | at once |
//! | its process died | `Disconnected` (its kernel says so) | within 20 ms |
//! | its host died, or the cable | none, while idle; an operation under way fails after the acknowledgement timeouts | `ack_timeout` × `retry_count` |
//! | its process hangs | none | never: only a deadline of the program's own helps |
//!
//! None of these touches the queue pair. It stays in RTS, with everything that was posted, until
//! its owner moves it to the error state; only then are operations that cannot complete flushed.
//!
//! # The lower level
//!
//! [`CmId`], [`EventChannel`] and [`CmEvent`] are librdmacm itself, made safe, for what the types
//! above do not cover.
//!
//! # Threads
//!
//! Everything is `Send`. [`Listener`] and [`Connection`] are used through `&self` from any thread;
//! the steps belong to one thread at a time. In a child of `fork` what was made before returns
//! [`CmError::Forked`], and dropping it leaves the parent's connections alone.

mod addr;
mod addrinfo;
mod channel;
mod connection;
mod connector;
mod deadline;
mod device;
mod error;
mod event;
mod id;
mod lease;
mod listener;
mod multicast;
mod option;
mod param;
mod qp;
mod service;
mod state;
mod sys;
#[cfg(feature = "tokio")]
pub mod tokio;

pub use addrinfo::{AddrHints, AddrInfo, resolve_name};
pub use channel::EventChannel;
pub use connection::{Connection, ConnectionEvent};
pub use connector::{Connecting, Connector, Resolved, Resolving};
pub use device::{DeviceAddress, context_for, device_addresses};
pub use error::{CmError, Result, Step};
pub use event::{EventStatus, EventType, RejectReason, SidrStatus};
pub use id::{CmEvent, CmId, PortSpace, RawParam, UdParam};
pub use listener::{Listener, Request};
pub use multicast::{Join, Joining, Membership};
pub use option::{IdOptions, ListenOptions};
pub use param::{
    ConnParam, MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, Negotiated, RequestParam,
};
pub use service::{
    LookingUp, Lookup, MAX_ANSWER_DATA, MAX_LOOKUP_DATA, Service, ServiceListener, ServiceRequest,
};
