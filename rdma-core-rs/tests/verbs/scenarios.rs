//! What must hold on every device. Each scenario is a sentence.

use std::os::fd::AsFd;
use std::time::Instant;

use rdma_core_rs::{
    Access, AddressHandle, AsyncEvent, CompletionChannel, CompletionQueue, DeviceCap, DmaBufRegion,
    Error, MemoryWindow, QpAttr, QpConfig, QpState, QpType, QueuePair, RecvWr, RegionOptions,
    RegionSlice, RemoteRegion, SendWr, Sge, SharedRegion, Srq, WcOpcode, WcStatus, WorkCompletion,
};

use super::{BUFFER, Bed, End, GRH, QKEY, connect, next_completion, pattern, soon};

/// Runs a macro over the names of all scenarios.
#[macro_export]
macro_rules! for_all_scenarios {
    ($macro:ident) => {
        $macro! {
            send_brings_bytes_and_immediate_data
            send_and_failure_show_nothing_of_an_earlier_receive
            empty_message_arrives
            message_of_many_packets_arrives_whole
            write_lands_where_it_should_and_nowhere_else
            write_with_immediate_completes_a_receive
            read_brings_the_peers_bytes
            compare_swap_swaps_only_what_it_finds
            fetch_add_returns_what_was_there
            atomics_from_both_sides_add_up
            several_elements_are_gathered_and_scattered
            chain_is_posted_in_order_with_one_call
            inline_bytes_are_free_once_posted
            inline_limit_is_granted_and_kept
            unsignaled_success_is_silent
            fence_and_solicited_requests_arrive
            only_solicited_receives_wake_when_asked_for
            window_opens_and_closes_a_part_of_a_region
            send_with_invalidate_closes_the_peers_window
            unreliable_connection_sends_and_writes
            datagram_arrives_behind_its_header_and_is_answered
            datagram_without_a_destination_is_refused
            queue_pair_leaves_its_multicast_groups_when_destroyed
            shared_receive_queue_feeds_two_queue_pairs
            shared_receive_queue_tells_when_it_runs_low
            too_many_elements_are_refused
            wrong_key_fails_the_write_and_flushes_the_rest
            missing_rights_fail_the_read
            message_too_long_for_the_receive_fails_both_sides
            missing_receive_fails_the_send_when_retries_run_out
            error_state_flushes_everything_posted
            drained_queue_pair_goes_on_after_a_stop
            send_before_connecting_is_refused_for_good
            queue_pair_reports_what_was_set
            attributes_out_of_range_are_named
            impossible_transition_names_the_call
            configuration_above_the_limits_is_named
            objects_of_two_devices_do_not_mix
            two_queues_on_one_channel_are_told_apart
            events_are_settled_however_many_were_read
            arming_before_the_last_poll_misses_nothing
            queue_is_destroyed_while_another_thread_waits
            completion_queue_grows_with_what_is_in_it
            overrun_is_told_by_an_event
            slices_rejoin_and_are_freed_with_the_last
            adopted_vec_and_bytes_carry_messages
            destroying_an_idle_queue_pair_succeeds
            everything_can_be_dropped_in_any_order
            optional_features_work_or_say_so
            device_and_port_describe_themselves
        }
    };
}

// --- reliable connection: each operation --------------------------------------------------------

pub fn send_brings_bytes_and_immediate_data(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(1, &[b.local.sge()]);
    b.post_recv(2, &[b.local.sge_range(1000..).unwrap()]);
    let message = pattern(1, 100);
    a.local[..100].copy_from_slice(&message);
    let sges = [a.local.sge_range(..100).unwrap()];

    a.post(SendWr::send(11, &sges));
    a.post(SendWr::send_with_imm(12, &sges, 0xdead_beef));

    a.expect(11, WcOpcode::Send);
    a.expect(12, WcOpcode::Send);
    let first = b.expect(1, WcOpcode::Recv);
    let second = b.expect(2, WcOpcode::Recv);
    let (first, second) = (first.success().unwrap(), second.success().unwrap());
    assert_eq!((first.byte_len(), first.imm_data()), (100, None));
    assert_eq!(
        (second.byte_len(), second.imm_data()),
        (100, Some(0xdead_beef))
    );
    assert_eq!(b.local[..100], message);
    assert_eq!(b.local[1000..1100], message);
    assert_eq!(b.local[100], 0);
}

pub fn send_and_failure_show_nothing_of_an_earlier_receive(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let mut room = [WorkCompletion::default()];
    b.post_recv(1, &[b.local.sge()]);
    a.post(SendWr::send_with_imm(2, &[], 7));
    assert_eq!(b.poll_into(&mut room).ok().unwrap().imm_data(), Some(7));

    let wc = a.poll_into(&mut room);
    assert_eq!(wc.ok().unwrap().imm_data(), None);
    assert_eq!((wc.wr_id(), wc.vendor_err()), (2, 0));
    println!("{:?}, {:?}", wc, wc.ok().unwrap().byte_len()); // reads every field that may be read

    b.post_recv(3, &[b.local.sge()]);
    b.qp.to_error().unwrap();
    let wc = b.poll_into(&mut room);
    assert_eq!(wc.wr_id(), 3);
    assert!(wc.success().unwrap_err().is_flush(), "{wc:?}");
}

pub fn empty_message_arrives(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(1, &[]);
    a.post(SendWr::send(2, &[]));
    a.expect(2, WcOpcode::Send);
    assert_eq!(b.expect(1, WcOpcode::Recv).success().unwrap().byte_len(), 0);
}

pub fn message_of_many_packets_arrives_whole(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let message = pattern(2, BUFFER);
    a.local.copy_from_slice(&message);
    b.post_recv(1, &[b.local.sge()]);
    a.post(SendWr::send(2, &[a.local.sge()]));
    a.expect(2, WcOpcode::Send);
    let length = b.expect(1, WcOpcode::Recv).success().unwrap().byte_len();
    assert_eq!(length as usize, BUFFER);
    assert!(b.local[..] == message[..]);
}

pub fn write_lands_where_it_should_and_nowhere_else(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    let message = pattern(3, 5000);
    a.local[..5000].copy_from_slice(&message);
    let sges = [a.local.sge_range(..5000).unwrap()];
    let remote = b.shared.descriptor().slice(1001..6001).unwrap();

    a.post(SendWr::write(1, &sges, remote));

    a.expect(1, WcOpcode::RdmaWrite);
    assert_eq!(b.shared_bytes(1001, 5000), message);
    assert_eq!(b.shared_bytes(0, 1001), vec![0; 1001]);
    assert_eq!(b.shared_bytes(6001, 100), vec![0; 100]);
    b.expect_nothing();
}

pub fn write_with_immediate_completes_a_receive(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(7, &[]);
    a.local[..8].copy_from_slice(b"immediat");
    let sges = [a.local.sge_range(..8).unwrap()];
    let remote = b.shared.descriptor().slice(64..72).unwrap();

    a.post(SendWr::write_with_imm(1, &sges, remote, 77));

    a.expect(1, WcOpcode::RdmaWrite);
    let wc = b.expect(7, WcOpcode::RecvRdmaWithImm);
    assert_eq!(wc.success().unwrap().imm_data(), Some(77));
    assert_eq!(b.shared_bytes(64, 8), b"immediat");
}

