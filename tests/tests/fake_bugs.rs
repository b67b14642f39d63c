//! What the checks of `docs/bug-checks.md` ask for, on the fake fabric: here completions can be held back,
//! come in one poll, carry garbage where a failed one has no valid field, and a queue is exactly as deep as asked.
//!
//! The fabric ends each test with a look whether a rule of the C interface was broken (a completion queue
//! overrun, a buffer freed that the device still had, an event not acknowledged) or an object is left.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use fake_verbs::{Config, Delivery, ErrorFields, Fabric, SendSlots};
use rdma_msg::{
    Access, Cause, Endpoint, EndpointConfig, Listener, OpKind, Operation, Outcome, PostErrorKind,
    Readiness, Receive, Wait, WcStatus, Worker, WorkerConfig,
};

const SOON: Duration = Duration::from_secs(5);

fn addr() -> SocketAddr {
    SocketAddr::from(([10, 9, 0, 2], 0))
}

fn pair(client: &EndpointConfig, server: &EndpointConfig) -> (Endpoint, Endpoint) {
    let listener = Listener::bind(addr(), server).expect("listen");
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let incoming = listener
                .accept_deadline(Instant::now() + SOON)
                .expect("a request");
            incoming
                .expect("a request in time")
                .accept()
                .expect("accept")
        });
        let client = Endpoint::connect(addr, client).expect("connect");
        (client, accepting.join().expect("the accepting thread"))
    })
}

fn manual() -> EndpointConfig {
    EndpointConfig {
        receive: Receive::Manual,
        extra_bufs: Some(64),
        ..EndpointConfig::default()
    }
}

#[test]
fn d01_of_completions_that_come_in_one_poll_none_is_lost_to_a_panicking_handler() {
    let fabric = Fabric::new();
    let (client, server) = pair(&EndpointConfig::default(), &EndpointConfig::default());
    let region = server.expose(64, Access::REMOTE_READ).unwrap().descriptor();
    fabric.hold_completions();
    let operations: Vec<Operation> = (0..17_u8)
        .map(|n| match n {
            8 => {
                let wrong = region.with_rkey(!region.rkey());
                client.read(client.alloc(64).unwrap(), wrong).unwrap()
            }
            n => client.send_slice(&[n; 8]).unwrap(),
        })
        .collect();
    fabric.release_completions();

    for (n, mut operation) in operations.into_iter().enumerate() {
        let handled = catch_unwind(AssertUnwindSafe(|| {
            match operation.wait_deadline(Instant::now() + SOON) {
                Err(error) if n == 8 => panic!("the handler gives up: {error}"),
                result => result.is_ok(),
            }
        }));
        match n {
            0..8 => assert!(
                matches!(handled, Ok(true)),
                "send {n} before the failed read"
            ),
            8 => assert!(handled.is_err(), "the read with the wrong key did not fail"),
            _ => assert!(
                matches!(handled, Ok(false)),
                "send {n} behind the failed read"
            ),
        }
    }
    assert_eq!(client.stats().ops.in_flight(), 0);
}

#[test]
fn d02_garbage_in_a_failed_completion_changes_nothing_of_the_report() {
    for error_fields in [
        ErrorFields::Poison,
        ErrorFields::Zero,
        ErrorFields::Unwritten,
    ] {
        let fabric = Fabric::with(Config {
            error_fields,
            ..Config::default()
        });
        let (client, server) = pair(&manual(), &EndpointConfig::default());
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let region = server.expose(64, rights).unwrap().descriptor();
        let word = region.slice(0..8).unwrap();
        fabric.set_delivery(Delivery::Manual); // nothing is executed any more
        let buf = || client.alloc(64).unwrap();
        let posted = [
            (OpKind::Receive, client.post_recv(buf()).unwrap()),
            (OpKind::Read, client.read(buf(), region).unwrap()),
            (OpKind::Write, client.write(buf(), region).unwrap()),
            (OpKind::FetchAdd, client.fetch_add(word, 1).unwrap()),
            (
                OpKind::CompareSwap,
                client.compare_swap(word, 0, 1).unwrap(),
            ),
            (OpKind::SendImm, client.send_imm(buf(), 1).unwrap()),
            (OpKind::Send, client.send(buf()).unwrap()),
        ];
        fabric.set_delivery(Delivery::Auto);
        drop(server);
        for (kind, mut operation) in posted {
            let result = operation.wait_deadline(Instant::now() + SOON);
            let Err(rdma_msg::WaitError::Operation(error)) = result else {
                panic!("{kind}: {result:?}");
            };
            assert_eq!(error.op, kind, "{error}");
        }
        let ended = client.stats().ops.all();
        assert_eq!(
            (ended.posted, ended.failed + ended.flushed),
            (7, 7),
            "{ended:?}"
        );
    }
}

