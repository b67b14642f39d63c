//! The same endpoints, awaited in a tokio runtime of either kind.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod common;

use std::future::Future;
use std::time::Duration;

use common::{LIMIT, any_port, filled, manual, small};
use fake_verbs::{Delivery, Fabric};
use rdma_msg::tokio::{accept, connect, establish};
use rdma_msg::{
    Access, Cause, CloseError, Endpoint, EndpointConfig, Listener, OpenError, RecvError,
};

/// Runs the story in both kinds of runtime, each ended by a limit.
fn in_both_runtimes<F: Future<Output = ()>>(story: impl Fn() -> F) {
    let current = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let multi = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    for runtime in [current.unwrap(), multi.unwrap()] {
        let fabric = Fabric::new();
        runtime.block_on(async {
            tokio::time::timeout(LIMIT, story())
                .await
                .expect("it hangs")
        });
        // The drivers end with their workers, and hold nothing of them.
        drop(runtime);
        drop(fabric);
    }
}

async fn pair_with(config: &EndpointConfig) -> (Endpoint, Endpoint) {
    let listener = Listener::bind(any_port(2), config).unwrap();
    let (client, server) = tokio::join!(connect(listener.local_addr(), config), async {
        establish(accept(&listener).await?).await
    });
    (client.unwrap(), server.unwrap())
}

#[test]
fn a_poll_by_somebody_else_does_not_make_the_driver_oversleep() {
    in_both_runtimes(|| async {
        let config = EndpointConfig {
            stall_timeout: None,
            ..manual()
        };
        let (client, server) = pair_with(&config).await;
        // No receive is there for it, so it stays.
        let stuck = client.send(filled(&client, b"stuck")).unwrap();
        // Here the driver has found no timer, and sleeps without an end.
        tokio::time::sleep(Duration::from_millis(20)).await;
        client.worker().poll();
        let closed = client.close_async(Duration::from_millis(20)).await;
        assert!(matches!(
            closed,
            Err(CloseError::TimedOut { unfinished: 1 })
        ));
        stuck.await.unwrap_err();
        drop(server);
    });
}

#[test]
fn messages_go_to_and_fro() {
    in_both_runtimes(|| async {
        let (client, server) = pair_with(&small()).await;
        let echo = tokio::spawn(async move {
            while let Ok(received) = server.recv_async().await {
                server.send(received.buf).unwrap().await.unwrap();
            }
            server.closed_async().await
        });
        for round in 0..200u32 {
            client
                .send(filled(&client, &round.to_ne_bytes()))
                .unwrap()
                .await
                .unwrap();
            assert_eq!(
                client.recv_async().await.unwrap().buf[..],
                round.to_ne_bytes()
            );
        }
        client.close_async(LIMIT).await.unwrap();
        assert_eq!(*echo.await.unwrap(), Cause::Disconnected);
    });
}

