//! The connection manager.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use std::ptr::null_mut;

use common::*;
use fake_verbs::Fabric;
use rdma_sys::rdma_cm_event_type::*;
use rdma_sys::*;

/// Listener, active id and passive id, both ends accepted and established.
fn establish(server: &Channel, client: &Channel) -> [*mut rdma_cm_id; 3] {
    let listening = listener(server, "0.0.0.0:7471");
    let active = client.id();
    resolve(client, active, "10.9.0.2:7471");
    assert_eq!(
        unsafe { rdma_connect(active, &mut conn_param(11, b"hi")) },
        0
    );
    let request = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.listen_id, listening);
    assert_eq!((request.data.len(), &request.data[..3]), (56, &b"hi\0"[..]));
    assert_eq!(
        unsafe { rdma_accept(request.id, &mut conn_param(22, b"welcome")) },
        0
    );
    let response = client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    assert_eq!(
        (response.data.len(), &response.data[..7]),
        (196, &b"welcome"[..])
    );
    assert_eq!(unsafe { rdma_establish(active) }, 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED);
    [listening, active, request.id]
}

#[test]
fn two_ids_connect_and_disconnect() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(server.expect(RDMA_CM_EVENT_DISCONNECTED).status, 0);
    assert_eq!(client.next(), None);
    assert_eq!(unsafe { rdma_disconnect(passive) }, 0);
    client.expect(RDMA_CM_EVENT_DISCONNECTED);
    fabric.expire_timewait();
    client.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    server.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    [listening, active, passive].into_iter().for_each(destroy);
    server.close();
    client.close();
    drop(fabric);
}

/// A request from a fresh active id, up to the event at the listener: active and passive id.
fn request(server: &Channel, client: &Channel, port: u16) -> [*mut rdma_cm_id; 2] {
    let active = client.id();
    resolve(client, active, &format!("10.9.0.2:{port}"));
    assert_eq!(unsafe { rdma_connect(active, &mut conn_param(11, b"")) }, 0);
    [active, server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id]
}

fn close(channels: [Channel; 2], ids: &[*mut rdma_cm_id]) {
    ids.iter().copied().for_each(destroy);
    channels.into_iter().for_each(Channel::close);
}

#[test]
fn resolving_shows_device_addresses_and_path() {
    let fabric = Fabric::new();
    let client = Channel::new();
    let id = client.id();
    resolve(&client, id, "10.9.0.2:7471");
    unsafe {
        assert!(!(*id).verbs.is_null());
        assert!(!(*id).pd.is_null());
        assert_eq!((*id).port_num, 1);
        assert_eq!((*id).route.num_paths, 1);
        assert_eq!((*id).route.addr.addr.ibaddr.sgid.raw, gid(0).raw);
        assert_eq!((*id).route.addr.addr.ibaddr.dgid.raw, gid(1).raw);
        assert_eq!(u16::from_be(rdma_get_dst_port(id)), 7471);
        assert!(u16::from_be(rdma_get_src_port(id)) > 40_000);
    }
    let info = &fabric.ids()[0];
    assert_eq!(
        (info.device, info.state.as_str()),
        (Some(0), "RouteResolved")
    );
    destroy(id);
    client.close();
    drop(fabric);
}

#[test]
fn addresses_lead_nowhere_in_three_ways() {
    let fabric = Fabric::new();
    let client = Channel::new();
    let id = client.id();
    let try_addr =
        |to: &str| unsafe { rdma_resolve_addr(id, null_mut(), Sockaddr::new(to).ptr(), 1000) };
    assert_eq!((try_addr("192.0.2.1:1"), errno()), (-1, libc::ENETUNREACH));
    assert_eq!(try_addr("127.0.0.1:1"), 0);
    assert_eq!(
        client.expect(RDMA_CM_EVENT_ADDR_ERROR).status,
        -libc::ENODEV
    );
    resolve(&client, id, "10.9.0.77:1");
    assert_eq!(unsafe { rdma_connect(id, &mut conn_param(1, b"")) }, 0);
    assert_eq!(client.next(), None, "nobody answers");
    fabric.expire_connects();
    assert_eq!(
        client.expect(RDMA_CM_EVENT_UNREACHABLE).status,
        -libc::ETIMEDOUT
    );
    destroy(id);
    client.close();
    drop(fabric);
}

