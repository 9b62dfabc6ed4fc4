//! `gpureap.report/1`: what `report --json` prints, and what its text and its page are made of. Fields may be added, never
//! renamed within a schema number.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    event::{OomScope, Xid},
    rows::{Cause, HoldEnd, HoldOrigin, Thread},
};
use crate::{
    holders::report::{ExitReport, Role, rfc3339},
    model::DeviceKind,
};

pub const SCHEMA: &str = "gpureap.report/1";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: String,
    /// When it was made.
    #[serde(with = "rfc3339")]
    pub time: Timestamp,
    #[serde(with = "rfc3339")]
    pub since: Timestamp,
    #[serde(with = "rfc3339")]
    pub until: Timestamp,
    /// What was held at this instant, with `--at`; `since` and `until` are the same then.
    #[serde(with = "rfc3339::option")]
    pub at: Option<Timestamp>,
    /// Each boot of each host that the record of the window is of, oldest first.
    pub hosts: Vec<HostReport>,
    pub devices: Vec<DeviceReport>,
    /// Newest last.
    pub incidents: Vec<Incident>,
    pub holds: Vec<HoldReport>,
    /// Everyone who held something, by start.
    pub processes: Vec<ProcessReport>,
    pub xids: Vec<XidReport>,
    /// When nobody read along, or something was lost.
    pub gaps: Vec<Gap>,
    /// Plain sentences about what limits this report.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    pub host: String,
    pub boot_id: String,
    pub kernel: String,
    /// Of the boot.
    #[serde(with = "rfc3339")]
    pub booted: Timestamp,
    /// The last sign of life in the record.
    #[serde(with = "rfc3339")]
    pub last: Timestamp,
    /// Whether this boot is over, and how: still `running`, stopped as it should (`stopped`), or `down` with a time bound.
    pub state: HostState,
    /// By how much its wall clock was moved against the time since boot while it was recorded.
    pub clock_moved_ms: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostState {
    Running,
    Stopped,
    Down,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    pub host: String,
    pub node: String,
    pub kind: DeviceKind,
    pub gpu: Option<u32>,
    pub index: Option<u32>,
    pub uuid: Option<String>,
    pub bdf: Option<String>,
    pub model: Option<String>,
}

