//! The echo as async tasks on tokio, current-thread.
//!
//! ```sh
//! cargo run --bin echo_tokio -- both --server-addr 192.168.99.2 --clients 4
//! ```
//!
//! Connecting, accepting, every operation and the close are awaited. Dropping a future drops the waiter
//! and never the buffer, so the `timeout` around a receive below loses nothing.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use rdma_examples::child::announce;
use rdma_examples::cli::{self, During, Result};
use rdma_msg::{Endpoint, EndpointConfig, Listener};
use tokio::task::JoinSet;
use tokio::time::timeout;

const PORT: u16 = 7471;
const PATIENCE: Duration = Duration::from_secs(5);

/// Echo over RDMA, with async tasks.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Sends back what clients send, for ever.
    Server {
        /// Address to listen on, of an RDMA device: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
    },
    /// A server and some clients, each in a task of this process.
    Both {
        /// Address to listen on, and to connect to.
        #[arg(long)]
        server_addr: String,
        /// How many clients at the same time.
        #[arg(long, default_value_t = 3)]
        clients: usize,
        /// Print the counters of each client at the end.
        #[arg(long)]
        stats: bool,
    },
}

fn main() -> ExitCode {
    cli::run("echo_tokio", |args: Args| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            match args.role {
                Role::Server { addr } => serve(&bind(cli::address(&addr, PORT)?)?).await,
                Role::Both {
                    server_addr,
                    clients,
                    stats,
                } => both(cli::address(&server_addr, PORT)?, clients, stats).await,
            }
        })
    })
}

fn bind(addr: SocketAddr) -> Result<Listener> {
    let listener = Listener::bind(addr, &EndpointConfig::default())?;
    announce(listener.local_addr());
    Ok(listener)
}

/// Accepts clients and echoes for each in a task of its own, for ever.
async fn serve(listener: &Listener) -> Result<()> {
    loop {
        let incoming = rdma_msg::tokio::accept(listener).await?;
        let peer = incoming.peer_addr();
        tokio::spawn(async move {
            let endpoint = match rdma_msg::tokio::establish(incoming).await {
                Ok(endpoint) => endpoint,
                Err(error) => {
                    return eprintln!("echo_tokio: client {peer}: {}", cli::chain(&error));
                }
            };
            if let Err(error) = echo(&endpoint).await {
                eprintln!("echo_tokio: client {peer}: {}", cli::chain(error.as_ref()));
            }
        });
    }
}

async fn echo(endpoint: &Endpoint) -> Result<()> {
    while let Ok(received) = endpoint.recv_async().await {
        endpoint.send(received.buf)?.await?;
    }
    Ok(())
}

async fn client(server: SocketAddr, number: usize, stats: bool) -> Result<()> {
    let config = EndpointConfig::default();
    let endpoint = rdma_msg::tokio::connect(server, &config).await?;
    for round in 0..3 {
        let text = format!("hello, other side ({number}.{round})");
        endpoint.send_slice(text.as_bytes())?.await?;
        let echo = timeout(PATIENCE, endpoint.recv_async()).await??;
        if *echo.buf != *text.as_bytes() {
            return Err(format!(
                "sent {text:?}, got {:?}",
                String::from_utf8_lossy(&echo.buf)
            )
            .into());
        }
        println!("{text}");
    }
    if stats {
        eprintln!("{}", endpoint.stats());
    }
    Ok(endpoint.close_async(config.close_deadline).await?)
}

async fn both(server: SocketAddr, clients: usize, stats: bool) -> Result<()> {
    let listener = bind(server)?;
    let server = listener.local_addr();
    let serving = tokio::spawn(async move { serve(&listener).await });
    let mut tasks = JoinSet::new();
    for number in 0..clients {
        tasks.spawn(async move {
            client(server, number, stats)
                .await
                .during(|| format!("client {number}"))
        });
    }
    while let Some(client) = tasks.join_next().await {
        client??;
    }
    serving.abort();
    Ok(())
}
