//! Stand-in devices in a place of their own: a mount namespace that ends with the demo, so that even a killed demo
//! leaves nothing behind.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, makedev, mknodat, open},
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

use crate::{
    config::{Config, StandIn},
    error::Failure,
};

/// Hidden under the demo's own file system, in the demo's namespace only.
const PLACE: &str = "/mnt";

/// Consoles that hardly any host uses, from the last one down, then devices whose open alone does nothing: /dev/full
/// and loop-control. What the host does use, /dev/zero or /dev/null, must never be among them: its users would be
/// holders.
fn candidates() -> impl Iterator<Item = (u32, u32)> {
    (40..=63).rev().map(|minor| (4, minor)).chain([(1, 7), (10, 237)])
}

pub struct Stage {
    pub config: Config,
    pub devices: Vec<StandIn>,
}

impl Stage {
    /// Makes nodes of devices that can be opened here and that nobody has open. The calling thread gets a mount
    /// namespace of its own, for good.
    pub fn set(config: &Config, count: usize) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::not_permitted("the demo makes devices and traces the kernel: run it as root").into());
        }
        let refused = |what: &str, error: io::Error| Failure::unsupported(format!("{what}: {error}"));
        // SAFETY: a mount namespace of its own does not take descriptors or memory from other threads.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
            .map_err(|error| refused("cannot make a mount namespace", error.into()))?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .map_err(|error| refused("cannot make mounts private", error.into()))?;
        mount("gpureap-demo", PLACE, "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, c"mode=0755,size=1m")
            .map_err(|error| refused("cannot mount a tmpfs", error.into()))?;
        let mut stage = Self { config: config.clone(), devices: Vec::new() };
        let held = held_numbers(Path::new("/proc"));
        for (major, minor) in candidates() {
            if stage.devices.len() == count {
                break;
            }
            if held.contains(&(major, minor)) {
                continue;
            }
            let node = PathBuf::from(PLACE).join(format!("gpu{}", stage.devices.len()));
            match try_node(&node, major, minor) {
                Ok(()) => stage.devices.push(StandIn { major, minor, node }),
                Err(error) => {
                    tracing::debug!(major, minor, %error, "no stand-in");
                    drop(fs::remove_file(&node));
                }
            }
        }
        if stage.devices.len() < count {
            return Err(Failure::unsupported("this host lets no device be made and opened for the demo").into());
        }
        stage.config.devices.clone_from(&stage.devices);
        stage.config.paths.state = PathBuf::from(PLACE).join("state");
        stage.config.paths.run = PathBuf::from(PLACE).join("run");
        stage.config.paths.pin = stage.pins();
        Ok(stage)
    }

    /// A bpf file system of its own too, where the kernel has one: pins go with the namespace.
    fn pins(&self) -> PathBuf {
        let place = PathBuf::from(PLACE).join("bpf");
        let mounted = fs::create_dir(&place)
            .and_then(|()| Ok(mount("gpureap-demo", &place, "bpf", MountFlags::empty(), None::<&std::ffi::CStr>)?));
        match mounted {
            Ok(()) => place.join("gpureap"),
            Err(error) => {
                tracing::debug!(%error, "no bpf file system of its own");
                self.config.paths.pin.with_file_name(format!("gpureap-demo-{}", std::process::id()))
            }
        }
    }

    pub fn nodes(&self) -> Vec<PathBuf> {
        self.devices.iter().map(|device| device.node.clone()).collect()
    }

    /// Takes everything away again. True when nothing is left.
    pub fn strike(self) -> bool {
        // Detaches what is mounted below too.
        let struck = unmount(PLACE, UnmountFlags::DETACH);
        struck.is_ok() && self.devices.iter().all(|device| !device.node.exists())
    }
}

fn try_node(node: &Path, major: u32, minor: u32) -> io::Result<()> {
    mknodat(CWD, node, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, makedev(major, minor))?;
    open_node(node).map(drop)
}

/// Never becomes the controlling terminal, never waits for a carrier.
pub(super) fn open_node(node: &Path) -> io::Result<rustix::fd::OwnedFd> {
    Ok(open(node, OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?)
}

/// Device numbers that someone has open, as far as /proc tells.
fn held_numbers(proc_root: &Path) -> BTreeSet<(u32, u32)> {
    let mut numbers = BTreeSet::new();
    for process in fs::read_dir(proc_root).into_iter().flatten().flatten() {
        for fd in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let Ok(meta) = fs::metadata(fd.path()) else { continue };
            if meta.file_type().is_char_device() {
                numbers.insert((rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())));
            }
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_here_is_no_candidate() {
        let _full = fs::File::open("/dev/full").unwrap();
        assert!(held_numbers(Path::new("/proc")).contains(&(1, 7)));
        assert!(!candidates().any(|number| [(1, 3), (1, 5), (5, 0), (5, 2), (1, 8), (1, 9)].contains(&number)));
    }
}
