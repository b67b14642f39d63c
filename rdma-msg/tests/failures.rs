//! What happens to operations, and to their buffers, when something breaks.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod common;

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    LIMIT, all_rights, any_port, connect_on, filled, manual, one_of_each, pair, pair_with, small,
};
use fake_verbs::{Completion, Config, Delivery, Fabric};
use rdma_msg::{
    Access, Cause, CloseError, CmError, Endpoint, EndpointConfig, Listener, OpError, OpKind,
    OpenError, Operation, Outcome, PostErrorKind, Queue, RecvError, RemoteRegion, WcStatus, Worker,
    WorkerConfig,
};

const EINTR: i32 = 4;
const EBADF: i32 = 9;
const ENOMEM: i32 = 12;
const UNREACHABLE: u32 = 7;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const ADDR_CHANGE: u32 = 14;
const TIMEWAIT_EXIT: u32 = 15;
const WR_FLUSH_ERR: u32 = 5;

fn error(operation: Operation) -> OpError {
    operation.wait().unwrap_err()
}

#[test]
fn everything_in_flight_ends_when_the_peer_is_killed() {
    let fabric = Fabric::new();
    let (client, server) = pair_with(&manual(), &manual());
    let region = server.expose(64, all_rights()).unwrap();
    let full = client.worker().available();
    fabric.set_delivery(Delivery::Manual);
    let operations = one_of_each(&client, region.descriptor());
    let kinds: Vec<OpKind> = operations.iter().map(Operation::kind).collect();

    fabric.kill(1);

    for (operation, kind) in operations.into_iter().zip(kinds) {
        let error = error(operation);
        assert_eq!(error.op, kind);
        assert_eq!(*error.cause, Cause::Disconnected);
        let expected = if kind.is_receive() {
            Outcome::NotSent
        } else {
            Outcome::Unknown
        };
        assert_eq!(error.outcome, expected, "{kind}");
        assert_eq!(error.buf.is_some(), !kind.is_atomic());
    }
    assert_eq!(*client.closed().unwrap(), Cause::Disconnected);
    assert_eq!(client.worker().available(), full);
    assert_eq!(client.worker().open_operations(), 0);
    assert_eq!(client.worker().stats().stale, 0);
    drop((client, server, region));
    fabric.abandon();
}

#[test]
fn what_the_peer_refuses_is_the_cause_of_everything_behind_it() {
    let fabric = Fabric::new();
    let (client, server) = pair_with(&manual(), &manual());
    fabric.set_delivery(Delivery::Manual);
    let bad = RemoteRegion::new(4096, 64, 0xbad);
    let recv = client.post_recv(client.alloc(0).unwrap()).unwrap();
    let refused = client.write(filled(&client, b"where?"), bad).unwrap();
    let behind = client.send(filled(&client, b"behind")).unwrap();
    let peers = server.post_recv(server.alloc(0).unwrap()).unwrap();
    fabric.set_delivery(Delivery::Auto);
    fabric.deliver();

    let refused = error(refused);
    assert_eq!(
        (refused.op, refused.outcome),
        (OpKind::Write, Outcome::Failed)
    );
    let Cause::Operation(failure) = &*refused.cause else {
        panic!("{refused}")
    };
    assert_eq!(
        (failure.op, failure.status),
        (OpKind::Write, WcStatus::RemAccessErr)
    );
    assert_eq!(failure.qp_num, client.qp_num());
    assert_eq!(failure.addrs.peer, client.peer_addr());

    let behind = error(behind);
    assert_eq!(
        (behind.op, behind.outcome),
        (OpKind::Send, Outcome::NotSent)
    );
    let recv = error(recv);
    assert_eq!((recv.op, recv.outcome), (OpKind::Receive, Outcome::NotSent));
    for error in [&behind, &recv] {
        assert!(Arc::ptr_eq(&error.cause, &refused.cause), "{error}");
    }
    assert!(Arc::ptr_eq(&client.closed().unwrap(), &refused.cause));
    assert_eq!(&behind.buf.unwrap()[..], b"behind");

    // At the peer nothing of its own has failed.
    let theirs = error(peers);
    assert_eq!(
        (theirs.op, theirs.outcome),
        (OpKind::Receive, Outcome::NotSent)
    );
    assert!(
        matches!(*theirs.cause, Cause::QueuePairError | Cause::Disconnected),
        "{}",
        theirs.cause
    );
}

#[test]
fn a_cut_link_ends_in_unknown() {
    let fabric = Fabric::with(Config {
        silent_peer: fake_verbs::SilentPeer::Wait,
        ..Config::default()
    });
    let (client, _server) = pair();
    fabric.cut_link();
    let first = client.send(filled(&client, b"lost")).unwrap();
    let behind = client.send(filled(&client, b"also")).unwrap();
    fabric.expire_retries();
    let (first, behind) = (error(first), error(behind));
    assert_eq!(first.outcome, Outcome::Unknown);
    assert!(
        matches!(&*first.cause, Cause::Operation(f) if f.status == WcStatus::RetryExcErr),
        "{first}"
    );
    assert_eq!(behind.outcome, Outcome::Unknown);
    assert!(Arc::ptr_eq(&first.cause, &behind.cause));
}

