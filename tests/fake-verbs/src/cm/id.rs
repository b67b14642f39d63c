//! Ids: creation, destruction, binding, and the fields C reads.
#![allow(unsafe_code)] // defines C symbols; fills the C struct of an id

use std::net::SocketAddr;
use std::ptr;

use libc::{c_int, c_void, sockaddr, sockaddr_storage};
use rdma_sys::*;

use super::event::{Body, number};
use crate::cbox::{CBox, get, put, zeroed};
use crate::device::PKEY;
use crate::inet;
use crate::world::{Outcome, World, enter, minus_one};

/// Reasons of a reject: the peer's application, or its kernel because the id went.
const BY_CONSUMER: i32 = 28;
const BY_TIMEOUT: i32 = 4;

/// Where an id is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    /// Active: the request is out.
    Connecting,
    /// Passive: a request came in.
    Requested,
    /// Passive: accepted.
    Responded,
    /// Active: the answer came.
    ResponseGot,
    Established,
    DisconnectSent,
    DisconnectGot,
    Disconnected,
    /// Rejected, unreachable, or its address or route was not found.
    Failed,
}

impl State {
    /// Both ends know of each other, and neither has disconnected.
    pub(crate) fn is_connected(self) -> bool {
        matches!(
            self,
            Self::Responded | Self::ResponseGot | Self::Established
        )
    }
}

/// Parameters one side sent, seen from that side.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Params {
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

pub(crate) struct Id {
    memory: CBox<rdma_cm_id>,
    pub(crate) serial: u32,
    pub(crate) channel: usize,
    pub(crate) state: State,
    pub(crate) port_space: u32,
    /// The device once bound or resolved; `holds_device` from when the application sees it.
    pub(crate) device: Option<usize>,
    holds_device: bool,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    pub(crate) peer: Option<usize>,
    /// For an incoming request: the listener it came to.
    pub(crate) listener: Option<usize>,
    /// Ids of requests that were not fetched yet are not the application's.
    pub(crate) visible: bool,
    /// Until it is accepted, the kernel keeps the events of an incoming request to itself.
    pub(crate) accepted: bool,
    /// Private data of the request.
    pub(crate) request: Vec<u8>,
    pub(crate) backlog: usize,
    pub(crate) unacked: u32,
    pub(crate) local: Params,
    pub(crate) remote: Params,
    pub(crate) reuse_address: bool,
    pub(crate) v6_only: bool,
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) groups: Vec<super::multicast::Group>,
    path: Option<CBox<ibv_sa_path_rec>>,
}

impl Id {
    pub(crate) fn ptr(&self) -> *mut rdma_cm_id {
        self.memory.ptr()
    }

    pub(crate) fn is_udp(&self) -> bool {
        self.port_space == rdma_port_space::RDMA_PS_UDP
            || self.port_space == rdma_port_space::RDMA_PS_IPOIB
    }
}

impl World {
    pub(crate) fn id(&mut self, id: *mut rdma_cm_id) -> Outcome<&mut Id> {
        if !self.cm.ids.contains_key(&id.addr()) {
            return self.unknown("cm id");
        }
        self.cm.ids.get_mut(&id.addr()).ok_or(libc::EINVAL)
    }

    pub(crate) fn new_id(
        &mut self,
        channel: usize,
        context: *mut c_void,
        ps: u32,
    ) -> *mut rdma_cm_id {
        // SAFETY: rdma_cm_id holds raw pointers, integers and addresses: zero is valid.
        let mut c: rdma_cm_id = unsafe { zeroed() };
        c.channel = self
            .cm
            .channels
            .get(&channel)
            .map_or(ptr::null_mut(), |c| c.ptr());
        c.context = context;
        c.ps = ps;
        let udp = ps == rdma_port_space::RDMA_PS_UDP || ps == rdma_port_space::RDMA_PS_IPOIB;
        c.qp_type = if udp {
            ibv_qp_type::IBV_QPT_UD
        } else {
            ibv_qp_type::IBV_QPT_RC
        };
        let memory = CBox::new(c);
        let ptr = memory.ptr();
        let id = Id {
            memory,
            serial: self.serial(),
            channel,
            state: State::Idle,
            port_space: ps,
            device: None,
            holds_device: false,
            src: None,
            dst: None,
            peer: None,
            listener: None,
            visible: true,
            accepted: false,
            request: Vec::new(),
            backlog: 0,
            unacked: 0,
            local: Params::default(),
            remote: Params::default(),
            reuse_address: false,
            v6_only: false,
            ack_timeout: None,
            groups: Vec::new(),
            path: None,
        };
        self.cm.ids.insert(ptr.addr(), id);
        ptr
    }

