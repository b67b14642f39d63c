//! Socket addresses between C and Rust.
#![allow(unsafe_code)] // reads the callers' sockaddr by its family

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

use crate::cbox::{get, put, zeroed};

/// The address at `addr`; `None` for null or a family the fabric has not.
pub(crate) fn read(addr: *const sockaddr) -> Option<SocketAddr> {
    if addr.is_null() {
        return None;
    }
    // The caller's pointer may cover a shorter struct than sockaddr_storage: read by family, and unaligned.
    match i32::from(get!(addr, sa_family)) {
        libc::AF_INET => {
            let v4 = addr.cast::<sockaddr_in>();
            let ip = Ipv4Addr::from(u32::from_be(get!(v4, sin_addr.s_addr)));
            Some(SocketAddr::new(ip.into(), u16::from_be(get!(v4, sin_port))))
        }
        libc::AF_INET6 => {
            let v6 = addr.cast::<sockaddr_in6>();
            let ip = Ipv6Addr::from(get!(v6, sin6_addr.s6_addr));
            let (flow, scope) = (get!(v6, sin6_flowinfo), get!(v6, sin6_scope_id));
            Some(SocketAddrV6::new(ip, u16::from_be(get!(v6, sin6_port)), flow, scope).into())
        }
        _ => None,
    }
}

/// Writes the address over a zeroed storage.
pub(crate) fn storage(addr: SocketAddr) -> sockaddr_storage {
    // SAFETY: sockaddr_storage holds integers only: zero is valid.
    let mut storage: sockaddr_storage = unsafe { zeroed() };
    let ptr = &raw mut storage;
    match addr {
        SocketAddr::V4(v4) => {
            let to = ptr.cast::<sockaddr_in>();
            put!(to, sin_family, libc::AF_INET as u16);
            put!(to, sin_port, v4.port().to_be());
            put!(to, sin_addr.s_addr, u32::from(*v4.ip()).to_be());
        }
        SocketAddr::V6(v6) => {
            let to = ptr.cast::<sockaddr_in6>();
            put!(to, sin6_family, libc::AF_INET6 as u16);
            put!(to, sin6_port, v6.port().to_be());
            put!(to, sin6_addr.s6_addr, v6.ip().octets());
            put!(to, sin6_scope_id, v6.scope_id());
        }
    }
    storage
}

/// Length of the C struct of the address's family.
pub(crate) fn len(addr: SocketAddr) -> u32 {
    match addr {
        SocketAddr::V4(_) => size_of::<sockaddr_in>() as u32,
        SocketAddr::V6(_) => size_of::<sockaddr_in6>() as u32,
    }
}

/// The GID RoCE v2 gives to an address.
pub(crate) fn gid(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}
