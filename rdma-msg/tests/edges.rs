//! Settings, queues and lists at their limits.

#![allow(clippy::unwrap_used)] // a failure is the test's

mod common;

use std::sync::{Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;
use std::{future::Future, pin::Pin, sync::Arc};

use common::{LIMIT, any_port, filled, manual, pair, pair_with, small};
use fake_verbs::{Delivery, Fabric};
use rdma_msg::{
    Access, Cause, Endpoint, EndpointConfig, Listener, OpOptions, OpenError, PostErrorKind,
    Readiness, RecvError, Worker, WorkerConfig,
};
use rustix::event::{PollFd, PollFlags, Timespec};

const HANG: Duration = Duration::from_secs(60);
const ENOMEM: i32 = 12;
const EINVAL: i32 = 22;

/// Runs `work` on another thread, and fails if it hangs. Other tests have the fabric before it.
fn within<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    result
        .recv_timeout(HANG)
        .expect("it neither hangs nor panics")
}

#[test]
fn intervals_that_cannot_be_kept_are_refused() {
    within(|| {
        let _fabric = Fabric::new();
        for time in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            let keepalive = EndpointConfig {
                keepalive: Some(time),
                ..small()
            };
            let stall_timeout = EndpointConfig {
                stall_timeout: Some(time),
                ..small()
            };
            for config in [keepalive, stall_timeout] {
                let error = Listener::bind(any_port(2), &config).unwrap_err();
                assert!(matches!(error, OpenError::Config { .. }), "{error}");
            }
        }
    });
}

#[test]
fn a_deadline_beyond_the_clock_is_as_far_as_it_goes() {
    let _fabric = Fabric::new();
    let config = EndpointConfig {
        connect_deadline: Duration::MAX,
        ..small()
    };
    let (client, server) = pair_with(&config, &config);
    client.send_slice(b"hi").unwrap().wait().unwrap();
    assert_eq!(&server.recv().unwrap().buf[..], b"hi");
}

#[test]
fn sizes_beyond_all_memory_are_errors() {
    let _fabric = Fabric::new();
    for (buf_size, buf_count) in [(usize::MAX, 1), (1, usize::MAX), (usize::MAX, usize::MAX)] {
        let config = WorkerConfig {
            buf_size,
            buf_count,
            ..WorkerConfig::default()
        };
        let error = Worker::for_addr(any_port(1), &config).unwrap_err();
        assert!(matches!(error, OpenError::Verbs(_)), "{error}");
    }
}

#[test]
fn settings_changed_to_the_impossible_before_an_accept_are_refused() {
    let _fabric = Fabric::new();
    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let worker = Worker::for_addr(any_port(1), &WorkerConfig::default()).unwrap();
    let refuse = |change: fn(&mut EndpointConfig)| {
        let opening = Endpoint::connect_with(&worker, listener.local_addr(), &small()).unwrap();
        let mut incoming = loop {
            worker.poll();
            worker.prepare_wait();
            if let Some(incoming) = listener.try_accept().unwrap() {
                break incoming;
            }
        };
        change(incoming.config_mut());
        let error = incoming.accept().unwrap_err();
        drop(opening);
        error
    };
    let error = refuse(|config| config.send_depth = u32::MAX);
    assert!(matches!(error, OpenError::Config { .. }), "{error}");
    let error = refuse(|config| config.private_data = vec![7; 181]);
    assert!(
        matches!(error, OpenError::Config { max: 180, .. }),
        "{error}"
    );
    let error = refuse(|config| config.extra_bufs = Some(usize::MAX));
    assert!(matches!(error, OpenError::Verbs(_)), "{error}");
}

fn with_data(len: usize) -> EndpointConfig {
    EndpointConfig {
        private_data: vec![7; len],
        ..small()
    }
}

#[test]
fn private_data_is_refused_before_anything_is_begun() {
    let _fabric = Fabric::new();
    let refused = |error: OpenError, limit: u64| {
        let text = error.to_string();
        assert!(
            matches!(error, OpenError::Config { max, .. } if max == limit),
            "{text}"
        );
    };
    refused(
        Listener::bind(any_port(2), &with_data(181)).unwrap_err(),
        180,
    );

    let listener = Listener::bind(any_port(2), &small()).unwrap();
    let addr = listener.local_addr();
    let worker = Worker::for_addr(any_port(1), &WorkerConfig::default()).unwrap();
    let long = with_data(41);
    refused(Endpoint::connect(addr, &long).unwrap_err(), 40);
    refused(
        Endpoint::connect_with(&worker, addr, &long).unwrap_err(),
        40,
    );
    refused(Endpoint::prepare(&worker, addr, &long).unwrap_err(), 40);
    assert!(listener.try_accept().unwrap().is_none());

    // What just fits arrives.
    let (client, server) = pair_with(&with_data(40), &with_data(180));
    assert_eq!(server.private_data(), [7; 40]);
    assert_eq!(client.private_data(), [7; 180]);
}

