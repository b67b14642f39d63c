//! Devices, contexts, ports, GIDs and P_Keys.
#![allow(unsafe_code)] // defines C symbols; fills C structs through the caller's pointers

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use libc::{c_char, c_int};
use rdma_sys::*;

use crate::async_event::AsyncEvent;
use crate::cbox::{CBox, zeroed};
use crate::config::Limits;
use crate::queue::EventQueue;
use crate::world::{Outcome, World, enter, minus_one, null, positive, set_errno};
use crate::{cq, device_ex, mr, post};

pub(crate) const GID_TABLE_LEN: usize = 16;
pub(crate) const PKEY: u16 = 0xffff;
pub(crate) const MTU_BYTES: usize = 4096;
const ROCE_V1: u32 = 1;
const ROCE_V2: u32 = 2;
const LINK_LAYER_ETHERNET: u8 = 2;

/// One fake NIC.
pub(crate) struct Device {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) ipv4: Ipv4Addr,
    pub(crate) ipv6: Ipv6Addr,
    pub(crate) gids: Vec<Gid>,
    pub(crate) port_up: bool,
    /// Removed devices are in no list any more.
    pub(crate) removed: bool,
    /// The C struct, alive while a list or a context refers to it.
    handle: Option<CBox<ibv_device>>,
    references: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) raw: [u8; 16],
    pub(crate) kind: u32,
}

/// An opened device; keyed by the address of its `ibv_context`.
pub(crate) struct Context {
    pub(crate) ptr: *mut ibv_context,
    pub(crate) device: usize,
    pub(crate) events: EventQueue<AsyncEvent>,
    /// Port and device events got and not acked.
    pub(crate) unacked: u32,
    /// Opened by the connection manager for its ids.
    pub(crate) of_cm: bool,
    _memory: CBox<verbs_context>,
}

impl Device {
    pub(crate) fn new(index: usize) -> Self {
        let host = u8::try_from(index + 1).unwrap_or(u8::MAX);
        let ipv4 = Ipv4Addr::new(10, 9, 0, host);
        let ipv6 = Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, host.into());
        let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x0009, 0, 0, host.into()).octets();
        let mapped = ipv4.to_ipv6_mapped().octets();
        let gids = vec![
            Gid {
                raw: link_local,
                kind: ROCE_V1,
            },
            Gid {
                raw: link_local,
                kind: ROCE_V2,
            },
            Gid {
                raw: mapped,
                kind: ROCE_V1,
            },
            Gid {
                raw: mapped,
                kind: ROCE_V2,
            },
            Gid {
                raw: ipv6.octets(),
                kind: ROCE_V1,
            },
            Gid {
                raw: ipv6.octets(),
                kind: ROCE_V2,
            },
        ];
        Self {
            index,
            name: format!("fake{index}"),
            ipv4,
            ipv6,
            gids,
            port_up: true,
            removed: false,
            handle: None,
            references: 0,
        }
    }

    pub(crate) fn guid(&self) -> u64 {
        0x0209_00ff_fe00_0000 | (self.index as u64 + 1)
    }

    pub(crate) fn has_ip(&self, ip: IpAddr) -> bool {
        ip == IpAddr::V4(self.ipv4) || ip == IpAddr::V6(self.ipv6)
    }

    /// The RoCE v2 GID of one of the device's addresses, and its index.
    pub(crate) fn gid_of(&self, ip: IpAddr) -> Option<(u8, [u8; 16])> {
        let raw = crate::inet::gid(ip);
        let index = self
            .gids
            .iter()
            .position(|g| g.raw == raw && g.kind == ROCE_V2)?;
        Some((index as u8, raw))
    }

    /// The C struct, made when the first reference is taken.
    pub(crate) fn take(&mut self) -> *mut ibv_device {
        self.references += 1;
        let name = &self.name;
        self.handle.get_or_insert_with(|| device_struct(name)).ptr()
    }

    /// Gives a reference back; the C struct is freed with the last.
    pub(crate) fn release(&mut self) {
        self.references -= 1;
        if self.references == 0 {
            self.handle = None;
        }
    }

    fn is(&self, device: usize) -> bool {
        self.handle.as_ref().is_some_and(|h| h.addr() == device)
    }
}

fn device_struct(name: &str) -> CBox<ibv_device> {
    // SAFETY: ibv_device holds optional function pointers, integers and character arrays: zero is valid.
    let mut device: ibv_device = unsafe { zeroed() };
    device.node_type = ibv_node_type::IBV_NODE_CA;
    device.transport_type = ibv_transport_type::IBV_TRANSPORT_IB;
    copy_text(&mut device.name, name);
    copy_text(&mut device.dev_name, &format!("uverbs{}", &name[4..]));
    copy_text(
        &mut device.dev_path,
        &format!("/sys/class/infiniband_verbs/uverbs{}", &name[4..]),
    );
    copy_text(
        &mut device.ibdev_path,
        &format!("/sys/class/infiniband/{name}"),
    );
    CBox::new(device)
}

