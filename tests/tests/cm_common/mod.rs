//! What the tests of the connection manager on soft-RoCE share: queue pairs with a message each
//! way, the lab's addresses and faults, and counts of what a round may leave behind.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its own part; a test may panic
#![allow(unsafe_code)] // posting, and poll(2)

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::time::{Duration, Instant};

use rdma_cm::{
    ConnParam, Connecting, Connection, ConnectionEvent, Connector, ListenOptions, Listener,
    Request, Resolved,
};
use rdma_core_rs::{
    AddressHandle, CompletionQueue, Context, ProtectionDomain, QpConfig, QueuePair, RecvWr,
    RegionSlice, SendWr, WcStatus, WorkCompletion,
};

/// The client's device of the lab.
pub(crate) const CLIENT: &str = "192.168.99.1";
/// The server's device of the lab.
pub(crate) const SERVER: &str = "192.168.99.2";
/// Longer than anything may take on a loaded machine under emulation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn addr(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

pub(crate) fn soon() -> Option<Instant> {
    Some(Instant::now() + PATIENCE)
}

/// A listener on the server's device.
pub(crate) fn listen() -> Listener {
    listen_with(&ListenOptions::default())
}

pub(crate) fn listen_with(options: &ListenOptions) -> Listener {
    Listener::bind(addr(SERVER, 0), options).expect("needs an RDMA device: cargo xtask test")
}

pub(crate) fn connector(to: &Listener) -> Connector {
    Connector::new(to.local_addr())
        .source(addr(CLIENT, 0))
        .deadline(PATIENCE)
}

/// A queue pair with a buffer for each direction.
pub(crate) struct End {
    pub(crate) qp: QueuePair,
    cq: CompletionQueue,
    inbox: RegionSlice,
    outbox: RegionSlice,
    early: Vec<WorkCompletion>,
}

const RECV: u64 = 1;
const SEND: u64 = 2;

impl End {
    pub(crate) fn new(context: &Context) -> Self {
        let pd = ProtectionDomain::new(context).unwrap();
        let cq = CompletionQueue::new(context, 32, None).unwrap();
        let config = QpConfig::rc(&cq, &cq);
        Self::with(&pd, cq, config)
    }

    pub(crate) fn datagram(context: &Context) -> Self {
        let pd = ProtectionDomain::new(context).unwrap();
        let cq = CompletionQueue::new(context, 32, None).unwrap();
        let config = QpConfig::ud(&cq, &cq);
        Self::with(&pd, cq, config)
    }

    fn with(pd: &ProtectionDomain, cq: CompletionQueue, mut config: QpConfig) -> Self {
        (config.max_send_wr, config.max_recv_wr) = (16, 16);
        Self {
            qp: QueuePair::new(pd, &config).unwrap(),
            cq,
            inbox: RegionSlice::alloc(pd, 4096).unwrap(),
            outbox: RegionSlice::alloc(pd, 4096).unwrap(),
            early: Vec::new(),
        }
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        self.qp.pd()
    }

    /// Posts a receive of the whole inbox.
    pub(crate) fn post_recv(&mut self) {
        let sge = [self.inbox.sge()];
        // SAFETY: the inbox is a live region of this domain, held by `self` for longer than the
        // queue pair (fields drop in order), and read only after its completion.
        unsafe { self.qp.post_recv(&mut RecvWr::new(RECV, &sge)) }.unwrap();
    }

    pub(crate) fn send(&mut self, message: &[u8]) {
        self.outbox[..message.len()].copy_from_slice(message);
        let sge = [self.outbox.sge_range(..message.len()).unwrap()];
        // SAFETY: as in `post_recv`, and the outbox is written to only after the completion.
        unsafe {
            self.qp
                .post_send(&mut SendWr::send(SEND, &sge).signaled(true))
        }
        .unwrap();
    }

    pub(crate) fn send_to(&mut self, message: &[u8], to: &AddressHandle, qp_num: u32, qkey: u32) {
        self.outbox[..message.len()].copy_from_slice(message);
        let sge = [self.outbox.sge_range(..message.len()).unwrap()];
        let mut wr = SendWr::send(SEND, &sge).signaled(true).to(to, qp_num, qkey);
        // SAFETY: as in `send`.
        unsafe { self.qp.post_send(&mut wr) }.unwrap();
    }

