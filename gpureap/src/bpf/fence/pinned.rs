//! The fence that needs no process: program and maps pinned in `fence/` of the pin directory. There is one, for all
//! devices that are fenced so.
//!
//! ```text
//! fence/          locked by whoever changes anything below
//!   new/          being made; whoever comes next removes it
//!   set/          finished; renamed from `new` when it is attached
//!       META MAJORS DEVICES FENCE FENCE_TALLY EXEMPT DENIED  links/node_open_fence
//! ```

use std::{
    collections::BTreeSet,
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::AsFd as _,
        unix::fs::{DirBuilderExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use gpureap_common::{abi::MAX_SLOTS, fence as record, record::Device};
use rustix::fs::{FlockOperation, flock};

use super::{Exemptions, Standing, attach, cgroup_root, load, maps::Maps};
use crate::{
    bpf::{
        denied_or, distrusted,
        handles::{LINKS, PinError},
        object, pins, sys,
    },
    clock,
    config::Config,
    error::Failure,
    gpu::devices::Devices,
    kernel::rights,
    model::{self, Slot},
    trust,
};

const SET: &str = "set";
const UNFINISHED: &str = "new";

/// A change takes a fraction of a second; somebody who is at it for this long hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(5);
/// Who only reads, the daemon among them, does not wait so long.
const GLANCE: Duration = Duration::from_millis(50);

/// What a change left.
#[derive(Debug, Default)]
pub struct Changed {
    /// The fence after the change, or as it was when it was lowered.
    pub standing: Standing,
    /// Device numbers that were fenced before.
    pub before: BTreeSet<u32>,
    pub notes: Vec<String>,
}

/// The pinned fence, for reading.
#[derive(Debug)]
pub struct Pinned {
    maps: Maps,
    /// Tells this set from a later one.
    inode: u64,
}

impl Pinned {
    /// `None`: nothing is fenced so.
    pub fn open(config: &Config) -> anyhow::Result<Option<Self>> {
        let dir = set_dir(&config.paths.pin);
        let until = Instant::now() + GLANCE;
        loop {
            // While this is held, nobody is in the middle of a change.
            let quiet = File::open(config.paths.pin.join(pins::FENCE));
            let quiet = quiet.ok().filter(|dir| flock(dir, FlockOperation::NonBlockingLockShared).is_ok());
            let Some(inode) = inode(&dir)? else { return Ok(None) };
            trust::place(&config.paths.pin).map_err(distrusted)?;
            match open_set(&dir) {
                Ok(None) => return Ok(None),
                Ok(Some(maps)) => return Ok(Some(Self { maps, inode })),
                // It may be on its way out.
                Err(_) if quiet.is_none() && Instant::now() < until => thread::sleep(PAUSE),
                Err(reason) => return Err(unreadable(&reason).into()),
            }
        }
    }

    /// Whether this still is what is pinned.
    pub fn is_current(&self, config: &Config) -> bool {
        matches!(inode(&set_dir(&config.paths.pin)), Ok(Some(inode)) if inode == self.inode)
    }

    /// What is fenced, without who tried: cheap.
    pub fn outline(&self) -> anyhow::Result<Standing> {
        Ok(Standing { table: self.maps.table()?, fences: self.maps.fences()?, ..Standing::default() })
    }

    pub fn standing(&self) -> anyhow::Result<Standing> {
        self.maps.standing()
    }

    /// All refused opens, and whether every deadline has passed: what is cheap to ask again and again.
    pub fn glance(&self) -> anyhow::Result<(u64, bool)> {
        let over = Standing { fences: self.maps.fences()?, ..Standing::default() }.is_over(clock::boottime_ns());
        Ok((self.maps.tallies()?.values().map(|tally| tally.denied).sum(), over))
    }
}

/// What is fenced, if anything is.
pub fn read(config: &Config) -> anyhow::Result<Option<Standing>> {
    Pinned::open(config)?.map(|pinned| pinned.standing()).transpose()
}

/// Closes `slots` of `devices` until the boottime `deadline_ns`; those that are closed already get the new deadline. The
/// exempt are added to those that there are.
pub fn raise(
    config: &Config,
    devices: &Devices,
    slots: &BTreeSet<Slot>,
    deadline_ns: u64,
    exempt: &Exemptions,
) -> anyhow::Result<Changed> {
    rights::require_host_namespaces()?;
    let cgroup = cgroup_root(&config.paths.proc)?;
    let lock = Lock::wait(&config.paths.pin)?;
    let raised = raise_locked(&lock, config, devices, slots, deadline_ns, exempt, &cgroup);
    lock.tidy();
    raised
}

fn raise_locked(
    lock: &Lock,
    config: &Config,
    devices: &Devices,
    slots: &BTreeSet<Slot>,
    deadline_ns: u64,
    exempt: &Exemptions,
    cgroup: &Path,
) -> anyhow::Result<Changed> {
    let now = clock::boottime_ns();
    let mut notes = Vec::new();
    let (standing, unreadable) = match lock.open() {
        Ok(maps) => (maps, false),
        Err(reason) => {
            notes.push(format!("the fence that was there is replaced, and what else it had fenced is open: {reason}"));
            (None, true)
        }
    };
    if let Some(maps) = standing {
        let before = maps.standing()?;
        if !before.is_over(now) {
            let wanted = Wanted::of(&maps, devices, slots, exempt)?;
            for slot in before.fences.keys().filter(|slot| !before.refuses(**slot, now)) {
                maps.open_slot(*slot)?;
                maps.forget(*slot)?;
            }
            wanted.enter(&maps, deadline_ns, now)?;
            let numbers = before.table.iter().filter(|(_, device)| before.refuses(device.slot, now));
            return Ok(Changed {
                before: numbers.map(|(number, _)| *number).collect(),
                standing: maps.standing()?,
                notes,
            });
        }
        // With it go its exemptions: whoever was let through then was not named now.
        maps.open_all()?;
        lock.remove_set()?;
    }

    let (maps, program) = load(config)?;
    let new = lock.dir.join(UNFINISHED);
    pins::make(&new)?;
    let made = (|| {
        Wanted::of(&maps, devices, slots, exempt)?.enter(&maps, deadline_ns, now)?;
        maps.pin(&new)?;
        let link = attach(&program, cgroup)?;
        sys::pin(link.as_fd(), &new.join(LINKS).join(object::FENCE.name)).context("pin the fence")?;
        if unreadable {
            lock.remove_set()?;
        }
        fs::rename(&new, lock.dir.join(SET)).context("rename the pins of the fence")
    })();
    if let Err(error) = made {
        maps.open_all()?;
        pins::remove(&new);
        return Err(error);
    }
    Ok(Changed { before: BTreeSet::new(), standing: maps.standing()?, notes })
}

/// What is entered into a fence that has room for all of it: a command closes what it names, or changes nothing.
#[derive(Debug)]
struct Wanted<'a> {
    /// With the fence's own slots.
    devices: Devices,
    close: Vec<Slot>,
    exempt: &'a Exemptions,
}

impl<'a> Wanted<'a> {
    fn of(maps: &Maps, devices: &Devices, slots: &BTreeSet<Slot>, exempt: &'a Exemptions) -> anyhow::Result<Self> {
        let (known, room) = maps.exempt_room()?;
        Ok(Self::within(&maps.table()?, &known, room, devices, slots, exempt)?)
    }

    fn within(
        table: &[(u32, Device)],
        known: &Exemptions,
        room: usize,
        devices: &Devices,
        slots: &BTreeSet<Slot>,
        exempt: &'a Exemptions,
    ) -> Result<Self, Failure> {
        let count = known.processes.union(&exempt.processes).count() + known.cgroups.union(&exempt.cgroups).count();
        if count > room {
            return Err(Failure::unsupported(format!(
                "{count} exempt processes and cgroups, those of before included, are too many: a fence has room for {room}"
            )));
        }
        let all = devices.with_all_of(table);
        let slot = |device: &model::Device| {
            let own = all.list().iter().find(|other| other.number() == device.number());
            own.map(|device| device.slot).ok_or_else(|| {
                Failure::unsupported(format!(
                    "the fence has no room for {}: it has {MAX_SLOTS} devices, and keeps them until it is gone",
                    device.node.display()
                ))
            })
        };
        let close = slots.iter().filter_map(|slot| devices.get(*slot)).map(slot).collect::<Result<_, _>>()?;
        Ok(Self { devices: all, close, exempt })
    }

    fn enter(self, maps: &Maps, deadline_ns: u64, now: u64) -> anyhow::Result<()> {
        let Self { devices, close, exempt } = self;
        maps.add_devices(&devices)?;
        maps.exempt(exempt)?;
        let before = maps.fences()?;
        for slot in close {
            let raised_ns = before.get(&slot).map_or(now, |fence| fence.raised_ns);
            maps.close(slot, record::Fence { raised_ns, deadline_ns })?;
        }
        Ok(())
    }
}

/// Opens devices by number, or all; with the last one the fence goes. Returns what stood before, those opened among it.
pub fn lower(config: &Config, numbers: Option<&BTreeSet<u32>>) -> anyhow::Result<Changed> {
    let Some(lock) = Lock::of_existing(&config.paths.pin)? else { return Ok(Changed::default()) };
    let lowered = lower_locked(&lock, numbers);
    lock.tidy();
    lowered
}

fn lower_locked(lock: &Lock, numbers: Option<&BTreeSet<u32>>) -> anyhow::Result<Changed> {
    let now = clock::boottime_ns();
    let maps = match lock.open() {
        Ok(Some(maps)) => maps,
        Ok(None) => return Ok(Changed::default()),
        // Nobody can tell what it fences: it can only go as a whole.
        Err(reason) if numbers.is_none() => {
            lock.remove_set()?;
            let note =
                format!("a fence that this gpureap cannot read is removed, and what it had fenced is open: {reason}");
            return Ok(Changed { notes: vec![note], ..Changed::default() });
        }
        Err(reason) => return Err(unreadable(&reason).into()),
    };
    let standing = maps.standing()?;
    let mut left = standing.clone();
    for (number, device) in &standing.table {
        if numbers.is_none_or(|numbers| numbers.contains(number)) && left.fences.remove(&device.slot).is_some() {
            maps.open_slot(device.slot)?;
        }
    }
    let mut notes = Vec::new();
    if numbers.is_none() || left.is_over(now) {
        maps.open_all()?;
        // That was it; only the pins are left.
        notes.extend(
            lock.remove_set().err().map(|error| format!("the fence is open, but it cannot be removed: {error:#}")),
        );
    } else {
        for slot in standing.fences.keys().filter(|slot| !left.fences.contains_key(slot)) {
            maps.forget(*slot)?;
        }
    }
    let before = standing.table.iter().filter(|(_, device)| standing.refuses(device.slot, now));
    Ok(Changed { before: before.map(|(number, _)| *number).collect(), standing, notes })
}

/// Removes the fence if every deadline has passed; whether it did. Does not wait for somebody who is changing it.
pub fn remove_expired(config: &Config) -> anyhow::Result<bool> {
    let Some(lock) = Lock::try_existing(&config.paths.pin)? else { return Ok(false) };
    let over = match lock.open().map_err(|reason| unreadable(&reason))? {
        Some(maps) => Standing { fences: maps.fences()?, ..Standing::default() }.is_over(clock::boottime_ns()),
        None => false,
    };
    let removed = if over { lock.remove_set() } else { Ok(()) };
    lock.tidy();
    removed.map(|()| over)
}

/// Why a set is not read, in words for a fence.
fn why(error: PinError) -> String {
    match error {
        PinError::Abi { path, found } => format!("{path} is of another version of gpureap (ABI {found})"),
        error => error.to_string(),
    }
}

fn unreadable(reason: &str) -> Failure {
    Failure::unsupported(format!("{reason}; `gpureap unfence` without --gpu removes it, `gpureap fence` replaces it"))
}

fn set_dir(root: &Path) -> PathBuf {
    root.join(pins::FENCE).join(SET)
}

fn inode(dir: &Path) -> anyhow::Result<Option<u64>> {
    match fs::metadata(dir) {
        Ok(meta) => Ok(Some(meta.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(denied_or(dir, error)),
    }
}

/// The right to change the fence. It goes with the process.
#[derive(Debug)]
struct Lock {
    root: PathBuf,
    dir: PathBuf,
    _file: File,
}

impl Lock {
    /// Makes the directory if it is not there.
    fn wait(root: &Path) -> anyhow::Result<Self> {
        let until = Instant::now() + PATIENCE;
        loop {
            pins::make_root(root)?;
            let dir = root.join(pins::FENCE);
            DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(|error| denied_or(&dir, error))?;
            if let Some(lock) = Self::take(root)? {
                return Ok(lock);
            }
            pause(until)?;
        }
    }

    /// `None` when there is no fence.
    fn of_existing(root: &Path) -> anyhow::Result<Option<Self>> {
        let until = Instant::now() + PATIENCE;
        while inode(&root.join(pins::FENCE))?.is_some() {
            if let Some(lock) = Self::take(root)? {
                return Ok(Some(lock));
            }
            pause(until)?;
        }
        Ok(None)
    }

    /// `None` also when somebody else has it.
    fn try_existing(root: &Path) -> anyhow::Result<Option<Self>> {
        match inode(&root.join(pins::FENCE))? {
            Some(_) => Self::take(root),
            None => Ok(None),
        }
    }

    /// `None` when somebody else has it, or the directory was removed meanwhile.
    fn take(root: &Path) -> anyhow::Result<Option<Self>> {
        match trust::place(root) {
            Ok(_) => {}
            Err(error) if error.is_absent() => return Ok(None),
            Err(error) => return Err(distrusted(error)),
        }
        let dir = root.join(pins::FENCE);
        let file = match File::open(&dir) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(denied_or(&dir, error)),
        };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        if inode(&dir)? != Some(file.metadata()?.ino()) {
            return Ok(None);
        }
        let lock = Self { root: root.to_owned(), dir, _file: file };
        // Left by one that was killed.
        pins::remove(&lock.dir.join(UNFINISHED));
        Ok(Some(lock))
    }

    /// The finished set; why not, when there is one that this build cannot read, or that is not attached.
    fn open(&self) -> Result<Option<Maps>, String> {
        open_set(&self.dir.join(SET))
    }

    fn remove_set(&self) -> anyhow::Result<()> {
        let set = self.dir.join(SET);
        pins::remove_whole(&set).map_err(|error| denied_or(&set, error))
    }

    /// Leaves no empty directories.
    fn tidy(self) {
        fs::remove_dir(&self.dir).ok();
        // A tracer that has just made the directory to start in has its lock.
        if fs::read_dir(&self.root).is_ok_and(|mut entries| entries.next().is_none())
            && let Ok(root) = File::open(&self.root)
            && flock(&root, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            fs::remove_dir(&self.root).ok();
        }
    }
}

fn open_set(set: &Path) -> Result<Option<Maps>, String> {
    if !set.exists() {
        return Ok(None);
    }
    let link = set.join(LINKS).join(object::FENCE.name);
    if !link.exists() {
        return Err(format!("{} is gone, so it fences nothing", link.display()));
    }
    Maps::from_pins(set).map(Some).map_err(why)
}

fn pause(until: Instant) -> anyhow::Result<()> {
    if Instant::now() > until {
        return Err(Failure::unsupported("another gpureap is changing the fence and does not end").into());
    }
    thread::sleep(PAUSE);
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpureap_common::abi::dev;

    use super::*;
    use crate::{
        config::StandIn,
        gpu::devices::stand_ins_alone,
        model::{DeviceKind, ProcKey},
    };

    fn exempt(pids: std::ops::Range<u32>, cgroups: &[u64]) -> Exemptions {
        Exemptions {
            processes: pids.map(|pid| ProcKey::new(pid, 1)).collect(),
            cgroups: cgroups.iter().copied().collect(),
        }
    }

    #[test]
    fn nothing_is_entered_without_room_for_all_of_it() {
        let stand_ins = [20, 21].map(|minor| StandIn::new(4, minor, format!("/dev/tty{minor}").into()).unwrap());
        let devices = stand_ins_alone(&stand_ins).unwrap();
        let both: BTreeSet<Slot> = devices.gpus().map(|device| device.slot).collect();
        let table = |count: u32| -> Vec<(u32, Device)> {
            (0..count).map(|slot| (dev(5, slot), Device { slot, kind: DeviceKind::Standin as u32 })).collect()
        };
        let within = |count: u32, known: &Exemptions, new: &Exemptions| {
            let wanted = Wanted::within(&table(count), known, 4, &devices, &both, new);
            wanted.map(|wanted| wanted.close).map_err(|failure| failure.message)
        };
        let nobody = Exemptions::default();
        assert_eq!(within(0, &nobody, &nobody), Ok(vec![0, 1]));
        assert_eq!(within(MAX_SLOTS - 2, &nobody, &nobody), Ok(vec![MAX_SLOTS - 2, MAX_SLOTS - 1]));
        let full = within(MAX_SLOTS - 1, &nobody, &nobody).unwrap_err();
        assert!(full.contains("no room for /dev/tty21: it has 256 devices"), "{full}");
        // Somebody who is exempt already takes no room.
        assert!(within(0, &exempt(0..2, &[7]), &exempt(1..2, &[7, 8])).is_ok());
        let full = within(0, &exempt(0..2, &[7]), &exempt(2..3, &[7, 8])).unwrap_err();
        assert!(full.starts_with("5 exempt processes and cgroups") && full.ends_with("room for 4"), "{full}");
    }
}
