//! Multicast groups: one datagram, many receivers.
//!
//! Joining asks the network (the subnet manager, or IGMP on Ethernet) for the group, and returns
//! what a datagram to it needs. Receiving needs a queue pair attached to the group as well.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_core_rs::{AddressHandle, Context, ProtectionDomain, QueuePair};

use crate::channel::EventChannel;
use crate::connector::check_source;
use crate::deadline::Deadline;
use crate::error::{CmError, Result, Step};
use crate::event::EventType;
use crate::id::{CmId, News, PortSpace, UdParam};
use crate::listener::missing;
use crate::qp;

/// The queue pair number that datagrams to a group carry.
const MULTICAST_QPN: u32 = 0xff_ffff;

/// A group to join: which, from where, and by when.
///
/// ```no_run
/// use rdma_cm::Join;
///
/// let membership = Join::new("239.1.2.3:0".parse().unwrap())
///     .source("192.168.99.1:0".parse().unwrap())
///     .join()?;
/// println!("key {:#x}", membership.qkey());
/// # Ok::<(), rdma_cm::CmError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens before start() or join()"]
pub struct Join {
    group: SocketAddr,
    source: Option<SocketAddr>,
    deadline: Duration,
    send_only: bool,
}

impl Join {
    /// The group at `group`, whose port is ignored, to be joined within 5 s.
    pub fn new(group: SocketAddr) -> Self {
        Self {
            group,
            source: None,
            deadline: Duration::from_secs(5),
            send_only: false,
        }
    }

    /// Joins with the device of this local address instead of what the routing table chooses.
    pub fn source(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// How long joining may take.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Joins for sending only: the network does not deliver the group's datagrams here. Not all
    /// devices can.
    pub fn send_only(mut self, send_only: bool) -> Self {
        self.send_only = send_only;
        self
    }

    /// Starts joining; nothing here waits.
    ///
    /// # Errors
    ///
    /// [`CmError::Config`] if the address is no multicast address; [`CmError::NoConnectionManager`],
    /// [`CmError::NoRoute`], [`CmError::NoDevice`], [`CmError::Call`].
    pub fn start(self) -> Result<Joining> {
        if !self.group.ip().is_multicast() {
            let asked = self.group.ip().to_string();
            return Err(CmError::Config {
                field: "group",
                asked,
                allowed: "a multicast address is needed",
            });
        }
        check_source(self.group, self.source)?;
        let deadline = Deadline::after(self.deadline);
        let mut id = CmId::new(PortSpace::Udp)?;
        let step = self.begin(&mut id, deadline)?;
        Ok(Joining {
            channel: id.shared_channel(),
            id: Some(id),
            join: self,
            step,
            deadline,
        })
    }

    /// A local address is all that joining needs; without one, the routing table has to choose.
    fn begin(&self, id: &mut CmId, deadline: Deadline) -> Result<Step> {
        match self.source {
            Some(source) => {
                id.bind(source)?;
                id.join_multicast(self.group, self.send_only)?;
                Ok(Step::JoinMulticast)
            }
            None => {
                id.resolve_addr(None, self.group, deadline.left())?;
                Ok(Step::ResolveAddr)
            }
        }
    }

    /// [`start`](Self::start), then waits until the group is joined.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start) and [`Joining::advance`].
    pub fn join(self) -> Result<Membership> {
        self.start().map_err(CmError::with_candidates)?.wait()
    }
}

/// A group is being joined. Dropping it gives up.
#[derive(Debug)]
pub struct Joining {
    /// Gone once the step is over.
    id: Option<CmId>,
    channel: Arc<EventChannel>,
    join: Join,
    step: Step,
    deadline: Deadline,
}

impl Joining {
    /// One step, as far as the events allow: `None` if the group is not joined yet. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CmError::TimedOut`]; [`CmError::Event`] with `MulticastError` if the network refused;
    /// [`CmError::NoDevice`], [`CmError::DeviceRemoved`], [`CmError::Call`]. After an error or the
    /// result it returns [`CmError::Finished`].
    pub fn advance(&mut self) -> Result<Option<Membership>> {
        let mut id = self
            .id
            .take()
            .ok_or(CmError::Finished { step: self.step })?;
        while let Some(news) = id.news()? {
            log::debug!("{} for {}", news.event, self.join.group);
            match news.event {
                EventType::AddrResolved => {
                    self.step = Step::JoinMulticast;
                    id.join_multicast(self.join.group, self.join.send_only)?;
                }
                EventType::MulticastJoin => {
                    return Membership::new(id, self.join.group, news).map(Some);
                }
                EventType::AddrError | EventType::MulticastError | EventType::DeviceRemoval => {
                    return Err(CmError::from_news(self.step, self.join.group, news, &id));
                }
                _ => {}
            }
        }
        if self.deadline.has_passed() {
            return Err(self.deadline.timed_out(self.step, Some(self.join.group)));
        }
        self.id = Some(id);
        Ok(None)
    }

