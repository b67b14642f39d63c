//! The 64 bits that travel with a work request and come back with its completion.
//!
//! They name a slot of the tracker *and* the generation of its occupant, because slots are reused at
//! once: with the slot alone, a late or duplicated completion would resolve a stranger's operation.

use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};

/// Identity of one accepted operation: `generation << 32 | slot + 1`.
///
/// Zero is never issued (I10), so a completion the library did not ask for, which on most devices
/// carries 0, can match nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WrId(NonZeroU64);

impl WrId {
    /// Names `slot` (at most `u32::MAX - 1`) in its `generation`.
    #[inline]
    pub(crate) fn new(slot: u32, generation: u32) -> WrId {
        debug_assert!(slot < u32::MAX);
        let low = NonZeroU64::from(NonZeroU32::MIN.saturating_add(slot));
        WrId(low | u64::from(generation) << 32)
    }

    /// Reads what a completion carries; `None` if this library cannot have issued it.
    #[inline]
    pub(crate) fn from_raw(raw: u64) -> Option<WrId> {
        (raw as u32 != 0).then_some(WrId(NonZeroU64::new(raw)?))
    }

    /// The value to put into a work request.
    #[inline]
    pub(crate) fn raw(self) -> u64 {
        self.0.get()
    }

    /// Index of the slot.
    #[inline]
    pub(crate) fn slot(self) -> u32 {
        self.raw() as u32 - 1
    }

    /// Which occupant of the slot is meant.
    #[inline]
    pub(crate) fn generation(self) -> u32 {
        (self.raw() >> 32) as u32
    }
}

impl fmt::Debug for WrId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WrId({}#{})", self.slot(), self.generation())
    }
}

#[cfg(test)]
mod tests {
    use super::WrId;

    #[test]
    fn zero_is_never_issued_and_never_read() {
        assert_ne!(WrId::new(0, 0).raw(), 0);
        assert_eq!(WrId::from_raw(0), None);
        assert_eq!(WrId::from_raw(7 << 32), None);
    }

    #[test]
    fn slot_and_generation_come_back() {
        for (slot, generation) in [(0, 0), (5, 9), (u32::MAX - 1, u32::MAX)] {
            let id = WrId::from_raw(WrId::new(slot, generation).raw()).unwrap();
            assert_eq!((id.slot(), id.generation()), (slot, generation));
        }
    }

    #[test]
    fn generations_of_one_slot_differ() {
        assert_ne!(WrId::new(3, 0), WrId::new(3, 1));
    }
}
