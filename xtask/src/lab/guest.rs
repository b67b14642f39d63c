//! The guest as a process on this machine: its QEMU, the line to its init, and its end.
#![allow(unsafe_code)] // prctl(2) and fcntl(2) in the child, between fork and exec

use super::wire::{Decoder, Frame};
use super::{Kernel, Shape};
use crate::interrupt::{AtInterrupt, at_interrupt};
use crate::process;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running guest. Dropping it ends it.
pub(crate) struct Guest {
    qemu: Child,
    line: UnixStream,
    decoder: Decoder,
    console: PathBuf,
    _at_interrupt: AtInterrupt,
}

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// The processor's own virtualization.
    Kvm,
    /// Software emulation, each of the guest's processors in a thread.
    Tcg,
    /// Software emulation in which one instruction takes one nanosecond of guest time.
    TcgCounting,
}

impl Guest {
    /// Starts QEMU. `folder` is for the files of this guest alone.
    ///
    /// QEMU dies with the thread that calls this, however that ends.
    pub(crate) fn start(
        kernel: &Kernel,
        initramfs: &Path,
        accelerator: Accelerator,
        shape: &Shape,
        folder: &Path,
    ) -> Result<Guest> {
        let (line, theirs) = UnixStream::pair()?;
        let console = folder.join("console");
        fs::write(&console, "")?;
        let mut command = Command::new(QEMU);
        command
            .args(machine(accelerator, shape))
            .args(["-append", &kernel_parameters(accelerator)])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(initramfs)
            .arg("-chardev")
            .arg(joined("file,id=console,path=", &console))
            .args(["-serial", "chardev:console"])
            .args([
                "-chardev",
                &format!("socket,id=line,fd={}", theirs.as_raw_fd()),
            ])
            .args(["-device", "virtio-serial-pci"])
            .args(["-device", "virtserialport,chardev=line,nr=1,name=lab"])
            .args(shared_folder("root", Path::new("/"), true));
        if let Some(out) = &shape.out {
            command.args(shared_folder("out", out, false));
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(folder.join("qemu"))?);
        let (parent, descriptor) = (std::process::id() as libc::pid_t, theirs.as_raw_fd());
        // SAFETY: between fork and exec the closure makes system calls and nothing else: no allocation, no
        // lock, which is what a child of a process with threads may do.
        unsafe { command.pre_exec(move || tie_to_parent(parent, descriptor)) };
        let qemu = command.spawn().with_context(|| {
            format!("cannot run {QEMU}: is the package qemu-system-x86 installed?")
        })?;
        let pid = qemu.id();
        let _at_interrupt = at_interrupt(move || process::end(pid))?;
        Ok(Guest {
            qemu,
            line,
            decoder: Decoder::default(),
            console,
            _at_interrupt,
        })
    }

