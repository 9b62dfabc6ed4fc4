//! `--fence`: the door of the chosen devices, closed for as long as the reap runs.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};

use super::plan::{Class, Policy, Subject};
use crate::{
    bpf::fence::{Denied, Exemptions, Fence},
    clock::{boottime_ns, nanos},
    config::Config,
    error::Failure,
    gpu::devices::Devices,
    kernel::rights,
    model::{ProcKey, Slot},
};

/// A reap that is stopped in the middle keeps the door closed this long at most, beside the time that it asked for.
const SPARE: Duration = Duration::from_mins(5);

/// Lets nobody in. Opens when it is dropped, or by the kernel when this process dies.
pub struct Door {
    fence: Fence,
}

/// What happened at the door.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoorReport {
    /// All refused opens.
    pub denied: u64,
    /// Who tried; of very many the last.
    pub tried: Vec<Tried>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    pub pid: u32,
    pub start_ns: u64,
    pub comm: String,
    pub uid: u32,
    pub node: String,
    pub count: u64,
}

/// Whether there may be a door at all; a plan asks too.
pub fn check() -> Result<(), Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::not_permitted("--fence needs root: it closes devices for the whole host"));
    }
    // Of those who are exempt the kernel knows the host's pids and starts.
    rights::require_host_namespaces()
}

impl Door {
    /// `helper` is let through: it asks NVML.
    pub fn close(
        config: &Config,
        devices: &Devices,
        policy: &Policy,
        helper: Option<ProcKey>,
        time: Duration,
    ) -> anyhow::Result<Self> {
        let chosen: BTreeSet<Slot> = match &policy.slots {
            Some(slots) => slots.clone(),
            None => devices.gpus().map(|device| device.slot).collect(),
        };
        let time = nanos(time.saturating_add(SPARE));
        let exempt = Exemptions { processes: helper.into_iter().collect(), cgroups: BTreeSet::new() };
        let deadline = boottime_ns().saturating_add(time);
        Ok(Self { fence: Fence::raise(config, devices, &chosen, Some(deadline), &exempt)? })
    }

    /// The system's own daemons among the holders go in and out as before.
    pub fn exempt<'a>(&self, subjects: impl Iterator<Item = (&'a ProcKey, &'a Subject)>) -> anyhow::Result<()> {
        for (key, subject) in subjects {
            if subject.class == Class::System {
                self.fence.exempt_process(*key)?;
            }
        }
        Ok(())
    }

    pub fn report(&self, devices: &Devices) -> anyhow::Result<DoorReport> {
        let tried = |denied: Denied| {
            let Denied { key, comm, uid, cgroup_id: _, slot, count, first_ns: _, last_ns: _ } = denied;
            let node = devices.node(slot);
            Tried { pid: key.tgid, start_ns: key.start_ns, comm, uid, node, count }
        };
        Ok(DoorReport {
            denied: self.fence.denied_total()?,
            tried: self.fence.denied()?.into_iter().map(tried).collect(),
        })
    }
}
