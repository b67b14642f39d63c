//! A protocol of others: what `rping` of rdmacm-utils speaks, in both roles.
//!
//! ```sh
//! cargo run --bin rping -- server --addr 192.168.99.2 --verbose     # then: rping -c -a 192.168.99.2 -C 10 -v -V
//! cargo run --bin rping -- client --addr 192.168.99.2 --count 10    # against: rping -s -a 192.168.99.2 -v
//! ```
//!
//! One ping, as both programs play it. Every message is a [`Descriptor`], 16 bytes; the server's carry nothing:
//!
//! ```text
//! client                                     server
//! send the source's descriptor         ──►   (RDMA_READ_ADV)
//!                                            read the source      (RDMA_READ_COMPLETE)
//!                                      ◄──   send "go ahead"
//! send the sink's descriptor           ──►   (RDMA_WRITE_ADV)
//!                                            write it to the sink (RDMA_WRITE_COMPLETE)
//!                                      ◄──   send "go ahead"
//! compare source and sink
//! ```
//!
//! The peer is a plain verbs program: no handshake of ours in the private data (`handshake: false`).

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use rdma_examples::child::announce;
use rdma_examples::cli::{self, During, Result};
use rdma_msg::{Access, Endpoint, EndpointConfig, Incoming, Listener, RemoteRegion, SharedRegion};

/// What rping uses when it is told no port.
const PORT: u16 = 7174;
const PATIENCE: Duration = Duration::from_secs(5);

/// RDMA ping, compatible with rping of rdmacm-utils.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Reads each ping from the client's memory and writes it back there.
    Server {
        /// Address to listen on: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        /// Print the data of each ping.
        #[arg(long, short)]
        verbose: bool,
        /// Serve one client after the other, for ever.
        #[arg(long, short = 'P')]
        persistent: bool,
        /// Print the endpoint's counters at the end.
        #[arg(long)]
        stats: bool,
    },
    /// Offers memory to the server and compares what it did there.
    Client {
        /// The server's address: HOST or HOST:PORT.
        #[arg(long)]
        addr: String,
        /// The client's own address; without it the routing table chooses.
        #[arg(long)]
        client_addr: Option<String>,
        /// How many pings.
        #[arg(long, short = 'C', default_value_t = 3)]
        count: u32,
        /// Bytes a ping, the ending zero byte with it; a server of rdmacm-utils needs the same.
        #[arg(long, short = 'S', default_value_t = 64, value_parser = clap::value_parser!(u32).range(23..=65535))]
        size: u32,
        /// Print the data of each ping.
        #[arg(long, short)]
        verbose: bool,
        /// Print the endpoint's counters at the end.
        #[arg(long)]
        stats: bool,
    },
}

fn main() -> ExitCode {
    cli::run("rping", |args: Args| match args.role {
        Role::Server {
            addr,
            verbose,
            persistent,
            stats,
        } => {
            let listener = Listener::bind(cli::address(&addr, PORT)?, &config(None))?;
            announce(listener.local_addr());
            loop {
                serve(listener.accept()?, verbose, stats)?;
                if !persistent {
                    return Ok(());
                }
            }
        }
        Role::Client {
            addr,
            client_addr,
            count,
            size,
            verbose,
            stats,
        } => {
            let source = client_addr
                .as_deref()
                .map(|addr| cli::address(addr, 0))
                .transpose()?;
            let endpoint = Endpoint::connect(cli::address(&addr, PORT)?, &config(source))?;
            ping(&endpoint, count, size as usize, verbose)?;
            print_if(stats, &endpoint);
            Ok(endpoint.close(PATIENCE)?)
        }
    })
}

fn config(source: Option<SocketAddr>) -> EndpointConfig {
    EndpointConfig {
        handshake: false,
        max_message: Descriptor::LEN,
        send_depth: 8,
        recv_depth: 8,
        source,
        ..EndpointConfig::default()
    }
}

/// A piece of the client's memory, as it travels: all fields in network order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Descriptor {
    buf: u64,
    rkey: u32,
    size: u32,
}

impl Descriptor {
    const LEN: usize = 16;
    /// What rping takes at most.
    const MAX_SIZE: u32 = 65_535;

