//! Queue pairs: the two ends of every transfer.

#![allow(unsafe_code)] // calls C

pub(crate) mod attr;
pub(crate) mod post;

use std::fmt;
use std::mem::{self, MaybeUninit};
use std::net::Ipv6Addr;
use std::ptr::{self, NonNull};

use self::attr::{QpAttr, QpState};
use crate::cq::CompletionQueue;
use crate::error::{self, Allowed, Error, Result};
use crate::pd::ProtectionDomain;
use crate::srq::Srq;
use crate::sys::{self, ibv_qp_attr_mask as mask, ibv_qp_type};

/// The transport of a queue pair.
#[doc(alias = "ibv_qp_type")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpType {
    /// Reliable connection: everything, in order, acknowledged.
    #[doc(alias = "IBV_QPT_RC")]
    Rc,
    /// Unreliable connection: sends and writes, not acknowledged.
    #[doc(alias = "IBV_QPT_UC")]
    Uc,
    /// Unreliable datagrams: sends of at most one packet to any peer.
    #[doc(alias = "IBV_QPT_UD")]
    Ud,
}

impl QpType {
    fn raw(self) -> ibv_qp_type::Type {
        match self {
            QpType::Rc => ibv_qp_type::IBV_QPT_RC,
            QpType::Uc => ibv_qp_type::IBV_QPT_UC,
            QpType::Ud => ibv_qp_type::IBV_QPT_UD,
        }
    }
}

/// What a queue pair is to be.
#[doc(alias = "ibv_qp_init_attr")]
#[derive(Debug, Clone)]
pub struct QpConfig {
    /// The transport.
    pub qp_type: QpType,
    /// Where sends complete.
    pub send_cq: CompletionQueue,
    /// Where receives complete.
    pub recv_cq: CompletionQueue,
    /// Where receives are taken from, if not from a queue of its own.
    pub srq: Option<Srq>,
    /// Requests in the send queue at a time.
    pub max_send_wr: u32,
    /// Receives at a time; without meaning if there is an `srq`.
    pub max_recv_wr: u32,
    /// Elements of a request.
    pub max_send_sge: u32,
    /// Elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes that a request can carry inline.
    pub max_inline_data: u32,
    /// Whether every request is signaled, whatever it says.
    pub sq_sig_all: bool,
}

impl QpConfig {
    /// A reliable connection with 16 requests and 16 receives of one element, nothing inline.
    pub fn rc(send_cq: &CompletionQueue, recv_cq: &CompletionQueue) -> QpConfig {
        QpConfig {
            qp_type: QpType::Rc,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            sq_sig_all: false,
        }
    }

    /// As [`rc`](Self::rc), an unreliable connection.
    pub fn uc(send_cq: &CompletionQueue, recv_cq: &CompletionQueue) -> QpConfig {
        QpConfig {
            qp_type: QpType::Uc,
            ..QpConfig::rc(send_cq, recv_cq)
        }
    }

    /// As [`rc`](Self::rc), for datagrams.
    pub fn ud(send_cq: &CompletionQueue, recv_cq: &CompletionQueue) -> QpConfig {
        QpConfig {
            qp_type: QpType::Ud,
            ..QpConfig::rc(send_cq, recv_cq)
        }
    }

    /// Compares with what the device can do, field by field.
    fn check(&self, pd: &ProtectionDomain) -> Result<()> {
        let device = pd.context().device_attr()?;
        error::at_most(
            "max_send_wr",
            self.max_send_wr.into(),
            device.max_qp_wr.into(),
        )?;
        error::at_most(
            "max_send_sge",
            self.max_send_sge.into(),
            device.max_sge.into(),
        )?;
        for cq in [&self.send_cq, &self.recv_cq] {
            if !cq.context().is_same_device(pd.context()) {
                return Err(Error::Foreign {
                    what: "a completion queue",
                    of: "context",
                });
            }
        }
        match &self.srq {
            Some(srq) if !srq.pd().context().is_same_device(pd.context()) => Err(Error::Foreign {
                what: "the shared receive queue",
                of: "context",
            }),
            Some(_) => Ok(()),
            None => {
                error::at_most(
                    "max_recv_wr",
                    self.max_recv_wr.into(),
                    device.max_qp_wr.into(),
                )?;
                error::at_most(
                    "max_recv_sge",
                    self.max_recv_sge.into(),
                    device.max_sge.into(),
                )
            }
        }
    }

