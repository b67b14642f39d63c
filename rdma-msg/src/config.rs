//! What can be set, with defaults that are meant to be kept.
//!
//! The defaults avoid what hangs or stalls elsewhere: no retry count of 7 (on soft-RoCE that means
//! for ever), no receiver-not-ready timer of 0 (655 ms), no depth of 0 (reads then hang). A
//! configuration is checked once, when an endpoint is made from it; nothing looks at it again.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_cm::{ConnParam, IdOptions, MAX_ACCEPT_DATA, MAX_CONNECT_DATA};

use crate::error::OpenError;
use crate::handshake;

/// How a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Poll without sleeping: the lowest latency, at the price of a processor. For at most a second
    /// at a time: who has waited that long sleeps after all.
    Spin,
    /// Sleep until the device raises an event: no processor time while idle, but two system calls
    /// and a wake-up later.
    Event,
    /// Poll for a while, then sleep.
    Hybrid {
        /// For how long to poll.
        spin: Duration,
    },
}

impl Default for Wait {
    fn default() -> Wait {
        Wait::Hybrid {
            spin: Duration::from_micros(20),
        }
    }
}

impl Wait {
    /// For how long to poll before sleeping.
    pub(crate) fn spin_time(self) -> Duration {
        match self {
            Wait::Spin => Duration::from_secs(1),
            Wait::Event => Duration::ZERO,
            Wait::Hybrid { spin } => spin.min(Duration::from_secs(1)),
        }
    }
}

/// How an endpoint gets its receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Receive {
    /// The endpoint keeps [`recv_depth`](EndpointConfig::recv_depth) receives posted, from before it
    /// is connected, and hands messages out in order: [`Endpoint::recv`](crate::Endpoint::recv).
    #[default]
    Managed,
    /// The program posts each receive: [`Endpoint::post_recv`](crate::Endpoint::post_recv), and
    /// [`Prepared::post_recv`](crate::Prepared::post_recv) before the connection is made.
    Manual,
}

/// Settings of a [`Worker`](crate::Worker).
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Depth of the completion queue: operations that all endpoints together may have in flight. Each
    /// endpoint reserves `send_depth + recv_depth + 1` of them while it lives, so the queue cannot
    /// overrun. More than the device offers is an error. Default 4096.
    pub max_in_flight: u32,
    /// Bytes of each buffer of the pool. Default 4096.
    pub buf_size: usize,
    /// Buffers in the pool. Default 1024.
    pub buf_count: usize,
    /// How threads wait.
    pub wait: Wait,
}

impl Default for WorkerConfig {
    fn default() -> WorkerConfig {
        WorkerConfig {
            max_in_flight: 4096,
            buf_size: 4096,
            buf_count: 1024,
            wait: Wait::default(),
        }
    }
}

