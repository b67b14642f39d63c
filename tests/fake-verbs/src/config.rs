//! How the fake devices behave where real ones differ.

/// When posted work is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// At once, inside the call that makes it possible.
    Auto,
    /// Only by [`Fabric::step`](crate::Fabric::step) and [`Fabric::deliver`](crate::Fabric::deliver).
    Manual,
}

/// What becomes of a receive posted to a queue pair in the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvInError {
    /// It is flushed, as the specification says.
    Flush,
    /// It stays in the queue for ever, as on rxe.
    Pend,
}

/// What the fields of a failed completion hold that are not valid then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFields {
    /// Zero, so that the opcode reads as a send, as on rxe.
    Zero,
    /// A pattern no program can take for a sensible value.
    Poison,
    /// What lay there before: they are not written, as on mlx5.
    Unwritten,
}

/// When a slot of the send queue becomes free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendSlots {
    /// When its completion, or that of a later request, is polled: hardware.
    FreedByPoll,
    /// When the request has been executed: rxe.
    FreedByExecution,
}

/// What a request to a peer that does not answer comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SilentPeer {
    /// It fails at once with RETRY_EXC_ERR, as if all retries had run out.
    Fail,
    /// It stays in flight until [`Fabric::expire_retries`](crate::Fabric::expire_retries).
    Wait,
}

/// What the devices have at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests in a queue of a queue pair, or in a shared receive queue.
    pub wr: u32,
    /// Scatter/gather entries of a request.
    pub sge: u32,
    /// Bytes of inline data; rxe's limit.
    pub inline: u32,
    /// Entries of a completion queue.
    pub cqe: u32,
    /// Reads and atomics in flight, in either direction; at most 254.
    pub rd_atomic: u8,
    /// Bytes of a message.
    pub msg: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wr: 16_384,
            sge: 32,
            inline: 512,
            cqe: 32_767,
            rd_atomic: 128,
            msg: 8 << 20,
        }
    }
}

/// What becomes of a send posted before the queue pair is connected; EINVAL in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlySend {
    /// It is refused.
    Refused,
    /// It stays in the queue and goes out after the connect, as on rxe.
    RefusedButKept,
}

/// Where an atomic on an address that is not a multiple of 8 fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misaligned {
    /// At the responder: REM_INV_REQ_ERR.
    AtResponder,
    /// At the post: EINVAL, as on rxe.
    AtPost,
}

/// The choices; [`Config::default`] is the strict side of each, [`Config::rxe`] the side rxe is on.
#[derive(Clone, Debug)]
pub struct Config {
    /// Number of devices: fake0 has 10.9.0.1 and fd09::1, fake1 10.9.0.2 and fd09::2, and so on.
    pub devices: usize,
    /// What they have at most.
    pub limits: Limits,
    /// When posted work is executed.
    pub delivery: Delivery,
    /// Receives posted in the error state.
    pub recv_in_error: RecvInError,
    /// Invalid fields of failed completions.
    pub error_fields: ErrorFields,
    /// When send slots become free.
    pub send_slots: SendSlots,
    /// Sends posted too early.
    pub early_send: EarlySend,
    /// Atomics on odd addresses.
    pub misaligned: Misaligned,
    /// Whether a `retry_cnt` of 7 means for ever, as on rxe.
    pub seven_retries_are_infinite: bool,
    /// Requests to peers that do not answer.
    pub silent_peer: SilentPeer,
    /// Whether the overrun of a completion queue also moves its queue pairs to the error state and raises QP_FATAL.
    pub overrun_is_fatal: bool,
    /// Whether LAST_WQE_REACHED is raised for a queue pair with a shared receive queue that enters the error state.
    pub last_wqe_event: bool,
    /// Whether COMM_EST is raised for a queue pair that receives something in RTR.
    pub comm_est_event: bool,
    /// Whether the responder of a refused access raises QP_ACCESS_ERR or QP_REQ_ERR.
    pub responder_events: bool,
    /// Bytes that can be registered before ENOMEM, the RLIMIT_MEMLOCK of the fake.
    pub memlock: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: 2,
            limits: Limits::default(),
            delivery: Delivery::Auto,
            recv_in_error: RecvInError::Flush,
            error_fields: ErrorFields::Poison,
            send_slots: SendSlots::FreedByPoll,
            early_send: EarlySend::Refused,
            misaligned: Misaligned::AtResponder,
            seven_retries_are_infinite: false,
            silent_peer: SilentPeer::Fail,
            overrun_is_fatal: true,
            last_wqe_event: true,
            comm_est_event: true,
            responder_events: true,
            memlock: usize::MAX,
        }
    }
}

impl Config {
    /// As soft-RoCE of Linux 6.1 does it.
    pub fn rxe() -> Self {
        Self {
            recv_in_error: RecvInError::Pend,
            error_fields: ErrorFields::Zero,
            send_slots: SendSlots::FreedByExecution,
            early_send: EarlySend::RefusedButKept,
            misaligned: Misaligned::AtPost,
            seven_retries_are_infinite: true,
            overrun_is_fatal: false,
            last_wqe_event: false,
            comm_est_event: false,
            responder_events: false,
            ..Self::default()
        }
    }
}
