//! Which operations are in flight, who waits for them, and what became of them.
//!
//! The tracker is the heart of the crate and pure: it knows no file descriptor, clock or thread, so
//! all of it is tested without I/O and under Miri. Everything a completion says is treated as input
//! from outside: it is matched by slot, generation and queue pair number, and what does not match is
//! counted and ignored (I10). The kind of an operation is always taken from its record.
//!
//! A **lane** is what one endpoint has here: its two queues, in posting order, and its limits. A
//! record goes through
//!
//! ```text
//!            abort (not posted)
//!          ┌──────────────────────────► gone, buffer back
//!  begin ──┤
//!          └► Posted ──► Flushed ──► Done ──► gone, buffer back      (I2: a record leaves once)
//!                └───────────────────►┘
//! ```
//!
//! A flushed completion says only that *something else* failed. Flushes of one queue can come before
//! the failure in the other queue that caused them, so a flushed record waits, its buffer safe, until
//! the lane knows its cause ([`Tracker::set_cause`] or the first real failure), and is done then.
//!
//! The buffer of a record is owned by it from before the post until the completion (I1), also when
//! nobody waits any more.

use std::mem;
use std::sync::Arc;
use std::task::Waker;

use rdma_core_rs::WcStatus;

use crate::error::{Addrs, Cause, Failure, OpKind, Outcome, Queue};
use crate::wr_id::WrId;

/// Names a lane of a [`Tracker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneId(u32);

/// What one lane may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneLimits {
    /// Operations in flight in the send queue; a probe has one more place, of its own.
    pub(crate) send_depth: u32,
    /// Operations in flight in the receive queue.
    pub(crate) recv_depth: u32,
    /// Records that are made beforehand. Results that were not fetched take more if they have to: it is
    /// no more than the program has `Operation`s, and if they took room from posting, who waits for
    /// that room could wait for itself.
    pub(crate) records: u32,
    /// Longest run of unsignaled operations, so that slots come back in time.
    pub(crate) max_unsignaled: u32,
}

/// Who gets the result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Whoever holds its [`WrId`]: it stays until [`Tracker::take`] or [`Tracker::forget`].
    Ticket,
    /// The one who calls [`Tracker::complete`]: receives that the endpoint posts by itself.
    Inbox,
    /// Nobody.
    Nobody,
}

/// What is to be begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begin {
    pub(crate) kind: OpKind,
    pub(crate) claim: Claim,
    pub(crate) len: u32,
    /// Whether the completion queue shall hear of its success.
    pub(crate) signaled: bool,
    /// Whether it is handed to the device in a call of its own, or is the first of a chain that is:
    /// these calls are counted.
    pub(crate) rings: bool,
}

/// A record could not be begun: the queue is full. With its depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full(pub(crate) Queue, pub(crate) u32);

/// A completion as the hardware reported it, with only the fields that are valid in its case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Success(Success),
    Flushed,
    Failed { status: WcStatus, vendor_err: u32 },
}

/// The valid fields of a successful completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Success {
    /// Length of what was received; of other operations the posted length counts.
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
    /// A receive that was consumed by a write with immediate.
    pub(crate) written: bool,
}

/// Why an operation has no success.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) outcome: Outcome,
    pub(crate) cause: Arc<Cause>,
}

/// The one result of an operation, with its buffer.
#[derive(Debug)]
pub(crate) struct Finished<B> {
    pub(crate) kind: OpKind,
    pub(crate) buf: B,
    pub(crate) result: Result<Success, Failed>,
}

/// What nobody needs any more, to be dropped where no lock is held.
#[derive(Debug)]
#[allow(dead_code)] // held only to be dropped
pub(crate) struct Forgotten<B> {
    pub(crate) buf: Option<B>,
    pub(crate) waker: Option<Waker>,
}

/// What a completion meant.
#[derive(Debug)]
pub(crate) enum Matched<B> {
    /// Nothing that is in flight: counted, to be ignored.
    Stale,
    /// An operation of `owner`; its result waits to be fetched, or nobody wanted it.
    Kept { owner: u32, news: News },
    /// A receive of the inbox of `owner`. The buffer of one that did not succeed is there as well.
    Inbox {
        owner: u32,
        news: News,
        buf: B,
        ending: Ending,
    },
}

