//! The communication id and its events: librdmacm as it is, without its traps.
//!
//! This is the lower level of the crate. [`Connector`](crate::Connector) and
//! [`Listener`](crate::Listener) are built on it, and so can be whatever they do not cover.
//!
//! Three rules of librdmacm are turned into types here:
//! - An id owns its channel, so an event that arrives is an event of this id.
//! - An event borrows its id and is acknowledged when dropped, or, if it was forgotten, when the id
//!   is used or dropped next. `rdma_destroy_id` waits for events that were fetched and not
//!   acknowledged, and would wait for ever for one held by its own thread.
//! - An id never has a queue pair. Given one, librdmacm moves it behind its owner's back whenever an
//!   event is fetched. Here the owner asks for the attributes ([`CmId::qp_attr`]) and moves it himself.
#![allow(unsafe_code)] // every call on an id passes its pointer to librdmacm

use std::fmt;
use std::io;
use std::mem;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::raw::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rdma_core_rs::{Birth, Context};

use crate::addr::{RawAddr, unspecified_like};
use crate::channel::EventChannel;
use crate::error::{CmError, Result, Step};
use crate::event::{EventStatus, EventType};
use crate::lease;
use crate::option::IdOptions;
use crate::param::RequestParam;
use crate::sys;

/// The name space of ports, which also decides what kind of queue pair an id is for.
#[doc(alias = "rdma_port_space")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortSpace {
    /// Reliable connections.
    #[doc(alias = "RDMA_PS_TCP")]
    Tcp,
    /// Unreliable datagrams.
    #[doc(alias = "RDMA_PS_UDP")]
    Udp,
    /// Reliable connections in the InfiniBand name space.
    #[doc(alias = "RDMA_PS_IB")]
    Ib,
    /// Unreliable datagrams that IP over InfiniBand understands; InfiniBand devices only.
    #[doc(alias = "RDMA_PS_IPOIB")]
    Ipoib,
}

impl PortSpace {
    pub(crate) const fn as_raw(self) -> sys::rdma_port_space::Type {
        match self {
            Self::Tcp => sys::rdma_port_space::RDMA_PS_TCP,
            Self::Udp => sys::rdma_port_space::RDMA_PS_UDP,
            Self::Ib => sys::rdma_port_space::RDMA_PS_IB,
            Self::Ipoib => sys::rdma_port_space::RDMA_PS_IPOIB,
        }
    }

    /// Whether ids of this space are for datagrams, whose events carry other parameters.
    #[must_use]
    pub const fn is_datagram(self) -> bool {
        matches!(self, Self::Udp | Self::Ipoib)
    }
}

/// The parameters that go to the peer with a request or an answer, as librdmacm takes them.
///
/// [`ConnParam`](crate::ConnParam) is what programs set; this is what is left of it after checks.
#[derive(Clone, Copy, Debug)]
pub struct RawParam<'a> {
    /// Bytes for the peer's program.
    pub private_data: &'a [u8],
    /// How many reads and atomics of the peer this side serves at a time.
    pub responder_resources: u8,
    /// How many reads and atomics this side has outstanding at a time.
    pub initiator_depth: u8,
    /// How often an unanswered packet is repeated.
    pub retry_count: u8,
    /// How often the peer should repeat a send for which this side had no receive.
    pub rnr_retry_count: u8,
    /// Whether end-to-end flow control is asked for.
    pub flow_control: bool,
    /// Whether the queue pair uses a shared receive queue.
    pub srq: bool,
    /// The number of this side's queue pair.
    pub qp_num: u32,
}

impl RawParam<'_> {
    /// The C structure; it points to the private data of `self`.
    fn to_raw(self) -> Result<sys::rdma_conn_param> {
        let private_data_len =
            u8::try_from(self.private_data.len()).map_err(|_| CmError::PrivateDataTooLong {
                message: "any message",
                asked: self.private_data.len(),
                limit: usize::from(u8::MAX),
            })?;
        Ok(sys::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast::<c_void>(),
            private_data_len,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: self.flow_control.into(),
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            srq: self.srq.into(),
            qp_num: self.qp_num,
        })
    }
}

/// Where datagrams go: what the peer, or a multicast group, answered.
#[doc(alias = "rdma_ud_param")]
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct UdParam {
    /// The path, for [`AddressHandle::from_raw_attr`](rdma_core_rs::AddressHandle::from_raw_attr).
    pub ah_attr: sys::ibv_ah_attr,
    /// The number of the queue pair.
    pub qp_num: u32,
    /// The key that datagrams to it have to carry.
    pub qkey: u32,
    /// The GID of the peer or the group.
    pub gid: Ipv6Addr,
    /// Its local identifier; InfiniBand only.
    pub lid: u16,
}

impl UdParam {
    fn new(raw: &sys::rdma_ud_param) -> Self {
        let sys::rdma_ud_param {
            ah_attr,
            qp_num,
            qkey,
            ..
        } = *raw;
        // SAFETY: both members of the union are 16 bytes, valid for every bit pattern, and
        // librdmacm zeroed or filled them.
        let gid = Ipv6Addr::from(unsafe { ah_attr.grh.dgid.raw });
        Self {
            ah_attr,
            qp_num,
            qkey,
            gid,
            lid: ah_attr.dlid,
        }
    }
}

