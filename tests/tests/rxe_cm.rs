//! The connection manager against the real one, on soft-RoCE in the lab.
//!
//! The tests cut wires and count objects of the whole host, so they run one at a time
//! (`--test-threads=1`, as `cargo xtask test` does) and restore what they broke.
#![allow(clippy::unwrap_used)] // a test may panic

mod cm_common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use cm_common::*;
use rdma_cm::{
    AddrHints, AddrInfo, CmError, ConnParam, Connecting, Connection, ConnectionEvent, Connector,
    EventStatus, IdOptions, Join, ListenOptions, Listener, Lookup, Negotiated, PortSpace,
    RejectReason, ServiceListener, SidrStatus, Step,
};
use rdma_core_rs::QpState;

/// A drop has to be done by then, whatever the peer and the wire do.
const PROMPT: Duration = Duration::from_secs(5);
/// What a busy emulated machine may be late by. (What is waited for without a deadline takes over a minute.)
const SLACK: Duration = Duration::from_secs(5);

fn drops_promptly<T>(what: &str, thing: T) {
    let start = Instant::now();
    drop(thing);
    assert!(
        start.elapsed() < PROMPT,
        "dropping {what} took {:?}",
        start.elapsed()
    );
}

// ----- a connection -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_connection_comes_up_carries_a_message_each_way_and_ends() {
    let listener = listen();
    let hello = ConnParam {
        private_data: b"hello".to_vec(),
        ..ConnParam::default()
    };
    let welcome = ConnParam {
        private_data: b"welcome".to_vec(),
        ..ConnParam::default()
    };

    let ((mut client, active), (mut server, passive)) =
        pair_by(&listener, connector(&listener), &hello, &welcome);

    assert!(active.is_established());
    assert_eq!(
        passive.wait_event(soon()).unwrap(),
        ConnectionEvent::Established
    );
    assert!(passive.is_established());
    assert_eq!(passive.private_data().len(), rdma_cm::MAX_CONNECT_DATA);
    assert!(
        passive.private_data().starts_with(b"hello\0"),
        "{:?}",
        passive.private_data()
    );
    assert_eq!(active.private_data().len(), rdma_cm::MAX_ACCEPT_DATA);
    assert!(
        active.private_data().starts_with(b"welcome\0"),
        "{:?}",
        active.private_data()
    );
    assert_eq!((active.device_name(), active.port_num()), ("rxe0", 1));
    assert_eq!((passive.device_name(), passive.port_num()), ("rxe1", 1));
    assert_eq!(
        active.local_gid(),
        Some("::ffff:192.168.99.1".parse().unwrap())
    );
    assert_eq!(
        (active.local_gid(), active.peer_gid()),
        (passive.peer_gid(), passive.local_gid())
    );
    assert_eq!(active.local_addr(), passive.peer_addr());
    assert_eq!(active.peer_addr(), passive.local_addr());

    exchange(&mut client, &mut server);

    active.disconnect().unwrap();
    assert_eq!(
        passive.wait_event(soon()).unwrap(),
        ConnectionEvent::Disconnected
    );
    assert!(!passive.is_established());
    passive.disconnect().unwrap();
    assert_eq!(
        active.wait_event(soon()).unwrap(),
        ConnectionEvent::Disconnected
    );
}

