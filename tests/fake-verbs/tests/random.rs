//! Random programs: whatever happens, each accepted request comes to exactly one end.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::collections::BTreeMap;

use common::*;
use fake_verbs::{Config, Delivery, Fabric, SilentPeer};
use rdma_sys::*;

/// Marsaglia's xorshift: small, and the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What was posted on one side and has not completed: by id, whether it is signaled.
type Pending = BTreeMap<u64, bool>;

/// Takes completions out of the books; each must be in them, and only once.
fn settle(side: &Side, pending: &mut Pending) {
    for wc in side.poll() {
        let known = pending.remove(&wc.wr_id);
        assert!(
            known.is_some(),
            "completion of {} was not expected",
            wc.wr_id
        );
        assert!(
            known == Some(true) || wc.status != IBV_WC_SUCCESS,
            "{} is unsignaled",
            wc.wr_id
        );
        assert_eq!(wc.qp_num, side.num());
    }
}

/// One random request; what was accepted is put into the books.
fn post(random: &mut Random, side: &Side, peer: &Side, id: u64, pending: &mut Pending) {
    let (offset, len) = (random.below(200) as usize, random.below(40) as usize);
    if random.below(2) == 0 {
        if side.post_recv(id, offset, len.max(1)) == 0 {
            pending.insert(id, true);
        }
        return;
    }
    let signaled = random.below(3) > 0;
    let remote_addr = peer.addr(random.below(230) as usize);
    let rkey = peer.rkey() ^ if random.below(50) == 0 { 2 } else { 0 };
    let kind = random.below(4);
    let posted = side.post(id, offset, len, |wr| {
        wr.send_flags = if signaled {
            ibv_send_flags::IBV_SEND_SIGNALED.0
        } else {
            0
        };
        wr.wr.rdma = rdma_t { remote_addr, rkey };
        wr.opcode = [
            ibv_wr_opcode::IBV_WR_SEND,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            ibv_wr_opcode::IBV_WR_RDMA_READ,
        ][kind as usize];
    });
    if posted == 0 {
        pending.insert(id, signaled);
    } else {
        assert!(posted == libc::ENOMEM, "{posted}");
    }
}

fn disturb(random: &mut Random, fabric: &Fabric, sides: [&Side; 2]) {
    match random.below(60) {
        0 => fabric.cut_link(),
        1 => fabric.break_qp(sides[random.below(2) as usize].num()),
        2 => fabric.hold_completions(),
        3 => {
            fabric.expire_retries();
        }
        4..=9 => fabric.mend_link(),
        10..=14 => fabric.release_completions(),
        _ => {
            fabric.step();
        }
    }
}

fn run(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let delivery = if seed.is_multiple_of(2) {
        Delivery::Auto
    } else {
        Delivery::Manual
    };
    let silent_peer = if seed.is_multiple_of(3) {
        SilentPeer::Fail
    } else {
        SilentPeer::Wait
    };
    let fabric = Fabric::with(Config {
        delivery,
        silent_peer,
        ..Config::default()
    });
    let (a, b) = pair();
    let mut books = [Pending::new(), Pending::new()];
    for id in 1..150 {
        let left = random.below(2) == 0;
        let (side, peer) = if left { (&a, &b) } else { (&b, &a) };
        post(&mut random, side, peer, id, &mut books[usize::from(!left)]);
        disturb(&mut random, &fabric, [&a, &b]);
        settle(&a, &mut books[0]);
        settle(&b, &mut books[1]);
    }
    fabric.release_completions();
    assert_eq!([a.to(IBV_QPS_ERR), b.to(IBV_QPS_ERR)], [0; 2]);
    settle(&a, &mut books[0]);
    settle(&b, &mut books[1]);
    // Unsignaled ones that succeeded say nothing; all others have been heard of.
    for pending in &books {
        assert!(
            pending.values().all(|&signaled| !signaled),
            "seed {seed}: {pending:?}"
        );
    }
    a.close();
    b.close();
    fabric.check();
}

#[test]
fn each_accepted_request_comes_to_one_end() {
    let seeds = if cfg!(miri) { 1 } else { 300 };
    (1..=seeds).for_each(run);
}