    /// Shows the id's device and addresses in its C struct, as librdmacm does when it hands an event over.
    pub(crate) fn show(&mut self, id: usize) -> Outcome<()> {
        let Some(record) = self.cm.ids.get_mut(&id) else {
            return Ok(());
        };
        let (c, device, src, dst) = (record.ptr(), record.device, record.src, record.dst);
        let take =
            device.filter(|_| !std::mem::replace(&mut record.holds_device, device.is_some()));
        if let Some(src) = src {
            put!(c, route.addr.src_addr_union.src_storage, inet::storage(src));
        }
        if let Some(dst) = dst {
            put!(c, route.addr.dst_addr_union.dst_storage, inet::storage(dst));
        }
        if device.is_some() {
            put!(c, port_num, 1);
            put!(c, route.addr.addr.ibaddr, ib_addr(src, dst));
        }
        if let Some(device) = take {
            let (context, pd) = self.cm_take(device)?;
            put!(c, verbs, context);
            put!(c, pd, pd);
        }
        Ok(())
    }

    /// Shows the path, as after ROUTE_RESOLVED.
    pub(crate) fn show_path(&mut self, id: usize) {
        let Some(record) = self.cm.ids.get_mut(&id) else {
            return;
        };
        let path = CBox::new(path(record.src, record.dst));
        let c = record.ptr();
        put!(c, route.path_rec, path.ptr());
        put!(c, route.num_paths, 1);
        record.path = Some(path);
    }

    fn bind_id(&mut self, id: *mut rdma_cm_id, addr: *const sockaddr) -> Outcome<()> {
        let wanted = inet::read(addr).ok_or(libc::EAFNOSUPPORT)?;
        self.bind_to(id, wanted)?;
        self.show(id.addr())
    }

    pub(crate) fn bind_to(&mut self, id: *mut rdma_cm_id, mut wanted: SocketAddr) -> Outcome<()> {
        let record = self.id(id)?;
        if record.state != State::Idle {
            return Err(libc::EINVAL);
        }
        let (port_space, reuse) = (record.port_space, record.reuse_address);
        let device = match wanted.ip().is_unspecified() {
            true => None,
            false => Some(self.device_with(wanted.ip()).ok_or(libc::ENODEV)?),
        };
        let clash = |other: &Id| {
            other.listener.is_none()
                && other.port_space == port_space
                && !(reuse && other.reuse_address && other.state != State::Listening)
                && other.src.is_some_and(|src| overlap(src, wanted))
        };
        if wanted.port() != 0 && self.cm.ids.values().any(clash) {
            return Err(libc::EADDRINUSE);
        }
        if wanted.port() == 0 {
            wanted.set_port(self.ephemeral_port());
        }
        let record = self.id(id)?;
        record.src = Some(wanted);
        record.device = device;
        record.state = State::Bound;
        Ok(())
    }

    fn destroy_id(&mut self, id: *mut rdma_cm_id) -> Outcome<()> {
        let record = self.id(id)?;
        let unacked = record.unacked;
        if unacked > 0 {
            self.violation(format_args!(
                "{unacked} events of the id were not acked: the C library would wait for ever"
            ));
        }
        if !get!(id, qp).is_null() {
            self.violation("the id still has a queue pair");
        }
        self.drop_id(id.addr());
        Ok(())
    }

    /// Ends what the id is in the middle of, and frees it.
    pub(crate) fn drop_id(&mut self, id: usize) {
        self.part(id);
        self.withdraw_events_of(id);
        let Some(record) = self.cm.ids.remove(&id) else {
            return;
        };
        for other in self
            .cm
            .ids
            .values_mut()
            .filter(|other| other.peer == Some(id))
        {
            other.peer = None;
        }
        if let Some(device) = record.device.filter(|_| record.holds_device) {
            self.cm_release(device);
        }
    }

    /// Tells the peer that this id goes.
    fn part(&mut self, id: usize) {
        let Some(record) = self.cm.ids.get(&id) else {
            return;
        };
        match record.state {
            State::Listening => {
                let unfetched = |other: &&usize| {
                    self.cm.ids[other].listener == Some(id) && !self.cm.ids[other].visible
                };
                let requests: Vec<usize> = self.cm.ids.keys().filter(unfetched).copied().collect();
                requests
                    .into_iter()
                    .for_each(|request| self.drop_id(request));
            }
            State::Connecting | State::Requested => {
                let status = if record.state == State::Requested {
                    BY_CONSUMER
                } else {
                    BY_TIMEOUT
                };
                if let Some(peer) = record.peer.filter(|&peer| self.link_between(id, peer)) {
                    self.fail_id(peer, number::REJECTED, status, Body::rejected(&[]));
                }
            }
            state if state.is_connected() || state == State::DisconnectGot => {
                let _ = self.disconnect(id);
            }
            _ => {}
        }
    }

    /// What the kernel does when resolving fails: one step back.
    pub(crate) fn forget_resolution(&mut self, id: usize, event: u32) {
        let Some(record) = self.cm.ids.get_mut(&id) else {
            return;
        };
        record.state = match (record.state, event) {
            (State::AddressResolved, number::ADDR_ERROR) => State::Bound,
            (State::RouteResolved, number::ROUTE_ERROR) => State::AddressResolved,
            (state, _) => state,
        };
    }