impl fmt::Debug for UdParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdParam")
            .field("qp_num", &self.qp_num)
            .field("qkey", &self.qkey)
            .field("gid", &self.gid)
            .finish_non_exhaustive()
    }
}

/// A communication id with an event channel of its own: the `socket` of RDMA.
///
/// Dropping it ends whatever is under way: a resolution is cancelled, an unanswered request is
/// rejected, a connection is disconnected. That takes milliseconds and does not wait for the peer.
#[doc(alias = "rdma_cm_id")]
#[derive(Debug)]
pub struct CmId {
    raw: NonNull<sys::rdma_cm_id>,
    port_space: PortSpace,
    birth: Birth,
    /// Whether [`notify_comm_est`](Self::notify_comm_est) had an effect: see [`Doomed`].
    notified: AtomicBool,
    /// The event that was fetched last, while it is not acknowledged.
    fetched: Option<Fetched>,
    /// A group could not be left: librdmacm has freed it, and its events may point there.
    lost_group: bool,
    /// After `raw`, which `Drop` destroys while the channel is still open.
    channel: Arc<EventChannel>,
}

// SAFETY: an id belongs to no thread; librdmacm guards what its ids share with locks of its own.
unsafe impl Send for CmId {}
// SAFETY: librdmacm writes to an id only while it is bound, resolved, connected, listened on,
// accepted, migrated or asked for an event. All of these take `&mut CmId` here, so whoever holds
// `&CmId` reads fields that nobody writes, or makes a system call.
unsafe impl Sync for CmId {}

impl CmId {
    /// Makes an id and its channel.
    ///
    /// # Errors
    ///
    /// Those of [`EventChannel::new`], and [`CmError::Call`] if the kernel refuses the id.
    #[doc(alias = "rdma_create_id")]
    pub fn new(port_space: PortSpace) -> Result<Self> {
        let channel = Arc::new(EventChannel::new()?);
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is open, `raw` is written to and read below, and the context, which
        // librdmacm only stores, may be null.
        let ret = unsafe {
            sys::rdma_create_id(
                channel.as_raw().as_ptr(),
                &mut raw,
                ptr::null_mut(),
                port_space.as_raw(),
            )
        };
        let created =
            sys::check(ret).and_then(|()| NonNull::new(raw).ok_or_else(io::Error::last_os_error));
        let raw = created.map_err(CmError::call("rdma_create_id", Step::CreateId, None))?;
        Ok(Self {
            raw,
            port_space,
            birth: Birth::now(),
            notified: AtomicBool::new(false),
            fetched: None,
            lost_group: false,
            channel,
        })
    }

    /// The C object, for calls that this crate does not wrap. Never create a queue pair on it.
    #[must_use]
    pub fn as_raw(&self) -> NonNull<sys::rdma_cm_id> {
        self.raw
    }

    /// The port space that the id was made in.
    #[must_use]
    pub fn port_space(&self) -> PortSpace {
        self.port_space
    }

