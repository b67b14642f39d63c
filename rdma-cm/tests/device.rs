//! A queue pair on another device than the connection's is told, not connected to nobody.
#![allow(clippy::unwrap_used)] // a test may panic

use std::net::SocketAddr;

use fake_verbs::Fabric;
use rdma_cm::{CmError, ConnParam, Connector, ListenOptions, Listener, context_for};
use rdma_core_rs::{CompletionQueue, Context, ProtectionDomain, QpConfig, QueuePair, devices};

fn queue_pair(context: &Context) -> QueuePair {
    let pd = ProtectionDomain::new(context).unwrap();
    let cq = CompletionQueue::new(context, 64, None).unwrap();
    QueuePair::new(&pd, &QpConfig::rc(&cq, &cq)).unwrap()
}

fn assert_is_told(result: Result<impl Sized, CmError>, device: &str) {
    let error = result.err().unwrap();
    assert!(
        matches!(error, CmError::Config { field: "qp", .. }),
        "{error}"
    );
    assert!(error.to_string().contains(device), "{error}");
}

#[test]
fn queue_pair_of_another_device_is_refused_on_both_sides() {
    let _fabric = Fabric::new();
    let there: SocketAddr = "10.9.0.2:7471".parse().unwrap();
    let listener = Listener::bind(there, &ListenOptions::default()).unwrap();
    let connector = Connector::new(there);

    let mut resolved = connector.clone().resolve().unwrap();
    assert_eq!(resolved.device_name(), "fake0");
    let mut wrong = queue_pair(&context_for(there).unwrap());
    assert_is_told(resolved.init_qp(&mut wrong), "fake1");
    assert_is_told(resolved.connect(&mut wrong, &ConnParam::default()), "fake1");

    let resolved = connector.resolve().unwrap();
    let mut client = queue_pair(&resolved.context());
    let _connecting = resolved
        .connect(&mut client, &ConnParam::default())
        .unwrap();
    let request = listener.accept(None).unwrap();
    let mut wrong = queue_pair(&context_for("10.9.0.1:0".parse().unwrap()).unwrap());
    assert_is_told(request.accept(&mut wrong, &ConnParam::default()), "fake0");
}

#[test]
fn device_opened_by_the_user_is_as_good_as_the_connections() {
    let _fabric = Fabric::new();
    let there: SocketAddr = "10.9.0.2:7471".parse().unwrap();
    let mut resolved = Connector::new(there).resolve().unwrap();
    let mut all = devices().unwrap().into_iter();
    let device = all.find(|it| it.name() == resolved.device_name()).unwrap();
    let mut own = queue_pair(&device.open().unwrap());
    resolved.init_qp(&mut own).unwrap();
}
