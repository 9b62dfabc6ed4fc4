//! Descriptors of the maps and programs, whether pinned by a daemon or loaded by this process.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use aya::{Ebpf, maps::Map};
use gpureap_common::{
    abi::{ABI_VERSION, MAGIC},
    counter, fix,
    record::{Device, File, Holder, HolderKey, Lineage, Meta, Proc, ProcKey, Table},
    sweep::SweepRecord,
};

use super::sys::{self, Tasks};

/// Names of the maps that are pinned, with the sizes of key and value that this build reads.
pub const MAPS: &[(&str, usize, usize)] = &[
    ("META", 4, size_of::<Meta>()),
    ("MAJORS", 4, 4),
    ("DEVICES", 4, size_of::<Device>()),
    ("FILES", 8, size_of::<File>()),
    ("TABLES", 8, size_of::<Table>()),
    ("HOLDERS", size_of::<HolderKey>(), size_of::<Holder>()),
    ("PROCS", 4, size_of::<Proc>()),
    ("LINEAGE", size_of::<ProcKey>(), size_of::<Lineage>()),
    ("EVENTS", 0, 0),
    ("COUNTERS", 4, 8),
    ("STATE", 4, 8),
];

/// Why pinned maps cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("{path}: {error}")]
    Io { path: String, error: io::Error },
    #[error(
        "{path} is not gpureap's: its keys and values have {found_key} and {found_value} bytes, expected {key} and {value}"
    )]
    Shape { path: String, found_key: u32, found_value: u32, key: usize, value: usize },
    #[error(
        "the pins in {path} have ABI {found}, this gpureap reads ABI {ABI_VERSION}: restart the daemon with this version"
    )]
    Abi { path: String, found: u32 },
    #[error("the pins in {path} were not made by gpureap")]
    Foreign { path: String },
}

/// Descriptors of the maps.
#[derive(Debug)]
pub struct Maps {
    pub meta: OwnedFd,
    pub majors: OwnedFd,
    pub devices: OwnedFd,
    pub files: OwnedFd,
    pub tables: OwnedFd,
    pub holders: OwnedFd,
    pub procs: OwnedFd,
    pub lineage: OwnedFd,
    pub counters: OwnedFd,
    pub state: OwnedFd,
}

impl Maps {
    fn open(mut one: impl FnMut(&str) -> Result<OwnedFd, PinError>) -> Result<Self, PinError> {
        Ok(Self {
            meta: one("META")?,
            majors: one("MAJORS")?,
            devices: one("DEVICES")?,
            files: one("FILES")?,
            tables: one("TABLES")?,
            holders: one("HOLDERS")?,
            procs: one("PROCS")?,
            lineage: one("LINEAGE")?,
            counters: one("COUNTERS")?,
            state: one("STATE")?,
        })
    }

    /// Opens pinned maps. Sizes are checked before anything is read through them, then the ABI record.
    pub fn from_pins(dir: &Path) -> Result<Self, PinError> {
        let maps = Self::open(|name| {
            let &(_, key, value) = MAPS.iter().find(|known| known.0 == name).expect("every name is in MAPS");
            pinned_map(dir, name, key, value)
        })?;
        check_meta(maps.meta.as_fd(), dir)?;
        Ok(maps)
    }

    pub fn from_object(ebpf: &Ebpf) -> Result<Self, PinError> {
        Self::open(|name| object_map(ebpf, name))
    }

    pub fn meta(&self) -> io::Result<Meta> {
        Ok(sys::lookup(self.meta.as_fd(), &0_u32)?.unwrap_or_default())
    }

    pub fn set_meta(&self, meta: &Meta) -> io::Result<()> {
        sys::update(self.meta.as_fd(), &0_u32, meta, sys::ANY).map(drop)
    }

    /// Device numbers that the kernel counts, with their slots.
    pub fn devices(&self) -> io::Result<Vec<(u32, Device)>> {
        sys::dump(self.devices.as_fd())
    }

