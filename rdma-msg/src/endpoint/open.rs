//! Getting connected: listeners, requests, and attempts that are under way.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rdma_cm::{Connector, ListenOptions, Resolved, Resolving};

use super::state::Link;
use super::{Endpoint, post_recv};
use crate::config::EndpointConfig;
use crate::error::{OpenError, PostError};
use crate::handshake;
use crate::lifecycle;
use crate::op::Operation;
use crate::pool::Buf;
use crate::wait::{self, Watch, new_key};
use crate::worker::{State, Worker};

/// Takes connection requests at a local address.
///
/// All methods take `&self`, and several threads may accept at once.
pub struct Listener {
    listener: rdma_cm::Listener,
    config: EndpointConfig,
}

impl Listener {
    /// Listens at `addr`; with port 0 at one that is free. What is accepted gets `config`.
    ///
    /// # Errors
    ///
    /// [`OpenError::Cm`] if no RDMA device has the address or it is in use; [`OpenError::Config`] if
    /// the configuration is not possible.
    #[doc(alias = "rdma_listen")]
    pub fn bind(addr: SocketAddr, config: &EndpointConfig) -> Result<Listener, OpenError> {
        config.check_to_accept()?;
        let options = ListenOptions {
            backlog: config.backlog,
            tos: config.tos,
            ack_timeout: Some(config.ack_timeout),
            reuse_addr: config.reuse_addr,
            ..ListenOptions::default()
        };
        let listener = rdma_cm::Listener::bind(addr, &options)?;
        Ok(Listener {
            listener,
            config: config.clone(),
        })
    }

    /// Where it listens, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Waits for the next request.
    ///
    /// # Errors
    ///
    /// [`OpenError::Cm`]. The listener goes on, unless it is
    /// [`CmError::DeviceRemoved`](rdma_cm::CmError::DeviceRemoved): then no request will ever come, and
    /// every further call says the same at once.
    #[doc(alias = "rdma_get_request")]
    pub fn accept(&self) -> Result<Incoming, OpenError> {
        Ok(self.incoming(self.listener.accept(None)?))
    }

    /// Waits for the next request until `deadline`: `None` if there was none by then.
    ///
    /// # Errors
    ///
    /// As for [`accept`](Listener::accept).
    pub fn accept_deadline(&self, deadline: Instant) -> Result<Option<Incoming>, OpenError> {
        match self.listener.accept(Some(deadline)) {
            Ok(request) => Ok(Some(self.incoming(request))),
            Err(error) if error.is_timed_out() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The next request, if there is one. To be called when the descriptor ([`AsFd`]) is readable.
    ///
    /// # Errors
    ///
    /// As for [`accept`](Listener::accept).
    pub fn try_accept(&self) -> Result<Option<Incoming>, OpenError> {
        Ok(self
            .listener
            .try_accept()?
            .map(|request| self.incoming(request)))
    }

    fn incoming(&self, request: rdma_cm::Request) -> Incoming {
        Incoming {
            request,
            config: self.config.clone(),
        }
    }
}

impl AsFd for Listener {
    /// Readable when there may be a request; it does not block when read by
    /// [`try_accept`](Listener::try_accept).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local_addr", &self.local_addr())
            .finish_non_exhaustive()
    }
}

/// A request for a connection: accept or reject it. Dropping it rejects it.
pub struct Incoming {
    request: rdma_cm::Request,
    config: EndpointConfig,
}

impl Incoming {
    /// Who asks.
    pub fn peer_addr(&self) -> SocketAddr {
        self.request.peer_addr()
    }

    /// At which local address.
    pub fn local_addr(&self) -> SocketAddr {
        self.request.local_addr()
    }

    /// What the peer's program said ([`EndpointConfig::private_data`]).
    pub fn private_data(&self) -> &[u8] {
        let bytes = self.request.private_data();
        if self.config.handshake {
            handshake::decode(bytes).1
        } else {
            bytes
        }
    }

    /// The settings that the endpoint will have, to be changed for this one.
    pub fn config_mut(&mut self) -> &mut EndpointConfig {
        &mut self.config
    }

    /// Accepts on a worker of its own, and waits until the peer has confirmed (or sent something).
    ///
    /// # Errors
    ///
    /// [`OpenError`]; the request is rejected then.
    #[doc(alias = "rdma_accept")]
    pub fn accept(self) -> Result<Endpoint, OpenError> {
        let worker = self.private_worker()?;
        self.accept_with(&worker)?.wait()
    }

