//! What happens when C says no: each fallible call fails once, requests are refused halfway,
//! destroying fails, and numbers come that nobody knows.
#![allow(unsafe_code)] // posts

mod verbs;

use std::error::Error as StdError;
use std::mem::MaybeUninit;
use std::sync::Arc;

use fake_verbs::{Completion, Config, Fabric};
use rdma_core_rs::{
    Access, AddressHandle, AsyncEvent, CompletionChannel, CompletionQueue, Context, Error,
    MemoryWindow, ProtectionDomain, QpAttr, QpConfig, QpState, QpType, QueuePair, RecvWr,
    RegionSlice, SendWr, SharedRegion, Srq, WcOpcode, WcStatus, devices,
};
use verbs::{Bed, End, PATIENCE, QKEY, next_completion};

const A: (&str, &str) = ("fake0", "10.9.0.1");
const B: (&str, &str) = ("fake1", "10.9.0.2");

type Outcome = Result<(), Box<dyn StdError>>;

/// Makes, uses and gives back one of everything, and passes every error on.
fn program() -> Outcome {
    let device = devices()?.into_iter().next().ok_or("no device")?;
    let context = device.open()?;
    let gid = context.find_gid(1, A.1.parse()?)?.ok_or("no GID")?;
    context.pkey(1, 0)?;
    context.on_demand_paging()?;
    let mtu = context.port_attr(1)?.active_mtu;
    let pd = ProtectionDomain::new(&context)?;
    let mut slice = RegionSlice::alloc(&pd, 64)?; // before the queues, so that it is freed after them
    let events = context.async_events()?;
    let channel = CompletionChannel::new(&context)?;
    let cq = CompletionQueue::new(&context, 64, Some(&channel))?;
    cq.resize(100)?;
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

fn poll_one(cq: &CompletionQueue) -> rdma_core_rs::Result<Option<rdma_core_rs::WorkCompletion>> {
    let mut room = [MaybeUninit::uninit()];
    Ok(cq.poll(&mut room)?.first().copied())
}

#[test]
fn any_call_may_fail_and_is_named_and_nothing_is_left() {
    let errnos = if cfg!(miri) {
        &[libc::EIO][..]
    } else {
        &[libc::EIO, libc::ENOMEM, libc::EINVAL]
    };
    for &errno in errnos {
        let mut called = Vec::new();
        for number in 0.. {
            let fabric = Fabric::new(); // dropped last: panics on a leak or a broken rule
            fabric.fail_call_number(number, errno);
            let outcome = program();
            let [failed] = fabric.failed_calls()[..] else {
                outcome.expect("nothing failed");
                break;
            };
            let error = outcome.expect_err(failed).to_string();
            assert!(
                error.contains(failed),
                "{failed} failed with errno {errno}, but: {error}"
            );
            called.push(failed);
        }
        called.sort_unstable();
        called.dedup();
        assert!(called.len() >= 25, "only {called:?} were reached");
    }
}

#[test]
fn any_destroy_may_fail_without_panic_or_double_free() {
    for number in 0.. {
        let fabric = Fabric::new(); // what a failed destroy leaves is allowed, a second one is not
        fabric.fail_destroy_number(number, libc::EBUSY);
        let outcome = program();
        let [failed] = fabric.failed_calls()[..] else {
            outcome.expect("nothing failed");
            break;
        };
        if let Err(error) = outcome {
            assert!(
                error.to_string().contains(failed),
                "{failed} failed, but: {error}"
            );
        }
    }
}

#[test]
fn missing_permission_and_missing_support_are_explained() {
    let fabric = Fabric::new();
    fabric.fail_nth("ibv_open_device", 0, libc::EACCES);
    let device = devices().unwrap().remove(0);
    let error = device.open().unwrap_err();
    assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
    assert!(error.to_string().contains("/dev/infiniband/"), "{error}");
    assert_eq!(error.errno(), Some(libc::EACCES));

    fabric.fail_nth("ibv_get_device_list", 0, libc::EPERM);
    let error = devices().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_get_device_list",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn memory_that_cannot_be_pinned_is_freed_and_less_still_works() {
    let _fabric = Fabric::with(Config {
        memlock: 64 << 10,
        ..Config::default()
    });
    let context = devices().unwrap()[0].open().unwrap();
    let pd = ProtectionDomain::new(&context).unwrap();
    let error = RegionSlice::alloc(&pd, 1 << 20).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOMEM));
    assert!(error.to_string().contains("ibv_reg_mr"), "{error}");
    RegionSlice::alloc(&pd, 16 << 10).unwrap();
}

