//! An endpoint as its worker sees it: what it is made of, and what is done to it when something
//! happens. The decisions are those of the table in [`lifecycle`](crate::lifecycle).

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_cm::{
    CmError, ConnParam, Connecting, Connection, ConnectionEvent, Resolved, Resolving, Step,
};
use rdma_core_rs::{QpConfig, QueuePair};
use rustix::io::Errno;

use super::far_future;
use super::watchdog::Watchdog;
use crate::config::{EndpointConfig, Receive};
use crate::error::{Addrs, Cause, OpenError, PostErrorKind};
use crate::handshake;
use crate::lifecycle::{self, Actions, Input};
use crate::op::{Payload, Received};
use crate::pool::{Buf, PoolError};
use crate::post::{Flags, Posted, Poster, Verb};
use crate::tracker::{Claim, LaneId, LaneLimits, Success, Tally};
use crate::wait::Waiters;
use crate::worker::State;

/// How far the connection manager is.
pub(crate) enum Link {
    None,
    Resolving(Resolving),
    /// Resolved, and held there until the program has posted its receives.
    Resolved(Box<Resolved>),
    Connecting(Connecting),
    /// A request that waits to be accepted, until the program has posted its receives.
    Requested(Box<rdma_cm::Request>),
    Up(Connection),
}

impl Link {
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Link::None | Link::Resolved(_) | Link::Requested(_) => None,
            Link::Resolving(link) => Some(link.as_fd()),
            Link::Connecting(link) => Some(link.as_fd()),
            Link::Up(link) => Some(link.as_fd()),
        }
    }
}

/// What holds for the operations of an endpoint, once it is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) max_inline: u32,
    pub(crate) max_sge: u32,
    /// Of the port.
    pub(crate) max_msg: u32,
    /// What the peer's receives take, if it said so.
    pub(crate) peer_max_message: Option<u32>,
    /// Reads and atomics that may be in flight at once.
    pub(crate) initiator_depth: u8,
    /// Managed receives.
    pub(crate) managed: bool,
}

pub(crate) struct Ep {
    /// Before the connection: the NIC stops before the id goes.
    pub(crate) qp: Option<QueuePair>,
    pub(crate) link: Link,
    pub(crate) life: lifecycle::State,
    /// `None` once it is closed and has given its reservations back.
    pub(crate) lane: Option<LaneId>,
    pub(crate) rules: Rules,
    pub(super) config: Box<EndpointConfig>,
    pub(crate) addrs: Addrs,
    pub(crate) peer_data: Vec<u8>,
    pub(crate) qp_num: u32,

    pub(crate) inbox: VecDeque<Received>,
    /// Managed receives that are not posted and should be.
    missing: u32,
    pub(crate) receives_delayed: u64,

    /// To be looked at after the batch, see [`State::mark`].
    pub(crate) marked: bool,
    /// A completion has failed.
    pub(crate) broken: bool,
    /// The device says that the queue pair failed.
    pub(crate) qp_failed: bool,
    /// A message has arrived while it was opening, so the peer is connected.
    pub(crate) first_receive: bool,
    /// Why it has to end, found where nothing can be done about it.
    pub(crate) bad_news: Option<Cause>,
    pub(crate) timer: Option<Instant>,
    /// When to ask the connection manager again, whose events could not be fetched.
    pub(crate) ask_again: Option<Instant>,
    /// How often in a row that failed. Its descriptor is not watched meanwhile.
    failed_asks: u32,
    pub(super) watchdog: Watchdog,

    pub(crate) open_error: Option<OpenError>,
    pub(crate) was_open: bool,
    /// Once the reason is known; from the lane when that is gone.
    pub(crate) cause: Option<Arc<Cause>>,
    /// Sends in flight when the time to close was up.
    pub(crate) unfinished: u32,
    /// The counters, once the lane is gone.
    tally: Tally,

    pub(crate) receivers: Waiters,
    pub(crate) posters: Waiters,
    pub(crate) watchers: Waiters,
}

impl Ep {
    /// Whether a successful completion may change something besides its operation.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.life != lifecycle::State::Open || !self.posters.is_empty()
    }
}

/// How long the flush of what is in flight may take, before the queue pair is destroyed and the rest
/// is ended without it. Devices need microseconds; some forget receives.
const FLUSH_TIME: Duration = Duration::from_millis(500);

