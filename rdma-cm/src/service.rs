//! Datagrams: finding the queue pair behind a UDP-like port, and being found.
//!
//! An unreliable datagram goes to a queue pair number with a key, by a path. None of them is an IP
//! address and a port. Service id resolution (SIDR) asks the peer's connection manager for them
//! once; after that the queue pair sends on its own, and there is no connection that could end.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_core_rs::{AddressHandle, Context, ProtectionDomain, QueuePair};

use crate::channel::EventChannel;
use crate::connector::Resolving;
use crate::deadline::Deadline;
use crate::error::{CmError, Result, Step};
use crate::id::{CmEvent, CmId, News, PortSpace, RawParam, UdParam};
use crate::listener::{Listening, missing};
use crate::option::{IdOptions, ListenOptions};
use crate::param::check_private_data;
use crate::qp;
use crate::state::{Action, Input, State};

/// The longest private data of a look-up.
pub const MAX_LOOKUP_DATA: usize = 180;
/// The longest private data of an answer to a look-up, and of a rejection.
pub const MAX_ANSWER_DATA: usize = 136;

/// A look-up of a datagram service: where, from where, and by when.
///
/// ```no_run
/// use rdma_cm::Lookup;
///
/// let service = Lookup::new("192.168.99.2:7174".parse().unwrap()).find()?;
/// println!("queue pair {:#x}, key {:#x}", service.qp_num(), service.qkey());
/// # Ok::<(), rdma_cm::CmError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens before start() or find()"]
pub struct Lookup {
    peer: SocketAddr,
    source: Option<SocketAddr>,
    deadline: Duration,
    options: IdOptions,
    private_data: Vec<u8>,
}

impl Lookup {
    /// A look-up of the service at `peer`, to be answered within 5 s.
    pub fn new(peer: SocketAddr) -> Self {
        Self {
            peer,
            source: None,
            deadline: Duration::from_secs(5),
            options: IdOptions::none(),
            private_data: Vec::new(),
        }
    }

    /// Binds to `source`, of the peer's family, instead of what the routing table chooses.
    pub fn source(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// How long the whole look-up may take.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Options of the id.
    pub fn options(mut self, options: IdOptions) -> Self {
        self.options = options;
        self
    }

    /// Bytes for the program at the peer, at most [`MAX_LOOKUP_DATA`]; padded with zeros there.
    pub fn private_data(mut self, private_data: &[u8]) -> Self {
        self.private_data = private_data.to_vec();
        self
    }

    /// Starts the look-up; nothing here waits.
    ///
    /// # Errors
    ///
    /// [`CmError::PrivateDataTooLong`], and those of [`Connector::start`](crate::Connector::start).
    pub fn start(self) -> Result<LookingUp> {
        check_private_data(&self.private_data, "look-up", MAX_LOOKUP_DATA)?;
        let resolving = Resolving::start(
            self.peer,
            self.source,
            self.deadline,
            &self.options,
            PortSpace::Udp,
        )?;
        Ok(LookingUp {
            channel: resolving.channel(),
            peer: self.peer,
            deadline: resolving.own_deadline(),
            private_data: self.private_data,
            phase: Phase::Resolving(resolving),
        })
    }

    /// [`start`](Self::start), then waits for the answer.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start) and [`LookingUp::advance`].
    pub fn find(self) -> Result<Service> {
        self.start().map_err(CmError::with_candidates)?.wait()
    }
}

/// A look-up is under way. Dropping it cancels it.
#[derive(Debug)]
pub struct LookingUp {
    channel: Arc<EventChannel>,
    peer: SocketAddr,
    deadline: Deadline,
    private_data: Vec<u8>,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Resolving(Resolving),
    Asking(CmId, State),
    Over,
}

impl LookingUp {
    /// One step, as far as the events allow: `None` if the answer is not here yet. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CmError::Unreachable`] with the peer's answer if nobody serves the port or its program said
    /// no, or if the kernel gave up; those of [`Resolving::advance`]. After an error or the result
    /// it returns [`CmError::Finished`].
    pub fn advance(&mut self) -> Result<Option<Service>> {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Resolving(resolving) => self.resolve(resolving),
            Phase::Asking(id, state) => self.ask(id, state),
            Phase::Over => Err(CmError::Finished {
                step: Step::Connect,
            }),
        }
    }

