//! The one module that makes raw bpf(2) calls: what aya 0.14 has no call for (iterators over one process, pinned
//! cgroup links, batches, test runs), and map access that is shared by pinned and by freshly loaded maps.

use std::{
    ffi::CString,
    io,
    mem::{MaybeUninit, offset_of},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::Pod;
use aya_obj::generated::bpf_prog_info;
use rustix::io::Errno;

/// Commands of bpf(2), include/uapi/linux/bpf.h.
mod command {
    pub(super) const MAP_LOOKUP_ELEM: i64 = 1;
    pub(super) const MAP_UPDATE_ELEM: i64 = 2;
    pub(super) const MAP_DELETE_ELEM: i64 = 3;
    pub(super) const OBJ_PIN: i64 = 6;
    pub(super) const OBJ_GET: i64 = 7;
    pub(super) const PROG_TEST_RUN: i64 = 10;
    pub(super) const OBJ_GET_INFO_BY_FD: i64 = 15;
    pub(super) const MAP_LOOKUP_BATCH: i64 = 24;
    pub(super) const LINK_CREATE: i64 = 28;
    pub(super) const ITER_CREATE: i64 = 33;
}

/// Attach types.
const CGROUP_DEVICE: u32 = 6;
const TRACE_ITER: u32 = 28;

/// Flags of an update.
pub const ANY: u64 = 0;
pub const NOEXIST: u64 = 1;

fn bpf<A>(command: i64, attributes: &mut A) -> io::Result<i64> {
    // SAFETY: the attribute is repr(C), fully initialised, and its size is passed; pointers in it outlive the call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, (&raw mut *attributes).cast::<libc::c_void>(), size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(raw: i64) -> OwnedFd {
    // SAFETY: bpf(2) has just returned this descriptor, nobody else has it.
    unsafe { OwnedFd::from_raw_fd(raw as i32) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_nul| io::ErrorKind::InvalidInput.into())
}

#[repr(C)]
struct Object {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Opens what is pinned at `path`.
pub fn get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    bpf(command::OBJ_GET, &mut Object { path: path.as_ptr() as u64, fd: 0, flags: 0 }).map(owned)
}

pub fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attributes = Object { path: path.as_ptr() as u64, fd: fd.as_raw_fd() as u32, flags: 0 };
    bpf(command::OBJ_PIN, &mut attributes).map(drop)
}

#[repr(C)]
struct LinkCreate {
    prog: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    iter_info: u64,
    iter_info_len: u32,
    _pad: u32,
}

/// `union bpf_iter_link_info`, the member for tasks (since 6.1).
#[repr(C)]
struct TaskTarget {
    tid: u32,
    pid: u32,
    pidfd: u32,
    _pad: u32,
}

/// Attaches a `cgroup_device` program; the link ends with its last descriptor or pin.
pub fn link_cgroup_device(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attributes = LinkCreate {
        prog: program.as_raw_fd() as u32,
        target: cgroup.as_raw_fd() as u32,
        attach_type: CGROUP_DEVICE,
        flags: 0,
        iter_info: 0,
        iter_info_len: 0,
        _pad: 0,
    };
    bpf(command::LINK_CREATE, &mut attributes).map(owned)
}

#[repr(C)]
struct IterCreate {
    link: u32,
    flags: u32,
}

/// Which tasks an iterator visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tasks {
    All,
    /// The threads of one process (since 6.1).
    Process(u32),
    /// One thread (since 6.1).
    Thread(u32),
}