pub fn read_brings_the_peers_bytes(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    let there = pattern(4, 9000);
    b.shared.write_at(10, &there).unwrap();
    let remote = b.shared.descriptor().slice(10..9010).unwrap();

    a.post(SendWr::read(
        1,
        &[a.local.sge_range(..9000).unwrap()],
        remote,
    ));

    a.expect(1, WcOpcode::RdmaRead);
    assert_eq!(a.local[..9000], there);
    assert_eq!(a.local[9000], 0);
}

pub fn compare_swap_swaps_only_what_it_finds(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    b.shared.store_u64(16, 5).unwrap();
    let word = b.shared.descriptor().slice(16..24).unwrap();
    let result = a.local.sge_range(..8).unwrap();

    a.post(SendWr::compare_swap(1, &result, word, 5, 9));
    a.expect(1, WcOpcode::CompSwap);
    assert_eq!((a.local_u64(), b.shared.load_u64(16).unwrap()), (5, 9));

    a.post(SendWr::compare_swap(2, &result, word, 5, 1));
    a.expect(2, WcOpcode::CompSwap);
    assert_eq!((a.local_u64(), b.shared.load_u64(16).unwrap()), (9, 9));
}

pub fn fetch_add_returns_what_was_there(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    b.shared.store_u64(0, u64::MAX).unwrap();
    let word = b.shared.descriptor().slice(0..8).unwrap();
    let result = a.local.sge_range(..8).unwrap();

    a.post(SendWr::fetch_add(1, &result, word, 3));

    a.expect(1, WcOpcode::FetchAdd);
    assert_eq!(
        (a.local_u64(), b.shared.load_u64(0).unwrap()),
        (u64::MAX, 2)
    );
}

pub fn atomics_from_both_sides_add_up(bed: &Bed) {
    const ROUNDS: u64 = if cfg!(miri) { 3 } else { 100 };
    let word = SharedRegion::alloc(&bed.b.pd, 8, Access::REMOTE).unwrap();
    let remote = word.descriptor();
    let (a, b) = connect(&bed.a, &bed.b, QpType::Rc, |_| {});
    let (c, d) = connect(&bed.b, &bed.b, QpType::Rc, |_| {});
    std::thread::scope(|scope| {
        for mut end in [a, c] {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    end.fetch_add(remote, 1);
                    end.add_by_compare_swap(remote, 1000);
                }
            });
        }
    });
    assert_eq!(word.load_u64(0).unwrap(), 2 * ROUNDS * 1001);
    drop((b, d));
}

impl End {
    fn local_u64(&self) -> u64 {
        u64::from_ne_bytes(self.local[..8].try_into().unwrap())
    }

    fn fetch_add(&mut self, word: RemoteRegion, add: u64) -> u64 {
        let result = self.local.sge_range(..8).unwrap();
        self.post(SendWr::fetch_add(1, &result, word, add));
        self.expect(1, WcOpcode::FetchAdd);
        self.local_u64()
    }

    fn add_by_compare_swap(&mut self, word: RemoteRegion, add: u64) {
        let result = self.local.sge_range(..8).unwrap();
        let mut found = self.fetch_add(word, 0);
        loop {
            let swap = found.wrapping_add(add);
            self.post(SendWr::compare_swap(2, &result, word, found, swap));
            self.expect(2, WcOpcode::CompSwap);
            if self.local_u64() == found {
                return;
            }
            found = self.local_u64();
        }
    }
}

// --- how requests are posted --------------------------------------------------------------------

pub fn several_elements_are_gathered_and_scattered(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let message = pattern(5, 600);
    a.local[..600].copy_from_slice(&message);
    let from = [
        a.local.sge_range(400..600).unwrap(),
        a.local.sge_range(0..1).unwrap(),
        a.local.sge_range(1..400).unwrap(),
    ];
    let to = [
        b.local.sge_range(5000..5250).unwrap(),
        b.local.sge_range(0..1000).unwrap(),
    ];
    b.post_recv(1, &to);

    a.post(SendWr::send(2, &from));

    a.expect(2, WcOpcode::Send);
    assert_eq!(
        b.expect(1, WcOpcode::Recv).success().unwrap().byte_len(),
        600
    );
    let sent = [&message[400..], &message[..400]].concat();
    assert_eq!(b.local[5000..5250], sent[..250]);
    assert_eq!(b.local[..350], sent[250..]);
}

pub fn chain_is_posted_in_order_with_one_call(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let room: Vec<_> = (0..8)
        .map(|i| [b.local.sge_range(i * 10..i * 10 + 10).unwrap()])
        .collect();
    let mut recvs: Vec<_> = (0..8).map(|i| RecvWr::new(i as u64, &room[i])).collect();
    // SAFETY: the buffers belong to the ends, which outlive the queue pairs.
    unsafe { b.qp.post_recv_list(&mut recvs) }.unwrap();
    a.local[..10].copy_from_slice(b"0123456789");
    let sges: Vec<_> = (0..8)
        .map(|i| [a.local.sge_range(i..i + 1).unwrap()])
        .collect();
    let mut sends: Vec<_> = (0..8).map(|i| SendWr::send(i as u64, &sges[i])).collect();

    // SAFETY: as above.
    unsafe { a.qp.post_send_list(&mut sends) }.unwrap();
    // SAFETY: nothing is posted.
    unsafe { a.qp.post_send_list(&mut []) }.unwrap();

    for i in 0..8 {
        a.expect(i, WcOpcode::Send);
        b.expect(i, WcOpcode::Recv);
        assert_eq!(b.local[10 * i as usize], b'0' + i as u8);
    }
}

pub fn inline_bytes_are_free_once_posted(bed: &Bed) {
    let (mut a, mut b) = bed.pair_with(QpType::Rc, |config| config.max_inline_data = 64);
    b.post_recv(1, &[b.local.sge()]);
    let mut data = *b"on the stack";
    a.post(SendWr::send(2, &[Sge::unregistered(&data)]).inline(true));
    data.fill(0);
    a.expect(2, WcOpcode::Send);
    b.expect(1, WcOpcode::Recv);
    assert_eq!(&b.local[..12], b"on the stack");
    assert_eq!(data, [0; 12]);
}

