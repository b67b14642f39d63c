//! Queue pairs: creation, the state machine, queues and their slots.
#![allow(unsafe_code)] // defines C symbols; reads and writes the callers' attribute structs

use std::collections::VecDeque;
use std::ptr;

use libc::c_int;
use rdma_sys::*;

use crate::async_event::{Element, number};
use crate::cbox::{CBox, get, put, zeroed};
use crate::config::{Limits, RecvInError, SendSlots};
use crate::cq::{Cqe, rounded};
use crate::device::{GID_TABLE_LEN, Gid};
use crate::mr::{Binding, Sge, Target};
use crate::transition::{Step, mask};
use crate::world::{Outcome, World, enter, enter_acked, null, positive};

use ibv_qp_state::*;

pub(crate) struct Qp {
    memory: CBox<ibv_qp>,
    pub(crate) serial: u32,
    pub(crate) num: u32,
    pub(crate) context: *mut ibv_context,
    pub(crate) device: usize,
    pub(crate) pd: usize,
    pub(crate) kind: u32,
    pub(crate) state: u32,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: usize,
    pub(crate) srq: Option<usize>,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signal_all: bool,
    /// Posted sends, until their slot is free again.
    pub(crate) sq: VecDeque<SendWqe>,
    next_seq: u64,
    pub(crate) rq: RecvQueue,
    /// Everything set by modify, as queried.
    pub(crate) attr: ibv_qp_attr,
    pub(crate) groups: Vec<[u8; 16]>,
    last_wqe_raised: bool,
    pub(crate) comm_est_raised: bool,
    pub(crate) async_unacked: u32,
}

/// One posted send, its lists copied out of the caller's memory.
#[derive(Clone, Debug)]
pub(crate) struct SendWqe {
    pub(crate) seq: u64,
    pub(crate) wr_id: u64,
    pub(crate) op: Op,
    pub(crate) sges: Vec<Sge>,
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) done: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Send {
        imm: Option<u32>,
        invalidate: Option<u32>,
        to: Option<Destination>,
    },
    Write {
        target: Target,
        imm: Option<u32>,
    },
    Read {
        target: Target,
    },
    CompareSwap {
        target: Target,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        target: Target,
        add: u64,
    },
    LocalInvalidate {
        rkey: u32,
    },
    Bind {
        mw: usize,
        rkey: u32,
        binding: Binding,
    },
}

impl Op {
    pub(crate) fn is_misaligned(&self) -> bool {
        match self {
            Self::CompareSwap { target, .. } | Self::FetchAdd { target, .. } => {
                target.addr % 8 != 0
            }
            _ => false,
        }
    }
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Destination {
    pub(crate) ah: usize,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
}

/// Posted receives of a queue pair or of a shared receive queue.
pub(crate) struct RecvQueue {
    owner: u32,
    pub(crate) depth: usize,
    pub(crate) max_sge: usize,
    next_seq: u64,
    pub(crate) posted: VecDeque<RecvWqe>,
    /// Filled or flushed, with a completion that was not polled yet.
    pub(crate) unpolled: Vec<RecvWqe>,
}

#[derive(Clone, Debug)]
pub(crate) struct RecvWqe {
    pub(crate) seq: u64,
    pub(crate) wr_id: u64,
    pub(crate) sges: Vec<Sge>,
}

/// The queue slot a completion stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// Serial number of the queue pair or shared receive queue.
    pub(crate) owner: u32,
    pub(crate) send: bool,
    pub(crate) seq: u64,
}

impl RecvQueue {
    pub(crate) fn new(owner: u32, depth: u32, max_sge: u32) -> Self {
        Self {
            owner,
            depth: depth as usize,
            max_sge: max_sge as usize,
            next_seq: 0,
            posted: VecDeque::new(),
            unpolled: Vec::new(),
        }
    }

    pub(crate) fn post(&mut self, wr_id: u64, sges: Vec<Sge>) -> Outcome<()> {
        if sges.len() > self.max_sge {
            return Err(libc::EINVAL);
        }
        if self.posted.len() + self.unpolled.len() >= self.depth {
            return Err(libc::ENOMEM);
        }
        self.posted.push_back(RecvWqe {
            seq: self.next_seq,
            wr_id,
            sges,
        });
        self.next_seq += 1;
        Ok(())
    }

    /// Takes the oldest receive; its slot stays in use until its completion is polled.
    pub(crate) fn consume(&mut self) -> Option<(RecvWqe, Slot)> {
        let wqe = self.posted.pop_front()?;
        let slot = Slot {
            owner: self.owner,
            send: false,
            seq: wqe.seq,
        };
        self.unpolled.push(wqe.clone());
        Some((wqe, slot))
    }

