//! Endpoints on soft-RoCE, in the lab: what the fake fabric cannot show.
//!
//! The tests cut wires, kill and stop processes, so they run one at a time, as `cargo xtask test`
//! does, and restore what they broke.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod cm_common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cm_common::{Fault, run};
use rdma_msg::{
    Access, Buf, Cause, CloseError, Endpoint, EndpointConfig, Failure, Listener, OpenError,
    Operation, Outcome, Receive, RemoteRegion, Wait, WcStatus,
};

const SERVER: &str = "192.168.99.2:0";
const LIMIT: Duration = Duration::from_secs(10);

/// Checks that something was done soon: half of the times, for a machine can be busy with something else for a
/// while, and always before what would be waited for instead (3 s for a peer, 4 s for the connection manager).
fn assert_soon(times: Vec<Duration>, limit: Duration) {
    assert!(
        times.iter().all(|&took| took < Duration::from_secs(2)),
        "{times:?}"
    );
    assert!(median(times.clone()) < limit, "{times:?}");
}

/// Rounds of the tests that break something; `RDMA_ROUNDS=200` for the full count.
fn rounds() -> u32 {
    std::env::var("RDMA_ROUNDS").map_or(5, |rounds| rounds.parse().unwrap())
}

/// Nothing is received unless the test says so, and a sender is told to wait for half a second each
/// time, for ever: what is posted stays in flight.
fn patient() -> EndpointConfig {
    EndpointConfig {
        receive: Receive::Manual,
        extra_bufs: Some(256),
        rnr_retry_count: 7,
        min_rnr_timer: 31,
        wait: Wait::Event,
        ..EndpointConfig::default()
    }
}

fn pair_with(client: &EndpointConfig, server: &EndpointConfig) -> (Endpoint, Endpoint) {
    pair_at(SERVER, client, server)
}

fn pair_at(addr: &str, client: &EndpointConfig, server: &EndpointConfig) -> (Endpoint, Endpoint) {
    let listener = Listener::bind(addr.parse().unwrap(), server).unwrap();
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept().unwrap().accept().unwrap());
        let connected = Endpoint::connect(addr, client).unwrap();
        (connected, accepting.join().unwrap())
    })
}

