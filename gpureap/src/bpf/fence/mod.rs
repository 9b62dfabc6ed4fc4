//! The fence: new opens of chosen devices fail, host-wide, containers included; what is open stays open.
//!
//! [`Fence`] is held by this process and goes with it, however it ends. [`pinned`] is the one that stays until its time
//! is over. Both are the same program with maps of their own; the kernel ends a fence at its deadline by itself.

mod maps;
pub mod pinned;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use gpureap_common::{
    abi::{self, ABI_VERSION, ANY_MINOR, MAGIC},
    fence::{self as record, Tally},
    record::{Device, Meta, backend},
};

use self::maps::Maps;
use super::{
    denied_or,
    load::{self, Loaded},
    object, sys,
};
use crate::{
    clock,
    config::Config,
    error::Failure,
    gpu::devices::Devices,
    kernel::rights,
    model::{ProcKey, Slot},
};

/// Who may open fenced devices all the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exemptions {
    /// Each alone, without its children; its start may be as coarse as /proc has it.
    pub processes: BTreeSet<ProcKey>,
    /// Ids of cgroups (inode numbers in cgroup2), with all below them.
    pub cgroups: BTreeSet<u64>,
}

/// A process that tried to open a fenced device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    pub key: ProcKey,
    pub comm: String,
    pub uid: u32,
    pub cgroup_id: u64,
    pub slot: Slot,
    pub count: u64,
    pub first_ns: u64,
    pub last_ns: u64,
}

/// What a fence is and has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The fence's own device table. Devices in it are not fenced unless `fences` has their slot.
    pub table: Vec<(u32, Device)>,
    pub fences: BTreeMap<Slot, record::Fence>,
    pub tallies: BTreeMap<Slot, Tally>,
    pub exempt: Exemptions,
    /// The processes that are remembered; [`Standing::tallies`] counts all opens.
    pub denied: Vec<Denied>,
}

impl Standing {
    /// Whether opens of a slot are refused at that boottime.
    pub fn refuses(&self, slot: Slot, now_ns: u64) -> bool {
        self.fences.get(&slot).is_some_and(|fence| now_ns < fence.deadline_ns)
    }

    /// Whether opens of a device are refused: the kernel's own lookup, a device before all others of its major.
    pub fn refuses_device(&self, major: u32, minor: Option<u32>, now_ns: u64) -> bool {
        let slot = |minor| {
            let number = abi::dev(major, minor);
            self.table.iter().find(|(known, _)| *known == number).map(|(_, device)| device.slot)
        };
        let slot = slot(minor.unwrap_or(ANY_MINOR)).or_else(|| slot(ANY_MINOR));
        slot.is_some_and(|slot| self.refuses(slot, now_ns))
    }

    /// The slots whose opens are refused.
    pub fn closed(&self, now_ns: u64) -> BTreeSet<Slot> {
        self.fences.keys().copied().filter(|slot| self.refuses(*slot, now_ns)).collect()
    }

    pub fn is_over(&self, now_ns: u64) -> bool {
        self.closed(now_ns).is_empty()
    }
}

/// A fence that this process holds. It ends when this is dropped, and with the process at the latest.
#[derive(Debug)]
pub struct Fence {
    maps: Maps,
    _link: OwnedFd,
}

impl Fence {
    /// Closes `slots` of `devices` until the boottime `deadline_ns`, or for as long as this lives. When it returns every
    /// open that begins is refused; one that had passed the check before may still be under way in the driver.
    pub fn raise(
        config: &Config,
        devices: &Devices,
        slots: &BTreeSet<Slot>,
        deadline_ns: Option<u64>,
        exempt: &Exemptions,
    ) -> anyhow::Result<Self> {
        let root = cgroup_root(&config.paths.proc)?;
        let (maps, program) = load(config)?;
        maps.add_devices(devices)?;
        maps.exempt(exempt)?;
        let fence =
            record::Fence { raised_ns: clock::boottime_ns(), deadline_ns: deadline_ns.unwrap_or(record::NO_DEADLINE) };
        for slot in slots {
            maps.close(*slot, fence)?;
        }
        let link = attach(&program, &root)?;
        Ok(Self { maps, _link: link })
    }

