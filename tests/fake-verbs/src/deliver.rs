//! What the wire and the NICs do: executes posted sends in order, one at a time.

use rdma_sys::{ibv_wc_opcode, ibv_wc_status};

use crate::async_event::number;
use crate::config::{Delivery, SilentPeer};
use crate::cq::{Completion, Cqe};
use crate::device::MTU_BYTES;
use crate::mr::{Sge, Span, Target, access};
use crate::packet;
use crate::qp::{Destination, Op, Qp, RecvWqe, SendWqe, Slot};
use crate::world::World;

use ibv_wc_status::*;
use rdma_sys::ibv_qp_state::*;

const WITH_GRH: u32 = 1;
const WITH_IMM: u32 = 2;
const WITH_INV: u32 = 8;
const MULTICAST_QPN: u32 = 0xff_ffff;

/// What became of a send.
enum Verdict {
    /// Executed; the bytes moved.
    Done(u32),
    /// Failed with this status: the queue pair is broken.
    Failed(u32),
    /// Still in flight.
    Waits(Wait),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// The peer does not answer.
    Silence,
    /// The peer is not ready yet: no answer so far, but not for good.
    NotYet,
    /// The peer has no receive posted.
    NoReceive,
    /// Reads and atomics are not allowed on this connection, and rxe never says so.
    NoReadCredit,
}

/// What arrives at a receive.
struct Arrival<'a> {
    data: &'a [u8],
    opcode: u32,
    imm: Option<u32>,
    invalidated: Option<u32>,
    solicited: bool,
}

impl World {
    /// Delivers all that can be delivered, if the fabric does so by itself.
    pub(crate) fn settle(&mut self) {
        if self.config.delivery == Delivery::Auto {
            while self.step(false) {}
        }
    }

    /// Executes one posted send. With `expired`, ones that wait for a peer fail as if their retries had run out.
    pub(crate) fn step(&mut self, expired: bool) -> bool {
        self.qps_in_order()
            .into_iter()
            .any(|qp| self.step_qp(qp, expired))
    }

    pub(crate) fn step_qp(&mut self, qp: usize, expired: bool) -> bool {
        let Some(record) = self.qps.get(&qp) else {
            return false;
        };
        if record.state != IBV_QPS_RTS || self.dead_devices.contains(&record.device) {
            return false;
        }
        let Some(wqe) = record.sq.iter().find(|wqe| !wqe.done).cloned() else {
            return false;
        };
        let (retries, rnr_retries) = (record.attr.retry_cnt, record.attr.rnr_retry);
        let verdict = match self.execute(qp, &wqe) {
            Verdict::Waits(wait) => self.out_of_patience(wait, retries, rnr_retries, expired),
            verdict => verdict,
        };
        match verdict {
            Verdict::Waits(_) => return false,
            Verdict::Done(len) => self.finish_send(qp, wqe.seq, Ok((wc_opcode(wqe.op), len))),
            Verdict::Failed(status) => {
                self.finish_send(qp, wqe.seq, Err(status));
                self.break_down(qp);
            }
        }
        true
    }

    fn out_of_patience(&self, wait: Wait, retries: u8, rnr_retry: u8, expired: bool) -> Verdict {
        let for_ever = retries == 7 && self.config.seven_retries_are_infinite;
        let gives_up = match wait {
            Wait::Silence | Wait::NotYet if for_ever => false,
            Wait::Silence => expired || self.config.silent_peer == SilentPeer::Fail,
            Wait::NotYet => expired,
            Wait::NoReceive => rnr_retry == 0 || (expired && rnr_retry < 7),
            Wait::NoReadCredit => false,
        };
        match (gives_up, wait) {
            (false, _) => Verdict::Waits(wait),
            (true, Wait::NoReceive) => Verdict::Failed(IBV_WC_RNR_RETRY_EXC_ERR),
            (true, _) => Verdict::Failed(IBV_WC_RETRY_EXC_ERR),
        }
    }

