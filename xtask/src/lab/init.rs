//! Process 1 of the guest: sets up two RDMA hosts and the wire between them, runs the job, reports.
//!
//! This is xtask itself, started by the initramfs from the machine's own root, which is mounted
//! read-only with a layer of memory over it: what the job writes vanishes with the guest.
#![allow(unsafe_code)] // mount(2), setrlimit(2), kill(2), openpty(3): no safe wrapper in std

use super::wire::{Decoder, Frame, Job, Size};
use anyhow::{Context, Result, anyhow, bail};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Runs as process 1 and does not return: the host ends the guest when it has the exit status.
pub(crate) fn main() -> ! {
    if std::process::id() != 1 {
        eprintln!("lab-init is process 1 of the lab's guest and nothing else");
        std::process::exit(2);
    }
    if let Err(error) = serve() {
        // The console is what is left; the host quotes its end.
        eprintln!("lab: {error:#}");
    }
    loop {
        power_off();
        thread::sleep(Duration::from_secs(1));
    }
}

fn serve() -> Result<()> {
    mount_kernel_filesystems()?;
    let port = Port::open()?;
    port.send(&Frame::Hello(
        fs::read_to_string("/proc/sys/kernel/osrelease")?
            .trim()
            .to_owned(),
    ))?;
    let mut decoder = Decoder::default();
    let job = match port.receive(&mut decoder)? {
        Frame::Job(job) => job,
        other => bail!("the host began with {other:?}"),
    };
    let last = match run(&port, decoder, job) {
        Ok(status) => Frame::Exit(status),
        Err(error) => Frame::Failed(format!("{error:#}\n{}", kernel_log_end())),
    };
    port.send(&last)?;
    Ok(())
}

fn run(port: &Port, decoder: Decoder, job: Job) -> Result<i32> {
    set_path(&job);
    share_out_folder(&job)?;
    raise_limits();
    set_up_network()?;
    set_up_devices()?;
    port.send(&Frame::Ready)?;
    match Running::start(&job) {
        Ok(running) => running.serve(port, decoder),
        Err(error) => {
            port.send(&Frame::Stderr(format!("lab: {error:#}\n").into_bytes()))?;
            Ok(CANNOT_RUN)
        }
    }
}

/// How long the kernel may take to make a device. Two of them take less than the host's patience, which says less
/// at its end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The status of a command that cannot be started, as a shell gives it.
const CANNOT_RUN: i32 = 127;

// ---- the machine -----------------------------------------------------------------------------------

fn mount_kernel_filesystems() -> Result<()> {
    mount("proc", "/proc", "proc", "")?;
    mount("sysfs", "/sys", "sysfs", "")?;
    mount("devtmpfs", "/dev", "devtmpfs", "mode=755")?;
    for (folder, kind, options) in [
        ("/dev/shm", "tmpfs", "mode=1777"),
        ("/dev/pts", "devpts", "mode=620,ptmxmode=666"),
        ("/run", "tmpfs", "mode=755"),
    ] {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {folder}"))?;
        mount(kind, folder, kind, options)?;
    }
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, Path::new("/dev").join(link));
    }
    let _ = fs::create_dir("/tmp");
    Ok(())
}

/// The folder given with `--out`, where what the job writes stays.
fn share_out_folder(job: &Job) -> Result<()> {
    let Some((_, folder)) = job.env.iter().find(|(name, _)| name == OUT_VARIABLE) else {
        return Ok(());
    };
    fs::create_dir_all(folder)?;
    mount(
        "out",
        &folder.to_string_lossy(),
        "9p",
        "trans=virtio,version=9p2000.L,msize=512000",
    )
}

/// The variable that names the folder given with `--out`, in the guest.
pub(crate) const OUT_VARIABLE: &str = "LAB_OUT";

fn mount(source: &str, target: &str, kind: &str, options: &str) -> Result<()> {
    let [source, place, kind, options] =
        [source, target, kind, options].map(|text| CString::new(text).unwrap_or_default());
    // SAFETY: the four pointers come from CStrings that live until the end of this function, so they are
    // NUL-terminated strings for the whole call; mount(2) only reads them.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            place.as_ptr(),
            kind.as_ptr(),
            0,
            options.as_ptr().cast(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()).with_context(|| format!("cannot mount {target}")),
    }
}

