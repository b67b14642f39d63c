//! Two connected endpoints on the fake fabric.

#![allow(dead_code)] // each test binary uses a part
#![allow(clippy::unwrap_used)] // a failure is the test's

pub(crate) mod program;

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rdma_msg::{
    Access, Buf, Endpoint, EndpointConfig, Listener, Operation, Receive, RemoteRegion, Wait,
    Worker, WorkerConfig,
};

/// A time that is long enough for everything, and ends a test that hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// Small queues, so that they are full soon; sleeping, so that a lost wake-up hangs.
pub(crate) fn small() -> EndpointConfig {
    EndpointConfig {
        send_depth: 8,
        recv_depth: 8,
        max_message: 256,
        wait: Wait::Event,
        ..EndpointConfig::default()
    }
}

/// As `small`, and the program posts the receives.
pub(crate) fn manual() -> EndpointConfig {
    EndpointConfig {
        receive: Receive::Manual,
        extra_bufs: Some(64),
        ..small()
    }
}

pub(crate) fn any_port(device: u8) -> SocketAddr {
    SocketAddr::from(([10, 9, 0, device], 0))
}

/// A client and a server with these settings.
pub(crate) fn pair_with(client: &EndpointConfig, server: &EndpointConfig) -> (Endpoint, Endpoint) {
    let listener = Listener::bind(any_port(2), server).unwrap();
    if cfg!(miri) {
        return pair_by_polling(client, &listener);
    }
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept().unwrap().accept().unwrap());
        let connected = Endpoint::connect(addr, client).unwrap();
        (connected, accepting.join().unwrap())
    })
}

/// The same without a blocking accept: Miri has no poll(2).
fn pair_by_polling(client: &EndpointConfig, listener: &Listener) -> (Endpoint, Endpoint) {
    let config = WorkerConfig {
        buf_size: 512,
        buf_count: 64,
        ..WorkerConfig::default()
    };
    let workers = [1, 2].map(|device| Worker::for_addr(any_port(device), &config).unwrap());
    let connecting = Endpoint::connect_with(&workers[0], listener.local_addr(), client).unwrap();
    let incoming = loop {
        workers[0].poll();
        workers[0].prepare_wait();
        if let Some(incoming) = listener.try_accept().unwrap() {
            break incoming;
        }
    };
    let accepting = incoming.accept_with(&workers[1]).unwrap();
    let connected = connecting.wait().unwrap();
    (connected, accepting.wait().unwrap())
}

pub(crate) fn pair() -> (Endpoint, Endpoint) {
    pair_with(&small(), &small())
}

/// A buffer of the endpoint's pool with this content.
pub(crate) fn filled(endpoint: &Endpoint, bytes: &[u8]) -> Buf {
    let mut buf = endpoint.alloc(0).unwrap();
    buf.fill_from(bytes);
    buf
}

/// An endpoint on this worker, and its peer on device 2 with a worker of its own.
pub(crate) fn connect_on(worker: &Worker, config: &EndpointConfig) -> (Endpoint, Endpoint) {
    let listener = Listener::bind(any_port(2), config).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept().unwrap().accept().unwrap());
        let opening = Endpoint::connect_with(worker, listener.local_addr(), config).unwrap();
        (opening.wait().unwrap(), accepting.join().unwrap())
    })
}

pub(crate) fn all_rights() -> Access {
    Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
}

/// Posts one operation of each kind towards `remote`, and a receive.
pub(crate) fn one_of_each(endpoint: &Endpoint, remote: RemoteRegion) -> Vec<Operation> {
    let word = remote.slice(0..8).unwrap();
    let buf = || filled(endpoint, &[7; 32]);
    vec![
        endpoint.send(buf()).unwrap(),
        endpoint.send_imm(buf(), 1).unwrap(),
        endpoint.write(buf(), remote).unwrap(),
        endpoint.write_imm(buf(), remote, 2).unwrap(),
        endpoint.read(buf(), remote).unwrap(),
        endpoint.compare_swap(word, 1, 2).unwrap(),
        endpoint.fetch_add(word, 1).unwrap(),
        endpoint.post_recv(buf()).unwrap(),
    ]
}
