//! Event channels, and the events on them.
#![allow(unsafe_code)] // defines C symbols; fills the C struct of an event

use libc::{c_char, c_int};
use rdma_sys::*;

use super::id::Params;
use crate::cbox::{CBox, put, zeroed};
use crate::queue::EventQueue;
use crate::world::{Outcome, World, enter, enter_blocking, minus_one, null, set_errno};

/// `enum rdma_cm_event_type`.
pub(crate) mod number {
    pub(crate) const ADDR_RESOLVED: u32 = 0;
    pub(crate) const ADDR_ERROR: u32 = 1;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const ROUTE_ERROR: u32 = 3;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_RESPONSE: u32 = 5;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const DEVICE_REMOVAL: u32 = 11;
    pub(crate) const MULTICAST_JOIN: u32 = 12;
    pub(crate) const TIMEWAIT_EXIT: u32 = 15;
}

/// Private data arrives padded to these lengths (TCP port space).
pub(crate) mod padded {
    pub(crate) const REQUEST: usize = 56;
    pub(crate) const RESPONSE: usize = 196;
    pub(crate) const REJECT: usize = 148;
    pub(crate) const UDP_REQUEST: usize = 180;
    pub(crate) const UDP_RESPONSE: usize = 136;
}

pub(crate) struct Channel {
    memory: CBox<rdma_event_channel>,
    queue: EventQueue<Pending>,
}

impl Channel {
    pub(crate) fn ptr(&self) -> *mut rdma_event_channel {
        self.memory.ptr()
    }
}

/// An event on its way to the application.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    /// The id it is about; for a request, the new one.
    pub(crate) id: usize,
    /// For a request, the listener, whose ack it waits for.
    pub(crate) listener: Option<usize>,
    pub(crate) number: u32,
    pub(crate) status: i32,
    pub(crate) body: Body,
}

impl Pending {
    /// The id that cannot be destroyed before the ack.
    fn counted_for(&self) -> usize {
        self.listener.unwrap_or(self.id)
    }
}

/// What an event carries.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    Nothing,
    Connection {
        params: Params,
        data: Vec<u8>,
    },
    Datagram {
        qp_num: u32,
        qkey: u32,
        dgid: [u8; 16],
        sgid_index: u8,
        data: Vec<u8>,
    },
}

impl Body {
    pub(crate) fn rejected(data: &[u8]) -> Self {
        Self::Connection {
            params: Params::default(),
            data: pad(data, padded::REJECT),
        }
    }
}

pub(crate) fn pad(data: &[u8], len: usize) -> Vec<u8> {
    let mut padded = data.to_vec();
    padded.resize(len.max(data.len()), 0);
    padded
}

/// An event the application holds; private data dies with it.
pub(crate) struct Got {
    _memory: CBox<rdma_cm_event>,
    _data: CBox<[u8]>,
    counted_for: usize,
}

impl World {
    pub(crate) fn cm_channel(&mut self, channel: *mut rdma_event_channel) -> Outcome<&mut Channel> {
        if !self.cm.channels.contains_key(&channel.addr()) {
            return self.unknown("event channel");
        }
        self.cm
            .channels
            .get_mut(&channel.addr())
            .ok_or(libc::EINVAL)
    }

    /// An event for an id, unless the test's plan loses or holds it.
    pub(crate) fn notify(&mut self, id: usize, number: u32, status: i32, body: Body) {
        let unaccepted = |id: &super::Id| id.listener.is_some() && !id.accepted;
        let secret = self.cm.ids.get(&id).is_some_and(unaccepted);
        if secret && number != number::CONNECT_REQUEST {
            return;
        }
        let listener = match number {
            number::CONNECT_REQUEST => self.cm.ids.get(&id).and_then(|id| id.listener),
            _ => None,
        };
        self.deliver_event(Pending {
            id,
            listener,
            number,
            status,
            body,
        });
    }

    fn deliver_event(&mut self, event: Pending) {
        if let Some(plan) = self
            .cm
            .to_drop
            .iter_mut()
            .find(|p| p.0 == event.number && p.1 > 0)
        {
            plan.1 -= 1;
        } else if self.cm.hold {
            self.cm.held.push_back(event);
        } else {
            self.push_event(event);
        }
    }

    pub(crate) fn push_event(&mut self, event: Pending) {
        let channel = self.cm.ids.get(&event.counted_for()).map(|id| id.channel);
        if let Some(channel) = channel.and_then(|c| self.cm.channels.get_mut(&c)) {
            channel.queue.push(event);
        }
    }

    pub(crate) fn withdraw_events_of(&mut self, id: usize) {
        self.cm
            .held
            .retain(|event| event.id != id && event.listener != Some(id));
        for channel in self.cm.channels.values_mut() {
            channel
                .queue
                .withdraw(|event| event.id == id || event.listener == Some(id));
        }
    }

