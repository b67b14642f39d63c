//! The active side, step by step.
//!
//! ```text
//! Connector ──start──► Resolving ──advance──► Resolved ──connect──► Connecting ──advance──► Connection
//! ```
//! Each step owns the id and hands it on. Dropping any of them cancels what is under way, tells the
//! peer if it has to know, and leaves nothing behind.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_core_rs::{Context, QueuePair};

use crate::addr::check_scope;
use crate::channel::EventChannel;
use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::{CmError, Result, Step};
use crate::id::{CmId, News, PortSpace, RawParam};
use crate::listener::check_connected;
use crate::option::IdOptions;
use crate::param::{ConnParam, MAX_CONNECT_DATA, Negotiated};
use crate::qp::{self, QpParam};
use crate::state::{Action, Input, State};

/// How long the kernel looks for an address or a path before it is asked again: questions get lost.
const ATTEMPT: Duration = Duration::from_secs(2);
/// How long it looks for an address at first; each time it takes twice as long. While a neighbour is
/// not known yet, the kernel (6.1) asks for it and then looks again only when its time is up, so that
/// the first look-up takes as long as it is allowed to.
const FIRST_ATTEMPT: Duration = Duration::from_millis(100);

/// A connection to be made: where to, from where, and by when.
///
/// ```no_run
/// use std::time::Duration;
/// use rdma_cm::Connector;
///
/// let resolved = Connector::new("192.168.99.2:7471".parse().unwrap())
///     .source("192.168.99.1:0".parse().unwrap())
///     .deadline(Duration::from_secs(3))
///     .resolve()?;
/// println!("by way of {}", resolved.device_name());
/// # Ok::<(), rdma_cm::CmError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens before start() or resolve()"]
pub struct Connector {
    peer: SocketAddr,
    source: Option<SocketAddr>,
    deadline: Duration,
    options: IdOptions,
    port_space: PortSpace,
}

impl Connector {
    /// A connection to `peer`, to be up within 5 s, in [`PortSpace::Tcp`].
    pub fn new(peer: SocketAddr) -> Self {
        Self {
            peer,
            source: None,
            deadline: Duration::from_secs(5),
            options: IdOptions::default(),
            port_space: PortSpace::Tcp,
        }
    }

