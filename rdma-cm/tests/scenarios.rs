//! Connecting, refusing, timing out and leaving, on the fake fabric.
#![allow(clippy::unwrap_used)] // a test may panic

mod fake;

use std::time::{Duration, Instant};

use fake::*;
use fake_verbs::Fabric;
use rdma_cm::{
    CmError, CmId, ConnParam, ConnectionEvent, Connector, EventStatus, Join, ListenOptions,
    Listener, Lookup, Negotiated, PortSpace, RejectReason, ServiceListener, SidrStatus, Step,
};
use rdma_core_rs::QpState;
use rdma_sys::rdma_cm_event_type as cm_event;

#[test]
fn a_connection_comes_up_step_by_step_and_ends() {
    let _fabric = Fabric::new();
    let listener = listen().unwrap();
    let mut resolving = connector(&listener).start().unwrap();
    let mut resolved = drive::<_, CmError>(|| resolving.advance()).unwrap();
    assert!(matches!(resolving.advance(), Err(CmError::Finished { .. })));
    assert_eq!(
        (resolved.device_name().as_str(), resolved.port_num()),
        ("fake0", 1)
    );
    let mut client = queue_pair(&resolved.context()).unwrap();
    resolved.init_qp(&mut client).unwrap();
    assert_eq!(client.state().unwrap(), QpState::Init);
    let param = ConnParam {
        private_data: b"hello".to_vec(),
        ..ConnParam::default()
    };
    let mut connecting = resolved.connect(&mut client, &param).unwrap();
    assert!(connecting.advance(&mut client).unwrap().is_none());

    let request = request(&listener).unwrap();
    assert!(request.private_data().starts_with(b"hello"));
    assert_eq!(request.param().qp_num, client.qp_num());
    assert_eq!(request.local_addr(), listener.local_addr());
    let (server, passive) = accept(request).unwrap();
    assert_eq!(server.state().unwrap(), QpState::Rts);
    assert!(!passive.is_established());

    let active = drive::<_, CmError>(|| connecting.advance(&mut client)).unwrap();
    assert!(matches!(
        connecting.advance(&mut client),
        Err(CmError::Finished { .. })
    ));
    assert_eq!(client.state().unwrap(), QpState::Rts);
    assert!(active.is_established());
    assert_eq!(
        passive.try_event().unwrap(),
        Some(ConnectionEvent::Established)
    );
    assert!(passive.is_established());
    assert_eq!(
        active.negotiated(),
        Negotiated {
            responder_resources: 16,
            initiator_depth: 16
        }
    );

    active.disconnect().unwrap();
    assert_eq!(
        passive.try_event().unwrap(),
        Some(ConnectionEvent::Disconnected)
    );
    passive.disconnect().unwrap();
    assert_eq!(
        active.try_event().unwrap(),
        Some(ConnectionEvent::Disconnected)
    );
    assert_eq!(
        (active.try_event().unwrap(), passive.try_event().unwrap()),
        (None, None)
    );
    assert_eq!(
        (client.state().unwrap(), server.state().unwrap()),
        (QpState::Rts, QpState::Rts)
    );
}

#[test]
fn the_timers_and_depths_are_those_that_were_agreed_on() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let [(client, _active), (server, _passive)] = pair(&listener).unwrap();
    for qp in [&client, &server] {
        let info = fabric
            .qps()
            .into_iter()
            .find(|info| info.qp_num == qp.qp_num())
            .unwrap();
        assert_eq!(
            info.timers,
            [16, 6, 6, 12],
            "timeout, retry_cnt, rnr_retry, min_rnr_timer"
        );
        assert_eq!(info.read_depths, [16, 16]);
    }
}

#[test]
fn connecting_with_another_queue_pair_is_refused_and_the_answer_not_lost() {
    let _fabric = Fabric::new();
    let listener = listen().unwrap();
    let (mut qp, mut connecting) = begin(&listener).unwrap();
    let (mut server, _passive) = accept(request(&listener).unwrap()).unwrap();
    let error = connecting.advance(&mut server).map(drop).unwrap_err();
    assert!(
        matches!(error, CmError::Config { field: "qp", .. }),
        "{error}"
    );
    let active = drive::<_, CmError>(|| connecting.advance(&mut qp)).unwrap();
    assert!(active.is_established());
}

