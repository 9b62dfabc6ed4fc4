//! Plain data that the rest is written over: what the kernel said, joined to processes and devices. No I/O here.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use gpureap_common::abi::{self, ANY_MINOR};
pub use gpureap_common::record::ProcKey;
use serde::{Deserialize, Serialize};

/// Index of a device in the table that user space gives the kernel.
pub type Slot = u32;

/// The probe set that feeds the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    Kprobe,
    Fentry,
    Gate,
}

impl Backend {
    /// Whether it counts every descriptor and file in the kernel; `gate` only names candidates.
    pub const fn counts(self) -> bool {
        matches!(self, Self::Kprobe | Self::Fentry)
    }
}

/// Where a view comes from: the always-on map, a one-shot sweep by iterators, or /proc for what the caller may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Map,
    Snapshot,
    Proc,
}

/// How a process, or nobody, holds a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum How {
    #[serde(rename = "fd")]
    Fd,
    #[serde(rename = "map")]
    Map,
    #[serde(rename = "private-fd-table")]
    PrivateFdTable,
    #[serde(rename = "zombie-leader")]
    ZombieLeader,
    #[serde(rename = "deleted-node")]
    DeletedNode,
    #[serde(rename = "in-flight")]
    InFlight,
    #[serde(rename = "io_uring")]
    IoUring,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    Gpu,
    Ctl,
    Uvm,
    UvmTools,
    Modeset,
    Cap,
    Imex,
    Nvswitch,
    Nvlink,
    Standin,
}

impl DeviceKind {
    /// Whether this node is a GPU to be freed, or one that all GPUs share.
    pub const fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu | Self::Standin)
    }
}

/// One device node. Matched by device number alone; the path is for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub slot: Slot,
    pub node: PathBuf,
    pub major: u32,
    /// `None`: every minor of the major without an entry of its own.
    pub minor: Option<u32>,
    pub kind: DeviceKind,
    /// The device-node minor of a GPU; for a stand-in, its position among the stand-ins.
    pub gpu: Option<u32>,
    /// NVML's index, when known.
    pub index: Option<u32>,
    pub uuid: Option<String>,
    /// PCI address, `0000:00:06.0`.
    pub bdf: Option<String>,
    pub model: Option<String>,
}

impl Device {
    /// The device number under which the kernel's tables have it.
    pub fn number(&self) -> u32 {
        abi::dev(self.major, self.minor.unwrap_or(ANY_MINOR))
    }
}

/// What people call a slot.
pub fn node_name(device: Option<&Device>, slot: Slot) -> String {
    device.map_or_else(|| format!("slot {slot}"), |device| device.node.display().to_string())
}

/// What one process has of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Descriptors, over all of the process's tables.
    pub fds: u32,
    /// Mappings (VMAs).
    pub maps: u32,
    pub first_open_ns: Option<u64>,
    pub last_open_ns: Option<u64>,
    /// The process, or one that it was forked from, has mapped the device at some time.
    pub ever_mapped: bool,
}

impl Usage {
    /// Whether anything keeps the device at this moment.
    pub const fn is_held(&self) -> bool {
        self.fds > 0 || self.maps > 0
    }
}

/// A process that holds at least one device file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub key: ProcKey,
    pub usage: BTreeMap<Slot, Usage>,
    pub how: BTreeSet<How>,
    /// Threads that have a descriptor table of their own with a device in it.
    pub private_tids: BTreeSet<u32>,
    /// The process that it was forked from while that one was of interest.
    pub inherited_from: Option<ProcKey>,
    /// Held since before the tracer was attached.
    pub from_snapshot: bool,
}

impl Holder {
    /// The devices that it keeps at this moment.
    pub fn held(&self) -> impl Iterator<Item = Slot> {
        self.usage.iter().filter(|(_, usage)| usage.is_held()).map(|(slot, _)| *slot)
    }
}

/// Device files that no process's tables or mappings refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub slot: Slot,
    pub files: u32,
    pub how: How,
    pub last_owner: Option<(ProcKey, String)>,
}

/// One consistent look at who holds what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub source: Source,
    /// The probe set, when a tracer is attached.
    pub backend: Option<Backend>,
    /// False when something is known to be out of sight: an unhealed loss, a full map, a process that may not be read.
    pub complete: bool,
    /// Kinds of holding that this source can never see.
    pub cannot_see: BTreeSet<How>,
    /// Losses since the attach, healed ones included.
    pub lost_events: u64,
    /// Boottime of the last full sweep.
    pub swept_ns: Option<u64>,
    /// Live device files by slot, as far as the source can count them.
    pub open_files: BTreeMap<Slot, u32>,
    pub holders: Vec<Holder>,
    pub orphans: Vec<Orphan>,
    /// Plain sentences about what limits this view.
    pub notes: Vec<String>,
}

/// What is remembered of a process, dead or alive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ancestor {
    pub key: ProcKey,
    pub parent: Option<ProcKey>,
    pub comm: String,
    /// As far as the kernel kept them.
    pub argv: Vec<String>,
    pub argv_cut: bool,
    pub uid: u32,
    pub cgroup_id: u64,
    /// Boottime of the death and the wait status.
    pub exit: Option<(u64, u32)>,
    /// Its record was dropped for want of room and made anew while it lived: the parent is the one that it had then.
    pub renewed: bool,
}

/// Answers from the kernel's memory of processes.
pub trait LineageSource {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor>;
    /// How many processes it has forgotten for want of room, at the least; `None` where that is not known.
    fn forgotten(&self) -> Option<u64> {
        None
    }
}

/// A source that remembers nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLineage;

impl LineageSource for NoLineage {
    fn lookup(&self, _key: ProcKey) -> Option<Ancestor> {
        None
    }
}

/// Where views come from; implemented over the kernel's maps and iterators, and by tests.
pub trait Eyes {
    /// The usual look: the map if a tracer runs.
    fn view(&self) -> anyhow::Result<View>;
    /// A full walk of all tasks in the kernel: the proof.
    fn sweep(&self) -> anyhow::Result<View>;
    /// What one process holds at this instant; `None` if nothing.
    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>>;
    fn lineage(&self) -> &dyn LineageSource;
    /// The caller has until that boottime; who asks somebody else is to be done soon after.
    fn give_up_at(&self, _boottime_ns: u64) {}
}
