//! Ping-pong: how long one message, write or read takes, with every byte of it checked.
//!
//! ```sh
//! cargo run --release --bin pingpong -- both --server-addr 192.168.99.2 --op write --size 64,4096
//! cargo run --release --bin pingpong -- server --addr 192.168.99.2      # or on two machines
//! cargo run --release --bin pingpong -- client --addr 192.168.99.2 --op send --json
//! ```
//!
//! What is timed, and what the latency in the table is:
//!
//! | op | timed section | latency |
//! |---|---|---|
//! | send | the client's send is posted … the server's answer of the same size has been received | half of it, as in the tools of perftest |
//! | write | the client's write *with immediate* is posted … the server's write of the same size has arrived | half of it |
//! | read | the read is posted … its completion has been taken | all of it: a read is a round trip by itself |
//!
//! Both sides compare every byte of what they got with a pattern that differs at every byte from the
//! iteration before; of a read only the client gets anything.
//!
//! Filling and checking the data, and the message by which the server says that it is ready for the
//! next iteration, lie outside of the timed section. Messages and megabytes a second are what went
//! through the timed sections divided by their length: one message at a time, so they say nothing
//! of the bandwidth that many messages in flight would reach.
//!
//! - `main.rs`: arguments and roles
//! - `wire.rs`: what the two sides tell each other beside the data
//! - `client.rs`, `server.rs`: one module for each side, one function for each operation
//! - `progress.rs`: the bar

mod client;
mod progress;
mod server;
mod wire;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use rdma_examples::child::{self, Peer, announce};
use rdma_examples::cli::{self, Result};
use rdma_examples::report;
use rdma_msg::{Endpoint, EndpointConfig, Listener, Wait};

use wire::Op;

const PORT: u16 = 7473;
/// How long either side waits for the other's next step before it gives up.
const PATIENCE: Duration = Duration::from_secs(10);

/// For connecting to a server that is known to be there: only a busy machine makes it slow to answer.
const CONNECT_TIME: Duration = Duration::from_secs(30);
/// Control messages are at most this long.
const CONTROL: usize = 256;

/// Latency and rate of RDMA operations, data verified.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Answers one client after the other.
    Server {
        /// Address to listen on, of an RDMA device: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        /// The largest message a client may ask for.
        #[arg(long, default_value_t = 1 << 20)]
        max_size: usize,
        #[arg(long, value_enum, default_value_t = WaitMode::Hybrid)]
        wait: WaitMode,
        /// End after so many clients; without it serve for ever.
        #[arg(long)]
        clients: Option<usize>,
        /// Print the endpoint's counters when a client leaves.
        #[arg(long)]
        stats: bool,
        /// The process to die with.
        #[arg(long, hide = true)]
        parent: Option<u32>,
    },
    /// Measures against a server.
    Client {
        /// The server's address: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        #[command(flatten)]
        run: Run,
    },
    /// Starts the server as a child process of its own, and measures against it.
    Both {
        /// Address for the server to listen on: HOST or HOST:PORT.
        #[arg(long)]
        server_addr: String,
        #[command(flatten)]
        run: Run,
    },
}

/// What to measure and how to show it.
#[derive(Parser)]
struct Run {
    /// The client's own address; without it the routing table chooses.
    #[arg(long)]
    client_addr: Option<String>,
    #[arg(long, value_enum, default_value_t = Op::Send)]
    op: Op,
    /// Bytes a message; several with commas between.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 4096, 65536, 1 << 20],
          value_parser = clap::value_parser!(u32).range(1..=8 << 20))]
    size: Vec<u32>,
    /// Iterations a size [default: 1000, fewer for large messages]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// How to wait for a completion.
    #[arg(long, value_enum, default_value_t = WaitMode::Hybrid)]
    wait: WaitMode,
    /// Only JSON on stdout: an array with an object for each size.
    #[arg(long)]
    json: bool,
    /// Print the endpoint's counters at the end, on stderr.
    #[arg(long)]
    stats: bool,
    /// Send one wrong byte in this iteration, to see that it is found.
    #[arg(long, hide = true)]
    corrupt_at: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum WaitMode {
    /// Sleep on the completion channel.
    Event,
    /// Poll all the time.
    Spin,
    /// Poll for some microseconds, then sleep.
    Hybrid,
}

