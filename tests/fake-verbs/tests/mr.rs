//! Memory regions.
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

fn register(side: &Side, memory: &mut [u8], access: i32) -> *mut ibv_mr {
    unsafe { ibv_reg_mr(side.pd, memory.as_mut_ptr().cast(), memory.len(), access) }
}

#[test]
fn registration_checks_rights_length_and_address() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let mut memory = vec![0u8; 16];
    let remote_write = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 as i32;
    let on_demand = ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as i32;
    for (access, error) in [
        (remote_write, libc::EINVAL),
        (1 << 10, libc::EINVAL),
        (on_demand, libc::EOPNOTSUPP),
    ] {
        assert!(register(&side, &mut memory, access).is_null());
        assert_eq!(errno(), error);
    }
    assert!(register(&side, &mut [], LOCAL_WRITE).is_null());
    assert_eq!(errno(), libc::EINVAL);
    assert!(unsafe { ibv_reg_mr(side.pd, null_mut(), 4, 0) }.is_null());
    assert_eq!(errno(), libc::EFAULT);
    let relaxed = ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0 as i32;
    let mr = register(&side, &mut memory, LOCAL_WRITE | relaxed);
    assert_eq!(unsafe { ((*mr).length, (*mr).pd) }, (16, side.pd));
    assert_ne!(unsafe { (*mr).lkey }, unsafe { (*mr).rkey });
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    assert!(unsafe { ibv_reg_dmabuf_mr(side.pd, 0, 4096, 0, 0, 0) }.is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    side.close();
    drop(fabric);
}

#[test]
fn the_limit_of_locked_memory_is_enomem() {
    let fabric = Fabric::with(Config {
        memlock: REGION + 100,
        ..Config::default()
    });
    let side = Side::new(0);
    let mut memory = vec![0u8; 101];
    assert!(register(&side, &mut memory, 0).is_null());
    assert_eq!(errno(), libc::ENOMEM);
    let mr = register(&side, &mut memory[..100], 0);
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    side.close();
    drop(fabric);
}

#[test]
fn a_region_can_be_addressed_by_another_start() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let mut memory = vec![0u8; 16];
    let addr = memory.as_mut_ptr();
    let mr = unsafe { ibv_reg_mr_iova(b.pd, addr.cast(), 16, 0x1000, ALL_ACCESS) };
    a.write(0, b"iova");
    a.post(1, 0, 4, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.wr.rdma = rdma_t {
            remote_addr: 0x1004,
            rkey: unsafe { (*mr).rkey },
        };
    });
    assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
    assert_eq!(
        unsafe { std::slice::from_raw_parts(addr.add(4), 4) },
        b"iova"
    );
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn reregistration_changes_memory_rights_and_keys() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let (mut first, mut second) = (vec![0u8; 16], vec![0u8; 32]);
    let mr = register(&b, &mut first, LOCAL_WRITE);
    let old = unsafe { (*mr).rkey };
    let to = second.as_mut_ptr();
    let flags = ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_TRANSLATION.0
        | ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS.0;
    let done = unsafe { ibv_rereg_mr(mr, flags as i32, null_mut(), to.cast(), 32, ALL_ACCESS) };
    assert_eq!(done, 0);
    assert_eq!(unsafe { ((*mr).length, (*mr).addr) }, (32, to.cast()));
    assert_ne!(unsafe { (*mr).rkey }, old);
    a.write(0, b"anew");
    a.post(1, 0, 4, |wr| {
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        let remote_addr = to.expose_provenance() as u64 + 28;
        wr.wr.rdma = rdma_t {
            remote_addr,
            rkey: unsafe { (*mr).rkey },
        };
    });
    assert_eq!(a.outcomes(), [(1, IBV_WC_SUCCESS)]);
    assert_eq!(
        unsafe { std::slice::from_raw_parts(to.add(28), 4) },
        b"anew"
    );
    let wrong = unsafe { ibv_rereg_mr(mr, 0, null_mut(), null_mut(), 0, 0) };
    assert_eq!(wrong, ibv_rereg_mr_err_code::IBV_REREG_MR_ERR_INPUT);
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_region_must_outlive_the_posted_work_until_it_is_polled() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let mut memory = vec![0u8; 16];
    let mr = register(&b, &mut memory, LOCAL_WRITE);
    let addr = memory.as_mut_ptr().expose_provenance() as u64;
    let mut sge = ibv_sge {
        addr,
        length: 16,
        lkey: unsafe { (*mr).lkey },
    };
    let mut wr = ibv_recv_wr {
        wr_id: 5,
        next: null_mut(),
        sg_list: &mut sge,
        num_sge: 1,
    };
    assert_eq!(unsafe { ibv_post_recv(b.qp, &mut wr, &mut null_mut()) }, 0);
    a.send(1, 0, 1);
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    let broken = fabric.take_violations();
    assert_eq!(
        broken,
        ["ibv_dereg_mr: a posted request (wr_id 0x5) uses the region"]
    );
    assert_eq!(unsafe { ibv_post_recv(b.qp, &mut wr, &mut null_mut()) }, 0);
    assert!(fabric.take_violations()[0].contains("of a deregistered region"));
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_region_is_free_once_its_completion_was_polled() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    let mut memory = vec![0u8; 16];
    let mr = register(&b, &mut memory, LOCAL_WRITE);
    let addr = memory.as_mut_ptr().expose_provenance() as u64;
    let mut sge = ibv_sge {
        addr,
        length: 16,
        lkey: unsafe { (*mr).lkey },
    };
    let mut wr = ibv_recv_wr {
        wr_id: 5,
        next: null_mut(),
        sg_list: &mut sge,
        num_sge: 1,
    };
    assert_eq!(unsafe { ibv_post_recv(b.qp, &mut wr, &mut null_mut()) }, 0);
    a.send(1, 0, 1);
    assert_eq!(b.outcomes(), [(5, IBV_WC_SUCCESS)]);
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn objects_destroyed_twice_are_noticed() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let mut memory = vec![0u8; 16];
    let mr = register(&side, &mut memory, LOCAL_WRITE);
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, libc::EINVAL);
    let broken = fabric.take_violations();
    assert_eq!(
        broken,
        ["ibv_dereg_mr: not a live memory region (destroyed already?)"]
    );
    side.close();
    drop(fabric);
}