    fn resolve(&mut self, mut resolving: Resolving) -> Result<Option<Service>> {
        match resolving.advance_id()? {
            None => self.phase = Phase::Resolving(resolving),
            Some(mut id) => {
                id.connect(datagram_param(&self.private_data, 0))?;
                self.phase = Phase::Asking(id, State::Connecting);
            }
        }
        Ok(None)
    }

    fn ask(&mut self, mut id: CmId, mut state: State) -> Result<Option<Service>> {
        while let Some(news) = id.news()? {
            let (next, action) = state.next(Input::from_event(news.event, news.status));
            log::debug!("{} from {} in {state:?}: {action:?}", news.event, self.peer);
            state = next;
            match action {
                Action::Done => return Service::new(id, self.peer, news).map(Some),
                Action::Fail => {
                    return Err(CmError::from_news(Step::Connect, self.peer, news, &id));
                }
                _ => {}
            }
        }
        if self.deadline.has_passed() {
            return Err(self.deadline.timed_out(Step::Connect, Some(self.peer)));
        }
        self.phase = Phase::Asking(id, state);
        Ok(None)
    }

    /// Waits for the answer, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance).
    pub fn wait(mut self) -> Result<Service> {
        loop {
            if let Some(service) = self.advance().map_err(CmError::with_candidates)? {
                return Ok(service);
            }
            self.channel.wait(Some(self.deadline()))?;
        }
    }

    /// When the look-up has to be over.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline.end()
    }
}

#[cfg(feature = "tokio")]
impl LookingUp {
    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.channel)
    }
}

impl AsFd for LookingUp {
    /// Readable when [`advance`](Self::advance) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A datagram service that was found: what a send to it needs.
#[derive(Debug)]
pub struct Service {
    id: CmId,
    context: Context,
    peer: SocketAddr,
    ud: UdParam,
    private_data: Vec<u8>,
}

impl Service {
    fn new(id: CmId, peer: SocketAddr, news: News) -> Result<Self> {
        let context = id.context()?;
        let ud = news
            .ud
            .ok_or_else(missing("an answer without parameters"))?;
        Ok(Self {
            id,
            context,
            peer,
            ud,
            private_data: news.private_data,
        })
    }

    /// The device that leads to the service.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context.clone()
    }

    /// The number of the peer's queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.ud.qp_num
    }

    /// The key that datagrams to it have to carry.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.ud.qkey
    }

    /// The path to it, as an address handle in `pd`.
    ///
    /// # Errors
    ///
    /// [`CmError::Verbs`] if the handle cannot be made, among others in a domain of another device.
    pub fn address_handle(&self, pd: &ProtectionDomain) -> Result<AddressHandle> {
        AddressHandle::from_raw_attr(pd, self.ud.ah_attr).map_err(CmError::verbs(Step::Device))
    }

    /// Moves a new datagram queue pair to RTS, with the key of this port space.
    ///
    /// # Errors
    ///
    /// [`CmError::Config`] if `qp` is on another device, [`CmError::Verbs`] or [`CmError::Call`].
    pub fn init_qp(&self, qp: &mut QueuePair) -> Result<()> {
        qp::datagram_to_rts(&self.id, qp)
    }

    /// What the program at the peer said, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// The local address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.id.local_addr()
    }
}

/// Offers a datagram service: answers look-ups of a port.
///
/// As for [`Listener`](crate::Listener), all methods take `&self`.
#[derive(Debug)]
pub struct ServiceListener {
    listening: Listening,
}