    fn execute(&mut self, qp: usize, wqe: &SendWqe) -> Verdict {
        let Some(record) = self.qps.get(&qp) else {
            return Verdict::Failed(IBV_WC_GENERAL_ERR);
        };
        let (pd, reliable) = (record.pd, record.is_rc());
        match wqe.op {
            Op::LocalInvalidate { rkey } => match self.invalidate(pd, rkey) {
                true => Verdict::Done(0),
                false => Verdict::Failed(IBV_WC_LOC_QP_OP_ERR),
            },
            Op::Bind { mw, rkey, binding } => match self.bind(qp, mw, rkey, binding) {
                true => Verdict::Done(0),
                false => Verdict::Failed(IBV_WC_MW_BIND_ERR),
            },
            Op::Send {
                to: Some(to), imm, ..
            } => self.send_datagram(qp, wqe, to, imm),
            _ if reliable => self.execute_reliable(qp, wqe),
            _ => self.execute_unreliable(qp, wqe),
        }
    }

    fn execute_reliable(&mut self, qp: usize, wqe: &SendWqe) -> Verdict {
        let data = match self.gather(qp, wqe) {
            Ok(data) => data,
            Err(status) => return Verdict::Failed(status),
        };
        match self.peer(qp) {
            Err(wait) => Verdict::Waits(wait),
            Ok(peer) => self.respond(qp, peer, wqe, &data),
        }
    }

    /// An unreliable connection never learns what became of a message.
    fn execute_unreliable(&mut self, qp: usize, wqe: &SendWqe) -> Verdict {
        let data = match self.gather(qp, wqe) {
            Ok(data) => data,
            Err(status) => return Verdict::Failed(status),
        };
        if let Ok(peer) = self.peer(qp) {
            self.respond(qp, peer, wqe, &data);
        }
        Verdict::Done(data.len() as u32)
    }

    /// The bytes a send or write carries; the places a read or atomic fills are checked.
    fn gather(&self, qp: usize, wqe: &SendWqe) -> Result<Vec<u8>, u32> {
        if let Some(data) = &wqe.inline {
            return Ok(data.clone());
        }
        let fills = !matches!(wqe.op, Op::Send { .. } | Op::Write { .. });
        let spans = self
            .spans(qp, &wqe.sges, fills)
            .ok_or(IBV_WC_LOC_PROT_ERR)?;
        if spans.iter().map(|span| span.len).sum::<usize>() > self.config.limits.msg as usize {
            return Err(IBV_WC_LOC_LEN_ERR);
        }
        Ok(if fills {
            Vec::new()
        } else {
            spans.into_iter().flat_map(Span::read).collect()
        })
    }

    fn spans(&self, qp: usize, sges: &[Sge], write: bool) -> Option<Vec<Span>> {
        let pd = self.qps.get(&qp)?.pd;
        let used = sges.iter().filter(|sge| sge.length > 0);
        used.map(|&sge| self.local_span(pd, sge, write)).collect()
    }

    /// The queue pair at the other end, if it answers.
    fn peer(&self, qp: usize) -> Result<usize, Wait> {
        let local = self.qps.get(&qp).ok_or(Wait::Silence)?;
        let addr = *self
            .qp_numbers
            .get(&local.attr.dest_qp_num)
            .ok_or(Wait::Silence)?;
        let peer = self.qps.get(&addr).filter(|peer| peer.kind == local.kind);
        let peer = peer.ok_or(Wait::Silence)?;
        let reachable = self.reachable(local.device, peer.device)
            && self.answers_to(peer.device, local.attr.ah_attr.grh.dgid);
        if !reachable || peer.in_error() {
            return Err(Wait::Silence);
        }
        if !peer.receives() {
            return Err(Wait::NotYet);
        }
        if peer.attr.dest_qp_num != local.num {
            return Err(Wait::Silence);
        }
        Ok(addr)
    }

    pub(crate) fn reachable(&self, from: usize, to: usize) -> bool {
        let alive = |device| !self.dead_devices.contains(&device);
        alive(from) && alive(to) && (from == to || !self.link_cut)
    }

    fn answers_to(&self, device: usize, dgid: rdma_sys::ibv_gid) -> bool {
        let raw = packet::gid_bytes(dgid);
        self.devices[device].gids.iter().any(|gid| gid.raw == raw)
    }

