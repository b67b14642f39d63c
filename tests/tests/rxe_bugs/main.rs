//! Fifteen classes of bugs that users of other frameworks reported, each as a check on soft-RoCE.
//!
//! The numbers and the reports behind them are listed in `docs/bug-checks.md`. A check that would pass on broken
//! code is worth nothing: each was seen to fail against a build broken for it (see the commits).
//!
//! The number of rounds is small by default; `RDMA_TEST_ROUNDS=full` does what the reports ask for.

#![allow(clippy::unwrap_used)] // helpers of tests: what goes wrong there is to fail the test

mod support;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rdma_msg::{
    Access, Cause, Endpoint, EndpointConfig, Listener, OpKind, OpOptions, Operation, Outcome,
    PostErrorKind, Receive, RemoteRegion, Wait, WaitError, WcStatus, Worker, WorkerConfig,
};

use support::*;

/// A descriptor whose key is wrong.
fn wrong_key(region: RemoteRegion) -> RemoteRegion {
    region.with_rkey(region.rkey() ^ 0x55)
}

/// Fails unless all that `endpoint` posted ends soon, its receives too.
fn assert_all_ended(endpoint: &Endpoint) {
    assert_ended(endpoint, |_| true);
}

/// Fails unless all that `endpoint` posted ends soon, except receives: those wait for messages.
fn assert_sends_ended(endpoint: &Endpoint) {
    assert_ended(endpoint, |kind| kind != OpKind::Receive);
}

fn assert_ended(endpoint: &Endpoint, counted: impl Fn(OpKind) -> bool) {
    let until = Instant::now() + SOON;
    loop {
        let ops = endpoint.stats().ops;
        let open: u64 = OpKind::ALL
            .into_iter()
            .filter(|&kind| counted(kind))
            .map(|kind| ops.of(kind))
            .map(|of| of.posted - of.succeeded - of.failed - of.flushed)
            .sum();
        if open == 0 {
            return;
        }
        assert!(
            Instant::now() < until,
            "{open} operations are still open: {ops}"
        );
        endpoint.worker().poll();
        thread::yield_now();
    }
}

