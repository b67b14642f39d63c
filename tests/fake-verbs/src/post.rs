//! Posting: the context's operations, and reading the callers' chains.
#![allow(unsafe_code)] // operations called through C function pointers; reads the caller's work requests

use std::ptr;

use libc::c_int;
use rdma_sys::*;

use crate::cbox::get;
use crate::config::{Config, EarlySend, Misaligned};
use crate::mr::{Sge, Target, binding, read_sge};
use crate::qp::{Destination, Op, Qp, SendWqe};
use crate::world::{Outcome, World, enter, positive};

use ibv_qp_state::*;
use ibv_wr_opcode::*;

const FLAG_SIGNALED: u32 = 2;
const FLAG_SOLICITED: u32 = 4;
const FLAG_INLINE: u32 = 8;

impl World {
    fn post_one_send(&mut self, qp: *mut ibv_qp, wr: *mut ibv_send_wr) -> Outcome<()> {
        let Config {
            send_slots: slots,
            early_send,
            misaligned,
            ..
        } = self.config;
        let record = self.qp(qp)?;
        let wqe = read_send(record, wr)?;
        if misaligned == Misaligned::AtPost && wqe.op.is_misaligned() {
            return Err(libc::EINVAL);
        }
        let early = matches!(record.state, IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR);
        if early && early_send == EarlySend::Refused {
            return Err(libc::EINVAL);
        }
        if record.sq_full(slots) {
            return Err(libc::ENOMEM);
        }
        if early {
            record.push_send(wqe);
            return Err(libc::EINVAL);
        }
        let sges = if wqe.inline.is_some() {
            Vec::new()
        } else {
            wqe.sges.clone()
        };
        record.push_send(wqe);
        let dead = record.in_error();
        self.check_keys(&sges);
        if dead {
            self.flush(qp.addr());
        }
        Ok(())
    }

    /// A key that was valid once: the NIC would say so only later, or to somebody else's region.
    fn check_keys(&mut self, sges: &[Sge]) {
        let stale = sges
            .iter()
            .find(|sge| sge.length > 0 && self.dead_keys.contains(&sge.lkey));
        if let Some(sge) = stale {
            let lkey = sge.lkey;
            self.violation(format_args!(
                "posted with lkey {lkey:#x} of a deregistered region"
            ));
        }
    }

    /// mlx4 takes a length of 0 for 2^31 bytes.
    fn check_recv(&mut self, sges: &[Sge]) {
        if sges.iter().any(|sge| sge.length == 0) {
            self.violation("posted with an element of no bytes");
        }
        self.check_keys(sges);
    }

    fn post_one_recv(&mut self, qp: *mut ibv_qp, wr: *mut ibv_recv_wr) -> Outcome<()> {
        let sges = read_sges(get!(wr, sg_list), get!(wr, num_sge))?;
        self.check_recv(&sges);
        let record = self.qp(qp)?;
        if record.state == IBV_QPS_RESET || record.srq.is_some() {
            return Err(libc::EINVAL);
        }
        record.rq.post(get!(wr, wr_id), sges)?;
        if record.in_error() {
            self.flush_late_recv(qp.addr());
        }
        Ok(())
    }

    fn post_one_srq_recv(&mut self, srq: *mut ibv_srq, wr: *mut ibv_recv_wr) -> Outcome<()> {
        let sges = read_sges(get!(wr, sg_list), get!(wr, num_sge))?;
        self.check_recv(&sges);
        self.srq(srq)?.rq.post(get!(wr, wr_id), sges)
    }

    /// Whether the plan refuses request number `index` of this chain.
    fn refused(&mut self, call: &'static str, index: usize) -> Outcome<()> {
        let refused = self
            .faults
            .refuse_post
            .filter(|r| r.call == call && r.index == index);
        match refused {
            None => Ok(()),
            Some(plan) => {
                self.faults.refuse_post = None;
                Err(plan.errno)
            }
        }
    }
}

