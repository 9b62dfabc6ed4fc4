//! Stand-in devices in a place of their own: a mount namespace that ends with the demo, so that even a killed demo
//! leaves nothing behind.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _},
            net::{SocketAddr, UnixListener},
        },
    },
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
    /// Keep other demos off the devices; nothing connects to them.
    claims: Vec<UnixListener>,
}

/// Another demo may be about to open this device. A name in the abstract namespace belongs to one process at a time and
/// ends with it.
fn claim((major, minor): (u32, u32)) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(format!("gpureap-demo-{major}-{minor}"))?)
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
        let mut stage = Self { config: config.clone(), devices: Vec::new(), claims: Vec::new() };
        let mut candidates = candidates();
        while stage.devices.len() < count {
            let claimed = candidates.by_ref().filter_map(|number| Some((number, claim(number).ok()?)));
            let round: Vec<_> = claimed.take(count - stage.devices.len()).collect();
            if round.is_empty() {
                return Err(Failure::unsupported("this host lets no device be made and opened for the demo").into());
            }
            // Looked at under the claims: a demo that has just ended may have left a process for a moment.
            let held = held_numbers(Path::new("/proc"));
            for ((major, minor), claim) in round {
                if held.contains(&(major, minor)) {
                    continue;
                }
                let node = PathBuf::from(PLACE).join(format!("gpu{}", stage.devices.len()));
                match try_node(&node, major, minor) {
                    Ok(()) => {
                        stage.devices.push(StandIn { major, minor, node });
                        stage.claims.push(claim);
                    }
                    Err(error) => {
                        tracing::debug!(major, minor, %error, "no stand-in");
                        drop(fs::remove_file(&node));
                    }
                }
            }
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
        // Not /dev/full, whose holders other tests of this process count.
        let _urandom = fs::File::open("/dev/urandom").unwrap();
        assert!(held_numbers(Path::new("/proc")).contains(&(1, 9)));
        // Two at once never get the same.
        let _claimed = claim((0, 7)).unwrap();
        assert_eq!(claim((0, 7)).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(!candidates().any(|number| [(1, 3), (1, 5), (5, 0), (5, 2), (1, 8), (1, 9)].contains(&number)));
    }

    #[test]
    fn two_at_once_get_different_devices() {
        let (set, both) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        let numbers = || {
            set.wait();
            let stage = Stage::set(&Config::default(), 3);
            both.wait();
            let stage = stage.map_err(|error| format!("{error:#}"))?;
            let numbers: Vec<_> = stage.devices.iter().map(|device| (device.major, device.minor)).collect();
            assert!(stage.strike());
            Ok::<_, String>(numbers)
        };
        // Each with a mount namespace of its own, which ends with the thread.
        let (one, other) = std::thread::scope(|scope| {
            let other = scope.spawn(numbers);
            (scope.spawn(numbers).join().unwrap(), other.join().unwrap())
        });
        match (one, other) {
            (Ok(one), Ok(other)) => {
                let all: BTreeSet<_> = one.iter().chain(&other).collect();
                assert_eq!(all.len(), 6, "{one:?} {other:?}");
            }
            (Err(reason), _) | (_, Err(reason)) => eprintln!("SKIPPED: {reason}"),
        }
    }
}
