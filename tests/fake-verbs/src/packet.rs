//! The 40 bytes before a datagram: a GRH, or an IPv4 header in its second half for RoCE v2 over IPv4.
#![allow(unsafe_code)] // reads the bytes of a GID union

use rdma_sys::ibv_gid;

pub(crate) const GRH_LEN: usize = 40;
const UDP: u8 = 17;

pub(crate) fn gid_bytes(gid: ibv_gid) -> [u8; 16] {
    // SAFETY: every variant of the union is 16 initialised bytes.
    unsafe { gid.raw }
}

/// The IPv4 address inside a mapped GID.
fn ipv4(gid: [u8; 16]) -> Option<[u8; 4]> {
    let address = std::net::Ipv6Addr::from(gid).to_ipv4_mapped()?;
    Some(address.octets())
}

pub(crate) fn grh(sgid: [u8; 16], dgid: [u8; 16], payload: usize) -> [u8; GRH_LEN] {
    let mut header = [0; GRH_LEN];
    match (ipv4(sgid), ipv4(dgid)) {
        (Some(from), Some(to)) => {
            let total = (payload + 20) as u16;
            header[20] = 0x45;
            header[22..24].copy_from_slice(&total.to_be_bytes());
            header[28] = 64;
            header[29] = UDP;
            header[32..36].copy_from_slice(&from);
            header[36..40].copy_from_slice(&to);
        }
        _ => {
            header[0] = 0x60;
            header[4..6].copy_from_slice(&(payload as u16).to_be_bytes());
            header[6] = UDP;
            header[7] = 64;
            header[8..24].copy_from_slice(&sgid);
            header[24..40].copy_from_slice(&dgid);
        }
    }
    header
}

/// Source and destination GID of a received header.
pub(crate) fn gids(header: &[u8; GRH_LEN]) -> ([u8; 16], [u8; 16]) {
    let mut sgid = [0; 16];
    let mut dgid = [0; 16];
    if header[0] >> 4 == 6 {
        sgid.copy_from_slice(&header[8..24]);
        dgid.copy_from_slice(&header[24..40]);
    } else {
        let mapped = |bytes: &[u8]| {
            let mut gid = [0; 16];
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(bytes);
            gid
        };
        sgid = mapped(&header[32..36]);
        dgid = mapped(&header[36..40]);
    }
    (sgid, dgid)
}
