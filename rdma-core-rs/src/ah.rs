//! Address handles: where a datagram goes.

#![allow(unsafe_code)] // calls C

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;
use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::pd::ProtectionDomain;
use crate::sys;
use crate::wc::Success;

/// A path to a port: the address of datagrams, and a part of the attributes with which a
/// connected queue pair is brought up.
///
/// ```
/// use rdma_core_rs::AddressVector;
/// use std::net::{Ipv4Addr, Ipv6Addr};
///
/// let gid = Ipv4Addr::new(192, 168, 99, 2).to_ipv6_mapped(); // the GID of a RoCE address
/// let mut path = AddressVector::global(1, gid, 1);
/// path.traffic_class = 96;
/// assert_eq!(path.hop_limit, 64);
/// ```
#[doc(alias = "ibv_ah_attr")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressVector {
    /// The local port it leaves by.
    pub port: u8,
    /// The peer's GID; on RoCE always needed.
    pub dgid: Option<Ipv6Addr>,
    /// Index of the local GID it comes from.
    pub sgid_index: u8,
    /// How many routers it may pass.
    pub hop_limit: u8,
    /// The traffic class, on RoCE v2 the IP type of service.
    pub traffic_class: u8,
    /// The flow label of the global routing header.
    pub flow_label: u32,
    /// The peer's local identifier; InfiniBand only.
    pub dlid: u16,
    /// The service level.
    pub sl: u8,
}

impl AddressVector {
    /// A path by GID, from the local port and GID index, with a hop limit of 64.
    pub fn global(port: u8, dgid: Ipv6Addr, sgid_index: u8) -> AddressVector {
        AddressVector {
            port,
            dgid: Some(dgid),
            sgid_index,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            dlid: 0,
            sl: 0,
        }
    }

    /// A path by local identifier, inside an InfiniBand subnet.
    pub fn local(port: u8, dlid: u16) -> AddressVector {
        AddressVector {
            dgid: None,
            dlid,
            hop_limit: 0,
            ..AddressVector::global(port, Ipv6Addr::UNSPECIFIED, 0)
        }
    }

    pub(crate) fn to_raw(&self) -> sys::ibv_ah_attr {
        let dgid = self.dgid.unwrap_or(Ipv6Addr::UNSPECIFIED);
        sys::ibv_ah_attr {
            grh: sys::ibv_global_route {
                dgid: sys::ibv_gid { raw: dgid.octets() },
                flow_label: self.flow_label,
                sgid_index: self.sgid_index,
                hop_limit: self.hop_limit,
                traffic_class: self.traffic_class,
            },
            dlid: self.dlid,
            sl: self.sl,
            src_path_bits: 0,
            static_rate: 0,
            is_global: self.dgid.is_some().into(),
            port_num: self.port,
        }
    }
}

/// An address that datagrams can be sent to.
///
/// Keep it until the completions of what was sent with it.
///
/// ```
/// use rdma_core_rs::{AddressHandle, AddressVector, SendWr};
///
/// # let _fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// # let pd = rdma_core_rs::ProtectionDomain::new(&context)?;
/// # let (peer_gid, peer_qp_num, qkey) = (context.gid(1, 2)?, 17, 0x1111_1111);
/// let ah = AddressHandle::new(&pd, &AddressVector::global(1, peer_gid, 2))?;
/// let empty_datagram = SendWr::send(1, &[]).to(&ah, peer_qp_num, qkey);
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[doc(alias = "ibv_ah")]
pub struct AddressHandle {
    ah: NonNull<sys::ibv_ah>,
    pd: ProtectionDomain,
}

// SAFETY: libibverbs allows its objects to be used from any thread; `ah` is only given to it and
// destroyed once.
unsafe impl Send for AddressHandle {}
// SAFETY: as for Send.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Creates a handle.
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_create_ah`: `EINVAL` for a port or GID index that
    /// does not exist, others if the peer's link address cannot be found.
    #[doc(alias = "ibv_create_ah")]
    pub fn new(pd: &ProtectionDomain, address: &AddressVector) -> Result<AddressHandle> {
        AddressHandle::from_raw_attr(pd, address.to_raw())
    }

    /// Creates a handle from attributes that C filled in, such as those in an event of the
    /// connection manager.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn from_raw_attr(
        pd: &ProtectionDomain,
        mut attr: sys::ibv_ah_attr,
    ) -> Result<AddressHandle> {
        pd.context().check_process()?;
        // SAFETY: `pd` lives during the call; `attr` is a local without pointers.
        let ah = unsafe { sys::ibv_create_ah(pd.as_raw().as_ptr(), &raw mut attr) };
        let ah = sys::check_null("ibv_create_ah", ah)?;
        Ok(AddressHandle { ah, pd: pd.clone() })
    }

    /// Creates a handle to the sender of a datagram, to answer it.
    ///
    /// `header` is what stands in the first 40 bytes of the buffer it was received in; `port` is
    /// the local port. Send the answer to [`Success::src_qp`].
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_create_ah_from_wc`: the header is none, or the local
    /// address it names is gone. The library does not always say which; then there is no errno.
    #[doc(alias = "ibv_create_ah_from_wc")]
    pub fn to_sender(
        pd: &ProtectionDomain,
        port: u8,
        received: &Success<'_>,
        header: &[u8; AddressHandle::HEADER_LEN],
    ) -> Result<AddressHandle> {
        pd.context().check_process()?;
        let mut grh = MaybeUninit::<sys::ibv_grh>::uninit();
        let bytes: *mut [u8; AddressHandle::HEADER_LEN] = grh.as_mut_ptr().cast();
        // SAFETY: the struct is of this size, and a byte array needs no alignment.
        unsafe { bytes.write(*header) };
        let (pd_raw, wc) = (pd.as_raw().as_ptr(), received.as_raw().cast_mut());
        sys::clear_errno();
        // SAFETY: `pd` lives during the call, which only reads the completion and the header.
        let ah = unsafe { sys::ibv_create_ah_from_wc(pd_raw, wc, grh.as_mut_ptr(), port) };
        let Some(ah) = NonNull::new(ah) else {
            let call = "ibv_create_ah_from_wc";
            let source = match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(0) => {
                    io::Error::other("the header is none, or names no address of this port")
                }
                error => error,
            };
            return Err(Error::Call { call, source });
        };
        Ok(AddressHandle { ah, pd: pd.clone() })
    }

    /// The length of the routing header in front of a received datagram.
    #[doc(alias = "ibv_grh")]
    pub const HEADER_LEN: usize = 40;

    /// The protection domain it was created in.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The C object. It lives as long as this handle.
    #[inline]
    pub fn as_raw(&self) -> NonNull<sys::ibv_ah> {
        self.ah
    }
}

const _: () = assert!(size_of::<sys::ibv_grh>() == AddressHandle::HEADER_LEN);

impl Drop for AddressHandle {
    fn drop(&mut self) {
        if self.pd.context().is_foreign_process() {
            return;
        }
        // SAFETY: we own it, and it is destroyed once.
        let ret = unsafe { sys::ibv_destroy_ah(self.ah.as_ptr()) };
        if let Err(error) = sys::check("ibv_destroy_ah", ret) {
            log::error!("{error}; the address handle is leaked");
        }
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressHandle")
            .field("ah", &self.ah)
            .finish_non_exhaustive()
    }
}
