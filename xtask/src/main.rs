//! Set-up, lab, ping-pong and tests: `cargo xtask help`.
fn main() {}