fn copy_text(to: &mut [c_char], text: &str) {
    for (to, from) in to.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

impl World {
    fn device_at(&mut self, device: *mut ibv_device) -> Outcome<usize> {
        match self.devices.iter().position(|d| d.is(device.addr())) {
            Some(index) => Ok(index),
            None => self.unknown("device (its list was freed?)"),
        }
    }

    pub(crate) fn context(&mut self, context: *mut ibv_context) -> Outcome<&mut Context> {
        if !self.contexts.contains_key(&context.addr()) {
            return self.unknown("context");
        }
        self.contexts.get_mut(&context.addr()).ok_or(libc::EINVAL)
    }

    /// The device a context belongs to.
    pub(crate) fn device_of(&mut self, context: *mut ibv_context) -> Outcome<&mut Device> {
        let device = self.context(context)?.device;
        Ok(&mut self.devices[device])
    }

    pub(crate) fn open(&mut self, index: usize, of_cm: bool) -> Outcome<*mut ibv_context> {
        let events = EventQueue::new()?;
        let device = self.devices[index].take();
        let memory = CBox::new(context_struct(device, events.fd()));
        // SAFETY: stays inside the live verbs_context, whose last field is the ibv_context.
        let ptr = unsafe { &raw mut (*memory.ptr()).context };
        let context = Context {
            ptr,
            device: index,
            events,
            unacked: 0,
            of_cm,
            _memory: memory,
        };
        self.contexts.insert(ptr.addr(), context);
        Ok(ptr)
    }

    pub(crate) fn close(&mut self, context: *mut ibv_context) -> Outcome<()> {
        let device = self.context(context)?.device;
        let children = self.children_of_context(context);
        if children > 0 {
            self.violation_unless_planned(format_args!("the context still has {children} objects"));
            return Err(libc::EBUSY);
        }
        if self.context(context)?.unacked > 0 {
            self.violation("the context has async events that were not acked");
        }
        self.contexts.remove(&context.addr());
        self.devices[device].release();
        Ok(())
    }

    fn children_of_context(&self, context: *mut ibv_context) -> usize {
        let channels = self
            .channels
            .values()
            .filter(|c| c.context == context)
            .count();
        let cqs = self.cqs.values().filter(|c| c.context == context).count();
        let pds = self
            .pds
            .values()
            .filter(|p| p.context == context && !p.of_cm)
            .count();
        channels + cqs + pds
    }

    pub(crate) fn gid(&mut self, context: *mut ibv_context, port: u8, index: i64) -> Outcome<Gid> {
        let device = self.device_of(context)?;
        check_port(port)?;
        if !(0..GID_TABLE_LEN as i64).contains(&index) {
            return Err(libc::EINVAL);
        }
        device
            .gids
            .get(index as usize)
            .copied()
            .ok_or(libc::ENODATA)
    }
}

pub(crate) fn check_port(port: u8) -> Outcome<()> {
    if port == 1 { Ok(()) } else { Err(libc::EINVAL) }
}

fn context_struct(device: *mut ibv_device, async_fd: c_int) -> verbs_context {
    // SAFETY: verbs_context holds optional function pointers, integers, raw pointers and a mutex of bytes: zero is valid.
    let mut outer: verbs_context = unsafe { zeroed() };
    outer.sz = size_of::<verbs_context>();
    outer.query_port = Some(query_port);
    outer.query_device_ex = Some(device_ex::query_device_ex);
    outer.modify_cq = Some(cq::modify_cq);
    outer.advise_mr = Some(mr::advise_mr);
    let inner = &mut outer.context;
    inner.device = device;
    inner.cmd_fd = -1;
    inner.async_fd = async_fd;
    inner.num_comp_vectors = 2;
    // The header's mark of a context inside a verbs_context: UINTPTR_MAX.
    inner.abi_compat = ptr::without_provenance_mut(usize::MAX);
    inner.ops.alloc_mw = Some(mr::alloc_mw);
    inner.ops.bind_mw = Some(post::bind_mw);
    inner.ops.dealloc_mw = Some(mr::dealloc_mw);
    inner.ops.poll_cq = Some(cq::poll_cq);
    inner.ops.req_notify_cq = Some(cq::req_notify_cq);
    inner.ops.post_srq_recv = Some(post::post_srq_recv);
    inner.ops.post_send = Some(post::post_send);
    inner.ops.post_recv = Some(post::post_recv);
    outer
}

/// `ibv_get_device_list(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    null(enter("ibv_get_device_list", |w| {
        let present: Vec<usize> = w
            .devices
            .iter()
            .filter(|d| !d.removed)
            .map(|d| d.index)
            .collect();
        let mut list: Vec<*mut ibv_device> = present
            .iter()
            .map(|&index| w.devices[index].take())
            .collect();
        list.push(ptr::null_mut());
        if !count.is_null() {
            // SAFETY: not null, and C requires it to be writable.
            unsafe { count.write(present.len() as c_int) };
        }
        let list = Box::into_raw(list.into_boxed_slice()).cast::<*mut ibv_device>();
        w.device_lists.insert(list.addr(), present);
        Ok(list)
    }))
}