    /// The responder's side of a request from `qp`.
    fn respond(&mut self, qp: usize, peer: usize, wqe: &SendWqe, data: &[u8]) -> Verdict {
        self.communication_is_established(peer);
        let arrival = |imm, invalidated, opcode| Arrival {
            data,
            opcode,
            imm,
            invalidated,
            solicited: wqe.solicited,
        };
        match wqe.op {
            Op::Send {
                imm, invalidate, ..
            } => {
                let arrival = arrival(imm, invalidate, ibv_wc_opcode::IBV_WC_RECV);
                self.receive(qp, peer, &arrival, 0)
            }
            Op::Write { target, imm: None } => self.write(peer, target, data),
            Op::Write { target, imm } => {
                if !self.has_recv(peer) {
                    return Verdict::Waits(Wait::NoReceive);
                }
                match self.write(peer, target, data) {
                    Verdict::Done(len) => {
                        let opcode = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
                        self.receive(qp, peer, &arrival(imm, None, opcode), len)
                    }
                    failed => failed,
                }
            }
            Op::Read { target } => self.read(qp, peer, wqe, target),
            Op::CompareSwap {
                target,
                compare,
                swap,
            } => {
                let update = |old| if old == compare { swap } else { old };
                self.atomic(qp, peer, wqe, target, update)
            }
            Op::FetchAdd { target, add } => {
                self.atomic(qp, peer, wqe, target, |old| old.wrapping_add(add))
            }
            Op::LocalInvalidate { .. } | Op::Bind { .. } => Verdict::Failed(IBV_WC_LOC_QP_OP_ERR),
        }
    }

    fn communication_is_established(&mut self, peer: usize) {
        let wanted = self.config.comm_est_event;
        let Some(record) = self.qps.get_mut(&peer) else {
            return;
        };
        let first = wanted && record.state == IBV_QPS_RTR && !record.comm_est_raised;
        if first {
            record.comm_est_raised = true;
            self.raise_qp(peer, number::COMM_EST);
        }
    }

    /// A message, or the immediate data of a write of `written` bytes, meets a receive.
    fn receive(&mut self, qp: usize, peer: usize, arrival: &Arrival<'_>, written: u32) -> Verdict {
        let Some((recv, slot)) = self.consume_recv(peer) else {
            return Verdict::Waits(Wait::NoReceive);
        };
        let is_write = arrival.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let payload = if is_write { &[][..] } else { arrival.data };
        let placed = self.place(peer, &recv, payload);
        let byte_len = if is_write {
            written
        } else {
            payload.len() as u32
        };
        if let Err((local, remote)) = placed {
            return self.recv_failed(peer, &recv, slot, local, remote);
        }
        if let Some(rkey) = arrival.invalidated {
            let pd = self.qps.get(&peer).map_or(0, |peer| peer.pd);
            if !self.invalidate(pd, rkey) {
                return self.recv_failed(
                    peer,
                    &recv,
                    slot,
                    IBV_WC_LOC_QP_OP_ERR,
                    IBV_WC_REM_OP_ERR,
                );
            }
        }
        let src_qp = self.qps.get(&qp).map_or(0, |qp| qp.num);
        self.received(
            peer,
            &recv,
            slot,
            arrival,
            Completion {
                byte_len,
                src_qp,
                ..Default::default()
            },
        );
        Verdict::Done(arrival.data.len() as u32)
    }

    /// Scatters a message over a receive; the statuses of receiver and sender if it does not go in.
    fn place(&self, peer: usize, recv: &RecvWqe, data: &[u8]) -> Result<(), (u32, u32)> {
        if recv
            .sges
            .iter()
            .map(|sge| u64::from(sge.length))
            .sum::<u64>()
            < data.len() as u64
        {
            return Err((IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR));
        }
        let spans = self
            .spans(peer, &recv.sges, true)
            .ok_or((IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR))?;
        scatter(&spans, data);
        Ok(())
    }

    fn recv_failed(
        &mut self,
        peer: usize,
        recv: &RecvWqe,
        slot: Slot,
        local: u32,
        remote: u32,
    ) -> Verdict {
        let Some((num, cq)) = self.qps.get(&peer).map(|peer| (peer.num, peer.recv_cq)) else {
            return Verdict::Failed(remote);
        };
        let wc = self.failed(recv.wr_id, num, local);
        self.complete(
            cq,
            Cqe {
                wc,
                slot: Some(slot),
                solicited: false,
            },
        );
        self.break_down(peer);
        Verdict::Failed(remote)
    }

