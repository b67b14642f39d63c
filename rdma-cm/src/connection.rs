//! A connection: what is left to do once both sides agreed, and what it may still report.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::channel::EventChannel;
use crate::deadline::Deadline;
#[cfg(doc)]
use crate::error::CmError;
use crate::error::{Result, Step};
use crate::event::{EventStatus, EventType, RejectReason};
use crate::id::CmId;
use crate::param::Negotiated;
use crate::state::{Action, Input, State};

/// A connection of two queue pairs, as the connection manager sees it.
///
/// It does not own the queue pair, and never touches it: when the peer disconnects, the queue pair
/// stays in RTS, and what was posted completes or not as the network has it. Its owner moves it to
/// the error state, collects the completions, and drops both.
///
/// All methods take `&self` and may be called from any thread. Dropping the connection tells the
/// peer (it sees [`ConnectionEvent::Disconnected`]) and takes milliseconds, whatever the peer does.
#[derive(Debug)]
pub struct Connection {
    live: Mutex<Live>,
    channel: Arc<EventChannel>,
    facts: Facts,
}

/// What changes.
#[derive(Debug)]
struct Live {
    id: CmId,
    state: State,
}

/// What never changes again.
#[derive(Clone, Debug)]
struct Facts {
    local_addr: SocketAddr,
    peer_addr: SocketAddr,
    device_name: String,
    port_num: u8,
    gids: [Option<Ipv6Addr>; 2],
    private_data: Vec<u8>,
    negotiated: Negotiated,
}

impl Connection {
    pub(crate) fn new(
        id: CmId,
        state: State,
        peer_addr: SocketAddr,
        private_data: Vec<u8>,
        negotiated: Negotiated,
    ) -> Self {
        let facts = Facts {
            local_addr: id.local_addr(),
            peer_addr: id.peer_addr().unwrap_or(peer_addr),
            device_name: id.device_name().unwrap_or_default(),
            port_num: id.port_num(),
            gids: [id.local_gid(), id.peer_gid()],
            private_data,
            negotiated,
        };
        Self {
            channel: id.shared_channel(),
            live: Mutex::new(Live { id, state }),
            facts,
        }
    }

    /// The next event, or `None` if there is none now. It never blocks.
    ///
    /// Events that say nothing new (a duplicate, one out of its time) are acknowledged and skipped.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`] if fetching an event fails; the connection is as it was.
    pub fn try_event(&self) -> Result<Option<ConnectionEvent>> {
        let mut live = self.live();
        let Live { id, state } = &mut *live;
        while let Some(news) = id.news()? {
            let (next, action) = state.next(Input::from_event(news.event, news.status));
            log::debug!("{} in {state:?}: {action:?}", news.event);
            *state = next;
            if action == Action::Report {
                return Ok(Some(ConnectionEvent::new(news.event, news.status)));
            }
        }
        Ok(None)
    }

    /// Waits for the next event until `deadline`; `None` waits for as long as it takes.
    ///
    /// # Errors
    ///
    /// [`CmError::TimedOut`] if the deadline passes first, and those of
    /// [`try_event`](Self::try_event). The connection is as it was.
    pub fn wait_event(&self, deadline: Option<Instant>) -> Result<ConnectionEvent> {
        let given = deadline.map(Deadline::at);
        loop {
            if let Some(event) = self.try_event()? {
                return Ok(event);
            }
            match given {
                Some(at) if at.has_passed() => {
                    return Err(at.timed_out(Step::Event, Some(self.peer_addr())));
                }
                _ => self.channel.wait(deadline)?,
            };
        }
    }