#[test]
fn nobody_listens() {
    let fabric = Fabric::new();
    let client = Channel::new();
    for to in ["10.9.0.2:7471", "[fd09::2]:7471"] {
        let id = client.id();
        resolve(&client, id, to);
        assert_eq!(unsafe { rdma_connect(id, &mut conn_param(1, b"")) }, 0);
        let rejected = client.expect(RDMA_CM_EVENT_REJECTED);
        assert_eq!((rejected.status, rejected.data.len()), (8, 148));
        destroy(id);
    }
    client.close();
    drop(fabric);
}

#[test]
fn a_reject_carries_its_data() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let [active, passive] = request(&server, &client, 7471);
    assert_eq!(unsafe { rdma_reject(passive, b"no".as_ptr().cast(), 2) }, 0);
    let rejected = client.expect(RDMA_CM_EVENT_REJECTED);
    assert_eq!(
        (rejected.status, rejected.data.len(), &rejected.data[..3]),
        (28, 148, &b"no\0"[..])
    );
    assert_eq!(
        unsafe { rdma_accept(passive, &mut conn_param(1, b"")) },
        -1,
        "too late"
    );
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn a_request_that_is_dropped_is_rejected() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let [active, passive] = request(&server, &client, 7471);
    destroy(passive);
    assert_eq!(client.expect(RDMA_CM_EVENT_REJECTED).status, 28);
    let second = client.id();
    resolve(&client, second, "10.9.0.2:7471");
    assert_eq!(unsafe { rdma_connect(second, &mut conn_param(11, b"")) }, 0);
    destroy(listening); // with the request still in its channel
    assert_eq!(client.expect(RDMA_CM_EVENT_REJECTED).status, 28);
    assert_eq!(server.next(), None);
    close([server, client], &[active, second]);
    drop(fabric);
}

#[test]
fn private_data_has_its_limits() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    assert_eq!(
        unsafe { rdma_connect(active, &mut conn_param(1, &[1; 57])) },
        -1
    );
    assert_eq!(errno(), libc::EINVAL);
    assert_eq!(
        unsafe { rdma_connect(active, null_mut()) },
        -1,
        "nobody knows the QP number"
    );
    assert_eq!(
        unsafe { rdma_connect(active, &mut conn_param(1, &[1; 56])) },
        0
    );
    let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id;
    assert_eq!(
        unsafe { rdma_accept(passive, &mut conn_param(1, &[1; 197])) },
        -1
    );
    assert_eq!(
        unsafe { rdma_accept(passive, &mut conn_param(1, &[1; 196])) },
        0
    );
    assert_eq!(client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE).data, [1; 196]);
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn a_full_backlog_lets_requests_wait() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = server.id();
    unsafe {
        assert_eq!(
            rdma_bind_addr(listening, Sockaddr::new("0.0.0.0:7471").ptr()),
            0
        );
        assert_eq!(rdma_listen(listening, 1), 0);
    }
    let actives = [client.id(), client.id()];
    for id in actives {
        resolve(&client, id, "10.9.0.2:7471");
        assert_eq!(unsafe { rdma_connect(id, &mut conn_param(1, b"mine")) }, 0);
    }
    let first = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id;
    assert_eq!(
        (server.next(), client.next()),
        (None, None),
        "neither told nor rejected"
    );
    fabric.resend_requests();
    let second = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(&second.data[..4], b"mine");
    fabric.resend_requests();
    assert_eq!(server.next(), None, "the first was heard");
    close(
        [server, client],
        &[listening, actives[0], actives[1], first, second.id],
    );
    drop(fabric);
}

