//! Endpoints in a tokio runtime (feature `tokio`).
//!
//! The futures of this crate know no runtime: they leave a waker with their worker. Somebody has to
//! poll the worker when its descriptor becomes readable, and that is all this module adds: a task that
//! does so ([`drive`]), and the few steps that come before there is a worker.
//!
//! It works on current-thread and multi-thread runtimes, which must have I/O and time enabled. Tasks
//! and threads may wait on the same worker.
//!
//! ```no_run
//! use rdma_msg::{EndpointConfig, Listener, RecvError};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = Listener::bind("192.168.99.2:7471".parse()?, &EndpointConfig::default())?;
//! loop {
//!     let endpoint = rdma_msg::tokio::establish(rdma_msg::tokio::accept(&listener).await?).await?;
//!     tokio::spawn(async move {
//!         while let Ok(received) = endpoint.recv_async().await {
//!             let Ok(operation) = endpoint.send(received.buf) else { break };
//!             if operation.await.is_err() {
//!                 break;
//!             }
//!         }
//!     });
//! }
//! # }
//! ```

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::config::EndpointConfig;
use crate::endpoint::{Endpoint, Incoming, Listener, Opening};
use crate::error::OpenError;
use crate::poller::Poller;
use crate::worker::{Readiness, Worker, WorkerInner};

/// Spawns a task that polls `worker` whenever there is something to do, until the worker is gone.
///
/// Once is enough; further calls do nothing while the task lives.
///
/// # Errors
///
/// If the runtime cannot watch the worker's descriptor.
///
/// # Panics
///
/// Outside of a runtime, or in one without I/O.
pub fn drive(worker: &Worker) -> io::Result<()> {
    let Some(turn) = Turn::take(&worker.inner) else {
        return Ok(());
    };
    let fd = PollerFd(worker.inner.poller_arc());
    let fd = register(fd)?;
    tokio::spawn(turn.drive(fd));
    Ok(())
}

/// The right to drive a worker, of which there is one.
struct Turn {
    /// Weak: the task ends with the worker, not the other way round.
    worker: Weak<WorkerInner>,
}

impl Turn {
    fn take(worker: &Arc<WorkerInner>) -> Option<Turn> {
        (!worker.set_driven(true)).then(|| Turn {
            worker: Arc::downgrade(worker),
        })
    }

    async fn drive(self, fd: AsyncFd<PollerFd>) {
        while let Some(next) = self.step() {
            match next {
                Readiness::Ready => tokio::task::yield_now().await,
                Readiness::MayWait => match fd.readable().await {
                    // Whatever is ready is handled by the next step, all of it, so that the next
                    // edge is a new one.
                    Ok(mut guard) => guard.clear_ready(),
                    Err(error) => {
                        // The runtime shuts down.
                        log::debug!("the driver of a worker ends: {error}");
                        return;
                    }
                },
            }
        }
    }

    /// Handles what there is. `None`: the worker is gone.
    fn step(&self) -> Option<Readiness> {
        let worker = Worker {
            inner: self.worker.upgrade()?,
        };
        worker.turn();
        Some(worker.prepare_wait())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.upgrade() {
            worker.set_driven(false);
        }
    }
}

/// Keeps the descriptors of a worker while they are watched, and nothing else of it.
struct PollerFd(Arc<Poller>);

impl AsRawFd for PollerFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Connects on a worker of its own, which is driven.
///
/// # Errors
///
/// As for [`Endpoint::connect`].
///
/// # Cancel safety
///
/// Dropping the future gives the attempt up and leaves nothing of it.
pub async fn connect(peer: SocketAddr, config: &EndpointConfig) -> Result<Endpoint, OpenError> {
    let mut resolving = Opening::resolve(peer, config)?;
    let fd = watch(&resolving)?;
    let resolved = loop {
        if let Some(resolved) = resolving.advance()? {
            break resolved;
        }
        let left = resolving
            .deadline()
            .saturating_duration_since(Instant::now());
        if let Ok(guard) = tokio::time::timeout(left, fd.readable()).await {
            guard?.clear_ready();
        }
    };
    drop(fd);
    let worker = Worker::new(&resolved.context(), &config.private_worker())?;
    drive(&worker)?;
    Opening::resolved(&worker, resolved, config)?.await
}

/// Waits for the next request of a listener.
///
/// # Errors
///
/// As for [`Listener::accept`].
///
/// # Cancel safety
///
/// Dropping the future loses no request.
pub async fn accept(listener: &Listener) -> Result<Incoming, OpenError> {
    let fd = watch(listener)?;
    loop {
        if let Some(incoming) = listener.try_accept()? {
            return Ok(incoming);
        }
        // Another one who waits may be told that the device is gone, and nobody else after it.
        if let Ok(ready) = tokio::time::timeout(LOOK_AGAIN, fd.readable()).await {
            ready?.clear_ready();
        }
    }
}

const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Accepts a request on a worker of its own, which is driven, and waits until the peer has confirmed.
///
/// # Errors
///
/// As for [`Incoming::accept`].
///
/// # Cancel safety
///
/// Dropping the future gives the connection up.
pub async fn establish(incoming: Incoming) -> Result<Endpoint, OpenError> {
    let worker = incoming.private_worker()?;
    drive(&worker)?;
    incoming.accept_with(&worker)?.await
}

/// Watches a duplicate of a descriptor, so that several tasks can watch the same.
fn watch(source: &impl AsFd) -> io::Result<AsyncFd<OwnedFd>> {
    let fd = source.as_fd().try_clone_to_owned()?;
    register(fd)
}

/// Registers a descriptor that `fd` owns for as long as it lives. (That is what the `unsafe`
/// replacement of this function asks its callers to see to.)
#[allow(deprecated)]
fn register<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}
