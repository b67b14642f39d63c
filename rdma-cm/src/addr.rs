//! Socket addresses, to and from the storage that librdmacm reads and writes.
//!
//! librdmacm keeps both addresses of an id inside it, as a union of `sockaddr`, `sockaddr_in`,
//! `sockaddr_in6` and `sockaddr_storage`. A `&sockaddr` covers 16 bytes only, too few for IPv6, so
//! nothing here ever makes one: the whole storage is copied and then read by its family.
#![allow(unsafe_code)] // views of one sockaddr type as another, each inside its own storage

use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

use crate::error::{CmError, Result};

/// A socket address in the form that C reads; it must outlive the call it is passed to.
#[derive(Clone, Copy)]
pub(crate) struct RawAddr {
    storage: libc::sockaddr_storage,
}

impl RawAddr {
    /// The address for librdmacm, which takes it as `*mut` but does not write to it.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    /// Copies an address of `len` bytes; what does not fit into any address is left out.
    ///
    /// # Safety
    ///
    /// `addr` must point to `len` readable bytes.
    pub(crate) unsafe fn copy_from(addr: *const libc::sockaddr, len: usize) -> Self {
        // SAFETY: sockaddr_storage is made of integers, for which zero is a valid value.
        let mut storage: libc::sockaddr_storage = unsafe { mem::zeroed() };
        let len = len.min(size_of::<libc::sockaddr_storage>());
        // SAFETY: the caller vouches for `len` readable bytes; as many fit into the storage, which
        // is a local and hence apart from them.
        unsafe { ptr::copy_nonoverlapping(addr.cast::<u8>(), (&raw mut storage).cast(), len) };
        Self { storage }
    }

    /// The address as Rust knows it, or `None` if it is neither IPv4 nor IPv6.
    pub(crate) fn to_socket_addr(self) -> Option<SocketAddr> {
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => Some(SocketAddr::V4(self.v4())),
            libc::AF_INET6 => Some(SocketAddr::V6(self.v6())),
            _ => None,
        }
    }

    fn v4(self) -> SocketAddrV4 {
        // SAFETY: sockaddr_storage is larger than sockaddr_in and aligned for it, all of its bytes
        // are initialised, and every bit pattern is a valid sockaddr_in.
        let sin: libc::sockaddr_in =
            unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
        SocketAddrV4::new(
            Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr)),
            u16::from_be(sin.sin_port),
        )
    }

    fn v6(self) -> SocketAddrV6 {
        // SAFETY: as in `v4`: large enough, aligned, initialised, and valid for every bit pattern.
        let sin: libc::sockaddr_in6 = unsafe {
            (&raw const self.storage)
                .cast::<libc::sockaddr_in6>()
                .read()
        };
        SocketAddrV6::new(
            Ipv6Addr::from(sin.sin6_addr.s6_addr),
            u16::from_be(sin.sin6_port),
            sin.sin6_flowinfo,
            sin.sin6_scope_id,
        )
    }
}

impl From<libc::sockaddr_storage> for RawAddr {
    fn from(storage: libc::sockaddr_storage) -> Self {
        Self { storage }
    }
}

impl From<SocketAddr> for RawAddr {
    fn from(addr: SocketAddr) -> Self {
        // SAFETY: sockaddr_storage is made of integers, for which zero is a valid value.
        let mut storage: libc::sockaddr_storage = unsafe { mem::zeroed() };
        match addr {
            SocketAddr::V4(v4) => {
                let sin = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from(*v4.ip()).to_be(),
                    },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_in fits into sockaddr_storage, which is aligned for it and ours.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(sin) };
            }
            SocketAddr::V6(v6) => {
                let sin = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: sockaddr_in6 fits into sockaddr_storage, which is aligned for it and ours.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(sin) };
            }
        }
        Self { storage }
    }
}

/// The wildcard address of the family of `addr`, with port 0: "nothing is known".
pub(crate) fn unspecified_like(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

/// A link-local address means something else on every interface, so it has to name one.
pub(crate) fn check_scope(addr: SocketAddr) -> Result<()> {
    match addr {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => {
            Err(CmError::Config {
                field: "address",
                asked: addr.to_string(),
                allowed: "a link-local address needs its interface, as in [fe80::1%2]:7471",
            })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(text: &str) -> SocketAddr {
        let addr: SocketAddr = text.parse().unwrap();
        RawAddr::from(addr).to_socket_addr().unwrap()
    }

    #[test]
    fn ipv4_survives_the_round_trip() {
        assert_eq!(
            round_trip("192.168.99.2:7471"),
            "192.168.99.2:7471".parse().unwrap()
        );
    }

    #[test]
    fn ipv6_keeps_its_scope_and_its_flow_label() {
        let addr = SocketAddr::V6(SocketAddrV6::new(
            "fe80::1:2".parse().unwrap(),
            4791,
            0x0123,
            7,
        ));
        assert_eq!(RawAddr::from(addr).to_socket_addr(), Some(addr));
        assert_eq!(
            round_trip("[fe80::5%3]:1"),
            "[fe80::5%3]:1".parse().unwrap()
        );
    }

    #[test]
    fn the_bytes_are_those_that_c_expects() {
        let mut raw = RawAddr::from("1.2.3.4:258".parse::<SocketAddr>().unwrap());
        let ptr = raw.as_mut_ptr().cast::<u8>();
        // SAFETY: `ptr` points to the 128 initialised bytes of `raw`, which lives on.
        let bytes = unsafe { std::slice::from_raw_parts(ptr, 8) };
        assert_eq!(bytes[..2], (libc::AF_INET as u16).to_ne_bytes());
        assert_eq!(bytes[2..], [1, 2, 1, 2, 3, 4]);
    }

    #[test]
    fn a_link_local_address_has_to_name_its_interface() {
        assert!(check_scope("[fe80::1]:1".parse().unwrap()).is_err());
        for fine in ["[fe80::1%2]:1", "[fd99::1]:1", "10.0.0.1:1", "[::]:0"] {
            check_scope(fine.parse().unwrap()).unwrap();
        }
    }

    #[test]
    fn a_family_that_is_not_ip_is_no_socket_address() {
        let mut raw = RawAddr::from("1.2.3.4:5".parse::<SocketAddr>().unwrap());
        raw.storage.ss_family = 27; // AF_IB
        assert_eq!(raw.to_socket_addr(), None);
        raw.storage.ss_family = 0;
        assert_eq!(raw.to_socket_addr(), None);
    }
}
