//! Every operation, between two endpoints that are well.

mod common;

use std::time::Instant;

use common::{LIMIT, filled, manual, pair, pair_with, small};
use fake_verbs::Fabric;
use rdma_msg::{
    Access, Bytes, Cause, EndpointConfig, OpKind, OpOptions, PostErrorKind, Queue, RecvError, Wait,
    WaitError,
};

#[test]
fn a_message_arrives_and_its_buffer_comes_back() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let operation = client.send(filled(&client, b"hello")).unwrap();
    let received = server.recv().unwrap();
    let completion = operation.wait().unwrap();

    assert_eq!(&received.buf[..], b"hello");
    assert_eq!((received.imm, received.written), (None, None));
    assert_eq!((completion.op, completion.byte_len), (OpKind::Send, 5));
    assert_eq!(&completion.buf.unwrap()[..], b"hello");
}

#[test]
fn messages_keep_their_order_and_the_receives_are_posted_again() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    for round in 0..100u32 {
        let operation = client
            .send_imm(filled(&client, &round.to_ne_bytes()), round)
            .unwrap();
        let received = server.recv().unwrap();
        assert_eq!(received.buf[..], round.to_ne_bytes());
        assert_eq!(received.imm, Some(round));
        assert_eq!(operation.wait().unwrap().imm, None); // of a receive only
    }
}

#[test]
fn a_slice_is_sent_inline_or_copied() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    for len in [0, 1, client.max_inline(), client.max_inline() + 1, 256] {
        let len = len.min(256);
        let operation = client.send_slice(&vec![7; len]).unwrap();
        assert_eq!(server.recv().unwrap().buf[..], vec![7; len]);
        assert_eq!(operation.wait().unwrap().byte_len, len);
    }
}

#[test]
fn foreign_bytes_are_copied_or_registered_where_they_are() {
    let _fabric = Fabric::new();
    let large = EndpointConfig {
        max_message: 100_000,
        ..small()
    };
    let (client, server) = pair_with(&small(), &large);
    for len in [10, 256, 257, 100_000] {
        let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let operation = client.send_vec(bytes.clone()).unwrap();
        assert_eq!(server.recv().unwrap().buf[..], bytes);
        assert_eq!(operation.wait().unwrap().buf.unwrap()[..], bytes);
        let operation = client.send_bytes(Bytes::from(bytes.clone())).unwrap();
        assert_eq!(server.recv().unwrap().freeze()[..], bytes);
        operation.wait().unwrap();
    }
}

#[test]
fn several_buffers_are_sent_as_one_message() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let bufs = vec![
        filled(&client, b"one "),
        filled(&client, b""),
        filled(&client, b"message"),
    ];
    let completion = client.send_gather(bufs).unwrap();
    assert_eq!(&server.recv().unwrap().buf[..], b"one message");
    let completion = completion.wait().unwrap();
    assert_eq!(&completion.buf.unwrap()[..], b"one ");
    assert_eq!(&completion.more[1][..], b"message");
}

#[test]
fn frozen_messages_give_their_slot_back_with_the_last_clone() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let full = server.worker().available();
    client.send_slice(b"keep me").unwrap().wait().unwrap();
    let bytes = server.recv().unwrap().freeze();
    let part = bytes.slice(5..);
    drop(bytes);
    assert_eq!(server.worker().available(), full - 1);
    assert_eq!(&part[..], b"me");
    drop(part);
    assert_eq!(server.worker().available(), full);
}

#[test]
fn memory_is_written_read_and_changed_atomically() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = server.expose(4096, access).unwrap();
    let remote = region.descriptor();

    let target = remote.slice(100..104).unwrap();
    client
        .write(filled(&client, b"abcd"), target)
        .unwrap()
        .wait()
        .unwrap();
    let mut bytes = [0; 4];
    region.read_at(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"abcd");

    let completion = client
        .read(client.alloc(0).unwrap(), target)
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(&completion.buf.unwrap()[..], b"abcd");

    let word = remote.slice(8..16).unwrap();
    region.store_u64(8, 40).unwrap();
    assert_eq!(
        client.fetch_add(word, 2).unwrap().wait().unwrap().value,
        Some(40)
    );
    assert_eq!(
        client
            .compare_swap(word, 42, 7)
            .unwrap()
            .wait()
            .unwrap()
            .value,
        Some(42)
    );
    assert_eq!(
        client
            .compare_swap(word, 42, 9)
            .unwrap()
            .wait()
            .unwrap()
            .value,
        Some(7)
    );
    assert_eq!(region.load_u64(8).unwrap(), 7);
}

