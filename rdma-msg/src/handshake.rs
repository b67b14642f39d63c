//! What two endpoints of this library tell each other while they connect.
//!
//! It travels in front of the program's private data, in 16 bytes, and is only a service: a peer that
//! does not know it sees some bytes, and an endpoint that does not find it takes everything for the
//! program's data.
//!
//! ```text
//! 0        4        5        6          8              12             16
//! | "rmsg" | version | 0     | data len | max message  | receives     | data ...
//! ```
//! Numbers are big-endian.

/// What a peer of this library has said about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerLimits {
    /// The longest message that it can receive; 0 if its program posts the receives.
    pub(crate) max_message: u32,
    /// How many receives it keeps posted.
    pub(crate) recv_depth: u32,
}

const MAGIC: [u8; 4] = *b"rmsg";
const VERSION: u8 = 1;
pub(crate) const LEN: usize = 16;

/// Puts the limits in front of the program's data.
pub(crate) fn encode(limits: PeerLimits, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LEN + data.len());
    bytes.extend(MAGIC);
    bytes.extend([VERSION, 0]);
    bytes.extend(u16::try_from(data.len()).unwrap_or(u16::MAX).to_be_bytes());
    bytes.extend(limits.max_message.to_be_bytes());
    bytes.extend(limits.recv_depth.to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Takes what arrived apart: the limits, if there are any that this version understands, and the
/// program's data. Nothing in it is trusted.
pub(crate) fn decode(bytes: &[u8]) -> (Option<PeerLimits>, &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<LEN>() else {
        return (None, bytes);
    };
    if head[..4] != MAGIC || head[4] != VERSION {
        return (None, bytes);
    }
    let number =
        |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let limits = PeerLimits {
        max_message: number(8),
        recv_depth: number(12),
    };
    let len = usize::from(u16::from_be_bytes([head[6], head[7]]));
    (Some(limits), &rest[..len.min(rest.len())])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PeerLimits = PeerLimits {
        max_message: 4096,
        recv_depth: 128,
    };

    #[test]
    fn limits_and_data_come_back_without_the_padding() {
        let mut bytes = encode(LIMITS, b"hello");
        bytes.resize(56, 0);
        assert_eq!(decode(&bytes), (Some(LIMITS), &b"hello"[..]));
    }

    #[test]
    fn data_of_a_stranger_is_data() {
        for bytes in [
            &b""[..],
            b"rms",
            b"rdma ping, and some more of it",
            &[0; 56],
        ] {
            assert_eq!(decode(bytes), (None, bytes));
        }
    }

    #[test]
    fn a_length_that_lies_is_cut() {
        let mut bytes = encode(LIMITS, b"abc");
        bytes[6] = 0xff;
        assert_eq!(decode(&bytes).1, b"abc");
    }

    #[test]
    fn another_version_is_not_understood() {
        let mut bytes = encode(LIMITS, b"");
        bytes[4] = 2;
        assert_eq!(decode(&bytes).0, None);
    }
}