    /// Whether the guest's kernel has printed anything by the deadline.
    pub(crate) fn shows_life(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if fs::metadata(&self.console).is_ok_and(|console| console.len() > 0) {
                return true;
            }
            if !matches!(self.qemu.try_wait(), Ok(None)) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    /// A second handle on the line to the guest, for writing.
    pub(crate) fn line(&self) -> io::Result<UnixStream> {
        self.line.try_clone()
    }

    /// The next frame; `None` when the deadline has passed.
    ///
    /// # Errors
    /// If the guest is gone; the message ends with what its console and QEMU said last.
    pub(crate) fn receive(&mut self, deadline: Option<Instant>) -> Result<Option<Frame>> {
        let mut buffer = [0; 1 << 16];
        loop {
            if let Some(frame) = self.decoder.frame()? {
                return Ok(Some(frame));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            self.line.set_read_timeout(left)?;
            match self.line.read(&mut buffer) {
                Ok(0) => bail!("the guest ended by itself\n{}", self.last_words()),
                Ok(length) => self.decoder.feed(&buffer[..length]),
                Err(error) if is_timeout(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("lost the guest\n{}", self.last_words()));
                }
            }
        }
    }

    /// The end of what the guest's console and QEMU have said.
    pub(crate) fn last_words(&self) -> String {
        let qemu = self.console.with_file_name("qemu");
        [("console", &self.console), ("QEMU", &qemu)]
            .map(|(name, path)| {
                let text = fs::read(path).unwrap_or_default();
                let text = String::from_utf8_lossy(&text);
                let lines: Vec<&str> = text.lines().collect();
                let (_, end) = lines.split_at(lines.len().saturating_sub(30));
                format!("{name}:\n  {}", end.join("\n  "))
            })
            .join("\n")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Nothing to save: what the job wrote to --out is on this machine's disk already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

const QEMU: &str = "qemu-system-x86_64";

/// Serial output is slow under emulation, so only errors go there; under KVM everything does, because the first
/// words tell that KVM works. The crypto code's tests of itself take a second of an emulated boot, and waiting
/// for all processors to pass a quiet state, when a network device is added, another. The
/// check of the timer fails when the machine is too busy to emulate its interrupts in time.
fn kernel_parameters(accelerator: Accelerator) -> String {
    let level = if accelerator == Accelerator::Kvm {
        7
    } else {
        4
    };
    format!(
        "console=ttyS0 earlyprintk=ttyS0 loglevel={level} panic=-1 tsc=reliable mitigations=off \
         no_timer_check cryptomgr.notests rcupdate.rcu_expedited=1"
    )
}

fn machine(accelerator: Accelerator, shape: &Shape) -> Vec<String> {
    let (accel, cpu, processors) = match accelerator {
        Accelerator::Kvm => ("kvm", "host", shape.processors),
        Accelerator::Tcg => ("tcg,thread=multi", "max", shape.processors),
        Accelerator::TcgCounting => ("tcg,thread=single", "max", 1),
    };
    let mut arguments: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
    ]
    .map(String::from)
    .into();
    for (option, value) in [
        ("-machine", "q35"),
        ("-accel", accel),
        ("-cpu", cpu),
        ("-smp", &processors.to_string()),
        ("-m", &format!("{}M", shape.memory_mib)),
    ] {
        arguments.extend([option.to_owned(), value.to_owned()]);
    }
    if accelerator == Accelerator::TcgCounting {
        arguments.extend(["-icount".to_owned(), "shift=0,sleep=off".to_owned()]);
    }
    arguments
}

fn shared_folder(tag: &str, folder: &Path, read_only: bool) -> [OsString; 4] {
    let read_only = if read_only { "on" } else { "off" };
    let options =
        format!("local,id={tag},security_model=none,multidevs=remap,readonly={read_only},path=");
    let device = format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}");
    [
        "-fsdev".into(),
        joined(&options, folder),
        "-device".into(),
        device.into(),
    ]
}

/// QEMU's option with a path in it: a comma is written twice there.
fn joined(option: &str, path: &Path) -> OsString {
    let path = path.to_string_lossy().replace(',', ",,");
    format!("{option}{path}").into()
}

/// Runs in the child: it is killed when its parent dies, and keeps its end of the line open over exec.
fn tie_to_parent(parent: libc::pid_t, descriptor: RawFd) -> io::Result<()> {
    // SAFETY: this prctl(2) takes a signal number and no pointers.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The parent may have died before the call above.
    // SAFETY: getppid(2) takes no arguments.
    if unsafe { libc::getppid() } != parent {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    // SAFETY: F_SETFD takes an int; the descriptor is open, because its owner lives until spawn has returned.
    if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // A group of its own: Ctrl-C reaches xtask, which then ends the guest in order.
    // SAFETY: setpgid(2) takes no pointers.
    if unsafe { libc::setpgid(0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_is_doubled_for_qemu() {
        assert_eq!(joined("path=", Path::new("/a,b")), "path=/a,,b");
    }

    #[test]
    fn counting_uses_one_processor() {
        let arguments = machine(Accelerator::TcgCounting, &Shape::default());
        let processors = arguments
            .iter()
            .position(|argument| argument == "-smp")
            .unwrap();
        assert_eq!(arguments[processors + 1], "1");
        assert!(arguments.contains(&"-icount".to_owned()));
    }
}
