//! Endpoints whose operations always end, with the right buffer and the true cause.

#![allow(clippy::result_large_err)] // what was refused comes back in the error, not on the heap

mod config;
mod endpoint;
mod error;
mod handshake;
mod lifecycle;
mod op;
mod poller;
mod pool;
mod post;
mod stats;
#[cfg(feature = "tokio")]
pub mod tokio;
mod tracker;
mod wait;
mod worker;
mod wr_id;

pub use bytes::Bytes;
pub use rdma_cm::CmError;
pub use rdma_core_rs::{
    Access, Context, OutOfRange, RemoteRegion, SharedRegion, SharedSlice, WcStatus,
};

pub use config::{EndpointConfig, MAX_SGE, Receive, Wait, WorkerConfig};
pub use endpoint::{
    Batch, Endpoint, Incoming, Listener, OpOptions, Opening, PostedBatch, Prepared, Unposted, With,
};
pub use error::{
    Addrs, Cause, CloseError, Closed, Failure, OpError, OpKind, OpenError, Outcome, PostError,
    PostErrorKind, Queue, RecvError, WaitError,
};
pub use op::{Completion, Operation, Received};
pub use pool::{Buf, PoolError};
pub use stats::{EndpointStats, KindStats, OpStats, WorkerStats};
pub use worker::{Readiness, Worker};
