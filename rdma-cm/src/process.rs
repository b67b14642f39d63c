//! Knowing that we are in a child of `fork`.
//!
//! A child shares the descriptor of each event channel with its parent. An id destroyed there would
//! end the parent's connection, and an event read there is lost to the parent, whose drop of the id
//! would wait for its acknowledgement for ever. So ids remember who made them.

/// The process in which an object was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// Whether this is still that process.
    pub(crate) fn is_here(self) -> bool {
        self == Self::current()
    }
}
