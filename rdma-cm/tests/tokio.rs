//! The steps awaited in a tokio runtime, on the fake fabric.
#![allow(clippy::unwrap_used)] // a test may panic

mod fake;

use std::time::Duration;

use fake::*;
use fake_verbs::Fabric;
use rdma_cm::{CmError, ConnParam, ConnectionEvent, Join, ListenOptions, Lookup, ServiceListener};
use tokio::runtime::Builder;
use tokio::time::timeout;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn both_sides_of_a_connection_are_awaited_in_one_thread() {
    let _fabric = Fabric::new();
    block_on(async {
        let listener = listen().unwrap();
        let mut resolving = connector(&listener).start().unwrap();
        let mut resolved = resolving.ready().await.unwrap();
        let mut client = queue_pair(&resolved.context()).unwrap();
        resolved.init_qp(&mut client).unwrap();
        let mut connecting = resolved
            .connect(&mut client, &ConnParam::default())
            .unwrap();

        let request = listener.next_request().await.unwrap();
        let (_server, passive) = accept(request).unwrap();
        let active = connecting.ready(&mut client).await.unwrap();
        assert_eq!(
            passive.next_event().await.unwrap(),
            ConnectionEvent::Established
        );
        active.disconnect().unwrap();
        assert_eq!(
            passive.next_event().await.unwrap(),
            ConnectionEvent::Disconnected
        );
    });
}

#[test]
fn a_dropped_future_loses_nothing() {
    let fabric = Fabric::new();
    block_on(async {
        let listener = listen().unwrap();
        let tick = Duration::from_millis(1);
        fabric.hold_cm_events();
        let mut resolving = connector(&listener).start().unwrap();
        assert!(timeout(tick, resolving.ready()).await.is_err());
        assert!(timeout(tick, listener.next_request()).await.is_err());
        fabric.release_cm_events();
        let resolved = resolving.ready().await.unwrap();

        let mut client = queue_pair(&resolved.context()).unwrap();
        let mut connecting = resolved
            .connect(&mut client, &ConnParam::default())
            .unwrap();
        assert!(timeout(tick, connecting.ready(&mut client)).await.is_err());
        let (_server, passive) = accept(listener.next_request().await.unwrap()).unwrap();
        let _active = connecting.ready(&mut client).await.unwrap();
        assert_eq!(
            passive.next_event().await.unwrap(),
            ConnectionEvent::Established
        );
        assert!(timeout(tick, passive.next_event()).await.is_err());
    });
}

#[test]
fn a_deadline_ends_a_step_that_is_awaited() {
    let fabric = Fabric::new();
    block_on(async {
        let listener = listen().unwrap();
        fabric.silence_port(listener.local_addr().port());
        let short = connector(&listener).deadline(Duration::from_secs(2));
        let resolved = short.start().unwrap().ready().await.unwrap();
        let mut client = queue_pair(&resolved.context()).unwrap();
        let mut connecting = resolved
            .connect(&mut client, &ConnParam::default())
            .unwrap();
        let error = connecting.ready(&mut client).await.map(drop).unwrap_err();
        assert!(error.is_timed_out(), "{error}");
        let again = connecting.ready(&mut client).await.map(drop).unwrap_err();
        assert!(matches!(again, CmError::Finished { .. }), "{again}");
    });
}

#[test]
fn datagrams_and_groups_are_awaited_too() {
    let _fabric = Fabric::new();
    block_on(async {
        let listener = ServiceListener::bind(addr(SERVER, 0), &ListenOptions::default()).unwrap();
        let mut looking = Lookup::new(listener.local_addr())
            .source(addr(CLIENT, 0))
            .start()
            .unwrap();
        assert!(
            timeout(Duration::from_millis(1), looking.ready())
                .await
                .is_err()
        );
        let request = listener.next_request().await.unwrap();
        let mut server = datagram_queue_pair(&request.context()).unwrap();
        request.init_qp(&mut server).unwrap();
        request.answer(&server, b"").unwrap();
        assert_eq!(looking.ready().await.unwrap().qp_num(), server.qp_num());

        let mut joining = Join::new(addr("239.1.2.3", 0))
            .source(addr(CLIENT, 0))
            .start()
            .unwrap();
        assert_eq!(joining.ready().await.unwrap().group(), addr("239.1.2.3", 0));
    });
}