    fn to_raw(&self) -> sys::ibv_qp_init_attr {
        let srq = self.srq.as_ref();
        let (max_recv_wr, max_recv_sge) = if srq.is_some() {
            (0, 0)
        } else {
            (self.max_recv_wr, self.max_recv_sge)
        };
        sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.send_cq.as_raw().as_ptr(),
            recv_cq: self.recv_cq.as_raw().as_ptr(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.as_raw().as_ptr()),
            cap: sys::ibv_qp_cap {
                max_send_wr: self.max_send_wr,
                max_recv_wr,
                max_send_sge: self.max_send_sge,
                max_recv_sge,
                max_inline_data: self.max_inline_data,
            },
            qp_type: self.qp_type.raw(),
            sq_sig_all: self.sq_sig_all.into(),
        }
    }
}

/// What a queue pair can hold: at least what was asked for.
///
/// The device rounds up and may take more than it says; count against what you asked for.
#[doc(alias = "ibv_qp_cap")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpCaps {
    /// Requests in the send queue at a time.
    pub max_send_wr: u32,
    /// Receives at a time.
    pub max_recv_wr: u32,
    /// Elements of a request.
    pub max_send_sge: u32,
    /// Elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes that a request can carry inline.
    pub max_inline_data: u32,
}

impl QpCaps {
    fn from_raw(raw: &sys::ibv_qp_cap) -> QpCaps {
        QpCaps {
            max_send_wr: raw.max_send_wr,
            max_recv_wr: raw.max_recv_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_inline_data: raw.max_inline_data,
        }
    }
}

/// A queue pair.
///
/// There is one handle to it: whoever posts or modifies has it mutably, so no two threads do so
/// at once. It can be moved to another thread. Dropping it destroys it, and from then on the device
/// does not touch what was posted to it; completions that were not polled may be lost. If the
/// device refuses, the handle is leaked together with what it needs.
///
/// ```
/// use rdma_core_rs::{CompletionQueue, QpConfig, QpState, QueuePair};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// let cq = CompletionQueue::new(&context, 64, None)?;
/// let config = QpConfig { max_send_wr: 32, max_inline_data: 64, ..QpConfig::rc(&cq, &cq) };
/// let qp = QueuePair::new(&pd, &config)?;
/// assert!(qp.caps().max_send_wr >= 32);
/// assert_eq!(qp.state()?, QpState::Reset);
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
///
/// Two posters on one queue pair do not compile:
///
/// ```compile_fail,E0499
/// # use rdma_core_rs::{QueuePair, RecvWr, SendWr};
/// # fn example(mut qp: QueuePair) {
/// std::thread::scope(|scope| {
///     // SAFETY: no buffers.
///     scope.spawn(|| unsafe { qp.post_send(&mut SendWr::send(1, &[])) });
///     // SAFETY: no buffers.
///     scope.spawn(|| unsafe { qp.post_recv(&mut RecvWr::new(2, &[])) });
/// });
/// # }
/// ```
#[doc(alias = "ibv_qp")]
pub struct QueuePair {
    qp: NonNull<sys::ibv_qp>,
    qp_num: u32,
    /// It has been brought to RTS, so that a send is either taken or flushed.
    can_send: bool,
    /// It has left RESET.
    can_receive: bool,
    destroyed: bool,
    /// The multicast groups it is attached to, which it must leave before it can be destroyed.
    groups: Vec<(Ipv6Addr, u16)>,
    caps: QpCaps,
    qp_type: QpType,
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<Srq>,
}

