//! One connection after the other, each phase timed on the active side.

use std::time::{Duration, Instant};

use rdma_bench::record::Figures;
use rdma_bench::spec::Spec;
use rdma_bench::stats::median;
use rdma_msg::{Endpoint, Listener};

use crate::Result;
use crate::link::endpoint_config;

/// Microseconds of one connection. An endpoint resolves, creates and connects in one call.
struct Phases {
    connect: f64,
    close: f64,
    destroy: f64,
}

pub(crate) fn client(spec: &Spec) -> Result<Figures> {
    for _ in 0..spec.warmup {
        once(spec)?;
    }
    let mut all = Vec::new();
    for _ in 0..spec.iters {
        all.push(once(spec)?);
    }
    let middle = |phase: fn(&Phases) -> f64| median(&all.iter().map(phase).collect::<Vec<_>>());
    Ok(Figures {
        connect_us: middle(|phases| phases.connect),
        disconnect_us: middle(|phases| phases.close),
        destroy_us: middle(|phases| phases.destroy),
        ..Figures::default()
    })
}

fn once(spec: &Spec) -> Result<Phases> {
    let peer = spec.peer.ok_or("a client needs --peer ADDRESS")?;
    let start = Instant::now();
    let endpoint = Endpoint::connect((peer, spec.port).into(), &endpoint_config(spec))?;
    let connected = Instant::now();
    endpoint.close(Duration::from_secs(1))?;
    let closed = Instant::now();
    drop(endpoint);
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    Ok(Phases {
        connect: us(connected - start),
        close: us(closed - connected),
        destroy: us(closed.elapsed()),
    })
}

pub(crate) fn server(spec: &Spec, listener: &Listener) -> Result<()> {
    for _ in 0..spec.end() {
        let endpoint = listener.accept()?.accept()?;
        while endpoint.recv().is_ok() {}
    }
    Ok(())
}
