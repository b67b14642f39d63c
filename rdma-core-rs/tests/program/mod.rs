//! A program that makes, uses and gives back one of everything.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // as in verbs/
#![allow(unsafe_code)] // posts

use std::error::Error as StdError;

use rdma_core_rs::{
    Access, AddressHandle, CompletionChannel, CompletionQueue, Error, MemoryWindow,
    ProtectionDomain, QpAttr, QpConfig, QpState, QueuePair, RecvWr, RegionSlice, SendWr,
    SharedRegion, Srq, WorkCompletion, devices,
};

use crate::verbs::QKEY;

/// The address of the device it uses.
const ADDRESS: &str = "10.9.0.1";

pub type Outcome = Result<(), Box<dyn StdError>>;

/// Makes, uses and gives back one of everything, and passes every error on.
pub fn program() -> Outcome {
    let device = devices()?.into_iter().next().ok_or("no device")?;
    let context = device.open()?;
    let gid = context.find_gid(1, ADDRESS.parse()?)?.ok_or("no GID")?;
    context.pkey(1, 0)?;
    context.on_demand_paging()?;
    let mtu = context.port_attr(1)?.active_mtu;
    let pd = ProtectionDomain::new(&context)?;
    let mut slice = RegionSlice::alloc(&pd, 64)?; // before the queues, so that it is freed after them
    let events = context.async_events()?;
    let channel = CompletionChannel::new(&context)?;
    let cq = CompletionQueue::new(&context, 64, Some(&channel))?;
    // SAFETY: nobody polls it.
    unsafe { cq.resize(100) }?;
    let srq = Srq::new(&pd, 16, 1)?;
    srq.arm_limit(1)?;
    srq.query()?;

    let mut config = QpConfig::rc(&cq, &cq);
    config.max_inline_data = 16;
    let mut sender = QueuePair::new(&pd, &config)?;
    config.srq = Some(srq.clone());
    let mut receiver = QueuePair::new(&pd, &config)?;
    let mut datagrams = QueuePair::new(&pd, &QpConfig::ud(&cq, &cq))?;
    let init = QpAttr::new().state(QpState::Init).pkey_index(0).port(1);
    datagrams.modify(&init.clone().qkey(QKEY))?;
    datagrams.attach_mcast("ff0e::1".parse()?, 0)?;
    datagrams.detach_mcast("ff0e::1".parse()?, 0)?;
    let path = rdma_core_rs::AddressVector::global(1, gid.gid, gid.index.try_into()?);
    let _ah = AddressHandle::new(&pd, &path)?;
    let numbers = (sender.qp_num(), receiver.qp_num());
    for (qp, peer) in [(&mut sender, numbers.1), (&mut receiver, numbers.0)] {
        qp.modify(&init.clone().access(Access::REMOTE))?;
        let rtr = QpAttr::new()
            .state(QpState::Rtr)
            .path(&path)
            .path_mtu(mtu)
            .dest_qp_num(peer);
        qp.modify(&rtr.rq_psn(0).max_dest_rd_atomic(1).min_rnr_timer(12))?;
    }
    let rts = QpAttr::new()
        .state(QpState::Rts)
        .sq_psn(0)
        .timeout(14)
        .retry_cnt(6);
    sender.modify(&rts.rnr_retry(6).max_rd_atomic(1))?;
    sender.query()?;
    sender.set_min_rnr_timer(13)?;

    let _adopted = RegionSlice::from_vec(&pd, vec![1; 64])?;
    let mut shared = SharedRegion::alloc(&pd, 64, Access::REMOTE_READ | Access::MW_BIND)?;
    shared.set_access(Access::REMOTE | Access::MW_BIND)?;
    let mut window = MemoryWindow::new(&pd)?;
    cq.moderate(1, 1).or_else(|error| match error {
        Error::NotSupported { .. } => Ok(()),
        other => Err(other),
    })?;

    slice[..2].copy_from_slice(b"hi");
    let sges = [slice.sge_range(..2)?];
    let room = [slice.sge_range(32..)?];
    // SAFETY: no buffer.
    unsafe { sender.post_recv(&mut RecvWr::new(0, &[])) }?;
    let window_part = shared.slice(..)?;
    let mut bind = window.bind(2, &window_part, Access::REMOTE_READ)?;
    // SAFETY: binding uses no buffer.
    unsafe { sender.post_send(&mut bind) }?;
    cq.req_notify(false)?;
    // SAFETY: `slice` outlives the queues, and is not touched until the completions.
    unsafe { srq.post_recv(&mut RecvWr::new(1, &room)) }?;
    // SAFETY: as above.
    unsafe { sender.post_send(&mut SendWr::send(3, &sges)) }?;
    let mut seen = 0;
    while let Some(wc) = poll_one(&cq)? {
        wc.success()?;
        seen += 1;
    }
    while channel.try_event()?.is_some() {}
    while events.try_event()?.is_some() {}
    sender.to_error()?;
    for qp in [sender, receiver, datagrams] {
        qp.destroy().map_err(|(_, error)| error)?;
    }
    assert_eq!((seen, &slice[32..34]), (3, &b"hi"[..]));
    Ok(())
}

pub fn poll_one(cq: &CompletionQueue) -> rdma_core_rs::Result<Option<WorkCompletion>> {
    let mut room = [WorkCompletion::default()];
    Ok(cq.poll(&mut room)?.first().copied())
}