#[test]
fn d05_buffers_in_flight_come_back_although_nothing_was_executed() {
    let fabric = Fabric::new();
    for close in [true, false] {
        let (client, _server) = pair(&manual(), &EndpointConfig::default());
        let worker = client.worker().clone();
        let free = || {
            std::iter::from_fn(|| worker.alloc(64).ok())
                .collect::<Vec<_>>()
                .len()
        };
        let all = free();
        fabric.set_delivery(Delivery::Manual);
        let sends: Vec<_> = (0..32)
            .map(|_| client.send(worker.alloc(64).unwrap()).unwrap())
            .collect();
        assert_eq!(free(), all - 32);
        if close {
            client
                .close(Duration::from_millis(20))
                .expect_err("its drain can't succeed");
        } else {
            drop(client);
        }
        for send in sends {
            let error = send.wait().expect_err("nothing was executed");
            assert!(error.buf.is_some(), "{error}");
        }
        assert_eq!(free(), all, "a buffer is missing");
        fabric.set_delivery(Delivery::Auto);
    }
}

#[test]
fn d08_a_listener_that_never_answers_costs_the_deadline() {
    let fabric = Fabric::new();
    let silent = Listener::bind(addr(), &EndpointConfig::default()).unwrap();
    let addr = silent.local_addr();
    fabric.silence_port(addr.port());
    let deadline = Duration::from_millis(200);
    let config = EndpointConfig {
        connect_deadline: deadline,
        ..EndpointConfig::default()
    };
    let start = Instant::now();
    Endpoint::connect(addr, &config).expect_err("nobody answers");
    assert!(start.elapsed() >= deadline);
    assert!(start.elapsed() < deadline + SOON, "{:?}", start.elapsed());
}

#[test]
fn d09_what_was_dropped_is_still_the_device_s_until_it_completes() {
    let fabric = Fabric::new();
    let (client, server) = pair(&manual(), &manual());
    let worker = client.worker().clone();
    let take_all = || std::iter::from_fn(|| worker.alloc(64).ok()).collect::<Vec<_>>();
    let all = take_all().len();

    drop(client.post_recv(client.alloc(64).unwrap()).unwrap());
    let mut canaries = take_all();
    assert_eq!(
        canaries.len(),
        all - 1,
        "the dropped receive's buffer is free already"
    );
    canaries.iter_mut().for_each(|buf| buf.fill(0xc5));
    server.send_slice(&[7; 64]).unwrap().wait().unwrap();
    while client.stats().ops.in_flight() > 0 {
        worker.poll();
    }
    let intact = canaries
        .iter()
        .all(|buf| buf.iter().all(|&byte| byte == 0xc5));
    assert!(intact, "the message went into a buffer that was free");
    drop(canaries);
    assert_eq!(take_all().len(), all);

    // A send in flight: what it sends is what was in the buffer, though that was dropped long ago.
    fabric.set_delivery(Delivery::Manual);
    let mut buf = client.alloc(64).unwrap();
    buf.fill(9);
    drop(client.send(buf).unwrap());
    take_all().iter_mut().for_each(|buf| buf.fill(0xc5));
    let receive = server.post_recv(server.alloc(64).unwrap()).unwrap();
    fabric.set_delivery(Delivery::Auto);
    fabric.deliver();
    assert_eq!(*receive.wait().unwrap().buf.unwrap(), [9; 64]);
}

#[test]
fn d10_strict_queues_never_overrun_however_fast_one_posts() {
    let slots = Config {
        send_slots: SendSlots::FreedByPoll,
        ..Config::default()
    };
    let _fabric = Fabric::with(Config {
        overrun_is_fatal: true,
        ..slots
    });
    let client = EndpointConfig {
        send_depth: 16,
        recv_depth: 4,
        ..EndpointConfig::default()
    };
    let (client, server) = pair(&client, &EndpointConfig::default());
    let mut posted = VecDeque::new();
    let (mut full, mut sent) = (0, 0_u64);
    while sent < 4096 {
        match client.send_slice(&sent.to_be_bytes()) {
            Ok(operation) => {
                posted.push_back(operation);
                sent += 1;
            }
            Err(error) => {
                assert!(error.is_full(), "{error}");
                full += 1;
                posted
                    .pop_front()
                    .expect("something is in flight")
                    .wait()
                    .expect("a send");
                // The peer takes what has come, so that there always is a receive.
                while server.try_recv().expect("open").is_some() {}
            }
        }
    }
    assert!(full > 0, "the queue never was full");
    posted
        .into_iter()
        .for_each(|operation| assert!(operation.wait().is_ok()));
}