    /// A worker for this one.
    pub(crate) fn private_worker(&self) -> Result<Worker, OpenError> {
        self.config.check_to_accept()?;
        Worker::new(&self.request.context(), &self.config.private_worker())
    }

    /// Accepts on a worker that is there; wait for the result, or await it.
    ///
    /// # Errors
    ///
    /// Those that are known at once; the others come from the [`Opening`].
    #[doc(alias = "rdma_accept")]
    pub fn accept_with(self, worker: &Worker) -> Result<Opening, OpenError> {
        let Incoming { request, config } = self;
        config.check_to_accept()?;
        Opening::start(worker, &config, Link::None, |state, index| {
            state.requested(index, request, false)
        })
    }

    /// Gets everything ready to accept, but does not accept yet: so that receives can be posted
    /// before the peer can send ([`Receive::Manual`](crate::Receive::Manual)).
    ///
    /// # Errors
    ///
    /// [`OpenError`]; the request is rejected then.
    pub fn prepare(self, worker: &Worker) -> Result<Prepared, OpenError> {
        let Incoming { request, config } = self;
        config.check_to_accept()?;
        let opening = Opening::start(worker, &config, Link::None, |state, index| {
            state.requested(index, request, true)
        })?;
        Ok(Prepared { opening })
    }

    /// Turns the peer down, with up to 148 bytes for its program.
    ///
    /// # Errors
    ///
    /// [`OpenError::Cm`] if the data is too long, or the peer has given up. It is rejected either
    /// way.
    #[doc(alias = "rdma_reject")]
    pub fn reject(self, private_data: &[u8]) -> Result<(), OpenError> {
        Ok(self.request.reject(private_data)?)
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incoming")
            .field("peer_addr", &self.peer_addr())
            .finish_non_exhaustive()
    }
}

/// An attempt to connect, or to accept, that is under way on a worker.
///
/// Wait for it with [`wait`](Opening::wait), or await it; it ends by the configuration's
/// [`connect_deadline`](EndpointConfig::connect_deadline).
///
/// # Cancel safety
///
/// Dropping it gives the attempt up at once, and leaves nothing of it.
#[must_use = "dropping it gives the attempt up"]
pub struct Opening {
    worker: Worker,
    index: u32,
    key: u64,
    /// The endpoint was handed out, or the error.
    over: bool,
}

impl Opening {
    pub(super) fn connect(
        worker: &Worker,
        peer: SocketAddr,
        config: &EndpointConfig,
    ) -> Result<Opening, OpenError> {
        let resolving = Opening::resolve(peer, config)?;
        let deadline = resolving.deadline();
        Opening::start(
            worker,
            config,
            Link::Resolving(resolving),
            |state, index| {
                state.set_timer(index, Some(deadline));
                Ok(())
            },
        )
    }

    /// The device is not known before the peer is resolved, so this waits for that.
    pub(super) fn connect_alone(
        peer: SocketAddr,
        config: &EndpointConfig,
    ) -> Result<Opening, OpenError> {
        config.check_to_connect()?;
        let resolved = connector(peer, config).resolve()?;
        let worker = Worker::new(&resolved.context(), &config.private_worker())?;
        Opening::resolved(&worker, resolved, config)
    }

    /// Starts to resolve the peer.
    pub(crate) fn resolve(
        peer: SocketAddr,
        config: &EndpointConfig,
    ) -> Result<Resolving, OpenError> {
        config.check_to_connect()?;
        Ok(connector(peer, config).start()?)
    }

    /// Goes on from there.
    pub(crate) fn resolved(
        worker: &Worker,
        resolved: Resolved,
        config: &EndpointConfig,
    ) -> Result<Opening, OpenError> {
        Opening::start(worker, config, Link::None, |state, index| {
            state.resolved(index, resolved, false)
        })
    }

    fn start(
        worker: &Worker,
        config: &EndpointConfig,
        link: Link,
        first: impl FnOnce(&mut State, u32) -> Result<(), OpenError>,
    ) -> Result<Opening, OpenError> {
        let slot_size = worker.inner.pool().slot_size();
        // What they hold is dropped here if the worker takes no endpoint, not under its lock.
        let (mut link, mut first) = (link, Some(first));
        let inserted = worker.inner.with(|state| {
            let index = state.insert(config, &mut link, slot_size)?;
            let first = first.take().map_or(Ok(()), |first| first(state, index));
            Ok::<_, OpenError>((index, first))
        });
        let (index, first) = inserted?;
        // From here on its drop cleans up.
        let opening = Opening {
            worker: worker.clone(),
            index,
            key: new_key(),
            over: false,
        };
        first?;
        Ok(opening)
    }