#[test]
fn refused_chain_tells_how_many_were_posted() {
    for refused in 0..4 {
        let fabric = Fabric::new();
        let bed = Bed::open(A, B);
        let (mut a, mut b) = bed.pair(QpType::Rc);

        fabric.refuse_post_at("ibv_post_recv", refused, libc::ENOMEM);
        let mut recvs: Vec<_> = (0..4).map(|i| RecvWr::new(i, &[])).collect();
        // SAFETY: no buffers.
        let error = unsafe { b.qp.post_recv_list(&mut recvs) }.unwrap_err();
        assert_eq!(
            (error.posted, error.source.errno()),
            (refused, libc::ENOMEM)
        );
        assert!(error.source.is_queue_full() && !error.source.may_be_posted());
        // SAFETY: no buffers.
        unsafe { b.qp.post_recv_list(&mut recvs[refused..]) }.unwrap();

        fabric.refuse_post_at("ibv_post_send", refused, libc::EINVAL);
        let mut sends: Vec<_> = (10..14).map(|i| SendWr::send(i, &[])).collect();
        // SAFETY: no buffers.
        let error = unsafe { a.qp.post_send_list(&mut sends) }.unwrap_err();
        assert_eq!(
            (error.posted, error.source.errno()),
            (refused, libc::EINVAL)
        );
        assert!(error.to_string().contains("ibv_post_send"), "{error}");
        // SAFETY: no buffers.
        unsafe { a.qp.post_send_list(&mut sends[refused..]) }.unwrap();

        for i in 0..4 {
            a.expect(10 + i, WcOpcode::Send);
            b.expect(i, WcOpcode::Recv);
        }
    }
}

#[test]
fn refused_chain_on_a_shared_queue_tells_how_many_were_posted() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let srq = Srq::new(&bed.b.pd, 16, 1).unwrap();
    fabric.refuse_post_at("ibv_post_srq_recv", 2, libc::ENOMEM);
    let mut recvs: Vec<_> = (0..4).map(|i| RecvWr::new(i, &[])).collect();
    // SAFETY: no buffers.
    let error = unsafe { srq.post_recv_list(&mut recvs) }.unwrap_err();
    assert_eq!(error.posted, 2);
    assert!(error.to_string().contains("ibv_post_srq_recv"), "{error}");
}

#[test]
fn full_queues_are_told_from_other_errors() {
    let _fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let (mut a, _b) = bed.pair(QpType::Rc);
    let granted = a.qp.caps().max_recv_wr as usize;
    let mut recvs: Vec<_> = (0..granted as u64 + 1)
        .map(|i| RecvWr::new(i, &[]))
        .collect();
    // SAFETY: no buffers.
    let error = unsafe { a.qp.post_recv_list(&mut recvs) }.unwrap_err();
    assert_eq!(
        (error.posted, error.source.is_queue_full()),
        (granted, true)
    );
}

#[test]
fn queue_pair_that_cannot_be_destroyed_comes_back() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let (a, _b) = bed.pair(QpType::Rc);
    fabric.fail_nth("ibv_destroy_qp", 0, libc::EBUSY);

    let (mut qp, error) = a.qp.destroy().unwrap_err();

    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_destroy_qp",
                ..
            }
        ),
        "{error}"
    );
    qp.to_error().unwrap();
    assert!(qp.destroy().is_ok());
}

#[test]
fn queue_pair_refused_by_drop_keeps_what_the_device_may_reach() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let cq = || CompletionQueue::new(&bed.a.context, 8, None).unwrap();
    let pd = ProtectionDomain::new(&bed.a.context).unwrap();
    let mut config = QpConfig::rc(&cq(), &cq());
    config.srq = Some(Srq::new(&pd, 8, 1).unwrap());
    let qp = QueuePair::new(&pd, &config).unwrap();
    fabric.fail_nth("ibv_destroy_qp", 0, libc::EBUSY);

    drop((qp, config, pd));

    let left = fabric.live_objects();
    assert_eq!((left.qps, left.cqs, left.srqs, left.pds), (1, 2, 1, 3));
    for call in ["ibv_destroy_cq", "ibv_destroy_srq", "ibv_dealloc_pd"] {
        assert_eq!(
            fabric.count_of(call),
            0,
            "{call} while the queue pair lives"
        );
    }
    assert_eq!(fabric.take_violations(), Vec::<String>::new());
}

