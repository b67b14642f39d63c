use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use proptest::prelude::*;

use super::*;

const QP: u32 = 17;
const OK: Ending = Ending::Success(Success {
    byte_len: 0,
    imm: None,
    written: false,
});
const REFUSED: Ending = Ending::Failed {
    status: WcStatus::RemAccessErr,
    vendor_err: 0x88,
};
const NO_ANSWER: Ending = Ending::Failed {
    status: WcStatus::RetryExcErr,
    vendor_err: 0,
};

fn limits(send_depth: u32, recv_depth: u32) -> LaneLimits {
    LaneLimits {
        send_depth,
        recv_depth,
        records: 2 * (send_depth + recv_depth) + 1,
        max_unsignaled: u32::MAX,
    }
}

/// A tracker with one lane, and short words for what is done to it.
struct Bed {
    tracker: Tracker<&'static str>,
    lane: LaneId,
    wakers: Vec<Waker>,
}

impl Bed {
    fn new(send_depth: u32, recv_depth: u32) -> Bed {
        let mut tracker = Tracker::new(1000);
        let lane = tracker.attach(3, limits(send_depth, recv_depth)).unwrap();
        tracker.bind(lane, QP, Addrs::default());
        Bed {
            tracker,
            lane,
            wakers: Vec::new(),
        }
    }

    fn try_post(&mut self, kind: OpKind, buf: &'static str) -> Result<WrId, Full> {
        let what = Begin {
            kind,
            claim: Claim::Ticket,
            len: 8,
            signaled: true,
            rings: true,
        };
        self.tracker.begin(self.lane, what, || buf)
    }

    fn post(&mut self, kind: OpKind, buf: &'static str) -> WrId {
        self.try_post(kind, buf).unwrap()
    }

    fn post_unsignaled(&mut self, buf: &'static str) -> WrId {
        let what = Begin {
            kind: OpKind::Write,
            claim: Claim::Ticket,
            len: 8,
            signaled: false,
            rings: true,
        };
        self.tracker.begin(self.lane, what, || buf).unwrap()
    }

    fn complete(&mut self, id: WrId, ending: Ending) -> Matched<&'static str> {
        self.tracker
            .complete(id.raw(), QP, ending, &mut self.wakers)
    }

    fn outcome(&mut self, id: WrId) -> Option<Outcome> {
        self.tracker
            .take(id)
            .and_then(|finished| finished.result.err())
            .map(|failed| failed.outcome)
    }

    fn disconnect(&mut self) {
        self.tracker
            .set_cause(self.lane, || Cause::Disconnected, &mut self.wakers);
    }
}

#[derive(Default)]
struct CountingWaker(AtomicUsize);

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_success_gives_the_buffer_back_once() {
    let mut bed = Bed::new(2, 2);
    let id = bed.post(OpKind::Send, "payload");
    assert!(bed.tracker.take(id).is_none());

    assert!(matches!(
        bed.complete(id, OK),
        Matched::Kept {
            owner: 3,
            news: News::Fine
        }
    ));

    let finished = bed.tracker.take(id).unwrap();
    assert_eq!((finished.kind, finished.buf), (OpKind::Send, "payload"));
    assert_eq!(finished.result.unwrap().byte_len, 8);
    assert!(bed.tracker.take(id).is_none());
    assert_eq!(bed.tracker.records(), 0);
}

#[test]
fn a_full_queue_is_a_value_and_gives_the_buffer_back() {
    let mut bed = Bed::new(2, 1);
    bed.post(OpKind::Send, "a");
    bed.post(OpKind::Read, "b");
    let what = Begin {
        kind: OpKind::Send,
        claim: Claim::Ticket,
        len: 0,
        signaled: true,
        rings: true,
    };
    let refused = bed
        .tracker
        .begin(bed.lane, what, || unreachable!("full"))
        .unwrap_err();
    assert_eq!(refused, Full(Queue::Send, 2));
    bed.post(OpKind::Receive, "the other queue has room");
    assert_eq!(
        bed.try_post(OpKind::Receive, "d"),
        Err(Full(Queue::Receive, 1))
    );
    assert_eq!(bed.tracker.tally(bed.lane).queue_full, 2);
}

#[test]
fn a_probe_finds_room_in_a_full_queue() {
    let mut bed = Bed::new(1, 1);
    bed.post(OpKind::Send, "a");
    bed.post(OpKind::Probe, "b");
    assert_eq!(bed.try_post(OpKind::Probe, "c"), Err(Full(Queue::Send, 2)));
    assert_eq!(bed.tracker.send_capacity(bed.lane), 0);
}

