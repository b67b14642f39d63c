//! Verbs and CM calls with the ceremony taken off, for the tests of the fabric.
#![allow(unsafe_code, dead_code, unused_imports, unreachable_pub)] // calls C functions; each test binary uses its part
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)] // raw calls are what is tested
#![allow(missing_docs)]

use std::net::SocketAddr;
use std::ptr::{null, null_mut};

use rdma_sys::*;

pub use rdma_sys::ibv_qp_state::*;
pub use rdma_sys::ibv_wc_status::*;

pub const LOCAL_WRITE: i32 = 1;
pub const ALL_ACCESS: i32 = 0xf;

pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// All-zero C struct.
pub fn zeroed<T>() -> T {
    unsafe { std::mem::zeroed() }
}

pub fn open(index: usize) -> *mut ibv_context {
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list.add(index));
        ibv_free_device_list(list);
        assert!(!context.is_null());
        context
    }
}

/// One side of a connection made by hand: context, PD, channel, CQ, QP and a region of 256 bytes.
pub struct Side {
    pub device: usize,
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub channel: *mut ibv_comp_channel,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub mr: *mut ibv_mr,
    memory: *mut [u8],
}

pub const REGION: usize = 256;

impl Side {
    pub fn new(device: usize) -> Self {
        Self::of_kind(device, ibv_qp_type::IBV_QPT_RC)
    }

    pub fn of_kind(device: usize, kind: u32) -> Self {
        Self::with(device, kind, 16, 16, 100)
    }

    pub fn with(device: usize, kind: u32, sends: u32, recvs: u32, cqe: i32) -> Self {
        unsafe {
            let context = open(device);
            let pd = ibv_alloc_pd(context);
            let channel = ibv_create_comp_channel(context);
            let cq = ibv_create_cq(context, cqe, null_mut(), channel, 0);
            let mut init = init_attr(cq, kind, sends, recvs);
            let qp = ibv_create_qp(pd, &mut init);
            assert!(!qp.is_null());
            let memory = Box::into_raw(vec![0u8; REGION].into_boxed_slice());
            let mr = ibv_reg_mr(pd, memory.cast(), REGION, ALL_ACCESS);
            assert!(!mr.is_null());
            Self {
                device,
                context,
                pd,
                channel,
                cq,
                qp,
                mr,
                memory,
            }
        }
    }