    /// Whether the connection is known to be up: the peer confirmed it, and nothing ended it since.
    ///
    /// The active side is established from the start. On the passive side the event tells; data may
    /// arrive before it, see [`notify_comm_est`](Self::notify_comm_est).
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.live().state == State::Established
    }

    /// Tells the connection manager that a receive completed before
    /// [`ConnectionEvent::Established`] came, which then comes at once instead of after seconds.
    ///
    /// A peer that sends has seen the answer, so its message counts as its confirmation. Does
    /// nothing if the connection is established already.
    ///
    /// The confirmation is normally a millisecond behind, so call this only if it has not come some
    /// 200 ms after the first message: the confirmation was lost then. Called at once, it can meet a
    /// peer that leaves at once, and the kernel then keeps the connection's id for 69 s (dropping the
    /// connection leaves it to a thread in the background).
    ///
    /// # Errors
    ///
    /// [`CmError::Call`] if the connection is over.
    #[doc(alias = "rdma_notify")]
    pub fn notify_comm_est(&self) -> Result<()> {
        let live = self.live();
        if live.state == State::Established {
            return Ok(());
        }
        match live.id.notify_comm_est() {
            Err(e) if e.errno() == Some(libc::EISCONN) => Ok(()),
            other => other,
        }
    }

    /// Starts ending the connection: the peer sees [`ConnectionEvent::Disconnected`], and so does
    /// this side once the peer disconnected as well, or after about a minute if it never does
    /// ([`ConnectionEvent::DisconnectUnanswered`]). Nobody has to wait for that.
    ///
    /// Calling it again, or after the peer did, answers the peer and does no harm. The queue pair
    /// stays in RTS, so what was posted can still be completed.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`] if the connection is not there any more (`EINVAL` among others).
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&self) -> Result<()> {
        self.live().id.disconnect()
    }

    /// What the peer's program sent with its request or its answer, padded with zeros: 56 bytes
    /// from the active side, 196 from the passive one (nothing, if the message carried none).
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.facts.private_data
    }

    /// How many reads and atomics may be outstanding.
    #[must_use]
    pub fn negotiated(&self) -> Negotiated {
        self.facts.negotiated
    }

    /// The local address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.facts.local_addr
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.facts.peer_addr
    }

    /// The name of the device, for instance `mlx5_0` or `rxe0`.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.facts.device_name
    }

    /// The port of the device, from 1.
    #[must_use]
    pub fn port_num(&self) -> u8 {
        self.facts.port_num
    }

    /// The GID of the local port, as far as the connection manager told it.
    #[must_use]
    pub fn local_gid(&self) -> Option<Ipv6Addr> {
        self.facts.gids[0]
    }

    /// The GID of the peer's port, as far as the connection manager told it.
    #[must_use]
    pub fn peer_gid(&self) -> Option<Ipv6Addr> {
        self.facts.gids[1]
    }

    /// A panic of another thread while it held the lock left nothing half done: the state is
    /// assigned at once.
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(feature = "tokio")]
impl Connection {
    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.channel)
    }
}

impl AsFd for Connection {
    /// Readable when an event waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// What a connection reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// The peer confirmed: both sides are up. The passive side gets it, once.
    Established,
    /// The peer disconnected, or answered this side's disconnect.
    Disconnected,
    /// This side disconnected, and the peer did not answer in time.
    DisconnectUnanswered(EventStatus),
    /// The peer took its acceptance back, or never got this side's.
    Rejected(RejectReason),
    /// The network lost the peer.
    Unreachable(EventStatus),
    /// Setting up failed on this host after the connection was accepted.
    ConnectError(EventStatus),
    /// The number of the connection's queue pair may be used again; the connection is over.
    TimewaitExit,
    /// The device goes away: drop everything that was made on it. The removal waits for that, and for
    /// librdmacm to notice, which it does when it looks for devices again: at the next
    /// [`context_for`](crate::context_for) another device, or [`device_addresses`](crate::device_addresses).
    DeviceRemoval,
    /// The network device changed its hardware address; a new connection may be needed to use it.
    AddrChange,
    /// Something that this version does not know.
    Other(u32),
}

impl ConnectionEvent {
    /// Whether the connection is over.
    #[must_use]
    pub fn is_end(&self) -> bool {
        !matches!(self, Self::Established | Self::AddrChange | Self::Other(_))
    }

    fn new(event: EventType, status: EventStatus) -> Self {
        match (event, status) {
            (EventType::Established, _) => Self::Established,
            (EventType::Disconnected, EventStatus::Errno(_)) => Self::DisconnectUnanswered(status),
            (EventType::Disconnected, _) => Self::Disconnected,
            (EventType::Rejected, EventStatus::Reject(reason)) => Self::Rejected(reason),
            (EventType::Unreachable, _) => Self::Unreachable(status),
            (EventType::TimewaitExit, _) => Self::TimewaitExit,
            (EventType::DeviceRemoval, _) => Self::DeviceRemoval,
            (EventType::AddrChange, _) => Self::AddrChange,
            (EventType::Unknown(number), _) => Self::Other(number),
            _ => Self::ConnectError(status),
        }
    }
}

impl fmt::Display for ConnectionEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Established => f.write_str("the connection is up"),
            Self::Disconnected => f.write_str("the peer disconnected"),
            Self::DisconnectUnanswered(status) => {
                write!(f, "disconnected without an answer: {status}")
            }
            Self::Rejected(reason) => write!(f, "the peer rejected the connection: {reason}"),
            Self::Unreachable(status) => write!(f, "the peer is unreachable: {status}"),
            Self::ConnectError(status) => write!(f, "the connection failed: {status}"),
            Self::TimewaitExit => f.write_str("the connection's time-wait is over"),
            Self::DeviceRemoval => f.write_str("the device is being removed"),
            Self::AddrChange => f.write_str("the network device changed its hardware address"),
            Self::Other(number) => write!(f, "unknown event {number}"),
        }
    }
}
