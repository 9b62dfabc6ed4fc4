//! An io_uring of eight entries, without a library: one request at a time.
use std::{
    io, ptr,
    sync::atomic::{AtomicU32, Ordering},
};

use super::sys::{self, Fd};

pub const SETUP_SQPOLL: u32 = 2;
pub const SQE_FIXED_FILE: u8 = 1;
pub const SQE_ASYNC: u8 = 1 << 4;
const OP_OPENAT: u8 = 18;
const OP_CLOSE: u8 = 19;
const OP_FIXED_FD_INSTALL: u8 = 54;
const REGISTER_FILES: u32 = 2;
const REGISTER_FILES_UPDATE: u32 = 6;
const ENTER_GETEVENTS: u32 = 1;
const ENTER_SQ_WAKEUP: u32 = 2;
const OFF_CQ_RING: i64 = 0x800_0000;
const OFF_SQES: i64 = 0x1000_0000;

#[repr(C)]
#[derive(Default)]
struct SqOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    reserved: [u32; 3],
}

#[repr(C)]
#[derive(Default)]
struct CqOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    overflow: u32,
    cqes: u32,
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: SqOffsets,
    cq: CqOffsets,
}

/// A request, as the kernel lays it out.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Request {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    length: u32,
    op_flags: u32,
    user_data: u64,
    buffer: u16,
    personality: u16,
    file_index: u32,
    padding: [u64; 2],
}

pub struct Ring {
    fd: Fd,
    params: Params,
    sq: *mut u8,
    cq: *mut u8,
    requests: *mut Request,
}

// SAFETY: the queues are shared with the kernel and may be used by any thread, one at a time, which a mutable borrow or a
// lock sees to.
unsafe impl Send for Ring {}

fn map(fd: Fd, length: usize, offset: i64) -> io::Result<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    // SAFETY: the kernel chooses the address of the ring's own memory.
    let address = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, offset) };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address.cast()) }
}

impl Ring {
    pub fn new(flags: u32) -> io::Result<Self> {
        let mut params = Params { flags, ..Params::default() };
        // SAFETY: the structure has the kernel's layout and outlives the call.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, &raw mut params) } as Fd;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let sq = map(fd, params.sq.array as usize + 4 * params.sq_entries as usize, 0)?;
        let cq = map(fd, params.cq.cqes as usize + 16 * params.cq_entries as usize, OFF_CQ_RING)?;
        let requests = map(fd, 64 * params.sq_entries as usize, OFF_SQES)?.cast();
        Ok(Self { fd, params, sq, cq, requests })
    }

    pub fn descriptor(&self) -> Fd {
        self.fd
    }

    /// The ring has another number, or one more.
    pub fn use_descriptor(&mut self, fd: Fd) {
        self.fd = fd;
    }

    /// Puts an open file into a free slot of the ring's table.
    pub fn put(ring: Fd, slot: u32, fd: Fd) -> io::Result<()> {
        #[repr(C)]
        struct Update {
            offset: u32,
            reserved: u32,
            fds: u64,
        }
        let update = Update { offset: slot, reserved: 0, fds: (&raw const fd) as u64 };
        // SAFETY: the structure has the kernel's layout; it and the one descriptor in it outlive the call.
        let ret =
            unsafe { libc::syscall(libc::SYS_io_uring_register, ring, REGISTER_FILES_UPDATE, &raw const update, 1) };
        if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn word(base: *mut u8, offset: u32) -> &'static AtomicU32 {
        // SAFETY: the offset comes from the kernel and names an aligned word in the mapped ring, which is never unmapped.
        unsafe { AtomicU32::from_ptr(base.add(offset as usize).cast()) }
    }

    /// Hands in one request and waits for its result: a descriptor, zero or a negative error number.
    fn submit(&self, request: Request) -> io::Result<i32> {
        let Self { fd, params, sq, cq, requests } = self;
        let tail = Self::word(*sq, params.sq.tail);
        let slot = tail.load(Ordering::Relaxed) & Self::word(*sq, params.sq.ring_mask).load(Ordering::Relaxed);
        // SAFETY: the slot is below the number of entries, and the kernel does not look at it before the tail moves.
        unsafe { requests.add(slot as usize).write(request) };
        Self::word(*sq, params.sq.array + 4 * slot).store(slot, Ordering::Relaxed);
        tail.fetch_add(1, Ordering::Release);
        let wakeup = if params.flags & SETUP_SQPOLL != 0 { ENTER_SQ_WAKEUP } else { 0 };
        // SAFETY: no signal mask is passed.
        let ret = unsafe { libc::syscall(libc::SYS_io_uring_enter, *fd, 1, 1, ENTER_GETEVENTS | wakeup, 0, 0) };
        if ret < 0 {
            return Err(io::Error::last_os_error());
        }
        let head = Self::word(*cq, params.cq.head);
        for _ in 0..2000 {
            let at = head.load(Ordering::Relaxed);
            if at != Self::word(*cq, params.cq.tail).load(Ordering::Acquire) {
                let index = at & Self::word(*cq, params.cq.ring_mask).load(Ordering::Relaxed);
                let result = Self::word(*cq, params.cq.cqes + 16 * index + 8).load(Ordering::Relaxed) as i32;
                head.fetch_add(1, Ordering::Release);
                return Ok(result);
            }
            sys::sleep(5);
        }
        Err(io::Error::other("no completion within ten seconds"))
    }

    fn result(&self, request: Request) -> io::Result<i32> {
        let result = self.submit(request)?;
        if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
    }

    /// Opens the path; into slot `direct` of the ring's own table, or as a descriptor.
    pub fn open(&self, path: &str, flags: u8, direct: Option<u32>) -> io::Result<Fd> {
        let path = sys::cstr(path);
        self.result(Request {
            opcode: OP_OPENAT,
            flags,
            fd: libc::AT_FDCWD,
            address: path.as_ptr() as u64,
            op_flags: libc::O_RDWR as u32,
            file_index: direct.map_or(0, |slot| slot + 1),
            ..Request::default()
        })
    }

    pub fn close(&self, fd: Fd, flags: u8) -> io::Result<i32> {
        self.result(Request { opcode: OP_CLOSE, flags, fd, ..Request::default() })
    }

    pub fn close_direct(&self, slot: u32) -> io::Result<i32> {
        self.result(Request { opcode: OP_CLOSE, file_index: slot + 1, ..Request::default() })
    }

    /// Makes a descriptor of the file in the slot.
    pub fn install(&self, slot: i32) -> io::Result<Fd> {
        self.result(Request { opcode: OP_FIXED_FD_INSTALL, flags: SQE_FIXED_FILE, fd: slot, ..Request::default() })
    }

    /// Gives the ring its own table with these files; -1 leaves a slot empty.
    pub fn register(&self, fds: &[Fd]) -> io::Result<()> {
        // SAFETY: the slice outlives the call.
        let ret = unsafe {
            libc::syscall(libc::SYS_io_uring_register, self.fd, REGISTER_FILES, fds.as_ptr(), fds.len() as u32)
        };
        if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Closes the ring. Its memory stays mapped, and a mapping keeps a ring alive, so that goes too.
    pub fn end(self) {
        let Self { fd, params, sq, cq, requests } = self;
        // SAFETY: the three areas were mapped with these lengths and are not used after this.
        unsafe {
            libc::munmap(sq.cast(), params.sq.array as usize + 4 * params.sq_entries as usize);
            libc::munmap(cq.cast(), params.cq.cqes as usize + 16 * params.cq_entries as usize);
            libc::munmap(requests.cast(), 64 * params.sq_entries as usize);
        }
        sys::close(fd);
    }
}
