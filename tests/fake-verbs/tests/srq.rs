//! Shared receive queues.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::ptr::null_mut;

use common::*;
use fake_verbs::{Config, Fabric};
use rdma_sys::*;

const LIMIT: i32 = 2;

fn create(side: &Side, max_wr: u32) -> *mut ibv_srq {
    let mut init: ibv_srq_init_attr = zeroed();
    init.attr = ibv_srq_attr {
        max_wr,
        max_sge: 2,
        srq_limit: 0,
    };
    let srq = unsafe { ibv_create_srq(side.pd, &mut init) };
    assert!(!srq.is_null());
    assert!(init.attr.max_wr >= max_wr);
    srq
}

fn post(side: &Side, srq: *mut ibv_srq, wr_id: u64) -> i32 {
    let mut sge = side.sge(0, 8);
    let mut wr = ibv_recv_wr {
        wr_id,
        next: null_mut(),
        sg_list: &mut sge,
        num_sge: 1,
    };
    unsafe { ibv_post_srq_recv(srq, &mut wr, &mut null_mut()) }
}

/// A pair whose second side receives through a shared queue of three.
fn pair_with_srq() -> (Side, Side, *mut ibv_srq) {
    let (a, mut b) = (Side::new(0), Side::new(1));
    let srq = create(&b, 3);
    unsafe {
        assert_eq!(ibv_destroy_qp(b.qp), 0);
        let mut init = init_attr(b.cq, ibv_qp_type::IBV_QPT_RC, 4, 0);
        init.srq = srq;
        b.qp = ibv_create_qp(b.pd, &mut init);
        assert!(!b.qp.is_null());
    }
    let (a, b) = connected(a, b);
    (a, b, srq)
}

fn next_async(side: &Side) -> Option<u32> {
    let mut event: [u64; 2] = zeroed();
    let event = (&raw mut event).cast::<ibv_async_event>();
    unsafe {
        libc::fcntl((*side.context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
        if ibv_get_async_event(side.context, event) != 0 {
            return None;
        }
        let number = event.cast::<u32>().add(2).read();
        ibv_ack_async_event(event);
        Some(number)
    }
}

#[test]
fn receives_are_taken_from_the_shared_queue_in_order() {
    let fabric = Fabric::new();
    let (a, b, srq) = pair_with_srq();
    assert_eq!(
        [post(&b, srq, 1), post(&b, srq, 2), post(&b, srq, 3)],
        [0; 3]
    );
    assert_eq!(post(&b, srq, 4), libc::ENOMEM);
    assert_eq!(
        b.post_recv(9, 0, 8),
        libc::EINVAL,
        "it has no queue of its own"
    );
    (1..=2).for_each(|id| assert_eq!(a.send(id, 0, 4), 0));
    assert_eq!(b.outcomes(), [(1, IBV_WC_SUCCESS), (2, IBV_WC_SUCCESS)]);
    assert_eq!([post(&b, srq, 4), post(&b, srq, 5)], [0; 2]);
    assert_eq!(unsafe { ibv_destroy_srq(srq) }, libc::EBUSY);
    assert_eq!(fabric.take_violations().len(), 1);
    a.close();
    close(b, srq);
    drop(fabric);
}

/// Closes a side and its shared queue in the right order.
fn close(mut b: Side, srq: *mut ibv_srq) {
    unsafe {
        assert_eq!(ibv_destroy_qp(b.qp), 0);
        assert_eq!(ibv_destroy_srq(srq), 0);
        let mut init = init_attr(b.cq, ibv_qp_type::IBV_QPT_RC, 1, 1);
        b.qp = ibv_create_qp(b.pd, &mut init);
    }
    b.close();
}

#[test]
fn the_limit_is_announced_once() {
    let fabric = Fabric::new();
    let (a, b, srq) = pair_with_srq();
    (1..=3).for_each(|id| assert_eq!(post(&b, srq, id), 0));
    let mut attr = ibv_srq_attr {
        max_wr: 0,
        max_sge: 0,
        srq_limit: 2,
    };
    assert_eq!(unsafe { ibv_modify_srq(srq, &mut attr, LIMIT) }, 0);
    a.send(1, 0, 4);
    assert_eq!(next_async(&b), None, "two are left");
    a.send(2, 0, 4);
    assert_eq!(next_async(&b), Some(15), "SRQ_LIMIT_REACHED");
    a.send(3, 0, 4);
    assert_eq!(next_async(&b), None, "it has to be armed again");
    assert_eq!(unsafe { ibv_query_srq(srq, &mut attr) }, 0);
    assert_eq!((attr.srq_limit, attr.max_wr, attr.max_sge), (0, 3, 2));
    a.close();
    close(b, srq);
    drop(fabric);
}

#[test]
fn the_last_request_is_announced_when_the_queue_pair_breaks() {
    for config in [Config::default(), Config::rxe()] {
        let expected = config.last_wqe_event.then_some(16);
        let fabric = Fabric::with(config);
        let (a, b, srq) = pair_with_srq();
        assert_eq!(post(&b, srq, 1), 0);
        assert_eq!(b.to(IBV_QPS_ERR), 0);
        assert_eq!(next_async(&b), expected);
        assert_eq!(
            b.outcomes(),
            [],
            "receives of a shared queue are not flushed"
        );
        a.close();
        close(b, srq);
        drop(fabric);
    }
}
