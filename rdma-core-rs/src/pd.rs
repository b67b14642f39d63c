//! Protection domains.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::context::Context;
use crate::error::Result;
use crate::sys;

/// A protection domain: memory and queue pairs can only be used together inside one.
///
/// A handle; clones mean the same domain. It is freed with its last user.
///
/// ```
/// use rdma_core_rs::{ProtectionDomain, devices};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// let context = devices()?.first().expect("a device").open()?;
/// let pd = ProtectionDomain::new(&context)?;
/// assert!(pd.is_same(&pd.clone()));
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[doc(alias = "ibv_pd")]
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    pd: NonNull<sys::ibv_pd>,
    context: Context,
}

// SAFETY: libibverbs allows its objects to be used from any thread (it locks where it must), and
// `pd` is only given to libibverbs and freed once, by the last owner.
unsafe impl Send for Inner {}
// SAFETY: as for Send; no method changes anything through `&self`.
unsafe impl Sync for Inner {}

impl ProtectionDomain {
    /// Allocates a protection domain on the device.
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_alloc_pd`, for instance `ENOMEM` when the device
    /// has no more; [`Forked`](crate::Error::Forked) in a child.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn new(context: &Context) -> Result<ProtectionDomain> {
        context.check_process()?;
        // SAFETY: `context` keeps the ibv_context open during the call.
        let pd = unsafe { sys::ibv_alloc_pd(context.as_raw().as_ptr()) };
        let pd = sys::check_null("ibv_alloc_pd", pd)?;
        Ok(ProtectionDomain {
            inner: Arc::new(Inner {
                pd,
                context: context.clone(),
            }),
        })
    }

    /// The device context it was allocated on.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Whether both handles mean the same domain.
    #[inline]
    pub fn is_same(&self, other: &ProtectionDomain) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The C object. It lives as long as this handle or a clone of it.
    #[inline]
    pub fn as_raw(&self) -> NonNull<sys::ibv_pd> {
        self.inner.pd
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.is_foreign_process() {
            return;
        }
        // SAFETY: we are the last owner, and everything made in the domain holds an owner.
        let ret = unsafe { sys::ibv_dealloc_pd(self.pd.as_ptr()) };
        if let Err(error) = sys::check("ibv_dealloc_pd", ret) {
            log::error!("{error}; the protection domain is leaked");
        }
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.inner.context.device_name())
            .finish_non_exhaustive()
    }
}
