//! Completion channels and completion queues.
#![allow(unsafe_code)] // defines C symbols; writes work completions to the caller's array

use std::collections::VecDeque;

use libc::{c_int, c_uint, c_void};
use rdma_sys::*;

use crate::async_event::{Element, number};
use crate::cbox::{CBox, put, zeroed};
use crate::config::ErrorFields;
use crate::qp::Slot;
use crate::queue::EventQueue;
use crate::world::{Outcome, World, enter, enter_acked, enter_blocking, minus_one, null, positive};

pub(crate) struct CompChannel {
    _memory: CBox<ibv_comp_channel>,
    pub(crate) context: *mut ibv_context,
    /// Addresses of the queues that have news.
    events: EventQueue<usize>,
}

/// What the next completion does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    Solicited,
    All,
}

pub(crate) struct Cq {
    memory: CBox<ibv_cq>,
    pub(crate) serial: u32,
    pub(crate) context: *mut ibv_context,
    pub(crate) channel: Option<usize>,
    pub(crate) cq_context: *mut c_void,
    pub(crate) depth: usize,
    pub(crate) entries: VecDeque<Cqe>,
    /// Completions the test holds back.
    pub(crate) held: VecDeque<Cqe>,
    pub(crate) armed: Armed,
    pub(crate) overrun: bool,
    unacked: u32,
    pub(crate) async_unacked: u32,
}

/// One entry of a completion queue: a completion and the slot its polling frees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe {
    pub(crate) wc: Completion,
    pub(crate) slot: Option<Slot>,
    pub(crate) solicited: bool,
}

/// A work completion with `ibv_wc`'s fields, for [`Fabric::inject_completion`](crate::Fabric::inject_completion).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The request's id.
    pub wr_id: u64,
    /// An `ibv_wc_status`.
    pub status: u32,
    /// An `ibv_wc_opcode`.
    pub opcode: u32,
    /// Vendor's code of the error.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data in network byte order, or the invalidated key.
    pub imm_data: u32,
    /// Number of the local queue pair.
    pub qp_num: u32,
    /// Number of the sender's queue pair (UD).
    pub src_qp: u32,
    /// `ibv_wc_flags`.
    pub wc_flags: u32,
}

impl Cq {
    pub(crate) fn ptr(&self) -> *mut ibv_cq {
        self.memory.ptr()
    }
}

impl World {
    fn channel(&mut self, channel: *mut ibv_comp_channel) -> Outcome<&mut CompChannel> {
        if !self.channels.contains_key(&channel.addr()) {
            return self.unknown("completion channel");
        }
        self.channels.get_mut(&channel.addr()).ok_or(libc::EINVAL)
    }

    pub(crate) fn cq(&mut self, cq: *mut ibv_cq) -> Outcome<&mut Cq> {
        if !self.cqs.contains_key(&cq.addr()) {
            return self.unknown("completion queue");
        }
        self.cqs.get_mut(&cq.addr()).ok_or(libc::EINVAL)
    }

    fn create_channel(&mut self, context: *mut ibv_context) -> Outcome<*mut ibv_comp_channel> {
        self.context(context)?;
        let events = EventQueue::new()?;
        let memory = CBox::new(ibv_comp_channel {
            context,
            fd: events.fd(),
            refcnt: 0,
        });
        let ptr = memory.ptr();
        self.channels.insert(
            ptr.addr(),
            CompChannel {
                _memory: memory,
                context,
                events,
            },
        );
        Ok(ptr)
    }

    fn destroy_channel(&mut self, channel: *mut ibv_comp_channel) -> Outcome<()> {
        self.channel(channel)?;
        if self
            .cqs
            .values()
            .any(|cq| cq.channel == Some(channel.addr()))
        {
            self.violation_unless_planned("a completion queue still uses the channel");
            return Err(libc::EBUSY);
        }
        self.channels.remove(&channel.addr());
        Ok(())
    }