/// What a completion says about its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// It goes on.
    Fine,
    /// The lane's first failure, which is now its cause.
    FirstFailure,
    /// The queue pair is in its error state.
    Broken,
}

/// How often things happened, by kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) posted: [u64; OpKind::COUNT],
    pub(crate) succeeded: [u64; OpKind::COUNT],
    pub(crate) failed: [u64; OpKind::COUNT],
    pub(crate) flushed: [u64; OpKind::COUNT],
    pub(crate) bytes_out: u64,
    pub(crate) bytes_in: u64,
    pub(crate) queue_full: u64,
    /// Calls of ibv_post_send, those that were refused included.
    pub(crate) doorbells: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Tally) {
        let pairs = [
            (&mut self.posted, &other.posted),
            (&mut self.succeeded, &other.succeeded),
            (&mut self.failed, &other.failed),
            (&mut self.flushed, &other.flushed),
        ];
        for (sum, more) in pairs {
            sum.iter_mut()
                .zip(more)
                .for_each(|(sum, more)| *sum += more);
        }
        self.bytes_out += other.bytes_out;
        self.bytes_in += other.bytes_in;
        self.queue_full += other.queue_full;
        self.doorbells += other.doorbells;
    }
}

const NONE: u32 = u32::MAX;

/// See the [module's documentation](self).
pub(crate) struct Tracker<B> {
    slots: Vec<Slot<B>>,
    free: u32,
    lanes: slab::Slab<Lane>,
    /// Completions that the completion queue can hold, and how many of them lanes have reserved.
    cq_capacity: u32,
    cq_reserved: u32,
    records_reserved: usize,
    stale: u64,
    /// Of the lanes that are gone.
    past: Tally,
}

/// A place for a record, and the record in it. Each field is written where it lies: a record is never
/// built elsewhere and moved here, for that costs more than all the rest.
struct Slot<B> {
    generation: u32,
    /// Neighbours in the list the record is in; `next` also links the free slots.
    prev: u32,
    next: u32,
    lane: u32,
    len: u32,
    kind: OpKind,
    claim: Claim,
    signaled: bool,
    state: State,
    buf: B,
    /// Of one that has not ended.
    waker: Option<Waker>,
}

enum State {
    /// There is no record.
    Free,
    Posted,
    /// Flushed, and the cause is not known yet. `refused_ahead`: see [`Lane::refused`].
    Flushed {
        refused_ahead: bool,
    },
    Done(Result<Success, Failed>),
}

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
    len: u32,
}

const EMPTY: List = List {
    head: NONE,
    tail: NONE,
    len: 0,
};

struct Lane {
    owner: u32,
    qp_num: u32,
    addrs: Addrs,
    limits: LaneLimits,
    sends: List,
    recvs: List,
    flushed: List,
    records: u32,
    /// Operations at the tail of the send queue that no signaled one follows.
    unsignaled_tail: u32,
    cause: Option<Arc<Cause>>,
    /// Set by the first failed completion of the send queue. True if the peer refused it in such a
    /// way that nothing behind it can have been executed.
    refused: Option<bool>,
    detached: bool,
    tally: Tally,
}

impl Lane {
    #[inline]
    fn queue(&mut self, kind: OpKind) -> &mut List {
        if kind.is_receive() {
            &mut self.recvs
        } else {
            &mut self.sends
        }
    }

    /// Ends a record with success: counts it, and keeps it for its ticket holder, or gives its ending
    /// back if there is none.
    #[inline(always)]
    fn end_well<B>(
        &mut self,
        slots: &mut [Slot<B>],
        slot: u32,
        mut success: Success,
        wakers: &mut Vec<Waker>,
    ) -> Option<Ending> {
        let record = &slots[slot as usize];
        let kind = record.kind;
        if !kind.is_receive() {
            success.byte_len = record.len;
        }
        self.tally.succeeded[kind as usize] += 1;
        let bytes = if kind.is_receive() || kind.is_fetching() {
            &mut self.tally.bytes_in
        } else {
            &mut self.tally.bytes_out
        };
        *bytes += u64::from(success.byte_len);
        self.unlink(slots, kind, slot);
        let record = &mut slots[slot as usize];
        if record.claim != Claim::Ticket {
            return Some(Ending::Success(success));
        }
        record.state = State::Done(Ok(success));
        if let Some(waker) = record.waker.take() {
            wakers.push(waker);
        }
        None
    }

