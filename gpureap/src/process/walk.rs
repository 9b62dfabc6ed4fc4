//! The fall-back without any kernel rights: /proc/PID/fd and /proc/PID/maps of the processes that the caller may see.
//!
//! It sees no file in flight and none in an io_uring table, and it is not one instant: a descriptor that wanders from
//! process to process while the walk runs may be missed or seen twice.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, OFlags, Statx, StatxFlags, statx},
    io::Errno,
};

use super::{facts::ProcDir, stat::Stat};
use crate::{
    config::Paths,
    error::Failure,
    gpu::devices::Devices,
    model::{Eyes, Holder, How, LineageSource, NoLineage, ProcKey, Slot, Source, Usage, View},
};

/// [`Eyes`] over /proc.
#[derive(Clone, Debug)]
pub struct ProcEyes {
    pub paths: Paths,
    pub devices: Devices,
}

impl Eyes for ProcEyes {
    fn view(&self) -> anyhow::Result<View> {
        view(&self.paths, &self.devices)
    }

    fn sweep(&self) -> anyhow::Result<View> {
        self.view()
    }

    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        match look_at(&self.paths.proc, tgid, &self.devices) {
            Ok(holder) => Ok(holder),
            Err(Hidden) => anyhow::bail!("process {tgid} may not be read"),
        }
    }

    fn lineage(&self) -> &dyn LineageSource {
        &NoLineage
    }
}

/// Bytes of a table of mappings: a million of them, or the default limit (`vm.max_map_count`) with long names.
const LONGEST_MAPS: usize = 64 << 20;

/// A process that the caller may not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hidden;

fn list(root: &Path) -> Result<fs::ReadDir, Failure> {
    fs::read_dir(root).map_err(|error| Failure::unsupported(format!("cannot list {}: {error}", root.display())))
}

pub fn view(paths: &Paths, devices: &Devices) -> anyhow::Result<View> {
    let root = &paths.proc;
    let mut holders = Vec::new();
    let mut hidden = 0_u32;
    for entry in list(root)?.flatten() {
        let Some(tgid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        match look_at(root, tgid, devices) {
            Ok(holder) => holders.extend(holder),
            Err(Hidden) => hidden += 1,
        }
    }
    holders.sort_by_key(|holder| holder.key);
    let mut notes = vec!["read from /proc: handles in flight and in io_uring tables are out of sight".to_owned()];
    match hidden {
        0 => {}
        1 => notes.push("1 process may not be read; run as root to see all".to_owned()),
        _ => notes.push(format!("{hidden} processes may not be read; run as root to see all")),
    }
    // Every pid namespace has a first process.
    if !root.join("1").exists() {
        notes.push(format!(
            "{} does not show the processes of others (it is mounted with hidepid): run as root to see all",
            root.display()
        ));
    }
    Ok(View {
        source: Source::Proc,
        backend: None,
        complete: false,
        cannot_see: BTreeSet::from([How::InFlight, How::IoUring]),
        lost_events: 0,
        swept_ns: None,
        open_files: BTreeMap::new(),
        holders,
        orphans: Vec::new(),
        notes,
    })
}

/// What one process holds; `None` when nothing, or when it is gone.
fn look_at(root: &Path, tgid: u32, devices: &Devices) -> Result<Option<Holder>, Hidden> {
    let Some(dir) = ProcDir::open(root, tgid) else { return Ok(None) };
    let Some(stat) = dir.read("stat").and_then(|bytes| Stat::parse(&bytes)) else {
        // With hidepid=1 it is listed, and nothing in it may be read.
        let refused = matches!(dir.open_file("stat", OFlags::RDONLY), Err(Errno::ACCESS | Errno::PERM));
        return if refused { Err(Hidden) } else { Ok(None) };
    };
    if stat.kernel_thread {
        return Ok(None);
    }
    let zombie_leader = stat.state == 'Z' && stat.threads > 1;
    let tids = if stat.threads > 1 { dir.tids() } else { vec![tgid] };
    let living: Vec<u32> = tids.into_iter().filter(|tid| !zombie_leader || *tid != tgid).collect();
    let mut found = Found::default();
    let mut hidden = false;
    let tables = tables(&dir, &living, devices, &mut found, &mut hidden);
    for Held { slot, deleted } in tables.iter().flat_map(BTreeMap::values) {
        found.usage.entry(*slot).or_default().fds += 1;
        found.how.insert(How::Fd);
        if *deleted {
            found.how.insert(How::DeletedNode);
        }
    }
    // Threads share their address space.
    mappings(&dir, living.first().copied().unwrap_or(tgid), devices, &mut found);
    let Found { usage, mut how, private_tids } = found;
    if usage.is_empty() {
        return if hidden { Err(Hidden) } else { Ok(None) };
    }
    if zombie_leader {
        how.insert(How::ZombieLeader);
    }
    Ok(Some(Holder {
        key: ProcKey::new(tgid, stat.start_ns()),
        usage,
        how,
        private_tids,
        inherited_from: None,
        from_snapshot: true,
    }))
}

#[derive(Default)]
struct Found {
    usage: BTreeMap<Slot, Usage>,
    how: BTreeSet<How>,
    private_tids: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    slot: Slot,
    deleted: bool,
}

/// Device descriptors by number.
type Table = BTreeMap<u32, Held>;

/// The different tables of a process's threads. They share one unless a thread asked for its own; equal contents are
/// taken for the same table.
fn tables(dir: &ProcDir, tids: &[u32], devices: &Devices, found: &mut Found, hidden: &mut bool) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    for tid in tids {
        let Some(table) = table(dir, *tid, devices, hidden) else { continue };
        if tables.is_empty() {
            tables.push(table);
        } else if !tables.contains(&table) {
            // A descriptor that came or went between two looks makes no private table: look once more.
            let shared = self::table(dir, tids[0], devices, hidden);
            let Some(again) = self::table(dir, *tid, devices, hidden) else { continue };
            if shared.as_ref() == Some(&again) || tables.contains(&again) {
                continue;
            }
            if !again.is_empty() {
                found.private_tids.insert(*tid);
                found.how.insert(How::PrivateFdTable);
            }
            tables.push(again);
        }
    }
    tables
}

