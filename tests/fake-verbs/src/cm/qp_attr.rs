//! `rdma_init_qp_attr`: what the connection knows of a queue pair's next state.
#![allow(unsafe_code)] // defines C symbols; fills the caller's attribute struct

use libc::c_int;
use rdma_sys::*;

use super::id::{Id, State};
use crate::cbox::{get, put};
use crate::inet;
use crate::mr::access;
use crate::transition::mask;
use crate::world::{Outcome, World, enter, minus_one};

use ibv_qp_state::*;

const UDP_QKEY: u32 = 0x0123_4567;
/// 4.096 us * 2^19: what the kernel chooses where nobody asked.
const ACK_TIMEOUT: u8 = 19;

impl World {
    fn init_qp_attr(&mut self, id: *mut rdma_cm_id, attr: *mut ibv_qp_attr) -> Outcome<u32> {
        let to = get!(attr, qp_state);
        let record = self.id(id)?;
        let device = record.device.ok_or(libc::EINVAL)?;
        if record.is_udp() {
            return datagram(to, attr);
        }
        match to {
            IBV_QPS_INIT => Ok(self.init(id, attr)?),
            IBV_QPS_RTR => self.ready_to_receive(id, device, attr),
            IBV_QPS_RTS => self.ready_to_send(id, attr),
            _ => Err(libc::EINVAL),
        }
    }

    fn init(&mut self, id: *mut rdma_cm_id, attr: *mut ibv_qp_attr) -> Outcome<u32> {
        let record = self.id(id)?;
        let reads = access::REMOTE_READ | access::REMOTE_ATOMIC;
        let flags = match record.state {
            // Before the connection exists there is nothing to allow.
            State::Idle | State::Bound | State::AddressResolved | State::RouteResolved => 0,
            _ if responder_resources(record) > 0 => access::REMOTE_WRITE | reads,
            _ => access::REMOTE_WRITE,
        };
        put!(attr, qp_access_flags, flags);
        put!(attr, pkey_index, 0);
        put!(attr, port_num, 1);
        Ok(mask::STATE | mask::ACCESS_FLAGS | mask::PKEY_INDEX | mask::PORT)
    }

    fn ready_to_receive(
        &mut self,
        id: *mut rdma_cm_id,
        device: usize,
        attr: *mut ibv_qp_attr,
    ) -> Outcome<u32> {
        let record = self.id(id)?;
        require_answer(record)?;
        let (src, dst) = (
            record.src.ok_or(libc::EINVAL)?,
            record.dst.ok_or(libc::EINVAL)?,
        );
        let (num, resources) = (record.remote.qp_num, responder_resources(record));
        let psn = record.serial;
        let (sgid_index, _) = self.devices[device].gid_of(src.ip()).ok_or(libc::EINVAL)?;
        put!(
            attr,
            ah_attr.grh.dgid,
            ibv_gid {
                raw: inet::gid(dst.ip())
            }
        );
        put!(attr, ah_attr.grh.sgid_index, sgid_index);
        put!(attr, ah_attr.grh.hop_limit, 64);
        put!(attr, ah_attr.is_global, 1);
        put!(attr, ah_attr.port_num, 1);
        put!(attr, path_mtu, ibv_mtu::IBV_MTU_4096);
        put!(attr, dest_qp_num, num);
        put!(attr, rq_psn, psn);
        put!(attr, max_dest_rd_atomic, resources);
        put!(attr, min_rnr_timer, 0);
        let connected = mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
        Ok(mask::STATE | connected | mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER)
    }

    fn ready_to_send(&mut self, id: *mut rdma_cm_id, attr: *mut ibv_qp_attr) -> Outcome<u32> {
        let record = self.id(id)?;
        require_answer(record)?;
        let passive = record.listener.is_some();
        // The requester's retry count serves both ends; each end's RNR count serves the other.
        let retries = if passive {
            record.remote.retry_count
        } else {
            record.local.retry_count
        };
        let (rnr, depth) = (record.remote.rnr_retry_count, initiator_depth(record));
        let (own_timeout, peer, psn) = (record.ack_timeout, record.peer, record.serial);
        let peer_timeout = peer
            .and_then(|p| self.cm.ids.get(&p))
            .and_then(|p| p.ack_timeout);
        put!(
            attr,
            timeout,
            own_timeout.or(peer_timeout).unwrap_or(ACK_TIMEOUT)
        );
        put!(attr, retry_cnt, retries);
        put!(attr, rnr_retry, rnr);
        put!(attr, sq_psn, psn);
        put!(attr, max_rd_atomic, depth);
        let retries = mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY;
        Ok(mask::STATE | mask::SQ_PSN | retries | mask::MAX_QP_RD_ATOMIC)
    }
}

/// Until it accepts, the passive side goes by what the request asks for.
fn responder_resources(id: &Id) -> u8 {
    match id.state {
        State::Connecting => id.local.responder_resources,
        State::Responded | State::Established if id.listener.is_some() => {
            id.local.responder_resources
        }
        _ => id.remote.initiator_depth,
    }
}

fn initiator_depth(id: &Id) -> u8 {
    match id.state {
        State::Responded | State::Established if id.listener.is_some() => id.local.initiator_depth,
        _ => id.remote.responder_resources,
    }
}

/// The peer's parameters are known from the request, or from the answer to it.
fn require_answer(id: &Id) -> Outcome<()> {
    match id.state {
        State::Requested | State::Responded | State::ResponseGot | State::Established => Ok(()),
        _ => Err(libc::EINVAL),
    }
}

fn datagram(to: u32, attr: *mut ibv_qp_attr) -> Outcome<u32> {
    match to {
        IBV_QPS_INIT => {
            put!(attr, pkey_index, 0);
            put!(attr, port_num, 1);
            put!(attr, qkey, UDP_QKEY);
            Ok(mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::QKEY)
        }
        IBV_QPS_RTR => Ok(mask::STATE),
        IBV_QPS_RTS => {
            put!(attr, sq_psn, 0);
            Ok(mask::STATE | mask::SQ_PSN)
        }
        _ => Err(libc::EINVAL),
    }
}

/// `rdma_init_qp_attr(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    qp_attr: *mut ibv_qp_attr,
    qp_attr_mask: *mut c_int,
) -> c_int {
    minus_one(enter("rdma_init_qp_attr", |w| {
        let bits = w.init_qp_attr(id, qp_attr)?;
        // SAFETY: C requires `qp_attr_mask` to be writable.
        unsafe { qp_attr_mask.write(bits as c_int) };
        Ok(())
    }))
}