    fn retire(&mut self, seq: u64) {
        self.unpolled.retain(|wqe| wqe.seq != seq);
    }

    fn clear(&mut self) {
        self.posted.clear();
        self.unpolled.clear();
    }

    fn uses(&self, lkey: u32) -> Option<u64> {
        let wqe = self
            .posted
            .iter()
            .chain(&self.unpolled)
            .find(|wqe| uses(&wqe.sges, lkey))?;
        Some(wqe.wr_id)
    }
}

fn uses(sges: &[Sge], lkey: u32) -> bool {
    sges.iter().any(|sge| sge.lkey == lkey)
}

impl Qp {
    pub(crate) fn ptr(&self) -> *mut ibv_qp {
        self.memory.ptr()
    }

    pub(crate) fn uses_cq(&self, cq: usize) -> bool {
        self.send_cq == cq || self.recv_cq == cq
    }

    pub(crate) fn in_error(&self) -> bool {
        self.state == IBV_QPS_ERR
    }

    pub(crate) fn is_rc(&self) -> bool {
        self.kind == ibv_qp_type::IBV_QPT_RC
    }

    pub(crate) fn is_ud(&self) -> bool {
        self.kind == ibv_qp_type::IBV_QPT_UD
    }

    /// Whether packets for the queue pair are taken in.
    pub(crate) fn receives(&self) -> bool {
        matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD)
    }

    pub(crate) fn push_send(&mut self, mut wqe: SendWqe) {
        wqe.seq = self.next_seq;
        self.next_seq += 1;
        self.sq.push_back(wqe);
    }

    pub(crate) fn sq_full(&self, slots: SendSlots) -> bool {
        let used = match slots {
            SendSlots::FreedByPoll => self.sq.len(),
            SendSlots::FreedByExecution => self.sq.iter().filter(|wqe| !wqe.done).count(),
        };
        used >= self.cap.max_send_wr as usize
    }

    fn slot(&self, seq: u64) -> Slot {
        Slot {
            owner: self.serial,
            send: true,
            seq,
        }
    }
}

impl World {
    pub(crate) fn qp(&mut self, qp: *mut ibv_qp) -> Outcome<&mut Qp> {
        if !self.qps.contains_key(&qp.addr()) {
            return self.unknown("queue pair");
        }
        self.qps.get_mut(&qp.addr()).ok_or(libc::EINVAL)
    }

    /// Oldest first, so that runs are repeatable.
    pub(crate) fn qps_in_order(&self) -> Vec<usize> {
        self.qp_numbers.values().copied().collect()
    }