fn table(dir: &ProcDir, tid: u32, devices: &Devices, hidden: &mut bool) -> Option<Table> {
    let place = format!("task/{tid}/fd");
    let fd_dir = match dir.open_file(&place, OFlags::PATH | OFlags::DIRECTORY) {
        Ok(fd_dir) => fd_dir,
        Err(error) => {
            *hidden |= matches!(error, Errno::ACCESS | Errno::PERM);
            return None;
        }
    };
    let names = match dir.entries(&place) {
        Ok(names) => names,
        Err(error) => {
            *hidden |= matches!(error, Errno::ACCESS | Errno::PERM);
            return None;
        }
    };
    let held = names.iter().filter_map(|name| Some((name.parse().ok()?, device_of(&look(&fd_dir, name)?, devices)?)));
    Some(held.collect())
}

/// What a magic link leads to, without waiting for a file server that does not answer.
fn look(dir: &OwnedFd, name: &str) -> Option<Statx> {
    let wanted = StatxFlags::TYPE | StatxFlags::NLINK;
    statx(dir.as_fd(), name, AtFlags::STATX_DONT_SYNC, wanted).ok()
}

fn device_of(node: &Statx, devices: &Devices) -> Option<Held> {
    if FileType::from_raw_mode(node.stx_mode.into()) != FileType::CharacterDevice {
        return None;
    }
    let device = devices.by_number(node.stx_rdev_major, node.stx_rdev_minor)?;
    Some(Held { slot: device.slot, deleted: node.stx_nlink == 0 })
}

/// A line of /proc/PID/maps with a file behind it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'a> {
    pub(crate) range: &'a str,
    /// Device number of the file system, and the inode.
    pub(crate) file: (u32, u32, u64),
    pub(crate) path: &'a str,
}

