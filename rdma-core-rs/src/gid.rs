//! The GID table of a port: which addresses it has.
//!
//! The table's GIDs come from verbs, their types and network devices from sysfs, where they have
//! been since kernel 4.5.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};

use crate::context::Context;
use crate::device::sysfs_device;
use crate::error::Result;

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// Where it is in the table.
    pub index: u32,
    /// The address; on RoCE an IPv6 address or an IPv4 address in IPv6 form.
    pub gid: Ipv6Addr,
    /// Its kind, if the kernel tells.
    pub gid_type: Option<GidType>,
    /// The network device it belongs to, if it belongs to one and the kernel tells.
    pub netdev: Option<String>,
}

/// The kind of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "IBV_GID_TYPE_ROCE_V2")]
pub enum GidType {
    /// InfiniBand, or RoCE version 1, whose packets are not routed.
    IbOrRoceV1,
    /// RoCE version 2, over UDP.
    RoceV2,
}

impl GidType {
    fn parse(text: &str) -> Option<GidType> {
        match text.trim() {
            "IB/RoCE v1" => Some(GidType::IbOrRoceV1),
            "RoCE v2" => Some(GidType::RoceV2),
            _ => None,
        }
    }
}

impl Context {
    /// The entries of a port's GID table that are in use.
    ///
    /// It asks the device for each entry, so it takes a while on a device with a long table.
    ///
    /// # Errors
    /// As for [`port_attr`](Context::port_attr) and [`gid`](Context::gid).
    pub fn gid_table(&self, port: u8) -> Result<Vec<GidEntry>> {
        let len = self.port_attr(port)?.gid_tbl_len;
        (0..len)
            .filter_map(|index| self.gid_entry(port, index).transpose())
            .collect()
    }

    /// The entry for an IP address: RoCE version 2 if there is one, else the first.
    ///
    /// The index may change when addresses come and go (see
    /// [`AsyncEvent::GidChange`](crate::AsyncEvent::GidChange)).
    ///
    /// ```
    /// # let _fabric = fake_verbs::Fabric::new();
    /// # let context = rdma_core_rs::devices()?[0].open()?;
    /// let entry = context.find_gid(1, "10.9.0.1".parse().expect("an address"))?;
    /// println!("index {} of the table", entry.expect("the port has the address").index);
    /// # Ok::<(), rdma_core_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`gid_table`](Context::gid_table).
    pub fn find_gid(&self, port: u8, ip: IpAddr) -> Result<Option<GidEntry>> {
        let wanted = match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut found = None;
        for index in 0..self.port_attr(port)?.gid_tbl_len {
            if self.gid(port, index)? != wanted {
                continue;
            }
            match self.gid_entry(port, index)? {
                Some(entry) if entry.gid_type == Some(GidType::RoceV2) => return Ok(Some(entry)),
                entry => found = found.or(entry),
            }
        }
        Ok(found)
    }

    /// The entry at an index, if it is in use.
    fn gid_entry(&self, port: u8, index: u32) -> Result<Option<GidEntry>> {
        let gid = self.gid(port, index)?;
        if gid.is_unspecified() {
            return Ok(None);
        }
        let attrs = sysfs_device(self.device_name()).join(format!("ports/{port}/gid_attrs"));
        let read = |kind: &str| fs::read_to_string(attrs.join(kind).join(index.to_string())).ok();
        let gid_type = read("types").and_then(|text| GidType::parse(&text));
        let netdev = read("ndevs")
            .map(|name| name.trim().to_owned())
            .filter(|n| !n.is_empty());
        Ok(Some(GidEntry {
            index,
            gid,
            gid_type,
            netdev,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_the_kernel_writes_them() {
        assert_eq!(GidType::parse("RoCE v2\n"), Some(GidType::RoceV2));
        assert_eq!(GidType::parse("IB/RoCE v1\n"), Some(GidType::IbOrRoceV1));
        assert_eq!(GidType::parse("something new\n"), None);
    }
}