#[test]
fn refused_rejected_and_unreachable_are_told_apart() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let gone = listen().unwrap();
    let mut resolved = resolve(connector(&gone).start().unwrap()).unwrap();
    let mut qp = queue_pair(&resolved.context()).unwrap();
    resolved.init_qp(&mut qp).unwrap();
    drop(gone);
    let mut connecting = resolved.connect(&mut qp, &ConnParam::default()).unwrap();
    let error = drive::<_, CmError>(|| connecting.advance(&mut qp))
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, CmError::Refused { .. }), "{error}");

    let (mut qp, mut connecting) = begin(&listener).unwrap();
    request(&listener).unwrap().reject(b"no").unwrap();
    match drive::<_, CmError>(|| connecting.advance(&mut qp))
        .map(drop)
        .unwrap_err()
    {
        CmError::Rejected {
            reason: RejectReason::Consumer,
            private_data,
            ..
        } => {
            assert!(private_data.starts_with(b"no"));
        }
        other => panic!("{other}"),
    }

    let (mut qp, mut connecting) = begin(&listener).unwrap();
    drop(request(&listener).unwrap());
    let error = drive::<_, CmError>(|| connecting.advance(&mut qp))
        .map(drop)
        .unwrap_err();
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

    fabric.silence_port(listener.local_addr().port());
    let (mut qp, mut connecting) = begin(&listener).unwrap();
    fabric.expire_connects();
    let error = drive::<_, CmError>(|| connecting.advance(&mut qp))
        .map(drop)
        .unwrap_err();
    let timed_out = EventStatus::Errno(libc::ETIMEDOUT);
    assert!(
        matches!(error, CmError::Unreachable { status, .. } if status == timed_out),
        "{error}"
    );
    assert_eq!(error.errno(), Some(libc::ETIMEDOUT));
}

