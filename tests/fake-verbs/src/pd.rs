//! Protection domains.
#![allow(unsafe_code)] // defines C symbols

use libc::c_int;
use rdma_sys::*;

use crate::cbox::CBox;
use crate::world::{Outcome, World, enter, null, positive};

pub(crate) struct Pd {
    _memory: CBox<ibv_pd>,
    pub(crate) context: *mut ibv_context,
    /// The one the connection manager keeps per device, `rdma_cm_id.pd`.
    pub(crate) of_cm: bool,
}

impl World {
    pub(crate) fn alloc_pd(
        &mut self,
        context: *mut ibv_context,
        of_cm: bool,
    ) -> Outcome<*mut ibv_pd> {
        self.context(context)?;
        let memory = CBox::new(ibv_pd {
            context,
            handle: self.serial(),
        });
        let ptr = memory.ptr();
        self.pds.insert(
            ptr.addr(),
            Pd {
                _memory: memory,
                context,
                of_cm,
            },
        );
        Ok(ptr)
    }

    pub(crate) fn pd(&mut self, pd: *mut ibv_pd) -> Outcome<&mut Pd> {
        if !self.pds.contains_key(&pd.addr()) {
            return self.unknown("protection domain");
        }
        self.pds.get_mut(&pd.addr()).ok_or(libc::EINVAL)
    }

    pub(crate) fn dealloc_pd(&mut self, pd: *mut ibv_pd) -> Outcome<()> {
        self.pd(pd)?;
        let children = self.children_of_pd(pd);
        if children > 0 {
            self.violation_unless_planned(format_args!("the PD still has {children} objects"));
            return Err(libc::EBUSY);
        }
        self.pds.remove(&pd.addr());
        Ok(())
    }

    fn children_of_pd(&self, pd: *mut ibv_pd) -> usize {
        let mrs = self.mrs.values().filter(|m| m.pd == pd.addr()).count();
        let mws = self.mws.values().filter(|m| m.pd == pd.addr()).count();
        let qps = self.qps.values().filter(|q| q.pd == pd.addr()).count();
        let srqs = self.srqs.values().filter(|s| s.pd == pd.addr()).count();
        let ahs = self.ahs.values().filter(|a| a.pd == pd.addr()).count();
        mrs + mws + qps + srqs + ahs
    }
}

/// `ibv_alloc_pd(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    null(enter("ibv_alloc_pd", |w| w.alloc_pd(context, false)))
}

/// `ibv_dealloc_pd(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    positive(enter("ibv_dealloc_pd", |w| {
        if w.pd(pd)?.of_cm {
            w.violation("the PD belongs to the connection manager");
            return Err(libc::EINVAL);
        }
        w.dealloc_pd(pd)
    }))
}
