//! Attributes of devices and ports, in Rust's terms.

use std::ffi::c_int;

use crate::sys::{self, ibv_atomic_cap, ibv_mtu, ibv_port_state};

/// Limits and properties of a device. The names are those of ibv_query_device(3).
#[doc(alias = "ibv_device_attr")]
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttr {
    /// Version of the firmware.
    pub fw_ver: String,
    /// In host order.
    pub node_guid: u64,
    /// In host order.
    pub sys_image_guid: u64,
    /// Largest memory region in bytes.
    pub max_mr_size: u64,
    /// Bit n: pages of 2^n bytes.
    pub page_size_cap: u64,
    /// The vendor's IEEE number.
    pub vendor_id: u32,
    /// The vendor's number of the model.
    pub vendor_part_id: u32,
    /// The vendor's version of the hardware.
    pub hw_ver: u32,
    /// Queue pairs of the whole device.
    pub max_qp: u32,
    /// Deepest send or receive queue of a queue pair.
    pub max_qp_wr: u32,
    /// Raw bits; see [`supports`](Self::supports).
    pub device_cap_flags: u32,
    /// Elements of a request or receive.
    pub max_sge: u32,
    /// Elements of a read, on devices that limit it further; else often 0.
    pub max_sge_rd: u32,
    /// Completion queues of the whole device.
    pub max_cq: u32,
    /// Completions that a queue can hold.
    pub max_cqe: u32,
    /// Memory regions of the whole device.
    pub max_mr: u32,
    /// Protection domains of the whole device.
    pub max_pd: u32,
    /// Most reads and atomics that a queue pair can have incoming.
    pub max_qp_rd_atom: u32,
    /// Incoming reads and atomics of the whole device.
    pub max_res_rd_atom: u32,
    /// Most reads and atomics that a queue pair can have outgoing.
    pub max_qp_init_rd_atom: u32,
    /// How far its atomics are atomic.
    pub atomic_cap: AtomicCap,
    /// Memory windows of the whole device.
    pub max_mw: u32,
    /// Multicast groups of the whole device.
    pub max_mcast_grp: u32,
    /// Queue pairs that can join one multicast group.
    pub max_mcast_qp_attach: u32,
    /// Address handles of the whole device.
    pub max_ah: u32,
    /// Shared receive queues of the whole device.
    pub max_srq: u32,
    /// Receives that a shared receive queue can hold.
    pub max_srq_wr: u32,
    /// Elements of a receive in a shared receive queue.
    pub max_srq_sge: u32,
    /// Partition keys of a port.
    pub max_pkeys: u16,
    /// Ports, numbered from 1.
    pub phys_port_cnt: u8,
}

/// A feature that a device has or has not.
#[doc(alias = "ibv_device_cap_flags")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceCap {
    /// Memory windows of type 2, the kind bound by a work request (type 2A or 2B).
    MemWindowType2,
    /// Send with invalidate, local invalidate.
    MemMgtExtensions,
    /// A shared receive queue can be resized.
    SrqResize,
    /// Events for a port that becomes active.
    PortActiveEvent,
}

impl DeviceAttr {
    /// Whether the device says that it has a feature.
    pub fn supports(&self, cap: DeviceCap) -> bool {
        use crate::sys::ibv_device_cap_flags as bits;
        let mask = match cap {
            DeviceCap::MemWindowType2 => {
                bits::IBV_DEVICE_MEM_WINDOW_TYPE_2A.0 | bits::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0
            }
            DeviceCap::MemMgtExtensions => bits::IBV_DEVICE_MEM_MGT_EXTENSIONS.0,
            DeviceCap::SrqResize => bits::IBV_DEVICE_SRQ_RESIZE.0,
            DeviceCap::PortActiveEvent => bits::IBV_DEVICE_PORT_ACTIVE_EVENT.0,
        };
        self.device_cap_flags & mask != 0
    }

