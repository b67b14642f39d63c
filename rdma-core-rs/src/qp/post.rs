//! Posting: the hot path.

#![allow(unsafe_code)] // calls C

use std::io;
use std::ptr;

use super::{QpType, QueuePair};
use crate::sys::{self, ibv_wr_opcode};
use crate::wr::{RecvWr, SendWr};

impl QueuePair {
    /// Posts one request to the send queue.
    ///
    /// # Safety
    /// - Every element of `wr` lies in a live region of this queue pair's protection domain (or
    ///   the request is inline). Its address handle or memory window, if it has one, is of that
    ///   domain too.
    /// - Until its completion was polled, or the queue pair destroyed with `Ok`, that memory is
    ///   neither freed nor written (for reads and atomics: nor referenced at all), and the address
    ///   handle is kept. Inline: until this call returns. An unsignaled request completes with the
    ///   next signaled one behind it.
    /// - This is the process that made the queue pair, not its child by `fork`: there the addresses mean the
    ///   parent's memory.
    ///
    /// # Errors
    /// [`PostError`]: `EINVAL` when the queue pair cannot send yet, an element or inline limit is
    /// passed, or, on a datagram queue pair, the request is not a send with a
    /// [destination](SendWr::to); `ENOMEM` when the queue is full. Unless
    /// [`may_be_posted`](PostError::may_be_posted), the request was not taken.
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn post_send(&mut self, wr: &mut SendWr<'_>) -> Result<(), PostError> {
        self.check_can_send(std::slice::from_ref(wr))?;
        wr.raw.next = ptr::null_mut();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; `wr` is a valid chain of one; its buffers are the caller's
        // promise.
        let ret = unsafe { sys::ibv_post_send(self.qp.as_ptr(), &raw mut wr.raw, &raw mut bad) };
        one(PostCall::Send, ret, bad.is_null())
    }

