//! Posting: the one place where work requests are handed to the NIC.
//!
//! `rdma-core-rs` posts under a contract of two lines: the memory lies in a live region of the queue
//! pair's protection domain, and until the completion (or the queue pair's destruction) it is neither
//! freed nor touched. Here the contract is kept by *construction*: the addresses are taken from
//! buffers that move into the tracker before the post, and the tracker gives a buffer out only after
//! its completion was polled, or after the queue pair was destroyed (I1).

#![allow(unsafe_code)] // discharges the posting contract of rdma-core-rs

use std::mem::{self, MaybeUninit};
use std::slice;

use rdma_core_rs::{PostListError, ProtectionDomain, QueuePair, RecvWr, RemoteRegion, SendWr, Sge};

use crate::config::MAX_SGE;
use crate::error::{OpKind, PostErrorKind};
use crate::op::Payload;
use crate::pool::Buf;
use crate::tracker::{Begin, Claim, Full, LaneId, Tracker};
use crate::wr_id::WrId;

/// What to do with the payload.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Send,
    SendImm(u32),
    Write(RemoteRegion),
    WriteImm(RemoteRegion, u32),
    Read(RemoteRegion),
    CompareSwap {
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        remote: RemoteRegion,
        add: u64,
    },
    /// A write of nothing to nowhere, which only asks for an acknowledgement.
    Probe,
}

impl Verb {
    #[inline]
    pub(crate) fn kind(&self) -> OpKind {
        match self {
            Verb::Send => OpKind::Send,
            Verb::SendImm(_) => OpKind::SendImm,
            Verb::Write(_) => OpKind::Write,
            Verb::WriteImm(..) => OpKind::WriteImm,
            Verb::Read(_) => OpKind::Read,
            Verb::CompareSwap { .. } => OpKind::CompareSwap,
            Verb::FetchAdd { .. } => OpKind::FetchAdd,
            Verb::Probe => OpKind::Probe,
        }
    }

    #[inline]
    fn request<'a>(&self, id: WrId, sges: &'a [Sge], flags: Flags) -> SendWr<'a> {
        let id = id.raw();
        let wr = match *self {
            Verb::Send => SendWr::send(id, sges),
            Verb::SendImm(imm) => SendWr::send_with_imm(id, sges, imm),
            Verb::Write(remote) => SendWr::write(id, sges, remote),
            Verb::WriteImm(remote, imm) => SendWr::write_with_imm(id, sges, remote, imm),
            Verb::Read(remote) => SendWr::read(id, sges, remote),
            Verb::CompareSwap {
                remote,
                compare,
                swap,
            } => SendWr::compare_swap(id, &sges[0], remote, compare, swap),
            Verb::FetchAdd { remote, add } => SendWr::fetch_add(id, &sges[0], remote, add),
            Verb::Probe => SendWr::write(id, &[], RemoteRegion::new(0, 0, 0)),
        };
        wr.signaled(flags.signaled)
            .fence(flags.fence)
            .solicited(flags.solicited)
            .inline(inline(self, flags))
    }
}

/// How to do it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flags {
    pub(crate) fence: bool,
    pub(crate) solicited: bool,
    pub(crate) inline: bool,
    pub(crate) signaled: bool,
}

/// One operation of a batch, checked and ready to be posted.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    pub(crate) flags: Flags,
    /// One buffer at most; none once it is posted.
    pub(crate) payload: Payload,
}

/// The parts of a worker and an endpoint that posting needs.
pub(crate) struct Poster<'a> {
    pub(crate) tracker: &'a mut Tracker<Payload>,
    pub(crate) lane: LaneId,
    pub(crate) qp: &'a mut QueuePair,
    pub(crate) pd: &'a ProtectionDomain,
}

/// What a post came to.
#[derive(Debug)]
pub(crate) enum Posted {
    Yes(WrId),
    /// The driver did not say whether it left the request out. It counts as posted, so that its
    /// buffer stays untouched, and the queue pair has to be broken, so that it ends.
    Perhaps(WrId),
}