/// How often the connection manager is asked again when there is no memory for its events: after a
/// millisecond, then after twice as long each time, so for a second altogether.
const ASKS_AGAIN: u32 = 10;
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// Making endpoints.
impl State {
    /// Takes an endpoint in, with room for all it may have in flight. The link stays where it is unless it
    /// is taken in, so that it is not dropped under the lock.
    pub(crate) fn insert(
        &mut self,
        config: &EndpointConfig,
        link: &mut Link,
        slot_size: usize,
    ) -> Result<u32, OpenError> {
        config.check()?;
        if let Some(cause) = &self.failed {
            return Err(OpenError::Ended(Arc::new(cause.clone())));
        }
        let managed = config.receive == Receive::Managed;
        if managed && config.max_message > slot_size {
            let value = config.max_message as u64;
            return Err(OpenError::Config {
                field: "max_message",
                value,
                min: 1,
                max: slot_size as u64,
            });
        }
        let limits = LaneLimits {
            send_depth: config.send_depth,
            recv_depth: config.recv_depth,
            records: 2 * config.send_depth + if managed { 1 } else { 2 } * config.recv_depth + 2,
            max_unsignaled: config.max_unsignaled(),
        };
        self.make_room(limits.records as usize);
        let index = self.endpoints.vacant_key() as u32;
        let lane = self
            .tracker
            .attach(index, limits)
            .map_err(|full| OpenError::WorkerFull {
                asked: full.asked,
                free: full.free,
            })?;
        if let Some(fd) = link.fd()
            && let Err(error) = self.poller_ref().add_endpoint(fd, index)
        {
            self.tracker.detach(lane);
            return Err(error.into());
        }
        let inbox = if managed {
            config.recv_depth as usize
        } else {
            0
        };
        self.endpoints.insert(Ep {
            qp: None,
            link: mem::replace(link, Link::None),
            life: lifecycle::State::Opening,
            lane: Some(lane),
            rules: Rules {
                max_inline: 0,
                max_sge: config.max_sge,
                max_msg: 0,
                peer_max_message: None,
                initiator_depth: 0,
                managed,
            },
            config: Box::new(config.clone()),
            addrs: Addrs::default(),
            peer_data: Vec::new(),
            qp_num: 0,
            inbox: VecDeque::with_capacity(inbox),
            missing: 0,
            receives_delayed: 0,
            marked: false,
            broken: false,
            qp_failed: false,
            first_receive: false,
            bad_news: None,
            timer: None,
            ask_again: None,
            failed_asks: 0,
            watchdog: Watchdog::default(),
            open_error: None,
            was_open: false,
            cause: None,
            unfinished: 0,
            tally: Tally::default(),
            receivers: Waiters::default(),
            posters: Waiters::default(),
            watchers: Waiters::default(),
        });
        Ok(index)
    }

    /// The peer is resolved: makes the queue pair and posts the receives; then asks for the
    /// connection, or holds there if `hold`.
    pub(crate) fn resolved(
        &mut self,
        index: u32,
        mut resolved: Resolved,
        hold: bool,
    ) -> Result<(), OpenError> {
        self.check_device(&resolved.context(), resolved.device_name())?;
        let addrs = Addrs {
            local: Some(resolved.local_addr()),
            peer: Some(resolved.peer_addr()),
        };
        let mut qp = self.new_queue_pair(index, resolved.port_num())?;
        resolved.init_qp(&mut qp)?;
        self.adopt_queue_pair(index, qp, addrs);
        self.set_timer(index, Some(resolved.deadline()));
        if hold {
            self.endpoints[index as usize].link = Link::Resolved(Box::new(resolved));
            return Ok(());
        }
        self.post_first_receives(index)?;
        self.ask(index, resolved)
    }

    /// Sends the request for the connection.
    fn ask(&mut self, index: u32, resolved: Resolved) -> Result<(), OpenError> {
        let ep = &mut self.endpoints[index as usize];
        let param = ep.conn_param(ep.config.handshake);
        let Some(qp) = &mut ep.qp else {
            return Err(not_established());
        };
        let link = Link::Connecting(resolved.connect(qp, &param)?);
        self.put_link(index, link)
    }

    /// A request is to be accepted: makes the queue pair and posts the receives; then accepts, or
    /// holds there if `hold`.
    pub(crate) fn requested(
        &mut self,
        index: u32,
        mut request: rdma_cm::Request,
        hold: bool,
    ) -> Result<(), OpenError> {
        self.check_device(&request.context(), request.device_name())?;
        let addrs = Addrs {
            local: Some(request.local_addr()),
            peer: Some(request.peer_addr()),
        };
        let mut qp = self.new_queue_pair(index, request.port_num())?;
        request.init_qp(&mut qp)?;
        self.adopt_queue_pair(index, qp, addrs);
        let limit = self.endpoints[index as usize].config.connect_deadline;
        let deadline = far_future(Instant::now(), limit);
        self.set_timer(index, Some(deadline));
        if hold {
            self.endpoints[index as usize].link = Link::Requested(Box::new(request));
            return Ok(());
        }
        self.post_first_receives(index)?;
        self.answer(index, request)
    }

