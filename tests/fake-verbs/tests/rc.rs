//! Reliable connections made by hand.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use common::*;
use fake_verbs::Fabric;
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