#[test]
fn a_completion_frees_the_queue_before_the_result_is_fetched() {
    let mut bed = Bed::new(1, 1);
    let first = bed.post(OpKind::Send, "a");
    bed.complete(first, OK);
    bed.post(OpKind::Send, "b");
    assert!(bed.tracker.take(first).is_some());
}

#[test]
fn results_nobody_fetches_take_no_room() {
    let mut bed = Bed::new(1, 1);
    let made = bed.tracker.slots.len();
    let ids: Vec<WrId> = (0..3 * made)
        .map(|_| {
            let id = bed.post(OpKind::Send, "kept");
            bed.complete(id, OK);
            assert_eq!(bed.tracker.send_capacity(bed.lane), 1);
            id
        })
        .collect();
    assert_eq!(bed.tracker.records(), ids.len());
    for id in ids {
        assert_eq!(bed.tracker.take(id).unwrap().buf, "kept");
    }
}

#[test]
fn an_aborted_operation_leaves_no_trace() {
    let mut bed = Bed::new(2, 2);
    let kept = bed.post(OpKind::Send, "kept");
    let id = bed.post(OpKind::Send, "refused");
    assert_eq!(bed.tracker.abort(id), Some("refused"));
    assert_eq!(bed.tracker.abort(id), None);
    assert_eq!(bed.tracker.in_flight(bed.lane), (1, 0));
    assert_eq!(bed.tracker.tally(bed.lane).posted[OpKind::Send as usize], 1);
    assert!(matches!(bed.complete(id, OK), Matched::Stale));
    assert!(matches!(bed.complete(kept, OK), Matched::Kept { .. }));
}

#[test]
fn stale_duplicate_and_foreign_completions_are_counted_and_ignored() {
    let mut bed = Bed::new(2, 2);
    let id = bed.post(OpKind::Send, "a");
    let wakers = &mut Vec::new();
    for raw in [0, u64::MAX, 99, 7 << 32, id.raw() | 1 << 60] {
        assert!(matches!(
            bed.tracker.complete(raw, QP, OK, wakers),
            Matched::Stale
        ));
    }
    assert!(matches!(
        bed.tracker.complete(id.raw(), QP + 1, OK, wakers),
        Matched::Stale
    ));
    bed.complete(id, OK);
    assert!(
        matches!(bed.complete(id, OK), Matched::Stale),
        "a duplicate before the fetch"
    );
    bed.tracker.take(id).unwrap();
    assert!(
        matches!(bed.complete(id, OK), Matched::Stale),
        "a duplicate after it"
    );
    assert_eq!(bed.tracker.stale(), 8);
}

#[test]
fn a_reused_slot_is_not_reached_by_the_id_of_its_former_occupant() {
    let mut bed = Bed::new(1, 1);
    let old = bed.post(OpKind::Send, "old");
    bed.complete(old, OK);
    bed.tracker.take(old).unwrap();
    let ids: Vec<WrId> = (0..4)
        .map(|_| {
            let id = bed.post(OpKind::Send, "new");
            bed.complete(id, OK);
            id
        })
        .collect();
    let new = ids.into_iter().find(|id| id.slot() == old.slot()).unwrap();
    assert_ne!(new, old);
    assert!(bed.tracker.take(old).is_none());
    assert!(bed.tracker.take(new).is_some());
}

#[test]
fn the_kind_of_a_failed_operation_is_that_of_its_record() {
    for kind in OpKind::ALL {
        let mut bed = Bed::new(4, 4);
        let id = bed.post(kind, "x");
        bed.complete(id, Ending::Flushed);
        bed.disconnect();
        let finished = bed.tracker.take(id).unwrap();
        assert_eq!(finished.kind, kind);
        assert_eq!(bed.tracker.in_flight(bed.lane), (0, 0));
    }
}

#[test]
fn the_first_failure_is_the_cause_of_all_flushes() {
    let mut bed = Bed::new(4, 4);
    let recv = bed.post(OpKind::Receive, "r");
    let bad = bed.post(OpKind::Write, "w");
    let behind = bed.post(OpKind::Send, "s");

    // The flush of the receive queue is seen before the failure that led to it.
    assert!(matches!(
        bed.complete(recv, Ending::Flushed),
        Matched::Kept {
            news: News::Broken,
            ..
        }
    ));
    assert!(
        bed.tracker.take(recv).is_none(),
        "no result without its cause"
    );
    assert!(matches!(
        bed.complete(bad, REFUSED),
        Matched::Kept {
            news: News::FirstFailure,
            ..
        }
    ));
    bed.complete(behind, Ending::Flushed);
    bed.disconnect();

    let failed = |bed: &mut Bed, id| bed.tracker.take(id).unwrap().result.unwrap_err();
    let (r, w, s) = (
        failed(&mut bed, recv),
        failed(&mut bed, bad),
        failed(&mut bed, behind),
    );
    assert_eq!(r.outcome, Outcome::NotSent);
    assert_eq!(w.outcome, Outcome::Failed);
    assert_eq!(s.outcome, Outcome::NotSent);
    assert!(Arc::ptr_eq(&r.cause, &w.cause) && Arc::ptr_eq(&s.cause, &w.cause));
    let Cause::Operation(failure) = &*w.cause else {
        panic!("{:?}", w.cause)
    };
    assert_eq!((failure.op, failure.qp_num), (OpKind::Write, QP));
    assert_eq!(
        (failure.status, failure.vendor_err),
        (WcStatus::RemAccessErr, 0x88)
    );
}

