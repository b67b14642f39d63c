//! A peer in a process of its own: this very program, started again.
//!
//! The child dies with its parent, whatever ends the parent, and is reaped in `Drop`.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::cli::{During, Result};

/// What a server prints on stdout once a client can connect; the address follows.
const LISTENING: &str = "listening on ";

/// Tells whoever reads this program's stdout where it listens.
pub fn announce(addr: SocketAddr) {
    println!("{LISTENING}{addr}");
}

/// Makes this process die with the one that started it, whose id is `parent`.
///
/// # Errors
/// If the parent is gone already, or the kernel refuses the signal.
pub fn die_with(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let now = getppid().map(Pid::as_raw_nonzero);
    if now.map(|pid| pid.get().unsigned_abs()) != Some(parent) {
        return Err("the parent process is gone".into());
    }
    Ok(())
}

/// A running child of this program. Dropped: killed and reaped.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts this program again with `args` and `--parent PID` behind them.
    ///
    /// Its stdout is a pipe that only [`Peer::listening`] reads; stderr is ours.
    ///
    /// # Errors
    /// If the program cannot be found or started.
    pub fn start<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Result<Peer> {
        let program = std::env::current_exe().during(|| "find this program".into())?;
        let mut child = Command::new(program)
            .args(args)
            .arg("--parent")
            .arg(std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .during(|| "start the server".into())?;
        let Some(stdout) = child.stdout.take() else {
            return Err("the server has no stdout".into());
        };
        Ok(Peer {
            child,
            stdout: BufReader::new(stdout),
        })
    }

    /// Waits until the child has announced where it listens.
    ///
    /// # Errors
    /// If it ends before it does; what was wrong stands on stderr.
    pub fn listening(&mut self) -> Result<SocketAddr> {
        let mut line = String::new();
        self.stdout
            .read_line(&mut line)
            .during(|| "read from the server".into())?;
        match line.trim_end().strip_prefix(LISTENING) {
            Some(addr) => addr
                .parse()
                .during(|| format!("the server's address {addr:?}")),
            None => Err(format!("the server did not start ({})", self.child.wait()?).into()),
        }
    }

    /// Kills the child at once (SIGKILL), as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill(); // already gone is as good
        let _ = self.child.wait();
    }

    /// Waits for the child to end by itself, at most `patience`; then kills it.
    ///
    /// # Errors
    /// If it had to be killed, or ended with another status than 0.
    pub fn finish(mut self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        loop {
            match self.child.try_wait()? {
                Some(status) => return ended(status),
                None if Instant::now() > until => {
                    return Err("the server did not end and was killed".into());
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn ended(status: ExitStatus) -> Result<()> {
    if status.success() {
        Ok(())
    } else {
        Err(format!("the server ended with {status}").into())
    }
}