fn exchange(client: &mut End, server: &mut End) {
    client.send(b"ping");
    client.expect_sent();
    assert_eq!(server.expect_received(), b"ping");
    server.send(b"pong");
    server.expect_sent();
    assert_eq!(client.expect_received(), b"pong");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn the_queue_pair_is_what_both_sides_agreed_on() {
    // Powers of two, to which soft-RoCE rounds up.
    let listener = listen();
    let ours = ConnParam {
        responder_resources: 8,
        initiator_depth: 16,
        retry_count: 3,
        min_rnr_timer: 14,
        ..ConnParam::default()
    };
    let theirs = ConnParam {
        responder_resources: 4,
        initiator_depth: 2,
        rnr_retry_count: 2,
        ..ConnParam::default()
    };
    let options = IdOptions {
        ack_timeout: Some(15),
        ..IdOptions::default()
    };

    let ((client, active), (server, passive)) = pair_by(
        &listener,
        connector(&listener).options(options),
        &ours,
        &theirs,
    );

    assert_eq!(
        active.negotiated(),
        Negotiated {
            responder_resources: 2,
            initiator_depth: 4
        }
    );
    assert_eq!(
        passive.negotiated(),
        Negotiated {
            responder_resources: 4,
            initiator_depth: 2
        }
    );
    let (client, server) = (client.qp.query().unwrap(), server.qp.query().unwrap());
    assert_eq!((client.state, server.state), (QpState::Rts, QpState::Rts));
    assert_eq!((client.max_dest_rd_atomic, client.max_rd_atomic), (2, 4));
    assert_eq!((server.max_dest_rd_atomic, server.max_rd_atomic), (4, 2));
    assert_eq!((client.retry_cnt, server.retry_cnt), (3, 6));
    assert_eq!((client.rnr_retry, server.rnr_retry), (2, 2));
    assert_eq!((client.min_rnr_timer, server.min_rnr_timer), (14, 12));
    assert_eq!((client.timeout, server.timeout), (15, 16));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_disconnect_leaves_the_queue_pair_to_its_owner() {
    let listener = listen();
    let ((mut client, active), (mut server, passive)) = pair(&listener);

    active.disconnect().unwrap();
    assert_eq!(wait_end(&passive), ConnectionEvent::Disconnected);

    assert_eq!(client.qp.state().unwrap(), QpState::Rts);
    assert_eq!(server.qp.state().unwrap(), QpState::Rts);
    assert!(!client.has_completion(), "the receive was flushed");
    exchange(&mut client, &mut server);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn dropping_a_connection_tells_the_peer() {
    let listener = listen();
    let ((_client, active), (_server, passive)) = pair(&listener);
    drops_promptly("the active side", active);
    assert_eq!(wait_end(&passive), ConnectionEvent::Disconnected);

    let ((_client, active), (_server, passive)) = pair(&listener);
    drops_promptly("the passive side", passive);
    // Rejected, if the confirmation had not arrived there yet.
    assert!(active.wait_event(soon()).unwrap().is_end());
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn data_counts_as_the_confirmation_once_the_manager_is_told() {
    let listener = listen();
    let ((mut client, active), (mut server, passive)) = pair(&listener);
    client.send(b"early");
    assert_eq!(server.expect_received(), b"early");

    passive.notify_comm_est().unwrap();
    assert_eq!(
        passive.wait_event(soon()).unwrap(),
        ConnectionEvent::Established
    );
    passive.notify_comm_est().unwrap(); // once more does no harm
    assert_eq!(passive.try_event().unwrap(), None);
    drop(active);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn dropping_is_prompt_even_when_a_peer_leaves_right_after_its_first_message() {
    let listener = listen();
    for _ in 0..30 {
        let ((mut client, active), (mut server, passive)) = pair(&listener);
        client.send(b"early");
        server.expect_received();
        // At once, which nobody should: the kernel may then keep the id for 69 s.
        passive.notify_comm_est().unwrap();
        drop((active, client));
        drops_promptly("the passive side", (passive, server));
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_device_outlives_the_id_that_found_it() {
    let listener = listen();
    let resolved = connector(&listener).resolve().unwrap();
    let context = resolved.context();
    drop(resolved);
    drop(listener);
    assert_eq!(context.device_name(), "rxe0");
    let end = End::new(&context);
    drop(context);
    assert_eq!(end.qp.state().unwrap(), QpState::Reset);

    let again = rdma_cm::context_for(addr(CLIENT, 0)).unwrap();
    assert!(
        again.is_same_device(end.pd().context()),
        "all share one context"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn the_steps_never_block_and_their_descriptors_tell_when_to_go_on() {
    let listener = listen();
    let mut resolving = connector(&listener).start().unwrap();
    let mut resolved = loop {
        if let Some(resolved) = resolving.advance().unwrap() {
            break resolved;
        }
        wait_readable(&resolving);
    };
    assert!(matches!(resolving.advance(), Err(CmError::Finished { .. })));
    let mut end = prepare(&mut resolved);
    let mut connecting = resolved
        .connect(&mut end.qp, &ConnParam::default())
        .unwrap();
    assert!(connecting.advance(&mut end.qp).unwrap().is_none());

    let request = loop {
        match listener.try_accept().unwrap() {
            Some(request) => break request,
            None => wait_readable(&listener),
        }
    };
    assert!(
        connecting.advance(&mut end.qp).unwrap().is_none(),
        "nobody answered yet"
    );
    let (_server, passive) = accept(request, &ConnParam::default());
    let active = loop {
        match connecting.advance(&mut end.qp).unwrap() {
            Some(connection) => break connection,
            None => wait_readable(&connecting),
        }
    };
    assert!(matches!(
        connecting.advance(&mut end.qp),
        Err(CmError::Finished { .. })
    ));
    wait_readable(&passive);
    assert_eq!(
        passive.try_event().unwrap(),
        Some(ConnectionEvent::Established)
    );
    assert_eq!(active.try_event().unwrap(), None);
}

// ----- what can go wrong -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_port_where_nobody_listens_refuses() {
    let listener = listen();
    let wrong = SocketAddr::new(listener.local_addr().ip(), listener.local_addr().port() ^ 1);
    for peer in [addr(SERVER, 9), wrong] {
        let start = Instant::now();
        let (mut end, connecting) = begin(
            Connector::new(peer).deadline(PATIENCE),
            &ConnParam::default(),
        );
        let error = connecting.wait(&mut end.qp).unwrap_err();
        assert!(
            matches!(error, CmError::Refused { peer: p } if p == peer),
            "{error}"
        );
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_rejection_carries_the_reason_and_the_data() {
    let listener = listen();
    let (mut end, connecting) = begin(connector(&listener), &ConnParam::default());
    listener
        .accept(soon())
        .unwrap()
        .reject(b"not today")
        .unwrap();
    match connecting.wait(&mut end.qp).unwrap_err() {
        CmError::Rejected {
            reason: RejectReason::Consumer,
            private_data,
            ..
        } => {
            assert_eq!(private_data.len(), rdma_cm::MAX_REJECT_DATA);
            assert!(private_data.starts_with(b"not today\0"));
        }
        other => panic!("{other}"),
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn private_data_of_the_longest_kind_arrives_whole() {
    let listener = listen();
    let data = |len: usize| (0..len).map(|i| 1 + i as u8).collect::<Vec<u8>>();
    let ours = ConnParam {
        private_data: data(rdma_cm::MAX_CONNECT_DATA),
        ..ConnParam::default()
    };
    let theirs = ConnParam {
        private_data: data(rdma_cm::MAX_ACCEPT_DATA),
        ..ConnParam::default()
    };
    let ((_client, active), (_server, passive)) =
        pair_by(&listener, connector(&listener), &ours, &theirs);
    assert_eq!(passive.private_data(), ours.private_data);
    assert_eq!(active.private_data(), theirs.private_data);

    let (mut end, connecting) = begin(connector(&listener), &ours);
    listener
        .accept(soon())
        .unwrap()
        .reject(&data(rdma_cm::MAX_REJECT_DATA))
        .unwrap();
    let error = connecting.wait(&mut end.qp).unwrap_err();
    assert!(
        matches!(&error, CmError::Rejected { private_data, .. } if *private_data == data(148)),
        "{error}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_request_that_nobody_answers_ends_at_the_deadline() {
    let listener = listen();
    let start = Instant::now();
    let limit = Duration::from_secs(2);
    let (mut end, connecting) = begin(connector(&listener).deadline(limit), &ConnParam::default());
    let error = connecting.wait(&mut end.qp).unwrap_err();
    assert!(
        matches!(error, CmError::TimedOut { step: Step::Connect, after, .. } if after == limit),
        "{error}"
    );
    assert!(start.elapsed() < limit + SLACK, "{:?}", start.elapsed());
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn an_address_without_a_route_is_told_at_once() {
    let peer = addr("10.77.0.1", 7471);
    let error = Connector::new(peer).start().map(drop).unwrap_err();
    assert!(
        matches!(error, CmError::NoRoute { peer: p, .. } if p == peer),
        "{error}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn an_address_without_a_device_comes_with_those_that_have_one() {
    let local = addr("127.0.0.1", 7471);
    let by_peer = Connector::new(local).resolve().map(drop).unwrap_err();
    let by_source = Connector::new(addr(SERVER, 1))
        .source(addr("127.0.0.1", 0))
        .resolve()
        .map(drop)
        .unwrap_err();
    let by_listening = Listener::bind(local, &ListenOptions::default())
        .map(drop)
        .unwrap_err();
    let by_asking = rdma_cm::context_for(local).map(drop).unwrap_err();
    for error in [by_peer, by_source, by_listening, by_asking] {
        let text = error.to_string();
        assert!(
            matches!(error, CmError::NoDevice { addr, .. } if addr.ip() == local.ip()),
            "{text}"
        );
        assert!(
            text.contains("192.168.99.1 (rxe0)") && text.contains("fd99::2 (rxe1)"),
            "{text}"
        );
    }
    assert!(
        rdma_cm::context_for(addr("0.0.0.0", 0)).is_err(),
        "a wildcard is no device's"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn an_address_of_nobody_does_not_resolve_and_ends_at_the_deadline() {
    run("ip route add 192.168.99.77/32 dev v0");
    let start = Instant::now();
    let limit = Duration::from_secs(1);
    let result = Connector::new(addr("192.168.99.77", 1))
        .source(addr(CLIENT, 0))
        .deadline(limit)
        .resolve();
    run("ip route del 192.168.99.77/32 dev v0");
    let error = result.map(drop).unwrap_err();
    assert!(error.is_timed_out(), "{error}");
    assert!(start.elapsed() < limit + SLACK, "{:?}", start.elapsed());
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn the_first_look_up_of_a_neighbour_does_not_wait_for_the_kernel_to_give_up() {
    let listener = listen();
    let mut times = Vec::new();
    for _ in 0..5 {
        run("ip neigh flush dev v0; ip neigh flush dev v1");
        let start = Instant::now();
        Connector::new(listener.local_addr())
            .source(addr(CLIENT, 0))
            .resolve()
            .unwrap();
        times.push(start.elapsed());
    }
    times.sort(); // one may be slow because the machine is
    assert!(times[2] < Duration::from_secs(2), "{times:?}");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_listener_dropped_with_requests_pending_rejects_them() {
    let listener = listen();
    let mut pending: Vec<_> = (0..4)
        .map(|_| begin(connector(&listener), &ConnParam::default()))
        .collect();
    let fetched = listener.accept(soon()).unwrap();
    drops_promptly("the listener", listener);
    drops_promptly("a request", fetched);
    for (end, connecting) in &mut pending {
        let error = wait_for(connecting, end).unwrap_err();
        assert!(
            matches!(error, CmError::Rejected { .. } | CmError::Refused { .. }),
            "{error}"
        );
    }
}

fn wait_for(connecting: &mut Connecting, end: &mut End) -> Result<Connection, CmError> {
    loop {
        if let Some(connection) = connecting.advance(&mut end.qp)? {
            return Ok(connection);
        }
        wait_readable(connecting);
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn an_accepted_connection_outlives_its_listener() {
    let listener = listen();
    let ((mut client, active), (mut server, passive)) = pair(&listener);
    drops_promptly("the listener", listener);
    exchange(&mut client, &mut server);
    drop(active);
    assert!(passive.wait_event(soon()).is_ok());
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn accepting_a_request_whose_peer_has_gone_says_so_or_ends() {
    let listener = listen();
    let (_end, connecting) = begin(connector(&listener), &ConnParam::default());
    let mut request = listener.accept(soon()).unwrap();
    drops_promptly("the connect", connecting);
    std::thread::sleep(Duration::from_millis(200)); // let the withdrawal arrive, if it is to
    let mut server = End::new(&request.context());
    let initialised = request.init_qp(&mut server.qp);
    match initialised.and_then(|()| request.accept(&mut server.qp, &ConnParam::default())) {
        Ok(connection) => assert!(connection.wait_event(soon()).unwrap().is_end()),
        Err(error) => assert!(matches!(error, CmError::Withdrawn { .. }), "{error}"),
    }
}

// ----- addresses, ports, options -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn ipv6_connects_by_global_and_by_link_local_address() {
    let listener = Listener::bind(addr("fd99::2", 0), &ListenOptions::default()).unwrap();
    let ours = Connector::new(listener.local_addr())
        .source(addr("fd99::1", 0))
        .deadline(PATIENCE);
    let ((mut client, active), (mut server, _passive)) = pair_by(
        &listener,
        ours,
        &ConnParam::default(),
        &ConnParam::default(),
    );
    exchange(&mut client, &mut server);
    assert_eq!(active.local_addr().ip(), addr("fd99::1", 0).ip());

    let (mut local, mut remote) = (link_local("rxe0"), link_local("rxe1"));
    assert!(scope(local) != 0 && scope(remote) != 0, "{local} {remote}");
    let listener = Listener::bind(remote, &ListenOptions::default()).unwrap();
    assert_eq!(scope(listener.local_addr()), scope(remote));
    remote.set_port(listener.local_addr().port());
    set_scope(&mut remote, scope(local)); // the peer's address is seen through the own interface
    local.set_port(0);
    let ours = Connector::new(remote).source(local).deadline(PATIENCE);
    let ((mut client, active), (mut server, _passive)) = pair_by(
        &listener,
        ours,
        &ConnParam::default(),
        &ConnParam::default(),
    );
    exchange(&mut client, &mut server);
    assert_eq!(active.peer_addr(), remote);
}

fn link_local(device: &str) -> SocketAddr {
    let addresses = rdma_cm::device_addresses().unwrap();
    let is_link_local =
        |a: SocketAddr| matches!(a, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local());
    addresses
        .iter()
        .find(|a| a.device == device && is_link_local(a.addr))
        .unwrap()
        .addr
}

fn scope(addr: SocketAddr) -> u32 {
    match addr {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    }
}

fn set_scope(addr: &mut SocketAddr, scope: u32) {
    if let SocketAddr::V6(v6) = addr {
        v6.set_scope_id(scope);
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn all_addresses_of_the_devices_are_found() {
    let found = rdma_cm::device_addresses().unwrap();
    for (ip, device) in [
        (CLIENT, "rxe0"),
        (SERVER, "rxe1"),
        ("fd99::1", "rxe0"),
        ("fd99::2", "rxe1"),
    ] {
        let matching = found.iter().find(|a| a.addr.ip() == addr(ip, 0).ip());
        assert_eq!(
            matching.map(|a| a.device.as_str()),
            Some(device),
            "{found:?}"
        );
    }
    assert!(
        found
            .iter()
            .all(|a| !a.addr.ip().is_loopback() && a.port_num == 1),
        "{found:?}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_wildcard_listens_on_all_devices_and_an_address_on_one() {
    let listener = Listener::bind(addr("0.0.0.0", 0), &ListenOptions::default()).unwrap();
    let port = listener.local_addr().port();
    assert_ne!(port, 0);
    for (from, to, device) in [(CLIENT, SERVER, "rxe1"), (SERVER, CLIENT, "rxe0")] {
        let ours = Connector::new(addr(to, port))
            .source(addr(from, 0))
            .deadline(PATIENCE);
        let ((mut client, _active), (mut server, passive)) = pair_by(
            &listener,
            ours,
            &ConnParam::default(),
            &ConnParam::default(),
        );
        assert_eq!(passive.device_name(), device);
        exchange(&mut client, &mut server);
    }

    let one = listen();
    let other = Connector::new(addr(CLIENT, one.local_addr().port())).source(addr(SERVER, 0));
    let (mut end, connecting) = begin(other.deadline(PATIENCE), &ConnParam::default());
    let error = connecting.wait(&mut end.qp).unwrap_err();
    assert!(matches!(error, CmError::Refused { .. }), "{error}");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_port_in_use_is_said_to_be_and_may_be_shared_on_request() {
    let listener = listen();
    let error = Listener::bind(listener.local_addr(), &ListenOptions::default())
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error, CmError::AddressInUse { addr, .. } if addr == listener.local_addr()),
        "{error}"
    );

    let port = addr(CLIENT, 18515);
    let bound = |reuse_addr| {
        let options = IdOptions {
            reuse_addr,
            ..IdOptions::default()
        };
        connector(&listener).source(port).options(options).resolve()
    };
    let first = bound(true).unwrap();
    assert_eq!(first.local_addr(), port);
    let second = bound(true).unwrap();
    assert_eq!(second.local_addr(), port);
    let error = bound(false).map(drop).unwrap_err();
    assert!(
        matches!(error, CmError::AddressInUse { addr, .. } if addr == port),
        "{error}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn options_are_taken_and_impossible_ones_refused() {
    let options = IdOptions {
        tos: Some(0x20),
        ack_timeout: Some(31),
        reuse_addr: true,
        af_only: None,
    };
    let listener = listen();
    connector(&listener).options(options).resolve().unwrap();
    for ack_timeout in [0, 32] {
        let options = IdOptions {
            ack_timeout: Some(ack_timeout),
            ..IdOptions::default()
        };
        let error = connector(&listener)
            .options(options)
            .start()
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(
                error,
                CmError::Config {
                    field: "ack_timeout",
                    ..
                }
            ),
            "{error}"
        );
    }
    let only_v6 = ListenOptions {
        af_only: Some(true),
        ..ListenOptions::default()
    };
    let six = Listener::bind(addr("::", 0), &only_v6).unwrap();
    let four = Listener::bind(
        addr("0.0.0.0", six.local_addr().port()),
        &ListenOptions::default(),
    );
    assert!(four.is_ok(), "{:?}", four.map(drop));
    let mixed = Connector::new(addr(SERVER, 1))
        .source(addr("fd99::1", 0))
        .start()
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(
            mixed,
            CmError::Config {
                field: "source",
                ..
            }
        ),
        "{mixed}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn the_infiniband_port_space_connects_too() {
    let listener =
        Listener::bind_in(PortSpace::Ib, addr(SERVER, 0), &ListenOptions::default()).unwrap();
    let ours = connector(&listener).port_space(PortSpace::Ib);
    let ((mut client, _active), (mut server, _passive)) = pair_by(
        &listener,
        ours,
        &ConnParam::default(),
        &ConnParam::default(),
    );
    exchange(&mut client, &mut server);

    let tcp = Listener::bind(listener.local_addr(), &ListenOptions::default());
    assert!(tcp.is_ok(), "the spaces are apart: {:?}", tcp.map(drop));
    let error = connector(&listener)
        .port_space(PortSpace::Udp)
        .start()
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(
            error,
            CmError::Config {
                field: "port_space",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn names_are_resolved_by_the_library_and_by_the_system() {
    let peer = AddrInfo::resolve(
        SERVER,
        "7471",
        &AddrHints {
            numeric_host: true,
            ..AddrHints::default()
        },
    )
    .unwrap();
    assert_eq!(peer[0].destination, Some(addr(SERVER, 7471)));
    let local = AddrInfo::resolve(
        SERVER,
        "7471",
        &AddrHints {
            passive: true,
            ..AddrHints::default()
        },
    )
    .unwrap();
    assert_eq!(
        (local[0].source, local[0].destination),
        (Some(addr(SERVER, 7471)), None)
    );
    let hints = AddrHints {
        numeric_host: true,
        ..AddrHints::default()
    };
    let error = AddrInfo::resolve("no.such.host", "1", &hints).unwrap_err();
    assert!(matches!(error, CmError::Name { .. }), "{error}");
    assert_eq!(
        rdma_cm::resolve_name("fd99::2", 5).unwrap(),
        [addr("fd99::2", 5)]
    );
}

// ----- datagrams -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_datagram_service_is_found_and_reached() {
    let listener = ServiceListener::bind(addr(SERVER, 0), &ListenOptions::default()).unwrap();
    let looking = Lookup::new(listener.local_addr())
        .source(addr(CLIENT, 0))
        .deadline(PATIENCE)
        .private_data(b"who is there?")
        .start()
        .unwrap();
    // The look-up resolves the address first, so somebody has to drive it.
    let looking = std::thread::spawn(move || looking.wait());
    let request = listener.request(soon()).unwrap();
    assert!(
        request.private_data().starts_with(b"who is there?"),
        "{:?}",
        request.private_data()
    );
    assert_eq!(request.peer_addr().ip(), addr(CLIENT, 0).ip());
    let mut server = End::datagram(&request.context());
    request.init_qp(&mut server.qp).unwrap();
    server.post_recv();
    request.answer(&server.qp, b"it is me").unwrap();

    let service = looking.join().unwrap().unwrap();
    assert!(
        service.private_data().starts_with(b"it is me\0"),
        "{:?}",
        service.private_data()
    );
    assert_eq!(service.qp_num(), server.qp.qp_num());
    let mut client = End::datagram(&service.context());
    service.init_qp(&mut client.qp).unwrap();
    let to = service.address_handle(client.pd()).unwrap();
    client.send_to(b"datagram", &to, service.qp_num(), service.qkey());
    client.expect_sent();
    assert_eq!(&server.expect_received()[40..], b"datagram"); // after the 40 bytes of header
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_datagram_service_that_is_not_there_or_says_no_is_told_apart() {
    let nobody = Lookup::new(addr(SERVER, 9))
        .deadline(PATIENCE)
        .find()
        .map(drop)
        .unwrap_err();
    let listener = ServiceListener::bind(addr(SERVER, 0), &ListenOptions::default()).unwrap();
    let peer = listener.local_addr();
    let find = move || {
        Lookup::new(peer)
            .deadline(PATIENCE)
            .find()
            .map(drop)
            .unwrap_err()
    };
    let looking = std::thread::spawn(find);
    listener.request(soon()).unwrap().reject(b"no").unwrap();
    let refused = looking.join().unwrap();

    let status = |error: &CmError| match error {
        CmError::Unreachable { status, .. } => *status,
        other => panic!("{other}"),
    };
    assert_eq!(
        status(&nobody),
        EventStatus::Sidr(SidrStatus::Unsupported),
        "{nobody}"
    );
    assert_eq!(
        status(&refused),
        EventStatus::Sidr(SidrStatus::Rejected),
        "{refused}"
    );

    let limit = Duration::from_secs(1);
    let silent = Lookup::new(peer)
        .deadline(limit)
        .find()
        .map(drop)
        .unwrap_err();
    assert!(silent.is_timed_out(), "{silent}");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_multicast_datagram_reaches_who_joined() {
    let group = addr("239.1.2.3", 0);
    let join = |from| {
        Join::new(group)
            .source(addr(from, 0))
            .deadline(PATIENCE)
            .join()
            .unwrap()
    };
    let (sending, receiving) = (join(CLIENT), join(SERVER));
    let (mut client, mut server) = (
        End::datagram(&sending.context()),
        End::datagram(&receiving.context()),
    );
    sending.init_qp(&mut client.qp).unwrap();
    receiving.init_qp(&mut server.qp).unwrap();
    receiving.attach(&mut server.qp).unwrap();
    server.post_recv();

    let to = sending.address_handle(client.pd()).unwrap();
    client.send_to(b"to all", &to, sending.qp_num(), sending.qkey());
    client.expect_sent();
    assert_eq!(&server.expect_received()[40..], b"to all");

    run("ip route add 239.0.0.0/8 dev v0");
    let by_route = Join::new(group).deadline(PATIENCE).join();
    run("ip route del 239.0.0.0/8 dev v0");
    assert_eq!(by_route.unwrap().context().device_name(), "rxe0");

    receiving.detach(&mut server.qp).unwrap();
    drops_promptly("a membership", receiving);
    let error = Join::new(addr(SERVER, 0)).start().map(drop).unwrap_err();
    assert!(
        matches!(error, CmError::Config { field: "group", .. }),
        "{error}"
    );
}

// ----- many -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn five_hundred_first_messages_find_their_receive() {
    const ROUNDS: u32 = 500;
    let never = ConnParam {
        rnr_retry_count: 0,
        ..ConnParam::default()
    };
    let before = (counter("rcvd_rnr_err"), counter("send_rnr_err"));
    let listener = listen();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                let (mut server, _passive) = accept(listener.accept(soon()).unwrap(), &never);
                assert_eq!(server.expect_received(), round.to_be_bytes());
                server.send(b"seen");
                server.expect_sent();
            }
        });
        for round in 0..ROUNDS {
            let (mut client, connecting) = begin(connector(&listener), &never);
            let _active = connecting.wait(&mut client.qp).unwrap();
            client.send(&round.to_be_bytes());
            client.expect_sent();
            assert_eq!(client.expect_received(), b"seen");
        }
    });
    assert_eq!((counter("rcvd_rnr_err"), counter("send_rnr_err")), before);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn two_hundred_at_once_overflow_a_backlog_of_16_and_all_get_in() {
    const CLIENTS: usize = 200;
    let listener = listen_with(&ListenOptions {
        backlog: 16,
        ..ListenOptions::default()
    });
    let long = || connector(&listener).deadline(PATIENCE * 4);
    let mut waiting: Vec<_> = (0..CLIENTS)
        .map(|_| begin(long(), &ConnParam::default()))
        .collect();
    std::thread::sleep(Duration::from_millis(500)); // all requests have arrived, or were ignored
    let mut servers = accept_all(&listener);
    assert!(
        servers.len() < CLIENTS,
        "the backlog of 16 did not overflow"
    );

    // Those that were ignored ask again every four seconds.
    let mut clients = Vec::new();
    let until = Instant::now() + PATIENCE * 4;
    while clients.len() < CLIENTS {
        assert!(Instant::now() < until, "only {} got in", clients.len());
        for (mut end, mut connecting) in std::mem::take(&mut waiting) {
            match connecting.advance(&mut end.qp).unwrap() {
                Some(connection) => clients.push((end, connection)),
                None => waiting.push((end, connecting)),
            }
            servers.extend(accept_all(&listener));
        }
        std::thread::sleep(Duration::from_millis(1)); // for the kernel's threads
    }
}

fn accept_all(listener: &Listener) -> Vec<(End, Connection)> {
    let requests = std::iter::from_fn(|| listener.try_accept().unwrap());
    requests
        .map(|request| accept(request, &ConnParam::default()))
        .collect()
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_thousand_rounds_leave_nothing_behind() {
    const ROUNDS: u32 = 1000;
    let listener = listen();
    drop(pair(&listener)); // what is made once is made now
    let (ours, theirs) = (Bare::new(CLIENT), Bare::new(SERVER));
    let before = settled();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let mut qp = theirs.queue_pair();
                let request = listener.accept(soon()).unwrap();
                wait_end(&request.accept(&mut qp, &ConnParam::default()).unwrap());
            }
        });
        for _ in 0..ROUNDS {
            let mut qp = ours.queue_pair();
            let resolved = connector(&listener).resolve().unwrap();
            let connecting = resolved.connect(&mut qp, &ConnParam::default()).unwrap();
            connecting.wait(&mut qp).unwrap().disconnect().unwrap();
        }
    });
    assert_settles(before);
}

/// What there is, once the kernel has destroyed what it destroys in the background.
fn settled() -> (usize, String) {
    let (mut last, mut since) = (rdma_objects(), Instant::now());
    while since.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(50));
        let now = rdma_objects();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    (open_fds(), last)
}

fn assert_settles(before: (usize, String)) {
    let until = Instant::now() + PATIENCE;
    while (open_fds(), rdma_objects()) != before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!((open_fds(), rdma_objects()), before);
}

// ----- somebody leaves -----

/// How far the client gets before it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Reach {
    Resolving,
    Resolved,
    Initialised,
    Asked,
    Answered,
    Connected,
    Confirmed,
}

const REACHES: [Reach; 7] = [
    Reach::Resolving,
    Reach::Resolved,
    Reach::Initialised,
    Reach::Asked,
    Reach::Answered,
    Reach::Connected,
    Reach::Confirmed,
];

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_client_dropped_at_any_step_leaves_the_server_working() {
    let listener = listen();
    drop(pair(&listener));
    let before = settled();
    for reach in REACHES {
        client_dropped_at(reach, &listener);
        let ((mut client, _active), (mut server, _passive)) = pair(&listener);
        exchange(&mut client, &mut server);
    }
    assert_settles(before);
}

fn client_dropped_at(reach: Reach, listener: &Listener) {
    println!("client dropped at {reach:?}");
    let resolving = connector(listener).start().unwrap();
    if reach == Reach::Resolving {
        return drops_promptly("the resolution", resolving);
    }
    let mut resolved = resolving.wait().unwrap();
    if reach == Reach::Resolved {
        return drops_promptly("what was resolved", resolved);
    }
    let mut client = prepare(&mut resolved);
    if reach == Reach::Initialised {
        return drops_promptly("the queue pair and what was resolved", (client, resolved));
    }
    let connecting = resolved
        .connect(&mut client.qp, &ConnParam::default())
        .unwrap();
    let request = listener.accept(soon()).unwrap();
    if reach == Reach::Asked {
        drops_promptly("the connect", (connecting, client));
        return drops_promptly("the request", request);
    }
    let (server, passive) = accept(request, &ConnParam::default());
    if reach == Reach::Answered {
        drops_promptly("the connect", (connecting, client));
        assert!(passive.wait_event(soon()).unwrap().is_end());
        return drops_promptly("the passive side", (passive, server));
    }
    let active = connecting.wait(&mut client.qp).unwrap();
    if reach == Reach::Confirmed {
        assert_eq!(
            passive.wait_event(soon()).unwrap(),
            ConnectionEvent::Established
        );
    }
    drops_promptly("the active side", (active, client));
    wait_end(&passive);
    drops_promptly("the passive side", (passive, server));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_server_gone_at_any_step_is_told_to_the_client() {
    for reach in REACHES {
        println!("server gone at {reach:?}");
        let listener = listen();
        let resolving = connector(&listener).start().unwrap();
        let gone = |listener| drops_promptly("the listener", listener);
        let refused = |error: CmError| {
            assert!(
                matches!(error, CmError::Refused { .. }),
                "{reach:?}: {error}"
            )
        };
        if reach == Reach::Resolving {
            gone(listener);
            let mut resolved = resolving.wait().unwrap();
            let mut client = prepare(&mut resolved);
            let connecting = resolved
                .connect(&mut client.qp, &ConnParam::default())
                .unwrap();
            refused(connecting.wait(&mut client.qp).map(drop).unwrap_err());
            continue;
        }
        let mut resolved = resolving.wait().unwrap();
        let mut client = prepare(&mut resolved);
        if reach <= Reach::Initialised {
            gone(listener);
            let connecting = resolved
                .connect(&mut client.qp, &ConnParam::default())
                .unwrap();
            refused(connecting.wait(&mut client.qp).map(drop).unwrap_err());
            continue;
        }
        let connecting = resolved
            .connect(&mut client.qp, &ConnParam::default())
            .unwrap();
        let request = listener.accept(soon()).unwrap();
        if reach == Reach::Asked {
            drops_promptly("the request", request);
            let error = connecting.wait(&mut client.qp).unwrap_err();
            assert!(
                matches!(
                    error,
                    CmError::Rejected {
                        reason: RejectReason::Consumer,
                        ..
                    }
                ),
                "{error}"
            );
            continue;
        }
        let (server, passive) = accept(request, &ConnParam::default());
        if reach == Reach::Answered {
            drops_promptly("the passive side", (passive, server));
            // The answer was on its way already: it may still come up, and then end.
            match connecting.wait(&mut client.qp) {
                Ok(active) => assert!(active.wait_event(soon()).unwrap().is_end()),
                Err(error) => assert!(!error.is_timed_out(), "{error}"),
            }
            continue;
        }
        let active = connecting.wait(&mut client.qp).unwrap();
        if reach == Reach::Confirmed {
            assert_eq!(
                passive.wait_event(soon()).unwrap(),
                ConnectionEvent::Established
            );
        }
        drops_promptly("the passive side", (passive, server));
        // Rejected, if the confirmation had not arrived there yet.
        assert!(active.wait_event(soon()).unwrap().is_end());
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_cut_wire_at_any_step_ends_at_the_deadline_and_drops_promptly() {
    let limit = Duration::from_secs(5);
    let listener = listen();
    for reach in REACHES {
        println!("wire cut at {reach:?}");
        drop(pair(&listener)); // the neighbours know each other again
        let start = Instant::now();
        let in_time = |start: Instant, error: CmError| {
            assert!(error.is_timed_out(), "{reach:?}: {error}");
            assert!(
                start.elapsed() < limit + SLACK,
                "{reach:?}: {:?}",
                start.elapsed()
            );
        };
        if reach == Reach::Resolving {
            let _wire = Fault::black_hole();
            run("ip neigh flush dev v0; ip neigh flush dev v1");
            let start = Instant::now();
            in_time(
                start,
                connector(&listener)
                    .deadline(limit)
                    .resolve()
                    .map(drop)
                    .unwrap_err(),
            );
            continue;
        }
        let mut resolved = connector(&listener).deadline(limit).resolve().unwrap();
        let mut client = prepare(&mut resolved);
        if reach <= Reach::Initialised {
            let _wire = Fault::black_hole();
            let asked = resolved.connect(&mut client.qp, &ConnParam::default());
            let answered = asked.and_then(|connecting| connecting.wait(&mut client.qp));
            in_time(start, answered.map(drop).unwrap_err());
            continue;
        }
        let connecting = resolved
            .connect(&mut client.qp, &ConnParam::default())
            .unwrap();
        let request = listener.accept(soon()).unwrap();
        if reach <= Reach::Answered {
            let _wire = Fault::black_hole();
            let answered =
                (reach == Reach::Answered).then(|| accept(request, &ConnParam::default()));
            in_time(
                start,
                connecting.wait(&mut client.qp).map(drop).unwrap_err(),
            );
            drops_promptly("the passive side", answered);
            continue;
        }
        let (server, passive) = accept(request, &ConnParam::default());
        let active = connecting.wait(&mut client.qp).unwrap();
        if reach == Reach::Confirmed {
            assert_eq!(
                passive.wait_event(soon()).unwrap(),
                ConnectionEvent::Established
            );
        }
        let _wire = Fault::black_hole();
        let silent = active.wait_event(Some(Instant::now() + Duration::from_millis(300)));
        assert!(
            silent.is_err_and(|e| e.is_timed_out()),
            "an idle connection cannot know"
        );
        if reach == Reach::Confirmed {
            active.disconnect().unwrap();
        }
        drops_promptly("the active side", (active, client));
        drops_promptly("the passive side", (passive, server));
    }
    let ((mut client, _active), (mut server, _passive)) = pair(&listener);
    exchange(&mut client, &mut server);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_link_that_is_down_is_told_and_a_link_that_comes_back_is_used() {
    let listener = listen();
    drop(pair(&listener));
    {
        // Nothing may be sent meanwhile: soft-RoCE then breaks the queue pair of the connection
        // manager itself.
        let _wire = Fault::link_down();
        let limit = Duration::from_secs(2);
        let start = Instant::now();
        let error = connector(&listener)
            .deadline(limit)
            .resolve()
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(error, CmError::NoRoute { .. } | CmError::TimedOut { .. }),
            "{error}"
        );
        assert!(start.elapsed() < limit + SLACK, "{:?}", start.elapsed());
    }
    let ((mut client, _active), (mut server, _passive)) = pair(&listener);
    exchange(&mut client, &mut server);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_device_that_is_removed_is_told_and_everything_can_be_dropped() {
    let listener = listen();
    let ((client, active), (server, passive)) = pair(&listener);
    assert_eq!(
        passive.wait_event(soon()).unwrap(),
        ConnectionEvent::Established
    );
    let start = Instant::now();
    // It returns once nobody uses the device any more.
    let removal = std::thread::spawn(|| run("rdma link delete rxe0"));

    let told = std::iter::repeat_with(|| active.wait_event(soon()).unwrap())
        .find(|e| *e == ConnectionEvent::DeviceRemoval);
    println!("told after {:?}: {told:?}", start.elapsed());
    drops_promptly("the active side", (active, client));
    wait_end(&passive);
    drops_promptly("the passive side", (passive, server));
    println!("dropped after {:?}", start.elapsed());
    drop(listener);
    // librdmacm keeps a device open until it looks for devices again and finds it gone.
    let until = Instant::now() + PATIENCE;
    while !removal.is_finished() {
        assert!(Instant::now() < until, "the device is still held");
        drop(rdma_cm::context_for(addr(SERVER, 0)).unwrap());
        std::thread::sleep(Duration::from_millis(100));
    }
    removal.join().unwrap();
    println!("removed after {:?}", start.elapsed());

    run("rdma link add rxe0 type rxe netdev v0");
    run(
        "for i in $(seq 100); do grep -qi ffff:c0a8:6301 /sys/class/infiniband/rxe0/ports/1/gids/* && exit 0; sleep 0.1; done; exit 1",
    );
    let listener = listen();
    let ((mut client, _active), (mut server, _passive)) = pair(&listener);
    exchange(&mut client, &mut server);
}