    pub(crate) fn from_raw(raw: &sys::ibv_device_attr) -> DeviceAttr {
        DeviceAttr {
            fw_ver: raw
                .fw_ver
                .iter()
                .take_while(|&&c| c != 0)
                .map(|&c| c as u8 as char)
                .collect(),
            node_guid: u64::from_be(raw.node_guid),
            sys_image_guid: u64::from_be(raw.sys_image_guid),
            max_mr_size: raw.max_mr_size,
            page_size_cap: raw.page_size_cap,
            vendor_id: raw.vendor_id,
            vendor_part_id: raw.vendor_part_id,
            hw_ver: raw.hw_ver,
            max_qp: count(raw.max_qp),
            max_qp_wr: count(raw.max_qp_wr),
            device_cap_flags: raw.device_cap_flags,
            max_sge: count(raw.max_sge),
            max_sge_rd: count(raw.max_sge_rd),
            max_cq: count(raw.max_cq),
            max_cqe: count(raw.max_cqe),
            max_mr: count(raw.max_mr),
            max_pd: count(raw.max_pd),
            max_qp_rd_atom: count(raw.max_qp_rd_atom),
            max_res_rd_atom: count(raw.max_res_rd_atom),
            max_qp_init_rd_atom: count(raw.max_qp_init_rd_atom),
            atomic_cap: AtomicCap::from_raw(raw.atomic_cap),
            max_mw: count(raw.max_mw),
            max_mcast_grp: count(raw.max_mcast_grp),
            max_mcast_qp_attach: count(raw.max_mcast_qp_attach),
            max_ah: count(raw.max_ah),
            max_srq: count(raw.max_srq),
            max_srq_wr: count(raw.max_srq_wr),
            max_srq_sge: count(raw.max_srq_sge),
            max_pkeys: raw.max_pkeys,
            phys_port_cnt: raw.phys_port_cnt,
        }
    }
}

/// C counts in `int`; a negative count can only mean none.
fn count(raw: c_int) -> u32 {
    u32::try_from(raw).unwrap_or(0)
}

/// How far a device's atomic operations are atomic.
#[doc(alias = "ibv_atomic_cap")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AtomicCap {
    /// The device has no atomics.
    None,
    /// Atomic among the operations of this device only; not towards the CPU.
    Hca,
    /// Atomic towards everything, the CPU included.
    Glob,
    /// A value this crate does not know.
    Unknown(u32),
}

impl AtomicCap {
    fn from_raw(raw: ibv_atomic_cap::Type) -> AtomicCap {
        match raw {
            ibv_atomic_cap::IBV_ATOMIC_NONE => AtomicCap::None,
            ibv_atomic_cap::IBV_ATOMIC_HCA => AtomicCap::Hca,
            ibv_atomic_cap::IBV_ATOMIC_GLOB => AtomicCap::Glob,
            other => AtomicCap::Unknown(other),
        }
    }
}

/// The state and the limits of a port. The names are those of ibv_query_port(3).
#[doc(alias = "ibv_port_attr")]
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortAttr {
    /// The logical state.
    pub state: PortState,
    /// The largest payload of a packet that the port can do.
    pub max_mtu: Mtu,
    /// The payload of a packet in force now.
    pub active_mtu: Mtu,
    /// Length of the GID table.
    pub gid_tbl_len: u32,
    /// Raw bits; see ibv_query_port(3).
    pub port_cap_flags: u32,
    /// Longest message in bytes.
    pub max_msg_sz: u32,
    /// Length of the table of partition keys.
    pub pkey_tbl_len: u16,
    /// The local identifier; InfiniBand only.
    pub lid: u16,
    /// The subnet manager's local identifier; InfiniBand only.
    pub sm_lid: u16,
    /// Lanes, as the device codes them; see [`speed_mbps`](Self::speed_mbps).
    pub active_width: u8,
    /// Rate per lane, as the device codes it.
    pub active_speed: u8,
    /// The physical state; 5 is up.
    pub phys_state: u8,
    /// What the link is made of.
    pub link_layer: LinkLayer,
}

impl PortAttr {
    /// The signalling rate in Mbit/s: lanes times rate per lane; 0 if the device uses a code this
    /// crate does not know.
    pub fn speed_mbps(&self) -> u64 {
        let lanes = match self.active_width {
            1 => 1,
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 0,
        };
        let lane_mbps = match self.active_speed {
            1 => 2_500,
            2 => 5_000,
            4 | 8 => 10_000, // QDR, FDR10
            16 => 14_000,
            32 => 25_000,
            64 => 50_000,
            128 => 100_000,
            _ => 0,
        };
        lanes * lane_mbps
    }

    pub(crate) fn from_raw(raw: &sys::ibv_port_attr) -> PortAttr {
        PortAttr {
            state: PortState::from_raw(raw.state),
            max_mtu: Mtu::from_raw(raw.max_mtu),
            active_mtu: Mtu::from_raw(raw.active_mtu),
            gid_tbl_len: count(raw.gid_tbl_len),
            port_cap_flags: raw.port_cap_flags,
            max_msg_sz: raw.max_msg_sz,
            pkey_tbl_len: raw.pkey_tbl_len,
            lid: raw.lid,
            sm_lid: raw.sm_lid,
            active_width: raw.active_width,
            active_speed: raw.active_speed,
            phys_state: raw.phys_state,
            link_layer: LinkLayer::from_raw(raw.link_layer),
        }
    }
}

/// The logical state of a port.
#[doc(alias = "ibv_port_state")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No state change.
    Nop,
    /// The link is down.
    Down,
    /// The physical link is up; the subnet manager has not configured it.
    Init,
    /// Configured, not yet active.
    Armed,
    /// Data can flow.
    Active,
    /// Active, with the link training again.
    ActiveDefer,
    /// A value this crate does not know.
    Unknown(u32),
}