// SAFETY: libibverbs allows its objects to be used from any thread; `qp` is only given to it and
// destroyed once.
unsafe impl Send for QueuePair {}
// SAFETY: through `&QueuePair` it can only be queried. That is a system call, after which libibverbs
// notes the state in an aligned word, which is read only by calls that need `&mut QueuePair`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Creates a queue pair in the reset state.
    ///
    /// # Errors
    /// - [`Config`](Error::Config) naming the field that is above what the device allows. Devices
    ///   do not report their inline limit, so it is found by trying when the creation failed.
    /// - [`Foreign`](Error::Foreign), if a completion queue or the shared receive queue was made
    ///   on another context.
    /// - [`Call`](Error::Call) naming `ibv_create_qp` for anything else.
    #[doc(alias = "ibv_create_qp")]
    pub fn new(pd: &ProtectionDomain, config: &QpConfig) -> Result<QueuePair> {
        pd.context().check_process()?;
        config.check(pd)?;
        let mut init = config.to_raw();
        let qp = match create(pd, &mut init) {
            Ok(qp) => qp,
            Err(error) => return Err(explain(error, pd, config)),
        };
        // SAFETY: the queue pair was just made and is ours; the field does not change.
        let qp_num = unsafe { (*qp.as_ptr()).qp_num };
        Ok(QueuePair {
            qp,
            qp_num,
            can_send: false,
            can_receive: false,
            destroyed: false,
            groups: Vec::new(),
            caps: QpCaps::from_raw(&init.cap),
            qp_type: config.qp_type,
            pd: pd.clone(),
            send_cq: config.send_cq.clone(),
            recv_cq: config.recv_cq.clone(),
            srq: config.srq.clone(),
        })
    }

    /// The number by which peers and completions name it.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// The transport.
    pub fn qp_type(&self) -> QpType {
        self.qp_type
    }

    /// What was granted when it was made.
    #[inline]
    pub fn caps(&self) -> QpCaps {
        self.caps
    }

    /// The protection domain it was created in.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where its sends complete.
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// Where its receives complete.
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.recv_cq
    }

    /// Where it takes its receives from, if not from a queue of its own.
    pub fn srq(&self) -> Option<&Srq> {
        self.srq.as_ref()
    }

    /// Changes attributes, most often to go to the next state.
    ///
    /// Going to the reset state drops what was posted without completions.
    ///
    /// # Errors
    /// - [`Config`](Error::Config) naming the attribute that is above what verbs or the device
    ///   allow.
    /// - [`Call`](Error::Call) naming `ibv_modify_qp`: `EINVAL` if the transition is not possible
    ///   or an attribute it needs is missing.
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attr: &QpAttr) -> Result<()> {
        self.pd.context().check_process()?;
        attr.check(self.pd.context().device_attr()?)?;
        let mut raw = attr.clone().raw;
        // SAFETY: `self` keeps the queue pair alive; `raw` is a local.
        let ret = unsafe { sys::ibv_modify_qp(self.qp.as_ptr(), &raw mut raw, attr.mask) };
        sys::check("ibv_modify_qp", ret)?;
        if let Some(state) = attr.target() {
            self.can_receive = state != QpState::Reset;
            self.can_send = matches!(
                state,
                QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err
            );
        }
        Ok(())
    }

    /// Moves it to the error state: everything that was posted is flushed, each request with a
    /// completion.
    ///
    /// # Errors
    /// As for [`modify`](Self::modify): from RESET, where nothing can be posted, there is no such step (EINVAL).
    #[doc(alias = "IBV_QPS_ERR")]
    pub fn to_error(&mut self) -> Result<()> {
        self.modify(&QpAttr::new().state(QpState::Err))
    }

    /// Sets how long a peer is to wait when this side had no receive, as in
    /// [`QpAttr::min_rnr_timer`].
    ///
    /// # Errors
    /// As for [`modify`](Self::modify).
    pub fn set_min_rnr_timer(&mut self, code: u8) -> Result<()> {
        self.modify(&QpAttr::new().min_rnr_timer(code))
    }

    /// Joins a multicast group: datagrams to it are received too. Datagram queue pairs only.
    ///
    /// The subnet must route the group here, which the connection manager asks for. It leaves its
    /// groups when it is destroyed.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_attach_mcast`.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&mut self, gid: Ipv6Addr, lid: u16) -> Result<()> {
        self.pd.context().check_process()?;
        let group = (gid, lid);
        let gid = sys::ibv_gid { raw: gid.octets() };
        // SAFETY: `self` keeps the queue pair alive; `gid` is a local that is only read.
        let ret = unsafe { sys::ibv_attach_mcast(self.qp.as_ptr(), &raw const gid, lid) };
        sys::check("ibv_attach_mcast", ret)?;
        if !self.groups.contains(&group) {
            self.groups.push(group);
        }
        Ok(())
    }

    /// Leaves a multicast group.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_detach_mcast`.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_mcast(&mut self, gid: Ipv6Addr, lid: u16) -> Result<()> {
        self.pd.context().check_process()?;
        let group = (gid, lid);
        let gid = sys::ibv_gid { raw: gid.octets() };
        // SAFETY: `self` keeps the queue pair alive; `gid` is a local that is only read.
        let ret = unsafe { sys::ibv_detach_mcast(self.qp.as_ptr(), &raw const gid, lid) };
        sys::check("ibv_detach_mcast", ret)?;
        self.groups.retain(|joined| *joined != group);
        Ok(())
    }

    /// The state it is in. The device moves it to the error state by itself after a failure.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_qp`.
    pub fn state(&self) -> Result<QpState> {
        Ok(QpState::from_raw(
            self.query_raw(mask::IBV_QP_STATE)?.qp_state,
        ))
    }

    /// All its attributes.
    ///
    /// # Errors
    /// [`Call`](Error::Call) naming `ibv_query_qp`.
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QpInfo> {
        let everything = mask::IBV_QP_STATE
            | mask::IBV_QP_ACCESS_FLAGS
            | mask::IBV_QP_PKEY_INDEX
            | mask::IBV_QP_PORT
            | mask::IBV_QP_QKEY
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_QP_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_CAP
            | mask::IBV_QP_DEST_QPN;
        Ok(QpInfo::from_raw(&self.query_raw(everything)?))
    }

    fn query_raw(&self, what: mask) -> Result<sys::ibv_qp_attr> {
        self.pd.context().check_process()?;
        let mut attr = QpAttr::new().raw;
        let mut init = MaybeUninit::<sys::ibv_qp_init_attr>::zeroed();
        let qp = self.qp.as_ptr();
        // SAFETY: `self` keeps the queue pair alive; both structs are locals to fill in.
        let ret = unsafe { sys::ibv_query_qp(qp, &raw mut attr, what.0 as i32, init.as_mut_ptr()) };
        sys::check("ibv_query_qp", ret)?;
        Ok(attr)
    }

    /// Destroys it and tells whether that worked. After `Ok` the device does not touch what was
    /// posted to it.
    ///
    /// # Errors
    /// The queue pair comes back with [`Call`](Error::Call) naming `ibv_destroy_qp`, or with
    /// [`Forked`](Error::Forked).
    #[doc(alias = "ibv_destroy_qp")]
    #[allow(clippy::result_large_err)] // it is the queue pair that comes back
    pub fn destroy(mut self) -> Result<(), (QueuePair, Error)> {
        match self.try_destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn try_destroy(&mut self) -> Result<()> {
        self.pd.context().check_process()?;
        for (gid, lid) in self.groups.clone() {
            if let Err(error) = self.detach_mcast(gid, lid) {
                log::warn!("{error}; queue pair {} stays in {gid}", self.qp_num);
            }
        }
        // SAFETY: the only handle, not destroyed yet: `destroyed` is set below and nothing else is
        // called after that.
        let ret = unsafe { sys::ibv_destroy_qp(self.qp.as_ptr()) };
        sys::check("ibv_destroy_qp", ret)?;
        self.destroyed = true;
        Ok(())
    }

    /// The C object. It lives as long as this handle.
    #[inline]
    pub fn as_raw(&self) -> NonNull<sys::ibv_qp> {
        self.qp
    }
}