fn read_send(qp: &Qp, wr: *mut ibv_send_wr) -> Outcome<SendWqe> {
    let flags = get!(wr, send_flags);
    let sges = read_sges(get!(wr, sg_list), get!(wr, num_sge))?;
    if sges.len() > qp.cap.max_send_sge as usize {
        return Err(libc::EINVAL);
    }
    let op = read_op(wr, qp.is_ud())?;
    check_op(qp.kind, op, &sges)?;
    let inline = match flags & FLAG_INLINE != 0 {
        false => None,
        true => Some(read_inline(&sges, qp.cap.max_inline_data, op)?),
    };
    Ok(SendWqe {
        seq: 0,
        wr_id: get!(wr, wr_id),
        op,
        sges,
        inline,
        signaled: qp.signal_all || flags & FLAG_SIGNALED != 0,
        solicited: flags & FLAG_SOLICITED != 0,
        done: false,
    })
}

fn read_op(wr: *mut ibv_send_wr, datagram: bool) -> Outcome<Op> {
    let imm = || get!(wr, imm_data_invalidated_rkey_union.imm_data);
    let target = || Target {
        addr: get!(wr, wr.rdma.remote_addr),
        rkey: get!(wr, wr.rdma.rkey),
    };
    let at = || Target {
        addr: get!(wr, wr.atomic.remote_addr),
        rkey: get!(wr, wr.atomic.rkey),
    };
    let operand = || get!(wr, wr.atomic.compare_add);
    let to = datagram.then(|| Destination {
        ah: get!(wr, wr.ud.ah).addr(),
        qp_num: get!(wr, wr.ud.remote_qpn),
        qkey: get!(wr, wr.ud.remote_qkey),
    });
    Ok(match get!(wr, opcode) {
        IBV_WR_SEND => Op::Send {
            imm: None,
            invalidate: None,
            to,
        },
        IBV_WR_SEND_WITH_IMM => Op::Send {
            imm: Some(imm()),
            invalidate: None,
            to,
        },
        IBV_WR_SEND_WITH_INV => Op::Send {
            imm: None,
            invalidate: Some(imm()),
            to,
        },
        IBV_WR_RDMA_WRITE => Op::Write {
            target: target(),
            imm: None,
        },
        IBV_WR_RDMA_WRITE_WITH_IMM => Op::Write {
            target: target(),
            imm: Some(imm()),
        },
        IBV_WR_RDMA_READ => Op::Read { target: target() },
        IBV_WR_ATOMIC_CMP_AND_SWP => Op::CompareSwap {
            target: at(),
            compare: operand(),
            swap: get!(wr, wr.atomic.swap),
        },
        IBV_WR_ATOMIC_FETCH_AND_ADD => Op::FetchAdd {
            target: at(),
            add: operand(),
        },
        IBV_WR_LOCAL_INV => Op::LocalInvalidate { rkey: imm() },
        IBV_WR_BIND_MW => Op::Bind {
            mw: get!(wr, bind_mw_tso_union.bind_mw.mw).addr(),
            rkey: get!(wr, bind_mw_tso_union.bind_mw.rkey),
            binding: binding(get!(wr, bind_mw_tso_union.bind_mw.bind_info)),
        },
        _ => return Err(libc::EINVAL),
    })
}

/// Which operations a kind of queue pair has, and what they need.
fn check_op(kind: u32, op: Op, sges: &[Sge]) -> Outcome<()> {
    let rc = kind == ibv_qp_type::IBV_QPT_RC;
    let connected = kind != ibv_qp_type::IBV_QPT_UD;
    let allowed = match op {
        Op::Send {
            invalidate: Some(_),
            ..
        } => rc,
        Op::Send { to, .. } => connected || to.is_some_and(|to| to.ah != 0),
        Op::Write { .. } | Op::LocalInvalidate { .. } | Op::Bind { .. } => connected,
        Op::Read { .. } => rc,
        Op::CompareSwap { .. } | Op::FetchAdd { .. } => {
            rc && sges.iter().map(|sge| u64::from(sge.length)).sum::<u64>() == 8
        }
    };
    if allowed { Ok(()) } else { Err(libc::EINVAL) }
}