    /// The program has posted its receives: connects, or accepts, unless that is over already.
    pub(crate) fn go_on(&mut self, index: u32) -> Result<(), OpenError> {
        let (now, timer) = (Instant::now(), self.endpoints[index as usize].timer);
        if timer.is_some_and(|at| at <= now) {
            self.set_timer(index, None);
            self.timer_ran_out(index, now);
        }
        let ep = &mut self.endpoints[index as usize];
        if ep.life != lifecycle::State::Opening {
            return Err(ep.open_error.take().unwrap_or_else(not_established));
        }
        let link = mem::replace(&mut self.endpoints[index as usize].link, Link::None);
        match link {
            Link::Resolved(resolved) => {
                self.post_first_receives(index)?;
                self.ask(index, *resolved)
            }
            Link::Requested(request) => {
                self.post_first_receives(index)?;
                self.answer(index, *request)
            }
            other => {
                self.endpoints[index as usize].link = other;
                Ok(())
            }
        }
    }

    /// Accepts the request.
    fn answer(&mut self, index: u32, request: rdma_cm::Request) -> Result<(), OpenError> {
        let ep = &mut self.endpoints[index as usize];
        // Only a peer that knows the handshake gets one.
        let knows = ep.hear(request.private_data());
        let param = ep.conn_param(ep.config.handshake && knows);
        let Some(qp) = &mut ep.qp else {
            return Err(not_established());
        };
        let connection = request.accept(qp, &param)?;
        ep.rules.initiator_depth = connection.negotiated().initiator_depth;
        self.put_link(index, Link::Up(connection))
    }

    fn check_device(&self, context: &rdma_core_rs::Context, name: String) -> Result<(), OpenError> {
        if context.is_same_device(self.pd.context()) {
            return Ok(());
        }
        let worker = self.pd.context().device_name().to_owned();
        Err(OpenError::OtherDevice {
            wanted: name,
            worker,
        })
    }

    fn new_queue_pair(&mut self, index: u32, port: u8) -> Result<QueuePair, OpenError> {
        let config = &self.endpoints[index as usize].config;
        let mut wanted = QpConfig::rc(&self.cq, &self.cq);
        wanted.max_send_wr = config.send_depth + 1; // the probe has a place of its own
        wanted.max_recv_wr = config.recv_depth;
        wanted.max_send_sge = config.max_sge;
        wanted.max_recv_sge = config.max_sge;
        wanted.max_inline_data = config.max_inline;
        let qp = QueuePair::new(&self.pd, &wanted)?;
        let max_msg = self.pd.context().port_attr(port)?.max_msg_sz;
        let rules = &mut self.endpoints[index as usize].rules;
        rules.max_msg = max_msg;
        rules.max_inline = qp.caps().max_inline_data;
        Ok(qp)
    }

    fn adopt_queue_pair(&mut self, index: u32, qp: QueuePair, addrs: Addrs) {
        let ep = &mut self.endpoints[index as usize];
        ep.qp_num = qp.qp_num();
        ep.addrs = addrs;
        if let Some(device) = &self.device {
            device.add_queue_pair(qp.qp_num());
        }
        if let Some(lane) = ep.lane {
            self.tracker.bind(lane, qp.qp_num(), addrs);
        }
        ep.qp = Some(qp);
    }

    /// Posts the managed receives. It has to be before the peer can send.
    fn post_first_receives(&mut self, index: u32) -> Result<(), OpenError> {
        let ep = &mut self.endpoints[index as usize];
        if !ep.rules.managed {
            return Ok(());
        }
        ep.missing = ep.config.recv_depth;
        while self.endpoints[index as usize].missing > 0 {
            self.refill_one(index)?;
        }
        Ok(())
    }

