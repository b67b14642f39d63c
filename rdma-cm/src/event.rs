//! What the connection manager reports, as enums that no newer kernel can break.
//!
//! The numbers come from the kernel through librdmacm unchecked. They are read as integers and
//! converted by total functions with an `Unknown` case, never written into a Rust enum by C.

use std::fmt;
use std::io;

use crate::sys::rdma_cm_event_type as raw;

/// The kind of a connection manager event.
///
/// [`EventType::from_raw`] is total: a number of a newer library becomes `Unknown`.
#[doc(alias = "rdma_cm_event_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventType {
    /// The peer's address belongs to a device and a port of this host, which the id is now bound to.
    AddrResolved,
    /// The peer's address could not be resolved; the status says why.
    AddrError,
    /// The path to the peer is known.
    RouteResolved,
    /// No path to the peer was found.
    RouteError,
    /// A peer asks a listener for a connection.
    ConnectRequest,
    /// The peer accepted; the queue pair has to be moved and [`establish`](crate::CmId::establish) called.
    ConnectResponse,
    /// Setting up the connection failed on this host.
    ConnectError,
    /// The peer did not answer, or the network lost it.
    Unreachable,
    /// The peer, or its kernel, said no.
    Rejected,
    /// The connection is up on both sides.
    Established,
    /// The peer, or this side, ended the connection.
    Disconnected,
    /// The device is going away: everything made on it has to be dropped.
    DeviceRemoval,
    /// A multicast group was joined.
    MulticastJoin,
    /// Joining a multicast group failed, or the membership was lost.
    MulticastError,
    /// The network device behind the id changed its hardware address (bonding fail-over).
    AddrChange,
    /// The connection's queue pair number may be used again.
    TimewaitExit,
    /// An event that this version does not know.
    Unknown(u32),
}

impl EventType {
    /// The kind for a number that librdmacm reported.
    #[must_use]
    pub const fn from_raw(event: u32) -> Self {
        match event {
            raw::RDMA_CM_EVENT_ADDR_RESOLVED => Self::AddrResolved,
            raw::RDMA_CM_EVENT_ADDR_ERROR => Self::AddrError,
            raw::RDMA_CM_EVENT_ROUTE_RESOLVED => Self::RouteResolved,
            raw::RDMA_CM_EVENT_ROUTE_ERROR => Self::RouteError,
            raw::RDMA_CM_EVENT_CONNECT_REQUEST => Self::ConnectRequest,
            raw::RDMA_CM_EVENT_CONNECT_RESPONSE => Self::ConnectResponse,
            raw::RDMA_CM_EVENT_CONNECT_ERROR => Self::ConnectError,
            raw::RDMA_CM_EVENT_UNREACHABLE => Self::Unreachable,
            raw::RDMA_CM_EVENT_REJECTED => Self::Rejected,
            raw::RDMA_CM_EVENT_ESTABLISHED => Self::Established,
            raw::RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            raw::RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoval,
            raw::RDMA_CM_EVENT_MULTICAST_JOIN => Self::MulticastJoin,
            raw::RDMA_CM_EVENT_MULTICAST_ERROR => Self::MulticastError,
            raw::RDMA_CM_EVENT_ADDR_CHANGE => Self::AddrChange,
            raw::RDMA_CM_EVENT_TIMEWAIT_EXIT => Self::TimewaitExit,
            other => Self::Unknown(other),
        }
    }

    /// The name that the manual pages use, or `None` for an unknown event.
    #[doc(alias = "rdma_event_str")]
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::AddrResolved => "RDMA_CM_EVENT_ADDR_RESOLVED",
            Self::AddrError => "RDMA_CM_EVENT_ADDR_ERROR",
            Self::RouteResolved => "RDMA_CM_EVENT_ROUTE_RESOLVED",
            Self::RouteError => "RDMA_CM_EVENT_ROUTE_ERROR",
            Self::ConnectRequest => "RDMA_CM_EVENT_CONNECT_REQUEST",
            Self::ConnectResponse => "RDMA_CM_EVENT_CONNECT_RESPONSE",
            Self::ConnectError => "RDMA_CM_EVENT_CONNECT_ERROR",
            Self::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
            Self::Rejected => "RDMA_CM_EVENT_REJECTED",
            Self::Established => "RDMA_CM_EVENT_ESTABLISHED",
            Self::Disconnected => "RDMA_CM_EVENT_DISCONNECTED",
            Self::DeviceRemoval => "RDMA_CM_EVENT_DEVICE_REMOVAL",
            Self::MulticastJoin => "RDMA_CM_EVENT_MULTICAST_JOIN",
            Self::MulticastError => "RDMA_CM_EVENT_MULTICAST_ERROR",
            Self::AddrChange => "RDMA_CM_EVENT_ADDR_CHANGE",
            Self::TimewaitExit => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
            Self::Unknown(_) => return None,
        })
    }
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name(), self) {
            (Some(name), _) => f.write_str(name),
            (None, Self::Unknown(number)) => write!(f, "unknown event {number}"),
            (None, _) => write!(f, "{self:?}"),
        }
    }
}

