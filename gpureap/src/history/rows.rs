//! What the journal keeps, as plain data: the state machine makes these, the journal stores and finds them, the report
//! reads them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::event::{Device, Event, OomScope, Process, Sender};
use crate::{holders::report::Role, model::ProcKey};

/// A process: thread-group id and boottime of its leader's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    pub pid: u32,
    pub start_ns: u64,
}

impl From<ProcKey> for Key {
    fn from(key: ProcKey) -> Self {
        Self { pid: key.tgid, start_ns: key.start_ns }
    }
}

impl From<Key> for ProcKey {
    fn from(key: Key) -> Self {
        Self::new(key.pid, key.start_ns)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    pub tid: u32,
    pub name: String,
}

/// Where a process ran: the names that are gone when the job is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slurm_job: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slurm_step: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
}

/// A boot of a host. Times of all other rows are boottimes of theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    pub boot_id: String,
    pub host: String,
    pub kernel: String,
    /// Wall clock minus boottime, at the last start of a daemon: what turns boottimes into dates.
    pub wall_offset_ns: i64,
    /// The last sign of life: what was held is known until then.
    pub last_ns: u64,
}

/// One daemon's life. Between two of one boot the kernel goes on counting, but nobody reads along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub version: String,
    pub pid: u32,
    pub backend: String,
    pub adopted: bool,
    pub begin_ns: u64,
    /// `None`: it runs, or was killed.
    pub end_ns: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessRow {
    pub key: Key,
    pub comm: String,
    pub argv: Vec<String>,
    pub argv_cut: bool,
    pub exe: Option<String>,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub class: Option<String>,
    pub nspids: Vec<u32>,
    pub place: Place,
    pub env: BTreeMap<String, String>,
    /// By tid, dead threads included.
    pub threads: Vec<Thread>,
    pub parent: Option<Key>,
    /// It held nothing itself and is kept as an ancestor.
    pub ancestor: bool,
    pub exit_ns: Option<u64>,
    /// Wait status.
    pub status: Option<u32>,
    pub death: Option<Death>,
}

impl From<Process> for ProcessRow {
    fn from(process: Process) -> Self {
        let Process {
            key,
            comm,
            argv,
            argv_cut,
            exe,
            uid,
            user,
            class,
            nspids,
            place,
            env,
            threads,
            parent,
            ancestor,
            exit,
        } = process;
        Self {
            key,
            comm,
            argv,
            argv_cut,
            exe,
            uid,
            user,
            class,
            nspids,
            place,
            env,
            threads,
            parent,
            ancestor,
            exit_ns: exit.map(|exit| exit.boot_ns),
            status: exit.map(|exit| exit.status),
            death: None,
        }
    }
}

/// One process on one device, from the first descriptor to the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldRow {
    pub key: Key,
    pub node: String,
    pub opened_ns: u64,
    /// `None`: held still, or until the record of its boot ends.
    pub released_ns: Option<u64>,
    pub ended: Option<HoldEnd>,
    pub origin: HoldOrigin,
    /// The most at any look.
    pub fds: u32,
    pub maps: u32,
    pub role: Option<Role>,
    pub inherited_from: Option<Key>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HoldOrigin {
    /// Its open was seen.
    Opened,
    /// From the process it was forked from.
    Inherited,
    /// A descriptor that somebody else had opened.
    Received,
    /// Held since before there was a tracer.
    Snapshot,
    /// An open was seen, and it was over before anybody could look: it may have failed (`gate`).
    Unconfirmed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HoldEnd {
    /// Closed by a process that lived on.
    Closed,
    /// With the process.
    Exited,
    /// The record ends while it was held.
    HostDown,
    /// It was gone when the next daemon looked; when is not known better than between the two.
    Unseen,
}

/// How a process ended. Absent parts are null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Death {
    pub cause: Cause,
    /// Exit code.
    pub code: Option<u32>,
    /// `SIGKILL`.
    pub signal: Option<String>,
    pub core: bool,
    /// Boottime in the journal; the report has a date there.
    pub boot_ns: Option<u64>,
    pub sender: Option<Sender>,
    /// The thread that raised the signal.
    pub thread: Option<Thread>,
    pub oom: Option<OomDeath>,
    /// Plain sentences, the deciding one first.
    pub evidence: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// By itself, with `code`.
    Exited,
    /// By `signal` from `sender`.
    KilledBy,
    OomKill,
    /// By a signal that a thread of its own raised.
    Fault,
    /// By gpureap.
    Reaped,
    /// It held when the record of its boot ends.
    HostDown,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomDeath {
    pub scope: Option<OomScope>,
    pub cgroup: Option<String>,
}

/// What the state machine asks the journal to keep. Rows replace the row of the same identity: (boot, process), or
/// (boot, process, node, opened) of a hold.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A daemon starts: its boot, itself, its devices.
    Start {
        boot: Boot,
        run: Run,
        devices: Vec<Device>,
    },
    /// It stops.
    Stop {
        boot_ns: u64,
    },
    Process(Box<ProcessRow>),
    Hold(HoldRow),
    Event(Event),
    /// A sign of life while something is held.
    Heartbeat {
        boot_ns: u64,
    },
    /// The wall clock was set: from now on it is so far from the time since boot.
    Clock {
        wall_offset_ns: i64,
    },
    /// All that is held, for a journal that may have missed some of it: what else it has as held is held no more.
    Now {
        boot_ns: u64,
        processes: Vec<ProcessRow>,
        holds: Vec<HoldRow>,
    },
}

impl Change {
    /// Whether it must be on disk when its batch is written: deaths and what led to them, and the bound of a host-down.
    pub fn is_urgent(&self) -> bool {
        use super::event::What;
        match self {
            Self::Start { .. } | Self::Stop { .. } | Self::Heartbeat { .. } | Self::Clock { .. } | Self::Now { .. } => {
                true
            }
            Self::Process(row) => row.exit_ns.is_some(),
            Self::Hold(row) => row.released_ns.is_some(),
            Self::Event(event) => matches!(
                event.what,
                What::Signal(_) | What::Oom(_) | What::Xid(_) | What::Reap(_) | What::Exit(_) | What::Lost(_)
            ),
        }
    }
}

/// One boot as far as a question goes: what the report reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub boot: Boot,
    pub runs: Vec<Run>,
    pub devices: Vec<Device>,
    /// Every holder of the window, its ancestors, and what its signals name.
    pub processes: Vec<ProcessRow>,
    pub holds: Vec<HoldRow>,
    /// In the order of recording.
    pub events: Vec<Event>,
}
