//! What is forgotten instead of dropped must neither hang nor leak what follows.
#![allow(clippy::unwrap_used)] // a test may panic

use std::mem;
use std::time::Duration;

use fake_verbs::Fabric;
use rdma_cm::{CmError, CmId, Connector, EventType, PortSpace};
use rdma_core_rs::{CompletionQueue, ProtectionDomain, QpConfig, QueuePair};

const HERE: &str = "10.9.0.1:0";
const THERE: &str = "10.9.0.2:7471";

fn resolving() -> CmId {
    let mut id = CmId::new(PortSpace::Tcp).unwrap();
    let (here, there) = (HERE.parse().unwrap(), THERE.parse().unwrap());
    id.resolve_addr(Some(here), there, Duration::from_secs(1))
        .unwrap();
    id
}

#[test]
fn id_can_be_dropped_after_an_event_was_forgotten() {
    let _fabric = Fabric::new();
    let mut id = resolving();
    let event = id.try_event().unwrap().unwrap();
    assert_eq!(event.event_type(), EventType::AddrResolved);
    mem::forget(event);
    drop(id);
}

#[test]
fn id_goes_on_after_an_event_was_forgotten() {
    let _fabric = Fabric::new();
    let mut id = resolving();
    mem::forget(id.try_event().unwrap());
    id.resolve_route(Duration::from_secs(1)).unwrap();
    let event = id.try_event().unwrap().unwrap();
    assert_eq!(event.event_type(), EventType::RouteResolved);
}

#[test]
fn request_that_was_forgotten_is_rejected_with_its_listener() {
    let _fabric = Fabric::new();
    let mut listener = CmId::new(PortSpace::Tcp).unwrap();
    listener.bind(THERE.parse().unwrap()).unwrap();
    listener.listen(1).unwrap();
    let resolved = Connector::new(THERE.parse().unwrap()).resolve().unwrap();
    let context = resolved.context();
    let pd = ProtectionDomain::new(&context).unwrap();
    let cq = CompletionQueue::new(&context, 64, None).unwrap();
    let mut qp = QueuePair::new(&pd, &QpConfig::rc(&cq, &cq)).unwrap();
    let connecting = resolved.connect(&mut qp, &Default::default()).unwrap();

    let event = listener.try_event().unwrap().unwrap();
    assert_eq!(event.event_type(), EventType::ConnectRequest);
    mem::forget(event);
    drop(listener);

    let error = connecting.wait(&mut qp).unwrap_err();
    assert!(matches!(error, CmError::Rejected { .. }), "{error}");
}
