//! Who is to be signalled. Pure: a view, what is known of the processes, and a policy go in; a plan comes out.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

pub use crate::classify::Class;
use crate::{
    classify::DEFAULT_RULE,
    model::{Holder, ProcKey, Slot, Usage, View},
};

/// Nanoseconds of the coarsest start time that a source may give: a tick of /proc/PID/stat.
const TICK_NS: u64 = 10_000_000;

/// Whether two keys name one process. One that comes from /proc has its start in whole ticks, in which a pid can be
/// given out twice; two exact ones agree exactly or are two processes.
pub const fn same_process(one: ProcKey, other: ProcKey) -> bool {
    let coarse = one.start_ns.is_multiple_of(TICK_NS) || other.start_ns.is_multiple_of(TICK_NS);
    one.tgid == other.tgid
        && (one.start_ns == other.start_ns || coarse && one.start_ns / TICK_NS == other.start_ns / TICK_NS)
}

/// Which handles count as holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matching {
    /// It has mapped the device, or was forked from a process that had.
    Attached,
    /// Any descriptor or mapping.
    Any,
}

/// What the plan must know of one process beyond what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    pub class: Class,
    /// The rule that classed it.
    pub class_rule: String,
    pub session: u32,
    pub kernel_thread: bool,
}

impl Default for Subject {
    fn default() -> Self {
        Self { class: Class::Job, class_rule: DEFAULT_RULE.to_owned(), session: 0, kernel_thread: false }
    }
}

/// What was chosen, and who is out of bounds.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The chosen devices; `None`: every device node, those that all GPUs share included.
    pub slots: Option<BTreeSet<Slot>>,
    pub matching: Matching,
    /// Devices of which any handle counts, whatever `matching` says: a capability of a GPU instance is never mapped, and
    /// nobody opens one but to work there.
    pub by_handle: BTreeSet<Slot>,
    /// Pids of processes that have a context on a device, as NVML tells: these are attached to it.
    pub contexts: BTreeMap<Slot, BTreeSet<u32>>,
    /// Only these processes; empty: all.
    pub pids: BTreeSet<u32>,
    /// Only these too, the ones that the filters let through; `None`: all. Of the view that the plan is made from; for
    /// another view it is to be found anew.
    pub chosen: Option<BTreeSet<ProcKey>>,
    /// Those of the same view that were left out because the filters could not judge them.
    pub undecided: BTreeSet<ProcKey>,
    pub own: u32,
    /// 0: not known, as in a container that was entered from outside; then no session is out of bounds.
    pub own_session: u32,
    pub ancestors: BTreeSet<u32>,
    pub include_own_session: bool,
    /// Class `monitor` too.
    pub stop_monitors: bool,
    /// Signal the classes `system` and `monitor` too, for the rules named here; `all` names every rule.
    pub include_protected: BTreeSet<String>,
    /// /proc shows this caller what every process holds.
    pub privileged: bool,
}

/// Why a chosen holder is not signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Skip {
    #[serde(rename = "self")]
    Own,
    Ancestor,
    OwnSession,
    Init,
    KernelThread,
    Protected,
    Monitor,
    /// It has a chosen device open without using it, and only use counts.
    HandleOnly,
}

impl Skip {
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::Own => "it is this gpureap",
            Self::Ancestor => "gpureap was started by it",
            Self::OwnSession => "it belongs to gpureap's own session; --include-own-session or --pid takes it along",
            Self::Init => "pid 1 is never signalled",
            Self::KernelThread => "kernel threads are never signalled",
            Self::Protected => "it is part of the system",
            Self::Monitor => "it is a monitor",
            Self::HandleOnly => "it has it open without using it; --match any includes it",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Signal,
    Skip(Skip),
}

/// How a process came into the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Via {
    /// It holds a chosen device.
    #[default]
    Device,
    /// It is in the process tree of one that does; the tree's root.
    Tree(ProcKey),
    /// It is in the cgroup of such a one's job.
    Cgroup(PathBuf),
}

/// One process of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub key: ProcKey,
    pub via: Via,
    /// The chosen devices that it holds, and why it counts.
    pub slots: BTreeSet<Slot>,
    pub class: Class,
    pub class_rule: String,
    pub action: Action,
    /// Its systemd unit, where that is to be stopped and not only its processes.
    pub stop_unit: Option<String>,
}

/// A cgroup in which everybody is a target, so that the kernel may kill them in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    pub dir: PathBuf,
    pub pids: BTreeSet<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub rows: Vec<Row>,
    /// Processes that have chosen devices open in a way that does not count.
    pub handle_only: Vec<Row>,
    pub cgroups: Vec<Whole>,
    /// Why a scope takes nobody along.
    pub notes: Vec<String>,
}

impl Plan {
    pub fn targets(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.action == Action::Signal)
    }
    pub fn skipped(&self) -> impl Iterator<Item = (&Row, Skip)> {
        self.rows.iter().chain(&self.handle_only).filter_map(|row| match row.action {
            Action::Signal => None,
            Action::Skip(reason) => Some((row, reason)),
        })
    }
}