    /// The channel on which the events of this id arrive.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    pub(crate) fn shared_channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.channel)
    }

    // ----- before connecting -----

    /// Sets `options`; before [`bind`](Self::bind) and [`resolve_addr`](Self::resolve_addr).
    ///
    /// # Errors
    ///
    /// [`CmError::Config`] for an acknowledgement timeout of 0 or above 31 (0 would mean for ever),
    /// [`CmError::Call`] if the kernel does not know an option. Options set before that stay set.
    #[doc(alias = "rdma_set_option")]
    pub fn set_options(&mut self, options: &IdOptions) -> Result<()> {
        self.check_process()?;
        if let Some(tos) = options.tos {
            self.set_option(sys::RDMA_OPTION_ID_TOS, tos)?;
        }
        if let Some(timeout) = options.ack_timeout {
            if !(1..=31).contains(&timeout) {
                let asked = timeout.to_string();
                return Err(CmError::Config {
                    field: "ack_timeout",
                    asked,
                    allowed: "1 to 31 is allowed",
                });
            }
            self.set_option(sys::RDMA_OPTION_ID_ACK_TIMEOUT, timeout)?;
        }
        if options.reuse_addr {
            self.set_option(sys::RDMA_OPTION_ID_REUSEADDR, c_int::from(true))?;
        }
        if let Some(af_only) = options.af_only {
            self.set_option(sys::RDMA_OPTION_ID_AFONLY, c_int::from(af_only))?;
        }
        Ok(())
    }

    /// `T` is the type that rdma_set_option(3) names for the option `name`.
    fn set_option<T: Copy>(&mut self, name: c_int, mut value: T) -> Result<()> {
        let len = mem::size_of::<T>();
        // SAFETY: the id is ours and alive, and the value is `len` bytes that outlive the call.
        let ret = unsafe {
            sys::rdma_set_option(
                self.raw.as_ptr(),
                sys::RDMA_OPTION_ID,
                name,
                (&raw mut value).cast(),
                len,
            )
        };
        sys::check(ret).map_err(CmError::call("rdma_set_option", Step::SetOption, None))
    }

    /// Binds the id to a local address, and with it to a device unless the address is a wildcard.
    /// Port 0 lets the kernel choose; [`local_addr`](Self::local_addr) tells what it chose.
    ///
    /// # Errors
    ///
    /// [`CmError::AddressInUse`], [`CmError::NoDevice`], or [`CmError::Call`].
    #[doc(alias = "rdma_bind_addr")]
    pub fn bind(&mut self, addr: SocketAddr) -> Result<()> {
        self.check_process()?;
        let mut raw = RawAddr::from(addr);
        // SAFETY: the id is alive and ours alone; the address outlives the call, which copies it.
        let ret = unsafe { sys::rdma_bind_addr(self.raw.as_ptr(), raw.as_mut_ptr()) };
        sys::check(ret).map_err(|source| local_error("rdma_bind_addr", Step::Bind, addr, source))
    }

    /// Listens for requests; the kernel ignores those above `backlog` until some are fetched.
    ///
    /// # Errors
    ///
    /// [`CmError::AddressInUse`] if another id listens on the port, or [`CmError::Call`].
    #[doc(alias = "rdma_listen")]
    pub fn listen(&mut self, backlog: u32) -> Result<()> {
        self.check_process()?;
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: the id is alive and ours alone.
        let ret = unsafe { sys::rdma_listen(self.raw.as_ptr(), backlog) };
        sys::check(ret)
            .map_err(|source| local_error("rdma_listen", Step::Listen, self.local_addr(), source))
    }

    /// Starts resolving `peer` to a device; `AddrResolved` or `AddrError` follows.
    ///
    /// `source` picks the local address. `timeout` is how long the kernel tries.
    ///
    /// # Errors
    ///
    /// [`CmError::NoRoute`], [`CmError::NoDevice`], [`CmError::AddressInUse`], [`CmError::Call`].
    #[doc(alias = "rdma_resolve_addr")]
    pub fn resolve_addr(
        &mut self,
        source: Option<SocketAddr>,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<()> {
        self.check_process()?;
        let mut source_raw = source.map(RawAddr::from);
        let mut peer_raw = RawAddr::from(peer);
        let source_ptr = source_raw
            .as_mut()
            .map_or(ptr::null_mut(), RawAddr::as_mut_ptr);
        // SAFETY: the id is alive and ours alone; both addresses outlive the call, which copies
        // them, and the source may be null.
        let ret = unsafe {
            sys::rdma_resolve_addr(
                self.raw.as_ptr(),
                source_ptr,
                peer_raw.as_mut_ptr(),
                milliseconds(timeout),
            )
        };
        sys::check(ret).map_err(|e| resolve_error(source, peer, e))
    }

    /// Starts resolving the path to the peer; `RouteResolved` or `RouteError` follows.
    ///
    /// # Errors
    ///
    /// [`CmError::NoDevice`], and [`CmError::Call`]: an id that has no device yet is refused with
    /// `EINVAL`.
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve_route(&mut self, timeout: Duration) -> Result<()> {
        self.check_process()?;
        let call = CmError::call("rdma_resolve_route", Step::ResolveRoute, self.peer_addr());
        if self.verbs().is_none() {
            return Err(call(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        // SAFETY: the id is alive, ours alone, and has the device that the function looks at.
        let ret = unsafe { sys::rdma_resolve_route(self.raw.as_ptr(), milliseconds(timeout)) };
        sys::check(ret).map_err(|source| match (source.raw_os_error(), self.peer_addr()) {
            // A loopback address gets this far: the kernel binds it to any device.
            (Some(libc::ENODEV), Some(peer)) => CmError::no_device(peer),
            _ => call(source),
        })
    }

    /// The attributes, and their mask, that move a queue pair to `state` on behalf of this id.
    ///
    /// `state` is the number of `IBV_QPS_INIT`, `IBV_QPS_RTR` or `IBV_QPS_RTS`.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`]: the connection is not far enough for that state, or over.
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn qp_attr(&self, state: sys::ibv_qp_state::Type) -> Result<(sys::ibv_qp_attr, c_int)> {
        self.check_process()?;
        // SAFETY: ibv_qp_attr is made of integers and unions of them, for which zero is valid.
        let mut attr: sys::ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = state;
        let mut mask = 0;
        // SAFETY: the id is alive and only its number is used; `attr` and `mask` outlive the call.
        let ret = unsafe { sys::rdma_init_qp_attr(self.raw.as_ptr(), &mut attr, &mut mask) };
        sys::check(ret).map_err(CmError::call(
            "rdma_init_qp_attr",
            Step::QueuePair,
            self.peer_addr(),
        ))?;
        Ok((attr, mask))
    }

    // ----- connecting -----

    /// Sends the request; `ConnectResponse`, `Rejected` or `Unreachable` follows (in the UDP port
    /// space `Established` or `Unreachable`).
    ///
    /// # Errors
    ///
    /// [`CmError::PrivateDataTooLong`] above 255 bytes; [`CmError::Call`] otherwise, among others
    /// `EINVAL` if the private data is longer than the message of this port space carries.
    #[doc(alias = "rdma_connect")]
    pub fn connect(&mut self, param: RawParam<'_>) -> Result<()> {
        self.check_process()?;
        self.require_device("rdma_connect", Step::Connect)?;
        let mut raw = param.to_raw()?;
        // SAFETY: the id is alive, ours alone, and has a device; `raw` and the data it points to
        // outlive the call, which copies them.
        let ret = unsafe { sys::rdma_connect(self.raw.as_ptr(), &mut raw) };
        sys::check(ret).map_err(CmError::call(
            "rdma_connect",
            Step::Connect,
            self.peer_addr(),
        ))
    }

    /// Accepts the request that this id stands for; `Established` follows once the peer confirmed.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect); also when the peer has given up meanwhile.
    #[doc(alias = "rdma_accept")]
    pub fn accept(&mut self, param: RawParam<'_>) -> Result<()> {
        self.check_process()?;
        self.require_device("rdma_accept", Step::Accept)?;
        let mut raw = param.to_raw()?;
        // SAFETY: as in `connect`.
        let ret = unsafe { sys::rdma_accept(self.raw.as_ptr(), &mut raw) };
        sys::check(ret).map_err(CmError::call("rdma_accept", Step::Accept, self.peer_addr()))
    }

    /// Refuses to go on in a child of the process that made the id.
    fn check_process(&self) -> Result<()> {
        if self.birth.is_here() {
            Ok(())
        } else {
            Err(CmError::Forked)
        }
    }

    /// librdmacm looks into the device without asking whether there is one.
    fn require_device(&self, call: &'static str, step: Step) -> Result<()> {
        match self.verbs() {
            Some(_) => Ok(()),
            None => Err(CmError::call(call, step, self.peer_addr())(
                io::Error::from_raw_os_error(libc::EINVAL),
            )),
        }
    }

    /// Confirms the peer's answer, after `ConnectResponse` and with the queue pair in RTS.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`]: the connection is not in that state, or over.
    #[doc(alias = "rdma_establish")]
    pub fn establish(&mut self) -> Result<()> {
        self.check_process()?;
        // SAFETY: the id is alive and has no queue pair, which the function insists on.
        let ret = unsafe { sys::rdma_establish(self.raw.as_ptr()) };
        sys::check(ret).map_err(CmError::call(
            "rdma_establish",
            Step::Establish,
            self.peer_addr(),
        ))
    }

    /// Rejects the request that this id stands for, with up to 255 bytes for its program.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    #[doc(alias = "rdma_reject")]
    pub fn reject(&mut self, private_data: &[u8]) -> Result<()> {
        self.check_process()?;
        let len = u8::try_from(private_data.len()).map_err(|_| CmError::PrivateDataTooLong {
            message: "reject",
            asked: private_data.len(),
            limit: usize::from(u8::MAX),
        })?;
        // SAFETY: the id is alive, and the data is `len` bytes that the call copies.
        let ret = unsafe { sys::rdma_reject(self.raw.as_ptr(), private_data.as_ptr().cast(), len) };
        sys::check(ret).map_err(CmError::call("rdma_reject", Step::Reject, self.peer_addr()))
    }

    /// Starts ending the connection. The queue pair stays as it is: its owner drains it and moves it
    /// to the error state. `Disconnected` follows once the peer did the same, or was asked in vain.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`]: there is no connection to end.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&self) -> Result<()> {
        self.check_process()?;
        let call = CmError::call("rdma_disconnect", Step::Disconnect, self.peer_addr());
        if self.verbs().is_none() {
            return Err(call(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        // SAFETY: the id is alive and has a device. Having no queue pair, it is not written to.
        let ret = unsafe { sys::rdma_disconnect(self.raw.as_ptr()) };
        sys::check(ret).map_err(call)
    }

    /// Tells the connection manager that data arrived before the peer's confirmation, which then
    /// counts as confirmed: `Established` follows at once.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`], with `EISCONN` if the connection is established already.
    #[doc(alias = "rdma_notify")]
    pub fn notify_comm_est(&self) -> Result<()> {
        self.check_process()?;
        let event = sys::ibv_event_type::IBV_EVENT_COMM_EST;
        // SAFETY: the id is alive, and only its number is used.
        let ret = unsafe { sys::rdma_notify(self.raw.as_ptr(), event) };
        sys::check(ret).map_err(CmError::call("rdma_notify", Step::Notify, self.peer_addr()))?;
        self.notified.store(true, Ordering::Relaxed);
        Ok(())
    }

    // ----- multicast -----

    /// Starts joining `group`; `MulticastJoin` or `MulticastError` follows.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`], among others if the id has no device yet.
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join_multicast(&mut self, group: SocketAddr, send_only: bool) -> Result<()> {
        self.check_process()?;
        let mask = sys::rdma_cm_join_mc_attr_mask::RDMA_CM_JOIN_MC_ATTR_ADDRESS
            | sys::rdma_cm_join_mc_attr_mask::RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
        let flags = match send_only {
            true => sys::rdma_cm_mc_join_flags::RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER,
            false => sys::rdma_cm_mc_join_flags::RDMA_MC_JOIN_FLAG_FULLMEMBER,
        };
        let mut addr = RawAddr::from(group);
        let mut attr = sys::rdma_cm_join_mc_attr_ex {
            comp_mask: mask.0,
            join_flags: flags.0,
            addr: addr.as_mut_ptr(),
        };
        // SAFETY: the id is alive and ours alone; the attributes and the address outlive the call,
        // which copies them; the context may be null.
        let ret =
            unsafe { sys::rdma_join_multicast_ex(self.raw.as_ptr(), &mut attr, ptr::null_mut()) };
        sys::check(ret).map_err(CmError::call(
            "rdma_join_multicast_ex",
            Step::JoinMulticast,
            Some(group),
        ))
    }

    /// Leaves `group`.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`]: `EADDRNOTAVAIL` if the id has not joined it, and nothing has changed. After any
    /// other errno the group is gone all the same, and no event of this id can be fetched any more
    /// ([`CmError::DeviceRemoved`]).
    #[doc(alias = "rdma_leave_multicast")]
    pub fn leave_multicast(&mut self, group: SocketAddr) -> Result<()> {
        self.check_process()?;
        drop(self.fetched.take()); // if it was forgotten: the call waits for it
        let mut addr = RawAddr::from(group);
        // SAFETY: the id is alive and ours alone, so that no event of it is unacknowledged, for
        // which the call would wait; the address outlives the call.
        let ret = unsafe { sys::rdma_leave_multicast(self.raw.as_ptr(), addr.as_mut_ptr()) };
        sys::check(ret).map_err(|error| {
            self.lost_group |= error.raw_os_error() != Some(libc::EADDRNOTAVAIL);
            CmError::call("rdma_leave_multicast", Step::LeaveMulticast, Some(group))(error)
        })
    }

    // ----- what the id knows -----

    /// The local address, with the port in use; the wildcard before the id is bound.
    #[doc(alias = "rdma_get_local_addr")]
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        // SAFETY: the id is alive; only the place of its local address is computed.
        let addr = unsafe { &raw const (*self.raw.as_ptr()).route.addr.src_addr_union };
        let unknown = || {
            self.peer_addr()
                .unwrap_or_else(|| SocketAddr::from(([0; 4], 0)))
        };
        // SAFETY: `addr` is the union of the local address in this id.
        unsafe { read_addr(addr.cast()) }.unwrap_or_else(|| unspecified_like(unknown()))
    }

    /// The peer's address, once there is one.
    #[doc(alias = "rdma_get_peer_addr")]
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        // SAFETY: the id is alive; only the place of its peer's address is computed.
        let addr = unsafe { &raw const (*self.raw.as_ptr()).route.addr.dst_addr_union };
        // SAFETY: `addr` is the union of the peer's address in this id.
        unsafe { read_addr(addr.cast()) }
    }

    /// The GID of the local port in use, once the id is bound to a device. On RoCE it is the local IP
    /// address in another form.
    #[must_use]
    pub fn local_gid(&self) -> Option<Ipv6Addr> {
        // SAFETY: the id is alive; only the place of its local GID is computed.
        let gid = unsafe { &raw const (*self.raw.as_ptr()).route.addr.addr.ibaddr.sgid };
        // SAFETY: `gid` is the local GID of this id.
        unsafe { read_gid(gid) }
    }

    /// The GID of the peer's port, once its address is resolved.
    #[must_use]
    pub fn peer_gid(&self) -> Option<Ipv6Addr> {
        // SAFETY: the id is alive; only the place of its peer's GID is computed.
        let gid = unsafe { &raw const (*self.raw.as_ptr()).route.addr.addr.ibaddr.dgid };
        // SAFETY: `gid` is the peer's GID of this id.
        unsafe { read_gid(gid) }
    }

    /// The port of the device that the id is bound to, from 1; 0 before that.
    #[must_use]
    pub fn port_num(&self) -> u8 {
        // SAFETY: the id is alive, and nobody writes to it while `&self` is held.
        unsafe { (*self.raw.as_ptr()).port_num }
    }

    /// The name of the device that the id is bound to, or `None` before that.
    #[must_use]
    pub fn device_name(&self) -> Option<String> {
        let verbs = self.verbs()?;
        // SAFETY: `verbs` is the context of this id, which the borrow of `self` keeps alive.
        Some(unsafe { lease::device_name(verbs) })
    }

    /// The device that the id is bound to, for making queue pairs and memory regions on it. It may
    /// outlive the id.
    ///
    /// # Errors
    ///
    /// [`CmError::DeviceRemoved`] if the id has no device or its device is gone, [`CmError::Call`]
    /// if the devices cannot be listed, [`CmError::Forked`] in a child of the process that made the id.
    pub fn context(&self) -> Result<Context> {
        self.check_process()?;
        let verbs = self.verbs().ok_or_else(|| CmError::DeviceRemoved {
            step: Step::Device,
            device: "?".to_owned(),
        })?;
        // SAFETY: `verbs` is the context of this id, which the borrow of `self` keeps alive.
        unsafe { lease::lease_context(verbs) }
    }

    pub(crate) fn verbs(&self) -> Option<NonNull<sys::ibv_context>> {
        // SAFETY: the id is alive, and nobody writes to it while `&self` is held.
        NonNull::new(unsafe { (*self.raw.as_ptr()).verbs })
    }

    // ----- events -----

    /// The next event, or `None` if there is none now.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`]: among others out of memory; the event then stays where it is.
    /// [`CmError::DeviceRemoved`] after a group could not be left: see
    /// [`leave_multicast`](Self::leave_multicast).
    #[doc(alias = "rdma_get_cm_event")]
    pub fn try_event(&mut self) -> Result<Option<CmEvent<'_>>> {
        self.check_process()?;
        drop(self.fetched.take()); // if it was forgotten
        if self.lost_group {
            return Err(CmError::DeviceRemoved {
                step: Step::LeaveMulticast,
                device: self.device_name().unwrap_or_else(|| "?".to_owned()),
            });
        }
        let mut raw = ptr::null_mut();
        sys::clear_errno();
        // SAFETY: the channel is open, and every id whose events arrive on it is alive: this one
        // is, and children of a listener report nothing before they are accepted, which is after
        // they have moved to channels of their own. So is every group with an event: leaving one takes
        // its events away, unless it fails, and then we do not come here.
        let ret = unsafe { sys::rdma_get_cm_event(self.channel.as_raw().as_ptr(), &mut raw) };
        let errno = io::Error::last_os_error().raw_os_error();
        match (sys::check(ret), NonNull::new(raw)) {
            (Ok(()), Some(raw)) => Ok(Some(self.hand_out(raw, errno.unwrap_or(0)))),
            (Ok(()), None) => Ok(None),
            (Err(e), _) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            (Err(e), _) => Err(CmError::call(
                "rdma_get_cm_event",
                Step::Event,
                self.peer_addr(),
            )(e)),
        }
    }
}

impl CmId {
    /// `raw` is an event just fetched, which nobody else has, and `errno` what was left behind then.
    fn hand_out(&mut self, raw: NonNull<sys::rdma_cm_event>, errno: i32) -> CmEvent<'_> {
        let own = self.raw;
        let event = CmEvent {
            raw,
            errno,
            port_space: self.port_space,
            fetched: &mut self.fetched,
        };
        let child = match event.event_type() {
            // SAFETY: the event is not acknowledged before `Fetched` is dropped.
            EventType::ConnectRequest => NonNull::new(unsafe { (*raw.as_ptr()).id }),
            _ => None,
        };
        *event.fetched = Some(Fetched {
            event: raw,
            child: child
                .filter(|child| *child != own)
                .map(|raw| Child(raw, self.birth)),
        });
        event
    }
}

impl AsFd for CmId {
    /// The channel's descriptor: readable when an event waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        drop(self.fetched.take()); // if it was forgotten
        if !self.birth.is_here() {
            return; // it is the parent's
        }
        let doomed = Doomed {
            raw: self.raw,
            channel: Arc::clone(&self.channel),
        };
        if *self.notified.get_mut() {
            doomed.drop_within(Duration::from_millis(200));
        }
    }
}

