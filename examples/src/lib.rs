//! What the examples share, so that each of them can be about RDMA only.
//!
//! The examples themselves are the files in `src/bin`, numbered from the smallest:
//!
//! | file | shows | level |
//! |---|---|---|
//! | `01_echo` | messages: one server, many clients | rdma-msg |
//! | `02_read_write` | one-sided read, write, compare-swap into an exposed region | rdma-msg |
//! | `03_completions` | how to know that a read or write is complete | rdma-core-rs and rdma-msg |
//! | `04_echo_epoll` | the echo in a foreign event loop, without a runtime | rdma-msg |
//! | `05_echo_tokio` | the echo as async tasks | rdma-msg with tokio |
//! | `06_rping` | a protocol of others: rdmacm-utils' rping, both roles | rdma-msg |
//! | `07_pingpong` | latency and rate, data verified byte by byte | rdma-msg |
//!
//! Every program logs through `env_logger` (`RUST_LOG=rdma_msg=debug`), prints one line with the
//! whole chain of causes when it fails, and exits with status 1 then.

pub mod child;
pub mod cli;
pub mod completions;
pub mod pattern;
pub mod report;
