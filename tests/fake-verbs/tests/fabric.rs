//! The fabric itself: fault plans, reports, threads.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use common::*;
use fake_verbs::{Fabric, LiveObjects};
use rdma_sys::*;

fn report(end: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(end)).expect_err("it should have panicked");
    *panic.downcast::<String>().expect("a message")
}

#[test]
fn what_is_left_behind_is_reported() {
    let fabric = Fabric::new();
    let context = open(0);
    let pd = unsafe { ibv_alloc_pd(context) };
    let live = LiveObjects {
        contexts: 1,
        pds: 1,
        ..LiveObjects::default()
    };
    assert_eq!(fabric.live_objects(), live);
    assert!(!pd.is_null());
    let text = report(|| fabric.check());
    assert!(
        text.contains("left behind") && text.contains("contexts: 1"),
        "{text}"
    );
}

#[test]
fn broken_rules_are_reported_by_the_drop() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    assert_eq!(unsafe { ibv_dealloc_pd(side.pd) }, libc::EBUSY);
    side.close();
    let text = report(|| drop(fabric));
    assert!(
        text.contains("ibv_dealloc_pd: the PD still has 2 objects"),
        "{text}"
    );
}

#[test]
fn an_abandoned_fabric_reports_nothing() {
    let fabric = Fabric::new();
    let context = open(0);
    assert!(!context.is_null());
    fabric.abandon();
}

#[test]
fn the_nth_call_of_a_kind_fails_with_its_errno() {
    let fabric = Fabric::new();
    let context = open(0);
    fabric.fail_nth("ibv_alloc_pd", 1, libc::ENOMEM);
    let pds = [(); 3].map(|()| unsafe { ibv_alloc_pd(context) });
    assert_eq!(pds.map(|pd| pd.is_null()), [false, true, false]);
    assert_eq!(fabric.failed_calls(), ["ibv_alloc_pd"]);
    assert_eq!(fabric.count_of("ibv_alloc_pd"), 3);
    for pd in [pds[0], pds[2]] {
        assert_eq!(unsafe { ibv_dealloc_pd(pd) }, 0);
    }
    assert_eq!(unsafe { ibv_close_device(context) }, 0);
    drop(fabric);
}

#[test]
fn each_call_follows_its_own_convention_for_errors() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let channel = Channel::new();
    let id = channel.id();
    fabric.fail_nth("ibv_create_cq", 0, libc::EMFILE);
    assert!(unsafe { ibv_create_cq(a.context, 1, null_mut(), null_mut(), 0) }.is_null());
    assert_eq!(errno(), libc::EMFILE, "NULL and errno");
    fabric.fail_nth("ibv_req_notify_cq", 0, libc::EIO);
    assert_eq!(
        unsafe { ibv_req_notify_cq(a.cq, 0) },
        libc::EIO,
        "a positive errno"
    );
    fabric.fail_nth("ibv_poll_cq", 0, libc::EIO);
    assert!(unsafe { ibv_poll_cq(a.cq, 1, &mut zeroed()) } < 0);
    fabric.fail_nth("rdma_listen", 0, libc::EACCES);
    assert_eq!(
        (unsafe { rdma_listen(id, 0) }, errno()),
        (-1, libc::EACCES),
        "-1 and errno"
    );
    fabric.fail_nth("ibv_get_cq_event", 0, libc::EINTR);
    let mut context = null_mut();
    let got = unsafe { ibv_get_cq_event(a.channel, &mut null_mut(), &mut context) };
    assert_eq!((got, errno()), (-1, libc::EINTR));
    destroy(id);
    channel.close();
    a.close();
    b.close();
    drop(fabric);
}

/// Makes and gives back a few objects, stopping at the first error.
fn program() -> Result<(), i32> {
    unsafe {
        let list = ibv_get_device_list(null_mut());
        if list.is_null() {
            return Err(errno());
        }
        let context = ibv_open_device(*list);
        let error = errno();
        ibv_free_device_list(list);
        if context.is_null() {
            return Err(error);
        }
        let pd = ibv_alloc_pd(context);
        let result = if pd.is_null() { Err(errno()) } else { Ok(()) };
        if !pd.is_null() {
            ibv_dealloc_pd(pd);
        }
        ibv_close_device(context);
        result
    }
}

#[test]
fn a_sweep_lets_every_call_fail_once() {
    let mut failed = Vec::new();
    for number in 0.. {
        let fabric = Fabric::new();
        fabric.fail_call_number(number, libc::EIO);
        let result = program();
        let calls = fabric.failed_calls();
        drop(fabric);
        if calls.is_empty() {
            assert_eq!(result, Ok(()));
            break;
        }
        assert_eq!(result, Err(libc::EIO));
        failed.extend(calls);
    }
    assert_eq!(
        failed,
        ["ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd"]
    );
}

