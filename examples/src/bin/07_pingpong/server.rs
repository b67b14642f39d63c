//! The side that answers. It prepares its answer before it says that it is ready, and checks what
//! it got after it has answered: neither is in the client's timed section.

use rdma_examples::cli::Result;
use rdma_examples::pattern::Pattern;
use rdma_msg::{Access, Buf, Endpoint, Incoming, RemoteRegion, SharedRegion};

use crate::client::{await_go, back, check_arrival, check_len, control, corrupt, receive};
use crate::print_stats;
use crate::wire::{Control, Op, Setup};

/// One run's state.
struct Run<'a> {
    endpoint: &'a Endpoint,
    setup: Setup,
    pattern: Pattern,
    /// Where the client writes and reads.
    region: SharedRegion,
    /// Where our writes go.
    remote: RemoteRegion,
    /// For looking at what arrived in `region`, and for filling it.
    scratch: Vec<u8>,
}

/// Accepts a client and does its runs until it leaves.
///
/// # Errors
/// If a byte of the client's data differs (the client is told), or it breaks the protocol.
pub(crate) fn serve(incoming: Incoming, max_size: usize, stats: bool) -> Result<()> {
    let endpoint = incoming.accept()?;
    while let Ok(message) = endpoint.recv() {
        let Control::Setup(setup, remote) = Control::from_bytes(&message.buf)? else {
            return Err("the client did not begin with a Setup".into());
        };
        drop(message); // its buffer goes back to the receives
        if let Err(error) = run(&endpoint, setup, remote, max_size) {
            // The client may be what broke; then it can't be told either.
            let _ = control(&endpoint, &Control::Wrong(error.to_string()));
            let _ = endpoint.close(crate::PATIENCE);
            return Err(error);
        }
    }
    if stats {
        print_stats("server", &endpoint);
    }
    Ok(())
}

fn run(endpoint: &Endpoint, setup: Setup, remote: RemoteRegion, max_size: usize) -> Result<()> {
    let size = setup.size as usize;
    if size > max_size {
        return Err(format!("{size} bytes are above this server's --max-size {max_size}").into());
    }
    let region = endpoint.expose(size, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    control(endpoint, &Control::Ready(region.descriptor()))?;
    let pattern = Pattern::new(size);
    let mut run = Run {
        endpoint,
        setup,
        pattern,
        region,
        remote,
        scratch: vec![0; size],
    };
    let mut buf = endpoint.alloc(size)?;
    for iteration in 0..setup.iterations {
        buf = match setup.op {
            Op::Send => run.send(buf, iteration)?,
            Op::Write => run.write(buf, iteration)?,
            Op::Read => run.offer(buf, iteration)?,
        };
    }
    control(endpoint, &Control::Go)
}

impl Run<'_> {
    fn send(&mut self, mut answer: Buf, iteration: u64) -> Result<Buf> {
        self.prepare(&mut answer, iteration)?;
        let message = receive(self.endpoint)?;
        let sent = self.endpoint.send(answer)?;
        check_len(message.buf.len(), self.setup.size)?;
        self.pattern.check(&message.buf, iteration)?;
        back(sent.wait()?.buf)
    }

    fn write(&mut self, mut answer: Buf, iteration: u64) -> Result<Buf> {
        self.prepare(&mut answer, iteration)?;
        let arrived = receive(self.endpoint)?;
        let written = self
            .endpoint
            .write_imm(answer, self.remote, iteration as u32)?;
        check_arrival(&arrived, self.setup, iteration)?;
        self.region.read_at(0, &mut self.scratch)?;
        self.pattern.check(&self.scratch, iteration)?;
        back(written.wait()?.buf)
    }

    /// Puts this iteration's data where the client reads it, and waits until it has.
    fn offer(&mut self, unused: Buf, iteration: u64) -> Result<Buf> {
        self.pattern.fill(&mut self.scratch, iteration);
        if self.setup.corrupt_at == Some(iteration) {
            corrupt(&mut self.scratch);
        }
        self.region.write_at(0, &self.scratch)?;
        control(self.endpoint, &Control::Go)?;
        await_go(self.endpoint)?;
        Ok(unused)
    }

    /// Makes the answer, then tells the client to begin.
    fn prepare(&self, answer: &mut Buf, iteration: u64) -> Result<()> {
        answer.set_len(self.setup.size as usize);
        self.pattern.fill(answer, iteration);
        control(self.endpoint, &Control::Go)
    }
}
