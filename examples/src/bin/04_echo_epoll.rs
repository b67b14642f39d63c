//! The echo server in an event loop of one's own, without a runtime and with one thread for all clients.
//!
//! ```sh
//! cargo run --bin echo_epoll -- --addr 192.168.99.2          # then: cargo run --bin echo -- client --addr 192.168.99.2
//! ```
//!
//! Two descriptors are all that the loop sleeps on: the listener's, and that of the one worker which
//! all clients share. Everything else is asked without blocking, and the order of a turn is always the
//! same: poll the worker, hand out, ask whether it may sleep (that arms the completion channel and polls once
//! more), sleep.

use std::collections::VecDeque;
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};

use clap::Parser;
use rdma_examples::child::announce;
use rdma_examples::cli::{self, Result};
use rdma_msg::{
    Endpoint, EndpointConfig, Listener, Opening, Operation, PostError, Readiness, Received, Worker,
    WorkerConfig,
};
use rustix::event::epoll;

const PORT: u16 = 7471;

/// Echo server over epoll, for the clients of `echo`.
#[derive(Parser)]
struct Args {
    /// Address to listen on, of an RDMA device: HOST or HOST:PORT.
    #[arg(long)]
    addr: String,
    /// End when so many clients have come and gone; without it serve for ever.
    #[arg(long)]
    clients: Option<usize>,
    /// Print the worker's counters at the end.
    #[arg(long)]
    stats: bool,
}

fn main() -> ExitCode {
    cli::run("echo_epoll", |args: Args| {
        let addr = cli::address(&args.addr, PORT)?;
        let worker = Worker::for_addr(addr, &WorkerConfig::default())?;
        let listener = Listener::bind(addr, &EndpointConfig::default())?;
        announce(listener.local_addr());
        let mut server = Server {
            worker,
            listener,
            opening: Vec::new(),
            clients: Vec::new(),
            gone: 0,
        };
        server.run(args.clients.unwrap_or(usize::MAX))?;
        if args.stats {
            eprintln!("{}", server.worker.stats());
        }
        Ok(())
    })
}

struct Server {
    worker: Worker,
    listener: Listener,
    /// Accepted, but not established yet.
    opening: Vec<Opening>,
    clients: Vec<Client>,
    /// How many have left.
    gone: usize,
}

/// One client, and what it is owed.
struct Client {
    endpoint: Endpoint,
    /// Received, but not sent back yet, because the send queue was full.
    waiting: VecDeque<Received>,
    /// Echoes in flight.
    sending: Vec<Operation>,
}

impl Server {
    fn run(&mut self, until_gone: usize) -> Result<()> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let any = epoll::EventData::new_u64(0); // whichever it is, every turn asks all
        epoll::add(&epoll, &self.worker, any, epoll::EventFlags::IN)?;
        epoll::add(&epoll, &self.listener, any, epoll::EventFlags::IN)?;
        while self.gone < until_gone {
            while self.worker.poll() > 0 {}
            self.accept()?;
            self.establish();
            self.echo();
            if self.worker.prepare_wait() == Readiness::MayWait {
                let mut ready = Vec::with_capacity(2);
                let room = rustix::buffer::spare_capacity(&mut ready);
                epoll::wait(&epoll, room, None)?;
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<()> {
        while let Some(incoming) = self.listener.try_accept()? {
            self.opening.push(incoming.accept_with(&self.worker)?);
        }
        Ok(())
    }

    fn establish(&mut self) {
        // A future needs no runtime to be polled, and no waker either: every turn asks again.
        let mut context = Context::from_waker(Waker::noop());
        for mut opening in std::mem::take(&mut self.opening) {
            match Pin::new(&mut opening).poll(&mut context) {
                Poll::Ready(Ok(endpoint)) => self.clients.push(Client::new(endpoint)),
                Poll::Ready(Err(error)) => eprintln!("echo_epoll: {}", cli::chain(&error)),
                Poll::Pending => self.opening.push(opening),
            }
        }
    }

    fn echo(&mut self) {
        let before = self.clients.len();
        self.clients.retain_mut(Client::turn);
        self.gone += before - self.clients.len();
    }
}

impl Client {
    fn new(endpoint: Endpoint) -> Client {
        Client {
            endpoint,
            waiting: VecDeque::new(),
            sending: Vec::new(),
        }
    }

    /// Takes what came, sends what can be sent; whether the client is still there.
    fn turn(&mut self) -> bool {
        self.sending.retain_mut(|send| send.try_result().is_none());
        let alive = loop {
            match self.endpoint.try_recv() {
                Ok(Some(received)) => self.waiting.push_back(received),
                Ok(None) => break true,
                Err(_) => break false,
            }
        };
        while let Some(received) = self.waiting.pop_front() {
            match self.endpoint.send(received.buf) {
                Ok(send) => self.sending.push(send),
                Err(PostError { buf, .. }) if alive => {
                    self.waiting.push_front(Received { buf, ..received });
                    break;
                }
                Err(_) => break, // nobody to send it to
            }
        }
        alive
    }
}
