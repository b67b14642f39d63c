//! Queue pairs: creation, transitions, queries, destruction.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::ptr::null_mut;

use common::*;
use fake_verbs::Fabric;
use rdma_sys::*;

#[test]
fn capacities_are_granted_at_least_as_asked() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let mut init = init_attr(side.cq, ibv_qp_type::IBV_QPT_RC, 10, 64);
    init.cap.max_inline_data = 256;
    let qp = unsafe { ibv_create_qp(side.pd, &mut init) };
    let cap = init.cap;
    assert_eq!((cap.max_send_wr, cap.max_recv_wr), (15, 127));
    assert_eq!(
        (cap.max_send_sge, cap.max_inline_data),
        (16, 256),
        "inline room makes entries"
    );
    let (mut attr, mut queried) = (zeroed(), zeroed());
    assert_eq!(unsafe { ibv_query_qp(qp, &mut attr, 0, &mut queried) }, 0);
    assert_eq!(
        (attr.qp_state, queried.cap.max_recv_wr),
        (IBV_QPS_RESET, 127)
    );
    assert_eq!(unsafe { ibv_destroy_qp(qp) }, 0);
    side.close();
    drop(fabric);
}

#[test]
fn too_much_of_anything_is_refused() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let changes: [fn(&mut ibv_qp_init_attr); 7] = [
        |init| init.cap.max_send_wr = 16_385,
        |init| init.cap.max_recv_wr = 16_385,
        |init| init.cap.max_send_sge = 33,
        |init| init.cap.max_recv_sge = 33,
        |init| init.cap.max_inline_data = 513,
        |init| init.send_cq = null_mut(),
        |init| init.qp_type = 255,
    ];
    for change in changes {
        let mut init = init_attr(side.cq, ibv_qp_type::IBV_QPT_RC, 1, 1);
        change(&mut init);
        assert!(unsafe { ibv_create_qp(side.pd, &mut init) }.is_null());
        assert!([libc::EINVAL, libc::EOPNOTSUPP].contains(&errno()));
    }
    side.close();
    drop(fabric);
}

