//! Devices, contexts, ports, GIDs, and async events.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use common::*;
use std::ffi::CStr;

use fake_verbs::{Config, Fabric};
use rdma_sys::*;

fn list() -> (*mut *mut ibv_device, i32) {
    let mut count = 0;
    let list = unsafe { ibv_get_device_list(&mut count) };
    assert!(!list.is_null());
    (list, count)
}

#[test]
fn devices_have_names_guids_and_a_terminated_list() {
    let fabric = Fabric::new();
    let (list, count) = list();
    assert_eq!(count, 2);
    let names =
        [0, 1].map(|index| unsafe { CStr::from_ptr(ibv_get_device_name(*list.add(index))) });
    assert_eq!(names, [c"fake0", c"fake1"]);
    assert!(unsafe { *list.add(2) }.is_null());
    let guids = [0, 1].map(|index| unsafe { ibv_get_device_guid(*list.add(index)) });
    assert_ne!(guids[0], guids[1]);
    assert_eq!(unsafe { (**list).node_type }, ibv_node_type::IBV_NODE_CA);
    unsafe { ibv_free_device_list(list) };
    drop(fabric);
}

#[test]
fn there_may_be_no_device_at_all() {
    let fabric = Fabric::with(Config {
        devices: 0,
        ..Config::default()
    });
    let (list, count) = list();
    assert_eq!(count, 0);
    unsafe { ibv_free_device_list(list) };
    drop(fabric);
}

#[test]
fn a_context_outlives_the_list_it_came_from() {
    let fabric = Fabric::new();
    let context = open(1);
    let device = unsafe { (*context).device };
    assert_eq!(
        unsafe { CStr::from_ptr(ibv_get_device_name(device)) },
        c"fake1"
    );
    assert_eq!(unsafe { ibv_close_device(context) }, 0);
    assert!(
        unsafe { ibv_open_device(device) }.is_null(),
        "the device went with the context"
    );
    assert_eq!(fabric.take_violations().len(), 1);
    drop(fabric);
}

#[test]
fn limits_port_and_tables_can_be_asked() {
    let fabric = Fabric::new();
    let context = open(0);
    let mut attr: ibv_device_attr = zeroed();
    assert_eq!(unsafe { ibv_query_device(context, &mut attr) }, 0);
    assert_eq!(
        (attr.max_qp_wr, attr.max_cqe, attr.phys_port_cnt),
        (16_384, 32_767, 1)
    );
    let mut port: ibv_port_attr = zeroed();
    assert_eq!(unsafe { ___ibv_query_port(context, 1, &mut port) }, 0);
    assert_eq!(
        (port.state, port.active_mtu),
        (ibv_port_state::IBV_PORT_ACTIVE, ibv_mtu::IBV_MTU_4096)
    );
    assert_eq!((port.gid_tbl_len, port.link_layer, port.flags), (16, 2, 0));
    assert_eq!(
        unsafe { ___ibv_query_port(context, 2, &mut port) },
        libc::EINVAL
    );
    let mut pkey = 0;
    assert_eq!(unsafe { ibv_query_pkey(context, 1, 0, &mut pkey) }, 0);
    assert_eq!(pkey, 0xffff);
    assert_eq!(unsafe { ibv_query_pkey(context, 1, 1, &mut pkey) }, -1);
    assert_eq!(unsafe { ibv_get_pkey_index(context, 1, 0xffff) }, 0);
    assert_eq!(unsafe { ibv_close_device(context) }, 0);
    drop(fabric);
}

unsafe extern "C" {
    fn _ibv_query_gid_ex(
        context: *mut ibv_context,
        port: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
        flags: u32,
        size: usize,
    ) -> i32;
    fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max: usize,
        flags: u32,
        size: usize,
    ) -> isize;
}

#[test]
fn gids_have_types_and_gaps() {
    let fabric = Fabric::new();
    let context = open(0);
    let mut raw = gid(7);
    assert_eq!(unsafe { ibv_query_gid(context, 1, 3, &mut raw) }, 0);
    assert_eq!(unsafe { raw.raw }, unsafe { gid(0).raw });
    assert_eq!(
        unsafe { ibv_query_gid(context, 1, 15, &mut raw) },
        0,
        "an empty entry reads as zero"
    );
    assert_eq!(unsafe { raw.raw }, [0; 16]);
    assert_eq!(unsafe { ibv_query_gid(context, 1, 16, &mut raw) }, -1);
    assert_eq!(errno(), libc::EINVAL);
    let size = size_of::<ibv_gid_entry>();
    let mut entries: [ibv_gid_entry; 16] = zeroed();
    let first = entries.as_mut_ptr();
    unsafe {
        assert_eq!(_ibv_query_gid_table(context, first, 16, 0, size), 6);
        assert_eq!(
            _ibv_query_gid_table(context, first, 5, 0, size),
            -libc::EINVAL as isize
        );
        assert_eq!(_ibv_query_gid_ex(context, 1, 3, first, 0, size), 0);
        assert_eq!(((*first).gid_type, (*first).gid_index), (2, 3));
        assert_eq!(
            _ibv_query_gid_ex(context, 1, 6, first, 0, size),
            libc::ENODATA
        );
    }
    assert_eq!(unsafe { ibv_close_device(context) }, 0);
    drop(fabric);
}