/// Runs an iterator program to its end and returns its records.
pub fn iterate<T: Pod>(program: BorrowedFd<'_>, tasks: Tasks) -> io::Result<Vec<T>> {
    const LITTLE: usize = 1 << 12;
    const ROOM: usize = 1 << 15;
    let (tid, pid) = match tasks {
        Tasks::All => (0, 0),
        Tasks::Process(tgid) => (0, tgid),
        Tasks::Thread(tid) => (tid, 0),
    };
    let restricted = tasks != Tasks::All;
    let target = TaskTarget { tid, pid, pidfd: 0, _pad: 0 };
    let mut attributes = LinkCreate {
        prog: program.as_raw_fd() as u32,
        target: 0,
        attach_type: TRACE_ITER,
        flags: 0,
        iter_info: if restricted { (&raw const target) as u64 } else { 0 },
        iter_info_len: if restricted { size_of::<TaskTarget>() as u32 } else { 0 },
        _pad: 0,
    };
    let link = owned(bpf(command::LINK_CREATE, &mut attributes)?);
    let iterator = owned(bpf(command::ITER_CREATE, &mut IterCreate { link: link.as_raw_fd() as u32, flags: 0 })?);
    // Room for what one process has, or for all that the kernel gives at a time (eight pages, kernel/bpf/bpf_iter.c).
    let mut bytes: Vec<u8> = Vec::with_capacity(if restricted { LITTLE } else { ROOM });
    loop {
        if bytes.capacity() - bytes.len() < LITTLE {
            bytes.reserve(ROOM);
        }
        match rustix::io::read(&iterator, rustix::buffer::spare_capacity(&mut bytes)) {
            Ok(0) => break,
            // The kernel gives up the processor after a million objects without a record (MAX_ITER_OBJECTS).
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(records(&bytes))
}

/// Whole records out of bytes; a rest shorter than one is left out.
pub fn records<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes
        .chunks_exact(size_of::<T>())
        // SAFETY: Pod: every bit pattern is a value; the chunk has the size; read_unaligned needs no alignment.
        .map(|chunk| unsafe { std::ptr::read_unaligned(chunk.as_ptr().cast::<T>()) })
        .collect()
}

#[repr(C)]
struct Element {
    map: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

pub fn lookup<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = MaybeUninit::<V>::zeroed();
    let mut attributes = Element {
        map: map.as_raw_fd() as u32,
        _pad: 0,
        key: (&raw const *key) as u64,
        value: value.as_mut_ptr() as u64,
        flags: 0,
    };
    match bpf(command::MAP_LOOKUP_ELEM, &mut attributes) {
        // SAFETY: zeroed, then filled by the kernel with the map's value size, which `Handles` checked; Pod.
        Ok(_) => Ok(Some(unsafe { value.assume_init() })),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// One element of a per-CPU array, all CPUs added up.
pub fn lookup_per_cpu_sum(map: BorrowedFd<'_>, index: u32, cpus: usize) -> io::Result<u64> {
    let mut values = vec![0_u64; cpus];
    let mut attributes = Element {
        map: map.as_raw_fd() as u32,
        _pad: 0,
        key: (&raw const index) as u64,
        value: values.as_mut_ptr() as u64,
        flags: 0,
    };
    bpf(command::MAP_LOOKUP_ELEM, &mut attributes)?;
    Ok(values.into_iter().sum())
}

/// `Ok(false)`: the key was there and `NOEXIST` was asked for.
pub fn update<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, value: &V, flags: u64) -> io::Result<bool> {
    let mut attributes = Element {
        map: map.as_raw_fd() as u32,
        _pad: 0,
        key: (&raw const *key) as u64,
        value: (&raw const *value) as u64,
        flags,
    };
    match bpf(command::MAP_UPDATE_ELEM, &mut attributes) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// `Ok(false)`: there was no such key.
pub fn delete<K: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<bool> {
    let mut attributes =
        Element { map: map.as_raw_fd() as u32, _pad: 0, key: (&raw const *key) as u64, value: 0, flags: 0 };
    match bpf(command::MAP_DELETE_ELEM, &mut attributes) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

#[repr(C)]
struct Batch {
    from: u64,
    next: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// All elements of a hash map. Elements that come or go meanwhile may or may not be in it.
pub fn dump<K: Pod, V: Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    // More elements than this in one hash bucket would be ENOSPC.
    let mut room = 512_usize;
    let mut all = Vec::new();
    let mut position = 0_u32;
    let mut started = false;
    loop {
        let mut keys = Vec::<MaybeUninit<K>>::with_capacity(room);
        let mut values = Vec::<MaybeUninit<V>>::with_capacity(room);
        let mut next = 0_u32;
        let mut attributes = Batch {
            from: if started { (&raw const position) as u64 } else { 0 },
            next: (&raw mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: room as u32,
            map: map.as_raw_fd() as u32,
            element_flags: 0,
            flags: 0,
        };
        let result = bpf(command::MAP_LOOKUP_BATCH, &mut attributes);
        let end = match &result {
            Ok(_) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                room *= 2;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return result.map(|_| all),
        };
        let filled = attributes.count as usize;
        // SAFETY: the kernel has filled `count` elements, at most as many as there was room for; Pod.
        unsafe {
            keys.set_len(filled);
            values.set_len(filled);
            all.extend(keys.into_iter().zip(values).map(|(key, value)| (key.assume_init(), value.assume_init())));
        }
        if end {
            return Ok(all);
        }
        position = next;
        started = true;
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    fd: u32,
    len: u32,
    at: u64,
}

/// The beginning of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapShape {
    pub kind: u32,
    pub id: u32,
    pub key_size: u32,
    pub value_size: u32,
    pub max_entries: u32,
    pub flags: u32,
}

pub fn map_shape(map: BorrowedFd<'_>) -> io::Result<MapShape> {
    let mut shape = MapShape::default();
    let mut attributes =
        Info { fd: map.as_raw_fd() as u32, len: size_of::<MapShape>() as u32, at: (&raw mut shape) as u64 };
    bpf(command::OBJ_GET_INFO_BY_FD, &mut attributes)?;
    Ok(shape)
}

/// How often the kernel skipped the program because it was already running on that CPU; `None` before 5.12.
pub fn skipped(program: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    const MISSES: usize = offset_of!(bpf_prog_info, recursion_misses);
    const LEN: usize = size_of::<bpf_prog_info>();
    let mut info = [0_u64; LEN / 8];
    let mut attributes = Info { fd: program.as_raw_fd() as u32, len: LEN as u32, at: info.as_mut_ptr() as u64 };
    bpf(command::OBJ_GET_INFO_BY_FD, &mut attributes)?;
    Ok((attributes.len as usize >= MISSES + 8).then(|| info[MISSES / 8]))
}

/// Runs a raw-tracepoint program once with the given arguments (since 5.10) and returns what it returned.
pub fn run_raw_tracepoint(program: BorrowedFd<'_>, arguments: &[u64]) -> io::Result<u32> {
    #[repr(C)]
    struct TestRun {
        prog: u32,
        retval: u32,
        data_size_in: u32,
        data_size_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
        ctx_size_in: u32,
        ctx_size_out: u32,
        ctx_in: u64,
        ctx_out: u64,
        flags: u32,
        cpu: u32,
    }
    let mut attributes = TestRun {
        prog: program.as_raw_fd() as u32,
        retval: 0,
        data_size_in: 0,
        data_size_out: 0,
        data_in: 0,
        data_out: 0,
        repeat: 0,
        duration: 0,
        ctx_size_in: size_of_val(arguments) as u32,
        ctx_size_out: 0,
        ctx_in: arguments.as_ptr() as u64,
        ctx_out: 0,
        flags: 0,
        cpu: 0,
    };
    bpf(command::PROG_TEST_RUN, &mut attributes)?;
    Ok(attributes.retval)
}

/// A second descriptor of the same object.
pub fn dup(fd: &impl AsFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}