    /// Moves an id and its unfetched events to another channel.
    fn migrate(&mut self, id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> Outcome<()> {
        self.cm_channel(channel)?;
        let record = self.id(id)?;
        let from = std::mem::replace(&mut record.channel, channel.addr());
        if record.unacked > 0 {
            self.violation("the id has unacked events: the C library would wait for ever");
        }
        put!(id, channel, channel);
        let moved = match self.cm.channels.get_mut(&from) {
            Some(from) => from
                .queue
                .withdraw(|event| event.counted_for() == id.addr()),
            None => Vec::new(),
        };
        moved.into_iter().for_each(|event| self.push_event(event));
        Ok(())
    }

    /// Hands an event over, bringing its id up to date as librdmacm does.
    fn hand_over(&mut self, event: Pending) -> Outcome<*mut rdma_cm_event> {
        if event.number == number::CONNECT_REQUEST {
            self.fetched_request(event.id);
        }
        match event.number {
            number::ADDR_RESOLVED | number::CONNECT_REQUEST => self.show(event.id)?,
            number::ROUTE_RESOLVED => self.show_path(event.id),
            _ => {}
        }
        let data = CBox::bytes(event.body.data());
        let memory = CBox::new(self.c_event(&event, &data));
        let ptr = memory.ptr();
        let counted_for = event.counted_for();
        if let Some(id) = self.cm.ids.get_mut(&counted_for) {
            id.unacked += 1;
        }
        self.cm.got.insert(
            ptr.addr(),
            Got {
                _memory: memory,
                _data: data,
                counted_for,
            },
        );
        Ok(ptr)
    }

    fn c_event(&self, event: &Pending, data: &CBox<[u8]>) -> rdma_cm_event {
        // SAFETY: rdma_cm_event holds raw pointers, integers and GID bytes: zero is valid.
        let mut c: rdma_cm_event = unsafe { zeroed() };
        c.id = self.id_ptr(Some(event.id));
        c.listen_id = self.id_ptr(event.listener);
        c.event = event.number;
        c.status = event.status;
        let data = data.ptr();
        let private_data = match data.len() {
            0 => std::ptr::null(),
            _ => data.cast_const().cast(),
        };
        let private_data_len = data.len() as u8;
        match &event.body {
            Body::Nothing => {}
            Body::Connection { params, .. } => {
                c.param.conn = rdma_conn_param {
                    private_data,
                    private_data_len,
                    // Seen from this end: what the peer may ask for is what this end must answer.
                    responder_resources: params.initiator_depth,
                    initiator_depth: params.responder_resources,
                    flow_control: params.flow_control,
                    retry_count: params.retry_count,
                    rnr_retry_count: params.rnr_retry_count,
                    srq: params.srq,
                    qp_num: params.qp_num,
                };
            }
            Body::Datagram {
                qp_num,
                qkey,
                dgid,
                sgid_index,
                ..
            } => {
                // SAFETY: ibv_ah_attr holds integers and GID bytes: zero is valid.
                let mut ah_attr: ibv_ah_attr = unsafe { zeroed() };
                ah_attr.is_global = 1;
                ah_attr.port_num = 1;
                ah_attr.grh.dgid = ibv_gid { raw: *dgid };
                ah_attr.grh.sgid_index = *sgid_index;
                ah_attr.grh.hop_limit = 64;
                let (qp_num, qkey) = (*qp_num, *qkey);
                c.param.ud = rdma_ud_param {
                    private_data,
                    private_data_len,
                    ah_attr,
                    qp_num,
                    qkey,
                };
            }
        }
        c
    }

    fn id_ptr(&self, id: Option<usize>) -> *mut rdma_cm_id {
        id.and_then(|id| self.cm.ids.get(&id))
            .map_or(std::ptr::null_mut(), |id| id.ptr())
    }

    /// The listener has room for one more request.
    fn fetched_request(&mut self, id: usize) {
        if let Some(id) = self.cm.ids.get_mut(&id) {
            id.visible = true;
        }
    }
}

impl Body {
    fn data(&self) -> &[u8] {
        match self {
            Self::Nothing => &[],
            Self::Connection { data, .. } | Self::Datagram { data, .. } => data,
        }
    }
}

/// `rdma_create_event_channel(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    null(enter("rdma_create_event_channel", |w| {
        let queue = EventQueue::new()?;
        let memory = CBox::new(rdma_event_channel { fd: queue.fd() });
        let ptr = memory.ptr();
        w.cm.channels.insert(ptr.addr(), Channel { memory, queue });
        Ok(ptr)
    }))
}

/// `rdma_destroy_event_channel(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let _ = enter("rdma_destroy_event_channel", |w| {
        w.cm_channel(channel)?;
        let ids =
            w.cm.ids
                .values()
                .filter(|id| id.channel == channel.addr())
                .count();
        if ids > 0 {
            w.violation_unless_planned(format_args!("the channel still has {ids} ids"));
        }
        w.cm.channels.remove(&channel.addr());
        Ok(())
    });
}

/// `rdma_get_cm_event(3)`: blocks unless the channel's descriptor is non-blocking.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    let mut own_failure = None;
    let ret = minus_one(enter_blocking("rdma_get_cm_event", |w| {
        let queue = &mut w.cm_channel(channel)?.queue;
        let Some(mut pending) = queue.pop() else {
            return if queue.is_nonblocking() {
                Err(libc::EAGAIN)
            } else {
                Ok(None)
            };
        };
        own_failure =
            w.cm.failing_query
                .take_if(|(number, _)| *number == pending.number);
        if own_failure.is_some() {
            pending.number += 1; // the error beside it
            pending.status = -1;
        }
        let got = w.hand_over(pending)?;
        // SAFETY: C requires `event` to be writable.
        unsafe { event.write(got) };
        Ok(Some(()))
    }));
    if let Some((_, errno)) = own_failure {
        set_errno(errno);
    }
    ret
}

/// `rdma_ack_cm_event(3)`: frees the event and its private data.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    minus_one(enter("rdma_ack_cm_event", |w| {
        let Some(got) = w.cm.got.remove(&event.addr()) else {
            return w.unknown("cm event");
        };
        if let Some(id) = w.cm.ids.get_mut(&got.counted_for) {
            id.unacked = id.unacked.saturating_sub(1);
        }
        Ok(())
    }))
}

/// `rdma_migrate_id(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    minus_one(enter("rdma_migrate_id", |w| w.migrate(id, channel)))
}

/// `rdma_event_str(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_event_str(event: rdma_cm_event_type::Type) -> *const c_char {
    crate::text::cm_event(event).as_ptr()
}