    /// Takes a posted record of that kind out of its queue.
    #[inline]
    fn unlink<B>(&mut self, slots: &mut [Slot<B>], kind: OpKind, slot: u32) {
        remove(slots, self.queue(kind), slot);
        if !kind.is_receive() {
            self.unsignaled_tail = self.unsignaled_tail.min(self.sends.len);
        }
    }
}

/// The completion queue cannot take another lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overcommitted {
    pub(crate) asked: u32,
    pub(crate) free: u32,
}

impl<B: Default> Tracker<B> {
    /// A tracker for a completion queue that can hold `cq_capacity` entries.
    pub(crate) fn new(cq_capacity: u32) -> Tracker<B> {
        Tracker {
            slots: Vec::new(),
            free: NONE,
            lanes: slab::Slab::new(),
            cq_capacity,
            cq_reserved: 0,
            records_reserved: 0,
            stale: 0,
            past: Tally::default(),
        }
    }

    /// Makes a lane for `owner`, and all the records it needs if results are fetched in time.
    ///
    /// Each operation can put one entry into the completion queue, the unsignaled ones too when they
    /// fail, so a place for each is reserved and the queue cannot overrun (I7).
    pub(crate) fn attach(
        &mut self,
        owner: u32,
        limits: LaneLimits,
    ) -> Result<LaneId, Overcommitted> {
        let asked = completions(&limits);
        let free = self.cq_capacity - self.cq_reserved;
        if asked > free {
            return Err(Overcommitted { asked, free });
        }
        self.cq_reserved += asked;
        self.records_reserved += limits.records as usize;
        let missing = self.records_reserved.saturating_sub(self.slots.len());
        grow(&mut self.slots, &mut self.free, missing);
        let lane = self.lanes.insert(Lane {
            owner,
            qp_num: 0,
            addrs: Addrs::default(),
            limits,
            sends: EMPTY,
            recvs: EMPTY,
            flushed: EMPTY,
            records: 0,
            unsignaled_tail: 0,
            cause: None,
            refused: None,
            detached: false,
            tally: Tally::default(),
        });
        Ok(LaneId(lane as u32))
    }

    /// Tells the lane which queue pair it has.
    pub(crate) fn bind(&mut self, lane: LaneId, qp_num: u32, addrs: Addrs) {
        let lane = self.lane_mut(lane);
        lane.qp_num = qp_num;
        lane.addrs = addrs;
    }

    /// Gives the lane's reservations back. Its queue pair is destroyed, the completion queue was
    /// polled until empty, and [`Tracker::drain`] was called. Results nobody fetched stay.
    pub(crate) fn detach(&mut self, lane: LaneId) {
        let state = &mut self.lanes[lane.0 as usize];
        debug_assert_eq!(state.sends.len + state.recvs.len + state.flushed.len, 0);
        if state.detached {
            return;
        }
        state.detached = true;
        self.cq_reserved -= completions(&state.limits);
        self.reap_lane(lane.0);
    }

    /// Starts to track an operation, which takes over what `buf` gives; its id goes into the work
    /// request.
    ///
    /// Must come before the post: its completion can be polled before the post returns. On failure
    /// nothing changed and `buf` was not asked.
    #[inline]
    pub(crate) fn begin(
        &mut self,
        lane: LaneId,
        what: Begin,
        buf: impl FnOnce() -> B,
    ) -> Result<WrId, Full> {
        let index = lane.0;
        let lane = &mut self.lanes[index as usize];
        let depth = match what.kind {
            OpKind::Receive => lane.limits.recv_depth,
            OpKind::Probe => lane.limits.send_depth + 1,
            _ => lane.limits.send_depth,
        };
        if lane.queue(what.kind).len >= depth {
            lane.tally.queue_full += 1;
            return Err(Full(queue_of(what.kind), depth));
        }
        lane.records += 1;
        lane.tally.posted[what.kind as usize] += 1;
        lane.tally.doorbells += u64::from(what.rings);
        if !what.kind.is_receive() {
            lane.unsignaled_tail = if what.signaled {
                0
            } else {
                lane.unsignaled_tail + 1
            };
        }
        if self.free == NONE {
            grow(&mut self.slots, &mut self.free, 1);
        }
        let slots = &mut *self.slots;
        let slot = self.free;
        self.free = slots[slot as usize].next;
        append(slots, lane.queue(what.kind), slot);
        let entry = &mut slots[slot as usize];
        entry.lane = index;
        entry.len = what.len;
        entry.kind = what.kind;
        entry.claim = what.claim;
        entry.signaled = what.signaled;
        entry.state = State::Posted;
        entry.buf = buf();
        Ok(WrId::new(slot, entry.generation))
    }