/// What the status of an event means; its number reads differently from kind to kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventStatus {
    /// Status 0.
    Success,
    /// A negative status: an errno of this host's kernel, or of librdmacm's own failure to look up what
    /// the event is about; here as a positive number.
    Errno(i32),
    /// The positive status of `Rejected`: the reason that the peer's side gave.
    Reject(RejectReason),
    /// The positive status of `Unreachable` in the UDP port space: the answer to the look-up.
    Sidr(SidrStatus),
    /// A positive status where none is defined.
    Other(i32),
}

impl EventStatus {
    /// Decodes the `status` of an event of kind `event`.
    #[must_use]
    pub fn decode(event: EventType, status: i32) -> Self {
        match (event, status) {
            (_, 0) => Self::Success,
            (_, i32::MIN..0) => Self::Errno(status.saturating_neg()),
            (EventType::Rejected, _) => Self::Reject(RejectReason::from_raw(status.unsigned_abs())),
            (EventType::Unreachable, _) => Self::Sidr(SidrStatus::from_raw(status.unsigned_abs())),
            _ => Self::Other(status),
        }
    }

    /// The errno, if that is what the status is.
    #[must_use]
    pub fn errno(self) -> Option<i32> {
        match self {
            Self::Errno(errno) => Some(errno),
            _ => None,
        }
    }
}

impl fmt::Display for EventStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Success => f.write_str("success"),
            Self::Errno(errno) => io::Error::from_raw_os_error(*errno).fmt(f),
            Self::Reject(reason) => reason.fmt(f),
            Self::Sidr(status) => status.fmt(f),
            Self::Other(status) => write!(f, "status {status}"),
        }
    }
}

/// Why a connection request was rejected: the reason code of the InfiniBand REJ message.
///
/// A program can only send [`Consumer`](Self::Consumer); all others come from the peer's kernel.
#[doc(alias = "ib_cm_rej_reason")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectReason {
    /// 1: no queue pair available.
    NoQp,
    /// 2: no end-to-end context available.
    NoEec,
    /// 3: no resources available.
    NoResources,
    /// 4: the peer waited in vain for a message of the handshake.
    Timeout,
    /// 5: the request is not supported.
    Unsupported,
    /// 6: the communication id is not known.
    InvalidCommId,
    /// 7: the communication instance is not valid.
    InvalidCommInstance,
    /// 8: nobody listens on that port: "connection refused".
    InvalidServiceId,
    /// 9: the transport type is not supported.
    InvalidTransportType,
    /// 10: the peer still has an old connection with the same numbers.
    StaleConnection,
    /// 12: the GID of the path is wrong.
    InvalidGid,
    /// 13: the LID of the path is wrong.
    InvalidLid,
    /// 14: the service level of the path is wrong.
    InvalidSl,
    /// 15: the traffic class of the path is wrong.
    InvalidTrafficClass,
    /// 16: the hop limit of the path is wrong.
    InvalidHopLimit,
    /// 17: the packet rate of the path is wrong.
    InvalidPacketRate,
    /// 24: ask another port and another connection manager.
    PortCmRedirect,
    /// 25: ask another port.
    PortRedirect,
    /// 26: the path MTU is not supported.
    InvalidMtu,
    /// 27: not enough responder resources.
    InsufficientResponderResources,
    /// 28: the program at the peer said no, or dropped the request without an answer.
    Consumer,
    /// 29: the RNR retry count is not supported.
    InvalidRnrRetry,
    /// 30: the communication id is in use already.
    DuplicateLocalCommId,
    /// 31: the class version is not supported.
    InvalidClassVersion,
    /// 32: the flow label of the path is wrong.
    InvalidFlowLabel,
    /// 35: a vendor option is not supported.
    VendorOptionNotSupported,
    /// Every other number, those for alternate paths among them.
    Unknown(u32),
}