fn read_sges(list: *mut ibv_sge, count: c_int) -> Outcome<Vec<Sge>> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    Ok((0..count)
        .map(|index| read_sge(list.wrapping_add(index)))
        .collect())
}

/// Inline data is copied while posting: the caller may reuse its buffer at once.
fn read_inline(sges: &[Sge], room: u32, op: Op) -> Outcome<Vec<u8>> {
    let total: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
    if total > room.into() || !matches!(op, Op::Send { .. } | Op::Write { .. }) {
        return Err(libc::EINVAL);
    }
    let mut data = Vec::with_capacity(total as usize);
    for sge in sges {
        let from = ptr::with_exposed_provenance::<u8>(sge.addr as usize);
        let mut part = vec![0; sge.length as usize];
        // SAFETY: C requires readable memory at each entry of an inline request; zero-length entries are not read.
        unsafe { ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
        data.append(&mut part);
    }
    Ok(data)
}

/// The `post_send` operation: all of the chain, or the part before `*bad_wr`.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    let mut at = wr;
    let posted = enter("ibv_post_send", |w| {
        for index in 0.. {
            if at.is_null() {
                break;
            }
            w.refused("ibv_post_send", index)?;
            w.post_one_send(qp, at)?;
            at = get!(at, next);
        }
        Ok(())
    });
    if posted.is_err() {
        // SAFETY: C requires `bad_wr` to be writable.
        unsafe { bad_wr.write(at) };
    }
    positive(posted)
}

/// The `post_recv` operation.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    post_recv_chain("ibv_post_recv", wr, bad_wr, |w, at| w.post_one_recv(qp, at))
}

/// The `post_srq_recv` operation.
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    post_recv_chain("ibv_post_srq_recv", wr, bad_wr, |w, at| {
        w.post_one_srq_recv(srq, at)
    })
}

fn post_recv_chain(
    call: &'static str,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    mut post: impl FnMut(&mut World, *mut ibv_recv_wr) -> Outcome<()>,
) -> c_int {
    let mut at = wr;
    let posted = enter(call, |w| {
        for index in 0.. {
            if at.is_null() {
                break;
            }
            w.refused(call, index)?;
            post(w, at)?;
            at = get!(at, next);
        }
        Ok(())
    });
    if posted.is_err() {
        // SAFETY: C requires `bad_wr` to be writable.
        unsafe { bad_wr.write(at) };
    }
    positive(posted)
}

/// The `bind_mw` operation, for type 1 windows: posts the bind with the window's next key.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    mw_bind: *mut ibv_mw_bind,
) -> c_int {
    positive(enter("ibv_bind_mw", |w| {
        let slots = w.config.send_slots;
        let rkey = get!(mw, rkey);
        let next = rkey & !0xff | rkey.wrapping_add(1) & 0xff;
        let record = w.qp(qp)?;
        if !matches!(record.state, IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_ERR) {
            return Err(libc::EINVAL);
        }
        if record.sq_full(slots) {
            return Err(libc::ENOMEM);
        }
        let flags = get!(mw_bind, send_flags);
        let binding = binding(get!(mw_bind, bind_info));
        record.push_send(SendWqe {
            seq: 0,
            wr_id: get!(mw_bind, wr_id),
            op: Op::Bind {
                mw: mw.addr(),
                rkey: next,
                binding,
            },
            sges: Vec::new(),
            inline: None,
            signaled: record.signal_all || flags & FLAG_SIGNALED != 0,
            solicited: false,
            done: false,
        });
        if w.qp(qp)?.in_error() {
            w.flush(qp.addr());
        }
        Ok(())
    }))
}