    /// Whether the next operation of the lane's send queue has to be signaled, whatever the user
    /// would like, for the queue's slots to come back in time.
    #[inline]
    pub(crate) fn must_signal(&self, lane: LaneId) -> bool {
        let lane = &self.lanes[lane.0 as usize];
        lane.unsignaled_tail >= lane.limits.max_unsignaled
    }

    /// Operations at the tail of the send queue that no signaled one follows, so that nobody would
    /// hear of their success.
    pub(crate) fn unsignaled_tail(&self, lane: LaneId) -> u32 {
        self.lanes[lane.0 as usize].unsignaled_tail
    }

    /// Takes back an operation whose post was refused. Of a chain, exactly the unposted tail is to be
    /// aborted, the last one first.
    pub(crate) fn abort(&mut self, id: WrId) -> Option<B> {
        let record = in_flight(&mut self.slots, id)?;
        let (lane, kind) = (record.lane, record.kind);
        record.waker = None;
        self.unlink(id.slot());
        let buf = self.free_slot(id.slot());
        let lane = &mut self.lanes[lane as usize];
        lane.tally.posted[kind as usize] -= 1;
        if !kind.is_receive() {
            lane.unsignaled_tail = unsignaled_before(&self.slots, lane.sends.tail);
        }
        Some(buf)
    }

    /// Handles one completion. Wakers of those who can go on are pushed to `wakers`, to be woken once
    /// no lock is held any more.
    #[inline(always)] // what a caller knows of `ending` is left out, and `Matched` is never in memory
    pub(crate) fn complete(
        &mut self,
        wr_id: u64,
        qp_num: u32,
        ending: Ending,
        wakers: &mut Vec<Waker>,
    ) -> Matched<B> {
        let Some(id) = WrId::from_raw(wr_id) else {
            return self.ignore();
        };
        let (slots, slot) = (&mut *self.slots, id.slot());
        let Some(record) = in_flight(slots, id) else {
            return self.ignore();
        };
        let lane = &mut self.lanes[record.lane as usize];
        if lane.qp_num != qp_num {
            return self.ignore();
        }
        let Ending::Success(success) = ending else {
            return self.end_badly(slot, ending, wakers);
        };
        if !record.kind.is_receive() && lane.sends.head != slot {
            return self.end_well_behind_others(slot, success, wakers);
        }
        let owner = lane.owner;
        match lane.end_well(slots, slot, success, wakers) {
            None => Matched::Kept {
                owner,
                news: News::Fine,
            },
            Some(ending) => self.release(slot, owner, News::Fine, ending),
        }
    }

    /// Sets why the lane ended, unless that is known already, and so ends its flushed operations.
    pub(crate) fn set_cause(
        &mut self,
        lane: LaneId,
        cause: impl FnOnce() -> Cause,
        wakers: &mut Vec<Waker>,
    ) -> Arc<Cause> {
        let state = &mut self.lanes[lane.0 as usize];
        let cause = Arc::clone(state.cause.get_or_insert_with(|| Arc::new(cause())));
        self.settle(lane.0, &cause, wakers);
        cause
    }

    /// Why the lane ended, if it did.
    pub(crate) fn cause(&self, lane: LaneId) -> Option<&Arc<Cause>> {
        self.lanes[lane.0 as usize].cause.as_ref()
    }

    /// Ends everything that is still in flight as if it had been flushed, the cause being set before.
    ///
    /// Only when the NIC cannot touch the buffers any more: the queue pair is destroyed. Buffers of
    /// the inbox, and of those nobody waits for, are handed to `release`.
    pub(crate) fn drain(
        &mut self,
        lane: LaneId,
        wakers: &mut Vec<Waker>,
        mut release: impl FnMut(B),
    ) -> u32 {
        debug_assert!(self.cause(lane).is_some(), "drained without a cause");
        let mut count = 0;
        loop {
            let state = &self.lanes[lane.0 as usize];
            let slot = if state.sends.len > 0 {
                state.sends.head
            } else {
                state.recvs.head
            };
            if slot == NONE {
                return count;
            }
            count += 1;
            if let Matched::Inbox { buf, .. } = self.flush(slot, wakers) {
                release(buf);
            }
        }
    }

