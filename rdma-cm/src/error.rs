//! What can go wrong while connecting, told with the step, the addresses and the reason.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::device::DeviceAddress;
use crate::event::{EventStatus, EventType, RejectReason};
use crate::id::{CmId, News};

/// The result of everything in this crate.
pub type Result<T, E = CmError> = std::result::Result<T, E>;

/// The step of setting up or ending a connection at which something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Opening an event channel, that is `/dev/infiniband/rdma_cm`.
    OpenChannel,
    /// Making an id.
    CreateId,
    /// Setting an option of an id.
    SetOption,
    /// Binding to a local address.
    Bind,
    /// Starting to listen.
    Listen,
    /// Waiting for a connection request.
    Request,
    /// Resolving a host name.
    Name,
    /// Resolving the peer's address to a device and port of this host.
    ResolveAddr,
    /// Resolving the path to the peer.
    ResolveRoute,
    /// Getting or keeping the device.
    Device,
    /// Moving the queue pair to a state.
    QueuePair,
    /// Asking the peer for a connection.
    Connect,
    /// Telling the peer that its answer arrived.
    Establish,
    /// Accepting a request.
    Accept,
    /// Rejecting a request.
    Reject,
    /// Giving an accepted request an event channel of its own.
    Migrate,
    /// Waiting for an event.
    Event,
    /// Reporting an event of the device to the connection manager.
    Notify,
    /// Ending the connection.
    Disconnect,
    /// Joining a multicast group.
    JoinMulticast,
    /// Leaving a multicast group.
    LeaveMulticast,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenChannel => "opening an event channel",
            Self::CreateId => "making an id",
            Self::SetOption => "setting an option",
            Self::Bind => "binding to the local address",
            Self::Listen => "starting to listen",
            Self::Request => "waiting for a connection request",
            Self::Name => "resolving the name",
            Self::ResolveAddr => "resolving the address",
            Self::ResolveRoute => "resolving the route",
            Self::Device => "keeping the device",
            Self::QueuePair => "moving the queue pair",
            Self::Connect => "waiting for the peer's answer",
            Self::Establish => "confirming the peer's answer",
            Self::Accept => "accepting the request",
            Self::Reject => "rejecting the request",
            Self::Migrate => "moving the request to a channel of its own",
            Self::Event => "waiting for an event",
            Self::Notify => "notifying the connection manager",
            Self::Disconnect => "disconnecting",
            Self::JoinMulticast => "joining the multicast group",
            Self::LeaveMulticast => "leaving the multicast group",
        })
    }
}

