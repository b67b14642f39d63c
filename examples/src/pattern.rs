//! Data that tells a stale, shifted or foreign byte from the right one.

use std::fmt;

/// Prime, so no shift by a page, a packet or a power of two maps the sequence onto itself.
const PERIOD: usize = 65_521;

/// A long pseudo-random sequence, of which iteration `n` sees the window that starts at byte `n`.
///
/// Neighbouring bytes of the sequence always differ, so two consecutive iterations differ at
/// *every* position: a byte left over from the iteration before can't go unnoticed. A window is a
/// plain slice, so filling and checking a message are a memory copy and a memory compare.
#[derive(Debug)]
pub struct Pattern {
    sequence: Vec<u8>,
}

/// The first byte that is not what the pattern says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Which iteration's window the data was compared to.
    pub iteration: u64,
    /// Position of the first wrong byte.
    pub offset: usize,
    /// What the pattern has there.
    pub expected: u8,
    /// What the data has there.
    pub found: u8,
}

impl Pattern {
    /// A pattern for messages of up to `max_len` bytes; the same on every machine.
    pub fn new(max_len: usize) -> Pattern {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut period = Vec::with_capacity(PERIOD);
        for index in 0..PERIOD {
            // xorshift64, the upper byte.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let mut byte = (random >> 56) as u8;
            let before = period.last().copied();
            let after = (index + 1 == PERIOD).then(|| period[0]);
            while Some(byte) == before || Some(byte) == after {
                byte = byte.wrapping_add(1);
            }
            period.push(byte);
        }
        let sequence = period
            .iter()
            .copied()
            .cycle()
            .take(PERIOD + max_len)
            .collect();
        Pattern { sequence }
    }

    /// The bytes that a message of `len` bytes carries in `iteration`.
    ///
    /// # Panics
    /// If `len` is above the `max_len` the pattern was made for.
    pub fn window(&self, iteration: u64, len: usize) -> &[u8] {
        let start = (iteration % PERIOD as u64) as usize;
        assert!(
            start + len <= self.sequence.len(),
            "longer than the pattern was made for"
        );
        &self.sequence[start..start + len]
    }

    /// Fills `data` with the window of `iteration`.
    ///
    /// # Panics
    /// As [`Pattern::window`].
    pub fn fill(&self, data: &mut [u8], iteration: u64) {
        data.copy_from_slice(self.window(iteration, data.len()));
    }

    /// Compares every byte of `data` with the window of `iteration`.
    ///
    /// # Errors
    /// The first byte that differs.
    ///
    /// # Panics
    /// As [`Pattern::window`].
    pub fn check(&self, data: &[u8], iteration: u64) -> Result<(), Mismatch> {
        let expected = self.window(iteration, data.len());
        if data == expected {
            return Ok(());
        }
        let differ = data
            .iter()
            .zip(expected)
            .enumerate()
            .find(|(_, (found, want))| found != want);
        match differ {
            None => Ok(()),
            Some((offset, (&found, &expected))) => Err(Mismatch {
                iteration,
                offset,
                expected,
                found,
            }),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch {
            iteration,
            offset,
            expected,
            found,
        } = self;
        write!(
            f,
            "data differs in iteration {iteration}: byte {offset} is {found:#04x}, not {expected:#04x}"
        )
    }
}

impl std::error::Error for Mismatch {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_filled_checks() {
        let pattern = Pattern::new(10_000);
        let mut data = vec![0; 10_000];
        for iteration in [0, 1, 65_520, 65_521, u64::MAX] {
            pattern.fill(&mut data, iteration);
            assert_eq!(pattern.check(&data, iteration), Ok(()));
        }
    }

    #[test]
    fn consecutive_iterations_differ_at_every_byte() {
        let pattern = Pattern::new(64);
        for iteration in 0..2 * PERIOD as u64 {
            let (this, next) = (
                pattern.window(iteration, 64),
                pattern.window(iteration + 1, 64),
            );
            assert!(
                this.iter().zip(next).all(|(a, b)| a != b),
                "iteration {iteration}"
            );
        }
    }

    #[test]
    fn each_single_wrong_byte_is_found_and_named() {
        let pattern = Pattern::new(257);
        let mut data = vec![0; 257];
        pattern.fill(&mut data, 7);
        for offset in 0..data.len() {
            let right = data[offset];
            data[offset] ^= 0x10;
            let found = Mismatch {
                iteration: 7,
                offset,
                expected: right,
                found: right ^ 0x10,
            };
            assert_eq!(pattern.check(&data, 7), Err(found));
            data[offset] = right;
        }
    }

    #[test]
    fn a_shift_by_a_page_or_a_packet_is_found() {
        let pattern = Pattern::new(1 << 20);
        for shift in [1, 64, 1024, 4096, 65_536] {
            let shifted = &pattern.window(3, 1 << 20)[shift..];
            assert!(pattern.check(shifted, 3).is_err(), "shifted by {shift}");
        }
    }
}
