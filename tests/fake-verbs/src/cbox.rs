//! C structs on the heap: what the fake hands out as `ibv_qp *` and the like.
#![allow(unsafe_code)] // allocates, fills and frees the structs C callers hold pointers to

use std::mem::MaybeUninit;

/// Owns one C struct, or an array; its users hold raw pointers to it until it is dropped.
pub(crate) struct CBox<T: ?Sized>(*mut T);

// SAFETY: the pointee is plain C data; the fabric's lock guards the fake's accesses, and C callers synchronise theirs as
// the C library demands.
unsafe impl<T: ?Sized> Send for CBox<T> {}

impl<T> CBox<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Box::into_raw(Box::new(value)))
    }

    pub(crate) fn addr(&self) -> usize {
        self.0.addr()
    }
}

impl CBox<[u8]> {
    pub(crate) fn bytes(bytes: &[u8]) -> Self {
        Self(Box::into_raw(bytes.into()))
    }
}

impl<T: ?Sized> CBox<T> {
    pub(crate) fn ptr(&self) -> *mut T {
        self.0
    }
}

impl<T: ?Sized> Drop for CBox<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from Box::into_raw in a constructor and is freed only here.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// An all-zero C struct.
///
/// # Safety
/// All-zero bytes must be a valid `T`.
pub(crate) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller promises that zero is valid for T.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Writes one field of a C struct through its pointer, making no reference to the struct.
macro_rules! put {
    ($ptr:expr, $($field:ident).+, $value:expr) => {{
        let ptr = $ptr;
        let value = $value;
        // SAFETY: `ptr` points to a live struct of the fake, or to the caller's output struct, which C requires to be writable.
        unsafe { (&raw mut (*ptr).$($field).+).write(value) }
    }};
}
/// Reads one field of a C struct through its pointer, making no reference to the struct.
macro_rules! get {
    ($ptr:expr, $($field:ident).+) => {{
        let ptr = $ptr;
        // SAFETY: `ptr` points to a live struct of the fake, or to the caller's input struct, which C requires to be readable.
        unsafe { (&raw const (*ptr).$($field).+).read() }
    }};
}
pub(crate) use {get, put};
