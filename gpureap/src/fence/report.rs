//! `gpureap.fence/1`: what `fence --json` and `unfence --json` print. Fields may be added, never renamed within a schema
//! number.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use gpureap_common::fence::NO_DEADLINE;
use serde::{Deserialize, Serialize};

use super::cgroup::Cgroups;
use crate::{
    bpf::fence::{Denied, Exemptions, Standing},
    config::Config,
    gpu::devices::Devices,
    host::Host,
    model::{Device, DeviceKind, Slot},
    process::{Facts, Place, users},
};

pub const SCHEMA: &str = "gpureap.fence/1";

/// Pids that are listed of one kind of trier, the last ones.
const PIDS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceReport {
    pub schema: String,
    pub host: String,
    pub boot_id: String,
    /// RFC 3339, like all times here.
    pub time: String,
    pub action: Action,
    /// What is fenced, and what this command opened.
    pub devices: Vec<FencedReport>,
    pub exempt: ExemptReport,
    /// Who tried, the last first. Of very many processes only the last are remembered; `denied_total` counts all opens.
    pub denied: Vec<DeniedReport>,
    pub denied_total: u64,
    pub notes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Fence,
    Unfence,
    List,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FencedReport {
    pub node: String,
    pub major: u32,
    /// `null`: all minors of the major that have no entry of their own.
    pub minor: Option<u32>,
    pub kind: DeviceKind,
    pub gpu: Option<u32>,
    pub index: Option<u32>,
    pub uuid: Option<String>,
    pub bdf: Option<String>,
    /// Opens are refused now.
    pub fenced: bool,
    /// What this command did to it.
    pub change: Option<Change>,
    pub since: String,
    /// `null` when it is open again, or closed without an end.
    pub until: Option<String>,
    pub left_ms: Option<u64>,
    pub denied: u64,
    /// Opens of those who are exempt.
    pub exempted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    Raised,
    /// It was fenced before, and got another deadline.
    Updated,
    Lowered,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExemptReport {
    pub processes: Vec<ExemptProcess>,
    pub cgroups: Vec<ExemptCgroup>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExemptProcess {
    pub pid: u32,
    pub start_ns: u64,
    /// `null`: it is gone.
    pub comm: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExemptCgroup {
    pub id: u64,
    /// `null`: it is gone.
    pub path: Option<String>,
}

/// Processes of one name, user and cgroup that tried to open one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeniedReport {
    pub node: String,
    pub comm: String,
    pub uid: u32,
    pub user: Option<String>,
    pub cgroup: Option<String>,
    pub unit: Option<String>,
    pub container: Option<String>,
    pub slurm_job: Option<String>,
    pub pod: Option<String>,
    pub count: u64,
    pub processes: u32,
    /// The last ones.
    pub pids: Vec<u32>,
    pub first: String,
    pub last: String,
}

/// What a report is made of.
#[derive(Debug)]
pub struct Scene<'a> {
    pub action: Action,
    pub standing: &'a Standing,
    /// With the fence's own slots.
    pub devices: &'a Devices,
    /// Device numbers that the command was about, and those that were fenced before it.
    pub chosen: &'a BTreeSet<u32>,
    pub before: &'a BTreeSet<u32>,
    pub notes: Vec<String>,
}

/// Who has what name.
pub trait Names {
    /// Name and cgroup of a process that lives.
    fn process(&self, tgid: u32, start_ns: u64) -> Option<(String, Option<String>)>;
    fn cgroup(&self, id: u64) -> Option<String>;
    fn user(&self, uid: u32) -> Option<String>;
}

/// Names as this host has them.
#[derive(Debug)]
pub struct HostNames<'a> {
    config: &'a Config,
    cgroups: OnceCell<HashMap<u64, String>>,
}

impl<'a> HostNames<'a> {
    pub const fn new(config: &'a Config) -> Self {
        Self { config, cgroups: OnceCell::new() }
    }
}

impl Names for HostNames<'_> {
    fn process(&self, tgid: u32, start_ns: u64) -> Option<(String, Option<String>)> {
        Facts::read(&self.config.paths.proc, tgid, start_ns).map(|facts| (facts.comm, facts.cgroup))
    }

    fn cgroup(&self, id: u64) -> Option<String> {
        let read = || Cgroups::find(&self.config.paths.proc).map(|cgroups| cgroups.paths()).unwrap_or_default();
        self.cgroups.get_or_init(read).get(&id).cloned()
    }

    fn user(&self, uid: u32) -> Option<String> {
        users::name_of(uid)
    }
}