fn create(pd: &ProtectionDomain, init: &mut sys::ibv_qp_init_attr) -> Result<NonNull<sys::ibv_qp>> {
    // SAFETY: `pd` lives during the call; the queues in `init` are held by the configuration it
    // was made from, and the call may change `init`.
    let qp = unsafe { sys::ibv_create_qp(pd.as_raw().as_ptr(), init) };
    sys::check_null("ibv_create_qp", qp)
}

/// Finds out whether a queue pair was refused because of what it should carry inline.
#[cold]
fn explain(error: Error, pd: &ProtectionDomain, config: &QpConfig) -> Error {
    let asked = config.max_inline_data;
    let refused = matches!(error.errno(), Some(libc::EINVAL | libc::ENOMEM));
    if asked == 0 || !refused || can_create(pd, config, asked) || !can_create(pd, config, 0) {
        return error;
    }
    let (mut good, mut bad) = (0, asked);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if can_create(pd, config, middle) {
            good = middle
        } else {
            bad = middle
        }
    }
    let allowed = Allowed::AtMost(good.into());
    Error::Config {
        field: "max_inline_data",
        asked: asked.into(),
        allowed,
    }
}

/// Whether the queue pair can be made with this much inline data.
fn can_create(pd: &ProtectionDomain, config: &QpConfig, max_inline_data: u32) -> bool {
    let mut init = config.to_raw();
    init.cap.max_inline_data = max_inline_data;
    let Ok(qp) = create(pd, &mut init) else {
        return false;
    };
    // SAFETY: just made, and known to nobody else.
    let ret = unsafe { sys::ibv_destroy_qp(qp.as_ptr()) };
    if let Err(error) = sys::check("ibv_destroy_qp", ret) {
        mem::forget((pd.clone(), config.clone()));
        log::error!("{error}; a queue pair made for a trial is leaked"); // last: a logger may panic
    }
    true
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if self.destroyed || self.pd.context().is_foreign_process() {
            return;
        }
        if let Err(error) = self.try_destroy() {
            mem::forget(self.pd.clone());
            mem::forget(self.send_cq.clone());
            mem::forget(self.recv_cq.clone());
            mem::forget(self.srq.clone());
            log::error!("{error}; queue pair {} is leaked", self.qp_num); // last: a logger may panic
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qp_num", &self.qp_num)
            .field("qp_type", &self.qp_type)
            .field("caps", &self.caps)
            .finish_non_exhaustive()
    }
}