    pub fn addr(&self, offset: usize) -> u64 {
        self.memory.cast::<u8>().expose_provenance() as u64 + offset as u64
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= REGION);
        unsafe {
            self.memory
                .cast::<u8>()
                .add(offset)
                .copy_from(bytes.as_ptr(), bytes.len());
        }
    }

    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= REGION);
        let mut bytes = vec![0; len];
        unsafe {
            self.memory
                .cast::<u8>()
                .add(offset)
                .copy_to(bytes.as_mut_ptr(), len)
        };
        bytes
    }

    pub fn sge(&self, offset: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr(offset),
            length: len as u32,
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    pub fn rkey(&self) -> u32 {
        unsafe { (*self.mr).rkey }
    }

    pub fn num(&self) -> u32 {
        unsafe { (*self.qp).qp_num }
    }

    pub fn post_recv(&self, wr_id: u64, offset: usize, len: usize) -> i32 {
        let mut sge = self.sge(offset, len);
        let mut wr = ibv_recv_wr {
            wr_id,
            next: null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
        };
        let mut bad = null_mut();
        unsafe { ibv_post_recv(self.qp, &mut wr, &mut bad) }
    }

    /// Posts one signaled request over `len` bytes at `offset`; `change` makes it what it is.
    pub fn post(
        &self,
        wr_id: u64,
        offset: usize,
        len: usize,
        change: impl FnOnce(&mut ibv_send_wr),
    ) -> i32 {
        let mut sge = self.sge(offset, len);
        let mut wr = send_wr(wr_id, &mut sge, 1);
        change(&mut wr);
        let mut bad = null_mut();
        unsafe { ibv_post_send(self.qp, &mut wr, &mut bad) }
    }

    pub fn send(&self, wr_id: u64, offset: usize, len: usize) -> i32 {
        self.post(wr_id, offset, len, |_| {})
    }

    /// Everything in the CQ.
    pub fn poll(&self) -> Vec<ibv_wc> {
        poll(self.cq)
    }

    /// Statuses and ids of everything in the CQ.
    pub fn outcomes(&self) -> Vec<(u64, u32)> {
        self.poll().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    pub fn modify(&self, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> i32 {
        unsafe { ibv_modify_qp(self.qp, attr, mask.0 as i32) }
    }

    pub fn to(&self, state: u32) -> i32 {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = state;
        self.modify(&mut attr, ibv_qp_attr_mask::IBV_QP_STATE)
    }

    pub fn init(&self) -> i32 {
        use ibv_qp_attr_mask as m;
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = ALL_ACCESS as u32;
        attr.qkey = 0x11;
        let ud = unsafe { (*self.qp).qp_type } == ibv_qp_type::IBV_QPT_UD;
        let last = if ud {
            m::IBV_QP_QKEY
        } else {
            m::IBV_QP_ACCESS_FLAGS
        };
        self.modify(
            &mut attr,
            m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | last,
        )
    }

    pub fn ready_to_receive(&self, peer: &Side) -> i32 {
        use ibv_qp_attr_mask as m;
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = ibv_mtu::IBV_MTU_1024;
        attr.dest_qp_num = peer.num();
        attr.max_dest_rd_atomic = 4;
        attr.min_rnr_timer = 12;
        attr.ah_attr = ah_attr(peer.device);
        let mut mask = m::IBV_QP_STATE
            | m::IBV_QP_AV
            | m::IBV_QP_PATH_MTU
            | m::IBV_QP_DEST_QPN
            | m::IBV_QP_RQ_PSN;
        if unsafe { (*self.qp).qp_type } == ibv_qp_type::IBV_QPT_RC {
            mask = mask | m::IBV_QP_MAX_DEST_RD_ATOMIC | m::IBV_QP_MIN_RNR_TIMER;
        }
        self.modify(&mut attr, mask)
    }

    pub fn ready_to_send(&self, rnr_retry: u8) -> i32 {
        use ibv_qp_attr_mask as m;
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_RTS;
        (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 6, rnr_retry);
        attr.max_rd_atomic = 4;
        let mut mask = m::IBV_QP_STATE | m::IBV_QP_SQ_PSN;
        if unsafe { (*self.qp).qp_type } == ibv_qp_type::IBV_QPT_RC {
            let retries = m::IBV_QP_TIMEOUT | m::IBV_QP_RETRY_CNT | m::IBV_QP_RNR_RETRY;
            mask = mask | retries | m::IBV_QP_MAX_QP_RD_ATOMIC;
        }
        self.modify(&mut attr, mask)
    }

    pub fn close(self) {
        unsafe {
            assert_eq!(ibv_destroy_qp(self.qp), 0);
            assert_eq!(ibv_dereg_mr(self.mr), 0);
            drop(Box::from_raw(self.memory));
            assert_eq!(ibv_destroy_cq(self.cq), 0);
            assert_eq!(ibv_destroy_comp_channel(self.channel), 0);
            assert_eq!(ibv_dealloc_pd(self.pd), 0);
            assert_eq!(ibv_close_device(self.context), 0);
        }
    }
}

pub fn init_attr(cq: *mut ibv_cq, kind: u32, sends: u32, recvs: u32) -> ibv_qp_init_attr {
    let mut init: ibv_qp_init_attr = zeroed();
    (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, kind);
    init.cap = ibv_qp_cap {
        max_send_wr: sends,
        max_recv_wr: recvs,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline_data: 32,
    };
    init
}

pub fn send_wr(wr_id: u64, sges: *mut ibv_sge, count: i32) -> ibv_send_wr {
    let mut wr: ibv_send_wr = zeroed();
    wr.wr_id = wr_id;
    (wr.sg_list, wr.num_sge) = (sges, count);
    wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
    wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    wr
}

/// The RoCE v2 GID over IPv4 of a device.
pub fn gid(device: usize) -> ibv_gid {
    let mut raw = [0; 16];
    raw[10..12].fill(0xff);
    raw[12..].copy_from_slice(&[10, 9, 0, device as u8 + 1]);
    ibv_gid { raw }
}

pub fn ah_attr(to_device: usize) -> ibv_ah_attr {
    let mut attr: ibv_ah_attr = zeroed();
    attr.is_global = 1;
    attr.port_num = 1;
    attr.grh.dgid = gid(to_device);
    attr.grh.sgid_index = 3;
    attr.grh.hop_limit = 64;
    attr
}

pub fn poll(cq: *mut ibv_cq) -> Vec<ibv_wc> {
    let mut wcs = Vec::new();
    loop {
        let mut wc: ibv_wc = zeroed();
        match unsafe { ibv_poll_cq(cq, 1, &mut wc) } {
            1 => wcs.push(wc),
            0 => return wcs,
            error => panic!("poll_cq: {error}"),
        }
    }
}

/// Two connected sides of one kind, on both devices.
pub fn pair_of(kind: u32) -> (Side, Side) {
    connected(Side::of_kind(0, kind), Side::of_kind(1, kind))
}

pub fn pair() -> (Side, Side) {
    pair_of(ibv_qp_type::IBV_QPT_RC)
}

pub fn connected(a: Side, b: Side) -> (Side, Side) {
    for (one, other) in [(&a, &b), (&b, &a)] {
        assert_eq!(one.init(), 0);
        assert_eq!(one.ready_to_receive(other), 0);
        assert_eq!(one.ready_to_send(6), 0);
    }
    (a, b)
}

// --- connection manager ---------------------------------------------------------------------

pub struct Sockaddr(libc::sockaddr_storage);

impl Sockaddr {
    pub fn new(addr: &str) -> Self {
        let mut storage: libc::sockaddr_storage = zeroed();
        let to = (&raw mut storage).cast::<u8>();
        unsafe {
            match addr.parse().expect("an address") {
                SocketAddr::V4(v4) => {
                    let mut sin: libc::sockaddr_in = zeroed();
                    sin.sin_family = libc::AF_INET as u16;
                    sin.sin_port = v4.port().to_be();
                    sin.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                    to.cast::<libc::sockaddr_in>().write(sin);
                }
                SocketAddr::V6(v6) => {
                    let mut sin: libc::sockaddr_in6 = zeroed();
                    sin.sin6_family = libc::AF_INET6 as u16;
                    sin.sin6_port = v6.port().to_be();
                    sin.sin6_addr.s6_addr = v6.ip().octets();
                    to.cast::<libc::sockaddr_in6>().write(sin);
                }
            }
        }
        Self(storage)
    }

    pub fn ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// What a test wants to know of an event; the event itself is acked.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    pub event: u32,
    pub status: i32,
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub data: Vec<u8>,
}

pub struct Channel(pub *mut rdma_event_channel);

impl Channel {
    pub fn new() -> Self {
        let channel = unsafe { rdma_create_event_channel() };
        assert!(!channel.is_null());
        let fd = unsafe { (*channel).fd };
        assert_eq!(
            unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) },
            0
        );
        Self(channel)
    }

    pub fn id(&self) -> *mut rdma_cm_id {
        self.id_of(rdma_port_space::RDMA_PS_TCP)
    }

    pub fn id_of(&self, port_space: u32) -> *mut rdma_cm_id {
        let mut id = null_mut();
        assert_eq!(
            unsafe { rdma_create_id(self.0, &mut id, null_mut(), port_space) },
            0
        );
        id
    }

    pub fn raw_event(&self) -> Option<*mut rdma_cm_event> {
        let mut event = null_mut();
        match unsafe { rdma_get_cm_event(self.0, &mut event) } {
            0 => Some(event),
            _ => {
                assert_eq!(errno(), libc::EAGAIN);
                None
            }
        }
    }

    /// The next event, acked; `None` if there is none.
    pub fn next(&self) -> Option<Seen> {
        let event = self.raw_event()?;
        unsafe {
            let conn = &raw const (*event).param.conn;
            let (data, len) = ((*conn).private_data, (*conn).private_data_len);
            let data = match data.is_null() {
                true => Vec::new(),
                false => std::slice::from_raw_parts(data.cast::<u8>(), len.into()).to_vec(),
            };
            let seen = Seen {
                event: (*event).event,
                status: (*event).status,
                id: (*event).id,
                listen_id: (*event).listen_id,
                data,
            };
            assert_eq!(rdma_ack_cm_event(event), 0);
            Some(seen)
        }
    }

    pub fn expect(&self, event: u32) -> Seen {
        let seen = self
            .next()
            .unwrap_or_else(|| panic!("no event, {event} expected"));
        assert_eq!(seen.event, event, "{seen:?}");
        seen
    }

    pub fn close(self) {
        unsafe { rdma_destroy_event_channel(self.0) };
    }
}

