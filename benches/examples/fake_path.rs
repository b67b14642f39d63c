//! The whole path of an operation on the fake fabric, in one thread, for a tool that counts instructions:
//! `fake_path write 1000` does 1000 of them inside `measured_*`, and nothing else there.
//!
//! `cargo xtask bench --instructions` runs it under callgrind and takes the fabric's own part off.

use std::error::Error;
use std::hint::black_box;
use std::thread;

use fake_verbs::Fabric;
use rdma_msg::{
    Access, Batch, Buf, Endpoint, EndpointConfig, Listener, Operation, RemoteRegion, SharedRegion,
    Wait,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("which path?")?;
    let count: u32 = arguments.next().ok_or("how many times?")?.parse()?;
    let _fabric = Fabric::new();
    let mut bed = Bed::new()?;
    if name == "batch" {
        return bed.batches(count);
    }
    for _ in 0..WARM_UP {
        bed.run(&name)?;
    }
    bed.measuring = true;
    for _ in 0..count {
        bed.run(&name)?;
    }
    Ok(())
}

/// Enough to fill every pool and table.
const WARM_UP: u32 = 300;
const SIZE: usize = 64;
const BATCH: usize = 16;

struct Bed {
    client: Endpoint,
    server: Endpoint,
    remote: RemoteRegion,
    _region: SharedRegion,
    buf: Option<Buf>,
    bufs: Vec<Buf>,
    measuring: bool,
}

impl Bed {
    fn new() -> Result<Bed> {
        let (client, server) = pair()?;
        let region = server.expose(
            4096,
            Access::LOCAL_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_WRITE
                | Access::REMOTE_ATOMIC,
        )?;
        let remote = region.descriptor();
        let buf = Some(client.alloc(SIZE)?);
        let mut bufs = Vec::new();
        for _ in 0..BATCH {
            bufs.push(client.alloc(SIZE)?);
        }
        Ok(Bed {
            client,
            server,
            remote,
            _region: region,
            buf,
            bufs,
            measuring: false,
        })
    }

    fn batches(&mut self, count: u32) -> Result<()> {
        let mut writes = Writes {
            batch: self.client.batch(),
            remote: self.remote.slice(0..SIZE as u64)?,
            bufs: &mut self.bufs,
            operations: Vec::new(),
        };
        for _ in 0..WARM_UP {
            writes.run()?;
        }
        for _ in 0..count {
            measured_batch(&mut writes)?;
        }
        Ok(())
    }

    fn run(&mut self, name: &str) -> Result<()> {
        let remote = self.remote.slice(0..SIZE as u64)?;
        let word = self.remote.slice(0..8)?;
        match name {
            "send" => {
                let buf = self.buf.take().ok_or("the buffer did not come back")?;
                self.buf = if self.measuring {
                    measured_send(&self.client, buf)?
                } else {
                    send(&self.client, buf)?
                };
                black_box(self.server.recv()?);
            }
            "recv" => {
                let buf = self.buf.take().ok_or("the buffer did not come back")?;
                self.buf = send(&self.client, buf)?;
                if self.measuring {
                    measured_recv(&self.server)?
                } else {
                    recv(&self.server)?
                }
            }
            "write" => {
                let buf = self.buf.take().ok_or("the buffer did not come back")?;
                self.buf = if self.measuring {
                    measured_write(&self.client, buf, remote)?
                } else {
                    write(&self.client, buf, remote)?
                };
            }
            "read" => {
                let buf = self.buf.take().ok_or("the buffer did not come back")?;
                self.buf = if self.measuring {
                    measured_read(&self.client, buf, remote)?
                } else {
                    read(&self.client, buf, remote)?
                };
            }
            "faa" => {
                if self.measuring {
                    measured_faa(&self.client, word)?
                } else {
                    faa(&self.client, word)?
                }
            }
            _ => return Err(format!("no path is called {name}").into()),
        }
        Ok(())
    }
}

#[inline(never)]
fn measured_send(client: &Endpoint, buf: Buf) -> Result<Option<Buf>> {
    send(client, buf)
}

#[inline(never)]
fn measured_recv(server: &Endpoint) -> Result<()> {
    recv(server)
}

#[inline(never)]
fn measured_write(client: &Endpoint, buf: Buf, remote: RemoteRegion) -> Result<Option<Buf>> {
    write(client, buf, remote)
}

#[inline(never)]
fn measured_read(client: &Endpoint, buf: Buf, remote: RemoteRegion) -> Result<Option<Buf>> {
    read(client, buf, remote)
}

#[inline(never)]
fn measured_faa(client: &Endpoint, word: RemoteRegion) -> Result<()> {
    faa(client, word)
}

#[inline(never)]
fn measured_batch(writes: &mut Writes<'_>) -> Result<()> {
    writes.run()
}

#[inline(always)]
fn send(client: &Endpoint, buf: Buf) -> Result<Option<Buf>> {
    Ok(client.send(buf)?.wait()?.buf)
}

#[inline(always)]
fn recv(server: &Endpoint) -> Result<()> {
    black_box(server.recv()?);
    Ok(())
}

#[inline(always)]
fn write(client: &Endpoint, buf: Buf, remote: RemoteRegion) -> Result<Option<Buf>> {
    Ok(client.write(buf, remote)?.wait()?.buf)
}

#[inline(always)]
fn read(client: &Endpoint, buf: Buf, remote: RemoteRegion) -> Result<Option<Buf>> {
    Ok(client.read(buf, remote)?.wait()?.buf)
}

#[inline(always)]
fn faa(client: &Endpoint, word: RemoteRegion) -> Result<()> {
    black_box(client.fetch_add(word, 1)?.wait()?.value);
    Ok(())
}

/// A batch that is filled, posted and waited for again and again.
struct Writes<'a> {
    batch: Batch<'a>,
    remote: RemoteRegion,
    bufs: &'a mut Vec<Buf>,
    operations: Vec<Operation>,
}

impl Writes<'_> {
    #[inline(always)]
    fn run(&mut self) -> Result<()> {
        for buf in self.bufs.drain(..) {
            self.batch.write(buf, self.remote)?;
        }
        self.batch
            .post_into(&mut self.operations)
            .map_err(|kind| kind.to_string())?;
        for operation in self.operations.drain(..) {
            self.bufs.extend(operation.wait()?.buf);
        }
        Ok(())
    }
}

fn pair() -> Result<(Endpoint, Endpoint)> {
    let config = EndpointConfig {
        max_message: SIZE,
        max_inline: 0,
        max_sge: 1,
        signal_every: BATCH as u32,
        wait: Wait::Event,
        ..EndpointConfig::default()
    };
    let listener = Listener::bind(([10, 9, 0, 2], 0).into(), &config)?;
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| -> std::result::Result<Endpoint, String> {
            let incoming = listener.accept().map_err(|error| error.to_string())?;
            incoming.accept().map_err(|error| error.to_string())
        });
        let client = Endpoint::connect(addr, &config)?;
        let server = accepting
            .join()
            .map_err(|_| "the accepting thread panicked")??;
        Ok((client, server))
    })
}