    /// Binds to `source`, of the peer's family, instead of what the routing table chooses. Port 0
    /// lets the kernel choose.
    pub fn source(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// How long the whole connect may take, from [`start`](Self::start) until it is established, the
    /// caller's own time between the steps included.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Options of the id.
    pub fn options(mut self, options: IdOptions) -> Self {
        self.options = options;
        self
    }

    /// Connects in another port space, [`PortSpace::Ib`]; those for datagrams are refused.
    pub fn port_space(mut self, port_space: PortSpace) -> Self {
        self.port_space = port_space;
        self
    }

    /// Starts resolving the address; nothing here waits.
    ///
    /// # Errors
    ///
    /// [`CmError::NoConnectionManager`]; [`CmError::Config`] for options and addresses that cannot
    /// be; [`CmError::NoRoute`], [`CmError::NoDevice`] and [`CmError::AddressInUse`] where the
    /// kernel knows at once; [`CmError::Call`] for anything else.
    pub fn start(self) -> Result<Resolving> {
        check_connected(self.port_space)?;
        Resolving::start(
            self.peer,
            self.source,
            self.deadline,
            &self.options,
            self.port_space,
        )
    }

    /// [`start`](Self::start), then waits until the peer is resolved.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start) and [`Resolving::advance`].
    pub fn resolve(self) -> Result<Resolved> {
        self.start().map_err(CmError::with_candidates)?.wait()
    }
}

/// The peer's address and the path to it are being resolved.
///
/// Wait until its descriptor is readable or [`deadline`](Self::deadline) has passed, then call
/// [`advance`](Self::advance). Dropping it cancels the resolution.
#[derive(Debug)]
pub struct Resolving {
    /// Gone once the step is over.
    id: Option<CmId>,
    channel: Arc<EventChannel>,
    peer: SocketAddr,
    source: Option<SocketAddr>,
    state: State,
    /// How long the last look-up of the address was allowed to take.
    attempt: Duration,
    deadline: Deadline,
}

impl Resolving {
    pub(crate) fn start(
        peer: SocketAddr,
        source: Option<SocketAddr>,
        deadline: Duration,
        options: &IdOptions,
        port_space: PortSpace,
    ) -> Result<Self> {
        check_source(peer, source)?;
        let deadline = Deadline::after(deadline);
        let mut id = CmId::new(port_space)?;
        id.set_options(options)?;
        let attempt = FIRST_ATTEMPT.min(deadline.left());
        id.resolve_addr(source, peer, attempt)?;
        Ok(Self {
            channel: id.shared_channel(),
            id: Some(id),
            peer,
            source,
            state: State::ResolvingAddr,
            attempt,
            deadline,
        })
    }

    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.channel)
    }

    pub(crate) fn own_deadline(&self) -> Deadline {
        self.deadline
    }

    /// One step, as far as the events allow: `None` if the answer is not here yet. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CmError::TimedOut`] once the deadline has passed; [`CmError::NoDevice`],
    /// [`CmError::NoRoute`], [`CmError::DeviceRemoved`], [`CmError::Event`] or [`CmError::Call`] as
    /// the kernel has it. After an error, or after the result, it returns [`CmError::Finished`].
    pub fn advance(&mut self) -> Result<Option<Resolved>> {
        let (peer, deadline) = (self.peer, self.deadline);
        self.advance_id()?
            .map(|id| Resolved::new(id, peer, deadline))
            .transpose()
    }

    /// [`advance`](Self::advance) for whatever port space the id is in.
    pub(crate) fn advance_id(&mut self) -> Result<Option<CmId>> {
        let mut id = self
            .id
            .take()
            .ok_or(CmError::Finished { step: self.step() })?;
        if self.drive(&mut id)? {
            return Ok(Some(id));
        }
        self.id = Some(id);
        Ok(None)
    }

    /// Handles the events that wait; whether all is resolved.
    fn drive(&mut self, id: &mut CmId) -> Result<bool> {
        while let Some(news) = id.news()? {
            let step = self.step();
            let (next, action) = self.state.next(Input::from_event(news.event, news.status));
            log::debug!(
                "{} for {} in {:?}: {action:?}",
                news.event,
                self.peer,
                self.state
            );
            self.state = next;
            match action {
                Action::ResolveAddr | Action::ResolveRoute if self.deadline.has_passed() => break,
                Action::ResolveAddr => {
                    self.attempt = ATTEMPT.min(self.attempt * 2);
                    let time = self.attempt.min(self.deadline.left());
                    id.resolve_addr(self.source, self.peer, time)?;
                }
                Action::ResolveRoute => id.resolve_route(ATTEMPT.min(self.deadline.left()))?,
                Action::Done => return Ok(true),
                Action::Fail => return Err(self.failure(step, news, id)),
                Action::Establish | Action::Report | Action::Ignore => {}
            }
        }
        self.check_deadline().map(|()| false)
    }

    fn check_deadline(&mut self) -> Result<()> {
        if !self.deadline.has_passed() {
            return Ok(());
        }
        let error = self.deadline.timed_out(self.step(), Some(self.peer));
        (self.state, _) = self.state.next(Input::Deadline);
        Err(error)
    }

    /// An address without a device is the local one, if one was given.
    fn failure(&self, step: Step, news: News, id: &CmId) -> CmError {
        match CmError::from_news(step, self.peer, news, id) {
            CmError::NoDevice { addr, .. } => CmError::no_device(self.source.unwrap_or(addr)),
            other => other,
        }
    }

    /// Waits until the peer is resolved, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance).
    pub fn wait(mut self) -> Result<Resolved> {
        loop {
            if let Some(resolved) = self.advance().map_err(CmError::with_candidates)? {
                return Ok(resolved);
            }
            self.channel.wait(Some(self.deadline()))?;
        }
    }

    /// When the whole connect has to be over.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline.end()
    }

    fn step(&self) -> Step {
        match self.state {
            State::ResolvingRoute => Step::ResolveRoute,
            _ => Step::ResolveAddr,
        }
    }
}