/// `ibv_free_device_list(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let _ = enter("ibv_free_device_list", |w| {
        let Some(devices) = w.device_lists.remove(&list.addr()) else {
            return w.unknown("device list");
        };
        for &device in &devices {
            w.devices[device].release();
        }
        let slice = ptr::slice_from_raw_parts_mut(list, devices.len() + 1);
        // SAFETY: made by Box::into_raw in ibv_get_device_list with this length, and removed from the table just now.
        drop(unsafe { Box::from_raw(slice) });
        Ok(())
    });
}

/// `ibv_get_device_name(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: C requires a live device; only the field's address is taken.
    unsafe { &raw const (*device).name }.cast()
}

/// `ibv_get_device_index(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    enter("ibv_get_device_index", |w| w.device_at(device)).map_or(-1, |index| index as c_int)
}

/// `ibv_get_device_guid(3)`, in network byte order.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> __be64 {
    let guid = enter("ibv_get_device_guid", |w| {
        let index = w.device_at(device)?;
        Ok(w.devices[index].guid())
    });
    guid.unwrap_or(0).to_be()
}

/// `ibv_open_device(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    null(enter("ibv_open_device", |w| {
        let index = w.device_at(device)?;
        if w.devices[index].removed {
            return Err(libc::ENODEV);
        }
        w.open(index, false)
    }))
}

/// `ibv_close_device(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    minus_one(enter("ibv_close_device", |w| {
        if w.context(context)?.of_cm {
            w.violation("the context belongs to the connection manager");
            return Err(libc::EINVAL);
        }
        w.close(context)
    }))
}

/// `ibv_query_device(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    positive(enter("ibv_query_device", |w| {
        let limits = w.config.limits;
        let attributes = attributes(w.device_of(context)?, limits);
        // SAFETY: C requires `attr` to be writable.
        unsafe { attr.write(attributes) };
        Ok(())
    }))
}

pub(crate) fn attributes(device: &Device, limits: Limits) -> ibv_device_attr {
    // SAFETY: ibv_device_attr holds integers and a character array: zero is valid.
    let mut attr: ibv_device_attr = unsafe { zeroed() };
    copy_text(&mut attr.fw_ver, "1.0");
    attr.node_guid = device.guid().to_be();
    attr.sys_image_guid = device.guid().to_be();
    attr.max_mr_size = u64::MAX;
    attr.page_size_cap = 0xffff_f000;
    attr.vendor_id = 0xfa4e;
    attr.max_qp = 65_536;
    attr.max_qp_wr = limits.wr as c_int;
    attr.device_cap_flags = (ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW
        | ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS
        | ibv_device_cap_flags::IBV_DEVICE_RC_RNR_NAK_GEN
        | ibv_device_cap_flags::IBV_DEVICE_SRQ_RESIZE)
        .0;
    attr.max_sge = limits.sge as c_int;
    attr.max_sge_rd = limits.sge as c_int;
    attr.max_cq = 65_536;
    attr.max_cqe = limits.cqe as c_int;
    attr.max_mr = 524_287;
    attr.max_pd = 65_536;
    attr.max_qp_rd_atom = limits.rd_atomic.into();
    attr.max_res_rd_atom = 258_048;
    attr.max_qp_init_rd_atom = limits.rd_atomic.into();
    attr.atomic_cap = ibv_atomic_cap::IBV_ATOMIC_HCA;
    attr.max_mw = 524_287;
    attr.max_mcast_grp = 8192;
    attr.max_mcast_qp_attach = 56;
    attr.max_total_mcast_qp_attach = 458_752;
    attr.max_ah = 32_767;
    attr.max_srq = 65_536;
    attr.max_srq_wr = limits.wr as c_int;
    attr.max_srq_sge = limits.sge as c_int;
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = 15;
    attr.phys_port_cnt = 1;
    attr
}