// ---- completion tracking ----------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d01_a_panicking_handler_costs_no_other_operation_its_result() {
    let _one = serial();
    let config = EndpointConfig {
        send_depth: 32,
        recv_depth: 16,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&config);
    let region = server.expose(4096, Access::REMOTE_READ).unwrap();

    let mut operations = Vec::new();
    for n in 0..17_u8 {
        operations.push(if n == 8 {
            let buf = client.alloc(64).unwrap();
            client
                .read(buf, wrong_key(region.descriptor()).slice(0..64).unwrap())
                .unwrap()
        } else {
            client.send_slice(&[n; 64]).unwrap()
        });
    }

    let results = within(SOON, "all results", move || {
        let each = operations.into_iter().map(|operation| {
            // The user's handler: it panics over the failed read, as the one in the report threw.
            catch_unwind(AssertUnwindSafe(|| match operation.wait() {
                Err(error) if error.op == OpKind::Read => panic!("the handler gives up: {error}"),
                result => result.is_ok(),
            }))
        });
        each.collect::<Vec<_>>()
    });
    assert!(
        results[8].is_err(),
        "the read with the wrong key did not fail"
    );
    assert!(
        results[..8].iter().all(|result| matches!(result, Ok(true))),
        "sends before it"
    );
    assert!(
        results[9..]
            .iter()
            .all(|result| matches!(result, Ok(false))),
        "sends behind it"
    );
    assert_all_ended(&client);
    assert_all_ended(&server);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d02_a_failed_operation_is_reported_as_what_it_was_posted_as() {
    let _one = serial();
    let manual = EndpointConfig {
        receive: Receive::Manual,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair_of(&manual, &deaf());
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = server.expose(4096, rights).unwrap().descriptor();
    let word = region.slice(0..8).unwrap();
    let part = region.slice(0..64).unwrap();

    let mut posted: Vec<(OpKind, Operation)> = vec![
        (
            OpKind::Receive,
            client.post_recv(client.alloc(64).unwrap()).unwrap(),
        ),
        (
            OpKind::Receive,
            client.post_recv(client.alloc(64).unwrap()).unwrap(),
        ),
        // The peer has no receive: this one is retried for seconds, and holds up all behind it.
        (OpKind::Send, client.send_slice(b"held up").unwrap()),
        (
            OpKind::SendImm,
            client.send_imm(client.alloc(64).unwrap(), 1).unwrap(),
        ),
        (
            OpKind::Write,
            client.write(client.alloc(64).unwrap(), part).unwrap(),
        ),
        (
            OpKind::WriteImm,
            client
                .write_imm(client.alloc(64).unwrap(), part, 2)
                .unwrap(),
        ),
        (
            OpKind::Read,
            client.read(client.alloc(64).unwrap(), part).unwrap(),
        ),
        (
            OpKind::CompareSwap,
            client.compare_swap(word, 0, 1).unwrap(),
        ),
        (OpKind::FetchAdd, client.fetch_add(word, 1).unwrap()),
    ];
    let count = posted.len() as u64;
    drop(server); // breaks the connection

    for (kind, operation) in posted.drain(..) {
        let error = within(SOON, "the result", move || operation.wait()).expect_err("it failed");
        assert_eq!(error.op, kind, "{error}");
        let text = error.to_string();
        assert!(!text.to_lowercase().contains("opcode"), "{text}");
        let may_have_happened = kind != OpKind::Receive;
        assert_eq!(
            error.outcome == Outcome::Unknown,
            may_have_happened,
            "{error:?}"
        );
    }
    assert_all_ended(&client);
    let ended = client.stats().ops.all();
    assert_eq!(
        (ended.posted, ended.failed + ended.flushed),
        (count, count),
        "{ended:?}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d02_the_error_names_status_addresses_and_queue_pair() {
    let _one = serial();
    let Pair { client, server } = pair(&EndpointConfig::default());
    let region = server.expose(64, Access::REMOTE_READ).unwrap();
    let bad = wrong_key(region.descriptor());
    let error = client
        .read(client.alloc(64).unwrap(), bad)
        .unwrap()
        .wait()
        .unwrap_err();

    assert_eq!(error.outcome, Outcome::Failed);
    let Cause::Operation(failure) = &*error.cause else {
        panic!("{error:?}")
    };
    assert_eq!(failure.op, OpKind::Read);
    assert_eq!(failure.status, WcStatus::RemAccessErr);
    assert_eq!(failure.qp_num, client.qp_num());
    let text = error.to_string();
    for part in [
        "read",
        "remote access",
        &client.peer_addr().unwrap().to_string(),
        &client.local_addr().unwrap().to_string(),
    ] {
        assert!(
            text.to_lowercase().contains(part),
            "{part:?} is missing in {text:?}"
        );
    }
    assert!(error.buf.is_some(), "the buffer comes back on failure too");
}

// ---- teardown ---------------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d03_dropping_all_after_a_failed_connect_returns_at_once() {
    let _one = serial();
    let before = baseline();
    let config = EndpointConfig {
        connect_deadline: SOON,
        ..EndpointConfig::default()
    };
    let nobody = SocketAddrWithoutListener::find();
    let (took, ()) = timed(|| {
        within(SOON, "no listener", move || {
            Endpoint::connect(nobody.0, &config).expect_err("nobody listens");
        });
    });
    assert!(took < PROMPTLY, "refused and dropped after {took:?}");

    let listener = Listener::bind(server_addr(), &EndpointConfig::default()).unwrap();
    let addr = listener.local_addr();
    let rejecting = thread::spawn(move || accept(&listener).reject(b"no").unwrap());
    let (took, ()) = timed(|| {
        within(SOON, "rejected", move || {
            Endpoint::connect(addr, &EndpointConfig::default()).expect_err("rejected");
        });
    });
    assert!(took < PROMPTLY, "rejected and dropped after {took:?}");
    rejecting.join().unwrap();
    assert_no_leak(&before);
}

/// An address on which nobody listens: one that a listener had and gave back.
struct SocketAddrWithoutListener(std::net::SocketAddr);

impl SocketAddrWithoutListener {
    fn find() -> Self {
        Self(
            Listener::bind(server_addr(), &EndpointConfig::default())
                .expect("listen")
                .local_addr(),
        )
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d03_an_endpoint_dropped_by_who_hears_of_its_end_disturbs_no_other() {
    let _one = serial();
    let worker = Worker::for_addr(server_addr(), &WorkerConfig::default()).unwrap();
    let listener = Listener::bind(server_addr(), &EndpointConfig::default()).unwrap();
    let addr = listener.local_addr();
    let on_worker = || {
        let client = thread::spawn(move || Endpoint::connect(addr, &EndpointConfig::default()));
        let incoming = accept(&listener);
        let served = incoming.accept_with(&worker).unwrap().wait().unwrap();
        (client.join().unwrap().unwrap(), served)
    };
    let (leaving, served) = on_worker();
    let (staying, other) = on_worker();

    drop(leaving);
    let (took, ()) = timed(|| {
        within(SOON, "hear of the end and drop", move || {
            served.recv().expect_err("the client has left");
            drop(served); // in the very place that was told
        });
    });
    assert!(took < PROMPTLY, "{took:?}");

    staying.send_slice(b"still here").unwrap().wait().unwrap();
    let received = other
        .recv_deadline(Instant::now() + SOON)
        .unwrap()
        .expect("the message");
    assert_eq!(&*received.buf, b"still here");
}

// ---- d04 is in d04.rs: it works on the lower crates -----------------------------------------------

mod d04;

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d05_closing_under_posting_threads_resolves_everything() {
    let _one = serial();
    let before = baseline();
    for round in 0..rounds(200, 5) {
        let Pair { client, server } = pair(&EndpointConfig::default());
        let receiving = thread::spawn(move || while server.recv().is_ok() {});
        let accepted = AtomicUsize::new(0);
        let resolved = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        match client.send_slice(&[7; 64]) {
                            Ok(operation) => {
                                accepted.fetch_add(1, Ordering::Relaxed);
                                let _ = operation.wait(); // ok, or an error: but it ends
                                resolved.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => match error.kind {
                                PostErrorKind::QueueFull { .. } | PostErrorKind::Pool(_) => {
                                    thread::yield_now();
                                }
                                PostErrorKind::Closed { .. } | PostErrorKind::Ending => return,
                                other => panic!("posting to a closing endpoint: {other:?}"),
                            },
                        }
                    }
                });
            }
            thread::sleep(Duration::from_millis(if round == 0 { 200 } else { 20 }));
            let (took, _) = timed(|| client.close(Duration::from_secs(1)));
            assert!(took < SOON, "close took {took:?}");
        });
        assert_eq!(
            accepted.load(Ordering::Relaxed),
            resolved.load(Ordering::Relaxed)
        );
        drop(client);
        receiving.join().unwrap();
    }
    assert_no_leak(&before);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d05_all_buffers_in_flight_are_back_after_the_end() {
    let _one = serial();
    const BUFS: usize = 32;
    let pool = WorkerConfig {
        buf_count: BUFS,
        ..WorkerConfig::default()
    };
    let listener = Listener::bind(server_addr(), &deaf()).unwrap();
    let worker = Worker::for_addr(client_addr(), &pool).unwrap();
    for round in 0..rounds(100, 10) {
        let client = EndpointConfig {
            receive: Receive::Manual,
            ..EndpointConfig::default()
        };
        let accepting = thread::scope(|scope| {
            let server = scope.spawn(|| accept(&listener).accept().unwrap());
            let client = Endpoint::connect_with(&worker, listener.local_addr(), &client);
            let client = client.unwrap().wait().unwrap();
            (client, server.join().unwrap())
        });
        let (client, server) = accepting;
        let mut sends = Vec::new();
        for _ in 0..BUFS {
            sends.push(client.send(worker.alloc(64).unwrap()).unwrap());
        }
        assert!(
            worker.alloc(64).is_err(),
            "the pool is larger than it was asked to be"
        );

        if round % 2 == 0 {
            let _ = client.close(Duration::from_millis(50)); // its drain can't succeed
        } else {
            drop(client);
        }
        let (took, ()) = timed(|| {
            for send in sends {
                let error = send.wait().expect_err("nobody received it");
                assert!(
                    error.buf.is_some(),
                    "round {round}: {error:?} without its buffer"
                );
            }
        });
        assert!(took < SOON, "round {round}: {took:?}");
        let back: Vec<_> = (0..BUFS).map_while(|_| worker.alloc(64).ok()).collect();
        assert_eq!(back.len(), BUFS, "round {round}: buffers are missing");
        drop(server);
    }
}

