//! Nothing is allocated per operation. Alone in its process, for it looks at everybody's allocations.

#![allow(clippy::unwrap_used)] // a failure is the test's
#![allow(unsafe_code)] // a global allocator

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};
use std::task::{Context, Poll, Waker};

use common::{filled, pair_with, small};
use fake_verbs::Fabric;
use rdma_msg::{Access, Buf, EndpointConfig, Operation, RemoteRegion, Wait};

/// Notes where the thread allocates, while it is asked to. The fake fabric allocates for each
/// request, as no provider does; what it does is left out.
struct Noting;

thread_local! {
    static ASKED: Cell<bool> = const { Cell::new(false) };
    static PLACES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

// SAFETY: everything is handed to the system's allocator as it came; what is allocated while noting
// is not noted, so it does not recurse.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ASKED.replace(false) {
            let place = Backtrace::force_capture().to_string();
            if !place.contains("fake_verbs::") {
                PLACES.with_borrow_mut(|places| places.push(place));
            }
            ASKED.set(true);
        }
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, handed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Noting = Noting;

/// Warms up, then asserts that further rounds allocate nothing.
fn assert_frugal(what: &str, mut round: impl FnMut()) {
    (0..50).for_each(|_| round());
    ASKED.set(true);
    (0..10).for_each(|_| round());
    ASKED.set(false);
    let places = PLACES.take();
    assert!(
        places.is_empty(),
        "{what}: {} allocations, one of them\n{}",
        places.len(),
        places[0]
    );
}

fn polled(mut operation: Operation) -> Buf {
    // Registers its waker if it is not done yet.
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(result) = std::pin::pin!(&mut operation).poll(&mut context) {
            return result.unwrap().buf.unwrap();
        }
    }
}

#[test]
fn operations_allocate_nothing_after_the_first_ones() {
    let _fabric = Fabric::new();
    for wait in [Wait::Spin, Wait::Event] {
        let config = EndpointConfig { wait, ..small() };
        let (client, server) = pair_with(&config, &config);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let region = server.expose(64, access).unwrap();
        let remote: RemoteRegion = region.descriptor();
        let word = remote.slice(8..16).unwrap();

        assert_frugal("inline sends", || {
            let operation = client.send_slice(b"small").unwrap();
            drop(server.recv().unwrap());
            operation.wait().unwrap();
        });
        assert_frugal("sends from a buffer", || {
            let operation = client.send(filled(&client, &[1; 256])).unwrap();
            drop(server.recv().unwrap());
            operation.wait().unwrap();
        });
        let no_more = EndpointConfig {
            extra_bufs: Some(0),
            ..config.clone()
        };
        let (sender, receiver) = pair_with(&config, &no_more);
        assert_frugal("receives that wait for the pool", || {
            let received: [_; 2] = std::array::from_fn(|_| {
                sender.send_slice(b"small").unwrap().wait().unwrap();
                receiver.recv().unwrap()
            });
            drop(received);
        });
        assert!(receiver.stats().receives_delayed > 50);
        assert_frugal("writes and reads", || {
            let buf = client
                .write(filled(&client, &[2; 64]), remote)
                .unwrap()
                .wait()
                .unwrap()
                .buf;
            client.read(buf.unwrap(), remote).unwrap().wait().unwrap();
        });
        assert_frugal("atomics", || {
            client.fetch_add(word, 1).unwrap().wait().unwrap();
            client.compare_swap(word, 0, 1).unwrap().wait().unwrap();
        });
        assert_frugal("dropped operations", || {
            drop(client.write(filled(&client, &[3; 64]), remote).unwrap());
            client.worker().poll();
        });
        assert_frugal("awaited operations", || {
            drop(polled(
                client.write(filled(&client, &[4; 64]), remote).unwrap(),
            ));
        });
        assert_frugal("a full queue", || {
            let operations: [Operation; 8] =
                std::array::from_fn(|_| client.write(filled(&client, b"x"), remote).unwrap());
            assert!(client.send_slice(b"refused").unwrap_err().is_full());
            operations
                .into_iter()
                .for_each(|operation| drop(operation.wait().unwrap()));
        });
    }
}
