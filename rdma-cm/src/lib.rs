//! Safe librdmacm.

mod addr;
mod channel;
mod deadline;
mod device;
mod error;
mod event;
mod id;
mod lease;
mod option;
mod param;
mod state;
mod sys;

pub use channel::EventChannel;
pub use device::{DeviceAddress, context_for, device_addresses};
pub use error::{CmError, Result, Step};
pub use event::{EventStatus, EventType, RejectReason, SidrStatus};
pub use id::{CmEvent, CmId, PortSpace, RawParam, UdParam};
pub use option::{IdOptions, ListenOptions};
pub use param::{
    ConnParam, MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, Negotiated, RequestParam,
};