#[test]
fn a_peer_without_receives_refuses_in_the_end() {
    let fabric = Fabric::new();
    let impatient = EndpointConfig {
        rnr_retry_count: 6,
        ..small()
    };
    let (client, _server) = pair_with(&impatient, &manual());
    let send = client.send(filled(&client, b"too early")).unwrap();
    let behind = client.send(filled(&client, b"behind")).unwrap();
    fabric.expire_retries();
    let (send, behind) = (error(send), error(behind));
    assert_eq!(
        (send.outcome, behind.outcome),
        (Outcome::Failed, Outcome::NotSent)
    );
}

#[test]
fn a_flush_without_a_failure_has_a_cause_of_its_own() {
    let fabric = Fabric::new();
    let (client, server) = pair_with(&manual(), &small());
    let recv = client.post_recv(client.alloc(0).unwrap()).unwrap();
    fabric.break_qp(client.qp_num());
    assert_eq!(*error(recv).cause, Cause::QueuePairError);
    assert_eq!(*client.closed().unwrap(), Cause::QueuePairError);
    assert!(
        matches!(server.recv(), Err(RecvError::Closed(cause)) if *cause == Cause::Disconnected)
    );
}

/// The queue of an endpoint.
fn queue_of(fabric: &Fabric, endpoint: &Endpoint) -> fake_verbs::CqId {
    let mut qps = fabric.qps().into_iter();
    qps.find(|qp| qp.qp_num == endpoint.qp_num())
        .unwrap()
        .send_cq
}

#[test]
fn nobody_is_told_a_cause_before_it_is_known() {
    for looked_at_before in [true, false] {
        let fabric = Fabric::new();
        let (client, server) = pair_with(&manual(), &manual());
        let recv = client.post_recv(client.alloc(0).unwrap()).unwrap();
        fabric.set_delivery(Delivery::Manual);
        let send = client.send_slice(b"lost").unwrap();
        fabric.cut_link();
        fabric.deliver();
        fabric.expire_retries();
        let queue = queue_of(&fabric, &client);
        let mut completions = fabric.lose_completions(queue);
        assert_eq!(completions.len(), 2);

        // The receive's flush comes first, as it can with two queues.
        completions.sort_by_key(|wc| wc.status != WR_FLUSH_ERR);
        fabric.inject_completion(queue, completions[0]);
        client.worker().poll();
        assert!(!client.is_open());
        if looked_at_before {
            let refused = client.send_slice(b"x").unwrap_err();
            assert!(matches!(refused.kind, PostErrorKind::Ending), "{refused}");
            assert!(client.closed().is_none());
            let soon = Instant::now() + Duration::from_millis(1);
            assert!(!client.wait_capacity(1, Some(soon)).unwrap());
        }
        fabric.inject_completion(queue, completions[1]);
        let refused = client.send_slice(b"x").unwrap_err();
        let PostErrorKind::Closed { cause } = refused.kind else {
            panic!("{refused}")
        };
        assert!(
            matches!(&*cause, Cause::Operation(failure) if failure.op == OpKind::Send),
            "{cause}"
        );
        assert_eq!(client.wait_capacity(1, None).unwrap_err().0, cause);
        assert_eq!(error(recv).cause, cause);
        assert_eq!(error(send).cause, cause);
        assert_eq!(client.closed().unwrap(), cause);
        drop(server);
    }
}

#[test]
fn news_of_the_connection_manager_ends_the_connection_at_once() {
    for (event, status, cause) in [
        (UNREACHABLE, -110, Cause::Unreachable { status: -110 }),
        (DISCONNECTED, 0, Cause::Disconnected),
        (TIMEWAIT_EXIT, 0, Cause::Disconnected),
    ] {
        let fabric = Fabric::new();
        let (client, server) = pair();
        client
            .send_slice(b"arrived before")
            .unwrap()
            .wait()
            .unwrap();

        fabric.inject_cm_event(passive_id(&fabric), event, status);

        assert_eq!(&server.recv().unwrap().buf[..], b"arrived before");
        let RecvError::Closed(closed) = server.recv().unwrap_err() else {
            panic!()
        };
        assert_eq!(*closed, cause);
        assert_eq!(server.worker().open_operations(), 0);
        assert!(
            fabric.qps().iter().all(|qp| qp.qp_num != server.qp_num()),
            "destroyed by itself"
        );
    }
}

/// The id of the server's endpoint.
fn passive_id(fabric: &Fabric) -> fake_verbs::IdName {
    let mut ids = fabric.ids().into_iter();
    ids.find(|id| id.passive && id.peer.is_some()).unwrap().name
}