#[test]
fn the_deadline_holds_at_each_step() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let short = || connector(&listener).deadline(Duration::from_millis(20));

    fabric.hold_cm_events();
    let error = short().resolve().map(drop).unwrap_err();
    assert!(
        matches!(
            error,
            CmError::TimedOut {
                step: Step::ResolveAddr,
                ..
            }
        ),
        "{error}"
    );
    fabric.release_cm_events();

    fabric.silence_port(listener.local_addr().port());
    // Long enough to resolve on a busy machine; and time enough to see that it is not exceeded by far.
    let deadline = Duration::from_secs(if cfg!(miri) { 60 } else { 2 });
    let resolved = connector(&listener).deadline(deadline).resolve().unwrap();
    let mut qp = queue_pair(&resolved.context()).unwrap();
    let start = Instant::now();
    let error = match resolved.connect(&mut qp, &ConnParam::default()) {
        Ok(connecting) => connecting.wait(&mut qp).map(drop).unwrap_err(),
        Err(error) => error,
    };
    assert!(
        matches!(
            error,
            CmError::TimedOut {
                step: Step::Connect,
                ..
            }
        ),
        "{error}"
    );
    assert!(start.elapsed() < deadline + Duration::from_secs(10));

    let error = listener.accept(Some(Instant::now())).map(drop).unwrap_err();
    assert!(
        matches!(
            error,
            CmError::TimedOut {
                step: Step::Request,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn only_calls_that_wait_look_for_the_addresses_that_would_do() {
    let fabric = Fabric::new();
    let mut by_peer = Connector::new(addr("127.0.0.1", 1)).start().unwrap();
    let mut looking_up = Lookup::new(addr("127.0.0.1", 1)).start().unwrap();
    let made = fabric.count_of("rdma_create_id");
    let by_peer = drive::<_, CmError>(|| by_peer.advance())
        .map(drop)
        .unwrap_err();
    let looking_up = drive::<_, CmError>(|| looking_up.advance())
        .map(drop)
        .unwrap_err();
    let by_source = Connector::new(addr(SERVER, 1))
        .source(addr("127.0.0.1", 0))
        .start()
        .map(drop)
        .unwrap_err();
    assert_eq!(fabric.count_of("rdma_create_id"), made);
    for error in [by_peer, looking_up, by_source] {
        assert!(
            matches!(error, CmError::NoDevice { known: None, .. }),
            "{error}"
        );
        let error = error.with_candidates();
        assert!(
            matches!(error, CmError::NoDevice { known: Some(_), .. }),
            "{error}"
        );
    }
}

#[test]
fn a_route_or_a_device_that_is_missing_is_named() {
    let _fabric = Fabric::new();
    let error = Connector::new(addr("192.0.2.1", 1))
        .start()
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, CmError::NoRoute { .. }), "{error}");
    let error = Connector::new(addr("127.0.0.1", 1))
        .resolve()
        .map(drop)
        .unwrap_err();
    let looked_for = |error| matches!(error, CmError::NoDevice { known: Some(_), .. });
    assert!(looked_for(error));
    let error = Listener::bind(addr("127.0.0.1", 0), &ListenOptions::default())
        .map(drop)
        .unwrap_err();
    assert!(looked_for(error));
    assert!(rdma_cm::context_for(addr("127.0.0.1", 0)).is_err());
    assert_eq!(
        rdma_cm::context_for(addr(SERVER, 0)).unwrap().device_name(),
        "fake1"
    );
}

#[test]
fn without_rdma_the_error_says_what_is_missing() {
    let fabric = Fabric::new();
    fabric.fail_nth("rdma_create_event_channel", 0, libc::ENOENT);
    let error = listen().map(drop).unwrap_err();
    assert!(
        matches!(error, CmError::NoConnectionManager { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("modprobe rdma_ucm"), "{error}");
}

#[test]
fn a_look_up_that_timed_out_is_tried_again_while_there_is_time() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    fabric.drop_cm_events(cm_event::RDMA_CM_EVENT_ADDR_RESOLVED, 1);
    let mut resolving = connector(&listener).start().unwrap();
    assert!(resolving.advance().unwrap().is_none());
    let before = fabric.count_of("rdma_resolve_addr");

    let id = fabric.ids().last().unwrap().name;
    fabric.inject_cm_event(id, cm_event::RDMA_CM_EVENT_ADDR_ERROR, -libc::ETIMEDOUT);

    let resolved = drive::<_, CmError>(|| resolving.advance()).unwrap();
    assert_eq!(resolved.device_name(), "fake0");
    assert_eq!(fabric.count_of("rdma_resolve_addr"), before + 1);
}

#[test]
fn a_route_that_timed_out_is_tried_again_while_there_is_time() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    fabric.drop_cm_events(cm_event::RDMA_CM_EVENT_ROUTE_RESOLVED, 1);
    let mut resolving = connector(&listener).start().unwrap();
    while fabric.count_of("rdma_resolve_route") == 0 {
        assert!(resolving.advance().unwrap().is_none());
    }
    let id = fabric.ids().last().unwrap().name;
    fabric.inject_cm_event(id, cm_event::RDMA_CM_EVENT_ROUTE_ERROR, -libc::ETIMEDOUT);

    drive::<_, CmError>(|| resolving.advance()).unwrap();
    assert_eq!(fabric.count_of("rdma_resolve_route"), 2);
}

#[test]
fn a_receive_before_the_confirmation_is_made_good_by_notify() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    fabric.lose_establish(1);
    let [_active, (_server, passive)] = pair(&listener).unwrap();
    assert_eq!(passive.try_event().unwrap(), None);
    passive.notify_comm_est().unwrap();
    assert_eq!(
        passive.try_event().unwrap(),
        Some(ConnectionEvent::Established)
    );
    passive.notify_comm_est().unwrap();
    assert_eq!(passive.try_event().unwrap(), None);
}

#[test]
fn a_peer_that_dies_or_does_not_answer_is_told() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let [(_client, active), (_server, passive)] = pair(&listener).unwrap();
    while passive.try_event().unwrap().is_some() {}
    active.disconnect().unwrap();
    fabric.expire_disconnects();
    let event = active.try_event().unwrap().unwrap();
    assert!(
        matches!(event, ConnectionEvent::DisconnectUnanswered(_)),
        "{event}"
    );
    assert!(event.is_end());
}