#[test]
fn d10_a_post_that_the_device_refuses_all_the_same_gives_the_buffer_back() {
    let fabric = Fabric::new();
    let (client, _server) = pair(&EndpointConfig::default(), &EndpointConfig::default());
    fabric.fail_nth("ibv_post_send", 0, libc::ENOMEM);
    let mut buf = client.alloc(8).unwrap();
    buf.copy_from_slice(b"precious");
    let refused = client.send(buf).expect_err("the device has no memory");
    assert!(
        matches!(refused.kind, PostErrorKind::Verbs(_)),
        "{:?}",
        refused.kind
    );
    assert_eq!(&*refused.buf, b"precious");
    client.send(refused.buf).unwrap().wait().unwrap(); // and the endpoint goes on
}

#[test]
fn d11_a_peer_without_a_receive_fails_the_send_by_name_when_retries_are_out() {
    let _fabric = Fabric::new();
    let impatient = EndpointConfig {
        rnr_retry_count: 0,
        ..manual()
    };
    let (client, _server) = pair(&impatient, &impatient);
    let error = client
        .send_slice(b"nobody there")
        .unwrap()
        .wait()
        .unwrap_err();
    let Cause::Operation(failure) = &*error.cause else {
        panic!("{error:?}")
    };
    assert_eq!(
        (failure.op, failure.status),
        (OpKind::Send, WcStatus::RnrRetryExcErr)
    );
    assert_eq!(error.outcome, Outcome::Failed);
}

#[test]
fn d13_one_wake_up_hands_out_all_that_has_completed() {
    for count in [1, 16, 17, 33, 100] {
        let fabric = Fabric::new();
        let sleeping = EndpointConfig {
            wait: Wait::Event,
            ..EndpointConfig::default()
        };
        let (client, server) = pair(&sleeping, &sleeping);
        thread::scope(|scope| {
            let taker = scope.spawn(|| {
                for n in 0..count {
                    let received = server.recv_deadline(Instant::now() + SOON).unwrap();
                    assert!(received.is_some(), "only {n} of {count} came");
                }
            });
            fabric.hold_completions();
            for n in 0..count {
                drop(client.send_slice(&[n; 8]).unwrap());
            }
            fabric.release_completions(); // all at once, behind one event
            taker.join().expect("all were taken");
        });
    }
}

#[test]
fn d13_a_foreign_loop_does_not_sleep_over_what_a_look_at_another_endpoint_took() {
    let _fabric = Fabric::new();
    let worker = Worker::for_addr(addr(), &WorkerConfig::default()).unwrap();
    let listener = Listener::bind(addr(), &EndpointConfig::default()).unwrap();
    let connect = || {
        let addr = listener.local_addr();
        thread::scope(|scope| {
            let client = scope.spawn(move || Endpoint::connect(addr, &EndpointConfig::default()));
            let incoming = listener
                .accept_deadline(Instant::now() + SOON)
                .unwrap()
                .unwrap();
            let served = incoming.accept_with(&worker).unwrap().wait().unwrap();
            (client.join().unwrap().unwrap(), served)
        })
    };
    let (leaving, first) = connect();
    let (_staying, second) = connect();
    while worker.poll() > 0 {}

    assert!(first.try_recv().unwrap().is_none(), "nothing has come yet");
    drop(leaving);
    // Looks at the second endpoint make progress for the whole worker, the connection manager's news
    // among it.
    let look = || assert!(second.try_recv().unwrap().is_none());
    while first.closed().is_none() {
        look();
    }
    (0..1000).for_each(|_| look()); // until all of it has been taken
    let ready = worker.prepare_wait();
    assert!(
        matches!(ready, Readiness::Ready),
        "it would sleep, the first endpoint's end unseen"
    );
}

#[test]
fn d13_a_completion_before_the_first_wait_is_found_by_it() {
    let _fabric = Fabric::new();
    let sleeping = EndpointConfig {
        wait: Wait::Event,
        ..EndpointConfig::default()
    };
    let (client, _server) = pair(&sleeping, &sleeping);
    let mut send = client.send_slice(b"done already").unwrap();
    send.wait_deadline(Instant::now() + SOON).unwrap();
}