#[test]
fn what_is_behind_an_unanswered_operation_may_have_been_executed() {
    let mut bed = Bed::new(4, 4);
    let lost = bed.post(OpKind::Send, "");
    let behind = bed.post(OpKind::Send, "");
    bed.complete(lost, NO_ANSWER);
    bed.complete(behind, Ending::Flushed);
    assert_eq!(bed.outcome(lost), Some(Outcome::Unknown));
    assert_eq!(bed.outcome(behind), Some(Outcome::Unknown));
}

#[test]
fn what_is_behind_a_refused_read_may_have_been_executed() {
    let mut bed = Bed::new(4, 4);
    let read = bed.post(OpKind::Read, "");
    let behind = bed.post(OpKind::Write, "");
    bed.complete(read, REFUSED);
    bed.complete(behind, Ending::Flushed);
    assert_eq!(bed.outcome(read), Some(Outcome::Failed));
    assert_eq!(bed.outcome(behind), Some(Outcome::Unknown));
}

#[test]
fn what_is_behind_a_local_failure_may_have_been_executed() {
    let mut bed = Bed::new(4, 4);
    let bad = bed.post(OpKind::Write, "");
    let behind = bed.post(OpKind::Write, "");
    bed.complete(
        bad,
        Ending::Failed {
            status: WcStatus::LocProtErr,
            vendor_err: 0,
        },
    );
    bed.complete(behind, Ending::Flushed);
    assert_eq!(bed.outcome(bad), Some(Outcome::Failed));
    assert_eq!(bed.outcome(behind), Some(Outcome::Unknown));
}

#[test]
fn sends_flushed_by_a_failed_receive_may_have_been_executed() {
    let mut bed = Bed::new(4, 4);
    let send = bed.post(OpKind::Send, "");
    let recv = bed.post(OpKind::Receive, "");
    bed.complete(
        recv,
        Ending::Failed {
            status: WcStatus::LocLenErr,
            vendor_err: 0,
        },
    );
    bed.complete(send, Ending::Flushed);
    assert_eq!(bed.outcome(send), Some(Outcome::Unknown));
}

#[test]
fn a_local_close_cancels_receives_and_only_those() {
    let mut bed = Bed::new(4, 4);
    let (send, recv) = (bed.post(OpKind::Send, ""), bed.post(OpKind::Receive, ""));
    bed.tracker
        .set_cause(bed.lane, || Cause::ClosedLocally, &mut bed.wakers);
    bed.complete(send, Ending::Flushed);
    bed.complete(recv, Ending::Flushed);
    assert_eq!(bed.outcome(send), Some(Outcome::Unknown));
    assert_eq!(bed.outcome(recv), Some(Outcome::Cancelled));
}

#[test]
fn a_second_real_failure_is_its_own_cause() {
    let mut bed = Bed::new(4, 4);
    bed.disconnect();
    let late = bed.post(OpKind::Send, "");
    bed.complete(late, NO_ANSWER);
    let failed = bed.tracker.take(late).unwrap().result.unwrap_err();
    assert!(matches!(&*failed.cause, Cause::Operation(failure) if failure.op == OpKind::Send));
    assert_eq!(**bed.tracker.cause(bed.lane).unwrap(), Cause::Disconnected);
}

#[test]
fn a_signaled_success_retires_the_unsignaled_ones_before_it() {
    let mut bed = Bed::new(8, 1);
    let quiet = [bed.post_unsignaled("a"), bed.post_unsignaled("b")];
    let last = bed.post(OpKind::Write, "c");
    let after = bed.post_unsignaled("d");
    assert_eq!(bed.tracker.unsignaled_tail(bed.lane), 1);

    bed.complete(last, OK);

    for id in quiet {
        assert!(bed.tracker.take(id).unwrap().result.is_ok());
    }
    assert!(bed.tracker.take(last).unwrap().result.is_ok());
    assert!(bed.tracker.take(after).is_none());
    assert_eq!(bed.tracker.in_flight(bed.lane), (1, 0));
    assert_eq!(bed.tracker.tally(bed.lane).bytes_out, 24);
}