pub fn inline_limit_is_granted_and_kept(bed: &Bed) {
    for asked in [0, 64, 220, 512, 513, 4096] {
        let cq = CompletionQueue::new(&bed.a.context, 16, None).unwrap();
        let config = QpConfig {
            max_inline_data: asked,
            ..QpConfig::rc(&cq, &cq)
        };
        let allowed = match QueuePair::new(&bed.a.pd, &config) {
            Ok(qp) => {
                assert!(qp.caps().max_inline_data >= asked);
                continue;
            }
            Err(Error::Config {
                field: "max_inline_data",
                asked: named,
                allowed,
            }) => {
                assert_eq!(named, u64::from(asked));
                allowed
            }
            Err(error) => panic!("inline {asked}: {error}"),
        };
        assert!(asked > 64, "{asked} inline bytes refused: {allowed}");
    }

    let (mut a, mut b) = bed.pair_with(QpType::Rc, |config| config.max_inline_data = 64);
    let granted = a.qp.caps().max_inline_data as usize;
    b.post_recv(1, &[b.local.sge()]);
    b.post_recv(2, &[b.local.sge()]);
    let data = pattern(6, granted + 1);
    let fits = [Sge::unregistered(&data[..granted])];
    let too_long = [Sge::unregistered(&data)];
    // SAFETY: inline, so the bytes are read before the call returns.
    let refused = unsafe { a.qp.post_send(&mut SendWr::send(9, &too_long).inline(true)) };
    assert!(refused.is_err_and(|error| !error.may_be_posted()));
    a.post(SendWr::send(3, &fits).inline(true));
    a.expect(3, WcOpcode::Send);
    assert_eq!(
        b.expect(1, WcOpcode::Recv).success().unwrap().byte_len() as usize,
        granted
    );
    assert_eq!(b.local[..granted], data[..granted]);
}

pub fn unsignaled_success_is_silent(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    let sges = [a.local.sge_range(..8).unwrap()];
    let remote = b.shared.descriptor();
    for i in 0..5 {
        a.post(SendWr::write(i, &sges, remote).signaled(false));
    }
    a.post(SendWr::write(5, &sges, remote));
    a.expect(5, WcOpcode::RdmaWrite);
    a.expect_nothing();
}

pub fn fence_and_solicited_requests_arrive(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.shared.write_at(0, b"old.").unwrap();
    b.post_recv(9, &[]);
    a.local[100..104].copy_from_slice(b"new.");
    let remote = b.shared.descriptor().slice(0..4).unwrap();
    let write = [a.local.sge_range(100..104).unwrap()];

    a.post(SendWr::read(1, &[a.local.sge_range(..4).unwrap()], remote));
    a.post(
        SendWr::write_with_imm(2, &write, remote, 1)
            .fence(true)
            .solicited(true),
    );

    a.expect(1, WcOpcode::RdmaRead);
    a.expect(2, WcOpcode::RdmaWrite);
    b.expect(9, WcOpcode::RecvRdmaWithImm);
    assert_eq!(&a.local[..4], b"old.");
    assert_eq!(b.shared_bytes(0, 4), b"new.");
}

pub fn only_solicited_receives_wake_when_asked_for(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(1, &[]);
    b.post_recv(2, &[]);
    b.cq.req_notify(true).unwrap();

    a.post(SendWr::send(1, &[]));
    a.expect(1, WcOpcode::Send);
    b.expect(1, WcOpcode::Recv);
    assert_eq!(b.channel.try_event().unwrap(), None);

    a.post(SendWr::send(2, &[]).solicited(true));
    let event = b
        .channel
        .wait(soon())
        .unwrap()
        .expect("a solicited receive wakes");
    assert!(event.is_for(&b.cq));
    b.expect(2, WcOpcode::Recv);
    a.expect(2, WcOpcode::Send);
}

// --- memory windows -----------------------------------------------------------------------------

pub fn window_opens_and_closes_a_part_of_a_region(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    let region = SharedRegion::alloc(&bed.a.pd, 4096, Access::MW_BIND | Access::LOCAL_WRITE);
    let region = region.unwrap();
    region.write_at(64, &pattern(7, 64)).unwrap();
    let mut window = MemoryWindow::new(&bed.a.pd).unwrap();
    let bind = window
        .bind(1, &region.slice(64..128).unwrap(), Access::REMOTE_READ)
        .unwrap();
    a.post(bind);
    a.expect(1, WcOpcode::BindMw);
    let open = window.descriptor();
    assert_eq!(
        (open.addr(), open.len()),
        (region.descriptor().addr() + 64, 64)
    );

    let mut b = b;
    let whole = [b.local.sge_range(..64).unwrap()];
    b.post(SendWr::read(2, &whole, open));
    b.expect(2, WcOpcode::RdmaRead);
    assert_eq!(b.local[..64], pattern(7, 64));

    a.post(SendWr::local_invalidate(3, window.rkey()));
    a.expect(3, WcOpcode::LocalInv);
    b.post(SendWr::read(4, &whole, open));
    b.expect_failure(4, WcStatus::RemAccessErr);

    let elsewhere = SharedRegion::alloc(&bed.a.pd, 64, Access::REMOTE_READ).unwrap();
    let slice = elsewhere.slice(..).unwrap();
    let unprepared = window.bind(5, &slice, Access::REMOTE_READ);
    assert!(matches!(unprepared, Err(Error::NotSupported { .. })));
    let foreign = SharedRegion::alloc(&bed.b.pd, 64, Access::MW_BIND).unwrap();
    let foreign = window
        .bind(5, &foreign.slice(..).unwrap(), Access::REMOTE_READ)
        .unwrap_err();
    assert!(matches!(foreign, Error::Foreign { .. }));
}

pub fn send_with_invalidate_closes_the_peers_window(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let mut window = MemoryWindow::new(&bed.a.pd).unwrap();
    let slice = a.shared.slice(0..8).unwrap();
    let bind = window.bind(1, &slice, Access::REMOTE_WRITE).unwrap();
    a.post(bind);
    a.expect(1, WcOpcode::BindMw);
    a.post_recv(2, &[]);

    b.post(SendWr::send_with_invalidate(3, &[], window.rkey()));
    b.expect(3, WcOpcode::Send);
    let wc = a.expect(2, WcOpcode::Recv);
    // rxe gives the kernel's number for the flag, which in user space means something else.
    let rkey = (!bed.is_rxe()).then_some(window.rkey());
    assert_eq!(wc.success().unwrap().invalidated_rkey(), rkey);

    b.post(SendWr::write(
        4,
        &[b.local.sge_range(..8).unwrap()],
        window.descriptor(),
    ));
    b.expect_failure(4, WcStatus::RemAccessErr);
}

// --- other transports ---------------------------------------------------------------------------

pub fn unreliable_connection_sends_and_writes(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Uc);
    let message = pattern(8, 6000);
    a.local[..6000].copy_from_slice(&message);
    let sges = [a.local.sge_range(..6000).unwrap()];
    b.post_recv(1, &[b.local.sge()]);
    b.post_recv(2, &[]);
    let remote = b.shared.descriptor();

    a.post(SendWr::send(3, &sges));
    a.post(SendWr::write_with_imm(4, &sges, remote, 5));

    a.expect(3, WcOpcode::Send);
    a.expect(4, WcOpcode::RdmaWrite);
    b.expect(1, WcOpcode::Recv);
    let wc = b.expect(2, WcOpcode::RecvRdmaWithImm);
    assert_eq!(wc.success().unwrap().imm_data(), Some(5));
    assert_eq!(b.local[..6000], message);
    assert_eq!(b.shared_bytes(0, 6000), message);
}