/// An id on its way out: dropping it destroys it.
struct Doomed {
    raw: NonNull<sys::rdma_cm_id>,
    /// Stays open until the id is gone.
    channel: Arc<EventChannel>,
}

// SAFETY: as for CmId, of which this is what is left.
unsafe impl Send for Doomed {}

impl Doomed {
    /// Drops it in a thread of its own, and waits for that no longer than `bound`.
    ///
    /// If an id was told of its connection by `rdma_notify` and the peer leaves right then, the kernel
    /// (6.1) goes on repeating its answer, and destroying the id waits for the end of that: 69 s.
    fn drop_within(self, bound: Duration) {
        let (done, is_done) = mpsc::sync_channel(1);
        let destroy = move || {
            drop(self);
            // Nobody waits any more if it took too long.
            let _ = done.send(());
        };
        // Without a thread the closure is dropped, and with it the id: here, after all.
        if let Err(e) = thread::Builder::new()
            .name("rdma-cm-destroy".to_owned())
            .spawn(destroy)
        {
            log::warn!("no thread to destroy an id in: {e}");
        }
        if is_done.recv_timeout(bound) == Err(RecvTimeoutError::Timeout) {
            log::warn!(
                "destroying an id takes longer than {bound:?}; it goes on in the background"
            );
        }
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        // SAFETY: the id was ours and is destroyed here only. Its events borrowed it, so all of them are
        // acknowledged and the call does not wait for one. It has no queue pair, and its channel is
        // open, being held.
        let ret = unsafe { sys::rdma_destroy_id(self.raw.as_ptr()) };
        if let Err(e) = sys::check(ret) {
            // The kernel destroys what is left when the channel closes, right after this.
            let fd = self.channel.as_fd().as_raw_fd();
            log::warn!("rdma_destroy_id on channel {fd}: {e}; a little memory of the id is lost");
        }
    }
}

