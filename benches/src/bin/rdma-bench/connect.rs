//! One connection after the other, each phase timed on the active side.

use std::time::{Duration, Instant};

use rdma_bench::record::Figures;
use rdma_bench::spec::Spec;
use rdma_bench::stats::median;
use rdma_cm::{ConnParam, Connector, IdOptions};
use rdma_core_rs::{
    CompletionChannel, CompletionQueue, ProtectionDomain, QpConfig, QueuePair, RegionSlice,
    SharedRegion,
};
use rdma_msg::{Endpoint, Listener, Worker};

use crate::Result;
use crate::link::{access, endpoint_config, worker_config};

/// Microseconds of each phase: resolve, create, connect, disconnect, destroy.
type Phases = [f64; 5];

pub(crate) fn client(spec: &Spec) -> Result<Figures> {
    let once = if spec.cm { with_cm } else { with_msg };
    for _ in 0..spec.warmup {
        once(spec)?;
    }
    let mut all = Vec::new();
    for _ in 0..spec.iters {
        all.push(once(spec)?);
    }
    let middle = |phase: usize| median(&all.iter().map(|phases| phases[phase]).collect::<Vec<_>>());
    Ok(Figures {
        resolve_us: middle(0),
        create_us: middle(1),
        connect_us: middle(2),
        disconnect_us: middle(3),
        destroy_us: middle(4),
        ..Figures::default()
    })
}

/// As the floor does it, object by object; no receives are posted, and no private data is sent.
fn with_cm(spec: &Spec) -> Result<Phases> {
    let peer = spec.peer.ok_or("a client needs --peer ADDRESS")?;
    let (sends, receives) = (spec.depth + 2, spec.receive_depth());
    let stride = spec.size.next_multiple_of(64) as usize;
    let msg = endpoint_config(spec);
    let options = IdOptions {
        ack_timeout: Some(msg.ack_timeout),
        ..IdOptions::default()
    };
    let mut watch = StopWatch::start();

    let mut resolved = Connector::new((peer, spec.port).into())
        .source(spec.local(0))
        .options(options)
        .resolve()?;
    let resolve = watch.lap();

    let pd = ProtectionDomain::new(&resolved.context())?;
    let channel = CompletionChannel::new(pd.context())?;
    let cq = CompletionQueue::new(pd.context(), sends + receives, Some(&channel))?;
    let mut config = QpConfig::rc(&cq, &cq);
    config.max_send_wr = sends;
    config.max_recv_wr = receives;
    let mut qp = QueuePair::new(&pd, &config)?;
    let local = RegionSlice::alloc(&pd, stride * (spec.depth + receives) as usize)?;
    let target = SharedRegion::alloc(&pd, stride, access())?;
    resolved.init_qp(&mut qp)?;
    let create = watch.lap();

    let connecting = resolved.connect(&mut qp, &ConnParam::default())?;
    let connection = connecting.wait(&mut qp)?;
    let connect = watch.lap();

    connection.disconnect()?;
    let deadline = Instant::now() + LIMIT;
    while !connection.wait_event(Some(deadline))?.is_end() {}
    let disconnect = watch.lap();

    qp.destroy().map_err(|(_, error)| error)?;
    drop((connection, local, target, cq, channel, pd));
    Ok([resolve, create, connect, disconnect, watch.lap()])
}

/// A worker for each. The queue pair belongs to the phase that resolves.
fn with_msg(spec: &Spec) -> Result<Phases> {
    let peer = spec.peer.ok_or("a client needs --peer ADDRESS")?;
    let config = endpoint_config(spec);
    let mut watch = StopWatch::start();
    let worker = Worker::for_addr(spec.local(0), &worker_config(spec, &config))?;
    let create = watch.lap();
    let prepared = Endpoint::prepare(&worker, (peer, spec.port).into(), &config)?;
    let resolve = watch.lap();
    let endpoint = prepared.open()?.wait()?;
    let connect = watch.lap();
    endpoint.close(LIMIT)?;
    let disconnect = watch.lap();
    drop((endpoint, worker));
    Ok([resolve, create, connect, disconnect, watch.lap()])
}

struct StopWatch(Instant);

impl StopWatch {
    fn start() -> StopWatch {
        StopWatch(Instant::now())
    }

    /// Microseconds since the start or the last call.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let before = std::mem::replace(&mut self.0, now);
        (now - before).as_secs_f64() * 1e6
    }
}

/// For a connection to end.
const LIMIT: Duration = Duration::from_secs(1);

pub(crate) fn server(spec: &Spec, listener: &Listener) -> Result<()> {
    for _ in 0..spec.end() {
        let endpoint = listener.accept()?.accept()?;
        while endpoint.recv().is_ok() {}
    }
    Ok(())
}
