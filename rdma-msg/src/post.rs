//! Posting: the one place where work requests are handed to the NIC.
//!
//! `rdma-core-rs` posts under a contract of two lines: the memory lies in a live region of the queue
//! pair's protection domain, and until the completion (or the queue pair's destruction) it is neither
//! freed nor touched. Here the contract is kept by *construction*: the addresses are taken from
//! buffers that move into the tracker before the post, and the tracker gives a buffer out only after
//! its completion was polled, or after the queue pair was destroyed (I1).

#![allow(unsafe_code)] // discharges the posting contract of rdma-core-rs

use rdma_core_rs::{ProtectionDomain, QueuePair, RecvWr, RemoteRegion, SendWr, Sge};

use crate::config::MAX_SGE;
use crate::error::{OpKind, PostErrorKind};
use crate::op::Payload;
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
    fn request<'a>(&self, id: WrId, sges: &'a [Sge]) -> SendWr<'a> {
        let id = id.raw();
        match *self {
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
        }
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

/// One operation of the send queue, checked and ready to be posted.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) verb: Verb,
    pub(crate) flags: Flags,
    pub(crate) payload: Payload,
    /// Bytes that are copied into the work request, instead of a payload.
    pub(crate) data: Option<&'a [u8]>,
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
    /// Posts one request. If it is refused, nothing has changed and the payload comes back.
    #[inline]
    pub(crate) fn send(
        &mut self,
        request: Request<'_>,
        claim: Claim,
    ) -> Result<Posted, (PostErrorKind, Payload)> {
        let Request {
            verb,
            flags,
            payload,
            data,
        } = request;
        let mut room = empty_sges();
        let sges = match self.sges(&payload, data, &mut room) {
            Ok(sges) => sges,
            Err(kind) => return Err((kind, payload)),
        };
        let what = begin(verb.kind(), claim, sges, flags.signaled);
        let id = match self.tracker.begin(self.lane, what, payload) {
            Ok(id) => id,
            Err((full, payload)) => return Err((full.into(), payload)),
        };
        let mut wr = verb
            .request(id, sges)
            .signaled(flags.signaled)
            .fence(flags.fence)
            .solicited(flags.solicited)
            .inline(flags.inline || data.is_some());
        // SAFETY: the elements were cut from buffers that lie in regions of this queue pair's domain
        // (checked in `sges`) and belong to the tracker's record since `begin`, which lets them go
        // only on the completion of `id` or after the queue pair's destruction (I1). Bytes from
        // `data` are only posted with the inline flag, and are borrowed until this call returns.
        match unsafe { self.qp.post_send(&mut wr) } {
            Ok(()) => Ok(Posted::Yes(id)),
            Err(error) if error.may_be_posted() => Ok(Posted::Perhaps(id)),
            Err(error) => Err((refused(error), self.take_back(id))),
        }
    }

    /// Posts one receive, for the whole capacity of its buffer.
    #[inline]
    pub(crate) fn recv(
        &mut self,
        payload: Payload,
        claim: Claim,
    ) -> Result<Posted, (PostErrorKind, Payload)> {
        let mut room = empty_sges();
        let sges = match self.recv_sges(&payload, &mut room) {
            Ok(sges) => sges,
            Err(kind) => return Err((kind, payload)),
        };
        let what = begin(OpKind::Receive, claim, sges, true);
        let id = match self.tracker.begin(self.lane, what, payload) {
            Ok(id) => id,
            Err((full, payload)) => return Err((full.into(), payload)),
        };
        let mut wr = RecvWr::new(id.raw(), sges);
        // SAFETY: as in `send`: the elements were cut from buffers of this domain that the tracker's
        // record owns until the completion or the queue pair's destruction (I1).
        match unsafe { self.qp.post_recv(&mut wr) } {
            Ok(()) => Ok(Posted::Yes(id)),
            Err(error) if error.may_be_posted() => Ok(Posted::Perhaps(id)),
            Err(error) => Err((refused(error), self.take_back(id))),
        }
    }

    /// Posts up to [`CHAIN`] requests with one doorbell. What was posted is pushed to `ids`; what was
    /// not comes back with the reason, in order.
    pub(crate) fn send_chain(
        &mut self,
        requests: &mut Vec<Request<'static>>,
        ids: &mut Vec<WrId>,
    ) -> Chained {
        debug_assert!(requests.len() <= CHAIN);
        let mut begun: [Option<(WrId, Verb, Flags)>; CHAIN] = [None; CHAIN];
        let mut rooms = [const { None }; CHAIN];
        let mut count = 0;
        let mut stopped = None;
        let mut rest = Vec::new();
        for request in requests.drain(..) {
            if stopped.is_some() {
                rest.push(request);
                continue;
            }
            match self.begin_one(request, &mut rooms[count]) {
                Ok(one) => {
                    begun[count] = Some(one);
                    count += 1;
                }
                Err((kind, request)) => {
                    stopped = Some(kind);
                    rest.push(request);
                }
            }
        }
        *requests = rest;
        let posted = self.post_begun(&begun[..count], &rooms[..count]);
        ids.extend(begun[..posted.count].iter().flatten().map(|(id, ..)| *id));
        // The unposted tail, the last one first; so the buffers are put back in front in order.
        for (id, verb, flags) in begun[posted.count..count].iter().rev().flatten() {
            let payload = self.take_back(*id);
            requests.insert(
                0,
                Request {
                    verb: *verb,
                    flags: *flags,
                    payload,
                    data: None,
                },
            );
        }
        Chained {
            error: posted.error.or(stopped),
            perhaps: posted.perhaps,
        }
    }

    #[allow(clippy::type_complexity)] // what is begun, or what is given back
    fn begin_one(
        &mut self,
        mut request: Request<'static>,
        room: &mut Option<([Sge; MAX_SGE as usize], usize)>,
    ) -> Result<(WrId, Verb, Flags), (PostErrorKind, Request<'static>)> {
        request.flags.signaled |= self.tracker.must_signal(self.lane);
        let mut elements = empty_sges();
        let (what, count) = match self.sges(&request.payload, None, &mut elements) {
            Ok(sges) => (
                begin(
                    request.verb.kind(),
                    Claim::Ticket,
                    sges,
                    request.flags.signaled,
                ),
                sges.len(),
            ),
            Err(kind) => return Err((kind, request)),
        };
        *room = Some((elements, count));
        let Request {
            verb,
            flags,
            payload,
            ..
        } = request;
        match self.tracker.begin(self.lane, what, payload) {
            Ok(id) => Ok((id, verb, flags)),
            Err((full, payload)) => Err((
                full.into(),
                Request {
                    verb,
                    flags,
                    payload,
                    data: None,
                },
            )),
        }
    }

    fn post_begun(
        &mut self,
        begun: &[Option<(WrId, Verb, Flags)>],
        rooms: &[Option<([Sge; MAX_SGE as usize], usize)>],
    ) -> PostedChain {
        let mut wrs: [SendWr<'_>; CHAIN] = std::array::from_fn(|i| {
            let sges = match rooms.get(i) {
                Some(Some((sges, count))) => &sges[..*count],
                _ => &[],
            };
            match begun.get(i) {
                Some(Some((id, verb, flags))) => verb
                    .request(*id, sges)
                    .signaled(flags.signaled)
                    .fence(flags.fence)
                    .solicited(flags.solicited)
                    .inline(flags.inline),
                _ => SendWr::send(0, &[]),
            }
        });
        // SAFETY: each element was cut from a buffer of this domain that its record owns since
        // `begin_one`, until its completion or the queue pair's destruction (I1).
        match unsafe { self.qp.post_send_list(&mut wrs[..begun.len()]) } {
            Ok(()) => PostedChain {
                count: begun.len(),
                error: None,
                perhaps: false,
            },
            Err(error) if error.source.may_be_posted() => PostedChain {
                count: begun.len(),
                error: None,
                perhaps: true,
            },
            Err(error) => {
                let kind = refused(error.source);
                PostedChain {
                    count: error.posted,
                    error: Some(kind),
                    perhaps: false,
                }
            }
        }
    }

    /// The elements of a payload, after a look that each lies in this queue pair's domain.
    #[inline]
    fn sges<'s>(
        &self,
        payload: &Payload,
        data: Option<&[u8]>,
        room: &'s mut [Sge; MAX_SGE as usize],
    ) -> Result<&'s [Sge], PostErrorKind> {
        let mut count = 0;
        if let Some(data) = data.filter(|data| !data.is_empty()) {
            let limit = self.qp.caps().max_inline_data;
            if data.len() > limit as usize {
                let len = data.len() as u64;
                return Err(PostErrorKind::TooLong {
                    len,
                    limit: limit.into(),
                    what: INLINE_LIMIT,
                });
            }
            room[0] = Sge::unregistered(data);
            count = 1;
        }
        for buf in payload.first.iter().chain(&payload.more) {
            if !buf.slice().pd().is_same(self.pd) {
                return Err(PostErrorKind::ForeignBuffer);
            }
            // An element of no bytes says nothing, and some devices take it for 2^31 of them.
            if !buf.is_empty() {
                room[count] = buf.slice().sge_range(..buf.len()).map_err(too_long)?;
                count += 1;
            }
        }
        Ok(&room[..count])
    }

    #[inline]
    fn recv_sges<'s>(
        &self,
        payload: &Payload,
        room: &'s mut [Sge; MAX_SGE as usize],
    ) -> Result<&'s [Sge], PostErrorKind> {
        let mut count = 0;
        for buf in payload.first.iter().chain(&payload.more) {
            if !buf.slice().pd().is_same(self.pd) {
                return Err(PostErrorKind::ForeignBuffer);
            }
            room[count] = buf.slice().sge();
            count += 1;
        }
        Ok(&room[..count])
    }

    fn take_back(&mut self, id: WrId) -> Payload {
        self.tracker.abort(id).unwrap_or_default()
    }
}