// ---- connection set-up ------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d06_a_message_sent_in_the_instant_of_the_connect_finds_a_receive() {
    let _one = serial();
    let impatient = EndpointConfig {
        rnr_retry_count: 0,
        ..EndpointConfig::default()
    };
    let listener = Listener::bind(server_addr(), &impatient).unwrap();
    let addr = listener.local_addr();
    let connections = rounds(500, 25);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..connections {
                let server = accept(&listener).accept().unwrap();
                let received = server.recv_deadline(Instant::now() + SOON).unwrap();
                assert_eq!(&*received.expect("the first message").buf, b"first");
                // Until the client leaves: its send is acknowledged by a queue pair that is there.
                server
                    .recv_deadline(Instant::now() + SOON)
                    .expect_err("the client leaves");
                let (took, ()) = timed(|| drop(server));
                assert!(took < PROMPTLY, "the drop took {took:?}");
            }
        });
        for n in 0..connections {
            let client = Endpoint::connect(addr, &impatient).unwrap();
            client
                .send_slice(b"first")
                .unwrap()
                .wait()
                .unwrap_or_else(|error| {
                    panic!("connection {n}: {error}");
                });
        }
    });
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d07_a_client_that_comes_before_the_server_is_refused_and_may_come_again() {
    let _one = serial();
    let addr = SocketAddrWithoutListener::find().0;
    let (took, error) = timed(|| Endpoint::connect(addr, &EndpointConfig::default()).unwrap_err());
    assert!(took < PROMPTLY, "{took:?}");
    assert!(
        support::chain(&error).contains("refused"),
        "{}",
        support::chain(&error)
    );

    let listener = Listener::bind(addr, &EndpointConfig::default()).unwrap();
    let Pair { client, server } = connect_to(&listener, &EndpointConfig::default());
    client.send_slice(b"second try").unwrap().wait().unwrap();
    assert_eq!(&*server.recv().unwrap().buf, b"second try");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d08_whatever_is_wrong_with_a_connect_it_ends_by_the_deadline() {
    let _one = serial();
    let before = baseline();
    let deadline = Duration::from_secs(3);
    let config = EndpointConfig {
        connect_deadline: deadline,
        ..EndpointConfig::default()
    };
    let silent = Listener::bind(server_addr(), &EndpointConfig::default()).unwrap();
    let rejecting = Listener::bind(server_addr(), &EndpointConfig::default()).unwrap();
    let rejecting_addr = rejecting.local_addr();
    let reject = thread::spawn(move || drop(accept(&rejecting)));

    let cases = [
        (
            "no device behind the address",
            "127.0.0.1:7471".parse().unwrap(),
        ),
        ("no route", "203.0.113.1:7471".parse().unwrap()),
        (
            "nobody has the address",
            "192.168.99.77:7471".parse().unwrap(),
        ),
        ("nobody listens", SocketAddrWithoutListener::find().0),
        ("rejected", rejecting_addr),
        ("never answered", silent.local_addr()),
    ];
    for (what, addr) in cases {
        let config = config.clone();
        let (took, error) = timed(|| {
            within(deadline + SOON, what, move || {
                Endpoint::connect(addr, &config).unwrap_err()
            })
        });
        assert!(took < deadline + PROMPTLY, "{what}: {took:?}");
        let text = support::chain(&error);
        assert!(text.contains(&addr.ip().to_string()), "{what}: {text}");
        eprintln!("{what}: {text} ({took:?})");
    }
    reject.join().unwrap();

    drop(pair(&config)); // the process is usable afterwards
    drop(silent);
    assert_no_leak(&before);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d08_many_connects_to_nobody_all_fail_in_time() {
    let _one = serial();
    let deadline = Duration::from_secs(2);
    let config = EndpointConfig {
        connect_deadline: deadline,
        ..EndpointConfig::default()
    };
    thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let addr = "192.168.99.77:7471".parse().unwrap();
                let (took, result) = timed(|| Endpoint::connect(addr, &config));
                assert!(result.is_err());
                assert!(took < deadline + PROMPTLY, "{took:?}");
            });
        }
    });
    drop(pair(&EndpointConfig::default()));
}

