//! Two hosts whose queue pairs are brought up by hand, and the scenarios that run between them:
//! on the fake fabric and, the same ones, on soft-RoCE.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // each binary uses its part and may panic
#![allow(unsafe_code)] // posts

pub mod scenarios;

use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use rdma_core_rs::{
    Access, AddressVector, CompletionChannel, CompletionQueue, Context, Mtu, ProtectionDomain,
    QpAttr, QpConfig, QpState, QpType, QueuePair, RecvWr, RegionSlice, SendWr, Sge, SharedRegion,
    Srq, WcOpcode, WcStatus, WorkCompletion, devices,
};

/// Longer than anything may take on a loaded machine under emulation.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The size of each end's two buffers.
pub const BUFFER: usize = if cfg!(miri) { 16 << 10 } else { 64 << 10 };
/// The key of datagrams.
pub const QKEY: u32 = 0x1111_1111;
/// The routing header in front of a datagram.
pub const GRH: usize = 40;

pub fn soon() -> Option<Instant> {
    Some(Instant::now() + PATIENCE)
}

/// Two hosts on one network.
pub struct Bed {
    pub a: Host,
    pub b: Host,
}

impl Bed {
    pub fn open(a: (&str, &str), b: (&str, &str)) -> Bed {
        Bed {
            a: Host::open(a.0, a.1),
            b: Host::open(b.0, b.1),
        }
    }

    /// Whether it is soft-RoCE, whose ways docs/rxe.md lists.
    pub fn is_rxe(&self) -> bool {
        self.a.context.device_name().starts_with("rxe")
    }

    /// A connected pair with the default configuration.
    pub fn pair(&self, qp_type: QpType) -> (End, End) {
        self.pair_with(qp_type, |_| {})
    }

    /// A connected pair whose configuration is changed before.
    pub fn pair_with(&self, qp_type: QpType, tune: impl Fn(&mut QpConfig)) -> (End, End) {
        connect(&self.a, &self.b, qp_type, tune)
    }
}

/// A connected pair between two hosts, which may be the same.
pub fn connect(
    from: &Host,
    to: &Host,
    qp_type: QpType,
    tune: impl Fn(&mut QpConfig),
) -> (End, End) {
    let (mut a, mut b) = (End::new(from, qp_type, &tune), End::new(to, qp_type, &tune));
    a.bring_up(&b.address());
    b.bring_up(&a.address());
    (a, b)
}

/// An open device with its address.
#[derive(Clone)]
pub struct Host {
    pub context: Context,
    pub pd: ProtectionDomain,
    pub gid: Ipv6Addr,
    pub gid_index: u8,
    pub mtu: Mtu,
}

impl Host {
    pub fn open(name: &str, ip: &str) -> Host {
        let found = devices()
            .unwrap()
            .into_iter()
            .find(|device| device.name() == name);
        let device = found.unwrap_or_else(|| panic!("needs the RDMA device {name}"));
        let context = device.open().unwrap();
        let ip: IpAddr = ip.parse().unwrap();
        let entry = context
            .find_gid(1, ip)
            .unwrap()
            .expect("the address is in the GID table");
        Host {
            pd: ProtectionDomain::new(&context).unwrap(),
            gid: entry.gid,
            gid_index: entry.index.try_into().unwrap(),
            mtu: context.port_attr(1).unwrap().active_mtu,
            context,
        }
    }
}

/// What a peer must know to reach a queue pair.
#[derive(Clone, Copy)]
pub struct Address {
    pub gid: Ipv6Addr,
    pub qp_num: u32,
    pub psn: u32,
    pub mtu: Mtu,
}

/// A queue pair with a local and a shared buffer. It is destroyed before they are freed.
pub struct End {
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub channel: CompletionChannel,
    pub local: RegionSlice,
    pub shared: SharedRegion,
    pub host: Host,
}

impl End {
    pub fn new(host: &Host, qp_type: QpType, tune: impl Fn(&mut QpConfig)) -> End {
        let channel = CompletionChannel::new(&host.context).unwrap();
        let cq = CompletionQueue::new(&host.context, 128, Some(&channel)).unwrap();
        let mut config = match qp_type {
            QpType::Uc => QpConfig::uc(&cq, &cq),
            QpType::Ud => QpConfig::ud(&cq, &cq),
            _ => QpConfig::rc(&cq, &cq),
        };
        (config.max_send_sge, config.max_recv_sge) = (4, 4);
        tune(&mut config);
        let everything = Access::REMOTE | Access::MW_BIND;
        End {
            qp: QueuePair::new(&host.pd, &config).unwrap(),
            cq,
            channel,
            local: RegionSlice::alloc(&host.pd, BUFFER).unwrap(),
            shared: SharedRegion::alloc(&host.pd, BUFFER, everything).unwrap(),
            host: host.clone(),
        }
    }

    pub fn address(&self) -> Address {
        let (gid, mtu) = (self.host.gid, self.host.mtu);
        Address {
            gid,
            qp_num: self.qp.qp_num(),
            psn: self.psn(),
            mtu,
        }
    }

    fn psn(&self) -> u32 {
        self.qp.qp_num().wrapping_mul(31) & 0xff_ffff
    }

    pub fn path_to(&self, peer: &Address) -> AddressVector {
        AddressVector::global(1, peer.gid, self.host.gid_index)
    }