pub fn datagram_arrives_behind_its_header_and_is_answered(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Ud);
    let ah = AddressHandle::new(&bed.a.pd, &a.path_to(&b.address())).unwrap();
    b.post_recv(1, &[b.local.sge_range(..GRH + 100).unwrap()]);
    a.local[..5].copy_from_slice(b"hello");
    let sges = [a.local.sge_range(..5).unwrap()];

    a.post(SendWr::send_with_imm(2, &sges, 42).to(&ah, b.qp.qp_num(), QKEY));

    a.expect(2, WcOpcode::Send);
    let wc = b.expect(1, WcOpcode::Recv);
    let success = wc.success().unwrap();
    assert_eq!(success.byte_len() as usize, GRH + 5);
    assert!(success.has_grh());
    assert_eq!(
        (success.src_qp(), success.imm_data()),
        (a.qp.qp_num(), Some(42))
    );
    assert_eq!(&b.local[GRH..GRH + 5], b"hello");

    let header = b.local.first_chunk().unwrap();
    let back = AddressHandle::to_sender(&bed.b.pd, 1, &success, header).unwrap();
    a.post_recv(3, &[a.local.sge_range(..GRH + 100).unwrap()]);
    b.local[..6].copy_from_slice(b"answer");
    let sges = [b.local.sge_range(..6).unwrap()];
    b.post(SendWr::send(4, &sges).to(&back, success.src_qp(), QKEY));
    b.expect(4, WcOpcode::Send);
    a.expect(3, WcOpcode::Recv);
    assert_eq!(&a.local[GRH..GRH + 6], b"answer");
}

pub fn datagram_without_a_destination_is_refused(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Ud);
    let ah = AddressHandle::new(&bed.a.pd, &a.path_to(&b.address())).unwrap();
    let sges = [a.local.sge_range(..5).unwrap()];
    let remote = b.shared.descriptor();
    let send = || SendWr::send(1, &sges).to(&ah, b.qp.qp_num(), QKEY);
    let nowhere = || SendWr::send(2, &sges);
    let no_send = || SendWr::write(3, &sges, remote);
    for mut wr in [nowhere(), no_send(), no_send().to(&ah, b.qp.qp_num(), QKEY)] {
        // SAFETY: the buffer belongs to the end, which outlives its queue pair.
        let error = unsafe { a.qp.post_send(&mut wr) }.unwrap_err();
        assert_eq!(
            (error.errno(), error.may_be_posted()),
            (libc::EINVAL, false)
        );
    }
    // SAFETY: as above.
    let error = unsafe { a.qp.post_send_list(&mut [send(), nowhere()]) }.unwrap_err();
    assert_eq!((error.posted, error.source.errno()), (0, libc::EINVAL));
    a.expect_nothing();
}

pub fn queue_pair_leaves_its_multicast_groups_when_destroyed(bed: &Bed) {
    let mut end = End::new(&bed.a, QpType::Ud, |_| {});
    end.init();
    for group in ["ff0e::ffff:239.1.2.3", "ff0e::ffff:239.1.2.4"] {
        end.qp.attach_mcast(group.parse().unwrap(), 0).unwrap();
    }
    let first = "ff0e::ffff:239.1.2.3".parse().unwrap();
    end.qp.attach_mcast(first, 0).unwrap(); // once more changes nothing
    end.qp.detach_mcast(first, 0).unwrap();
    end.qp.attach_mcast(first, 0).unwrap();
    end.qp.destroy().map_err(|(_, error)| error).unwrap();
}

// --- shared receive queues ----------------------------------------------------------------------

pub fn shared_receive_queue_feeds_two_queue_pairs(bed: &Bed) {
    let srq = Srq::new(&bed.b.pd, 16, 1).unwrap();
    assert!(srq.limits().max_wr >= 16);
    let host = bed.b.clone_for(&srq);
    let (mut a, b) = host.pair_to(&bed.a);
    let (mut c, d) = host.pair_to(&bed.a);
    let sges: Vec<_> = (0..4)
        .map(|i| [b.local.sge_range(i * 10..i * 10 + 10).unwrap()])
        .collect();
    let mut recvs: Vec<_> = (0..4).map(|i| RecvWr::new(i as u64, &sges[i])).collect();
    // SAFETY: the buffers belong to the end, which outlives the queue pairs.
    unsafe { srq.post_recv_list(&mut recvs) }.unwrap();

    for i in 0..4 {
        let (from, to) = if i % 2 == 0 {
            (&mut a, &b)
        } else {
            (&mut c, &d)
        };
        from.local[0] = b'a' + i as u8;
        from.post(SendWr::send(9, &[from.local.sge_range(..1).unwrap()]));
        from.expect(9, WcOpcode::Send);
        to.expect(i, WcOpcode::Recv);
        assert_eq!(b.local[10 * i as usize], b'a' + i as u8);
    }
}

pub fn shared_receive_queue_tells_when_it_runs_low(bed: &Bed) {
    let events = bed.b.context.async_events().unwrap();
    let srq = Srq::new(&bed.b.pd, 16, 1).unwrap();
    let other = Srq::new(&bed.b.pd, 16, 1).unwrap();
    let host = bed.b.clone_for(&srq);
    let (mut a, b) = host.pair_to(&bed.a);
    for i in 0..4 {
        b.post_srq(&srq, i, &[]);
    }
    srq.arm_limit(3).unwrap();
    assert_eq!(srq.query().unwrap().limit, 3);

    a.post(SendWr::send(1, &[]));
    a.expect(1, WcOpcode::Send);
    b.expect(0, WcOpcode::Recv);
    assert_eq!(events.try_event().unwrap(), None); // three are left
    a.post(SendWr::send(2, &[]));

    let event = events
        .wait(soon())
        .unwrap()
        .expect("two are left: fewer than three");
    assert!(
        matches!(event, AsyncEvent::SrqLimitReached { .. }),
        "{event:?}"
    );
    assert!(event.is_for_srq(&srq) && !event.is_for_srq(&other));
    assert!(matches!(
        srq.arm_limit(1 << 30),
        Err(Error::Config { field: "limit", .. })
    ));
}

/// A host whose queue pairs take their receives from a shared receive queue.
pub struct SrqHost {
    host: super::Host,
    srq: Srq,
}

impl super::Host {
    fn clone_for(&self, srq: &Srq) -> SrqHost {
        SrqHost {
            host: self.clone(),
            srq: srq.clone(),
        }
    }
}

impl SrqHost {
    /// A pair whose second end is here.
    fn pair_to(&self, from: &super::Host) -> (End, End) {
        let mut a = End::new(from, QpType::Rc, |_| {});
        let mut b = End::new(&self.host, QpType::Rc, |config| {
            config.srq = Some(self.srq.clone())
        });
        a.bring_up(&b.address());
        b.bring_up(&a.address());
        (a, b)
    }
}