/// Has the connection manager's next events be refused `count` times.
fn refuse_cm_events(fabric: &Fabric, count: u64, errno: i32) {
    (0..count).for_each(|nth| fabric.fail_nth("rdma_get_cm_event", nth, errno));
}

#[test]
fn no_memory_for_an_event_of_the_connection_manager_ends_nothing() {
    for errno in [ENOMEM, EINTR] {
        let fabric = Fabric::new();
        let (client, server) = pair();
        let id = passive_id(&fabric);
        refuse_cm_events(&fabric, 3, errno);
        fabric.inject_cm_event(id, ADDR_CHANGE, 0);
        let end = Instant::now() + LIMIT;
        while fabric.failed_calls().len() < 3 {
            assert!(Instant::now() < end, "it was not asked again");
            let soon = Instant::now() + Duration::from_millis(20);
            assert!(server.recv_deadline(soon).unwrap().is_none());
        }
        client.send_slice(b"I am here").unwrap().wait().unwrap();
        assert_eq!(&server.recv().unwrap().buf[..], b"I am here");

        // What comes after it is heard, and what the event says is the cause.
        refuse_cm_events(&fabric, 3, errno);
        fabric.inject_cm_event(id, DISCONNECTED, 0);
        let RecvError::Closed(cause) = server.recv().unwrap_err() else {
            panic!()
        };
        assert_eq!(*cause, Cause::Disconnected);
        assert_eq!(fabric.failed_calls().len(), 6);
    }
}

#[test]
fn events_that_cannot_be_fetched_for_long_end_the_connection_without_spinning() {
    for (errno, most) in [(ENOMEM, 20), (EBADF, 2)] {
        let fabric = Fabric::new();
        let (client, server) = pair();
        refuse_cm_events(&fabric, 10_000, errno);
        fabric.inject_cm_event(passive_id(&fabric), ADDR_CHANGE, 0);
        if errno == ENOMEM {
            let later = Instant::now() + Duration::from_millis(50);
            assert!(server.recv_deadline(later).unwrap().is_none());
            client.send_slice(b"I am here").unwrap().wait().unwrap();
            assert_eq!(&server.recv().unwrap().buf[..], b"I am here");
        }
        let ended = server.recv_deadline(Instant::now() + LIMIT).unwrap_err();
        assert!(
            matches!(&ended, RecvError::Closed(cause)
                if **cause == Cause::ConnectionManagerError { errno }),
            "{ended}"
        );
        let failed = fabric.failed_calls().len();
        assert!(failed <= most, "{failed} times");
    }
}

#[test]
fn a_removed_device_ends_everything() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    fabric.remove_device(1);
    let RecvError::Closed(cause) = server.recv().unwrap_err() else {
        panic!()
    };
    assert!(
        matches!(*cause, Cause::DeviceRemoved | Cause::QueuePairError),
        "{cause}"
    );
    drop((client, server));
    fabric.abandon();
}

#[test]
fn dropping_an_endpoint_ends_its_operations_and_returns_their_buffers() {
    let fabric = Fabric::new();
    let worker = Worker::for_addr(
        any_port(1),
        &WorkerConfig {
            buf_count: 32,
            ..Default::default()
        },
    )
    .unwrap();
    let listener = Listener::bind(any_port(2), &manual()).unwrap();
    let (client, server) = thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept().unwrap().accept().unwrap());
        let client = Endpoint::connect_with(&worker, listener.local_addr(), &manual());
        (client.unwrap().wait().unwrap(), accepting.join().unwrap())
    });
    let region = server.expose(64, all_rights()).unwrap();
    fabric.set_delivery(Delivery::Manual);
    let operations = one_of_each(&client, region.descriptor());
    let theirs = client.expose(64, all_rights()).unwrap();
    let kept = one_of_each(&server, theirs.descriptor());

    drop(client);

    for operation in operations {
        let kind = operation.kind();
        let error = error(operation);
        assert_eq!(*error.cause, Cause::ClosedLocally);
        let expected = if kind.is_receive() {
            Outcome::Cancelled
        } else {
            Outcome::Unknown
        };
        assert_eq!((error.op, error.outcome), (kind, expected));
    }
    assert_eq!(worker.available(), 32);
    assert_eq!(worker.open_operations(), 0);
    for operation in kept {
        assert_eq!(*error(operation).cause, Cause::Disconnected);
    }
}

#[test]
fn operations_that_nobody_waits_for_return_their_buffers_too() {
    let fabric = Fabric::new();
    let (client, server) = pair_with(&manual(), &manual());
    let region = server.expose(64, all_rights()).unwrap();
    let worker = client.worker().clone();
    let full = worker.available();
    fabric.set_delivery(Delivery::Manual);
    drop(one_of_each(&client, region.descriptor()));
    assert_eq!(worker.available(), full - 6, "they are with the NIC");
    drop(client);
    assert_eq!(worker.available(), full);
}

