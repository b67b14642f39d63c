//! Who may do what with registered memory.

use crate::sys::ibv_access_flags;

bitflags::bitflags! {
    /// What the local device and the peers may do with a memory region, or the peers through a
    /// queue pair.
    ///
    /// The local device may always read. For a memory region, remote write and remote atomic need
    /// local write (ibv_reg_mr(3)); it is added when registering, see [`Access::for_region`].
    #[doc(alias = "ibv_access_flags")]
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local device may write: needed for receives and as the target of reads and atomics.
        #[doc(alias = "IBV_ACCESS_LOCAL_WRITE")]
        const LOCAL_WRITE = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        /// Peers may write.
        #[doc(alias = "IBV_ACCESS_REMOTE_WRITE")]
        const REMOTE_WRITE = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        /// Peers may read.
        #[doc(alias = "IBV_ACCESS_REMOTE_READ")]
        const REMOTE_READ = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        /// Peers may run compare-and-swap and fetch-and-add.
        #[doc(alias = "IBV_ACCESS_REMOTE_ATOMIC")]
        const REMOTE_ATOMIC = ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        /// Memory windows may be bound to the region.
        #[doc(alias = "IBV_ACCESS_MW_BIND")]
        const MW_BIND = ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        /// A memory window's addresses start at 0 instead of at the memory's address.
        #[doc(alias = "IBV_ACCESS_ZERO_BASED")]
        const ZERO_BASED = ibv_access_flags::IBV_ACCESS_ZERO_BASED.0;
        /// Pages are not pinned but faulted in by the device (on-demand paging), where it can.
        #[doc(alias = "IBV_ACCESS_ON_DEMAND")]
        const ON_DEMAND = ibv_access_flags::IBV_ACCESS_ON_DEMAND.0;
        /// The memory consists of huge pages. Not needed for them, and refused by some drivers.
        #[doc(alias = "IBV_ACCESS_HUGETLB")]
        const HUGETLB = ibv_access_flags::IBV_ACCESS_HUGETLB.0;
        /// The device may reorder its writes on the bus. Never poll on memory with this flag:
        /// wait for the completion. Ignored where it is unknown.
        #[doc(alias = "IBV_ACCESS_RELAXED_ORDERING")]
        const RELAXED_ORDERING = ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
    }
}

impl Access {
    /// Every kind of access that a peer can be given.
    pub const REMOTE: Access = Access::REMOTE_WRITE
        .union(Access::REMOTE_READ)
        .union(Access::REMOTE_ATOMIC);

    /// Whether a peer gets any access.
    ///
    /// ```
    /// # use rdma_core_rs::Access;
    /// assert!(Access::REMOTE_READ.is_remote());
    /// assert!(!Access::LOCAL_WRITE.is_remote());
    /// ```
    pub const fn is_remote(self) -> bool {
        self.intersects(Access::REMOTE)
    }

    /// These flags as a memory region needs them: remote write and remote atomic bring local write
    /// along.
    ///
    /// ```
    /// # use rdma_core_rs::Access;
    /// assert_eq!(Access::REMOTE_WRITE.for_region(), Access::REMOTE_WRITE | Access::LOCAL_WRITE);
    /// assert_eq!(Access::REMOTE_READ.for_region(), Access::REMOTE_READ);
    /// ```
    pub const fn for_region(self) -> Access {
        if self.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC)) {
            self.union(Access::LOCAL_WRITE)
        } else {
            self
        }
    }
}
