//! What the programs of the benchmark share: what is measured ([`spec`]), how it is said ([`record`]) and what
//! numbers are made of it ([`stats`]).
//!
//! Four programs do the work. `rdma-bench` runs one measurement on `rdma-msg`, the C program in `floor/` runs the same
//! one on raw verbs, `rdma-bench-suite` runs both and the C tools in turn on a machine with two RDMA devices, and
//! `rdma-bench-report` makes tables and plots of what it wrote. `cargo xtask bench` puts them together.

pub mod record;
pub mod spec;
pub mod stats;
