//! The one door to C: what we use of `rdma-sys`, what it lacks, and the three ways its functions
//! report an error.
//!
//! libibverbs has three conventions (the man page of each function says which). They are turned
//! into [`Error`] here and nowhere else.

#![allow(unsafe_code)] // looks for the extended operations behind a context; sets errno

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

use crate::error::Error;

pub(crate) use rdma_sys::*;

/// For functions that return 0 or a positive errno: `ibv_modify_*`, `ibv_destroy_*`,
/// `ibv_dereg_mr`, `ibv_query_*`, `ibv_req_notify_cq`.
///
/// A few providers return -1 and set errno instead, or the errno negated (rxe, when it refuses a
/// post); all are understood.
#[inline]
pub(crate) fn check(call: &'static str, ret: c_int) -> Result<(), Error> {
    if ret == 0 {
        Ok(())
    } else {
        Err(Error::Call {
            call,
            source: error_of(ret),
        })
    }
}

/// For functions that return -1 and set errno: `ibv_get_cq_event`, `ibv_get_async_event`,
/// `ibv_query_gid`, `ibv_query_pkey`.
#[inline]
pub(crate) fn check_minus_one(call: &'static str, ret: c_int) -> Result<(), Error> {
    if ret == 0 {
        Ok(())
    } else {
        Err(Error::last(call))
    }
}

/// For functions that return a null pointer and set errno: `ibv_create_*`, `ibv_alloc_*`,
/// `ibv_reg_*`, `ibv_open_device`.
#[inline]
pub(crate) fn check_null<T>(call: &'static str, ptr: *mut T) -> Result<NonNull<T>, Error> {
    NonNull::new(ptr).ok_or_else(|| Error::last(call))
}

/// Sets errno to 0 before a call that does not always set it on failure.
pub(crate) fn clear_errno() {
    // SAFETY: takes nothing.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the calling thread's own errno, which nobody else touches.
    unsafe { errno.write(0) };
}

/// The error behind a return value that is not zero: an errno of either sign, or errno itself for
/// -1.
#[cold]
pub(crate) fn error_of(ret: c_int) -> io::Error {
    match ret {
        -1 => io::Error::last_os_error(),
        errno => io::Error::from_raw_os_error(errno.saturating_abs()),
    }
}

/// The extended operations that the library keeps in front of a context, if it has any.
///
/// rdma-sys looks for them with the wrong marker (`u32::MAX` for C's `UINTPTR_MAX`) and so never
/// finds them.
///
/// # Safety
/// `context` must be open.
unsafe fn extended(context: *mut ibv_context) -> Option<*mut verbs_context> {
    // SAFETY: open by contract; the field does not change.
    let marker = unsafe { (*context).abi_compat };
    let offset = std::mem::offset_of!(verbs_context, context);
    (marker.addr() == usize::MAX).then(|| context.wrapping_byte_sub(offset).cast())
}

/// The operation in a field of a `verbs_context`, if the library and the provider have it.
macro_rules! extended_op {
    ($context:expr, $field:ident) => {{
        // SAFETY: the caller of the enclosing function vouches for an open context.
        let extended = unsafe { extended($context) }?;
        // SAFETY: the marker says that the context lies in a verbs_context.
        let size = unsafe { (*extended).sz };
        if size < size_of::<verbs_context>() - std::mem::offset_of!(verbs_context, $field) {
            return None; // a library older than this operation
        }
        // SAFETY: the size says that the field is there.
        unsafe { (*extended).$field }
    }};
}

/// `ibv_modify_cq`, which is an inline function in C. `None` if there is no such operation.
///
/// # Safety
/// `cq` must be a live completion queue, and `attr` valid.
pub(crate) unsafe fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> Option<c_int> {
    // SAFETY: `cq` is alive by contract; the field does not change.
    let context = unsafe { (*cq).context };
    let modify_cq = extended_op!(context, modify_cq)?;
    // SAFETY: the provider's function, with arguments valid by contract.
    Some(unsafe { modify_cq(cq, attr) })
}

/// `ibv_query_device_ex`, which is an inline function in C. `None` if there is no such operation.
///
/// # Safety
/// `context` must be open, and `attr` zeroed.
pub(crate) unsafe fn query_device_ex(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr_ex,
) -> Option<c_int> {
    let query = extended_op!(context, query_device_ex)?;
    let size = size_of::<ibv_device_attr_ex>();
    // SAFETY: the provider's function, with arguments valid by contract and their true size.
    Some(unsafe { query(context, std::ptr::null(), attr, size) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positive_return_is_the_errno() {
        let error = check("ibv_modify_qp", libc::EINVAL).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL));
        assert!(error.to_string().starts_with("ibv_modify_qp"));
    }

    #[test]
    fn negative_return_is_the_errno_too_unless_it_is_minus_one() {
        // SAFETY: takes nothing.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the calling thread's own errno.
        unsafe { *errno = libc::ENOMEM };
        assert_eq!(error_of(-libc::EINVAL).raw_os_error(), Some(libc::EINVAL));
        assert_eq!(error_of(-1).raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn zero_is_success_in_both_integer_conventions() {
        assert!(check("x", 0).is_ok());
        assert!(check_minus_one("x", 0).is_ok());
    }

    #[test]
    fn null_is_an_error_and_a_pointer_is_itself() {
        let mut value = 1u8;
        assert_eq!(
            check_null("x", &raw mut value).unwrap().as_ptr(),
            &raw mut value
        );
        assert!(check_null::<u8>("x", std::ptr::null_mut()).is_err());
    }
}
