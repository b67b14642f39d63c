//! The passive side: a listener, and the requests that arrive on it.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdma_core_rs::{Context, QueuePair};

use crate::addr::check_scope;
use crate::channel::EventChannel;
use crate::connection::Connection;
use crate::connector::raw_param;
use crate::deadline::Deadline;
use crate::error::{CmError, Result, Step};
use crate::event::EventType;
use crate::id::{CmEvent, CmId, PortSpace};
use crate::option::{IdOptions, ListenOptions};
use crate::param::{
    ConnParam, MAX_ACCEPT_DATA, MAX_REJECT_DATA, Negotiated, RequestParam, check_private_data,
};
use crate::qp::{self, QpParam};
use crate::state::State;

/// Listens for connection requests.
///
/// A wildcard address listens on all devices, present and future; an address of a device on that
/// one only. All methods take `&self`, so several threads may accept. Dropping it rejects the
/// requests that nobody fetched; connections that were accepted live on.
///
/// ```no_run
/// use rdma_cm::{ListenOptions, Listener};
///
/// let listener = Listener::bind("0.0.0.0:7471".parse().unwrap(), &ListenOptions::default())?;
/// let request = listener.accept(None)?;
/// println!("{} would like to connect", request.peer_addr());
/// request.reject(b"not today")?;
/// # Ok::<(), rdma_cm::CmError>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    listening: Listening,
    options: IdOptions,
}

impl Listener {
    /// Listens on `addr`; port 0 lets the kernel choose one.
    ///
    /// # Errors
    ///
    /// [`CmError::AddressInUse`]; [`CmError::NoDevice`] for an address of no device, and for a
    /// loopback address, which the kernel would take for the wildcard, open to everyone;
    /// [`CmError::NoConnectionManager`], [`CmError::Config`], [`CmError::Call`].
    pub fn bind(addr: SocketAddr, options: &ListenOptions) -> Result<Self> {
        Self::bind_in(PortSpace::Tcp, addr, options)
    }

    /// [`bind`](Self::bind) in another port space for connections, [`PortSpace::Ib`].
    ///
    /// # Errors
    ///
    /// Those of [`bind`](Self::bind), and [`CmError::Config`] for a port space of datagrams.
    pub fn bind_in(
        port_space: PortSpace,
        addr: SocketAddr,
        options: &ListenOptions,
    ) -> Result<Self> {
        check_connected(port_space)?;
        Ok(Self {
            listening: Listening::bind(port_space, addr, options)?,
            options: options.id_options(),
        })
    }

    /// The address that it listens on, with the port that was chosen.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.listening.local_addr()
    }

    /// The next request, or `None` if there is none now. It never blocks.
    ///
    /// # Errors
    ///
    /// [`CmError::DeviceRemoved`] when the device of a listener on one device is gone: it will never
    /// get a request again, and every further call says the same. [`CmError::Call`] and
    /// [`CmError::NoConnectionManager`] if the request could not be given a channel of its own (too many
    /// open files): that request is rejected, and the listener goes on. A request whose own device has
    /// just gone, as can be on a wildcard address, is dropped with a line in the log.
    pub fn try_accept(&self) -> Result<Option<Request>> {
        self.listening
            .try_next(|event| Request::new(event, &self.options))
    }

    /// Waits for the next request until `deadline`; `None` waits for as long as it takes.
    ///
    /// # Errors
    ///
    /// [`CmError::TimedOut`] if the deadline passes first, and those of
    /// [`try_accept`](Self::try_accept).
    pub fn accept(&self, deadline: Option<Instant>) -> Result<Request> {
        self.listening
            .next(deadline, |event| Request::new(event, &self.options))
    }
}

#[cfg(feature = "tokio")]
impl Listener {
    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.listening.channel)
    }
}

impl AsFd for Listener {
    /// Readable when a request waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listening.as_fd()
    }
}

