//! Two processes, a server and a client: start one, wait until it listens, start the other, and never wait for ever.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{io, thread};

/// How one knows that the server can be connected to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ready {
    /// It prints `listening`.
    SaysSo,
    /// Its TCP port is open.
    TcpPort,
    /// Nothing shows it: wait a little.
    AfterAWhile,
}

/// The two command lines; `{port}` stands for the port.
#[derive(Clone, Debug)]
pub(crate) struct Commands {
    pub(crate) server: Vec<String>,
    pub(crate) client: Vec<String>,
}

/// A server and a client, not yet started.
pub(crate) struct Pair<'a> {
    commands: &'a Commands,
    port: u16,
    ready: Ready,
    step: Duration,
}

/// What the client left behind when it had ended well.
pub(crate) struct Finished {
    pub(crate) stdout: String,
    pub(crate) elapsed: Duration,
    pub(crate) client_pid: u32,
}

impl Finished {
    pub(crate) fn not_understood(&self) -> String {
        let last = self.stdout.lines().last().unwrap_or("nothing");
        format!("ended well, but no figures were found: it printed {last:?} at the end")
    }
}

impl<'a> Pair<'a> {
    pub(crate) fn new(commands: &'a Commands, port: u16, ready: Ready) -> Pair<'a> {
        Pair {
            commands,
            port,
            ready,
            step: STEP,
        }
    }

    /// Looks at the processes this often: what one processor counts should not have much of the looking in it.
    pub(crate) fn looked_at_every(self, step: Duration) -> Pair<'a> {
        Pair { step, ..self }
    }

    /// Runs both; the error says in words what went wrong. Neither outlives the call.
    pub(crate) fn run(&self, limit: Duration) -> Result<Finished, String> {
        let deadline = Instant::now() + limit;
        let mut server = Process::start(&self.commands.server, self.port)?;
        self.wait_until_ready(&mut server, deadline)?;
        let start = Instant::now();
        let mut client = Process::start(&self.commands.client, self.port)?;
        let ended = client.wait(deadline, self.step)?;
        let elapsed = start.elapsed();
        if ended.is_none() {
            return Err(format!(
                "hung: killed after {} s; the client slept in {}, the server in {}",
                limit.as_secs(),
                client.sleeps_in(),
                server.sleeps_in()
            ));
        }
        if ended != Some(true) {
            let server = server.last_words();
            return Err(format!(
                "failed: {} (server: {server})",
                client.last_words()
            ));
        }
        // A server that is still closing needs the port and the device a moment longer.
        let _ = server.wait(Instant::now() + Duration::from_secs(2), STEP)?;
        Ok(Finished {
            stdout: client.stdout(),
            elapsed,
            client_pid: client.child.id(),
        })
    }

    /// Kills the server after a while and returns how long the client went on; it may end as it likes.
    pub(crate) fn kill_the_server_after(
        &self,
        lead: Duration,
        limit: Duration,
    ) -> Result<Finished, String> {
        let mut server = Process::start(&self.commands.server, self.port)?;
        self.wait_until_ready(&mut server, Instant::now() + limit)?;
        let mut client = Process::start(&self.commands.client, self.port)?;
        if client.wait(Instant::now() + lead, self.step)?.is_some() {
            return Err(format!(
                "ended before its peer was killed: {}",
                client.last_words()
            ));
        }
        let start = Instant::now();
        server.child.kill().map_err(|error| error.to_string())?;
        match client.wait(start + limit, STEP)? {
            None => Err(format!(
                "was still running {} s after its peer was killed",
                limit.as_secs()
            )),
            Some(_) => Ok(Finished {
                stdout: client.stdout(),
                elapsed: start.elapsed(),
                client_pid: client.child.id(),
            }),
        }
    }

    fn wait_until_ready(&self, server: &mut Process, deadline: Instant) -> Result<(), String> {
        loop {
            let ready = match self.ready {
                Ready::SaysSo => server.stdout().contains("listening"),
                Ready::TcpPort => tcp_port_is_open(self.port),
                Ready::AfterAWhile => {
                    thread::sleep(Duration::from_millis(400));
                    true
                }
            };
            if ready {
                return Ok(());
            }
            if server.try_wait()?.is_some() {
                return Err(format!("the server ended at once: {}", server.last_words()));
            }
            if Instant::now() > deadline {
                return Err("the server did not listen in time".to_owned());
            }
            thread::sleep(STEP);
        }
    }
}

/// A child whose output goes to files, so that nobody has to read while it runs.
struct Process {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Process {
    fn start(command: &[String], port: u16) -> Result<Process, String> {
        let words: Vec<String> = command
            .iter()
            .map(|word| word.replace("{port}", &port.to_string()))
            .collect();
        let (program, arguments) = words.split_first().ok_or("an empty command")?;
        let name = program.rsplit('/').next().unwrap_or(program);
        let base = std::env::temp_dir().join(format!("{name}-{port}-{}", words.join(" ").len()));
        let (stdout, stderr) = (base.with_extension("out"), base.with_extension("err"));
        let open = |path| File::create(path).map_err(|error: io::Error| error.to_string());
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(open(&stdout)?)
            .stderr(open(&stderr)?)
            .spawn()
            .map_err(|error| format!("{program} cannot be started: {error}"))?;
        Ok(Process {
            child,
            stdout,
            stderr,
        })
    }

    /// Whether it ended well, `None` while it runs.
    fn try_wait(&mut self) -> Result<Option<bool>, String> {
        let status = self.child.try_wait().map_err(|error| error.to_string())?;
        Ok(status.map(|status| status.success()))
    }

    /// Whether it ended well, `None` if it had not ended by the deadline.
    fn wait(&mut self, deadline: Instant, step: Duration) -> Result<Option<bool>, String> {
        loop {
            let ended = self.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                return Ok(ended);
            }
            thread::sleep(step);
        }
    }

    fn stdout(&self) -> String {
        fs::read_to_string(&self.stdout).unwrap_or_default()
    }

    /// The kernel's function in which it waits.
    fn sleeps_in(&self) -> String {
        fs::read_to_string(format!("/proc/{}/wchan", self.child.id())).unwrap_or_default()
    }

    fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.stderr).unwrap_or_default() + &self.stdout();
        let lines: Vec<&str> = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .collect();
        match lines.last() {
            Some(line) => (*line).to_owned(),
            None => "it said nothing".to_owned(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.stdout);
        let _ = fs::remove_file(&self.stderr);
    }
}

/// How often a process is looked at, unless told otherwise: seldom enough not to disturb what is timed.
const STEP: Duration = Duration::from_millis(10);

/// Looks for a listening socket in the kernel's tables: state 0A, the port in hex behind the local address.
fn tcp_port_is_open(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .any(|table| {
            table.lines().any(|line| {
                let mut words = line.split_whitespace().skip(1);
                let local = words.next().unwrap_or_default();
                let state = words.nth(1).unwrap_or_default();
                local.ends_with(&wanted) && state == "0A"
            })
        })
}