#[test]
fn a_removed_device_is_told_everywhere_and_everything_can_still_be_dropped() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let [(client, active), (server, passive)] = pair(&listener).unwrap();
    let mut resolving = connector(&listener).start().unwrap();
    let (mut waiting, mut connecting) = begin(&listener).unwrap();
    let pending = request(&listener).unwrap();

    fabric.remove_device(0);
    fabric.remove_device(1);

    let events: Vec<_> = std::iter::from_fn(|| active.try_event().unwrap()).collect();
    assert!(
        events.contains(&ConnectionEvent::DeviceRemoval),
        "{events:?}"
    );
    let events: Vec<_> = std::iter::from_fn(|| passive.try_event().unwrap()).collect();
    assert!(
        events.contains(&ConnectionEvent::DeviceRemoval),
        "{events:?}"
    );
    let error = drive::<_, CmError>(|| connecting.advance(&mut waiting))
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(&error, CmError::DeviceRemoved { device, .. } if device == "fake0"),
        "{error}"
    );
    let error = drive::<_, CmError>(|| listener.try_accept())
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(&error, CmError::DeviceRemoved { device, .. } if device == "fake1"),
        "{error}"
    );
    // It stays so: nothing will ever come again.
    assert!(matches!(
        listener
            .accept(Some(Instant::now() + Duration::from_secs(60)))
            .map(drop),
        Err(CmError::DeviceRemoved { .. })
    ));
    let _ = resolving.advance();
    drop((
        pending, connecting, waiting, client, server, active, passive, listener,
    ));
}

#[test]
fn a_request_whose_device_has_gone_does_not_end_a_listener_on_all_devices() {
    let fabric = Fabric::new();
    let listener = Listener::bind(addr("0.0.0.0", 0), &ListenOptions::default()).unwrap();
    let port = listener.local_addr().port();
    let ask = |ip| {
        let connector = Connector::new(addr(ip, port)).deadline(LONG);
        let resolved = resolve(connector.start().unwrap()).unwrap();
        let mut qp = queue_pair(&resolved.context()).unwrap();
        resolved.connect(&mut qp, &ConnParam::default()).unwrap()
    };
    let in_vain = ask(SERVER);
    fabric.remove_device(1);
    assert!(listener.try_accept().unwrap().is_none());

    let asking = ask(CLIENT);
    let request = request(&listener).unwrap();
    assert_eq!(request.device_name(), "fake0");
    drop((in_vain, asking, request));
}

#[test]
fn every_thread_that_accepts_is_told_of_a_removed_device() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let accept = || listener.accept(Some(until)).map(drop);
        let threads = [scope.spawn(accept), scope.spawn(accept)];
        fabric.remove_device(1);
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            assert!(matches!(error, CmError::DeviceRemoved { .. }), "{error}");
        }
    });
}

#[test]
fn a_failure_of_the_library_tells_its_own_reason() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    for (event, name) in [
        (cm_event::RDMA_CM_EVENT_ADDR_RESOLVED, "ADDR_ERROR"),
        (cm_event::RDMA_CM_EVENT_ROUTE_RESOLVED, "ROUTE_ERROR"),
    ] {
        fabric.fail_cm_query(event, libc::ENODATA);
        let mut resolving = connector(&listener).start().unwrap();
        let error = drive::<_, CmError>(|| resolving.advance()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODATA), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }

    let mut resolving = connector(&listener).start().unwrap();
    let id = fabric.ids().last().unwrap().name;
    fabric.inject_cm_event(
        id,
        cm_event::RDMA_CM_EVENT_CONNECT_ERROR,
        -libc::EPERM, // the kernel's own
    );
    let error = drive::<_, CmError>(|| resolving.advance()).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EPERM), "{error}");
}