impl From<WaitMode> for Wait {
    fn from(mode: WaitMode) -> Wait {
        match mode {
            WaitMode::Event => Wait::Event,
            WaitMode::Spin => Wait::Spin,
            WaitMode::Hybrid => Wait::default(),
        }
    }
}

impl Run {
    fn iterations(&self, size: u32) -> u64 {
        const BYTES: u64 = 32 << 20; // so that the large sizes take about as long as the small
        self.iters
            .unwrap_or_else(|| (BYTES / u64::from(size)).clamp(50, 1000))
    }

    fn largest(&self) -> usize {
        self.size.iter().copied().max().unwrap_or(0) as usize
    }
}

fn main() -> ExitCode {
    cli::run("pingpong", |args: Args| match args.role {
        Role::Server {
            addr,
            max_size,
            wait,
            clients,
            stats,
            parent,
        } => {
            if let Some(parent) = parent {
                child::die_with(parent)?;
            }
            let listener =
                Listener::bind(cli::address(&addr, PORT)?, &config(max_size, wait, None))?;
            announce(listener.local_addr());
            serve(&listener, max_size, clients, stats)
        }
        Role::Client { addr, run } => {
            let deadline = EndpointConfig::default().connect_deadline;
            measure(cli::address(&addr, PORT)?, &run, deadline)
        }
        Role::Both { server_addr, run } => both(cli::address(&server_addr, PORT)?, &run),
    })
}

/// Serves `clients` clients, and fails if one did; or all that come, and only says so.
fn serve(listener: &Listener, max_size: usize, clients: Option<usize>, stats: bool) -> Result<()> {
    if let Some(clients) = clients {
        return (0..clients).try_for_each(|_| server::serve(listener.accept()?, max_size, stats));
    }
    loop {
        if let Err(error) = server::serve(listener.accept()?, max_size, stats) {
            eprintln!("pingpong: {}", cli::chain(error.as_ref()));
        }
    }
}

/// A ping-pong has one message in flight: short queues, but room for the largest message.
fn config(max_message: usize, wait: WaitMode, source: Option<SocketAddr>) -> EndpointConfig {
    EndpointConfig {
        send_depth: 8,
        recv_depth: 8,
        max_message: max_message.max(CONTROL),
        wait: wait.into(),
        source,
        ..EndpointConfig::default()
    }
}

fn both(server: SocketAddr, run: &Run) -> Result<()> {
    let (addr, largest) = (server.to_string(), run.largest().to_string());
    let wait = run
        .wait
        .to_possible_value()
        .map(|value| value.get_name().to_owned());
    let wait = wait.unwrap_or_default(); // no mode is skipped, so each has a name
    let mut args = vec![
        "server",
        "--addr",
        &addr,
        "--max-size",
        &largest,
        "--wait",
        &wait,
    ];
    args.extend(["--clients", "1"]);
    args.extend(run.stats.then_some("--stats"));
    let mut peer = Peer::start(args)?;
    measure(peer.listening()?, run, CONNECT_TIME)?;
    peer.finish(PATIENCE)
}

/// Runs all sizes over one connection, made by `deadline`, and prints the result.
fn measure(server: SocketAddr, run: &Run, deadline: Duration) -> Result<()> {
    let source = run
        .client_addr
        .as_deref()
        .map(|addr| cli::address(addr, 0))
        .transpose()?;
    let config = EndpointConfig {
        connect_deadline: deadline,
        ..config(run.largest(), run.wait, source)
    };
    let endpoint = Endpoint::connect(server, &config)?;
    let mut rows = Vec::new();
    if !run.json {
        print!("{}", report::heading());
    }
    for &size in &run.size {
        let setup = wire::Setup {
            op: run.op,
            size,
            iterations: run.iterations(size),
            corrupt_at: run.corrupt_at,
        };
        let row = client::run(&endpoint, setup)?;
        if !run.json {
            print!("{}", report::line(&row));
        }
        rows.push(row);
    }
    if run.json {
        print!("{}", report::json(&rows));
    }
    if run.stats {
        print_stats("client", &endpoint);
    }
    Ok(endpoint.close(config.close_deadline)?)
}

fn print_stats(side: &str, endpoint: &Endpoint) {
    eprintln!("{side}, endpoint: {}", endpoint.stats());
    eprintln!("{side}, worker: {}", endpoint.worker().stats());
}
