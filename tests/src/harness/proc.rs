//! What /proc shows of an actor, to prove the actor itself: descriptors by thread, mappings by process.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use crate::actor::{
    sys::{self, Pid},
    truth::key,
};

fn numbers(directory: impl AsRef<Path>) -> Vec<Pid> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn is_device(link: &Path, device: &str) -> bool {
    fs::metadata(link).is_ok_and(|meta| meta.file_type().is_char_device() && key(meta.rdev()) == device)
}

/// O_PATH descriptors name the node and hold nothing.
fn is_path_only(thread: &str, fd: Pid) -> bool {
    let info = fs::read_to_string(format!("{thread}/fdinfo/{fd}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or("0");
    i32::from_str_radix(flags.trim(), 8).is_ok_and(|flags| flags & sys::O_PATH != 0)
}

/// Counts of one process: descriptors over all its tables, and mapped areas.
pub fn counts(pid: Pid, device: &str) -> (u32, u32) {
    let mut tables: Vec<Pid> = Vec::new();
    let mut fds = 0;
    for tid in numbers(format!("/proc/{pid}/task")) {
        if tables.iter().any(|other| sys::same_table(tid, *other).unwrap_or(true)) {
            continue;
        }
        let thread = format!("/proc/{pid}/task/{tid}");
        let held = numbers(format!("{thread}/fd"));
        if held.is_empty() {
            // A thread that has ended has no table, and must not hide the others.
            continue;
        }
        tables.push(tid);
        let on_device = held
            .into_iter()
            .filter(|fd| is_device(Path::new(&format!("{thread}/fd/{fd}")), device) && !is_path_only(&thread, *fd));
        fds += on_device.count() as u32;
    }
    let maps = fs::read_dir(format!("/proc/{pid}/map_files")).into_iter().flatten().flatten();
    (fds, maps.filter(|entry| is_device(&entry.path(), device)).count() as u32)
}

/// Who of the session holds the device, as far as /proc shows it.
pub fn observe(session: Pid, device: &str) -> BTreeMap<Pid, (u32, u32)> {
    let members: BTreeSet<Pid> =
        numbers("/proc").into_iter().filter(|pid| sys::session(*pid) == Some(session)).collect();
    members.into_iter().map(|pid| (pid, counts(pid, device))).filter(|(_, counts)| *counts != (0, 0)).collect()
}

/// The processes of a session that have not ended. Their descriptors are closed when they have.
pub(super) fn living(session: Pid) -> Vec<Pid> {
    let ended = |pid: Pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next();
        // A main thread that has ended is a zombie as long as another lives.
        matches!(state, None | Some('X')) || state == Some('Z') && numbers(format!("/proc/{pid}/task")).len() <= 1
    };
    numbers("/proc").into_iter().filter(|pid| sys::session(*pid) == Some(session) && !ended(*pid)).collect()
}

/// Everybody on the host who holds the device, as far as /proc shows it: before a test kills all holders.
pub fn anybody(device: &str) -> Vec<Pid> {
    numbers("/proc").into_iter().filter(|pid| counts(*pid, device) != (0, 0)).collect()
}