/// Why a step failed.
///
/// Every variant names what a reader of a log needs: the address, the step, and the reason. Unless
/// a method says otherwise, its subject is gone after an error, and so is everything it owned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// The connection manager cannot be opened at all.
    #[error(
        "the RDMA connection manager cannot be used ({source}): it needs an RDMA device and \
         /dev/infiniband/rdma_cm; load the driver of the device and run `modprobe rdma_ucm` as root, \
         and see that this user may open that file"
    )]
    NoConnectionManager {
        /// What opening the channel reported.
        source: io::Error,
    },

    /// No RDMA device has the local address asked for, or none lies on the way to the peer.
    #[error("no RDMA device has the address {addr}, or leads there{}", Candidates(.known))]
    NoDevice {
        /// The address: the local one if one was given, the peer's otherwise.
        addr: SocketAddr,
        /// The addresses of this host that do belong to an RDMA device, if they were looked for: calls
        /// that wait do that, the others leave it to [`with_candidates`](CmError::with_candidates).
        known: Option<Vec<DeviceAddress>>,
    },

    /// The routing table of this host has no way to the peer.
    #[error("no route to {peer}: {source}")]
    NoRoute {
        /// The peer.
        peer: SocketAddr,
        /// What the kernel reported: `ENETUNREACH` or `EHOSTUNREACH`.
        source: io::Error,
    },

    /// The peer is there, but nobody listens on that port.
    #[error("connection refused: nobody listens on {peer}")]
    Refused {
        /// The peer.
        peer: SocketAddr,
    },

    /// The peer rejected the connection.
    #[error("{peer} rejected the connection: {reason}{}", Data(.private_data))]
    Rejected {
        /// The peer.
        peer: SocketAddr,
        /// The reason that its program, or its kernel, gave.
        reason: RejectReason,
        /// What its program said; padded with zeros to the limit of the message.
        private_data: Vec<u8>,
    },

    /// The peer did not answer within the kernel's own limit, or the look-up of a service failed.
    #[error("{peer} is unreachable while {step}: {status}")]
    Unreachable {
        /// The step.
        step: Step,
        /// The peer.
        peer: SocketAddr,
        /// What the event said.
        status: EventStatus,
    },

    /// The deadline passed first. The id is gone, and with it the attempt.
    #[error("timed out after {after:?} while {step}{}", To(.peer))]
    TimedOut {
        /// The step that was under way.
        step: Step,
        /// The peer, if there is one.
        peer: Option<SocketAddr>,
        /// How long it was tried, from the start of the first step.
        after: Duration,
    },

    /// Another socket or listener holds the local address.
    #[error("address in use: {addr}")]
    AddressInUse {
        /// The local address.
        addr: SocketAddr,
        /// What the kernel reported.
        source: io::Error,
    },

    /// The device went away. Everything that was made on it has to be dropped.
    #[error("RDMA device {device} was removed while {step}")]
    DeviceRemoved {
        /// The step.
        step: Step,
        /// The device's name, or a question mark if the id was not bound to one yet.
        device: String,
    },

    /// The peer ended the connection before it was up.
    #[error("{peer} disconnected while {step}")]
    Disconnected {
        /// The step.
        step: Step,
        /// The peer.
        peer: SocketAddr,
    },

    /// The request cannot be answered any more: its peer has withdrawn it, or is gone.
    #[error("{peer} has withdrawn its request ({call}: {source})")]
    Withdrawn {
        /// The peer.
        peer: SocketAddr,
        /// The C function that found out.
        call: &'static str,
        /// What it reported.
        source: io::Error,
    },

    /// More private data than the message can carry; nothing was sent.
    #[error("{asked} bytes of private data are too many: {message} carries {limit}")]
    PrivateDataTooLong {
        /// The message: `connect`, `accept` or `reject`.
        message: &'static str,
        /// The length that was asked for.
        asked: usize,
        /// The longest possible one.
        limit: usize,
    },

    /// A value is outside what the connection manager allows; nothing was done.
    #[error("{field} = {asked} is not possible: {allowed}")]
    Config {
        /// The field, by its name in this crate.
        field: &'static str,
        /// What was asked for.
        asked: String,
        /// What is allowed.
        allowed: &'static str,
    },

    /// A function of librdmacm failed.
    #[error("{call} failed while {step}{}: {source}", To(.peer))]
    Call {
        /// The C function.
        call: &'static str,
        /// The step.
        step: Step,
        /// The peer, or the local address where there is no peer.
        peer: Option<SocketAddr>,
        /// What the function reported.
        source: io::Error,
    },

    /// An event reported a failure that has no variant of its own.
    #[error("{event} while {step} {peer}: {status}")]
    Event {
        /// The step.
        step: Step,
        /// The peer.
        peer: SocketAddr,
        /// The event.
        event: EventType,
        /// Its status.
        status: EventStatus,
    },

    /// A verbs call failed: the queue pair could not be moved, or the device not be queried.
    #[error("{source} (while {step})")]
    Verbs {
        /// The step.
        step: Step,
        /// What the call reported.
        source: rdma_core_rs::Error,
    },

    /// A name could not be resolved.
    #[error("cannot resolve {name}: {source}")]
    Name {
        /// The name of the host, and of the service.
        name: String,
        /// What the resolver reported.
        source: io::Error,
    },

    /// The id was made, or the connection manager first used, before a `fork`, and this is the child.
    ///
    /// The child shares the id's descriptor, and the devices that librdmacm has opened, with its parent,
    /// so a call made here would act on the parent's. Fork before anything of RDMA is used, or `exec` in
    /// the child.
    #[error("the connection manager was used before a fork and cannot be used in the child")]
    Forked,

    /// The step was over already: it had handed out its result, or failed.
    #[error("{step} is over: its result was handed out, or it failed")]
    Finished {
        /// The step.
        step: Step,
    },
}

