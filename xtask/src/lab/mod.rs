//! The lab: any command, where two RDMA hosts exist that are joined by a wire.
//!
//! A guest is booted, its kernel makes two soft-RoCE devices on the ends of a veth pair, and the command
//! runs there with this machine's files, in the same folder, with the same environment. See `docs/lab.md`.

mod accel;
mod guest;
mod image;
pub(crate) mod init;
mod initramfs;
mod kernel;
mod module;
mod terminal;
mod wire;

use crate::scratch::Scratch;
use crate::setup::Consent;
use accel::{Kvm, Verdict};
use anyhow::{Context, Result, bail};
use guest::{Accelerator, Guest};
use kernel::Kernel;
pub(crate) use kernel::Source;
use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use terminal::{RawTerminal, size_of};
use wire::{Frame, Job};

/// What to run, and in which guest.
pub(crate) struct Lab {
    /// Where the guest's kernel comes from.
    pub(crate) kernel: Source,
    /// The guest's hardware.
    pub(crate) shape: Shape,
    /// How long the command may take, counted from its start.
    pub(crate) timeout: Option<Duration>,
    /// How long the command may write nothing before the guest is taken for dead.
    pub(crate) silence: Option<Duration>,
    /// Whether the command reads this process's standard input; otherwise it finds an empty one.
    pub(crate) stdin: bool,
    /// Whether what the kernel's package turns out to need may be installed.
    pub(crate) consent: Consent,
}

/// The guest's hardware.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) processors: u32,
    pub(crate) memory_mib: u32,
    /// One nanosecond of guest time for each instruction.
    pub(crate) counting: bool,
    /// A folder of this machine the command may write to.
    pub(crate) out: Option<PathBuf>,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            processors: 2,
            memory_mib: 2048,
            counting: false,
            out: None,
        }
    }
}

/// The status of a command that was stopped at its timeout, as timeout(1) has it.
pub(crate) const TIMED_OUT: i32 = 124;

impl Lab {
    /// Runs `argv` in a guest with this process's standard streams, and returns its exit status.
    ///
    /// An empty `argv` is a shell on the terminal.
    pub(crate) fn run(&self, argv: &[OsString]) -> Result<i32> {
        let mut out = Passing;
        self.run_with(argv, &mut out)
    }

    /// Runs `argv` in a guest and gives what it writes to `output`.
    pub(crate) fn run_with(&self, argv: &[OsString], output: &mut dyn Output) -> Result<i32> {
        let called = Instant::now();
        let cache = cache()?;
        let folder = Scratch::new(&cache.join("runs"))?;
        let kernel = Kernel::prepare(&self.kernel, &cache, folder.path(), self.consent)?;
        let boot = Boot::prepare(&kernel, &self.shape, &folder)?;
        let job = self.job(argv)?;
        let on_terminal = job.terminal.is_some();
        let (mut guest, accelerator, release) = boot.start(&Verdict::in_cache(&cache), &job)?;
        eprintln!(
            "lab: {}, kernel {release}, ready after {:.1} s",
            accelerator.name(),
            called.elapsed().as_secs_f64()
        );
        let raw = on_terminal.then(RawTerminal::enter).transpose()?;
        feed(&guest, self.stdin, on_terminal)?;
        let result = self.follow(&mut guest, output);
        drop(raw);
        result
    }

