//! Connecting, accepting, rejecting and disconnecting.
#![allow(unsafe_code)] // defines C symbols; reads the callers' parameters and private data

use std::net::{IpAddr, SocketAddr};

use libc::{c_int, c_void};
use rdma_sys::*;

use super::event::{Body, number, pad, padded};
use super::id::{Params, State};
use crate::async_event;
use crate::cbox::get;
use crate::inet;
use crate::world::{Outcome, World, enter, minus_one};

const NO_LISTENER: i32 = 8;
const REJECTED_BY_CONSUMER: i32 = 28;
const BACKLOG: usize = 1024;
/// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`: as much as the device has.
const DEVICE_MAXIMUM: u8 = 0xff;
/// The Q_Key of the UDP port space.
const UDP_QKEY: u32 = 0x0123_4567;

impl World {
    fn connect(&mut self, id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> Outcome<()> {
        let most = self.config.limits.rd_atomic;
        let record = self.id(id)?;
        if record.state != State::RouteResolved {
            return Err(libc::EINVAL);
        }
        let udp = record.is_udp();
        let (params, data) = read_params(param, udp, true, most)?;
        let record = self.id(id)?;
        record.local = params;
        record.request = data;
        record.state = State::Connecting;
        self.send_request(id.addr())
    }

    /// Sends the request of an active id; it may get lost.
    fn send_request(&mut self, id: usize) -> Outcome<()> {
        let to = self
            .cm
            .ids
            .get(&id)
            .and_then(|id| id.dst)
            .ok_or(libc::EINVAL)?;
        if self.is_heard(id, to) {
            self.request(id, to)
        } else {
            Ok(())
        }
    }

    /// Requests that got lost, or met a full backlog, are sent again.
    pub(crate) fn resend_requests(&mut self) {
        for id in self.ids_in(|state| state == State::Connecting) {
            if self.cm.ids.get(&id).is_some_and(|id| id.peer.is_none()) {
                let _ = self.send_request(id);
            }
        }
    }

    /// Whether the host at `to` gets the request at all.
    fn is_heard(&self, id: usize, to: SocketAddr) -> bool {
        let from = self.cm.ids.get(&id).and_then(|id| id.device);
        let target = self.device_with(to.ip());
        let (Some(from), Some(target)) = (from, target) else {
            return false;
        };
        self.reachable(from, target) && !self.cm.silent_ports.contains(&to.port())
    }

    fn request(&mut self, id: usize, to: SocketAddr) -> Outcome<()> {
        let Some(listener) = self.listener(id, to) else {
            self.fail_id(id, number::REJECTED, NO_LISTENER, Body::rejected(&[]));
            return Ok(());
        };
        let unfetched = self
            .cm
            .ids
            .values()
            .filter(|other| other.listener == Some(listener) && !other.visible)
            .count();
        // A full backlog is no reason to reject: the kernel forgets the request, so that it may be sent again.
        let full = self
            .cm
            .ids
            .get(&listener)
            .is_some_and(|l| unfetched >= l.backlog);
        if full {
            Ok(())
        } else {
            self.incoming(id, listener, to)
        }
    }

    fn listener(&self, id: usize, to: SocketAddr) -> Option<usize> {
        let port_space = self.cm.ids.get(&id)?.port_space;
        let target = self.device_with(to.ip());
        let hears = |src: SocketAddr, v6_only: bool| {
            let any_v4 = matches!(src.ip(), IpAddr::V4(ip) if ip.is_unspecified());
            let any_v6 = matches!(src.ip(), IpAddr::V6(ip) if ip.is_unspecified());
            let any = (any_v4 && to.is_ipv4()) || (any_v6 && (to.is_ipv6() || !v6_only));
            src.port() == to.port() && (src.ip() == to.ip() || any)
        };
        let listening = self.cm.ids.iter().filter(|(_, other)| {
            other.state == State::Listening
                && other.port_space == port_space
                && other.device.is_none_or(|device| Some(device) == target)
        });
        let mut hearing = listening.filter(|(_, l)| l.src.is_some_and(|src| hears(src, l.v6_only)));
        hearing.next().map(|(&addr, _)| addr)
    }

    /// A new id for a request, and the event that announces it.
    fn incoming(&mut self, id: usize, listener: usize, to: SocketAddr) -> Outcome<()> {
        let active = self.cm.ids.get(&id).ok_or(libc::EINVAL)?;
        let (from, remote, port_space) = (active.src, active.local, active.port_space);
        let data = active.request.clone();
        let at = self.cm.ids.get(&listener).ok_or(libc::EINVAL)?;
        let (channel, context) = (at.channel, get!(at.ptr(), context));
        let device = self.device_with(to.ip());
        let child = self.new_id(channel, context, port_space).addr();
        let record = self.cm.ids.get_mut(&child).ok_or(libc::ENOMEM)?;
        record.state = State::Requested;
        record.visible = false;
        record.listener = Some(listener);
        record.device = device;
        (record.src, record.dst) = (Some(to), from);
        (record.remote, record.peer) = (remote, Some(id));
        if let Some(active) = self.cm.ids.get_mut(&id) {
            active.peer = Some(child);
        }
        let body = match self.cm.ids.get(&child).is_some_and(super::Id::is_udp) {
            false => Body::Connection {
                params: remote,
                data: pad(&data, padded::REQUEST),
            },
            true => self.datagram_body(id, child, pad(&data, padded::UDP_REQUEST)),
        };
        self.notify(child, number::CONNECT_REQUEST, 0, body);
        Ok(())
    }

    /// What a datagram peer needs to send to `of`, seen from `from_id`.
    fn datagram_body(&self, of: usize, seen_from: usize, data: Vec<u8>) -> Body {
        let gid = |id: usize| {
            let addr = self.cm.ids.get(&id).and_then(|id| id.src);
            addr.map(|addr| addr.ip())
        };
        let own = self
            .cm
            .ids
            .get(&seen_from)
            .and_then(|id| id.device)
            .zip(gid(seen_from));
        let sgid_index = own.and_then(|(device, ip)| self.devices[device].gid_of(ip));
        Body::Datagram {
            qp_num: self.cm.ids.get(&of).map_or(0, |id| id.local.qp_num),
            qkey: UDP_QKEY,
            dgid: gid(of).map_or([0; 16], inet::gid),
            sgid_index: sgid_index.map_or(0, |(index, _)| index),
            data,
        }
    }

    fn listen(&mut self, id: *mut rdma_cm_id, backlog: c_int) -> Outcome<()> {
        if self.id(id)?.state == State::Idle {
            self.bind_to(id, SocketAddr::from(([0; 16], 0)))?;
        }
        let record = self.id(id)?;
        if record.state != State::Bound {
            return Err(libc::EINVAL);
        }
        record.backlog = match usize::try_from(backlog) {
            Ok(backlog) if (1..BACKLOG).contains(&backlog) => backlog,
            _ => BACKLOG,
        };
        record.state = State::Listening;
        self.show(id.addr())
    }

    fn accept(&mut self, id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> Outcome<()> {
        let most = self.config.limits.rd_atomic;
        let record = self.id(id)?;
        if record.state != State::Requested {
            return Err(libc::EINVAL);
        }
        let udp = record.is_udp();
        let (params, data) = read_params(param, udp, false, most)?;
        let record = self.id(id)?;
        record.local = params;
        record.accepted = true;
        record.state = if udp {
            State::Established
        } else {
            State::Responded
        };
        let peer = record
            .peer
            .filter(|&peer| self.link_between(id.addr(), peer));
        let Some(peer) = peer else { return Ok(()) };
        let (state, event, body) = match udp {
            false => {
                let body = Body::Connection {
                    params,
                    data: pad(&data, padded::RESPONSE),
                };
                (State::ResponseGot, number::CONNECT_RESPONSE, body)
            }
            true => {
                let data = pad(&data, padded::UDP_RESPONSE);
                let body = self.datagram_body(id.addr(), peer, data);
                (State::Established, number::ESTABLISHED, body)
            }
        };
        if let Some(active) = self.cm.ids.get_mut(&peer) {
            active.remote = params;
            active.state = state;
        }
        self.notify(peer, event, 0, body);
        Ok(())
    }

    pub(crate) fn link_between(&self, a: usize, b: usize) -> bool {
        let device = |id: usize| self.cm.ids.get(&id).and_then(|id| id.device);
        match (device(a), device(b)) {
            (Some(a), Some(b)) => self.reachable(a, b),
            _ => false,
        }
    }

    fn establish(&mut self, id: *mut rdma_cm_id) -> Outcome<()> {
        if !get!(id, qp).is_null() {
            return Err(libc::EINVAL);
        }
        let record = self.id(id)?;
        if record.state != State::ResponseGot {
            return Err(libc::EINVAL);
        }
        record.state = State::Established;
        let peer = record.peer;
        if self.cm.lose_establish > 0 {
            self.cm.lose_establish -= 1;
        } else if let Some(peer) = peer.filter(|&peer| self.link_between(id.addr(), peer)) {
            self.established(peer);
        }
        Ok(())
    }

    /// The passive side learns that the active side is ready.
    fn established(&mut self, id: usize) {
        let Some(record) = self.cm.ids.get_mut(&id) else {
            return;
        };
        if record.state == State::Responded {
            record.state = State::Established;
            self.notify(id, number::ESTABLISHED, 0, Body::Nothing);
        }
    }

    fn communication_established(&mut self, id: *mut rdma_cm_id, event: u32) -> Outcome<()> {
        let state = self.id(id)?.state;
        match (event, state) {
            (event, _) if event != ibv_event_type::IBV_EVENT_COMM_EST as u32 => Err(libc::EINVAL),
            (_, State::Responded) => {
                self.cm.notified = true;
                self.established(id.addr());
                Ok(())
            }
            (_, State::Established) => Err(libc::EISCONN),
            _ => Err(libc::EINVAL),
        }
    }

    fn reject(&mut self, id: *mut rdma_cm_id, data: &[u8]) -> Outcome<()> {
        let record = self.id(id)?;
        if !matches!(record.state, State::Requested | State::ResponseGot) {
            return Err(libc::EINVAL);
        }
        record.state = State::Failed;
        let peer = record
            .peer
            .filter(|&peer| self.link_between(id.addr(), peer));
        if let Some(peer) = peer {
            self.fail_id(
                peer,
                number::REJECTED,
                REJECTED_BY_CONSUMER,
                Body::rejected(data),
            );
        }
        Ok(())
    }

    pub(crate) fn disconnect(&mut self, id: usize) -> Outcome<()> {
        let Some(record) = self.cm.ids.get_mut(&id) else {
            return Err(libc::EINVAL);
        };
        let (state, peer) = (record.state, record.peer);
        record.state = match state {
            State::DisconnectGot => State::Disconnected,
            state if state.is_connected() => State::DisconnectSent,
            _ => return Err(libc::EINVAL),
        };
        let Some(peer) = peer.filter(|&peer| self.link_between(id, peer)) else {
            return Ok(());
        };
        let Some(other) = self.cm.ids.get_mut(&peer) else {
            return Ok(());
        };
        other.state = match (state, other.state) {
            (State::DisconnectGot, State::DisconnectSent) => State::Disconnected,
            (_, other) if other.is_connected() => State::DisconnectGot,
            _ => return Ok(()),
        };
        self.notify(peer, number::DISCONNECTED, 0, Body::Nothing);
        Ok(())
    }

    /// The process behind a device died, and its kernel cleans up: peers learn of it.
    pub(crate) fn cm_kill(&mut self, device: usize) {
        let on_device =
            |w: &Self, id: usize| w.cm.ids.get(&id).and_then(|id| id.device) == Some(device);
        let ids: Vec<(usize, State, Option<usize>)> = self
            .cm
            .ids
            .iter()
            .map(|(&addr, id)| (addr, id.state, id.peer))
            .collect();
        for (id, state, peer) in ids {
            if on_device(self, id) || !peer.is_some_and(|peer| on_device(self, peer)) {
                continue;
            }
            match state {
                State::Connecting => {
                    self.fail_id(
                        id,
                        number::REJECTED,
                        REJECTED_BY_CONSUMER,
                        Body::rejected(&[]),
                    );
                }
                State::Requested => self.fail_id(id, number::REJECTED, 4, Body::rejected(&[])),
                state if state.is_connected() => self.end(id, State::DisconnectGot, 0),
                State::DisconnectSent => self.end(id, State::Disconnected, 0),
                _ => {}
            }
        }
    }

    fn end(&mut self, id: usize, state: State, status: i32) {
        if let Some(id) = self.cm.ids.get_mut(&id) {
            id.state = state;
        }
        self.notify(id, number::DISCONNECTED, status, Body::Nothing);
    }

    /// Requests and responses without an answer give up.
    pub(crate) fn expire_connects(&mut self) {
        for id in self.ids_in(|state| matches!(state, State::Connecting | State::Responded)) {
            let silent = Body::Nothing;
            self.fail_id(id, number::UNREACHABLE, -libc::ETIMEDOUT, silent);
        }
    }

    /// Disconnects without an answer give up.
    pub(crate) fn expire_disconnects(&mut self) {
        for id in self.ids_in(|state| state == State::DisconnectSent) {
            self.end(id, State::Disconnected, -libc::ETIMEDOUT);
        }
    }

    pub(crate) fn expire_timewait(&mut self) {
        for id in self.ids_in(|state| state == State::Disconnected) {
            if let Some(id) = self.cm.ids.get_mut(&id) {
                id.state = State::Failed;
            }
            self.notify(id, number::TIMEWAIT_EXIT, 0, Body::Nothing);
        }
    }

    fn ids_in(&self, wanted: impl Fn(State) -> bool) -> Vec<usize> {
        let mut ids: Vec<(u32, usize)> = self
            .cm
            .ids
            .iter()
            .filter(|(_, id)| wanted(id.state))
            .map(|(&addr, id)| (id.serial, addr))
            .collect();
        ids.sort_unstable();
        ids.into_iter().map(|(_, addr)| addr).collect()
    }

    pub(crate) fn remove_device(&mut self, device: usize) {
        self.devices[device].removed = true;
        let ids: Vec<usize> = self
            .cm
            .ids
            .iter()
            .filter(|(_, id)| id.device == Some(device))
            .map(|(&addr, _)| addr)
            .collect();
        for id in ids {
            self.notify(id, number::DEVICE_REMOVAL, 0, Body::Nothing);
        }
        let contexts: Vec<*mut ibv_context> = self
            .contexts
            .values()
            .filter(|c| c.device == device)
            .map(|c| c.ptr)
            .collect();
        for context in contexts {
            let element = async_event::Element::Port(0);
            self.raise(context, element, async_event::number::DEVICE_FATAL);
        }
    }
}

/// The caller's parameters and private data, checked as librdmacm and the kernel check them.
fn read_params(
    param: *mut rdma_conn_param,
    udp: bool,
    connect: bool,
    most_reads: u8,
) -> Outcome<(Params, Vec<u8>)> {
    if param.is_null() {
        // Without a queue pair on the id nobody would know its number.
        return if udp {
            Ok((Params::default(), Vec::new()))
        } else {
            Err(libc::EINVAL)
        };
    }
    let room = match (udp, connect) {
        (false, true) => padded::REQUEST,
        (false, false) => padded::RESPONSE,
        (true, true) => padded::UDP_REQUEST,
        (true, false) => padded::UDP_RESPONSE,
    };
    let len = usize::from(get!(param, private_data_len));
    let data = read_private_data(get!(param, private_data), len, room)?;
    let params = Params {
        responder_resources: device_limit(get!(param, responder_resources), most_reads)?,
        initiator_depth: device_limit(get!(param, initiator_depth), most_reads)?,
        flow_control: get!(param, flow_control),
        retry_count: get!(param, retry_count) & 7,
        rnr_retry_count: get!(param, rnr_retry_count) & 7,
        srq: get!(param, srq),
        qp_num: get!(param, qp_num),
    };
    Ok((params, data))
}

fn device_limit(asked: u8, most: u8) -> Outcome<u8> {
    match asked {
        DEVICE_MAXIMUM => Ok(most),
        asked if asked > most => Err(libc::EINVAL),
        asked => Ok(asked),
    }
}

fn read_private_data(data: *const c_void, len: usize, room: usize) -> Outcome<Vec<u8>> {
    if len > room {
        return Err(libc::EINVAL);
    }
    if len == 0 || data.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: C requires `len` readable bytes at `data`.
    Ok(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec())
}

/// `rdma_connect(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_connect(
    id: *mut rdma_cm_id,
    conn_param: *mut rdma_conn_param,
) -> c_int {
    minus_one(enter("rdma_connect", |w| w.connect(id, conn_param)))
}

/// `rdma_listen(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    minus_one(enter("rdma_listen", |w| w.listen(id, backlog)))
}

/// `rdma_accept(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_accept(
    id: *mut rdma_cm_id,
    conn_param: *mut rdma_conn_param,
) -> c_int {
    minus_one(enter("rdma_accept", |w| w.accept(id, conn_param)))
}

/// `rdma_reject(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    minus_one(enter("rdma_reject", |w| {
        let data = read_private_data(private_data, private_data_len.into(), padded::REJECT)?;
        w.reject(id, &data)
    }))
}

/// `rdma_establish(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    minus_one(enter("rdma_establish", |w| w.establish(id)))
}

/// `rdma_notify(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    let event = event as u32;
    minus_one(enter("rdma_notify", |w| {
        w.communication_established(id, event)
    }))
}

/// `rdma_disconnect(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    minus_one(enter("rdma_disconnect", |w| {
        w.id(id)?;
        w.disconnect(id.addr())
    }))
}