    fn received(
        &mut self,
        peer: usize,
        recv: &RecvWqe,
        slot: Slot,
        arrival: &Arrival<'_>,
        rest: Completion,
    ) {
        let Some((num, cq)) = self.qps.get(&peer).map(|peer| (peer.num, peer.recv_cq)) else {
            return;
        };
        let flag = |present: Option<u32>, bit| if present.is_some() { bit } else { 0 };
        let flags = flag(arrival.imm, WITH_IMM) | flag(arrival.invalidated, WITH_INV);
        let wc = Completion {
            wr_id: recv.wr_id,
            opcode: arrival.opcode,
            qp_num: num,
            imm_data: arrival.imm.or(arrival.invalidated).unwrap_or(0),
            wc_flags: rest.wc_flags | flags,
            ..rest
        };
        self.complete(
            cq,
            Cqe {
                wc,
                slot: Some(slot),
                solicited: arrival.solicited,
            },
        );
    }

    /// The responder refuses: its queue pair breaks too.
    fn refuse(&mut self, peer: usize, event: u32, status: u32) -> Verdict {
        if self.qps.get(&peer).is_some_and(Qp::is_rc) {
            if self.config.responder_events {
                self.raise_qp(peer, event);
            }
            self.break_down(peer);
        }
        Verdict::Failed(status)
    }

    /// What the peer's queue pair and region let a remote operation touch.
    fn target(&self, peer: usize, target: Target, len: u64, rights: u32) -> Option<Span> {
        let record = self.qps.get(&peer)?;
        let allowed = record.attr.qp_access_flags & rights == rights;
        allowed.then(|| self.remote_span(record.pd, peer, target, len, rights))?
    }

    fn write(&mut self, peer: usize, target: Target, data: &[u8]) -> Verdict {
        if data.is_empty() {
            return Verdict::Done(0);
        }
        match self.target(peer, target, data.len() as u64, access::REMOTE_WRITE) {
            None => self.refuse(peer, number::QP_ACCESS_ERR, IBV_WC_REM_ACCESS_ERR),
            Some(span) => {
                span.write(data);
                Verdict::Done(data.len() as u32)
            }
        }
    }

    /// Whether both ends allow reads and atomics at all.
    fn read_credit(&self, qp: usize, peer: usize) -> bool {
        let initiator = self
            .qps
            .get(&qp)
            .is_some_and(|qp| qp.attr.max_rd_atomic > 0);
        initiator
            && self
                .qps
                .get(&peer)
                .is_some_and(|peer| peer.attr.max_dest_rd_atomic > 0)
    }

    fn read(&mut self, qp: usize, peer: usize, wqe: &SendWqe, target: Target) -> Verdict {
        if !self.read_credit(qp, peer) {
            return Verdict::Waits(Wait::NoReadCredit);
        }
        let Some(spans) = self.spans(qp, &wqe.sges, true) else {
            return Verdict::Failed(IBV_WC_LOC_PROT_ERR);
        };
        let len: usize = spans.iter().map(|span| span.len).sum();
        if len == 0 {
            return Verdict::Done(0);
        }
        match self.target(peer, target, len as u64, access::REMOTE_READ) {
            None => self.refuse(peer, number::QP_ACCESS_ERR, IBV_WC_REM_ACCESS_ERR),
            Some(span) => {
                scatter(&spans, &span.read());
                Verdict::Done(len as u32)
            }
        }
    }

    fn atomic(
        &mut self,
        qp: usize,
        peer: usize,
        wqe: &SendWqe,
        target: Target,
        update: impl Fn(u64) -> u64,
    ) -> Verdict {
        if !self.read_credit(qp, peer) {
            return Verdict::Waits(Wait::NoReadCredit);
        }
        let Some(spans) = self.spans(qp, &wqe.sges, true) else {
            return Verdict::Failed(IBV_WC_LOC_PROT_ERR);
        };
        if !target.addr.is_multiple_of(8) {
            return self.refuse(peer, number::QP_REQ_ERR, IBV_WC_REM_INV_REQ_ERR);
        }
        match self.target(peer, target, 8, access::REMOTE_ATOMIC) {
            None => self.refuse(peer, number::QP_ACCESS_ERR, IBV_WC_REM_ACCESS_ERR),
            Some(word) => {
                scatter(&spans, &word.update(update).to_ne_bytes());
                Verdict::Done(8)
            }
        }
    }