fn filled(endpoint: &Endpoint, bytes: &[u8]) -> Buf {
    let mut buf = endpoint.alloc(0).unwrap();
    buf.fill_from(bytes);
    buf
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn every_kind_of_operation_works_and_every_way_to_wait() {
    for wait in [Wait::default(), Wait::Event, Wait::Spin] {
        let config = EndpointConfig {
            wait,
            ..EndpointConfig::default()
        };
        let (client, server) = pair_with(&config, &config);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let region = server.expose(4096, access).unwrap();
        let remote = region.descriptor();

        let sent = client.send_imm(filled(&client, b"hello"), 7).unwrap();
        let received = server.recv().unwrap();
        assert_eq!((&received.buf[..], received.imm), (&b"hello"[..], Some(7)));
        drop(received);
        sent.wait().unwrap();
        server.send_slice(&[9; 4096]).unwrap().wait().unwrap();
        assert_eq!(client.recv().unwrap().buf[..], [9; 4096]);

        let target = remote.slice(64..68).unwrap();
        client
            .write(filled(&client, b"abcd"), target)
            .unwrap()
            .wait()
            .unwrap();
        let read = client
            .read(client.alloc(0).unwrap(), target)
            .unwrap()
            .wait()
            .unwrap()
            .buf;
        assert_eq!(&read.as_deref().unwrap(), b"abcd");
        drop(read);
        let word = remote.slice(8..16).unwrap();
        assert_eq!(
            client.fetch_add(word, 5).unwrap().wait().unwrap().value,
            Some(0)
        );
        assert_eq!(
            client
                .compare_swap(word, 5, 1)
                .unwrap()
                .wait()
                .unwrap()
                .value,
            Some(5)
        );
        assert_eq!(region.load_u64(8).unwrap(), 1);
        let told = client
            .write_imm(filled(&client, b"efgh"), target, 3)
            .unwrap();
        let received = server.recv().unwrap();
        assert_eq!((received.imm, received.written), (Some(3), Some(4)));
        drop(received);
        told.wait().unwrap();
        let bufs = vec![filled(&client, b"one "), filled(&client, b"message")];
        let gathered = client.send_gather(bufs).unwrap();
        assert_eq!(&server.recv().unwrap().buf[..], b"one message");
        gathered.wait().unwrap();

        client.close(LIMIT).unwrap();
        assert!(server.recv().is_err());
        assert_eq!(*server.closed().unwrap(), Cause::Disconnected);
        // It has ended; this waits until its receives are flushed, too.
        assert!(matches!(server.close(LIMIT), Err(CloseError::Broken(_))));
        for endpoint in [&client, &server] {
            assert_eq!(endpoint.worker().open_operations(), 0);
            assert_eq!(endpoint.worker().stats().stale, 0);
            let (count, _) = endpoint.worker().pool_size();
            assert_eq!(endpoint.worker().available(), count);
        }
    }
}

/// A peer in a process of its own, connected, with operations in flight on both sides.
struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    fn connect() -> (Peer, Endpoint, RemoteRegion) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_msg-peer"))
            .arg(SERVER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut peer = Peer {
            child,
            stdin,
            stdout: BufReader::new(stdout),
        };
        let addr = peer.line().parse().unwrap();
        let endpoint = Endpoint::connect(addr, &patient()).unwrap();
        let hex = peer.line();
        let byte = |i: usize| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
        (
            peer,
            endpoint,
            RemoteRegion::from_bytes(std::array::from_fn(byte)),
        )
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn signal(&self, name: &str) {
        run(&format!("kill -{name} {}", self.child.id()));
    }

    /// Tells it to look, and asserts that on its side all has ended and every buffer is back.
    fn assert_clean_end(mut self) {
        writeln!(self.stdin, "look").unwrap();
        let report = self.line();
        assert!(
            report.ends_with(" failed, 0 buffers missing, true"),
            "the peer says: {report:?}"
        );
        assert!(
            !report.starts_with("0 failed"),
            "the peer had nothing in flight"
        );
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// 16 receives, and 100 operations of all other kinds behind a send that the peer has no receive for.
fn load(endpoint: &Endpoint, remote: RemoteRegion) -> Vec<Operation> {
    let buf = || filled(endpoint, &[7; 64]);
    let word = remote.slice(0..8).unwrap();
    let mut operations: Vec<_> = (0..16)
        .map(|_| endpoint.post_recv(endpoint.alloc(0).unwrap()).unwrap())
        .collect();
    for round in 0..100 {
        operations.push(match round % 7 {
            0 => endpoint.send(buf()).unwrap(),
            1 => endpoint.write(buf(), remote).unwrap(),
            2 => endpoint.read(buf(), remote.slice(0..64).unwrap()).unwrap(),
            3 => endpoint.compare_swap(word, 0, 1).unwrap(),
            4 => endpoint.fetch_add(word, 1).unwrap(),
            5 => endpoint.send_imm(buf(), 1).unwrap(),
            _ => endpoint.write_imm(buf(), remote, 1).unwrap(),
        });
    }
    operations
}

/// Waits for all, each on its own; how long the first and the last took.
fn all_end(operations: Vec<Operation>, since: Instant) -> (Duration, Duration) {
    let (mut first, mut last) = (None, Duration::ZERO);
    let mut failed = 0;
    for mut operation in operations {
        let kind = operation.kind();
        match operation.wait_deadline(since + LIMIT) {
            // The peer's first messages arrived before it was broken.
            Ok(_) => assert!(kind.is_receive(), "{kind} succeeded"),
            Err(rdma_msg::WaitError::Operation(error)) => {
                assert_eq!(error.op, kind);
                failed += 1;
                first.get_or_insert_with(|| since.elapsed());
            }
            Err(error) => panic!("{kind}: {error}"),
        }
        last = since.elapsed();
    }
    assert!(failed >= 100);
    (first.unwrap(), last)
}

fn assert_buffers_home(endpoint: &Endpoint) {
    let worker = endpoint.worker();
    assert_eq!(worker.open_operations(), 0);
    assert_eq!(worker.available(), worker.pool_size().0);
    assert_eq!((worker.stats().stale, worker.stats().leaked), (0, 0));
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn everything_ends_at_once_when_the_peer_is_killed() {
    let (mut times, mut spans) = (Vec::new(), Vec::new());
    for _ in 0..rounds() {
        let (mut peer, endpoint, remote) = Peer::connect();
        let operations = load(&endpoint, remote);
        assert_eq!(peer.line(), "posted");
        let start = Instant::now();
        peer.signal("KILL");
        let (first, last) = all_end(operations, start);
        // Between the news and the last outcome; the time to the news is the kernel's.
        spans.push(last - first);
        assert!(matches!(
            *endpoint.closed().unwrap(),
            Cause::Disconnected | Cause::Operation(_)
        ));
        assert_buffers_home(&endpoint);
        times.push(last);
    }
    println!(
        "killed: all 116 ended after {:?} (median), counted from the kill",
        median(times)
    );
    assert_soon(spans, Duration::from_millis(100));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_stopped_peer_does_not_hold_up_a_close() {
    let mut times = Vec::new();
    for _ in 0..rounds() {
        let (mut peer, endpoint, remote) = Peer::connect();
        let operations = load(&endpoint, remote);
        assert_eq!(peer.line(), "posted");
        peer.signal("STOP");
        let start = Instant::now();
        let closed = endpoint.close(Duration::from_millis(200));
        let took = start.elapsed();
        assert!(
            matches!(closed, Err(CloseError::TimedOut { unfinished: 100 })),
            "{closed:?}"
        );
        times.push(took);
        all_end(operations, start);
        assert_buffers_home(&endpoint);
        peer.signal("CONT");
        peer.assert_clean_end();
    }
    assert_soon(times, Duration::from_millis(800));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_cut_wire_ends_everything_within_the_peer_timeout() {
    // Not with the link down: the disconnect that is sent then puts the device's QP 1 into an error
    // state that soft-RoCE (6.1) does not leave again, and no test after it could connect.
    let mut times = Vec::new();
    for _ in 0..rounds() {
        let (mut peer, endpoint, remote) = Peer::connect();
        let operations = load(&endpoint, remote);
        assert_eq!(peer.line(), "posted");
        let fault = Fault::black_hole();
        let start = Instant::now();
        let (_, last) = all_end(operations, start);
        times.push(last);
        assert_buffers_home(&endpoint);
        // The peer finds out by itself, from its own operations in flight.
        peer.assert_clean_end();
        drop(fault);
    }
    let median = median(times);
    println!("cut: all 116 ended after {median:?} (median)");
    assert!(median < Duration::from_secs(3), "{median:?}");
}

/// Two more hosts on a wire of their own: a message of the connection manager that is sent while the
/// link is down leaves a device of soft-RoCE (6.1) of no use.
struct SpareHosts;

impl SpareHosts {
    const SERVER: &str = "192.168.98.2:0";

    fn new() -> SpareHosts {
        let in_the_lab = std::env::var_os("LAB").is_some();
        assert!(
            in_the_lab,
            "makes devices and routing rules: only in the lab's guest"
        );
        run("ip link add s0 type veth peer name s1");
        let hosts = SpareHosts; // from here on, dropping it cleans up
        run("
set -e
add_host() { # device, netdev, own address, the other's, table
    ip link set $2 up
    ip addr add $3/32 dev $2
    ip rule add pref 11 iif lo to $4 lookup $5
    for table in $5 main; do ip route add $4/32 dev $2 src $3 table $table; done
    rdma link add $1 type rxe netdev $2
}
add_host spare0 s0 192.168.98.1 192.168.98.2 12
add_host spare1 s1 192.168.98.2 192.168.98.1 13
for device in spare0 spare1; do
    for i in $(seq 100); do
        grep -q ACTIVE /sys/class/infiniband/$device/ports/1/state && grep -qi ffff:c0a8:620 /sys/class/infiniband/$device/ports/1/gids/* && continue 2
        sleep 0.1
    done
    exit 1
done");
        hosts
    }
}

impl Drop for SpareHosts {
    fn drop(&mut self) {
        run("
ip rule del pref 11 iif lo to 192.168.98.2 lookup 12
ip rule del pref 11 iif lo to 192.168.98.1 lookup 13
ip link del s0"); // and the devices with it
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn everything_ends_when_the_link_goes_down() {
    const NAME: &str = "everything_ends_when_the_link_goes_down";
    if std::env::var_os(NAME).is_some() {
        return take_the_link_down();
    }
    // A device can be removed once all that opened it have ended, and librdmacm closes none before.
    let hosts = SpareHosts::new();
    let test = std::env::current_exe().unwrap();
    let test = test.to_str().unwrap();
    let said = run(&format!(
        "{NAME}=1 {test} --ignored --exact {NAME} --nocapture"
    ));
    print!("{said}");
    assert!(said.contains("1 passed"), "{said}");
    drop(hosts);
}

fn take_the_link_down() {
    let (client, server) = pair_at(SpareHosts::SERVER, &patient(), &patient());
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = server.expose(4096, access).unwrap();
    let operations = load(&client, region.descriptor());

    run("ip link set s0 down");
    let start = Instant::now();

    let (_, last) = all_end(operations, start);
    let cause = client.closed().unwrap();
    println!("link down: all 116 ended after {last:?}: {cause}");
    assert!(last < Duration::from_secs(3), "{last:?}");
    assert_buffers_home(&client);
    // 6.1 says which operation failed, 6.12 flushes that one, too.
    let local = |failure: &Failure| failure.status == WcStatus::LocQpOpErr;
    assert!(
        matches!(&*cause, Cause::Operation(failure) if local(failure))
            || matches!(*cause, Cause::QueuePairError),
        "{cause}"
    );
    // The port's event ends nothing by itself, but the worker reads it.
    while client.worker().stats().device_events == 0 {
        assert!(start.elapsed() < LIMIT, "PORT_ERR was not read");
        client.worker().prepare_wait();
        client.worker().poll();
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_close_from_another_thread_ends_everything() {
    let mut times = Vec::new();
    for _ in 0..rounds() {
        let (mut peer, endpoint, remote) = Peer::connect();
        let operations = load(&endpoint, remote);
        assert_eq!(peer.line(), "posted");
        let start = Instant::now();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| all_end(operations, start));
            let closed = endpoint.close(Duration::from_millis(50));
            assert!(
                matches!(closed, Err(CloseError::TimedOut { .. })),
                "{closed:?}"
            );
            let (_, last) = waiting.join().unwrap();
            times.push(last);
        });
        assert_buffers_home(&endpoint);
        peer.assert_clean_end();
    }
    assert_soon(times, Duration::from_millis(650));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn dropping_an_endpoint_is_quick_and_returns_its_buffers() {
    let mut times = Vec::new();
    for _ in 0..rounds() {
        let (mut peer, endpoint, remote) = Peer::connect();
        let operations = load(&endpoint, remote);
        assert_eq!(peer.line(), "posted");
        let worker = endpoint.worker().clone();
        let start = Instant::now();
        drop(endpoint);
        times.push(start.elapsed());
        for operation in operations {
            if let Err(error) = operation.wait() {
                let receive = error.op.is_receive();
                let outcome = if receive {
                    Outcome::Cancelled
                } else {
                    Outcome::Unknown
                };
                assert_eq!(
                    (error.outcome, &*error.cause),
                    (outcome, &Cause::ClosedLocally)
                );
            }
        }
        assert_eq!(worker.available(), worker.pool_size().0);
        assert_eq!(worker.open_operations(), 0);
        peer.assert_clean_end();
    }
    assert_soon(times, Duration::from_millis(500));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_connect_into_a_black_hole_ends_by_its_deadline() {
    let listener = Listener::bind(SERVER.parse().unwrap(), &patient()).unwrap();
    // Resolved once, so that what follows is not the look-up's time.
    let addr = listener.local_addr();
    drop(Endpoint::connect(
        addr,
        &EndpointConfig {
            connect_deadline: Duration::from_secs(1),
            ..patient()
        },
    ));
    let fault = Fault::black_hole();
    let mut times = Vec::new();
    for deadline in [300, 500, 1000] {
        let config = EndpointConfig {
            connect_deadline: Duration::from_millis(deadline),
            ..patient()
        };
        let start = Instant::now();
        let error = Endpoint::connect(addr, &config).unwrap_err();
        let took = start.elapsed();
        assert!(
            matches!(&error, OpenError::Cm(error) if error.is_timed_out()),
            "{error}"
        );
        times.push(took.saturating_sub(config.connect_deadline));
    }
    assert_soon(times, Duration::from_millis(500));
    drop(fault);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_keepalive_finds_a_cut_wire_on_an_idle_connection() {
    let config = EndpointConfig {
        keepalive: Some(Duration::from_millis(200)),
        ..EndpointConfig::default()
    };
    let (client, server) = pair_with(&config, &EndpointConfig::default());
    let quiet = client
        .recv_deadline(Instant::now() + Duration::from_secs(1))
        .unwrap();
    assert!(quiet.is_none(), "the probes hurt nobody");
    assert!(server.closed().is_none());
    let fault = Fault::black_hole();
    let start = Instant::now();
    assert!(client.recv().is_err());
    assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
    drop(fault);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_wake_up_costs_three_system_calls() {
    let trace = std::env::temp_dir().join("wakes.trace");
    let trace = trace.to_str().unwrap();
    let said = run(&format!(
        "strace -f -o {trace} {} {SERVER}",
        env!("CARGO_BIN_EXE_msg-wakes")
    ));
    let numbers: Vec<usize> = said
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    let [sleeps, arms, events, posts] = numbers[..] else {
        panic!("{said}")
    };
    let text = std::fs::read_to_string(trace).unwrap();
    let begins = text.find("/counting-begins").unwrap();
    let counted = &text[begins..text.find("/counting-ends").unwrap()];
    let thread = text[..begins]
        .lines()
        .last()
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap();
    // A call that another thread interrupts in the trace has a second line that says "resumed".
    let calls: Vec<&str> = counted
        .lines()
        .skip(1)
        .filter(|line| line.starts_with(thread))
        .filter(|line| !line.contains(" resumed>") && !line.contains("statx("))
        .collect();
    assert!(
        sleeps >= 50,
        "only {sleeps} sleeps: it does not wait by events"
    );
    // Arming without a sleep is a completion that came in between, and the first event may answer
    // to an arm from before the counting.
    assert!(
        events <= arms + 1 && arms <= sleeps + sleeps / 10 + 2,
        "{arms} arms and {events} events in {sleeps} sleeps"
    );
    // And the provider's doorbell for each send.
    let allowed = sleeps + arms + events + posts;
    assert!(
        calls.len() <= allowed,
        "{} system calls in {sleeps} sleeps, {arms} arms, {events} events and {posts} posts, such as {:#?}",
        calls.len(),
        &calls[..12]
    );
    println!(
        "{} system calls in {sleeps} sleeps and {posts} posts",
        calls.len()
    );
}
