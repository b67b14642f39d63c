//! Messages: one server sends back what each of its clients sends.
//!
//! ```sh
//! cargo run --bin echo -- both --server-addr 192.168.99.2 --clients 4   # all in one process
//! cargo run --bin echo -- server --addr 192.168.99.2                    # or each by itself
//! cargo run --bin echo -- client --addr 192.168.99.2 --text hello
//! ```
//!
//! Both ends keep receives posted before they can be connected, so no message ever finds none.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use rdma_examples::child::announce;
use rdma_examples::cli::{self, During, Result};
use rdma_msg::{Endpoint, EndpointConfig, Incoming, Listener};

const PORT: u16 = 7471;
/// How long a client waits for its echo.
const PATIENCE: Duration = Duration::from_secs(5);

/// Echo over RDMA: one server, many clients.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Sends back what clients send.
    Server {
        /// Address to listen on, of an RDMA device: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        /// End after so many clients; without it serve for ever.
        #[arg(long)]
        clients: Option<usize>,
    },
    /// Sends a text some times and compares what comes back.
    Client {
        /// The server's address: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        #[command(flatten)]
        say: Say,
    },
    /// A server and some clients, each in a thread of this process.
    Both {
        /// Address to listen on, and to connect to.
        #[arg(long)]
        server_addr: String,
        /// How many clients at the same time.
        #[arg(long, default_value_t = 3)]
        clients: usize,
        #[command(flatten)]
        say: Say,
    },
}

#[derive(Parser, Clone)]
struct Say {
    /// What to send.
    #[arg(long, default_value = "hello, other side")]
    text: String,
    /// How often.
    #[arg(long, default_value_t = 3)]
    count: usize,
    /// The client's own address; without it the routing table chooses.
    #[arg(long)]
    client_addr: Option<String>,
    /// Print the endpoint's counters at the end.
    #[arg(long)]
    stats: bool,
}

fn main() -> ExitCode {
    cli::run("echo", |args: Args| match args.role {
        Role::Server { addr, clients } => serve(
            &bind(cli::address(&addr, PORT)?)?,
            clients.unwrap_or(usize::MAX),
            None,
        ),
        Role::Client { addr, say } => client(cli::address(&addr, PORT)?, &say, 0),
        Role::Both {
            server_addr,
            clients,
            say,
        } => both(cli::address(&server_addr, PORT)?, clients, &say),
    })
}

fn bind(addr: SocketAddr) -> Result<Listener> {
    let listener = Listener::bind(addr, &EndpointConfig::default())?;
    announce(listener.local_addr());
    Ok(listener)
}

/// Accepts `clients` clients, all of them by `deadline`, and serves each in a thread of its own.
fn serve(listener: &Listener, clients: usize, deadline: Option<Instant>) -> Result<()> {
    thread::scope(|scope| {
        for _ in 0..clients {
            let incoming = match deadline {
                None => listener.accept()?,
                Some(deadline) => listener
                    .accept_deadline(deadline)?
                    .ok_or("a client is missing")?,
            };
            scope.spawn(move || {
                let peer = incoming.peer_addr();
                if let Err(error) = echo(incoming) {
                    eprintln!("echo: client {peer}: {}", cli::chain(error.as_ref()));
                }
            });
        }
        Ok(())
    })
}

/// Sends each message back in the buffer it came in, until the client leaves.
fn echo(incoming: Incoming) -> Result<()> {
    let endpoint = incoming.accept()?;
    while let Ok(received) = endpoint.recv() {
        endpoint.send(received.buf)?.wait()?;
    }
    Ok(())
}

fn client(server: SocketAddr, say: &Say, number: usize) -> Result<()> {
    let source = say
        .client_addr
        .as_deref()
        .map(|addr| cli::address(addr, 0))
        .transpose()?;
    let config = EndpointConfig {
        source,
        ..EndpointConfig::default()
    };
    let endpoint = Endpoint::connect(server, &config)?;
    for round in 0..say.count {
        let text = format!("{} ({number}.{round})", say.text);
        endpoint.send_slice(text.as_bytes())?.wait()?;
        let echo = endpoint.recv_deadline(Instant::now() + PATIENCE)?;
        let echo = echo.ok_or_else(|| format!("no echo within {PATIENCE:?}"))?;
        if *echo.buf != *text.as_bytes() {
            return Err(format!(
                "sent {text:?}, got {:?}",
                String::from_utf8_lossy(&echo.buf)
            )
            .into());
        }
        println!("{text}");
    }
    if say.stats {
        eprintln!("{}", endpoint.stats());
    }
    Ok(endpoint.close(config.close_deadline)?)
}

fn both(server: SocketAddr, clients: usize, say: &Say) -> Result<()> {
    let listener = bind(server)?;
    let server = listener.local_addr();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..clients)
            .map(|number| scope.spawn(move || client(server, say, number)))
            .collect();
        let served = serve(
            &listener,
            clients.len(),
            Some(Instant::now() + 2 * PATIENCE),
        );
        for (number, client) in clients.into_iter().enumerate() {
            let outcome = client.join().unwrap_or_else(|_| Err("panicked".into()));
            outcome.during(|| format!("client {number}"))?;
        }
        served
    })
}