    /// Waits until the connection is there.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing is left of the attempt.
    pub fn wait(mut self) -> Result<Endpoint, OpenError> {
        let worker = self.worker.clone();
        match wait::wait(&worker.inner, &mut self, None) {
            Some(Err(OpenError::Cm(error))) => Err(error.with_candidates().into()),
            Some(result) => result,
            None => unreachable!("a wait without a deadline does not time out"),
        }
    }

    /// The worker it is on.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }
}

fn connector(peer: SocketAddr, config: &EndpointConfig) -> Connector {
    let connector = Connector::new(peer)
        .deadline(config.connect_deadline)
        .options(config.id_options());
    match config.source {
        Some(source) => connector.source(source),
        None => connector,
    }
}

impl Watch for Opening {
    type Output = Result<Endpoint, OpenError>;

    fn check(&mut self, state: &mut State) -> Option<Self::Output> {
        let ep = &mut state.endpoints[self.index as usize];
        match ep.life {
            lifecycle::State::Opening => None,
            lifecycle::State::Open | lifecycle::State::Draining => {
                self.over = true;
                Some(Ok(Endpoint::new(self.worker.clone(), self.index, state)))
            }
            lifecycle::State::Flushing | lifecycle::State::Closed => {
                if let Some(error) = ep.open_error.take() {
                    return Some(Err(error));
                }
                // It was open for a moment: then its end is the endpoint's to tell.
                if ep.was_open {
                    self.over = true;
                    return Some(Ok(Endpoint::new(self.worker.clone(), self.index, state)));
                }
                let cause = state.known_cause(self.index)?;
                Some(Err(OpenError::Ended(Arc::clone(cause))))
            }
        }
    }

    fn register(&mut self, state: &mut State, key: u64, waker: Waker) -> Option<Waker> {
        state.endpoints[self.index as usize]
            .watchers
            .set(key, waker)
    }

    fn unregister(&mut self, state: &mut State, key: u64) -> Option<Waker> {
        if self.over {
            return None;
        }
        state.endpoints[self.index as usize].watchers.remove(key)
    }
}

impl Future for Opening {
    type Output = Result<Endpoint, OpenError>;

    /// # Panics
    ///
    /// If it has given its result before.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        assert!(!self.over, "polled after it gave its result");
        let (worker, key) = (self.worker.clone(), self.key);
        wait::poll(&worker.inner, &mut *self, key, cx)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if !self.over {
            drop(self.worker.inner.with(|state| state.remove(self.index)));
        }
    }
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

/// An endpoint with its queue pair, before it is connected: receives can be posted to it, and are
/// there when the peer's first message comes.
///
/// Dropping it gives the attempt up.
#[derive(Debug)]
#[must_use = "nothing is connected before open()"]
pub struct Prepared {
    opening: Opening,
}

impl Prepared {
    pub(super) fn connect(
        worker: &Worker,
        peer: SocketAddr,
        config: &EndpointConfig,
    ) -> Result<Prepared, OpenError> {
        config.check_to_connect()?;
        let resolved = connector(peer, config).resolve()?;
        let opening = Opening::start(worker, config, Link::None, |state, index| {
            state.resolved(index, resolved, true)
        })?;
        Ok(Prepared { opening })
    }

    /// Posts a receive for the whole capacity of `buf`.
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::post_recv`].
    pub fn post_recv(&self, buf: Buf) -> Result<Operation, PostError<Buf>> {
        post_recv(&self.opening.worker.inner, self.opening.index, buf)
    }

    /// The worker it is on.
    pub fn worker(&self) -> &Worker {
        &self.opening.worker
    }

    /// Connects, or accepts; wait for the result, or await it.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing is left of the attempt then. After the
    /// [`connect_deadline`](EndpointConfig::connect_deadline), counted from the start of the connect
    /// or from [`Incoming::prepare`], it is a [`CmError`](crate::CmError) that is
    /// [timed out](crate::CmError::is_timed_out); nothing was sent, and the receives have ended.
    pub fn open(self) -> Result<Opening, OpenError> {
        let Opening { worker, index, .. } = &self.opening;
        worker.inner.with(|state| state.go_on(*index))?;
        Ok(self.opening)
    }
}