#[test]
fn the_end_of_a_request_is_told_by_the_failure_of_its_accept() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let [active, passive] = request(&server, &client, 7471);
    destroy(active);
    assert_eq!(
        server.next(),
        None,
        "the kernel keeps events of unaccepted ids to itself"
    );
    assert_eq!(unsafe { rdma_accept(passive, &mut conn_param(1, b"")) }, -1);
    assert_eq!(errno(), libc::EINVAL);
    close([server, client], &[listening, passive]);
    drop(fabric);
}

#[test]
fn addresses_are_bound_once() {
    let fabric = Fabric::new();
    let server = Channel::new();
    let first = listener(&server, "10.9.0.2:7471");
    let second = server.id();
    let bind = |id, at: &str| unsafe { rdma_bind_addr(id, Sockaddr::new(at).ptr()) };
    assert_eq!(
        (bind(second, "0.0.0.0:7471"), errno()),
        (-1, libc::EADDRINUSE)
    );
    assert_eq!((bind(second, "10.1.1.1:7471"), errno()), (-1, libc::ENODEV));
    assert_eq!(
        bind(second, "10.9.0.1:7471"),
        0,
        "the other device's address"
    );
    assert_eq!(
        (bind(second, "10.9.0.1:7472"), errno()),
        (-1, libc::EINVAL),
        "bound already"
    );
    destroy(first);
    let third = listener(&server, "10.9.0.2:7471");
    [second, third].into_iter().for_each(destroy);
    server.close();
    drop(fabric);
}

#[test]
fn both_ends_learn_each_others_parameters() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    assert_eq!(unsafe { rdma_connect(active, &mut conn_param(11, b"")) }, 0);
    let conn = |event: *mut rdma_cm_event| unsafe {
        let conn = &raw const (*event).param.conn;
        let depths = ((*conn).responder_resources, (*conn).initiator_depth);
        (
            depths,
            (*conn).retry_count,
            (*conn).rnr_retry_count,
            (*conn).qp_num,
        )
    };
    let event = server.raw_event().expect("the request");
    assert_eq!(conn(event), ((3, 4), 6, 5, 11), "seen from the other end");
    let passive = unsafe { (*event).id };
    assert_eq!(unsafe { rdma_ack_cm_event(event) }, 0);
    let mut param = conn_param(22, b"");
    (param.responder_resources, param.initiator_depth) = (2, 1);
    assert_eq!(unsafe { rdma_accept(passive, &mut param) }, 0);
    let event = client.raw_event().expect("the response");
    assert_eq!(conn(event).0, (1, 2));
    assert_eq!(unsafe { rdma_ack_cm_event(event) }, 0);
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn queue_pairs_are_moved_by_what_the_ids_know() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    let (a, b) = (Side::new(0), Side::new(1));
    let advance = |side: &Side, id, state| {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = state;
        let mut mask = 0;
        if unsafe { rdma_init_qp_attr(id, &mut attr, &mut mask) } != 0 {
            return -errno();
        }
        side.modify(&mut attr, ibv_qp_attr_mask(mask as u32))
    };
    assert_eq!(
        advance(&a, active, IBV_QPS_RTR),
        -libc::EINVAL,
        "no answer yet"
    );
    assert_eq!(advance(&a, active, IBV_QPS_INIT), 0);
    assert_eq!(
        unsafe { rdma_connect(active, &mut conn_param(a.num(), b"")) },
        0
    );
    let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id;
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        assert_eq!(advance(&b, passive, state), 0);
    }
    assert_eq!(b.post_recv(1, 0, 8), 0);
    assert_eq!(
        unsafe { rdma_accept(passive, &mut conn_param(b.num(), b"")) },
        0
    );
    client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    for state in [IBV_QPS_RTR, IBV_QPS_RTS] {
        assert_eq!(advance(&a, active, state), 0);
    }
    assert_eq!(unsafe { rdma_establish(active) }, 0);
    a.write(0, b"over cm");
    assert_eq!(a.send(1, 0, 7), 0);
    assert_eq!((a.outcomes(), b.outcomes()), (vec![(1, 0)], vec![(1, 0)]));
    let qps = fabric.qps();
    assert_eq!(qps[0].timers, [19, 6, 5, 0]);
    assert_eq!((qps[0].read_depths, qps[1].read_depths), ([4, 3], [4, 3]));
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(
        fabric.qp_state(a.num()),
        IBV_QPS_RTS,
        "the id has no queue pair to break"
    );
    close([server, client], &[listening, active, passive]);
    a.close();
    b.close();
    drop(fabric);
}

