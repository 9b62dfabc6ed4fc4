//! Whether the path of a process's program can be believed.
//!
//! A user cannot change a file of root's, but can copy it, rename the copy, and, in a mount namespace of his own, mount
//! any file over any path. So neither path nor owner alone proves anything: the file that runs must be the very file
//! that lies at that path in the host's own root, in directories that only root can change.

use std::path::{Component, Path};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{AtFlags, CWD, Mode, OFlags, Statx, StatxFlags, openat, statx},
};

/// Who vouches for the path of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Nobody.
    #[default]
    None,
    /// It is the host's file at that path, only root may change it, and the process has the host's root.
    Host,
    /// It is the container's file at that path, not from a volume, and root's in there. Whoever started the container
    /// chose what is in it, so this counts only together with where the container came from.
    Container,
}

/// `S_IWGRP | S_IWOTH`: an access list that lets others write shows as the group's permission.
const WRITABLE_BY_OTHERS: u16 = 0o022;

fn stat_of(place: impl AsFd, name: &Path, flags: AtFlags) -> Option<Statx> {
    statx(place, name, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID).ok()
}

/// Root's, and only root may write it. Owners are numbered as the caller sees them, so a user who is root in a namespace
/// of his own is not root here.
const fn only_roots(stat: &Statx) -> bool {
    stat.stx_uid == 0 && stat.stx_mode & WRITABLE_BY_OTHERS == 0
}

const fn same_file(one: &Statx, other: &Statx) -> bool {
    one.stx_dev_major == other.stx_dev_major && one.stx_dev_minor == other.stx_dev_minor && one.stx_ino == other.stx_ino
}

fn process(proc: &Path, tgid: u32) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, proc.join(tgid.to_string()), flags, Mode::empty()).ok()
}

/// The file at an absolute path below a root, if root alone may change it and every directory that leads there. No link
/// is followed: the kernel's path of a program has none.
fn guarded(root: OwnedFd, path: &Path) -> Option<Statx> {
    let mut dir = root;
    let mut parts = path.components().filter(|part| *part != Component::RootDir).peekable();
    if !path.is_absolute() {
        return None;
    }
    loop {
        let here = stat_of(&dir, Path::new(""), AtFlags::EMPTY_PATH)?;
        if !only_roots(&here) {
            return None;
        }
        let Component::Normal(name) = parts.next()? else { return None };
        if parts.peek().is_none() {
            return stat_of(&dir, Path::new(name), AtFlags::SYMLINK_NOFOLLOW).filter(only_roots);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        dir = openat(&dir, name, flags, Mode::empty()).ok()?;
    }
}

/// The program of a process is the host's file at that path. `exe` may be gone from there since, as after an upgrade of
/// its package: then the process must at least share the host's mounts, where no user can have mounted anything.
pub(super) fn is_hosts(proc: &Path, tgid: u32, exe: &Path, root: &Path) -> bool {
    let check = || {
        let dir = process(proc, tgid)?;
        let running = stat_of(&dir, Path::new("exe"), AtFlags::empty())?;
        if !only_roots(&running) {
            return None;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open_root = || openat(CWD, root, flags, Mode::empty()).ok();
        // A container is given some of the host's programs, those of the driver for one; in there they are the
        // container's to start.
        let own_root = stat_of(&dir, Path::new("root"), AtFlags::empty())?;
        stat_of(open_root()?, Path::new(""), AtFlags::EMPTY_PATH).filter(|host| same_file(host, &own_root))?;
        if running.stx_nlink > 0 {
            return guarded(open_root()?, exe).filter(|there| same_file(there, &running)).map(|_| ());
        }
        let mounts = |place: &Path| stat_of(CWD, &place.join("ns/mnt"), AtFlags::empty());
        let own = stat_of(&dir, Path::new("ns/mnt"), AtFlags::empty())?;
        let shares = [proc.join("1"), proc.join("self")];
        let shares = shares.iter().filter_map(|place| mounts(place)).any(|host| same_file(&host, &own));
        let parent = exe.parent().filter(|_| shares)?;
        // The directory is judged by what would lie in it.
        guarded_directory(open_root()?, parent).then_some(())
    };
    check().is_some()
}

fn guarded_directory(root: OwnedFd, path: &Path) -> bool {
    if path == Path::new("/") {
        return stat_of(&root, Path::new(""), AtFlags::EMPTY_PATH).is_some_and(|stat| only_roots(&stat));
    }
    guarded(root, path).is_some()
}

/// The program of a process in a container is the container's own file at that path: root's there and here, and on the
/// mount that is the container's root, so from its image or its own layer and from no volume.
pub(super) fn is_containers(proc: &Path, tgid: u32, exe: &Path) -> bool {
    let check = || {
        let dir = process(proc, tgid)?;
        let running = stat_of(&dir, Path::new("exe"), AtFlags::empty())?;
        let root = openat(&dir, "root", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let root_stat = stat_of(&root, Path::new(""), AtFlags::EMPTY_PATH)?;
        let there = guarded(root, exe)?;
        let has_mount = |stat: &Statx| stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
        let own = has_mount(&running) && has_mount(&root_stat) && running.stx_mnt_id == root_stat.stx_mnt_id;
        (own && same_file(&there, &running)).then_some(())
    };
    check().is_some()
}
