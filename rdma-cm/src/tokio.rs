//! The steps, awaited in a tokio runtime (feature `tokio`).
//!
//! Each waits for its descriptor instead of blocking the thread, and otherwise does what its blocking
//! form does (but for [`CmError::with_candidates`], which is left to the program). The runtime needs its
//! I/O and time drivers (`enable_all`); without them the methods panic, as everything of tokio does.
//!
//! # Cancel safety
//!
//! All of them are cancel safe. They borrow the step: dropping the future leaves the step as it was,
//! and awaiting it again goes on from there. No event is lost, because an event is handled in the same
//! poll that fetches it. To give a step up, drop the step itself.
//!
//! ```no_run
//! # async fn example(mut qp: rdma_core_rs::QueuePair) -> Result<(), rdma_cm::CmError> {
//! use rdma_cm::{ConnParam, Connector};
//!
//! let mut resolving = Connector::new("192.168.99.2:7471".parse().unwrap()).start()?;
//! let resolved = resolving.ready().await?;
//! // ... make a queue pair on resolved.context() ...
//! let mut connecting = resolved.connect(&mut qp, &ConnParam::default())?;
//! let connection = connecting.ready(&mut qp).await?;
//! println!("connected to {}", connection.peer_addr());
//! # Ok(())
//! # }
//! ```

use std::io;
use std::sync::Arc;
use std::time::Instant;

use rdma_core_rs::QueuePair;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout_at;

use crate::channel::EventChannel;
use crate::error::{CmError, Result, Step};
use crate::listener::LOOK_AGAIN;
use crate::{
    Connecting, Connection, ConnectionEvent, Joining, Listener, LookingUp, Membership, Request,
    Resolved, Resolving, Service, ServiceListener, ServiceRequest,
};

/// Repeats `step` whenever the channel became readable or the time that `look_at` gives has come, until
/// it has a result.
///
/// The readiness is cleared *before* the step is repeated, so an event that arrives in between is
/// either fetched by the step or makes the descriptor ready again.
async fn until<T>(
    channel: Arc<EventChannel>,
    look_at: impl Fn() -> Option<Instant>,
    mut step: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    if let Some(result) = step()? {
        return Ok(result);
    }
    let failed = |source| CmError::call("epoll_ctl", Step::Event, None)(source);
    let channel = register(channel).map_err(failed)?;
    loop {
        let readable = match look_at() {
            Some(at) => timeout_at(at.into(), channel.readable()).await.ok(),
            None => Some(channel.readable().await),
        };
        if let Some(ready) = readable {
            ready.map_err(failed)?.clear_ready();
        }
        if let Some(result) = step()? {
            return Ok(result);
        }
    }
}

/// Another one who waits for a request may be told that the device is gone, and nobody else after it.
fn soon() -> Option<Instant> {
    Some(Instant::now() + LOOK_AGAIN)
}

/// Registers a channel, which the registration keeps open. (Its newer, unsafe form asks for just that,
/// and is not there in older versions of tokio.)
#[allow(deprecated)]
fn register(channel: Arc<EventChannel>) -> io::Result<AsyncFd<Arc<EventChannel>>> {
    AsyncFd::with_interest(channel, Interest::READABLE)
}

impl Resolving {
    /// Waits until the peer is resolved, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance), and [`CmError::Call`] if the descriptor cannot be
    /// registered, among others because another task waits for the same step.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the step goes on when it is awaited again.
    pub async fn ready(&mut self) -> Result<Resolved> {
        let deadline = self.deadline();
        until(self.channel(), || Some(deadline), || self.advance()).await
    }
}

impl Connecting {
    /// Waits until the connection is up, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance), and [`CmError::Call`] as for [`Resolving::ready`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the step goes on when it is awaited again.
    pub async fn ready(&mut self, qp: &mut QueuePair) -> Result<Connection> {
        let deadline = self.deadline();
        until(self.channel(), || Some(deadline), || self.advance(qp)).await
    }
}

impl LookingUp {
    /// Waits for the answer, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance), and [`CmError::Call`] as for [`Resolving::ready`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the step goes on when it is awaited again.
    pub async fn ready(&mut self) -> Result<Service> {
        let deadline = self.deadline();
        until(self.channel(), || Some(deadline), || self.advance()).await
    }
}

impl Joining {
    /// Waits until the group is joined, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance), and [`CmError::Call`] as for [`Resolving::ready`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the step goes on when it is awaited again.
    pub async fn ready(&mut self) -> Result<Membership> {
        let deadline = self.deadline();
        until(self.channel(), || Some(deadline), || self.advance()).await
    }
}

impl Listener {
    /// Waits for the next request, for as long as it takes.
    ///
    /// # Errors
    ///
    /// Those of [`try_accept`](Self::try_accept), and [`CmError::Call`] as for [`Resolving::ready`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a request that was not returned is returned to the next one who waits.
    pub async fn next_request(&self) -> Result<Request> {
        until(self.channel(), soon, || self.try_accept()).await
    }
}

impl ServiceListener {
    /// Waits for the next look-up, for as long as it takes.
    ///
    /// # Errors
    ///
    /// Those of [`try_request`](Self::try_request), and [`CmError::Call`] as for
    /// [`Resolving::ready`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a look-up that was not returned is returned to the next one who waits.
    pub async fn next_request(&self) -> Result<ServiceRequest> {
        until(self.channel(), soon, || self.try_request()).await
    }
}

impl Connection {
    /// Waits for the next event, for as long as it takes.
    ///
    /// # Errors
    ///
    /// Those of [`try_event`](Self::try_event), and [`CmError::Call`] as for [`Resolving::ready`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: an event that was not returned is returned to the next one who waits.
    pub async fn next_event(&self) -> Result<ConnectionEvent> {
        until(self.channel(), || None, || self.try_event()).await
    }
}