pub fn conn_param(qp_num: u32, data: &[u8]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: if data.is_empty() {
            null()
        } else {
            data.as_ptr().cast()
        },
        private_data_len: data.len() as u8,
        responder_resources: 4,
        initiator_depth: 3,
        flow_control: 0,
        retry_count: 6,
        rnr_retry_count: 5,
        srq: 0,
        qp_num,
    }
}

pub fn resolve(channel: &Channel, id: *mut rdma_cm_id, to: &str) {
    use rdma_cm_event_type::*;
    unsafe {
        assert_eq!(
            rdma_resolve_addr(id, null_mut(), Sockaddr::new(to).ptr(), 1000),
            0
        );
        assert_eq!(channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).id, id);
        assert_eq!(rdma_resolve_route(id, 1000), 0);
        assert_eq!(channel.expect(RDMA_CM_EVENT_ROUTE_RESOLVED).id, id);
    }
}

pub fn listener(channel: &Channel, at: &str) -> *mut rdma_cm_id {
    let id = channel.id();
    unsafe {
        assert_eq!(rdma_bind_addr(id, Sockaddr::new(at).ptr()), 0);
        assert_eq!(rdma_listen(id, 8), 0);
    }
    id
}

pub fn destroy(id: *mut rdma_cm_id) {
    assert_eq!(unsafe { rdma_destroy_id(id) }, 0);
}