    fn put_link(&mut self, index: u32, link: Link) -> Result<(), OpenError> {
        if let Some(fd) = link.fd() {
            match self.poller_ref().add_endpoint(fd, index) {
                // It is the same channel from the first step on.
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(error.into());
                }
                _ => {}
            }
        }
        self.endpoints[index as usize].link = link;
        // What happened meanwhile raises no edge for it.
        self.link_news(index);
        Ok(())
    }

    /// The attempt to connect failed: everything of it goes at once, for nobody can have sent.
    pub(crate) fn open_failed(&mut self, index: u32, error: OpenError) {
        log::debug!("opening an endpoint failed: {error}");
        let ep = &mut self.endpoints[index as usize];
        ep.open_error = Some(error);
        self.set_cause(index, Cause::NotEstablished);
        self.step(index, Input::Abort);
    }

    /// The endpoint's handle is dropped: ends what is left, and forgets it.
    pub(crate) fn remove(&mut self, index: u32) -> Option<Ep> {
        self.step(index, Input::Abort);
        self.set_timer(index, None);
        self.set_ask_again(index, None);
        self.dry.retain(|&other| other != index);
        self.attention.retain(|&other| other != index);
        let ep = self.endpoints.try_remove(index as usize);
        if !self.attention.is_empty() {
            self.attend();
        }
        ep
    }
}

fn not_established() -> OpenError {
    OpenError::Ended(Arc::new(Cause::NotEstablished))
}

impl Ep {
    fn conn_param(&self, handshake: bool) -> ConnParam {
        let config = &self.config;
        if !handshake {
            return config.conn_param(config.private_data.clone());
        }
        let managed = self.rules.managed;
        let limits = handshake::PeerLimits {
            max_message: if managed {
                u32::try_from(config.max_message).unwrap_or(u32::MAX)
            } else {
                0
            },
            recv_depth: config.recv_depth,
        };
        config.conn_param(handshake::encode(limits, &config.private_data))
    }

    /// Takes what the peer said while connecting; whether it knows the handshake.
    fn hear(&mut self, bytes: &[u8]) -> bool {
        if !self.config.handshake {
            self.peer_data = bytes.to_vec();
            return false;
        }
        let (limits, data) = handshake::decode(bytes);
        self.peer_data = data.to_vec();
        self.rules.peer_max_message = limits
            .map(|limits| limits.max_message)
            .filter(|&max_message| max_message > 0);
        limits.is_some()
    }
}

/// The connection manager's news, and the timers.
impl State {
    /// Looks what the connection manager has to say about an endpoint.
    #[cold]
    pub(crate) fn link_news(&mut self, index: u32) {
        let Some(ep) = self.endpoints.get_mut(index as usize) else {
            return;
        };
        match mem::replace(&mut ep.link, Link::None) {
            Link::Resolving(mut link) => match link.advance() {
                Ok(None) => ep.link = Link::Resolving(link),
                Ok(Some(resolved)) => {
                    if let Err(error) = self.resolved(index, resolved, false) {
                        self.open_failed(index, error);
                    }
                }
                Err(error) => self.open_failed(index, error.into()),
            },
            Link::Connecting(mut link) => {
                let Some(qp) = &mut ep.qp else { return };
                match link.advance(qp) {
                    Ok(None) => ep.link = Link::Connecting(link),
                    Ok(Some(connection)) => self.connected(index, connection),
                    Err(error) => self.open_failed(index, error.into()),
                }
            }
            Link::Up(link) => {
                ep.link = Link::Up(link);
                self.connection_news(index);
            }
            other => ep.link = other,
        }
    }

    fn connected(&mut self, index: u32, connection: Connection) {
        let ep = &mut self.endpoints[index as usize];
        ep.hear(connection.private_data());
        ep.rules.initiator_depth = connection.negotiated().initiator_depth;
        ep.link = Link::Up(connection);
        self.step(index, Input::Established);
        self.connection_news(index);
    }

    pub(crate) fn connection_news(&mut self, index: u32) {
        loop {
            let Some(ep) = self.endpoints.get(index as usize) else {
                return;
            };
            let Link::Up(connection) = &ep.link else {
                return;
            };
            let (asked, qp_num) = (connection.try_event(), ep.qp_num);
            let event = match asked {
                Ok(event) => {
                    self.ask_succeeded(index);
                    event
                }
                Err(error) => return self.ask_failed(index, &error),
            };
            let Some(event) = event else { return };
            log::debug!("queue pair {qp_num}: {event}");
            match cause_of(event) {
                Some(cause) => self.bad_news(index, cause),
                None if event == ConnectionEvent::Established => {
                    self.step(index, Input::Established)
                }
                None => {}
            }
        }
    }