    /// Posts several requests to the send queue with one call, in order: one doorbell.
    ///
    /// # Safety
    /// As for [`post_send`](Self::post_send), for each.
    ///
    /// # Errors
    /// [`PostListError`] tells how many were posted; the others were not taken.
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn post_send_list(&mut self, wrs: &mut [SendWr<'_>]) -> Result<(), PostListError> {
        self.check_can_send(wrs)
            .map_err(|source| PostListError { posted: 0, source })?;
        let Some(first) = link_sends(wrs) else {
            return Ok(());
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; `first` is a valid chain; its buffers are the caller's
        // promise.
        let ret = unsafe { sys::ibv_post_send(self.qp.as_ptr(), first, &raw mut bad) };
        many(PostCall::Send, ret, first, bad, wrs.len())
    }

    /// Posts one receive.
    ///
    /// A receive posted when the queue pair is in the error state may never complete (on rxe it
    /// does not); it is released when the queue pair is destroyed.
    ///
    /// # Safety
    /// - Every element of `wr` lies in a live region of this queue pair's protection domain.
    /// - Until its completion was polled, or the queue pair destroyed with `Ok`, that memory is
    ///   neither freed nor referenced.
    /// - This is the process that made the queue pair, as for [`post_send`](Self::post_send).
    ///
    /// # Errors
    /// [`PostError`]: `EINVAL` when the queue pair is in the reset state, uses a shared receive
    /// queue, or an element limit is passed, `ENOMEM` when the queue is full.
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post_recv(&mut self, wr: &mut RecvWr<'_>) -> Result<(), PostError> {
        self.check_can_receive()?;
        wr.raw.next = ptr::null_mut();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; `wr` is a valid chain of one; its buffers are the caller's
        // promise.
        let ret = unsafe { sys::ibv_post_recv(self.qp.as_ptr(), &raw mut wr.raw, &raw mut bad) };
        one(PostCall::Recv, ret, bad.is_null())
    }

    /// Posts several receives with one call, in order.
    ///
    /// # Safety
    /// As for [`post_recv`](Self::post_recv), for each.
    ///
    /// # Errors
    /// [`PostListError`] tells how many were posted; the others were not taken.
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post_recv_list(&mut self, wrs: &mut [RecvWr<'_>]) -> Result<(), PostListError> {
        self.check_can_receive()
            .map_err(|source| PostListError { posted: 0, source })?;
        let Some(first) = link_recvs(wrs) else {
            return Ok(());
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; `first` is a valid chain; its buffers are the caller's
        // promise.
        let ret = unsafe { sys::ibv_post_recv(self.qp.as_ptr(), first, &raw mut bad) };
        many(PostCall::Recv, ret, first, bad, wrs.len())
    }

    /// rxe answers EINVAL to a send before RTS, but keeps it in the ring and sends it after the
    /// connect: the buffer may be gone by then. So such a post does not reach the device. Neither
    /// does a datagram without a destination, whose address handle drivers follow unseen.
    #[inline]
    fn check_can_send(&self, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let fits = self.qp_type != QpType::Ud || wrs.iter().all(is_datagram);
        if self.can_send && fits {
            Ok(())
        } else {
            Err(PostError::refused(PostCall::Send))
        }
    }

    #[inline]
    fn check_can_receive(&self) -> Result<(), PostError> {
        if self.can_receive {
            Ok(())
        } else {
            Err(PostError::refused(PostCall::Recv))
        }
    }
}

/// Whether it is a send with a destination, the only request that a datagram queue pair takes.
fn is_datagram(wr: &SendWr<'_>) -> bool {
    let opcodes = [
        ibv_wr_opcode::IBV_WR_SEND,
        ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
    ];
    // SAFETY: every variant covers the pointer's bytes, and `SendWr` wrote one of them.
    let ah = unsafe { wr.raw.wr.ud.ah };
    opcodes.contains(&wr.raw.opcode) && !ah.is_null()
}

/// A request that was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}: {}", call.name(), io::Error::from_raw_os_error(*errno))]
pub struct PostError {
    errno: i32,
    call: PostCall,
    may_be_posted: bool,
}

/// The C function that was called. Small, so that a post's result fits into a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PostCall {
    Send,
    Recv,
    SrqRecv,
}

impl PostCall {
    fn name(self) -> &'static str {
        match self {
            PostCall::Send => "ibv_post_send",
            PostCall::Recv => "ibv_post_recv",
            PostCall::SrqRecv => "ibv_post_srq_recv",
        }
    }
}

const _: () = assert!(size_of::<Result<(), PostError>>() <= 8);

impl PostError {
    #[cold]
    fn refused(call: PostCall) -> PostError {
        PostError {
            errno: libc::EINVAL,
            call,
            may_be_posted: false,
        }
    }

    /// What the device's driver answered.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// Whether the queue is full. Counting what is in flight avoids it.
    pub fn is_queue_full(&self) -> bool {
        self.errno == libc::ENOMEM
    }

    /// Whether the driver did not say that it left the request out: it may be in the queue, so
    /// its buffer must be kept as if it had been posted.
    ///
    /// It happens when ringing the doorbell failed, as when the device has been removed.
    pub fn may_be_posted(&self) -> bool {
        self.may_be_posted
    }
}

/// A list of requests of which the first `posted` were posted, and no other.
///
/// ```
/// # use rdma_core_rs::{QueuePair, SendWr};
/// # fn example(qp: &mut QueuePair, mut requests: Vec<SendWr<'_>>) {
/// // SAFETY: (what the requests' buffers need)
/// if let Err(error) = unsafe { qp.post_send_list(&mut requests) } {
///     let to_post_later = requests.split_off(error.posted);
/// }
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{posted} work requests were posted, then: {source}")]
pub struct PostListError {
    /// How many were posted, from the first on. If [`PostError::may_be_posted`], all of them are
    /// counted here, since any may be in the queue.
    pub posted: usize,
    /// Why the next was not.
    pub source: PostError,
}

/// The result of posting one request. `bad_untouched`: the driver did not name a request.
#[inline]
pub(crate) fn one(call: PostCall, ret: i32, bad_untouched: bool) -> Result<(), PostError> {
    if ret == 0 {
        Ok(())
    } else {
        Err(post_error(call, ret, bad_untouched))
    }
}

/// The result of posting `count` requests that lie in a row from `first` on.
#[inline]
pub(crate) fn many<W>(
    call: PostCall,
    ret: i32,
    first: *const W,
    bad: *const W,
    count: usize,
) -> Result<(), PostListError> {
    if ret == 0 {
        Ok(())
    } else {
        Err(post_list_error(call, ret, first, bad, count))
    }
}

#[cold]
fn post_error(call: PostCall, ret: i32, may_be_posted: bool) -> PostError {
    let errno = sys::error_of(ret).raw_os_error().unwrap_or(libc::EIO);
    PostError {
        errno,
        call,
        may_be_posted,
    }
}

#[cold]
fn post_list_error<W>(
    call: PostCall,
    ret: i32,
    first: *const W,
    bad: *const W,
    count: usize,
) -> PostListError {
    let offset = bad.addr().wrapping_sub(first.addr());
    let posted = offset / size_of::<W>();
    if offset.is_multiple_of(size_of::<W>()) && posted < count {
        PostListError {
            posted,
            source: post_error(call, ret, false),
        }
    } else {
        PostListError {
            posted: count,
            source: post_error(call, ret, true),
        }
    }
}

/// Chains the requests in the order in which they lie.
#[inline]
fn link_sends(wrs: &mut [SendWr<'_>]) -> Option<*mut sys::ibv_send_wr> {
    let count = wrs.len();
    let first: *mut sys::ibv_send_wr = wrs.as_mut_ptr().cast(); // SendWr is transparent
    for i in 0..count {
        let next = if i + 1 < count {
            first.wrapping_add(i + 1)
        } else {
            ptr::null_mut()
        };
        // SAFETY: the i-th of `count` requests that `wrs` borrows mutably.
        unsafe { (*first.wrapping_add(i)).next = next };
    }
    (count > 0).then_some(first)
}

/// Chains the receives in the order in which they lie.
#[inline]
pub(crate) fn link_recvs(wrs: &mut [RecvWr<'_>]) -> Option<*mut sys::ibv_recv_wr> {
    let count = wrs.len();
    let first: *mut sys::ibv_recv_wr = wrs.as_mut_ptr().cast(); // RecvWr is transparent
    for i in 0..count {
        let next = if i + 1 < count {
            first.wrapping_add(i + 1)
        } else {
            ptr::null_mut()
        };
        // SAFETY: the i-th of `count` receives that `wrs` borrows mutably.
        unsafe { (*first.wrapping_add(i)).next = next };
    }
    (count > 0).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_chained_in_order_and_ends() {
        let mut wrs = [
            RecvWr::new(1, &[]),
            RecvWr::new(2, &[]),
            RecvWr::new(3, &[]),
        ];
        let mut at = link_recvs(&mut wrs).unwrap();
        let mut ids = Vec::new();
        while !at.is_null() {
            // SAFETY: `at` walks the chain through `wrs`.
            let wr = unsafe { at.read() };
            ids.push(wr.wr_id);
            at = wr.next;
        }
        assert_eq!(ids, [1, 2, 3]);
        assert!(link_recvs(&mut []).is_none());
    }

    #[test]
    fn number_posted_is_the_distance_to_the_bad_one() {
        let wrs = [0u64; 4];
        let at = |i: usize| wrs.as_ptr().wrapping_add(i);
        let error = many(PostCall::Send, libc::ENOMEM, at(0), at(2), 4).unwrap_err();
        assert_eq!((error.posted, error.source.is_queue_full()), (2, true));
        assert!(!error.source.may_be_posted());
        assert_eq!(
            many(PostCall::Send, libc::EINVAL, at(0), at(0), 4)
                .unwrap_err()
                .posted,
            0
        );
    }

    #[test]
    fn without_a_bad_one_all_may_be_posted() {
        let wrs = [0u64; 4];
        let error = many(PostCall::Send, libc::EIO, wrs.as_ptr(), ptr::null(), 4).unwrap_err();
        assert_eq!((error.posted, error.source.may_be_posted()), (4, true));
        assert!(
            one(PostCall::Recv, libc::EIO, true)
                .unwrap_err()
                .may_be_posted()
        );
        assert!(
            !one(PostCall::Recv, libc::ENOMEM, false)
                .unwrap_err()
                .may_be_posted()
        );
    }
}