/// No memory limit, no core files, and a name for the prompt.
fn raise_limits() {
    let unlimited = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the pointer is to a live rlimit on this stack, which setrlimit(2) only reads. It cannot fail
    // for root with a valid resource, and if it did, registering memory would say so.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &unlimited) };
    let _ = fs::write("/proc/sys/kernel/core_pattern", "/dev/null");
    let _ = fs::write("/proc/sys/kernel/hostname", "lab");
}

/// `ip` and `rdma` live in /sbin, which is not in everybody's PATH.
fn set_path(job: &Job) {
    let given = job.env.iter().find(|(name, _)| name == "PATH");
    let mut path = given.map(|(_, value)| value.clone()).unwrap_or_default();
    path.push(":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    // SAFETY: process 1 has one thread at this point: the others are started in `Running::serve`.
    unsafe { std::env::set_var("PATH", path) };
}

fn power_off() {
    // SAFETY: reboot(2) takes no pointers. Nothing is lost: the only file system that outlives the guest
    // is the 9p one, which is written through.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
}

// ---- two hosts and a wire --------------------------------------------------------------------------

/// Both ends of a veth pair get an address, and the kernel is kept from its usual shortcut through `lo`,
/// so that packets between the two cross the wire, where `tc` and `ip link` can lose them.
fn set_up_network() -> Result<()> {
    for scope in ["all", "default"] {
        for (name, value) in [
            ("accept_local", "1"),
            ("rp_filter", "0"),
            ("arp_ignore", "1"),
            ("arp_announce", "2"),
        ] {
            sysctl(&format!("net/ipv4/conf/{scope}/{name}"), value)?;
        }
        // Duplicate detection would hold back every new IPv6 address for a second.
        for (name, value) in [("accept_dad", "0"), ("dad_transmits", "0")] {
            sysctl(&format!("net/ipv6/conf/{scope}/{name}"), value)?;
        }
    }
    batch("ip", &[], LINKS)?;
    batch(
        "ip",
        &["-4"],
        &addresses("192.168.99.1", "192.168.99.2", 32, ""),
    )?;
    batch(
        "ip",
        &["-6"],
        &(addresses("fd99::1", "fd99::2", 128, " nodad") + REVERSE_IPV6),
    )
}

const LINKS: &str = "\
link set lo up
link add v0 mtu 4200 type veth peer name v1 mtu 4200
link set v0 up
link set v1 up
";

/// The local table is asked last, and packets from this machine (`iif lo`) to either address go out by the
/// other end's device. The same routes in the main table satisfy the reverse lookups of the kernel's CM.
fn addresses(here: &str, there: &str, prefix: u8, flags: &str) -> String {
    format!(
        "\
addr add {here}/{prefix} dev v0{flags}
addr add {there}/{prefix} dev v1{flags}
rule add pref 100 lookup local
rule del pref 0
rule add pref 10 iif lo to {there} lookup 10
rule add pref 10 iif lo to {here} lookup 11
route add {there}/{prefix} dev v0 src {here} table 10
route add {here}/{prefix} dev v1 src {there} table 11
route add {there}/{prefix} dev v0 src {here}
route add {here}/{prefix} dev v1 src {there}
"
    )
}

/// The CM's reverse lookup names the device, which IPv6, unlike IPv4, does not let decide: the local table would
/// answer with the other end.
const REVERSE_IPV6: &str = "\
rule add pref 9 oif v0 to fd99::2 lookup 10
rule add pref 9 oif v1 to fd99::1 lookup 11
";

fn set_up_devices() -> Result<()> {
    batch(
        "rdma",
        &[],
        "link add rxe0 type rxe netdev v0\nlink add rxe1 type rxe netdev v1\n",
    )?;
    for (device, address) in [("rxe0", "192.168.99.1"), ("rxe1", "192.168.99.2")] {
        wait_until_usable(device, address)?;
    }
    Ok(())
}

/// The kernel fills the table of addresses (GIDs) after the link has been added.
fn wait_until_usable(device: &str, address: &str) -> Result<()> {
    let port = Path::new("/sys/class/infiniband")
        .join(device)
        .join("ports/1");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let active =
            fs::read_to_string(port.join("state")).is_ok_and(|state| state.contains("ACTIVE"));
        if active && has_gid(&port, address) {
            return Ok(());
        }
        if Instant::now() > deadline {
            let seconds = PATIENCE.as_secs();
            bail!("{device} has not become active with {address} in {seconds} s");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn has_gid(port: &Path, address: &str) -> bool {
    let Ok(address) = address.parse::<std::net::Ipv4Addr>() else {
        return false;
    };
    let wanted = address.to_ipv6_mapped();
    let gids = fs::read_dir(port.join("gids"))
        .into_iter()
        .flatten()
        .flatten();
    gids.filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .any(|gid| gid.trim().parse() == Ok(wanted))
}

fn sysctl(name: &str, value: &str) -> Result<()> {
    fs::write(Path::new("/proc/sys").join(name), value)
        .with_context(|| format!("cannot set {name} to {value}"))
}

/// Gives `commands` to one process of `tool`, which stops at the first that fails.
fn batch(tool: &str, options: &[&str], commands: &str) -> Result<()> {
    let mut child = Command::new(tool)
        .args(options)
        .args(["-b", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {tool}: is the package iproute2 installed?"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(commands.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{tool} failed: {}\nin this list:\n{commands}", said.trim());
    }
    Ok(())
}

fn kernel_log_end() -> String {
    let output = Command::new("dmesg")
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    let log = String::from_utf8_lossy(&output);
    let lines: Vec<&str> = log.lines().collect();
    let end = lines.split_at(lines.len().saturating_sub(20)).1.join("\n");
    format!("the end of the guest's kernel log:\n{end}")
}

// ---- the port --------------------------------------------------------------------------------------

/// The virtio port to the host; clones write to the same one.
#[derive(Clone)]
struct Port {
    file: Arc<File>,
    writing: Arc<Mutex<()>>,
}

impl Port {
    /// Waits for the device node, which the kernel makes some time after the driver is loaded.
    fn open() -> Result<Port> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/vport0p1")
            {
                Ok(file) => {
                    return Ok(Port {
                        file: Arc::new(file),
                        writing: Arc::default(),
                    });
                }
                Err(error) if Instant::now() > deadline => {
                    return Err(error).context("no port to the host");
                }
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        let _turn = self.writing.lock();
        frame.write_to(&mut &*self.file)
    }

    fn receive(&self, decoder: &mut Decoder) -> io::Result<Frame> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            if let Some(frame) = decoder.frame()? {
                return Ok(frame);
            }
            match (&*self.file).read(&mut buffer)? {
                // The host's end is not connected yet.
                0 => thread::sleep(Duration::from_millis(2)),
                length => decoder.feed(&buffer[..length]),
            }
        }
    }
}

// ---- the job ---------------------------------------------------------------------------------------

/// How bytes from one of the job's streams travel.
type AsFrame = fn(Vec<u8>) -> Frame;

/// The job's process and our ends of its standard streams.
struct Running {
    pid: libc::pid_t,
    stdin: Option<File>,
    outputs: Vec<(File, AsFrame)>,
    terminal: Option<File>,
}

impl Running {
    fn start(job: &Job) -> Result<Running> {
        let Some((program, arguments)) = job.argv.split_first() else {
            bail!("no command")
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(job.env.clone())
            .current_dir(&job.cwd);
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env("PATH", path);
        let running = match job.terminal {
            Some(size) => Running::on_terminal(&mut command, size),
            None => Running::on_pipes(&mut command),
        };
        running.with_context(|| {
            format!(
                "cannot run {} in {}",
                program.to_string_lossy(),
                job.cwd.to_string_lossy()
            )
        })
    }

    fn on_pipes(command: &mut Command) -> Result<Running> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let missing = || anyhow!("a standard stream is missing");
        let stdin: OwnedFd = child.stdin.take().ok_or_else(missing)?.into();
        let stdout: OwnedFd = child.stdout.take().ok_or_else(missing)?.into();
        let stderr: OwnedFd = child.stderr.take().ok_or_else(missing)?.into();
        Ok(Running {
            pid: child.id() as libc::pid_t,
            stdin: Some(stdin.into()),
            outputs: vec![
                (stdout.into(), Frame::Stdout),
                (stderr.into(), Frame::Stderr),
            ],
            terminal: None,
        })
    }

    fn on_terminal(command: &mut Command, size: Size) -> Result<Running> {
        let (ours, theirs) = open_terminal(size)?;
        command
            .stdin(theirs.try_clone()?)
            .stdout(theirs.try_clone()?)
            .stderr(theirs);
        // SAFETY: between fork and exec the closure makes two system calls and nothing else: no allocation,
        // no lock, which is what a child of a process with threads may do.
        unsafe { command.pre_exec(take_terminal) };
        let child = command.spawn()?;
        Ok(Running {
            pid: child.id() as libc::pid_t,
            stdin: Some(ours.try_clone()?),
            outputs: vec![(ours.try_clone()?, Frame::Stdout)],
            terminal: Some(ours),
        })
    }

    /// Carries bytes both ways until the job is over, and returns its exit status.
    fn serve(self, port: &Port, decoder: Decoder) -> Result<i32> {
        let outputs: Vec<_> = self
            .outputs
            .into_iter()
            .map(|(file, frame)| {
                let port = port.clone();
                thread::spawn(move || forward(file, frame, &port))
            })
            .collect();
        let input = port.clone();
        thread::spawn(move || feed(&input, decoder, self.stdin, self.terminal));
        let status = wait_for(self.pid)?;
        // What the job left running must not keep its output open.
        // SAFETY: kill(2) takes no pointers; as process 1 we are exempt from a signal to everybody.
        unsafe { libc::kill(-1, libc::SIGKILL) };
        for output in outputs {
            let _ = output.join();
        }
        Ok(status)
    }
}

/// Sends what can be read from `file` until it ends (a terminal ends with an error).
fn forward(mut file: File, frame: AsFrame, port: &Port) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length @ 1..) = file.read(&mut buffer) {
        if port.send(&frame(buffer[..length].to_vec())).is_err() {
            return;
        }
    }
}

