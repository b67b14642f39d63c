//! Reliable connections made by hand.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::ptr::null_mut;

use common::*;
use fake_verbs::{Config, Delivery, Fabric, SilentPeer};
use rdma_sys::*;

#[test]
fn a_send_fills_the_posted_receive() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.write(0, b"hello");
    assert_eq!(b.post_recv(7, 100, 16), 0);
    assert_eq!(a.send(1, 0, 5), 0);
    let [sent] = &a.poll()[..] else {
        panic!("one completion")
    };
    assert_eq!(
        (sent.wr_id, sent.status, sent.qp_num),
        (1, IBV_WC_SUCCESS, a.num())
    );
    let [received] = &b.poll()[..] else {
        panic!("one completion")
    };
    assert_eq!(
        (received.wr_id, received.status, received.byte_len),
        (7, IBV_WC_SUCCESS, 5)
    );
    assert_eq!(
        (received.qp_num, received.opcode),
        (b.num(), ibv_wc_opcode::IBV_WC_RECV)
    );
    assert_eq!(b.read(100, 5), b"hello");
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn write_read_and_atomics_reach_the_peers_memory() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.write(0, b"written");
    a.post(1, 0, 7, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.wr.rdma = rdma_t {
            remote_addr: b.addr(8),
            rkey: b.rkey(),
        };
    });
    assert_eq!(b.read(8, 7), b"written");
    a.post(2, 64, 7, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
        wr.wr.rdma = rdma_t {
            remote_addr: b.addr(8),
            rkey: b.rkey(),
        };
    });
    assert_eq!(a.read(64, 7), b"written");
    let at = (b.addr(0) as usize).next_multiple_of(8) - b.addr(0) as usize + 128;
    b.write(at, &41u64.to_ne_bytes());
    let target = |compare_add, swap| atomic_t {
        remote_addr: b.addr(at),
        rkey: b.rkey(),
        compare_add,
        swap,
    };
    a.post(3, 80, 8, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
        wr.wr.atomic = target(1, 0);
    });
    a.post(4, 88, 8, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
        wr.wr.atomic = target(42, 1000);
    });
    assert_eq!(a.read(80, 8), 41u64.to_ne_bytes());
    assert_eq!(a.read(88, 8), 42u64.to_ne_bytes());
    assert_eq!(b.read(at, 8), 1000u64.to_ne_bytes());
    let ok: Vec<_> = (1..=4).map(|id| (id, IBV_WC_SUCCESS)).collect();
    assert_eq!(a.outcomes(), ok);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn immediate_data_comes_with_sends_and_writes() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.write(0, b"abcd");
    b.post_recv(1, 100, 4);
    b.post_recv(2, 110, 4);
    a.post(1, 0, 4, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_IMM;
        wr.imm_data_invalidated_rkey_union.imm_data = 7u32.to_be();
    });
    a.post(2, 0, 4, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.imm_data_invalidated_rkey_union.imm_data = 8u32.to_be();
        wr.wr.rdma = rdma_t {
            remote_addr: b.addr(16),
            rkey: b.rkey(),
        };
    });
    let received = b.poll();
    let seen: Vec<_> = received
        .iter()
        .map(|wc| (wc.opcode, wc.byte_len, wc.wc_flags))
        .collect();
    let with_imm = ibv_wc_flags::IBV_WC_WITH_IMM.0;
    assert_eq!(
        seen,
        [
            (ibv_wc_opcode::IBV_WC_RECV, 4, with_imm),
            (ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM, 4, with_imm)
        ]
    );
    let imm = received
        .iter()
        .map(|wc| unsafe { wc.imm_data_invalidated_rkey_union.imm_data });
    assert_eq!(imm.map(u32::from_be).collect::<Vec<_>>(), [7, 8]);
    assert_eq!(b.read(16, 4), b"abcd");
    assert_eq!(
        b.read(110, 4),
        [0; 4],
        "a write does not touch the receive's buffer"
    );
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn inline_data_may_be_reused_after_the_post() {
    let fabric = Fabric::with(Config {
        delivery: Delivery::Manual,
        ..Config::default()
    });
    let (a, b) = pair();
    b.post_recv(1, 0, 8);
    let mut data = *b"inline!!";
    let addr = data.as_mut_ptr().expose_provenance() as u64;
    let mut sge = ibv_sge {
        addr,
        length: 8,
        lkey: 0,
    };
    let mut wr = send_wr(1, &mut sge, 1);
    wr.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    let mut bad = null_mut();
    assert_eq!(unsafe { ibv_post_send(a.qp, &mut wr, &mut bad) }, 0);
    data.fill(0);
    assert_eq!(fabric.deliver(), 1);
    assert_eq!(b.read(0, 8), b"inline!!");
    let mut too_long = ibv_sge {
        length: 1000,
        ..sge
    };
    wr.sg_list = &mut too_long;
    let wr = &raw mut wr;
    assert_eq!(unsafe { ibv_post_send(a.qp, wr, &mut bad) }, libc::EINVAL);
    assert_eq!(bad, wr);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn several_entries_are_gathered_and_scattered() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.write(0, b"0123456789");
    let mut to = [b.sge(100, 3), b.sge(200, 7)];
    let mut recv = ibv_recv_wr {
        wr_id: 1,
        next: null_mut(),
        sg_list: to.as_mut_ptr(),
        num_sge: 2,
    };
    assert_eq!(
        unsafe { ibv_post_recv(b.qp, &mut recv, &mut null_mut()) },
        0
    );
    let mut from = [a.sge(5, 5), a.sge(0, 5)];
    let mut wr = send_wr(1, from.as_mut_ptr(), 2);
    assert_eq!(unsafe { ibv_post_send(a.qp, &mut wr, &mut null_mut()) }, 0);
    assert_eq!(
        (b.read(100, 3), b.read(200, 7)),
        (b"567".to_vec(), b"8901234".to_vec())
    );
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_message_too_long_for_the_receive_breaks_both_ends() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    b.post_recv(1, 0, 4);
    b.post_recv(2, 10, 4);
    a.send(1, 0, 5);
    assert_eq!(a.outcomes(), [(1, IBV_WC_REM_INV_REQ_ERR)]);
    assert_eq!(
        b.outcomes(),
        [(1, IBV_WC_LOC_LEN_ERR), (2, IBV_WC_WR_FLUSH_ERR)]
    );
    assert_eq!(
        (fabric.qp_state(a.num()), fabric.qp_state(b.num())),
        (IBV_QPS_ERR, IBV_QPS_ERR)
    );
    a.close();
    b.close();
    drop(fabric);
}