/// What posting a chain came to, besides the ids and what is left.
pub(crate) struct Chained {
    /// Why not everything was posted.
    pub(crate) error: Option<PostErrorKind>,
    /// As [`Posted::Perhaps`].
    pub(crate) perhaps: bool,
}

struct PostedChain {
    count: usize,
    error: Option<PostErrorKind>,
    perhaps: bool,
}

/// Requests that are posted with one doorbell.
pub(crate) const CHAIN: usize = 32;

#[inline]
fn begin(kind: OpKind, claim: Claim, sges: &[Sge], signaled: bool) -> Begin {
    let len = sges.iter().map(Sge::len).fold(0, u32::saturating_add);
    Begin {
        kind,
        claim,
        len,
        signaled,
    }
}

#[inline]
fn empty_sges() -> [Sge; MAX_SGE as usize] {
    [Sge::unregistered(&[]); MAX_SGE as usize]
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

#[cold]
fn refused(error: rdma_core_rs::PostError) -> PostErrorKind {
    PostErrorKind::Verbs(error)
}

impl From<Full> for PostErrorKind {
    #[cold]
    fn from(full: Full) -> PostErrorKind {
        match full {
            Full::Queue(queue, depth) => PostErrorKind::QueueFull { queue, depth },
            Full::Records(count) => PostErrorKind::TooManyUnfetched { count },
        }
    }
}
