//! What a wake-up costs, for a test that counts system calls: two endpoints in one process that sleep
//! for each message. Looks for a file that is not there where counting begins and ends, and then says
//! how often threads slept, armed the queue and fetched an event, and how many requests were posted,
//! meanwhile.

use std::net::SocketAddr;
use std::thread;

use rdma_msg::{Endpoint, EndpointConfig, Listener, Wait};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const ROUNDS: u32 = 200;

fn main() -> Result<()> {
    let addr: SocketAddr = std::env::args()
        .nth(1)
        .ok_or("usage: msg-wakes ADDRESS")?
        .parse()?;
    let config = EndpointConfig {
        wait: Wait::Event,
        connect_deadline: std::time::Duration::from_secs(30), // it is traced
        stall_timeout: None,                                  // its timer would be counted, too
        ..EndpointConfig::default()
    };
    let listener = Listener::bind(addr, &config)?;
    let addr = listener.local_addr();
    let server = thread::spawn(move || serve(&listener));
    let client = Endpoint::connect(addr, &config)?;
    (0..20).try_for_each(|_| round(&client))?;
    let before = client.worker().stats();
    let _ = std::fs::metadata("/counting-begins");
    (0..ROUNDS).try_for_each(|_| round(&client))?;
    let _ = std::fs::metadata("/counting-ends");
    let after = client.worker().stats();
    println!(
        "{} {} {} {}",
        after.sleeps - before.sleeps,
        after.arms - before.arms,
        after.events - before.events,
        ROUNDS
    );
    client.close(config.close_deadline)?;
    server.join().map_err(|_| "the server panicked")?
}

fn round(endpoint: &Endpoint) -> Result<()> {
    let sent = endpoint.send_slice(b"ping")?;
    drop(endpoint.recv()?);
    sent.wait()?;
    Ok(())
}

fn serve(listener: &Listener) -> Result<()> {
    let endpoint = listener.accept()?.accept()?;
    while let Ok(received) = endpoint.recv() {
        endpoint.send(received.buf)?.wait()?;
    }
    Ok(())
}