/// Posts a write of `len` bytes to `offset` beyond the start of the peer's region; gives the outcome.
fn write_to(a: &Side, b: &Side, offset: usize, len: usize, rkey: u32) -> u32 {
    a.post(1, 0, len, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.wr.rdma = rdma_t {
            remote_addr: b.addr(offset),
            rkey,
        };
    });
    a.outcomes()[0].1
}

#[test]
fn remote_access_is_checked_for_bounds_and_key() {
    for (offset, len, wrong_key) in [(REGION - 4, 5, 0), (REGION, 1, 0), (0, 4, 2)] {
        let fabric = Fabric::new();
        let (a, b) = pair();
        let status = write_to(&a, &b, offset, len, b.rkey() ^ wrong_key);
        assert_eq!(status, IBV_WC_REM_ACCESS_ERR);
        assert_eq!(
            fabric.qp_state(b.num()),
            IBV_QPS_ERR,
            "the responder breaks too"
        );
        a.close();
        b.close();
        drop(fabric);
    }
}

#[test]
fn remote_keys_and_local_keys_are_not_interchangeable() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let lkey = unsafe { (*b.mr).lkey };
    assert_eq!(write_to(&a, &b, 0, 4, lkey), IBV_WC_REM_ACCESS_ERR);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn remote_access_needs_the_right_of_region_and_queue_pair() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let mut memory = vec![0u8; 16];
    let addr = memory.as_mut_ptr();
    let local_only = unsafe { ibv_reg_mr(b.pd, addr.cast(), 16, LOCAL_WRITE) };
    a.post(1, 0, 4, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
        let rkey = unsafe { (*local_only).rkey };
        wr.wr.rdma = rdma_t {
            remote_addr: addr.expose_provenance() as u64,
            rkey,
        };
    });
    assert_eq!(a.outcomes(), [(1, IBV_WC_REM_ACCESS_ERR)]);
    assert_eq!(unsafe { ibv_dereg_mr(local_only) }, 0);
    a.close();
    b.close();

    let (a, b) = pair();
    let mut attr: ibv_qp_attr = zeroed();
    attr.qp_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
    assert_eq!(
        b.modify(&mut attr, ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS),
        0
    );
    assert_eq!(write_to(&a, &b, 0, 4, b.rkey()), IBV_WC_REM_ACCESS_ERR);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn local_keys_are_checked_for_bounds_and_domain() {
    let fabric = Fabric::new();
    for foreign in [false, true] {
        let (a, b) = pair();
        b.post_recv(1, 0, 64);
        let mut sge = if foreign {
            b.sge(0, 4)
        } else {
            a.sge(REGION - 2, 4)
        };
        let mut wr = send_wr(1, &mut sge, 1);
        assert_eq!(unsafe { ibv_post_send(a.qp, &mut wr, &mut null_mut()) }, 0);
        assert_eq!(a.outcomes(), [(1, IBV_WC_LOC_PROT_ERR)]);
        assert_eq!(b.outcomes(), [], "nothing left the sender");
        a.close();
        b.close();
    }
    drop(fabric);
}

