//! Asynchronous events: what happens to a device outside any request.
//!
//! libibverbs waits, when an object is destroyed, for every event about it that was read and not
//! acknowledged. So an event is copied and acknowledged before it is returned; while that happens
//! the object it names cannot go away. The event's type is read as a plain integer: newer kernels
//! send numbers that the enum in rdma-sys does not have.

#![allow(unsafe_code)] // calls C, reads a union

use std::ffi::c_int;
use std::fmt;
use std::mem::{align_of, offset_of, size_of};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::time::Instant;

use crate::context::Context;
use crate::cq::CompletionQueue;
use crate::error::Result;
use crate::fd;
use crate::srq::Srq;
use crate::sys;

/// The stream of a context's asynchronous events.
///
/// Made by [`Context::async_events`]. Each event goes to one reader, of all readers of the open
/// device. It can be used from any thread.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use rdma_core_rs::AsyncEvent;
///
/// # let fabric = fake_verbs::Fabric::new();
/// # let context = rdma_core_rs::devices()?[0].open()?;
/// let events = context.async_events()?;
/// # fabric.set_port(0, false);
/// while let Some(event) = events.wait(Some(Instant::now() + Duration::from_millis(10)))? {
///     match event {
///         AsyncEvent::QpFatal { qp_num } => println!("queue pair {qp_num} is lost"),
///         AsyncEvent::PortErr { port } => println!("port {port} is down"),
///         other => println!("{other:?}"),
///     }
/// }
/// # Ok::<(), rdma_core_rs::Error>(())
/// ```
#[derive(Clone)]
pub struct AsyncEvents {
    context: Context,
}

impl AsyncEvents {
    pub(crate) fn new(context: &Context) -> Result<AsyncEvents> {
        context.check_process()?;
        fd::set_nonblocking(context.async_fd())?;
        Ok(AsyncEvents {
            context: context.clone(),
        })
    }

    /// The next event, if there is one, already acknowledged. Never sleeps.
    ///
    /// # Errors
    /// [`Call`](crate::Error::Call) naming `ibv_get_async_event`;
    /// [`Forked`](crate::Error::Forked) in a child, where it would take the parent's event.
    #[doc(alias = "ibv_get_async_event")]
    #[doc(alias = "ibv_ack_async_event")]
    pub fn try_event(&self) -> Result<Option<AsyncEvent>> {
        self.context.check_process()?;
        let mut raw = RawEvent {
            element: Element {
                object: ptr::null_mut(),
            },
            event_type: 0,
        };
        let event: *mut sys::ibv_async_event = (&raw mut raw).cast();
        loop {
            // SAFETY: the context is open; `raw` is laid out as C's struct, checked below.
            let ret = unsafe { sys::ibv_get_async_event(self.context.as_raw().as_ptr(), event) };
            match sys::check_minus_one("ibv_get_async_event", ret) {
                Ok(()) => break,
                Err(error) if fd::would_block(&error) => return Ok(None),
                Err(error) if fd::interrupted(&error) => {}
                Err(error) => return Err(error),
            }
        }
        // SAFETY: the event was just read and not acknowledged yet, so its object is alive.
        let copy = unsafe { AsyncEvent::from_raw(&raw) };
        // SAFETY: the event was just read, and is acknowledged here only.
        unsafe { sys::ibv_ack_async_event(event) };
        Ok(Some(copy))
    }

    /// The next event; sleeps until there is one or the deadline has come. `None` for the latter.
    ///
    /// # Errors
    /// As for [`try_event`](Self::try_event); [`Call`](crate::Error::Call) naming `poll`.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Option<AsyncEvent>> {
        self.context.check_process()?;
        while fd::wait_readable(self.as_fd(), deadline)? {
            if let Some(event) = self.try_event()? {
                return Ok(Some(event)); // else another reader was faster
            }
        }
        Ok(None)
    }

    /// The device context whose events these are.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.context.async_fd()
    }
}

impl fmt::Debug for AsyncEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncEvents")
            .field("context", &self.context)
            .finish()
    }
}

