//! Mappings, and memory as such.

use super::{Fd, io, must, ptr};

/// A mapping of one page, by address.
#[derive(Clone, Copy)]
pub struct Page(usize);

pub fn map(fd: Fd, protection: i32, flags: i32, offset: i64) -> io::Result<Page> {
    // SAFETY: the kernel chooses the address; nothing else uses the new page.
    let address = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, fd, offset) };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Page(address as usize)) }
}

pub const PAGE: usize = 4096;

/// Maps so many pages privately at an address where nothing is.
pub fn map_at(address: usize, pages: usize, fd: Fd) {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the kernel refuses an address where something is mapped.
    let got = unsafe { libc::mmap(address as *mut _, pages * PAGE, libc::PROT_READ, flags, fd, 0) };
    assert_eq!(got as usize, address, "mmap: {}", io::Error::last_os_error());
}

/// Unmaps what [`map_at`] has mapped.
pub fn unmap_at(address: usize, pages: usize) {
    // SAFETY: nothing refers to these pages.
    must("munmap", unsafe { libc::munmap(address as *mut _, pages * PAGE) }.into());
}

/// Memory that is there and not only promised. It is never given back.
pub fn take_memory(bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    // SAFETY: the kernel chooses the address; nothing refers to the mapping.
    let address = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub fn unmap(page: Page) {
    // SAFETY: the page came from `map` and nothing refers to it.
    must("munmap", unsafe { libc::munmap(page.0 as *mut _, 4096) }.into());
}
