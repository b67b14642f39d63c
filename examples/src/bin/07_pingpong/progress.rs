//! A progress bar on stderr, where somebody can see it.

use std::env;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// Redraws a second.
const HZ: u8 = 10;

/// The bar of one run; cleared when dropped.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A bar for `iterations` messages of `size` bytes.
    ///
    /// It is drawn if stderr is a terminal, or if `LAB_TTY=1` says that one is behind it.
    pub(crate) fn new(size: u32, iterations: u64) -> Bar {
        let bar = ProgressBar::with_draw_target(Some(iterations), target());
        let style = ProgressStyle::with_template("{msg:>10} [{bar:40}] {pos}/{len} {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(format!("{size} B"));
        Bar(bar)
    }

    /// One more is done.
    pub(crate) fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn target() -> ProgressDrawTarget {
    if io::stderr().is_terminal() {
        ProgressDrawTarget::stderr_with_hz(HZ)
    } else if env::var_os("LAB_TTY").is_some_and(|value| value == "1") {
        ProgressDrawTarget::term_like_with_hz(Box::new(FarTerminal), HZ)
    } else {
        ProgressDrawTarget::hidden()
    }
}

/// A terminal behind a pipe: the lab passes stderr on to one.
#[derive(Debug)]
struct FarTerminal;

impl FarTerminal {
    fn escape(count: usize, letter: char) -> io::Result<()> {
        if count == 0 {
            Ok(())
        } else {
            write!(io::stderr(), "\x1b[{count}{letter}")
        }
    }
}

impl TermLike for FarTerminal {
    fn width(&self) -> u16 {
        env::var("COLUMNS")
            .ok()
            .and_then(|columns| columns.parse().ok())
            .unwrap_or(80)
    }
    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        Self::escape(n, 'A')
    }
    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        Self::escape(n, 'B')
    }
    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        Self::escape(n, 'C')
    }
    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        Self::escape(n, 'D')
    }
    fn write_line(&self, text: &str) -> io::Result<()> {
        write!(io::stderr(), "{text}\r\n")
    }
    fn write_str(&self, text: &str) -> io::Result<()> {
        write!(io::stderr(), "{text}")
    }
    fn clear_line(&self) -> io::Result<()> {
        write!(io::stderr(), "\r\x1b[2K")
    }
    fn flush(&self) -> io::Result<()> {
        io::stderr().flush()
    }
}