/// Reads one of the two addresses of an id.
///
/// # Safety
///
/// `addr` must be the place of such an address, in an id that is alive and that nobody writes to
/// during the call.
unsafe fn read_addr(addr: *const libc::sockaddr_storage) -> Option<SocketAddr> {
    // SAFETY: the union is as large as a sockaddr_storage, librdmacm zeroed all of it when it made
    // the id, and every bit pattern is a valid one; the caller vouches for the rest.
    RawAddr::from(unsafe { addr.read() }).to_socket_addr()
}

/// Reads one of the two GIDs of an id; all zeros means that it is not known.
///
/// # Safety
///
/// `gid` must be the place of such a GID, in an id that is alive and that nobody writes to during the
/// call.
unsafe fn read_gid(gid: *const sys::ibv_gid) -> Option<Ipv6Addr> {
    // SAFETY: a GID is 16 bytes, valid for every bit pattern and zeroed when the id was made; the
    // caller vouches for the rest.
    let gid = Ipv6Addr::from(unsafe { gid.cast::<[u8; 16]>().read() });
    (!gid.is_unspecified()).then_some(gid)
}

/// A failed call on a local address.
fn local_error(call: &'static str, step: Step, addr: SocketAddr, source: io::Error) -> CmError {
    match source.raw_os_error() {
        Some(libc::EADDRINUSE) => CmError::AddressInUse { addr, source },
        Some(libc::ENODEV | libc::EADDRNOTAVAIL) => CmError::no_device(addr),
        _ => CmError::call(call, step, Some(addr))(source),
    }
}

