//! The connection manager against the real one, on soft-RoCE in the lab.
//!
//! The tests cut wires and count objects of the whole host, so they run one at a time
//! (`--test-threads=1`, as `cargo xtask test` does) and restore what they broke.

mod cm_common;

use std::time::{Duration, Instant};

use cm_common::*;
use rdma_cm::{CmError, ConnParam, ConnectionEvent, Connector, RejectReason, Step};

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_connection_comes_up_carries_a_message_each_way_and_ends() {
    let listener = listen();
    let hello = ConnParam {
        private_data: b"hello".to_vec(),
        ..ConnParam::default()
    };
    let welcome = ConnParam {
        private_data: b"welcome".to_vec(),
        ..ConnParam::default()
    };

    let ((mut client, active), (mut server, passive)) =
        pair_by(&listener, connector(&listener), &hello, &welcome);

    assert!(active.is_established());
    assert_eq!(
        passive.wait_event(soon()).unwrap(),
        ConnectionEvent::Established
    );
    assert!(passive.is_established());
    assert!(
        passive.private_data().starts_with(b"hello\0"),
        "{:?}",
        passive.private_data()
    );
    assert!(
        active.private_data().starts_with(b"welcome\0"),
        "{:?}",
        active.private_data()
    );
    assert_eq!((active.device_name(), active.port_num()), ("rxe0", 1));
    assert_eq!((passive.device_name(), passive.port_num()), ("rxe1", 1));
    assert_eq!(active.local_addr(), passive.peer_addr());
    assert_eq!(active.peer_addr(), passive.local_addr());
    assert_eq!(active.negotiated().initiator_depth, 16);

    client.send(b"ping");
    client.expect_sent();
    assert_eq!(server.expect_received(), b"ping");
    server.send(b"pong");
    server.expect_sent();
    assert_eq!(client.expect_received(), b"pong");

    active.disconnect().unwrap();
    assert_eq!(
        passive.wait_event(soon()).unwrap(),
        ConnectionEvent::Disconnected
    );
    passive.disconnect().unwrap();
    assert_eq!(
        active.wait_event(soon()).unwrap(),
        ConnectionEvent::Disconnected
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_port_where_nobody_listens_refuses() {
    let peer = addr(SERVER, 9);
    let (mut end, connecting) = begin(
        Connector::new(peer).deadline(PATIENCE),
        &ConnParam::default(),
    );
    let error = connecting.wait(&mut end.qp).unwrap_err();
    assert!(
        matches!(error, CmError::Refused { peer: p } if p == peer),
        "{error}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_rejection_carries_the_reason_and_the_data() {
    let listener = listen();
    let (mut end, connecting) = begin(connector(&listener), &ConnParam::default());
    listener
        .accept(soon())
        .unwrap()
        .reject(b"not today")
        .unwrap();
    match connecting.wait(&mut end.qp).unwrap_err() {
        CmError::Rejected {
            reason: RejectReason::Consumer,
            private_data,
            ..
        } => {
            assert_eq!(private_data.len(), rdma_cm::MAX_REJECT_DATA);
            assert!(private_data.starts_with(b"not today\0"));
        }
        other => panic!("{other}"),
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_request_that_nobody_answers_ends_at_the_deadline() {
    let listener = listen();
    let start = Instant::now();
    let limit = Duration::from_secs(2);
    let (mut end, connecting) = begin(connector(&listener).deadline(limit), &ConnParam::default());
    let error = connecting.wait(&mut end.qp).unwrap_err();
    assert!(
        matches!(error, CmError::TimedOut { step: Step::Connect, after, .. } if after == limit),
        "{error}"
    );
    assert!(
        start.elapsed() < limit + Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
}
