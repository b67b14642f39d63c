//! Memory regions and windows, and the NIC's access to their memory.
#![allow(unsafe_code)] // defines C symbols; reads and writes registered memory as a NIC does

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_uint, c_void};
use rdma_sys::*;

use crate::cbox::{CBox, get, put};
use crate::world::{Outcome, World, enter, null, positive, set_errno};

pub(crate) mod access {
    pub(crate) const LOCAL_WRITE: u32 = 1;
    pub(crate) const REMOTE_WRITE: u32 = 2;
    pub(crate) const REMOTE_READ: u32 = 4;
    pub(crate) const REMOTE_ATOMIC: u32 = 8;
    pub(crate) const MW_BIND: u32 = 16;
    pub(crate) const ZERO_BASED: u32 = 32;
    pub(crate) const ON_DEMAND: u32 = 64;
    pub(crate) const HUGETLB: u32 = 128;
    /// Flags a device may ignore.
    pub(crate) const OPTIONAL: u32 = 0x3ff0_0000;
    pub(crate) const KNOWN: u32 = LOCAL_WRITE
        | REMOTE_WRITE
        | REMOTE_READ
        | REMOTE_ATOMIC
        | MW_BIND
        | ZERO_BASED
        | ON_DEMAND
        | HUGETLB
        | OPTIONAL;
}

/// A registered region. Its pointer is the one given at registration, so the NIC reaches what that pointer may reach.
pub(crate) struct Mr {
    _memory: CBox<ibv_mr>,
    pub(crate) pd: usize,
    pub(crate) addr: *mut u8,
    pub(crate) len: usize,
    pub(crate) iova: u64,
    pub(crate) access: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// A memory window; `bound` once a bind succeeded.
pub(crate) struct Mw {
    pub(crate) memory: CBox<ibv_mw>,
    pub(crate) pd: usize,
    pub(crate) kind: u32,
    pub(crate) rkey: u32,
    pub(crate) bound: Option<Binding>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub(crate) mr: usize,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
    /// Type 2 windows serve this queue pair only.
    pub(crate) qp: Option<usize>,
}

/// Part of a region the NIC has been allowed to touch.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    addr: *mut u8,
    pub(crate) len: usize,
}

impl Span {
    pub(crate) fn read(self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the span lies inside a live region, whose owner keeps the memory valid until it is deregistered.
        unsafe { ptr::copy_nonoverlapping(self.addr, bytes.as_mut_ptr(), self.len) };
        bytes
    }

    /// Writes the front of `bytes`, as much as fits, and returns the rest.
    pub(crate) fn write(self, bytes: &[u8]) -> &[u8] {
        let (now, rest) = bytes.split_at(self.len.min(bytes.len()));
        // SAFETY: as in `read`; the region is registered for writing.
        unsafe { ptr::copy(now.as_ptr(), self.addr, now.len()) };
        rest
    }

    /// Applies `f` to the eight aligned bytes of the span, atomically; gives the former value.
    pub(crate) fn update(self, f: impl Fn(u64) -> u64) -> u64 {
        // SAFETY: as in `read`; the caller checked length and alignment.
        let word = unsafe { AtomicU64::from_ptr(self.addr.cast()) };
        let mut old = word.load(Ordering::SeqCst);
        while let Err(now) = word.compare_exchange(old, f(old), Ordering::SeqCst, Ordering::SeqCst)
        {
            old = now;
        }
        old
    }
}

impl Mr {
    /// Looks at the ends of the memory: until it is deregistered a NIC may use it, so it must still be there.
    /// Memory freed too early is found by the sanitizers here, even if nothing was ever sent.
    fn touch(&self) {
        for offset in [0, self.len - 1] {
            let byte = self.addr.wrapping_add(offset).cast::<MaybeUninit<u8>>();
            // SAFETY: inside the region, whose owner keeps the memory valid until it is deregistered, that is, after this.
            unsafe { byte.read_volatile() };
        }
    }

    pub(crate) fn span(&self, addr: u64, len: u64) -> Option<Span> {
        let offset = usize::try_from(addr.checked_sub(self.iova)?).ok()?;
        let len = usize::try_from(len).ok()?;
        let fits = offset.checked_add(len)? <= self.len;
        fits.then(|| Span {
            addr: self.addr.wrapping_add(offset),
            len,
        })
    }
}

impl World {
    fn mr(&mut self, mr: *mut ibv_mr) -> Outcome<&mut Mr> {
        if !self.mrs.contains_key(&mr.addr()) {
            return self.unknown("memory region");
        }
        self.mrs.get_mut(&mr.addr()).ok_or(libc::EINVAL)
    }

    fn mw(&mut self, mw: *mut ibv_mw) -> Outcome<&mut Mw> {
        if !self.mws.contains_key(&mw.addr()) {
            return self.unknown("memory window");
        }
        self.mws.get_mut(&mw.addr()).ok_or(libc::EINVAL)
    }

