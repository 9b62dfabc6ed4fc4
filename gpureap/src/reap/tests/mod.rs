//! Reaps of scripted hosts, and of real processes.

mod plans;
mod processes;
mod schema;
mod scopes;
mod scripted;
mod told;
mod world;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use super::{
    ladder::Rungs,
    plan::{Matching, Policy, Subject, Via},
    report::{Identity, Parent, People, Presence, Scene},
    scope::Kinship,
};
use jiff::Timestamp;

use crate::{
    host::Host,
    model::{Device, DeviceKind, ProcKey, Slot},
    process::{cgroup::JobCgroup, table::Table},
};

/// Everything counts, nobody is out of bounds but pid 999, in session 900.
fn policy() -> Policy {
    Policy {
        slots: None,
        matching: Matching::Any,
        by_handle: BTreeSet::new(),
        contexts: BTreeMap::new(),
        pids: BTreeSet::new(),
        chosen: None,
        undecided: BTreeSet::new(),
        own: 999,
        own_session: 900,
        ancestors: BTreeSet::new(),
        include_own_session: false,
        stop_monitors: false,
        include_protected: BTreeSet::new(),
        privileged: true,
    }
}

const fn ladder_of(grace_ms: u64, timeout_ms: u64) -> Rungs {
    Rungs { now: false, grace: Duration::from_millis(grace_ms), timeout: Duration::from_millis(timeout_ms) }
}

fn device(slot: Slot) -> Device {
    Device {
        slot,
        node: PathBuf::from(format!("/dev/nvidia{slot}")),
        major: 195,
        minor: Some(slot),
        kind: DeviceKind::Gpu,
        gpu: Some(slot),
        index: None,
        uuid: None,
        bdf: None,
        model: None,
    }
}

/// A host whose clocks both begin at zero.
fn scene(begun_ns: u64) -> Scene {
    let host = Host { name: "host".to_owned(), boot_id: "boot".to_owned(), now: Timestamp::UNIX_EPOCH, boottime_ns: 0 };
    Scene { host, begun_ns }
}

/// Knows everyone as `worker`.
struct Workers;

impl People for Workers {
    fn identity(&self, key: ProcKey) -> Identity {
        Identity {
            pid: key.tgid,
            start_ns: key.start_ns,
            comm: "worker".to_owned(),
            argv: vec!["worker".to_owned(), format!("\u{1b}[31m--rank={}", key.tgid)],
            uid: Some(0),
            user: Some("root".to_owned()),
            unit: Some("train.service".to_owned()),
            container: None,
            parent: Some(Parent { pid: 1, comm: "systemd".to_owned() }),
        }
    }

    fn service(&self, key: ProcKey) -> Option<String> {
        Some(format!("unit{}.service", key.tgid))
    }

    /// Numbers from 1000 on are nobody's, and from 2000 on they are threads of 10.
    fn presence(&self, pid: u32) -> Presence {
        match pid {
            2000.. => Presence::ThreadOf(10),
            1000.. => Presence::Absent,
            _ => Presence::Here,
        }
    }
}

/// Knows of no other processes.
struct Alone;

impl Kinship for Alone {
    fn table(&self) -> Table {
        Table::default()
    }
    fn job_cgroup(&self, _pid: u32) -> Result<JobCgroup, String> {
        Err("/ is no job's cgroup".to_owned())
    }
    fn members(&self, _cgroup: &JobCgroup) -> BTreeSet<u32> {
        BTreeSet::new()
    }
    fn subject(&self, _pid: u32) -> Option<(ProcKey, Subject)> {
        None
    }
    fn belongs(&self, _pid: u32, _via: &Via) -> bool {
        true
    }
    fn can_kill(&self, _cgroup: &JobCgroup) -> bool {
        false
    }
}

type Subjects = BTreeMap<ProcKey, Subject>;