#[test]
fn a_write_with_immediate_tells_the_peer() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let region = server.expose(64, Access::REMOTE_WRITE).unwrap();
    let operation = client
        .write_imm(filled(&client, b"data"), region.descriptor(), 9)
        .unwrap();
    let received = server.recv().unwrap();
    assert_eq!((received.imm, received.written), (Some(9), Some(4)));
    assert!(received.buf.is_empty());
    operation.wait().unwrap();
}

#[test]
fn options_reach_the_operation() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let options = OpOptions {
        fence: true,
        solicited: true,
        inline: true,
    };
    let operation = client
        .with(options)
        .send(filled(&client, b"inline"))
        .unwrap();
    assert_eq!(&server.recv().unwrap().buf[..], b"inline");
    operation.wait().unwrap();
}

#[test]
fn receives_of_the_program_end_as_operations() {
    let _fabric = Fabric::new();
    let (client, server) = pair_with(&small(), &manual());
    let operation = server.post_recv(server.alloc(0).unwrap()).unwrap();
    client
        .send_slice(b"to that buffer")
        .unwrap()
        .wait()
        .unwrap();
    let completion = operation.wait().unwrap();
    assert_eq!(completion.op, OpKind::Receive);
    assert_eq!(&completion.buf.unwrap()[..], b"to that buffer");
    assert!(matches!(server.try_recv(), Err(RecvError::Manual)));

    let refused = client.post_recv(client.alloc(0).unwrap()).unwrap_err();
    assert!(
        matches!(refused.kind, PostErrorKind::WrongMode { .. }),
        "{refused}"
    );
}

#[test]
fn a_full_queue_is_told_and_can_be_waited_for() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let operations: Vec<_> = (0..8).map(|_| client.send_slice(b"x").unwrap()).collect();
    let refused = client.send(filled(&client, b"one too many")).unwrap_err();
    assert!(refused.is_full());
    assert!(matches!(
        refused.kind,
        PostErrorKind::QueueFull {
            queue: Queue::Send,
            depth: 8
        }
    ));
    assert_eq!(&refused.buf[..], b"one too many");
    assert!(
        client
            .wait_capacity(8, Some(Instant::now() + LIMIT))
            .unwrap()
    );
    assert_eq!(client.send_capacity(), 8);
    operations
        .into_iter()
        .for_each(|operation| drop(operation.wait().unwrap()));
    (0..8).for_each(|_| drop(server.recv().unwrap()));
    assert_eq!(client.stats().ops.queue_full, 1);
}

#[test]
fn a_dropped_operation_takes_place_all_the_same() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let full = client.worker().available();
    for _ in 0..50 {
        drop(client.send(filled(&client, &[1; 200])).unwrap());
        assert_eq!(server.recv().unwrap().buf[..], [1; 200]);
        client.worker().poll();
    }
    assert_eq!(client.worker().available(), full);
    assert_eq!(client.stats().ops.of(OpKind::Send).succeeded, 50);
}

#[test]
fn a_wait_that_times_out_leaves_the_operation_as_it_is() {
    let _fabric = Fabric::new();
    let (client, server) = pair_with(&small(), &manual());
    let mut operation = server.post_recv(server.alloc(0).unwrap()).unwrap();
    let waited = operation.wait_deadline(Instant::now());
    assert!(matches!(waited, Err(WaitError::TimedOut)));
    assert!(operation.try_result().is_none());
    client.send_slice(b"late").unwrap().wait().unwrap();
    let completion = operation.wait_deadline(Instant::now() + LIMIT).unwrap();
    assert_eq!(&completion.buf.unwrap()[..], b"late");
    assert!(operation.is_taken());
}