#[test]
fn a_lost_handshake_message_is_made_good_by_a_notify() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let [active, passive] = request(&server, &client, 7471);
    assert_eq!(unsafe { rdma_accept(passive, &mut conn_param(1, b"")) }, 0);
    client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    fabric.lose_establish(1);
    assert_eq!(unsafe { rdma_establish(active) }, 0);
    assert_eq!(server.next(), None);
    let notify = || unsafe { rdma_notify(passive, ibv_event_type::IBV_EVENT_COMM_EST) };
    assert_eq!(notify(), 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!((notify(), errno()), (-1, libc::EISCONN));
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn a_migrated_id_takes_its_events_along() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    let own = Channel::new();
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(unsafe { rdma_migrate_id(passive, own.0) }, 0);
    assert_eq!(unsafe { (*passive).channel }, own.0);
    assert_eq!(server.next(), None);
    own.expect(RDMA_CM_EVENT_DISCONNECTED);
    close([server, client], &[listening, active, passive]);
    own.close();
    drop(fabric);
}

#[test]
fn an_event_must_be_acked_before_its_id_goes() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    assert_eq!(unsafe { rdma_connect(active, &mut conn_param(11, b"")) }, 0);
    let event = server.raw_event().expect("the request");
    destroy(unsafe { (*event).id }); // the request counts for the listener
    assert_eq!(fabric.take_violations(), [""; 0]);
    destroy(listening);
    let broken = fabric.take_violations();
    assert!(
        broken[0].starts_with("rdma_destroy_id: 1 events of the id were not acked"),
        "{broken:?}"
    );
    assert_eq!(unsafe { rdma_ack_cm_event(event) }, 0);
    assert_eq!(unsafe { rdma_ack_cm_event(event) }, -1);
    assert_eq!(
        fabric.take_violations(),
        ["rdma_ack_cm_event: not a live cm event (destroyed already?)"]
    );
    close([server, client], &[active]);
    drop(fabric);
}