/// A refused resolution.
fn resolve_error(local: Option<SocketAddr>, peer: SocketAddr, source: io::Error) -> CmError {
    match (source.raw_os_error(), local) {
        (Some(libc::ENETUNREACH | libc::EHOSTUNREACH), _) => CmError::NoRoute { peer, source },
        (Some(libc::EADDRINUSE), Some(addr)) => CmError::AddressInUse { addr, source },
        (Some(libc::ENODEV | libc::EADDRNOTAVAIL), local) => {
            CmError::no_device(local.unwrap_or(peer))
        }
        _ => CmError::call("rdma_resolve_addr", Step::ResolveAddr, Some(peer))(source),
    }
}

/// Whole milliseconds for librdmacm, at least one, rounded up.
fn milliseconds(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_nanos().div_ceil(1_000_000))
        .unwrap_or(c_int::MAX)
        .max(1)
}

/// An event of an id. It is acknowledged when dropped (or, if it is forgotten, with the next event of
/// the id, or with the id).
///
/// It borrows the id, so the id can neither be used nor dropped meanwhile, and the private data
/// lives as long as the event. A connection request that is not taken with
/// [`into_request`](Self::into_request) is rejected.
#[doc(alias = "rdma_cm_event")]
#[derive(Debug)]
pub struct CmEvent<'id> {
    raw: NonNull<sys::rdma_cm_event>,
    /// What librdmacm put into errno while it fetched the event; 0 if nothing.
    errno: i32,
    port_space: PortSpace,
    /// Where the id keeps the event, which is acknowledged when taken from there.
    fetched: &'id mut Option<Fetched>,
}

