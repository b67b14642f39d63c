//! Each call fails once, each event arrives at each step, and everything is dropped at each step.
#![allow(clippy::unwrap_used)] // a test may panic

mod fake;
mod program;

use std::collections::BTreeSet;

use fake::*;
use fake_verbs::{Fabric, IdName};
use program::program;
use rdma_cm::{CmError, ConnParam, ConnectionEvent};

#[test]
fn each_call_may_fail_once_and_is_named_and_nothing_is_left() {
    let unnamed = ["rdma_getaddrinfo"]; // its errors name the host
    let mut reached = BTreeSet::new();
    for number in 0.. {
        let fabric = Fabric::new(); // dropped last: panics if anything is left or a rule was broken
        fabric.fail_call_number(number, libc::EIO);
        let outcome = program();
        let [failed] = fabric.failed_calls()[..] else {
            outcome.unwrap();
            break;
        };
        reached.insert(failed);
        let text = outcome.expect_err(failed).to_string();
        assert!(
            text.contains(failed) || unnamed.contains(&failed),
            "{failed} failed, but: {text}"
        );
    }
    for call in [
        "rdma_create_event_channel",
        "rdma_create_id",
        "rdma_set_option",
        "rdma_bind_addr",
        "rdma_listen",
        "rdma_resolve_addr",
        "rdma_resolve_route",
        "rdma_get_devices",
        "rdma_init_qp_attr",
        "rdma_connect",
        "rdma_migrate_id",
        "rdma_accept",
        "rdma_establish",
        "rdma_notify",
        "rdma_reject",
        "ibv_modify_qp",
    ] {
        assert!(
            reached.contains(call),
            "{call} was not reached: {reached:?}"
        );
    }
}

/// How far two hosts get before everything is dropped.
#[test]
fn everything_may_be_dropped_at_each_step_and_in_either_order() {
    for step in 0..10 {
        for server_first in [false, true] {
            let fabric = Fabric::new();
            dropped_at(step, server_first).unwrap();
            fabric.check();
        }
    }
}

fn dropped_at(step: u32, server_first: bool) -> Result<(), Failure> {
    let listener = listen()?;
    if step == 0 {
        return Ok(());
    }
    let mut resolving = connector(&listener).start()?;
    if step == 1 {
        return leave(server_first, resolving, listener);
    }
    let mut resolved = drive::<_, Failure>(|| resolving.advance())?;
    if step == 2 {
        return leave(server_first, (resolved, resolving), listener);
    }
    let mut client = queue_pair(&resolved.context())?;
    resolved.init_qp(&mut client)?;
    if step == 3 {
        return leave(server_first, (resolved, client), listener);
    }
    let mut connecting = resolved.connect(&mut client, &ConnParam::default())?;
    if step == 4 {
        return leave(server_first, (connecting, client), listener);
    }
    let mut request = request(&listener)?;
    if step == 5 {
        return leave(server_first, (client, connecting), (listener, request));
    }
    let mut server = queue_pair(&request.context())?;
    request.init_qp(&mut server)?;
    if step == 6 {
        return leave(
            server_first,
            (connecting, client),
            (request, server, listener),
        );
    }
    let passive = request.accept(&mut server, &ConnParam::default())?;
    if step == 7 {
        return leave(
            server_first,
            (client, connecting),
            (server, passive, listener),
        );
    }
    let active = drive::<_, Failure>(|| connecting.advance(&mut client))?;
    if step == 8 {
        return leave(server_first, (active, client), (passive, listener, server));
    }
    active.disconnect()?;
    while passive.try_event()?.is_some() {}
    leave(server_first, (client, active), (listener, passive, server))
}

fn leave<C, S>(server_first: bool, client: C, server: S) -> Result<(), Failure> {
    if server_first {
        drop(server);
        drop(client);
    } else {
        drop(client);
        drop(server);
    }
    Ok(())
}

/// All kinds of events and some that nobody knows, each with statuses of all kinds.
fn all_events() -> impl Iterator<Item = (u32, i32)> {
    let numbers = (0..=17).chain([999, u32::MAX]);
    numbers.flat_map(|number| {
        [0, -libc::ETIMEDOUT, -libc::ENODEV, 8, 28, i32::MIN].map(|status| (number, status))
    })
}