#[test]
fn a_queue_pair_leaves_no_completion_behind_in_the_queue() {
    let _fabric = Fabric::new();
    let deep = EndpointConfig {
        recv_depth: 600,
        ..small()
    };
    let (client, server) = pair_with(&deep, &small());
    let worker = client.worker().clone();
    drop(client);
    for _ in 0..5 {
        worker.poll();
    }
    assert_eq!(worker.stats().stale, 0);
    assert_eq!(worker.available(), worker.pool_size().0);
    drop(server);
}

#[test]
fn what_arrived_is_handed_out_before_the_end() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    fabric.hold_completions();
    let operation = server.send_slice(b"the last").unwrap();
    let id = fabric
        .ids()
        .into_iter()
        .find(|id| !id.passive && id.peer.is_some());
    fabric.inject_cm_event(id.unwrap().name, 10, 0);
    while client.is_open() {
        client.worker().poll();
        client.worker().prepare_wait();
    }
    fabric.release_completions();
    assert_eq!(&client.recv().unwrap().buf[..], b"the last");
    assert!(matches!(client.recv(), Err(RecvError::Closed(_))));
    drop(operation);
}

#[test]
fn who_holds_all_results_can_post_and_wait_for_capacity() {
    within(|| {
        let _fabric = Fabric::new();
        let (client, server) = pair();
        let mut unfetched = Vec::new();
        for _ in 0..100 {
            assert!(client.wait_capacity(8, None).unwrap());
            unfetched.push(client.send_slice(b"more").unwrap());
            server.recv().unwrap();
        }
        // Receives are posted again all the same.
        for _ in 0..20 {
            server.send_slice(b"answer").unwrap().wait().unwrap();
            assert_eq!(&client.recv().unwrap().buf[..], b"answer");
        }
        for operation in unfetched {
            operation.wait().unwrap();
        }
        assert_eq!(client.worker().open_operations(), 8, "the receives");
    });
}

#[test]
fn batches_that_fill_the_queue_do_not_end_the_connection() {
    let _fabric = Fabric::new();
    // One of them has the queue full behind the first, unsignaled operation of a batch.
    for first in 1..=3 {
        fill_queue_by_batches(first);
    }
}

fn fill_queue_by_batches(first: usize) {
    let config = EndpointConfig {
        send_depth: 4,
        signal_every: 2,
        extra_bufs: Some(64),
        ..small()
    };
    let (client, server) = pair_with(&config, &small());
    let mut unfetched = Vec::new();
    let mut size = first;
    for _ in 0..20 {
        let mut batch = client.batch();
        for _ in 0..size {
            batch.send(filled(&client, b"more")).unwrap();
        }
        size = 3;
        let posted = batch.post();
        unfetched.extend(posted.operations);
        while let Some(received) = server.try_recv().unwrap() {
            drop(received);
        }
        client.worker().poll();
        let full = matches!(posted.error, None | Some(PostErrorKind::QueueFull { .. }));
        assert!(full, "{:?}", posted.error);
    }
    assert!(client.is_open(), "{:?}", client.closed());
    for operation in unfetched {
        operation.wait().unwrap();
    }
    assert!(client.is_open());
}