impl ServiceListener {
    /// Waits for look-ups of `addr`; port 0 lets the kernel choose one.
    ///
    /// # Errors
    ///
    /// Those of [`Listener::bind`](crate::Listener::bind).
    pub fn bind(addr: SocketAddr, options: &ListenOptions) -> Result<Self> {
        let options = ListenOptions {
            ack_timeout: None,
            ..options.clone()
        };
        Ok(Self {
            listening: Listening::bind(PortSpace::Udp, addr, &options)?,
        })
    }

    /// The address that it listens on, with the port that was chosen.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.listening.local_addr()
    }

    /// The next look-up, or `None` if there is none now. It never blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Listener::try_accept`](crate::Listener::try_accept).
    pub fn try_request(&self) -> Result<Option<ServiceRequest>> {
        self.listening.try_next(ServiceRequest::new)
    }

    /// Waits for the next look-up until `deadline`; `None` waits for as long as it takes.
    ///
    /// # Errors
    ///
    /// [`CmError::TimedOut`], and those of [`try_request`](Self::try_request).
    pub fn request(&self, deadline: Option<Instant>) -> Result<ServiceRequest> {
        self.listening.next(deadline, ServiceRequest::new)
    }
}

#[cfg(feature = "tokio")]
impl ServiceListener {
    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.listening.channel)
    }
}

impl AsFd for ServiceListener {
    /// Readable when a look-up waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listening.as_fd()
    }
}

/// A peer looks a service up. Dropping it unanswered makes the peer's look-up fail.
#[derive(Debug)]
pub struct ServiceRequest {
    id: CmId,
    context: Context,
    peer: SocketAddr,
    private_data: Vec<u8>,
}

impl ServiceRequest {
    fn new(event: CmEvent<'_>) -> Result<Self> {
        let private_data = event.private_data().to_vec();
        let id = event
            .into_request()?
            .ok_or_else(missing("a request without an id"))?;
        let peer = id
            .peer_addr()
            .ok_or_else(missing("a request without an IP address"))?;
        Ok(Self {
            context: id.context()?,
            id,
            peer,
            private_data,
        })
    }

    /// The device on which the look-up arrived: the queue pair of the answer has to be on it.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context.clone()
    }

    /// What the peer's program sent, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Moves a new datagram queue pair to RTS, with the key of this port space. One queue pair can
    /// serve all look-ups on its device.
    ///
    /// # Errors
    ///
    /// [`CmError::Config`] if `qp` is on another device, [`CmError::Verbs`] or [`CmError::Call`].
    pub fn init_qp(&self, qp: &mut QueuePair) -> Result<()> {
        qp::datagram_to_rts(&self.id, qp)
    }

    /// Answers with the number of `qp`, and `private_data` of at most [`MAX_ANSWER_DATA`] bytes.
    ///
    /// # Errors
    ///
    /// [`CmError::PrivateDataTooLong`] and [`CmError::Call`]; the peer's look-up then fails.
    pub fn answer(mut self, qp: &QueuePair, private_data: &[u8]) -> Result<()> {
        check_private_data(private_data, "answer", MAX_ANSWER_DATA)?;
        self.id.accept(datagram_param(private_data, qp.qp_num()))
    }

    /// Says no, with at most [`MAX_ANSWER_DATA`] bytes; the peer sees
    /// [`SidrStatus::Rejected`](crate::SidrStatus::Rejected).
    ///
    /// # Errors
    ///
    /// [`CmError::PrivateDataTooLong`] and [`CmError::Call`].
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        check_private_data(private_data, "reject", MAX_ANSWER_DATA)?;
        self.id.reject(private_data)
    }
}

/// Datagrams know neither depths nor retries.
fn datagram_param(private_data: &[u8], qp_num: u32) -> RawParam<'_> {
    RawParam {
        private_data,
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        flow_control: false,
        srq: false,
        qp_num,
    }
}
