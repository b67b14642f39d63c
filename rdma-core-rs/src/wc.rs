//! Work completions: how a posted request ended.

use std::fmt;
use std::mem::{offset_of, size_of};

use crate::sys::{self, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status};

/// How a posted request ended.
///
/// On failure only four fields mean anything (ibv_poll_cq(3)); the others can be reached only
/// through [`success`](Self::success). Some devices put a wrong opcode into a failed completion, so
/// remember by `wr_id` what you posted.
///
/// The default is room for [`poll`](crate::CompletionQueue::poll).
///
/// ```
/// # fn example(wc: rdma_core_rs::WorkCompletion) {
/// match wc.success() {
///     Ok(success) => println!("{} bytes, number {:?}", success.byte_len(), success.imm_data()),
///     Err(failure) if failure.is_flush() => println!("{} was swept away", failure.wr_id),
///     Err(failure) => println!("the cause: {failure}"),
/// }
/// # }
/// ```
#[doc(alias = "ibv_wc")]
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct WorkCompletion {
    wr_id: u64,
    status: u32,
    opcode: u32,
    vendor_err: u32,
    byte_len: u32,
    imm_data_or_rkey: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

// C writes this struct where it expects an ibv_wc (which has no Copy in rdma-sys).
const _: () = {
    assert!(size_of::<WorkCompletion>() == size_of::<sys::ibv_wc>());
    assert!(align_of::<WorkCompletion>() == align_of::<sys::ibv_wc>());
    assert!(offset_of!(WorkCompletion, wr_id) == offset_of!(sys::ibv_wc, wr_id));
    assert!(offset_of!(WorkCompletion, status) == offset_of!(sys::ibv_wc, status));
    assert!(offset_of!(WorkCompletion, opcode) == offset_of!(sys::ibv_wc, opcode));
    assert!(offset_of!(WorkCompletion, vendor_err) == offset_of!(sys::ibv_wc, vendor_err));
    assert!(offset_of!(WorkCompletion, byte_len) == offset_of!(sys::ibv_wc, byte_len));
    assert!(
        offset_of!(WorkCompletion, imm_data_or_rkey)
            == offset_of!(sys::ibv_wc, imm_data_invalidated_rkey_union)
    );
    assert!(offset_of!(WorkCompletion, qp_num) == offset_of!(sys::ibv_wc, qp_num));
    assert!(offset_of!(WorkCompletion, src_qp) == offset_of!(sys::ibv_wc, src_qp));
    assert!(offset_of!(WorkCompletion, wc_flags) == offset_of!(sys::ibv_wc, wc_flags));
    assert!(offset_of!(WorkCompletion, pkey_index) == offset_of!(sys::ibv_wc, pkey_index));
    assert!(offset_of!(WorkCompletion, slid) == offset_of!(sys::ibv_wc, slid));
    assert!(offset_of!(WorkCompletion, sl) == offset_of!(sys::ibv_wc, sl));
    assert!(offset_of!(WorkCompletion, dlid_path_bits) == offset_of!(sys::ibv_wc, dlid_path_bits));
};

impl WorkCompletion {
    /// The number given to the request. Valid always.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// How it ended. Valid always.
    #[inline]
    pub fn status(&self) -> WcStatus {
        WcStatus::from_raw(self.status)
    }

    /// Whether it ended well.
    #[inline]
    pub fn is_success(&self) -> bool {
        self.status == ibv_wc_status::IBV_WC_SUCCESS
    }

    /// The local queue pair it was posted to (or, for a shared receive queue, that received).
    /// Valid always.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// The vendor's code for the failure; 0 on success.
    #[inline]
    pub fn vendor_err(&self) -> u32 {
        if self.is_success() {
            0
        } else {
            self.vendor_err // which some devices leave unwritten on success
        }
    }

    /// The fields that are valid on success, or what is known of the failure.
    #[inline]
    pub fn success(&self) -> Result<Success<'_>, Failure> {
        if self.is_success() {
            Ok(Success { wc: self })
        } else {
            Err(self.failure())
        }
    }

    /// As [`success`](Self::success), without the failure.
    #[inline]
    pub fn ok(&self) -> Option<Success<'_>> {
        self.success().ok()
    }

    fn failure(&self) -> Failure {
        Failure {
            wr_id: self.wr_id,
            status: self.status(),
            qp_num: self.qp_num,
            vendor_err: self.vendor_err,
        }
    }
}

