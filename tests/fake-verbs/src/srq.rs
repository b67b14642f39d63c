//! Shared receive queues.
#![allow(unsafe_code)] // defines C symbols; reads and writes the callers' attribute structs

use libc::c_int;
use rdma_sys::*;

use crate::async_event::{Element, number};
use crate::cbox::{CBox, get, put, zeroed};
use crate::cq::rounded;
use crate::qp::{RecvQueue, RecvWqe, Slot};
use crate::world::{Outcome, World, enter, enter_acked, null, positive};

const SRQ_MAX_WR: u32 = 1;
const SRQ_LIMIT: u32 = 2;

pub(crate) struct Srq {
    memory: CBox<ibv_srq>,
    pub(crate) serial: u32,
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: usize,
    pub(crate) rq: RecvQueue,
    /// Armed while not 0: one event once fewer receives than this are posted.
    limit: u32,
    pub(crate) async_unacked: u32,
}

impl Srq {
    pub(crate) fn ptr(&self) -> *mut ibv_srq {
        self.memory.ptr()
    }
}

impl World {
    pub(crate) fn srq(&mut self, srq: *mut ibv_srq) -> Outcome<&mut Srq> {
        if !self.srqs.contains_key(&srq.addr()) {
            return self.unknown("shared receive queue");
        }
        self.srqs.get_mut(&srq.addr()).ok_or(libc::EINVAL)
    }

    fn create_srq(
        &mut self,
        pd: *mut ibv_pd,
        init: *mut ibv_srq_init_attr,
    ) -> Outcome<*mut ibv_srq> {
        let limits = self.config.limits;
        let context = self.pd(pd)?.context;
        let (wr, sge) = (get!(init, attr.max_wr), get!(init, attr.max_sge));
        if wr == 0 || wr > limits.wr || sge > limits.sge {
            return Err(libc::EINVAL);
        }
        let depth = rounded(wr);
        put!(init, attr.max_wr, depth);
        let serial = self.serial();
        // SAFETY: ibv_srq holds raw pointers, integers and pthread objects as bytes: zero is valid.
        let mut c: ibv_srq = unsafe { zeroed() };
        (c.context, c.pd, c.srq_context) = (context, pd, get!(init, srq_context));
        c.handle = serial;
        let memory = CBox::new(c);
        let ptr = memory.ptr();
        let rq = RecvQueue::new(serial, depth, sge);
        let pd = pd.addr();
        let srq = Srq {
            memory,
            serial,
            context,
            pd,
            rq,
            limit: 0,
            async_unacked: 0,
        };
        self.srqs.insert(ptr.addr(), srq);
        Ok(ptr)
    }

    fn modify_srq(&mut self, srq: *mut ibv_srq, attr: *mut ibv_srq_attr, bits: u32) -> Outcome<()> {
        let limits = self.config.limits;
        let record = self.srq(srq)?;
        if bits & !(SRQ_MAX_WR | SRQ_LIMIT) != 0 {
            return Err(libc::EINVAL);
        }
        let mut depth = record.rq.depth as u32;
        if bits & SRQ_MAX_WR != 0 {
            let asked = get!(attr, max_wr);
            let used = record.rq.posted.len() + record.rq.unpolled.len();
            if asked == 0 || asked > limits.wr || (asked as usize) < used {
                return Err(libc::EINVAL);
            }
            depth = rounded(asked);
        }
        if bits & SRQ_LIMIT != 0 {
            let limit = get!(attr, srq_limit);
            if limit > depth {
                return Err(libc::EINVAL);
            }
            record.limit = limit;
        }
        record.rq.depth = depth as usize;
        Ok(())
    }

    fn destroy_srq(&mut self, srq: *mut ibv_srq) -> Outcome<()> {
        let unacked = self.srq(srq)?.async_unacked;
        if self.qps.values().any(|qp| qp.srq == Some(srq.addr())) {
            self.violation_unless_planned("a queue pair still uses the SRQ");
            return Err(libc::EBUSY);
        }
        self.forget_events_of(Element::Srq(srq.addr()), unacked);
        self.srqs.remove(&srq.addr());
        Ok(())
    }

    /// Takes a receive for a message that arrived at `qp`, from its own queue or the shared one.
    pub(crate) fn consume_recv(&mut self, qp: usize) -> Option<(RecvWqe, Slot)> {
        let record = self.qps.get_mut(&qp)?;
        let Some(srq) = record.srq else {
            return record.rq.consume();
        };
        let shared = self.srqs.get_mut(&srq)?;
        let taken = shared.rq.consume();
        let below = shared.limit > 0 && shared.rq.posted.len() < shared.limit as usize;
        if below {
            shared.limit = 0;
            self.raise_srq(srq, number::SRQ_LIMIT_REACHED);
        }
        taken
    }

    pub(crate) fn has_recv(&self, qp: usize) -> bool {
        let Some(record) = self.qps.get(&qp) else {
            return false;
        };
        match record.srq {
            None => !record.rq.posted.is_empty(),
            Some(srq) => self
                .srqs
                .get(&srq)
                .is_some_and(|srq| !srq.rq.posted.is_empty()),
        }
    }
}

/// `ibv_create_srq(3)`: the granted size is written back.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    srq_init_attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    null(enter("ibv_create_srq", |w| w.create_srq(pd, srq_init_attr)))
}

/// `ibv_modify_srq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    srq_attr: *mut ibv_srq_attr,
    srq_attr_mask: c_int,
) -> c_int {
    positive(enter("ibv_modify_srq", |w| {
        w.modify_srq(srq, srq_attr, srq_attr_mask as u32)
    }))
}

/// `ibv_query_srq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_srq(
    srq: *mut ibv_srq,
    srq_attr: *mut ibv_srq_attr,
) -> c_int {
    positive(enter("ibv_query_srq", |w| {
        let record = w.srq(srq)?;
        let attr = ibv_srq_attr {
            max_wr: record.rq.depth as u32,
            max_sge: record.rq.max_sge as u32,
            srq_limit: record.limit,
        };
        // SAFETY: C requires `srq_attr` to be writable.
        unsafe { srq_attr.write(attr) };
        Ok(())
    }))
}

/// `ibv_destroy_srq(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let element = Element::Srq(srq.addr());
    positive(enter_acked("ibv_destroy_srq", element, |w| {
        w.destroy_srq(srq)
    }))
}