    fn reg_mr(
        &mut self,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        len: usize,
        iova: u64,
        access: u32,
    ) -> Outcome<*mut ibv_mr> {
        let context = self.pd(pd)?.context;
        check_region(addr, len, access)?;
        let registered: usize = self.mrs.values().map(|mr| mr.len).sum();
        if len > self.config.memlock.saturating_sub(registered) {
            return Err(libc::ENOMEM);
        }
        let lkey = self.key();
        let rkey = self.key() | 1;
        let handle = self.serial();
        let memory = CBox::new(ibv_mr {
            context,
            pd,
            addr,
            length: len,
            handle,
            lkey,
            rkey,
        });
        let ptr = memory.ptr();
        let addr = addr.cast();
        let mr = Mr {
            _memory: memory,
            pd: pd.addr(),
            addr,
            len,
            iova,
            access,
            lkey,
            rkey,
        };
        self.mrs.insert(ptr.addr(), mr);
        Ok(ptr)
    }

    fn dereg_mr(&mut self, mr: *mut ibv_mr) -> Outcome<()> {
        let lkey = self.mr(mr)?.lkey;
        let windows = self
            .mws
            .values()
            .filter(|w| w.bound.is_some_and(|b| b.mr == mr.addr()));
        if windows.count() > 0 {
            return Err(libc::EBUSY);
        }
        self.check_unused(lkey);
        self.mr(mr)?.touch();
        self.mrs.remove(&mr.addr());
        self.dead_keys.insert(lkey);
        Ok(())
    }

    /// A region must not change or go while posted work refers to it.
    fn check_unused(&mut self, lkey: u32) {
        if let Some(wr_id) = self.posted_with(lkey) {
            self.violation(format_args!(
                "a posted request (wr_id {wr_id:#x}) uses the region"
            ));
        }
    }

    fn rereg_mr(
        &mut self,
        mr: *mut ibv_mr,
        flags: u32,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        len: usize,
        access: u32,
    ) -> Outcome<()> {
        let Mr { lkey, .. } = *self.mr(mr)?;
        if flags == 0 || flags & !7 != 0 {
            return Err(libc::EINVAL);
        }
        let [translation, new_pd, new_access] = [1, 2, 4].map(|bit| flags & bit != 0);
        if translation {
            check_region(addr, len, if new_access { access } else { 0 })?;
        }
        if new_pd {
            self.pd(pd)?;
        }
        self.check_unused(lkey);
        self.dead_keys.insert(lkey);
        let (lkey, rkey) = (self.key(), self.key() | 1);
        let record = self.mr(mr)?;
        if translation {
            (record.addr, record.len, record.iova) = (addr.cast(), len, addr.addr() as u64);
            put!(mr, addr, addr);
            put!(mr, length, len);
        }
        if new_pd {
            record.pd = pd.addr();
            put!(mr, pd, pd);
        }
        if new_access {
            record.access = access;
        }
        (record.lkey, record.rkey) = (lkey, rkey);
        put!(mr, lkey, lkey);
        put!(mr, rkey, rkey);
        Ok(())
    }

    /// What a local key gives access to, if the key, the domain, the bounds and the rights are right.
    pub(crate) fn local_span(&self, pd: usize, sge: Sge, write: bool) -> Option<Span> {
        let mr = self
            .mrs
            .values()
            .find(|mr| mr.lkey == sge.lkey && mr.pd == pd)?;
        let allowed = !write || mr.access & access::LOCAL_WRITE != 0;
        allowed.then(|| mr.span(sge.addr, sge.length.into()))?
    }

    /// As [`Self::local_span`], for a remote key used by a peer of queue pair `qp`.
    pub(crate) fn remote_span(
        &self,
        pd: usize,
        qp: usize,
        target: Target,
        len: u64,
        rights: u32,
    ) -> Option<Span> {
        if let Some(mr) = self.mrs.values().find(|mr| mr.rkey == target.rkey) {
            let allowed = mr.pd == pd && mr.access & rights == rights;
            return allowed.then(|| mr.span(target.addr, len))?;
        }
        let mw = self
            .mws
            .values()
            .find(|mw| mw.rkey == target.rkey && mw.pd == pd)?;
        let bound = mw.bound.filter(|b| b.access & rights == rights)?;
        let inside = target.addr >= bound.addr
            && target.addr.checked_add(len)? <= bound.addr.checked_add(bound.len)?;
        let right_qp = bound.qp.is_none_or(|bound_qp| bound_qp == qp);
        let mr = self.mrs.get(&bound.mr)?;
        (inside && right_qp).then(|| mr.span(target.addr, len))?
    }

    /// Binds a window, or invalidates it if the length is 0. False if the request is wrong.
    pub(crate) fn bind(&mut self, qp: usize, mw: usize, rkey: u32, binding: Binding) -> bool {
        let Some(mr) = self.mrs.get(&binding.mr) else {
            return false;
        };
        let (mr_pd, mr_access) = (mr.pd, mr.access);
        let fits = mr.span(binding.addr, binding.len).is_some();
        let wants_write = access::REMOTE_WRITE | access::REMOTE_ATOMIC;
        let write_ok = binding.access & wants_write == 0 || mr_access & access::LOCAL_WRITE != 0;
        let Some(window) = self.mws.get_mut(&mw) else {
            return false;
        };
        if window.pd != mr_pd || mr_access & access::MW_BIND == 0 || !fits || !write_ok {
            return false;
        }
        let type_2 = window.kind == ibv_mw_type::IBV_MW_TYPE_2;
        window.rkey = rkey;
        let qp = type_2.then_some(qp);
        window.bound = (binding.len > 0).then_some(Binding { qp, ..binding });
        let ptr = window.memory.ptr();
        put!(ptr, rkey, rkey);
        true
    }

