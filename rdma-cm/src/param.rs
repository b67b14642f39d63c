//! The parameters of a connection, checked and negotiated before librdmacm sees them.
//!
//! A zero-filled `rdma_conn_param` asks for no retries and no outstanding reads, and a read on such
//! a connection may simply never complete. So the parameters here start from values that work, and
//! what the device or the peer cannot do is lowered to what they can.

use crate::error::{CmError, Result};

/// The longest private data of a connect in the TCP port space.
pub const MAX_CONNECT_DATA: usize = 56;
/// The longest private data of an accept in the TCP port space.
pub const MAX_ACCEPT_DATA: usize = 196;
/// The longest private data of a reject in the TCP port space.
pub const MAX_REJECT_DATA: usize = 148;
/// What one side wants of a connection.
///
/// The default works everywhere: 16 reads and atomics each way (or as many as the device has), six
/// retries, and an RNR timer of 0.64 ms. Both sides may differ; see [`Negotiated`] for what came out.
///
/// ```
/// use rdma_cm::ConnParam;
/// let param = ConnParam { private_data: b"hello".to_vec(), ..ConnParam::default() };
/// assert_eq!(param.retry_count, 6);
/// ```
#[doc(alias = "rdma_conn_param")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnParam {
    /// Bytes for the peer's program: at most [`MAX_CONNECT_DATA`] in a connect and
    /// [`MAX_ACCEPT_DATA`] in an accept. The peer sees them padded with zeros to that limit, so
    /// data of varying length has to carry its length.
    pub private_data: Vec<u8>,
    /// How many reads and atomics of the peer this side serves at a time; lowered to what the
    /// device can do. With 0 the peer cannot read at all.
    pub responder_resources: u8,
    /// How many reads and atomics this side has outstanding at a time; lowered to what the device
    /// can do. With 0 this side cannot read at all.
    pub initiator_depth: u8,
    /// How often this side's queue pair repeats an unanswered packet, 0 to 7. 7 means for ever on
    /// some devices (soft-RoCE is one).
    pub retry_count: u8,
    /// How often a send is repeated when the receiver has no receive posted, 0 to 7, where 7 means
    /// for ever. Each side's queue pair uses the smaller one of both sides' values.
    pub rnr_retry_count: u8,
    /// How long the peer waits before it repeats a send for which this side had no receive, as the
    /// code of the InfiniBand specification, 0 to 31: 12 is 0.64 ms, 0 is 655 ms, 1 is 0.01 ms.
    pub min_rnr_timer: u8,
    /// Whether the hardware's end-to-end flow control is asked for.
    pub flow_control: bool,
    /// Whether this side's queue pair takes its receives from a shared receive queue.
    pub srq: bool,
}

impl Default for ConnParam {
    fn default() -> Self {
        Self {
            private_data: Vec::new(),
            responder_resources: 16,
            initiator_depth: 16,
            retry_count: 6,
            rnr_retry_count: 6,
            min_rnr_timer: 12,
            flow_control: true,
            srq: false,
        }
    }
}

impl ConnParam {
    /// Checks everything that no peer and no device has a say in.
    pub(crate) fn check(&self, message: &'static str, limit: usize) -> Result<()> {
        check_private_data(&self.private_data, message, limit)?;
        at_most("retry_count", self.retry_count, 7, "0 to 7 is allowed")?;
        at_most(
            "rnr_retry_count",
            self.rnr_retry_count,
            7,
            "0 to 7 is allowed",
        )?;
        at_most(
            "min_rnr_timer",
            self.min_rnr_timer,
            31,
            "0 to 31 is allowed",
        )
    }

    /// The depths that remain within `limit`.
    pub(crate) fn depths_within(&self, limit: Negotiated) -> Negotiated {
        Negotiated {
            responder_resources: self.responder_resources.min(limit.responder_resources),
            initiator_depth: self.initiator_depth.min(limit.initiator_depth),
        }
    }
}