/// Takes the host's frames. A job that does not read its input, or has closed it, loses it.
fn feed(port: &Port, mut decoder: Decoder, mut stdin: Option<File>, terminal: Option<File>) {
    while let Ok(frame) = port.receive(&mut decoder) {
        match frame {
            Frame::Stdin(bytes) => {
                let written = stdin.as_mut().map(|file| file.write_all(&bytes));
                if matches!(written, Some(Err(_))) {
                    stdin = None;
                }
            }
            Frame::StdinEnd => stdin = None,
            Frame::Resize(size) => {
                if let Some(terminal) = &terminal {
                    resize(terminal, size);
                }
            }
            _ => {}
        }
    }
}

/// Reaps everybody's orphans, as process 1 must, until the job itself is over.
fn wait_for(job: libc::pid_t) -> Result<i32> {
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a live int on this stack, which waitpid(2) writes.
        let pid = unsafe { libc::waitpid(-1, &mut status, 0) };
        if pid == job {
            return Ok(exit_status(status));
        }
        if pid < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).context("lost the job");
            }
        }
    }
}

/// As a shell gives it: 128 and the signal's number for a job that was killed.
fn exit_status(status: libc::c_int) -> i32 {
    if libc::WIFSIGNALED(status) {
        128 + libc::WTERMSIG(status)
    } else {
        libc::WEXITSTATUS(status)
    }
}

