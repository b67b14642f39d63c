//! The code that `docs/completions.md` shows, run on the fake fabric: without RDMA, wherever the tests run.
//!
//! The same on soft-RoCE, and with a peer that is killed, is in `rxe_examples.rs`.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use fake_verbs::Fabric;
use rdma_core_rs::WcStatus;
use rdma_examples::completions::peer::{CONTENT, LEN, Peer};
use rdma_examples::completions::{Op, Way, endpoint, flag, verbs};
use rdma_msg::{Cause, Endpoint, Outcome, RemoteRegion};

/// The second device of the fabric.
fn bind() -> Peer {
    let addr: SocketAddr = "10.9.0.2:0".parse().expect("an address");
    Peer::bind(addr).expect("listen")
}

/// Connects a client of either level to `peer`: it, and the peer's endpoint.
fn connect<C: Send>(peer: &Peer, client: impl FnOnce(SocketAddr) -> C + Send) -> (C, Endpoint) {
    let addr = peer.addr();
    thread::scope(|scope| {
        let client = scope.spawn(move || client(addr));
        let theirs = peer.accept().expect("accept");
        (client.join().expect("the connecting thread"), theirs)
    })
}

fn connect_verbs(peer: &Peer) -> (verbs::Client, Endpoint) {
    connect(peer, |addr| verbs::Client::connect(addr).expect("connect"))
}

fn connect_endpoint(peer: &Peer) -> (Endpoint, RemoteRegion, Endpoint) {
    let ((ours, remote), theirs) = connect(peer, |addr| endpoint::connect(addr).expect("connect"));
    (ours, remote, theirs)
}

#[test]
fn each_way_finds_the_completion_of_a_read_and_of_a_write() {
    let _fabric = Fabric::new();
    let peer = bind();
    for way in Way::ALL {
        let (mut client, _theirs) = connect_verbs(&peer);
        let part = client.remote.slice(0..CONTENT.len() as u64).unwrap();
        let (entry, buffer) = client.run(Op::Read, way, part).unwrap();
        assert!(
            entry.is_success() && *buffer == *CONTENT,
            "{way}: {entry:?}"
        );
        let room = client.remote.slice(64..68).unwrap();
        let (entry, _) = client.run(Op::Write, way, room).unwrap();
        assert!(entry.is_success(), "{way}: {entry:?}");

        let (ours, remote, _theirs) = connect_endpoint(&peer);
        let part = remote.slice(0..CONTENT.len() as u64).unwrap();
        let done = endpoint::run(&ours, Op::Read, way, part).unwrap().unwrap();
        assert_eq!(*done.buf.unwrap(), *CONTENT, "{way}");
        let room = remote.slice(64..68).unwrap();
        endpoint::run(&ours, Op::Write, way, room).unwrap().unwrap();

        let mut written = [0; 4];
        peer.region.read_at(64, &mut written).unwrap();
        assert_eq!(&written, b"????", "{way}");
        peer.region.write_at(64, &[0; 4]).unwrap();
    }
}

#[test]
fn each_way_tells_a_wrong_key_apart() {
    let _fabric = Fabric::new();
    let peer = bind();
    for way in Way::ALL {
        for op in [Op::Read, Op::Write] {
            let (mut client, _theirs) = connect_verbs(&peer);
            let wrong = client.remote.with_rkey(!client.remote.rkey());
            let (entry, _) = client.run(op, way, wrong).unwrap();
            assert_eq!(entry.status(), WcStatus::RemAccessErr, "{way}, {op}");

            let (ours, remote, _theirs) = connect_endpoint(&peer);
            let wrong = remote.with_rkey(!remote.rkey());
            let error = endpoint::run(&ours, op, way, wrong).unwrap().unwrap_err();
            assert_eq!(error.outcome, Outcome::Failed, "{way}, {op}");
            assert!(
                matches!(*error.cause, Cause::Operation(_)),
                "{way}, {op}: {error}"
            );
            assert_eq!(error.buf.map(|buf| buf.len()), Some(LEN), "{way}, {op}");
        }
    }
}

#[test]
fn the_plain_wait_reads_what_the_peer_exposed() {
    let _fabric = Fabric::new();
    let peer = bind();
    let (ours, remote, _theirs) = connect_endpoint(&peer);
    let part = remote.slice(0..CONTENT.len() as u64).unwrap();
    assert_eq!(endpoint::read(&ours, part).unwrap(), CONTENT);
}

#[test]
fn markers_reach_the_other_side() {
    let _fabric = Fabric::new();
    let peer = bind();
    let (ours, remote, theirs) = connect_endpoint(&peer);

    endpoint::write_with_marker(&ours, &theirs, remote, [b"both ", b"parts"]).unwrap();
    let mut data = [0; 10];
    peer.region.read_at(0, &mut data).unwrap();
    assert_eq!(&data, b"both parts");

    let word = remote.slice(1024..1032).unwrap();
    assert!(endpoint::mark(&ours, word, 0, 1).unwrap());
    assert!(!endpoint::mark(&ours, word, 0, 2).unwrap());
    assert_eq!(peer.region.load_u64(1024).unwrap(), 1);

    let before = endpoint::read_then_write(&ours, remote, 7).unwrap();
    assert_eq!(before[LEN - 8..], [0; 8]);
    assert_eq!(peer.region.load_u64(LEN - 8).unwrap(), 7);
}

#[test]
fn a_memory_flag_hangs_when_forgotten_and_lies_when_the_write_failed() {
    let _fabric = Fabric::new();
    let peer = bind();
    let (writer, remote, _theirs) = connect_endpoint(&peer);
    let patience = Duration::from_millis(50);

    flag::write(&writer, remote, *b"round  1", Some(1)).unwrap();
    let seen = flag::look(&peer.region, 1, patience).unwrap();
    assert_eq!((seen.flag, &*seen.data), (true, "round  1"));

    flag::write(&writer, remote, *b"round  2", None).unwrap();
    let seen = flag::look(&peer.region, 2, patience).unwrap();
    assert_eq!(
        (seen.flag, &*seen.data),
        (false, "round  2"),
        "complete, and not noticed"
    );

    let wrong = remote.with_rkey(!remote.rkey());
    flag::write(&writer, wrong, *b"round  3", Some(1)).unwrap();
    let seen = flag::look(&peer.region, 1, patience).unwrap();
    assert_eq!(
        (seen.flag, &*seen.data),
        (true, "round  2"),
        "failed, and taken for complete"
    );
}
