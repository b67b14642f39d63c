//! Datagrams, address handles and multicast.
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

const UD: u32 = ibv_qp_type::IBV_QPT_UD;

/// Two datagram sides, ready, and a handle from the first to the second.
fn sides() -> (Side, Side, *mut ibv_ah) {
    let (a, b) = (Side::of_kind(0, UD), Side::of_kind(1, UD));
    for side in [&a, &b] {
        assert_eq!(
            [side.init(), side.to(IBV_QPS_RTR), side.ready_to_send(0)],
            [0; 3]
        );
    }
    let ah = unsafe { ibv_create_ah(a.pd, &mut ah_attr(1)) };
    assert!(!ah.is_null());
    (a, b, ah)
}

fn send_to(from: &Side, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32, len: usize) -> i32 {
    from.post(1, 0, len, |wr| {
        wr.wr.ud = ud_t {
            ah,
            remote_qpn,
            remote_qkey,
        }
    })
}

fn close(a: Side, b: Side, ah: *mut ibv_ah) {
    assert_eq!(unsafe { ibv_destroy_ah(ah) }, 0);
    a.close();
    b.close();
}

#[test]
fn a_datagram_arrives_behind_its_header_and_can_be_answered() {
    let fabric = Fabric::new();
    let (a, b, ah) = sides();
    a.write(0, b"ping");
    b.post_recv(1, 0, 64);
    assert_eq!(send_to(&a, ah, b.num(), 0x11, 4), 0);
    assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
    let mut received = b.poll();
    let wc = &mut received[0];
    assert_eq!(
        (wc.byte_len, wc.src_qp, wc.wc_flags),
        (44, a.num(), ibv_wc_flags::IBV_WC_GRH.0)
    );
    assert_eq!(b.read(40, 4), b"ping");

    let mut attr = zeroed();
    let grh = b.addr(0) as usize;
    let grh = std::ptr::with_exposed_provenance_mut(grh);
    assert_eq!(
        unsafe { ibv_init_ah_from_wc(b.context, 1, wc, grh, &mut attr) },
        0
    );
    assert_eq!(unsafe { attr.grh.dgid.raw }, unsafe { gid(0).raw });
    let back = unsafe { ibv_create_ah_from_wc(b.pd, wc, grh, 1) };
    a.post_recv(2, 64, 64);
    assert_eq!(send_to(&b, back, wc.src_qp, 0x11, 4), 0);
    assert_eq!(a.outcomes(), [(2, IBV_WC_SUCCESS)]);
    assert_eq!(unsafe { ibv_destroy_ah(back) }, 0);
    close(a, b, ah);
    drop(fabric);
}

#[test]
fn what_does_not_fit_is_lost_in_silence() {
    let fabric = Fabric::new();
    let (a, b, ah) = sides();
    assert_eq!(send_to(&a, ah, b.num(), 0x11, 4), 0, "no receive");
    b.post_recv(1, 0, 64);
    assert_eq!(send_to(&a, ah, b.num(), 0x12, 4), 0, "another Q_Key");
    assert_eq!(send_to(&a, ah, b.num() + 100, 0x11, 4), 0, "nobody");
    fabric.cut_link();
    assert_eq!(send_to(&a, ah, b.num(), 0x11, 4), 0, "no wire");
    fabric.mend_link();
    assert_eq!(
        a.outcomes()
            .iter()
            .filter(|o| o.1 == IBV_WC_SUCCESS)
            .count(),
        4
    );
    assert_eq!(b.outcomes(), []);
    close(a, b, ah);
    drop(fabric);
}

#[test]
fn datagram_queue_pairs_only_send() {
    let fabric = Fabric::new();
    let (a, b, ah) = sides();
    let write = |wr: &mut ibv_send_wr| wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
    assert_eq!(a.post(1, 0, 4, write), libc::EINVAL);
    assert_eq!(
        send_to(&a, null_mut(), b.num(), 0x11, 4),
        libc::EINVAL,
        "a handle is needed"
    );
    close(a, b, ah);
    drop(fabric);
}

#[test]
fn a_group_receives_what_is_sent_to_it() {
    let fabric = Fabric::new();
    let (a, b, ah) = sides();
    let mut group = [0; 16];
    (group[0], group[1], group[15]) = (0xff, 0x0e, 9);
    let mut attr = ah_attr(1);
    attr.grh.dgid = ibv_gid { raw: group };
    let to_group = unsafe { ibv_create_ah(a.pd, &mut attr) };
    b.post_recv(1, 0, 64);
    assert_eq!(unsafe { ibv_attach_mcast(b.qp, &attr.grh.dgid, 0) }, 0);
    assert_eq!(send_to(&a, to_group, 0xff_ffff, 0x11, 4), 0);
    assert_eq!(b.outcomes(), [(1, IBV_WC_SUCCESS)]);
    assert_eq!(unsafe { ibv_destroy_qp(b.qp) }, libc::EBUSY);
    assert_eq!(fabric.take_violations().len(), 1);
    assert_eq!(unsafe { ibv_detach_mcast(b.qp, &attr.grh.dgid, 0) }, 0);
    assert_eq!(
        unsafe { ibv_detach_mcast(b.qp, &attr.grh.dgid, 0) },
        libc::EINVAL
    );
    assert_eq!(unsafe { ibv_destroy_ah(to_group) }, 0);
    close(a, b, ah);
    drop(fabric);
}

#[test]
fn handles_need_a_global_header() {
    let fabric = Fabric::new();
    let (a, b, ah) = sides();
    let mut attr = ah_attr(1);
    attr.is_global = 0;
    assert!(unsafe { ibv_create_ah(a.pd, &mut attr) }.is_null());
    assert_eq!(errno(), libc::EINVAL);
    close(a, b, ah);
    drop(fabric);
}
