//! The connection manager: state, events and how two ids meet.
//!
//! Like the kernel, it has no queue pairs on its ids: the application moves its own by `rdma_init_qp_attr`.

mod addrinfo;
mod connect;
mod event;
mod id;
mod multicast;
mod option;
mod qp_attr;
mod resolve;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rdma_sys::{ibv_context, ibv_pd};

pub(crate) use event::{Body, Pending, rdma_get_cm_event as get_cm_event};
pub(crate) use id::Id;

use crate::world::{Outcome, Table, World};

/// What the kernel's CM knows, and librdmacm's share of it.
#[derive(Default)]
pub(crate) struct Cm {
    pub(crate) channels: Table<event::Channel>,
    pub(crate) ids: Table<Id>,
    /// Events the application got and has not acked, by the address of their C struct.
    pub(crate) got: Table<event::Got>,
    devices: BTreeMap<usize, CmDevice>,
    context_lists: BTreeMap<usize, Vec<usize>>,
    pub(crate) addrinfos: Table<addrinfo::Record>,
    last_port: u16,
    pub(crate) hold: bool,
    pub(crate) held: VecDeque<Pending>,
    /// Kinds of events to lose, each with how often.
    pub(crate) to_drop: Vec<(u32, usize)>,
    /// rdma_notify was called: destroying such an id can take long, so rdma-cm may do it in a thread of its own.
    pub(crate) notified: bool,
    /// How many of the next handshakes lose their last message.
    pub(crate) lose_establish: usize,
    /// Ports whose listeners never see a request.
    pub(crate) silent_ports: BTreeSet<u16>,
    /// The event for which librdmacm's next look-up fails, and the errno.
    pub(crate) failing_query: Option<(u32, i32)>,
}

/// The context and PD librdmacm keeps for a device, while an id or a list needs them.
struct CmDevice {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    references: usize,
}

impl Cm {
    pub(crate) fn context_lists(&self) -> usize {
        self.context_lists.len()
    }
}

impl World {
    /// The device's context for ids and lists; opened with the first reference.
    pub(crate) fn cm_take(&mut self, device: usize) -> Outcome<(*mut ibv_context, *mut ibv_pd)> {
        if let Some(open) = self.cm.devices.get_mut(&device) {
            open.references += 1;
            return Ok((open.context, open.pd));
        }
        let context = self.open(device, true)?;
        let pd = self.alloc_pd(context, true)?;
        self.cm.devices.insert(
            device,
            CmDevice {
                context,
                pd,
                references: 1,
            },
        );
        Ok((context, pd))
    }

    /// Gives a reference back; with the last the context is closed, and whatever still lives on it hangs in the air.
    pub(crate) fn cm_release(&mut self, device: usize) {
        let Some(open) = self.cm.devices.get_mut(&device) else {
            return;
        };
        open.references -= 1;
        if open.references > 0 {
            return;
        }
        let (context, pd) = (open.context, open.pd);
        self.cm.devices.remove(&device);
        if self.dealloc_pd(pd).is_err() || self.close(context).is_err() {
            self.violation_unless_planned(
                "the last id or list of the device went while objects live on its context",
            );
        }
    }

    /// A port nobody has.
    pub(crate) fn ephemeral_port(&mut self) -> u16 {
        self.cm.last_port = self.cm.last_port.max(40_000) + 1;
        self.cm.last_port
    }
}