/// Something that happened to a device, a port, a queue pair or a queue.
///
/// The names are those of ibv_get_async_event(3).
#[doc(alias = "ibv_event_type")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue overflowed or broke; completions are lost.
    #[doc(alias = "IBV_EVENT_CQ_ERR")]
    CqErr {
        /// Which one: see [`is_for_cq`](Self::is_for_cq).
        cq: ObjectId,
    },
    /// A queue pair failed and went to the error state.
    #[doc(alias = "IBV_EVENT_QP_FATAL")]
    QpFatal {
        /// Its number.
        qp_num: u32,
    },
    /// A queue pair got an invalid request.
    #[doc(alias = "IBV_EVENT_QP_REQ_ERR")]
    QpReqErr {
        /// Its number.
        qp_num: u32,
    },
    /// A peer tried what it may not.
    #[doc(alias = "IBV_EVENT_QP_ACCESS_ERR")]
    QpAccessErr {
        /// The number of the queue pair that was addressed.
        qp_num: u32,
    },
    /// The first message arrived at a queue pair in RTR.
    #[doc(alias = "IBV_EVENT_COMM_EST")]
    CommEst {
        /// Its number.
        qp_num: u32,
    },
    /// A send queue has drained, as asked for by going to SQD.
    #[doc(alias = "IBV_EVENT_SQ_DRAINED")]
    SqDrained {
        /// The number of its queue pair.
        qp_num: u32,
    },
    /// A connection moved to its alternate path.
    #[doc(alias = "IBV_EVENT_PATH_MIG")]
    PathMig {
        /// The number of the queue pair.
        qp_num: u32,
    },
    /// A connection could not move to its alternate path.
    #[doc(alias = "IBV_EVENT_PATH_MIG_ERR")]
    PathMigErr {
        /// The number of the queue pair.
        qp_num: u32,
    },
    /// A queue pair in the error state will take no more from its shared receive queue.
    #[doc(alias = "IBV_EVENT_QP_LAST_WQE_REACHED")]
    QpLastWqeReached {
        /// Its number.
        qp_num: u32,
    },
    /// A shared receive queue broke.
    #[doc(alias = "IBV_EVENT_SRQ_ERR")]
    SrqErr {
        /// Which one: see [`is_for_srq`](Self::is_for_srq).
        srq: ObjectId,
    },
    /// Fewer receives are left in a shared receive queue than the limit that was armed.
    #[doc(alias = "IBV_EVENT_SRQ_LIMIT_REACHED")]
    SrqLimitReached {
        /// Which one: see [`is_for_srq`](Self::is_for_srq).
        srq: ObjectId,
    },
    /// The device failed for good.
    #[doc(alias = "IBV_EVENT_DEVICE_FATAL")]
    DeviceFatal,
    /// A port went up.
    #[doc(alias = "IBV_EVENT_PORT_ACTIVE")]
    PortActive {
        /// Its number.
        port: u8,
    },
    /// A port went down.
    #[doc(alias = "IBV_EVENT_PORT_ERR")]
    PortErr {
        /// Its number.
        port: u8,
    },
    /// A port's local identifier changed.
    #[doc(alias = "IBV_EVENT_LID_CHANGE")]
    LidChange {
        /// Its number.
        port: u8,
    },
    /// A port's table of partition keys changed.
    #[doc(alias = "IBV_EVENT_PKEY_CHANGE")]
    PkeyChange {
        /// Its number.
        port: u8,
    },
    /// A port has another subnet manager.
    #[doc(alias = "IBV_EVENT_SM_CHANGE")]
    SmChange {
        /// Its number.
        port: u8,
    },
    /// The subnet manager asks a port's clients to register again.
    #[doc(alias = "IBV_EVENT_CLIENT_REREGISTER")]
    ClientReregister {
        /// Its number.
        port: u8,
    },
    /// A port's table of GIDs changed.
    #[doc(alias = "IBV_EVENT_GID_CHANGE")]
    GidChange {
        /// Its number.
        port: u8,
    },
    /// An event that this crate does not know, by C's number.
    Unknown(u32),
}