#[test]
fn a_failure_retires_the_unsignaled_ones_before_it_as_successes() {
    let mut bed = Bed::new(8, 1);
    let quiet = bed.post_unsignaled("a");
    let bad = bed.post(OpKind::Write, "b");
    let behind = bed.post_unsignaled("c");
    bed.complete(bad, REFUSED);
    bed.complete(behind, Ending::Flushed);
    assert!(bed.tracker.take(quiet).unwrap().result.is_ok());
    assert_eq!(bed.outcome(behind), Some(Outcome::NotSent));
    assert_eq!(bed.tracker.in_flight(bed.lane), (0, 0));
}

#[test]
fn an_unsignaled_operation_that_fails_has_its_own_completion() {
    let mut bed = Bed::new(8, 1);
    let bad = bed.post_unsignaled("a");
    let behind = bed.post_unsignaled("b");
    bed.complete(bad, REFUSED);
    bed.complete(behind, Ending::Flushed);
    assert_eq!(bed.outcome(bad), Some(Outcome::Failed));
    assert_eq!(bed.outcome(behind), Some(Outcome::NotSent));
}

#[test]
fn a_reordered_success_does_not_retire_signaled_operations() {
    let mut bed = Bed::new(8, 1);
    let first = bed.post(OpKind::Read, "first");
    let second = bed.post(OpKind::Write, "second");
    bed.complete(second, OK);
    assert!(
        bed.tracker.take(first).is_none(),
        "its buffer is still the NIC's"
    );
    bed.complete(first, OK);
    assert_eq!(bed.tracker.take(first).unwrap().buf, "first");
    assert_eq!(bed.tracker.take(second).unwrap().buf, "second");
}

#[test]
fn unsignaled_runs_are_bounded() {
    let mut tracker = Tracker::new(100);
    let lane = tracker
        .attach(
            0,
            LaneLimits {
                max_unsignaled: 2,
                ..limits(8, 1)
            },
        )
        .unwrap();
    tracker.bind(lane, QP, Addrs::default());
    let quiet = Begin {
        kind: OpKind::Write,
        claim: Claim::Ticket,
        len: 0,
        signaled: false,
        rings: true,
    };
    assert!(!tracker.must_signal(lane));
    tracker.begin(lane, quiet, || ()).unwrap();
    let second = tracker.begin(lane, quiet, || ()).unwrap();
    assert!(tracker.must_signal(lane));
    tracker.abort(second);
    assert!(!tracker.must_signal(lane));
    tracker.begin(lane, quiet, || ()).unwrap();
    tracker
        .begin(
            lane,
            Begin {
                signaled: true,
                rings: true,
                ..quiet
            },
            || (),
        )
        .unwrap();
    assert_eq!(tracker.unsignaled_tail(lane), 0);
}

#[test]
fn aborting_the_signaled_end_of_a_chain_leaves_its_unsignaled_part_visible() {
    let mut bed = Bed::new(8, 1);
    bed.post_unsignaled("a");
    bed.post_unsignaled("b");
    let last = bed.post(OpKind::Write, "c");
    assert_eq!(bed.tracker.unsignaled_tail(bed.lane), 0);
    bed.tracker.abort(last);
    assert_eq!(bed.tracker.unsignaled_tail(bed.lane), 2);
}

#[test]
fn a_forgotten_operation_keeps_its_buffer_until_its_completion() {
    let mut bed = Bed::new(2, 2);
    let id = bed.post(OpKind::Read, "target");
    assert!(bed.tracker.forget(id).buf.is_none());
    assert_eq!(bed.tracker.records(), 1);
    bed.complete(id, OK);
    assert_eq!(bed.tracker.records(), 0);
    assert_eq!(bed.tracker.stale(), 0);
}

#[test]
fn a_forgotten_result_gives_its_buffer_up_at_once() {
    let mut bed = Bed::new(2, 2);
    let done = bed.post(OpKind::Read, "done");
    bed.complete(done, OK);
    assert_eq!(bed.tracker.forget(done).buf, Some("done"));
    let flushed = bed.post(OpKind::Read, "flushed");
    bed.complete(flushed, Ending::Flushed);
    assert_eq!(bed.tracker.forget(flushed).buf, Some("flushed"));
    bed.disconnect();
    assert_eq!(bed.tracker.records(), 0);
}

