//! A lock that goes with its holder, however that ends, and that holds between containers on one machine.
#![allow(unsafe_code)] // flock(2): std has it from Rust 1.89 on

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// A lock on a file. Dropping it unlocks.
#[must_use = "the lock is given back when this is dropped"]
pub(crate) struct Lock(#[expect(dead_code, reason = "it is there to be closed")] File);

impl Lock {
    /// Locks a file, which is made if there is none; `None` if somebody else has the lock.
    pub(crate) fn try_on(path: &Path) -> io::Result<Option<Lock>> {
        let file = open(path)?;
        match flock(&file, libc::LOCK_EX | libc::LOCK_NB) {
            Ok(()) => Ok(Some(Lock(file))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Locks a file, which is made if there is none, and waits for as long as somebody else has the lock.
    pub(crate) fn wait_on(path: &Path) -> io::Result<Lock> {
        let file = open(path)?;
        loop {
            match flock(&file, libc::LOCK_EX) {
                Ok(()) => return Ok(Lock(file)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).open(path)
}

fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: flock(2) takes no pointers, and the descriptor is open, because `file` is borrowed.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