    /// The event is still there, and the connection as it was. Its descriptor stays readable, so it
    /// is not watched until asking succeeds.
    fn ask_failed(&mut self, index: u32, error: &CmError) {
        let ep = &mut self.endpoints[index as usize];
        if ep.ask_again.is_some() {
            return; // asked by the way
        }
        let (qp_num, failed_before) = (ep.qp_num, ep.failed_asks);
        ep.failed_asks += 1;
        if failed_before == 0 {
            self.watch_link(index, false);
        }
        let errno = error.errno().unwrap_or(0);
        let may_pass = [Errno::NOMEM, Errno::INTR].map(Errno::raw_os_error);
        if may_pass.contains(&errno) && failed_before < ASKS_AGAIN {
            log::warn!("queue pair {qp_num}: {error}; the connection manager is asked again");
            let pause = FIRST_PAUSE * (1 << failed_before);
            self.set_ask_again(index, Some(Instant::now() + pause));
            return;
        }
        log::error!("queue pair {qp_num}: {error}; the connection is given up");
        self.bad_news(index, Cause::ConnectionManagerError { errno });
    }

    fn ask_succeeded(&mut self, index: u32) {
        let ep = &mut self.endpoints[index as usize];
        if mem::take(&mut ep.failed_asks) > 0 {
            self.set_ask_again(index, None);
            self.watch_link(index, true);
        }
    }

    fn watch_link(&self, index: u32, watched: bool) {
        if let Some(fd) = self.endpoints[index as usize].link.fd() {
            self.poller_ref().watch_endpoint(fd, index, watched);
        }
    }

    /// The connection is lost. What has arrived is delivered first, then the rest is flushed.
    pub(crate) fn bad_news(&mut self, index: u32, cause: Cause) {
        self.poll_until_empty();
        if self.endpoints[index as usize].life == lifecycle::State::Opening {
            let cause = Arc::new(cause);
            let ended = OpenError::Ended(Arc::clone(&cause));
            self.endpoints[index as usize]
                .open_error
                .get_or_insert(ended);
            self.set_cause(index, (*cause).clone());
        } else {
            self.set_cause(index, cause);
        }
        self.step(index, Input::BadNews);
    }

    /// Sets why the endpoint ended, unless that is known.
    fn set_cause(&mut self, index: u32, mut cause: Cause) {
        let ep = &mut self.endpoints[index as usize];
        // What the peer or the program does about it is no cause of it.
        if ep.qp_failed && matches!(cause, Cause::Disconnected | Cause::ClosedLocally) {
            cause = Cause::QueuePairError;
        }
        let Some(lane) = ep.lane else { return };
        if self.tracker.cause(lane).is_none() {
            // Who waits for no operation, but for the cause.
            self.news = true;
            ep.posters.wake_all(&mut self.wakers);
            ep.watchers.wake_all(&mut self.wakers);
        }
        ep.cause = Some(self.tracker.set_cause(lane, || cause, &mut self.wakers));
    }

    pub(crate) fn timer_ran_out(&mut self, index: u32, now: Instant) {
        let ep = &mut self.endpoints[index as usize];
        match (&ep.link, ep.life) {
            (Link::Resolved(_), lifecycle::State::Opening) => {
                self.held_too_long(index, Step::Connect)
            }
            (Link::Requested(_), lifecycle::State::Opening) => {
                self.held_too_long(index, Step::Accept)
            }
            // These know their deadline themselves, and report it with the step they were in.
            (Link::Resolving(_) | Link::Connecting(_), lifecycle::State::Opening) => {
                self.link_news(index);
                self.check_again_if_early(index, now);
            }
            (_, lifecycle::State::Open) => self.look_after(index, now),
            _ => self.step(index, Input::Deadline),
        }
    }

    /// The program did not go on in time.
    fn held_too_long(&mut self, index: u32, step: Step) {
        let ep = &self.endpoints[index as usize];
        let error = CmError::TimedOut {
            step,
            peer: ep.addrs.peer,
            after: ep.config.connect_deadline,
        };
        self.open_failed(index, error.into());
    }

    /// A timer can run out a moment before the step's own clock agrees.
    fn check_again_if_early(&mut self, index: u32, now: Instant) {
        let ep = &self.endpoints[index as usize];
        if matches!(ep.link, Link::Resolving(_) | Link::Connecting(_)) && ep.timer.is_none() {
            self.set_timer(index, Some(now + Duration::from_millis(1)));
        }
    }

