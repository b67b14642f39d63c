//! Event queues with a real, pollable file descriptor: one byte in the pipe per event.
#![allow(unsafe_code)] // pipe2 and taking ownership of its descriptors

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use crate::world::Outcome;

/// Events waiting to be fetched; the descriptor is readable exactly while there are any.
pub(crate) struct EventQueue<E> {
    reader: File,
    writer: File,
    events: VecDeque<E>,
}

impl<E> EventQueue<E> {
    pub(crate) fn new() -> Outcome<Self> {
        let mut fds = [0; 2];
        // SAFETY: `fds` has room for the two descriptors pipe2 writes.
        if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return Err(crate::world::errno());
        }
        // SAFETY: pipe2 just returned this descriptor; nobody else owns it.
        let reader = unsafe { File::from_raw_fd(fds[0]) };
        // SAFETY: as above.
        let writer = unsafe { File::from_raw_fd(fds[1]) };
        Ok(Self {
            reader,
            writer,
            events: VecDeque::new(),
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    pub(crate) fn push(&mut self, event: E) {
        self.events.push_back(event);
        // A pipe holds 64 Ki events: more unfetched ones than any test has.
        let _ = self.writer.write(&[0]);
    }

    pub(crate) fn pop(&mut self) -> Option<E> {
        let event = self.events.pop_front()?;
        self.eat_token();
        Some(event)
    }

    /// Takes the events back that `withdraw` matches, as the kernel does when their object goes.
    pub(crate) fn withdraw(&mut self, mut withdraw: impl FnMut(&E) -> bool) -> Vec<E> {
        let mut taken = Vec::new();
        for event in std::mem::take(&mut self.events) {
            if withdraw(&event) {
                self.eat_token();
                taken.push(event);
            } else {
                self.events.push_back(event);
            }
        }
        taken
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        // SAFETY: F_GETFL only reads the flags of our own descriptor.
        let flags = unsafe { libc::fcntl(self.fd(), libc::F_GETFL) };
        flags & libc::O_NONBLOCK != 0
    }

    /// Tokens are eaten only under the fabric's lock, so there is one for each event and this never blocks.
    fn eat_token(&mut self) {
        let _ = self.reader.read(&mut [0]);
    }
}