fn newest(fabric: &Fabric) -> IdName {
    fabric.ids().last().unwrap().name
}

#[test]
fn each_event_may_arrive_while_resolving() {
    for (event, status) in all_events() {
        let fabric = Fabric::new();
        let listener = listen().unwrap();
        let mut resolving = connector(&listener).start().unwrap();
        fabric.inject_cm_event(newest(&fabric), event, status);
        match drive::<_, CmError>(|| resolving.advance()) {
            Ok(resolved) => assert_eq!(resolved.device_name(), "fake0", "{event} {status}"),
            Err(error) => assert!(
                !matches!(error, CmError::Finished { .. }),
                "{event} {status}: {error}"
            ),
        }
        assert!(
            matches!(resolving.advance(), Err(CmError::Finished { .. })),
            "{event} {status}"
        );
    }
}

#[test]
fn each_event_may_arrive_while_connecting() {
    const BAD: [u32; 9] = [1, 3, 6, 7, 8, 10, 11, 15, 5];
    for (event, status) in all_events() {
        let fabric = Fabric::new();
        let listener = listen().unwrap();
        let (mut client, mut connecting) = begin(&listener).unwrap();
        let id = newest_active(&fabric);
        fabric.inject_cm_event(id, event, status);
        match connecting.advance(&mut client) {
            Ok(None) => {
                assert!(!BAD.contains(&event), "{event} {status} was ignored");
                let (_server, _passive) = accept(request(&listener).unwrap()).unwrap();
                let active = drive::<_, CmError>(|| connecting.advance(&mut client)).unwrap();
                assert!(active.is_established(), "{event} {status}");
            }
            Ok(Some(connection)) => {
                assert_eq!(event, 9, "{event} {status} established");
                drop(connection);
            }
            Err(_) => {
                assert!(BAD.contains(&event), "{event} {status} failed");
                assert!(matches!(
                    connecting.advance(&mut client),
                    Err(CmError::Finished { .. })
                ));
            }
        }
    }
}

fn newest_active(fabric: &Fabric) -> IdName {
    fabric
        .ids()
        .iter()
        .rev()
        .find(|id| !id.passive)
        .unwrap()
        .name
}

#[test]
fn each_event_may_arrive_on_a_connection_and_its_end_is_told_once() {
    const ENDS: [u32; 6] = [6, 7, 8, 10, 11, 15];
    for (event, status) in all_events() {
        for passive_side in [false, true] {
            let fabric = Fabric::new();
            let listener = listen().unwrap();
            let [active, passive] = pair(&listener).unwrap();
            let ids = fabric.ids();
            let accepted = |id: &&fake_verbs::IdInfo| {
                id.passive && id.peer.is_some_and(|peer| peer.port() != 0)
            };
            let name = match passive_side {
                false => newest_active(&fabric),
                true => ids.iter().rev().find(accepted).unwrap().name,
            };
            fabric.inject_cm_event(name, event, status);
            fabric.inject_cm_event(name, event, status);
            let (_qp, connection) = if passive_side { &passive } else { &active };
            let events: Vec<_> = std::iter::from_fn(|| connection.try_event().unwrap()).collect();
            let is_end = ENDS.contains(&event);
            assert_eq!(
                connection.is_established(),
                !is_end,
                "{event} {status}: {events:?}"
            );
            // The device and the end of the time-wait are told even after the end.
            let ends = events.iter().filter(|event| event.is_end()).count();
            let most = if [11, 15].contains(&event) { 2 } else { 1 };
            assert!(
                ends == 0 && !is_end || (1..=most).contains(&ends),
                "{event} {status}: {events:?}"
            );
            let ups = events
                .iter()
                .filter(|event| **event == ConnectionEvent::Established)
                .count();
            assert_eq!(
                ups,
                usize::from(passive_side),
                "{event} {status}: {events:?}"
            );
        }
    }
}

#[test]
fn each_event_may_arrive_on_a_listener() {
    for (event, status) in all_events() {
        let fabric = Fabric::new();
        let listener = listen().unwrap();
        fabric.inject_cm_event(newest(&fabric), event, status);
        match listener.try_accept() {
            Ok(None) => assert_ne!(event, 11),
            Ok(Some(_)) => panic!("{event} {status} made a request"),
            Err(error) => assert!([4, 11].contains(&event), "{event} {status}: {error}"),
        }
    }
}