    pub fn exempt_process(&self, key: ProcKey) -> anyhow::Result<()> {
        self.maps.exempt(&Exemptions { processes: [key].into(), cgroups: BTreeSet::new() })
    }

    pub fn exempt_cgroup(&self, id: u64) -> anyhow::Result<()> {
        self.maps.exempt(&Exemptions { processes: BTreeSet::new(), cgroups: [id].into() })
    }

    /// Who tried, the first first. Of very many only the last are remembered.
    pub fn denied(&self) -> anyhow::Result<Vec<Denied>> {
        self.maps.denied()
    }

    /// All refused opens.
    pub fn denied_total(&self) -> anyhow::Result<u64> {
        Ok(self.maps.tallies()?.values().map(|tally| tally.denied).sum())
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // The kernel may take a moment to detach; this works at once.
        if let Err(error) = self.maps.open_all() {
            tracing::debug!("fence: {error:#}");
        }
    }
}

/// An instance of the object with the maps and the program of a fence, nothing attached.
fn load(config: &Config) -> anyhow::Result<(Maps, OwnedFd)> {
    let mut loaded = Loaded::for_fence(config)?;
    let maps = Maps::from_object(&loaded)?;
    maps.set_meta(&Meta {
        magic: MAGIC,
        abi: ABI_VERSION,
        backend: backend::FENCE,
        attached_ns: clock::boottime_ns(),
        object: object::object_id(),
        snapshot_ns: 0,
        wall_offset_ns: clock::wall_offset_ns(),
    })?;
    let program = loaded.program(&object::FENCE)?;
    Ok((maps, program))
}

fn cgroup_root(proc: &Path) -> anyhow::Result<PathBuf> {
    load::cgroup2_root(proc)
        .ok_or_else(|| Failure::unsupported(format!("a fence needs the whole cgroup2: {}", load::NO_CGROUP2)).into())
}

fn attach(program: &OwnedFd, root: &Path) -> anyhow::Result<OwnedFd> {
    let cgroup = File::open(root).map_err(|error| denied_or(root, error))?;
    sys::link_cgroup_device(program.as_fd(), cgroup.as_fd()).map_err(|error| {
        if error.kind() == std::io::ErrorKind::PermissionDenied {
            return rights::refused("a fence", load::PROBES, &error.to_string()).into();
        }
        Failure::unsupported(format!("this kernel does not let a fence be attached to {} ({error})", root.display()))
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing() -> Standing {
        let device = |slot| Device { slot, kind: 0 };
        let until = |deadline_ns| record::Fence { raised_ns: 0, deadline_ns };
        Standing {
            table: vec![
                (abi::dev(195, 0), device(0)),
                (abi::dev(195, 1), device(1)),
                (abi::dev(195, ANY_MINOR), device(2)),
                (abi::dev(4, 20), device(3)),
            ],
            fences: [(0, until(100)), (2, until(record::NO_DEADLINE))].into(),
            ..Standing::default()
        }
    }

    #[test]
    fn a_device_goes_before_the_others_of_its_major() {
        let standing = standing();
        for (major, minor, now, fenced) in [
            (195, Some(0), 99, true),
            (195, Some(0), 100, false),
            (195, Some(1), 0, false),
            (195, Some(7), 1 << 60, true),
            (195, None, 0, true),
            (4, Some(20), 0, false),
            (4, Some(21), 0, false),
            (4, None, 0, false),
        ] {
            assert_eq!(standing.refuses_device(major, minor, now), fenced, "{major}:{minor:?} at {now}");
        }
    }

    #[test]
    fn a_fence_is_over_with_its_last_device() {
        let mut standing = standing();
        assert!(!standing.is_over(100));
        standing.fences.remove(&2);
        assert!(!standing.is_over(99) && standing.is_over(100));
        assert!(Standing::default().is_over(0));
        assert_eq!((standing.closed(99), standing.closed(100)), ([0].into(), [].into()));
    }

    #[test]
    fn without_the_hosts_cgroup2_it_is_refused() {
        let error = cgroup_root(Path::new("/nonexistent")).unwrap_err();
        assert_eq!(crate::error::exit_of(&error), crate::exit_code::Exit::Unsupported);
    }
}