impl CmError {
    /// The errno of the failed call or event, where there was one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::NoConnectionManager { source }
            | Self::NoRoute { source, .. }
            | Self::AddressInUse { source, .. }
            | Self::Withdrawn { source, .. }
            | Self::Name { source, .. }
            | Self::Call { source, .. } => source.raw_os_error(),
            Self::Verbs { source, .. } => source.errno(),
            Self::Unreachable { status, .. } | Self::Event { status, .. } => status.errno(),
            _ => None,
        }
    }

    /// Whether the deadline of the step, or of the whole connect, passed.
    #[must_use]
    pub fn is_timed_out(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }

    /// The error for an event that ends a step.
    pub(crate) fn from_news(step: Step, peer: SocketAddr, news: News, id: &CmId) -> Self {
        let News {
            event,
            status,
            private_data,
            ..
        } = news;
        match (event, status) {
            (EventType::Rejected, EventStatus::Reject(RejectReason::InvalidServiceId))
            | (EventType::Rejected, EventStatus::Errno(libc::ECONNREFUSED)) => {
                Self::Refused { peer }
            }
            (EventType::Rejected, EventStatus::Reject(reason)) => Self::Rejected {
                peer,
                reason,
                private_data,
            },
            (EventType::AddrError, EventStatus::Errno(libc::ENODEV)) => Self::no_device(peer),
            (
                EventType::AddrError,
                EventStatus::Errno(errno @ (libc::ENETUNREACH | libc::EHOSTUNREACH)),
            ) => Self::NoRoute {
                peer,
                source: io::Error::from_raw_os_error(errno),
            },
            (EventType::Unreachable, _) => Self::Unreachable { step, peer, status },
            (EventType::Disconnected | EventType::TimewaitExit, _) => {
                Self::Disconnected { step, peer }
            }
            (EventType::DeviceRemoval, _) => Self::device_removed(step, id),
            (event, status) => Self::Event {
                step,
                peer,
                event,
                status,
            },
        }
    }

    pub(crate) fn device_removed(step: Step, id: &CmId) -> Self {
        Self::DeviceRemoved {
            step,
            device: id.device_name().unwrap_or_else(|| "?".to_owned()),
        }
    }

    /// A request reports nothing when its peer gives up; the next call on it is refused as one on an
    /// id in the wrong state.
    pub(crate) fn or_withdrawn(self, peer: SocketAddr) -> Self {
        match self {
            Self::Call { call, source, .. } if source.raw_os_error() == Some(libc::EINVAL) => {
                Self::Withdrawn { peer, call, source }
            }
            other => other,
        }
    }

    pub(crate) fn call(
        call: &'static str,
        step: Step,
        peer: Option<SocketAddr>,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Call {
            call,
            step,
            peer,
            source,
        }
    }

    pub(crate) fn verbs(step: Step) -> impl FnOnce(rdma_core_rs::Error) -> Self {
        move |source| Self::Verbs { step, source }
    }
}

/// The addresses that would do, as a half sentence, or nothing.
struct Candidates<'a>(&'a Option<Vec<DeviceAddress>>);

impl fmt::Display for Candidates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(known) = self.0 else { return Ok(()) };
        let Some((first, rest)) = known.split_first() else {
            return f.write_str("; no address of this host belongs to one");
        };
        write!(f, "; these do: {first}")?;
        rest.iter().try_for_each(|addr| write!(f, ", {addr}"))
    }
}

/// Private data without its padding, escaped, or nothing.
struct Data<'a>(&'a [u8]);

impl fmt::Display for Data<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.iter().rposition(|&byte| byte != 0) {
            Some(last) => write!(f, ", \"{}\"", self.0[..=last].escape_ascii()),
            None => Ok(()),
        }
    }
}

/// The peer in parentheses, or nothing.
struct To<'a>(&'a Option<SocketAddr>);

impl fmt::Display for To<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(addr) => write!(f, " ({addr})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> SocketAddr {
        "192.168.99.2:7471".parse().unwrap()
    }

    #[test]
    fn a_timeout_names_the_step_the_peer_and_the_time() {
        let error = CmError::TimedOut {
            step: Step::ResolveRoute,
            peer: Some(peer()),
            after: Duration::from_secs(5),
        };
        assert_eq!(
            error.to_string(),
            "timed out after 5s while resolving the route (192.168.99.2:7471)"
        );
        assert!(error.is_timed_out());
    }

    #[test]
    fn a_rejection_shows_the_data_without_its_padding() {
        let mut private_data = b"busy\x01".to_vec();
        private_data.resize(148, 0);
        let error = CmError::Rejected {
            peer: peer(),
            reason: RejectReason::Consumer,
            private_data,
        };
        assert_eq!(
            error.to_string(),
            "192.168.99.2:7471 rejected the connection: the program at the peer said no, \"busy\\x01\""
        );
    }

    #[test]
    fn a_missing_device_comes_with_the_addresses_that_would_do() {
        let known = vec![DeviceAddress {
            addr: "192.168.99.1:0".parse().unwrap(),
            device: "rxe0".to_owned(),
            port_num: 1,
        }];
        let error = CmError::NoDevice {
            addr: "127.0.0.1:5".parse().unwrap(),
            known: Some(known),
        };
        assert_eq!(
            error.to_string(),
            "no RDMA device has the address 127.0.0.1:5, or leads there; these do: 192.168.99.1 (rxe0)"
        );
        let none = CmError::NoDevice {
            addr: peer(),
            known: Some(Vec::new()),
        };
        assert!(
            none.to_string()
                .ends_with("; no address of this host belongs to one")
        );
        assert_eq!(
            CmError::no_device(peer()).to_string(),
            "no RDMA device has the address 192.168.99.2:7471, or leads there"
        );
    }

    #[test]
    fn the_error_stays_small_enough_for_a_result() {
        assert!(size_of::<CmError>() <= 128, "{}", size_of::<CmError>());
    }
}
