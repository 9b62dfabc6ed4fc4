//! Device memory as the last of the three facts: `exited`, `closed`, `memory free`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::plan::Policy;
use crate::{
    clock::boottime_ns,
    config::Config,
    gpu::{
        devices::Devices,
        modules,
        nvml::{
            NvmlChild, NvmlTrouble, Snapshot,
            memory::{Case, Inheritance, MemoryState},
            proof::{Limits, prove},
        },
    },
    model::{DeviceKind, Holder, ProcKey, Slot},
};

/// Memory is free when the last file is closed, as measured; what is not free after this long stays.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whom the memory of a GPU may belong to without being a fault.
#[derive(Clone, Debug, Default)]
pub struct Staying {
    /// Holders that were left alone.
    pub remaining: BTreeSet<u32>,
    /// Holders with what they were forked from.
    pub heirs: Vec<Holder>,
}

/// What is known of the memory of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotMemory {
    pub state: MemoryState,
    /// Boottime at which it was seen to be free.
    pub free_ns: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryFacts {
    pub slots: BTreeMap<Slot, SlotMemory>,
    /// Why nothing, or not all, is known.
    pub trouble: Option<String>,
    /// Who refers to the driver's modules; asked where memory stays used.
    pub modules: Vec<String>,
}

impl MemoryFacts {
    /// The slots of which the memory is still used.
    pub fn used(&self) -> impl Iterator<Item = (Slot, &MemoryState)> {
        self.slots
            .iter()
            .filter(|(_, memory)| matches!(memory.state, MemoryState::StillUsed { .. }))
            .map(|(slot, memory)| (*slot, &memory.state))
    }
}

/// Somebody who can be asked for device memory.
pub trait MemoryWitness {
    fn testify(&mut self, staying: &Staying, patience: Duration) -> MemoryFacts;
}

/// In a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    pub state: MemoryWord,
    /// What is used by none of those that stay.
    pub used_mib: Option<u64>,
    /// One sentence, unless it is free.
    pub note: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryWord {
    Free,
    StillUsed,
    Unknown,
}

impl From<&MemoryState> for MemoryReport {
    fn from(state: &MemoryState) -> Self {
        let note = Some(state.sentence());
        match state {
            MemoryState::Free => Self { state: MemoryWord::Free, used_mib: None, note: None },
            MemoryState::StillUsed { mib, by: _ } => Self { state: MemoryWord::StillUsed, used_mib: Some(*mib), note },
            MemoryState::Unknown(_) => Self { state: MemoryWord::Unknown, used_mib: None, note },
        }
    }
}

/// NVML, in a child with a time limit.
pub struct Nvml {
    child: Result<NvmlChild, NvmlTrouble>,
    minors: BTreeMap<Slot, u32>,
    before: Option<Snapshot>,
    proc: PathBuf,
    sys: PathBuf,
    timeout: Duration,
}

impl Nvml {
    /// `None` where no real GPU is chosen: stand-ins have no memory. The child does nothing before [`Nvml::start`].
    pub fn prepare(config: &Config, devices: &Devices, policy: &Policy) -> Option<Self> {
        let minors: BTreeMap<Slot, u32> = devices
            .list()
            .iter()
            .filter(|device| device.kind == DeviceKind::Gpu && policy.wants(device.slot))
            .filter_map(|device| Some((device.slot, device.minor?)))
            .collect();
        (!minors.is_empty()).then(|| Self {
            child: NvmlChild::spawn(&config.nvml),
            minors,
            before: None,
            proc: config.paths.proc.clone(),
            sys: config.paths.sys.clone(),
            timeout: config.nvml.timeout,
        })
    }

    /// The child, while there is one.
    pub fn helper(&self) -> Option<ProcKey> {
        self.child.as_ref().ok().map(NvmlChild::key)
    }

    /// Lets the child load the library, while the caller does something else.
    pub fn start(&mut self) {
        if let Ok(child) = &mut self.child
            && let Err(trouble) = child.start()
        {
            self.child = Err(trouble);
        }
    }

    /// Who has a context on which of the chosen GPUs; waits for the answer. Nobody where there is none.
    pub fn contexts(&mut self) -> BTreeMap<Slot, BTreeSet<u32>> {
        let Ok(child) = &mut self.child else { return BTreeMap::new() };
        self.before = child.ask(self.timeout).ok();
        let Some(before) = &self.before else { return BTreeMap::new() };
        let contexts = before.contexts();
        self.minors.iter().filter_map(|(slot, minor)| Some((*slot, contexts.get(minor)?.clone()))).collect()
    }
}

impl MemoryWitness for Nvml {
    fn testify(&mut self, staying: &Staying, patience: Duration) -> MemoryFacts {
        let Self { child, minors, before, proc, sys, timeout } = self;
        let child = match child {
            Ok(child) => child,
            Err(trouble) => {
                return MemoryFacts { trouble: Some(trouble.to_string()), ..MemoryFacts::default() };
            }
        };
        let alive = |pid: u32| proc.join(pid.to_string()).exists();
        let inheritance = |heir: &Holder| {
            let dead = heir.inherited_from?.tgid;
            let held = heir.usage.keys().filter_map(|slot| minors.get(slot)).copied().collect();
            (!alive(dead)).then_some(Inheritance { dead, living: heir.key.tgid, minors: held })
        };
        let mut case = Case {
            before: before.clone(),
            remaining: staying.remaining.clone(),
            alive: BTreeSet::new(),
            inherited: staying.heirs.iter().filter_map(inheritance).collect(),
        };
        let limits = Limits { until: Instant::now() + patience.min(PATIENCE), timeout: *timeout, clock: boottime_ns };
        let wanted: BTreeSet<u32> = minors.values().copied().collect();
        let proof = prove(child, &mut case, &wanted, limits, &alive);
        let slots = minors.iter().filter_map(|(slot, minor)| {
            let gpu = proof.gpus.get(minor)?;
            Some((*slot, SlotMemory { state: gpu.state.clone(), free_ns: gpu.free_ns }))
        });
        let mut facts = MemoryFacts {
            slots: slots.collect(),
            trouble: proof.trouble.map(|trouble| trouble.to_string()),
            modules: Vec::new(),
        };
        if facts.used().next().is_some() {
            facts.modules = modules::read(sys).iter().map(modules::Module::sentence).collect();
        }
        facts
    }
}