impl<'a> Mapping<'a> {
    pub(crate) fn parse(line: &'a str) -> Option<Self> {
        let mut rest = line;
        let mut word = || {
            let (word, after) = rest.trim_start().split_once(' ')?;
            rest = after;
            Some(word)
        };
        let (range, _permissions, _offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
        let (major, minor) = device.split_once(':')?;
        let hex = |text| u32::from_str_radix(text, 16).ok();
        let path = rest.trim_start();
        let file = (hex(major)?, hex(minor)?, inode.parse().ok()?);
        path.starts_with('/').then_some(Self { range, file, path })
    }
}

fn mappings(dir: &ProcDir, tid: u32, devices: &Devices, found: &mut Found) {
    let Some(bytes) = dir.read_to(&format!("task/{tid}/maps"), LONGEST_MAPS) else { return };
    let text = String::from_utf8_lossy(&bytes);
    let links = dir.open_file("map_files", OFlags::PATH | OFlags::DIRECTORY).ok();
    // Libraries are mapped several times each: one look per file.
    let mut known: HashMap<(u32, u32, u64), Option<Held>> = HashMap::new();
    for mapping in text.lines().filter_map(Mapping::parse) {
        let held =
            *known.entry(mapping.file).or_insert_with(|| mapped_device(dir, links.as_ref(), tid, &mapping, devices));
        if let Some(Held { slot, deleted }) = held {
            let usage = found.usage.entry(slot).or_default();
            usage.maps += 1;
            usage.ever_mapped = true;
            found.how.insert(How::Map);
            if deleted {
                found.how.insert(How::DeletedNode);
            }
        }
    }
}

/// The line tells the file system and the inode, not the device: ask the link in map_files, which takes a capability to follow; else
/// the path as that process sees it, if that is the same file still. The link comes first as it is no path: one may lead
/// to a file server that does not answer.
fn mapped_device(
    dir: &ProcDir,
    links: Option<&OwnedFd>,
    tid: u32,
    mapping: &Mapping<'_>,
    devices: &Devices,
) -> Option<Held> {
    let Mapping { range, file, path } = mapping;
    if let Some(node) = links.and_then(|links| mapped_file(links, range)) {
        return device_of(&node, devices);
    }
    let inside = PathBuf::from(format!("task/{tid}/root")).join(path.strip_prefix('/')?);
    let meta = fs::File::from(dir.open_file(inside.to_str()?, OFlags::PATH).ok()?).metadata().ok()?;
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    if (major, minor, meta.ino()) != *file || FileType::from_raw_mode(meta.mode()) != FileType::CharacterDevice {
        return None;
    }
    let device = devices.by_rdev(meta.rdev())?;
    Some(Held { slot: device.slot, deleted: meta.nlink() == 0 })
}

/// The kernel prints the range with leading zeros in one place and without them in the other.
fn mapped_file(links: &OwnedFd, range: &str) -> Option<Statx> {
    let (start, end) = range.split_once('-')?;
    let plain = |address: &str| u64::from_str_radix(address, 16).map(|address| format!("{address:x}")).ok();
    look(links, &format!("{}-{}", plain(start)?, plain(end)?))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        sync::{Mutex, PoisonError, mpsc},
        thread,
    };

    use super::*;
    use crate::{config::StandIn, gpu::devices::discover};