    fn create_qp(&mut self, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Outcome<*mut ibv_qp> {
        let context = self.pd(pd)?.context;
        let device = self.context(context)?.device;
        let (send_cq, recv_cq, srq) = (get!(init, send_cq), get!(init, recv_cq), get!(init, srq));
        for cq in [send_cq, recv_cq] {
            if cq.is_null() || self.cq(cq)?.context != context {
                return Err(libc::EINVAL);
            }
        }
        if !srq.is_null() && self.srq(srq)?.context != context {
            return Err(libc::EINVAL);
        }
        let kind = get!(init, qp_type);
        if !(ibv_qp_type::IBV_QPT_RC..=ibv_qp_type::IBV_QPT_UD).contains(&kind) {
            return Err(libc::EOPNOTSUPP);
        }
        let cap = granted(get!(init, cap), srq.is_null(), self.config.limits)?;
        put!(init, cap, cap);
        let (serial, num) = (self.serial(), self.qp_num());
        // SAFETY: ibv_qp holds raw pointers, integers and pthread objects as bytes: zero is valid.
        let mut c: ibv_qp = unsafe { zeroed() };
        (c.context, c.pd, c.qp_context) = (context, pd, get!(init, qp_context));
        (c.send_cq, c.recv_cq, c.srq) = (send_cq, recv_cq, srq);
        (c.handle, c.qp_num, c.qp_type) = (serial, num, kind);
        let memory = CBox::new(c);
        let ptr = memory.ptr();
        let qp = Qp {
            memory,
            serial,
            num,
            context,
            device,
            pd: pd.addr(),
            kind,
            state: IBV_QPS_RESET,
            send_cq: send_cq.addr(),
            recv_cq: recv_cq.addr(),
            srq: (!srq.is_null()).then(|| srq.addr()),
            cap,
            signal_all: get!(init, sq_sig_all) != 0,
            sq: VecDeque::new(),
            next_seq: 0,
            rq: RecvQueue::new(serial, cap.max_recv_wr, cap.max_recv_sge),
            // SAFETY: ibv_qp_attr holds integers and GID bytes: zero is valid.
            attr: unsafe { zeroed() },
            groups: Vec::new(),
            last_wqe_raised: false,
            comm_est_raised: false,
            async_unacked: 0,
        };
        self.qps.insert(ptr.addr(), qp);
        self.qp_numbers.insert(num, ptr.addr());
        Ok(ptr)
    }

    fn modify_qp(&mut self, qp: *mut ibv_qp, attr: *mut ibv_qp_attr, bits: u32) -> Outcome<()> {
        let record = self.qp(qp)?;
        let from = match bits & mask::CUR_STATE != 0 {
            true => get!(attr, cur_qp_state),
            false => record.state,
        };
        if from != record.state {
            return Err(libc::EINVAL);
        }
        let to = match bits & mask::STATE != 0 {
            true => get!(attr, qp_state),
            false => from,
        };
        if !(Step {
            kind: record.kind,
            from,
            to,
        })
        .allows(bits)
        {
            return Err(libc::EINVAL);
        }
        let device = record.device;
        check_values(
            attr,
            bits,
            &self.devices[device].gids,
            self.config.limits.rd_atomic,
        )?;
        let record = self.qp(qp)?;
        store(&mut record.attr, attr, bits);
        record.state = to;
        put!(qp, state, to);
        self.entered(qp.addr(), from, to, get!(attr, en_sqd_async_notify) != 0);
        Ok(())
    }

    fn entered(&mut self, qp: usize, from: u32, to: u32, notify_drained: bool) {
        match to {
            IBV_QPS_RESET => self.reset(qp),
            IBV_QPS_ERR if from != IBV_QPS_ERR => self.flush(qp),
            // Work is executed at once, so the queue is drained already.
            IBV_QPS_SQD if from == IBV_QPS_RTS && notify_drained => {
                self.raise_qp(qp, number::SQ_DRAINED);
            }
            _ => {}
        }
    }

    fn reset(&mut self, qp: usize) {
        if let Some(qp) = self.qps.get_mut(&qp) {
            qp.sq.clear();
            qp.rq.clear();
            qp.last_wqe_raised = false;
            qp.comm_est_raised = false;
        }
    }

    /// As the NIC does it, behind the application's back.
    pub(crate) fn break_down(&mut self, qp: usize) {
        let Some(record) = self.qps.get_mut(&qp) else {
            return;
        };
        if !record.in_error() {
            record.state = IBV_QPS_ERR;
            self.flush(qp);
        }
    }

    /// Completes all that is posted with WR_FLUSH_ERR, receives and sends taking turns.
    pub(crate) fn flush(&mut self, qp: usize) {
        while self.flush_recv(qp) | self.flush_send(qp) {}
        let Some(record) = self.qps.get_mut(&qp) else {
            return;
        };
        let first = !std::mem::replace(&mut record.last_wqe_raised, true);
        if record.srq.is_some() && first && self.config.last_wqe_event {
            self.raise_qp(qp, number::QP_LAST_WQE_REACHED);
        }
    }

    fn flush_recv(&mut self, qp: usize) -> bool {
        let Some(record) = self.qps.get_mut(&qp) else {
            return false;
        };
        let (num, cq) = (record.num, record.recv_cq);
        let Some((wqe, slot)) = record.rq.consume() else {
            return false;
        };
        let wc = self.failed(wqe.wr_id, num, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        self.complete(
            cq,
            Cqe {
                wc,
                slot: Some(slot),
                solicited: false,
            },
        );
        true
    }

    fn flush_send(&mut self, qp: usize) -> bool {
        let Some(record) = self.qps.get_mut(&qp) else {
            return false;
        };
        let Some(seq) = record.sq.iter().find(|wqe| !wqe.done).map(|wqe| wqe.seq) else {
            return false;
        };
        self.finish_send(qp, seq, Err(ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
        true
    }

    /// A receive that was posted in the error state.
    pub(crate) fn flush_late_recv(&mut self, qp: usize) {
        if self.config.recv_in_error == RecvInError::Flush {
            while self.flush_recv(qp) {}
        }
    }

    /// Marks a send as executed and completes it, if it is signaled or failed.
    pub(crate) fn finish_send(&mut self, qp: usize, seq: u64, outcome: Result<(u32, u32), u32>) {
        let Some(record) = self.qps.get_mut(&qp) else {
            return;
        };
        let Some(wqe) = record.sq.iter_mut().find(|wqe| wqe.seq == seq) else {
            return;
        };
        wqe.done = true;
        let (wr_id, signaled) = (wqe.wr_id, wqe.signaled);
        let with_imm = matches!(
            wqe.op,
            Op::Send { imm: Some(_), .. } | Op::Write { imm: Some(_), .. }
        );
        let (num, cq, slot) = (record.num, record.send_cq, record.slot(seq));
        let wc = match outcome {
            Err(status) => self.failed(wr_id, num, status),
            Ok((opcode, byte_len)) => crate::cq::Completion {
                wr_id,
                opcode,
                byte_len,
                qp_num: num,
                // The flag alone, as on hardware.
                wc_flags: if with_imm {
                    ibv_wc_flags::IBV_WC_WITH_IMM.0
                } else {
                    0
                },
                ..Default::default()
            },
        };
        if signaled || outcome.is_err() {
            self.complete(
                cq,
                Cqe {
                    wc,
                    slot: Some(slot),
                    solicited: false,
                },
            );
        } else if self.config.send_slots == SendSlots::FreedByExecution {
            record_drop_done_front(self.qps.get_mut(&qp));
        }
    }

    /// The completion was polled: its slot is free, and with a send's the slots of all earlier ones.
    pub(crate) fn retire(&mut self, slot: Slot) {
        if let Some(qp) = self.qps.values_mut().find(|qp| qp.serial == slot.owner) {
            if slot.send {
                qp.sq.retain(|wqe| wqe.seq > slot.seq);
            } else {
                qp.rq.retire(slot.seq);
            }
        } else if let Some(srq) = self.srqs.values_mut().find(|srq| srq.serial == slot.owner) {
            srq.rq.retire(slot.seq);
        }
    }

    /// The id of a request that uses the key and whose slot is not free yet.
    pub(crate) fn posted_with(&self, lkey: u32) -> Option<u64> {
        let in_qp = |qp: &Qp| {
            let send = qp
                .sq
                .iter()
                .find(|w| w.inline.is_none() && uses(&w.sges, lkey));
            send.map(|wqe| wqe.wr_id).or_else(|| qp.rq.uses(lkey))
        };
        let of_qps = self.qps.values().find_map(in_qp);
        of_qps.or_else(|| self.srqs.values().find_map(|srq| srq.rq.uses(lkey)))
    }

    fn destroy_qp(&mut self, qp: *mut ibv_qp) -> Outcome<()> {
        let record = self.qp(qp)?;
        if !record.groups.is_empty() {
            self.violation_unless_planned("the queue pair is still attached to a multicast group");
            return Err(libc::EBUSY);
        }
        let (unacked, num) = (record.async_unacked, record.num);
        self.forget_events_of(Element::Qp(qp.addr()), unacked);
        self.qp_numbers.remove(&num);
        self.qps.remove(&qp.addr());
        Ok(())
    }
}

/// Slots that polling will never free, where the device does not need polling.
fn record_drop_done_front(qp: Option<&mut Qp>) {
    if let Some(qp) = qp {
        while qp.sq.front().is_some_and(|wqe| wqe.done && !wqe.signaled) {
            qp.sq.pop_front();
        }
    }
}

/// Capacities as rxe grants them: queues of 2^n - 1, and inline room and entries share one area.
fn granted(asked: ibv_qp_cap, own_rq: bool, limits: Limits) -> Outcome<ibv_qp_cap> {
    let too_much = asked.max_send_wr > limits.wr
        || asked.max_send_sge > limits.sge
        || asked.max_inline_data > limits.inline
        || (own_rq && (asked.max_recv_wr > limits.wr || asked.max_recv_sge > limits.sge));
    if too_much {
        return Err(libc::EINVAL);
    }
    let max_send_sge = asked.max_send_sge.max(asked.max_inline_data.div_ceil(16));
    Ok(ibv_qp_cap {
        max_send_wr: rounded(asked.max_send_wr),
        max_recv_wr: if own_rq {
            rounded(asked.max_recv_wr)
        } else {
            0
        },
        max_send_sge,
        max_recv_sge: if own_rq { asked.max_recv_sge } else { 0 },
        max_inline_data: (max_send_sge * 16).max(asked.max_inline_data),
    })
}

fn check_values(attr: *mut ibv_qp_attr, bits: u32, gids: &[Gid], max_reads: u8) -> Outcome<()> {
    let has = |bit| bits & bit != 0;
    let av = get!(attr, ah_attr);
    let sgid = av.grh.sgid_index as usize;
    let mtu = get!(attr, path_mtu);
    let wrong = (has(mask::PORT) && get!(attr, port_num) != 1)
        || (has(mask::PKEY_INDEX) && get!(attr, pkey_index) != 0)
        || (has(mask::AV) && (av.is_global == 0 || av.port_num > 1))
        || (has(mask::AV) && (sgid >= GID_TABLE_LEN || gids.get(sgid).is_none()))
        || (has(mask::PATH_MTU) && !(1..=5).contains(&mtu))
        || (has(mask::TIMEOUT) && get!(attr, timeout) > 31)
        || (has(mask::RETRY_CNT) && get!(attr, retry_cnt) > 7)
        || (has(mask::RNR_RETRY) && get!(attr, rnr_retry) > 7)
        || (has(mask::MIN_RNR_TIMER) && get!(attr, min_rnr_timer) > 31)
        || (has(mask::MAX_QP_RD_ATOMIC) && get!(attr, max_rd_atomic) > max_reads)
        || (has(mask::MAX_DEST_RD_ATOMIC) && get!(attr, max_dest_rd_atomic) > max_reads);
    if wrong { Err(libc::EINVAL) } else { Ok(()) }
}

/// Copies the fields the mask names.
fn store(to: &mut ibv_qp_attr, from: *mut ibv_qp_attr, bits: u32) {
    macro_rules! take {
        ($($bit:ident: $($field:ident),+;)+) => {
            $(if bits & mask::$bit != 0 { $(to.$field = get!(from, $field);)+ })+
        };
    }
    take! {
        ACCESS_FLAGS: qp_access_flags;
        PKEY_INDEX: pkey_index;
        PORT: port_num;
        QKEY: qkey;
        AV: ah_attr;
        PATH_MTU: path_mtu;
        TIMEOUT: timeout;
        RETRY_CNT: retry_cnt;
        RNR_RETRY: rnr_retry;
        RQ_PSN: rq_psn;
        MAX_QP_RD_ATOMIC: max_rd_atomic;
        MIN_RNR_TIMER: min_rnr_timer;
        SQ_PSN: sq_psn;
        MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        DEST_QPN: dest_qp_num;
        ALT_PATH: alt_ah_attr, alt_port_num, alt_pkey_index, alt_timeout;
        PATH_MIG_STATE: path_mig_state;
        RATE_LIMIT: rate_limit;
        EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
    }
}

/// `ibv_create_qp(3)`: the granted capacities are written back.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    null(enter("ibv_create_qp", |w| w.create_qp(pd, qp_init_attr)))
}

/// `ibv_modify_qp(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    attr_mask: c_int,
) -> c_int {
    positive(enter("ibv_modify_qp", |w| {
        w.modify_qp(qp, attr, attr_mask as u32)
    }))
}

/// `ibv_query_qp(3)`: all attributes, whatever the mask.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    positive(enter("ibv_query_qp", |w| {
        let record = w.qp(qp)?;
        put!(qp, state, record.state);
        (record.attr.qp_state, record.attr.cur_qp_state) = (record.state, record.state);
        record.attr.cap = record.cap;
        // SAFETY: C requires `attr` to be writable; ibv_qp_attr is plain data, which may be copied.
        unsafe { ptr::copy_nonoverlapping(&raw const record.attr, attr, 1) };
        let init = init_attributes(record);
        // SAFETY: C requires `init_attr` to be writable.
        unsafe { init_attr.write(init) };
        Ok(())
    }))
}

fn init_attributes(qp: &Qp) -> ibv_qp_init_attr {
    let c = qp.ptr();
    ibv_qp_init_attr {
        qp_context: get!(c, qp_context),
        send_cq: get!(c, send_cq),
        recv_cq: get!(c, recv_cq),
        srq: get!(c, srq),
        cap: qp.cap,
        qp_type: qp.kind,
        sq_sig_all: qp.signal_all.into(),
    }
}

/// `ibv_destroy_qp(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let element = Element::Qp(qp.addr());
    positive(enter_acked("ibv_destroy_qp", element, |w| w.destroy_qp(qp)))
}

/// `ibv_query_qp_data_in_order(3)`: nothing is promised.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode::Type,
    _flags: u32,
) -> c_int {
    0
}

/// `ibv_qp_to_qp_ex(3)`: the fake has no extended queue pairs.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(_qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    ptr::null_mut()
}

/// `ibv_set_ece(3)`: not supported.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    libc::EOPNOTSUPP
}

/// `ibv_query_ece(3)`: not supported.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    libc::EOPNOTSUPP
}