// --- failures -----------------------------------------------------------------------------------

pub fn too_many_elements_are_refused(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let caps = a.qp.caps();
    let sge = a.local.sge_range(..1).unwrap();
    let sges = vec![sge; caps.max_send_sge.max(caps.max_recv_sge) as usize + 1];
    // SAFETY: the buffer belongs to the end, which outlives its queue pair.
    let sent = unsafe { a.qp.post_send(&mut SendWr::send(1, &sges)) }.unwrap_err();
    // SAFETY: as above.
    let received = unsafe { a.qp.post_recv(&mut RecvWr::new(1, &sges)) }.unwrap_err();
    assert!(!sent.may_be_posted() && !received.may_be_posted());
    assert_eq!(
        (sent.errno(), received.errno()),
        (libc::EINVAL, libc::EINVAL)
    );
    b.post_recv(2, &[]);
    a.post(SendWr::send(3, &[]));
    a.expect(3, WcOpcode::Send);
    b.expect(2, WcOpcode::Recv);
}

pub fn wrong_key_fails_the_write_and_flushes_the_rest(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let remote = b.shared.descriptor();
    let wrong = remote.with_rkey(remote.rkey() ^ 0x5500);
    let sges = [a.local.sge_range(..8).unwrap()];
    a.post_recv(1, &[a.local.sge_range(100..200).unwrap()]);
    b.post_recv(2, &[b.local.sge_range(..100).unwrap()]);

    let mut wrs = [
        SendWr::write(3, &sges, wrong).signaled(false),
        SendWr::write(4, &sges, remote).signaled(false),
    ];
    // SAFETY: the buffers belong to the end, which outlives its queue pair.
    unsafe { a.qp.post_send_list(&mut wrs) }.unwrap();

    let mut ended: Vec<_> = (0..3)
        .map(|_| a.completion().success().unwrap_err())
        .collect();
    ended.sort_by_key(|failure| failure.wr_id);
    let [recv, cause, flushed] = ended[..] else {
        unreachable!()
    };
    assert_eq!((recv.wr_id, recv.is_flush()), (1, true));
    assert_eq!((cause.wr_id, cause.status), (3, WcStatus::RemAccessErr));
    assert_eq!((flushed.wr_id, flushed.is_flush()), (4, true));
    assert_eq!(a.qp.state().unwrap(), QpState::Err);
    assert_eq!(b.shared_bytes(0, 8), [0; 8]);
    b.qp.to_error().unwrap();
    b.expect_failure(2, WcStatus::WrFlushErr);
}

pub fn missing_rights_fail_the_read(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    let closed = SharedRegion::alloc(&b.host.pd, 64, Access::REMOTE_WRITE).unwrap();
    a.post(SendWr::read(
        1,
        &[a.local.sge_range(..8).unwrap()],
        closed.descriptor(),
    ));
    a.expect_failure(1, WcStatus::RemAccessErr);
    assert_eq!(a.local[..8], [0; 8]);
}

pub fn message_too_long_for_the_receive_fails_both_sides(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(1, &[b.local.sge_range(..10).unwrap()]);
    a.post(SendWr::send(2, &[a.local.sge_range(..11).unwrap()]));
    // rxe reports it on both sides as an operation error.
    let (at_b, at_a) = match bed.is_rxe() {
        true => (WcStatus::LocQpOpErr, WcStatus::RemOpErr),
        false => (WcStatus::LocLenErr, WcStatus::RemInvReqErr),
    };
    b.expect_failure(1, at_b);
    a.expect_failure(2, at_a);
    assert_eq!(b.local[10], 0);
}

pub fn missing_receive_fails_the_send_when_retries_run_out(bed: &Bed) {
    let mut a = End::new(&bed.a, QpType::Rc, |_| {});
    let mut b = End::new(&bed.b, QpType::Rc, |_| {});
    b.bring_up(&a.address());
    a.init();
    a.ready_to_receive(&b.address());
    let psn = a.address().psn;
    let attr = QpAttr::new()
        .state(QpState::Rts)
        .sq_psn(psn)
        .timeout(14)
        .retry_cnt(6);
    a.qp.modify(&attr.rnr_retry(0).max_rd_atomic(1)).unwrap();

    a.post(SendWr::send(1, &[]));

    a.expect_failure(1, WcStatus::RnrRetryExcErr);
}

pub fn error_state_flushes_everything_posted(bed: &Bed) {
    let (mut a, b) = bed.pair(QpType::Rc);
    for i in 0..5 {
        a.post_recv(i, &[a.local.sge_range(..8).unwrap()]);
    }
    a.qp.to_error().unwrap();
    a.post(SendWr::send(10, &[]));
    let mut ended: Vec<_> = (0..6)
        .map(|_| a.completion().success().unwrap_err())
        .collect();
    ended.sort_by_key(|failure| failure.wr_id);
    assert!(ended.iter().all(|failure| failure.is_flush()));
    assert_eq!(
        ended.iter().map(|f| f.wr_id).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 10]
    );
    drop(b);
}

// --- queue pairs --------------------------------------------------------------------------------

pub fn drained_queue_pair_goes_on_after_a_stop(bed: &Bed) {
    let events = bed.a.context.async_events().unwrap();
    let (mut a, mut b) = bed.pair(QpType::Rc);
    b.post_recv(1, &[]);
    b.post_recv(2, &[]);
    a.post(SendWr::send(1, &[]));
    a.expect(1, WcOpcode::Send);

    a.qp.modify(&QpAttr::new().state(QpState::Sqd).sqd_async_notify(true))
        .unwrap();
    let event = events.wait(soon()).unwrap().expect("the queue has drained");
    assert_eq!(
        event,
        AsyncEvent::SqDrained {
            qp_num: a.qp.qp_num()
        }
    );
    assert_eq!(a.qp.state().unwrap(), QpState::Sqd);

    a.qp.modify(&QpAttr::new().state(QpState::Rts)).unwrap();
    a.post(SendWr::send(2, &[]));
    a.expect(2, WcOpcode::Send);
    b.expect(1, WcOpcode::Recv);
    b.expect(2, WcOpcode::Recv);
}

pub fn send_before_connecting_is_refused_for_good(bed: &Bed) {
    let (mut a, mut b) = (
        End::new(&bed.a, QpType::Rc, |_| {}),
        End::new(&bed.b, QpType::Rc, |_| {}),
    );
    // SAFETY: no buffers.
    let in_reset = unsafe { a.qp.post_recv(&mut RecvWr::new(1, &[])) }.unwrap_err();
    assert_eq!(
        (in_reset.errno(), in_reset.may_be_posted()),
        (libc::EINVAL, false)
    );
    a.init();
    // SAFETY: no buffers.
    let in_init = unsafe { a.qp.post_send(&mut SendWr::send(1, &[])) }.unwrap_err();
    assert_eq!(
        (in_init.errno(), in_init.may_be_posted()),
        (libc::EINVAL, false)
    );
    a.ready_to_receive(&b.address());
    // SAFETY: no buffers.
    let in_rtr = unsafe { a.qp.post_send_list(&mut [SendWr::send(2, &[])]) }.unwrap_err();
    assert_eq!(in_rtr.posted, 0);

    a.ready_to_send();
    b.bring_up(&a.address());
    b.post_recv(7, &[]);
    a.post(SendWr::send(3, &[]));
    a.expect(3, WcOpcode::Send);
    b.expect(7, WcOpcode::Recv);
    a.expect_nothing();
    b.expect_nothing();
}