/// A listening id, for requests of either kind.
#[derive(Debug)]
pub(crate) struct Listening {
    id: Mutex<CmId>,
    pub(crate) channel: Arc<EventChannel>,
    local_addr: SocketAddr,
    /// The device is gone; nothing comes any more.
    removed: AtomicBool,
}

/// How long one waits for a request before one looks whether another was told that the device is gone.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Listening {
    pub(crate) fn bind(
        port_space: PortSpace,
        addr: SocketAddr,
        options: &ListenOptions,
    ) -> Result<Self> {
        check_scope(addr)?;
        if addr.ip().is_loopback() {
            return Err(CmError::no_device(addr).with_candidates());
        }
        let mut id = CmId::new(port_space)?;
        id.set_options(&options.id_options())?;
        id.bind(addr).map_err(CmError::with_candidates)?;
        id.listen(options.backlog)?;
        Ok(Self {
            channel: id.shared_channel(),
            local_addr: id.local_addr(),
            id: Mutex::new(id),
            removed: AtomicBool::new(false),
        })
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The next request, as `make` has it.
    pub(crate) fn try_next<T>(&self, make: impl Fn(CmEvent<'_>) -> Result<T>) -> Result<Option<T>> {
        // A panic of another thread while it held the lock left nothing half done.
        let mut id = self.id.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if self.removed.load(Ordering::Relaxed) {
                return Err(CmError::device_removed(Step::Request, &id));
            }
            let Some(event) = id.try_event()? else {
                return Ok(None);
            };
            match event.event_type() {
                EventType::ConnectRequest => match make(event) {
                    // Not the listener's: that one is told by an event.
                    Err(error @ CmError::DeviceRemoved { .. }) => {
                        log::warn!("a request at {} is dropped: {error}", self.local_addr);
                    }
                    made => return made.map(Some),
                },
                EventType::DeviceRemoval => self.removed.store(true, Ordering::Relaxed),
                other => log::debug!("{other} on the listener of {}", self.local_addr),
            }
        }
    }

    /// Waits for the next request.
    pub(crate) fn next<T>(
        &self,
        deadline: Option<Instant>,
        make: impl Fn(CmEvent<'_>) -> Result<T>,
    ) -> Result<T> {
        let given = deadline.map(Deadline::at);
        loop {
            if let Some(request) = self.try_next(&make)? {
                return Ok(request);
            }
            match given {
                Some(at) if at.has_passed() => {
                    return Err(at.timed_out(Step::Request, Some(self.local_addr)));
                }
                _ => {
                    let look = Instant::now() + LOOK_AGAIN;
                    self.channel
                        .wait(Some(deadline.map_or(look, |at| at.min(look))))?
                }
            };
        }
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A request that the library delivered without something that every request has.
pub(crate) fn missing(what: &'static str) -> impl FnOnce() -> CmError {
    move || CmError::call("rdma_get_cm_event", Step::Request, None)(std::io::Error::other(what))
}

/// Connections cannot be made in a port space of datagrams.
pub(crate) fn check_connected(port_space: PortSpace) -> Result<()> {
    if !port_space.is_datagram() {
        return Ok(());
    }
    let asked = format!("{port_space:?}");
    Err(CmError::Config {
        field: "port_space",
        asked,
        allowed: "a connection needs Tcp or Ib",
    })
}

/// A peer asks for a connection.
///
/// It has an event channel of its own already. Dropping it rejects the request: the kernel does so
/// when an id is destroyed whose peer waits. If the peer gives up first, nothing tells, and
/// [`accept`](Self::accept) fails.
#[derive(Debug)]
pub struct Request {
    id: CmId,
    context: Context,
    peer: SocketAddr,
    param: RequestParam,
    private_data: Vec<u8>,
    /// The number of the queue pair that [`init_qp`](Self::init_qp) moved.
    initialised: Option<u32>,
}

impl Request {
    fn new(event: CmEvent<'_>, options: &IdOptions) -> Result<Self> {
        let param = event
            .conn_param()
            .ok_or_else(missing("a request without parameters"))?;
        let private_data = event.private_data().to_vec();
        let mut id = event
            .into_request()?
            .ok_or_else(missing("a request without an id"))?;
        let peer = id
            .peer_addr()
            .ok_or_else(missing("a request without an IP address"))?;
        let context = id.context()?;
        id.set_options(&IdOptions {
            ack_timeout: options.ack_timeout,
            ..IdOptions::none()
        })?;
        Ok(Self {
            id,
            context,
            peer,
            param,
            private_data,
            initialised: None,
        })
    }

    /// The device on which the request arrived. It may outlive the connection.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context.clone()
    }

    /// What the peer's program sent with the request, padded with zeros to 56 bytes.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// What the peer asks for.
    #[must_use]
    pub fn param(&self) -> RequestParam {
        self.param
    }

    /// The local address that the request arrived on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.id.local_addr()
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// The port of the device, from 1.
    #[must_use]
    pub fn port_num(&self) -> u8 {
        self.id.port_num()
    }

    /// The name of the device.
    #[must_use]
    pub fn device_name(&self) -> String {
        self.id.device_name().unwrap_or_default()
    }

    /// The id, for what this crate does not wrap.
    #[must_use]
    pub fn id(&self) -> &CmId {
        &self.id
    }

    /// Moves a new queue pair to INIT, so that receives can be posted before the peer can send.
    ///
    /// # Errors
    ///
    /// [`CmError::Config`] if `qp` is on another device, [`CmError::Withdrawn`] if the peer has given
    /// up, [`CmError::Verbs`] or [`CmError::Call`].
    pub fn init_qp(&mut self, qp: &mut QueuePair) -> Result<()> {
        qp::to_init(&self.id, qp).map_err(|e| e.or_withdrawn(self.peer))?;
        self.initialised = Some(qp.qp_num());
        Ok(())
    }

    /// Accepts the request with `qp`, which is moved to INIT if it was not yet, and then to RTR and
    /// RTS. Nothing here waits: [`ConnectionEvent::Established`](crate::ConnectionEvent::Established)
    /// follows when the peer confirmed. Before that, or before data arrived, do not send.
    ///
    /// The depths are the smaller ones of `param`, the request and the device.
    ///
    /// # Errors
    ///
    /// [`CmError::PrivateDataTooLong`] and [`CmError::Config`] for parameters that cannot be,
    /// [`CmError::Withdrawn`] if the peer has given up, [`CmError::Verbs`] and [`CmError::Call`].
    /// The request is then rejected.
    pub fn accept(mut self, qp: &mut QueuePair, param: &ConnParam) -> Result<Connection> {
        param.check("accept", MAX_ACCEPT_DATA)?;
        if self.initialised != Some(qp.qp_num()) {
            self.init_qp(qp)?;
        }
        let limit = qp::device_depths(&self.context)?.min(self.param.depths());
        let depths = param.depths_within(limit);
        self.answer(qp, param, depths)
            .map_err(|e| e.or_withdrawn(self.peer))?;
        Ok(Connection::new(
            self.id,
            State::Accepting,
            self.peer,
            self.private_data,
            depths,
        ))
    }

    fn answer(&mut self, qp: &mut QueuePair, param: &ConnParam, depths: Negotiated) -> Result<()> {
        qp::to_rts(&self.id, qp, QpParam::new(param, depths))?;
        self.id.accept(raw_param(param, depths, qp.qp_num()))
    }

    /// Rejects the request; `private_data`, at most 148 bytes, is for the peer's program.
    ///
    /// # Errors
    ///
    /// [`CmError::PrivateDataTooLong`], with which the request is rejected without data, and
    /// [`CmError::Withdrawn`] if the peer has given up.
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        check_private_data(private_data, "reject", MAX_REJECT_DATA)?;
        self.id
            .reject(private_data)
            .map_err(|e| e.or_withdrawn(self.peer))
    }
}
