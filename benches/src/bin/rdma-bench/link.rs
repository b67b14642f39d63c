//! A connected endpoint, and what the two sides told each other in the private data.

use std::process;
use std::time::Duration;

use rdma_bench::spec::{Op, Spec, Wait};
use rdma_msg::{
    Access, Buf, Endpoint, EndpointConfig, Listener, Operation, RemoteRegion, SharedRegion, Worker,
    WorkerConfig,
};

use crate::Result;

/// What is there before the connection: the worker, and the memory that the peer reads, writes and adds to.
pub(crate) struct Prepared {
    spec: Spec,
    pub(crate) worker: Worker,
    target: SharedRegion,
    pub(crate) config: EndpointConfig,
}

impl Prepared {
    pub(crate) fn new(spec: &Spec) -> Result<Prepared> {
        let config = endpoint_config(spec);
        let worker = Worker::for_addr(spec.local(0), &worker_config(spec, &config))?;
        let target = worker.expose(spec.size.next_multiple_of(64) as usize, access())?;
        if !spec.op.is_atomic() {
            target.write_at(0, &vec![TARGET_BYTE; target.len()])?;
        }
        let config = EndpointConfig {
            private_data: Hello::of(&target).to_bytes().to_vec(),
            ..config
        };
        Ok(Prepared {
            spec: spec.clone(),
            worker,
            target,
            config,
        })
    }

    fn connected(self, endpoint: Endpoint, peer: &[u8]) -> Result<Link> {
        let Prepared {
            spec,
            worker,
            target,
            ..
        } = self;
        let hello = Hello::from_bytes(peer)?;
        Ok(Link {
            remote: hello.region.slice(0..u64::from(spec.size))?,
            peer_pid: hello.pid,
            spec,
            worker,
            target,
            endpoint,
        })
    }
}

/// A connection that can be measured.
pub(crate) struct Link {
    pub(crate) spec: Spec,
    pub(crate) endpoint: Endpoint,
    pub(crate) worker: Worker,
    /// What the peer accesses.
    pub(crate) target: SharedRegion,
    /// What the peer lets us access.
    pub(crate) remote: RemoteRegion,
    pub(crate) peer_pid: u32,
}

impl Link {
    pub(crate) fn connect(spec: &Spec) -> Result<Link> {
        let prepared = Prepared::new(spec)?;
        let peer = spec.peer.ok_or("a client needs --peer ADDRESS")?;
        let endpoint =
            Endpoint::connect_with(&prepared.worker, (peer, spec.port).into(), &prepared.config)?
                .wait()?;
        let peer = endpoint.private_data().to_vec();
        prepared.connected(endpoint, &peer)
    }

    pub(crate) fn accept(prepared: Prepared, listener: &Listener) -> Result<Link> {
        let incoming = listener.accept()?;
        let peer = incoming.private_data().to_vec();
        let endpoint = incoming.accept_with(&prepared.worker)?.wait()?;
        prepared.connected(endpoint, &peer)
    }

    /// A buffer of the measured size, with this side's byte in it.
    pub(crate) fn filled_buf(&self, byte: u8) -> Result<Buf> {
        let mut buf = self.worker.alloc(self.spec.size as usize)?;
        buf.fill(byte);
        Ok(buf)
    }

    /// Posts operation `number`; atomics need no buffer and drop it.
    #[inline]
    pub(crate) fn post(&self, number: u64, buf: Option<Buf>) -> Result<Operation> {
        let Link {
            endpoint, remote, ..
        } = self;
        let operation = match (self.spec.op, buf) {
            (Op::Send, Some(buf)) => endpoint.send(buf)?,
            (Op::Write, Some(buf)) => endpoint.write(buf, *remote)?,
            (Op::WriteImm, Some(buf)) => endpoint.write_imm(buf, *remote, number as u32)?,
            (Op::Read, Some(buf)) => endpoint.read(buf, *remote)?,
            // The word counts the operations: a swap expects the one before it, an addition adds one.
            (Op::Cas, _) => endpoint.compare_swap(*remote, number, number + 1)?,
            (Op::Faa, _) => endpoint.fetch_add(*remote, 1)?,
            (op, None) => return Err(format!("{op} without a buffer").into()),
        };
        Ok(operation)
    }

    /// Receives until the peer has closed the connection.
    pub(crate) fn wait_for_the_end(&self) {
        while self.endpoint.recv().is_ok() {}
    }

    pub(crate) fn close(&self) -> Result<()> {
        Ok(self.endpoint.close(Duration::from_secs(1))?)
    }
}

/// The same settings as the floor's.
pub(crate) fn endpoint_config(spec: &Spec) -> EndpointConfig {
    EndpointConfig {
        // Two more than the depth: the credits of the rate measurement.
        send_depth: spec.depth + 2,
        recv_depth: spec.receive_depth(),
        max_message: spec.size.max(1) as usize,
        max_inline: spec.inline,
        max_sge: 1,
        signal_every: spec.signal,
        wait: wait(spec),
        ack_timeout: 14,
        // The peer may be the floor.
        handshake: false,
        source: Some(spec.local(0)),
        ..EndpointConfig::default()
    }
}

pub(crate) fn worker_config(spec: &Spec, config: &EndpointConfig) -> WorkerConfig {
    WorkerConfig {
        max_in_flight: config.send_depth + config.recv_depth + 1,
        buf_size: spec.size.max(8) as usize,
        buf_count: (config.recv_depth + config.send_depth) as usize + SPARE_BUFS,
        wait: config.wait,
    }
}

fn wait(spec: &Spec) -> rdma_msg::Wait {
    match spec.wait {
        // The connection manager is always watched.
        Wait::Event | Wait::Watch => rdma_msg::Wait::Event,
        Wait::Spin => rdma_msg::Wait::Spin,
        Wait::Hybrid => rdma_msg::Wait::Hybrid {
            spin: Duration::from_micros(spec.spin_us.into()),
        },
    }
}

pub(crate) fn access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
}

/// What lies in memory that the peer reads.
pub(crate) const TARGET_BYTE: u8 = 0xa5;
/// What the server sends and writes.
pub(crate) const SERVER_BYTE: u8 = 0x5a;
/// What the client sends and writes.
pub(crate) const CLIENT_BYTE: u8 = 0x3c;

/// Messages that are held for a moment while their receives are posted again.
const SPARE_BUFS: usize = 8;

/// The private data of connect and accept: address, length, key and process, little endian.
struct Hello {
    region: RemoteRegion,
    pid: u32,
}

impl Hello {
    fn of(target: &SharedRegion) -> Hello {
        Hello {
            region: target.descriptor(),
            pid: process::id(),
        }
    }

    fn to_bytes(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.region.addr().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.region.len().to_le_bytes());
        bytes[16..20].copy_from_slice(&self.region.rkey().to_le_bytes());
        bytes[20..].copy_from_slice(&self.pid.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Hello> {
        let bytes: &[u8; 24] = bytes.first_chunk().ok_or("the peer said too little")?;
        let long =
            |at: usize| -> Result<u64> { Ok(u64::from_le_bytes(bytes[at..at + 8].try_into()?)) };
        let short =
            |at: usize| -> Result<u32> { Ok(u32::from_le_bytes(bytes[at..at + 4].try_into()?)) };
        Ok(Hello {
            region: RemoteRegion::new(long(0)?, long(8)?, short(16)?),
            pid: short(20)?,
        })
    }
}
