//! The caller's terminal, when the guest's shell runs on it.
#![allow(unsafe_code)] // tcgetattr(3), tcsetattr(3) and TIOCGWINSZ: no safe wrapper in std

use super::wire::Size;
use crate::interrupt::{AtInterrupt, at_interrupt};
use anyhow::{Context, Result};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;

/// A terminal's settings, as read from it.
#[derive(Clone, Copy)]
struct Settings(libc::termios);

/// While this lives, standard input passes every key on and interprets none: that is the guest's terminal's part.
pub(crate) struct RawTerminal {
    before: Settings,
    _at_interrupt: AtInterrupt,
}

impl RawTerminal {
    pub(crate) fn enter() -> Result<RawTerminal> {
        let before = Settings::read().context("cannot read the terminal's settings")?;
        let mut raw = before;
        // SAFETY: the pointer is to a live, initialized termios, which cfmakeraw(3) changes in place.
        unsafe { libc::cfmakeraw(&mut raw.0) };
        let _at_interrupt = at_interrupt(move || before.apply())?;
        raw.apply();
        Ok(RawTerminal {
            before,
            _at_interrupt,
        })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.before.apply();
    }
}

impl Settings {
    fn read() -> io::Result<Settings> {
        let mut settings = MaybeUninit::uninit();
        // SAFETY: the pointer is to room for a termios, which tcgetattr(3) fills when it succeeds.
        if unsafe { libc::tcgetattr(0, settings.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: tcgetattr succeeded, so it has filled the value.
        Ok(Settings(unsafe { settings.assume_init() }))
    }

    fn apply(&self) {
        // SAFETY: the pointer is to a live termios, which tcsetattr(3) reads. If it fails the terminal is
        // gone, and there is nothing to set.
        unsafe { libc::tcsetattr(0, libc::TCSANOW, &self.0) };
    }
}

/// The size of the terminal behind `stream`, `None` if it is none.
pub(crate) fn size_of(stream: &impl AsFd) -> Option<Size> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let descriptor = stream.as_fd().as_raw_fd();
    // SAFETY: TIOCGWINSZ writes a winsize, and the pointer is to a live one on this stack.
    let result = unsafe { libc::ioctl(descriptor, libc::TIOCGWINSZ, &mut size) };
    // A terminal that does not know its size says 0 by 0.
    let known = |value, usual| if value == 0 { usual } else { value };
    (result == 0).then(|| Size {
        rows: known(size.ws_row, 24),
        columns: known(size.ws_col, 80),
    })
}

/// Calls `tell` whenever the terminal's size has changed, until it returns false.
pub(crate) fn on_resize(tell: impl Fn(Size) -> bool + Send + 'static) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGWINCH])?;
    thread::spawn(move || {
        for _ in signals.forever() {
            if size_of(&io::stdout()).is_some_and(|size| !tell(size)) {
                return;
            }
        }
    });
    Ok(())
}