    /// Posts a write of length zero, which only asks for an acknowledgement.
    pub(crate) fn probe(&mut self, index: u32) {
        let flags = Flags {
            signaled: true,
            ..Flags::default()
        };
        let Ok(mut poster) = self.poster(index) else {
            return;
        };
        match poster.send(Verb::Probe, flags, &mut Payload::None, None, Claim::Nobody) {
            Ok(Posted::Yes(_)) => {}
            Ok(Posted::Perhaps(_)) => self.doorbell_failed(index),
            Err(kind) => {
                log::warn!("a probe could not be posted: {kind}");
                self.endpoints[index as usize]
                    .bad_news
                    .get_or_insert(Cause::QueuePairError);
                self.mark(index);
            }
        }
    }

    /// A post that may or may not have reached the device: everything in flight has to end.
    #[cold]
    pub(crate) fn doorbell_failed(&mut self, index: u32) {
        log::error!("ringing the doorbell failed; the connection is given up");
        self.endpoints[index as usize]
            .bad_news
            .get_or_insert(Cause::QueuePairError);
        self.mark(index);
    }
}

/// What a connection manager event means for the endpoint, if it is over.
fn cause_of(event: ConnectionEvent) -> Option<Cause> {
    match event {
        ConnectionEvent::Disconnected
        | ConnectionEvent::TimewaitExit
        | ConnectionEvent::Rejected(_)
        | ConnectionEvent::DisconnectUnanswered(_) => Some(Cause::Disconnected),
        ConnectionEvent::Unreachable(status) | ConnectionEvent::ConnectError(status) => {
            Some(Cause::Unreachable {
                status: status.errno().map_or(0, |errno| -errno),
            })
        }
        ConnectionEvent::DeviceRemoval => Some(Cause::DeviceRemoved),
        event if event.is_end() => Some(Cause::Disconnected),
        _ => None,
    }
}

/// The table at work.
impl State {
    /// Looks at an endpoint about which a completion said something.
    pub(crate) fn review(&mut self, index: u32) {
        let Some(ep) = self.endpoints.get_mut(index as usize) else {
            return;
        };
        ep.marked = false;
        if mem::take(&mut ep.first_receive) {
            self.step(index, Input::FirstReceive);
        }
        let ep = &mut self.endpoints[index as usize];
        let broken = ep.broken;
        match ep.bad_news.take() {
            Some(cause) => self.bad_news(index, cause),
            None if broken => self.step(index, Input::BadNews),
            None => {}
        }
        self.count(index);
        let ep = &mut self.endpoints[index as usize];
        ep.posters.wake_all(&mut self.wakers);
    }

    /// Looks whether what an ending endpoint waits for is there.
    fn count(&mut self, index: u32) {
        let ep = &self.endpoints[index as usize];
        let Some(lane) = ep.lane else { return };
        let (sends, recvs) = self.tracker.in_flight(lane);
        match ep.life {
            lifecycle::State::Draining if sends == 0 => self.step(index, Input::SendsDone),
            lifecycle::State::Flushing if sends + recvs == 0 => {
                self.find_cause(index);
                self.step(index, Input::AllDone);
            }
            _ => {}
        }
    }

    /// Everything was flushed, and no completion said why. The connection manager may know.
    fn find_cause(&mut self, index: u32) {
        if self.known_cause(index).is_none() {
            self.connection_news(index);
        }
        if self.known_cause(index).is_none() {
            self.set_cause(index, Cause::QueuePairError);
        }
    }

    /// Why the endpoint ended, if it did and that is known.
    pub(crate) fn known_cause(&self, index: u32) -> Option<&Arc<Cause>> {
        let ep = &self.endpoints[index as usize];
        ep.cause.as_ref().or_else(|| self.tracker.cause(ep.lane?))
    }

    /// Feeds the table and does what it says.
    pub(crate) fn step(&mut self, index: u32, input: Input) {
        let Some(ep) = self.endpoints.get_mut(index as usize) else {
            return;
        };
        let before = ep.life;
        let (life, actions) = before.on(input);
        if life == before {
            return;
        }
        log::debug!(
            "queue pair {}: {before:?} → {life:?} on {input:?}",
            ep.qp_num
        );
        ep.life = life;
        self.news = true;
        let ep = &mut self.endpoints[index as usize];
        ep.was_open |= life == lifecycle::State::Open;
        if let Some(cause) = cause_of_step(before, input) {
            if before == lifecycle::State::Draining && input == Input::Deadline {
                ep.unfinished = ep.lane.map_or(0, |lane| self.tracker.in_flight(lane).0);
            }
            self.set_cause(index, cause);
        }
        self.act(index, actions);
        self.start_timer(index);
        self.count(index);
    }

