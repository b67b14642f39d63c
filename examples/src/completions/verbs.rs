//! With rdma-core-rs: one completion queue, its channel, and three ways to wait.

#![allow(unsafe_code)] // posting on this level is unsafe: see `Client::post`

use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rdma_cm::{ConnParam, Connection, Connector};
use rdma_core_rs::{
    CompletionChannel, CompletionQueue, ProtectionDomain, QpConfig, QueuePair, RegionSlice,
    RemoteRegion, SendWr, WorkCompletion,
};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::{Op, PATIENCE, Way, peer, readable};
use crate::cli::Result;

/// One connection of plain verbs, with at most one operation in flight.
#[derive(Debug)]
pub struct Client {
    /// `None` only while it is being dropped.
    qp: Option<QueuePair>,
    /// The buffer of the operation in flight: nobody looks at it before the completion.
    in_flight: Option<RegionSlice>,
    cq: CompletionQueue,
    channel: CompletionChannel,
    pd: ProtectionDomain,
    connection: Connection,
    /// The peer's memory.
    pub remote: RemoteRegion,
}

impl Client {
    /// Connects to a [`Peer`](peer::Peer).
    ///
    /// # Errors
    /// If one of the steps fails, or the peer sends no descriptor.
    pub fn connect(server: SocketAddr) -> Result<Client> {
        let resolved = Connector::new(server).resolve()?;
        let context = resolved.context();
        let pd = ProtectionDomain::new(&context)?;
        let channel = CompletionChannel::new(&context)?;
        let cq = CompletionQueue::new(&context, 16, Some(&channel))?;
        let mut qp = QueuePair::new(&pd, &QpConfig::rc(&cq, &cq))?;
        let connection = resolved
            .connect(&mut qp, &ConnParam::default())?
            .wait(&mut qp)?;
        let remote = peer::descriptor(connection.private_data())?;
        Ok(Client {
            qp: Some(qp),
            in_flight: None,
            cq,
            channel,
            pd,
            connection,
            remote,
        })
    }

    // region: post
    /// Posts a read or write between `buffer` and the peer's memory; `id` comes back with its completion.
    fn post(&mut self, id: u64, op: Op, buffer: RegionSlice, remote: RemoteRegion) -> Result<()> {
        if self.in_flight.is_some() {
            return Err("the operation before is not complete".into());
        }
        let sges = [buffer.sge()];
        let request = match op {
            Op::Read => SendWr::read(id, &sges, remote),
            Op::Write => SendWr::write(id, &sges, remote),
        };
        self.in_flight = Some(buffer); // from here on it is the NIC's
        let qp = self.qp.as_mut().ok_or("closed")?;
        // SAFETY: the only sge lies in the buffer, a live region of this queue pair's protection domain
        // (`run` allocates it). It stays in `in_flight`, where nobody looks at it, until its completion has
        // been polled (`run` takes it out) or the queue pair is destroyed (`drop` leaks it if that fails).
        unsafe { qp.post_send(&mut request.signaled(true)) }?;
        Ok(())
    }
    // endregion

    /// Does one operation, waits for it in the given way, and gives the completion and the buffer.
    ///
    /// # Errors
    /// If a verb fails, or there was no completion within [`PATIENCE`]. A *failed completion* is no
    /// error here: it is an answer.
    pub fn run(
        &mut self,
        op: Op,
        way: Way,
        remote: RemoteRegion,
    ) -> Result<(WorkCompletion, RegionSlice)> {
        let id = 0x1d;
        let mut buffer = RegionSlice::alloc(&self.pd, remote.len() as usize)?;
        buffer.fill(b'?');
        self.post(id, op, buffer, remote)?;
        let deadline = Instant::now() + PATIENCE;
        let completion = match way {
            Way::Poll => self.poll(id, deadline),
            Way::Epoll => self.epoll(id, deadline),
            Way::Await => self.block_on(id, deadline),
        }?;
        let buffer = self.in_flight.take().ok_or("no buffer in flight")?;
        Ok((completion, buffer))
    }

