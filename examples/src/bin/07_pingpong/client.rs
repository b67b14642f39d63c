//! The side that starts each iteration, and holds the clock.

use std::time::Instant;

use rdma_examples::cli::Result;
use rdma_examples::pattern::Pattern;
use rdma_examples::report::{Latencies, Row};
use rdma_msg::{Access, Buf, Endpoint, Received, RemoteRegion, SharedRegion};

use crate::PATIENCE;
use crate::progress::Bar;
use crate::wire::{Control, Op, Setup};

/// One run's state: made before the first iteration, so that the timed sections allocate nothing.
struct Run<'a> {
    endpoint: &'a Endpoint,
    setup: Setup,
    pattern: Pattern,
    /// Where the server's writes arrive.
    region: SharedRegion,
    /// Where ours go, and what we read.
    remote: RemoteRegion,
    /// For looking at what arrived in `region`.
    scratch: Vec<u8>,
    latencies: Latencies,
}

/// Does all iterations of `setup` and sums them up.
///
/// # Errors
/// If a byte differs at either end, the server says nothing for [`PATIENCE`], or the connection breaks.
pub(crate) fn run(endpoint: &Endpoint, setup: Setup) -> Result<Row> {
    let size = setup.size as usize;
    let region = endpoint.expose(size, Access::REMOTE_WRITE)?;
    control(endpoint, &Control::Setup(setup, region.descriptor()))?;
    let remote = match await_control(endpoint)? {
        Control::Ready(remote) => remote,
        Control::Wrong(text) => return Err(format!("server: {text}").into()),
        other => return Err(format!("expected Ready, got {other:?}").into()),
    };
    let mut run = Run {
        endpoint,
        setup,
        pattern: Pattern::new(size),
        region,
        remote,
        scratch: vec![0; size],
        latencies: Latencies::new(),
    };
    let mut buf = endpoint.alloc(size)?;
    let bar = Bar::new(setup.size, setup.iterations);
    for iteration in 0..setup.iterations {
        buf = match setup.op {
            Op::Send => run.send(buf, iteration)?,
            Op::Write => run.write(buf, iteration)?,
            Op::Read => run.read(buf, iteration)?,
        };
        bar.step();
    }
    await_go(endpoint)?; // the server has checked the last one
    Ok(run.latencies.row(size, setup.iterations, true))
}

impl Run<'_> {
    fn send(&mut self, mut buf: Buf, iteration: u64) -> Result<Buf> {
        self.fill(&mut buf, iteration);
        await_go(self.endpoint)?;

        let start = Instant::now();
        let sent = self.endpoint.send(buf)?;
        let answer = receive(self.endpoint)?;
        self.latencies.record(start.elapsed(), 2);

        check_len(answer.buf.len(), self.setup.size)?;
        self.pattern.check(&answer.buf, iteration)?;
        back(sent.wait()?.buf)
    }

    fn write(&mut self, mut buf: Buf, iteration: u64) -> Result<Buf> {
        self.fill(&mut buf, iteration);
        await_go(self.endpoint)?;

        let start = Instant::now();
        let written = self
            .endpoint
            .write_imm(buf, self.remote, iteration as u32)?;
        let answer = receive(self.endpoint)?;
        self.latencies.record(start.elapsed(), 2);

        check_arrival(&answer, self.setup, iteration)?;
        self.region.read_at(0, &mut self.scratch)?;
        self.pattern.check(&self.scratch, iteration)?;
        back(written.wait()?.buf)
    }

    fn read(&mut self, buf: Buf, iteration: u64) -> Result<Buf> {
        await_go(self.endpoint)?; // the server has put this iteration's data in place

        let start = Instant::now();
        let read = self.endpoint.read(buf, self.remote)?.wait()?;
        self.latencies.record(start.elapsed(), 1);

        let buf = back(read.buf)?;
        check_len(buf.len(), self.setup.size)?;
        self.pattern.check(&buf, iteration)?;
        control(self.endpoint, &Control::Go)?; // the server may change it
        Ok(buf)
    }

    fn fill(&self, buf: &mut Buf, iteration: u64) {
        buf.set_len(self.setup.size as usize);
        self.pattern.fill(buf, iteration);
        if self.setup.corrupt_at == Some(iteration) {
            corrupt(buf);
        }
    }
}

/// Makes one byte wrong, in the middle.
pub(crate) fn corrupt(data: &mut [u8]) {
    let middle = data.len() / 2;
    data[middle] ^= 1;
}

/// Sends a control message and waits until the peer's NIC has it.
pub(crate) fn control(endpoint: &Endpoint, message: &Control) -> Result<()> {
    endpoint.send_slice(&message.to_bytes())?.wait()?;
    Ok(())
}

/// The next control message.
pub(crate) fn await_control(endpoint: &Endpoint) -> Result<Control> {
    Control::from_bytes(&receive(endpoint)?.buf)
}

/// Waits for the other side to be ready for the next iteration.
pub(crate) fn await_go(endpoint: &Endpoint) -> Result<()> {
    match await_control(endpoint)? {
        Control::Go => Ok(()),
        Control::Wrong(text) => Err(format!("the other side says: {text}").into()),
        other => Err(format!("expected Go, got {other:?}").into()),
    }
}

/// The next message or arrived write, or an error after [`PATIENCE`].
pub(crate) fn receive(endpoint: &Endpoint) -> Result<Received> {
    let received = endpoint.recv_deadline(Instant::now() + PATIENCE)?;
    received.ok_or_else(|| format!("the other side said nothing for {PATIENCE:?}").into())
}

/// That what arrived is the write of this iteration, all of it.
pub(crate) fn check_arrival(arrived: &Received, setup: Setup, iteration: u64) -> Result<()> {
    if arrived.imm != Some(iteration as u32) {
        return Err(format!(
            "iteration {iteration}: arrived with immediate {:?}",
            arrived.imm
        )
        .into());
    }
    check_len(arrived.written.unwrap_or(0), setup.size)
}

/// That a message has the length that was agreed.
pub(crate) fn check_len(len: usize, size: u32) -> Result<()> {
    if len == size as usize {
        Ok(())
    } else {
        Err(format!("{len} bytes came, not {size}").into())
    }
}

/// The buffer that an operation gives back.
pub(crate) fn back(buf: Option<Buf>) -> Result<Buf> {
    buf.ok_or_else(|| "an operation ended without its buffer".into())
}