    /// Visits the buffers of everything that is in flight.
    pub(crate) fn for_each_in_flight(&mut self, lane: LaneId, mut visit: impl FnMut(&mut B)) {
        let Lane { sends, recvs, .. } = &self.lanes[lane.0 as usize];
        for mut slot in [sends.head, recvs.head] {
            while slot != NONE {
                visit(&mut self.slots[slot as usize].buf);
                slot = self.slots[slot as usize].next;
            }
        }
    }

    /// Whether the result of an operation can be had.
    #[inline]
    pub(crate) fn has_ended(&self, id: WrId) -> bool {
        self.slots.get(id.slot() as usize).is_some_and(|slot| {
            slot.generation == id.generation() && matches!(slot.state, State::Done(_))
        })
    }

    /// The result of an operation, if it has ended. It can be had once: the record is gone then.
    #[inline(always)]
    pub(crate) fn take(&mut self, id: WrId) -> Option<Finished<B>> {
        let record = self.record(id)?;
        let result = match &mut record.state {
            State::Done(Ok(success)) => Ok(*success),
            State::Done(Err(failed)) => Err(failed.clone()),
            _ => return None,
        };
        let kind = record.kind;
        let buf = self.free_slot(id.slot());
        Some(Finished { kind, buf, result })
    }

    /// Has `waker` woken when the operation ends, in place of the one before, which comes back: a
    /// waker is foreign code, so it is cloned and dropped where no lock is held.
    pub(crate) fn wake_on_end(&mut self, id: WrId, waker: Waker) -> Option<Waker> {
        match self.record(id) {
            Some(record) if !matches!(record.state, State::Done(_)) => record.waker.replace(waker),
            _ => Some(waker),
        }
    }

    /// Takes the waker back.
    pub(crate) fn unwake(&mut self, id: WrId) -> Option<Waker> {
        self.record(id)?.waker.take()
    }

    /// Nobody waits for the operation any more. If it is in flight, its record keeps the buffer until
    /// the completion; a result that is there is thrown away, and its buffer returned.
    pub(crate) fn forget(&mut self, id: WrId) -> Forgotten<B> {
        let Some(record) = self.record(id) else {
            return Forgotten {
                buf: None,
                waker: None,
            };
        };
        let lane = record.lane;
        let waker = record.waker.take();
        let buf = match record.state {
            State::Posted => {
                record.claim = Claim::Nobody;
                None
            }
            State::Flushed { .. } => {
                let flushed = &mut self.lanes[lane as usize].flushed;
                remove(&mut self.slots, flushed, id.slot());
                Some(self.free_slot(id.slot()))
            }
            State::Done(_) => Some(self.free_slot(id.slot())),
            State::Free => None,
        };
        Forgotten { buf, waker }
    }

    /// Operations of the lane that the NIC may still work on: of the send and the receive queue.
    #[inline]
    pub(crate) fn in_flight(&self, lane: LaneId) -> (u32, u32) {
        let lane = &self.lanes[lane.0 as usize];
        (lane.sends.len, lane.recvs.len)
    }

    /// How many operations the send queue takes now.
    #[inline]
    pub(crate) fn send_capacity(&self, lane: LaneId) -> u32 {
        let lane = &self.lanes[lane.0 as usize];
        lane.limits.send_depth.saturating_sub(lane.sends.len)
    }

    /// What the lane may use.
    pub(crate) fn limits(&self, lane: LaneId) -> &LaneLimits {
        &self.lanes[lane.0 as usize].limits
    }

    /// Completions that matched nothing.
    pub(crate) fn stale(&self) -> u64 {
        self.stale
    }

    /// The counters of a lane.
    pub(crate) fn tally(&self, lane: LaneId) -> &Tally {
        &self.lanes[lane.0 as usize].tally
    }

    /// The counters of all lanes, the ones that are gone included.
    pub(crate) fn total(&self) -> Tally {
        let mut total = self.past;
        self.lanes
            .iter()
            .for_each(|(_, lane)| total.add(&lane.tally));
        total
    }

