//! `rdma_getaddrinfo`, for numeric addresses and ports.
#![allow(unsafe_code)] // defines C symbols; reads the callers' strings and hints

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{c_char, c_int, sockaddr_storage};
use rdma_sys::*;

use crate::cbox::{CBox, get, zeroed};
use crate::inet;
use crate::world::{Outcome, enter, set_errno};

/// Keeps a result and the addresses it points to alive.
pub(crate) struct Record {
    _memory: CBox<rdma_addrinfo>,
    _addr: CBox<sockaddr_storage>,
}

/// What the caller wants.
struct Wanted {
    passive: bool,
    family: c_int,
    qp_type: c_int,
    port_space: c_int,
}

impl Wanted {
    fn read(hints: *const rdma_addrinfo) -> Self {
        let tcp = rdma_port_space::RDMA_PS_TCP as c_int;
        let rc = ibv_qp_type::IBV_QPT_RC as c_int;
        if hints.is_null() {
            return Self {
                passive: false,
                family: 0,
                qp_type: rc,
                port_space: tcp,
            };
        }
        let or = |value: c_int, default| if value == 0 { default } else { value };
        let port_space = or(get!(hints, ai_port_space), tcp);
        let ud = ibv_qp_type::IBV_QPT_UD as c_int;
        Self {
            passive: get!(hints, ai_flags) & RAI_PASSIVE as c_int != 0,
            family: get!(hints, ai_family),
            qp_type: or(
                get!(hints, ai_qp_type),
                if port_space == tcp { rc } else { ud },
            ),
            port_space,
        }
    }
}

fn resolve(node: Option<&str>, service: Option<&str>, wanted: &Wanted) -> Outcome<SocketAddr> {
    let port = service
        .map_or(Ok(0), str::parse)
        .map_err(|_| libc::EAI_SERVICE)?;
    let ip: IpAddr = match node {
        Some(node) => node.parse().map_err(|_| libc::EAI_NONAME)?,
        None if !wanted.passive => return Err(libc::EAI_NONAME),
        None if wanted.family == libc::AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
        None => Ipv4Addr::UNSPECIFIED.into(),
    };
    let family = if ip.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    if wanted.family != 0 && wanted.family != family {
        return Err(libc::EAI_FAMILY);
    }
    Ok(SocketAddr::new(ip, port))
}

fn text<'a>(from: *const c_char) -> Option<&'a str> {
    if from.is_null() {
        return None;
    }
    // SAFETY: not null, and C requires a terminated string that lives for the call.
    unsafe { CStr::from_ptr(from) }.to_str().ok()
}

fn result(addr: SocketAddr, wanted: &Wanted) -> (*mut rdma_addrinfo, Record) {
    let storage = CBox::new(inet::storage(addr));
    // SAFETY: rdma_addrinfo holds raw pointers and integers: zero is valid.
    let mut info: rdma_addrinfo = unsafe { zeroed() };
    info.ai_family = if addr.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    info.ai_qp_type = wanted.qp_type;
    info.ai_port_space = wanted.port_space;
    if wanted.passive {
        info.ai_flags = RAI_PASSIVE as c_int;
        (info.ai_src_addr, info.ai_src_len) = (storage.ptr().cast(), inet::len(addr));
    } else {
        (info.ai_dst_addr, info.ai_dst_len) = (storage.ptr().cast(), inet::len(addr));
    }
    let memory = CBox::new(info);
    (
        memory.ptr(),
        Record {
            _memory: memory,
            _addr: storage,
        },
    )
}

/// `rdma_getaddrinfo(3)`: 0, a code of `getaddrinfo(3)`, or -1 and errno.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    let mut code = None;
    let done = enter("rdma_getaddrinfo", |w| {
        let wanted = Wanted::read(hints);
        match resolve(text(node), text(service), &wanted) {
            Ok(addr) => {
                let (ptr, record) = result(addr, &wanted);
                w.cm.addrinfos.insert(ptr.addr(), record);
                // SAFETY: C requires `res` to be writable.
                unsafe { res.write(ptr) };
            }
            Err(error) => code = Some(error),
        }
        Ok(())
    });
    match (done, code) {
        (Err(errno), _) => {
            set_errno(errno);
            -1
        }
        (Ok(()), code) => code.unwrap_or(0),
    }
}

/// `rdma_freeaddrinfo(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) {
    let _ = enter("rdma_freeaddrinfo", |w| {
        match w.cm.addrinfos.remove(&res.addr()) {
            Some(_) => Ok(()),
            None => w.unknown("addrinfo"),
        }
    });
}
