//! Which device belongs to which address of this host.
#![allow(unsafe_code)] // getifaddrs(3) and the list it returns

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ptr;

use rdma_core_rs::Context;

use crate::addr::{RawAddr, check_scope};
use crate::error::{CmError, Result, Step};
use crate::id::{CmId, PortSpace};

/// An address of this host that belongs to an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAddress {
    /// The address; its port is 0.
    pub addr: SocketAddr,
    /// The device's name, for instance `mlx5_0` or `rxe0`.
    pub device: String,
    /// The port of the device, from 1.
    pub port_num: u8,
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addr {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => write!(f, "{}%{}", v6.ip(), v6.scope_id())?,
            addr => write!(f, "{}", addr.ip())?,
        }
        write!(f, " ({})", self.device)
    }
}

/// The device that the local address `local` belongs to; its port is ignored.
///
/// The context is the one that all connections on this device share, so memory registered on it can
/// be used with any of them.
///
/// # Errors
///
/// [`CmError::NoDevice`] if no RDMA device has the address, which a wildcard never is;
/// [`CmError::NoConnectionManager`]; [`CmError::Call`].
///
/// ```no_run
/// let context = rdma_cm::context_for("192.168.99.1:0".parse().unwrap())?;
/// # Ok::<(), rdma_cm::CmError>(())
/// ```
pub fn context_for(mut local: SocketAddr) -> Result<Context> {
    check_scope(local)?;
    local.set_port(0);
    let mut id = CmId::new(PortSpace::Tcp)?;
    id.bind(local).map_err(CmError::with_candidates)?;
    match id.verbs() {
        Some(_) => id.context(),
        None => Err(CmError::no_device(local).with_candidates()),
    }
}

/// The addresses of this host that belong to an RDMA device.
///
/// # Errors
///
/// [`CmError::NoConnectionManager`], or [`CmError::Call`] if the addresses cannot be listed.
pub fn device_addresses() -> Result<Vec<DeviceAddress>> {
    let mut found = Vec::new();
    for addr in interface_addresses().map_err(CmError::call("getifaddrs", Step::Device, None))? {
        let mut id = CmId::new(PortSpace::Tcp)?;
        if id
            .bind(addr)
            .is_err_and(|e| !matches!(e, CmError::NoDevice { .. }))
        {
            log::debug!("{addr} cannot be bound");
        }
        if let Some(device) = id.device_name() {
            found.push(DeviceAddress {
                addr,
                device,
                port_num: id.port_num(),
            });
        }
    }
    Ok(found)
}

impl CmError {
    /// The error for an address without a device; [`with_candidates`](Self::with_candidates) adds
    /// what would do.
    pub(crate) fn no_device(addr: SocketAddr) -> Self {
        Self::NoDevice { addr, known: None }
    }

    /// Adds the addresses that would do to a [`NoDevice`](Self::NoDevice) that has none, as far as they
    /// can be found out; any other error stays as it is.
    ///
    /// The calls of this crate that wait do that themselves. Those that do not, such as
    /// [`Resolving::advance`](crate::Resolving::advance), and the awaited ones leave it to the program:
    /// each address of this host is bound for it, which takes milliseconds.
    #[must_use]
    pub fn with_candidates(self) -> Self {
        // Apart from making the error, because finding them makes such errors.
        match self {
            Self::NoDevice { addr, known: None } => {
                let known = Some(device_addresses().unwrap_or_default());
                Self::NoDevice { addr, known }
            }
            other => other,
        }
    }
}

/// All IPv4 and IPv6 addresses of this host's interfaces, with port 0.
fn interface_addresses() -> io::Result<Vec<SocketAddr>> {
    if cfg!(miri) {
        return Ok(Vec::new()); // Miri has no getifaddrs
    }
    let list = InterfaceList::new()?;
    let mut addresses = Vec::new();
    let mut next = list.0;
    while !next.is_null() {
        // SAFETY: `next` is an entry of the list, which lives until `list` is dropped.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        addresses.extend(read_addr(entry));
    }
    Ok(addresses)
}

fn read_addr(entry: &libc::ifaddrs) -> Option<SocketAddr> {
    if entry.ifa_addr.is_null() {
        return None;
    }
    // SAFETY: a non-null address has at least its family.
    let len = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: an address of that family has `len` bytes.
    unsafe { RawAddr::copy_from(entry.ifa_addr, len) }.to_socket_addr()
}

/// The list of getifaddrs(3).
struct InterfaceList(*mut libc::ifaddrs);

impl InterfaceList {
    fn new() -> io::Result<Self> {
        let mut list = ptr::null_mut();
        // SAFETY: `list` is a pointer that the function sets.
        match unsafe { libc::getifaddrs(&mut list) } {
            0 => Ok(Self(list)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for InterfaceList {
    fn drop(&mut self) {
        // SAFETY: the list came from getifaddrs and is freed here only.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the system")]
    fn the_loopback_address_is_among_the_interfaces() {
        let addresses = interface_addresses().unwrap();
        assert!(
            addresses.contains(&"127.0.0.1:0".parse().unwrap()),
            "{addresses:?}"
        );
        assert!(addresses.iter().all(|addr| addr.port() == 0));
    }
}
