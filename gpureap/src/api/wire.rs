//! What goes over the socket. The types are the protocol: they change only by new fields, and readers ignore those that
//! they do not know. The model is converted to them and back, never sent as it is.

use std::collections::{BTreeMap, BTreeSet};

use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IgnoredAny},
};

use crate::model::{self, Backend, DeviceKind, How, ProcKey, Slot, Source};

pub const VERSION: u32 = 1;

/// Bytes of the longest request.
pub const MAX_REQUEST: usize = 32 << 10;
/// Bytes of the longest answer that a client takes.
pub const MAX_ANSWER: usize = 64 << 20;
/// Processes in one request for lineage.
pub const MAX_KEYS: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub v: u32,
    pub get: Get,
    /// For `look_at`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// For `lineage`: at most [`MAX_KEYS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub of: Vec<Key>,
}

impl Request {
    pub const fn new(get: Get) -> Self {
        Self { v: VERSION, get, pid: None, of: Vec::new() }
    }

    pub fn look_at(pid: u32) -> Self {
        Self { pid: Some(pid), ..Self::new(Get::LookAt) }
    }

    pub fn lineage(of: &[ProcKey]) -> Self {
        Self { of: of.iter().copied().map(Key::from).collect(), ..Self::new(Get::Lineage) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Get {
    View,
    Sweep,
    LookAt,
    Lineage,
    Devices,
    Status,
    /// A line for each burst of events, until the client hangs up.
    Events,
    /// Each event of the flight recorder (`gpureap.event/1`), until the client hangs up.
    Follow,
}

/// An answer as it is written; `T` is one of the types below.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer<T> {
    pub v: u32,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub answer: Option<T>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
}

const fn none<T>() -> Option<T> {
    None
}

impl<T> Answer<T> {
    pub const fn of(answer: T) -> Self {
        Self { v: VERSION, answer: Some(answer), error: None }
    }
}

/// Reads an answer. In another version the same words may mean something else.
pub fn answer<T: DeserializeOwned>(bytes: &[u8]) -> Result<Answer<T>, String> {
    #[derive(Deserialize)]
    struct Spoken {
        v: u32,
    }
    let answer: Result<Answer<T>, _> = serde_json::from_slice(bytes);
    let spoken = || serde_json::from_slice(bytes).ok().map(|Spoken { v }| v);
    match answer.as_ref().map_or_else(|_| spoken(), |answer| Some(answer.v)) {
        Some(v) if v != VERSION => {
            Err(format!("it is of version {v} of the protocol, and this gpureap speaks {VERSION}"))
        }
        _ => answer.map_err(|error| error.to_string()),
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub code: Code,
    pub message: String,
    /// For `busy`: when to ask again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_ms: Option<u64>,
}

impl Refusal {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_ms: None }
    }

    pub fn busy(message: &str, retry_ms: u64) -> Self {
        Self { retry_ms: Some(retry_ms), ..Self::new(Code::Busy, message) }
    }

    /// The line to write.
    pub fn line(&self) -> Vec<u8> {
        line(&Answer::<()> { v: VERSION, answer: None, error: Some(self.clone()) })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    BadRequest,
    Version,
    Busy,
    Failed,
    /// One that this build does not know.
    #[serde(other)]
    Other,
}

/// One line of JSON. What goes over the wire has string keys and no foreign types, so it always can be written.
pub fn line(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).expect("plain data is JSON");
    bytes.push(b'\n');
    bytes
}

/// A request, or why it is none.
pub fn parse(bytes: &[u8]) -> Result<Request, Refusal> {
    /// All that must be understood of a request of another version.
    #[derive(Deserialize)]
    struct Version {
        v: u32,
        #[serde(rename = "get")]
        _get: IgnoredAny,
    }
    let bad = |error: serde_json::Error| Refusal::new(Code::BadRequest, format!("not a request: {error}"));
    let Version { v, _get } = serde_json::from_slice(bytes).map_err(bad)?;
    if v != VERSION {
        return Err(Refusal::new(Code::Version, format!("version {v} is not spoken here, but {VERSION}")));
    }
    let request: Request = serde_json::from_slice(bytes).map_err(bad)?;
    match request {
        Request { get: Get::LookAt, pid: None, .. } => Err(Refusal::new(Code::BadRequest, "look_at needs a pid")),
        Request { ref of, .. } if of.len() > MAX_KEYS => {
            Err(Refusal::new(Code::BadRequest, format!("more than {MAX_KEYS} processes in one request")))
        }
        request => Ok(request),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    fn from(Key { pid, start_ns }: Key) -> Self {
        Self::new(pid, start_ns)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub slot: Slot,
    #[serde(default)]
    pub fds: u32,
    #[serde(default)]
    pub maps: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_open_ns: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_open_ns: Option<u64>,
    #[serde(default)]
    pub ever_mapped: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    #[serde(flatten)]
    pub key: Key,
    pub usage: Vec<Usage>,
    #[serde(default)]
    pub how: BTreeSet<How>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub private_tids: BTreeSet<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inherited_from: Option<Key>,
    #[serde(default)]
    pub from_snapshot: bool,
}

impl From<model::Holder> for Holder {
    fn from(holder: model::Holder) -> Self {
        let model::Holder { key, usage, how, private_tids, inherited_from, from_snapshot } = holder;
        let usage = usage.into_iter().map(|(slot, usage)| {
            let model::Usage { fds, maps, first_open_ns, last_open_ns, ever_mapped } = usage;
            Usage { slot, fds, maps, first_open_ns, last_open_ns, ever_mapped }
        });
        Self {
            key: key.into(),
            usage: usage.collect(),
            how,
            private_tids,
            inherited_from: inherited_from.map(Key::from),
            from_snapshot,
        }
    }
}

impl From<Holder> for model::Holder {
    fn from(holder: Holder) -> Self {
        let Holder { key, usage, how, private_tids, inherited_from, from_snapshot } = holder;
        let usage = usage.into_iter().map(|usage| {
            let Usage { slot, fds, maps, first_open_ns, last_open_ns, ever_mapped } = usage;
            (slot, model::Usage { fds, maps, first_open_ns, last_open_ns, ever_mapped })
        });
        Self {
            key: key.into(),
            usage: usage.collect(),
            how,
            private_tids,
            inherited_from: inherited_from.map(ProcKey::from),
            from_snapshot,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orphan {
    pub slot: Slot,
    pub files: u32,
    pub how: How,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_owner: Option<Owner>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    #[serde(flatten)]
    pub key: Key,
    #[serde(default)]
    pub comm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    pub source: Source,
    pub backend: Option<Backend>,
    pub complete: bool,
    #[serde(default)]
    pub cannot_see: BTreeSet<How>,
    #[serde(default)]
    pub lost_events: u64,
    #[serde(default)]
    pub swept_ns: Option<u64>,
    /// Slot to files; JSON has its keys as text.
    #[serde(default)]
    pub open_files: BTreeMap<Slot, u32>,
    pub holders: Vec<Holder>,
    #[serde(default)]
    pub orphans: Vec<Orphan>,
    #[serde(default)]
    pub notes: Vec<String>,
}

impl From<model::View> for View {
    fn from(view: model::View) -> Self {
        let model::View {
            source,
            backend,
            complete,
            cannot_see,
            lost_events,
            swept_ns,
            open_files,
            holders,
            orphans,
            notes,
        } = view;
        let orphans = orphans.into_iter().map(|orphan| {
            let model::Orphan { slot, files, how, last_owner } = orphan;
            Orphan { slot, files, how, last_owner: last_owner.map(|(key, comm)| Owner { key: key.into(), comm }) }
        });
        Self {
            source,
            backend,
            complete,
            cannot_see,
            lost_events,
            swept_ns,
            open_files,
            holders: holders.into_iter().map(Holder::from).collect(),
            orphans: orphans.collect(),
            notes,
        }
    }
}

impl From<View> for model::View {
    fn from(view: View) -> Self {
        let View { source, backend, complete, cannot_see, lost_events, swept_ns, open_files, holders, orphans, notes } =
            view;
        let orphans = orphans.into_iter().map(|orphan| {
            let Orphan { slot, files, how, last_owner } = orphan;
            let last_owner = last_owner.map(|Owner { key, comm }| (key.into(), comm));
            model::Orphan { slot, files, how, last_owner }
        });
        Self {
            source,
            backend,
            complete,
            cannot_see,
            lost_events,
            swept_ns,
            open_files,
            holders: holders.into_iter().map(model::Holder::from).collect(),
            orphans: orphans.collect(),
            notes,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ancestor {
    #[serde(flatten)]
    pub key: Key,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Key>,
    #[serde(default)]
    pub comm: String,
    #[serde(default)]
    pub argv: Vec<String>,
    #[serde(default)]
    pub argv_cut: bool,
    pub uid: u32,
    #[serde(default)]
    pub cgroup_id: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub renewed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    pub time_ns: u64,
    /// Wait status.
    pub status: u32,
}

impl From<model::Ancestor> for Ancestor {
    fn from(ancestor: model::Ancestor) -> Self {
        let model::Ancestor { key, parent, comm, argv, argv_cut, uid, cgroup_id, exit, renewed } = ancestor;
        Self {
            key: key.into(),
            parent: parent.map(Key::from),
            comm,
            argv,
            argv_cut,
            uid,
            cgroup_id,
            exit: exit.map(|(time_ns, status)| Exit { time_ns, status }),
            renewed,
        }
    }
}

impl From<Ancestor> for model::Ancestor {
    fn from(ancestor: Ancestor) -> Self {
        let Ancestor { key, parent, comm, argv, argv_cut, uid, cgroup_id, exit, renewed } = ancestor;
        Self {
            key: key.into(),
            parent: parent.map(ProcKey::from),
            comm,
            argv,
            argv_cut,
            uid,
            cgroup_id,
            exit: exit.map(|Exit { time_ns, status }| (time_ns, status)),
            renewed,
        }
    }
}

/// `holder` is null where the process holds nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookAt {
    pub holder: Option<Holder>,
}

/// The asked processes that are known and, up to 64 steps, the parents they were forked from, each once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    pub processes: Vec<Ancestor>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub slot: Slot,
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
    /// Its own node exists.
    #[serde(default)]
    pub present: bool,
}

impl Device {
    pub fn new(device: &model::Device, present: bool) -> Self {
        let model::Device { slot, node, major, minor, kind, gpu, index, uuid, bdf, model } = device.clone();
        let node = node.to_string_lossy().into_owned();
        Self { slot, node, major, minor, kind, gpu, index, uuid, bdf, model, present }
    }
}

impl From<Device> for model::Device {
    fn from(device: Device) -> Self {
        let Device { slot, node, major, minor, kind, gpu, index, uuid, bdf, model, present: _ } = device;
        Self { slot, node: node.into(), major, minor, kind, gpu, index, uuid, bdf, model }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    pub devices: Vec<Device>,
    #[serde(default)]
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub backend: Backend,
    /// The pins of an earlier daemon were taken over at the start.
    pub adopted: bool,
    pub devices: u32,
    pub lost_events: u64,
}

/// What `events` writes: how many bursts of records the ring has given since the daemon's start. At once, then after
/// each burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    pub events: u64,
}

#[cfg(test)]
mod tests;
