//! The other side: it exposes memory, hands out the descriptor, and is not asked any more.

use std::net::SocketAddr;

use rdma_msg::{
    Access, Endpoint, EndpointConfig, Listener, RemoteRegion, SharedRegion, Worker, WorkerConfig,
};

use crate::child::announce;
use crate::cli::Result;

/// Bytes that the peer exposes.
pub const LEN: usize = 4096;
/// What stands at the beginning of them.
pub const CONTENT: &[u8] = b"written by the peer";

/// A listener and the memory that its clients get.
#[derive(Debug)]
pub struct Peer {
    worker: Worker,
    listener: Listener,
    /// The memory.
    pub region: SharedRegion,
}

impl Peer {
    /// Exposes memory and listens.
    ///
    /// The descriptor travels in the private data of the accept, without a handshake of rdma-msg's
    /// own, so that a client of plain verbs finds it too.
    ///
    /// # Errors
    /// If there is no device for `addr`, or one of the steps fails.
    pub fn bind(addr: SocketAddr) -> Result<Peer> {
        let worker = Worker::for_addr(addr, &WorkerConfig::default())?;
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let region = worker.expose(LEN, rights)?;
        region.write_at(0, CONTENT)?;
        let private_data = region.descriptor().to_bytes().to_vec();
        let listener = Listener::bind(
            addr,
            &EndpointConfig {
                private_data,
                ..config()
            },
        )?;
        Ok(Peer {
            worker,
            listener,
            region,
        })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Accepts one client.
    ///
    /// # Errors
    /// If the client gives up while it is being accepted.
    pub fn accept(&self) -> Result<Endpoint> {
        Ok(self.listener.accept()?.accept_with(&self.worker)?.wait()?)
    }

    /// Announces the address and serves one client after the other, until it is killed.
    ///
    /// # Errors
    /// As [`Peer::accept`].
    pub fn serve(&self) -> Result<()> {
        announce(self.addr());
        loop {
            let endpoint = self.accept()?;
            let _ = endpoint.recv(); // nothing comes: it ends when the client leaves
        }
    }
}

/// What both sides of these examples are configured with.
pub fn config() -> EndpointConfig {
    EndpointConfig {
        handshake: false,
        send_depth: 8,
        recv_depth: 8,
        ..EndpointConfig::default()
    }
}

/// The descriptor out of the private data, which arrives padded with zeros.
///
/// # Errors
/// If there is too little of it.
pub fn descriptor(private_data: &[u8]) -> Result<RemoteRegion> {
    let bytes = private_data
        .first_chunk()
        .ok_or("the peer sent no descriptor")?;
    Ok(RemoteRegion::from_bytes(*bytes))
}
