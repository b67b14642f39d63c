//! Our `rping` against the one of rdmacm-utils, both ways, IPv4 and IPv6.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENCE, Running, run, serial};

const OURS: &str = env!("CARGO_BIN_EXE_rping");
const THEIRS: &str = "rping";
const IPV4: &str = "192.168.99.2";
const IPV6: &str = "fd99::2";

/// The tool's client reads nothing by itself: our server reads and writes its memory.
fn their_client_our_server(addr: &str, size: &str) {
    let _one = serial();
    let server = Running::server(OURS, ["server", "--addr", addr, "--verbose", "--stats"]);
    let client = run(
        THEIRS,
        ["-c", "-a", addr, "-C", "10", "-S", size, "-v", "-V"],
    )
    .succeeded();
    let server = server.end_within(PATIENCE);
    let (pings, stats) = (server.stdout.clone(), server.stderr.clone());
    assert_eq!(server.status, Some(0), "{server:?}");
    for ping in 0..10 {
        assert!(
            client.contains(&format!("ping data: rdma-ping-{ping}: ")),
            "{client}"
        );
        assert!(
            pings.contains(&format!("server ping data: rdma-ping-{ping}: ")),
            "{pings}"
        );
    }
    assert!(!stats.is_empty(), "--stats printed nothing");
}

/// Our client compares what the tool's server read from its memory and wrote back to it.
fn our_client_their_server(addr: &str, size: &str) {
    let _one = serial();
    let server = Running::start(THEIRS, ["-s", "-a", addr, "-C", "10", "-S", size, "-v"]);
    // The tool does not say when it listens: a refused client comes again.
    let until = Instant::now() + Duration::from_secs(10);
    let client = loop {
        let args = [
            "client",
            "--addr",
            addr,
            "-C",
            "10",
            "-S",
            size,
            "--verbose",
        ];
        let client = run(OURS, args);
        if client.status == Some(0) || Instant::now() > until || !client.stderr.contains("refused")
        {
            break client;
        }
        thread::sleep(Duration::from_millis(50));
    };
    let pings = client.succeeded();
    let server = server.end_within(PATIENCE);
    for ping in 0..10 {
        assert!(
            pings.contains(&format!("ping data: rdma-ping-{ping}: ")),
            "{pings}"
        );
        let line = format!("server ping data: rdma-ping-{ping}: ");
        assert!(server.stdout.contains(&line), "{server:?}");
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn their_client_pings_our_server_over_ipv4() {
    their_client_our_server(IPV4, "64");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn their_client_pings_our_server_over_ipv6() {
    their_client_our_server(IPV6, "64");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn their_client_pings_our_server_with_many_packets_a_ping() {
    their_client_our_server(IPV4, "65535");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn our_client_pings_their_server_over_ipv4() {
    our_client_their_server(IPV4, "64");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn our_client_pings_their_server_over_ipv6() {
    our_client_their_server(IPV6, "64");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn our_client_pings_their_server_with_many_packets_a_ping() {
    our_client_their_server(IPV4, "65535");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn both_sides_ours_work_too() {
    let _one = serial();
    let server = Running::server(OURS, ["server", "--addr", IPV4, "-v"]);
    let pings = run(OURS, ["client", "--addr", IPV4, "-C", "3", "-v"]).succeeded();
    assert_eq!(pings.lines().count(), 3, "{pings}");
    assert_eq!(server.end_within(PATIENCE).succeeded().lines().count(), 3);
}