pub fn build(scene: Scene<'_>, host: &Host, names: &dyn Names) -> FenceReport {
    let Scene { action, standing, devices, chosen, before, notes } = scene;
    let Host { name, boot_id, now, boottime_ns } = host;
    let fenced = devices.list().iter().filter_map(|device| {
        let fence = standing.fences.get(&device.slot)?;
        let number = device.number();
        let touched = chosen.contains(&number);
        let lowered = action == Action::Unfence && touched;
        let closed = standing.refuses(device.slot, *boottime_ns);
        // One whose time is over is no news, unless somebody asked to open it.
        if !closed && !lowered {
            return None;
        }
        let limited = (fence.deadline_ns != NO_DEADLINE && !lowered).then_some(fence.deadline_ns);
        let tally = standing.tallies.get(&device.slot).copied().unwrap_or_default();
        let Device { slot: _, node, major, minor, kind, gpu, index, uuid, bdf, model: _ } = device.clone();
        Some(FencedReport {
            node: node.display().to_string(),
            major,
            minor,
            kind,
            gpu,
            index,
            uuid,
            bdf,
            fenced: closed && !lowered,
            change: match action {
                Action::Unfence if touched => Some(Change::Lowered),
                Action::Fence if touched && before.contains(&number) => Some(Change::Updated),
                Action::Fence if touched => Some(Change::Raised),
                _ => None,
            },
            since: host.wall(fence.raised_ns).to_string(),
            until: limited.map(|deadline| host.wall(deadline).to_string()),
            left_ms: limited.map(|deadline| deadline.saturating_sub(*boottime_ns) / 1_000_000),
            denied: tally.denied,
            exempted: tally.exempted,
        })
    });
    let fenced: Vec<FencedReport> = fenced.collect();
    FenceReport {
        schema: SCHEMA.to_owned(),
        host: name.clone(),
        boot_id: boot_id.clone(),
        time: now.to_string(),
        action,
        denied_total: fenced.iter().map(|device| device.denied).sum(),
        devices: fenced,
        exempt: exempt(&standing.exempt, names),
        denied: groups(&standing.denied).into_iter().map(|group| denied(&group, devices, host, names)).collect(),
        notes,
    }
}

fn exempt(exemptions: &Exemptions, names: &dyn Names) -> ExemptReport {
    let Exemptions { processes, cgroups } = exemptions;
    ExemptReport {
        processes: processes
            .iter()
            .map(|key| ExemptProcess {
                pid: key.tgid,
                start_ns: key.start_ns,
                comm: names.process(key.tgid, key.start_ns).map(|(comm, _)| comm),
            })
            .collect(),
        cgroups: cgroups.iter().map(|id| ExemptCgroup { id: *id, path: names.cgroup(*id) }).collect(),
    }
}

/// Those that a reader takes for one: a supervisor makes a new process for each try.
fn groups(denied: &[Denied]) -> Vec<Vec<&Denied>> {
    let mut groups: BTreeMap<(Slot, &str, u32, u64), Vec<&Denied>> = BTreeMap::new();
    for one in denied {
        groups.entry((one.slot, &one.comm, one.uid, one.cgroup_id)).or_default().push(one);
    }
    let mut groups: Vec<Vec<&Denied>> = groups.into_values().collect();
    for group in &mut groups {
        group.sort_by_key(|one| std::cmp::Reverse(one.last_ns));
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.first().map(|one| one.last_ns)));
    groups
}

fn denied(group: &[&Denied], devices: &Devices, host: &Host, names: &dyn Names) -> DeniedReport {
    let last = group[0];
    let Denied { key: _, comm, uid, cgroup_id, slot, count: _, first_ns: _, last_ns } = last;
    // On a mixed host /proc may say more than the id, which is of cgroup2 alone.
    let living = group.iter().take(PIDS).find_map(|one| names.process(one.key.tgid, one.key.start_ns));
    let cgroup = living.and_then(|(_, cgroup)| cgroup).or_else(|| names.cgroup(*cgroup_id));
    let Place { unit, container, slurm_job, slurm_step: _, pod } = cgroup.as_deref().map(Place::of).unwrap_or_default();
    let first = group.iter().map(|one| one.first_ns).min().unwrap_or(*last_ns);
    DeniedReport {
        node: devices.node(*slot),
        comm: comm.clone(),
        uid: *uid,
        user: names.user(*uid),
        cgroup,
        unit,
        container,
        slurm_job,
        pod,
        count: group.iter().map(|one| one.count).sum(),
        processes: group.len() as u32,
        pids: group.iter().take(PIDS).map(|one| one.key.tgid).collect(),
        first: host.wall(first).to_string(),
        last: host.wall(*last_ns).to_string(),
    }
}