#[test]
fn who_waits_for_capacity_is_woken_by_a_completion() {
    let fabric = Fabric::new();
    let config = EndpointConfig {
        send_depth: 1,
        ..small()
    };
    let (client, server) = pair_with(&config, &small());
    fabric.set_delivery(Delivery::Manual);
    let operation = client.send_slice(b"slow").unwrap();
    let woken = Arc::new(Flag::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut waiting = std::pin::pin!(client.capacity_async(1));
    let mut cx = Context::from_waker(&waker);
    assert!(waiting.as_mut().poll(&mut cx).is_pending());
    fabric.set_delivery(Delivery::Auto);
    fabric.deliver();
    client.worker().poll();
    assert!(woken.0.load(std::sync::atomic::Ordering::SeqCst));
    assert!(matches!(
        waiting.as_mut().poll(&mut cx),
        Poll::Ready(Ok(()))
    ));
    operation.wait().unwrap();
    drop(server);
}

#[derive(Default)]
struct Flag(std::sync::atomic::AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

/// A waker that uses the worker when it is dropped, as the last reference to a task may.
struct Nosy(Worker);

impl Wake for Nosy {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Nosy {
    fn drop(&mut self) {
        self.0.open_operations();
    }
}

#[test]
fn a_waker_that_is_replaced_by_a_waiting_thread_may_use_the_worker() {
    within(|| {
        let fabric = Fabric::new();
        let (client, server) = pair();
        fabric.set_delivery(Delivery::Manual);
        let mut operation = client.send_slice(b"slow").unwrap();
        let waker = Waker::from(Arc::new(Nosy(client.worker().clone())));
        let polled = Pin::new(&mut operation).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        drop(waker);
        let soon = std::time::Instant::now() + Duration::from_millis(10);
        operation.wait_deadline(soon).unwrap_err();
        fabric.set_delivery(Delivery::Auto);
        fabric.deliver();
        operation.wait().unwrap();
        drop(server);
    });
}

/// Whether a loop that sleeps on the worker's descriptor would wake up.
fn is_readable(worker: &Worker) -> bool {
    let mut fds = [PollFd::new(worker, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

/// Polls on another thread than the loop's.
fn poll_elsewhere(worker: &Worker) {
    thread::scope(|scope| scope.spawn(|| worker.poll()).join().unwrap());
}

#[test]
fn a_poll_by_another_thread_takes_nothing_from_a_foreign_loop() {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let worker = client.worker();
    let may_wait = || matches!(worker.prepare_wait(), Readiness::MayWait);
    for _ in 0..3 {
        while !may_wait() {
            worker.poll();
        }
        // Not the event that ends the loop's sleep.
        assert!(!is_readable(worker));
        server.send_slice(b"one").unwrap().wait().unwrap();
        poll_elsewhere(worker);
        assert!(is_readable(worker));
        worker.poll();
        assert!(client.try_recv().unwrap().is_some());

        // Not the news of what the loop had looked at.
        while !may_wait() {
            worker.poll();
        }
        worker.poll();
        assert!(client.try_recv().unwrap().is_none());
        server.send_slice(b"two").unwrap().wait().unwrap();
        poll_elsewhere(worker);
        assert!(!may_wait());
        worker.poll();
        assert!(client.try_recv().unwrap().is_some());
    }
}

/// Uses a worker when it is told that an id could not be destroyed.
struct Listening(Mutex<Option<Worker>>);

static LISTENING: Listening = Listening(Mutex::new(None));

impl log::Log for Listening {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().starts_with("rdma_destroy_id")
            && let Some(worker) = self.0.lock().unwrap().take()
        {
            worker.open_operations();
        }
    }

    fn flush(&self) {}
}

#[test]
fn a_worker_can_be_used_while_a_connection_is_dropped() {
    log::set_logger(&LISTENING).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let ends: [fn(Endpoint); 3] = [
        drop,
        |client| client.close(LIMIT).unwrap(),
        |client| {
            let _ = client.recv(); // the peer has gone
        },
    ];
    for end in ends {
        within(move || {
            let fabric = Fabric::new();
            let (client, server) = pair();
            let heard = client.worker().clone();
            server.close(LIMIT).unwrap();
            *LISTENING.0.lock().unwrap() = Some(heard);
            fabric.fail_nth("rdma_destroy_id", 0, EINVAL);
            end(client);
            assert!(LISTENING.0.lock().unwrap().is_none(), "it was destroyed");
            drop(server);
            fabric.abandon();
        });
    }
}

#[test]
fn a_read_with_the_option_inline_is_a_read() {
    let _fabric = Fabric::new();
    let (client, server) = pair_with(&manual(), &manual());
    let region = server.expose(64, Access::REMOTE_READ).unwrap();
    region.write_at(0, b"remote").unwrap();
    let inline = OpOptions {
        inline: true,
        ..OpOptions::default()
    };
    let remote = region.descriptor().slice(0..6).unwrap();
    let buf = client.alloc(0).unwrap();
    let read = client.with(inline).read(buf, remote).unwrap();
    assert_eq!(&read.wait().unwrap().buf.unwrap()[..], b"remote");
    let mut batch = client.batch();
    batch.options(inline);
    batch.read(client.alloc(0).unwrap(), remote).unwrap();
    for read in batch.post().accepted().unwrap() {
        assert_eq!(&read.wait().unwrap().buf.unwrap()[..], b"remote");
    }
}

#[test]
fn an_endpoint_whose_receive_is_refused_ends_without_another_poll() {
    let fabric = Fabric::new();
    let (client, server) = pair();
    server.send_slice(b"one").unwrap().wait().unwrap();
    fabric.refuse_post_at("ibv_post_recv", 0, ENOMEM);
    assert_eq!(&client.recv().unwrap().buf[..], b"one");
    assert!(!client.is_open());
    assert_eq!(*client.closed().unwrap(), Cause::QueuePairError);
}

#[test]
fn a_receive_without_bytes_has_no_element() {
    let _fabric = Fabric::new(); // which knows that some devices take no bytes for 2^31 of them
    let config = WorkerConfig {
        buf_size: 0,
        ..WorkerConfig::default()
    };
    let listener = Listener::bind(any_port(2), &manual()).unwrap();
    let worker = Worker::for_addr(any_port(2), &config).unwrap();
    let (client, server) = thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let incoming = listener.accept().unwrap();
            incoming.accept_with(&worker).unwrap().wait().unwrap()
        });
        let connected = Endpoint::connect(listener.local_addr(), &small()).unwrap();
        (connected, accepting.join().unwrap())
    });
    let received = server.post_recv(server.alloc(0).unwrap()).unwrap();
    client.send_slice(b"").unwrap().wait().unwrap();
    assert_eq!(received.wait().unwrap().byte_len, 0);
}
