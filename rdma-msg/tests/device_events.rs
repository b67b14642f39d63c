//! The device's asynchronous events: who gets them, and what they end.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, all_rights, any_port, connect_on, filled, manual, one_of_each};
use fake_verbs::{Delivery, Fabric, QpInfo};
use rdma_msg::{
    Cause, Endpoint, Listener, OpError, OpKind, OpenError, Operation, Outcome, Readiness,
    RemoteRegion, WaitError, WcStatus, Worker, WorkerConfig,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const CQ_ERR: u32 = 0;
const QP_FATAL: u32 = 1;
const QP_REQ_ERR: u32 = 2;
const QP_ACCESS_ERR: u32 = 3;
const DEVICE_FATAL: u32 = 8;
const PORT_ERR: u32 = 10;
const QP_LAST_WQE_REACHED: u32 = 16;

const EIO: i32 = 5;
const BUFS: usize = 64;

fn worker() -> Worker {
    let config = WorkerConfig {
        buf_count: BUFS,
        ..WorkerConfig::default()
    };
    Worker::for_addr(any_port(1), &config).unwrap()
}

/// An endpoint on a worker of device 0, and its peer on device 1.
fn connect(worker: &Worker) -> (Endpoint, Endpoint) {
    connect_on(worker, &manual())
}

/// One operation of each kind, which all stay in flight.
fn stuck(fabric: &Fabric, endpoint: &Endpoint, peer: &Endpoint) -> Vec<Operation> {
    fabric.set_delivery(Delivery::Manual);
    one_of_each(
        endpoint,
        peer.expose(64, all_rights()).unwrap().descriptor(),
    )
}

fn error(mut operation: Operation) -> OpError {
    match operation.wait_deadline(Instant::now() + LIMIT) {
        Err(WaitError::Operation(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// All operations end, and no buffer is missing.
fn assert_ended(endpoint: &Endpoint, operations: Vec<Operation>, cause: &Cause) {
    for operation in operations {
        let kind = operation.kind();
        let error = error(operation);
        assert_eq!((error.op, &*error.cause), (kind, cause));
        let expected = if kind.is_receive() {
            Outcome::NotSent
        } else {
            Outcome::Unknown
        };
        assert_eq!(error.outcome, expected, "{kind}");
        assert_eq!(error.buf.is_some(), !kind.is_atomic());
    }
    assert_eq!(*endpoint.closed().unwrap(), *cause);
}

fn assert_nothing_left(worker: &Worker) {
    assert_eq!((worker.open_operations(), worker.available()), (0, BUFS));
    let stats = worker.stats();
    assert_eq!((stats.stale, stats.leaked), (0, 0));
}

fn assert_works(fabric: &Fabric, endpoint: &Endpoint, peer: &Endpoint) {
    assert!(endpoint.closed().is_none());
    fabric.set_delivery(Delivery::Auto);
    fabric.deliver();
    let received = peer.post_recv(peer.alloc(0).unwrap()).unwrap();
    endpoint.send_slice(b"fine").unwrap().wait().unwrap();
    assert_eq!(received.wait().unwrap().buf.as_deref(), Some(&b"fine"[..]));
}

fn qp(fabric: &Fabric, endpoint: &Endpoint) -> QpInfo {
    let mut qps = fabric.qps().into_iter();
    qps.find(|qp| qp.qp_num == endpoint.qp_num()).unwrap()
}

/// One turn of a foreign loop that finds its descriptor readable.
fn turn(worker: &Worker) {
    while worker.prepare_wait() == Readiness::Ready {
        worker.poll();
    }
    worker.poll();
}

fn is_readable(worker: &Worker, within: Duration) -> bool {
    let within = Timespec {
        tv_sec: within.as_secs() as i64,
        tv_nsec: within.subsec_nanos().into(),
    };
    let fd = worker.as_fd();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&within)).unwrap() > 0
}

#[test]
fn an_event_of_a_queue_pair_ends_its_endpoint_alone() {
    for event in [QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR] {
        let fabric = Fabric::new();
        let (worker, other) = (worker(), worker());
        let (broken, peer) = connect(&worker);
        let healthy = [connect(&worker), connect(&other)];
        let operations = stuck(&fabric, &broken, &peer);

        fabric.inject_qp_event(broken.qp_num(), event);

        assert_ended(&broken, operations, &Cause::QueuePairError);
        for (endpoint, peer) in &healthy {
            assert_works(&fabric, endpoint, peer);
        }
        drop((broken, healthy));
        assert_nothing_left(&worker);
        assert_nothing_left(&other);
    }
}

#[test]
fn an_operation_that_fails_after_the_event_is_the_cause_all_the_same() {
    let fabric = Fabric::new();
    let worker = worker();
    let (client, _server) = connect(&worker);
    fabric.hold_completions();
    let nowhere = RemoteRegion::new(4096, 64, 0xbad);
    let write = client.write(filled(&client, b"where?"), nowhere).unwrap();
    let behind = client.send(filled(&client, b"behind")).unwrap();
    fabric.inject_qp_event(client.qp_num(), QP_FATAL);
    turn(&worker);
    assert!(!client.is_open());
    fabric.release_completions();

    let write = error(write);
    assert_eq!((write.op, write.outcome), (OpKind::Write, Outcome::Failed));
    assert!(
        matches!(&*write.cause, Cause::Operation(f) if f.status == WcStatus::RemAccessErr),
        "{write}"
    );
    let behind = error(behind);
    assert_eq!(behind.outcome, Outcome::NotSent);
    assert!(Arc::ptr_eq(&behind.cause, &write.cause), "{behind}");
    assert!(Arc::ptr_eq(&client.closed().unwrap(), &write.cause));
}

#[test]
fn what_the_peer_does_about_the_end_is_not_its_cause() {
    let fabric = Fabric::new();
    let worker = worker();
    let (client, server) = connect(&worker);
    let receive = client.post_recv(client.alloc(0).unwrap()).unwrap();
    fabric.hold_completions();
    fabric.inject_qp_event(client.qp_num(), QP_FATAL);
    turn(&worker);
    drop(server); // which answers the disconnect
    assert_eq!(*error(receive).cause, Cause::QueuePairError);
    assert_eq!(*client.closed().unwrap(), Cause::QueuePairError);
}

/// A worker whose completion queue failed is of no use any more.
fn assert_refuses(worker: &Worker) {
    let refused = Endpoint::connect_with(worker, any_port(2), &manual()).unwrap_err();
    assert!(
        matches!(&refused, OpenError::Ended(cause) if **cause == Cause::CompletionQueueError),
        "{refused}"
    );
}

#[test]
fn a_failed_completion_queue_ends_all_endpoints_of_its_worker() {
    let fabric = Fabric::new();
    let (worker, other) = (worker(), worker());
    let pairs = [connect(&worker), connect(&worker)];
    let healthy = connect(&other);
    let in_flight = pairs.each_ref().map(|(a, b)| stuck(&fabric, a, b));
    let cq = qp(&fabric, &pairs[0].0).send_cq;
    // No completion comes any more.
    fabric.hold_completions();

    fabric.inject_cq_event(cq, CQ_ERR);

    for ((endpoint, _), operations) in pairs.iter().zip(in_flight) {
        assert_ended(endpoint, operations, &Cause::CompletionQueueError);
    }
    fabric.release_completions();
    assert_refuses(&worker);
    assert_works(&fabric, &healthy.0, &healthy.1);
    drop((pairs, healthy));
    assert_nothing_left(&worker);
    assert_nothing_left(&other);
}

#[test]
fn a_completion_queue_that_cannot_be_used_ends_its_worker() {
    for call in ["ibv_poll_cq", "ibv_req_notify_cq", "ibv_get_cq_event"] {
        let fabric = Fabric::new();
        let worker = worker();
        let (endpoint, peer) = connect(&worker);
        let operations = stuck(&fabric, &endpoint, &peer);
        fabric.hold_completions();
        fabric.spurious_cq_event(qp(&fabric, &endpoint).send_cq);

        fabric.fail_nth(call, 0, EIO);

        assert_ended(&endpoint, operations, &Cause::CompletionQueueError);
        assert_eq!(fabric.failed_calls(), [call]);
        fabric.release_completions();
        assert_refuses(&worker);
        drop((endpoint, peer));
        assert_nothing_left(&worker);
    }
}

#[test]
fn a_failed_device_ends_all_endpoints_of_all_its_workers() {
    let fabric = Fabric::new();
    let workers = [worker(), worker()];
    let pairs = workers.each_ref().map(connect);
    let in_flight = pairs.each_ref().map(|(a, b)| stuck(&fabric, a, b));

    fabric.inject_port_event(0, 1, DEVICE_FATAL);

    for ((endpoint, _), operations) in pairs.iter().zip(in_flight) {
        assert_ended(endpoint, operations, &Cause::DeviceRemoved);
    }
    // One that is made later is told, too.
    let later = worker();
    assert_eq!(connect_twice(&later), [const { Cause::DeviceRemoved }; 2]);
    drop(pairs);
    workers.iter().for_each(assert_nothing_left);
}

/// What ends the first and the second connect.
fn connect_twice(worker: &Worker) -> [Cause; 2] {
    let listener = Listener::bind(any_port(2), &manual()).unwrap();
    let connect = || match Endpoint::connect_with(worker, listener.local_addr(), &manual()) {
        Ok(opening) => opening.wait(),
        Err(error) => Err(error),
    };
    let cause = |result: Result<Endpoint, OpenError>| match result {
        Err(OpenError::Ended(cause)) => (*cause).clone(),
        other => panic!("{other:?}"),
    };
    [cause(connect()), cause(connect())]
}

#[test]
fn a_worker_that_is_not_concerned_passes_the_event_on() {
    let fabric = Fabric::new();
    let (concerned, other) = (worker(), worker());
    let (broken, peer) = connect(&concerned);
    let (healthy, healthys_peer) = connect(&other);
    let operations = stuck(&fabric, &broken, &peer);
    while concerned.prepare_wait() == Readiness::Ready {
        concerned.poll();
    }
    let seen = concerned.stats().device_events;

    fabric.inject_qp_event(broken.qp_num(), QP_FATAL);
    turn(&other); // reads it, the fabric has no second one

    assert_eq!(concerned.stats().device_events, seen + 1);
    assert!(is_readable(&concerned, LIMIT), "nobody told the worker");
    assert_eq!(concerned.prepare_wait(), Readiness::Ready);
    assert!(!broken.is_open());
    assert_ended(&broken, operations, &Cause::QueuePairError);
    assert_works(&fabric, &healthy, &healthys_peer);
}

#[test]
fn threads_that_sleep_on_other_workers_do_not_keep_an_event() {
    let fabric = Fabric::new();
    let workers = [worker(), worker(), worker()];
    let pairs = workers.each_ref().map(connect);
    thread::scope(|scope| {
        let sleeping = pairs.each_ref().map(|(endpoint, _)| {
            let receive = endpoint.post_recv(endpoint.alloc(0).unwrap()).unwrap();
            scope.spawn(move || error(receive))
        });
        thread::sleep(Duration::from_millis(5)); // so that they more likely sleep: any order is right
        for ((endpoint, _), thread) in pairs.iter().zip(sleeping) {
            assert!(endpoint.closed().is_none());
            fabric.inject_qp_event(endpoint.qp_num(), QP_ACCESS_ERR);
            assert_eq!(*thread.join().unwrap().cause, Cause::QueuePairError);
        }
    });
}

#[test]
fn a_worker_can_go_while_events_are_pending() {
    let fabric = Fabric::new();
    let (gone, stays) = (worker(), worker());
    let (endpoint, _peer) = connect(&gone);
    let qp_num = endpoint.qp_num();
    fabric.inject_qp_event(qp_num, QP_FATAL);
    fabric.inject_port_event(0, 1, PORT_ERR);
    turn(&stays); // has mail for the other
    fabric.inject_qp_event(qp_num, QP_FATAL);
    let cq = qp(&fabric, &endpoint).send_cq;
    fabric.inject_cq_event(cq, CQ_ERR);
    fabric.inject_port_event(0, 1, PORT_ERR);
    drop((endpoint, gone));
    assert!(fabric.cqs().iter().all(|other| other.id != cq));
    let (endpoint, peer) = connect(&stays);
    assert_works(&fabric, &endpoint, &peer);
    drop((endpoint, stays));
    // The last worker leaves one behind, the next finds it.
    fabric.inject_port_event(0, 1, PORT_ERR);
    let (endpoint, peer) = connect(&worker());
    assert_works(&fabric, &endpoint, &peer);
}

/// Threads read each other's events while the queue pairs, queues and workers these are about go.
#[test]
fn workers_that_come_and_go_do_not_get_in_each_others_way() {
    const ROUNDS: u32 = if cfg!(miri) { 2 } else { 60 };
    let fabric = Fabric::new();
    let done = AtomicBool::new(false);
    let live_and_go = || {
        for round in 0..ROUNDS {
            let worker = worker();
            let (endpoint, _peer) = connect(&worker);
            let receive = endpoint.post_recv(endpoint.alloc(0).unwrap()).unwrap();
            fabric.inject_port_event(0, 1, PORT_ERR);
            fabric.inject_qp_event(endpoint.qp_num(), QP_FATAL);
            if round % 2 == 0 {
                drop(endpoint);
                error(receive);
            } else {
                assert_eq!(*error(receive).cause, Cause::QueuePairError);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let reader = worker();
            while !done.load(Ordering::Relaxed) {
                turn(&reader);
            }
        });
        let threads = [0; 3].map(|_| scope.spawn(live_and_go));
        let results = threads.map(|thread| thread.join());
        done.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
}

#[test]
fn other_events_are_counted_and_end_nothing() {
    let fabric = Fabric::new();
    let worker = worker();
    let (endpoint, peer) = connect(&worker);
    turn(&worker);
    let before = worker.stats().device_events;
    fabric.set_port(0, false);
    fabric.set_port(0, true);
    fabric.inject_port_event(0, 1, 77); // no library knows it
    fabric.inject_qp_event(endpoint.qp_num(), QP_LAST_WQE_REACHED);
    fabric.inject_qp_event(peer.qp_num(), QP_FATAL); // of the other device
    assert!(is_readable(&worker, LIMIT));
    turn(&worker);
    assert_eq!(worker.stats().device_events - before, 4);
    assert!(!is_readable(&worker, Duration::ZERO));
    assert!(endpoint.is_open());
}

#[test]
fn a_loop_of_the_programs_own_is_woken() {
    let fabric = Fabric::new();
    let worker = worker();
    let (endpoint, peer) = connect(&worker);
    let operations = stuck(&fabric, &endpoint, &peer);
    thread::scope(|scope| {
        scope.spawn(|| fabric.inject_qp_event(endpoint.qp_num(), QP_FATAL));
        while endpoint.is_open() {
            worker.poll();
            if worker.prepare_wait() == Readiness::MayWait {
                let woken = is_readable(&worker, LIMIT);
                assert!(woken, "the loop slept through the event");
            }
        }
    });
    assert_ended(&endpoint, operations, &Cause::QueuePairError);
}

#[test]
fn events_that_cannot_be_read_any_more_cost_nothing_else() {
    let fabric = Fabric::new();
    let worker = worker();
    let (endpoint, peer) = connect(&worker);
    turn(&worker);
    fabric.fail_nth("ibv_get_async_event", 0, EIO);
    fabric.set_port(0, false);
    assert!(is_readable(&worker, LIMIT));
    turn(&worker);
    assert!(!is_readable(&worker, Duration::ZERO), "it would spin");
    fabric.set_port(0, true);
    assert_works(&fabric, &endpoint, &peer);
}