#[test]
fn a_close_that_runs_out_of_time_says_so_and_closes() {
    let fabric = Fabric::new();
    let (client, _server) = pair();
    fabric.set_delivery(Delivery::Manual);
    let stuck = client.send(filled(&client, b"stuck")).unwrap();
    let closed = client.close(Duration::from_millis(20));
    assert!(
        matches!(closed, Err(CloseError::TimedOut { unfinished: 1 })),
        "{closed:?}"
    );
    let error = error(stuck);
    assert_eq!(
        (error.outcome, &*error.cause),
        (Outcome::Unknown, &Cause::ClosedLocally)
    );
}

#[test]
fn a_close_waits_for_the_sends() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    fabric.set_delivery(Delivery::Manual);
    let operation = client.send(filled(&client, b"slow")).unwrap();
    thread::scope(|scope| {
        let closing = scope.spawn(|| client.close(LIMIT));
        while client.is_open() {
            thread::yield_now();
        }
        let refused = client.send_slice(b"too late").unwrap_err();
        assert!(
            matches!(&refused.kind, PostErrorKind::Closed { cause } if **cause == Cause::ClosedLocally)
        );
        fabric.set_delivery(Delivery::Auto);
        fabric.deliver();
        closing.join().unwrap().unwrap();
    });
    operation.wait().unwrap();
    assert_eq!(&server.recv().unwrap().buf[..], b"slow");
}

#[test]
fn a_close_from_another_thread_ends_every_wait() {
    let _fabric = Fabric::new();
    let (client, _server) = pair_with(&manual(), &small());
    let (managed, _peer) = pair();
    thread::scope(|scope| {
        let operation = client.post_recv(client.alloc(0).unwrap()).unwrap();
        let waits = scope.spawn(|| error(operation));
        let receives = scope.spawn(|| managed.recv().map(drop).unwrap_err());
        let receives_too = scope.spawn(|| managed.recv().map(drop).unwrap_err());
        thread::sleep(Duration::from_millis(5)); // so that they more likely sleep: any order is right
        client.close(LIMIT).unwrap();
        managed.close(LIMIT).unwrap();
        assert_eq!(waits.join().unwrap().outcome, Outcome::Cancelled);
        for receives in [receives, receives_too] {
            let RecvError::Closed(cause) = receives.join().unwrap() else {
                panic!()
            };
            assert_eq!(*cause, Cause::ClosedLocally);
        }
    });
}

#[test]
fn other_endpoints_of_the_worker_do_not_notice() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let worker = Worker::for_addr(any_port(1), &WorkerConfig::default()).unwrap();
    let connect = || Endpoint::connect_with(&worker, listener.local_addr(), &small()).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            (0..2)
                .map(|_| listener.accept().unwrap().accept().unwrap())
                .collect::<Vec<_>>()
        });
        let (broken, healthy) = (connect().wait().unwrap(), connect().wait().unwrap());
        let servers = accepting.join().unwrap();
        let bad = broken
            .write(filled(&broken, b"x"), RemoteRegion::new(0, 64, 0xbad))
            .unwrap();
        let good = healthy.send(filled(&healthy, b"fine")).unwrap();
        assert_eq!(error(bad).outcome, Outcome::Failed);
        good.wait().unwrap();
        assert_eq!(&servers[1].recv().unwrap().buf[..], b"fine");
        assert!(healthy.closed().is_none());
        assert!(broken.closed().is_some());
    });
}

#[test]
fn completions_that_match_nothing_are_counted_and_harmless() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    fabric.hold_completions();
    let operations: Vec<_> = (0..4u8)
        .map(|i| client.send(filled(&client, &[i])).unwrap())
        .collect();
    let cq = fabric
        .qps()
        .iter()
        .find(|qp| qp.qp_num == client.qp_num())
        .unwrap()
        .send_cq;
    fabric.release_completions();
    let first = fabric.completions(cq)[0];
    fabric.duplicate_completions(cq);
    fabric.reverse_completions(cq);
    for foreign in [
        Completion { wr_id: 0, ..first },
        Completion {
            wr_id: u64::MAX,
            ..first
        },
        Completion {
            wr_id: first.wr_id ^ 1 << 40,
            ..first
        },
        Completion {
            qp_num: first.qp_num + 1,
            ..first
        },
    ] {
        fabric.inject_completion(cq, foreign);
    }
    for (i, operation) in operations.into_iter().enumerate() {
        assert_eq!(operation.wait().unwrap().buf.unwrap()[..], [i as u8]);
        assert_eq!(server.recv().unwrap().buf[..], [i as u8]);
    }
    client.worker().poll();
    assert_eq!(client.worker().stats().stale, 8);
    client.send_slice(b"fine").unwrap().wait().unwrap();
}