impl fmt::Debug for WorkCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.success() {
            Ok(success) => success.fmt(f),
            Err(failure) => failure.fmt(f),
        }
    }
}

/// The fields of a [`WorkCompletion`] that are valid on success.
#[derive(Clone, Copy)]
pub struct Success<'a> {
    wc: &'a WorkCompletion,
}

impl Success<'_> {
    /// What completed.
    #[inline]
    pub fn opcode(&self) -> WcOpcode {
        WcOpcode::from_raw(self.wc.opcode)
    }

    /// Bytes received, read or returned by an atomic; for other requests any number. On UD it
    /// includes the 40 bytes of the global routing header.
    #[inline]
    pub fn byte_len(&self) -> u32 {
        self.wc.byte_len
    }

    /// The sender's immediate data in host order, if this is a receive and has any.
    #[inline]
    pub fn imm_data(&self) -> Option<u32> {
        self.has_received(ibv_wc_flags::IBV_WC_WITH_IMM)
            .then(|| u32::from_be(self.wc.imm_data_or_rkey))
    }

    /// The key of this side that a send with invalidate took back, if it was one.
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        self.has_received(ibv_wc_flags::IBV_WC_WITH_INV)
            .then_some(self.wc.imm_data_or_rkey)
    }

    /// UD: whether the first 40 bytes of the buffer hold a global routing header. On RC and UC it
    /// means nothing: rxe sets it there too.
    #[inline]
    pub fn has_grh(&self) -> bool {
        self.has(ibv_wc_flags::IBV_WC_GRH)
    }

    /// A receive on UD: the sender's queue pair number.
    #[inline]
    pub fn src_qp(&self) -> u32 {
        self.wc.src_qp
    }

    /// A receive on UD, on InfiniBand: the sender's local identifier.
    #[inline]
    pub fn slid(&self) -> u16 {
        self.wc.slid
    }

    /// The flags as C gives them.
    #[inline]
    pub fn wc_flags(&self) -> u32 {
        self.wc.wc_flags
    }

    /// The completion as C has it.
    pub(crate) fn as_raw(&self) -> *const sys::ibv_wc {
        (&raw const *self.wc).cast()
    }

    #[inline]
    fn has(&self, flag: ibv_wc_flags) -> bool {
        self.wc.wc_flags & flag.0 != 0
    }

    /// Devices flag a send with immediate data too, and do not write the data then.
    #[inline]
    fn has_received(&self, flag: ibv_wc_flags) -> bool {
        self.wc.opcode & ibv_wc_opcode::IBV_WC_RECV != 0 && self.has(flag)
    }
}

impl fmt::Debug for Success<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Success");
        fields
            .field("wr_id", &self.wc.wr_id)
            .field("opcode", &self.opcode())
            .field("qp_num", &self.wc.qp_num);
        if !matches!(self.opcode(), WcOpcode::Send | WcOpcode::RdmaWrite) {
            fields.field("byte_len", &self.byte_len());
        }
        fields.finish_non_exhaustive()
    }
}

/// What is known of a request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("work request {wr_id} on queue pair {qp_num}: {status} (vendor error {vendor_err})")]
pub struct Failure {
    /// The number given to the request.
    pub wr_id: u64,
    /// How it failed.
    pub status: WcStatus,
    /// The local queue pair.
    pub qp_num: u32,
    /// The vendor's code.
    pub vendor_err: u32,
}

