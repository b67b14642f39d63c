//! Options of an id, and what else librdmacm has beside connections.
#![allow(unsafe_code)] // defines C symbols; reads the callers' option values

use libc::{c_int, c_void};
use rdma_sys::*;

use super::id::State;
use crate::world::{Outcome, World, enter, minus_one};

const LEVEL_ID: c_int = 0;
const TOS: c_int = 0;
const REUSE_ADDRESS: c_int = 1;
const AF_ONLY: c_int = 2;
const ACK_TIMEOUT: c_int = 3;

impl World {
    fn set_option(
        &mut self,
        id: *mut rdma_cm_id,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> Outcome<()> {
        let record = self.id(id)?;
        if level != LEVEL_ID {
            return Err(libc::ENOSYS);
        }
        let number = || {
            value
                .try_into()
                .map(i32::from_ne_bytes)
                .map_err(|_| libc::EINVAL)
        };
        match (name, value) {
            (TOS, [_]) => {}
            (ACK_TIMEOUT, &[timeout]) if timeout < 32 => record.ack_timeout = Some(timeout),
            (TOS | ACK_TIMEOUT, _) => return Err(libc::EINVAL),
            (REUSE_ADDRESS, _) => {
                let on = number()? != 0;
                if record.state != State::Idle {
                    return Err(libc::EINVAL);
                }
                record.reuse_address = on;
            }
            (AF_ONLY, _) => record.v6_only = number()? != 0,
            _ => return Err(libc::ENOSYS),
        }
        Ok(())
    }
}

/// `rdma_set_option(3)`: the options of level `RDMA_OPTION_ID`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    optname: c_int,
    optval: *mut c_void,
    optlen: usize,
) -> c_int {
    minus_one(enter("rdma_set_option", |w| {
        if optval.is_null() || optlen == 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: not null, and C requires `optlen` readable bytes there.
        let value = unsafe { std::slice::from_raw_parts(optval.cast::<u8>(), optlen) };
        w.set_option(id, level, optname, value)
    }))
}

/// `rdma_set_local_ece(3)`: accepted and without effect.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_set_local_ece(
    id: *mut rdma_cm_id,
    _ece: *mut ibv_ece,
) -> c_int {
    minus_one(enter("rdma_set_local_ece", |w| w.id(id).map(|_| ())))
}

/// `rdma_get_remote_ece(3)`: no peer has any.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rdma_get_remote_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    minus_one(enter("rdma_get_remote_ece", |w| {
        w.id(id)?;
        // SAFETY: C requires `ece` to be writable.
        unsafe {
            ece.write(ibv_ece {
                vendor_id: 0,
                options: 0,
                comp_mask: 0,
            })
        };
        Ok(())
    }))
}