/// Settings of an [`Endpoint`](crate::Endpoint), for both sides.
///
/// ```
/// use rdma_msg::EndpointConfig;
/// let config = EndpointConfig { send_depth: 16, max_message: 64 << 10, ..Default::default() };
/// ```
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Sends, writes, reads and atomics that may be in flight. Default 128.
    pub send_depth: u32,
    /// Receives that may be posted; with [`Receive::Managed`], that are. Default 128.
    pub recv_depth: u32,
    /// Longest message that can be received; the size of each managed receive. The peer is told, if
    /// it uses this library and [`handshake`](Self::handshake) is on. Default 4096.
    pub max_message: usize,
    /// Who posts the receives.
    pub receive: Receive,
    /// Messages up to this many bytes travel in the work request. The device may grant more, see
    /// [`Endpoint::max_inline`](crate::Endpoint::max_inline), and an error names the limit if it
    /// grants less. Default 64.
    pub max_inline: u32,
    /// Buffers that one operation can have. Default 4, at most [`MAX_SGE`].
    pub max_sge: u32,
    /// In a batch, one operation in this many reports its success; the others are known to have
    /// succeeded when a later one has. 1, the default: every operation reports. The last of a batch
    /// always does, and so does one in every half queue.
    pub signal_every: u32,
    /// How threads wait, for the private worker of the endpoint; a shared worker has its own setting.
    pub wait: Wait,
    /// Buffers of a private worker's pool beyond the managed receives; `None` is `send_depth`, and
    /// one for each managed receive, so that as many messages can be held as can be received.
    pub extra_bufs: Option<usize>,
    /// Within this time the connection is made, or the attempt fails. Default 5 s.
    pub connect_deadline: Duration,
    /// How long [`Endpoint::close`](crate::Endpoint::close) is usually given; dropping does not wait.
    /// Default 1 s.
    pub close_deadline: Duration,
    /// How often the device repeats a request that is not acknowledged, 0 to 6 (7 is for ever on
    /// some devices). Default 6.
    pub retry_count: u8,
    /// How often the device repeats a send that finds no receive posted: 0 to 6, or 7 for ever.
    /// Default 7: with fewer, a receiver that is late by a few milliseconds ends the connection.
    /// What bounds it is [`stall_timeout`](Self::stall_timeout).
    pub rnr_retry_count: u8,
    /// How long a peer that sent too early is told to wait, as a code: 12 is 0.64 ms. 0 would be
    /// 655 ms. Default 12.
    pub min_rnr_timer: u8,
    /// How long the device waits for an acknowledgement, as a code: 4.096 µs · 2^code, 1 to 31. With
    /// the retries it bounds how long a dead peer goes unnoticed by operations in flight: a device
    /// may take up to four times as long for each of `retry_count + 1` tries, usually it takes one
    /// to two; with the defaults, 16 and 6, about 2 s. Default 16.
    pub ack_timeout: u8,
    /// How long sends, writes, reads and atomics may be in flight without a single one completing,
    /// before the endpoint ends with [`Cause::Stalled`](crate::Cause::Stalled); noticed after one to
    /// one and a half times as long. That is a peer that is alive and posts no receives. 1 ms to a
    /// year; `None`: for ever. Default 30 s.
    pub stall_timeout: Option<Duration>,
    /// Reads and atomics of the peer that this side serves at once; 0 forbids them. Default 16,
    /// lowered to what the device can.
    pub responder_resources: u8,
    /// Reads and atomics of this side that are in flight at once; further ones wait in the device.
    /// Default 16, lowered to what the device can.
    pub initiator_depth: u8,
    /// How often to probe an idle connection with a write of length zero, which fails if the peer is
    /// gone. 1 ms to a year. Default `None`: a peer that vanishes while nothing is in flight is not
    /// noticed.
    pub keepalive: Option<Duration>,
    /// Bytes for the peer's program, see [`Incoming::private_data`](crate::Incoming::private_data):
    /// at most 40 from the connecting side and 180 from the accepting one (56 and 196 without
    /// [`handshake`](Self::handshake)).
    pub private_data: Vec<u8>,
    /// Whether to tell the peer this side's limits, in 16 bytes of private data. Default true; a peer
    /// that is not of this library sees them as data and can be connected to all the same.
    pub handshake: bool,
    /// The local address to connect from; `None` leaves it to the routing table.
    pub source: Option<SocketAddr>,
    /// The type of service (DSCP) of the packets; `None` leaves it to the system.
    pub tos: Option<u8>,
    /// Whether a listener may take an address that another one has just left. Default true.
    pub reuse_addr: bool,
    /// Requests that may wait to be accepted. Default 128.
    pub backlog: u32,
}

/// The most buffers one operation can have, whatever the device offers.
pub const MAX_SGE: u32 = 16;

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        EndpointConfig {
            send_depth: 128,
            recv_depth: 128,
            max_message: 4096,
            receive: Receive::Managed,
            max_inline: 64,
            max_sge: 4,
            signal_every: 1,
            wait: Wait::default(),
            extra_bufs: None,
            connect_deadline: Duration::from_secs(5),
            close_deadline: Duration::from_secs(1),
            retry_count: 6,
            rnr_retry_count: 7,
            min_rnr_timer: 12,
            stall_timeout: Some(Duration::from_secs(30)),
            ack_timeout: 16,
            responder_resources: 16,
            initiator_depth: 16,
            keepalive: None,
            private_data: Vec::new(),
            handshake: true,
            source: None,
            tos: None,
            reuse_addr: true,
            backlog: 128,
        }
    }
}

impl EndpointConfig {
    /// Checks every field against its limits, for the connecting side.
    pub(crate) fn check_to_connect(&self) -> Result<(), OpenError> {
        self.check()?;
        self.check_private_data(MAX_CONNECT_DATA)
    }

    /// As `check_to_connect`, for the accepting side.
    pub(crate) fn check_to_accept(&self) -> Result<(), OpenError> {
        self.check()?;
        self.check_private_data(MAX_ACCEPT_DATA)
    }

    /// A message takes `limit` bytes, of which the handshake needs some. (The accepting side leaves it
    /// out if the peer does not know it, but has to be able to answer any peer.)
    fn check_private_data(&self, limit: usize) -> Result<(), OpenError> {
        let own = if self.handshake { handshake::LEN } else { 0 };
        let len = self.private_data.len();
        between("private_data.len()", len as u64, 0, (limit - own) as u64)
    }