impl Failure {
    /// Whether it was only swept away by an earlier failure, or by the queue pair's going to the
    /// error state: then this is not the cause.
    pub fn is_flush(&self) -> bool {
        self.status == WcStatus::WrFlushErr
    }
}

/// The status of a completion, by the names of ibv_poll_cq(3).
#[doc(alias = "ibv_wc_status")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcStatus {
    /// Success.
    #[doc(alias = "IBV_WC_SUCCESS")]
    Success,
    /// Local length error: the message does not fit the buffer.
    #[doc(alias = "IBV_WC_LOC_LEN_ERR")]
    LocLenErr,
    /// Local queue pair operation error.
    #[doc(alias = "IBV_WC_LOC_QP_OP_ERR")]
    LocQpOpErr,
    /// Local EE context operation error.
    #[doc(alias = "IBV_WC_LOC_EEC_OP_ERR")]
    LocEecOpErr,
    /// Local protection error: a buffer is not in a valid region.
    #[doc(alias = "IBV_WC_LOC_PROT_ERR")]
    LocProtErr,
    /// Flushed: the queue pair is in the error state.
    #[doc(alias = "IBV_WC_WR_FLUSH_ERR")]
    WrFlushErr,
    /// Memory window bind error.
    #[doc(alias = "IBV_WC_MW_BIND_ERR")]
    MwBindErr,
    /// Bad response from the peer.
    #[doc(alias = "IBV_WC_BAD_RESP_ERR")]
    BadRespErr,
    /// Local access error.
    #[doc(alias = "IBV_WC_LOC_ACCESS_ERR")]
    LocAccessErr,
    /// The peer found the request invalid.
    #[doc(alias = "IBV_WC_REM_INV_REQ_ERR")]
    RemInvReqErr,
    /// Remote access error: key, range or rights do not fit.
    #[doc(alias = "IBV_WC_REM_ACCESS_ERR")]
    RemAccessErr,
    /// The peer could not complete the operation.
    #[doc(alias = "IBV_WC_REM_OP_ERR")]
    RemOpErr,
    /// The peer did not answer, retries exhausted.
    #[doc(alias = "IBV_WC_RETRY_EXC_ERR")]
    RetryExcErr,
    /// The peer had no receive posted, retries exhausted.
    #[doc(alias = "IBV_WC_RNR_RETRY_EXC_ERR")]
    RnrRetryExcErr,
    /// Local RDD violation.
    #[doc(alias = "IBV_WC_LOC_RDD_VIOL_ERR")]
    LocRddViolErr,
    /// Remote invalid RD request.
    #[doc(alias = "IBV_WC_REM_INV_RD_REQ_ERR")]
    RemInvRdReqErr,
    /// The peer aborted the operation.
    #[doc(alias = "IBV_WC_REM_ABORT_ERR")]
    RemAbortErr,
    /// Invalid EE context number.
    #[doc(alias = "IBV_WC_INV_EECN_ERR")]
    InvEecnErr,
    /// Invalid EE context state.
    #[doc(alias = "IBV_WC_INV_EEC_STATE_ERR")]
    InvEecStateErr,
    /// Fatal error of the device.
    #[doc(alias = "IBV_WC_FATAL_ERR")]
    FatalErr,
    /// Response timeout.
    #[doc(alias = "IBV_WC_RESP_TIMEOUT_ERR")]
    RespTimeoutErr,
    /// General error.
    #[doc(alias = "IBV_WC_GENERAL_ERR")]
    GeneralErr,
    /// Tag matching error.
    #[doc(alias = "IBV_WC_TM_ERR")]
    TmErr,
    /// Tag matching rendezvous incomplete.
    #[doc(alias = "IBV_WC_TM_RNDV_INCOMPLETE")]
    TmRndvIncomplete,
    /// A value this crate does not know.
    Unknown(u32),
}