impl Poster<'_> {
    /// Posts one request. The payload is taken from its place only if it is accepted, so that nothing
    /// is moved about on the way; if it is refused, nothing has changed. `data` are bytes that are
    /// copied into the work request, instead of a payload.
    #[inline]
    pub(crate) fn send(
        &mut self,
        verb: Verb,
        flags: Flags,
        payload: &mut Payload,
        data: Option<&[u8]>,
        claim: Claim,
    ) -> Result<Posted, PostErrorKind> {
        let (one, mut many);
        let sges = match (&*payload, data) {
            (Payload::One(buf), _) => {
                one = self.element(buf)?;
                used(&one)
            }
            (Payload::Many(bufs), _) => {
                many = [Sge::unregistered(&[]); MAX_SGE as usize];
                self.elements(bufs, &mut many)?
            }
            (Payload::None, Some(data)) => {
                one = self.inline_element(data)?;
                used(&one)
            }
            (Payload::None, None) => &[],
        };
        let what = Begin {
            kind: verb.kind(),
            claim,
            len: total(sges),
            signaled: flags.signaled,
            rings: true,
        };
        let id = self.tracker.begin(self.lane, what, || mem::take(payload))?;
        let flags = Flags {
            inline: data.is_some() || flags.inline,
            ..flags
        };
        let mut wr = verb.request(id, sges, flags);
        // SAFETY: the elements were cut from buffers that lie in regions of this queue pair's domain
        // (checked in `element`) and belong to the tracker's record since `begin`, which lets them go
        // only on the completion of `id` or after the queue pair's destruction (I1). Bytes from
        // `data` are only posted with the inline flag, and are borrowed until this call returns.
        match unsafe { self.qp.post_send(&mut wr) } {
            Ok(()) => Ok(Posted::Yes(id)),
            Err(error) if error.may_be_posted() => Ok(Posted::Perhaps(id)),
            Err(error) => {
                *payload = self.take_back(id);
                Err(PostErrorKind::Verbs(error))
            }
        }
    }

    /// Posts one receive, for the whole capacity of its buffers; otherwise as [`send`](Self::send).
    #[inline]
    pub(crate) fn recv(
        &mut self,
        payload: &mut Payload,
        claim: Claim,
    ) -> Result<Posted, PostErrorKind> {
        let Payload::One(buf) = &*payload else {
            return Err(PostErrorKind::NoBuffer);
        };
        self.check_domain(buf)?;
        let sge = buf.slice().sge();
        let sges = used(&sge);
        let what = Begin {
            kind: OpKind::Receive,
            claim,
            len: sge.len(),
            signaled: true,
            rings: false,
        };
        let id = self.tracker.begin(self.lane, what, || mem::take(payload))?;
        let mut wr = RecvWr::new(id.raw(), sges);
        // SAFETY: as in `send`: the element was cut from a buffer of this domain that the tracker's
        // record owns until the completion or the queue pair's destruction (I1).
        match unsafe { self.qp.post_recv(&mut wr) } {
            Ok(()) => Ok(Posted::Yes(id)),
            Err(error) if error.may_be_posted() => Ok(Posted::Perhaps(id)),
            Err(error) => {
                *payload = self.take_back(id);
                Err(PostErrorKind::Verbs(error))
            }
        }
    }

    /// Posts up to [`CHAIN`] requests with one doorbell. The ids of those that were posted, the first
    /// ones, are pushed to `ids`; the others keep their payloads.
    pub(crate) fn send_chain(&mut self, requests: &mut [Request], ids: &mut Vec<WrId>) -> Chained {
        debug_assert!(requests.len() <= CHAIN);
        let before = ids.len();
        let mut sges = [Sge::unregistered(&[]); CHAIN];
        let mut room = [const { MaybeUninit::<SendWr<'_>>::uninit() }; CHAIN];
        let mut stopped = None;
        for ((request, sge), wr) in requests.iter_mut().zip(&mut sges).zip(&mut room) {
            let rings = ids.len() == before;
            match self.begin_one(request, sge, wr, rings) {
                Ok(id) => ids.push(id),
                Err(kind) => {
                    stopped = Some(kind);
                    break;
                }
            }
        }
        let begun = ids.len() - before;
        // SAFETY: the first `begun` elements were written by `begin_one`, one for each id.
        let wrs = unsafe { slice::from_raw_parts_mut(room.as_mut_ptr().cast(), begun) };
        // SAFETY: each element was cut from a buffer of this domain that its record owns since
        // `begin_one`, until its completion or the queue pair's destruction (I1).
        let mut chained = match unsafe { self.qp.post_send_list(wrs) } {
            Ok(()) => Chained::all(begun),
            Err(error) => Chained::some(begun, error),
        };
        // The unposted tail is taken back, the last one first.
        let tail = ids.drain(before + chained.posted..);
        for (id, request) in tail.zip(&mut requests[chained.posted..begun]).rev() {
            request.payload = self.take_back(id);
        }
        chained.error = chained.error.or(stopped);
        chained
    }

    /// Begins one of a chain, and writes its element and its work request.
    #[inline]
    fn begin_one<'s>(
        &mut self,
        request: &mut Request,
        sge: &'s mut Sge,
        wr: &mut MaybeUninit<SendWr<'s>>,
        rings: bool,
    ) -> Result<WrId, PostErrorKind> {
        let Request {
            verb,
            flags,
            payload,
        } = request;
        if let Payload::One(buf) = payload {
            *sge = self.element(buf)?;
        }
        let sges = used(sge);
        flags.signaled |= self.tracker.must_signal(self.lane);
        let what = Begin {
            kind: verb.kind(),
            claim: Claim::Ticket,
            len: sge.len(),
            signaled: flags.signaled,
            rings,
        };
        let id = self.tracker.begin(self.lane, what, || mem::take(payload))?;
        wr.write(verb.request(id, sges, *flags));
        Ok(id)
    }

    /// The element of a buffer.
    #[inline]
    fn element(&self, buf: &Buf) -> Result<Sge, PostErrorKind> {
        self.check_domain(buf)?;
        buf.slice().sge_range(..buf.len()).map_err(too_long)
    }

    #[inline]
    fn inline_element(&self, data: &[u8]) -> Result<Sge, PostErrorKind> {
        let limit = self.qp.caps().max_inline_data;
        if data.len() > limit as usize {
            let len = data.len() as u64;
            return Err(PostErrorKind::TooLong {
                len,
                limit: limit.into(),
                what: INLINE_LIMIT,
            });
        }
        Ok(Sge::unregistered(data))
    }

    /// The elements of an operation with several buffers, at most [`MAX_SGE`].
    #[inline(never)]
    fn elements<'s>(
        &self,
        bufs: &[Buf],
        room: &'s mut [Sge; MAX_SGE as usize],
    ) -> Result<&'s [Sge], PostErrorKind> {
        let mut count = 0;
        for buf in bufs {
            let sge = self.element(buf)?;
            if !used(&sge).is_empty() {
                room[count] = sge;
                count += 1;
            }
        }
        Ok(&room[..count])
    }

    #[inline]
    fn check_domain(&self, buf: &Buf) -> Result<(), PostErrorKind> {
        if buf.is_of(self.pd) {
            Ok(())
        } else {
            Err(PostErrorKind::ForeignBuffer)
        }
    }

    #[cold]
    fn take_back(&mut self, id: WrId) -> Payload {
        self.tracker.abort(id).unwrap_or_default()
    }
}