#[test]
fn a_killed_peer_is_told_by_its_kernel_and_a_dead_one_is_not() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    fabric.kill(1);
    assert_eq!(client.expect(RDMA_CM_EVENT_DISCONNECTED).status, 0);
    close([server, client], &[listening, active, passive]);
    drop(fabric);

    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    fabric.power_off(1);
    assert_eq!(client.next(), None);
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(client.next(), None);
    fabric.expire_disconnects();
    assert_eq!(
        client.expect(RDMA_CM_EVENT_DISCONNECTED).status,
        -libc::ETIMEDOUT
    );
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn a_silent_listener_never_answers() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    fabric.silence_port(7471);
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    assert_eq!(unsafe { rdma_connect(active, &mut conn_param(11, b"")) }, 0);
    assert_eq!((client.next(), server.next()), (None, None));
    fabric.unsilence_port(7471);
    fabric.resend_requests();
    let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id;
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn events_can_be_held_lost_and_invented() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    fabric.hold_cm_events();
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(server.next(), None);
    fabric.release_cm_events();
    server.expect(RDMA_CM_EVENT_DISCONNECTED);
    fabric.drop_cm_events(RDMA_CM_EVENT_DISCONNECTED, 1);
    assert_eq!(unsafe { rdma_disconnect(passive) }, 0);
    assert_eq!(client.next(), None);
    let name = fabric
        .ids()
        .iter()
        .find(|id| id.passive)
        .expect("the passive id")
        .name;
    fabric.inject_cm_event(name, 4242, -5);
    let invented = server.expect(4242);
    assert_eq!((invented.id, invented.status), (passive, -5));
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn a_removed_device_is_told_to_its_ids() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    fabric.remove_device(1);
    assert_eq!(server.expect(RDMA_CM_EVENT_DEVICE_REMOVAL).id, passive);
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn contexts_of_ids_go_with_the_last_id_or_list() {
    let fabric = Fabric::new();
    let client = Channel::new();
    let id = client.id();
    resolve(&client, id, "10.9.0.2:7471");
    let list = unsafe { rdma_get_devices(null_mut()) };
    let context = unsafe { (*id).verbs };
    assert_eq!(unsafe { *list }, context);
    destroy(id);
    let pd = unsafe { ibv_alloc_pd(context) };
    assert!(!pd.is_null(), "the list keeps the context");
    assert_eq!(unsafe { ibv_dealloc_pd(pd) }, 0);
    assert_eq!(fabric.live_objects().context_lists, 1);
    unsafe { rdma_free_devices(list) };
    assert!(unsafe { ibv_alloc_pd(context) }.is_null());
    assert_eq!(fabric.take_violations().len(), 1);

    let id = client.id();
    resolve(&client, id, "10.9.0.2:7471");
    let pd = unsafe { ibv_alloc_pd((*id).verbs) };
    destroy(id);
    assert_eq!(fabric.take_violations().len(), 2, "a PD hangs in the air");
    assert_eq!(unsafe { ibv_dealloc_pd(pd) }, 0);
    client.close();
    drop(fabric);
}

#[test]
fn options_are_checked() {
    let fabric = Fabric::new();
    let client = Channel::new();
    let id = client.id();
    let set = |level, name, value: &mut [u8]| unsafe {
        rdma_set_option(id, level, name, value.as_mut_ptr().cast(), value.len())
    };
    assert_eq!(set(0, 3, &mut [16]), 0, "ACK_TIMEOUT");
    assert_eq!((set(0, 3, &mut [32]), errno()), (-1, libc::EINVAL));
    assert_eq!(set(0, 0, &mut [8]), 0, "TOS");
    assert_eq!(set(0, 1, &mut 1i32.to_ne_bytes()), 0, "REUSEADDR");
    assert_eq!((set(0, 1, &mut [1]), errno()), (-1, libc::EINVAL));
    assert_eq!((set(0, 9, &mut [1]), errno()), (-1, libc::ENOSYS));
    destroy(id);
    client.close();
    drop(fabric);
}

#[test]
fn numeric_addresses_are_looked_up() {
    let fabric = Fabric::new();
    let mut info = null_mut();
    unsafe {
        let found = rdma_getaddrinfo(
            c"10.9.0.2".as_ptr(),
            c"7471".as_ptr(),
            null_mut(),
            &mut info,
        );
        assert_eq!((found, (*info).ai_family), (0, libc::AF_INET));
        assert_eq!((*info).ai_port_space, rdma_port_space::RDMA_PS_TCP as i32);
        let client = Channel::new();
        let id = client.id();
        assert_eq!(rdma_resolve_addr(id, null_mut(), (*info).ai_dst_addr, 0), 0);
        client.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        rdma_freeaddrinfo(info);
        let mut hints: rdma_addrinfo = zeroed();
        (hints.ai_flags, hints.ai_family) = (RAI_PASSIVE as i32, libc::AF_INET6);
        assert_eq!(
            rdma_getaddrinfo(null_mut(), c"1".as_ptr(), &hints, &mut info),
            0
        );
        assert!(!(*info).ai_src_addr.is_null());
        rdma_freeaddrinfo(info);
        let missing = rdma_getaddrinfo(c"nowhere".as_ptr(), null_mut(), null_mut(), &mut info);
        assert_eq!(missing, libc::EAI_NONAME);
        destroy(id);
        client.close();
    }
    drop(fabric);
}

