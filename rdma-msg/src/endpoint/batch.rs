//! Several operations with one doorbell.

use std::sync::Arc;

use rdma_core_rs::RemoteRegion;

use super::{Endpoint, OpOptions, fit_read};
use crate::error::{OpKind, PostError, PostErrorKind};
use crate::op::{Operation, Payload};
use crate::pool::Buf;
use crate::post::{CHAIN, Flags, Request, Verb};
use crate::worker::State;
use crate::wr_id::WrId;

/// Operations that are collected, and posted together: the device is told once for up to 32 of them,
/// instead of once for each.
///
/// ```no_run
/// # use rdma_msg::{Buf, Endpoint, RemoteRegion};
/// # fn example(endpoint: &Endpoint, data: Buf, note: Buf, remote: RemoteRegion)
/// #     -> Result<(), Box<dyn std::error::Error>> {
/// let mut batch = endpoint.batch();
/// batch.write(data, remote)?;
/// batch.send(note)?;
/// for operation in batch.post().accepted()? {
///     operation.wait()?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Batch<'a> {
    endpoint: &'a Endpoint,
    options: OpOptions,
    requests: Vec<Request<'static>>,
}

impl<'a> Batch<'a> {
    pub(super) fn new(endpoint: &'a Endpoint) -> Batch<'a> {
        Batch {
            endpoint,
            options: OpOptions::default(),
            requests: Vec::new(),
        }
    }

    /// Sets the options of the operations added from here on.
    pub fn options(&mut self, options: OpOptions) -> &mut Batch<'a> {
        self.options = options;
        self
    }

    /// How many operations it holds.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a send; see [`Endpoint::send`].
    ///
    /// # Errors
    ///
    /// [`PostError`] with the buffer, if a rule that can be checked now refuses it.
    pub fn send(&mut self, buf: Buf) -> Result<(), PostError<Buf>> {
        self.add(Verb::Send, buf)
    }

    /// Adds a send with immediate data; see [`Endpoint::send_imm`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Batch::send).
    pub fn send_imm(&mut self, buf: Buf, imm: u32) -> Result<(), PostError<Buf>> {
        self.add(Verb::SendImm(imm), buf)
    }

    /// Adds a write; see [`Endpoint::write`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Batch::send).
    pub fn write(&mut self, buf: Buf, remote: RemoteRegion) -> Result<(), PostError<Buf>> {
        self.add(Verb::Write(remote), buf)
    }

    /// Adds a write with immediate data; see [`Endpoint::write_imm`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Batch::send).
    pub fn write_imm(
        &mut self,
        buf: Buf,
        remote: RemoteRegion,
        imm: u32,
    ) -> Result<(), PostError<Buf>> {
        self.add(Verb::WriteImm(remote, imm), buf)
    }

    /// Adds a read; see [`Endpoint::read`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Batch::send).
    pub fn read(&mut self, mut buf: Buf, remote: RemoteRegion) -> Result<(), PostError<Buf>> {
        if let Err(kind) = fit_read(&mut buf, remote) {
            return Err(PostError::new(kind, buf));
        }
        self.add(Verb::Read(remote), buf)
    }

    /// Adds a fetch-and-add; see [`Endpoint::fetch_add`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Batch::send).
    pub fn fetch_add(&mut self, remote: RemoteRegion, add: u64) -> Result<(), PostError<()>> {
        self.add_atomic(Verb::FetchAdd { remote, add })
    }

    /// Adds a compare-and-swap; see [`Endpoint::compare_swap`].
    ///
    /// # Errors
    ///
    /// As for [`send`](Batch::send).
    pub fn compare_swap(
        &mut self,
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    ) -> Result<(), PostError<()>> {
        self.add_atomic(Verb::CompareSwap {
            remote,
            compare,
            swap,
        })
    }

    fn add_atomic(&mut self, verb: Verb) -> Result<(), PostError<()>> {
        let cell = self.endpoint.worker.inner.cell();
        let cell = cell.map_err(|error| PostError::new(error, ()))?;
        self.add(verb, cell).map_err(|error| error.map(drop))
    }