pub(crate) fn check_private_data(data: &[u8], message: &'static str, limit: usize) -> Result<()> {
    if data.len() <= limit {
        Ok(())
    } else {
        Err(CmError::PrivateDataTooLong {
            message,
            asked: data.len(),
            limit,
        })
    }
}

fn at_most(field: &'static str, value: u8, most: u8, allowed: &'static str) -> Result<()> {
    if value <= most {
        Ok(())
    } else {
        Err(CmError::Config {
            field,
            asked: value.to_string(),
            allowed,
        })
    }
}

/// How many reads and atomics may be outstanding, seen from this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// How many of the peer's this side serves at a time.
    pub responder_resources: u8,
    /// How many this side may have outstanding at a time.
    pub initiator_depth: u8,
}

impl Negotiated {
    /// The smaller one of both, for each direction.
    pub(crate) fn min(self, other: Self) -> Self {
        Self {
            responder_resources: self.responder_resources.min(other.responder_resources),
            initiator_depth: self.initiator_depth.min(other.initiator_depth),
        }
    }
}

/// What the peer asks for in its connection request, already turned to this side's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestParam {
    /// How many reads and atomics the peer would like this side to serve at a time.
    pub responder_resources: u8,
    /// How many reads and atomics the peer lets this side have outstanding at a time.
    pub initiator_depth: u8,
    /// How often the peer repeats an unanswered packet.
    pub retry_count: u8,
    /// How often the peer would like a send to it to be repeated when it has no receive posted.
    pub rnr_retry_count: u8,
    /// Whether the peer asks for the hardware's end-to-end flow control.
    pub flow_control: bool,
    /// Whether the peer's queue pair takes its receives from a shared receive queue.
    pub srq: bool,
    /// The number of the peer's queue pair.
    pub qp_num: u32,
}

impl RequestParam {
    pub(crate) fn depths(&self) -> Negotiated {
        Negotiated {
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_possible_and_waits_neither_for_ever_nor_for_nothing() {
        let param = ConnParam::default();
        param.check("connect", MAX_CONNECT_DATA).unwrap();
        assert!((1..7).contains(&param.retry_count));
        assert!((1..7).contains(&param.rnr_retry_count));
        assert!(param.min_rnr_timer > 0);
        assert!(param.responder_resources > 0 && param.initiator_depth > 0);
    }

    #[test]
    fn private_data_may_fill_the_message_and_not_more() {
        let param = |len| ConnParam {
            private_data: vec![1; len],
            ..ConnParam::default()
        };
        param(56).check("connect", MAX_CONNECT_DATA).unwrap();
        let error = param(57).check("connect", MAX_CONNECT_DATA).unwrap_err();
        assert_eq!(
            error.to_string(),
            "57 bytes of private data are too many: connect carries 56"
        );
    }

    #[test]
    fn a_count_that_does_not_fit_its_field_is_refused() {
        let param = ConnParam {
            retry_count: 8,
            ..ConnParam::default()
        };
        let error = param.check("connect", MAX_CONNECT_DATA).unwrap_err();
        assert_eq!(
            error.to_string(),
            "retry_count = 8 is not possible: 0 to 7 is allowed"
        );
        let param = ConnParam {
            rnr_retry_count: 8,
            ..ConnParam::default()
        };
        assert!(param.check("connect", MAX_CONNECT_DATA).is_err());
        let param = ConnParam {
            min_rnr_timer: 32,
            ..ConnParam::default()
        };
        assert!(param.check("connect", MAX_CONNECT_DATA).is_err());
    }

    #[test]
    fn depths_are_lowered_to_the_device_and_to_the_request() {
        let device = Negotiated {
            responder_resources: 4,
            initiator_depth: 128,
        };
        let request = Negotiated {
            responder_resources: 8,
            initiator_depth: 2,
        };
        let depths = ConnParam::default().depths_within(device.min(request));
        assert_eq!(
            depths,
            Negotiated {
                responder_resources: 4,
                initiator_depth: 2
            }
        );
    }
}
