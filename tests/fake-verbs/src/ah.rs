//! Address handles and multicast groups.
#![allow(unsafe_code)] // defines C symbols; reads the callers' attribute structs

use libc::c_int;
use rdma_sys::*;

use crate::cbox::{CBox, get, zeroed};
use crate::packet::{GRH_LEN, gid_bytes, gids};
use crate::world::{Outcome, World, enter, minus_one, null, positive};

pub(crate) struct AddressHandle {
    _memory: CBox<ibv_ah>,
    pub(crate) pd: usize,
    pub(crate) dgid: [u8; 16],
    pub(crate) sgid_index: usize,
}

impl World {
    fn create_ah(&mut self, pd: *mut ibv_pd, attr: ibv_ah_attr) -> Outcome<*mut ibv_ah> {
        let context = self.pd(pd)?.context;
        let gids = self.device_of(context)?.gids.len();
        let sgid_index = usize::from(attr.grh.sgid_index);
        if attr.is_global == 0 || attr.port_num != 1 || sgid_index >= gids {
            return Err(libc::EINVAL);
        }
        let memory = CBox::new(ibv_ah {
            context,
            pd,
            handle: self.serial(),
        });
        let ptr = memory.ptr();
        let dgid = gid_bytes(attr.grh.dgid);
        let ah = AddressHandle {
            _memory: memory,
            pd: pd.addr(),
            dgid,
            sgid_index,
        };
        self.ahs.insert(ptr.addr(), ah);
        Ok(ptr)
    }

    /// The attributes of an answer to the sender of a received datagram.
    fn ah_from_wc(
        &mut self,
        context: *mut ibv_context,
        port: u8,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
    ) -> Outcome<ibv_ah_attr> {
        crate::device::check_port(port)?;
        let device = self.device_of(context)?;
        // SAFETY: ibv_ah_attr holds integers and GID bytes: zero is valid.
        let mut attr: ibv_ah_attr = unsafe { zeroed() };
        attr.port_num = port;
        attr.sl = get!(wc, sl);
        if get!(wc, wc_flags) & ibv_wc_flags::IBV_WC_GRH.0 == 0 {
            return Ok(attr);
        }
        // SAFETY: C requires a readable header of 40 bytes at `grh` when the completion says there is one.
        let header: [u8; GRH_LEN] = unsafe { grh.cast::<[u8; GRH_LEN]>().read_unaligned() };
        let (sender, receiver) = gids(&header);
        let own = device
            .gids
            .iter()
            .rposition(|gid| gid.raw == receiver)
            .ok_or(libc::EINVAL)?;
        attr.is_global = 1;
        attr.grh.dgid = ibv_gid { raw: sender };
        attr.grh.sgid_index = own as u8;
        attr.grh.hop_limit = 0xff;
        Ok(attr)
    }
}

/// `ibv_create_ah(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    null(enter("ibv_create_ah", |w| {
        // SAFETY: C requires `attr` to be readable.
        w.create_ah(pd, unsafe { attr.read() })
    }))
}

/// `ibv_init_ah_from_wc(3)`: -1 and errno.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    ah_attr: *mut ibv_ah_attr,
) -> c_int {
    minus_one(enter("ibv_init_ah_from_wc", |w| {
        let attr = w.ah_from_wc(context, port_num, wc, grh)?;
        // SAFETY: C requires `ah_attr` to be writable.
        unsafe { ah_attr.write(attr) };
        Ok(())
    }))
}

/// `ibv_create_ah_from_wc(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    null(enter("ibv_create_ah_from_wc", |w| {
        let context = w.pd(pd)?.context;
        let attr = w.ah_from_wc(context, port_num, wc, grh)?;
        w.create_ah(pd, attr)
    }))
}

/// `ibv_destroy_ah(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    positive(enter("ibv_destroy_ah", |w| {
        match w.ahs.remove(&ah.addr()) {
            Some(_) => Ok(()),
            None => w.unknown("address handle"),
        }
    }))
}

/// `ibv_attach_mcast(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_attach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    _lid: u16,
) -> c_int {
    positive(enter("ibv_attach_mcast", |w| {
        // SAFETY: C requires `gid` to be readable.
        let group = gid_bytes(unsafe { gid.read() });
        let record = w.qp(qp)?;
        if !record.is_ud() || group[0] != 0xff {
            return Err(libc::EINVAL);
        }
        if !record.groups.contains(&group) {
            record.groups.push(group);
        }
        Ok(())
    }))
}

/// `ibv_detach_mcast(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_detach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    _lid: u16,
) -> c_int {
    positive(enter("ibv_detach_mcast", |w| {
        // SAFETY: C requires `gid` to be readable.
        let group = gid_bytes(unsafe { gid.read() });
        let record = w.qp(qp)?;
        let at = record
            .groups
            .iter()
            .position(|g| *g == group)
            .ok_or(libc::EINVAL)?;
        record.groups.swap_remove(at);
        Ok(())
    }))
}

/// `ibv_resolve_eth_l2_from_gid(3)`: every peer has the same made-up address.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    _attr: *mut ibv_ah_attr,
    _eth_mac: *mut u8,
    _vid: *mut u16,
) -> c_int {
    libc::EOPNOTSUPP
}