impl AsyncEvent {
    /// Whether it is about this completion queue.
    pub fn is_for_cq(&self, of: &CompletionQueue) -> bool {
        matches!(self, AsyncEvent::CqErr { cq } if cq.0 == of.as_raw().as_ptr().addr())
    }

    /// Whether it is about this shared receive queue.
    pub fn is_for_srq(&self, of: &Srq) -> bool {
        match self {
            AsyncEvent::SrqErr { srq } | AsyncEvent::SrqLimitReached { srq } => {
                srq.0 == of.as_raw().as_ptr().addr()
            }
            _ => false,
        }
    }

    /// The number of the queue pair it is about, if it is about one.
    pub fn qp_num(&self) -> Option<u32> {
        match *self {
            AsyncEvent::QpFatal { qp_num }
            | AsyncEvent::QpReqErr { qp_num }
            | AsyncEvent::QpAccessErr { qp_num }
            | AsyncEvent::CommEst { qp_num }
            | AsyncEvent::SqDrained { qp_num }
            | AsyncEvent::PathMig { qp_num }
            | AsyncEvent::PathMigErr { qp_num }
            | AsyncEvent::QpLastWqeReached { qp_num } => Some(qp_num),
            _ => None,
        }
    }

    /// # Safety
    /// If `raw` names an object, that object must be alive: the event is not acknowledged.
    unsafe fn from_raw(raw: &RawEvent) -> AsyncEvent {
        use sys::ibv_event_type as c;
        const CQ_ERR: u32 = c::IBV_EVENT_CQ_ERR as u32;
        const QP_FATAL: u32 = c::IBV_EVENT_QP_FATAL as u32;
        const QP_REQ_ERR: u32 = c::IBV_EVENT_QP_REQ_ERR as u32;
        const QP_ACCESS_ERR: u32 = c::IBV_EVENT_QP_ACCESS_ERR as u32;
        const COMM_EST: u32 = c::IBV_EVENT_COMM_EST as u32;
        const SQ_DRAINED: u32 = c::IBV_EVENT_SQ_DRAINED as u32;
        const PATH_MIG: u32 = c::IBV_EVENT_PATH_MIG as u32;
        const PATH_MIG_ERR: u32 = c::IBV_EVENT_PATH_MIG_ERR as u32;
        const DEVICE_FATAL: u32 = c::IBV_EVENT_DEVICE_FATAL as u32;
        const PORT_ACTIVE: u32 = c::IBV_EVENT_PORT_ACTIVE as u32;
        const PORT_ERR: u32 = c::IBV_EVENT_PORT_ERR as u32;
        const LID_CHANGE: u32 = c::IBV_EVENT_LID_CHANGE as u32;
        const PKEY_CHANGE: u32 = c::IBV_EVENT_PKEY_CHANGE as u32;
        const SM_CHANGE: u32 = c::IBV_EVENT_SM_CHANGE as u32;
        const SRQ_ERR: u32 = c::IBV_EVENT_SRQ_ERR as u32;
        const SRQ_LIMIT_REACHED: u32 = c::IBV_EVENT_SRQ_LIMIT_REACHED as u32;
        const QP_LAST_WQE_REACHED: u32 = c::IBV_EVENT_QP_LAST_WQE_REACHED as u32;
        const CLIENT_REREGISTER: u32 = c::IBV_EVENT_CLIENT_REREGISTER as u32;
        const GID_CHANGE: u32 = c::IBV_EVENT_GID_CHANGE as u32;

        // SAFETY: called only for types whose object is a queue pair, alive by contract.
        let qp_num = || unsafe { raw.qp_num() };
        match raw.event_type {
            CQ_ERR => AsyncEvent::CqErr {
                cq: raw.object_id(),
            },
            QP_FATAL => AsyncEvent::QpFatal { qp_num: qp_num() },
            QP_REQ_ERR => AsyncEvent::QpReqErr { qp_num: qp_num() },
            QP_ACCESS_ERR => AsyncEvent::QpAccessErr { qp_num: qp_num() },
            COMM_EST => AsyncEvent::CommEst { qp_num: qp_num() },
            SQ_DRAINED => AsyncEvent::SqDrained { qp_num: qp_num() },
            PATH_MIG => AsyncEvent::PathMig { qp_num: qp_num() },
            PATH_MIG_ERR => AsyncEvent::PathMigErr { qp_num: qp_num() },
            QP_LAST_WQE_REACHED => AsyncEvent::QpLastWqeReached { qp_num: qp_num() },
            SRQ_ERR => AsyncEvent::SrqErr {
                srq: raw.object_id(),
            },
            SRQ_LIMIT_REACHED => AsyncEvent::SrqLimitReached {
                srq: raw.object_id(),
            },
            DEVICE_FATAL => AsyncEvent::DeviceFatal,
            PORT_ACTIVE => AsyncEvent::PortActive { port: raw.port() },
            PORT_ERR => AsyncEvent::PortErr { port: raw.port() },
            LID_CHANGE => AsyncEvent::LidChange { port: raw.port() },
            PKEY_CHANGE => AsyncEvent::PkeyChange { port: raw.port() },
            SM_CHANGE => AsyncEvent::SmChange { port: raw.port() },
            CLIENT_REREGISTER => AsyncEvent::ClientReregister { port: raw.port() },
            GID_CHANGE => AsyncEvent::GidChange { port: raw.port() },
            other => AsyncEvent::Unknown(other),
        }
    }
}

