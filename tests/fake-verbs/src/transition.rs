//! The queue pair's state machine: which attributes a transition needs and which it may have.
//! The table is that of the specification (IBA 11.2.5.2), as the kernel checks it.

use rdma_sys::ibv_qp_state::*;
use rdma_sys::ibv_qp_type::*;

/// `enum ibv_qp_attr_mask`, as plain numbers.
pub(crate) mod mask {
    pub(crate) const STATE: u32 = 1;
    pub(crate) const CUR_STATE: u32 = 1 << 1;
    pub(crate) const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub(crate) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(crate) const PKEY_INDEX: u32 = 1 << 4;
    pub(crate) const PORT: u32 = 1 << 5;
    pub(crate) const QKEY: u32 = 1 << 6;
    pub(crate) const AV: u32 = 1 << 7;
    pub(crate) const PATH_MTU: u32 = 1 << 8;
    pub(crate) const TIMEOUT: u32 = 1 << 9;
    pub(crate) const RETRY_CNT: u32 = 1 << 10;
    pub(crate) const RNR_RETRY: u32 = 1 << 11;
    pub(crate) const RQ_PSN: u32 = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(crate) const ALT_PATH: u32 = 1 << 14;
    pub(crate) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(crate) const SQ_PSN: u32 = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(crate) const PATH_MIG_STATE: u32 = 1 << 18;
    pub(crate) const DEST_QPN: u32 = 1 << 20;
    pub(crate) const RATE_LIMIT: u32 = 1 << 25;
}
use mask::*;

/// One change of state of one kind of queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) kind: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

impl Step {
    /// Whether the step exists and `bits` holds all it needs and nothing it does not know.
    pub(crate) fn allows(self, bits: u32) -> bool {
        match self.attributes() {
            None => false,
            Some((required, optional)) => {
                bits & required == required && bits & !(required | optional | STATE) == 0
            }
        }
    }

    /// Required and optional attributes; `None` if there is no such step.
    fn attributes(self) -> Option<(u32, u32)> {
        let by_kind = |ud: u32, uc: u32, rc: u32| match self.kind {
            IBV_QPT_UD => ud,
            IBV_QPT_UC => uc,
            _ => rc,
        };
        let connected = ALT_PATH | ACCESS_FLAGS | PATH_MIG_STATE;
        Some(match (self.from, self.to) {
            // The one state that cannot become an error is the one in which nothing can go wrong.
            (IBV_QPS_RESET, IBV_QPS_ERR) => return None,
            (from, IBV_QPS_RESET | IBV_QPS_ERR) if from <= IBV_QPS_ERR => (0, 0),
            (IBV_QPS_RESET, IBV_QPS_INIT) => (
                PKEY_INDEX | PORT | by_kind(QKEY, ACCESS_FLAGS, ACCESS_FLAGS),
                0,
            ),
            (IBV_QPS_INIT, IBV_QPS_INIT) => (
                0,
                PKEY_INDEX | PORT | by_kind(QKEY, ACCESS_FLAGS, ACCESS_FLAGS),
            ),
            (IBV_QPS_INIT, IBV_QPS_RTR) => {
                let uc = AV | PATH_MTU | DEST_QPN | RQ_PSN;
                let rc = uc | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
                let optional = ALT_PATH | ACCESS_FLAGS | PKEY_INDEX;
                (
                    by_kind(0, uc, rc),
                    by_kind(PKEY_INDEX | QKEY, optional, optional),
                )
            }
            (IBV_QPS_RTR, IBV_QPS_RTS) => {
                let rc = SQ_PSN | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC;
                let uc = CUR_STATE | connected;
                (
                    by_kind(SQ_PSN, SQ_PSN, rc),
                    by_kind(CUR_STATE | QKEY, uc, uc | MIN_RNR_TIMER) | RATE_LIMIT,
                )
            }
            (IBV_QPS_RTS | IBV_QPS_SQD, IBV_QPS_RTS) => {
                let uc = CUR_STATE | connected;
                (
                    0,
                    by_kind(CUR_STATE | QKEY, uc, uc | MIN_RNR_TIMER) | RATE_LIMIT,
                )
            }
            (IBV_QPS_SQE, IBV_QPS_RTS) => {
                (0, by_kind(CUR_STATE | QKEY, CUR_STATE | ACCESS_FLAGS, 0))
            }
            (IBV_QPS_RTS, IBV_QPS_SQD) => (0, EN_SQD_ASYNC_NOTIFY),
            (IBV_QPS_SQD, IBV_QPS_SQD) => {
                let uc = AV | connected | PKEY_INDEX;
                let rc = uc
                    | PORT
                    | TIMEOUT
                    | RETRY_CNT
                    | RNR_RETRY
                    | MAX_QP_RD_ATOMIC
                    | MAX_DEST_RD_ATOMIC
                    | MIN_RNR_TIMER;
                (0, by_kind(PKEY_INDEX | QKEY, uc, rc))
            }
            _ => return None,
        })
    }
}
