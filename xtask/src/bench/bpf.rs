//! bpf(2), as much of it as measurements need.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use anyhow::{Context as _, Result};
use gpureap_common::counter;
use walkdir::WalkDir;

/// Commands, include/uapi/linux/bpf.h.
pub(super) mod command {
    pub(in crate::bench) const MAP_LOOKUP_ELEM: i64 = 1;
    pub(in crate::bench) const PROG_LOAD: i64 = 5;
    pub(in crate::bench) const OBJ_GET: i64 = 7;
    pub(in crate::bench) const PROG_GET_FD_BY_ID: i64 = 13;
    pub(in crate::bench) const OBJ_GET_INFO_BY_FD: i64 = 15;
    pub(in crate::bench) const RAW_TRACEPOINT_OPEN: i64 = 17;
    pub(in crate::bench) const LINK_CREATE: i64 = 28;
}

pub(super) fn bpf<A>(command: i64, attributes: &mut A) -> io::Result<i64> {
    // SAFETY: the attribute is repr(C), fully initialised, and its size is passed; pointers in it outlive the call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, (&raw mut *attributes).cast::<libc::c_void>(), size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(super) fn owned(raw: i64) -> OwnedFd {
    // SAFETY: the kernel has just returned this descriptor, nobody else has it.
    unsafe { OwnedFd::from_raw_fd(raw as i32) }
}

/// Opens what is pinned at `path`.
pub(super) fn get(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    bpf(command::OBJ_GET, &mut [path.as_ptr() as u64, 0]).map(owned)
}

/// What gpureap's programs have counted, from the map that is pinned somewhere below a directory.
pub(super) fn counters(pins: &Path) -> Result<BTreeMap<&'static str, u64>> {
    let found = WalkDir::new(pins).into_iter().filter_map(Result::ok).find(|entry| entry.file_name() == "COUNTERS");
    let map = get(found.context("no counters are pinned")?.path()).context("open the counters")?;
    let processors = possible_processors()?;
    let mut counted = BTreeMap::new();
    for (index, name) in (0_u32..).zip(counter::NAMES) {
        let mut values = vec![0_u64; processors];
        let mut element = [map.as_raw_fd() as u64, (&raw const index) as u64, values.as_mut_ptr() as u64, 0];
        bpf(command::MAP_LOOKUP_ELEM, &mut element).context("read a counter")?;
        counted.insert(name, values.iter().sum());
    }
    Ok(counted)
}

/// A map with a value for each processor has one for those too that may come.
fn possible_processors() -> Result<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible").context("read the possible processors")?;
    let last = text.trim().rsplit(['-', ',']).next().unwrap_or_default();
    Ok(last.parse::<usize>().context("the possible processors")? + 1)
}
