//! Nanoseconds of the path from a post to its completion on the fake fabric, whose own work is in them too: a change of
//! ours shows, an absolute value says little.

#![allow(missing_docs)] // criterion's macros make public functions
#![allow(clippy::unwrap_used)] // a benchmark that fails should stop

use std::hint::black_box;
use std::thread;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fake_verbs::Fabric;
use rdma_msg::{Access, Endpoint, EndpointConfig, Listener, RemoteRegion, Wait};

const SIZE: usize = 64;
const BATCH: usize = 16;

fn pair() -> (Endpoint, Endpoint) {
    let config = EndpointConfig {
        max_message: SIZE,
        max_inline: 0,
        signal_every: BATCH as u32,
        wait: Wait::Event,
        ..EndpointConfig::default()
    };
    let listener = Listener::bind(([10, 9, 0, 2], 0).into(), &config).unwrap();
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept().unwrap().accept().unwrap());
        let client = Endpoint::connect(addr, &config).unwrap();
        (client, accepting.join().unwrap())
    })
}

fn post_to_completion(criterion: &mut Criterion) {
    let _fabric = Fabric::new();
    let (client, server) = pair();
    let everything =
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = server.expose(SIZE, everything).unwrap();
    let remote = region.descriptor();
    let mut group = criterion.benchmark_group("post to completion");

    let mut buf = Some(client.alloc(SIZE).unwrap());
    group.bench_function("write", |bencher| {
        bencher.iter(|| {
            let operation = client.write(buf.take().unwrap(), remote).unwrap();
            buf = operation.wait().unwrap().buf;
        });
    });
    group.bench_function("read", |bencher| {
        bencher.iter(|| {
            let operation = client.read(buf.take().unwrap(), remote).unwrap();
            buf = operation.wait().unwrap().buf;
        });
    });
    group.bench_function("send and receive", |bencher| {
        bencher.iter(|| {
            let operation = client.send(buf.take().unwrap()).unwrap();
            black_box(server.recv().unwrap());
            buf = operation.wait().unwrap().buf;
        });
    });
    let word = remote.slice(0..8).unwrap();
    group.bench_function("fetch-add", |bencher| {
        bencher.iter(|| client.fetch_add(word, 1).unwrap().wait().unwrap().value);
    });

    group.throughput(Throughput::Elements(BATCH as u64));
    let mut bufs: Vec<_> = (0..BATCH).map(|_| client.alloc(SIZE).unwrap()).collect();
    let mut batch = client.batch();
    let mut operations = Vec::new();
    group.bench_function("a batch of 16 writes", |bencher| {
        bencher.iter(|| {
            for buf in bufs.drain(..) {
                batch.write(buf, remote).unwrap();
            }
            batch.post_into(&mut operations).unwrap();
            for operation in operations.drain(..) {
                bufs.extend(operation.wait().unwrap().buf);
            }
        });
    });
    group.finish();
}

fn parts(criterion: &mut Criterion) {
    let _fabric = Fabric::new();
    let (client, _server) = pair();
    let mut group = criterion.benchmark_group("parts");
    group.bench_function("a buffer from the pool and back", |bencher| {
        bencher.iter(|| client.alloc(SIZE).unwrap());
    });
    group.bench_function("a poll that finds nothing", |bencher| {
        bencher.iter(|| client.worker().poll());
    });
    let region = RemoteRegion::new(1 << 20, 1 << 20, 7);
    group.bench_function("a slice of a remote region", |bencher| {
        bencher.iter(|| black_box(region).slice(black_box(64)..128).unwrap());
    });
    group.finish();
}

criterion_group!(benches, post_to_completion, parts);
criterion_main!(benches);
