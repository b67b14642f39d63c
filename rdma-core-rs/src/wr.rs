//! Work requests: what is posted to a queue.
//!
//! Plain values on the stack, laid out as C wants them, so that posting converts nothing.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::slice;

use crate::ah::AddressHandle;
use crate::remote::RemoteRegion;
use crate::sys::{self, ibv_send_flags, ibv_wr_opcode};

/// A scatter/gather element: a piece of registered memory.
///
/// It is only made by slices of regions, so it lies inside one (I9); but it does not keep the
/// region alive.
#[doc(alias = "ibv_sge")]
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Sge(sys::ibv_sge);

impl Sge {
    /// `len` bytes at `ptr`, which must lie in the region with that key.
    #[inline]
    pub(crate) fn new(ptr: NonNull<u8>, len: u32, lkey: u32) -> Sge {
        Sge(sys::ibv_sge {
            addr: ptr.as_ptr().addr() as u64,
            length: len,
            lkey,
        })
    }

    /// Bytes that are not registered, for a request that carries them [inline](SendWr::inline).
    ///
    /// They are read before the post returns. Posted without `inline`, the request fails with
    /// [`WcStatus::LocProtErr`](crate::WcStatus::LocProtErr). At most 2^32 - 1 bytes are covered.
    #[inline]
    pub fn unregistered(data: &[u8]) -> Sge {
        let addr = data.as_ptr().expose_provenance() as u64;
        Sge(sys::ibv_sge {
            addr,
            length: u32::try_from(data.len()).unwrap_or(u32::MAX),
            lkey: 0,
        })
    }

    /// `len` bytes at an address that the device gives a meaning to.
    pub(crate) fn at(addr: u64, len: u32, lkey: u32) -> Sge {
        Sge(sys::ibv_sge {
            addr,
            length: len,
            lkey,
        })
    }

    /// The address of the first byte.
    #[inline]
    pub fn addr(&self) -> u64 {
        self.0.addr
    }

    /// The number of bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // a number to read, not a collection
    pub fn len(&self) -> u32 {
        self.0.length
    }

    /// The local key of the region.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.0.lkey
    }
}

impl fmt::Debug for Sge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sge")
            .field("addr", &format_args!("{:#x}", self.0.addr))
            .field("len", &self.0.length)
            .field("lkey", &self.0.lkey)
            .finish()
    }
}

/// A request for the send queue: a send, a write, a read, an atomic or one of their kin.
///
/// It is signaled unless told otherwise: its completion shows up in the send queue's CQ. (In C the
/// default is unsignaled. A failed request always completes.)
///
/// ```no_run
/// use rdma_core_rs::{QueuePair, RegionSlice, RemoteRegion, SendWr};
///
/// # fn example(qp: &mut QueuePair, slice: RegionSlice, to: RemoteRegion) {
/// let sges = [slice.sge()];
/// let mut wr = SendWr::write(7, &sges, to).fence(true);
/// // SAFETY: the slice lies in a region of the queue pair's domain, and we keep it and do not
/// // write to it until the completion with wr_id 7.
/// let posted = unsafe { qp.post_send(&mut wr) };
/// # }
/// ```
///
/// It borrows its elements, so it cannot outlive them:
///
/// ```compile_fail,E0597
/// # use rdma_core_rs::{RegionSlice, SendWr};
/// # fn example(slice: RegionSlice) {
/// let wr = {
///     let sges = [slice.sge()];
///     SendWr::send(1, &sges)
/// };
/// println!("{wr:?}");
/// # }
/// ```
#[doc(alias = "ibv_send_wr")]
#[repr(transparent)]
pub struct SendWr<'a> {
    pub(crate) raw: sys::ibv_send_wr,
    sges: PhantomData<&'a [Sge]>,
}

/// No remote side: for requests whose opcode does not look at it.
const NO_REMOTE: sys::wr_t = sys::wr_t {
    rdma: sys::rdma_t {
        remote_addr: 0,
        rkey: 0,
    },
};