pub fn queue_pair_reports_what_was_set(bed: &Bed) {
    let (a, b) = bed.pair(QpType::Rc);
    let info = a.qp.query().unwrap();
    assert_eq!(info.state, QpState::Rts);
    assert_eq!(
        (info.dest_qp_num, info.rq_psn),
        (b.qp.qp_num(), b.address().psn)
    );
    assert_eq!(info.access & Access::REMOTE, Access::REMOTE);
    assert_eq!((info.port, info.pkey_index), (1, 0));
    assert_eq!((info.timeout, info.retry_cnt, info.rnr_retry), (14, 6, 6));
    assert_eq!(
        (
            info.max_rd_atomic,
            info.max_dest_rd_atomic,
            info.min_rnr_timer
        ),
        (16, 16, 12)
    );
    let caps = a.qp.caps();
    assert!(caps.max_send_wr >= 16 && caps.max_recv_wr >= 16, "{caps:?}");
    assert!(caps.max_send_sge >= 4 && caps.max_recv_sge >= 4, "{caps:?}");

    let mut a = a;
    a.qp.set_min_rnr_timer(14).unwrap();
    assert_eq!(a.qp.query().unwrap().min_rnr_timer, 14);
    a.qp.to_error().unwrap();
    assert_eq!(a.qp.state().unwrap(), QpState::Err);
    a.qp.modify(&QpAttr::new().state(QpState::Reset)).unwrap();
    assert_eq!(a.qp.state().unwrap(), QpState::Reset);
    a.bring_up(&b.address());
    assert_eq!(a.qp.state().unwrap(), QpState::Rts);
}

pub fn attributes_out_of_range_are_named(bed: &Bed) {
    let mut end = End::new(&bed.a, QpType::Rc, |_| {});
    let new = QpAttr::new;
    for (attr, name) in [
        (new().port(0), "port"),
        (new().port(200), "port"),
        (new().pkey_index(u16::MAX), "pkey_index"),
        (new().dest_qp_num(1 << 24), "dest_qp_num"),
        (new().rq_psn(1 << 24), "rq_psn"),
        (new().sq_psn(u32::MAX), "sq_psn"),
        (new().max_rd_atomic(255), "max_rd_atomic"),
        (new().max_dest_rd_atomic(255), "max_dest_rd_atomic"),
        (new().min_rnr_timer(32), "min_rnr_timer"),
        (new().timeout(32), "timeout"),
        (new().retry_cnt(8), "retry_cnt"),
        (new().rnr_retry(8), "rnr_retry"),
    ] {
        let error = end.qp.modify(&attr).unwrap_err();
        assert!(
            matches!(error, Error::Config { field, .. } if field == name),
            "{name}: {error}"
        );
    }
    assert_eq!(end.qp.state().unwrap(), QpState::Reset);
}

pub fn impossible_transition_names_the_call(bed: &Bed) {
    let mut end = End::new(&bed.a, QpType::Rc, |_| {});
    let error = end
        .qp
        .modify(&QpAttr::new().state(QpState::Rts))
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_modify_qp",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(error.errno(), Some(libc::EINVAL));
    assert_eq!(end.qp.state().unwrap(), QpState::Reset);
    end.init();
}

pub fn destroying_an_idle_queue_pair_succeeds(bed: &Bed) {
    let end = End::new(&bed.a, QpType::Rc, |_| {});
    end.qp.destroy().map_err(|(_, error)| error).unwrap();
}

// --- configuration ------------------------------------------------------------------------------

pub fn configuration_above_the_limits_is_named(bed: &Bed) {
    let attr = bed.a.context.device_attr().unwrap().clone();
    let named = |result: Result<(), Error>, name: &str| {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::Config { field, .. } if field == name),
            "{name}: {error}"
        );
    };
    let cq = |cqe| CompletionQueue::new(&bed.a.context, cqe, None);
    named(cq(0).map(drop), "cqe");
    named(cq(attr.max_cqe + 1).map(drop), "cqe");
    let vector = bed.a.context.num_comp_vectors();
    let on_vector = CompletionQueue::on_vector(&bed.a.context, 1, None, vector);
    named(on_vector.map(drop), "comp_vector");

    let good = cq(16).unwrap();
    let new = |change: &dyn Fn(&mut QpConfig)| {
        let mut config = QpConfig::rc(&good, &good);
        change(&mut config);
        QueuePair::new(&bed.a.pd, &config).map(drop)
    };
    named(
        new(&|config| config.max_send_wr = attr.max_qp_wr + 1),
        "max_send_wr",
    );
    named(
        new(&|config| config.max_recv_wr = attr.max_qp_wr + 1),
        "max_recv_wr",
    );
    named(
        new(&|config| config.max_send_sge = attr.max_sge + 1),
        "max_send_sge",
    );
    named(
        new(&|config| config.max_recv_sge = attr.max_sge + 1),
        "max_recv_sge",
    );

    let srq = |wr, sge| Srq::new(&bed.a.pd, wr, sge).map(drop);
    named(srq(0, 1), "max_wr");
    named(srq(attr.max_srq_wr + 1, 1), "max_wr");
    named(srq(1, 0), "max_sge");
    named(srq(1, attr.max_srq_sge + 1), "max_sge");

    named(RegionSlice::alloc(&bed.a.pd, 0).map(drop), "len");
    named(
        RegionSlice::from_vec(&bed.a.pd, Vec::new()).map(drop),
        "len",
    );
    named(
        SharedRegion::alloc(&bed.a.pd, 0, Access::REMOTE).map(drop),
        "len",
    );
}

pub fn objects_of_two_devices_do_not_mix(bed: &Bed) {
    let foreign = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Foreign { .. }), "{error}");
    };
    assert!(!bed.a.context.is_same_device(&bed.b.context));
    let cq_a = CompletionQueue::new(&bed.a.context, 16, None).unwrap();
    let cq_b = CompletionQueue::new(&bed.b.context, 16, None).unwrap();
    foreign(QueuePair::new(&bed.a.pd, &QpConfig::rc(&cq_a, &cq_b)).map(drop));
    foreign(QueuePair::new(&bed.a.pd, &QpConfig::rc(&cq_b, &cq_a)).map(drop));
    let mut config = QpConfig::rc(&cq_a, &cq_a);
    config.srq = Some(Srq::new(&bed.b.pd, 16, 1).unwrap());
    foreign(QueuePair::new(&bed.a.pd, &config).map(drop));
    let channel = CompletionChannel::new(&bed.b.context).unwrap();
    foreign(CompletionQueue::new(&bed.a.context, 16, Some(&channel)).map(drop));
}