impl RejectReason {
    /// The reason for the number in the REJ message.
    #[must_use]
    pub const fn from_raw(reason: u32) -> Self {
        match reason {
            1 => Self::NoQp,
            2 => Self::NoEec,
            3 => Self::NoResources,
            4 => Self::Timeout,
            5 => Self::Unsupported,
            6 => Self::InvalidCommId,
            7 => Self::InvalidCommInstance,
            8 => Self::InvalidServiceId,
            9 => Self::InvalidTransportType,
            10 => Self::StaleConnection,
            12 => Self::InvalidGid,
            13 => Self::InvalidLid,
            14 => Self::InvalidSl,
            15 => Self::InvalidTrafficClass,
            16 => Self::InvalidHopLimit,
            17 => Self::InvalidPacketRate,
            24 => Self::PortCmRedirect,
            25 => Self::PortRedirect,
            26 => Self::InvalidMtu,
            27 => Self::InsufficientResponderResources,
            28 => Self::Consumer,
            29 => Self::InvalidRnrRetry,
            30 => Self::DuplicateLocalCommId,
            31 => Self::InvalidClassVersion,
            32 => Self::InvalidFlowLabel,
            35 => Self::VendorOptionNotSupported,
            other => Self::Unknown(other),
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::NoQp => "no queue pair",
            Self::NoEec => "no end-to-end context",
            Self::NoResources => "no resources",
            Self::Timeout => "the peer timed out",
            Self::Unsupported => "unsupported request",
            Self::InvalidCommId => "invalid communication id",
            Self::InvalidCommInstance => "invalid communication instance",
            Self::InvalidServiceId => "nobody listens there",
            Self::InvalidTransportType => "invalid transport type",
            Self::StaleConnection => "stale connection",
            Self::InvalidGid => "invalid GID",
            Self::InvalidLid => "invalid LID",
            Self::InvalidSl => "invalid service level",
            Self::InvalidTrafficClass => "invalid traffic class",
            Self::InvalidHopLimit => "invalid hop limit",
            Self::InvalidPacketRate => "invalid packet rate",
            Self::PortCmRedirect => "redirected to another port and connection manager",
            Self::PortRedirect => "redirected to another port",
            Self::InvalidMtu => "invalid path MTU",
            Self::InsufficientResponderResources => "not enough responder resources",
            Self::Consumer => "the program at the peer said no",
            Self::InvalidRnrRetry => "invalid RNR retry count",
            Self::DuplicateLocalCommId => "duplicate communication id",
            Self::InvalidClassVersion => "invalid class version",
            Self::InvalidFlowLabel => "invalid flow label",
            Self::VendorOptionNotSupported => "vendor option not supported",
            Self::Unknown(_) => "reason",
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())?;
        match self {
            Self::Unknown(number) => write!(f, " {number}"),
            _ => Ok(()),
        }
    }
}

/// The answer to a look-up in the UDP port space (service id resolution, SIDR).
#[doc(alias = "ib_cm_sidr_status")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SidrStatus {
    /// 1: nobody serves that port.
    Unsupported,
    /// 2: the program at the peer said no.
    Rejected,
    /// 3: the peer has no queue pair for it.
    NoQp,
    /// 4: ask elsewhere.
    Redirect,
    /// 5: the version is not supported.
    UnsupportedVersion,
    /// Every other number.
    Unknown(u32),
}

impl SidrStatus {
    /// The status for the number in the answer.
    #[must_use]
    pub const fn from_raw(status: u32) -> Self {
        match status {
            1 => Self::Unsupported,
            2 => Self::Rejected,
            3 => Self::NoQp,
            4 => Self::Redirect,
            5 => Self::UnsupportedVersion,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for SidrStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported => f.write_str("nobody serves that port"),
            Self::Rejected => f.write_str("the program at the peer said no"),
            Self::NoQp => f.write_str("no queue pair"),
            Self::Redirect => f.write_str("redirected"),
            Self::UnsupportedVersion => f.write_str("unsupported version"),
            Self::Unknown(number) => write!(f, "SIDR status {number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_an_event() {
        for number in 0..=15 {
            let event = EventType::from_raw(number);
            assert!(event.name().is_some(), "{number} is known");
        }
        assert_eq!(EventType::from_raw(16), EventType::Unknown(16));
        assert_eq!(
            EventType::from_raw(u32::MAX).to_string(),
            "unknown event 4294967295"
        );
    }

    #[test]
    fn a_status_reads_by_the_kind_of_its_event() {
        let decode = EventStatus::decode;
        assert_eq!(
            decode(EventType::Rejected, 8),
            EventStatus::Reject(RejectReason::InvalidServiceId)
        );
        assert_eq!(
            decode(EventType::Rejected, -111),
            EventStatus::Errno(libc::ECONNREFUSED)
        );
        assert_eq!(
            decode(EventType::AddrError, -19),
            EventStatus::Errno(libc::ENODEV)
        );
        assert_eq!(decode(EventType::AddrError, 3), EventStatus::Other(3));
        assert_eq!(
            decode(EventType::Unreachable, 1),
            EventStatus::Sidr(SidrStatus::Unsupported)
        );
        assert_eq!(decode(EventType::Disconnected, 0), EventStatus::Success);
        assert_eq!(
            decode(EventType::AddrError, i32::MIN),
            EventStatus::Errno(i32::MAX)
        );
    }

    #[test]
    fn every_reject_reason_says_something_of_its_own() {
        let texts: std::collections::HashSet<String> = (0..64)
            .map(|n| RejectReason::from_raw(n).to_string())
            .collect();
        assert_eq!(texts.len(), 64);
        assert_eq!(RejectReason::from_raw(11).to_string(), "reason 11");
    }
}