#[test]
fn region_that_cannot_be_deregistered_keeps_its_memory() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let (mut a, b) = bed.pair(QpType::Rc);
    let region = SharedRegion::alloc(&bed.b.pd, 64, Access::REMOTE_WRITE).unwrap();
    let descriptor = region.descriptor();
    fabric.fail_nth("ibv_dereg_mr", 0, libc::EBUSY);
    drop(region);
    // The device may still write there, and under a sanitizer this would show freed memory.
    a.post(SendWr::write(
        1,
        &[a.local.sge_range(..64).unwrap()],
        descriptor,
    ));
    a.expect(1, WcOpcode::RdmaWrite);
    drop(b);
}

#[test]
fn broken_completion_queue_names_the_call() {
    let fabric = Fabric::new();
    let context = devices().unwrap()[0].open().unwrap();
    let cq = CompletionQueue::new(&context, 1, None).unwrap();
    fabric.fail_nth("ibv_poll_cq", 0, libc::EIO);
    let error = poll_one(&cq).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_poll_cq",
                ..
            }
        ),
        "{error}"
    );
    fabric.fail_nth("ibv_req_notify_cq", 0, libc::EIO);
    let error = cq.req_notify(false).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_req_notify_cq",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn broken_event_streams_name_the_call_and_signals_do_not_break_them() {
    let fabric = Fabric::new();
    let context = devices().unwrap()[0].open().unwrap();
    let channel = CompletionChannel::new(&context).unwrap();
    let events = context.async_events().unwrap();
    fabric.fail_nth("ibv_get_cq_event", 0, libc::EIO);
    fabric.fail_nth("ibv_get_async_event", 0, libc::EIO);
    let error = channel.try_event().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_get_cq_event",
                ..
            }
        ),
        "{error}"
    );
    let error = events.try_event().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_get_async_event",
                ..
            }
        ),
        "{error}"
    );

    fabric.fail_nth("ibv_get_cq_event", 0, libc::EINTR);
    fabric.fail_nth("ibv_get_async_event", 0, libc::EINTR);
    assert_eq!(channel.try_event().unwrap(), None);
    assert_eq!(events.try_event().unwrap(), None);
}

#[test]
fn unknown_and_known_async_events_are_read_and_acknowledged() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let events = bed.a.context.async_events().unwrap();
    let end = End::new(&bed.a, QpType::Rc, |_| {});
    let qp_num = end.qp.qp_num();
    let next = || {
        events
            .wait(Some(std::time::Instant::now() + PATIENCE))
            .unwrap()
            .unwrap()
    };

    for (number, event) in [
        (1, AsyncEvent::QpFatal { qp_num }),
        (2, AsyncEvent::QpReqErr { qp_num }),
        (3, AsyncEvent::QpAccessErr { qp_num }),
        (4, AsyncEvent::CommEst { qp_num }),
        (5, AsyncEvent::SqDrained { qp_num }),
        (6, AsyncEvent::PathMig { qp_num }),
        (7, AsyncEvent::PathMigErr { qp_num }),
        (16, AsyncEvent::QpLastWqeReached { qp_num }),
        (999, AsyncEvent::Unknown(999)),
    ] {
        fabric.inject_qp_event(qp_num, number);
        let got = next();
        assert_eq!(got, event);
        assert_eq!(got.qp_num(), (number != 999).then_some(qp_num));
    }
    for (number, event) in [
        (8, AsyncEvent::DeviceFatal),
        (9, AsyncEvent::PortActive { port: 1 }),
        (10, AsyncEvent::PortErr { port: 1 }),
        (11, AsyncEvent::LidChange { port: 1 }),
        (12, AsyncEvent::PkeyChange { port: 1 }),
        (13, AsyncEvent::SmChange { port: 1 }),
        (17, AsyncEvent::ClientReregister { port: 1 }),
        (18, AsyncEvent::GidChange { port: 1 }),
        (20, AsyncEvent::Unknown(20)), // of newer kernels
    ] {
        fabric.inject_port_event(0, 1, number);
        assert_eq!(next(), event);
    }
    fabric.inject_cq_event(fabric.cqs()[0].id, 0);
    assert!(next().is_for_cq(&end.cq));
    drop(end); // would hang on a real library, and is a broken rule here, if one was not acknowledged
}

