//! `gpureap.event/1`: one thing that happened. What the daemon records, `gpureap events` prints, and a replay reads.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::rows::{Key, Place, Thread};
use crate::{
    holders::report::{Role, rfc3339},
    model::{Backend, DeviceKind},
};

pub const SCHEMA: &str = "gpureap.event/1";

/// One line of NDJSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Wall clock, by the offset of the moment it was recorded.
    #[serde(with = "rfc3339")]
    pub time: Timestamp,
    /// `CLOCK_BOOTTIME`: orders the events of one boot.
    pub boot_ns: u64,
    #[serde(flatten)]
    pub what: What,
}

/// What happened. Where a process is named, `pid` and `start_ns` are its identity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// A daemon begins to record.
    Start(Start),
    /// A daemon ends as it was told to.
    Stop,
    /// A driver's open begins (`kprobe`, `fentry`), or the gate let one through (`gate`). It may still fail.
    Open(FileEvent),
    /// A process that lives on has closed its last descriptor of a device; a mapping may be left (`kprobe`, `fentry`).
    Close(FileEvent),
    /// The last reference to a file is gone and the driver has released it (`kprobe`, `fentry`).
    Free(FileEvent),
    /// What a process holds at this instant, all of it; nothing: no more.
    Held(Held),
    /// A process that holds forked; it may have handed on what it had.
    Fork(Fork),
    Exec(Named),
    /// A thread of a holder was made, or has a new name.
    Thread(ThreadEvent),
    /// Who a process is, as far as it could be read.
    Process(Box<Process>),
    /// A signal to a holder that can end it.
    Signal(Signal),
    /// The kernel chose a victim because memory ran out.
    Oom(Oom),
    /// The driver reported an error.
    Xid(Xid),
    /// gpureap is about to signal a process; written before it does.
    Reap(Reap),
    /// The last thread of a holder is exiting; its files are still open.
    Exit(Exit),
    /// A process that was exiting has closed its files: the driver has let go.
    Closed(Subject),
    /// What another process of the same job was doing when one of them was about to die.
    Peer(Peer),
    /// Device memory by process, as NVML told.
    Memory(Memory),
    /// Something was not recorded.
    Lost(Lost),
}

/// A process and no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    #[serde(flatten)]
    pub key: Key,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    #[serde(flatten)]
    pub key: Key,
    pub comm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub boot_id: String,
    pub host: String,
    pub kernel: String,
    pub version: String,
    pub backend: Backend,
    /// The programs of an earlier daemon were taken over: they had gone on counting.
    pub adopted: bool,
    pub daemon_pid: u32,
    /// Wall clock minus boottime.
    pub wall_offset_ns: i64,
    pub devices: Vec<Device>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub node: String,
    pub major: u32,
    pub minor: Option<u32>,
    pub kind: DeviceKind,
    #[serde(default)]
    pub gpu: Option<u32>,
    #[serde(default)]
    pub index: Option<u32>,
    #[serde(default)]
    pub uuid: Option<String>,
    #[serde(default)]
    pub bdf: Option<String>,
    #[serde(default)]
    pub model: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEvent {
    /// Of an open, who opens. The task that happens to drop the last reference says nothing, so a free has none.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tid: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub comm: String,
    pub node: String,
    /// Address of the `struct file`, the same in its open and its free; 0 with `gate`, which does not know it.
    pub file: u64,
    /// Of a free: the open had failed, nobody ever held it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    #[serde(flatten)]
    pub key: Key,
    /// The process that it was forked from while that one held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inherited_from: Option<Key>,
    /// It held before there was a tracer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_snapshot: bool,
    pub devices: Vec<HeldDevice>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDevice {
    pub node: String,
    pub fds: u32,
    pub maps: u32,
    /// `None` for nodes that all GPUs share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Boottime of the first open, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_ns: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fork {
    /// The child.
    #[serde(flatten)]
    pub key: Key,
    pub parent: Key,
    pub comm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadEvent {
    #[serde(flatten)]
    pub key: Key,
    #[serde(flatten)]
    pub thread: Thread,
}

/// Who a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    #[serde(flatten)]
    pub key: Key,
    pub comm: String,
    #[serde(default)]
    pub argv: Vec<String>,
    /// The arguments were longer than what was kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub argv_cut: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exe: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// `job`, `monitor` or `system`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nspids: Vec<u32>,
    #[serde(flatten)]
    pub place: Place,
    /// The variables that are kept, see `[journal] environment`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<Thread>,
    /// As of the fork, or as /proc has it where the fork was not seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Key>,
    /// An ancestor of a holder that holds nothing itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ancestor: bool,
    /// Of an ancestor that was dead already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Ended>,
}

/// A death that only the kernel's memory tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    pub boot_ns: u64,
    /// Wait status.
    pub status: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    /// The target.
    #[serde(flatten)]
    pub key: Key,
    /// The thread that it was sent to, or that raised it.
    pub tid: u32,
    pub thread: String,
    /// `SIGKILL`.
    pub signal: String,
    /// `si_code` (`sigaction(2)`); absent where the kernel gave none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// Absent: the kernel itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sender: Option<Box<Sender>>,
    /// Of the kernel's own: the process that ran at that moment, which need not have to do with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<Box<Sender>>,
}

/// Who sent a signal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    #[serde(flatten)]
    pub key: Key,
    pub tid: u32,
    pub thread: String,
    pub comm: String,
    #[serde(default)]
    pub argv: Vec<String>,
    pub uid: u32,
    /// gpureap's own program.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gpureap: bool,
    /// From its parent upwards.
    #[serde(default)]
    pub lineage: Vec<Relative>,
}

/// One in a line of ancestors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relative {
    #[serde(flatten)]
    pub key: Key,
    pub comm: String,
    #[serde(default)]
    pub argv: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oom {
    /// Absent where only a thread id is known so far.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    pub tid: u32,
    pub comm: String,
    /// Known from the kernel's log alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<OomScope>,
    /// The cgroup whose limit was reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// `tracepoint` or `kmsg`.
    pub source: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OomScope {
    Cgroup,
    Global,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xid {
    /// PCI address as the driver prints it, completed to `0000:00:06.0`.
    pub bdf: String,
    /// The GPU's node, where the address is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    pub xid: u32,
    /// As the driver says; not an identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub message: String,
    /// `tracepoint` or `kmsg`.
    pub source: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reap {
    #[serde(flatten)]
    pub key: Key,
    /// Absent where a unit is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    pub by_pid: u32,
    pub by_uid: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    #[serde(flatten)]
    pub key: Key,
    /// The thread that went last.
    pub tid: u32,
    pub comm: String,
    /// Wait status; the kernel's word for the whole group.
    pub status: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    #[serde(flatten)]
    pub key: Key,
    /// The one that was about to die.
    pub of: Key,
    pub state: char,
    /// The kernel function that its main thread sleeps in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wchan: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub node: String,
    pub used_bytes: u64,
    pub total_bytes: u64,
    pub processes: Vec<ProcessMemory>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    pub pid: u32,
    pub bytes: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    pub events: u64,
    /// `ring`, `map`, `recorder`, `journal`, `reader`.
    pub at: String,
    /// A plain sentence.
    pub note: String,
}