/// A process in a report: its host, pid and start together are its identity; the boot makes it unique for ever.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Who {
    pub host: String,
    pub boot_id: String,
    pub pid: u32,
    pub start_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldReport {
    #[serde(flatten)]
    pub who: Who,
    pub comm: String,
    pub node: String,
    #[serde(with = "rfc3339")]
    pub opened: Timestamp,
    /// Null: held still, or until the record ends.
    #[serde(with = "rfc3339::option")]
    pub released: Option<Timestamp>,
    pub ended: Option<HoldEnd>,
    pub origin: HoldOrigin,
    /// The most at any look.
    pub fds: u32,
    pub maps: u32,
    /// Null for nodes that all GPUs share.
    pub role: Option<Role>,
    pub inherited_from: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReport {
    #[serde(flatten)]
    pub who: Who,
    #[serde(with = "rfc3339")]
    pub started: Timestamp,
    pub nspids: Vec<u32>,
    pub comm: String,
    pub argv: Vec<String>,
    pub argv_cut: bool,
    pub exe: Option<String>,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub class: Option<String>,
    pub cgroup: Option<String>,
    pub unit: Option<String>,
    pub container: Option<String>,
    pub container_name: Option<String>,
    pub image: Option<String>,
    pub slurm_job: Option<String>,
    pub slurm_step: Option<String>,
    pub pod: Option<String>,
    pub pod_name: Option<String>,
    pub pod_namespace: Option<String>,
    /// `RANK` and the like, as `[journal] environment` has it.
    pub env: BTreeMap<String, String>,
    /// All that it had while it was recorded.
    pub threads: Vec<Thread>,
    /// From its parent at fork upwards.
    pub lineage: Vec<AncestorReport>,
    #[serde(with = "rfc3339::option")]
    pub exited: Option<Timestamp>,
    /// When the driver had let go of all that it held.
    #[serde(with = "rfc3339::option")]
    pub closed: Option<Timestamp>,
    /// Its wait status.
    pub exit: Option<ExitReport>,
    /// Null while it lives.
    pub death: Option<DeathReport>,
    /// The `id` of the incident that its end is part of.
    pub incident: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AncestorReport {
    pub pid: u32,
    pub start_ns: u64,
    pub comm: String,
    pub argv: Vec<String>,
    /// Null: not known to have ended.
    pub exit: Option<ExitReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeathReport {
    pub cause: Cause,
    pub code: Option<u32>,
    /// `SIGKILL`.
    pub signal: Option<String>,
    pub core: bool,
    #[serde(with = "rfc3339::option")]
    pub time: Option<Timestamp>,
    pub sender: Option<SenderReport>,
    /// The thread that raised the signal.
    pub thread: Option<Thread>,
    pub oom: Option<OomReport>,
    /// Plain sentences, the deciding one first.
    pub evidence: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SenderReport {
    pub pid: u32,
    pub start_ns: u64,
    pub tid: u32,
    pub thread: String,
    pub comm: String,
    pub argv: Vec<String>,
    pub uid: u32,
    pub user: Option<String>,
    pub lineage: Vec<AncestorReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomReport {
    pub scope: Option<OomScope>,
    pub cgroup: Option<String>,
}

/// Deaths that belong together, an Xid, or a host that went down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incident {
    /// Counts from 1 within the report.
    pub id: u32,
    #[serde(with = "rfc3339")]
    pub began: Timestamp,
    /// The last death of it.
    #[serde(with = "rfc3339")]
    pub ended: Timestamp,
    /// One sentence: what happened.
    pub title: String,
    pub cause: IncidentCause,
    /// Whose deaths these are.
    pub group: Group,
    /// In the order of their deaths.
    pub processes: Vec<Member>,
    /// Nodes of the GPUs that were held, by host.
    pub devices: Vec<HeldNode>,
    /// When the last of them was let go; null if one is held still.
    #[serde(with = "rfc3339::option")]
    pub freed: Option<Timestamp>,
    /// Positions in `xids`.
    pub xids: Vec<u32>,
    /// Plain sentences, the deciding one first.
    pub evidence: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IncidentCause {
    /// The first of them ended with a code that is not 0.
    Exited,
    KilledBy,
    OomKill,
    Fault,
    /// A watchdog thread ended its process because a peer had stalled.
    CollectiveTimeout,
    Reaped,
    HostDown,
    Xid,
    Unknown,
}

/// What the processes of an incident have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub by: GroupBy,
    /// `4711`, a container's or pod's name, the command of the common ancestor, …
    pub name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupBy {
    SlurmJob,
    Pod,
    Container,
    /// The same `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE`.
    RankSet,
    /// A common ancestor.
    Lineage,
    Process,
    Device,
    Host,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    #[serde(flatten)]
    pub who: Who,
    pub comm: String,
    pub rank: Option<u32>,
    pub part: Part,
    #[serde(with = "rfc3339::option")]
    pub time: Option<Timestamp>,
    pub cause: Option<Cause>,
    /// One clause: `killed by SIGKILL from pkill (pid 812)`.
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Who died first.
    First,
    /// Who died after it.
    Followed,
    /// Alive at the end, or the one whom the others waited for.
    Stalled,
    Survived,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HeldNode {
    pub host: String,
    pub node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct XidReport {
    pub host: String,
    #[serde(with = "rfc3339")]
    pub time: Timestamp,
    #[serde(flatten)]
    pub xid: Xid,
    pub class: XidClass,
    /// What NVIDIA's catalogue calls it.
    pub meaning: String,
    /// Who held the GPU at that instant.
    pub holders: Vec<Who>,
}

/// Who is to blame, by NVIDIA's catalogue of Xids and by what happened just before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum XidClass {
    Application,
    Hardware,
    Driver,
    /// The process that it names had been killed just before.
    ResultOfAKill,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    pub host: String,
    pub boot_id: String,
    #[serde(with = "rfc3339")]
    pub from: Timestamp,
    #[serde(with = "rfc3339::option")]
    pub to: Option<Timestamp>,
    /// Null: not known how many.
    pub events: Option<u64>,
    pub note: String,
}
