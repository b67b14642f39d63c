//! One whole connection, for tests that let each of its calls fail.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rdma_msg::{Access, Endpoint, EndpointConfig, Listener, RemoteRegion};

use super::{LIMIT, any_port, small};

pub(crate) type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

fn config(patience: Duration) -> EndpointConfig {
    EndpointConfig {
        recv_depth: 2,
        send_depth: 2,
        connect_deadline: patience,
        ..small()
    }
}

/// One connection: both ends on their own threads, each of which may fail at any point.
fn program(patience: Duration) -> Outcome {
    let listener = Listener::bind(any_port(2), &config(patience))?;
    let addr = listener.local_addr();
    let server = thread::spawn(move || serve(&listener, patience));
    let client = call(addr, patience);
    let server = server.join().expect("the server does not panic");
    client.and(server)
}

fn serve(listener: &Listener, patience: Duration) -> Outcome {
    let deadline = Instant::now() + 2 * patience;
    let incoming = listener.accept_deadline(deadline)?.ok_or("nobody came")?;
    let endpoint = incoming.accept()?;
    let region = endpoint.expose(64, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    endpoint
        .send_slice(&region.descriptor().to_bytes())?
        .wait()?;
    let done = endpoint
        .recv_deadline(Instant::now() + LIMIT)?
        .ok_or("no word from the client")?;
    drop(done);
    endpoint.close(LIMIT)?;
    Ok(())
}

fn call(addr: std::net::SocketAddr, patience: Duration) -> Outcome {
    let endpoint = Endpoint::connect(addr, &config(patience))?;
    let hello = endpoint
        .recv_deadline(Instant::now() + LIMIT)?
        .ok_or("no word from the server")?;
    let remote = RemoteRegion::from_bytes(hello.buf[..].try_into()?);
    let mut buf = endpoint.alloc(8)?;
    buf.fill_from(b"mark");
    let buf = endpoint
        .write(buf, remote)?
        .wait()?
        .buf
        .ok_or("no buffer")?;
    let read = endpoint.read(buf, remote.slice(0..4)?)?.wait()?;
    assert_eq!(read.buf.as_deref(), Some(&b"mark"[..]));
    endpoint.send_slice(b"done")?.wait()?;
    // The peer closes.
    while endpoint.recv_deadline(Instant::now() + LIMIT)?.is_some() {}
    Err("the peer did not close".into())
}

/// As `program`, when nothing is to fail, with a limit; an end by the peer's close counts as success.
pub(crate) fn run() -> Outcome {
    run_with(LIMIT)
}

/// When something is to fail: nothing takes long then, whatever is missing.
pub(crate) fn run_failing() -> Outcome {
    run_with(Duration::from_millis(500))
}

fn run_with(patience: Duration) -> Outcome {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(program(patience)));
    let outcome = told.recv_timeout(4 * LIMIT).expect("the program hangs");
    outcome.or_else(
        |error| match error.to_string().contains("disconnected by the peer") {
            true => Ok(()),
            false => Err(error),
        },
    )
}
