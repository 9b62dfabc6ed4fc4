//! A running tracer: adopted from pins or freshly attached.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use aya::maps::{Map, MapData, RingBuf};
use gpureap_common::abi::ABI_VERSION;
use rustix::fs::{FlockOperation, flock};

use super::{
    eyes::KernelEyes,
    handles::{Handles, LINKS},
    load::{self, Attached, KernelLog, Refusal},
    object::{self, When},
    pins::{self, Set},
    resync, sys,
};
use crate::{config::Config, error::Failure, gpu::devices::Devices, kernel::rights, model::Backend};

/// Keeps the programs attached; dropped, it removes the pins unless told to keep them.
pub struct Tracer {
    eyes: KernelEyes,
    pub backend: Backend,
    /// The pins of an earlier daemon were taken over: nothing was missed in between.
    pub adopted: bool,
    /// Sets that were tried before and what the kernel said.
    pub refusals: Vec<Refusal>,
    pub notes: Vec<String>,
    log: Option<KernelLog>,
    dir: PathBuf,
    keep: bool,
    /// One tracer per pin directory; the lock goes with the process.
    _lock: File,
}

impl Tracer {
    /// Adopts pins of this very build, or attaches anew beside what is there and then removes the old.
    pub fn start(config: &Config, devices: &Devices) -> anyhow::Result<Self> {
        rights::require_host_namespaces()?;
        let root = &config.paths.pin;
        pins::make_root(root)?;
        let started = Self::start_in(root, config, devices);
        if started.is_err() {
            // Gone only if nothing is left in it.
            fs::remove_dir(root).ok();
        }
        started
    }

    fn start_in(root: &Path, config: &Config, devices: &Devices) -> anyhow::Result<Self> {
        let lock = File::open(root).map_err(|error| super::denied_or(root, error))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(
                Failure::unsupported(format!("another gpureap traces with the pins in {}", root.display())).into()
            );
        }
        let unfinished = pins::unfinished(root);
        pins::remove(&unfinished);
        pins::remove_retired(root);
        let (sets, others) = pins::list(root).map_err(|error| super::denied_or(root, error))?;
        let mut notes: Vec<String> =
            others.iter().map(|path| format!("{} is not gpureap's and is left alone", path.display())).collect();
        let order = load::order(config);

        // What is pinned was loaded without its debug lines, or writes them where nobody reads them any more.
        for set in sets.iter().filter(|set| ours(set, &order) && !config.kernel_log) {
            match adopt(set, config, devices) {
                Ok(eyes) => {
                    for other in sets.iter().filter(|other| other.dir != set.dir) {
                        pins::remove(&other.dir);
                    }
                    return Ok(Self {
                        eyes,
                        backend: set.backend,
                        adopted: true,
                        refusals: Vec::new(),
                        notes,
                        log: None,
                        dir: set.dir.clone(),
                        keep: false,
                        _lock: lock,
                    });
                }
                Err(error) => notes.push(format!("pins in {} are not adopted: {error:#}", set.dir.display())),
            }
        }
        for set in sets.iter().filter(|set| config.kernel_log || !ours(set, &order)) {
            let why = match set.abi {
                ABI_VERSION if config.kernel_log => "a start without --kernel-log",
                ABI_VERSION => "another build or probe set",
                _ => "another ABI",
            };
            notes.push(format!("pins in {} are of {why} and are replaced", set.dir.display()));
        }

        let Attached { handles, backend, refusals, log } = load::attach(config, devices, &order, &unfinished)?;
        let mut started = Self {
            eyes: KernelEyes::new(handles, devices.clone(), Some(backend), config),
            backend,
            adopted: false,
            refusals,
            notes,
            log,
            dir: unfinished.clone(),
            keep: false,
            _lock: lock,
        };
        // Attached first, now the snapshot.
        let outcome = started.resync()?;
        if outcome.pending > 0 {
            started.notes.push(format!("{} counts were still moving at the first snapshot", outcome.pending));
        }
        let dir = root.join(pins::set_name(backend));
        // For readers the one follows the other at once.
        let retired: Vec<PathBuf> = sets.iter().map(|set| pins::retire(&set.dir)).collect();
        fs::rename(&unfinished, &dir).with_context(|| format!("rename pins to {}", dir.display()))?;
        started.dir = dir;
        for dir in &retired {
            pins::remove(dir);
        }
        Ok(started)
    }

    /// The debug lines of the kernel programs, where they were asked for; one reader.
    pub const fn take_log(&mut self) -> Option<KernelLog> {
        self.log.take()
    }

    pub const fn eyes(&self) -> &KernelEyes {
        &self.eyes
    }

    pub fn resync(&self) -> anyhow::Result<resync::Outcome> {
        self.eyes.resync()
    }

    /// The ring; one reader at a time.
    pub fn events(&self) -> anyhow::Result<RingBuf<MapData>> {
        let path = self.dir.join("EVENTS");
        let data = MapData::from_pin(&path).with_context(|| format!("open {}", path.display()))?;
        Ok(RingBuf::try_from(Map::from_map_data(data)?)?)
    }

    /// The driver was reloaded: its majors may have changed. Devices that stay keep their slots.
    pub fn set_devices(&mut self, devices: &Devices) -> anyhow::Result<()> {
        self.eyes.set_devices(devices)
    }

    /// Fails when somebody has taken the pins away: then nothing is attached any more.
    pub fn check(&self) -> anyhow::Result<()> {
        let present = fs::read_dir(self.dir.join(LINKS)).map_or(0, Iterator::count);
        let expected = self.eyes.handles().programs.attached.len();
        anyhow::ensure!(
            present >= expected,
            "{} of {expected} pinned links in {} are gone: nothing is traced any more",
            expected - present,
            self.dir.display()
        );
        Ok(())
    }

    /// Leaves the programs attached when this is dropped: the next daemon adopts them.
    pub const fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if !self.keep {
            pins::remove(&self.dir);
            fs::remove_dir(self.dir.parent().unwrap_or(Path::new("/"))).ok();
        }
    }
}

/// Whether a set of pins is what this build would make now.
fn ours(set: &Set, order: &[Backend]) -> bool {
    set.abi == ABI_VERSION && set.object == object::object_id() && order.contains(&set.backend)
}

fn adopt(set: &Set, config: &Config, devices: &Devices) -> anyhow::Result<KernelEyes> {
    let handles = Handles::from_pins(&set.dir)?;
    let links: BTreeSet<String> = fs::read_dir(set.dir.join(LINKS))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    let missing: Vec<&str> = object::COMMON
        .iter()
        .chain(object::set(set.backend))
        .filter(|program| program.when == When::Always && program.hook != object::Hook::OnDemand)
        .map(|program| program.name)
        .filter(|name| !links.contains(*name))
        .collect();
    anyhow::ensure!(missing.is_empty(), "{} not attached", missing.join(", "));
    let sizes = &config.maps;
    for (map, wanted, name) in [
        (&handles.maps.files, sizes.files, "files"),
        (&handles.maps.tables, sizes.tables, "tables"),
        (&handles.maps.holders, sizes.holders, "holders"),
        (&handles.maps.procs, sizes.procs, "procs"),
        (&handles.maps.lineage, sizes.lineage, "lineage"),
    ] {
        let has = sys::map_shape(map.as_fd())?.max_entries;
        anyhow::ensure!(has == wanted, "maps.{name} was {has} and is now {wanted}");
    }
    let mut eyes = KernelEyes::new(handles, devices.clone(), Some(set.backend), config);
    eyes.set_devices(devices)?;
    eyes.resync()?;
    Ok(eyes)
}