// --- completion events --------------------------------------------------------------------------

pub fn two_queues_on_one_channel_are_told_apart(bed: &Bed) {
    let channel = CompletionChannel::new(&bed.b.context).unwrap();
    let send_cq = CompletionQueue::new(&bed.b.context, 16, Some(&channel)).unwrap();
    let recv_cq = CompletionQueue::new(&bed.b.context, 16, Some(&channel)).unwrap();
    let mut a = End::new(&bed.a, QpType::Rc, |_| {});
    let mut b = End::new(&bed.b, QpType::Rc, |config| {
        (config.send_cq, config.recv_cq) = (send_cq.clone(), recv_cq.clone());
    });
    a.bring_up(&b.address());
    b.bring_up(&a.address());
    b.post_recv(1, &[]);
    send_cq.req_notify(false).unwrap();
    recv_cq.req_notify(false).unwrap();
    assert_eq!(channel.try_event().unwrap(), None);
    assert_eq!(channel.wait(Some(Instant::now())).unwrap(), None);

    a.post(SendWr::send(1, &[]));
    let event = channel.wait(soon()).unwrap().expect("the receive wakes");
    assert!(event.is_for(&recv_cq) && !event.is_for(&send_cq));
    assert_eq!(next_completion(&recv_cq).unwrap().wr_id(), 1);

    a.post_recv(2, &[]);
    b.post(SendWr::send(3, &[]));
    let event = channel.wait(soon()).unwrap().expect("the send wakes");
    assert!(event.is_for(&send_cq) && !event.is_for(&recv_cq));
    assert_eq!(next_completion(&send_cq).unwrap().wr_id(), 3);
}

pub fn events_are_settled_however_many_were_read(bed: &Bed) {
    let counts = if cfg!(miri) {
        &[1, 65][..]
    } else {
        &[0, 1, 63, 64, 65, 130]
    };
    for &count in counts {
        let (mut a, b) = bed.pair(QpType::Rc);
        let sges = [a.local.sge_range(..1).unwrap()];
        for _ in 0..count {
            a.cq.req_notify(false).unwrap();
            a.post(SendWr::write(1, &sges, b.shared.descriptor()));
            a.channel.wait(soon()).unwrap().expect("the write wakes");
            a.expect(1, WcOpcode::RdmaWrite);
        }
        drop(a); // would hang if one event were not acknowledged
    }
}

pub fn arming_before_the_last_poll_misses_nothing(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    for round in 0..if cfg!(miri) { 2 } else { 20 } {
        for i in 0..10 {
            b.post_recv(i, &[]);
        }
        for i in 0..10 {
            a.post(SendWr::send(i, &[]).signaled(i == 9));
        }
        let mut seen = 0;
        let mut room = [WorkCompletion::default(); 3];
        while seen < 10 {
            b.cq.req_notify(false).unwrap();
            let before = seen;
            while let wcs @ [_, ..] = b.cq.poll(&mut room).unwrap() {
                seen += wcs.len();
            }
            if seen == before {
                let event = b.channel.wait(soon()).unwrap();
                event.unwrap_or_else(|| panic!("round {round}: nothing after {seen}"));
            }
        }
        a.expect(9, WcOpcode::Send);
    }
}

pub fn queue_is_destroyed_while_another_thread_waits(bed: &Bed) {
    let channel = CompletionChannel::new(&bed.a.context).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut events = 0u32;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let short = Instant::now() + std::time::Duration::from_millis(1);
                events += u32::from(channel.wait(Some(short)).unwrap().is_some());
            }
            events
        });
        for _ in 0..if cfg!(miri) { 5 } else { 50 } {
            let cq = CompletionQueue::new(&bed.a.context, 16, Some(&channel)).unwrap();
            let mut a = End::new(&bed.a, QpType::Rc, |config| {
                (config.send_cq, config.recv_cq) = (cq.clone(), cq.clone());
            });
            a.init();
            a.post_recv(1, &[]);
            cq.req_notify(false).unwrap();
            a.qp.to_error().unwrap(); // flushes: an event, which the other thread may be reading
            drop((a, cq));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        reader.join().unwrap();
    });
}

// --- completion queues --------------------------------------------------------------------------

pub fn completion_queue_grows_with_what_is_in_it(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    for i in 0..5 {
        b.post_recv(i, &[]);
        a.post(SendWr::send(i, &[]));
    }
    for i in 0..5 {
        a.expect(i, WcOpcode::Send);
    }
    let before = b.cq.capacity();
    b.resize_cq(before + 1).unwrap();
    assert!(b.cq.capacity() > before);
    for i in 0..5 {
        b.expect(i, WcOpcode::Recv);
    }
    let max = bed.b.context.device_attr().unwrap().max_cqe;
    let error = b.resize_cq(max + 1).unwrap_err();
    assert!(
        matches!(error, Error::Config { field: "cqe", .. }),
        "{error}"
    );
}

pub fn overrun_is_told_by_an_event(bed: &Bed) {
    let events = bed.a.context.async_events().unwrap();
    let cq = CompletionQueue::new(&bed.a.context, 1, None).unwrap();
    let other = CompletionQueue::new(&bed.a.context, 1, None).unwrap();
    let mut a = End::new(&bed.a, QpType::Rc, |config| config.send_cq = cq.clone());
    let mut b = End::new(&bed.b, QpType::Rc, |_| {});
    a.bring_up(&b.address());
    b.bring_up(&a.address());
    let sges = [a.local.sge_range(..8).unwrap()];
    for i in 0..8 {
        a.post(SendWr::write(i, &sges, b.shared.descriptor()));
    }
    let event = events.wait(soon()).unwrap().expect("completions were lost");
    assert!(
        event.is_for_cq(&cq) && !event.is_for_cq(&other),
        "{event:?}"
    );
    while events.try_event().unwrap().is_some() {}
}

// --- memory -------------------------------------------------------------------------------------

pub fn slices_rejoin_and_are_freed_with_the_last(bed: &Bed) {
    let mut first = RegionSlice::alloc(&bed.a.pd, 100).unwrap();
    assert_eq!(first[..], [0; 100]);
    let mut third = first.split_off(50);
    let second = {
        let rest = third.split_off(25);
        std::mem::replace(&mut third, rest)
    };
    assert_eq!((first.len(), second.len(), third.len()), (50, 25, 25));
    assert_eq!(first.lkey(), third.lkey());
    assert!(first.sge_range(..51).is_err());
    third.fill(3);
    let third = first.unsplit(third).unwrap_err(); // not the neighbour
    first.unsplit(second).unwrap();
    first.unsplit(third).unwrap();
    assert_eq!(first.len(), 100);
    assert_eq!(first[75..], [3; 25]);
    let stranger = RegionSlice::alloc(&bed.a.pd, 10).unwrap();
    assert!(first.unsplit(stranger).is_err());
    std::thread::spawn(move || drop(first)).join().unwrap();
}

