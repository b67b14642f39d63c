//! A program whose calls the tests let fail.

use rdma_cm::{
    AddrHints, AddrInfo, ConnParam, IdOptions, Join, ListenOptions, Listener, Lookup,
    ServiceListener,
};

use crate::fake::*;

/// Every call of this crate once or more, with every error passed on.
pub(crate) fn program() -> Result<(), Failure> {
    let all = IdOptions {
        tos: Some(32),
        ack_timeout: Some(14),
        reuse_addr: true,
        af_only: Some(true),
    };
    let IdOptions {
        tos,
        ack_timeout,
        reuse_addr,
        af_only,
    } = all.clone();
    let options = ListenOptions {
        backlog: 8,
        tos,
        ack_timeout,
        reuse_addr,
        af_only,
    };
    let listener = Listener::bind(addr(SERVER, 0), &options)?;
    let mut resolved = resolve(connector(&listener).options(all).start()?)?;
    let mut client = queue_pair(&resolved.context())?;
    resolved.init_qp(&mut client)?;
    let mut connecting = resolved.connect(&mut client, &ConnParam::default())?;
    let (server, passive) = accept(request(&listener)?)?;
    passive.notify_comm_est()?;
    let active = drive::<_, Failure>(|| connecting.advance(&mut client))?;
    while passive.try_event()?.is_some() {}
    active.disconnect()?;
    passive.disconnect()?;
    while active.try_event()?.is_some() {}

    let (rejected, _connecting) = begin(&listener)?;
    request(&listener)?.reject(b"no")?;
    drop((client, server, rejected));
    datagrams()?;
    rdma_cm::context_for(addr(CLIENT, 0))?;
    Ok(())
}

fn datagrams() -> Result<(), Failure> {
    let service = ServiceListener::bind(addr(SERVER, 0), &ListenOptions::default())?;
    let mut looking = Lookup::new(service.local_addr())
        .source(addr(CLIENT, 0))
        .deadline(LONG)
        .start()?;
    let request = drive::<_, Failure>(|| match looking.advance()? {
        Some(_) => panic!("nobody answered"),
        None => service.try_request(),
    })?;
    let mut server = datagram_queue_pair(&request.context())?;
    request.init_qp(&mut server)?;
    request.answer(&server, b"")?;
    let found = drive::<_, Failure>(|| looking.advance())?;
    let mut client = datagram_queue_pair(&found.context())?;
    found.init_qp(&mut client)?;
    found.address_handle(client.pd())?;

    let mut joining = Join::new(addr("239.1.2.3", 0))
        .source(addr(CLIENT, 0))
        .deadline(LONG)
        .start()?;
    let membership = drive::<_, Failure>(|| joining.advance())?;
    membership.attach(&mut client)?;
    membership.detach(&mut client)?;
    AddrInfo::resolve(
        SERVER,
        "1",
        &AddrHints {
            numeric_host: true,
            ..AddrHints::default()
        },
    )?;
    Ok(())
}