    /// Posts `count` receives of `len` bytes side by side.
    pub(crate) fn post_recvs(&mut self, count: usize, len: usize) {
        for i in 0..count {
            let sge = [self.inbox.sge_range(i * len..(i + 1) * len).unwrap()];
            // SAFETY: as in `post_recv`, each receive in a range of its own.
            unsafe { self.qp.post_recv(&mut RecvWr::new(RECV, &sge)) }.unwrap();
        }
    }

    /// Sends `count` messages of `len` bytes.
    pub(crate) fn send_many(&mut self, count: usize, len: usize) {
        let sge = [self.outbox.sge_range(..len).unwrap()];
        for _ in 0..count {
            // SAFETY: as in `send`; the messages may share their bytes.
            unsafe {
                self.qp
                    .post_send(&mut SendWr::send(SEND, &sge).signaled(true))
            }
            .unwrap();
        }
        (0..count).for_each(|_| self.expect_sent());
    }

    /// Sends `count` datagrams of `len` bytes that carry the own queue pair number, as the tools do.
    pub(crate) fn send_datagrams(
        &mut self,
        count: usize,
        len: usize,
        to: &AddressHandle,
        qp_num: u32,
        qkey: u32,
    ) {
        let sge = [self.outbox.sge_range(..len).unwrap()];
        for _ in 0..count {
            let mut wr = SendWr::send_with_imm(SEND, &sge, self.qp.qp_num())
                .signaled(true)
                .to(to, qp_num, qkey);
            // SAFETY: as in `send_many`.
            unsafe { self.qp.post_send(&mut wr) }.unwrap();
        }
        (0..count).for_each(|_| self.expect_sent());
    }

    /// Waits for `count` messages of `len` bytes; the completion of the last one.
    pub(crate) fn expect_messages(&mut self, count: usize, len: usize) -> WorkCompletion {
        let mut last = None;
        for _ in 0..count {
            let wc = self.completion(RECV);
            assert_eq!(wc.status(), WcStatus::Success);
            assert_eq!(wc.success().unwrap().byte_len() as usize, len);
            last = Some(wc);
        }
        last.unwrap()
    }

    /// The sender of a datagram in the first receive.
    pub(crate) fn sender_of(&self, wc: &WorkCompletion) -> AddressHandle {
        let header = self.inbox[..AddressHandle::HEADER_LEN].try_into().unwrap();
        AddressHandle::to_sender(self.pd(), 1, &wc.success().unwrap(), header).unwrap()
    }

