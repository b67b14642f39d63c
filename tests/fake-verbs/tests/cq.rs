//! Completion queues and channels.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::ptr::null_mut;

use common::*;
use fake_verbs::{Completion, Config, Delivery, Fabric};
use rdma_sys::*;

fn nonblocking(channel: *mut ibv_comp_channel) {
    let fd = unsafe { (*channel).fd };
    assert_eq!(
        unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) },
        0
    );
}

/// The queue of the next event, if there is one.
fn next_event(side: &Side) -> Option<*mut ibv_cq> {
    let (mut cq, mut context) = (null_mut(), null_mut());
    match unsafe { ibv_get_cq_event(side.channel, &mut cq, &mut context) } {
        0 => Some(cq),
        _ => {
            assert_eq!(errno(), libc::EAGAIN);
            None
        }
    }
}

fn arm(side: &Side, solicited_only: bool) {
    assert_eq!(
        unsafe { ibv_req_notify_cq(side.cq, solicited_only.into()) },
        0
    );
}

#[test]
fn one_arming_makes_one_event() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    nonblocking(b.channel);
    (0..4).for_each(|id| assert_eq!(b.post_recv(id, 0, 8), 0));
    a.send(1, 0, 1);
    arm(&b, false);
    assert_eq!(
        next_event(&b),
        None,
        "what was there before the arming announces nothing"
    );
    a.send(2, 0, 1);
    a.send(3, 0, 1);
    assert_eq!(next_event(&b), Some(b.cq));
    assert_eq!(next_event(&b), None, "one-shot");
    assert_eq!(b.poll().len(), 3);
    unsafe { ibv_ack_cq_events(b.cq, 1) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn armed_for_solicited_ones_it_waits_for_those_and_for_failures() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    nonblocking(b.channel);
    (0..4).for_each(|id| assert_eq!(b.post_recv(id, 0, 8), 0));
    arm(&b, true);
    a.send(1, 0, 1);
    assert_eq!(next_event(&b), None);
    a.post(2, 0, 1, |wr| {
        wr.send_flags |= ibv_send_flags::IBV_SEND_SOLICITED.0
    });
    assert_eq!(next_event(&b), Some(b.cq));
    arm(&b, true);
    fabric.break_qp(b.num());
    assert_eq!(next_event(&b), Some(b.cq), "a failure counts as solicited");
    unsafe { ibv_ack_cq_events(b.cq, 2) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn the_channels_descriptor_is_readable_exactly_while_events_wait() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    nonblocking(b.channel);
    let readable = || {
        let fd = unsafe { (*b.channel).fd };
        let mut poll = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    };
    b.post_recv(1, 0, 8);
    arm(&b, false);
    assert!(!readable());
    a.send(1, 0, 1);
    assert!(readable());
    assert_eq!(next_event(&b), Some(b.cq));
    assert!(!readable());
    unsafe { ibv_ack_cq_events(b.cq, 1) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_blocking_wait_ends_when_another_thread_makes_the_completion() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    b.post_recv(1, 0, 8);
    arm(&b, false);
    let (channel, cq) = (b.channel.expose_provenance(), b.cq.addr());
    let waiter = std::thread::spawn(move || {
        let (mut got, mut context) = (null_mut(), null_mut());
        let channel = std::ptr::with_exposed_provenance_mut(channel);
        assert_eq!(
            unsafe { ibv_get_cq_event(channel, &mut got, &mut context) },
            0
        );
        assert_eq!(got.addr(), cq);
    });
    a.send(1, 0, 1);
    waiter.join().expect("the waiter saw the event");
    unsafe { ibv_ack_cq_events(b.cq, 1) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn several_queues_share_a_channel_and_carry_their_contexts() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    nonblocking(side.channel);
    let tags = [5usize, 6];
    let cqs = tags.map(|tag| unsafe {
        let tag = std::ptr::without_provenance_mut(tag);
        ibv_create_cq(side.context, 1, tag, side.channel, 0)
    });
    for (cq, tag) in cqs.iter().zip(tags).rev() {
        assert_eq!(unsafe { ibv_req_notify_cq(*cq, 0) }, 0);
        fabric.inject_completion(fabric.cqs()[tag - 4].id, Completion::default());
        let (mut got, mut context) = (null_mut(), null_mut());
        assert_eq!(
            unsafe { ibv_get_cq_event(side.channel, &mut got, &mut context) },
            0
        );
        assert_eq!((got, context.addr()), (*cq, tag));
        unsafe { ibv_ack_cq_events(got, 1) };
    }
    assert_eq!(
        unsafe { ibv_destroy_comp_channel(side.channel) },
        libc::EBUSY
    );
    assert_eq!(fabric.take_violations().len(), 1);
    cqs.map(|cq| assert_eq!(unsafe { ibv_destroy_cq(cq) }, 0))
        .into_iter()
        .for_each(drop);
    side.close();
    drop(fabric);
}

#[test]
fn an_overrun_loses_the_entry_and_is_told_by_an_async_event() {
    for config in [Config::default(), Config::rxe()] {
        let fatal = config.overrun_is_fatal;
        let fabric = Fabric::with(config);
        let (a, b) = connected(
            Side::with(0, ibv_qp_type::IBV_QPT_RC, 16, 1, 1),
            Side::new(1),
        );
        assert_eq!(fabric.cqs()[0].depth, 1);
        (0..4).for_each(|id| assert_eq!(b.post_recv(id, 0, 8), 0));
        a.send(1, 0, 1);
        a.send(2, 0, 1);
        assert!(fabric.cqs()[0].overrun);
        assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
        let state = if fatal { IBV_QPS_ERR } else { IBV_QPS_RTS };
        assert_eq!(fabric.qp_state(a.num()), state);
        assert_eq!(b.poll().len(), 2, "the data arrived all the same");
        let mut event: [u64; 2] = zeroed();
        let event = (&raw mut event).cast();
        assert_eq!(unsafe { ibv_get_async_event(a.context, event) }, 0);
        assert_eq!(unsafe { event.cast::<u32>().add(2).read() }, 0, "CQ_ERR");
        unsafe { ibv_ack_async_event(event) };
        a.close();
        b.close();
        drop(fabric);
    }
}

#[test]
fn sizes_are_rounded_up_and_limited() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let make = |cqe| unsafe { ibv_create_cq(side.context, cqe, null_mut(), null_mut(), 0) };
    for (asked, granted) in [(1, 1), (2, 3), (100, 127), (32_767, 32_767)] {
        let cq = make(asked);
        assert_eq!(unsafe { (*cq).cqe }, granted);
        assert_eq!(unsafe { ibv_destroy_cq(cq) }, 0);
    }
    for asked in [0, -1, 32_768] {
        assert!(make(asked).is_null());
        assert_eq!(errno(), libc::EINVAL);
    }
    assert_eq!(unsafe { ibv_resize_cq(side.cq, 200) }, 0);
    assert_eq!(unsafe { (*side.cq).cqe }, 255);
    side.close();
    drop(fabric);
}

#[test]
fn a_test_can_hold_repeat_turn_lose_and_invent_completions() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    (0..4).for_each(|id| assert_eq!(b.post_recv(id, 0, 8), 0));
    let cq = fabric.qps()[0].send_cq;
    fabric.hold_completions();
    (1..=3).for_each(|id| assert_eq!(a.send(id, 0, 1), 0));
    assert_eq!(a.outcomes(), []);
    fabric.release_completions();
    fabric.reverse_completions(cq);
    fabric.duplicate_completions(cq);
    let foreign = Completion {
        wr_id: 99,
        status: 77,
        qp_num: 12_345,
        ..Completion::default()
    };
    fabric.inject_completion(cq, foreign);
    assert_eq!(fabric.completions(cq).len(), 7);
    let seen: Vec<_> = a.outcomes();
    assert_eq!(
        seen,
        [(3, 0), (2, 0), (1, 0), (3, 0), (2, 0), (1, 0), (99, 77)]
    );
    a.send(4, 0, 1);
    assert_eq!(fabric.lose_completions(cq)[0].wr_id, 4);
    assert_eq!(a.outcomes(), []);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn an_event_can_come_without_a_completion() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    nonblocking(side.channel);
    fabric.spurious_cq_event(fabric.cqs()[0].id);
    assert_eq!(next_event(&side), Some(side.cq));
    unsafe { ibv_ack_cq_events(side.cq, 1) };
    side.close();
    drop(fabric);
}

#[test]
fn events_that_were_not_fetched_go_with_their_queue() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    nonblocking(side.channel);
    let cq = unsafe { ibv_create_cq(side.context, 1, null_mut(), side.channel, 0) };
    fabric.spurious_cq_event(fabric.cqs()[1].id);
    assert_eq!(unsafe { ibv_destroy_cq(cq) }, 0);
    assert_eq!(next_event(&side), None);
    side.close();
    drop(fabric);
}