    fn job(&self, argv: &[OsString]) -> Result<Job> {
        let interactive =
            argv.is_empty() && io::stdin().is_terminal() && io::stdout().is_terminal();
        let argv = match argv {
            [] => vec![std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())],
            _ => argv.to_vec(),
        };
        let cwd = std::env::current_dir()?.into_os_string();
        let mut env: Vec<_> = std::env::vars_os().collect();
        env.extend(self.variables());
        Ok(Job {
            argv,
            cwd,
            env,
            terminal: interactive.then(|| size_of(&io::stdout())).flatten(),
        })
    }

    /// What a command can know of the lab it runs in.
    fn variables(&self) -> Vec<(OsString, OsString)> {
        let mut variables: Vec<(OsString, OsString)> = vec![("LAB".into(), "1".into())];
        if io::stderr().is_terminal() {
            variables.push(("LAB_TTY".into(), "1".into()));
            if let Some(size) = size_of(&io::stderr()) {
                variables.push(("COLUMNS".into(), size.columns.to_string().into()));
            }
        }
        if self.shape.counting {
            variables.push(("LAB_COUNTING".into(), "1".into()));
        }
        if self.shape.out.is_some() {
            variables.push((init::OUT_VARIABLE.into(), OUT_FOLDER.into()));
        }
        variables
    }

    /// Passes on what the command writes until it ends or its time is over.
    fn follow(&self, guest: &mut Guest, output: &mut dyn Output) -> Result<i32> {
        let end = self.timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let silent = self.silence.map(|silence| Instant::now() + silence);
            let deadline = [end, silent].into_iter().flatten().min();
            match guest.receive(deadline)? {
                Some(Frame::Stdout(bytes)) => output.stdout(&bytes)?,
                Some(Frame::Stderr(bytes)) => output.stderr(&bytes)?,
                Some(Frame::Exit(status)) => return Ok(status),
                Some(Frame::Failed(text)) => bail!("{text}"),
                Some(other) => bail!("the guest sent {other:?}"),
                None if end.is_some_and(|end| end <= Instant::now()) => {
                    let seconds = self.timeout.unwrap_or_default().as_secs();
                    eprintln!("lab: the command was not over after {seconds} s: guest killed");
                    return Ok(TIMED_OUT);
                }
                None => bail!(
                    "the guest was silent for {} s: killed\n{}",
                    self.silence.unwrap_or_default().as_secs(),
                    guest.last_words()
                ),
            }
        }
    }
}

/// Where the guest sees the folder given with `--out`.
const OUT_FOLDER: &str = "/run/lab/out";

/// Whether the initramfs can have what it needs of this machine.
pub(crate) fn has_busybox() -> bool {
    initramfs::busybox().is_ok()
}

/// Takes what a command writes.
pub(crate) trait Output {
    fn stdout(&mut self, bytes: &[u8]) -> io::Result<()>;
    fn stderr(&mut self, bytes: &[u8]) -> io::Result<()>;
}

/// Passes everything on to this process's own streams.
struct Passing;

impl Output for Passing {
    fn stdout(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    fn stderr(&mut self, bytes: &[u8]) -> io::Result<()> {
        io::stderr().write_all(bytes)
    }
}

/// The folder that keeps kernels between runs: `LAB_CACHE`, or `target/lab`.
fn cache() -> Result<PathBuf> {
    let folder = match std::env::var_os("LAB_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None => crate::workspace::target().join("lab"),
    };
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder.canonicalize()?)
}

/// Everything a boot needs.
struct Boot<'a> {
    kernel: &'a Kernel,
    shape: &'a Shape,
    initramfs: PathBuf,
    folder: &'a Path,
}