#[test]
fn attributes_come_back_from_a_query() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
    assert_eq!(unsafe { ibv_query_qp(a.qp, &mut attr, 0, &mut init) }, 0);
    assert_eq!((attr.qp_state, attr.dest_qp_num), (IBV_QPS_RTS, b.num()));
    assert_eq!(
        (
            attr.timeout,
            attr.retry_cnt,
            attr.rnr_retry,
            attr.min_rnr_timer
        ),
        (14, 6, 6, 12)
    );
    assert_eq!(
        (init.send_cq, init.qp_type),
        (a.cq, ibv_qp_type::IBV_QPT_RC)
    );
    assert_eq!(fabric.qps()[0].timers, [14, 6, 6, 12]);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn transitions_need_their_attributes_and_no_others() {
    let fabric = Fabric::new();
    let (a, b) = (Side::new(0), Side::new(1));
    assert_eq!(a.to(IBV_QPS_INIT), libc::EINVAL, "attributes are missing");
    assert_eq!(a.to(IBV_QPS_RTS), libc::EINVAL, "no such step");
    assert_eq!(a.to(IBV_QPS_ERR), libc::EINVAL, "nor this one");
    assert_eq!(a.ready_to_receive(&b), libc::EINVAL, "INIT comes first");
    assert_eq!(a.init(), 0);
    let mut attr: ibv_qp_attr = zeroed();
    attr.qp_state = IBV_QPS_ERR;
    let too_many = ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_TIMEOUT;
    assert_eq!(a.modify(&mut attr, too_many), libc::EINVAL);
    attr.qp_state = IBV_QPS_RTR;
    attr.cur_qp_state = IBV_QPS_RTS;
    let lies = ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_CUR_STATE;
    assert_eq!(a.modify(&mut attr, lies), libc::EINVAL);
    assert_eq!(a.ready_to_receive(&b), 0);
    assert_eq!(a.ready_to_send(8), libc::EINVAL, "rnr_retry has three bits");
    assert_eq!(a.ready_to_send(7), 0);
    attr.min_rnr_timer = 14;
    assert_eq!(
        a.modify(&mut attr, ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER),
        0,
        "RTS to RTS"
    );
    for state in [
        IBV_QPS_SQD,
        IBV_QPS_RTS,
        IBV_QPS_ERR,
        IBV_QPS_ERR,
        IBV_QPS_RESET,
    ] {
        assert_eq!(a.to(state), 0);
        assert_eq!(unsafe { (*a.qp).state }, state);
    }
    assert_eq!(a.to(IBV_QPS_SQE), libc::EINVAL);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn the_path_needs_a_global_header_and_an_existing_gid() {
    let fabric = Fabric::new();
    let (a, b) = (Side::new(0), Side::new(1));
    assert_eq!(a.init(), 0);
    let changes: [fn(&mut ibv_qp_attr); 4] = [
        |attr| attr.ah_attr.is_global = 0,
        |attr| attr.ah_attr.grh.sgid_index = 6,
        |attr| attr.path_mtu = 6,
        |attr| attr.max_dest_rd_atomic = 129,
    ];
    use ibv_qp_attr_mask as m;
    let path = m::IBV_QP_AV | m::IBV_QP_PATH_MTU | m::IBV_QP_DEST_QPN | m::IBV_QP_RQ_PSN;
    let mask = m::IBV_QP_STATE | path | m::IBV_QP_MAX_DEST_RD_ATOMIC | m::IBV_QP_MIN_RNR_TIMER;
    for change in changes {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTR;
        (attr.path_mtu, attr.dest_qp_num) = (ibv_mtu::IBV_MTU_1024, b.num());
        attr.ah_attr = ah_attr(1);
        change(&mut attr);
        assert_eq!(a.modify(&mut attr, mask), libc::EINVAL);
    }
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn reset_forgets_what_was_posted() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.post_recv(1, 0, 8);
    assert_eq!(a.to(IBV_QPS_RESET), 0);
    assert_eq!(a.outcomes(), []);
    assert_eq!(fabric.qps()[0].receives, 0);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_drained_send_queue_holds_its_sends_until_it_goes_on() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    b.post_recv(1, 0, 8);
    assert_eq!(a.to(IBV_QPS_SQD), 0);
    assert_eq!(a.send(1, 0, 1), 0);
    assert_eq!(a.outcomes(), []);
    assert_eq!(a.to(IBV_QPS_RTS), 0);
    assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn the_nic_moves_a_queue_pair_without_telling_the_struct() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    fabric.break_qp(a.num());
    assert_eq!(unsafe { (*a.qp).state }, IBV_QPS_RTS);
    let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
    assert_eq!(unsafe { ibv_query_qp(a.qp, &mut attr, 1, &mut init) }, 0);
    assert_eq!(
        (attr.qp_state, unsafe { (*a.qp).state }),
        (IBV_QPS_ERR, IBV_QPS_ERR)
    );
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn parents_are_busy_while_they_have_children() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    assert_eq!(unsafe { ibv_destroy_cq(side.cq) }, libc::EBUSY);
    assert_eq!(unsafe { ibv_dealloc_pd(side.pd) }, libc::EBUSY);
    assert_eq!(
        unsafe { ibv_destroy_comp_channel(side.channel) },
        libc::EBUSY
    );
    assert_eq!(unsafe { ibv_close_device(side.context) }, -1);
    assert_eq!(fabric.take_violations().len(), 4);
    side.close();
    drop(fabric);
}

#[test]
fn unreliable_connections_do_not_know_what_arrives() {
    let fabric = Fabric::new();
    let (a, b) = pair_of(ibv_qp_type::IBV_QPT_UC);
    a.write(0, b"data");
    a.send(1, 0, 4); // no receive: lost
    b.post_recv(1, 100, 8);
    a.send(2, 0, 4);
    a.post(3, 0, 4, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.wr.rdma = rdma_t {
            remote_addr: b.addr(0),
            rkey: 1,
        }; // refused in silence
    });
    let read = |wr: &mut ibv_send_wr| wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
    assert_eq!(a.post(4, 0, 4, read), libc::EINVAL, "UC has no reads");
    assert_eq!(a.outcomes(), [1, 2, 3].map(|id| (id, IBV_WC_SUCCESS)));
    assert_eq!(b.outcomes(), [(1, IBV_WC_SUCCESS)]);
    assert_eq!(b.read(100, 4), b"data");
    assert_eq!(fabric.qp_state(b.num()), IBV_QPS_RTS);
    a.close();
    b.close();
    drop(fabric);
}