// ---- memory -----------------------------------------------------------------------------------------

/// Fills all buffers that are free with a canary, and finds out later whether somebody wrote into one.
struct Canaries(Vec<rdma_msg::Buf>);

impl Canaries {
    const BYTE: u8 = 0xc5;

    fn fill(worker: &Worker, len: usize) -> Canaries {
        let mut bufs: Vec<_> = std::iter::from_fn(|| worker.alloc(len).ok()).collect();
        for buf in &mut bufs {
            buf.fill(Self::BYTE);
        }
        Canaries(bufs)
    }

    fn assert_alive(&self, when: &str) {
        for (n, buf) in self.0.iter().enumerate() {
            let wrong = buf.iter().position(|&byte| byte != Self::BYTE);
            assert_eq!(wrong, None, "{when}: somebody wrote into free buffer {n}");
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d09_a_dropped_receive_keeps_its_buffer_until_the_message_has_come() {
    let _one = serial();
    let client = EndpointConfig {
        receive: Receive::Manual,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair_of(&client, &EndpointConfig::default());
    let worker = client.worker().clone();
    let free = Canaries::fill(&worker, 64).0.len();
    for round in 0..rounds(1000, 50) {
        drop(client.post_recv(client.alloc(64).unwrap()).unwrap());
        let canaries = Canaries::fill(&worker, 64);
        assert_eq!(
            canaries.0.len(),
            free - 1,
            "round {round}: the dropped buffer is free already"
        );
        server
            .send_slice(&[round as u8; 64])
            .unwrap()
            .wait()
            .unwrap();
        assert_all_ended(&client);
        canaries.assert_alive("a message came");
    }
    assert_eq!(
        Canaries::fill(&worker, 64).0.len(),
        free,
        "a buffer did not come back"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d09_a_dropped_send_still_sends_what_was_in_its_buffer() {
    let _one = serial();
    let manual = EndpointConfig {
        receive: Receive::Manual,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&manual);
    let worker = client.worker().clone();
    for round in 0..rounds(1000, 50) {
        let mut buf = client.alloc(1000).unwrap();
        buf.fill(round as u8);
        drop(client.send(buf).unwrap()); // the peer has no receive yet: it is in flight
        let canaries = Canaries::fill(&worker, 1000);
        let receive = server.post_recv(server.alloc(1000).unwrap()).unwrap();
        let received = receive.wait().unwrap().buf.unwrap();
        assert!(
            received.iter().all(|&byte| byte == round as u8),
            "round {round}"
        );
        canaries.assert_alive("the send went out");
        assert_sends_ended(&client);
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d09_a_dropped_read_writes_into_its_own_buffer_only() {
    let _one = serial();
    const LEN: usize = 4 << 20;
    let Pair { client, server } = pair(&EndpointConfig::default());
    let region = server.expose(LEN, Access::REMOTE_READ).unwrap();
    region.write_at(0, &vec![0x3a; LEN]).unwrap();
    for round in 0..rounds(1000, 5) {
        drop(
            client
                .read(client.alloc(LEN).unwrap(), region.descriptor())
                .unwrap(),
        );
        // What the allocator hands out now must not be what the NIC still writes to.
        let canary = vec![Canaries::BYTE; LEN];
        assert_sends_ended(&client);
        let intact = canary.iter().all(|&byte| byte == Canaries::BYTE);
        assert!(intact, "round {round}: the read went into freed memory");
    }
    // A read whose endpoint is dropped with it.
    drop(
        client
            .read(client.alloc(LEN).unwrap(), region.descriptor())
            .unwrap(),
    );
    drop(client);
    let canary = vec![Canaries::BYTE; LEN];
    thread::sleep(Duration::from_millis(200));
    assert!(
        canary.iter().all(|&byte| byte == Canaries::BYTE),
        "written after the drop"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d09_messages_whose_sender_forgot_them_at_once_arrive_whole() {
    let _one = serial();
    let Pair { client, server } = pair(&EndpointConfig::default());
    let messages = rounds(10_000, 1000);
    let checksum = |data: &[u8]| {
        data.iter()
            .fold(0_u32, |sum, &b| sum.rotate_left(5) ^ u32::from(b))
    };
    let receiving = thread::spawn(move || {
        for n in 0..messages {
            let received = server.recv_deadline(Instant::now() + SOON).unwrap();
            let received = received.unwrap_or_else(|| panic!("message {n} is missing"));
            let (sum, data) = received.buf.split_first_chunk().unwrap();
            assert_eq!(u32::from_be_bytes(*sum), checksum(data), "message {n}");
        }
    });
    /// Posts and returns at once: nothing of the message is left in this frame.
    fn post(client: &Endpoint, n: usize, checksum: impl Fn(&[u8]) -> u32) {
        let mut buf = client.alloc(500).unwrap();
        for (offset, byte) in buf.iter_mut().enumerate() {
            *byte = (n + offset) as u8;
        }
        let sum = checksum(&buf[4..]);
        buf[..4].copy_from_slice(&sum.to_be_bytes());
        drop(client.send(buf).unwrap());
    }
    for n in 0..messages {
        let room = client.wait_capacity(1, Some(Instant::now() + SOON));
        assert!(room.unwrap(), "message {n}: no room in time");
        post(&client, n, checksum);
    }
    receiving.join().unwrap();
}

// ---- flow control -----------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d10_four_thousand_sends_through_a_queue_of_sixteen() {
    let _one = serial();
    const SENDS: usize = 4096;
    let client = EndpointConfig {
        send_depth: 16,
        recv_depth: 4,
        ..EndpointConfig::default()
    };
    let server = EndpointConfig {
        recv_depth: 1024,
        max_message: 64,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair_of(&client, &server);
    let receiving = thread::spawn(move || {
        for n in 0..SENDS {
            let received = server.recv_deadline(Instant::now() + SOON).unwrap();
            let received = received.unwrap_or_else(|| panic!("message {n} is missing"));
            assert_eq!(&*received.buf, (n as u64).to_be_bytes());
        }
        server // alive until all have come
    });
    // All are posted as fast as it goes; results are only fetched when a post is refused.
    let mut posted = VecDeque::with_capacity(SENDS);
    let (mut full, mut resolved) = (0, 0);
    for n in 0..SENDS as u64 {
        while let Err(error) = client
            .send_slice(&n.to_be_bytes())
            .map(|op| posted.push_back(op))
        {
            assert!(error.is_full(), "send {n}: {error}");
            full += 1;
            posted
                .pop_front()
                .expect("something is in flight")
                .wait()
                .expect("a send");
            resolved += 1;
        }
    }
    assert!(full > 0, "the queue never was full: this shows nothing");
    for operation in posted {
        operation.wait().unwrap_or_else(|error| panic!("{error}"));
        resolved += 1;
    }
    assert_eq!(resolved, SENDS);
    receiving.join().unwrap();
    assert_sends_ended(&client);
    assert_eq!(client.closed().map(|cause| cause.to_string()), None);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d10_a_full_queue_is_a_value_of_its_own_and_loses_nothing() {
    let _one = serial();
    let client = EndpointConfig {
        send_depth: 16,
        receive: Receive::Manual,
        extra_bufs: Some(32),
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair_of(&client, &deaf());
    let mut operations = Vec::new();
    let refused = loop {
        let mut buf = client.alloc(8).unwrap();
        buf.copy_from_slice(&(operations.len() as u64).to_be_bytes());
        match client.send(buf) {
            Ok(operation) => operations.push(operation),
            Err(error) => break error,
        }
        assert!(operations.len() <= 16, "more than the depth was accepted");
    };
    assert_eq!(operations.len(), 16);
    assert!(
        matches!(refused.kind, PostErrorKind::QueueFull { .. }),
        "{:?}",
        refused.kind
    );
    assert_eq!(
        &*refused.buf,
        16_u64.to_be_bytes(),
        "the buffer comes back as it was"
    );

    let receives: Vec<_> = (0..17)
        .map(|_| server.post_recv(server.alloc(8).unwrap()).unwrap())
        .collect();
    for operation in operations {
        operation.wait().unwrap();
    }
    client.send(refused.buf).unwrap().wait().unwrap(); // posting works again
    for (n, receive) in receives.into_iter().enumerate() {
        let received = receive.wait().unwrap().buf.unwrap();
        assert_eq!(&*received, (n as u64).to_be_bytes(), "out of order");
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d11_a_receive_posted_300_ms_late_still_gets_the_message() {
    let _one = serial();
    let manual = EndpointConfig {
        receive: Receive::Manual,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&manual);
    let send = client.send_slice(b"early").unwrap();
    thread::sleep(Duration::from_millis(300));
    let receive = server.post_recv(server.alloc(64).unwrap()).unwrap();
    send.wait().unwrap();
    assert_eq!(&*receive.wait().unwrap().buf.unwrap(), b"early");
    assert_eq!(client.closed().map(|cause| cause.to_string()), None);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d11_with_no_retries_a_missing_receive_fails_the_send_promptly() {
    let _one = serial();
    let manual = EndpointConfig {
        receive: Receive::Manual,
        rnr_retry_count: 0,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&manual);
    let send = client.send_slice(b"nobody there").unwrap();
    let (took, error) = timed(|| within(SOON, "the failure", move || send.wait().unwrap_err()));
    assert!(took < PROMPTLY, "{took:?}");
    let Cause::Operation(failure) = &*error.cause else {
        panic!("{error:?}")
    };
    assert_eq!(failure.status, WcStatus::RnrRetryExcErr);
    drop(server);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d11_a_peer_that_never_receives_costs_the_deadline_and_no_processor() {
    let _one = serial();
    let manual = EndpointConfig {
        receive: Receive::Manual,
        // 2 s, so that its retries last longer than the deadline: rxe counts an answer that comes late,
        // on a loaded machine, against them, however often "receiver not ready" came in between.
        ack_timeout: 19,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&manual);
    let mut send = client.send_slice(b"never taken").unwrap();
    let cpu = cpu_time();
    let (took, result) = timed(|| send.wait_deadline(Instant::now() + Duration::from_secs(3)));
    let used = cpu_time() - cpu;
    assert!(matches!(result, Err(WaitError::TimedOut)), "{result:?}");
    assert!((3.0..5.0).contains(&took.as_secs_f64()), "{took:?}");
    assert!(used < took / 5, "waiting used {used:?} of processor time");

    let (took, _) = timed(|| client.close(Duration::from_secs(1)));
    assert!(took < SOON, "close took {took:?}");
    send.wait().expect_err("it was never received");
    drop(server);
}

/// Processor time of this process so far, in user space and kernel.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // After the name in parentheses, which may hold anything: fields 14 and 15, in clock ticks.
    let (_, rest) = stat.rsplit_once(')').unwrap();
    let ticks: u64 = rest
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().unwrap())
        .sum();
    Duration::from_millis(ticks * 10) // 100 ticks a second on every Linux that Debian builds
}

// ---- ordering ---------------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d12_a_read_sees_the_old_value_of_what_a_fenced_write_behind_it_changes() {
    let _one = serial();
    read_then_write_fenced(1 << 20, rounds(1000, 20));
}

/// soft-RoCE answers requests in their order, and so would hide a missing fence. But a part of the answer that
/// was lost is read from memory again, behind the write, unless that was held back.
#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d12_the_fence_holds_while_parts_of_the_read_are_lost_and_repeated() {
    let _one = serial();
    let _wire = LossyWire::losing(5);
    read_then_write_fenced(64 << 10, rounds(1000, 60));
}

/// Reads `len` bytes, and behind the read's back writes 1 to their last word, which was 0.
fn read_then_write_fenced(len: usize, rounds: usize) {
    let Pair { client, server } = pair(&EndpointConfig::default());
    let region = server
        .expose(len, Access::REMOTE_READ | Access::REMOTE_WRITE)
        .unwrap();
    let last = region
        .descriptor()
        .slice(len as u64 - 8..len as u64)
        .unwrap();
    let fence = OpOptions {
        fence: true,
        ..OpOptions::default()
    };
    for round in 0..rounds {
        region.store_u64(len - 8, 0).unwrap();
        let mut one = client.alloc(8).unwrap();
        one.copy_from_slice(&1_u64.to_ne_bytes());
        let read = client
            .read(client.alloc(len).unwrap(), region.descriptor())
            .unwrap();
        let write = client.with(fence).write(one, last).unwrap();
        let seen = read.wait().unwrap().buf.unwrap();
        write.wait().unwrap();
        assert_eq!(
            seen[len - 8..],
            [0; 8],
            "round {round}: the read saw the later write"
        );
        assert_eq!(region.load_u64(len - 8).unwrap(), 1, "round {round}");
    }
}

// ---- notification -----------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d13_no_round_of_an_event_driven_ping_pong_sleeps_over_its_completion() {
    let _one = serial();
    let config = EndpointConfig {
        wait: Wait::Event,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&config);
    let total = rounds(200_000, 2000);
    let answering = thread::spawn(move || {
        let mut delay = Delays::new(1);
        for _ in 0..total {
            delay.next();
            let received = server
                .recv_deadline(Instant::now() + SOON)
                .unwrap()
                .expect("a ping");
            drop(server.send(received.buf).unwrap()); // its end is the next ping's to know
        }
        server
    });
    let mut delay = Delays::new(2);
    let mut slow = Slow::default();
    for round in 0..total {
        let start = Instant::now();
        drop(client.send_slice(&[round as u8; 64]).unwrap());
        delay.next();
        let pong = client.recv_deadline(Instant::now() + SOON).unwrap();
        assert!(pong.is_some(), "round {round}: no answer");
        slow.note(start.elapsed());
    }
    let _server = answering.join().unwrap();

    // Complete before the first wait is ever called.
    let send = client.send_slice(b"last").unwrap();
    thread::sleep(Duration::from_millis(50));
    let (took, result) = timed(|| send.wait());
    result.unwrap();
    assert!(took < PROMPTLY, "{took:?}");
}

/// Counts what took a second and more, as it does now and then on a busy machine.
#[derive(Default)]
struct Slow(Vec<Duration>);

impl Slow {
    fn note(&mut self, took: Duration) {
        if took >= Duration::from_secs(1) {
            self.0.push(took);
            assert!(self.0.len() <= 3 && took < SOON / 2, "{:?}", self.0);
        }
    }
}

/// Random pauses of up to 50 us, the same in every run: they move the wait around the completion.
struct Delays(u64);

impl Delays {
    fn new(seed: u64) -> Delays {
        Delays(seed)
    }

    fn next(&mut self) {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let until = Instant::now() + Duration::from_micros(self.0 % 51);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d13_one_wake_up_hands_out_all_that_has_completed() {
    let _one = serial();
    for count in [1, 16, 17, 33, 100] {
        let config = EndpointConfig {
            wait: Wait::Event,
            recv_depth: 128,
            ..EndpointConfig::default()
        };
        let Pair { client, server } = pair(&config);
        let taken = AtomicUsize::new(0);
        let sleeping = AtomicBool::new(false);
        thread::scope(|scope| {
            let taker = scope.spawn(|| {
                sleeping.store(true, Ordering::Release);
                while taken.load(Ordering::Acquire) < count {
                    let received = server.recv_deadline(Instant::now() + SOON).unwrap();
                    assert!(received.is_some(), "{count}: only {taken:?} came");
                    taken.fetch_add(1, Ordering::AcqRel);
                }
            });
            while !sleeping.load(Ordering::Acquire) {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(50));
            let mut batch = client.batch();
            for n in 0..count {
                let mut buf = client.alloc(8).unwrap();
                buf.fill(n as u8);
                batch.send(buf).unwrap();
            }
            let posted = batch.post();
            assert_eq!(posted.operations.len(), count, "{:?}", posted.error);
            let (took, ()) = timed(|| taker.join().unwrap());
            assert!(took < PROMPTLY, "{count}: {took:?}");
        });
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d13_the_last_completion_of_a_burst_is_not_slept_over() {
    let _one = serial();
    let config = EndpointConfig {
        wait: Wait::Event,
        ..EndpointConfig::default()
    };
    let Pair { client, server } = pair(&config);
    let mut slow = Slow::default();
    let bursts = rounds(100_000, 500);
    let receiving = thread::spawn(move || while server.recv().is_ok() {});
    for burst in 0..bursts {
        let sends: Vec<_> = (0..burst % 8 + 1)
            .map(|_| client.send_slice(&[1; 64]).unwrap())
            .collect();
        let (took, ()) = timed(|| {
            for mut send in sends {
                send.wait_deadline(Instant::now() + SOON).unwrap();
            }
        });
        slow.note(took);
    }
    drop(client);
    receiving.join().unwrap();
}

// ---- limits -----------------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d14_inline_is_granted_and_reported_or_refused_by_name() {
    let _one = serial();
    for asked in [0, 64, 220, 512, 513, 4096] {
        let config = EndpointConfig {
            max_inline: asked,
            ..EndpointConfig::default()
        };
        let listener = Listener::bind(server_addr(), &EndpointConfig::default()).unwrap();
        let addr = listener.local_addr();
        let serving = thread::spawn(move || {
            let incoming = listener.accept_deadline(Instant::now() + SOON).unwrap();
            incoming.map(|incoming| incoming.accept().unwrap())
        });
        match Endpoint::connect(addr, &config) {
            Ok(client) => {
                let server = serving.join().unwrap().expect("connected");
                let granted = client.max_inline();
                assert!(
                    granted >= asked as usize,
                    "asked {asked}, granted {granted}"
                );
                // With the granted size and one byte more: both arrive, inline or copied.
                for len in [granted, granted + 1] {
                    let data = vec![len as u8; len];
                    client.send_slice(&data).unwrap().wait().unwrap();
                    assert_eq!(&*server.recv().unwrap().buf, data);
                }
            }
            Err(error) => {
                let text = support::chain(&error);
                assert!(asked > 512, "{asked} refused: {text}");
                assert!(
                    text.contains("inline") && text.contains(&asked.to_string()),
                    "{text}"
                );
                serving.join().unwrap();
            }
        }
    }
}

/// Set for the copy of this program that runs with little lockable memory.
const CHILD: &str = "RDMA_TEST_MEMLOCK_CHILD";

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn d15_too_little_lockable_memory_is_named_with_the_limit() {
    if let Ok(limit) = std::env::var(CHILD) {
        return register_with_little_lockable_memory(&limit);
    }
    let _one = serial();
    let before = baseline();
    for kib in ["64", "0"] {
        // Root may lock any amount, unless it has lost that capability.
        let program = std::env::current_exe().unwrap();
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!(
                "ulimit -l {kib} && exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock \"$0\" \
                 --ignored --exact --nocapture d15_too_little_lockable_memory_is_named_with_the_limit"
            ))
            .arg(program)
            .env(CHILD, kib)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let ran = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && ran.contains("1 passed"),
            "{kib} KiB: {ran}{said}"
        );
    }
    assert_no_leak(&before);
}

fn register_with_little_lockable_memory(kib: &str) {
    let context = rdma_cm::context_for(server_addr()).unwrap();
    let pd = rdma_core_rs::ProtectionDomain::new(&context).unwrap();
    let error = rdma_core_rs::SharedRegion::alloc(&pd, 1 << 20, Access::REMOTE_WRITE).unwrap_err();
    let text = support::chain(&error).to_lowercase();
    assert!(text.contains("memlock"), "{text}");
    let limit = (kib.parse::<u64>().unwrap() * 1024).to_string();
    assert!(
        text.contains(&limit),
        "the limit, {limit} bytes, is missing: {text}"
    );
    if kib != "0" {
        let small = rdma_core_rs::SharedRegion::alloc(&pd, 16 << 10, Access::REMOTE_WRITE);
        small.expect("16 KiB still fit");
    }
}
