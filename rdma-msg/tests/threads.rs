//! Several threads on one worker, and foreign event loops.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod common;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, any_port, filled, manual, pair, pair_with, small};
use fake_verbs::{Delivery, Fabric};
use rdma_msg::{Cause, Endpoint, EndpointConfig, Listener, Readiness, Wait, Worker, WorkerConfig};

/// How often; a lost wake-up hangs, so the more the better.
const ROUNDS: u64 = if cfg!(miri) { 3 } else { 300 };

#[test]
fn threads_that_wait_on_one_endpoint_all_get_their_results() {
    let _fabric = Fabric::new();
    for wait in [Wait::Event, Wait::default()] {
        let config = EndpointConfig {
            wait,
            send_depth: 64,
            recv_depth: 64,
            ..small()
        };
        let (client, server) = pair_with(&config, &config);
        let (sum, messages) = (AtomicU64::new(0), 4 * ROUNDS);
        let taken = AtomicU64::new(0);
        thread::scope(|scope| {
            for thread in 0..4 {
                let client = &client;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let number = thread * ROUNDS + round;
                        client
                            .send_slice(&number.to_ne_bytes())
                            .unwrap()
                            .wait()
                            .unwrap();
                    }
                });
            }
            for _ in 0..3 {
                scope.spawn(|| {
                    while taken.fetch_add(1, Ordering::Relaxed) < messages {
                        let received = server.recv().unwrap();
                        let number = u64::from_ne_bytes(received.buf[..].try_into().unwrap());
                        sum.fetch_add(number, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), (0..messages).sum());
    }
}

#[test]
fn threads_wait_for_different_endpoints_of_one_worker() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let worker = Worker::for_addr(
        any_port(1),
        &WorkerConfig {
            wait: Wait::Event,
            ..WorkerConfig::default()
        },
    )
    .unwrap();
    let servers = Worker::for_addr(
        any_port(2),
        &WorkerConfig {
            wait: Wait::Event,
            ..WorkerConfig::default()
        },
    )
    .unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..4 {
                let server = listener.accept().unwrap().accept_with(&servers).unwrap();
                let server = server.wait().unwrap();
                scope.spawn(move || {
                    while let Ok(received) = server.recv() {
                        server.send(received.buf).unwrap().wait().unwrap();
                    }
                });
            }
        });
        for _ in 0..4 {
            scope.spawn(|| {
                let client = Endpoint::connect_with(&worker, listener.local_addr(), &small());
                let client = client.unwrap().wait().unwrap();
                for round in 0..ROUNDS {
                    let sent = client.send_slice(&round.to_ne_bytes()).unwrap();
                    assert_eq!(client.recv().unwrap().buf[..], round.to_ne_bytes());
                    sent.wait().unwrap();
                }
                client.close(LIMIT).unwrap();
            });
        }
    });
    assert_eq!(worker.open_operations() + servers.open_operations(), 0);
}

#[test]
fn four_threads_post_while_a_fifth_closes() {
    let _fabric = Fabric::new();
    for _ in 0..ROUNDS.min(50) {
        let (client, server) = pair();
        let full = client.worker().pool_size().0;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| while let Ok(()) | Err(true) = post_one(&client) {});
            }
            scope.spawn(|| while server.recv().is_ok() {});
            thread::yield_now();
            client.close(LIMIT).unwrap();
        });
        assert_eq!(client.worker().open_operations(), 0);
        assert_eq!(client.worker().available(), full);
        assert_eq!(client.worker().stats().stale, 0);
    }
}

/// `Err(true)`: the queue is full.
fn post_one(client: &Endpoint) -> Result<(), bool> {
    let Ok(mut buf) = client.alloc(0) else {
        return Err(true);
    };
    buf.fill_from(b"x");
    let operation = client.send(buf).map_err(|error| error.is_full())?;
    // Accepted operations end, one way or the other.
    let _ = operation.wait();
    Ok(())
}

#[test]
fn a_foreign_loop_sleeps_on_the_descriptor_alone() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                let message = next_message(&server);
                assert_eq!(message, round.to_ne_bytes());
                drop(server.send_slice(&message).unwrap());
            }
        });
        for round in 0..ROUNDS {
            drop(client.send_slice(&round.to_ne_bytes()).unwrap());
            assert_eq!(client.recv().unwrap().buf[..], round.to_ne_bytes());
        }
    });
}

/// What a program with its own poll(2) or epoll does.
fn next_message(endpoint: &Endpoint) -> Vec<u8> {
    let worker = endpoint.worker();
    loop {
        worker.poll();
        if let Some(received) = endpoint.try_recv().unwrap() {
            return received.buf.to_vec();
        }
        if worker.prepare_wait() == Readiness::MayWait {
            sleep_on(worker);
        }
    }
}

fn sleep_on(worker: &Worker) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let timeout = Timespec {
        tv_sec: LIMIT.as_secs() as i64,
        tv_nsec: 0,
    };
    let fd = worker.as_fd();
    let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(ready, 1, "nothing came");
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no timerfd")]
fn a_foreign_loop_hears_of_the_workers_timers_by_its_descriptor() {
    let _fabric = Fabric::new();
    let patient = EndpointConfig {
        stall_timeout: Some(Duration::from_millis(20)),
        ..small()
    };
    let (client, _server) = pair_with(&patient, &manual());
    let worker = client.worker();
    let mut send = client.send(filled(&client, b"nobody listens")).unwrap();
    let error = loop {
        worker.poll();
        if let Some(result) = send.try_result() {
            break result.unwrap_err();
        }
        if worker.prepare_wait() == Readiness::MayWait {
            sleep_on(worker);
        }
    };
    assert_eq!(*error.cause, Cause::Stalled);
}

#[test]
fn a_leader_that_times_out_leaves_somebody_in_charge() {
    let fabric = Fabric::new();
    let (client, _server) = pair();
    fabric.set_delivery(Delivery::Manual);
    let operation = client.send(filled(&client, b"slow")).unwrap();
    thread::scope(|scope| {
        for delay in 1..4 {
            let client = &client;
            scope.spawn(move || {
                let deadline = Instant::now() + Duration::from_millis(5 * delay);
                assert!(client.recv_deadline(deadline).unwrap().is_none());
            });
        }
        let waiting = scope.spawn(|| operation.wait().unwrap());
        thread::sleep(Duration::from_millis(30)); // the others have left by then, whoever led
        fabric.set_delivery(Delivery::Auto);
        fabric.deliver();
        waiting.join().unwrap();
    });
}
