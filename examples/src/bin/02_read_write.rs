//! One-sided: a client works in the server's memory, and the server's program does nothing.
//!
//! ```sh
//! cargo run --bin read_write -- both --server-addr 192.168.99.2
//! cargo run --bin read_write -- server --addr 192.168.99.2
//! cargo run --bin read_write -- client --addr 192.168.99.2
//! ```
//!
//! The server exposes a region and sends its descriptor (address, length, key: 20 bytes) in a message.
//! The client reads from it, writes into it, changes a word in it atomically, and at the end says so with
//! a write *with immediate*: the only one of these operations that the server notices.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use rdma_examples::child::announce;
use rdma_examples::cli::{self, Result};
use rdma_msg::{Access, Endpoint, EndpointConfig, Incoming, Listener, Received, RemoteRegion};

const PORT: u16 = 7472;
const PATIENCE: Duration = Duration::from_secs(5);

/// The region: a greeting to be read, a counter, and room for the client's answer.
const LEN: usize = 4096;
const GREETING: &[u8] = b"read me";
const COUNTER: usize = 64;
const ANSWER: usize = 1024;
/// What the client's last write carries for the server.
const DONE: u32 = 0x0d0e;

/// One-sided operations into an exposed region.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Exposes a region and shows what the client did to it.
    Server {
        /// Address to listen on, of an RDMA device: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
    },
    /// Reads, writes and changes the server's region.
    Client {
        /// The server's address: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        #[command(flatten)]
        options: Options,
    },
    /// Both, each in a thread of this process.
    Both {
        /// Address to listen on, and to connect to.
        #[arg(long)]
        server_addr: String,
        #[command(flatten)]
        options: Options,
    },
}

#[derive(Parser)]
struct Options {
    /// The client's own address; without it the routing table chooses.
    #[arg(long)]
    client_addr: Option<String>,
    /// Print the endpoint's counters at the end.
    #[arg(long)]
    stats: bool,
}

fn main() -> ExitCode {
    cli::run("read_write", |args: Args| match args.role {
        Role::Server { addr } => server(bind(cli::address(&addr, PORT)?)?.accept()?),
        Role::Client { addr, options } => client(cli::address(&addr, PORT)?, &options),
        Role::Both {
            server_addr,
            options,
        } => both(cli::address(&server_addr, PORT)?, &options),
    })
}

fn bind(addr: SocketAddr) -> Result<Listener> {
    let listener = Listener::bind(addr, &EndpointConfig::default())?;
    announce(listener.local_addr());
    Ok(listener)
}

fn server(incoming: Incoming) -> Result<()> {
    let endpoint = incoming.accept()?;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = endpoint.expose(LEN, rights)?;
    region.write_at(0, GREETING)?;
    endpoint
        .send_slice(&region.descriptor().to_bytes())?
        .wait()?;

    // From here on the region changes under us; only the write with immediate tells that it is done.
    let done = message(&endpoint)?;
    let mut answer = vec![0; done.written.unwrap_or(0)];
    region.read_at(ANSWER, &mut answer)?;
    println!(
        "server: marker {:#x}, counter {}, answer {:?}",
        done.imm.unwrap_or(0),
        region.load_u64(COUNTER)?,
        String::from_utf8_lossy(&answer),
    );
    endpoint.recv().err(); // until the client leaves; the region must live as long
    Ok(())
}

fn client(server: SocketAddr, options: &Options) -> Result<()> {
    let source = options
        .client_addr
        .as_deref()
        .map(|addr| cli::address(addr, 0))
        .transpose()?;
    let config = EndpointConfig {
        source,
        ..EndpointConfig::default()
    };
    let endpoint = Endpoint::connect(server, &config)?;
    let descriptor = message(&endpoint)?.buf;
    let region = RemoteRegion::from_bytes((*descriptor).try_into()?);

    let part = region.slice(0..GREETING.len() as u64)?;
    let read = endpoint
        .read(endpoint.alloc(GREETING.len())?, part)?
        .wait()?;
    let greeting = read.buf.ok_or("the read came back without its buffer")?;
    println!("client: read {:?}", String::from_utf8_lossy(&greeting));

    let word = region.slice(COUNTER as u64..COUNTER as u64 + 8)?;
    let old = endpoint.compare_swap(word, 0, 41)?.wait()?.value;
    let next = endpoint.fetch_add(word, 1)?.wait()?.value;
    println!("client: the counter was {old:?}, then {next:?}");

    let mut answer = endpoint.alloc(GREETING.len())?;
    answer.copy_from_slice(&greeting);
    answer.reverse();
    let room = region.slice(ANSWER as u64..(ANSWER + answer.len()) as u64)?;
    endpoint.write_imm(answer, room, DONE)?.wait()?;

    if options.stats {
        eprintln!("{}", endpoint.stats());
    }
    Ok(endpoint.close(config.close_deadline)?)
}

/// The next message, or an error after [`PATIENCE`].
fn message(endpoint: &Endpoint) -> Result<Received> {
    let received = endpoint.recv_deadline(Instant::now() + PATIENCE)?;
    received.ok_or_else(|| format!("no message within {PATIENCE:?}").into())
}

fn both(addr: SocketAddr, options: &Options) -> Result<()> {
    let listener = bind(addr)?;
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            let incoming = listener.accept_deadline(Instant::now() + 2 * PATIENCE)?;
            server(incoming.ok_or("the client is missing")?)
        });
        client(addr, options)?;
        server
            .join()
            .unwrap_or_else(|_| Err("the server panicked".into()))
    })
}
