//! `gpureap.reap/1`: what was done and what it came to.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    door::DoorReport,
    ladder::{End, Fate},
    memory::{MemoryFacts, MemoryReport},
    plan::{Class, Plan, Policy, Row, Skip, Via, same_process},
    stuck::Stuck,
    verdict::{Proof, Verdict},
};
use crate::{
    exit_code::Exit,
    holders::report::ExitReport,
    host::Host,
    model::{
        Ancestor, Backend, Device, DeviceKind, Holder, How, LineageSource, ProcKey, Slot, Source, Usage, View,
        node_name,
    },
    out::words::{nodes, ranges},
};

pub const SCHEMA: &str = "gpureap.reap/1";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Freed,
    NothingToDo,
    Held,
    Unkillable,
    Protected,
    KernelReference,
}

/// Who a process is, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub pid: u32,
    pub start_ns: u64,
    pub comm: String,
    pub argv: Vec<String>,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub unit: Option<String>,
    pub container: Option<String>,
    pub parent: Option<Parent>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    pub pid: u32,
    pub comm: String,
}

/// Knows processes by name.
pub trait People {
    fn identity(&self, key: ProcKey) -> Identity;
    /// Its service of the system's manager, which would start it again.
    fn service(&self, key: ProcKey) -> Option<String>;
    /// What stands behind a number that the caller gave.
    fn presence(&self, pid: u32) -> Presence;
}

