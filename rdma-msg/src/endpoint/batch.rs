//! Several operations with one doorbell.

use std::sync::Arc;

use rdma_core_rs::RemoteRegion;

use super::{Endpoint, OpOptions, fit_read, refused};
use crate::error::{OpKind, PostError, PostErrorKind};
use crate::op::{Operation, Payload};
use crate::pool::Buf;
use crate::post::{CHAIN, Request, Verb};
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
    requests: Vec<Request>,
    /// Ids of what was just posted; kept for its allocation.
    ids: Vec<WrId>,
}

impl<'a> Batch<'a> {
    pub(super) fn new(endpoint: &'a Endpoint) -> Batch<'a> {
        Batch {
            endpoint,
            options: OpOptions::default(),
            requests: Vec::new(),
            ids: Vec::new(),
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
        // Found when posting, it would stay in the way of all that is behind it.
        if !self.endpoint.worker.inner.can_use(&buf) {
            return Err(PostError::new(PostErrorKind::ForeignBuffer, buf));
        }
        let payload = Payload::One(buf);
        match self
            .endpoint
            .check(&verb, &payload, None, self.options, false)
        {
            Ok(flags) => self.requests.push(Request {
                verb,
                flags,
                payload,
            }),
            Err(kind) => return Err(PostError::new(kind, refused(payload))),
        }
        Ok(())
    }

    /// Posts what was collected, in order, as far as the queue takes it. The batch is empty afterwards
    /// and can be filled again.
    #[must_use = "what was not posted is in it"]
    pub fn post(&mut self) -> PostedBatch {
        let mut operations = Vec::with_capacity(self.len());
        let error = self.post_into(&mut operations).err();
        let unposted = self.take_unposted().collect();
        PostedBatch {
            operations,
            unposted,
            error,
        }
    }

    /// As [`post`](Self::post), for loops that must not allocate: adds the accepted operations to
    /// `operations`, which can be used again like the batch itself.
    ///
    /// # Errors
    ///
    /// Why not all were posted. Exactly the rest stays in the batch: to be posted later, or taken with
    /// [`take_unposted`](Self::take_unposted).
    pub fn post_into(&mut self, operations: &mut Vec<Operation>) -> Result<(), PostErrorKind> {
        let Batch {
            endpoint: Endpoint { worker, index, .. },
            requests,
            ids,
            ..
        } = self;
        let result = worker
            .inner
            .with(|state| state.post_batch(*index, requests, ids));
        operations.extend(ids.iter().zip(&*requests).map(|(&id, request)| {
            Operation::new(Arc::clone(&worker.inner), id, request.verb.kind())
        }));
        requests.drain(..ids.len());
        ids.clear();
        result
    }

    /// Takes what the batch holds, in order.
    pub fn take_unposted(&mut self) -> impl Iterator<Item = Unposted> + '_ {
        self.requests.drain(..).map(Unposted::new)
    }
}

impl State {
    /// Posts a batch in chains. The ids of what was posted, the first ones, are pushed to `ids`.
    fn post_batch(
        &mut self,
        index: u32,
        requests: &mut [Request],
        ids: &mut Vec<WrId>,
    ) -> Result<(), PostErrorKind> {
        for chain in requests.chunks_mut(CHAIN) {
            // Who waits for any of them hears of it by the last one at the latest.
            if let Some(last) = chain.last_mut() {
                last.flags.signaled = true;
            }
            let chained = self.sender(index)?.send_chain(chain, ids);
            if chained.perhaps {
                self.doorbell_failed(index);
                self.attend();
            }
            if let Some(kind) = chained.error {
                self.signal_tail(index);
                return Err(kind);
            }
        }
        Ok(())
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
    fn new(request: Request) -> Unposted {
        let op = request.verb.kind();
        let buf = if op.is_atomic() {
            None
        } else {
            request.payload.split().0
        };
        Unposted { op, buf }
    }
}