impl<'a> SendWr<'a> {
    /// Sends the bytes of `sges` into a receive of the peer.
    #[doc(alias = "IBV_WR_SEND")]
    #[inline]
    pub fn send(wr_id: u64, sges: &'a [Sge]) -> SendWr<'a> {
        SendWr::new(ibv_wr_opcode::IBV_WR_SEND, wr_id, sges, 0, NO_REMOTE)
    }

    /// As [`send`](Self::send), with a number (in host order) in the receive's completion.
    #[doc(alias = "IBV_WR_SEND_WITH_IMM")]
    #[inline]
    pub fn send_with_imm(wr_id: u64, sges: &'a [Sge], imm: u32) -> SendWr<'a> {
        SendWr::new(
            ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
            wr_id,
            sges,
            imm.to_be(),
            NO_REMOTE,
        )
    }

    /// As [`send`](Self::send); when it arrives, the peer's `rkey` is taken back.
    #[doc(alias = "IBV_WR_SEND_WITH_INV")]
    #[inline]
    pub fn send_with_invalidate(wr_id: u64, sges: &'a [Sge], rkey: u32) -> SendWr<'a> {
        SendWr::new(
            ibv_wr_opcode::IBV_WR_SEND_WITH_INV,
            wr_id,
            sges,
            rkey,
            NO_REMOTE,
        )
    }

    /// Writes the bytes of `sges` to the start of the peer's `remote`.
    ///
    /// The length is that of `sges`, not that of `remote`: compare them before.
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    #[inline]
    pub fn write(wr_id: u64, sges: &'a [Sge], remote: RemoteRegion) -> SendWr<'a> {
        SendWr::new(
            ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            wr_id,
            sges,
            0,
            rdma(remote),
        )
    }

    /// As [`write`](Self::write); it also completes a receive of the peer, with a number (in host
    /// order).
    #[doc(alias = "IBV_WR_RDMA_WRITE_WITH_IMM")]
    #[inline]
    pub fn write_with_imm(
        wr_id: u64,
        sges: &'a [Sge],
        remote: RemoteRegion,
        imm: u32,
    ) -> SendWr<'a> {
        let opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        SendWr::new(opcode, wr_id, sges, imm.to_be(), rdma(remote))
    }

    /// Reads from the start of the peer's `remote` into `sges`.
    ///
    /// The length is that of `sges`, not that of `remote`: compare them before. Reads and atomics
    /// hang, without an error, on a queue pair whose `max_rd_atomic` is 0.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    #[inline]
    pub fn read(wr_id: u64, sges: &'a [Sge], remote: RemoteRegion) -> SendWr<'a> {
        SendWr::new(
            ibv_wr_opcode::IBV_WR_RDMA_READ,
            wr_id,
            sges,
            0,
            rdma(remote),
        )
    }

    /// Stores `swap` in the peer's 8-byte word at the start of `remote` if it is `compare`; what
    /// it was comes into `sge`, which must have 8 bytes. The address must be a multiple of 8.
    #[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
    #[inline]
    pub fn compare_swap(
        wr_id: u64,
        sge: &'a Sge,
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    ) -> SendWr<'a> {
        let opcode = ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
        SendWr::new(
            opcode,
            wr_id,
            slice::from_ref(sge),
            0,
            atomic(remote, compare, swap),
        )
    }

    /// Adds to the peer's 8-byte word at the start of `remote`; what it was comes into `sge`,
    /// which must have 8 bytes. The address must be a multiple of 8.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    #[inline]
    pub fn fetch_add(wr_id: u64, sge: &'a Sge, remote: RemoteRegion, add: u64) -> SendWr<'a> {
        let opcode = ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
        SendWr::new(
            opcode,
            wr_id,
            slice::from_ref(sge),
            0,
            atomic(remote, add, 0),
        )
    }

    /// Takes back a key of this side, such as that of a memory window.
    #[doc(alias = "IBV_WR_LOCAL_INV")]
    #[inline]
    pub fn local_invalidate(wr_id: u64, rkey: u32) -> SendWr<'a> {
        SendWr::new(ibv_wr_opcode::IBV_WR_LOCAL_INV, wr_id, &[], rkey, NO_REMOTE)
    }

    /// Binds a memory window; see [`MemoryWindow::bind`](crate::MemoryWindow::bind).
    pub(crate) fn bind_mw(wr_id: u64, bind_mw: sys::bind_mw_t) -> SendWr<'a> {
        let mut wr = SendWr::new(ibv_wr_opcode::IBV_WR_BIND_MW, wr_id, &[], 0, NO_REMOTE);
        wr.raw.bind_mw_tso_union = sys::bind_mw_tso_union_t { bind_mw };
        wr
    }

    #[inline]
    fn new(
        opcode: ibv_wr_opcode::Type,
        wr_id: u64,
        sges: &'a [Sge],
        imm_or_rkey: u32,
        wr: sys::wr_t,
    ) -> SendWr<'a> {
        let raw = sys::ibv_send_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: sges.as_ptr().cast_mut().cast(), // C only reads it
            num_sge: sges.len() as i32,               // more than max_send_sge is refused anyway
            opcode,
            send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0,
            imm_data_invalidated_rkey_union: sys::imm_data_invalidated_rkey_union_t {
                imm_data: imm_or_rkey,
            },
            wr,
            qp_type: sys::qp_type_t {
                xrc: sys::xrc_t { remote_srqn: 0 },
            },
            bind_mw_tso_union: sys::bind_mw_tso_union_t {
                tso: sys::tso_t {
                    hdr: ptr::null_mut(),
                    hdr_sz: 0,
                    mss: 0,
                },
            },
        };
        SendWr {
            raw,
            sges: PhantomData,
        }
    }

