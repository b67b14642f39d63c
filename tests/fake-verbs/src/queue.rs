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
    /// Bytes in the pipe: one per event, until it is full.
    tokens: usize,
}

/// A pipe that holds its 64 Ki bytes is readable enough; the kernel's own queues are unbounded too.
const MOST_TOKENS: usize = 60_000;

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
            tokens: 0,
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    pub(crate) fn push(&mut self, event: E) {
        self.events.push_back(event);
        self.balance();
    }

    pub(crate) fn pop(&mut self) -> Option<E> {
        let event = self.events.pop_front()?;
        self.balance();
        Some(event)
    }

    /// Takes the events back that `withdraw` matches, as the kernel does when their object goes.
    pub(crate) fn withdraw(&mut self, withdraw: impl FnMut(&E) -> bool) -> Vec<E> {
        let (taken, kept): (Vec<E>, VecDeque<E>) = split(&mut self.events, withdraw);
        self.events = kept;
        self.balance();
        taken
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        // SAFETY: F_GETFL only reads the flags of our own descriptor.
        let flags = unsafe { libc::fcntl(self.fd(), libc::F_GETFL) };
        flags & libc::O_NONBLOCK != 0
    }

    /// Makes the bytes in the pipe as many as the events. Only done under the fabric's lock, so it never blocks.
    fn balance(&mut self) {
        let wanted = self.events.len().min(MOST_TOKENS);
        while self.tokens < wanted {
            let _ = self.writer.write(&[0]);
            self.tokens += 1;
        }
        while self.tokens > wanted {
            let _ = self.reader.read(&mut [0]);
            self.tokens -= 1;
        }
    }
}

fn split<E>(
    events: &mut VecDeque<E>,
    mut matches: impl FnMut(&E) -> bool,
) -> (Vec<E>, VecDeque<E>) {
    let (mut yes, mut no) = (Vec::new(), VecDeque::new());
    for event in events.drain(..) {
        if matches(&event) {
            yes.push(event);
        } else {
            no.push_back(event);
        }
    }
    (yes, no)
}