#[test]
fn datagram_ids_exchange_numbers_and_keys() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = server.id_of(rdma_port_space::RDMA_PS_UDP);
    unsafe {
        assert_eq!(
            rdma_bind_addr(listening, Sockaddr::new("0.0.0.0:7471").ptr()),
            0
        );
        assert_eq!(rdma_listen(listening, 0), 0);
    }
    let active = client.id_of(rdma_port_space::RDMA_PS_UDP);
    resolve(&client, active, "10.9.0.2:7471");
    assert_eq!(unsafe { rdma_connect(active, &mut conn_param(11, b"")) }, 0);
    let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id;
    assert_eq!(unsafe { rdma_accept(passive, &mut conn_param(22, b"")) }, 0);
    let event = client.raw_event().expect("the answer");
    unsafe {
        assert_eq!((*event).event, RDMA_CM_EVENT_ESTABLISHED);
        let ud = &raw const (*event).param.ud;
        assert_eq!(
            ((*ud).qp_num, (*ud).qkey, (*ud).private_data_len),
            (22, RDMA_UDP_QKEY, 136)
        );
        assert_eq!((*ud).ah_attr.grh.dgid.raw, gid(1).raw);
        assert_eq!(rdma_ack_cm_event(event), 0);
        let mut group = Sockaddr::new("239.1.1.1:0");
        assert_eq!(rdma_join_multicast(active, group.ptr(), null_mut()), 0);
        client.expect(RDMA_CM_EVENT_MULTICAST_JOIN);
        assert_eq!(rdma_leave_multicast(active, group.ptr()), 0);
        assert_eq!(rdma_leave_multicast(active, group.ptr()), -1);
    }
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}

#[test]
fn disconnecting_needs_a_connection() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    assert_eq!(unsafe { rdma_disconnect(listening) }, -1);
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(
        (unsafe { rdma_disconnect(active) }, errno()),
        (-1, libc::EINVAL)
    );
    destroy(passive); // answers the disconnect
    client.expect(RDMA_CM_EVENT_DISCONNECTED);
    close([server, client], &[listening, active]);
    drop(fabric);
}

#[test]
fn port_spaces_do_not_know_each_other() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let udp = server.id_of(rdma_port_space::RDMA_PS_UDP);
    unsafe {
        assert_eq!(rdma_bind_addr(udp, Sockaddr::new("0.0.0.0:7471").ptr()), 0);
        assert_eq!(rdma_listen(udp, 0), 0);
    }
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    assert_eq!(unsafe { rdma_connect(active, &mut conn_param(11, b"")) }, 0);
    assert_eq!(client.expect(RDMA_CM_EVENT_REJECTED).status, 8);
    let tcp = listener(&server, "0.0.0.0:7471");
    close([server, client], &[udp, tcp, active]);
    drop(fabric);
}

#[test]
fn each_end_retries_as_the_requester_and_its_peer_wish() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let listening = listener(&server, "10.9.0.2:7471");
    let active = client.id();
    resolve(&client, active, "10.9.0.2:7471");
    let mut param = conn_param(11, b"");
    (param.retry_count, param.rnr_retry_count) = (1, 2);
    assert_eq!(unsafe { rdma_connect(active, &mut param) }, 0);
    let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id;
    (param.retry_count, param.rnr_retry_count) = (3, 4);
    assert_eq!(unsafe { rdma_accept(passive, &mut param) }, 0);
    client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    let retries = |id| {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTS;
        assert_eq!(unsafe { rdma_init_qp_attr(id, &mut attr, &mut 0) }, 0);
        (attr.retry_cnt, attr.rnr_retry)
    };
    assert_eq!((retries(active), retries(passive)), ((1, 4), (1, 2)));
    close([server, client], &[listening, active, passive]);
    drop(fabric);
}