/// The `query_port` operation of the context.
unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    positive(enter("ibv_query_port", |w| {
        let max_msg_sz = w.config.limits.msg;
        let device = w.device_of(context)?;
        check_port(port)?;
        let from = port_attributes(device, max_msg_sz);
        let length = length.min(size_of::<ibv_port_attr>());
        // SAFETY: C requires `length` writable bytes at `attr`; the source is as long, and distinct.
        unsafe { ptr::copy_nonoverlapping((&raw const from).cast::<u8>(), attr.cast(), length) };
        Ok(())
    }))
}

/// `ibv_query_port(3)` as the library exports it: it fills the struct up to and including `flags`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    let length = std::mem::offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: the caller's struct is an ibv_port_attr, at least up to the fields of the first ABI.
    unsafe { query_port(context, port, attr.cast(), length) }
}

fn port_attributes(device: &Device, max_msg_sz: u32) -> ibv_port_attr {
    // SAFETY: ibv_port_attr holds integers only: zero is valid.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    attr.state = match device.port_up {
        true => ibv_port_state::IBV_PORT_ACTIVE,
        false => ibv_port_state::IBV_PORT_DOWN,
    };
    attr.max_mtu = ibv_mtu::IBV_MTU_4096;
    attr.active_mtu = ibv_mtu::IBV_MTU_4096;
    attr.gid_tbl_len = GID_TABLE_LEN as c_int;
    attr.max_msg_sz = max_msg_sz;
    attr.pkey_tbl_len = 1;
    attr.max_vl_num = 1;
    attr.active_width = 2;
    attr.active_speed = 32;
    attr.phys_state = if device.port_up { 5 } else { 3 };
    attr.link_layer = LINK_LAYER_ETHERNET;
    attr
}

/// `ibv_query_gid(3)`: an empty entry reads as zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    minus_one(enter("ibv_query_gid", |w| {
        let raw = match w.gid(context, port, index.into()) {
            Ok(gid) => gid.raw,
            Err(libc::ENODATA) => [0; 16],
            Err(errno) => return Err(errno),
        };
        // SAFETY: C requires `gid` to be writable.
        unsafe { gid.write(ibv_gid { raw }) };
        Ok(())
    }))
}

/// `ibv_query_gid_ex(3)` as exported: a positive errno, ENODATA for an empty entry.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    positive(enter("ibv_query_gid_ex", |w| {
        let port_num = u8::try_from(port).map_err(|_| libc::EINVAL)?;
        if flags != 0 || entry_size != size_of::<ibv_gid_entry>() {
            return Err(libc::EINVAL);
        }
        let gid = w.gid(context, port_num, index.into())?;
        // SAFETY: C requires `entry` to be writable, and its size was checked.
        unsafe { entry.write(gid_entry(gid, index)) };
        Ok(())
    }))
}

/// `ibv_query_gid_table(3)` as exported: the number of entries, or a negative errno.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let count = enter("ibv_query_gid_table", |w| {
        let gids = w.device_of(context)?.gids.clone();
        if flags != 0 || entry_size != size_of::<ibv_gid_entry>() || gids.len() > max_entries {
            return Err(libc::EINVAL);
        }
        for (index, &gid) in gids.iter().enumerate() {
            let entry = entries.wrapping_add(index);
            // SAFETY: index < max_entries, the number of writable entries C requires at `entries`.
            unsafe { entry.write(gid_entry(gid, index as u32)) };
        }
        Ok(gids.len() as isize)
    });
    count.unwrap_or_else(|errno| -(errno as isize))
}

fn gid_entry(gid: Gid, index: u32) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: gid.raw },
        gid_index: index,
        port_num: 1,
        gid_type: gid.kind,
        ndev_ifindex: 1,
    }
}

/// `ibv_query_pkey(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut __be16,
) -> c_int {
    minus_one(enter("ibv_query_pkey", |w| {
        w.context(context)?;
        check_port(port)?;
        if index != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: C requires `pkey` to be writable.
        unsafe { pkey.write(PKEY.to_be()) };
        Ok(())
    }))
}

/// `ibv_get_pkey_index(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_pkey_index(
    context: *mut ibv_context,
    port: u8,
    pkey: __be16,
) -> c_int {
    minus_one(enter("ibv_get_pkey_index", |w| {
        w.context(context)?;
        check_port(port)?;
        if pkey == PKEY.to_be() {
            Ok(())
        } else {
            Err(libc::EINVAL)
        }
    }))
}

/// `ibv_fork_init(3)`: the fake has nothing to protect.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_fork_init() -> c_int {
    positive(enter("ibv_fork_init", |_| Ok(())))
}

/// `ibv_is_fork_initialized(3)`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// `ibv_import_device(3)`: not supported.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_import_device(_cmd_fd: c_int) -> *mut ibv_context {
    set_errno(libc::EOPNOTSUPP);
    ptr::null_mut()
}