#[test]
fn what_a_planned_failure_leaves_is_excused() {
    let fabric = Fabric::new();
    fabric.fail_destroy_number(0, libc::EBUSY);
    assert_eq!(program(), Ok(()));
    assert_eq!(fabric.failed_calls(), ["ibv_dealloc_pd"]);
    assert_eq!(fabric.live_objects().pds, 1);
    fabric.check();
}

#[test]
#[should_panic(expected = "no such call: ibv_aloc_pd")]
fn a_misspelt_call_is_no_plan() {
    let fabric = Fabric::new();
    fabric.fail_nth("ibv_aloc_pd", 0, 1);
}

#[test]
fn unmodelled_calls_are_violations() {
    let fabric = Fabric::new();
    assert_eq!(
        unsafe { rdma_create_qp(null_mut(), null_mut(), null_mut()) },
        -1
    );
    assert_eq!(
        fabric.take_violations(),
        ["rdma_create_qp: not modelled by the fake"]
    );
    drop(fabric);
}

#[test]
fn the_symbols_are_the_fakes_in_this_binary() {
    // `Fabric::new` asserts it for some; here is one more, by what it does.
    let fabric = Fabric::new();
    let (list, name) = unsafe {
        let list = ibv_get_device_list(null_mut());
        (list, std::ffi::CStr::from_ptr(ibv_get_device_name(*list)))
    };
    assert_eq!(name, c"fake0");
    unsafe { ibv_free_device_list(list) };
    drop(fabric);
}

#[test]
fn many_threads_post_and_poll_at_once() {
    const EACH: u64 = if cfg!(miri) { 4 } else { 20 };
    let fabric = Fabric::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let (a, b) = pair();
                for id in 0..EACH {
                    a.write(0, &id.to_ne_bytes());
                    assert_eq!((b.post_recv(id, 8, 8), a.send(id, 0, 8)), (0, 0));
                    assert_eq!((a.outcomes(), b.outcomes()), (vec![(id, 0)], vec![(id, 0)]));
                    assert_eq!(b.read(8, 8), id.to_ne_bytes());
                }
                a.close();
                b.close();
            });
        }
    });
    fabric.check();
}

#[test]
fn a_thread_waits_for_a_cm_event_of_another() {
    let fabric = Fabric::new();
    let channel = unsafe { rdma_create_event_channel() };
    let mut id = null_mut();
    assert_eq!(
        unsafe { rdma_create_id(channel, &mut id, null_mut(), 262) },
        0
    );
    let address = channel.expose_provenance();
    let waiter = std::thread::spawn(move || unsafe {
        let mut event = null_mut();
        let channel = std::ptr::with_exposed_provenance_mut(address);
        assert_eq!(rdma_get_cm_event(channel, &mut event), 0);
        let number = (*event).event;
        assert_eq!(rdma_ack_cm_event(event), 0);
        number
    });
    let mut to = Sockaddr::new("10.9.0.2:1");
    assert_eq!(unsafe { rdma_resolve_addr(id, null_mut(), to.ptr(), 0) }, 0);
    assert_eq!(waiter.join().expect("no panic"), 0);
    destroy(id);
    unsafe { rdma_destroy_event_channel(channel) };
    drop(fabric);
}

#[test]
fn a_planned_failure_excuses_no_leak_it_does_not_cause() {
    let fabric = Fabric::new();
    let context = open(0);
    fabric.fail_nth("ibv_close_device", 0, libc::EIO);
    let channel = unsafe { ibv_create_comp_channel(context) };
    assert!(!channel.is_null());
    assert_eq!(unsafe { ibv_close_device(context) }, -1);
    let text = report(|| fabric.check());
    assert!(
        text.contains("comp_channels: 1") && text.contains("contexts: 0"),
        "{text}"
    );
}

#[test]
fn a_storm_of_events_does_not_block() {
    let storm = if cfg!(miri) { 100 } else { 70_000 };
    let fabric = Fabric::new();
    let side = Side::new(0);
    (0..storm).for_each(|_| fabric.inject_qp_event(side.num(), 1));
    let mut event: [u64; 2] = zeroed();
    let event = (&raw mut event).cast::<ibv_async_event>();
    for _ in 0..storm {
        assert_eq!(unsafe { ibv_get_async_event(side.context, event) }, 0);
        unsafe { ibv_ack_async_event(event) };
    }
    side.close();
    drop(fabric);
}