    fn act(&mut self, index: u32, actions: Actions) {
        let ep = &mut self.endpoints[index as usize];
        if actions.contains(Actions::TO_ERROR)
            && let Some(qp) = &mut ep.qp
            && let Err(error) = qp.to_error()
        {
            log::warn!("queue pair {}: {error}", ep.qp_num);
        }
        if actions.contains(Actions::DISCONNECT)
            && let Link::Up(connection) = &ep.link
            && let Err(error) = connection.disconnect()
        {
            log::debug!("rdma_disconnect: {error}");
        }
        if actions.contains(Actions::DESTROY) {
            self.destroy(index);
        }
        if actions.contains(Actions::WAKE) {
            let ep = &mut self.endpoints[index as usize];
            for waiters in [&mut ep.receivers, &mut ep.posters, &mut ep.watchers] {
                waiters.wake_all(&mut self.wakers);
            }
        }
    }

    /// The states that may not last have their time.
    fn start_timer(&mut self, index: u32) {
        let ep = &self.endpoints[index as usize];
        let at = match ep.life {
            // They brought their own.
            lifecycle::State::Opening | lifecycle::State::Draining => return,
            lifecycle::State::Open => return self.start_watchdog(index),
            lifecycle::State::Flushing => Some(Instant::now() + FLUSH_TIME),
            lifecycle::State::Closed => None,
        };
        self.set_timer(index, at);
    }

    /// Starts to close: nothing new is accepted, sends in flight have time until `deadline`.
    pub(crate) fn close(&mut self, index: u32, deadline: Instant) {
        if self.endpoints[index as usize].life == lifecycle::State::Open {
            self.set_timer(index, Some(deadline));
        }
        self.step(index, Input::Close);
    }

    /// Destroys the queue pair, and ends what is still in flight without the device: it cannot touch
    /// the buffers any more.
    fn destroy(&mut self, index: u32) {
        let ep = &mut self.endpoints[index as usize];
        let Some(lane) = ep.lane else { return };
        if let (Some(device), Some(qp)) = (&self.device, &ep.qp) {
            device.remove_queue_pair(qp.qp_num());
        }
        let destroyed = match ep.qp.take().map(QueuePair::destroy) {
            None | Some(Ok(())) => true,
            Some(Err((qp, error))) => {
                let qp_num = qp.qp_num();
                mem::forget(qp);
                log::error!("queue pair {qp_num} is leaked with its buffers: {error}");
                false
            }
        };
        // What completed before is delivered.
        self.poll_until_empty();
        if self.known_cause(index).is_none() {
            self.set_cause(index, Cause::QueuePairError);
        }
        if !destroyed {
            let leaked = &mut self.counters.leaked;
            self.tracker
                .for_each_in_flight(lane, |payload| *leaked += payload.leak() as u64);
        }
        self.tracker.drain(lane, &mut self.wakers, drop);
        let ep = &mut self.endpoints[index as usize];
        ep.tally = *self.tracker.tally(lane);
        ep.cause = self.tracker.cause(lane).cloned();
        ep.lane = None;
        ep.missing = 0;
        // Dropping the link tells the peer, if nothing else did.
        let link = mem::replace(&mut ep.link, Link::None);
        self.bury(link);
        if destroyed {
            self.tracker.detach(lane);
        }
    }

    /// The counters of an endpoint's operations.
    pub(crate) fn tally(&self, index: u32) -> Tally {
        let ep = &self.endpoints[index as usize];
        ep.lane.map_or(ep.tally, |lane| *self.tracker.tally(lane))
    }
}

/// What the endpoint's end is due to, if this input says so.
fn cause_of_step(before: lifecycle::State, input: Input) -> Option<Cause> {
    use lifecycle::State as S;
    match (before, input) {
        (S::Opening, Input::Deadline) => Some(Cause::NotEstablished),
        (S::Draining, Input::Deadline | Input::SendsDone) => Some(Cause::ClosedLocally),
        (S::Opening, Input::Close) | (_, Input::Abort) => Some(Cause::ClosedLocally),
        _ => None,
    }
}

/// Why a managed receive could not be posted.
enum Refill {
    PoolIsDry(PoolError),
    Refused(PostErrorKind),
}

impl From<Refill> for OpenError {
    fn from(refill: Refill) -> OpenError {
        match refill {
            Refill::PoolIsDry(error) => OpenError::Pool(error),
            Refill::Refused(kind) => OpenError::Post(kind),
        }
    }
}

