//! Options of an id, and of a listener.

/// Options that are set on an id before it is bound or connects.
///
/// ```
/// use rdma_cm::IdOptions;
/// let options = IdOptions { reuse_addr: true, ..IdOptions::default() };
/// assert_eq!(options.ack_timeout, Some(16));
/// ```
#[doc(alias = "rdma_set_option")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdOptions {
    /// The type of service (RFC 2474) of the packets; `None` leaves the kernel's default.
    #[doc(alias = "RDMA_OPTION_ID_TOS")]
    pub tos: Option<u8>,
    /// How long the queue pair waits for an acknowledgement: 4.096 µs times two to the power of
    /// this number, 1 to 31. It is tried again `retry_count` times, and a device may take up to
    /// four times as long. 16 (268 ms) by default; `None` leaves the kernel's choice, which is
    /// derived from the path and is 2.1 s on RoCE.
    #[doc(alias = "RDMA_OPTION_ID_ACK_TIMEOUT")]
    pub ack_timeout: Option<u8>,
    /// Whether the local address may be bound while another id that also said so holds it.
    #[doc(alias = "RDMA_OPTION_ID_REUSEADDR")]
    pub reuse_addr: bool,
    /// Whether an IPv6 wildcard takes IPv6 only; `None` leaves the system's default.
    #[doc(alias = "RDMA_OPTION_ID_AFONLY")]
    pub af_only: Option<bool>,
}

impl Default for IdOptions {
    fn default() -> Self {
        Self {
            tos: None,
            ack_timeout: Some(16),
            reuse_addr: false,
            af_only: None,
        }
    }
}

impl IdOptions {
    /// Nothing is set: everything is left to the kernel.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            tos: None,
            ack_timeout: None,
            reuse_addr: false,
            af_only: None,
        }
    }
}

/// Options of a [`Listener`](crate::Listener); those of [`IdOptions`] mean the same here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenOptions {
    /// How many requests may wait to be fetched. The kernel ignores any more, and their peers ask
    /// again after about four seconds. 128 by default; the kernel's own limit, 1024 unless
    /// `net.rdma_ucm.max_backlog` says otherwise, is used for 0 and for more than that.
    pub backlog: u32,
    /// See [`IdOptions::tos`].
    pub tos: Option<u8>,
    /// See [`IdOptions::ack_timeout`]; it holds for the accepted connections.
    pub ack_timeout: Option<u8>,
    /// See [`IdOptions::reuse_addr`].
    pub reuse_addr: bool,
    /// See [`IdOptions::af_only`].
    pub af_only: Option<bool>,
}

impl ListenOptions {
    pub(crate) fn id_options(&self) -> IdOptions {
        IdOptions {
            tos: self.tos,
            ack_timeout: self.ack_timeout,
            reuse_addr: self.reuse_addr,
            af_only: self.af_only,
        }
    }
}

impl Default for ListenOptions {
    fn default() -> Self {
        let IdOptions {
            tos,
            ack_timeout,
            reuse_addr,
            af_only,
        } = IdOptions::default();
        Self {
            backlog: 128,
            tos,
            ack_timeout,
            reuse_addr,
            af_only,
        }
    }
}