fn open_terminal(size: Size) -> Result<(File, OwnedFd)> {
    let (mut ours, mut theirs) = (-1, -1);
    let size = window_size(size);
    let name: *mut libc::c_char = std::ptr::null_mut();
    let settings: *const libc::termios = std::ptr::null();
    // SAFETY: the first two pointers are to live ints on this stack, which openpty(3) writes; it accepts null
    // for the name and the settings; the last is to a live winsize, which it reads.
    let result = unsafe { libc::openpty(&mut ours, &mut theirs, name, settings, &size) };
    if result != 0 {
        return Err(io::Error::last_os_error()).context("cannot open a terminal in the guest");
    }
    // SAFETY: openpty succeeded, so this is an open descriptor that nobody else owns.
    let ours = unsafe { OwnedFd::from_raw_fd(ours) };
    // SAFETY: the same for the other end.
    let theirs = unsafe { OwnedFd::from_raw_fd(theirs) };
    Ok((ours.into(), theirs))
}

/// Makes descriptor 0 the controlling terminal of a new session.
fn take_terminal() -> io::Result<()> {
    // SAFETY: setsid(2) takes no arguments.
    if unsafe { libc::setsid() } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: TIOCSCTTY takes an int, not a pointer.
    if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn resize(terminal: &File, size: Size) {
    let size = window_size(size);
    // SAFETY: TIOCSWINSZ reads a winsize, and the pointer is to a live one on this stack.
    unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) };
}

fn window_size(size: Size) -> libc::winsize {
    libc::winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_job_has_the_status_a_shell_would_give_it() {
        assert_eq!(exit_status(7 << 8), 7);
        assert_eq!(exit_status(libc::SIGSEGV), 139);
    }
}
