//! A child of `fork` must leave its parent's objects alone. Alone in its binary, since it forks.
#![allow(unsafe_code)] // forks
#![cfg(not(miri))] // Miri cannot fork

use fake_verbs::Fabric;
use rdma_core_rs::{
    Access, CompletionChannel, CompletionQueue, Error, MemoryWindow, ProtectionDomain, QpConfig,
    QueuePair, RegionSlice, SharedRegion, Srq, WorkCompletion, devices,
};

#[test]
fn child_is_refused_and_destroys_nothing() {
    let fabric = Fabric::new();
    let context = devices().unwrap()[0].open().unwrap();
    let pd = ProtectionDomain::new(&context).unwrap();
    let channel = CompletionChannel::new(&context).unwrap();
    let cq = CompletionQueue::new(&context, 8, Some(&channel)).unwrap();
    let events = context.async_events().unwrap();
    let srq = Srq::new(&pd, 8, 1).unwrap();
    let mut qp = QueuePair::new(&pd, &QpConfig::rc(&cq, &cq)).unwrap();
    let slice = RegionSlice::alloc(&pd, 8).unwrap();
    let shared = SharedRegion::alloc(&pd, 8, Access::MW_BIND).unwrap();
    let window = MemoryWindow::new(&pd).unwrap();
    let destroyed = fabric.destroys_made();

    // SAFETY: the test's only other threads are the harness's, which hold no lock we take.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(ProtectionDomain::new(&context), Err(Error::Forked))
            && matches!(qp.to_error(), Err(Error::Forked))
            // SAFETY: nobody polls it.
            && matches!(unsafe { cq.resize(9) }, Err(Error::Forked))
            && matches!(srq.arm_limit(1), Err(Error::Forked))
            && matches!(
                cq.poll(&mut [WorkCompletion::default()]),
                Err(Error::Forked)
            )
            && matches!(cq.req_notify(false), Err(Error::Forked))
            && matches!(channel.try_event(), Err(Error::Forked))
            && matches!(channel.wait(None), Err(Error::Forked))
            && matches!(events.try_event(), Err(Error::Forked))
            && matches!(events.wait(None), Err(Error::Forked))
            && matches!(RegionSlice::alloc(&pd, 8), Err(Error::Forked));
        let qp = match qp.destroy() {
            Err((qp, Error::Forked)) => qp,
            // SAFETY: ends the child.
            _ => unsafe { libc::_exit(2) },
        };
        drop((
            slice, window, shared, qp, srq, cq, channel, events, pd, context,
        ));
        let untouched = fabric.destroys_made() == destroyed;
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if refused && untouched { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child and `status` a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    qp.query().unwrap();
}