#[test]
fn a_refused_post_gives_the_buffer_back_and_changes_nothing() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    fabric.fail_nth("ibv_post_send", 0, ENOMEM);
    let refused = client.send(filled(&client, b"again")).unwrap_err();
    assert!(
        matches!(&refused.kind, PostErrorKind::Verbs(e) if e.is_queue_full()),
        "{refused}"
    );
    client.send(refused.buf).unwrap().wait().unwrap();
    assert_eq!(&server.recv().unwrap().buf[..], b"again");
    assert_eq!(client.stats().ops.of(OpKind::Send).posted, 1);
}

#[test]
fn of_a_batch_that_is_refused_half_way_exactly_the_rest_comes_back() {
    for signal_every in [1, 100] {
        let fabric = Fabric::new();
        let (client, server) = pair_with(
            &EndpointConfig {
                signal_every,
                ..small()
            },
            &small(),
        );
        let mut batch = client.batch();
        (0..5u8).for_each(|i| batch.send(filled(&client, &[i])).unwrap());
        fabric.refuse_post_at("ibv_post_send", 3, ENOMEM);

        let posted = batch.post();

        assert_eq!(posted.operations.len(), 3);
        let rest: Vec<u8> = posted
            .unposted
            .iter()
            .map(|un| un.buf.as_ref().unwrap()[0])
            .collect();
        assert_eq!(rest, [3, 4]);
        assert!(matches!(posted.error, Some(PostErrorKind::Verbs(_))));
        // None of those that were posted is signaled, if signals are rare: they end all the same.
        for (i, operation) in posted.operations.into_iter().enumerate() {
            assert_eq!(operation.wait().unwrap().buf.unwrap()[..], [i as u8]);
            assert_eq!(server.recv().unwrap().buf[..], [i as u8]);
        }
        assert_eq!(client.send_capacity(), 8);
    }
}

#[test]
fn signals_are_as_rare_as_asked_for() {
    let fabric = Fabric::new();
    let config = EndpointConfig {
        signal_every: 4,
        send_depth: 32,
        ..small()
    };
    let (client, server) = pair_with(
        &config,
        &EndpointConfig {
            recv_depth: 32,
            ..small()
        },
    );
    let mut batch = client.batch();
    (0..10u8).for_each(|i| batch.send(filled(&client, &[i])).unwrap());
    let cq = fabric
        .qps()
        .iter()
        .find(|qp| qp.qp_num == client.qp_num())
        .unwrap()
        .send_cq;
    let operations = batch.post().accepted().unwrap();
    // The 4th, the 8th and the last.
    assert_eq!(fabric.completions(cq).len(), 3);
    operations
        .into_iter()
        .for_each(|operation| drop(operation.wait().unwrap()));
    (0..10u8).for_each(|i| assert_eq!(server.recv().unwrap().buf[..], [i]));
}

#[test]
fn a_full_send_queue_of_unsignaled_work_never_overfills_the_device() {
    let fabric = Fabric::new(); // a slot is free when its completion was polled, as on hardware
    let config = EndpointConfig {
        signal_every: 1000,
        ..small()
    };
    let (client, server) = pair_with(&config, &small());
    let region = server.expose(64, Access::REMOTE_WRITE).unwrap();
    let remote = region.descriptor();
    for _ in 0..50 {
        let mut batch = client.batch();
        (0..8).for_each(|_| batch.write(filled(&client, b"x"), remote).unwrap());
        let operations = batch.post().accepted().unwrap();
        operations
            .into_iter()
            .for_each(|operation| drop(operation.wait().unwrap()));
    }
    assert_eq!(client.stats().ops.of(OpKind::Write).succeeded, 400);
    assert!(fabric.failed_calls().is_empty());
}

#[test]
fn the_completion_queue_cannot_overrun() {
    let fabric = Fabric::new();
    let (client, _server) = pair_with(&manual(), &small());
    fabric.set_delivery(Delivery::Manual);
    let sends: Vec<_> = (0..8).map(|_| client.send_slice(b"x").unwrap()).collect();
    let recvs: Vec<_> = (0..8)
        .map(|_| client.post_recv(client.alloc(0).unwrap()).unwrap())
        .collect();
    let refused = client.post_recv(client.alloc(0).unwrap()).unwrap_err();
    assert!(matches!(
        refused.kind,
        PostErrorKind::QueueFull {
            queue: Queue::Receive,
            depth: 8
        }
    ));
    fabric.break_qp(client.qp_num());
    assert!(fabric.cqs().iter().all(|cq| !cq.overrun));
    sends
        .into_iter()
        .chain(recvs)
        .for_each(|operation| drop(error(operation)));
}

#[test]
fn a_worker_takes_no_more_endpoints_than_its_queue_can_serve() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let config = WorkerConfig {
        max_in_flight: 20,
        ..WorkerConfig::default()
    };
    let worker = Worker::for_addr(any_port(1), &config).unwrap();
    let first = Endpoint::connect_with(&worker, listener.local_addr(), &small()).unwrap();
    let second = Endpoint::connect_with(&worker, listener.local_addr(), &small());
    assert!(
        matches!(second, Err(OpenError::WorkerFull { asked: 17, free: 3 })),
        "{second:?}"
    );
    drop(first);
    drop(Endpoint::connect_with(&worker, listener.local_addr(), &small()).unwrap());
}