    /// The completion of `wr_id`; one of the other kind that comes first is kept. The two
    /// directions of a queue pair complete in no order.
    fn completion(&mut self, wr_id: u64) -> WorkCompletion {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.early.iter().position(|wc| wc.wr_id() == wr_id) {
                return self.early.remove(at);
            }
            if !self.has_completion() {
                assert!(Instant::now() < until, "no completion");
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Whether a completion is there, without waiting.
    pub(crate) fn has_completion(&mut self) -> bool {
        let mut entry = [WorkCompletion::default()];
        self.early
            .extend_from_slice(self.cq.poll(&mut entry).unwrap());
        !self.early.is_empty()
    }

    /// How many receives have completed that nobody has expected yet.
    pub(crate) fn arrived(&mut self) -> usize {
        let mut before = usize::MAX;
        while before != self.early.len() {
            before = self.early.len();
            self.has_completion();
        }
        self.early.iter().filter(|wc| wc.wr_id() == RECV).count()
    }

    pub(crate) fn expect_sent(&mut self) {
        assert_eq!(self.completion(SEND).status(), WcStatus::Success);
    }

    /// What the inbox received.
    pub(crate) fn expect_received(&mut self) -> Vec<u8> {
        let wc = self.completion(RECV);
        assert_eq!(wc.status(), WcStatus::Success);
        let len = wc.success().unwrap().byte_len() as usize;
        self.inbox[..len].to_vec()
    }
}

/// What queue pairs without messages share.
pub(crate) struct Bare {
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Bare {
    pub(crate) fn new(ip: &str) -> Self {
        let context = rdma_cm::context_for(addr(ip, 0)).unwrap();
        Self {
            pd: ProtectionDomain::new(&context).unwrap(),
            cq: CompletionQueue::new(&context, 16, None).unwrap(),
        }
    }

    pub(crate) fn queue_pair(&self) -> QueuePair {
        let mut config = QpConfig::rc(&self.cq, &self.cq);
        (config.max_send_wr, config.max_recv_wr) = (1, 1);
        QueuePair::new(&self.pd, &config).unwrap()
    }
}

/// The active side, up to where the request is out.
pub(crate) fn begin(connector: Connector, param: &ConnParam) -> (End, Connecting) {
    let mut resolved = connector.resolve().unwrap();
    let mut end = prepare(&mut resolved);
    let connecting = resolved.connect(&mut end.qp, param).unwrap();
    (end, connecting)
}

pub(crate) fn prepare(resolved: &mut Resolved) -> End {
    let mut end = End::new(&resolved.context());
    resolved.init_qp(&mut end.qp).unwrap();
    end.post_recv();
    end
}

/// The passive side: accepts with a receive posted.
pub(crate) fn accept(mut request: Request, param: &ConnParam) -> (End, Connection) {
    let mut end = End::new(&request.context());
    request.init_qp(&mut end.qp).unwrap();
    end.post_recv();
    let connection = request.accept(&mut end.qp, param).unwrap();
    (end, connection)
}

/// A connection, both ends.
pub(crate) fn pair(listener: &Listener) -> ((End, Connection), (End, Connection)) {
    pair_by(
        listener,
        connector(listener),
        &ConnParam::default(),
        &ConnParam::default(),
    )
}

pub(crate) fn pair_by(
    listener: &Listener,
    connector: Connector,
    ours: &ConnParam,
    theirs: &ConnParam,
) -> ((End, Connection), (End, Connection)) {
    let (mut end, connecting) = begin(connector, ours);
    let passive = accept(listener.accept(soon()).unwrap(), theirs);
    let connection = connecting.wait(&mut end.qp).unwrap();
    ((end, connection), passive)
}

/// Waits until the descriptor of `step` is readable, as an event loop would.
pub(crate) fn wait_readable(step: &impl AsFd) {
    let fd = step.as_fd().as_raw_fd();
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let timeout = i32::try_from(PATIENCE.as_millis()).unwrap();
    // SAFETY: one pollfd that outlives the call.
    let ready = unsafe { libc::poll(&mut entry, 1, timeout) };
    assert_eq!(ready, 1, "nothing happened");
}

/// Waits for the event that ends `connection`; on the passive side it may come with or without
/// `Established` before it.
pub(crate) fn wait_end(connection: &Connection) -> ConnectionEvent {
    loop {
        let event = connection.wait_event(soon()).unwrap();
        if event.is_end() {
            return event;
        }
    }
}

pub(crate) fn run(command: &str) -> String {
    let out = Command::new("sh").args(["-c", command]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        out.status.success(),
        "{command}: {}{}",
        text,
        String::from_utf8_lossy(&out.stderr)
    );
    text
}

/// A fault of the wire that ends when this drops.
pub(crate) struct Fault {
    cure: &'static str,
}

impl Fault {
    /// Every packet is lost, both ways.
    pub(crate) fn black_hole() -> Self {
        run("for v in v0 v1; do tc qdisc add dev $v root netem loss 100%; done");
        Self {
            cure: "for v in v0 v1; do tc qdisc del dev $v root; done",
        }
    }

    /// The cable is pulled.
    pub(crate) fn link_down() -> Self {
        run("ip link set v0 down");
        Self { cure: LINK_UP }
    }
}

/// Bringing a link up again brings back neither its IPv6 address nor the lab's routes.
const LINK_UP: &str = "
set -e
ip link set v0 up
for table in 10 main; do ip -4 route replace 192.168.99.2/32 dev v0 src 192.168.99.1 table $table; done
ip -6 addr replace fd99::1/128 dev v0 nodad
for table in 10 main; do ip -6 route replace fd99::2/128 dev v0 src fd99::1 table $table; done
for i in $(seq 100); do
    grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state && grep -q ^fd99: /sys/class/infiniband/rxe0/ports/1/gids/* && exit 0
    sleep 0.1
done
exit 1";

impl Drop for Fault {
    fn drop(&mut self) {
        run(self.cure);
    }
}

/// How many file descriptors this process has open.
pub(crate) fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What the kernel holds of RDMA objects, over all devices.
pub(crate) fn rdma_objects() -> String {
    run("rdma resource show")
}

/// The kernel's hardware counters of that name, summed over the lab's devices.
pub(crate) fn counter(name: &str) -> u64 {
    ["rxe0", "rxe1"]
        .iter()
        .map(|device| format!("/sys/class/infiniband/{device}/ports/1/hw_counters/{name}"))
        .map(|path| {
            std::fs::read_to_string(path)
                .unwrap()
                .trim()
                .parse::<u64>()
                .unwrap()
        })
        .sum()
}
