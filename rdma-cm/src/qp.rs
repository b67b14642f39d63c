//! Moving a queue pair through its states on behalf of an id that does not know it.
//!
//! The connection manager supplies the attributes (`rdma_init_qp_attr`); here they are completed
//! with what it leaves out or chooses badly, and applied by the owner of the queue pair.

use std::os::raw::{c_int, c_uint};

use rdma_core_rs::{Context, QpAttr, QueuePair};

use crate::error::{CmError, Result, Step};
use crate::id::CmId;
use crate::param::{ConnParam, Negotiated};
use crate::sys::{ibv_access_flags as access, ibv_qp_attr, ibv_qp_attr_mask as bit, ibv_qp_state};

/// What both sides agreed on, as far as it concerns the own queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpParam {
    pub(crate) depths: Negotiated,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) min_rnr_timer: u8,
}

impl QpParam {
    pub(crate) fn new(param: &ConnParam, depths: Negotiated) -> Self {
        Self {
            depths,
            retry_count: param.retry_count,
            rnr_retry_count: param.rnr_retry_count,
            min_rnr_timer: param.min_rnr_timer,
        }
    }
}

/// To INIT: from now on receives can be posted.
pub(crate) fn to_init(id: &CmId, qp: &mut QueuePair) -> Result<()> {
    check_device(id, qp)?;
    let (attr, mask) = id.qp_attr(ibv_qp_state::IBV_QPS_INIT)?;
    modify(qp, attr, mask)
}

/// To RTR and RTS: from now on it receives and sends.
pub(crate) fn to_rts(id: &CmId, qp: &mut QueuePair, param: QpParam) -> Result<()> {
    check_device(id, qp)?;
    let (mut attr, flags) = id.qp_attr(ibv_qp_state::IBV_QPS_RTR)?;
    // The connection manager chooses 0, which is the longest timer of all: 655 ms.
    attr.min_rnr_timer = param.min_rnr_timer;
    attr.max_dest_rd_atomic = param.depths.responder_resources;
    attr.qp_access_flags = remote_access(param.depths);
    let more = bit::IBV_QP_MIN_RNR_TIMER.0 | bit::IBV_QP_ACCESS_FLAGS.0;
    modify(qp, attr, flags | bits(more))?;

    let (mut attr, flags) = id.qp_attr(ibv_qp_state::IBV_QPS_RTS)?;
    attr.max_rd_atomic = param.depths.initiator_depth;
    attr.retry_cnt = param.retry_count;
    // What is there is the peer's wish, and 7 would be for ever.
    attr.rnr_retry = attr.rnr_retry.min(param.rnr_retry_count);
    modify(qp, attr, flags)
}

/// A datagram queue pair to RTS: it needs a port and a key, and knows no peer.
pub(crate) fn datagram_to_rts(id: &CmId, qp: &mut QueuePair) -> Result<()> {
    to_init(id, qp)?;
    for (state, more) in [
        (ibv_qp_state::IBV_QPS_RTR, 0),
        (ibv_qp_state::IBV_QPS_RTS, bit::IBV_QP_SQ_PSN.0),
    ] {
        let (mut attr, _) = id.qp_attr(ibv_qp_state::IBV_QPS_INIT)?;
        attr.qp_state = state;
        attr.sq_psn = 0;
        modify(qp, attr, bits(bit::IBV_QP_STATE.0 | more))?;
    }
    Ok(())
}

/// Writes are always allowed (a region still has to allow them); reads and atomics need a resource
/// each, so without one they are refused at once rather than left without an answer.
fn remote_access(depths: Negotiated) -> c_uint {
    let reads = access::IBV_ACCESS_REMOTE_READ.0 | access::IBV_ACCESS_REMOTE_ATOMIC.0;
    access::IBV_ACCESS_REMOTE_WRITE.0
        | if depths.responder_resources == 0 {
            0
        } else {
            reads
        }
}

/// A number means another queue pair on another device: the peer would talk to a stranger, or to
/// nobody. The device may have been opened twice, so its name counts.
fn check_device(id: &CmId, qp: &QueuePair) -> Result<()> {
    let device = qp.pd().context().device_name();
    match id.device_name() {
        Some(own) if own != device => Err(CmError::Config {
            field: "qp",
            asked: format!("a queue pair on {device}"),
            allowed: "it has to be on the device of the connection (context())",
        }),
        _ => Ok(()),
    }
}

fn modify(qp: &mut QueuePair, attr: ibv_qp_attr, mask: c_int) -> Result<()> {
    qp.modify(&QpAttr::from_raw(attr, mask))
        .map_err(CmError::verbs(Step::QueuePair))
}

const fn bits(mask: c_uint) -> c_int {
    mask as c_int // bits, not a number
}

/// The depths that a device can do.
pub(crate) fn device_depths(context: &Context) -> Result<Negotiated> {
    let attr = context
        .device_attr()
        .map_err(CmError::verbs(Step::Device))?;
    Ok(Negotiated {
        responder_resources: u8::try_from(attr.max_qp_rd_atom).unwrap_or(u8::MAX),
        initiator_depth: u8::try_from(attr.max_qp_init_rd_atom).unwrap_or(u8::MAX),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_responder_resources_the_peer_may_write_but_not_read() {
        let depths = |responder_resources| Negotiated {
            responder_resources,
            initiator_depth: 0,
        };
        assert_eq!(remote_access(depths(0)), 0x2);
        assert_eq!(remote_access(depths(1)), 0xe);
    }
}