/// An event that is not acknowledged yet. Dropping it does that.
#[derive(Debug)]
struct Fetched {
    event: NonNull<sys::rdma_cm_event>,
    /// The new id of a connection request, destroyed with the event unless it is taken.
    child: Option<Child>,
}

impl CmEvent<'_> {
    /// What happened.
    #[must_use]
    pub fn event_type(&self) -> EventType {
        // SAFETY: the event is alive until it is acknowledged in `Drop`; its kind is an integer in
        // the bindings, so any number may stand there.
        EventType::from_raw(unsafe { (*self.raw.as_ptr()).event })
    }

    /// Its status as librdmacm gives it: the kernel's, or -1 if librdmacm itself failed to look up what
    /// the event is about.
    #[must_use]
    pub fn raw_status(&self) -> i32 {
        // SAFETY: the event is alive until it is acknowledged in `Drop`.
        unsafe { (*self.raw.as_ptr()).status }
    }

    /// Its status, decoded. Where librdmacm itself failed, it is the errno of that failure.
    #[must_use]
    pub fn status(&self) -> EventStatus {
        match (self.raw_status(), self.errno) {
            (-1, errno @ 1..) => EventStatus::Errno(errno),
            (status, _) => EventStatus::decode(self.event_type(), status),
        }
    }

    /// What the peer's program said, padded with zeros to the limit of the message; empty for
    /// events that carry none.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        let (data, len) = match (self.has_param(), self.port_space.is_datagram()) {
            (false, _) => return &[],
            (true, false) => {
                let conn = self.conn();
                (conn.private_data, conn.private_data_len)
            }
            (true, true) => {
                let ud = self.ud();
                (ud.private_data, ud.private_data_len)
            }
        };
        if data.is_null() || len == 0 {
            return &[];
        }
        // SAFETY: librdmacm copied `len` bytes into the event's own buffer, which lives and stays
        // as it is until the event is acknowledged in `Drop`.
        unsafe { std::slice::from_raw_parts(data.cast::<u8>(), usize::from(len)) }
    }

    /// The parameters that the peer sent, in a connected port space.
    #[must_use]
    pub fn conn_param(&self) -> Option<RequestParam> {
        if !self.has_param() || self.port_space.is_datagram() {
            return None;
        }
        let conn = self.conn();
        Some(RequestParam {
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
            retry_count: conn.retry_count,
            rnr_retry_count: conn.rnr_retry_count,
            flow_control: conn.flow_control != 0,
            srq: conn.srq != 0,
            qp_num: conn.qp_num,
        })
    }

    /// The parameters that an answer to a look-up, or a multicast join, came with, in a datagram
    /// port space.
    #[must_use]
    pub fn ud_param(&self) -> Option<UdParam> {
        let has_param = self.has_param() || self.event_type() == EventType::MulticastJoin;
        (has_param && self.port_space.is_datagram()).then(|| UdParam::new(&self.ud()))
    }

    /// The parameters, for an event of a connected port space.
    fn conn(&self) -> sys::rdma_conn_param {
        // SAFETY: the event is alive until it is acknowledged in `Drop`; only a place is computed.
        let param = unsafe { &raw const (*self.raw.as_ptr()).param };
        // SAFETY: librdmacm zeroed the union and then filled it as this type, if at all; it is made
        // of integers and a pointer, for which zero is valid.
        unsafe { param.cast::<sys::rdma_conn_param>().read() }
    }

    /// The parameters, for an event of a datagram port space.
    fn ud(&self) -> sys::rdma_ud_param {
        // SAFETY: as in `conn`.
        let param = unsafe { &raw const (*self.raw.as_ptr()).param };
        // SAFETY: as in `conn`, with the other type of the union.
        unsafe { param.cast::<sys::rdma_ud_param>().read() }
    }

    /// Whether the union of parameters is filled, with private data of the peer in it.
    ///
    /// The multicast events use the same field for the caller's context, so they are not among them.
    fn has_param(&self) -> bool {
        matches!(
            self.event_type(),
            EventType::ConnectRequest
                | EventType::ConnectResponse
                | EventType::Established
                | EventType::Rejected
                | EventType::Disconnected
        )
    }

    /// The id of a connection request, moved to a channel of its own; `None` for other events.
    ///
    /// The event is acknowledged first, so read what it carries before.
    ///
    /// # Errors
    ///
    /// Those of [`EventChannel::new`], and [`CmError::Call`] if moving fails. The request is then
    /// rejected.
    #[doc(alias = "rdma_migrate_id")]
    pub fn into_request(self) -> Result<Option<CmId>> {
        let Some(child) = self.fetched.as_mut().and_then(|it| it.child.take()) else {
            return Ok(None);
        };
        let port_space = self.port_space;
        drop(self);
        child.migrate(port_space).map(Some)
    }
}

