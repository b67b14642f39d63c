//! What happens when C says no: each fallible call fails once, requests are refused halfway,
//! destroying fails, and numbers come that nobody knows.
#![allow(unsafe_code)] // posts

mod program;
mod verbs;

use std::sync::Arc;

use fake_verbs::{Completion, Config, Fabric};
use program::{poll_one, program};
use rdma_core_rs::{
    AddressHandle, AsyncEvent, CompletionChannel, CompletionQueue, Context, Error,
    ProtectionDomain, QpConfig, QpType, QueuePair, RecvWr, RegionSlice, SendWr, Srq, WcOpcode,
    WcStatus, devices,
};
use verbs::{Bed, End, PATIENCE, next_completion};

const A: (&str, &str) = ("fake0", "10.9.0.1");
const B: (&str, &str) = ("fake1", "10.9.0.2");

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
fn queue_that_a_resize_may_have_lost_is_not_polled() {
    for (errno, lost) in [
        (libc::EINVAL, false),
        (libc::ENOMEM, true),
        (libc::EIO, true),
    ] {
        let fabric = Fabric::new();
        let context = devices().unwrap()[0].open().unwrap();
        let cq = CompletionQueue::new(&context, 8, None).unwrap();
        fabric.fail_nth("ibv_resize_cq", 0, errno);
        // SAFETY: nobody polls it meanwhile.
        let resize = || unsafe { cq.resize(16) };
        assert_eq!(resize().unwrap_err().errno(), Some(errno));
        let polled = cq.poll(&mut []).map(<[_]>::len);
        let polled = polled.map_err(|error| error.errno());
        let expected = if lost { Err(Some(libc::EIO)) } else { Ok(0) };
        assert_eq!((polled, cq.capacity() == 0), (expected, lost));
        let calls = fabric.count_of("ibv_poll_cq");
        assert_eq!(calls, u64::from(!lost));
        assert_eq!(resize().is_err(), lost, "it cannot be had back");
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
fn address_handle_refused_without_a_reason_does_not_tell_an_old_one() {
    let fabric = Fabric::new();
    let bed = Bed::open(A, B);
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(1, &[]);
    a.post(SendWr::send(2, &[]));
    let received = b.expect(1, WcOpcode::Recv);
    fabric.fail_nth("ibv_open_device", 0, libc::ENOSPC);
    devices().unwrap()[0].open().unwrap_err(); // leaves its errno

    fabric.fail_nth("ibv_create_ah_from_wc", 0, 0);
    let received = received.success().unwrap();
    let error = AddressHandle::to_sender(&bed.b.pd, 1, &received, &[0; 40]).unwrap_err();
    assert_eq!(error.errno(), None, "{error}");
    assert!(
        error.to_string().contains("ibv_create_ah_from_wc"),
        "{error}"
    );
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