#[test]
fn a_receive_of_the_inbox_is_handed_over_with_its_completion() {
    let mut bed = Bed::new(2, 2);
    let what = Begin {
        kind: OpKind::Receive,
        claim: Claim::Inbox,
        len: 64,
        signaled: true,
        rings: false,
    };
    let id = bed.tracker.begin(bed.lane, what, || "message").unwrap();
    let arrived = Success {
        byte_len: 5,
        imm: Some(9),
        written: false,
    };
    let matched = bed.complete(id, Ending::Success(arrived));
    let Matched::Inbox {
        owner: 3,
        buf: "message",
        ending: Ending::Success(got),
        ..
    } = matched
    else {
        panic!("{matched:?}")
    };
    assert_eq!(got, arrived);
    assert_eq!(bed.tracker.records(), 0);
}

#[test]
fn who_waits_is_woken_once_the_result_can_be_fetched() {
    let mut bed = Bed::new(2, 2);
    let counter = Arc::new(CountingWaker::default());
    let id = bed.post(OpKind::Send, "");
    assert!(
        bed.tracker
            .wake_on_end(id, Waker::from(counter.clone()))
            .is_none()
    );
    assert!(
        bed.tracker
            .wake_on_end(id, Waker::from(counter.clone()))
            .is_some(),
        "the former one"
    );

    bed.complete(id, Ending::Flushed);
    assert!(bed.wakers.is_empty(), "there is no result yet");
    bed.disconnect();
    bed.wakers.drain(..).for_each(Waker::wake);

    assert_eq!(counter.0.load(Ordering::Relaxed), 1);
    assert!(bed.tracker.take(id).is_some());
}

#[test]
fn a_drained_lane_has_resolved_everything() {
    let mut bed = Bed::new(4, 4);
    let send = bed.post(OpKind::Send, "send");
    let recv = bed.post(OpKind::Receive, "recv");
    let what = Begin {
        kind: OpKind::Receive,
        claim: Claim::Inbox,
        len: 64,
        signaled: true,
        rings: false,
    };
    bed.tracker.begin(bed.lane, what, || "inbox").unwrap();
    bed.disconnect();

    let mut released = Vec::new();
    let count = bed
        .tracker
        .drain(bed.lane, &mut bed.wakers, |buf| released.push(buf));

    assert_eq!(count, 3);
    assert_eq!(released, ["inbox"]);
    assert_eq!(bed.outcome(send), Some(Outcome::Unknown));
    assert_eq!(bed.outcome(recv), Some(Outcome::NotSent));
}

#[test]
fn lanes_cannot_promise_more_completions_than_the_queue_holds() {
    let mut tracker: Tracker<()> = Tracker::new(10);
    let first = tracker.attach(0, limits(4, 4)).unwrap();
    let refused = tracker.attach(1, limits(1, 1)).unwrap_err();
    assert_eq!(refused, Overcommitted { asked: 3, free: 1 });
    tracker.detach(first);
    tracker.attach(1, limits(5, 4)).unwrap();
}

#[test]
fn results_outlive_their_lane() {
    let mut bed = Bed::new(2, 2);
    let id = bed.post(OpKind::Send, "kept");
    bed.disconnect();
    bed.tracker.drain(bed.lane, &mut bed.wakers, drop);
    bed.tracker.detach(bed.lane);
    assert_eq!(bed.tracker.take(id).unwrap().buf, "kept");
    assert_eq!(bed.tracker.records(), 0);
    assert_eq!(bed.tracker.total().flushed[OpKind::Send as usize], 1);
}

#[test]
fn one_lane_never_notices_the_failure_of_another() {
    let mut bed = Bed::new(2, 2);
    let other = bed.tracker.attach(4, limits(2, 2)).unwrap();
    bed.tracker.bind(other, QP + 1, Addrs::default());
    let what = Begin {
        kind: OpKind::Send,
        claim: Claim::Ticket,
        len: 0,
        signaled: true,
        rings: true,
    };
    let healthy = bed.tracker.begin(other, what, || "healthy").unwrap();
    let bad = bed.post(OpKind::Send, "bad");
    bed.complete(bad, REFUSED);
    assert!(bed.tracker.cause(other).is_none());
    bed.tracker
        .complete(healthy.raw(), QP + 1, OK, &mut bed.wakers);
    assert!(bed.tracker.take(healthy).unwrap().result.is_ok());
}