impl Policy {
    fn counts(&self, tgid: u32, slot: Slot, usage: &Usage) -> bool {
        let has_context = || self.contexts.get(&slot).is_some_and(|pids| pids.contains(&tgid));
        let holding = match self.matching {
            Matching::Attached => {
                usage.maps > 0 || usage.ever_mapped || self.by_handle.contains(&slot) || has_context()
            }
            Matching::Any => true,
        };
        self.wants(slot) && holding && usage.is_held()
    }

    /// Whether a process is one of those that were named and that the filters let through.
    pub fn names(&self, key: ProcKey) -> bool {
        (self.pids.is_empty() || self.pids.contains(&key.tgid))
            && self.chosen.as_ref().is_none_or(|keys| has(keys, key))
    }

    /// How many of a view's holders count and may have been meant.
    pub fn undecided_of(&self, view: &View) -> usize {
        let undecided = |holder: &&Holder| has(&self.undecided, holder.key) && !self.chosen_slots(holder).is_empty();
        view.holders.iter().filter(undecided).count()
    }

    fn includes(&self, rule: &str) -> bool {
        self.include_protected.contains(rule) || self.include_protected.contains("all")
    }

    /// The chosen devices that a process without a hold that counts has open all the same.
    pub fn handle_slots(&self, holder: &Holder) -> BTreeSet<Slot> {
        if self.chosen_slots(holder).is_empty() {
            Self { matching: Matching::Any, ..self.clone() }.chosen_slots(holder)
        } else {
            BTreeSet::new()
        }
    }

    /// The chosen devices that this process holds in a way that counts.
    pub fn chosen_slots(&self, holder: &Holder) -> BTreeSet<Slot> {
        holder
            .usage
            .iter()
            .filter(|(slot, usage)| self.counts(holder.key.tgid, **slot, usage))
            .map(|(slot, _)| *slot)
            .collect()
    }

    /// Whether a device is one of those to be freed.
    pub fn wants(&self, slot: Slot) -> bool {
        self.slots.as_ref().is_none_or(|slots| slots.contains(&slot))
    }

    const fn is_own_session(&self, session: u32) -> bool {
        session != 0 && session == self.own_session
    }

    /// What is done with a process that counts.
    pub fn action(&self, key: ProcKey, subject: &Subject) -> Action {
        let Subject { class, class_rule, session, kernel_thread } = subject;
        let skip = if key.tgid == self.own {
            Skip::Own
        } else if key.tgid <= 1 {
            Skip::Init
        } else if *kernel_thread {
            Skip::KernelThread
        } else if self.ancestors.contains(&key.tgid) {
            Skip::Ancestor
        } else if self.is_own_session(*session) && !self.include_own_session && !self.pids.contains(&key.tgid) {
            Skip::OwnSession
        } else {
            match class {
                Class::System if !self.includes(class_rule) => Skip::Protected,
                Class::Monitor if !self.stop_monitors && !self.includes(class_rule) => Skip::Monitor,
                Class::Job | Class::Monitor | Class::System => return Action::Signal,
            }
        };
        Action::Skip(skip)
    }
}

/// Decides, for each holder that the policy chooses, whether it is signalled. A process of which nothing is known is
/// classed as a job outside every session: its identity is checked again before any signal.
pub fn plan(view: &View, subjects: &BTreeMap<ProcKey, Subject>, policy: &Policy) -> Plan {
    let unknown = Subject::default();
    let row = |holder: &Holder, slots: BTreeSet<Slot>, action: &dyn Fn(&Subject) -> Action| {
        let subject = subjects.get(&holder.key).unwrap_or(&unknown);
        (!slots.is_empty()).then(|| Row {
            key: holder.key,
            via: Via::Device,
            slots,
            class: subject.class,
            class_rule: subject.class_rule.clone(),
            action: action(subject),
            stop_unit: None,
        })
    };
    let named = || view.holders.iter().filter(|holder| policy.names(holder.key));
    Plan {
        rows: sorted(named().filter_map(|holder| {
            row(holder, policy.chosen_slots(holder), &|subject| policy.action(holder.key, subject))
        })),
        handle_only: sorted(
            named().filter_map(|holder| row(holder, policy.handle_slots(holder), &|_| Action::Skip(Skip::HandleOnly))),
        ),
        ..Plan::default()
    }
}

fn has(keys: &BTreeSet<ProcKey>, key: ProcKey) -> bool {
    let of_number = ProcKey::new(key.tgid, 0)..=ProcKey::new(key.tgid, u64::MAX);
    keys.range(of_number).any(|other| same_process(*other, key))
}

fn sorted(rows: impl Iterator<Item = Row>) -> Vec<Row> {
    let mut rows: Vec<Row> = rows.collect();
    rows.sort_by_key(|row| row.key);
    rows.dedup_by_key(|row| row.key);
    rows
}