    fn of(region: &SharedRegion) -> Descriptor {
        let remote = region.descriptor();
        let size = remote.len() as u32; // at most 65535: see the argument's range
        Descriptor {
            buf: remote.addr(),
            rkey: remote.rkey(),
            size,
        }
    }

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.buf.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        bytes[12..].copy_from_slice(&self.size.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Descriptor> {
        let bytes: &[u8; Self::LEN] = bytes
            .try_into()
            .map_err(|_| format!("a message of {} bytes, not {}", bytes.len(), Self::LEN))?;
        let [a, b, c, d, e, f, g, h, rkey @ .., _, _, _, _] = *bytes;
        let [.., s, t, u, v] = *bytes;
        let size = u32::from_be_bytes([s, t, u, v]);
        if size > Self::MAX_SIZE {
            return Err(format!("the peer offers {size} bytes, more than rping can").into());
        }
        Ok(Descriptor {
            buf: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            rkey: u32::from_be_bytes(rkey),
            size,
        })
    }

    fn region(self) -> RemoteRegion {
        RemoteRegion::new(self.buf, self.size.into(), self.rkey)
    }
}

/// Serves one client until it disconnects.
fn serve(incoming: Incoming, verbose: bool, stats: bool) -> Result<()> {
    let peer = incoming.peer_addr();
    let endpoint = incoming.accept().during(|| format!("accept {peer}"))?;
    while let Ok(source) = endpoint.recv() {
        let source = Descriptor::from_bytes(&source.buf)?;
        let buf = endpoint.alloc(source.size as usize)?;
        let read = endpoint.read(buf, source.region())?.wait()?;
        let mut data = read.buf.ok_or("the read came back without its buffer")?;
        if verbose {
            println!("server ping data: {}", text(&data));
        }
        go_ahead(&endpoint)?;

        let sink = descriptor(&endpoint)?;
        // As rping does: the text and its ending zero byte, not the whole buffer.
        let len = data
            .iter()
            .position(|&byte| byte == 0)
            .map_or(data.len(), |end| end + 1);
        data.set_len(len);
        endpoint
            .write(data, sink.region().slice(0..len as u64)?)?
            .wait()?;
        go_ahead(&endpoint)?;
    }
    print_if(stats, &endpoint);
    Ok(())
}

/// Plays the client's part `count` times.
fn ping(endpoint: &Endpoint, count: u32, size: usize, verbose: bool) -> Result<()> {
    let source = endpoint.expose(size, Access::REMOTE_READ)?;
    let sink = endpoint.expose(size, Access::REMOTE_WRITE)?;
    for round in 0..count {
        let sent = ping_data(round, size);
        source.write_at(0, &sent)?;
        for region in [&source, &sink] {
            endpoint
                .send_slice(&Descriptor::of(region).to_bytes())?
                .wait()?;
            descriptor(endpoint)?; // the server's "go ahead": its content means nothing
        }
        let mut came_back = vec![0; size];
        sink.read_at(0, &mut came_back)?;
        if came_back != sent {
            return Err(format!("ping {round}: what came back differs").into());
        }
        if verbose {
            println!("ping data: {}", text(&came_back));
        }
    }
    Ok(())
}

/// The text that rping sends: a heading, letters from a start that moves, a zero byte.
fn ping_data(round: u32, size: usize) -> Vec<u8> {
    let letters = (b'A'..=b'z').cycle().skip(round as usize % 58);
    let mut data: Vec<u8> = format!("rdma-ping-{round}: ").into_bytes();
    data.extend(letters.take(size - 1 - data.len()));
    data.push(0);
    data
}

fn go_ahead(endpoint: &Endpoint) -> Result<()> {
    endpoint.send_slice(&[0; Descriptor::LEN])?.wait()?;
    Ok(())
}

fn descriptor(endpoint: &Endpoint) -> Result<Descriptor> {
    let received = endpoint.recv_deadline(Instant::now() + PATIENCE)?;
    let received = received.ok_or_else(|| format!("no message within {PATIENCE:?}"))?;
    Descriptor::from_bytes(&received.buf)
}

fn text(data: &[u8]) -> String {
    let end = data
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(data.len());
    String::from_utf8_lossy(&data[..end]).into_owned()
}

fn print_if(stats: bool, endpoint: &Endpoint) {
    if stats {
        eprintln!("{}", endpoint.stats());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_travels_in_network_order() {
        let descriptor = Descriptor {
            buf: 0x0102_0304_0506_0708,
            rkey: 0x0a0b_0c0d,
            size: 64,
        };
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 0xa, 0xb, 0xc, 0xd, 0, 0, 0, 64];
        assert_eq!(descriptor.to_bytes(), bytes);
        assert_eq!(Descriptor::from_bytes(&bytes).unwrap(), descriptor);
        assert!(Descriptor::from_bytes(&bytes[1..]).is_err());
    }

    #[test]
    fn the_ping_is_text_of_the_whole_size_with_a_zero_byte_at_the_end() {
        let data = ping_data(12, 64);
        assert_eq!(data.len(), 64);
        assert!(data.starts_with(b"rdma-ping-12: MNOP"), "{}", text(&data));
        assert_eq!(data.iter().position(|&byte| byte == 0), Some(63));
    }
}