    fn create_cq(
        &mut self,
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> Outcome<*mut ibv_cq> {
        let most = self.config.limits.cqe as c_int;
        self.context(context)?;
        if !(1..=most).contains(&cqe) || !(0..2).contains(&vector) {
            return Err(libc::EINVAL);
        }
        if !channel.is_null() && self.channel(channel)?.context != context {
            return Err(libc::EINVAL);
        }
        let depth = rounded(cqe as u32) as usize;
        let serial = self.serial();
        let memory = CBox::new(cq_struct(context, channel, cq_context, serial, depth));
        let ptr = memory.ptr();
        let cq = Cq {
            memory,
            serial,
            context,
            channel: (!channel.is_null()).then(|| channel.addr()),
            cq_context,
            depth,
            entries: VecDeque::new(),
            held: VecDeque::new(),
            armed: Armed::No,
            overrun: false,
            unacked: 0,
            async_unacked: 0,
        };
        self.cqs.insert(ptr.addr(), cq);
        Ok(ptr)
    }

    fn destroy_cq(&mut self, cq: *mut ibv_cq) -> Outcome<()> {
        let Cq {
            unacked,
            async_unacked,
            channel,
            ..
        } = *self.cq(cq)?;
        let users = self.qps.values().filter(|qp| qp.uses_cq(cq.addr())).count();
        if users > 0 {
            self.violation_unless_planned(format_args!("{users} queue pairs still use the CQ"));
            return Err(libc::EBUSY);
        }
        if unacked > 0 {
            self.violation(format_args!(
                "{unacked} completion events were not acked: the C library would wait for ever"
            ));
        }
        if let Some(channel) = channel.and_then(|c| self.channels.get_mut(&c)) {
            channel.events.withdraw(|&event| event == cq.addr());
        }
        self.forget_events_of(Element::Cq(cq.addr()), async_unacked);
        self.cqs.remove(&cq.addr());
        Ok(())
    }

    fn resize_cq(&mut self, cq: *mut ibv_cq, cqe: c_int) -> Outcome<()> {
        let most = self.config.limits.cqe as c_int;
        let record = self.cq(cq)?;
        if !(1..=most).contains(&cqe) || (cqe as usize) < record.entries.len() {
            return Err(libc::EINVAL);
        }
        record.depth = rounded(cqe as u32) as usize;
        put!(cq, cqe, record.depth as c_int);
        Ok(())
    }

    /// Puts a completion into its queue, or aside while completions are held back.
    pub(crate) fn complete(&mut self, cq: usize, cqe: Cqe) {
        let hold = self.hold_completions;
        let Some(queue) = self.cqs.get_mut(&cq) else {
            return;
        };
        if hold {
            queue.held.push_back(cqe);
        } else if queue.entries.len() >= queue.depth {
            self.overrun(cq);
        } else {
            queue.entries.push_back(cqe);
            let urgent = cqe.solicited || cqe.wc.status != ibv_wc_status::IBV_WC_SUCCESS;
            let announce = match queue.armed {
                Armed::No => false,
                Armed::Solicited => urgent,
                Armed::All => true,
            };
            if announce {
                self.announce(cq);
            }
        }
    }

    /// One event for one arming.
    pub(crate) fn announce(&mut self, cq: usize) {
        let Some(queue) = self.cqs.get_mut(&cq) else {
            return;
        };
        queue.armed = Armed::No;
        if let Some(channel) = queue.channel.and_then(|c| self.channels.get_mut(&c)) {
            channel.events.push(cq);
        }
    }

    /// The entry is lost; the application learns of it by an async event, and on hardware by the death of its QPs.
    fn overrun(&mut self, cq: usize) {
        if let Some(queue) = self.cqs.get_mut(&cq) {
            queue.overrun = true;
        }
        self.raise_cq(cq, number::CQ_ERR);
        if !self.config.overrun_is_fatal {
            return;
        }
        for qp in self.qps_in_order() {
            if self
                .qps
                .get(&qp)
                .is_some_and(|q| q.uses_cq(cq) && !q.in_error())
            {
                self.raise_qp(qp, number::QP_FATAL);
                self.break_down(qp);
            }
        }
    }

    pub(crate) fn release_held(&mut self) {
        self.hold_completions = false;
        let held: Vec<(usize, VecDeque<Cqe>)> = self
            .cqs
            .iter_mut()
            .map(|(&addr, cq)| (addr, std::mem::take(&mut cq.held)))
            .collect();
        for (cq, cqes) in held {
            for cqe in cqes {
                self.complete(cq, cqe);
            }
        }
    }

    /// A failed completion with the fields that are not valid then filled as configured.
    pub(crate) fn failed(&self, wr_id: u64, qp_num: u32, status: u32) -> Completion {
        let valid = Completion {
            wr_id,
            qp_num,
            status,
            ..Completion::default()
        };
        match self.config.error_fields {
            ErrorFields::Zero | ErrorFields::Unwritten => valid,
            ErrorFields::Poison => Completion {
                opcode: 0xdead_beef,
                vendor_err: 0x51,
                byte_len: 0xdead_beef,
                imm_data: 0xdead_beef,
                src_qp: 0xdead_beef,
                wc_flags: 0xdead_beef,
                ..valid
            },
        }
    }
}

/// Queues hold 2^n - 1 entries, as rxe's.
pub(crate) fn rounded(asked: u32) -> u32 {
    (asked + 1).next_power_of_two() - 1
}

fn cq_struct(
    context: *mut ibv_context,
    channel: *mut ibv_comp_channel,
    cq_context: *mut c_void,
    handle: u32,
    depth: usize,
) -> ibv_cq {
    // SAFETY: ibv_cq holds raw pointers, integers and pthread objects as bytes: zero is valid.
    let mut cq: ibv_cq = unsafe { zeroed() };
    cq.context = context;
    cq.channel = channel;
    cq.cq_context = cq_context;
    cq.handle = handle;
    cq.cqe = depth as c_int;
    cq
}

/// `ibv_create_comp_channel(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    null(enter("ibv_create_comp_channel", |w| {
        w.create_channel(context)
    }))
}

