//! The event channel: one file descriptor of `/dev/infiniband/rdma_cm`.
#![allow(unsafe_code)] // rdma_create_event_channel and its counterpart

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::time::Instant;

use crate::error::{CmError, Result, Step};
use crate::sys;

/// A channel on which the events of one id arrive.
///
/// Its file descriptor is non-blocking and becomes readable when an event waits, so it fits into
/// any event loop. Each [`CmId`](crate::CmId) owns one: events need no sorting by id, and dropping
/// an id never waits for somebody who holds an event of another one.
#[doc(alias = "rdma_event_channel")]
#[derive(Debug)]
pub struct EventChannel {
    raw: NonNull<sys::rdma_event_channel>,
}

// SAFETY: the channel is one file descriptor in memory that only `Drop` frees; it belongs to no thread.
unsafe impl Send for EventChannel {}
// SAFETY: through `&EventChannel` the descriptor is only read, and librdmacm uses it for write(2),
// which any thread may call.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Opens a channel.
    ///
    /// # Errors
    ///
    /// [`CmError::NoConnectionManager`] if there is no RDMA device, no `/dev/infiniband/rdma_cm`,
    /// or no permission to open it; [`CmError::Call`] for everything else, such as too many open
    /// files; [`CmError::Forked`] in a child of a process that has used this crate.
    #[doc(alias = "rdma_create_event_channel")]
    pub fn new() -> Result<Self> {
        if !sys::is_usable() {
            return Err(CmError::Forked);
        }
        // SAFETY: the function takes nothing and may be called at any time from any thread.
        let raw = unsafe { sys::rdma_create_event_channel() };
        let raw = NonNull::new(raw).ok_or_else(|| cannot_open(io::Error::last_os_error()))?;
        let channel = Self { raw };
        sys::set_nonblocking_cloexec(channel.as_fd()).map_err(CmError::call(
            "fcntl",
            Step::OpenChannel,
            None,
        ))?;
        Ok(channel)
    }

    /// The C object, for calls that this crate does not wrap.
    #[must_use]
    pub fn as_raw(&self) -> NonNull<sys::rdma_event_channel> {
        self.raw
    }

    /// Waits until an event is there or `deadline` has passed; `false` means it has passed.
    ///
    /// # Errors
    ///
    /// [`CmError::Call`] if poll(2) fails.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        sys::wait_readable(self.as_fd(), deadline).map_err(CmError::call("poll", Step::Event, None))
    }
}

fn cannot_open(source: io::Error) -> CmError {
    match source.raw_os_error() {
        Some(
            libc::ENODEV | libc::ENOENT | libc::ENXIO | libc::ENOSYS | libc::EPERM | libc::EACCES,
        ) => CmError::NoConnectionManager { source },
        _ => CmError::call("rdma_create_event_channel", Step::OpenChannel, None)(source),
    }
}

impl AsRawFd for EventChannel {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: `raw` is the channel that librdmacm allocated and that `Drop` frees; nobody
        // writes to its only field after that.
        unsafe { (*self.raw.as_ptr()).fd }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor stays open until `Drop`, and the borrow of `self` ends before that.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: `raw` came from rdma_create_event_channel and is destroyed here only. The id that
        // uses it is destroyed first (field order of CmId), and the events borrow that id.
        unsafe { sys::rdma_destroy_event_channel(self.raw.as_ptr()) }
    }
}
