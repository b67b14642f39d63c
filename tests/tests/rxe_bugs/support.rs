//! What the checks share: two endpoints, a clock that ends a hang, how many rounds to do.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rdma_msg::{Endpoint, EndpointConfig, Incoming, Listener, Receive};

/// Bugs show as hangs; each check has a bound, and this is the slack for a loaded machine.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// What the reports ask of what is done at once. Not for what is done thousands of times: a busy machine
/// stands still for longer now and then.
pub(crate) const PROMPTLY: Duration = Duration::from_secs(2);

/// The longest that any check may take, all its rounds together.
const WATCHDOG: Duration = Duration::from_secs(240);

/// Held by a check while it runs.
pub(crate) struct Alone {
    _one: MutexGuard<'static, ()>,
    _over: mpsc::Sender<()>,
}

/// One check at a time: they count objects of the whole device, and two cores are few.
///
/// A check that hangs where no deadline of its own catches it ends the program after [`WATCHDOG`], with
/// its name.
pub(crate) fn serial() -> Alone {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let name = thread::current().name().unwrap_or("a check").to_owned();
    let patience = if full() { 30 * WATCHDOG } else { WATCHDOG };
    let (over, is_over) = mpsc::channel::<()>();
    thread::spawn(move || {
        if is_over.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name}: not over after {patience:?}, it hangs");
            std::process::exit(101);
        }
    });
    Alone {
        _one: one,
        _over: over,
    }
}

/// `all` rounds if `RDMA_TEST_ROUNDS=full`, else `short`.
pub(crate) fn rounds(all: usize, short: usize) -> usize {
    if full() { all } else { short }
}

fn full() -> bool {
    match std::env::var("RDMA_TEST_ROUNDS").as_deref() {
        Ok("full") => true,
        Ok(other) => panic!("RDMA_TEST_ROUNDS is {other:?}, not \"full\""),
        Err(_) => false,
    }
}

/// The address the servers listen on, port chosen by the kernel.
pub(crate) fn server_addr() -> SocketAddr {
    addr_from("RDMA_TEST_SERVER", "192.168.99.2")
}

/// The address that clients connect from.
pub(crate) fn client_addr() -> SocketAddr {
    addr_from("RDMA_TEST_CLIENT", "192.168.99.1")
}

fn addr_from(variable: &str, default: &str) -> SocketAddr {
    let ip = std::env::var(variable).unwrap_or_else(|_| default.into());
    SocketAddr::new(
        ip.parse()
            .unwrap_or_else(|_| panic!("{variable} is no IP address")),
        0,
    )
}

/// Runs `body` in a thread and fails if it takes longer than `limit`: a hang becomes a failed check.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, result) = mpsc::channel();
    let worker = thread::spawn(move || {
        let _ = done.send(body()); // nobody listens once the time is over
    });
    match result.recv_timeout(limit) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: not over after {limit:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("the thread ended without a result or a panic"),
        },
    }
}

/// How long `body` took, and what it returned.
pub(crate) fn timed<T>(body: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let value = body();
    (start.elapsed(), value)
}

/// Two connected endpoints: the client's and the server's.
pub(crate) struct Pair {
    pub(crate) client: Endpoint,
    pub(crate) server: Endpoint,
}

/// Connects a client to a server in this process, each with its own configuration.
pub(crate) fn pair_of(client: &EndpointConfig, server: &EndpointConfig) -> Pair {
    let listener = Listener::bind(server_addr(), server).expect("listen");
    connect_to(&listener, client)
}

/// A pair with the same configuration on both sides.
pub(crate) fn pair(config: &EndpointConfig) -> Pair {
    pair_of(config, config)
}

/// Connects a client to `listener` and accepts it.
pub(crate) fn connect_to(listener: &Listener, config: &EndpointConfig) -> Pair {
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let server = scope.spawn(|| accept(listener).accept().expect("accept"));
        let client = Endpoint::connect(addr, config).expect("connect");
        Pair {
            client,
            server: server.join().expect("the accepting thread"),
        }
    })
}

/// The next request; a check whose client failed must not wait for one.
pub(crate) fn accept(listener: &Listener) -> Incoming {
    let incoming = listener
        .accept_deadline(Instant::now() + SOON)
        .expect("a request");
    incoming.expect("a request in time")
}

/// A server that posts receives only when it is told to, so what is sent to it stays in flight: its
/// "not ready" answers ask for 491 ms of patience each, seven times.
pub(crate) fn deaf() -> EndpointConfig {
    EndpointConfig {
        receive: Receive::Manual,
        min_rnr_timer: 31,
        ..EndpointConfig::default()
    }
}

/// What the kernel's RDMA objects are at the moment, one line each, without what always changes.
fn resources() -> Vec<String> {
    run("rdma", &["resource", "show"])
        .lines()
        .map(str::to_owned)
        .collect()
}

/// What there is before a check that counts.
pub(crate) fn baseline() -> Vec<String> {
    settled()
}

/// The kernel's objects, without what librdmacm keeps for later: once used, a device stays open, and
/// its protection domain stays until an id is the last to let go of the device.
fn settled() -> Vec<String> {
    for address in rdma_cm::device_addresses().expect("devices") {
        drop(rdma_cm::Listener::bind(
            address.addr,
            &rdma_cm::ListenOptions::default(),
        ));
    }
    resources()
}

/// Fails if the kernel's objects are not as `before` soon: some are freed late.
pub(crate) fn assert_no_leak(before: &[String]) {
    let until = Instant::now() + SOON;
    loop {
        let now = settled();
        if now == before {
            return;
        }
        assert!(
            Instant::now() < until,
            "left behind: {now:#?}, before: {before:#?}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// An error's text and those of all its sources.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let sources = std::iter::successors(Some(error), |error| error.source());
    sources
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

/// A wire that loses packets from the server to the client, until it is dropped.
pub(crate) struct LossyWire {
    netdev: String,
}

impl LossyWire {
    /// Has the server's network device lose so many percent of what it sends.
    pub(crate) fn losing(percent: u32) -> LossyWire {
        let ip = server_addr().ip().to_string();
        let shown = run("ip", &["-o", "addr", "show", "to", &ip]);
        let netdev = shown
            .split_whitespace()
            .nth(1)
            .expect("a device with the server's address");
        let loss = format!("{percent}%");
        run(
            "tc",
            &[
                "qdisc", "add", "dev", netdev, "root", "netem", "loss", &loss,
            ],
        );
        LossyWire {
            netdev: netdev.to_owned(),
        }
    }
}

impl Drop for LossyWire {
    fn drop(&mut self) {
        run("tc", &["qdisc", "del", "dev", &self.netdev, "root"]);
    }
}

fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect(program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