    /// Records that were made beforehand for the lanes that are there.
    pub(crate) fn records_reserved(&self) -> usize {
        self.records_reserved
    }

    /// Records in use, the ended ones that nobody has fetched included.
    pub(crate) fn records(&self) -> usize {
        self.lanes
            .iter()
            .map(|(_, lane)| lane.records as usize)
            .sum()
    }
}

/// How a completion is handled, once its record was found.
impl<B: Default> Tracker<B> {
    #[cold]
    fn ignore(&mut self) -> Matched<B> {
        self.stale += 1;
        Matched::Stale
    }

    /// As [`complete`](Self::complete), of one that is not the oldest of its queue.
    fn end_well_behind_others(
        &mut self,
        slot: u32,
        success: Success,
        wakers: &mut Vec<Waker>,
    ) -> Matched<B> {
        let index = self.slots[slot as usize].lane;
        self.retire_unsignaled_before(slot, index, wakers);
        let lane = &mut self.lanes[index as usize];
        let owner = lane.owner;
        match lane.end_well(&mut self.slots, slot, success, wakers) {
            None => Matched::Kept {
                owner,
                news: News::Fine,
            },
            Some(ending) => self.release(slot, owner, News::Fine, ending),
        }
    }

    #[cold]
    fn end_badly(&mut self, slot: u32, ending: Ending, wakers: &mut Vec<Waker>) -> Matched<B> {
        match ending {
            Ending::Failed { status, vendor_err } => self.fail(slot, status, vendor_err, wakers),
            Ending::Flushed | Ending::Success(_) => self.flush(slot, wakers),
        }
    }

    /// Completions of one send queue come in order, so the success of `slot` is the success of all
    /// unsignaled operations before it, and its failure as well: one of them that failed would have
    /// had its completion first. Signaled ones keep waiting for their own completion.
    fn retire_unsignaled_before(&mut self, slot: u32, lane: u32, wakers: &mut Vec<Waker>) {
        let mut cursor = self.lanes[lane as usize].sends.head;
        while cursor != slot && cursor != NONE {
            let lane = &mut self.lanes[lane as usize];
            let Slot { next, signaled, .. } = self.slots[cursor as usize];
            if !signaled
                && lane
                    .end_well(&mut self.slots, cursor, Success::default(), wakers)
                    .is_some()
            {
                self.free_slot(cursor);
            }
            cursor = next;
        }
    }

    #[cold]
    fn fail(
        &mut self,
        slot: u32,
        status: WcStatus,
        vendor_err: u32,
        wakers: &mut Vec<Waker>,
    ) -> Matched<B> {
        let Slot {
            kind, lane: index, ..
        } = self.slots[slot as usize];
        let refused = refused_by_peer(status);
        if !kind.is_receive() {
            self.first_failure_of_send_queue(slot, index, refused && !kind.is_fetching(), wakers);
        }
        let lane = &mut self.lanes[index as usize];
        lane.tally.failed[kind as usize] += 1;
        let failure = Failure {
            op: kind,
            status,
            vendor_err,
            qp_num: lane.qp_num,
            addrs: lane.addrs,
        };
        let cause = Arc::new(Cause::Operation(failure));
        let first = lane.cause.is_none();
        if first {
            lane.cause = Some(Arc::clone(&cause));
            self.settle(index, &cause, wakers);
        }
        let outcome = if unanswered(kind, status) {
            Outcome::Unknown
        } else {
            Outcome::Failed
        };
        self.unlink(slot);
        let news = if first {
            News::FirstFailure
        } else {
            News::Broken
        };
        self.end(
            slot,
            Failed { outcome, cause },
            news,
            Ending::Failed { status, vendor_err },
            wakers,
        )
    }