#[test]
fn memory_operations_are_awaited_like_messages() {
    in_both_runtimes(|| async {
        let (client, server) = pair_with(&small()).await;
        let region = server
            .expose(64, Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            .unwrap();
        let remote = region.descriptor();
        client
            .write(filled(&client, b"word"), remote)
            .unwrap()
            .await
            .unwrap();
        let word = remote.slice(8..16).unwrap();
        let (one, two) = (
            client.fetch_add(word, 1).unwrap(),
            client.fetch_add(word, 1).unwrap(),
        );
        let (one, two) = tokio::join!(one, two);
        assert_eq!((one.unwrap().value, two.unwrap().value), (Some(0), Some(1)));
    });
}

#[test]
fn a_dropped_future_loses_neither_message_nor_operation() {
    in_both_runtimes(|| async {
        let (client, server) = pair_with(&small()).await;
        for round in 0..20u8 {
            let soon = Duration::from_micros(u64::from(round) * 50);
            let nothing = tokio::time::timeout(soon, server.recv_async()).await;
            assert!(nothing.is_err());
            let mut operation = client.send(filled(&client, &[round])).unwrap();
            tokio::select! {
                biased;
                () = std::future::ready(()) => {}
                _ = &mut operation => unreachable!(),
            }
            assert_eq!(server.recv_async().await.unwrap().buf[..], [round]);
            operation.await.unwrap();
        }
        assert_eq!(client.worker().open_operations(), 8, "the receives");
    });
}

#[test]
fn room_in_the_queue_can_be_awaited() {
    in_both_runtimes(|| async {
        let (client, server) = pair_with(&small()).await;
        let receiving = tokio::spawn(async move {
            for round in 0..500u32 {
                assert_eq!(
                    server.recv_async().await.unwrap().buf[..],
                    round.to_ne_bytes()
                );
            }
        });
        for round in 0..500u32 {
            client.capacity_async(1).await.unwrap();
            drop(client.send_slice(&round.to_ne_bytes()).unwrap());
        }
        receiving.await.unwrap();
    });
}

#[test]
fn a_failed_attempt_ends_as_an_error() {
    in_both_runtimes(|| async {
        let nobody = "10.9.0.2:9".parse().unwrap();
        let refused = connect(nobody, &small()).await.unwrap_err();
        assert!(
            matches!(refused, OpenError::Cm(rdma_msg::CmError::Refused { .. })),
            "{refused}"
        );
        let quick = EndpointConfig {
            connect_deadline: Duration::from_millis(20),
            ..small()
        };
        let silent = connect("10.9.0.77:9".parse().unwrap(), &quick)
            .await
            .unwrap_err();
        assert!(
            matches!(&silent, OpenError::Cm(error) if error.is_timed_out()),
            "{silent}"
        );
    });
}

#[test]
fn an_attempt_can_be_given_up() {
    in_both_runtimes(|| async {
        let listener = Listener::bind(any_port(2), &small()).unwrap();
        let config = small();
        let attempt = connect("10.9.0.77:9".parse().unwrap(), &config);
        assert!(
            tokio::time::timeout(Duration::from_millis(5), attempt)
                .await
                .is_err()
        );
        assert!(
            tokio::time::timeout(Duration::from_millis(5), accept(&listener))
                .await
                .is_err()
        );
    });
}

#[test]
fn threads_and_tasks_wait_on_one_worker() {
    let _fabric = Fabric::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime.unwrap();
    let (client, server) = runtime.block_on(pair_with(&small()));
    let (client, server) = (std::sync::Arc::new(client), server);
    let awaiting = runtime.spawn({
        let client = std::sync::Arc::clone(&client);
        async move {
            for _ in 0..200 {
                client.send_slice(b"from a task").unwrap().await.unwrap();
            }
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                client.send_slice(b"from a thread").unwrap().wait().unwrap();
            }
        });
        scope.spawn(|| (0..400).for_each(|_| drop(server.recv().unwrap())));
        runtime.block_on(awaiting).unwrap();
    });
    drop(client);
    assert!(matches!(server.recv(), Err(RecvError::Closed(_))));
}

#[test]
fn a_slow_wire_wakes_the_task() {
    let fabric = Fabric::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (client, server) = pair_with(&small()).await;
        fabric.set_delivery(Delivery::Manual);
        let sent = client.send_slice(b"late").unwrap();
        let received =
            tokio::spawn(async move { server.recv_async().await.map(|got| got.freeze()) });
        tokio::time::sleep(Duration::from_millis(5)).await;
        fabric.set_delivery(Delivery::Auto);
        fabric.deliver();
        tokio::time::timeout(LIMIT, sent).await.unwrap().unwrap();
        assert_eq!(&received.await.unwrap().unwrap()[..], b"late");
    });
}

#[test]
fn an_event_of_the_device_wakes_the_driver() {
    const QP_FATAL: u32 = 1;
    let fabric = Fabric::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (client, _server) = pair_with(&manual()).await;
        let receive = client.post_recv(client.alloc(0).unwrap()).unwrap();
        let receive = tokio::spawn(receive);
        tokio::time::sleep(Duration::from_millis(5)).await; // the driver sleeps by then
        fabric.inject_qp_event(client.qp_num(), QP_FATAL);
        let ended = tokio::time::timeout(LIMIT, receive).await.unwrap();
        let error = ended.unwrap().unwrap_err();
        assert_eq!(*error.cause, Cause::QueuePairError);
    });
}