#[test]
fn a_lost_confirmation_is_made_good_by_the_first_message() {
    let fabric = Fabric::new();
    fabric.drop_cm_events(ESTABLISHED, 1);
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let (_client, server) = thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept().unwrap().accept().unwrap());
        let client = Endpoint::connect(listener.local_addr(), &small()).unwrap();
        client.send_slice(b"here I am").unwrap().wait().unwrap();
        let server = accepting.join().unwrap();
        assert_eq!(&server.recv().unwrap().buf[..], b"here I am");
        server.send_slice(b"I see").unwrap().wait().unwrap();
        assert_eq!(&client.recv().unwrap().buf[..], b"I see");
        (client, server)
    });
    let end = Instant::now() + LIMIT;
    while fabric.count_of("rdma_notify") == 0 {
        assert!(
            Instant::now() < end,
            "the connection manager was never told"
        );
        let soon = Instant::now() + Duration::from_millis(20);
        assert!(server.recv_deadline(soon).unwrap().is_none());
    }
    drop(server);
}

#[test]
fn the_connection_manager_is_not_told_what_it_knows() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    client.send_slice(b"here I am").unwrap().wait().unwrap();
    drop(server.recv().unwrap());
    // Longer than it would wait for a lost confirmation.
    let later = Instant::now() + Duration::from_millis(300);
    assert!(server.recv_deadline(later).unwrap().is_none());
    assert_eq!(fabric.count_of("rdma_notify"), 0);
}

#[test]
fn a_peer_that_takes_nothing_ends_the_endpoint_in_bounded_time() {
    let _fabric = Fabric::new();
    let patient = EndpointConfig {
        stall_timeout: Some(Duration::from_millis(20)),
        ..small()
    };
    let (client, server) = pair_with(&patient, &manual());
    let idle = Instant::now() + Duration::from_millis(60);
    assert!(client.recv_deadline(idle).unwrap().is_none());
    assert!(client.is_open(), "idle is not stalled");

    let refused = error(client.send(filled(&client, b"nobody listens")).unwrap());

    assert_eq!(*refused.cause, Cause::Stalled);
    assert_eq!(refused.outcome, Outcome::Unknown);
    assert_eq!(&refused.buf.unwrap()[..], b"nobody listens");
    drop(server);
}

#[test]
fn connecting_ends_by_the_deadline_or_with_the_reason() {
    let fabric = Fabric::new();
    let quick = EndpointConfig {
        connect_deadline: Duration::from_millis(50),
        ..small()
    };
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let addr = listener.local_addr();

    fabric.silence_port(addr.port());
    let worker = Worker::for_addr(any_port(1), &WorkerConfig::default()).unwrap();
    for error in [
        Endpoint::connect(addr, &quick).unwrap_err(),
        Endpoint::connect_with(&worker, addr, &quick)
            .unwrap()
            .wait()
            .unwrap_err(),
    ] {
        assert!(
            matches!(&error, OpenError::Cm(error) if error.is_timed_out()),
            "{error}"
        );
    }

    let nobody = "10.9.0.2:9".parse().unwrap();
    let refused = Endpoint::connect(nobody, &small()).unwrap_err();
    assert!(
        matches!(refused, OpenError::Cm(CmError::Refused { .. })),
        "{refused}"
    );
    let refused = Endpoint::connect_with(&worker, nobody, &small())
        .unwrap()
        .wait()
        .unwrap_err();
    assert!(
        matches!(refused, OpenError::Cm(CmError::Refused { .. })),
        "{refused}"
    );
    let wrong = Endpoint::connect("127.0.0.1:9".parse().unwrap(), &small()).unwrap_err();
    assert!(
        matches!(
            wrong,
            OpenError::Cm(CmError::NoDevice { known: Some(_), .. })
        ),
        "{wrong}"
    );
    assert_eq!(worker.open_operations(), 0);
}

#[test]
fn an_address_without_a_device_holds_up_nobody_else_on_the_worker() {
    let fabric = Fabric::new();
    let worker = Worker::for_addr(any_port(1), &WorkerConfig::default()).unwrap();
    let nowhere = "127.0.0.1:9".parse().unwrap();
    let opening = Endpoint::connect_with(&worker, nowhere, &small()).unwrap();
    let made = fabric.count_of("rdma_create_id");
    worker.prepare_wait();
    worker.prepare_wait();
    assert_eq!(fabric.count_of("rdma_create_id"), made);
    // Who waits for it is told the addresses that would do.
    let wrong = opening.wait().unwrap_err();
    assert!(
        matches!(
            wrong,
            OpenError::Cm(CmError::NoDevice { known: Some(_), .. })
        ),
        "{wrong}"
    );
}