    /// Invalidates a bound type 2 window by key. False if there is none.
    pub(crate) fn invalidate(&mut self, pd: usize, rkey: u32) -> bool {
        let window = self.mws.values_mut().find(|w| w.rkey == rkey && w.pd == pd);
        let type_2 = window.filter(|w| w.kind == ibv_mw_type::IBV_MW_TYPE_2 && w.bound.is_some());
        type_2.is_some_and(|w| w.bound.take().is_some())
    }
}

/// One entry of a scatter/gather list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The peer's memory a one-sided operation names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

fn check_region(addr: *mut c_void, len: usize, flags: u32) -> Outcome<()> {
    let needs_local = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
    if len == 0 || addr.addr().checked_add(len).is_none() || flags & !access::KNOWN != 0 {
        return Err(libc::EINVAL);
    }
    if needs_local && flags & access::LOCAL_WRITE == 0 {
        return Err(libc::EINVAL);
    }
    if flags & (access::ON_DEMAND | access::ZERO_BASED) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if addr.is_null() {
        Err(libc::EFAULT)
    } else {
        Ok(())
    }
}

/// `ibv_reg_mr(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    null(enter("ibv_reg_mr", |w| {
        w.reg_mr(pd, addr, length, addr.addr() as u64, access as u32)
    }))
}

/// `ibv_reg_mr_iova(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    null(enter("ibv_reg_mr_iova", |w| {
        w.reg_mr(pd, addr, length, iova, access as u32)
    }))
}

/// The function behind the header's `ibv_reg_mr` macros.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    null(enter("ibv_reg_mr_iova2", |w| {
        w.reg_mr(pd, addr, length, iova, access)
    }))
}

/// `ibv_reg_dmabuf_mr(3)`: not supported by the fake devices.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    null(enter("ibv_reg_dmabuf_mr", |w| {
        w.pd(pd)?;
        Err(libc::EOPNOTSUPP)
    }))
}

/// `ibv_rereg_mr(3)`: an error is an `ibv_rereg_mr_err_code`, and errno is set.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let done = enter("ibv_rereg_mr", |w| {
        w.rereg_mr(mr, flags as u32, pd, addr, length, access as u32)
    });
    match done {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            match errno {
                libc::EINVAL => ibv_rereg_mr_err_code::IBV_REREG_MR_ERR_INPUT,
                _ => ibv_rereg_mr_err_code::IBV_REREG_MR_ERR_CMD,
            }
        }
    }
}

/// `ibv_dereg_mr(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    positive(enter("ibv_dereg_mr", |w| w.dereg_mr(mr)))
}

/// The `advise_mr` operation: accepted and without effect.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    _advice: ib_uverbs_advise_mr_advice::Type,
    _flags: u32,
    _sg_list: *mut ibv_sge,
    _num_sge: u32,
) -> c_int {
    positive(enter("ibv_advise_mr", |w| w.pd(pd).map(|_| ())))
}

/// The `alloc_mw` operation.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type::Type) -> *mut ibv_mw {
    null(enter("ibv_alloc_mw", |w| {
        let context = w.pd(pd)?.context;
        if kind != ibv_mw_type::IBV_MW_TYPE_1 && kind != ibv_mw_type::IBV_MW_TYPE_2 {
            return Err(libc::EINVAL);
        }
        let rkey = w.key();
        let handle = w.serial();
        let memory = CBox::new(ibv_mw {
            context,
            pd,
            rkey,
            handle,
            type_: kind,
        });
        let ptr = memory.ptr();
        w.mws.insert(
            ptr.addr(),
            Mw {
                memory,
                pd: pd.addr(),
                kind,
                rkey,
                bound: None,
            },
        );
        Ok(ptr)
    }))
}

/// The `dealloc_mw` operation.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    positive(enter("ibv_dealloc_mw", |w| {
        w.mw(mw)?;
        w.mws.remove(&mw.addr());
        Ok(())
    }))
}

/// Reads what a bind request says.
pub(crate) fn binding(info: ibv_mw_bind_info) -> Binding {
    let mr = info.mr.addr();
    let access = info.mw_access_flags;
    Binding {
        mr,
        addr: info.addr,
        len: info.length,
        access,
        qp: None,
    }
}

/// Reads one scatter/gather entry of the caller.
pub(crate) fn read_sge(sge: *const ibv_sge) -> Sge {
    Sge {
        addr: get!(sge, addr),
        length: get!(sge, length),
        lkey: get!(sge, lkey),
    }
}