    /// From RESET to RTS.
    pub fn bring_up(&mut self, peer: &Address) {
        self.init();
        self.ready_to_receive(peer);
        self.ready_to_send();
    }

    pub fn init(&mut self) {
        let attr = QpAttr::new().state(QpState::Init).pkey_index(0).port(1);
        let attr = match self.qp.qp_type() {
            QpType::Ud => attr.qkey(QKEY),
            _ => attr.access(Access::REMOTE),
        };
        self.qp.modify(&attr).unwrap();
    }

    pub fn ready_to_receive(&mut self, peer: &Address) {
        let attr = QpAttr::new().state(QpState::Rtr);
        let connected = || {
            let mtu = self.host.mtu.min(peer.mtu);
            let attr = attr.clone().path(&self.path_to(peer)).path_mtu(mtu);
            attr.dest_qp_num(peer.qp_num).rq_psn(peer.psn)
        };
        let attr = match self.qp.qp_type() {
            QpType::Ud => attr,
            QpType::Uc => connected(),
            _ => connected().max_dest_rd_atomic(16).min_rnr_timer(12),
        };
        self.qp.modify(&attr).unwrap();
    }

    pub fn ready_to_send(&mut self) {
        let attr = QpAttr::new().state(QpState::Rts).sq_psn(self.psn());
        let attr = match self.qp.qp_type() {
            QpType::Rc => attr.timeout(14).retry_cnt(6).rnr_retry(6).max_rd_atomic(16),
            _ => attr,
        };
        self.qp.modify(&attr).unwrap();
    }

    /// Posts a request over this end's buffers.
    #[track_caller]
    pub fn post(&mut self, mut wr: SendWr<'_>) {
        // SAFETY: the scenarios only use the buffers of ends, which outlive their queue pairs, and
        // touch them after the completion.
        unsafe { self.qp.post_send(&mut wr) }.unwrap();
    }

    /// Posts a receive over this end's buffers.
    #[track_caller]
    pub fn post_recv(&mut self, wr_id: u64, sges: &[Sge]) {
        // SAFETY: as in `post`.
        unsafe { self.qp.post_recv(&mut RecvWr::new(wr_id, sges)) }.unwrap();
    }

    /// Posts a receive to a shared receive queue, over this end's buffers.
    #[track_caller]
    pub fn post_srq(&self, srq: &Srq, wr_id: u64, sges: &[Sge]) {
        // SAFETY: as in `post`.
        unsafe { srq.post_recv(&mut RecvWr::new(wr_id, sges)) }.unwrap();
    }

    /// The next completion.
    #[track_caller]
    pub fn completion(&self) -> WorkCompletion {
        next_completion(&self.cq).unwrap_or_else(|| panic!("no completion came"))
    }

    /// The next completion, which must be a success of the given kind and number.
    #[track_caller]
    pub fn expect(&self, wr_id: u64, opcode: WcOpcode) -> WorkCompletion {
        let wc = self.completion();
        assert_eq!(
            (wc.status(), wc.wr_id()),
            (WcStatus::Success, wr_id),
            "{wc:?}"
        );
        assert_eq!(wc.success().unwrap().opcode(), opcode);
        assert_eq!(wc.qp_num(), self.qp.qp_num());
        wc
    }

    /// The next completion, which must be a failure of the given kind and number.
    #[track_caller]
    pub fn expect_failure(&self, wr_id: u64, status: WcStatus) {
        let failure = self.completion().success().unwrap_err();
        assert_eq!(
            (failure.status, failure.wr_id),
            (status, wr_id),
            "{failure}"
        );
        assert_eq!(failure.qp_num, self.qp.qp_num());
    }

    /// The next completion, in this room.
    #[track_caller]
    pub fn poll_into<'a>(&self, room: &'a mut [WorkCompletion; 1]) -> &'a WorkCompletion {
        poll_into(&self.cq, room).expect("a completion")
    }

    pub fn resize_cq(&self, cqe: u32) -> Result<(), rdma_core_rs::Error> {
        // SAFETY: nobody else has the queue, so nobody polls it.
        unsafe { self.cq.resize(cqe) }
    }

    /// Asserts that there is no completion now.
    #[track_caller]
    pub fn expect_nothing(&self) {
        let mut room = [WorkCompletion::default()];
        assert_eq!(self.cq.poll(&mut room).unwrap().len(), 0);
    }

    /// An element over bytes of the shared buffer.
    pub fn shared_sge(&self, range: std::ops::Range<usize>) -> Sge {
        self.shared.slice(range).unwrap().sge()
    }

    /// Bytes of the shared buffer.
    pub fn shared_bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.shared.read_at(offset, &mut bytes).unwrap();
        bytes
    }
}

/// The next completion of a queue, or none within patience.
pub fn next_completion(cq: &CompletionQueue) -> Option<WorkCompletion> {
    let mut room = [WorkCompletion::default()];
    poll_into(cq, &mut room).copied()
}

fn poll_into<'a>(
    cq: &CompletionQueue,
    room: &'a mut [WorkCompletion; 1],
) -> Option<&'a WorkCompletion> {
    let until = Instant::now() + PATIENCE;
    while cq.poll(room).unwrap().is_empty() {
        if Instant::now() > until {
            return None;
        }
        std::thread::yield_now();
    }
    Some(&room[0])
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}