    pub fn counter(&self, index: u32) -> io::Result<u64> {
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
        sys::lookup_per_cpu_sum(self.counters.as_fd(), index, cpus)
    }

    pub fn counters(&self) -> io::Result<Vec<(&'static str, u64)>> {
        (0..counter::COUNT).map(|index| Ok((counter::NAMES[index as usize], self.counter(index)?))).collect()
    }

    pub fn ancestor(&self, key: ProcKey) -> io::Result<Option<Lineage>> {
        sys::lookup(self.lineage.as_fd(), &key)
    }

    /// How many processes `LINEAGE` has dropped, at the least: what was put in beyond its room.
    pub fn forgotten(&self) -> io::Result<u64> {
        let room = sys::map_shape(self.lineage.as_fd())?.max_entries;
        Ok(self.counter(counter::LINEAGE_INSERTS)?.saturating_sub(u64::from(room)))
    }

    pub fn state(&self, word: State) -> io::Result<u64> {
        Ok(sys::lookup(self.state.as_fd(), &(word as u32))?.unwrap_or(0))
    }

    pub fn set_state(&self, word: State, value: u64) -> io::Result<()> {
        sys::update(self.state.as_fd(), &(word as u32), &value, sys::ANY).map(drop)
    }
}

/// Opens a pinned map whose keys and values have these sizes.
pub(super) fn pinned_map(dir: &Path, name: &str, key: usize, value: usize) -> Result<OwnedFd, PinError> {
    let path = dir.join(name);
    let at = || path.display().to_string();
    let io = |error| PinError::Io { path: at(), error };
    let map = sys::get(&path).map_err(io)?;
    let shape = sys::map_shape(map.as_fd()).map_err(io)?;
    if shape.key_size as usize != key || shape.value_size as usize != value {
        let (found_key, found_value) = (shape.key_size, shape.value_size);
        return Err(PinError::Shape { path: at(), found_key, found_value, key, value });
    }
    Ok(map)
}

/// Whether the record `META` says that this build can read the pins beside it.
pub(super) fn check_meta(meta: BorrowedFd<'_>, dir: &Path) -> Result<(), PinError> {
    let path = || dir.display().to_string();
    let Meta { magic, abi, .. } =
        sys::lookup::<u32, Meta>(meta, &0).map_err(|error| PinError::Io { path: path(), error })?.unwrap_or_default();
    match (magic, abi) {
        (MAGIC, ABI_VERSION) => Ok(()),
        (MAGIC, found) => Err(PinError::Abi { path: path(), found }),
        _ => Err(PinError::Foreign { path: path() }),
    }
}

/// A map of a loaded object.
pub(super) fn object_map(ebpf: &Ebpf, name: &str) -> Result<OwnedFd, PinError> {
    let io = |error| PinError::Io { path: format!("map {name}"), error };
    let map = ebpf.map(name).ok_or_else(|| io(io::ErrorKind::NotFound.into()))?;
    let (Map::Array(data) | Map::HashMap(data) | Map::LruHashMap(data) | Map::PerCpuArray(data) | Map::RingBuf(data)) =
        map
    else {
        return Err(io(io::ErrorKind::InvalidData.into()));
    };
    sys::dup(data.fd()).map_err(io)
}

/// Words of the map `STATE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Boottime of the last full sweep.
    Swept = 0,
    /// Sum of all losses that a resync has healed.
    Healed = 1,
    /// Device opens that the gate had let through before the last sweep began.
    BaseOpens = 2,
    /// Device files that the last sweep found.
    BaseFiles = 3,
    /// Ties the two words above together: a reader that meets half an update sweeps again.
    BaseCheck = 4,
    /// Sequence number of the last record of the kernel's log that was read.
    LogRead = 5,
    /// Losses of the maps, and records that found the ring full, as far as a daemon has told of them.
    ToldLost = 6,
    ToldFull = 7,
}

