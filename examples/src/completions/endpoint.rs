//! With rdma-msg: the operation is a value that ends exactly once, with its buffer.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rdma_msg::{
    Completion, Endpoint, OpError, OpOptions, Operation, Readiness, Received, RemoteRegion, Worker,
};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::{Op, PATIENCE, Way, peer, readable};
use crate::cli::Result;

/// Connects to a [`Peer`](peer::Peer): the endpoint, and the peer's memory.
///
/// # Errors
/// If the connect fails, or the peer sends no descriptor.
pub fn connect(server: SocketAddr) -> Result<(Endpoint, RemoteRegion)> {
    let endpoint = Endpoint::connect(server, &peer::config())?;
    let remote = peer::descriptor(endpoint.private_data())?;
    Ok((endpoint, remote))
}

/// Does one operation and waits for it in the given way.
///
/// # Errors
/// If it could not be posted, or has not ended within [`PATIENCE`]. A failed operation is no error
/// here: it is an answer.
pub fn run(
    endpoint: &Endpoint,
    op: Op,
    way: Way,
    remote: RemoteRegion,
) -> Result<Result<Completion, OpError>> {
    let mut buf = endpoint.alloc(remote.len() as usize)?;
    buf.fill(b'?');
    let operation = match op {
        Op::Read => endpoint.read(buf, remote)?,
        Op::Write => endpoint.write(buf, remote)?,
    };
    let deadline = Instant::now() + PATIENCE;
    match way {
        Way::Poll => by_polling(endpoint.worker(), operation, deadline),
        Way::Epoll => by_epoll(endpoint.worker(), operation, deadline),
        Way::Await => block_on(endpoint.worker(), awaited(operation), deadline),
    }
}

/// The plainest way: the calling thread waits.
///
/// # Errors
/// If the read could not be posted, or failed.
pub fn read(endpoint: &Endpoint, remote: RemoteRegion) -> Result<Vec<u8>> {
    // region: wait
    let buf = endpoint.alloc(remote.len() as usize)?;
    let done = endpoint.read(buf, remote)?.wait()?;
    let data = done.buf.ok_or("a read has a buffer")?; // complete: the data is in it
    // endregion
    Ok(data.to_vec())
}

// region: poll
fn by_polling(
    worker: &Worker,
    mut operation: Operation,
    deadline: Instant,
) -> Result<Result<Completion, OpError>> {
    while Instant::now() < deadline {
        worker.poll(); // completions, and once in a while the connection's news
        if let Some(result) = operation.try_result() {
            return Ok(result);
        }
    }
    Err("not complete by the deadline".into())
}
// endregion

// region: epoll
fn by_epoll(
    worker: &Worker,
    mut operation: Operation,
    deadline: Instant,
) -> Result<Result<Completion, OpError>> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let none = epoll::EventData::new_u64(0);
    epoll::add(&epoll, worker, none, epoll::EventFlags::IN)?;
    while Instant::now() < deadline {
        worker.poll();
        if let Some(result) = operation.try_result() {
            return Ok(result);
        }
        // Arms and polls again. The worker's own timers end the sleep as well.
        if worker.prepare_wait() == Readiness::MayWait {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.try_into()?;
            let mut ready = Vec::with_capacity(1);
            epoll::wait(&epoll, spare_capacity(&mut ready), Some(&left))?;
        }
    }
    Err("not complete by the deadline".into())
}
// endregion

// region: await
async fn awaited(operation: Operation) -> Result<Completion, OpError> {
    operation.await
}
// endregion

/// The smallest executor there is; any other does as well, if something polls the worker.
fn block_on<T>(worker: &Worker, future: impl Future<Output = T>, deadline: Instant) -> Result<T> {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    while Instant::now() < deadline {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Ok(output);
        }
        if worker.poll() > 0 {
            continue;
        }
        if worker.prepare_wait() == Readiness::MayWait {
            readable([worker.as_fd()], deadline)?;
        }
    }
    Err("not complete by the deadline".into())
}

/// Writes, and marks the end with a write with immediate; `peer` is the other side's endpoint.
///
/// # Errors
/// If an operation fails, or nothing arrives.
pub fn write_with_marker(
    endpoint: &Endpoint,
    peer: &Endpoint,
    remote: RemoteRegion,
    parts: [&[u8]; 2],
) -> Result<Received> {
    let [first, second] = parts;
    let (start, end) = (first.len() as u64, (first.len() + second.len()) as u64);
    let mut bufs = [endpoint.alloc(first.len())?, endpoint.alloc(second.len())?];
    bufs[0].copy_from_slice(first);
    bufs[1].copy_from_slice(second);
    let [first, second] = bufs;
    let deadline = Instant::now() + PATIENCE;
    // region: write_imm
    let write = endpoint.write(first, remote.slice(0..start)?)?;
    let marked = endpoint.write_imm(second, remote.slice(start..end)?, 42)?;

    // At the peer: a receive completes, and the data of *both* writes is in its memory.
    let arrived = peer.recv_deadline(deadline)?.ok_or("nothing arrived")?;
    assert_eq!(arrived.imm, Some(42));
    // endregion
    write.wait()?;
    marked.wait()?;
    Ok(arrived)
}

/// Takes the word at the beginning of `remote` from `old` to `new`; whether it was `old`.
///
/// # Errors
/// If the operation fails.
pub fn mark(endpoint: &Endpoint, remote: RemoteRegion, old: u64, new: u64) -> Result<bool> {
    // region: compare_swap
    let word = remote.slice(0..8)?;
    let found = endpoint.compare_swap(word, old, new)?.wait()?.value;
    let ours = found == Some(old); // else somebody was there before, and nothing was changed
    // endregion
    Ok(ours)
}

/// Reads all of `remote` and sets its last word behind the read's back, but not before it is done.
///
/// # Errors
/// If one of the operations fails.
pub fn read_then_write(endpoint: &Endpoint, remote: RemoteRegion, word: u64) -> Result<Vec<u8>> {
    let buf = endpoint.alloc(remote.len() as usize)?;
    let mut value = endpoint.alloc(8)?;
    value.copy_from_slice(&word.to_ne_bytes());
    // region: fence
    let last = remote.slice(remote.len() - 8..remote.len())?;
    let fence = OpOptions {
        fence: true,
        ..OpOptions::default()
    };
    let read = endpoint.read(buf, remote)?;
    let write = endpoint.with(fence).write(value, last)?; // starts when the read is complete
    // endregion
    let before = read.wait()?.buf.ok_or("a read has a buffer")?;
    write.wait()?;
    Ok(before.to_vec())
}