    /// A datagram is executed once it left: whether and where it arrives is not the sender's to know.
    fn send_datagram(
        &mut self,
        qp: usize,
        wqe: &SendWqe,
        to: Destination,
        imm: Option<u32>,
    ) -> Verdict {
        let data = match self.gather(qp, wqe) {
            Ok(data) if data.len() > MTU_BYTES => return Verdict::Failed(IBV_WC_LOC_LEN_ERR),
            Ok(data) => data,
            Err(status) => return Verdict::Failed(status),
        };
        let Some(local) = self.qps.get(&qp) else {
            return Verdict::Failed(IBV_WC_GENERAL_ERR);
        };
        let (pd, device, num) = (local.pd, local.device, local.num);
        let Some(ah) = self.ahs.get(&to.ah).filter(|ah| ah.pd == pd) else {
            self.violation(
                "a datagram was posted with an address handle that is not live in its PD",
            );
            return Verdict::Failed(IBV_WC_LOC_QP_OP_ERR);
        };
        // A Q_Key with its top bit set stands for the sender's own.
        let qkey = if to.qkey >> 31 == 1 {
            local.attr.qkey
        } else {
            to.qkey
        };
        let sgid = self.devices[device].gids[ah.sgid_index].raw;
        let grh = packet::grh(sgid, ah.dgid, data.len());
        let arrival = Arrival {
            data: &data,
            opcode: ibv_wc_opcode::IBV_WC_RECV,
            imm,
            invalidated: None,
            solicited: wqe.solicited,
        };
        for peer in self.datagram_peers(device, ah.dgid, to.qp_num, qp) {
            self.receive_datagram(peer, qkey, &grh, &arrival, num);
        }
        Verdict::Done(data.len() as u32)
    }

    fn datagram_peers(&self, from: usize, dgid: [u8; 16], num: u32, sender: usize) -> Vec<usize> {
        let multicast = dgid[0] == 0xff && num == MULTICAST_QPN;
        let addressed = |addr: usize, peer: &Qp| match multicast {
            true => addr != sender && peer.groups.contains(&dgid),
            false => {
                peer.num == num && self.devices[peer.device].gids.iter().any(|g| g.raw == dgid)
            }
        };
        let all = self.qps_in_order().into_iter();
        all.filter(|addr| {
            self.qps.get(addr).is_some_and(|peer| {
                peer.is_ud() && addressed(*addr, peer) && self.reachable(from, peer.device)
            })
        })
        .collect()
    }

    fn receive_datagram(
        &mut self,
        peer: usize,
        qkey: u32,
        grh: &[u8],
        arrival: &Arrival<'_>,
        src_qp: u32,
    ) {
        let wanted = self
            .qps
            .get(&peer)
            .is_some_and(|p| p.receives() && p.attr.qkey == qkey);
        if !wanted {
            return;
        }
        let Some((recv, slot)) = self.consume_recv(peer) else {
            return;
        };
        let packet = [grh, arrival.data].concat();
        let byte_len = packet.len() as u32;
        if let Err((local, remote)) = self.place(peer, &recv, &packet) {
            self.recv_failed(peer, &recv, slot, local, remote);
            return;
        }
        let rest = Completion {
            byte_len,
            src_qp,
            wc_flags: WITH_GRH,
            ..Default::default()
        };
        self.received(peer, &recv, slot, arrival, rest);
    }
}

fn scatter(spans: &[Span], mut data: &[u8]) {
    for span in spans {
        data = span.write(data);
    }
}

fn wc_opcode(op: Op) -> u32 {
    match op {
        Op::Send { .. } => ibv_wc_opcode::IBV_WC_SEND,
        Op::Write { .. } => ibv_wc_opcode::IBV_WC_RDMA_WRITE,
        Op::Read { .. } => ibv_wc_opcode::IBV_WC_RDMA_READ,
        Op::CompareSwap { .. } => ibv_wc_opcode::IBV_WC_COMP_SWAP,
        Op::FetchAdd { .. } => ibv_wc_opcode::IBV_WC_FETCH_ADD,
        Op::LocalInvalidate { .. } => ibv_wc_opcode::IBV_WC_LOCAL_INV,
        Op::Bind { .. } => ibv_wc_opcode::IBV_WC_BIND_MW,
    }
}