#[test]
fn an_atomic_must_be_aligned() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let odd = if b.addr(0) % 8 == 0 {
        4
    } else {
        (8 - b.addr(0) % 8) as usize + 4
    };
    a.post(1, 0, 8, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
        let (remote_addr, rkey) = (b.addr(odd), b.rkey());
        wr.wr.atomic = atomic_t {
            remote_addr,
            rkey,
            compare_add: 1,
            swap: 0,
        };
    });
    assert_eq!(a.outcomes(), [(1, IBV_WC_REM_INV_REQ_ERR)]);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_send_waits_for_a_receive_and_gives_up_without_retries() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.write(0, b"later");
    a.send(1, 0, 5);
    assert_eq!(a.outcomes(), []);
    b.post_recv(9, 0, 5);
    assert_eq!(
        (a.outcomes(), b.read(0, 5)),
        (vec![(1, IBV_WC_SUCCESS)], b"later".to_vec())
    );
    a.send(2, 0, 5);
    fabric.expire_retries();
    assert_eq!(a.outcomes(), [(2, IBV_WC_RNR_RETRY_EXC_ERR)]);
    assert_eq!(
        fabric.qp_state(b.num()),
        IBV_QPS_RTS,
        "the receiver did nothing wrong"
    );
    b.poll();
    a.close();
    b.close();

    let (a, b) = (Side::new(0), Side::new(1));
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!(
            [
                one.init(),
                one.ready_to_receive(other),
                one.ready_to_send(0)
            ],
            [0; 3]
        );
    }
    a.send(1, 0, 5);
    assert_eq!(a.outcomes(), [(1, IBV_WC_RNR_RETRY_EXC_ERR)]);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_failure_flushes_what_is_posted_receives_and_sends_in_turn() {
    let fabric = Fabric::with(Config {
        delivery: Delivery::Manual,
        ..Config::default()
    });
    let (a, b) = pair();
    for id in 1..=2 {
        a.post_recv(10 + id, 0, 8);
    }
    for id in 1..=3 {
        a.post(id, 0, 8, |wr| wr.send_flags = 0); // unsignaled
    }
    fabric.break_qp(a.num());
    let flushed = |id| (id, IBV_WC_WR_FLUSH_ERR);
    assert_eq!(a.outcomes(), [11, 1, 12, 2, 3].map(flushed));
    assert_eq!(a.send(4, 0, 8), 0, "posting in the error state is accepted");
    assert_eq!(a.post_recv(14, 0, 8), 0);
    assert_eq!(a.outcomes(), [4, 14].map(flushed));
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn rxe_never_completes_a_receive_posted_in_the_error_state() {
    let fabric = Fabric::with(Config::rxe());
    let (a, b) = pair();
    assert_eq!(a.to(IBV_QPS_ERR), 0);
    assert_eq!(a.post_recv(1, 0, 8), 0);
    assert_eq!(a.outcomes(), []);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn fields_of_a_failed_completion_are_zero_or_poison() {
    for (config, opcode) in [(Config::rxe(), 0), (Config::default(), 0xdead_beef)] {
        let fabric = Fabric::with(config);
        let (a, b) = pair();
        a.post_recv(1, 0, 8);
        assert_eq!(a.to(IBV_QPS_ERR), 0);
        let wc = &a.poll()[0];
        assert_eq!((wc.qp_num, wc.opcode), (a.num(), opcode));
        a.close();
        b.close();
        drop(fabric);
    }
}

#[test]
fn slots_of_unsignaled_sends_come_back_with_a_later_polled_completion() {
    let fabric = Fabric::new();
    let (a, b) = connected(
        Side::with(0, ibv_qp_type::IBV_QPT_RC, 3, 1, 10),
        Side::with(1, ibv_qp_type::IBV_QPT_RC, 3, 15, 10),
    );
    for id in 0..6 {
        b.post_recv(id, 0, 8);
    }
    let unsignaled = |wr: &mut ibv_send_wr| wr.send_flags = 0;
    assert_eq!(
        [
            a.post(1, 0, 1, unsignaled),
            a.post(2, 0, 1, unsignaled),
            a.send(3, 0, 1)
        ],
        [0; 3]
    );
    assert_eq!(
        a.send(4, 0, 1),
        libc::ENOMEM,
        "executed, but nothing was polled"
    );
    assert_eq!(a.outcomes(), [(3, IBV_WC_SUCCESS)]);
    assert_eq!(fabric.qps()[0].sends, 0);
    assert_eq!(
        [a.post(5, 0, 1, unsignaled), a.post(6, 0, 1, unsignaled)],
        [0; 2]
    );
    assert_eq!(a.post(7, 0, 1, unsignaled), 0);
    assert_eq!(
        a.send(8, 0, 1),
        libc::ENOMEM,
        "three unsignaled ones: stuck for ever"
    );
    a.close();
    b.close();
    drop(fabric);

    let fabric = Fabric::with(Config::rxe());
    let (a, b) = connected(
        Side::with(0, ibv_qp_type::IBV_QPT_RC, 3, 1, 10),
        Side::with(1, ibv_qp_type::IBV_QPT_RC, 3, 63, 100),
    );
    for id in 0..50 {
        b.post_recv(id, 0, 8);
        assert_eq!(a.post(id, 0, 1, unsignaled), 0, "rxe frees slots by itself");
    }
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_queue_pair_that_is_not_connected_refuses_sends() {
    let fabric = Fabric::new();
    let a = Side::new(0);
    assert_eq!(a.post_recv(1, 0, 1), libc::EINVAL, "no receives in RESET");
    assert_eq!(a.send(1, 0, 1), libc::EINVAL);
    assert_eq!(a.init(), 0);
    assert_eq!(a.post_recv(1, 0, 1), 0);
    assert_eq!(a.send(1, 0, 1), libc::EINVAL);
    a.close();
    drop(fabric);
}

#[test]
fn a_chain_is_refused_from_the_bad_request_on() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    (0..3).for_each(|id| assert_eq!(b.post_recv(id, 0, 8), 0));
    let mut sge = a.sge(0, 4);
    let sge = &raw mut sge;
    let mut wrs = [1, 2, 3].map(|id| send_wr(id, sge, 1));
    let first = wrs.as_mut_ptr();
    unsafe {
        (*first).next = first.add(1);
        (*first.add(1)).next = first.add(2);
    }
    fabric.refuse_post_at("ibv_post_send", 1, libc::ENOMEM);
    let mut bad = null_mut();
    assert_eq!(
        unsafe { ibv_post_send(a.qp, first, &mut bad) },
        libc::ENOMEM
    );
    assert_eq!(unsafe { (*bad).wr_id }, 2);
    assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
    assert_eq!(
        unsafe { ibv_post_send(a.qp, bad, &mut null_mut()) },
        0,
        "the rest can be posted"
    );
    assert_eq!(a.outcomes(), [(2, IBV_WC_SUCCESS), (3, IBV_WC_SUCCESS)]);
    fabric.fail_nth("ibv_post_send", 0, libc::EIO);
    assert_eq!(unsafe { ibv_post_send(a.qp, first, &mut bad) }, libc::EIO);
    assert_eq!(bad, first, "nothing was posted");
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn reads_hang_where_no_resources_were_granted() {
    let fabric = Fabric::new();
    let (a, b) = (Side::new(0), Side::new(1));
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!([one.init(), one.ready_to_receive(other)], [0; 2]);
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTS;
        use ibv_qp_attr_mask as m;
        let mask = m::IBV_QP_STATE | m::IBV_QP_SQ_PSN | m::IBV_QP_TIMEOUT | m::IBV_QP_RETRY_CNT;
        assert_eq!(
            one.modify(
                &mut attr,
                mask | m::IBV_QP_RNR_RETRY | m::IBV_QP_MAX_QP_RD_ATOMIC
            ),
            0
        );
    }
    let read = |wr: &mut ibv_send_wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
        wr.wr.rdma = rdma_t {
            remote_addr: b.addr(0),
            rkey: b.rkey(),
        };
    };
    assert_eq!(a.post(1, 0, 4, read), 0);
    fabric.expire_retries();
    assert_eq!(a.outcomes(), []);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_peer_that_is_gone_is_noticed_by_the_next_request() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    b.close();
    a.send(1, 0, 1);
    assert_eq!(a.outcomes(), [(1, IBV_WC_RETRY_EXC_ERR)]);
    a.close();
    drop(fabric);
}

#[test]
fn a_cut_link_holds_requests_until_it_is_mended_or_retries_run_out() {
    let fabric = Fabric::with(Config {
        silent_peer: SilentPeer::Wait,
        ..Config::default()
    });
    let (a, b) = pair();
    b.post_recv(1, 0, 8);
    fabric.cut_link();
    a.send(1, 0, 1);
    assert_eq!(a.outcomes(), []);
    fabric.mend_link();
    assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
    fabric.cut_link();
    a.send(2, 0, 1);
    fabric.expire_retries();
    assert_eq!(a.outcomes(), [(2, IBV_WC_RETRY_EXC_ERR)]);
    b.poll();
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn completions_outlive_their_queue_pair() {
    let fabric = Fabric::new();
    let (mut a, b) = pair();
    b.post_recv(1, 0, 8);
    a.send(1, 0, 1);
    let (num, cq) = (a.num(), a.cq);
    assert_eq!(unsafe { ibv_destroy_qp(a.qp) }, 0);
    let left = poll(cq);
    assert_eq!((left.len(), left[0].qp_num), (1, num));
    let mut init = init_attr(cq, ibv_qp_type::IBV_QPT_RC, 1, 1);
    a.qp = unsafe { ibv_create_qp(a.pd, &mut init) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn windows_give_access_and_lose_it_by_invalidation() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let mut memory = vec![0u8; 64];
    let base = memory.as_mut_ptr();
    let addr = base.expose_provenance() as u64;
    unsafe {
        let flags = LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_MW_BIND.0 as i32;
        let mr = ibv_reg_mr(b.pd, base.cast(), 64, flags);
        let mw = ibv_alloc_mw(b.pd, ibv_mw_type::IBV_MW_TYPE_2).expect("windows are there");
        let rkey = ibv_inc_rkey((*mw).rkey);
        let mut bind = send_wr(5, null_mut(), 0);
        bind.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
        let mw_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        let bind_info = ibv_mw_bind_info {
            mr,
            addr: addr + 16,
            length: 8,
            mw_access_flags,
        };
        bind.bind_mw_tso_union.bind_mw = bind_mw_t {
            mw,
            rkey,
            bind_info,
        };
        assert_eq!(ibv_post_send(b.qp, &mut bind, &mut null_mut()), 0);
        assert_eq!((*mw).rkey, rkey);
        assert_eq!(b.outcomes(), [(5, IBV_WC_SUCCESS)]);
        assert_eq!(ibv_dereg_mr(mr), libc::EBUSY, "a window is bound to it");

        let write = |at: u64| {
            move |wr: &mut ibv_send_wr| {
                wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                wr.wr.rdma = rdma_t {
                    remote_addr: at,
                    rkey,
                };
            }
        };
        a.write(0, b"window");
        a.post(1, 0, 6, write(addr + 16));
        assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
        assert_eq!(std::slice::from_raw_parts(base.add(16), 6), b"window");

        b.post_recv(7, 0, 8);
        a.post(2, 0, 1, |wr| {
            wr.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
            wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
        });
        assert_eq!(a.outcomes(), [(2, IBV_WC_SUCCESS)]);
        let received = b.poll();
        assert_eq!(received[0].wc_flags, ibv_wc_flags::IBV_WC_WITH_INV.0);
        a.post(3, 0, 6, write(addr + 16));
        assert_eq!(a.outcomes(), [(3, IBV_WC_REM_ACCESS_ERR)]);
        assert_eq!(ibv_dealloc_mw(mw), 0);
        assert_eq!(ibv_dereg_mr(mr), 0);
    }
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn rxe_keeps_a_send_it_refused_and_sends_it_after_the_connect() {
    let fabric = Fabric::with(Config::rxe());
    let (a, b) = (Side::new(0), Side::new(1));
    assert_eq!(a.init(), 0);
    assert_eq!(a.send(5, 0, 4), libc::EINVAL);
    let (a, b) = connected_from_init(a, b);
    assert_eq!(b.post_recv(1, 0, 8), 0);
    assert_eq!(a.outcomes(), [(5, IBV_WC_SUCCESS)], "with its old wr_id");
    a.close();
    b.close();
    drop(fabric);
}

/// As `connected`, for a first side that is in INIT already.
fn connected_from_init(a: Side, b: Side) -> (Side, Side) {
    assert_eq!(b.init(), 0);
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!([one.ready_to_receive(other), one.ready_to_send(6)], [0; 2]);
    }
    (a, b)
}

#[test]
fn rxe_refuses_a_misaligned_atomic_at_the_post() {
    let fabric = Fabric::with(Config::rxe());
    let (a, b) = pair();
    let odd = |wr: &mut ibv_send_wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
        let remote_addr = b.addr(0) / 8 * 8 + 12;
        wr.wr.atomic = atomic_t {
            remote_addr,
            rkey: b.rkey(),
            compare_add: 1,
            swap: 0,
        };
    };
    assert_eq!(a.post(1, 0, 8, odd), libc::EINVAL);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn the_test_chooses_which_queue_pair_goes_on() {
    let fabric = Fabric::with(Config {
        delivery: Delivery::Manual,
        ..Config::default()
    });
    let (a, b) = pair();
    for side in [&a, &b] {
        assert_eq!([side.post_recv(9, 0, 8), side.send(1, 0, 1)], [0; 2]);
    }
    assert!(fabric.step_qp(b.num()));
    assert_eq!((a.outcomes(), b.outcomes()), (vec![(9, 0)], vec![(1, 0)]));
    assert!(!fabric.step_qp(b.num()));
    assert!(fabric.step_qp(a.num()));
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_queue_pair_that_receives_before_it_may_send_is_told() {
    let fabric = Fabric::new();
    let (a, b) = (Side::new(0), Side::new(1));
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!([one.init(), one.ready_to_receive(other)], [0; 2]);
    }
    assert_eq!(
        [a.ready_to_send(6), b.post_recv(1, 0, 8), a.send(1, 0, 1)],
        [0; 3]
    );
    let mut event: [u64; 2] = zeroed();
    let event = (&raw mut event).cast::<ibv_async_event>();
    assert_eq!(unsafe { ibv_get_async_event(b.context, event) }, 0);
    assert_eq!(unsafe { event.cast::<u32>().add(2).read() }, 4, "COMM_EST");
    unsafe { ibv_ack_async_event(event) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_receive_needs_local_write() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let mut memory = vec![0u8; 16];
    let start = memory.as_mut_ptr();
    let read_only = unsafe { ibv_reg_mr(b.pd, start.cast(), 16, 0) };
    let (addr, lkey) = (start.expose_provenance() as u64, unsafe {
        (*read_only).lkey
    });
    let mut sge = ibv_sge {
        addr,
        length: 16,
        lkey,
    };
    let mut recv = ibv_recv_wr {
        wr_id: 1,
        next: null_mut(),
        sg_list: &mut sge,
        num_sge: 1,
    };
    assert_eq!(
        unsafe { ibv_post_recv(b.qp, &mut recv, &mut null_mut()) },
        0
    );
    a.send(1, 0, 4);
    assert_eq!(a.outcomes(), [(1, IBV_WC_REM_OP_ERR)]);
    assert_eq!(b.outcomes(), [(1, IBV_WC_LOC_PROT_ERR)]);
    assert_eq!(unsafe { ibv_dereg_mr(read_only) }, 0);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn remote_keys_hold_in_their_own_domain_only() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let stranger = Side::new(1);
    assert_eq!(
        write_to(&a, &stranger, 0, 4, stranger.rkey()),
        IBV_WC_REM_ACCESS_ERR
    );
    stranger.close();
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn only_the_queue_pair_it_is_connected_to_answers() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let intruder = Side::new(0);
    assert_eq!(
        [
            intruder.init(),
            intruder.ready_to_receive(&b),
            intruder.ready_to_send(6)
        ],
        [0; 3]
    );
    intruder.send(1, 0, 1);
    assert_eq!(intruder.outcomes(), [(1, IBV_WC_RETRY_EXC_ERR)]);
    intruder.close();
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_path_to_the_wrong_address_reaches_nobody() {
    let fabric = Fabric::new();
    let (a, b) = (Side::new(0), Side::new(1));
    assert_eq!(
        [b.init(), b.ready_to_receive(&a), b.ready_to_send(6)],
        [0; 3]
    );
    let wrong_path = |from: &Side| {
        use ibv_qp_attr_mask as m;
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTR;
        (attr.path_mtu, attr.dest_qp_num) = (ibv_mtu::IBV_MTU_1024, b.num());
        attr.ah_attr = ah_attr(0); // the sender's own device
        let path = m::IBV_QP_AV | m::IBV_QP_PATH_MTU | m::IBV_QP_DEST_QPN | m::IBV_QP_RQ_PSN;
        let reads = m::IBV_QP_MAX_DEST_RD_ATOMIC | m::IBV_QP_MIN_RNR_TIMER;
        from.modify(&mut attr, m::IBV_QP_STATE | path | reads)
    };
    assert_eq!([a.init(), wrong_path(&a), a.ready_to_send(6)], [0; 3]);
    assert_eq!(b.post_recv(1, 0, 8), 0);
    a.send(1, 0, 1);
    assert_eq!(a.outcomes(), [(1, IBV_WC_RETRY_EXC_ERR)]);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_write_of_nothing_needs_no_key() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    assert_eq!(write_to(&a, &b, 0, 0, 0xbad), IBV_WC_SUCCESS);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn windows_of_type_1_get_a_new_key_by_binding() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let idle = Side::new(1);
    let mut memory = vec![0u8; 16];
    let start = memory.as_mut_ptr();
    unsafe {
        let flags = LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_MW_BIND.0 as i32;
        let mr = ibv_reg_mr(b.pd, start.cast(), 16, flags);
        let mw = ibv_alloc_mw(b.pd, ibv_mw_type::IBV_MW_TYPE_1).expect("windows are there");
        let old = (*mw).rkey;
        let addr = start.expose_provenance() as u64;
        let mw_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        let bind_info = ibv_mw_bind_info {
            mr,
            addr,
            length: 16,
            mw_access_flags,
        };
        let send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        let mut bind = ibv_mw_bind {
            wr_id: 3,
            send_flags,
            bind_info,
        };
        assert_eq!(
            ibv_bind_mw(idle.qp, mw, &mut bind),
            libc::EINVAL,
            "not connected"
        );
        assert_eq!(ibv_bind_mw(b.qp, mw, &mut bind), 0);
        assert_ne!((*mw).rkey, old);
        assert_eq!(b.outcomes(), [(3, IBV_WC_SUCCESS)]);
        a.post(1, 0, 4, |wr| {
            wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
            wr.wr.rdma = rdma_t {
                remote_addr: addr,
                rkey: (*mw).rkey,
            };
        });
        assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
        assert_eq!((ibv_dealloc_mw(mw), ibv_dereg_mr(mr)), (0, 0));
    }
    idle.close();
    a.close();
    b.close();
    drop(fabric);
}
