//! One operation at a time. Sends and writes with immediate are answered in kind, so a sample is a round trip; the
//! others end with their own completion.

use rdma_bench::record::Figures;
use rdma_bench::spec::Op;
use rdma_msg::{Buf, Completion};

use crate::Result;
use crate::link::{CLIENT_BYTE, Link, SERVER_BYTE, TARGET_BYTE};
use crate::yardstick::Yardstick;

pub(crate) fn client(link: &Link) -> Result<Figures> {
    let spec = &link.spec;
    let mut client = Client {
        link,
        buf: Some(link.filled_buf(CLIENT_BYTE)?),
        answer: None,
        value: None,
    };
    for number in 0..spec.warmup.into() {
        client.one(number)?;
    }
    let mut yardstick = Yardstick::start(link, !spec.no_samples);
    for measured in 0..spec.iters.into() {
        client.one(u64::from(spec.warmup) + measured)?;
        yardstick.mark(measured + 1);
    }
    let figures = yardstick.stop(true);
    let verified = Some(client.verified()?);
    link.close()?;
    Ok(Figures {
        verified,
        ..figures
    })
}

struct Client<'a> {
    link: &'a Link,
    /// Goes out with each operation and comes back with its completion.
    buf: Option<Buf>,
    /// What the last answer was.
    answer: Option<Buf>,
    /// What the last atomic found.
    value: Option<u64>,
}

impl Client<'_> {
    #[inline]
    fn one(&mut self, number: u64) -> Result<()> {
        let operation = self.link.post(number, self.buf.take())?;
        if self.link.spec.op.consumes_receive() {
            self.answer = Some(self.link.endpoint.recv()?.buf);
        }
        let Completion { buf, value, .. } = operation.wait()?;
        (self.buf, self.value) = (buf, value);
        Ok(())
    }

    fn verified(&self) -> Result<bool> {
        let spec = &self.link.spec;
        Ok(match spec.op {
            Op::Send => self
                .answer
                .as_ref()
                .is_some_and(|answer| all(answer, SERVER_BYTE)),
            Op::WriteImm => {
                let mut written = vec![0; spec.size as usize];
                self.link.target.read_at(0, &mut written)?;
                all(&written, SERVER_BYTE)
            }
            Op::Read => self.buf.as_ref().is_some_and(|read| all(read, TARGET_BYTE)),
            Op::Cas | Op::Faa => self.value == Some(spec.end() - 1),
            Op::Write => true, // its completion says so
        })
    }
}

fn all(bytes: &[u8], byte: u8) -> bool {
    bytes.iter().all(|found| *found == byte)
}

pub(crate) fn server(link: &Link) -> Result<()> {
    let spec = &link.spec;
    if spec.op.consumes_receive() {
        let mut spare = Some(link.filled_buf(SERVER_BYTE)?);
        let mut before = link.post_answer(0, link.filled_buf(SERVER_BYTE)?)?;
        for number in 1..spec.end() {
            let answer =
                link.post_answer(number, spare.take().ok_or("an answer kept its buffer")?)?;
            spare = std::mem::replace(&mut before, answer).wait()?.buf;
        }
        before.wait()?;
    }
    link.wait_for_the_end();
    Ok(())
}

impl Link {
    /// Waits for message `number` and answers it in kind.
    #[inline]
    fn post_answer(&self, number: u64, answer: Buf) -> Result<rdma_msg::Operation> {
        self.endpoint.recv()?;
        self.post(number, Some(answer))
    }
}