#[test]
fn an_unacked_event_is_a_violation_when_the_queue_goes() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let cq = unsafe { ibv_create_cq(side.context, 1, null_mut(), side.channel, 0) };
    fabric.spurious_cq_event(fabric.cqs()[1].id);
    assert_eq!(next_event(&side), Some(cq));
    assert_eq!(unsafe { ibv_destroy_cq(cq) }, 0);
    let broken = fabric.take_violations();
    assert!(
        broken[0].starts_with("ibv_destroy_cq: 1 completion events were not acked"),
        "{broken:?}"
    );
    unsafe { ibv_ack_cq_events(side.cq, 1) };
    assert_eq!(
        fabric.take_violations(),
        ["ibv_ack_cq_events: 1 events acked, 0 got"]
    );
    side.close();
    drop(fabric);
}

#[test]
fn manual_delivery_executes_one_send_at_a_time() {
    let fabric = Fabric::with(Config {
        delivery: Delivery::Manual,
        ..Config::default()
    });
    let (a, b) = pair();
    (0..2).for_each(|id| assert_eq!(b.post_recv(id, 0, 8), 0));
    assert_eq!((a.send(1, 0, 1), a.send(2, 0, 1)), (0, 0));
    assert_eq!((a.outcomes().len(), fabric.qps()[0].unexecuted), (0, 2));
    assert!(fabric.step());
    assert_eq!((a.outcomes().len(), fabric.qps()[0].unexecuted), (1, 1));
    assert_eq!(fabric.deliver(), 1);
    assert!(!fabric.step());
    a.close();
    b.close();
    drop(fabric);
}