#[test]
fn all_ways_to_wait_find_the_message() {
    let _fabric = Fabric::new();
    for wait in [Wait::Spin, Wait::Event, Wait::default()] {
        let config = EndpointConfig { wait, ..small() };
        let (client, server) = pair_with(&config, &config);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..50 {
                    let received = server.recv().unwrap();
                    server.send(received.buf).unwrap().wait().unwrap();
                }
            });
            for round in 0..50u64 {
                drop(client.send_slice(&round.to_ne_bytes()).unwrap());
                assert_eq!(client.recv().unwrap().buf[..], round.to_ne_bytes());
            }
        });
    }
}

#[test]
fn a_batch_is_posted_with_one_doorbell() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    let region = server
        .expose(64, Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
        .unwrap();
    let remote = region.descriptor();
    let mut batch = client.batch();
    batch.write(filled(&client, b"first"), remote).unwrap();
    batch.fetch_add(remote.slice(8..16).unwrap(), 1).unwrap();
    batch.send(filled(&client, b"then")).unwrap();

    let before = fabric.count_of("ibv_post_send");
    let operations = batch.post().accepted().unwrap();

    assert_eq!(fabric.count_of("ibv_post_send"), before + 1);
    assert_eq!(operations.len(), 3);
    operations
        .into_iter()
        .for_each(|operation| drop(operation.wait().unwrap()));
    assert_eq!(&server.recv().unwrap().buf[..], b"then");
    assert_eq!(region.load_u64(8).unwrap(), 1);
}

#[test]
fn what_did_not_fit_stays_in_the_batch_and_can_be_posted_later() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let mut batch = client.batch();
    (0..10u8).for_each(|i| batch.send(filled(&client, &[i])).unwrap());
    let mut operations = Vec::new();

    let error = batch.post_into(&mut operations).unwrap_err();

    assert!(matches!(error, PostErrorKind::QueueFull { .. }), "{error}");
    assert_eq!((operations.len(), batch.len()), (8, 2));
    // With the first one refused, the device is not called.
    batch.post_into(&mut operations).unwrap_err();
    assert_eq!((operations.len(), batch.len()), (8, 2));
    for operation in operations.drain(..) {
        operation.wait().unwrap();
    }
    // Makes the peer post receives again.
    (0..8u8).for_each(|i| assert_eq!(server.recv().unwrap().buf[0], i));
    batch.post_into(&mut operations).unwrap();
    assert_eq!((operations.len(), batch.len()), (2, 0));
    operations
        .into_iter()
        .for_each(|operation| drop(operation.wait().unwrap()));
    (8..10u8).for_each(|i| assert_eq!(server.recv().unwrap().buf[0], i));
    let stats = client.stats().ops;
    assert_eq!((stats.doorbells, stats.all().succeeded), (2, 10));
}

#[test]
fn a_batch_that_does_not_fit_gives_back_exactly_the_rest() {
    let _fabric = Fabric::new();
    let (client, _server) = pair();
    let mut batch = client.batch();
    (0..10u8).for_each(|i| batch.send(filled(&client, &[i])).unwrap());
    let posted = batch.post();
    assert_eq!(posted.operations.len(), 8);
    let rest: Vec<u8> = posted
        .unposted
        .iter()
        .map(|un| un.buf.as_ref().unwrap()[0])
        .collect();
    assert_eq!(rest, [8, 9]);
    assert!(matches!(
        posted.error,
        Some(PostErrorKind::QueueFull { .. })
    ));
    posted
        .operations
        .into_iter()
        .for_each(|operation| drop(operation.wait().unwrap()));
}

