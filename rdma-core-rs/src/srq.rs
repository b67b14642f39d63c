//! Shared receive queues.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::error::{self, Result};
use crate::pd::ProtectionDomain;
use crate::qp::post::{self, PostCall, PostError, PostListError};
use crate::sys::{self, ibv_srq_attr_mask};
use crate::wr::RecvWr;

/// A receive queue that several queue pairs take from.
///
/// A handle; clones mean the same queue, which is destroyed with its last user, after the queue
/// pairs that use it. It can be posted to from any thread.
///
/// ```
/// use rdma_core_rs::{CompletionQueue, QpConfig, QueuePair, Srq};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// let cq = CompletionQueue::new(&context, 64, None)?;
/// let srq = Srq::new(&pd, 32, 1)?;
/// srq.arm_limit(8)?; // an asynchronous event when fewer than 8 are left
/// let config = QpConfig { srq: Some(srq.clone()), ..QpConfig::rc(&cq, &cq) };
/// let qps = [QueuePair::new(&pd, &config)?, QueuePair::new(&pd, &config)?];
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[doc(alias = "ibv_srq")]
#[derive(Clone)]
pub struct Srq {
    inner: Arc<Inner>,
}

struct Inner {
    srq: NonNull<sys::ibv_srq>,
    limits: SrqLimits,
    pd: ProtectionDomain,
}

/// What a shared receive queue holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SrqLimits {
    /// Receives that can be posted at a time.
    pub max_wr: u32,
    /// Elements of one receive.
    pub max_sge: u32,
    /// The number below which an event comes, 0 if none will.
    pub limit: u32,
}

// SAFETY: libibverbs allows its objects to be used from any thread (providers lock their queues);
// `srq` is only given to it and destroyed once, by the last owner.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

