//! Two hosts on the fake fabric, driven by one thread: nothing here waits.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its own part; a test may panic

use std::net::SocketAddr;
use std::time::Duration;

use rdma_cm::{
    CmError, ConnParam, Connecting, Connection, Connector, ListenOptions, Listener, Request,
    Resolved, Resolving,
};
use rdma_core_rs::{CompletionQueue, Context, ProtectionDomain, QpConfig, QueuePair};

/// The client's device, `fake0`.
pub(crate) const CLIENT: &str = "10.9.0.1";
/// The server's device, `fake1`.
pub(crate) const SERVER: &str = "10.9.0.2";
/// Never reached: the fabric has no clock, and the steps are driven without waiting.
pub(crate) const LONG: Duration = Duration::from_secs(3600);

pub(crate) fn addr(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

pub(crate) fn listen() -> Result<Listener, CmError> {
    Listener::bind(addr(SERVER, 0), &ListenOptions::default())
}

pub(crate) fn connector(to: &Listener) -> Connector {
    Connector::new(to.local_addr())
        .source(addr(CLIENT, 0))
        .deadline(LONG)
}

/// Calls a step until it is over; it has to be after a few calls, as nothing takes time here.
pub(crate) fn drive<T, E: From<CmError>>(
    mut step: impl FnMut() -> Result<Option<T>, CmError>,
) -> Result<T, E> {
    for _ in 0..10 {
        if let Some(result) = step()? {
            return Ok(result);
        }
    }
    panic!("the step does not end");
}

/// What a test may fail with: of this crate, or of making queue pairs.
#[derive(Debug)]
pub(crate) enum Failure {
    Cm(CmError),
    Verbs(rdma_core_rs::Error),
}

impl From<CmError> for Failure {
    fn from(error: CmError) -> Self {
        Self::Cm(error)
    }
}

impl From<rdma_core_rs::Error> for Failure {
    fn from(error: rdma_core_rs::Error) -> Self {
        Self::Verbs(error)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cm(error) => error.fmt(f),
            Self::Verbs(error) => error.fmt(f),
        }
    }
}

pub(crate) fn queue_pair(context: &Context) -> Result<QueuePair, Failure> {
    let pd = ProtectionDomain::new(context)?;
    let cq = CompletionQueue::new(context, 16, None)?;
    Ok(QueuePair::new(&pd, &QpConfig::rc(&cq, &cq))?)
}

pub(crate) fn datagram_queue_pair(context: &Context) -> Result<QueuePair, Failure> {
    let pd = ProtectionDomain::new(context)?;
    let cq = CompletionQueue::new(context, 16, None)?;
    Ok(QueuePair::new(&pd, &QpConfig::ud(&cq, &cq))?)
}

pub(crate) fn resolve(mut resolving: Resolving) -> Result<Resolved, Failure> {
    drive(|| resolving.advance())
}

/// The active side, up to where the request is out.
pub(crate) fn begin(to: &Listener) -> Result<(QueuePair, Connecting), Failure> {
    let mut resolved = resolve(connector(to).start()?)?;
    let mut qp = queue_pair(&resolved.context())?;
    resolved.init_qp(&mut qp)?;
    let connecting = resolved.connect(&mut qp, &ConnParam::default())?;
    Ok((qp, connecting))
}

pub(crate) fn request(listener: &Listener) -> Result<Request, Failure> {
    drive(|| listener.try_accept())
}

pub(crate) fn accept(mut request: Request) -> Result<(QueuePair, Connection), Failure> {
    let mut qp = queue_pair(&request.context())?;
    request.init_qp(&mut qp)?;
    let connection = request.accept(&mut qp, &ConnParam::default())?;
    Ok((qp, connection))
}

/// Both ends; the queue pair of an end is dropped before its connection.
pub(crate) fn pair(listener: &Listener) -> Result<[(QueuePair, Connection); 2], Failure> {
    let (mut qp, mut connecting) = begin(listener)?;
    let passive = accept(request(listener)?)?;
    let active = drive::<_, Failure>(|| connecting.advance(&mut qp))?;
    Ok([(qp, active), passive])
}

/// File descriptors that this process has open.
pub(crate) fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