/// What posting a chain came to.
pub(crate) struct Chained {
    /// How many were posted, or may have been.
    pub(crate) posted: usize,
    /// Why not all.
    pub(crate) error: Option<PostErrorKind>,
    /// As [`Posted::Perhaps`].
    pub(crate) perhaps: bool,
}

impl Chained {
    fn all(count: usize) -> Chained {
        Chained {
            posted: count,
            error: None,
            perhaps: false,
        }
    }

    #[cold]
    fn some(count: usize, error: PostListError) -> Chained {
        if error.source.may_be_posted() {
            let perhaps = true;
            return Chained {
                perhaps,
                ..Chained::all(count)
            };
        }
        Chained {
            error: Some(PostErrorKind::Verbs(error.source)),
            ..Chained::all(error.posted)
        }
    }
}

/// Requests that are posted with one doorbell.
pub(crate) const CHAIN: usize = 32;

/// Bytes of all elements.
#[inline]
fn total(sges: &[Sge]) -> u32 {
    match sges {
        [] => 0,
        [one] => one.len(),
        many => many.iter().map(Sge::len).fold(0, u32::saturating_add),
    }
}

/// An element of no bytes says nothing, and some devices take it for 2^31 of them.
#[inline]
fn used(sge: &Sge) -> &[Sge] {
    &slice::from_ref(sge)[..usize::from(sge.len() > 0)]
}

/// Whether the bytes of the buffer travel in the request. Never those of a read or an atomic: its
/// buffer is where the result goes, and a driver that copied its content into the request instead of
/// its address would have the device write to wherever that content points.
#[inline]
fn inline(verb: &Verb, flags: Flags) -> bool {
    flags.inline && !verb.kind().is_fetching()
}

const INLINE_LIMIT: &str = "the bytes a work request of this endpoint can carry";

#[cold]
fn too_long(range: rdma_core_rs::OutOfRange) -> PostErrorKind {
    let limit = u32::MAX.into();
    PostErrorKind::TooLong {
        len: range.end - range.start,
        limit,
        what: "the length of one element",
    }
}

impl From<Full> for PostErrorKind {
    #[cold]
    fn from(Full(queue, depth): Full) -> PostErrorKind {
        PostErrorKind::QueueFull { queue, depth }
    }
}