/// Messages.
impl State {
    /// Puts a message into the inbox.
    #[inline(always)]
    pub(crate) fn deliver(&mut self, index: u32, payload: Payload, success: Success) {
        let Some(ep) = self.endpoints.get_mut(index as usize) else {
            return;
        };
        let Payload::One(mut buf) = payload else {
            return;
        };
        let len = success.byte_len as usize;
        // The device cannot have received more than the buffer holds.
        buf.set_len(if success.written {
            0
        } else {
            len.min(buf.capacity())
        });
        let written = success.written.then_some(len);
        ep.inbox.push_back(Received {
            buf,
            imm: success.imm,
            written,
        });
        if !ep.receivers.is_empty() {
            ep.receivers.wake_all(&mut self.wakers);
        }
    }

    /// Takes the oldest message, and posts a receive in the place of its own.
    #[inline]
    pub(crate) fn take_message(&mut self, index: u32) -> Option<Received> {
        let ep = &mut self.endpoints[index as usize];
        let received = ep.inbox.pop_front()?;
        if ep.life.takes_receives() {
            ep.missing += 1;
            // A receive that cannot be posted now is when the pool has a buffer; anything worse has
            // been noted, and ends the endpoint: at once, for perhaps nobody polls again.
            let waits =
                !self.dry.is_empty() || matches!(self.refill_one(index), Err(Refill::PoolIsDry(_)));
            if waits {
                self.refill_in_turn(index);
            }
            if !self.attention.is_empty() {
                self.attend();
            }
        }
        Some(received)
    }

    /// Posts one of the managed receives that are missing.
    fn refill_one(&mut self, index: u32) -> Result<(), Refill> {
        let Some(buf) = self.pool.take_or_call_back(0) else {
            let count = self.pool.count();
            return Err(Refill::PoolIsDry(PoolError::Empty { count }));
        };
        self.post_managed(index, buf).map_err(Refill::Refused)
    }

    fn post_managed(&mut self, index: u32, buf: Buf) -> Result<(), PostErrorKind> {
        let mut payload = Payload::One(buf);
        let posted = self.poster(index)?.recv(&mut payload, Claim::Inbox);
        let ep = &mut self.endpoints[index as usize];
        match posted {
            Ok(Posted::Yes(_)) => ep.missing -= 1,
            Ok(Posted::Perhaps(_)) => {
                ep.missing -= 1;
                self.doorbell_failed(index);
            }
            Err(kind) => {
                log::error!("a receive could not be posted: {kind}");
                ep.missing = 0;
                ep.bad_news.get_or_insert(Cause::QueuePairError);
                self.mark(index);
                return Err(kind);
            }
        }
        Ok(())
    }

    /// The pool is dry, or others lack receives already: this endpoint stands behind them.
    #[cold]
    fn refill_in_turn(&mut self, index: u32) {
        if !self.dry.contains(&index) {
            self.dry.push_back(index);
        }
        self.refill_dry();
        let ep = &mut self.endpoints[index as usize];
        ep.receives_delayed += u64::from(ep.missing > 0);
    }

    /// The pool may have buffers again: they go to those who lack receives one by one, in turn, so
    /// that nobody waits for ever behind one that is always short of some.
    #[cold]
    pub(crate) fn refill_dry(&mut self) {
        while let Some(&index) = self.dry.front() {
            let again = self.lacks_receives(index)
                && match self.refill_one(index) {
                    Ok(()) => self.lacks_receives(index),
                    Err(Refill::PoolIsDry(_)) => return,
                    Err(Refill::Refused(_)) => false, // noted
                };
            self.dry.pop_front();
            if again {
                self.dry.push_back(index);
            }
        }
    }

    fn lacks_receives(&self, index: u32) -> bool {
        self.endpoints
            .get(index as usize)
            .is_some_and(|ep| ep.missing > 0 && ep.life.takes_receives())
    }

    /// What posting needs, if the endpoint has a queue pair. Not in a child of `fork`: what is posted
    /// there can reach the parent's device, which would write to the parent's buffers.
    #[inline]
    pub(crate) fn poster(&mut self, index: u32) -> Result<Poster<'_>, PostErrorKind> {
        if !self.poller_ref().is_here() {
            return Err(PostErrorKind::Forked);
        }
        let ep = &mut self.endpoints[index as usize];
        match (&mut ep.qp, ep.lane) {
            (Some(qp), Some(lane)) => Ok(Poster {
                tracker: &mut self.tracker,
                lane,
                qp,
                pd: &self.pd,
            }),
            _ => Err(PostErrorKind::NotOpen),
        }
    }
}
