//! Memory that a region owns.
//!
//! It is held as a raw pointer, never as a `Box<[u8]>` or `Vec<u8>`: those claim to be the only way
//! to the bytes whenever they are moved, which is false while the device or a slice points there.
//! The pointer's provenance is exposed, since C, and the device behind it, turn the number back
//! into a pointer.

#![allow(unsafe_code)] // allocates and frees

use std::alloc::{self, Layout};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use bytes::BytesMut;

use crate::error::{Allowed, Error, Result};

/// How memory for a region is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Pages {
    /// The system's normal pages.
    #[default]
    Normal,
    /// Huge pages of the system's default size, from the pool that `vm.nr_hugepages` sets. The
    /// length is rounded up to whole huge pages.
    Huge,
}

/// Owned bytes at a fixed address, freed on drop.
pub(crate) struct Memory {
    ptr: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    Heap(Layout),
    Mapped(usize),
    Vec(usize),
    Bytes { _owner: BytesMut },
}

// SAFETY: plain bytes, owned; moving the owner to another thread moves nothing else.
unsafe impl Send for Memory {}
// SAFETY: through `&Memory` only the address and the length can be read.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed memory that starts on a page of its own and shares its last page with nobody.
    pub(crate) fn zeroed(len: usize, pages: Pages) -> Result<Memory> {
        if len == 0 {
            return Err(Error::Config {
                field: "len",
                asked: 0,
                allowed: Allowed::AtLeast(1),
            });
        }
        match pages {
            Pages::Normal => Memory::heap(len),
            Pages::Huge => Memory::huge(len),
        }
    }

    fn heap(len: usize) -> Result<Memory> {
        let too_long = || Error::Config {
            field: "len",
            asked: len as u64,
            allowed: Allowed::AtMost(isize::MAX as u64),
        };
        let page = page_size();
        let size = len.checked_next_multiple_of(page).ok_or_else(too_long)?;
        let layout = Layout::from_size_align(size, page).map_err(|_| too_long())?;
        // SAFETY: the layout's size is not zero, `len` being at least 1.
        let ptr = unsafe { alloc::alloc_zeroed(layout) };
        let ptr = NonNull::new(ptr).ok_or_else(|| no_memory("alloc"))?;
        Ok(Memory::new(ptr, len, Owner::Heap(layout)))
    }

    fn huge(len: usize) -> Result<Memory> {
        let size = len
            .checked_next_multiple_of(huge_page_size())
            .ok_or_else(|| no_memory("mmap"))?;
        let flags =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_POPULATE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing
        // that exists.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, -1, 0) };
        if ptr == libc::MAP_FAILED {
            return Err(Error::last("mmap"));
        }
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| no_memory("mmap"))?;
        Ok(Memory::new(ptr, size, Owner::Mapped(size)))
    }

    /// Takes over the initialized part of a `Vec`.
    pub(crate) fn from_vec(vec: Vec<u8>) -> Memory {
        let mut vec = ManuallyDrop::new(vec);
        let ptr = NonNull::new(vec.as_mut_ptr()).unwrap_or(NonNull::dangling()); // never null
        Memory::new(ptr, vec.len(), Owner::Vec(vec.capacity()))
    }

    /// Takes over the initialized part of a `BytesMut`, which is its only owner.
    pub(crate) fn from_bytes(mut bytes: BytesMut) -> Memory {
        let ptr = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling()); // never null
        let len = bytes.len();
        Memory::new(ptr, len, Owner::Bytes { _owner: bytes })
    }

    fn new(ptr: NonNull<u8>, len: usize, owner: Owner) -> Memory {
        ptr.as_ptr().expose_provenance();
        Memory { ptr, len, owner }
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: allocated in `heap` with this layout; dropped once, with no slice left.
            Owner::Heap(layout) => unsafe { alloc::dealloc(self.ptr.as_ptr(), layout) },
            Owner::Mapped(size) => {
                // SAFETY: mapped in `huge` with this size; dropped once, with no slice left.
                let ret = unsafe { libc::munmap(self.ptr.as_ptr().cast(), size) };
                if ret != 0 {
                    log::error!("{}; {size} bytes stay mapped", Error::last("munmap"));
                }
            }
            Owner::Vec(capacity) => {
                // SAFETY: the three parts of a Vec that `from_vec` took apart and did not drop.
                drop(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), self.len, capacity) });
            }
            Owner::Bytes { .. } => {} // dropped with the field
        }
    }
}

#[cold]
fn no_memory(call: &'static str) -> Error {
    Error::Call {
        call,
        source: std::io::Error::from_raw_os_error(libc::ENOMEM),
    }
}

pub(crate) fn page_size() -> usize {
    // SAFETY: asks for a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size)
        .ok()
        .filter(|size| size.is_power_of_two())
        .unwrap_or(4096)
}

fn huge_page_size() -> usize {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    parse_huge_page_size(&meminfo).unwrap_or(2 << 20)
}

fn parse_huge_page_size(meminfo: &str) -> Option<usize> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).filter(|size| size.is_power_of_two())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_memory_is_page_aligned() {
        let memory = Memory::zeroed(5, Pages::Normal).unwrap();
        assert_eq!(memory.len(), 5);
        assert_eq!(memory.ptr().as_ptr().addr() % page_size(), 0);
    }

    #[test]
    fn empty_and_absurd_lengths_are_refused() {
        assert!(Memory::zeroed(0, Pages::Normal).is_err());
        assert!(Memory::zeroed(usize::MAX, Pages::Normal).is_err());
    }

    #[test]
    fn vec_keeps_its_bytes_and_is_freed() {
        let mut vec = Vec::with_capacity(100);
        vec.extend_from_slice(b"hello");
        let at = vec.as_ptr();
        let memory = Memory::from_vec(vec);
        assert_eq!((memory.ptr().as_ptr().cast_const(), memory.len()), (at, 5));
    }

    #[test]
    fn size_of_huge_pages_is_read_from_meminfo() {
        assert_eq!(
            parse_huge_page_size("A: 1\nHugepagesize:       2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(
            parse_huge_page_size("Hugepagesize:   1048576 kB\n"),
            Some(1 << 30)
        );
        assert_eq!(parse_huge_page_size("nothing"), None);
    }
}
