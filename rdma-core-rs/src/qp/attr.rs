//! Attributes of a queue pair: what `modify` changes and `query` reports.

#![allow(unsafe_code)] // zeroes and copies a struct of C

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr;

use crate::access::Access;
use crate::ah::AddressVector;
use crate::attr::{DeviceAttr, Mtu};
use crate::error::{self, Result};
use crate::sys::{self, ibv_qp_attr_mask as bit, ibv_qp_state};

/// The state of a queue pair.
#[doc(alias = "ibv_qp_state")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpState {
    /// New; nothing can be posted.
    Reset,
    /// Receives can be posted; nothing moves.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// The send queue drains: what was posted completes, nothing new is started.
    Sqd,
    /// The send queue failed (not on RC); receives go on.
    Sqe,
    /// Everything posted is flushed.
    Err,
    /// A value this crate does not know.
    Unknown(u32),
}

impl QpState {
    /// Turns C's number into a state. Total.
    pub const fn from_raw(raw: u32) -> QpState {
        match raw {
            ibv_qp_state::IBV_QPS_RESET => QpState::Reset,
            ibv_qp_state::IBV_QPS_INIT => QpState::Init,
            ibv_qp_state::IBV_QPS_RTR => QpState::Rtr,
            ibv_qp_state::IBV_QPS_RTS => QpState::Rts,
            ibv_qp_state::IBV_QPS_SQD => QpState::Sqd,
            ibv_qp_state::IBV_QPS_SQE => QpState::Sqe,
            ibv_qp_state::IBV_QPS_ERR => QpState::Err,
            other => QpState::Unknown(other),
        }
    }

    pub(crate) const fn raw(self) -> u32 {
        match self {
            QpState::Reset => ibv_qp_state::IBV_QPS_RESET,
            QpState::Init => ibv_qp_state::IBV_QPS_INIT,
            QpState::Rtr => ibv_qp_state::IBV_QPS_RTR,
            QpState::Rts => ibv_qp_state::IBV_QPS_RTS,
            QpState::Sqd => ibv_qp_state::IBV_QPS_SQD,
            QpState::Sqe => ibv_qp_state::IBV_QPS_SQE,
            QpState::Err => ibv_qp_state::IBV_QPS_ERR,
            QpState::Unknown(raw) => raw,
        }
    }
}

/// Attributes to set on a queue pair: only those that were named are changed.
///
/// ```
/// use rdma_core_rs::{Access, QpAttr, QpState};
///
/// let to_init = QpAttr::new()
///     .state(QpState::Init)
///     .pkey_index(0)
///     .port(1)
///     .access(Access::REMOTE_READ | Access::REMOTE_WRITE);
/// ```
#[doc(alias = "ibv_qp_attr")]
pub struct QpAttr {
    pub(crate) raw: sys::ibv_qp_attr,
    pub(crate) mask: i32,
}

impl Clone for QpAttr {
    fn clone(&self) -> QpAttr {
        // SAFETY: plain values without an owner, which rdma-sys only forgot to make Copy.
        let raw = unsafe { ptr::read(&raw const self.raw) };
        QpAttr {
            raw,
            mask: self.mask,
        }
    }
}

impl Default for QpAttr {
    fn default() -> QpAttr {
        QpAttr::new()
    }
}

impl QpAttr {
    /// Changes nothing yet.
    pub fn new() -> QpAttr {
        let raw = MaybeUninit::<sys::ibv_qp_attr>::zeroed();
        // SAFETY: a struct of integers and 16-byte GIDs, for which all zeroes is a value.
        let raw = unsafe { raw.assume_init() };
        QpAttr { raw, mask: 0 }
    }

    /// Attributes that C filled in, such as those of `rdma_init_qp_attr`; more can be added.
    ///
    /// `mask` is a set of `IBV_QP_*` bits.
    pub fn from_raw(raw: sys::ibv_qp_attr, mask: i32) -> QpAttr {
        QpAttr { raw, mask }
    }

    /// The state to go to.
    #[doc(alias = "IBV_QP_STATE")]
    #[must_use]
    pub fn state(mut self, state: QpState) -> QpAttr {
        self.raw.qp_state = state.raw();
        self.with(bit::IBV_QP_STATE)
    }

    /// The state to assume it is in.
    #[doc(alias = "IBV_QP_CUR_STATE")]
    #[must_use]
    pub fn cur_state(mut self, state: QpState) -> QpAttr {
        self.raw.cur_qp_state = state.raw();
        self.with(bit::IBV_QP_CUR_STATE)
    }