    /// Moves an id that waits for its peer to its end.
    pub(crate) fn fail_id(&mut self, id: usize, event: u32, status: i32, body: Body) {
        let Some(record) = self.cm.ids.get_mut(&id) else {
            return;
        };
        if matches!(
            record.state,
            State::Connecting | State::Requested | State::Responded | State::ResponseGot
        ) {
            record.state = State::Failed;
            let (event, status) = match record.is_udp() {
                true => look_up_failed(event, status),
                false => (event, status),
            };
            self.notify(id, event, status, body);
        }
    }
}

/// A look-up is answered by a message of its own, which the kernel reports as UNREACHABLE with its
/// status: 1 nobody serves the port, 2 rejected.
fn look_up_failed(event: u32, status: i32) -> (u32, i32) {
    match (event, status) {
        (number::REJECTED, 8) => (number::UNREACHABLE, 1),
        (number::REJECTED, _) => (number::UNREACHABLE, 2),
        other => other,
    }
}

fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let same_ip = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port() && same_ip
}

fn ib_addr(src: Option<SocketAddr>, dst: Option<SocketAddr>) -> rdma_ib_addr {
    let gid = |addr: Option<SocketAddr>| ibv_gid {
        raw: addr.map_or([0; 16], |addr| inet::gid(addr.ip())),
    };
    rdma_ib_addr {
        sgid: gid(src),
        dgid: gid(dst),
        pkey: PKEY.to_be(),
    }
}

fn path(src: Option<SocketAddr>, dst: Option<SocketAddr>) -> ibv_sa_path_rec {
    // SAFETY: ibv_sa_path_rec holds integers and GID bytes: zero is valid.
    let mut path: ibv_sa_path_rec = unsafe { zeroed() };
    let addr = ib_addr(src, dst);
    (path.sgid, path.dgid, path.pkey) = (addr.sgid, addr.dgid, addr.pkey);
    path.reversible = 1;
    path.numb_path = 1;
    path.mtu = ibv_mtu::IBV_MTU_4096 as u8;
    path.hop_limit = 64;
    path
}

/// `rdma_create_id(3)`; synchronous ids (without a channel) are not modelled.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space::Type,
) -> c_int {
    minus_one(enter("rdma_create_id", |w| {
        w.cm_channel(channel)?;
        if !matches!(
            ps,
            rdma_port_space::RDMA_PS_TCP
                | rdma_port_space::RDMA_PS_UDP
                | rdma_port_space::RDMA_PS_IPOIB
                | rdma_port_space::RDMA_PS_IB
        ) {
            return Err(libc::EPROTONOSUPPORT);
        }
        let made = w.new_id(channel.addr(), context, ps);
        // SAFETY: C requires `id` to be writable.
        unsafe { id.write(made) };
        Ok(())
    }))
}

/// `rdma_destroy_id(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    minus_one(enter("rdma_destroy_id", |w| w.destroy_id(id)))
}

/// `rdma_bind_addr(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    minus_one(enter("rdma_bind_addr", |w| w.bind_id(id, addr)))
}

/// `rdma_get_src_port(3)`, in network byte order.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> __be16 {
    port_of(&get!(id, route.addr.src_addr_union.src_storage))
}

/// `rdma_get_dst_port(3)`, in network byte order.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> __be16 {
    port_of(&get!(id, route.addr.dst_addr_union.dst_storage))
}

fn port_of(storage: &sockaddr_storage) -> __be16 {
    inet::read((&raw const *storage).cast()).map_or(0, |addr| addr.port().to_be())
}

/// `rdma_get_devices(3)`: the contexts stay open until the list is freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    crate::world::null(enter("rdma_get_devices", |w| {
        let devices: Vec<usize> = w
            .devices
            .iter()
            .filter(|d| !d.removed)
            .map(|d| d.index)
            .collect();
        let mut list = Vec::new();
        for &device in &devices {
            list.push(w.cm_take(device)?.0);
        }
        list.push(ptr::null_mut());
        if !count.is_null() {
            // SAFETY: not null, and C requires it to be writable.
            unsafe { count.write(devices.len() as c_int) };
        }
        let list = Box::into_raw(list.into_boxed_slice()).cast::<*mut ibv_context>();
        w.cm.context_lists.insert(list.addr(), devices);
        Ok(list)
    }))
}

/// `rdma_free_devices(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    let _ = enter("rdma_free_devices", |w| {
        let Some(devices) = w.cm.context_lists.remove(&list.addr()) else {
            return w.unknown("context list");
        };
        devices.iter().for_each(|&device| w.cm_release(device));
        let slice = ptr::slice_from_raw_parts_mut(list, devices.len() + 1);
        // SAFETY: made by Box::into_raw in rdma_get_devices with this length, and removed from the table just now.
        drop(unsafe { Box::from_raw(slice) });
        Ok(())
    });
}