#[test]
fn completions_nobody_knows_are_passed_on_as_they_are() {
    let fabric = Fabric::new();
    let context = devices().unwrap()[0].open().unwrap();
    let cq = CompletionQueue::new(&context, 8, None).unwrap();
    let strange = Completion {
        wr_id: u64::MAX,
        status: 77,
        opcode: 0xbad,
        vendor_err: 5,
        byte_len: 1,
        imm_data: 2,
        qp_num: 3,
        src_qp: 4,
        wc_flags: u32::MAX,
    };
    fabric.inject_completion(fabric.cqs()[0].id, strange);
    fabric.inject_completion(
        fabric.cqs()[0].id,
        Completion {
            status: 0,
            ..strange
        },
    );

    let failed = next_completion(&cq).unwrap();
    assert_eq!(
        (failed.wr_id(), failed.status()),
        (u64::MAX, WcStatus::Unknown(77))
    );
    assert!(!failed.is_success() && failed.ok().is_none());
    let succeeded = next_completion(&cq).unwrap();
    assert_eq!(
        succeeded.success().unwrap().opcode(),
        WcOpcode::Unknown(0xbad)
    );
}

#[test]
fn spurious_event_is_harmless() {
    let fabric = Fabric::new();
    let context = devices().unwrap()[0].open().unwrap();
    let channel = CompletionChannel::new(&context).unwrap();
    let cq = CompletionQueue::new(&context, 8, Some(&channel)).unwrap();
    fabric.spurious_cq_event(fabric.cqs()[0].id);
    assert!(channel.try_event().unwrap().expect("an event").is_for(&cq));
    assert!(poll_one(&cq).unwrap().is_none());
}

#[test]
fn borrowed_context_is_not_closed_and_its_keeper_goes_last() {
    let fabric = Fabric::new();
    let opened = devices().unwrap()[0].open().unwrap();
    let keeper: Arc<Context> = Arc::new(opened.clone());
    // SAFETY: the keeper holds the open device.
    let borrowed = unsafe { Context::from_raw(opened.as_raw(), keeper.clone()) };
    assert!(borrowed.is_same_device(&opened));
    let pd = ProtectionDomain::new(&borrowed).unwrap();
    drop((opened, borrowed));
    assert_eq!(Arc::strong_count(&keeper), 2, "the domain needs the device");
    let slice = RegionSlice::alloc(&pd, 10).unwrap();
    drop(pd);
    assert_eq!(Arc::strong_count(&keeper), 2);
    drop(slice);
    assert_eq!(Arc::strong_count(&keeper), 1);
    assert_eq!(fabric.live_objects().contexts, 1);
    drop(keeper);
    assert_eq!(fabric.live_objects().contexts, 0);
}

#[test]
fn unplugged_device_fails_its_queue_pairs_and_says_so() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let (mut a, _b) = bed.pair(QpType::Rc);
    let events = bed.a.context.async_events().unwrap();
    a.post_recv(1, &[a.local.sge()]);
    fabric.remove_device(0);
    assert_eq!(events.try_event().unwrap(), Some(AsyncEvent::DeviceFatal));
    a.expect_failure(1, WcStatus::WrFlushErr);
}

#[test]
fn inline_limit_that_comes_and_goes_is_not_blamed() {
    let fabric = Fabric::new();
    let context = devices().unwrap()[0].open().unwrap();
    let pd = ProtectionDomain::new(&context).unwrap();
    let cq = CompletionQueue::new(&context, 8, None).unwrap();
    let config = QpConfig {
        max_inline_data: 64,
        ..QpConfig::rc(&cq, &cq)
    };
    fabric.fail_nth("ibv_create_qp", 0, libc::EINVAL);
    let error = QueuePair::new(&pd, &config).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_create_qp",
                ..
            }
        ),
        "{error}"
    );

    let config = QpConfig {
        max_inline_data: 5000,
        ..config
    };
    let error = QueuePair::new(&pd, &config).unwrap_err().to_string();
    assert_eq!(
        error,
        "max_inline_data = 5000 is not possible: at most 512 is allowed"
    );
}