/// Descriptors of the programs that user space runs.
#[derive(Debug)]
pub struct Programs {
    pub sweep_fds: OwnedFd,
    /// Absent before 6.1.
    pub sweep_maps: Option<OwnedFd>,
    pub sweep_lineage: OwnedFd,
    pub fix: Option<OwnedFd>,
    /// Attached programs, asked for how often the kernel skipped them.
    pub attached: Vec<(String, OwnedFd)>,
}

/// Everything a reader needs.
#[derive(Debug)]
pub struct Handles {
    pub maps: Maps,
    pub programs: Programs,
}

/// Subdirectories of a pin directory.
pub const PROGRAMS: &str = "programs";
pub const LINKS: &str = "links";

impl Handles {
    pub fn from_pins(dir: &Path) -> Result<Self, PinError> {
        let maps = Maps::from_pins(dir)?;
        let programs = dir.join(PROGRAMS);
        let get = |name: &str| {
            let path = programs.join(name);
            sys::get(&path).map_err(|error| PinError::Io { path: path.display().to_string(), error })
        };
        let links = dir.join(LINKS);
        let mut attached = Vec::new();
        let listing =
            std::fs::read_dir(&links).map_err(|error| PinError::Io { path: links.display().to_string(), error })?;
        for entry in listing.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let program = get(&name)?;
            attached.push((name, program));
        }
        attached.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self {
            maps,
            programs: Programs {
                sweep_fds: get("sweep_fds")?,
                sweep_maps: get("sweep_maps").ok(),
                sweep_lineage: get("sweep_lineage")?,
                fix: Some(get("fix")?),
                attached,
            },
        })
    }

    /// All losses since the attach: counted ones and programs that the kernel skipped.
    pub fn losses(&self) -> io::Result<u64> {
        let mut sum = 0;
        for index in counter::LOSSES {
            sum += self.maps.counter(index)?;
        }
        Ok(sum + self.skipped()?)
    }

    /// How often the kernel skipped an attached program.
    pub fn skipped(&self) -> io::Result<u64> {
        self.programs
            .attached
            .iter()
            .map(|(_, program)| sys::skipped(program.as_fd()).map(Option::unwrap_or_default))
            .sum()
    }

    /// Descriptors and mappings of these tasks.
    pub fn sweep(&self, tasks: Tasks) -> io::Result<Vec<SweepRecord>> {
        let mut records = sys::iterate(self.programs.sweep_fds.as_fd(), tasks)?;
        if let Some(program) = &self.programs.sweep_maps {
            records.extend(sys::iterate::<SweepRecord>(program.as_fd(), tasks)?);
        }
        Ok(records)
    }

    pub fn sweep_lineage(&self) -> io::Result<()> {
        sys::iterate::<SweepRecord>(self.programs.sweep_lineage.as_fd(), Tasks::All).map(drop)
    }

    pub fn fix(&self, arguments: &[u64]) -> io::Result<u32> {
        let Some(program) = &self.programs.fix else { return Err(io::ErrorKind::Unsupported.into()) };
        let mut all = [0; fix::ARGUMENTS];
        all[..arguments.len()].copy_from_slice(arguments);
        sys::run_raw_tracepoint(program.as_fd(), &all)
    }

    pub fn files(&self) -> io::Result<Vec<(u64, File)>> {
        sys::dump(self.maps.files.as_fd())
    }

    pub fn tables(&self) -> io::Result<Vec<(u64, Table)>> {
        sys::dump(self.maps.tables.as_fd())
    }

    pub fn holders(&self) -> io::Result<Vec<(HolderKey, Holder)>> {
        sys::dump(self.maps.holders.as_fd())
    }

    pub fn process(&self, tgid: u32) -> io::Result<Option<Proc>> {
        sys::lookup(self.maps.procs.as_fd(), &tgid)
    }

    pub fn procs(&self) -> io::Result<Vec<(u32, Proc)>> {
        sys::dump(self.maps.procs.as_fd())
    }
}

/// The descriptor of a loaded program.
pub fn program_fd(program: &aya::programs::Program) -> Result<BorrowedFd<'_>, aya::programs::ProgramError> {
    program.fd().map(|fd| fd.as_fd())
}
