//! The `ibv_*` and `rdma_*` symbols in Rust, for tests.
