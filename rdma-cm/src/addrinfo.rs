//! Names of hosts and services, by the system's resolver and by librdmacm's.
#![allow(unsafe_code)] // rdma_getaddrinfo(3) and the list it returns

use std::ffi::{CStr, CString};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::raw::c_int;
use std::ptr;

use crate::addr::RawAddr;
use crate::error::{CmError, Result};
use crate::id::PortSpace;
use crate::sys;

/// The addresses of `host`, a name or a number, each with `port`, as the system's resolver has them.
///
/// It may ask a name server, so it may block for as long as the system's configuration allows.
///
/// # Errors
///
/// [`CmError::Name`] if the name is not known.
///
/// ```
/// let addresses = rdma_cm::resolve_name("127.0.0.1", 7471)?;
/// assert_eq!(addresses, ["127.0.0.1:7471".parse().unwrap()]);
/// # Ok::<(), rdma_cm::CmError>(())
/// ```
pub fn resolve_name(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    match (host, port).to_socket_addrs() {
        Ok(addresses) => Ok(addresses.collect()),
        Err(source) => Err(CmError::Name {
            name: host.to_owned(),
            source,
        }),
    }
}

/// What to look for with [`AddrInfo::resolve`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddrHints {
    /// For listening: the result is a local address. Otherwise it is a peer.
    #[doc(alias = "RAI_PASSIVE")]
    pub passive: bool,
    /// The host is a number; no name server is asked.
    #[doc(alias = "RAI_NUMERICHOST")]
    pub numeric_host: bool,
    /// Only addresses, no path: the InfiniBand address service is not asked.
    #[doc(alias = "RAI_NOROUTE")]
    pub no_route: bool,
    /// The port space.
    pub port_space: PortSpace,
}

impl Default for AddrHints {
    fn default() -> Self {
        Self {
            passive: false,
            numeric_host: false,
            no_route: false,
            port_space: PortSpace::Tcp,
        }
    }
}

/// One result of librdmacm's resolver; addresses that are not IP are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddrInfo {
    /// The local address, for listening or where librdmacm chose one.
    pub source: Option<SocketAddr>,
    /// The peer's address.
    pub destination: Option<SocketAddr>,
}

impl AddrInfo {
    /// Resolves a host and a service (a name or a port number) with librdmacm, which on InfiniBand
    /// may ask its address service (ibacm) as well. It may block, as [`resolve_name`] may.
    ///
    /// # Errors
    ///
    /// [`CmError::Name`] if the host or service is not known, or if there is no RDMA device at all.
    #[doc(alias = "rdma_getaddrinfo")]
    pub fn resolve(host: &str, service: &str, hints: &AddrHints) -> Result<Vec<Self>> {
        let failed = |source| CmError::Name {
            name: format!("{host} {service}"),
            source,
        };
        let node = CString::new(host).map_err(|e| failed(e.into()))?;
        let port = CString::new(service).map_err(|e| failed(e.into()))?;
        let raw_hints = hints.to_raw();
        let mut list = ptr::null_mut();
        // SAFETY: both strings end with NUL and outlive the call, as do the hints, whose pointers
        // are null; `list` is a pointer that the function sets.
        let ret =
            unsafe { sys::rdma_getaddrinfo(node.as_ptr(), port.as_ptr(), &raw_hints, &mut list) };
        check_resolver(ret).map_err(failed)?;
        Ok(AddrList(list).read())
    }
}

impl AddrHints {
    fn to_raw(&self) -> sys::rdma_addrinfo {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let flags = flag(self.passive, sys::RAI_PASSIVE)
            | flag(self.numeric_host, sys::RAI_NUMERICHOST)
            | flag(self.no_route, sys::RAI_NOROUTE);
        // SAFETY: rdma_addrinfo is made of integers and pointers, for which zero is valid.
        let mut raw: sys::rdma_addrinfo = unsafe { std::mem::zeroed() };
        raw.ai_flags = flags as c_int; // bits, not a number
        raw.ai_port_space = self.port_space.as_raw() as c_int; // below 2^16
        raw
    }
}

/// 0, or -1 and errno, or a number of getaddrinfo(3).
fn check_resolver(ret: c_int) -> io::Result<()> {
    match ret {
        0 => Ok(()),
        -1 | libc::EAI_SYSTEM => Err(io::Error::last_os_error()),
        code => {
            // SAFETY: the function takes any number.
            let text = unsafe { libc::gai_strerror(code) };
            // SAFETY: it returns a static string for each.
            let text = unsafe { CStr::from_ptr(text) };
            Err(io::Error::other(text.to_string_lossy().into_owned()))
        }
    }
}

/// The list of rdma_getaddrinfo(3).
struct AddrList(*mut sys::rdma_addrinfo);

impl AddrList {
    fn read(&self) -> Vec<AddrInfo> {
        let mut found = Vec::new();
        let mut next = self.0;
        while !next.is_null() {
            // SAFETY: `next` is an entry of the list, which nobody changes and `Drop` frees.
            let entry = unsafe { &*next };
            next = entry.ai_next;
            found.push(AddrInfo {
                source: read_addr(entry.ai_src_addr, entry.ai_src_len),
                destination: read_addr(entry.ai_dst_addr, entry.ai_dst_len),
            });
        }
        found
    }
}

impl Drop for AddrList {
    fn drop(&mut self) {
        // SAFETY: the list came from rdma_getaddrinfo and is freed here only; null is allowed.
        unsafe { sys::rdma_freeaddrinfo(self.0) }
    }
}

fn read_addr(addr: *const libc::sockaddr, len: libc::socklen_t) -> Option<SocketAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: the list holds `len` bytes of address there.
    unsafe { RawAddr::copy_from(addr, len as usize) }.to_socket_addr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the system")]
    fn a_name_that_is_not_known_is_named_in_the_error() {
        let error = resolve_name("no-such-host.invalid", 1).unwrap_err();
        assert!(
            error.to_string().contains("no-such-host.invalid"),
            "{error}"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system")]
    fn a_code_of_the_resolver_is_told_in_words() {
        let error = check_resolver(libc::EAI_NONAME).unwrap_err();
        assert!(error.to_string().contains("not known"), "{error}");
    }
}
