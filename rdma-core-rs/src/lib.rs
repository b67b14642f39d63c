//! Safe libibverbs.
