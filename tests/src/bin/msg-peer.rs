//! The peer of the tests that kill and stop processes: accepts one connection, does what it is told on
//! standard input, and reports on standard output, one line each.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use rdma_msg::{Access, Endpoint, EndpointConfig, Listener, Operation, Receive, WaitError};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let addr = std::env::args()
        .nth(1)
        .ok_or("usage: msg-peer ADDRESS")?
        .parse()?;
    // It posts no receive, and its device tells senders to wait for as long as can be: so the first
    // send of the test stays in flight, and everything behind it.
    let config = EndpointConfig {
        receive: Receive::Manual,
        extra_bufs: Some(64),
        rnr_retry_count: 7,
        min_rnr_timer: 31,
        ..EndpointConfig::default()
    };
    let listener = Listener::bind(addr, &config)?;
    say(&listener.local_addr().to_string())?;
    let endpoint = listener.accept()?.accept()?;
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = endpoint.expose(4096, access)?;
    let bytes = region.descriptor().to_bytes();
    say(&bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>())?;
    let operations = send_many(&endpoint)?;
    say("posted")?;
    wait_for_the_end(&endpoint, operations)
}

/// More sends than the test has receives: some stay in flight.
fn send_many(endpoint: &Endpoint) -> Result<Vec<Operation>> {
    let mut operations = Vec::new();
    for _ in 0..50 {
        let mut buf = endpoint.alloc(0)?;
        buf.fill_from(&[1; 100]);
        operations.push(endpoint.send(buf)?);
    }
    Ok(operations)
}

/// Until the other side ends the connection, or the test says so; then whether all is well here.
fn wait_for_the_end(endpoint: &Endpoint, operations: Vec<Operation>) -> Result<()> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    if line.trim() == "close" {
        let _ = endpoint.close(Duration::from_millis(100));
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut ended = 0;
    for mut operation in operations {
        match operation.wait_deadline(deadline) {
            Ok(_) => {}
            Err(WaitError::Operation(_)) => ended += 1,
            Err(error) => say(&format!("a send did not end: {error}"))?,
        }
    }
    let (count, _) = endpoint.worker().pool_size();
    let missing = count - endpoint.worker().available();
    say(&format!(
        "{ended} failed, {missing} buffers missing, {}",
        endpoint.closed().is_some()
    ))
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