#[test]
fn a_datagram_service_is_found_refused_and_missed() {
    let fabric = Fabric::new();
    let listener = ServiceListener::bind(addr(SERVER, 0), &ListenOptions::default()).unwrap();
    let look = || {
        Lookup::new(listener.local_addr())
            .source(addr(CLIENT, 0))
            .deadline(LONG)
            .private_data(b"who?")
            .start()
            .unwrap()
    };
    let ask = |looking: &mut rdma_cm::LookingUp| {
        (0..5).for_each(|_| assert!(looking.advance().unwrap().is_none()))
    };

    let mut looking = look();
    ask(&mut looking);
    let request = drive::<_, CmError>(|| listener.try_request()).unwrap();
    assert!(request.private_data().starts_with(b"who?"));
    let mut server = datagram_queue_pair(&request.context()).unwrap();
    request.init_qp(&mut server).unwrap();
    assert_eq!(server.state().unwrap(), QpState::Rts);
    request.answer(&server, b"me").unwrap();
    let service = drive::<_, CmError>(|| looking.advance()).unwrap();
    assert_eq!(service.qp_num(), server.qp_num());
    assert!(service.private_data().starts_with(b"me"));
    let mut client = datagram_queue_pair(&service.context()).unwrap();
    service.init_qp(&mut client).unwrap();
    service.address_handle(client.pd()).unwrap();
    assert!(matches!(looking.advance(), Err(CmError::Finished { .. })));

    let mut looking = look();
    ask(&mut looking);
    drive::<_, CmError>(|| listener.try_request())
        .unwrap()
        .reject(b"")
        .unwrap();
    let error = drive::<_, CmError>(|| looking.advance())
        .map(drop)
        .unwrap_err();
    let rejected = EventStatus::Sidr(SidrStatus::Rejected);
    assert!(
        matches!(error, CmError::Unreachable { status, .. } if status == rejected),
        "{error}"
    );

    let mut looking = look();
    ask(&mut looking);
    drop(drive::<_, CmError>(|| listener.try_request()).unwrap());
    fabric.expire_connects();
    let error = drive::<_, CmError>(|| looking.advance())
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, CmError::Unreachable { .. }), "{error}");
}

#[test]
fn a_multicast_group_is_joined_and_left() {
    let _fabric = Fabric::new();
    let mut joining = Join::new(addr("239.1.2.3", 0))
        .source(addr(CLIENT, 0))
        .deadline(LONG)
        .start()
        .unwrap();
    let membership = drive::<_, CmError>(|| joining.advance()).unwrap();
    let mut qp = datagram_queue_pair(&membership.context()).unwrap();
    membership.init_qp(&mut qp).unwrap();
    membership.attach(&mut qp).unwrap();
    membership.address_handle(qp.pd()).unwrap();
    membership.detach(&mut qp).unwrap();
    assert!(matches!(joining.advance(), Err(CmError::Finished { .. })));
}

#[test]
fn an_id_whose_group_could_not_be_left_fetches_no_event() {
    let group = addr("239.1.2.3", 0);
    for (errno, lost) in [(libc::ENXIO, true), (libc::EADDRNOTAVAIL, false)] {
        let fabric = Fabric::new();
        let mut id = CmId::new(PortSpace::Udp).unwrap();
        id.bind(addr(CLIENT, 0)).unwrap();
        id.join_multicast(group, false).unwrap();
        fabric.fail_nth("rdma_leave_multicast", 0, errno);
        assert_eq!(id.leave_multicast(group).unwrap_err().errno(), Some(errno));
        match id.try_event() {
            Err(CmError::DeviceRemoved { .. }) => assert!(lost),
            Ok(Some(event)) => assert!(!lost, "{event:?}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_device_outlives_every_id_on_it() {
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let resolved = resolve(connector(&listener).start().unwrap()).unwrap();
    let qp = queue_pair(&resolved.context()).unwrap();
    drop((resolved, listener));
    assert_eq!(fabric.live_objects().ids, 0);
    assert_eq!(qp.state().unwrap(), QpState::Reset);
}

#[test]
fn a_thousand_rounds_leave_nothing_behind() {
    let rounds = if cfg!(miri) { 5 } else { 1000 };
    let fabric = Fabric::new();
    let listener = listen().unwrap();
    let kept = pair(&listener).unwrap();
    let before = (fabric.live_objects(), open_fds());
    for _ in 0..rounds {
        let [(_client, active), (_server, passive)] = pair(&listener).unwrap();
        active.disconnect().unwrap();
        while passive.try_event().unwrap().is_some() {}
    }
    assert_eq!((fabric.live_objects(), open_fds()), before);
    drop(kept);
}