    // region: take
    /// Polls once: the entry of our operation, if it is there.
    fn take(cq: &CompletionQueue, id: u64) -> Result<Option<WorkCompletion>> {
        let mut entries = [WorkCompletion::default(); 16];
        // What has been polled is gone from the queue: look at all of it.
        let entries = cq.poll(&mut entries)?;
        Ok(entries.iter().find(|entry| entry.wr_id() == id).copied())
    }
    // endregion

    // region: poll
    fn poll(&mut self, id: u64, deadline: Instant) -> Result<WorkCompletion> {
        while Instant::now() < deadline {
            if let Some(entry) = Self::take(&self.cq, id)? {
                return Ok(entry); // success() says whether it was one
            }
            self.watch_connection()?;
        }
        Err("no completion by the deadline".into())
    }
    // endregion

    // region: epoll
    fn epoll(&mut self, id: u64, deadline: Instant) -> Result<WorkCompletion> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let none = epoll::EventData::new_u64(0);
        epoll::add(&epoll, &self.channel, none, epoll::EventFlags::IN)?;
        epoll::add(&epoll, &self.connection, none, epoll::EventFlags::IN)?; // a dead peer shows here

        while Instant::now() < deadline {
            self.cq.req_notify(false)?; // 1. arm
            if let Some(entry) = Self::take(&self.cq, id)? {
                return Ok(entry); // 2. polled again: it came before we armed
            }
            let left = deadline
                .saturating_duration_since(Instant::now())
                .try_into()?;
            let mut ready = Vec::with_capacity(2);
            epoll::wait(&epoll, spare_capacity(&mut ready), Some(&left))?; // 3. wait
            while self.channel.try_event()?.is_some() {} // 4. get, 5. ack: counted, done in batches
            self.watch_connection()?;
        }
        Err("no completion by the deadline".into())
    }
    // endregion

    // region: watch
    /// A dead peer makes no completion for seconds. The connection's events know of it at once; then the
    /// error state of our own queue pair flushes what is in flight.
    fn watch_connection(&mut self) -> Result<()> {
        let news = self.connection.try_event()?;
        if news.is_some_and(|event| event.is_end()) {
            self.qp.as_mut().ok_or("closed")?.to_error()?;
        }
        Ok(())
    }
    // endregion

    /// The smallest executor there is: poll the future, sleep on the descriptors, poll it again.
    fn block_on(&mut self, id: u64, deadline: Instant) -> Result<WorkCompletion> {
        let (cq, channel) = (self.cq.clone(), self.channel.clone());
        let mut completion = pin!(Completed { id, cq, channel });
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(entry) = completion.as_mut().poll(&mut context) {
                return entry;
            }
            if !readable([self.channel.as_fd(), self.connection.as_fd()], deadline)? {
                return Err("no completion by the deadline".into());
            }
            self.watch_connection()?;
        }
    }
}

// region: future
/// Resolves to the completion of the operation `id`.
struct Completed {
    id: u64,
    cq: CompletionQueue,
    channel: CompletionChannel,
}

impl Future for Completed {
    type Output = Result<WorkCompletion>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        while self.channel.try_event()?.is_some() {} // get and ack what woke us
        self.cq.req_notify(false)?; // arm
        match Client::take(&self.cq, self.id)? {
            Some(entry) => Poll::Ready(Ok(entry)), // polled again
            None => Poll::Pending, // a reactor takes the waker here, and wakes it when the channel is readable
        }
    }
}
// endregion

impl Drop for Client {
    fn drop(&mut self) {
        let destroyed = self.qp.take().map(QueuePair::destroy);
        if !matches!(destroyed, Some(Ok(()))) {
            std::mem::forget(self.in_flight.take()); // the NIC may still reach it
        }
    }
}