impl AsFd for Resolving {
    /// Readable when [`advance`](Self::advance) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// The peer is resolved: the device is known, and a queue pair can be made on it.
#[derive(Debug)]
pub struct Resolved {
    id: CmId,
    context: Context,
    peer: SocketAddr,
    deadline: Deadline,
    /// The number of the queue pair that [`init_qp`](Self::init_qp) moved.
    initialised: Option<u32>,
}

impl Resolved {
    fn new(id: CmId, peer: SocketAddr, deadline: Deadline) -> Result<Self> {
        let context = id.context()?;
        Ok(Self {
            id,
            context,
            peer,
            deadline,
            initialised: None,
        })
    }

    /// The device that leads to the peer. It may outlive the connection.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context.clone()
    }

    /// The local address that the connection will have, with its port.
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

    /// When the whole connect has to be over.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline.end()
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
    /// [`CmError::Config`] if `qp` is on another device, [`CmError::Verbs`] or [`CmError::Call`]; the
    /// step may be tried again.
    pub fn init_qp(&mut self, qp: &mut QueuePair) -> Result<()> {
        qp::to_init(&self.id, qp)?;
        self.initialised = Some(qp.qp_num());
        Ok(())
    }

    /// Asks the peer for a connection with `qp`, which is moved to INIT if it was not yet. Nothing
    /// here waits.
    ///
    /// # Errors
    ///
    /// [`CmError::TimedOut`] if the deadline has passed; [`CmError::PrivateDataTooLong`] and
    /// [`CmError::Config`] for parameters that cannot be; [`CmError::Verbs`] and [`CmError::Call`].
    pub fn connect(mut self, qp: &mut QueuePair, param: &ConnParam) -> Result<Connecting> {
        param.check("connect", MAX_CONNECT_DATA)?;
        if self.deadline.has_passed() {
            return Err(self.deadline.timed_out(Step::Connect, Some(self.peer)));
        }
        if self.initialised != Some(qp.qp_num()) {
            self.init_qp(qp)?;
        }
        let depths = param.depths_within(qp::device_depths(&self.context)?);
        let raw = raw_param(param, depths, qp.qp_num());
        self.id.connect(raw)?;
        Ok(Connecting {
            channel: self.id.shared_channel(),
            id: Some(self.id),
            peer: self.peer,
            qp_num: qp.qp_num(),
            param: QpParam::new(param, depths),
            state: State::Connecting,
            deadline: self.deadline,
        })
    }
}

/// The parameters of librdmacm, with the depths that are possible.
pub(crate) fn raw_param(param: &ConnParam, depths: Negotiated, qp_num: u32) -> RawParam<'_> {
    RawParam {
        private_data: &param.private_data,
        responder_resources: depths.responder_resources,
        initiator_depth: depths.initiator_depth,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        flow_control: param.flow_control,
        srq: param.srq,
        qp_num,
    }
}

/// The request is out; the peer's answer is awaited.
///
/// Dropping it withdraws the request.
#[derive(Debug)]
pub struct Connecting {
    /// Gone once the step is over.
    id: Option<CmId>,
    channel: Arc<EventChannel>,
    peer: SocketAddr,
    qp_num: u32,
    param: QpParam,
    state: State,
    deadline: Deadline,
}

