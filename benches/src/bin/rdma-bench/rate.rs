//! Many operations in flight. Messages that need a receive are sent against credits, so the receiver is never found
//! empty.

use std::collections::VecDeque;

use rdma_bench::record::Figures;
use rdma_bench::spec::Op;
use rdma_msg::{Batch, Buf, Operation};

use crate::Result;
use crate::link::{CLIENT_BYTE, Link};
use crate::yardstick::Yardstick;

pub(crate) fn client(link: &Link) -> Result<Figures> {
    let spec = &link.spec;
    let mut client = Client::new(link)?;
    client.run(spec.warmup.into(), None)?;
    let mut yardstick = Yardstick::start(link, false);
    client.run(spec.end(), Some(&mut yardstick))?;
    while client.reap()? {}
    let figures = yardstick.stop(true);
    link.close()?;
    Ok(figures)
}

struct Client<'a> {
    link: &'a Link,
    batch: Batch<'a>,
    posted: u64,
    /// Messages that may have been sent: the sender may be this far ahead of the receiver.
    allowed: u64,
    in_flight: VecDeque<Operation>,
    /// Operations of the batch that was just posted, on their way to `in_flight`.
    accepted: Vec<Operation>,
    free: Vec<Buf>,
}

impl<'a> Client<'a> {
    fn new(link: &'a Link) -> Result<Client<'a>> {
        let depth = link.spec.depth as usize;
        let mut free = Vec::with_capacity(depth);
        if !link.spec.op.is_atomic() {
            for _ in 0..depth {
                free.push(link.filled_buf(CLIENT_BYTE)?);
            }
        }
        let allowed = if link.spec.op.consumes_receive() {
            link.spec.receive_depth().into()
        } else {
            u64::MAX
        };
        Ok(Client {
            link,
            batch: link.endpoint.batch(),
            posted: 0,
            allowed,
            in_flight: VecDeque::with_capacity(depth),
            accepted: Vec::with_capacity(link.spec.batch as usize),
            free,
        })
    }

    fn run(&mut self, until: u64, mut yardstick: Option<&mut Yardstick<'_>>) -> Result<()> {
        while self.posted < until {
            let count = u64::from(self.link.spec.batch).min(until - self.posted);
            while self.in_flight.len() as u64 + count > self.link.spec.depth.into() {
                self.reap()?;
            }
            while self.posted + count > self.allowed {
                self.link.endpoint.recv()?; // a credit
                self.allowed += u64::from(self.link.spec.receive_depth() / 2);
            }
            self.post(count)?;
            if let Some(yardstick) = &mut yardstick {
                yardstick.mark(self.posted - u64::from(self.link.spec.warmup));
            }
        }
        Ok(())
    }

    /// Posts so many with one doorbell.
    fn post(&mut self, count: u64) -> Result<()> {
        if count == 1 {
            let operation = self.link.post(self.posted, self.free.pop())?;
            self.in_flight.push_back(operation);
            self.posted += 1;
            return Ok(());
        }
        for _ in 0..count {
            self.add()?;
        }
        self.batch
            .post_into(&mut self.accepted)
            .map_err(|kind| kind.to_string())?;
        self.in_flight.extend(self.accepted.drain(..));
        Ok(())
    }

    fn add(&mut self) -> Result<()> {
        let Client { link, batch, .. } = self;
        let (number, remote) = (self.posted, link.remote);
        match (link.spec.op, self.free.pop()) {
            (Op::Send, Some(buf)) => batch.send(buf)?,
            (Op::Write, Some(buf)) => batch.write(buf, remote)?,
            (Op::WriteImm, Some(buf)) => batch.write_imm(buf, remote, number as u32)?,
            (Op::Read, Some(buf)) => batch.read(buf, remote)?,
            (Op::Cas, _) => batch.compare_swap(remote, number, number + 1)?,
            (Op::Faa, _) => batch.fetch_add(remote, 1)?,
            (op, None) => return Err(format!("{op} without a buffer").into()),
        }
        self.posted += 1;
        Ok(())
    }

    /// Waits for the oldest operation; whether there was one.
    fn reap(&mut self) -> Result<bool> {
        let Some(oldest) = self.in_flight.pop_front() else {
            return Ok(false);
        };
        self.free.extend(oldest.wait()?.buf);
        Ok(true)
    }
}

/// Each half of the receives that was taken gives the sender a credit.
pub(crate) fn server(link: &Link) -> Result<()> {
    let spec = &link.spec;
    let half = u64::from(spec.receive_depth() / 2);
    let mut credits = VecDeque::new();
    if spec.op.consumes_receive() {
        for received in 1..=spec.end() {
            link.endpoint.recv()?;
            if received % half == 0 {
                credits.push_back(link.endpoint.send_slice(&[])?);
            }
            if credits.len() > 1
                && let Some(credit) = credits.pop_front()
            {
                credit.wait()?;
            }
        }
    }
    for credit in credits {
        credit.wait()?;
    }
    link.wait_for_the_end();
    Ok(())
}
