//! The connection manager.
#![allow(unsafe_code)] // calls the C interface
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]

mod common;

use common::*;
use fake_verbs::Fabric;
use rdma_sys::rdma_cm_event_type::*;
use rdma_sys::*;

/// Listener, active id and passive id, both ends accepted and established.
fn establish(server: &Channel, client: &Channel) -> [*mut rdma_cm_id; 3] {
    let listening = listener(server, "0.0.0.0:7471");
    let active = client.id();
    resolve(client, active, "10.9.0.2:7471");
    assert_eq!(
        unsafe { rdma_connect(active, &mut conn_param(11, b"hi")) },
        0
    );
    let request = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.listen_id, listening);
    assert_eq!((request.data.len(), &request.data[..3]), (56, &b"hi\0"[..]));
    assert_eq!(
        unsafe { rdma_accept(request.id, &mut conn_param(22, b"welcome")) },
        0
    );
    let response = client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    assert_eq!(
        (response.data.len(), &response.data[..7]),
        (196, &b"welcome"[..])
    );
    assert_eq!(unsafe { rdma_establish(active) }, 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED);
    [listening, active, request.id]
}

#[test]
fn two_ids_connect_and_disconnect() {
    let fabric = Fabric::new();
    let (server, client) = (Channel::new(), Channel::new());
    let [listening, active, passive] = establish(&server, &client);
    assert_eq!(unsafe { rdma_disconnect(active) }, 0);
    assert_eq!(server.expect(RDMA_CM_EVENT_DISCONNECTED).status, 0);
    assert_eq!(client.next(), None);
    assert_eq!(unsafe { rdma_disconnect(passive) }, 0);
    client.expect(RDMA_CM_EVENT_DISCONNECTED);
    fabric.expire_timewait();
    client.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    server.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    [listening, active, passive].into_iter().for_each(destroy);
    server.close();
    client.close();
    drop(fabric);
}
