//! `gpureap.holders/1`: what `holders --json` prints. Fields may be added, never renamed within a schema number.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    classify::Class,
    model::{Backend, DeviceKind, How, Source},
};

pub const SCHEMA: &str = "gpureap.holders/1";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldersReport {
    pub schema: String,
    pub host: String,
    pub boot_id: String,
    #[serde(with = "rfc3339")]
    pub time: Timestamp,
    pub source: Source,
    pub backend: Option<Backend>,
    pub complete: bool,
    pub cannot_see: BTreeSet<How>,
    /// Time of the last walk of all tasks in the kernel.
    #[serde(with = "rfc3339::option")]
    pub swept: Option<Timestamp>,
    pub devices: Vec<DeviceReport>,
    pub holders: Vec<HolderReport>,
    pub orphans: Vec<OrphanReport>,
    pub lost_events: u64,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    pub node: String,
    pub major: u32,
    /// `null`: all minors of the major that have no entry of their own.
    pub minor: Option<u32>,
    pub kind: DeviceKind,
    pub gpu: Option<u32>,
    pub index: Option<u32>,
    pub uuid: Option<String>,
    pub bdf: Option<String>,
    pub model: Option<String>,
    pub fenced: bool,
    /// `null` where the source cannot count them.
    pub open_files: Option<u32>,
    pub holders: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderReport {
    pub pid: u32,
    pub start_ns: u64,
    pub nspids: Vec<u32>,
    /// `null`, like all that follows from /proc, when the process may not be seen there.
    pub state: Option<char>,
    pub comm: String,
    pub argv: Vec<String>,
    pub exe: Option<String>,
    pub exe_deleted: bool,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub class: Class,
    pub class_rule: String,
    pub cgroup: Option<String>,
    pub unit: Option<String>,
    /// Id, or name where the runtime has no ids.
    pub container: Option<String>,
    /// What the runtime's files tell of it.
    #[serde(default)]
    pub container_name: Option<String>,
    #[serde(default)]
    pub image: Option<String>,
    pub slurm_job: Option<String>,
    #[serde(default)]
    pub slurm_step: Option<String>,
    /// Uid.
    pub pod: Option<String>,
    #[serde(default)]
    pub pod_name: Option<String>,
    #[serde(default)]
    pub pod_namespace: Option<String>,
    pub parent: Option<ProcessName>,
    /// From the parent at fork upwards, ancestors that are gone included, without pid 1.
    pub lineage: Vec<AncestorReport>,
    /// An ancestor is missing, or may be: the tracer's memory of processes has no room for all.
    #[serde(default)]
    pub lineage_cut: bool,
    /// The farthest dead ancestor, when the process outlived the one that it was forked from.
    pub orphan_of: Option<ProcessName>,
    /// Distinct names.
    pub threads: Vec<String>,
    /// Threads with a descriptor table of their own.
    pub private_tids: BTreeSet<u32>,
    pub devices: Vec<HeldReport>,
    pub how: BTreeSet<How>,
    pub origin: Origin,
}

#[cfg(test)]
impl HolderReport {
    /// A job of alice, with nothing more known of it, for tests to say the rest.
    pub(crate) fn sample(pid: u32, devices: Vec<HeldReport>) -> Self {
        Self {
            pid,
            start_ns: 1,
            nspids: vec![pid],
            state: Some('S'),
            comm: "python3".to_owned(),
            argv: Vec::new(),
            exe: None,
            exe_deleted: false,
            uid: Some(1000),
            user: Some("alice".to_owned()),
            class: Class::Job,
            class_rule: "default".to_owned(),
            cgroup: None,
            unit: None,
            container: None,
            container_name: None,
            image: None,
            slurm_job: None,
            slurm_step: None,
            pod: None,
            pod_name: None,
            pod_namespace: None,
            parent: None,
            lineage: Vec::new(),
            lineage_cut: false,
            orphan_of: None,
            threads: Vec::new(),
            private_tids: BTreeSet::new(),
            devices,
            how: BTreeSet::new(),
            origin: Origin::Traced,
        }
    }
}

/// Whether its beginning was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The tracer saw it from the first open on.
    Traced,
    /// Held since before there was a tracer.
    Snapshot,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessName {
    pub pid: u32,
    pub start_ns: Option<u64>,
    pub comm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AncestorReport {
    pub pid: u32,
    pub start_ns: u64,
    pub comm: String,
    pub argv: Vec<String>,
    pub argv_cut: bool,
    pub uid: Option<u32>,
    pub alive: bool,
    pub exit: Option<ExitReport>,
}

/// How a process ended: one of `code` and `signal`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<u32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub core: bool,
}

impl ExitReport {
    /// From a wait status.
    pub const fn from_status(status: u32) -> Self {
        match status & 0x7f {
            0 => Self { code: Some(status >> 8 & 0xff), signal: None, core: false },
            signal => Self { code: None, signal: Some(signal), core: status & 0x80 != 0 },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldReport {
    pub node: String,
    pub fds: u32,
    pub maps: u32,
    /// `null` for nodes that all GPUs share: every user of any GPU holds and maps them.
    pub role: Option<Role>,
    pub inherited_from: Option<u32>,
    #[serde(with = "rfc3339::option")]
    pub first_open: Option<Timestamp>,
    #[serde(with = "rfc3339::option")]
    pub last_open: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Mapped the GPU, or inherited its handles from a process that did.
    Attached,
    /// Has handles and no more.
    Handle,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrphanReport {
    pub node: String,
    pub files: u32,
    pub how: How,
    pub last_owner: Option<ProcessName>,
}

/// Times as RFC 3339 text in UTC.
pub(crate) mod rfc3339 {
    use jiff::Timestamp;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(crate) fn serialize<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(time)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }

    pub(crate) mod option {
        use super::{Deserializer, Serializer, Timestamp};
        use serde::{Deserialize as _, de::Error as _};

        #[expect(clippy::ref_option, reason = "the signature that serde calls")]
        pub(crate) fn serialize<S: Serializer>(time: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
            match time {
                Some(time) => serializer.collect_str(time),
                None => serializer.serialize_none(),
            }
        }

        pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
            let text = Option::<String>::deserialize(deserializer)?;
            text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses() {
        for (status, json) in [
            (0, r#"{"code":0}"#),
            (137 << 8, r#"{"code":137}"#),
            (9, r#"{"signal":9}"#),
            (0x8b, r#"{"signal":11,"core":true}"#),
            (0x80 | 6, r#"{"signal":6,"core":true}"#),
        ] {
            assert_eq!(serde_json::to_string(&ExitReport::from_status(status)).unwrap(), json);
        }
    }
}