/// Both ways in which a deadline can be seen to have passed: by a poll, and by nobody.
fn wait_until_past(worker: &Worker, deadline: Instant, by_polling: bool) {
    thread::sleep(deadline.saturating_duration_since(Instant::now()));
    if by_polling {
        worker.poll();
        worker.prepare_wait();
        worker.poll();
    }
}

#[test]
fn what_was_prepared_for_too_long_is_not_opened() {
    let mut time = Duration::from_millis(20);
    for (receive, by_polling) in [
        (manual(), true),
        (manual(), false),
        (small(), true),
        (small(), false),
    ] {
        let fabric = Fabric::new();
        let mut config = receive;
        let is_manual = config.receive == manual().receive;
        let listener = Listener::bind(any_port(2), &small()).unwrap();
        let workers =
            [1, 2].map(|n| Worker::for_addr(any_port(n), &WorkerConfig::default()).unwrap());
        let full = workers[0].available();

        let prepared = loop {
            config.connect_deadline = time;
            match Endpoint::prepare(&workers[0], listener.local_addr(), &config) {
                Err(OpenError::Cm(error)) if error.is_timed_out() => time *= 2, // a busy machine
                prepared => break prepared.unwrap(),
            }
        };
        let recv = is_manual.then(|| prepared.post_recv(workers[0].alloc(0).unwrap()).unwrap());
        wait_until_past(&workers[0], Instant::now() + time, by_polling);
        let posted = fabric.count_of("ibv_post_recv");
        let refused = prepared.open().unwrap_err();
        assert!(
            matches!(&refused, OpenError::Cm(error) if error.is_timed_out()),
            "{refused}"
        );
        assert_eq!(fabric.count_of("ibv_post_recv"), posted);
        assert_eq!(fabric.count_of("rdma_connect"), 0);
        if let Some(recv) = recv {
            let error = error(recv);
            assert_eq!(error.outcome, Outcome::NotSent);
            assert_eq!(*error.cause, Cause::NotEstablished);
        }
        assert_eq!(workers[0].available(), full);
        assert!(listener.try_accept().unwrap().is_none());

        let patient = Endpoint::connect_with(&workers[0], listener.local_addr(), &small()).unwrap();
        let mut incoming = loop {
            workers[0].poll();
            workers[0].prepare_wait();
            if let Some(incoming) = listener.try_accept().unwrap() {
                break incoming;
            }
        };
        *incoming.config_mut() = config;
        let prepared = incoming.prepare(&workers[1]).unwrap();
        wait_until_past(&workers[1], Instant::now() + time, by_polling);
        let refused = prepared.open().unwrap_err();
        assert!(
            matches!(&refused, OpenError::Cm(error) if error.is_timed_out()),
            "{refused}"
        );
        assert_eq!(fabric.count_of("rdma_accept"), 0);
        let rejected = patient.wait().unwrap_err();
        assert!(
            matches!(&rejected, OpenError::Cm(CmError::Rejected { .. })),
            "{rejected}"
        );
    }
}

#[test]
fn receives_that_are_posted_before_the_connection_get_the_first_messages() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &manual()).unwrap();
    let workers = [1, 2].map(|n| Worker::for_addr(any_port(n), &WorkerConfig::default()).unwrap());
    let client = Endpoint::prepare(&workers[0], listener.local_addr(), &manual()).unwrap();
    let client_recv = client.post_recv(workers[0].alloc(0).unwrap()).unwrap();
    let client = client.open().unwrap();
    let server = listener.accept().unwrap().prepare(&workers[1]).unwrap();
    let server_recv = server.post_recv(workers[1].alloc(0).unwrap()).unwrap();
    let server = server.open().unwrap();
    let (client, server) = (client.wait().unwrap(), server.wait().unwrap());
    client.send_slice(b"to server").unwrap().wait().unwrap();
    server.send_slice(b"to client").unwrap().wait().unwrap();
    let content = |recv: Operation| recv.wait().unwrap().buf.unwrap();
    assert_eq!(&content(server_recv)[..], b"to server");
    assert_eq!(&content(client_recv)[..], b"to client");
}

#[test]
fn a_rejection_carries_the_words_of_the_peer() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| listener.accept().unwrap().reject(b"full").unwrap());
        let error = Endpoint::connect(listener.local_addr(), &small()).unwrap_err();
        let OpenError::Cm(CmError::Rejected { private_data, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(&private_data[..4], b"full");
    });
}

#[test]
fn an_endpoint_of_another_device_is_refused() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let other = Worker::for_addr(any_port(2), &WorkerConfig::default()).unwrap();
    let opening = Endpoint::connect_with(&other, listener.local_addr(), &small()).unwrap();
    let error = opening.wait().unwrap_err();
    assert!(matches!(error, OpenError::OtherDevice { .. }), "{error}");
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        std::panic::panic_any(PanicsWhenDropped);
    }
}

struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("what a waker panicked with");
    }
}

#[test]
fn a_waker_that_panics_costs_nobody_a_completion() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    fabric.set_delivery(Delivery::Manual);
    let mut operations: Vec<_> = (0..4).map(|_| client.send_slice(b"x").unwrap()).collect();
    let waker = Waker::from(Arc::new(Panics));
    for operation in &mut operations {
        let polled = std::pin::pin!(operation).poll(&mut Context::from_waker(&waker));
        assert!(matches!(polled, Poll::Pending));
    }
    fabric.set_delivery(Delivery::Auto);
    fabric.deliver();
    assert_eq!(client.worker().poll(), 4);
    operations
        .into_iter()
        .for_each(|operation| drop(operation.wait().unwrap()));
    (0..4).for_each(|_| drop(server.recv().unwrap()));
}

#[test]
fn receives_wait_for_the_pool_and_come_back_with_it() {
    let _fabric = Fabric::new();
    let dry = EndpointConfig {
        extra_bufs: Some(0),
        ..small()
    };
    let (client, server) = pair_with(&small(), &dry);
    let kept: Vec<_> = (0..8)
        .map(|_| {
            client.send_slice(&[1; 200]).unwrap().wait().unwrap();
            server.recv().unwrap().freeze()
        })
        .collect();
    assert_eq!(server.stats().receives_delayed, 8);
    drop(kept);
    thread::scope(|scope| {
        let receiving = scope.spawn(|| server.recv_deadline(Instant::now() + LIMIT));
        // Until the receives are posted again the peer is refused.
        client.send_slice(b"again").unwrap().wait().unwrap();
        assert_eq!(
            &receiving.join().unwrap().unwrap().unwrap().buf[..],
            b"again"
        );
    });
}

#[test]
fn a_busy_endpoint_leaves_the_receives_of_a_quiet_one_alone() {
    for handled_in_between in [true, false] {
        let _fabric = Fabric::new();
        let config = WorkerConfig {
            buf_size: 256,
            buf_count: 16, // just the receives of two
            ..WorkerConfig::default()
        };
        let worker = Worker::for_addr(any_port(1), &config).unwrap();
        let (quiet, quiet_peer) = connect_on(&worker, &small());
        let (busy, busy_peer) = connect_on(&worker, &small());
        let message = |from: &Endpoint, to: &Endpoint| {
            from.send_slice(b"take this").unwrap().wait().unwrap();
            to.recv().unwrap().buf
        };
        let kept: Vec<_> = (0..8).map(|_| message(&quiet_peer, &quiet)).collect();
        worker.prepare_wait(); // from here on each one handles what there is

        for _ in 0..6 {
            drop(message(&busy_peer, &busy));
            if handled_in_between {
                worker.prepare_wait();
            }
        }

        quiet_peer.send_slice(b"and I?").unwrap().wait().unwrap();
        let soon = Instant::now() + LIMIT;
        let received = quiet.recv_deadline(soon).unwrap().unwrap();
        assert_eq!(&received.buf[..], b"and I?");
        assert!(busy.is_open());
        drop(kept);
    }
}

#[test]
fn an_idle_peer_that_vanished_is_noticed_by_the_keepalive() {
    let fabric = Fabric::with(Config {
        silent_peer: fake_verbs::SilentPeer::Fail,
        ..Config::default()
    });
    let keepalive = Some(Duration::from_millis(5));
    let (client, server) = pair_with(
        &EndpointConfig {
            keepalive,
            ..small()
        },
        &small(),
    );
    let until = Instant::now() + LIMIT;
    while client.stats().ops.of(OpKind::Probe).succeeded == 0 {
        assert!(Instant::now() < until, "no probe was sent");
        let soon = Instant::now() + Duration::from_millis(30);
        assert!(client.recv_deadline(soon).unwrap().is_none());
    }

    fabric.power_off(1);

    let RecvError::Closed(cause) = client.recv().unwrap_err() else {
        panic!()
    };
    assert!(
        matches!(&*cause, Cause::Operation(failure) if failure.op == OpKind::Probe),
        "{cause}"
    );
    drop((client, server));
    fabric.abandon();
}

#[test]
fn an_error_says_what_failed_and_where() {
    let fabric = Fabric::new();
    let (client, _server) = pair_with(&manual(), &small());
    let recv = client.post_recv(client.alloc(0).unwrap()).unwrap();
    let bad = client
        .write(filled(&client, b"x"), RemoteRegion::new(0, 64, 0xbad))
        .unwrap();
    fabric.deliver();
    let text = error(recv).to_string();
    for part in [
        "receive",
        "write",
        "remote access",
        "10.9.0.1",
        "10.9.0.2",
        "queue pair",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    assert!(!text.contains("opcode"));
    drop(error(bad));
}