    /// Waits until the group is joined, at most until the deadline.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance).
    pub fn wait(mut self) -> Result<Membership> {
        loop {
            if let Some(membership) = self.advance().map_err(CmError::with_candidates)? {
                return Ok(membership);
            }
            self.channel.wait(Some(self.deadline()))?;
        }
    }

    /// When the group has to be joined.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline.end()
    }
}

#[cfg(feature = "tokio")]
impl Joining {
    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.channel)
    }
}

impl AsFd for Joining {
    /// Readable when [`advance`](Self::advance) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A multicast group that was joined. Dropping it leaves the group.
#[derive(Debug)]
pub struct Membership {
    id: CmId,
    context: Context,
    group: SocketAddr,
    ud: UdParam,
}

impl Membership {
    fn new(id: CmId, group: SocketAddr, news: News) -> Result<Self> {
        let context = id.context()?;
        let ud = news.ud.ok_or_else(missing("a group without parameters"))?;
        Ok(Self {
            id,
            context,
            group,
            ud,
        })
    }

    /// The device that the group was joined with.
    #[must_use]
    pub fn context(&self) -> Context {
        self.context.clone()
    }

    /// The number that datagrams to the group carry as their queue pair number.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        MULTICAST_QPN
    }

    /// The key that datagrams to the group have to carry.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.ud.qkey
    }

    /// The group's address.
    #[must_use]
    pub fn group(&self) -> SocketAddr {
        self.group
    }

    /// The path to the group, as an address handle in `pd`.
    ///
    /// # Errors
    ///
    /// [`CmError::Verbs`] if the handle cannot be made.
    pub fn address_handle(&self, pd: &ProtectionDomain) -> Result<AddressHandle> {
        AddressHandle::from_raw_attr(pd, self.ud.ah_attr).map_err(CmError::verbs(Step::Device))
    }

    /// Moves a new datagram queue pair to RTS, with the key of the group.
    ///
    /// # Errors
    ///
    /// [`CmError::Verbs`] or [`CmError::Call`].
    pub fn init_qp(&self, qp: &mut QueuePair) -> Result<()> {
        qp::datagram_to_rts(&self.id, qp)
    }

    /// Lets `qp` receive what is sent to the group. [`detach`](Self::detach) it before it is
    /// destroyed, which is refused otherwise.
    ///
    /// # Errors
    ///
    /// [`CmError::Verbs`].
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach(&self, qp: &mut QueuePair) -> Result<()> {
        qp.attach_mcast(self.ud.gid, self.ud.lid)
            .map_err(CmError::verbs(Step::JoinMulticast))
    }

    /// Ends what [`attach`](Self::attach) began.
    ///
    /// # Errors
    ///
    /// [`CmError::Verbs`], among others for a queue pair that was not attached.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach(&self, qp: &mut QueuePair) -> Result<()> {
        qp.detach_mcast(self.ud.gid, self.ud.lid)
            .map_err(CmError::verbs(Step::LeaveMulticast))
    }
}

impl Drop for Membership {
    /// Destroying the id alone would leave the group too, but not free what librdmacm noted of it.
    fn drop(&mut self) {
        if let Err(e) = self.id.leave_multicast(self.group) {
            log::debug!("leaving {}: {e}", self.group);
        }
    }
}