/// Number and element of the next async event, acked.
fn next_event(context: *mut ibv_context) -> Option<(u32, usize)> {
    let mut event: [u64; 2] = zeroed();
    let event = (&raw mut event).cast::<ibv_async_event>();
    unsafe {
        libc::fcntl((*context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
        if ibv_get_async_event(context, event) != 0 {
            assert_eq!(errno(), libc::EAGAIN);
            return None;
        }
        let number = event.cast::<u32>().add(2).read();
        let element = event.cast::<*mut ibv_qp>().read().addr();
        ibv_ack_async_event(event);
        Some((number, element))
    }
}

#[test]
fn async_events_name_their_object_and_may_have_unknown_numbers() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    fabric.inject_qp_event(side.num(), 999);
    fabric.inject_cq_event(fabric.cqs()[0].id, 0);
    fabric.set_port(0, false);
    assert_eq!(next_event(side.context), Some((999, side.qp.addr())));
    assert_eq!(next_event(side.context), Some((0, side.cq.addr())));
    assert_eq!(
        next_event(side.context).map(|e| (e.0, e.1 as u32)),
        Some((10, 1))
    );
    assert_eq!(next_event(side.context), None);
    let mut port: ibv_port_attr = zeroed();
    assert_eq!(unsafe { ___ibv_query_port(side.context, 1, &mut port) }, 0);
    assert_eq!(port.state, ibv_port_state::IBV_PORT_DOWN);
    side.close();
    drop(fabric);
}

#[test]
fn an_unacked_async_event_is_a_violation_when_the_object_goes() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    fabric.inject_qp_event(side.num(), 1);
    let mut event: [u64; 2] = zeroed();
    let event = (&raw mut event).cast::<ibv_async_event>();
    assert_eq!(unsafe { ibv_get_async_event(side.context, event) }, 0);
    side.close();
    assert!(fabric.take_violations()[0].starts_with("ibv_destroy_qp: 1 async events"));
    drop(fabric);
}

#[test]
fn an_object_waits_for_the_thread_that_acks_its_event() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    fabric.inject_qp_event(side.num(), 1);
    let mut event: [u64; 2] = zeroed();
    let event = (&raw mut event).cast::<ibv_async_event>();
    assert_eq!(unsafe { ibv_get_async_event(side.context, event) }, 0);
    let address = event.expose_provenance();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let event = std::ptr::with_exposed_provenance_mut(address);
            unsafe { ibv_ack_async_event(event) };
        });
        side.close();
    });
    drop(fabric);
}

#[test]
fn a_removed_device_is_told_breaks_its_queue_pairs_and_leaves_the_list() {
    let fabric = Fabric::new();
    let (a, b) = pair();
    a.post_recv(1, 0, 8);
    fabric.remove_device(0);
    assert_eq!(a.outcomes(), [(1, IBV_WC_WR_FLUSH_ERR)]);
    assert_eq!(next_event(a.context).map(|e| e.0), Some(8));
    let (list, count) = list();
    assert_eq!(count, 1);
    unsafe { ibv_free_device_list(list) };
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn numbers_have_words() {
    let text = |ptr| unsafe { CStr::from_ptr(ptr) };
    unsafe {
        assert_eq!(
            text(ibv_wc_status_str(IBV_WC_RETRY_EXC_ERR)),
            c"transport retry counter exceeded"
        );
        assert_eq!(text(ibv_wc_status_str(1000)), c"unknown");
        assert_eq!(text(ibv_node_type_str(-1)), c"unknown");
        assert_eq!(text(ibv_port_state_str(4)), c"active");
        assert_eq!(
            text(ibv_event_type_str(ibv_event_type::IBV_EVENT_QP_FATAL)),
            c"local work queue catastrophic error"
        );
        assert_eq!(text(rdma_event_str(8)), c"RDMA_CM_EVENT_REJECTED");
        assert_eq!(text(rdma_event_str(99)), c"UNKNOWN EVENT");
    }
}

#[test]
fn limits_can_be_chosen() {
    let limits = fake_verbs::Limits {
        wr: 31,
        cqe: 63,
        rd_atomic: 16,
        ..Default::default()
    };
    let fabric = Fabric::with(Config {
        limits,
        ..Config::default()
    });
    let side = Side::with(0, ibv_qp_type::IBV_QPT_RC, 31, 16, 63);
    let mut attr: ibv_device_attr = zeroed();
    assert_eq!(unsafe { ibv_query_device(side.context, &mut attr) }, 0);
    assert_eq!(
        (attr.max_qp_wr, attr.max_cqe, attr.max_qp_rd_atom),
        (31, 63, 16)
    );
    let mut init = init_attr(side.cq, ibv_qp_type::IBV_QPT_RC, 32, 1);
    assert!(unsafe { ibv_create_qp(side.pd, &mut init) }.is_null());
    side.close();
    drop(fabric);
}

#[test]
fn async_events_that_were_not_fetched_go_with_their_object() {
    let fabric = Fabric::new();
    let side = Side::new(0);
    let mut init = init_attr(side.cq, ibv_qp_type::IBV_QPT_RC, 1, 1);
    let other = unsafe { ibv_create_qp(side.pd, &mut init) };
    fabric.inject_qp_event(unsafe { (*other).qp_num }, 1);
    assert_eq!(unsafe { ibv_destroy_qp(other) }, 0);
    assert_eq!(next_event(side.context), None);
    side.close();
    drop(fabric);
}