    /// Whether to tell by an asynchronous event when the send queue has drained (in SQD).
    #[doc(alias = "IBV_QP_EN_SQD_ASYNC_NOTIFY")]
    #[must_use]
    pub fn sqd_async_notify(mut self, on: bool) -> QpAttr {
        self.raw.en_sqd_async_notify = on.into();
        self.with(bit::IBV_QP_EN_SQD_ASYNC_NOTIFY)
    }

    /// The local port.
    #[doc(alias = "IBV_QP_PORT")]
    #[must_use]
    pub fn port(mut self, port: u8) -> QpAttr {
        self.raw.port_num = port;
        self.with(bit::IBV_QP_PORT)
    }

    /// Index of the partition key.
    #[doc(alias = "IBV_QP_PKEY_INDEX")]
    #[must_use]
    pub fn pkey_index(mut self, index: u16) -> QpAttr {
        self.raw.pkey_index = index;
        self.with(bit::IBV_QP_PKEY_INDEX)
    }

    /// What the peer may do through this queue pair. Only remote flags count.
    #[doc(alias = "IBV_QP_ACCESS_FLAGS")]
    #[must_use]
    pub fn access(mut self, access: Access) -> QpAttr {
        self.raw.qp_access_flags = access.bits();
        self.with(bit::IBV_QP_ACCESS_FLAGS)
    }

    /// The key that datagrams must carry.
    #[doc(alias = "IBV_QP_QKEY")]
    #[must_use]
    pub fn qkey(mut self, qkey: u32) -> QpAttr {
        self.raw.qkey = qkey;
        self.with(bit::IBV_QP_QKEY)
    }

    /// The path to the peer.
    #[doc(alias = "IBV_QP_AV")]
    #[must_use]
    pub fn path(mut self, path: &AddressVector) -> QpAttr {
        self.raw.ah_attr = path.to_raw();
        self.with(bit::IBV_QP_AV)
    }

    /// The payload of a packet.
    #[doc(alias = "IBV_QP_PATH_MTU")]
    #[must_use]
    pub fn path_mtu(mut self, mtu: Mtu) -> QpAttr {
        self.raw.path_mtu = mtu.raw();
        self.with(bit::IBV_QP_PATH_MTU)
    }

    /// The peer's queue pair number.
    #[doc(alias = "IBV_QP_DEST_QPN")]
    #[must_use]
    pub fn dest_qp_num(mut self, qp_num: u32) -> QpAttr {
        self.raw.dest_qp_num = qp_num;
        self.with(bit::IBV_QP_DEST_QPN)
    }

    /// The first packet number expected: the peer's `sq_psn`. 24 bits.
    #[doc(alias = "IBV_QP_RQ_PSN")]
    #[must_use]
    pub fn rq_psn(mut self, psn: u32) -> QpAttr {
        self.raw.rq_psn = psn;
        self.with(bit::IBV_QP_RQ_PSN)
    }

    /// The first packet number sent. 24 bits.
    #[doc(alias = "IBV_QP_SQ_PSN")]
    #[must_use]
    pub fn sq_psn(mut self, psn: u32) -> QpAttr {
        self.raw.sq_psn = psn;
        self.with(bit::IBV_QP_SQ_PSN)
    }

    /// Most outgoing reads and atomics at a time. With 0 they hang.
    #[doc(alias = "IBV_QP_MAX_QP_RD_ATOMIC")]
    #[must_use]
    pub fn max_rd_atomic(mut self, count: u8) -> QpAttr {
        self.raw.max_rd_atomic = count;
        self.with(bit::IBV_QP_MAX_QP_RD_ATOMIC)
    }

    /// Most incoming reads and atomics at a time.
    #[doc(alias = "IBV_QP_MAX_DEST_RD_ATOMIC")]
    #[must_use]
    pub fn max_dest_rd_atomic(mut self, count: u8) -> QpAttr {
        self.raw.max_dest_rd_atomic = count;
        self.with(bit::IBV_QP_MAX_DEST_RD_ATOMIC)
    }

    /// How long a peer that found no receive is to wait before it tries again, as a code: 12 is
    /// 0.64 ms, 0 is 655 ms. Set by the receiver.
    #[doc(alias = "IBV_QP_MIN_RNR_TIMER")]
    #[must_use]
    pub fn min_rnr_timer(mut self, code: u8) -> QpAttr {
        self.raw.min_rnr_timer = code;
        self.with(bit::IBV_QP_MIN_RNR_TIMER)
    }

    /// How long to wait for an acknowledgement: 4.096 us times two to this power; 0 is for ever.
    #[doc(alias = "IBV_QP_TIMEOUT")]
    #[must_use]
    pub fn timeout(mut self, exponent: u8) -> QpAttr {
        self.raw.timeout = exponent;
        self.with(bit::IBV_QP_TIMEOUT)
    }

