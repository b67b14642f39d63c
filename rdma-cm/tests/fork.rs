//! A child of `fork` must leave its parent's connections alone. Alone in its binary, since it forks.
#![allow(unsafe_code, clippy::unwrap_used)] // forks; a test may panic
#![cfg(not(miri))] // Miri cannot fork

use fake_verbs::Fabric;
use rdma_cm::{
    CmError, CmId, ConnParam, ConnectionEvent, Connector, ListenOptions, Listener, PortSpace,
};
use rdma_core_rs::{CompletionQueue, Context, ProtectionDomain, QpConfig, QueuePair};

fn queue_pair(context: &Context) -> QueuePair {
    let pd = ProtectionDomain::new(context).unwrap();
    let cq = CompletionQueue::new(context, 64, None).unwrap();
    QueuePair::new(&pd, &QpConfig::rc(&cq, &cq)).unwrap()
}

#[test]
fn child_is_refused_and_ends_no_connection() {
    let fabric = Fabric::new();
    let there = "10.9.0.2:7471".parse().unwrap();
    let listener = Listener::bind(there, &ListenOptions::default()).unwrap();
    let resolved = Connector::new(there).resolve().unwrap();
    let mut client = queue_pair(&resolved.context());
    let connecting = resolved
        .connect(&mut client, &ConnParam::default())
        .unwrap();
    let request = listener.accept(None).unwrap();
    let mut server = queue_pair(&request.context());
    let passive = request.accept(&mut server, &ConnParam::default()).unwrap();
    let active = connecting.wait(&mut client).unwrap();
    let mut id = CmId::new(PortSpace::Tcp).unwrap();
    id.bind("10.9.0.1:0".parse().unwrap()).unwrap();
    let destroyed = fabric.count_of("rdma_destroy_id");

    // SAFETY: the test's only other threads are the harness's, which hold no lock we take.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(active.disconnect(), Err(CmError::Forked))
            && matches!(passive.try_event(), Err(CmError::Forked))
            && matches!(listener.try_accept(), Err(CmError::Forked))
            && matches!(id.context(), Err(CmError::Forked))
            // librdmacm would give them the parent's open device.
            && matches!(CmId::new(PortSpace::Tcp), Err(CmError::Forked))
            && matches!(rdma_cm::context_for(there), Err(CmError::Forked))
            && matches!(rdma_cm::device_addresses(), Err(CmError::Forked));
        drop((active, passive, listener, id));
        let untouched = fabric.count_of("rdma_destroy_id") == destroyed;
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if refused && untouched { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child and `status` a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    assert_eq!(
        passive.try_event().unwrap(),
        Some(ConnectionEvent::Established)
    );
    drop(active);
    assert_eq!(
        passive.try_event().unwrap(),
        Some(ConnectionEvent::Disconnected)
    );
}