/// What can be done to a tracker, with numbers that are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Begin {
        lane: usize,
        kind: usize,
        claim: usize,
        signaled: bool,
    },
    Abort {
        lane: usize,
    },
    Succeed {
        lane: usize,
        recv: bool,
    },
    Fail {
        lane: usize,
        recv: bool,
        status: usize,
    },
    Flush {
        lane: usize,
        recv: bool,
    },
    Stale {
        raw: u64,
        qp: u32,
    },
    Duplicate {
        nth: usize,
    },
    Take {
        nth: usize,
    },
    Forget {
        nth: usize,
    },
    Cause {
        lane: usize,
    },
    Drain {
        lane: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let lane = 0..2usize;
    prop_oneof![
        8 => (lane.clone(), 0..9usize, 0..3usize, any::<bool>())
            .prop_map(|(lane, kind, claim, signaled)| Step::Begin { lane, kind, claim, signaled }),
        1 => lane.clone().prop_map(|lane| Step::Abort { lane }),
        6 => (lane.clone(), any::<bool>()).prop_map(|(lane, recv)| Step::Succeed { lane, recv }),
        1 => (lane.clone(), any::<bool>(), 0..4usize)
            .prop_map(|(lane, recv, status)| Step::Fail { lane, recv, status }),
        3 => (lane.clone(), any::<bool>()).prop_map(|(lane, recv)| Step::Flush { lane, recv }),
        1 => (0..1u64 << 34, 0..40u32).prop_map(|(raw, qp)| Step::Stale { raw, qp }),
        1 => (0..64usize).prop_map(|nth| Step::Duplicate { nth }),
        4 => (0..64usize).prop_map(|nth| Step::Take { nth }),
        2 => (0..64usize).prop_map(|nth| Step::Forget { nth }),
        1 => lane.clone().prop_map(|lane| Step::Cause { lane }),
        1 => lane.prop_map(|lane| Step::Drain { lane }),
    ]
}

/// The obvious tracker: lists of what was posted, and for each operation where it stands.
#[derive(Default)]
struct Model {
    /// Posting order, per lane and queue, of (id, signaled).
    queues: [[Vec<(WrId, bool)>; 2]; 2],
    ops: HashMap<WrId, Op>,
    broken_sends: [bool; 2],
    cause: [bool; 2],
}

struct Op {
    lane: usize,
    kind: OpKind,
    claim: Claim,
    token: usize,
    stage: Stage,
    waits: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    InFlight,
    Flushed,
    Done { ok: bool },
}

impl Model {
    fn end(&mut self, id: WrId, stage: Stage, freed: &mut Vec<usize>) {
        let op = self.ops.get_mut(&id).unwrap();
        let (lane, recv) = (op.lane, op.kind.is_receive());
        self.queues[lane][recv as usize].retain(|&(other, _)| other != id);
        op.stage = stage;
        if op.claim != Claim::Ticket {
            freed.push(self.ops.remove(&id).unwrap().token);
        }
    }

    /// Ends what was posted unsignaled before `id` in its queue.
    fn retire_before(&mut self, lane: usize, id: WrId, freed: &mut Vec<usize>) {
        let quiet: Vec<WrId> = self.queues[lane][0]
            .iter()
            .take_while(|&&(other, _)| other != id)
            .filter(|&&(_, signaled)| !signaled)
            .map(|&(other, _)| other)
            .collect();
        quiet
            .into_iter()
            .for_each(|id| self.end(id, Stage::Done { ok: true }, freed));
    }

    fn break_sends(&mut self, lane: usize, id: WrId, freed: &mut Vec<usize>) {
        if !self.broken_sends[lane] {
            self.broken_sends[lane] = true;
            self.retire_before(lane, id, freed);
        }
    }

    fn settle(&mut self, lane: usize) {
        self.cause[lane] = true;
        for op in self.ops.values_mut().filter(|op| op.lane == lane) {
            if op.stage == Stage::Flushed {
                op.stage = Stage::Done { ok: false };
            }
        }
    }

    fn flush(&mut self, lane: usize, id: WrId, freed: &mut Vec<usize>) {
        if !self.ops[&id].kind.is_receive() {
            self.break_sends(lane, id, freed);
        }
        let stage = if self.cause[lane] {
            Stage::Done { ok: false }
        } else {
            Stage::Flushed
        };
        self.end(id, stage, freed);
    }

    fn nth(&self, nth: usize) -> Option<WrId> {
        let mut ids: Vec<WrId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.claim == Claim::Ticket)
            .map(|(&id, _)| id)
            .collect();
        ids.sort_by_key(|id| id.raw());
        (!ids.is_empty()).then(|| ids[nth % ids.len()])
    }
}

/// A buffer that says when it is dropped.
#[derive(Debug)]
struct Token(usize, std::rc::Rc<std::cell::RefCell<Vec<usize>>>);