impl<'a> Boot<'a> {
    fn prepare(kernel: &'a Kernel, shape: &'a Shape, folder: &'a Scratch) -> Result<Boot<'a>> {
        let archive = initramfs::build(&kernel.modules, &folder.own_program()?)?;
        let (folder, initramfs) = (folder.path(), folder.path().join("initramfs"));
        fs::write(&initramfs, archive)?;
        Ok(Boot {
            kernel,
            shape,
            initramfs,
            folder,
        })
    }

    /// Boots and starts the job; the guest's init tells the kernel's release.
    ///
    /// A guest that has not got so far is given another try: on a very busy machine an emulated kernel can fail in
    /// its first second, for want of a timer's interrupt, and its devices can be late.
    fn start(&self, verdict: &Verdict, job: &Job) -> Result<(Guest, Accelerator, String)> {
        let noted = match self.shape.counting {
            true => Kvm::Fails, // it counts nothing
            false => verdict.read(),
        };
        let mut kvm = noted;
        let started = self.attempt(&mut kvm, job).or_else(|error| {
            eprintln!("lab: {error:#}\nlab: booting once more");
            self.attempt(&mut kvm, job)
        });
        if let Some(works) = kvm.news(noted, started.is_ok()) {
            verdict.write(works);
        }
        started
    }

    /// One boot, under KVM unless that is known to fail. What it tells of KVM goes into `kvm`.
    fn attempt(&self, kvm: &mut Kvm, job: &Job) -> Result<(Guest, Accelerator, String)> {
        let (mut guest, accelerator) = self.power_on(kvm)?;
        let greeting = greet(&mut guest);
        if accelerator == Accelerator::Kvm {
            *kvm = match greeting {
                Ok(_) => Kvm::Works,
                Err(_) => Kvm::Fails,
            };
        }
        let release = greeting?;
        begin(&mut guest, job.clone())?;
        Ok((guest, accelerator, release))
    }

    /// Under KVM if that works or may work, else under emulation.
    fn power_on(&self, kvm: &mut Kvm) -> Result<(Guest, Accelerator)> {
        if *kvm != Kvm::Fails {
            let mut guest = self.under(Accelerator::Kvm)?;
            if guest.shows_life(KVM_PATIENCE) {
                return Ok((guest, Accelerator::Kvm));
            }
            *kvm = Kvm::Fails;
            eprintln!("lab: /dev/kvm is there but a guest shows no life under it: emulating");
        }
        let accelerator = match self.shape.counting {
            true => Accelerator::TcgCounting,
            false => Accelerator::Tcg,
        };
        Ok((self.under(accelerator)?, accelerator))
    }

    fn under(&self, accelerator: Accelerator) -> Result<Guest> {
        Guest::start(
            self.kernel,
            &self.initramfs,
            accelerator,
            self.shape,
            self.folder,
        )
    }
}

/// Under a KVM that works the first line comes within half a second, if the machine is not busy.
const KVM_PATIENCE: Duration = Duration::from_secs(10);

/// Much longer than a boot takes under emulation on a busy machine.
const BOOT_PATIENCE: Duration = Duration::from_secs(180);

impl Accelerator {
    fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "KVM",
            Accelerator::Tcg => "emulation (TCG)",
            Accelerator::TcgCounting => "emulation (TCG, counting instructions)",
        }
    }
}

/// Waits for the guest's init and returns the kernel's release.
fn greet(guest: &mut Guest) -> Result<String> {
    match answer(guest)? {
        Frame::Hello(release) => Ok(release),
        other => bail!("the guest began with {other:?}"),
    }
}

/// Hands the job to the guest's init; on return it is started.
fn begin(guest: &mut Guest, job: Job) -> Result<()> {
    Frame::Job(job).write_to(&mut guest.line()?)?;
    match answer(guest)? {
        Frame::Ready => Ok(()),
        Frame::Failed(text) => bail!("the guest could not be set up: {text}"),
        other => bail!("the guest sent {other:?} instead of being ready"),
    }
}

/// What the guest says next while it gets ready.
fn answer(guest: &mut Guest) -> Result<Frame> {
    let frame = guest.receive(Some(Instant::now() + BOOT_PATIENCE))?;
    frame.with_context(|| {
        let (seconds, words) = (BOOT_PATIENCE.as_secs(), guest.last_words());
        format!("the guest was not ready after {seconds} s\n{words}")
    })
}

/// Starts the thread that passes standard input on, and for a terminal the one that passes its size on.
fn feed(guest: &Guest, stdin: bool, on_terminal: bool) -> Result<()> {
    if !stdin {
        return Ok(Frame::StdinEnd.write_to(&mut guest.line()?)?);
    }
    let line = Arc::new(Mutex::new(guest.line()?));
    if on_terminal {
        let line = line.clone();
        let tell = move |size| send(&line, &Frame::Resize(size)).is_ok();
        // It may have been resized during the boot.
        size_of(&io::stdout()).map(&tell);
        terminal::on_resize(tell)?;
    }
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(length @ 1..) = io::stdin().read(&mut buffer) {
            if send(&line, &Frame::Stdin(buffer[..length].to_vec())).is_err() {
                return;
            }
        }
        let _ = send(&line, &Frame::StdinEnd);
    });
    Ok(())
}

fn send(line: &Mutex<impl Write>, frame: &Frame) -> io::Result<()> {
    let mut line = line.lock().map_err(|_| io::ErrorKind::BrokenPipe)?;
    frame.write_to(&mut *line)
}