impl Srq {
    /// Creates a queue for at least `max_wr` receives of at most `max_sge` elements.
    ///
    /// # Errors
    /// - [`Config`](crate::Error::Config) naming `max_wr` or `max_sge`, if 0 or above the device's
    ///   `max_srq_wr` or `max_srq_sge`.
    /// - [`Call`](crate::Error::Call) naming `ibv_create_srq` for anything else.
    #[doc(alias = "ibv_create_srq")]
    pub fn new(pd: &ProtectionDomain, max_wr: u32, max_sge: u32) -> Result<Srq> {
        pd.context().check_process()?;
        let device = pd.context().device_attr()?;
        error::at_least("max_wr", max_wr.into(), 1)?;
        error::at_most("max_wr", max_wr.into(), device.max_srq_wr.into())?;
        error::at_least("max_sge", max_sge.into(), 1)?;
        error::at_most("max_sge", max_sge.into(), device.max_srq_sge.into())?;
        let mut init = sys::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: sys::ibv_srq_attr {
                max_wr,
                max_sge,
                srq_limit: 0,
            },
        };
        // SAFETY: `pd` lives during the call, and `init` is a local it may change.
        let srq = unsafe { sys::ibv_create_srq(pd.as_raw().as_ptr(), &raw mut init) };
        let srq = sys::check_null("ibv_create_srq", srq)?;
        let limits = SrqLimits {
            max_wr: init.attr.max_wr,
            max_sge: init.attr.max_sge,
            limit: 0,
        };
        Ok(Srq {
            inner: Arc::new(Inner {
                srq,
                limits,
                pd: pd.clone(),
            }),
        })
    }

    /// What was granted when it was made: at least what was asked for.
    pub fn limits(&self) -> SrqLimits {
        self.inner.limits
    }

    /// What it holds now, and the limit that is armed.
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_query_srq`.
    #[doc(alias = "ibv_query_srq")]
    pub fn query(&self) -> Result<SrqLimits> {
        self.inner.pd.context().check_process()?;
        let mut attr = MaybeUninit::<sys::ibv_srq_attr>::zeroed();
        // SAFETY: `self` keeps the queue alive, and `attr` is room for what is written.
        let ret = unsafe { sys::ibv_query_srq(self.inner.srq.as_ptr(), attr.as_mut_ptr()) };
        sys::check("ibv_query_srq", ret)?;
        // SAFETY: zeroed before the call, and every field is an integer.
        let attr = unsafe { attr.assume_init() };
        Ok(SrqLimits {
            max_wr: attr.max_wr,
            max_sge: attr.max_sge,
            limit: attr.srq_limit,
        })
    }

    /// Asks for one asynchronous event when fewer than `limit` receives are left.
    ///
    /// The event disarms it. 0 means no event.
    ///
    /// # Errors
    /// - [`Config`](crate::Error::Config) naming `limit`, if the queue never holds so many.
    /// - [`Call`](crate::Error::Call) naming `ibv_modify_srq`.
    #[doc(alias = "ibv_modify_srq")]
    #[doc(alias = "IBV_SRQ_LIMIT")]
    pub fn arm_limit(&self, limit: u32) -> Result<()> {
        self.inner.pd.context().check_process()?;
        error::at_most("limit", limit.into(), self.inner.limits.max_wr.into())?;
        let mut attr = sys::ibv_srq_attr {
            max_wr: 0,
            max_sge: 0,
            srq_limit: limit,
        };
        let mask = ibv_srq_attr_mask::IBV_SRQ_LIMIT.0 as i32;
        // SAFETY: `self` keeps the queue alive; `attr` is a local.
        let ret = unsafe { sys::ibv_modify_srq(self.inner.srq.as_ptr(), &raw mut attr, mask) };
        sys::check("ibv_modify_srq", ret)
    }

    /// Posts one receive.
    ///
    /// # Safety
    /// As for [`QueuePair::post_recv`](crate::QueuePair::post_recv), until the completion was
    /// polled, or every queue pair using this queue was destroyed with `Ok` and the last handle of
    /// this queue is gone.
    ///
    /// # Errors
    /// [`PostError`], `ENOMEM` when the queue is full.
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub unsafe fn post_recv(&self, wr: &mut RecvWr<'_>) -> Result<(), PostError> {
        wr.raw.next = ptr::null_mut();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue lives; `wr` is a valid chain of one; its buffers are the caller's
        // promise.
        let ret = unsafe {
            sys::ibv_post_srq_recv(self.inner.srq.as_ptr(), &raw mut wr.raw, &raw mut bad)
        };
        post::one(PostCall::SrqRecv, ret, bad.is_null())
    }

    /// Posts several receives at once.
    ///
    /// # Safety
    /// As for [`post_recv`](Self::post_recv), for each.
    ///
    /// # Errors
    /// [`PostListError`] tells how many were posted.
    #[inline]
    pub unsafe fn post_recv_list(&self, wrs: &mut [RecvWr<'_>]) -> Result<(), PostListError> {
        let Some(first) = post::link_recvs(wrs) else {
            return Ok(());
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue lives; `first` is a valid chain; its buffers are the caller's promise.
        let ret = unsafe { sys::ibv_post_srq_recv(self.inner.srq.as_ptr(), first, &raw mut bad) };
        post::many(PostCall::SrqRecv, ret, first, bad, wrs.len())
    }

    /// The protection domain it was created in.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// The C object. It lives as long as this handle or a clone of it.
    pub fn as_raw(&self) -> NonNull<sys::ibv_srq> {
        self.inner.srq
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.pd.context().is_foreign_process() {
            return;
        }
        // SAFETY: we are the last owner, and every queue pair that uses it holds an owner.
        let ret = unsafe { sys::ibv_destroy_srq(self.srq.as_ptr()) };
        if let Err(error) = sys::check("ibv_destroy_srq", ret) {
            mem::forget(self.pd.clone());
            log::error!("{error}; the shared receive queue is leaked"); // last: a logger may panic
        }
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq")
            .field("limits", &self.inner.limits)
            .finish_non_exhaustive()
    }
}