impl WcStatus {
    /// Turns C's number into a status. Total: what is not known becomes `Unknown`.
    pub const fn from_raw(raw: u32) -> WcStatus {
        use ibv_wc_status as c;
        match raw {
            c::IBV_WC_SUCCESS => WcStatus::Success,
            c::IBV_WC_LOC_LEN_ERR => WcStatus::LocLenErr,
            c::IBV_WC_LOC_QP_OP_ERR => WcStatus::LocQpOpErr,
            c::IBV_WC_LOC_EEC_OP_ERR => WcStatus::LocEecOpErr,
            c::IBV_WC_LOC_PROT_ERR => WcStatus::LocProtErr,
            c::IBV_WC_WR_FLUSH_ERR => WcStatus::WrFlushErr,
            c::IBV_WC_MW_BIND_ERR => WcStatus::MwBindErr,
            c::IBV_WC_BAD_RESP_ERR => WcStatus::BadRespErr,
            c::IBV_WC_LOC_ACCESS_ERR => WcStatus::LocAccessErr,
            c::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemInvReqErr,
            c::IBV_WC_REM_ACCESS_ERR => WcStatus::RemAccessErr,
            c::IBV_WC_REM_OP_ERR => WcStatus::RemOpErr,
            c::IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExcErr,
            c::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExcErr,
            c::IBV_WC_LOC_RDD_VIOL_ERR => WcStatus::LocRddViolErr,
            c::IBV_WC_REM_INV_RD_REQ_ERR => WcStatus::RemInvRdReqErr,
            c::IBV_WC_REM_ABORT_ERR => WcStatus::RemAbortErr,
            c::IBV_WC_INV_EECN_ERR => WcStatus::InvEecnErr,
            c::IBV_WC_INV_EEC_STATE_ERR => WcStatus::InvEecStateErr,
            c::IBV_WC_FATAL_ERR => WcStatus::FatalErr,
            c::IBV_WC_RESP_TIMEOUT_ERR => WcStatus::RespTimeoutErr,
            c::IBV_WC_GENERAL_ERR => WcStatus::GeneralErr,
            c::IBV_WC_TM_ERR => WcStatus::TmErr,
            c::IBV_WC_TM_RNDV_INCOMPLETE => WcStatus::TmRndvIncomplete,
            other => WcStatus::Unknown(other),
        }
    }

    const fn words(self) -> &'static str {
        match self {
            WcStatus::Success => "success",
            WcStatus::LocLenErr => "local length error: the message does not fit the buffer",
            WcStatus::LocQpOpErr => "local queue pair operation error",
            WcStatus::LocEecOpErr => "local EE context operation error",
            WcStatus::LocProtErr => "local protection error: a buffer is not in a valid region",
            WcStatus::WrFlushErr => "flushed: the queue pair is in the error state",
            WcStatus::MwBindErr => "memory window bind error",
            WcStatus::BadRespErr => "bad response from the peer",
            WcStatus::LocAccessErr => "local access error",
            WcStatus::RemInvReqErr => "the peer found the request invalid",
            WcStatus::RemAccessErr => "remote access error: key, range or rights do not fit",
            WcStatus::RemOpErr => "the peer could not complete the operation",
            WcStatus::RetryExcErr => "the peer did not answer, retries exhausted",
            WcStatus::RnrRetryExcErr => "the peer had no receive posted, retries exhausted",
            WcStatus::LocRddViolErr => "local RDD violation",
            WcStatus::RemInvRdReqErr => "remote invalid RD request",
            WcStatus::RemAbortErr => "the peer aborted the operation",
            WcStatus::InvEecnErr => "invalid EE context number",
            WcStatus::InvEecStateErr => "invalid EE context state",
            WcStatus::FatalErr => "fatal error of the device",
            WcStatus::RespTimeoutErr => "response timeout",
            WcStatus::GeneralErr => "general error",
            WcStatus::TmErr => "tag matching error",
            WcStatus::TmRndvIncomplete => "tag matching rendezvous incomplete",
            WcStatus::Unknown(_) => "unknown status",
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WcStatus::Unknown(raw) => write!(f, "unknown status {raw}"),
            known => f.write_str(known.words()),
        }
    }
}