/// Who a process is. One that is gone already may still be remembered by the kernel side.
pub fn identify(people: &dyn People, lineage: &dyn LineageSource, key: ProcKey) -> Identity {
    let identity = people.identity(key);
    if !identity.comm.is_empty() {
        return identity;
    }
    match lineage.lookup(key) {
        Some(Ancestor { comm, argv, uid, .. }) => Identity { comm, argv, uid: Some(uid), ..identity },
        None => identity,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Absent,
    Here,
    /// It exists, and /proc does not show it to this caller.
    Hidden,
    /// A thread of this process.
    ThreadOf(u32),
}

/// A pid that was named without being a chosen holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unmatched {
    pub pid: u32,
    pub reason: Unmatch,
    /// The process of the thread that was named.
    pub process: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unmatch {
    NoSuchProcess,
    HoldsNothing,
    /// It holds, and another filter does not fit it.
    LeftOut,
    /// What it holds may not be seen by this caller.
    NotVisible,
    Thread,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: String,
    pub host: String,
    pub boot_id: String,
    /// When the reap began, RFC 3339.
    pub time: String,
    pub dry_run: bool,
    /// Null for a dry run.
    pub outcome: Option<Outcome>,
    pub exit_code: u8,
    pub verified: bool,
    pub source: Source,
    pub backend: Option<Backend>,
    /// Whether the last look saw all that its source can see.
    pub complete: bool,
    /// Kinds of holding that the source can never see.
    pub cannot_see: BTreeSet<How>,
    pub processes: Vec<Process>,
    pub devices: Vec<DeviceState>,
    pub respawned: Vec<Respawned>,
    pub skipped: Vec<Skipped>,
    pub unmatched: Vec<Unmatched>,
    /// Null without `--fence`.
    pub fence: Option<DoorReport>,
    pub elapsed_ms: f64,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Process {
    #[serde(flatten)]
    pub identity: Identity,
    pub class: Class,
    pub class_rule: String,
    pub via: Entry,
    /// The chosen nodes that it held.
    pub nodes: Vec<String>,
    /// Its unit, where that was, or in a dry run would be, stopped too.
    pub unit_stopped: Option<String>,
    /// Null for a dry run.
    pub result: Option<Ending>,
    pub reason: Option<String>,
    pub signals: Vec<SignalSent>,
    /// From the first signal.
    pub exited_ms: Option<f64>,
    pub closed_ms: Option<f64>,
    pub devices: Vec<Closing>,
    /// How it ended, where the kernel tells.
    pub exit: Option<ExitReport>,
    /// Why it does not end.
    pub stuck: Option<Stuck>,
}

/// How a process came into the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Entry {
    /// It held a chosen device.
    Device,
    /// It was in the process tree of one that did.
    Tree,
    /// It was in the cgroup of such a one's job.
    Cgroup,
}

impl From<&Via> for Entry {
    fn from(via: &Via) -> Self {
        match via {
            Via::Device => Self::Device,
            Via::Tree(_) => Self::Tree,
            Via::Cgroup(_) => Self::Cgroup,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    Vanished,
    PidReused,
    Released,
    Exited,
    NotPermitted,
    Failed,
    Survived,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SignalSent {
    pub signal: String,
    pub time: String,
    /// From the beginning of the reap.
    pub after_ms: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Closing {
    pub node: String,
    /// From the first signal; null while it is held.
    pub closed_ms: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceState {
    pub node: String,
    pub kind: DeviceKind,
    pub gpu: Option<u32>,
    pub index: Option<u32>,
    pub uuid: Option<String>,
    pub bdf: Option<String>,
    pub before: Count,
    /// Null for a dry run.
    pub after: Option<Count>,
    /// From the first signal to the last close by a signalled process; null while one of them holds it.
    pub closed_ms: Option<f64>,
    /// From the first signal to NVML's first answer that said so; from the beginning where nothing was signalled. Null
    /// where it is not free, or not known.
    pub memory_free_ms: Option<f64>,
    /// Null where there is no device memory, and for a dry run.
    pub memory: Option<MemoryReport>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    pub holders: u32,
    /// Null where the source cannot count files.
    pub open_files: Option<u32>,
}

impl Count {
    pub(crate) fn of(view: &View, slot: Slot) -> Self {
        let holds = |holder: &&Holder| holder.usage.get(&slot).is_some_and(Usage::is_held);
        Self {
            holders: view.holders.iter().filter(holds).count() as u32,
            open_files: view
                .open_files
                .get(&slot)
                .copied()
                .or_else(|| (view.source == Source::Map && view.backend != Some(Backend::Gate)).then_some(0)),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Respawned {
    #[serde(flatten)]
    pub identity: Identity,
    pub nodes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    #[serde(flatten)]
    pub identity: Identity,
    pub class: Class,
    pub class_rule: String,
    pub nodes: Vec<String>,
    pub reason: Skip,
}

/// Where and when.
#[derive(Clone, Debug)]
pub struct Scene {
    pub host: Host,
    /// Boottime at which the reap began.
    pub begun_ns: u64,
}

impl Scene {
    /// A boottime as RFC 3339.
    pub fn wall(&self, boottime_ns: u64) -> String {
        self.host.wall(boottime_ns).to_string()
    }
}

/// Milliseconds with three decimals.
pub fn millis(from_ns: u64, to_ns: u64) -> f64 {
    (to_ns.saturating_sub(from_ns) / 1_000) as f64 / 1_000.0
}

/// What the report is made of.
pub struct Parts<'a> {
    pub scene: &'a Scene,
    pub policy: &'a Policy,
    pub plan: &'a Plan,
    pub before: &'a View,
    pub devices: &'a [Device],
    /// Of everyone named in the report; asked for before the signals, as afterwards there is nobody left to ask.
    pub identities: &'a BTreeMap<ProcKey, Identity>,
    pub unmatched: &'a [Unmatched],
}

impl Parts<'_> {
    fn node(&self, slot: Slot) -> String {
        node_name(self.devices.iter().find(|device| device.slot == slot), slot)
    }

    fn nodes(&self, slots: &BTreeSet<Slot>) -> Vec<String> {
        slots.iter().map(|slot| self.node(*slot)).collect()
    }

    fn identity(&self, key: ProcKey) -> Identity {
        let unknown = || Identity { pid: key.tgid, start_ns: key.start_ns, ..Identity::default() };
        self.identities.get(&key).cloned().unwrap_or_else(unknown)
    }

    fn process(&self, row: &Row) -> Process {
        Process {
            identity: self.identity(row.key),
            class: row.class,
            class_rule: row.class_rule.clone(),
            via: Entry::from(&row.via),
            nodes: self.nodes(&row.slots),
            unit_stopped: row.stop_unit.clone(),
            result: None,
            reason: None,
            signals: Vec::new(),
            exited_ms: None,
            closed_ms: None,
            devices: Vec::new(),
            exit: None,
            stuck: None,
        }
    }

    fn fate(&self, row: &Row, fate: &Fate, stuck: Option<Stuck>) -> Process {
        let Fate {
            key: _,
            holder: _,
            end,
            sent,
            unit_stopped_ns,
            unit_error: _,
            exited_ns,
            closed_ns,
            holds: _,
            status,
            exiting: _,
        } = fate;
        let (result, reason) = match end {
            End::Vanished => (Ending::Vanished, None),
            End::PidReused => (Ending::PidReused, None),
            End::Released => (Ending::Released, None),
            End::Exited => (Ending::Exited, None),
            End::NotPermitted => (Ending::NotPermitted, Some("not permitted to signal it".to_owned())),
            End::Failed(reason) => (Ending::Failed, Some(reason.clone())),
            End::Survived => (Ending::Survived, None),
        };
        let first = fate.first_act_ns();
        let since = |time: u64| Some(millis(first?, time));
        Process {
            unit_stopped: row.stop_unit.clone().filter(|_| unit_stopped_ns.is_some()),
            result: Some(result),
            reason,
            signals: sent
                .iter()
                .map(|sent| SignalSent {
                    signal: sent.signal.name().to_owned(),
                    time: self.scene.wall(sent.at_ns),
                    after_ms: millis(self.scene.begun_ns, sent.at_ns),
                })
                .collect(),
            exited_ms: exited_ns.and_then(since),
            closed_ms: fate.all_closed_ns().and_then(since),
            devices: row
                .slots
                .iter()
                .map(|slot| Closing { node: self.node(*slot), closed_ms: closed_ns.get(slot).copied().and_then(since) })
                .collect(),
            exit: status.map(ExitReport::from_status),
            stuck,
            ..self.process(row)
        }
    }

    fn skipped(&self) -> Vec<Skipped> {
        let skipped = |(row, reason): (&Row, Skip)| Skipped {
            identity: self.identity(row.key),
            class: row.class,
            class_rule: row.class_rule.clone(),
            nodes: self.nodes(&row.slots),
            reason,
        };
        self.plan.skipped().map(skipped).collect()
    }

    /// Names those who have chosen devices open in a way that does not count.
    fn handle_only(&self, view: &View) -> Option<String> {
        let (mut pids, mut slots) = (BTreeSet::new(), BTreeSet::new());
        for holder in view.holders.iter().filter(|holder| self.policy.names(holder.key)) {
            let open = self.policy.handle_slots(holder);
            if !open.is_empty() {
                pids.insert(holder.key.tgid);
                slots.extend(open);
            }
        }
        let nodes = nodes(&self.nodes(&slots));
        let list = ranges(&pids.iter().copied().collect::<Vec<_>>());
        match pids.len() {
            0 => None,
            1 => Some(format!("process {list} has {nodes} open without using it; `--match any` includes it")),
            count => Some(format!(
                "{count} processes have {nodes} open without using it (pids {list}); `--match any` includes them"
            )),
        }
    }

    /// The chosen devices, and of the others those that were held; with everything chosen only what was held, and GPUs.
    fn device_states(&self, after: Option<&View>, fates: &[Fate], memory: &MemoryFacts) -> Vec<DeviceState> {
        let first = fates.iter().filter_map(Fate::first_act_ns).min();
        let state = |device: &Device| {
            let Device { slot, node, kind, gpu, index, uuid, bdf, .. } = device;
            let holders = || fates.iter().filter(|fate| fate.holds.contains(slot) || fate.closed_ns.contains_key(slot));
            let closed = holders().filter_map(|fate| fate.closed_ns.get(slot)).max();
            let held = holders().any(|fate| fate.holds.contains(slot));
            let known = memory.slots.get(slot);
            DeviceState {
                node: node.display().to_string(),
                kind: *kind,
                gpu: *gpu,
                index: *index,
                uuid: uuid.clone(),
                bdf: bdf.clone(),
                before: Count::of(self.before, *slot),
                after: after.map(|view| Count::of(view, *slot)),
                closed_ms: first.zip(closed).filter(|_| !held).map(|(first, closed)| millis(first, *closed)),
                memory_free_ms: known
                    .and_then(|known| known.free_ns)
                    .map(|free| millis(first.unwrap_or(self.scene.begun_ns), free)),
                memory: known.map(|known| MemoryReport::from(&known.state)),
            }
        };
        let chosen = |device: &&Device| {
            self.policy.wants(device.slot)
                && (device.kind.is_gpu() || Count::of(self.before, device.slot) != Count::default())
        };
        self.devices.iter().filter(chosen).map(state).collect()
    }

    fn report(&self, ended_ns: u64) -> Report {
        Report {
            schema: SCHEMA.to_owned(),
            host: self.scene.host.name.clone(),
            boot_id: self.scene.host.boot_id.clone(),
            time: self.scene.wall(self.scene.begun_ns),
            dry_run: false,
            outcome: None,
            exit_code: Exit::Done as u8,
            verified: false,
            source: self.before.source,
            backend: self.before.backend,
            complete: self.before.complete,
            cannot_see: self.before.cannot_see.clone(),
            processes: Vec::new(),
            devices: Vec::new(),
            respawned: Vec::new(),
            skipped: self.skipped(),
            unmatched: self.unmatched.to_vec(),
            fence: None,
            elapsed_ms: millis(self.scene.begun_ns, ended_ns),
            notes: Vec::new(),
        }
    }

    /// The plan alone.
    pub fn dry_run(&self, now_ns: u64) -> Report {
        Report {
            dry_run: true,
            processes: self.plan.targets().map(|row| self.process(row)).collect(),
            devices: self.device_states(None, &[], &MemoryFacts::default()),
            notes: self
                .before
                .notes
                .iter()
                .chain(&self.plan.notes)
                .cloned()
                .chain(self.handle_only(self.before))
                .collect(),
            ..self.report(now_ns)
        }
    }

    /// What was done. `stuck` says why a survivor does not die.
    pub fn done(
        &self,
        fates: &[Fate],
        proof: &Proof,
        memory: &MemoryFacts,
        verdict: Verdict,
        stuck: impl Fn(ProcKey) -> Option<Stuck>,
        ended_ns: u64,
    ) -> Report {
        let Verdict { outcome, exit, verified, mut notes } = verdict;
        notes.extend(proof.view.notes.iter().cloned());
        notes.extend(self.handle_only(&proof.view));
        if let Some(trouble) = &memory.trouble {
            notes.push(format!("device memory is not confirmed: {trouble}"));
        }
        for (slot, used) in memory.used() {
            notes.push(format!("{}: {}", self.node(slot), used.sentence()));
        }
        let process = |(row, fate): (&Row, &Fate)| {
            debug_assert!(same_process(row.key, fate.key), "fates come in the order of the targets");
            self.fate(row, fate, stuck(fate.key).filter(|_| fate.end == End::Survived))
        };
        Report {
            outcome: Some(outcome),
            exit_code: exit as u8,
            verified,
            source: proof.view.source,
            backend: proof.view.backend,
            complete: proof.view.complete,
            cannot_see: proof.view.cannot_see.clone(),
            processes: self.plan.targets().zip(fates).map(process).collect(),
            devices: self.device_states(Some(&proof.view), fates, memory),
            respawned: proof
                .respawned
                .iter()
                .map(|holder| Respawned {
                    identity: self.identity(holder.key),
                    nodes: self.nodes(&self.policy.chosen_slots(holder)),
                })
                .collect(),
            notes,
            ..self.report(ended_ns)
        }
    }
}
