//! A peer's memory, as a value that can be sent over any wire.

use std::ops::Range;

use crate::error::OutOfRange;

/// Where a peer's memory is and the key that opens it: what a write, read or atomic needs.
///
/// It is only a description. Whether the access succeeds is decided by the peer's device: the key
/// may have been taken back meanwhile.
///
/// ```
/// use rdma_core_rs::RemoteRegion;
///
/// let whole = RemoteRegion::new(0x1000, 4096, 7);
/// let wire: [u8; 20] = whole.to_bytes();
/// let word = RemoteRegion::from_bytes(wire).slice(8..16)?;
/// assert_eq!((word.addr(), word.len(), word.rkey()), (0x1008, 8, 7));
/// assert!(whole.slice(4090..4097).is_err());
/// # Ok::<(), rdma_core_rs::OutOfRange>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    addr: u64,
    len: u64,
    rkey: u32,
}

impl RemoteRegion {
    /// Length of the encoding of [`to_bytes`](Self::to_bytes).
    pub const ENCODED_LEN: usize = 20;

    /// Describes `len` bytes at the peer's address `addr`, opened by `rkey`.
    ///
    /// A length that would pass the end of the address space is cut to it, so that later ranges
    /// cannot wrap around.
    pub const fn new(addr: u64, len: u64, rkey: u32) -> RemoteRegion {
        let room = u64::MAX - addr;
        RemoteRegion {
            addr,
            len: if len < room { len } else { room },
            rkey,
        }
    }

    /// The address of the first byte, in the peer's terms.
    #[inline]
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// The number of bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // `is_empty` is right below
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The remote key.
    #[inline]
    pub const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The same memory opened by another key, such as that of a memory window bound to it.
    #[must_use]
    pub const fn with_rkey(self, rkey: u32) -> RemoteRegion {
        RemoteRegion { rkey, ..self }
    }

    /// A part of it, `range` counted from its first byte.
    ///
    /// # Errors
    /// [`OutOfRange`] if the range is backwards or does not lie inside.
    #[inline]
    pub const fn slice(&self, range: Range<u64>) -> Result<RemoteRegion, OutOfRange> {
        if range.start > range.end || range.end > self.len {
            return Err(OutOfRange {
                start: range.start,
                end: range.end,
                len: self.len,
            });
        }
        Ok(RemoteRegion {
            addr: self.addr + range.start,
            len: range.end - range.start,
            rkey: self.rkey,
        })
    }

    /// The fixed encoding: address, length, key, each big-endian.
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_LEN] {
        let mut bytes = [0; Self::ENCODED_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    /// Reads the encoding of [`to_bytes`](Self::to_bytes). Every 20 bytes mean something.
    pub fn from_bytes(bytes: [u8; Self::ENCODED_LEN]) -> RemoteRegion {
        let [
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            l0,
            l1,
            l2,
            l3,
            l4,
            l5,
            l6,
            l7,
            k0,
            k1,
            k2,
            k3,
        ] = bytes;
        RemoteRegion::new(
            u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            u64::from_be_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
            u32::from_be_bytes([k0, k1, k2, k3]),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_is_big_endian_and_survives_the_round_trip() {
        let region = RemoteRegion::new(0x0102_0304_0506_0708, 0x1112, 0x2122_2324);
        let bytes = region.to_bytes();
        assert_eq!(bytes[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[16..], [0x21, 0x22, 0x23, 0x24]);
        assert_eq!(RemoteRegion::from_bytes(bytes), region);
    }

    #[test]
    fn slice_refuses_what_is_outside_or_backwards() {
        let region = RemoteRegion::new(100, 10, 1);
        assert_eq!(region.slice(10..10).unwrap().len(), 0);
        assert!(region.slice(0..11).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 5..4;
        assert!(region.slice(backwards).is_err());
        assert!(region.slice(u64::MAX..u64::MAX).is_err());
    }

    #[test]
    fn hostile_length_cannot_make_an_address_wrap() {
        let region = RemoteRegion::from_bytes([0xff; 20]);
        assert_eq!(region.len(), 0);
        let region = RemoteRegion::new(u64::MAX - 4, 100, 0);
        assert_eq!(region.slice(0..4).unwrap().addr(), u64::MAX - 4);
        assert!(region.slice(0..5).is_err());
    }
}