    #[cold]
    fn flush(&mut self, slot: u32, wakers: &mut Vec<Waker>) -> Matched<B> {
        let Slot {
            kind,
            lane: index,
            claim,
            ..
        } = self.slots[slot as usize];
        if !kind.is_receive() {
            self.first_failure_of_send_queue(slot, index, false, wakers);
        }
        self.unlink(slot);
        let lane = &mut self.lanes[index as usize];
        lane.tally.flushed[kind as usize] += 1;
        let refused_ahead = !kind.is_receive() && lane.refused == Some(true);
        match lane.cause.clone() {
            Some(cause) => {
                let outcome = flushed_outcome(kind, refused_ahead, &cause);
                let failed = Failed { outcome, cause };
                self.end(slot, failed, News::Broken, Ending::Flushed, wakers)
            }
            None if claim == Claim::Ticket => {
                append(&mut self.slots, &mut lane.flushed, slot);
                let owner = lane.owner;
                self.slots[slot as usize].state = State::Flushed { refused_ahead };
                Matched::Kept {
                    owner,
                    news: News::Broken,
                }
            }
            None => {
                let owner = lane.owner;
                self.release(slot, owner, News::Broken, Ending::Flushed)
            }
        }
    }

    fn first_failure_of_send_queue(
        &mut self,
        slot: u32,
        lane: u32,
        refused: bool,
        wakers: &mut Vec<Waker>,
    ) {
        if self.lanes[lane as usize].refused.is_none() {
            self.lanes[lane as usize].refused = Some(refused);
            self.retire_unsignaled_before(slot, lane, wakers);
        }
    }

    /// Gives an unlinked record its failure and wakes who waits for it, or lets it go.
    fn end(
        &mut self,
        slot: u32,
        failed: Failed,
        news: News,
        ending: Ending,
        wakers: &mut Vec<Waker>,
    ) -> Matched<B> {
        let record = &mut self.slots[slot as usize];
        let owner = self.lanes[record.lane as usize].owner;
        if record.claim != Claim::Ticket {
            return self.release(slot, owner, news, ending);
        }
        record.state = State::Done(Err(failed));
        wakers.extend(record.waker.take());
        Matched::Kept { owner, news }
    }

    /// Lets an unlinked record go that no ticket holder will ask for.
    #[inline(always)]
    fn release(&mut self, slot: u32, owner: u32, news: News, ending: Ending) -> Matched<B> {
        let claim = self.slots[slot as usize].claim;
        let buf = self.free_slot(slot);
        match claim {
            Claim::Inbox => Matched::Inbox {
                owner,
                news,
                buf,
                ending,
            },
            Claim::Ticket | Claim::Nobody => Matched::Kept { owner, news },
        }
    }

    /// Ends the flushed records of a lane, now that the cause is known.
    fn settle(&mut self, lane: u32, cause: &Arc<Cause>, wakers: &mut Vec<Waker>) {
        loop {
            let slot = self.lanes[lane as usize].flushed.head;
            if slot == NONE {
                return;
            }
            remove(
                &mut self.slots,
                &mut self.lanes[lane as usize].flushed,
                slot,
            );
            let record = &mut self.slots[slot as usize];
            let refused_ahead = matches!(
                record.state,
                State::Flushed {
                    refused_ahead: true
                }
            );
            let outcome = flushed_outcome(record.kind, refused_ahead, cause);
            record.state = State::Done(Err(Failed {
                outcome,
                cause: Arc::clone(cause),
            }));
            wakers.extend(record.waker.take());
        }
    }
}

/// Slots and lists.
impl<B: Default> Tracker<B> {
    fn lane_mut(&mut self, lane: LaneId) -> &mut Lane {
        &mut self.lanes[lane.0 as usize]
    }

    /// The record that the id means, if it is still there.
    #[inline]
    fn record(&mut self, id: WrId) -> Option<&mut Slot<B>> {
        let slot = self.slots.get_mut(id.slot() as usize)?;
        let is_there = slot.generation == id.generation() && !matches!(slot.state, State::Free);
        is_there.then_some(slot)
    }

    /// Takes a posted record out of its queue.
    fn unlink(&mut self, slot: u32) {
        let Slot { kind, lane, .. } = self.slots[slot as usize];
        self.lanes[lane as usize].unlink(&mut self.slots, kind, slot);
    }

    /// Empties the slot of an unlinked record, and gives its buffer; from here on its id means nothing (I2).
    #[inline(always)]
    fn free_slot(&mut self, slot: u32) -> B {
        let entry = &mut self.slots[slot as usize];
        debug_assert!(!matches!(entry.state, State::Free), "freed twice");
        debug_assert!(entry.waker.is_none(), "nobody waits for what has ended");
        let buf = mem::take(&mut entry.buf);
        entry.state = State::Free;
        entry.generation = entry.generation.wrapping_add(1);
        entry.next = self.free;
        self.free = slot;
        let index = entry.lane;
        let lane = &mut self.lanes[index as usize];
        lane.records -= 1;
        if lane.detached {
            self.reap_lane(index);
        }
        buf
    }