impl Drop for Token {
    fn drop(&mut self) {
        self.1.borrow_mut().push(self.0);
    }
}

fn cases() -> u32 {
    if cfg!(miri) { 2 } else { 500 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happens in whatever order, the tracker does what the obvious model does: every
    /// operation ends once, every buffer is in exactly one place, and no count drifts.
    #[test]
    fn the_tracker_behaves_like_its_model(steps in prop::collection::vec(step(), 1..if cfg!(miri) { 40 } else { 200 })) {
        const DEPTH: [u32; 2] = [4, 3];
        let dropped = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let mut tracker = Tracker::new(100);
        let records = 3; // more are made when they are needed
        let lanes = [0, 1].map(|owner| {
            let limits = LaneLimits { records, ..limits(DEPTH[0], DEPTH[1]) };
            let lane = tracker.attach(owner, limits).unwrap();
            tracker.bind(lane, QP + owner, Addrs::default());
            lane
        });
        let mut model = Model::default();
        let mut wakers = Vec::new();
        let mut tokens = 0;
        let mut stale = 0;
        let counter = Arc::new(CountingWaker::default());
        let mut wakes = 0;

        for step in steps {
            let mut freed: Vec<usize> = Vec::new();
            match step {
                Step::Begin { lane, kind, claim, signaled } => {
                    let kind = OpKind::ALL[kind];
                    let claim = [Claim::Ticket, Claim::Inbox, Claim::Nobody][claim];
                    let claim = if claim == Claim::Inbox && !kind.is_receive() { Claim::Nobody } else { claim };
                    let signaled = signaled || kind.is_receive();
                    let what = Begin { kind, claim, len: 1, signaled, rings: !kind.is_receive() };
                    tokens += 1;
                    let queue = &mut model.queues[lane][kind.is_receive() as usize];
                    let depth = DEPTH[kind.is_receive() as usize] + u32::from(kind == OpKind::Probe);
                    let full = queue.len() as u32 >= depth;
                    match tracker.begin(lanes[lane], what, || Some(Token(tokens, dropped.clone()))) {
                        Ok(id) => {
                            prop_assert!(!full);
                            prop_assert!(!model.ops.contains_key(&id), "an id was issued twice");
                            queue.push((id, signaled));
                            let waits = claim == Claim::Ticket && tokens % 2 == 0;
                            if waits {
                                tracker.wake_on_end(id, Waker::from(counter.clone()));
                            }
                            let stage = Stage::InFlight;
                            model.ops.insert(id, Op { lane, kind, claim, token: tokens, stage, waits });
                        }
                        Err(_) => prop_assert!(full),
                    }
                }
                Step::Abort { lane } => {
                    if let Some((id, _)) = model.queues[lane][0].pop() {
                        let op = model.ops.remove(&id).unwrap();
                        prop_assert_eq!(tracker.abort(id).map(|t| t.unwrap().0), Some(op.token));
                        freed.push(op.token);
                    }
                }
                Step::Succeed { lane, recv } => {
                    let signaled = model.queues[lane][recv as usize].iter().find(|q| q.1).copied();
                    if let Some((id, _)) = signaled {
                        if !recv {
                            model.retire_before(lane, id, &mut freed);
                        }
                        model.end(id, Stage::Done { ok: true }, &mut freed);
                        drop(tracker.complete(id.raw(), QP + lane as u32, OK, &mut wakers));
                    }
                }
                Step::Fail { lane, recv, status } => {
                    if let Some(&(id, _)) = model.queues[lane][recv as usize].first() {
                        let status = [WcStatus::RemAccessErr, WcStatus::RetryExcErr, WcStatus::LocLenErr, WcStatus::RnrRetryExcErr][status];
                        if !recv {
                            model.break_sends(lane, id, &mut freed);
                        }
                        model.settle(lane);
                        model.end(id, Stage::Done { ok: false }, &mut freed);
                        let ending = Ending::Failed { status, vendor_err: 0 };
                        drop(tracker.complete(id.raw(), QP + lane as u32, ending, &mut wakers));
                    }
                }
                Step::Flush { lane, recv } => {
                    if let Some(&(id, _)) = model.queues[lane][recv as usize].first() {
                        model.flush(lane, id, &mut freed);
                        drop(tracker.complete(id.raw(), QP + lane as u32, Ending::Flushed, &mut wakers));
                    }
                }
                Step::Stale { raw, qp } => {
                    let known = WrId::from_raw(raw).is_some_and(|id| {
                        model.ops.get(&id).is_some_and(|op| op.stage == Stage::InFlight && QP + op.lane as u32 == qp)
                    });
                    if !known {
                        stale += 1;
                        prop_assert!(matches!(tracker.complete(raw, qp, OK, &mut wakers), Matched::Stale));
                    }
                }
                Step::Duplicate { nth } => {
                    if let Some(id) = model.nth(nth).filter(|id| model.ops[id].stage != Stage::InFlight) {
                        stale += 1;
                        let qp = QP + model.ops[&id].lane as u32;
                        prop_assert!(matches!(tracker.complete(id.raw(), qp, OK, &mut wakers), Matched::Stale));
                    }
                }
                Step::Take { nth } => {
                    if let Some(id) = model.nth(nth) {
                        let finished = tracker.take(id);
                        match model.ops[&id].stage {
                            Stage::Done { ok } => {
                                let op = model.ops.remove(&id).unwrap();
                                let finished = finished.unwrap();
                                prop_assert_eq!(finished.kind, op.kind);
                                prop_assert_eq!(finished.buf.unwrap().0, op.token);
                                prop_assert_eq!(finished.result.is_ok(), ok);
                                wakes += usize::from(op.waits);
                                freed.push(op.token);
                            }
                            _ => prop_assert!(finished.is_none()),
                        }
                    }
                }
                Step::Forget { nth } => {
                    if let Some(id) = model.nth(nth) {
                        let forgotten = tracker.forget(id);
                        let op = model.ops.get_mut(&id).unwrap();
                        if matches!(op.stage, Stage::Done { .. }) {
                            wakes += usize::from(op.waits);
                        }
                        match op.stage {
                            Stage::InFlight => {
                                prop_assert!(forgotten.buf.is_none());
                                op.claim = Claim::Nobody;
                            }
                            _ => {
                                let op = model.ops.remove(&id).unwrap();
                                prop_assert_eq!(forgotten.buf.map(|t| t.unwrap().0), Some(op.token));
                                freed.push(op.token);
                            }
                        }
                    }
                }
                Step::Cause { lane } => {
                    model.settle(lane);
                    tracker.set_cause(lanes[lane], || Cause::Disconnected, &mut wakers);
                }
                Step::Drain { lane } => {
                    model.settle(lane);
                    tracker.set_cause(lanes[lane], || Cause::ClosedLocally, &mut wakers);
                    while let Some(&(id, _)) =
                        model.queues[lane][0].first().or(model.queues[lane][1].first())
                    {
                        model.flush(lane, id, &mut freed);
                    }
                    tracker.drain(lanes[lane], &mut wakers, drop);
                }
            }
            let mut gone: Vec<usize> = dropped.borrow_mut().drain(..).collect();
            gone.sort();
            freed.sort();
            prop_assert_eq!(gone, freed, "buffers that were let go");
            for (lane, id) in lanes.into_iter().enumerate() {
                let [sends, recvs] = &model.queues[lane];
                prop_assert_eq!(tracker.in_flight(id), (sends.len() as u32, recvs.len() as u32));
                prop_assert_eq!(tracker.cause(id).is_some(), model.cause[lane]);
            }
            prop_assert_eq!(tracker.records(), model.ops.len());
            prop_assert_eq!(tracker.stale(), stale);
        }

        // Whoever still waits is woken by the end, each once.
        let ended = |op: &&Op| op.waits && matches!(op.stage, Stage::Done { .. }) && op.claim == Claim::Ticket;
        wakes += model.ops.values().filter(ended).count();
        wakers.drain(..).for_each(Waker::wake);
        prop_assert_eq!(counter.0.load(Ordering::Relaxed), wakes);
    }
}

#[test]
fn a_failure_that_does_not_tell_leaves_it_unknown() {
    let cases = [
        (OpKind::Send, WcStatus::FatalErr, Outcome::Unknown),
        (OpKind::Send, WcStatus::BadRespErr, Outcome::Unknown),
        (OpKind::Write, WcStatus::GeneralErr, Outcome::Unknown),
        (OpKind::FetchAdd, WcStatus::LocProtErr, Outcome::Unknown),
        (OpKind::FetchAdd, WcStatus::RemAccessErr, Outcome::Failed),
        (OpKind::Send, WcStatus::LocProtErr, Outcome::Failed),
        (OpKind::Receive, WcStatus::LocLenErr, Outcome::Failed),
    ];
    for (kind, status, expected) in cases {
        let mut bed = Bed::new(1, 1);
        let id = bed.post(kind, "");
        let failed = Ending::Failed {
            status,
            vendor_err: 0,
        };
        bed.complete(id, failed);
        let finished = bed.tracker.take(id).unwrap();
        assert_eq!(
            finished.result.unwrap_err().outcome,
            expected,
            "{kind} {status:?}"
        );
    }
}