    /// How often to send again without an acknowledgement, 0 to 7. On rxe 7 is for ever.
    #[doc(alias = "IBV_QP_RETRY_CNT")]
    #[must_use]
    pub fn retry_cnt(mut self, count: u8) -> QpAttr {
        self.raw.retry_cnt = count;
        self.with(bit::IBV_QP_RETRY_CNT)
    }

    /// How often to send again when the peer had no receive, 0 to 6; 7 is for ever.
    #[doc(alias = "IBV_QP_RNR_RETRY")]
    #[must_use]
    pub fn rnr_retry(mut self, count: u8) -> QpAttr {
        self.raw.rnr_retry = count;
        self.with(bit::IBV_QP_RNR_RETRY)
    }

    /// The attributes as C has them, and the mask of those that are set.
    pub fn as_raw(&self) -> (&sys::ibv_qp_attr, i32) {
        (&self.raw, self.mask)
    }

    /// Compares what is set with what verbs and the device allow, field by field.
    pub(crate) fn check(&self, device: &DeviceAttr) -> Result<()> {
        let raw = &self.raw;
        let numbers: [(bit, &'static str, u32, u32); 11] = [
            (
                bit::IBV_QP_PKEY_INDEX,
                "pkey_index",
                raw.pkey_index.into(),
                last(device.max_pkeys),
            ),
            (
                bit::IBV_QP_DEST_QPN,
                "dest_qp_num",
                raw.dest_qp_num,
                MAX_24_BITS,
            ),
            (bit::IBV_QP_RQ_PSN, "rq_psn", raw.rq_psn, MAX_24_BITS),
            (bit::IBV_QP_SQ_PSN, "sq_psn", raw.sq_psn, MAX_24_BITS),
            (
                bit::IBV_QP_MAX_QP_RD_ATOMIC,
                "max_rd_atomic",
                raw.max_rd_atomic.into(),
                device.max_qp_init_rd_atom,
            ),
            (
                bit::IBV_QP_MAX_DEST_RD_ATOMIC,
                "max_dest_rd_atomic",
                raw.max_dest_rd_atomic.into(),
                device.max_qp_rd_atom,
            ),
            (
                bit::IBV_QP_MIN_RNR_TIMER,
                "min_rnr_timer",
                raw.min_rnr_timer.into(),
                31,
            ),
            (bit::IBV_QP_TIMEOUT, "timeout", raw.timeout.into(), 31),
            (bit::IBV_QP_RETRY_CNT, "retry_cnt", raw.retry_cnt.into(), 7),
            (bit::IBV_QP_RNR_RETRY, "rnr_retry", raw.rnr_retry.into(), 7),
            (
                bit::IBV_QP_PORT,
                "port",
                raw.port_num.into(),
                device.phys_port_cnt.into(),
            ),
        ];
        for (named, field, asked, max) in numbers {
            if self.has(named) {
                error::at_most(field, asked.into(), max.into())?;
            }
        }
        if self.has(bit::IBV_QP_PORT) {
            error::at_least("port", raw.port_num.into(), 1)?;
        }
        Ok(())
    }

    /// The state that this would bring the queue pair to, if any.
    pub(crate) fn target(&self) -> Option<QpState> {
        self.has(bit::IBV_QP_STATE)
            .then(|| QpState::from_raw(self.raw.qp_state))
    }

    fn has(&self, named: bit) -> bool {
        self.mask & named.0 as i32 != 0
    }

    fn with(mut self, named: bit) -> QpAttr {
        self.mask |= named.0 as i32;
        self
    }
}

/// Queue pair numbers and packet numbers have 24 bits on the wire.
const MAX_24_BITS: u32 = (1 << 24) - 1;

/// The last index of a table of `len` entries.
fn last(len: u16) -> u32 {
    u32::from(len).saturating_sub(1)
}

impl fmt::Debug for QpAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QpAttr")
            .field("state", &self.target())
            .field("mask", &format_args!("{:#x}", self.mask))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_attributes_are_in_the_mask() {
        let attr = QpAttr::new().min_rnr_timer(12);
        assert_eq!(attr.mask, bit::IBV_QP_MIN_RNR_TIMER.0 as i32);
        assert_eq!(attr.target(), None);
        assert_eq!(attr.state(QpState::Rts).target(), Some(QpState::Rts));
    }

    #[test]
    fn every_state_survives_the_round_trip() {
        for raw in 0..10 {
            assert_eq!(QpState::from_raw(raw).raw(), raw);
        }
    }
}