    /// Checks what both sides have in common.
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        between("send_depth", self.send_depth.into(), 1, MAX_DEPTH)?;
        between("recv_depth", self.recv_depth.into(), 1, MAX_DEPTH)?;
        between("max_message", self.max_message as u64, 1, 1 << 31)?;
        between("max_sge", self.max_sge.into(), 1, MAX_SGE.into())?;
        between("signal_every", self.signal_every.into(), 1, MAX_DEPTH)?;
        between("retry_count", self.retry_count.into(), 0, 6)?;
        between("rnr_retry_count", self.rnr_retry_count.into(), 0, 7)?;
        between("min_rnr_timer", self.min_rnr_timer.into(), 1, 31)?;
        between("ack_timeout", self.ack_timeout.into(), 1, 31)?;
        let interval = |field, time: Option<Duration>| {
            let millis = time.map_or(1, |time| time.as_millis());
            between(field, u64::try_from(millis).unwrap_or(u64::MAX), 1, YEAR)
        };
        interval("keepalive", self.keepalive)?;
        interval("stall_timeout", self.stall_timeout)?;
        Ok(())
    }

    /// Operations that the endpoint may have in flight, its own probe included.
    pub(crate) fn in_flight(&self) -> u32 {
        self.send_depth + self.recv_depth + 1
    }

    /// Settings of a worker for one endpoint like this, which was [checked](Self::check).
    pub(crate) fn private_worker(&self) -> WorkerConfig {
        let managed = match self.receive {
            Receive::Managed => self.recv_depth as usize,
            Receive::Manual => 0,
        };
        let extra = self
            .extra_bufs
            .unwrap_or(self.send_depth as usize + managed);
        WorkerConfig {
            max_in_flight: self.in_flight(),
            buf_size: self.max_message,
            buf_count: managed.saturating_add(extra),
            wait: self.wait,
        }
    }

    /// Longest run of unsignaled operations: what the user wants, but at least one in every half
    /// queue is signaled, so that slots come back in time.
    pub(crate) fn max_unsignaled(&self) -> u32 {
        (self.signal_every - 1).min((self.send_depth / 2).saturating_sub(1))
    }

    pub(crate) fn conn_param(&self, private_data: Vec<u8>) -> ConnParam {
        ConnParam {
            private_data,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            min_rnr_timer: self.min_rnr_timer,
            ..ConnParam::default()
        }
    }

    pub(crate) fn id_options(&self) -> IdOptions {
        IdOptions {
            tos: self.tos,
            ack_timeout: Some(self.ack_timeout),
            ..IdOptions::default()
        }
    }
}

fn between(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), OpenError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(OpenError::Config {
            field,
            value,
            min,
            max,
        })
    }
}

const MAX_DEPTH: u64 = 1 << 20;

/// In milliseconds.
const YEAR: u64 = 365 * 24 * 60 * 60 * 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_accepted() {
        EndpointConfig::default().check().unwrap();
    }

    #[test]
    fn what_hangs_or_stalls_is_refused_by_name() {
        let bad = [
            (
                "send_depth",
                EndpointConfig {
                    send_depth: 0,
                    ..Default::default()
                },
            ),
            (
                "recv_depth",
                EndpointConfig {
                    recv_depth: 0,
                    ..Default::default()
                },
            ),
            (
                "retry_count",
                EndpointConfig {
                    retry_count: 7,
                    ..Default::default()
                },
            ),
            (
                "min_rnr_timer",
                EndpointConfig {
                    min_rnr_timer: 0,
                    ..Default::default()
                },
            ),
            (
                "ack_timeout",
                EndpointConfig {
                    ack_timeout: 0,
                    ..Default::default()
                },
            ),
            (
                "max_sge",
                EndpointConfig {
                    max_sge: 17,
                    ..Default::default()
                },
            ),
        ];
        for (name, config) in bad {
            let error = config.check().unwrap_err();
            assert!(
                matches!(error, OpenError::Config { field, .. } if field == name),
                "{error}"
            );
        }
    }

    #[test]
    fn private_data_has_the_room_that_the_handshake_leaves() {
        for (handshake, to_connect, to_accept) in [(true, 40, 180), (false, 56, 196)] {
            let config = |len| EndpointConfig {
                private_data: vec![1; len],
                handshake,
                ..Default::default()
            };
            config(to_connect).check_to_connect().unwrap();
            config(to_accept).check_to_accept().unwrap();
            for (error, max) in [
                (config(to_connect + 1).check_to_connect(), to_connect),
                (config(to_accept + 1).check_to_accept(), to_accept),
            ] {
                let text = error.unwrap_err().to_string();
                let (asked, field) = (max + 1, "private_data.len()");
                assert_eq!(
                    text,
                    format!("{field} = {asked} is not possible: 0 to {max} is allowed")
                );
            }
        }
    }

    #[test]
    fn one_operation_in_every_half_queue_is_signaled() {
        let config = |send_depth, signal_every| {
            EndpointConfig {
                send_depth,
                signal_every,
                ..Default::default()
            }
            .max_unsignaled()
        };
        assert_eq!(config(128, 1), 0);
        assert_eq!(config(128, 16), 15);
        assert_eq!(config(16, 100), 7);
        assert_eq!(config(1, 100), 0);
    }
}