pub fn adopted_vec_and_bytes_carry_messages(bed: &Bed) {
    let (mut a, mut b) = bed.pair(QpType::Rc);
    let vec = RegionSlice::from_vec(&bed.a.pd, b"from a vec".to_vec()).unwrap();
    let bytes = bytes::BytesMut::from(&b"from bytes"[..]);
    let bytes = RegionSlice::from_bytes(&bed.a.pd, bytes).unwrap();
    for (i, slice) in [vec, bytes].iter().enumerate() {
        b.post_recv(i as u64, &[b.local.sge()]);
        a.post(SendWr::send(i as u64, &[slice.sge()]));
        a.expect(i as u64, WcOpcode::Send);
        b.expect(i as u64, WcOpcode::Recv);
        assert_eq!(b.local[..10], slice[..]);
    }
}

/// Each of these is the last but for one handle in some order; none may be needed by what is left.
pub fn everything_can_be_dropped_in_any_order(bed: &Bed) {
    use std::any::Any;
    for step in 1..=11 {
        for order in 0..if cfg!(miri) { 2 } else { 24 } {
            let mut things: Vec<Box<dyn Any>> = Vec::new();
            let context = bed.a.context.clone();
            let pd = rdma_core_rs::ProtectionDomain::new(&context).unwrap();
            let channel = CompletionChannel::new(&context).unwrap();
            let cq = CompletionQueue::new(&context, 16, Some(&channel)).unwrap();
            let srq = Srq::new(&pd, 4, 1).unwrap();
            let mut config = QpConfig::rc(&cq, &cq);
            config.srq = Some(srq.clone());
            let qp = QueuePair::new(&pd, &config).unwrap();
            let mut slice = RegionSlice::alloc(&pd, 64).unwrap();
            let region = SharedRegion::alloc(&pd, 64, Access::REMOTE | Access::MW_BIND).unwrap();
            drop(config);
            let path = rdma_core_rs::AddressVector::global(1, bed.a.gid, bed.a.gid_index);
            let mut window = MemoryWindow::new(&pd).unwrap();
            let part = region.slice(..8).unwrap();
            let _ = window.bind(1, &part, Access::REMOTE_READ).unwrap(); // holds the region from now on
            things.push(Box::new(window));
            things.push(Box::new(AddressHandle::new(&pd, &path).unwrap()));
            things.push(Box::new(context.async_events().unwrap()));
            things.push(Box::new(slice.split_off(32)));
            things.push(Box::new((slice, region.slice(..).unwrap(), region)));
            things.push(Box::new(context));
            things.push(Box::new(qp));
            things.push(Box::new(channel));
            things.push(Box::new(cq));
            things.push(Box::new(pd));
            things.push(Box::new(srq));
            things.truncate(step);
            shuffle(&mut things, order);
            if order % 3 == 0 {
                let unwinding = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let _things = things;
                    std::panic::resume_unwind(Box::new("on purpose"));
                }));
                assert!(unwinding.is_err());
            }
        }
    }
}

fn shuffle<T>(things: &mut [T], seed: usize) {
    let mut state = seed as u64 + 1;
    for i in (1..things.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        things.swap(i, (state >> 33) as usize % (i + 1));
    }
}

// --- what a device may or may not have ----------------------------------------------------------

pub fn optional_features_work_or_say_so(bed: &Bed) {
    let optional = |result: Result<(), Error>, what: &str| match result {
        Ok(()) => println!("{what}: works"),
        Err(error @ Error::NotSupported { .. }) => println!("{what}: {error}"),
        Err(error) => panic!("{what}: {error}"),
    };
    let (mut a, b) = bed.pair(QpType::Rc);
    optional(a.cq.moderate(16, 10), "moderation");
    let on_demand = RegionOptions {
        on_demand: true,
        ..RegionOptions::default()
    };
    optional(
        RegionSlice::alloc_with(&bed.a.pd, 4096, &on_demand).map(drop),
        "on-demand paging",
    );
    let relaxed = RegionOptions {
        relaxed_ordering: true,
        ..RegionOptions::default()
    };
    RegionSlice::alloc_with(&bed.a.pd, 4096, &relaxed).unwrap(); // ignored where unknown

    let file = std::fs::File::open("/dev/null").unwrap();
    match DmaBufRegion::new(&bed.a.pd, file.as_fd(), 0..4096, 0, Access::LOCAL_WRITE) {
        Err(
            error @ Error::Call {
                call: "ibv_reg_dmabuf_mr",
                ..
            },
        ) => println!("dma-buf: {error}"),
        other => optional(other.map(drop), "dma-buf"),
    }

    let mut region = SharedRegion::alloc(&b.host.pd, 64, Access::REMOTE_READ).unwrap();
    let second = region.clone();
    let shared = region.set_access(Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(shared, Error::InUse { .. }), "{shared}");
    drop(second);
    let changed = region.set_access(Access::REMOTE_WRITE);
    if changed.is_ok() {
        assert!(
            region
                .access()
                .contains(Access::REMOTE_WRITE | Access::LOCAL_WRITE)
        );
        let sges = [a.local.sge_range(..8).unwrap()];
        a.post(SendWr::write(1, &sges, region.descriptor()));
        a.expect(1, WcOpcode::RdmaWrite);
    }
    optional(changed, "re-registration");
}

pub fn device_and_port_describe_themselves(bed: &Bed) {
    let context = &bed.a.context;
    let attr = context.device_attr().unwrap();
    assert!(
        attr.max_qp_wr > 0 && attr.max_cqe > 0 && attr.phys_port_cnt == 1,
        "{attr:?}"
    );
    assert!(
        attr.supports(DeviceCap::MemWindowType2),
        "{:#x}",
        attr.device_cap_flags
    );
    assert_ne!(attr.node_guid, 0);
    let port = context.port_attr(1).unwrap();
    assert_eq!(port.state, rdma_core_rs::PortState::Active);
    assert_eq!(port.link_layer, rdma_core_rs::LinkLayer::Ethernet);
    assert!(port.speed_mbps() > 0, "{port:?}");
    assert!(port.active_mtu <= port.max_mtu);
    let table = context.gid_table(1).unwrap();
    assert!(
        table.iter().any(|entry| entry.gid == bed.a.gid),
        "{table:?}"
    );
    let nobody = "203.0.113.1".parse().unwrap();
    assert_eq!(context.find_gid(1, nobody).unwrap(), None);
    let error = context.port_attr(77).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Call {
                call: "ibv_query_port",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(context.pkey(1, 0).unwrap(), 0xffff);
    assert!(context.gid(1, 1 << 20).is_err());
    let device = rdma_core_rs::devices().unwrap();
    let device = device
        .iter()
        .find(|device| device.name() == context.device_name())
        .unwrap();
    assert_eq!(device.guid().0, attr.node_guid);
    assert_eq!(device.node_type(), rdma_core_rs::NodeType::ChannelAdapter);
    println!("{device:?} on NUMA node {:?}", device.numa_node());
}
