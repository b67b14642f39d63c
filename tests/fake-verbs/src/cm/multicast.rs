//! Multicast groups joined through an id.
#![allow(unsafe_code)] // defines C symbols; reads the callers' addresses

use std::net::{IpAddr, SocketAddr};

use libc::{c_int, c_void, sockaddr};
use rdma_sys::*;

use super::event::{Body, number};
use crate::cbox::get;
use crate::inet;
use crate::world::{Outcome, World, enter, minus_one};

const UDP_QKEY: u32 = 0x0123_4567;
const MULTICAST_QPN: u32 = 0xff_ffff;

/// A group an id is in.
pub(crate) struct Group {
    addr: SocketAddr,
}

impl World {
    fn join(&mut self, id: *mut rdma_cm_id, addr: *const sockaddr) -> Outcome<()> {
        let addr = inet::read(addr).ok_or(libc::EINVAL)?;
        let record = self.id(id)?;
        let (device, src) = (
            record.device.ok_or(libc::EINVAL)?,
            record.src.ok_or(libc::EINVAL)?,
        );
        if !record.is_udp() || !addr.ip().is_multicast() {
            return Err(libc::EINVAL);
        }
        record.groups.push(Group { addr });
        let sgid_index = self.devices[device]
            .gid_of(src.ip())
            .map_or(0, |(index, _)| index);
        let dgid = group_gid(addr.ip());
        let body = Body::Datagram {
            qp_num: MULTICAST_QPN,
            qkey: UDP_QKEY,
            dgid,
            sgid_index,
            data: Vec::new(),
        };
        self.notify(id.addr(), number::MULTICAST_JOIN, 0, body);
        Ok(())
    }

    fn leave(&mut self, id: *mut rdma_cm_id, addr: *const sockaddr) -> Outcome<()> {
        let addr = inet::read(addr).ok_or(libc::EINVAL)?;
        let record = self.id(id)?;
        let at = record.groups.iter().position(|group| group.addr == addr);
        record.groups.swap_remove(at.ok_or(libc::EADDRNOTAVAIL)?);
        Ok(())
    }
}

/// The GID of a group: `ff0e::ffff:a.b.c.d` for IPv4, the address itself for IPv6.
fn group_gid(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(v6) => v6.octets(),
        IpAddr::V4(v4) => {
            let mut gid = [0; 16];
            gid[..2].copy_from_slice(&[0xff, 0x0e]);
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&v4.octets());
            gid
        }
    }
}

/// `rdma_join_multicast(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
    _context: *mut c_void,
) -> c_int {
    minus_one(enter("rdma_join_multicast", |w| w.join(id, addr)))
}

/// `rdma_join_multicast_ex(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    _context: *mut c_void,
) -> c_int {
    minus_one(enter("rdma_join_multicast_ex", |w| {
        w.join(id, get!(attr, addr))
    }))
}

/// `rdma_leave_multicast(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_leave_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
) -> c_int {
    minus_one(enter("rdma_leave_multicast", |w| w.leave(id, addr)))
}