impl PortState {
    fn from_raw(raw: ibv_port_state::Type) -> PortState {
        match raw {
            ibv_port_state::IBV_PORT_NOP => PortState::Nop,
            ibv_port_state::IBV_PORT_DOWN => PortState::Down,
            ibv_port_state::IBV_PORT_INIT => PortState::Init,
            ibv_port_state::IBV_PORT_ARMED => PortState::Armed,
            ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
            ibv_port_state::IBV_PORT_ACTIVE_DEFER => PortState::ActiveDefer,
            other => PortState::Unknown(other),
        }
    }
}

/// The maximum payload of a packet.
#[doc(alias = "ibv_mtu")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Mtu {
    /// 256 bytes.
    Mtu256,
    /// 512 bytes.
    Mtu512,
    /// 1024 bytes.
    Mtu1024,
    /// 2048 bytes.
    Mtu2048,
    /// 4096 bytes.
    Mtu4096,
    /// A code this crate does not know.
    Unknown(u32),
}

impl Mtu {
    /// The payload in bytes; 0 if unknown.
    pub const fn bytes(self) -> u32 {
        match self {
            Mtu::Mtu256 => 256,
            Mtu::Mtu512 => 512,
            Mtu::Mtu1024 => 1024,
            Mtu::Mtu2048 => 2048,
            Mtu::Mtu4096 => 4096,
            Mtu::Unknown(_) => 0,
        }
    }

    pub(crate) const fn from_raw(raw: ibv_mtu::Type) -> Mtu {
        match raw {
            ibv_mtu::IBV_MTU_256 => Mtu::Mtu256,
            ibv_mtu::IBV_MTU_512 => Mtu::Mtu512,
            ibv_mtu::IBV_MTU_1024 => Mtu::Mtu1024,
            ibv_mtu::IBV_MTU_2048 => Mtu::Mtu2048,
            ibv_mtu::IBV_MTU_4096 => Mtu::Mtu4096,
            other => Mtu::Unknown(other),
        }
    }

    pub(crate) const fn raw(self) -> ibv_mtu::Type {
        match self {
            Mtu::Mtu256 => ibv_mtu::IBV_MTU_256,
            Mtu::Mtu512 => ibv_mtu::IBV_MTU_512,
            Mtu::Mtu1024 => ibv_mtu::IBV_MTU_1024,
            Mtu::Mtu2048 => ibv_mtu::IBV_MTU_2048,
            Mtu::Mtu4096 => ibv_mtu::IBV_MTU_4096,
            Mtu::Unknown(raw) => raw,
        }
    }
}

/// What a port's link is made of.
#[doc(alias = "IBV_LINK_LAYER_ETHERNET")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// The device does not say; old InfiniBand drivers do that.
    Unspecified,
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// A value this crate does not know.
    Unknown(u8),
}

impl LinkLayer {
    fn from_raw(raw: u8) -> LinkLayer {
        match raw {
            0 => LinkLayer::Unspecified,
            1 => LinkLayer::InfiniBand,
            2 => LinkLayer::Ethernet,
            other => LinkLayer::Unknown(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(width: u8, speed: u8) -> PortAttr {
        PortAttr {
            state: PortState::Active,
            max_mtu: Mtu::Mtu4096,
            active_mtu: Mtu::Mtu1024,
            gid_tbl_len: 1,
            port_cap_flags: 0,
            max_msg_sz: 0,
            pkey_tbl_len: 1,
            lid: 0,
            sm_lid: 0,
            active_width: width,
            active_speed: speed,
            phys_state: 5,
            link_layer: LinkLayer::Ethernet,
        }
    }

    #[test]
    fn speed_is_lanes_times_lane_rate() {
        assert_eq!(port(1, 1).speed_mbps(), 2_500);
        assert_eq!(port(2, 32).speed_mbps(), 100_000);
        assert_eq!(port(2, 128).speed_mbps(), 400_000);
        assert_eq!(port(3, 1).speed_mbps(), 0);
    }

    #[test]
    fn every_mtu_survives_the_round_trip() {
        for raw in 0..10 {
            assert_eq!(Mtu::from_raw(raw).raw(), raw);
        }
        assert_eq!(Mtu::from_raw(5).bytes(), 4096);
    }

    #[test]
    fn unknown_codes_are_kept() {
        assert_eq!(PortState::from_raw(17), PortState::Unknown(17));
        assert_eq!(LinkLayer::from_raw(9), LinkLayer::Unknown(9));
        assert_eq!(AtomicCap::from_raw(3), AtomicCap::Unknown(3));
    }
}