    fn add(&mut self, verb: Verb, buf: Buf) -> Result<(), PostError<Buf>> {
        let len = buf.len() as u64;
        if let Err(kind) = self.endpoint.rules.check(&verb, len, 1, self.options) {
            return Err(PostError::new(kind, buf));
        }
        let OpOptions {
            fence,
            solicited,
            inline,
        } = self.options;
        let flags = Flags {
            fence,
            solicited,
            inline,
            signaled: false,
        };
        self.requests.push(Request {
            verb,
            flags,
            payload: Payload::one(buf),
            data: None,
        });
        Ok(())
    }

    /// Posts what was collected, in order, as far as the queue takes it. The batch can be filled
    /// again afterwards.
    #[must_use = "what was not posted is in it"]
    pub fn post(&mut self) -> PostedBatch {
        let Endpoint { worker, index, .. } = self.endpoint;
        let mut requests = std::mem::take(&mut self.requests);
        let mut ids = Vec::with_capacity(requests.len());
        let kinds: Vec<OpKind> = requests.iter().map(|request| request.verb.kind()).collect();
        let error = worker
            .inner
            .with(|state| state.post_batch(*index, &mut requests, &mut ids));
        let operations = ids
            .into_iter()
            .zip(kinds)
            .map(|(id, kind)| Operation::new(Arc::clone(&worker.inner), id, kind))
            .collect();
        let unposted = requests.into_iter().map(Unposted::new).collect();
        PostedBatch {
            operations,
            unposted,
            error,
        }
    }
}

impl State {
    /// Posts a batch in chains. What was not posted is left in `requests`, with the reason.
    fn post_batch(
        &mut self,
        index: u32,
        requests: &mut Vec<Request<'static>>,
        ids: &mut Vec<WrId>,
    ) -> Option<PostErrorKind> {
        if let Err(kind) = self.takes_sends(index) {
            return (!requests.is_empty()).then_some(kind);
        }
        while !requests.is_empty() {
            let rest = requests.split_off(requests.len().min(CHAIN));
            // Who waits for any of them hears of it by the last one at the latest.
            if let Some(last) = requests.last_mut() {
                last.flags.signaled = true;
            }
            let chained = match self.poster(index) {
                Ok(mut poster) => poster.send_chain(requests, ids),
                Err(kind) => {
                    requests.extend(rest);
                    return Some(kind);
                }
            };
            requests.extend(rest);
            if chained.perhaps {
                self.doorbell_failed(index);
                self.attend();
                return None;
            }
            if chained.error.is_some() {
                self.signal_tail(index);
                return chained.error;
            }
        }
        None
    }

    /// The signaled end of a chain was refused: what was posted before it would never be heard of.
    fn signal_tail(&mut self, index: u32) {
        let lane = self.endpoints[index as usize].lane;
        if lane.is_some_and(|lane| self.tracker.unsignaled_tail(lane) > 0) {
            self.probe(index);
            self.attend();
        }
    }
}

/// What posting a batch came to.
#[derive(Debug)]
#[must_use = "what was not posted is in it"]
pub struct PostedBatch {
    /// The accepted operations, in order: the first ones of the batch.
    pub operations: Vec<Operation>,
    /// The rest, in order: exactly what was not posted.
    pub unposted: Vec<Unposted>,
    /// Why there is a rest.
    pub error: Option<PostErrorKind>,
}

impl PostedBatch {
    /// The operations, if all were accepted.
    ///
    /// # Errors
    ///
    /// [`PostError`] with everything, otherwise.
    pub fn accepted(self) -> Result<Vec<Operation>, PostError<PostedBatch>> {
        match self.error {
            None => Ok(self.operations),
            Some(kind) => {
                let PostedBatch {
                    operations,
                    unposted,
                    ..
                } = self;
                Err(PostError::new(
                    kind,
                    PostedBatch {
                        operations,
                        unposted,
                        error: None,
                    },
                ))
            }
        }
    }
}

/// An operation of a batch that was not posted.
#[derive(Debug)]
pub struct Unposted {
    /// What it was to be.
    pub op: OpKind,
    /// Its buffer; `None` for an atomic.
    pub buf: Option<Buf>,
}

impl Unposted {
    fn new(request: Request<'static>) -> Unposted {
        let op = request.verb.kind();
        let buf = if op.is_atomic() {
            None
        } else {
            request.payload.first
        };
        Unposted { op, buf }
    }
}