/// Which object an event is about.
///
/// It is only good for comparing while the object lives: a later object may get the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectId(usize);

/// C's `ibv_async_event` with the type as an integer.
#[repr(C)]
struct RawEvent {
    element: Element,
    event_type: u32,
}

#[repr(C)]
union Element {
    object: *mut sys::ibv_qp, // or of another kind
    port_num: c_int,
}

const _: () = {
    assert!(size_of::<RawEvent>() == size_of::<sys::ibv_async_event>());
    assert!(align_of::<RawEvent>() == align_of::<sys::ibv_async_event>());
    assert!(offset_of!(RawEvent, element) == offset_of!(sys::ibv_async_event, element));
    assert!(offset_of!(RawEvent, event_type) == offset_of!(sys::ibv_async_event, event_type));
};

impl RawEvent {
    fn object_id(&self) -> ObjectId {
        // SAFETY: initialized as a pointer; C writes a pointer or an integer over it.
        ObjectId(unsafe { self.element.object }.addr())
    }

    fn port(&self) -> u8 {
        // SAFETY: initialized as a pointer; C writes a pointer or an integer over it.
        u8::try_from(unsafe { self.element.port_num }).unwrap_or(0)
    }

    /// # Safety
    /// The event must be about a queue pair, and that must be alive.
    unsafe fn qp_num(&self) -> u32 {
        // SAFETY: initialized as a pointer; C writes a pointer or an integer over it.
        let qp = unsafe { self.element.object };
        // SAFETY: a live queue pair by contract; the field does not change.
        unsafe { (*qp).qp_num }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port_event(event_type: u32, port_num: c_int) -> AsyncEvent {
        let mut raw = RawEvent {
            element: Element {
                object: ptr::null_mut(),
            },
            event_type,
        };
        raw.element.port_num = port_num;
        // SAFETY: none of the types used here names an object.
        unsafe { AsyncEvent::from_raw(&raw) }
    }

    #[test]
    fn number_newer_than_the_headers_is_unknown() {
        assert_eq!(port_event(20, 1), AsyncEvent::Unknown(20));
        assert_eq!(port_event(u32::MAX, 1), AsyncEvent::Unknown(u32::MAX));
    }

    #[test]
    fn port_events_carry_their_port() {
        assert_eq!(port_event(10, 2), AsyncEvent::PortErr { port: 2 });
        assert_eq!(port_event(18, 1), AsyncEvent::GidChange { port: 1 });
        assert_eq!(port_event(8, 0), AsyncEvent::DeviceFatal);
    }
}
