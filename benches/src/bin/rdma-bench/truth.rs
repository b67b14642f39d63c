//! The peer is killed while `depth` operations are in flight: how long until each of them has its outcome?

use std::time::Instant;

use rdma_bench::record::Figures;

use crate::link::{CLIENT_BYTE, Link};
use crate::{Result, sys};

pub(crate) fn client(link: &Link) -> Result<Figures> {
    let mut operations = Vec::new();
    for number in 0..link.spec.depth.into() {
        operations.push(link.post(number, Some(link.filled_buf(CLIENT_BYTE)?))?);
    }
    let start = Instant::now();
    sys::kill(link.peer_pid)?;
    let (mut ok, mut failed) = (0, 0);
    for operation in operations {
        match operation.wait() {
            Ok(_) => ok += 1,
            Err(_) => failed += 1,
        }
    }
    Ok(Figures {
        truth_ms: Some(start.elapsed().as_secs_f64() * 1e3),
        ok: Some(ok),
        failed: Some(failed),
        ..Figures::default()
    })
}