impl Drop for CmEvent<'_> {
    fn drop(&mut self) {
        drop(self.fetched.take());
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        // SAFETY: the event was fetched and is acknowledged here only. Its id keeps `self`, hence is
        // alive, and nothing borrowed from the event is left.
        let ret = unsafe { sys::rdma_ack_cm_event(self.event.as_ptr()) };
        if let Err(e) = sys::check(ret) {
            log::warn!("rdma_ack_cm_event: {e}");
        }
        // Then a child that is left, as a field.
    }
}

/// A copy of an event that is acknowledged already, for the steps: they use the id right after.
pub(crate) struct News {
    pub(crate) event: EventType,
    pub(crate) status: EventStatus,
    pub(crate) param: Option<RequestParam>,
    pub(crate) ud: Option<UdParam>,
    pub(crate) private_data: Vec<u8>,
}

impl CmId {
    /// The next event, copied and acknowledged.
    pub(crate) fn news(&mut self) -> Result<Option<News>> {
        Ok(self.try_event()?.map(|event| News {
            event: event.event_type(),
            status: event.status(),
            param: event.conn_param(),
            ud: event.ud_param(),
            private_data: event.private_data().to_vec(),
        }))
    }
}

/// The id of a request on its listener's channel: on its way to its own, or to be rejected.
///
/// It does not outlive the listener's id, whose channel it uses.
#[derive(Debug)]
struct Child(NonNull<sys::rdma_cm_id>, Birth);

impl Child {
    fn migrate(self, port_space: PortSpace) -> Result<CmId> {
        let channel = Arc::new(EventChannel::new()?);
        // SAFETY: the child is alive and ours alone, both channels are open, and no event of the
        // child is unacknowledged: it reports none before it is accepted.
        let ret = unsafe { sys::rdma_migrate_id(self.0.as_ptr(), channel.as_raw().as_ptr()) };
        sys::check(ret).map_err(CmError::call("rdma_migrate_id", Step::Migrate, None))?;
        let Child(raw, birth) = self;
        mem::forget(self);
        Ok(CmId {
            raw,
            port_space,
            birth,
            notified: AtomicBool::new(false),
            fetched: None,
            lost_group: false,
            channel,
        })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.1.is_here() {
            return; // it is the parent's
        }
        log::debug!("a connection request is dropped, and thereby rejected");
        // SAFETY: the child is alive, ours alone and destroyed here only; it has no event that is
        // not acknowledged. The kernel rejects a request whose id is destroyed.
        let ret = unsafe { sys::rdma_destroy_id(self.0.as_ptr()) };
        if let Err(e) = sys::check(ret) {
            log::warn!("rdma_destroy_id of a request: {e}");
        }
    }
}