    /// Removes a detached lane once nobody can ask for its results any more.
    fn reap_lane(&mut self, lane: u32) {
        if self.lanes[lane as usize].records == 0 {
            let gone = self.lanes.remove(lane as usize);
            self.records_reserved -= gone.limits.records as usize;
            self.past.add(&gone.tally);
        }
    }
}

/// Makes `count` more slots, which are free.
#[cold]
fn grow<B: Default>(slots: &mut Vec<Slot<B>>, free: &mut u32, count: usize) {
    for _ in 0..count {
        let slot = slots.len() as u32;
        slots.push(Slot {
            generation: 0,
            prev: NONE,
            next: *free,
            lane: 0,
            len: 0,
            kind: OpKind::Probe,
            claim: Claim::Nobody,
            signaled: false,
            state: State::Free,
            buf: B::default(),
            waker: None,
        });
        *free = slot;
    }
}

/// The record that the id means, if it is in flight.
#[inline]
fn in_flight<B>(slots: &mut [Slot<B>], id: WrId) -> Option<&mut Slot<B>> {
    let slot = slots.get_mut(id.slot() as usize)?;
    let is_posted = slot.generation == id.generation() && matches!(slot.state, State::Posted);
    is_posted.then_some(slot)
}

#[inline]
fn append<B>(slots: &mut [Slot<B>], list: &mut List, slot: u32) {
    slots[slot as usize].prev = list.tail;
    slots[slot as usize].next = NONE;
    match list.tail {
        NONE => list.head = slot,
        tail => slots[tail as usize].next = slot,
    }
    list.tail = slot;
    list.len += 1;
}

#[inline]
fn remove<B>(slots: &mut [Slot<B>], list: &mut List, slot: u32) {
    let Slot { prev, next, .. } = slots[slot as usize];
    match prev {
        NONE => list.head = next,
        prev => slots[prev as usize].next = next,
    }
    match next {
        NONE => list.tail = prev,
        next => slots[next as usize].prev = prev,
    }
    list.len -= 1;
}

/// How many unsignaled operations there are from `slot` on backwards.
fn unsignaled_before<B>(slots: &[Slot<B>], mut slot: u32) -> u32 {
    let mut count = 0;
    while slot != NONE && !slots[slot as usize].signaled {
        count += 1;
        slot = slots[slot as usize].prev;
    }
    count
}

/// Entries that a lane's operations can put into the completion queue.
fn completions(limits: &LaneLimits) -> u32 {
    limits
        .send_depth
        .saturating_add(limits.recv_depth)
        .saturating_add(1)
}

fn queue_of(kind: OpKind) -> Queue {
    if kind.is_receive() {
        Queue::Receive
    } else {
        Queue::Send
    }
}

/// The outcome of a flushed operation; the rules are those of [`Outcome`].
fn flushed_outcome(kind: OpKind, refused_ahead: bool, cause: &Cause) -> Outcome {
    match (kind.is_receive(), cause) {
        (true, Cause::ClosedLocally) => Outcome::Cancelled,
        (true, _) => Outcome::NotSent,
        (false, _) if refused_ahead => Outcome::NotSent,
        (false, _) => Outcome::Unknown,
    }
}

/// The peer looked at the request and refused it. Its responder goes no further then: requests are
/// executed strictly in order.
fn refused_by_peer(status: WcStatus) -> bool {
    matches!(
        status,
        WcStatus::RemAccessErr
            | WcStatus::RemInvReqErr
            | WcStatus::RemOpErr
            | WcStatus::RnrRetryExcErr
    )
}

/// The peer never answered, or in a way that does not tell what it did.
fn unanswered(kind: OpKind, status: WcStatus) -> bool {
    match status {
        WcStatus::RetryExcErr | WcStatus::RespTimeoutErr => true,
        WcStatus::BadRespErr
        | WcStatus::RemAbortErr
        | WcStatus::FatalErr
        | WcStatus::GeneralErr => !kind.is_receive(),
        // The error can be one of taking the answer in.
        _ => kind.is_atomic() && !refused_by_peer(status),
    }
}

#[cfg(test)]
mod tests;