    /// All tests are one process: what one holds, another sees.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    fn devices(minor: u32) -> (Paths, Devices) {
        let paths = Paths { sys: "/nonexistent".into(), ..Paths::default() };
        let devices = discover(&paths, &[StandIn::new(1, minor, "/dev/x".into()).unwrap()]).unwrap();
        (paths, devices)
    }

    /// What this process has of /dev/full (1:7) or /dev/zero (1:5).
    fn own(minor: u32) -> Option<(Usage, Holder)> {
        let (paths, devices) = devices(minor);
        let holder = look_at(&paths.proc, std::process::id(), &devices).unwrap()?;
        Some((holder.usage[&devices.by_number(1, minor).unwrap().slot].clone(), holder))
    }

    #[test]
    fn own_descriptors_are_found() {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, second) = (File::open("/dev/full").unwrap(), File::open("/dev/full").unwrap());
        let (usage, holder) = own(7).unwrap();
        assert_eq!((usage.fds, usage.maps), (2, 0));
        assert_eq!(holder.how, BTreeSet::from([How::Fd]));
        let (paths, devices) = devices(7);
        let view = view(&paths, &devices).unwrap();
        assert!(!view.complete && view.cannot_see.contains(&How::InFlight));
        assert!(view.holders.iter().any(|other| other.key == holder.key));
        drop((first, second));
        assert_eq!(own(7), None);
    }

    #[test]
    fn a_mapping_without_a_descriptor() {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let file = File::open("/dev/zero").unwrap();
        let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &file, 0) }.unwrap();
        drop(file);
        let (usage, holder) = own(5).unwrap();
        assert_eq!((usage.fds, usage.maps, usage.ever_mapped), (0, 1, true));
        assert_eq!(holder.how, BTreeSet::from([How::Map]));
        // SAFETY: made above, and nothing refers to it.
        unsafe { rustix::mm::munmap(address, 4096) }.unwrap();
    }

    #[test]
    fn a_mapping_is_known_by_its_link_whatever_its_path_is_now() {
        use rustix::fs::{CWD, Mode, makedev, mkfifoat, mknodat};
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("zero");
        let mode = Mode::RUSR | Mode::WUSR;
        let made = mknodat(CWD, &node, FileType::CharacterDevice, mode, makedev(1, 5));
        let Some(file) = made.ok().and_then(|()| File::open(&node).ok()) else {
            eprintln!("skipped: needs root, and device nodes in the directory for temporary files");
            return;
        };
        let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &file, 0) }.unwrap();
        drop(file);
        fs::remove_file(&node).unwrap();
        mkfifoat(CWD, &node, mode).unwrap();
        let (usage, holder) = own(5).unwrap();
        assert_eq!((usage.fds, usage.maps), (0, 1));
        assert_eq!(holder.how, BTreeSet::from([How::Map, How::DeletedNode]));
        // SAFETY: made above, and nothing refers to it.
        unsafe { rustix::mm::munmap(address, 4096) }.unwrap();
    }

    #[test]
    fn a_thread_with_its_own_table() {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (ready, is_ready) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        let worker = thread::spawn(move || {
            // SAFETY: this thread uses no descriptor of the others afterwards.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            let file = File::open("/dev/full").unwrap();
            ready.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            is_done.recv().unwrap_err();
            drop(file);
        });
        let tid = is_ready.recv().unwrap();
        let (usage, holder) = own(7).unwrap();
        assert_eq!(usage.fds, 1);
        assert_eq!(holder.how, BTreeSet::from([How::Fd, How::PrivateFdTable]));
        assert_eq!(holder.private_tids, BTreeSet::from([tid]));
        drop(done);
        worker.join().unwrap();
    }

    #[test]
    fn a_process_that_is_gone_holds_nothing() {
        let (paths, devices) = devices(7);
        assert_eq!(look_at(&paths.proc, u32::MAX, &devices), Ok(None));
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("5/task/5")).unwrap();
        assert_eq!(look_at(dir.path(), 5, &devices), Ok(None));
        fs::write(dir.path().join("5/stat"), "nonsense").unwrap();
        assert_eq!(look_at(dir.path(), 5, &devices), Ok(None));
    }

    #[test]
    fn no_proc_is_a_host_that_cannot_do_it() {
        let (paths, devices) = devices(7);
        let error = view(&Paths { proc: "/nonexistent".into(), ..paths }, &devices).unwrap_err();
        assert_eq!(crate::error::exit_of(&error), crate::exit_code::Exit::Unsupported);
        assert!(error.to_string().starts_with("cannot list /nonexistent: "), "{error}");
    }

    #[test]
    fn lines_of_maps() {
        let line = "200600000-200800000 rw-s 00000000 00:06 143                              /dev/nvidia0";
        let expected = Mapping { range: "200600000-200800000", file: (0, 6, 143), path: "/dev/nvidia0" };
        assert_eq!(Mapping::parse(line), Some(expected));
        let odd = "1-2 rw-s 00000000 fd:0a 7   /tmp/a b (deleted)";
        assert_eq!(Mapping::parse(odd).map(|mapping| mapping.path), Some("/tmp/a b (deleted)"));
        for line in
            ["", "1-2 rw-s", "1-2 rw-p 0 00:00 0 ", "1-2 rw-p 0 00:00 0 [heap]", "x y z a:b c /d", "1-2 r 0 0 0 /d"]
        {
            assert_eq!(Mapping::parse(line), None, "{line}");
        }
    }
}