/// What [`QueuePair::query`] reports. The names are those of ibv_query_qp(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpInfo {
    /// The state it is in.
    pub state: QpState,
    /// The payload of a packet.
    pub path_mtu: crate::attr::Mtu,
    /// The key that datagrams must carry.
    pub qkey: u32,
    /// The packet number expected next.
    pub rq_psn: u32,
    /// The packet number sent next.
    pub sq_psn: u32,
    /// The peer's queue pair number.
    pub dest_qp_num: u32,
    /// What the peer may do.
    pub access: crate::access::Access,
    /// What it can hold.
    pub caps: QpCaps,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Whether the send queue is draining (in SQD).
    pub sq_draining: bool,
    /// Most outgoing reads and atomics at a time.
    pub max_rd_atomic: u8,
    /// Most incoming reads and atomics at a time.
    pub max_dest_rd_atomic: u8,
    /// How long a peer that found no receive waits, as a code.
    pub min_rnr_timer: u8,
    /// The local port.
    pub port: u8,
    /// How long it waits for an acknowledgement, as an exponent.
    pub timeout: u8,
    /// How often it sends again without an acknowledgement.
    pub retry_cnt: u8,
    /// How often it sends again when the peer had no receive.
    pub rnr_retry: u8,
}

impl QpInfo {
    fn from_raw(raw: &sys::ibv_qp_attr) -> QpInfo {
        QpInfo {
            state: QpState::from_raw(raw.qp_state),
            path_mtu: crate::attr::Mtu::from_raw(raw.path_mtu),
            qkey: raw.qkey,
            rq_psn: raw.rq_psn,
            sq_psn: raw.sq_psn,
            dest_qp_num: raw.dest_qp_num,
            access: crate::access::Access::from_bits_retain(raw.qp_access_flags),
            caps: QpCaps::from_raw(&raw.cap),
            pkey_index: raw.pkey_index,
            sq_draining: raw.sq_draining != 0,
            max_rd_atomic: raw.max_rd_atomic,
            max_dest_rd_atomic: raw.max_dest_rd_atomic,
            min_rnr_timer: raw.min_rnr_timer,
            port: raw.port_num,
            timeout: raw.timeout,
            retry_cnt: raw.retry_cnt,
            rnr_retry: raw.rnr_retry,
        }
    }
}
