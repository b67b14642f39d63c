//! Each example as a user runs it: its output, its exit status, and what bad input gets.

mod common;

use std::time::Duration;

use common::{PATIENCE, Running, SERVER, run, serial};

const ECHO: &str = env!("CARGO_BIN_EXE_echo");
const READ_WRITE: &str = env!("CARGO_BIN_EXE_read_write");
const COMPLETIONS: &str = env!("CARGO_BIN_EXE_completions");
const ECHO_EPOLL: &str = env!("CARGO_BIN_EXE_echo_epoll");
const PINGPONG: &str = env!("CARGO_BIN_EXE_pingpong");

/// What an error may take that needs no deadline to show, start of the program and a busy machine included.
const PROMPTLY: Duration = Duration::from_secs(10);
/// What an error may take that comes with the deadline of 5 s for a connect.
const BY_THE_DEADLINE: Duration = Duration::from_secs(12);

// ---- what they do -----------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn echo_serves_several_clients_at_once() {
    let _one = serial();
    let args = [
        "both",
        "--server-addr",
        SERVER,
        "--clients",
        "4",
        "--count",
        "5",
        "--text",
        "hi",
    ];
    let said = run(ECHO, args).succeeded();
    for client in 0..4 {
        for round in 0..5 {
            assert!(said.contains(&format!("hi ({client}.{round})")), "{said}");
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn echo_works_between_processes_and_prints_its_counters() {
    let _one = serial();
    let server = Running::server(ECHO, ["server", "--addr", SERVER, "--clients", "2"]);
    for _ in 0..2 {
        let ended = run(ECHO, ["client", "--addr", SERVER, "--stats"]);
        assert!(ended.stderr.contains("send: 3 posted, 3 ok"), "{ended:?}");
        assert_eq!(ended.succeeded().lines().count(), 3);
    }
    server.end_within(PATIENCE).succeeded();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn read_write_changes_the_server_s_memory() {
    let _one = serial();
    let said = run(READ_WRITE, ["both", "--server-addr", SERVER]).succeeded();
    for line in [
        "client: read \"read me\"",
        "client: the counter was Some(0), then Some(41)",
        "server: marker 0xd0e, counter 42, answer \"em daer\"",
    ] {
        assert!(said.contains(line), "{line:?} is missing in {said}");
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn completions_shows_every_case_on_both_levels() {
    let _one = serial();
    let said = run(COMPLETIONS, ["both", "--server-addr", SERVER]).succeeded();
    let (success, rest) = said.split_once("a wrong key:").unwrap();
    let (bad_key, rest) = rest.split_once("the peer was killed just before:").unwrap();
    let (dead, rest) = rest.split_once("markers for the other side:").unwrap();
    assert_eq!(
        success.matches("success: \"written by the peer\"").count(),
        6,
        "{success}"
    );
    assert_eq!(success.matches(" success").count(), 12, "{success}");
    assert_eq!(bad_key.matches("remote access").count(), 12, "{bad_key}");
    assert!(!dead.contains("success"), "{dead}");
    assert_eq!(
        dead.lines().filter(|line| line.contains("rdma-")).count(),
        12,
        "{dead}"
    );
    for line in [
        "the peer got Some(42) and sees \"both parts\"",
        "the first found what it expected: true, the second: false; the word is 1",
        "the read saw 0, the write behind it left 7",
        "with a flag: Seen { flag: true",
        "forgotten: Seen { flag: false",
        "an old flag stands there: Seen { flag: true",
    ] {
        assert!(rest.contains(line), "{line:?} is missing in {rest}");
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn echo_epoll_serves_the_clients_of_echo() {
    let _one = serial();
    let server = Running::server(ECHO_EPOLL, ["--addr", SERVER, "--clients", "3"]);
    let clients: Vec<_> = (0..3)
        .map(|_| Running::start(ECHO, ["client", "--addr", SERVER]))
        .collect();
    for client in clients {
        assert_eq!(client.end_within(PATIENCE).succeeded().lines().count(), 3);
    }
    server.end_within(PATIENCE).succeeded();
}

#[cfg(feature = "tokio")]
#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn echo_tokio_echoes_among_its_tasks() {
    let _one = serial();
    let program = env!("CARGO_BIN_EXE_echo_tokio");
    let said = run(program, ["both", "--server-addr", SERVER, "--clients", "4"]).succeeded();
    assert_eq!(
        said.lines()
            .filter(|line| line.starts_with("hello"))
            .count(),
        12,
        "{said}"
    );
}

// ---- the ping-pong ----------------------------------------------------------------------------------

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn pingpong_measures_each_op_in_each_way_of_waiting() {
    let _one = serial();
    for op in ["send", "write", "read"] {
        for wait in ["event", "spin", "hybrid"] {
            let args = ["both", "--server-addr", SERVER, "--op", op, "--wait", wait];
            let args = args
                .into_iter()
                .chain(["--size", "64,5000", "--iters", "20"]);
            let said = run(PINGPONG, args).succeeded();
            let lines: Vec<&str> = said.lines().collect();
            assert_eq!(lines.len(), 3, "{op}, {wait}: {said}");
            assert!(lines[1].trim_start().starts_with("64 B"), "{said}");
            assert!(lines[2].trim_start().starts_with("5000 B"), "{said}");
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn pingpong_s_json_is_all_that_is_on_stdout() {
    let _one = serial();
    let args = [
        "both",
        "--server-addr",
        SERVER,
        "--json",
        "--stats",
        "--size",
        "64,1048576",
    ];
    let ended = run(PINGPONG, args.into_iter().chain(["--iters", "10"]));
    assert!(
        ended.stderr.contains("client, ") && ended.stderr.contains("server, "),
        "{ended:?}"
    );
    let said = ended.succeeded();
    let rows: serde_json::Value = serde_json::from_str(&said).expect(&said);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, size) in rows.iter().zip([64, 1_048_576]) {
        assert_eq!(row["size_bytes"], size);
        assert_eq!(row["iterations"], 10);
        assert_eq!(row["verified"], true);
        let latency = |name: &str| row["latency_us"][name].as_f64().unwrap();
        let order = ["min", "median", "p99", "p999", "max"].map(latency);
        assert!(order[0] > 0.0 && order.is_sorted(), "{order:?}");
        assert!(row["msgs_per_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn pingpong_fails_over_one_wrong_byte() {
    let _one = serial();
    for op in ["send", "write", "read"] {
        let args = [
            "both",
            "--server-addr",
            SERVER,
            "--op",
            op,
            "--size",
            "4096",
        ];
        let args = args
            .into_iter()
            .chain(["--iters", "10", "--corrupt-at", "7"]);
        let ended = run(PINGPONG, args);
        assert_eq!(ended.status, Some(1), "{op}: {ended:?}");
        let what = "data differs in iteration 7: byte 2048";
        assert!(ended.stderr.contains(what), "{op}: {ended:?}");
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn pingpong_draws_its_bar_only_where_somebody_sees_it() {
    let _one = serial();
    let args = [
        "both",
        "--server-addr",
        SERVER,
        "--size",
        "64",
        "--iters",
        "200",
    ];
    let plain = run(PINGPONG, args);
    assert_eq!(plain.stderr, "", "{plain:?}");
    let with_bar = run("env", ["LAB_TTY=1", PINGPONG].into_iter().chain(args));
    assert!(with_bar.stderr.contains("64 B ["), "{with_bar:?}");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_pingpong_server_refuses_a_larger_size_by_name() {
    let _one = serial();
    let server = Running::server(
        PINGPONG,
        [
            "server",
            "--addr",
            SERVER,
            "--max-size",
            "4096",
            "--clients",
            "1",
        ],
    );
    let args = [
        "client", "--addr", SERVER, "--op", "write", "--size", "8192", "--iters", "1",
    ];
    let ended = run(PINGPONG, args);
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("--max-size 4096"), "{ended:?}");
    assert_eq!(server.end_within(PATIENCE).status, Some(1));
}

// ---- bad input --------------------------------------------------------------------------------------

/// The clients' command lines for one address.
fn clients(addr: &str) -> Vec<(&'static str, Vec<String>)> {
    let client = ["client", "--addr", addr].map(str::to_owned).to_vec();
    let rping = env!("CARGO_BIN_EXE_rping");
    [ECHO, READ_WRITE, rping, PINGPONG]
        .map(|program| (program, client.clone()))
        .into()
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn without_a_listener_a_client_is_refused_at_once() {
    let _one = serial();
    for (program, args) in clients("192.168.99.2:4999") {
        run(program, args).failed_with(PROMPTLY, &["192.168.99.2:4999", "refused"]);
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn an_address_without_a_device_is_named() {
    let _one = serial();
    for (program, args) in clients("127.0.0.1:4999") {
        run(program, args).failed_with(PROMPTLY, &["127.0.0.1"]);
    }
    let bind = run(ECHO, ["server", "--addr", "203.0.113.1"]);
    bind.failed_with(PROMPTLY, &["203.0.113.1"]);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn an_unknown_address_ends_by_the_deadline() {
    let _one = serial();
    let clients = clients("192.168.99.77");
    let clients: Vec<_> = clients
        .into_iter()
        .map(|(program, args)| Running::start(program, args))
        .collect();
    for client in clients {
        client
            .end_within(PATIENCE)
            .failed_with(BY_THE_DEADLINE, &["192.168.99.77"]);
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn a_listener_that_never_answers_costs_the_deadline() {
    let _one = serial();
    // A server stopped before it could accept: the kernel took the request, nobody answers it.
    let server = Running::server(ECHO, ["server", "--addr", "192.168.99.2:4998"]);
    server.stop();
    let clients: Vec<_> = clients("192.168.99.2:4998")
        .into_iter()
        .map(|(program, args)| Running::start(program, args))
        .collect();
    for client in clients {
        let ended = client.end_within(PATIENCE);
        assert!(
            ended.took > Duration::from_secs(4),
            "before the deadline: {ended:?}"
        );
        ended.failed_with(BY_THE_DEADLINE, &["192.168.99.2:4998"]);
    }
}

#[test]
fn wrong_arguments_are_explained_with_status_1() {
    for program in [
        ECHO,
        READ_WRITE,
        COMPLETIONS,
        PINGPONG,
        env!("CARGO_BIN_EXE_rping"),
    ] {
        let ended = run(program, ["client", "--no-such-option"]);
        assert_eq!(ended.status, Some(1), "{ended:?}");
        assert!(ended.stderr.contains("Usage:"), "{ended:?}");
        let ended = run(program, ["--help"]);
        assert_eq!(ended.status, Some(0), "{ended:?}");
    }
    let ended = run(PINGPONG, ["both", "--server-addr", SERVER, "--size", "0"]);
    assert_eq!(ended.status, Some(1), "{ended:?}");
}

#[test]
fn an_unknown_name_is_named() {
    let ended = run(ECHO, ["client", "--addr", "no.such.host.invalid"]);
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("no.such.host.invalid"), "{ended:?}");
}