/// `ibv_destroy_comp_channel(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    positive(enter("ibv_destroy_comp_channel", |w| {
        w.destroy_channel(channel)
    }))
}

/// `ibv_create_cq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    null(enter("ibv_create_cq", |w| {
        w.create_cq(context, cqe, cq_context, channel, comp_vector)
    }))
}

/// `ibv_resize_cq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    positive(enter("ibv_resize_cq", |w| w.resize_cq(cq, cqe)))
}

/// `ibv_destroy_cq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let element = Element::Cq(cq.addr());
    positive(enter_acked("ibv_destroy_cq", element, |w| w.destroy_cq(cq)))
}

/// `ibv_get_cq_event(3)`: blocks unless the channel's descriptor is non-blocking.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    minus_one(enter_blocking("ibv_get_cq_event", |w| {
        let events = &mut w.channel(channel)?.events;
        let Some(got) = events.pop() else {
            return if events.is_nonblocking() {
                Err(libc::EAGAIN)
            } else {
                Ok(None)
            };
        };
        let queue = w.cqs.get_mut(&got).ok_or(libc::EINVAL)?;
        queue.unacked += 1;
        // SAFETY: C requires `cq` to be writable.
        unsafe { cq.write(queue.ptr()) };
        // SAFETY: C requires `cq_context` to be writable.
        unsafe { cq_context.write(queue.cq_context) };
        Ok(Some(()))
    }))
}

/// `ibv_ack_cq_events(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) {
    let _ = enter("ibv_ack_cq_events", |w| {
        let unacked = &mut w.cq(cq)?.unacked;
        let got = *unacked;
        *unacked = got.saturating_sub(nevents);
        if nevents > got {
            w.violation(format_args!("{nevents} events acked, {got} got"));
        }
        Ok(())
    });
}

/// The `poll_cq` operation.
pub(crate) unsafe extern "C" fn poll_cq(
    cq: *mut ibv_cq,
    num_entries: c_int,
    wc: *mut ibv_wc,
) -> c_int {
    let polled = enter("ibv_poll_cq", |w| {
        let mut count = 0;
        while count < num_entries.max(0) {
            let Some(cqe) = w.cq(cq)?.entries.pop_front() else {
                break;
            };
            if let Some(slot) = cqe.slot {
                w.retire(slot);
            }
            let all = w.config.error_fields != ErrorFields::Unwritten;
            // SAFETY: C requires `num_entries` writable completions at `wc`, and count < num_entries.
            unsafe { fill(wc.wrapping_add(count as usize), cqe.wc, all) };
            count += 1;
        }
        Ok(count)
    });
    polled.unwrap_or_else(|errno| -errno)
}

/// Writes the fields that are valid, and of a failed completion, if `all`, the others too. What is not written
/// stays as it was: stale values show in a room that is used again, and Miri sees a read in one that was not
/// initialised.
///
/// # Safety
/// `to` must be writable.
unsafe fn fill(to: *mut ibv_wc, from: Completion, all: bool) {
    let failed = from.status != ibv_wc_status::IBV_WC_SUCCESS;
    let received = from.opcode & ibv_wc_opcode::IBV_WC_RECV != 0;
    let fetched = matches!(
        from.opcode,
        ibv_wc_opcode::IBV_WC_RDMA_READ
            | ibv_wc_opcode::IBV_WC_COMP_SWAP
            | ibv_wc_opcode::IBV_WC_FETCH_ADD
    );
    put!(to, wr_id, from.wr_id);
    put!(to, status, from.status);
    put!(to, qp_num, from.qp_num);
    if failed {
        put!(to, vendor_err, from.vendor_err);
        if !all {
            return;
        }
    }
    put!(to, opcode, from.opcode);
    put!(to, wc_flags, from.wc_flags);
    if failed || received || fetched {
        put!(to, byte_len, from.byte_len);
    }
    if failed || received {
        let imm_data = from.imm_data;
        put!(
            to,
            imm_data_invalidated_rkey_union,
            imm_data_invalidated_rkey_union_t { imm_data }
        );
        put!(to, src_qp, from.src_qp);
        put!(to, pkey_index, 0);
        put!(to, slid, 0);
        put!(to, sl, 0);
        put!(to, dlid_path_bits, 0);
    }
}

/// The `req_notify_cq` operation: arming for all completions is not undone by arming for solicited ones.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    positive(enter("ibv_req_notify_cq", |w| {
        let queue = w.cq(cq)?;
        queue.armed = match (solicited_only != 0, queue.armed) {
            (true, Armed::No | Armed::Solicited) => Armed::Solicited,
            (true, Armed::All) | (false, _) => Armed::All,
        };
        Ok(())
    }))
}

/// The `modify_cq` operation: moderation is accepted and without effect.
pub(crate) unsafe extern "C" fn modify_cq(
    cq: *mut ibv_cq,
    _attr: *mut ibv_modify_cq_attr,
) -> c_int {
    positive(enter("ibv_modify_cq", |w| w.cq(cq).map(|_| ())))
}
