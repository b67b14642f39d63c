//! Address and route resolution.
#![allow(unsafe_code)] // defines C symbols

use std::net::{IpAddr, SocketAddr};

use libc::{c_int, sockaddr};
use rdma_sys::*;

use super::event::{Body, number};
use super::id::State;
use crate::inet;
use crate::world::{Outcome, World, enter, minus_one};

/// What the fabric's routing table says of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Device(usize),
    /// On the devices' network, but nobody there.
    NobodyThere,
    /// On a network no RDMA device serves.
    NoDevice,
    Unroutable,
}

impl World {
    pub(crate) fn device_with(&self, ip: IpAddr) -> Option<usize> {
        self.devices
            .iter()
            .find(|d| !d.removed && d.has_ip(ip))
            .map(|d| d.index)
    }

    fn route(&self, ip: IpAddr) -> Route {
        if let Some(device) = self.device_with(ip) {
            return Route::Device(device);
        }
        match ip {
            IpAddr::V4(v4) => match v4.octets() {
                [10, 9, 0, _] => Route::NobodyThere,
                [192, 0, 2, _] => Route::Unroutable,
                _ => Route::NoDevice,
            },
            IpAddr::V6(v6) => match v6.segments() {
                [0xfd09, 0, 0, 0, ..] => Route::NobodyThere,
                [0x2001, 0xdb8, ..] => Route::Unroutable,
                _ => Route::NoDevice,
            },
        }
    }

    /// The device that speaks to `dst`: the first other one, as if each device were its own host.
    fn device_towards(&self, dst: Route) -> Option<usize> {
        let present = || self.devices.iter().filter(|d| !d.removed).map(|d| d.index);
        match dst {
            Route::Device(device) => present().find(|&d| d != device).or(Some(device)),
            _ => present().next(),
        }
    }

    fn resolve_addr(
        &mut self,
        id: *mut rdma_cm_id,
        src: *const sockaddr,
        dst: *const sockaddr,
    ) -> Outcome<()> {
        let dst = inet::read(dst).ok_or(libc::EAFNOSUPPORT)?;
        let is_bound = matches!(self.id(id)?.state, State::Bound); // then the source is ignored
        if let Some(src) = inet::read(src).filter(|_| !is_bound) {
            self.bind_to(id, src)?;
        }
        if !matches!(self.id(id)?.state, State::Idle | State::Bound) {
            return Err(libc::EINVAL);
        }
        let route = self.route(dst.ip());
        match route {
            Route::Unroutable => return Err(libc::ENETUNREACH),
            Route::NoDevice => {
                // As in the kernel, the id may try again.
                self.id(id)?.state = State::Bound;
                self.notify(id.addr(), number::ADDR_ERROR, -libc::ENODEV, Body::Nothing);
                return Ok(());
            }
            Route::Device(_) | Route::NobodyThere => {}
        }
        let device = match self.id(id)?.device {
            Some(device) => device,
            None => self.device_towards(route).ok_or(libc::ENODEV)?,
        };
        let port = match self.id(id)?.src {
            Some(src) => src.port(),
            None => self.ephemeral_port(),
        };
        let ip = match dst {
            SocketAddr::V4(_) => IpAddr::V4(self.devices[device].ipv4),
            SocketAddr::V6(_) => IpAddr::V6(self.devices[device].ipv6),
        };
        let record = self.id(id)?;
        record.device = Some(device);
        record.src = Some(SocketAddr::new(ip, port));
        record.dst = Some(dst);
        record.state = State::AddressResolved;
        self.notify(id.addr(), number::ADDR_RESOLVED, 0, Body::Nothing);
        Ok(())
    }

    fn resolve_route(&mut self, id: *mut rdma_cm_id) -> Outcome<()> {
        let record = self.id(id)?;
        if record.state != State::AddressResolved {
            return Err(libc::EINVAL);
        }
        record.state = State::RouteResolved;
        self.notify(id.addr(), number::ROUTE_RESOLVED, 0, Body::Nothing);
        Ok(())
    }
}

/// `rdma_resolve_addr(3)`: answered at once, whatever the timeout.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src_addr: *mut sockaddr,
    dst_addr: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    minus_one(enter("rdma_resolve_addr", |w| {
        w.resolve_addr(id, src_addr, dst_addr)
    }))
}

/// `rdma_resolve_route(3)`: answered at once, whatever the timeout.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    minus_one(enter("rdma_resolve_route", |w| w.resolve_route(id)))
}
