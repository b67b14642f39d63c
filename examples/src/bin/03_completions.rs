//! How do I know that an RDMA read or write is complete? See `docs/completions.md`.
//!
//! ```sh
//! cargo run --bin completions -- both --server-addr 192.168.99.2
//! ```
//!
//! Each case is run against a peer in a process of its own, which is killed for the last one.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use rdma_examples::child;
use rdma_examples::cli::{self, Result};
use rdma_examples::completions::peer::{CONTENT, LEN, Peer};
use rdma_examples::completions::{Op, Way, endpoint, flag, verbs};
use rdma_msg::{Endpoint, RemoteRegion};

const PORT: u16 = 7475;

/// Success, failure and a dead peer, seen in three ways on two levels.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Exposes memory.
    Server {
        /// Address to listen on, of an RDMA device: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        /// The process to die with.
        #[arg(long, hide = true)]
        parent: Option<u32>,
    },
    /// Starts servers and shows all cases.
    Both {
        /// Address for the servers to listen on: HOST or HOST:PORT.
        #[arg(long)]
        server_addr: String,
        /// Print the last endpoint's counters at the end.
        #[arg(long)]
        stats: bool,
    },
}

fn main() -> ExitCode {
    cli::run("completions", |args: Args| match args.role {
        Role::Server { addr, parent } => {
            if let Some(parent) = parent {
                child::die_with(parent)?;
            }
            Peer::bind(cli::address(&addr, PORT)?)?.serve()
        }
        Role::Both { server_addr, stats } => both(cli::address(&server_addr, PORT)?, stats),
    })
}

/// What happens to the peer or the key of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    Success,
    BadKey,
    DeadPeer,
}

fn both(server: SocketAddr, stats: bool) -> Result<()> {
    for case in [Case::Success, Case::BadKey, Case::DeadPeer] {
        println!("{}:", title(case));
        for way in Way::ALL {
            for op in [Op::Read, Op::Write] {
                show("rdma-core-rs", way, op, || {
                    with_verbs(server, case, way, op)
                })?;
                show("rdma-msg", way, op, || with_endpoint(server, case, way, op))?;
            }
        }
    }
    let (peer, endpoint, _theirs) = markers(server)?;
    memory_flag(&peer, &endpoint)?;
    if stats {
        eprintln!("{}", endpoint.stats());
    }
    Ok(())
}

fn title(case: Case) -> &'static str {
    match case {
        Case::Success => "success",
        Case::BadKey => "a wrong key",
        Case::DeadPeer => "the peer was killed just before",
    }
}

fn show(level: &str, way: Way, op: Op, run: impl FnOnce() -> Result<String>) -> Result<()> {
    let start = Instant::now();
    let outcome = run()?;
    let took = start.elapsed().as_millis();
    println!("  {level:<12} {way:<8} {op:<5} {outcome} ({took} ms with set-up)");
    Ok(())
}

/// A peer of one's own, which can be killed.
fn start(server: SocketAddr) -> Result<(child::Peer, SocketAddr)> {
    let mut peer = child::Peer::start(["server", "--addr", &server.to_string()])?;
    let addr = peer.listening()?;
    Ok((peer, addr))
}

fn target(case: Case, remote: RemoteRegion) -> Result<RemoteRegion> {
    let part = remote.slice(0..CONTENT.len() as u64)?;
    Ok(if case == Case::BadKey {
        part.with_rkey(!part.rkey())
    } else {
        part
    })
}

fn with_verbs(server: SocketAddr, case: Case, way: Way, op: Op) -> Result<String> {
    let (mut peer, addr) = start(server)?;
    let mut client = verbs::Client::connect(addr)?;
    if case == Case::DeadPeer {
        peer.kill();
    }
    let (completion, buffer) = client.run(op, way, target(case, client.remote)?)?;
    Ok(match (completion.success(), op) {
        (Ok(_), Op::Read) => format!("success: {:?}", String::from_utf8_lossy(&buffer)),
        (Ok(_), Op::Write) => "success".into(),
        (Err(failure), _) => failure.to_string(),
    })
}

fn with_endpoint(server: SocketAddr, case: Case, way: Way, op: Op) -> Result<String> {
    let (mut peer, addr) = start(server)?;
    let (endpoint, remote) = endpoint::connect(addr)?;
    if case == Case::DeadPeer {
        peer.kill();
    }
    Ok(
        match endpoint::run(&endpoint, op, way, target(case, remote)?)? {
            Ok(done) if op == Op::Read => {
                let buf = done.buf.ok_or("a read has a buffer")?;
                format!("success: {:?}", String::from_utf8_lossy(&buf))
            }
            Ok(_) => "success".into(),
            Err(error) => format!("{:?}: {error}", error.outcome),
        },
    )
}

/// The markers: a write with immediate, a compare-swap, a fenced write behind a read.
fn markers(server: SocketAddr) -> Result<(Peer, Endpoint, Endpoint)> {
    println!("markers for the other side:");
    let peer = Peer::bind(server)?;
    let (ours, theirs) = connect(&peer)?;
    let (endpoint, remote) = ours;

    let arrived = endpoint::write_with_marker(&endpoint, &theirs, remote, [b"both ", b"parts"])?;
    let mut data = [0; 10];
    peer.region.read_at(0, &mut data)?;
    println!(
        "  write with immediate: the peer got {:?} and sees {:?}",
        arrived.imm,
        String::from_utf8_lossy(&data)
    );

    let word = remote.slice(1024..1032)?;
    let first = endpoint::mark(&endpoint, word, 0, 1)?;
    let second = endpoint::mark(&endpoint, word, 0, 2)?;
    let value = peer.region.load_u64(1024)?;
    println!(
        "  compare-swap: the first found what it expected: {first}, the second: {second}; the word is {value}"
    );

    let before = endpoint::read_then_write(&endpoint, remote.slice(2048..LEN as u64)?, 7)?;
    let after = peer.region.load_u64(LEN - 8)?;
    println!(
        "  fence: the read saw {}, the write behind it left {after}",
        before[LEN - 2048 - 8]
    );
    Ok((peer, endpoint, theirs))
}

/// Connects to a peer in this process: our endpoint with its memory, and the peer's endpoint.
fn connect(peer: &Peer) -> Result<((Endpoint, RemoteRegion), Endpoint)> {
    let addr = peer.addr();
    std::thread::scope(|scope| {
        let ours = scope.spawn(move || endpoint::connect(addr));
        let theirs = peer.accept()?;
        Ok((
            ours.join()
                .unwrap_or_else(|_| Err("connecting panicked".into()))?,
            theirs,
        ))
    })
}

/// The memory flag: right by luck, hanging, mistaken.
fn memory_flag(peer: &Peer, writer: &Endpoint) -> Result<()> {
    println!("the memory flag, seen by the side that is written to:");
    let patience = Duration::from_millis(300);
    let region = peer.region.descriptor();

    flag::write(writer, region, *b"round  1", Some(1))?;
    let seen = flag::look(&peer.region, 1, patience)?;
    println!("  with a flag: {seen:?}");

    flag::write(writer, region, *b"round  2", None)?;
    let seen = flag::look(&peer.region, 2, patience)?;
    println!("  forgotten: {seen:?}: it would wait for ever");

    flag::write(
        writer,
        region.with_rkey(!region.rkey()),
        *b"round  3",
        Some(1),
    )?;
    let seen = flag::look(&peer.region, 1, patience)?;
    println!("  the write failed, an old flag stands there: {seen:?}: old data taken for new");
    Ok(())
}