/// What a successful completion completed.
#[doc(alias = "ibv_wc_opcode")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcOpcode {
    /// A send of any kind.
    Send,
    /// A write of any kind.
    RdmaWrite,
    /// A read.
    RdmaRead,
    /// A compare-and-swap.
    CompSwap,
    /// A fetch-and-add.
    FetchAdd,
    /// The binding of a memory window.
    BindMw,
    /// A local invalidate.
    LocalInv,
    /// A receive that a send of the peer completed.
    Recv,
    /// A receive that a write with immediate data of the peer completed: the data is where the
    /// peer wrote it, not in the receive's buffer.
    RecvRdmaWithImm,
    /// A value this crate does not know.
    Unknown(u32),
}

impl WcOpcode {
    /// Turns C's number into an opcode. Total: what is not known becomes `Unknown`.
    #[inline]
    pub const fn from_raw(raw: u32) -> WcOpcode {
        use ibv_wc_opcode as c;
        match raw {
            c::IBV_WC_SEND => WcOpcode::Send,
            c::IBV_WC_RDMA_WRITE => WcOpcode::RdmaWrite,
            c::IBV_WC_RDMA_READ => WcOpcode::RdmaRead,
            c::IBV_WC_COMP_SWAP => WcOpcode::CompSwap,
            c::IBV_WC_FETCH_ADD => WcOpcode::FetchAdd,
            c::IBV_WC_BIND_MW => WcOpcode::BindMw,
            c::IBV_WC_LOCAL_INV => WcOpcode::LocalInv,
            c::IBV_WC_RECV => WcOpcode::Recv,
            c::IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvRdmaWithImm,
            other => WcOpcode::Unknown(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(status: u32, opcode: u32) -> WorkCompletion {
        WorkCompletion {
            wr_id: 5,
            status,
            opcode,
            vendor_err: 9,
            byte_len: 100,
            imm_data_or_rkey: 0x0102_0304_u32.to_be(),
            qp_num: 17,
            wc_flags: ibv_wc_flags::IBV_WC_WITH_IMM.0,
            ..WorkCompletion::default()
        }
    }

    #[test]
    fn success_shows_the_data_and_immediate_in_host_order() {
        let wc = completion(0, ibv_wc_opcode::IBV_WC_RECV);
        let success = wc.success().unwrap();
        assert_eq!(success.opcode(), WcOpcode::Recv);
        assert_eq!(success.byte_len(), 100);
        assert_eq!(success.imm_data(), Some(0x0102_0304));
        assert_eq!(success.invalidated_rkey(), None);
    }

    #[test]
    fn send_shows_no_immediate_and_no_error_code() {
        let wc = completion(0, ibv_wc_opcode::IBV_WC_SEND);
        assert_eq!(wc.success().unwrap().imm_data(), None);
        assert_eq!(wc.vendor_err(), 0);
    }

    #[test]
    fn failure_shows_only_what_is_valid() {
        let wc = completion(
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
            ibv_wc_opcode::IBV_WC_SEND,
        );
        let failure = wc.success().unwrap_err();
        assert!(failure.is_flush());
        assert_eq!(
            (failure.wr_id, failure.qp_num, failure.vendor_err),
            (5, 17, 9)
        );
        let text = failure.to_string();
        assert!(text.contains("flushed") && text.contains("17"), "{text}");
    }

    #[test]
    fn unknown_numbers_are_kept() {
        assert_eq!(WcStatus::from_raw(1000), WcStatus::Unknown(1000));
        assert_eq!(WcStatus::from_raw(1000).to_string(), "unknown status 1000");
        assert_eq!(WcOpcode::from_raw(135), WcOpcode::Unknown(135));
    }

    #[test]
    fn every_known_status_has_its_own_words() {
        let mut words: Vec<_> = (0..24)
            .map(|raw| WcStatus::from_raw(raw).to_string())
            .collect();
        words.sort();
        words.dedup();
        assert_eq!(words.len(), 24);
    }
}