#[test]
fn rules_are_checked_before_the_device_sees_the_operation() {
    let _fabric = Fabric::new();
    let none = EndpointConfig {
        responder_resources: 0,
        ..small()
    };
    let (client, server) = pair_with(
        &EndpointConfig {
            max_message: 512,
            ..small()
        },
        &none,
    );
    let region = server.expose(64, Access::REMOTE_READ).unwrap().descriptor();
    let kind = |error: rdma_msg::PostError<rdma_msg::Buf>| error.kind;
    let buf = |len| filled(&client, &vec![0; len]);

    assert!(matches!(
        kind(client.send(buf(257)).unwrap_err()),
        PostErrorKind::TooLong {
            len: 257,
            limit: 256,
            ..
        }
    ));
    assert!(matches!(
        kind(client.write(buf(65), region).unwrap_err()),
        PostErrorKind::OutOfBounds {
            local: 65,
            remote: 64
        }
    ));
    assert!(matches!(
        kind(
            client
                .read(buf(0), rdma_msg::RemoteRegion::new(0, 513, 1))
                .unwrap_err()
        ),
        PostErrorKind::OutOfBounds {
            local: 512,
            remote: 513
        }
    ));
    assert!(matches!(
        kind(client.read(buf(0), region).unwrap_err()),
        PostErrorKind::DepthZero {
            op: OpKind::Read,
            ..
        }
    ));
    let atomic = |from, to| {
        client
            .fetch_add(region.slice(from..to).unwrap(), 1)
            .unwrap_err()
            .kind
    };
    assert!(matches!(atomic(4, 12), PostErrorKind::Misaligned { .. }));
    assert!(matches!(atomic(0, 16), PostErrorKind::Misaligned { .. }));
    assert!(matches!(
        atomic(0, 8),
        PostErrorKind::DepthZero {
            op: OpKind::FetchAdd,
            ..
        }
    ));
    let inline = OpOptions {
        inline: true,
        ..OpOptions::default()
    };
    let too_long = client
        .with(inline)
        .write(buf(512), region.slice(0..64).unwrap())
        .unwrap_err();
    assert!(
        matches!(too_long.kind, PostErrorKind::TooLong { .. }),
        "{too_long}"
    );
    let many = (0..5).map(|_| buf(1)).collect();
    let refused = client.send_gather(many).unwrap_err();
    assert!(matches!(
        refused.kind,
        PostErrorKind::TooManyBuffers { count: 5, limit: 4 }
    ));
    assert_eq!(refused.buf.len(), 5);
    assert!(matches!(
        client.send_gather(Vec::new()).unwrap_err().kind,
        PostErrorKind::NoBuffer
    ));
    assert!(matches!(
        kind(client.send(filled(&server, b"foreign")).unwrap_err()),
        PostErrorKind::ForeignBuffer
    ));
    client.send_slice(b"usable").unwrap().wait().unwrap();
}

#[test]
fn a_batch_takes_no_buffer_of_another_worker() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let mut batch = client.batch();
    let refused = batch.send(filled(&server, b"foreign")).unwrap_err();
    assert!(matches!(refused.kind, PostErrorKind::ForeignBuffer));
    assert_eq!(&refused.buf[..], b"foreign");
    batch.send(filled(&client, b"own")).unwrap();
    let mut operations = Vec::new();
    batch.post_into(&mut operations).unwrap();
    assert!(batch.is_empty());
    assert_eq!(&server.recv().unwrap().buf[..], b"own");
    for operation in operations {
        operation.wait().unwrap();
    }
}

#[test]
fn a_close_is_orderly_and_tells_both_sides() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    drop(client.send_slice(b"last words").unwrap());

    client.close(LIMIT).unwrap();

    assert_eq!(&server.recv().unwrap().buf[..], b"last words");
    assert!(server.recv().is_err());
    assert_eq!(*server.closed().unwrap(), Cause::Disconnected);
    assert_eq!(*client.closed().unwrap(), Cause::ClosedLocally);
    assert!(matches!(client.recv(), Err(RecvError::Closed(_))));
    client.close(LIMIT).unwrap();
    let refused = client.send(filled(&client, b"too late")).unwrap_err();
    assert!(matches!(refused.kind, PostErrorKind::Closed { .. }));
    assert_eq!(client.worker().open_operations(), 0);
    assert_eq!(server.worker().open_operations(), 0);
}

#[test]
fn both_sides_see_addresses_and_private_data() {
    let _fabric = Fabric::new();
    let config = |text: &str| EndpointConfig {
        private_data: text.into(),
        ..small()
    };
    let (client, server) = pair_with(&config("from the client"), &config("from the server"));
    assert_eq!(client.private_data(), b"from the server");
    assert_eq!(server.private_data(), b"from the client");
    assert_eq!(client.local_addr(), server.peer_addr());
    assert_eq!(client.peer_addr(), server.local_addr());
    assert_eq!(client.max_message(), 256);

    let plain = EndpointConfig {
        handshake: false,
        ..config("plain")
    };
    let (client, server) = pair_with(&plain, &small());
    assert_eq!(&server.private_data()[..5], b"plain");
    assert_eq!(server.max_message(), 8 << 20);
    assert!(client.private_data().iter().all(|&byte| byte == 0));
}
