//! The connection manager against the C tools of librdmacm, in both directions.
//!
//! They speak to the kernel through librdmacm as we do, but to us only over the wire: that parameters,
//! private data, states and messages mean the same on both sides is what is tested here.
#![allow(clippy::unwrap_used)] // a test may panic

mod cm_common;

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cm_common::*;
use rdma_cm::{
    CmError, ConnParam, Connection, ConnectionEvent, Connector, Join, ListenOptions, Listener,
    Lookup, PortSpace, Service, ServiceListener,
};

/// How many messages of which size the tools exchange by default.
const COUNT: usize = 10;
const SIZE: usize = 100;
/// The header in front of a datagram.
const GRH: usize = 40;

/// A tool that runs; killed if the test ends before it.
struct Tool {
    child: Option<Child>,
    command: String,
}

impl Tool {
    fn start(command: String) -> Self {
        println!("starting {command}");
        let mut words = command.split(' ');
        let child = Command::new(words.next().unwrap())
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            child: Some(child),
            command,
        }
    }

    fn is_running(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    /// Waits until the tool is done, and for its success; what it said.
    fn finish(mut self) -> String {
        let until = Instant::now() + PATIENCE;
        while self.is_running() {
            assert!(Instant::now() < until, "{} does not end", self.command);
            sleep(Duration::from_millis(20));
        }
        let out = self.child.take().unwrap().wait_with_output().unwrap();
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        assert!(
            out.status.success(),
            "{}: {}\n{said}",
            self.command,
            out.status
        );
        said
    }

    fn kill(mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Connects to a tool that may still be starting: until it listens, it refuses.
fn connect(port: u16, port_space: PortSpace, receives: usize, len: usize) -> (End, Connection) {
    let until = Instant::now() + PATIENCE;
    loop {
        let peer = Connector::new(addr(SERVER, port)).source(addr(CLIENT, 0));
        let mut resolved = peer
            .port_space(port_space)
            .deadline(PATIENCE)
            .resolve()
            .unwrap();
        let mut end = End::new(&resolved.context());
        resolved.init_qp(&mut end.qp).unwrap();
        end.post_recvs(receives, len);
        let connecting = resolved
            .connect(&mut end.qp, &ConnParam::default())
            .unwrap();
        match connecting.wait(&mut end.qp) {
            Ok(connection) => return (end, connection),
            Err(CmError::Refused { .. }) if Instant::now() < until => {
                sleep(Duration::from_millis(50))
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Accepts the tool's connection with receives posted, and waits until it is up.
fn serve(listener: &Listener, receives: usize, len: usize) -> (End, Connection) {
    let mut request = listener.accept(soon()).unwrap();
    let mut end = End::new(&request.context());
    request.init_qp(&mut end.qp).unwrap();
    end.post_recvs(receives, len);
    let connection = request.accept(&mut end.qp, &ConnParam::default()).unwrap();
    assert_eq!(
        connection.wait_event(soon()).unwrap(),
        ConnectionEvent::Established
    );
    (end, connection)
}

fn port_of(listener: SocketAddr) -> u16 {
    listener.port()
}

// ----- ucmatose: the server sends ten messages, the client answers, the server disconnects -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_ucmatose_as_the_server() {
    for (flags, port_space) in [("", PortSpace::Tcp), (" -P ib", PortSpace::Ib)] {
        let tool = Tool::start(format!("ucmatose -b {SERVER} -p 7571{flags}"));
        let (mut end, connection) = connect(7571, port_space, COUNT, SIZE);
        // It accepts with the parameters that it was offered.
        assert_eq!(connection.negotiated().initiator_depth, 16);
        end.expect_messages(COUNT, SIZE);
        end.send_many(COUNT, SIZE);
        assert_eq!(wait_end(&connection), ConnectionEvent::Disconnected);
        connection.disconnect().unwrap();
        assert!(tool.finish().contains("return status 0"));
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_ucmatose_as_the_client() {
    for (flags, port_space) in [
        ("", PortSpace::Tcp),
        (" -P ib", PortSpace::Ib),
        (" -m", PortSpace::Tcp),
    ] {
        let listener =
            Listener::bind_in(port_space, addr(SERVER, 0), &ListenOptions::default()).unwrap();
        let port = port_of(listener.local_addr());
        let tool = Tool::start(format!("ucmatose -s {SERVER} -b {CLIENT} -p {port}{flags}"));
        let (mut end, connection) = serve(&listener, COUNT, SIZE);
        // It asks for one outstanding read each way.
        assert_eq!(connection.negotiated().initiator_depth, 1);
        end.send_many(COUNT, SIZE);
        end.expect_messages(COUNT, SIZE);
        connection.disconnect().unwrap();
        assert_eq!(wait_end(&connection), ConnectionEvent::Disconnected);
        assert!(tool.finish().contains("return status 0"));
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_ucmatose_as_a_hundred_clients() {
    const CLIENTS: usize = 100;
    let listener = listen();
    let port = port_of(listener.local_addr());
    let tool = Tool::start(format!(
        "ucmatose -s {SERVER} -b {CLIENT} -p {port} -c {CLIENTS} -C 0"
    ));
    let mut served: Vec<_> = (0..CLIENTS)
        .map(|_| accept(listener.accept(soon()).unwrap(), &ConnParam::default()))
        .collect();
    for (_end, connection) in &mut served {
        assert_eq!(
            connection.wait_event(soon()).unwrap(),
            ConnectionEvent::Established
        );
        connection.disconnect().unwrap();
    }
    for (_end, connection) in &mut served {
        assert_eq!(wait_end(connection), ConnectionEvent::Disconnected);
    }
    assert!(tool.finish().contains("return status 0"));
}

// ----- udaddy: the client sends ten datagrams, the server answers them -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_udaddy_as_the_server() {
    let tool = Tool::start(format!("udaddy -b {SERVER}"));
    let service = find(7174);
    let mut end = End::datagram(&service.context());
    service.init_qp(&mut end.qp).unwrap();
    end.post_recvs(COUNT, GRH + SIZE);
    let to = service.address_handle(end.pd()).unwrap();
    end.send_datagrams(COUNT, SIZE, &to, service.qp_num(), service.qkey());
    let last = end.expect_messages(COUNT, GRH + SIZE);
    assert_eq!(last.success().unwrap().imm_data(), Some(service.qp_num()));
    assert!(tool.finish().contains("return status 0"));
}

/// Finds a service that may still be starting.
fn find(port: u16) -> Service {
    let until = Instant::now() + PATIENCE;
    loop {
        match Lookup::new(addr(SERVER, port))
            .source(addr(CLIENT, 0))
            .deadline(PATIENCE)
            .find()
        {
            Ok(service) => return service,
            Err(CmError::Unreachable { .. }) if Instant::now() < until => {
                sleep(Duration::from_millis(50))
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_udaddy_as_the_client() {
    let listener = ServiceListener::bind(addr(SERVER, 7174), &ListenOptions::default()).unwrap();
    let tool = Tool::start(format!("udaddy -s {SERVER} -b {CLIENT}"));
    let request = listener.request(soon()).unwrap();
    let mut end = End::datagram(&request.context());
    request.init_qp(&mut end.qp).unwrap();
    end.post_recvs(COUNT, GRH + SIZE);
    request.answer(&end.qp, b"").unwrap();
    let last = end.expect_messages(COUNT, GRH + SIZE);
    let peer = last.success().unwrap().imm_data().unwrap();
    let to = end.sender_of(&last);
    end.send_datagrams(COUNT, SIZE, &to, peer, RDMA_UDP_QKEY);
    assert!(tool.finish().contains("return status 0"));
}

/// The key of the UDP port space.
const RDMA_UDP_QKEY: u32 = 0x0123_4567;

// ----- rdma_client and rdma_server: one message of 16 bytes each way -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_rdma_server_as_the_server() {
    let tool = Tool::start(format!("rdma_server -s {SERVER} -p 7572"));
    let (mut end, connection) = connect(7572, PortSpace::Tcp, 1, 16);
    end.send_many(1, 16);
    end.expect_messages(1, 16);
    assert_eq!(wait_end(&connection), ConnectionEvent::Disconnected);
    connection.disconnect().unwrap();
    assert!(tool.finish().contains("end 0"));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_rdma_client_as_the_client() {
    let listener = listen();
    let port = port_of(listener.local_addr());
    let tool = Tool::start(format!("rdma_client -s {SERVER} -p {port}"));
    let (mut end, connection) = serve(&listener, 1, 16);
    end.expect_messages(1, 16);
    end.send_many(1, 16);
    assert_eq!(wait_end(&connection), ConnectionEvent::Disconnected);
    connection.disconnect().unwrap();
    assert!(tool.finish().contains("end 0"));
}

// ----- cmtime: connects and disconnects, many times -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_cmtime_as_the_client() {
    const CLIENTS: usize = 50;
    let listener = listen();
    let port = port_of(listener.local_addr());
    let tool = Tool::start(format!(
        "cmtime -s {SERVER} -b {CLIENT} -p {port} -c {CLIENTS}"
    ));
    let served: Vec<_> = (0..CLIENTS)
        .map(|_| accept(listener.accept(soon()).unwrap(), &ConnParam::default()))
        .collect();
    for (_end, connection) in &served {
        assert_eq!(wait_end(connection), ConnectionEvent::Disconnected);
        connection.disconnect().unwrap();
    }
    assert!(tool.finish().contains("disconnect"));
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_cmtime_as_the_server() {
    const CLIENTS: usize = 20;
    let tool = Tool::start(format!("cmtime -b {SERVER} -p 7573 -c {CLIENTS}"));
    let mut connected: Vec<_> = (0..CLIENTS)
        .map(|_| connect(7573, PortSpace::Tcp, 1, 16))
        .collect();
    for (_end, connection) in &mut connected {
        connection.disconnect().unwrap();
        assert_eq!(wait_end(connection), ConnectionEvent::Disconnected);
    }
    tool.kill(); // it serves for ever
}

// ----- mckey: ten datagrams to a group -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_mckey_as_the_sender() {
    let group = "239.4.5.6";
    let membership = Join::new(addr(group, 0))
        .source(addr(SERVER, 0))
        .deadline(PATIENCE)
        .join()
        .unwrap();
    let mut end = End::datagram(&membership.context());
    membership.init_qp(&mut end.qp).unwrap();
    membership.attach(&mut end.qp).unwrap();
    end.post_recvs(COUNT, GRH + SIZE);
    // It destroys its queue pair without waiting for its sends, of which a kernel that sends later
    // (6.12) loses the last ones, or all: so it is started until ten have come.
    let until = Instant::now() + PATIENCE;
    while end.arrived() < COUNT {
        assert!(Instant::now() < until, "only {} have come", end.arrived());
        let tool = Tool::start(format!("mckey -m {group} -b {CLIENT} -s -C 500"));
        assert!(tool.finish().contains("return status 0"));
    }
    end.expect_messages(COUNT, GRH + SIZE);
    membership.detach(&mut end.qp).unwrap();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_mckey_as_the_receiver() {
    let group = "239.4.5.7";
    let membership = Join::new(addr(group, 0))
        .source(addr(CLIENT, 0))
        .deadline(PATIENCE)
        .join()
        .unwrap();
    let mut end = End::datagram(&membership.context());
    membership.init_qp(&mut end.qp).unwrap();
    let to = membership.address_handle(end.pd()).unwrap();
    let mut tool = Tool::start(format!("mckey -m {group} -b {SERVER} -C {COUNT}"));
    // Nothing tells when it has joined, so it gets datagrams until it has had its ten.
    let until = Instant::now() + PATIENCE;
    while tool.is_running() && Instant::now() < until {
        end.send_datagrams(1, SIZE, &to, membership.qp_num(), membership.qkey());
        sleep(Duration::from_millis(50));
    }
    assert!(tool.finish().contains("return status 0"));
}

// ----- rping: a server that is killed -----

#[test]
#[ignore = "needs an RDMA device: cargo xtask test"]
fn interop_rping_killed_is_a_disconnect() {
    let tool = Tool::start(format!("rping -s -a {SERVER} -p 7574"));
    let (end, connection) = connect(7574, PortSpace::Tcp, 1, 16);
    let start = Instant::now();
    tool.kill();
    assert_eq!(wait_end(&connection), ConnectionEvent::Disconnected);
    println!("told after {:?}", start.elapsed());
    assert_eq!(
        end.qp.state().unwrap(),
        rdma_core_rs::QpState::Rts,
        "nobody touched it"
    );
}