impl Connecting {
    /// One step, as far as the events allow: `None` if the answer is not here yet. Never blocks.
    ///
    /// When the answer is here, `qp`, the queue pair that [`Resolved::connect`] was given, is moved
    /// to RTR and RTS, and the peer is told. From then on both sides may send.
    ///
    /// # Errors
    ///
    /// [`CmError::Refused`] if nobody listens; [`CmError::Rejected`] with the reason and what the
    /// peer's program said; [`CmError::Unreachable`], [`CmError::Disconnected`],
    /// [`CmError::DeviceRemoved`]; [`CmError::TimedOut`] once the deadline has passed;
    /// [`CmError::Config`] if `qp` is another queue pair (the answer is then not lost: call it again
    /// with the right one); [`CmError::Verbs`] and [`CmError::Call`]. After all others and after the
    /// result it returns [`CmError::Finished`].
    pub fn advance(&mut self, qp: &mut QueuePair) -> Result<Option<Connection>> {
        if qp.qp_num() != self.qp_num {
            let asked = qp.qp_num().to_string();
            return Err(CmError::Config {
                field: "qp",
                asked,
                allowed: "the queue pair that connect() was given",
            });
        }
        let mut id = self.id.take().ok_or(CmError::Finished {
            step: Step::Connect,
        })?;
        match self.drive(&mut id, qp)? {
            Some(answer) => {
                let Answer {
                    private_data,
                    depths,
                } = answer;
                Ok(Some(Connection::new(
                    id,
                    self.state,
                    self.peer,
                    private_data,
                    depths,
                )))
            }
            None => {
                self.id = Some(id);
                Ok(None)
            }
        }
    }

    /// Handles the events that wait; what the peer answered, once the connection is up.
    fn drive(&mut self, id: &mut CmId, qp: &mut QueuePair) -> Result<Option<Answer>> {
        while let Some(news) = id.news()? {
            let (next, action) = self.state.next(Input::from_event(news.event, news.status));
            log::debug!(
                "{} from {} in {:?}: {action:?}",
                news.event,
                self.peer,
                self.state
            );
            self.state = next;
            match action {
                Action::Establish => {
                    let answer = Answer::new(news, self.param.depths);
                    self.establish(id, qp, answer.depths)?;
                    return Ok(Some(answer));
                }
                Action::Done => return Ok(Some(Answer::new(news, self.param.depths))),
                Action::Fail => return Err(CmError::from_news(Step::Connect, self.peer, news, id)),
                Action::ResolveAddr | Action::ResolveRoute | Action::Report | Action::Ignore => {}
            }
        }
        if self.deadline.has_passed() {
            (self.state, _) = self.state.next(Input::Deadline);
            return Err(self.deadline.timed_out(Step::Connect, Some(self.peer)));
        }
        Ok(None)
    }

    fn establish(&self, id: &mut CmId, qp: &mut QueuePair, depths: Negotiated) -> Result<()> {
        qp::to_rts(
            id,
            qp,
            QpParam {
                depths,
                ..self.param
            },
        )?;
        id.establish()
    }

    /// Waits until the connection is up, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance).
    pub fn wait(mut self, qp: &mut QueuePair) -> Result<Connection> {
        loop {
            if let Some(connection) = self.advance(qp)? {
                return Ok(connection);
            }
            self.channel.wait(Some(self.deadline()))?;
        }
    }

    /// When the whole connect has to be over.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline.end()
    }
}

#[cfg(feature = "tokio")]
impl Connecting {
    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.channel)
    }
}

impl AsFd for Connecting {
    /// Readable when [`advance`](Self::advance) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// What came with the peer's answer.
struct Answer {
    private_data: Vec<u8>,
    depths: Negotiated,
}

impl Answer {
    fn new(news: News, own: Negotiated) -> Self {
        Self {
            private_data: news.private_data,
            depths: news.param.map_or(own, |peer| own.min(peer.depths())),
        }
    }
}

/// Link-local addresses have to name their interface. The source has to be of the peer's family, and not a loopback address on the way to another host:
/// the kernel takes that for the wildcard.
pub(crate) fn check_source(peer: SocketAddr, source: Option<SocketAddr>) -> Result<()> {
    check_scope(peer)?;
    source.map_or(Ok(()), check_scope)?;
    match source {
        Some(source) if source.is_ipv4() != peer.is_ipv4() => Err(CmError::Config {
            field: "source",
            asked: source.to_string(),
            allowed: "an address of the peer's family is needed",
        }),
        Some(source) if source.ip().is_loopback() && !peer.ip().is_loopback() => {
            Err(CmError::no_device(source))
        }
        _ => Ok(()),
    }
}