    /// Whether success is to be reported by a completion. Failure always is.
    #[doc(alias = "IBV_SEND_SIGNALED")]
    #[inline]
    #[must_use]
    pub fn signaled(self, on: bool) -> Self {
        self.flag(ibv_send_flags::IBV_SEND_SIGNALED, on)
    }

    /// Whether it waits for the reads and atomics posted before it (not for other requests).
    #[doc(alias = "IBV_SEND_FENCE")]
    #[inline]
    #[must_use]
    pub fn fence(self, on: bool) -> Self {
        self.flag(ibv_send_flags::IBV_SEND_FENCE, on)
    }

    /// Whether the receive it completes at the peer counts as solicited there.
    #[doc(alias = "IBV_SEND_SOLICITED")]
    #[inline]
    #[must_use]
    pub fn solicited(self, on: bool) -> Self {
        self.flag(ibv_send_flags::IBV_SEND_SOLICITED, on)
    }

    /// Whether the bytes are copied into the request while posting, so that the buffer is free
    /// once the post has returned. At most `max_inline_data` bytes; sends and writes only.
    #[doc(alias = "IBV_SEND_INLINE")]
    #[inline]
    #[must_use]
    pub fn inline(self, on: bool) -> Self {
        self.flag(ibv_send_flags::IBV_SEND_INLINE, on)
    }

    /// Where a datagram goes: for queue pairs of type UD.
    ///
    /// A datagram queue pair takes only sends with a destination. Keep the address handle until the
    /// completion.
    #[inline]
    #[must_use]
    pub fn to(mut self, ah: &'a AddressHandle, qp_num: u32, qkey: u32) -> Self {
        let ah = ah.as_raw().as_ptr();
        self.raw.wr = sys::wr_t {
            ud: sys::ud_t {
                ah,
                remote_qpn: qp_num,
                remote_qkey: qkey,
            },
        };
        self
    }

    /// The number that its completion will carry.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.raw.wr_id
    }

    #[inline]
    fn flag(mut self, flag: ibv_send_flags, on: bool) -> Self {
        if on {
            self.raw.send_flags |= flag.0;
        } else {
            self.raw.send_flags &= !flag.0;
        }
        self
    }
}

#[inline]
fn rdma(remote: RemoteRegion) -> sys::wr_t {
    sys::wr_t {
        rdma: sys::rdma_t {
            remote_addr: remote.addr(),
            rkey: remote.rkey(),
        },
    }
}

#[inline]
fn atomic(remote: RemoteRegion, compare_add: u64, swap: u64) -> sys::wr_t {
    let (remote_addr, rkey) = (remote.addr(), remote.rkey());
    sys::wr_t {
        atomic: sys::atomic_t {
            remote_addr,
            compare_add,
            swap,
            rkey,
        },
    }
}

impl fmt::Debug for SendWr<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendWr")
            .field("wr_id", &self.raw.wr_id)
            .field("opcode", &self.raw.opcode)
            .field("flags", &self.raw.send_flags)
            .field("num_sge", &self.raw.num_sge)
            .finish_non_exhaustive()
    }
}

/// A request for a receive queue: room for one message.
#[doc(alias = "ibv_recv_wr")]
#[repr(transparent)]
pub struct RecvWr<'a> {
    pub(crate) raw: sys::ibv_recv_wr,
    sges: PhantomData<&'a [Sge]>,
}

impl<'a> RecvWr<'a> {
    /// Room for a message of at most as many bytes as `sges` have together.
    ///
    /// On UD the first 40 bytes are for the global routing header.
    #[inline]
    pub fn new(wr_id: u64, sges: &'a [Sge]) -> RecvWr<'a> {
        let raw = sys::ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: sges.as_ptr().cast_mut().cast(), // C only reads it
            num_sge: sges.len() as i32,               // more than max_recv_sge is refused anyway
        };
        RecvWr {
            raw,
            sges: PhantomData,
        }
    }

    /// The number that its completion will carry.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.raw.wr_id
    }
}

impl fmt::Debug for RecvWr<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvWr")
            .field("wr_id", &self.raw.wr_id)
            .field("num_sge", &self.raw.num_sge)
            .finish()
    }
}
