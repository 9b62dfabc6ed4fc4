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
            memory::{Case, MemoryState, inherited},
            proof::{GpuMemory, Limits, prove},
        },
    },
    model::{Device, DeviceKind, ProcKey, Slot, View},
};

/// Memory is free when the last file is closed, as measured; what is not free after this long stays.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whom the memory of a GPU may belong to without being a fault.
#[derive(Clone, Debug)]
pub struct Staying<'a> {
    /// Holders that were left alone.
    pub remaining: BTreeSet<u32>,
    /// Who holds what, and has it from whom.
    pub view: &'a View,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryFacts {
    pub slots: BTreeMap<Slot, GpuMemory>,
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
    fn testify(&mut self, staying: &Staying<'_>, patience: Duration) -> MemoryFacts;
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
    gpus: Vec<Device>,
    before: Option<Snapshot>,
    proc: PathBuf,
    sys: PathBuf,
    timeout: Duration,
}

impl Nvml {
    /// `None` where no real GPU is chosen: stand-ins have no memory. The child does nothing before [`Nvml::start`].
    pub fn prepare(config: &Config, devices: &Devices, policy: &Policy) -> Option<Self> {
        let is_real = |device: &&Device| device.kind == DeviceKind::Gpu && device.minor.is_some();
        let chosen = devices.list().iter().filter(is_real).filter(|device| policy.wants(device.slot));
        let gpus: Vec<Device> = chosen.cloned().collect();
        (!gpus.is_empty()).then(|| Self {
            child: NvmlChild::spawn(&config.nvml),
            gpus,
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

    /// Who has a context on which of the chosen GPUs; waits for the answer.
    pub fn contexts(&mut self) -> Result<BTreeMap<Slot, BTreeSet<u32>>, NvmlTrouble> {
        let child = self.child.as_mut().map_err(|trouble| trouble.clone())?;
        let before = self.before.insert(child.ask(self.timeout)?);
        let contexts = before.contexts();
        Ok(self.gpus.iter().filter_map(|gpu| Some((gpu.slot, contexts.get(&gpu.minor?)?.clone()))).collect())
    }
}

impl MemoryWitness for Nvml {
    fn testify(&mut self, staying: &Staying<'_>, patience: Duration) -> MemoryFacts {
        let Self { child, gpus, before, proc, sys, timeout } = self;
        let child = match child {
            Ok(child) => child,
            Err(trouble) => {
                return MemoryFacts { trouble: Some(trouble.to_string()), ..MemoryFacts::default() };
            }
        };
        let alive = |pid: u32| proc.join(pid.to_string()).exists();
        let mut case = Case {
            before: before.clone(),
            remaining: staying.remaining.clone(),
            alive: BTreeSet::new(),
            inherited: inherited(staying.view, gpus, &|key| alive(key.tgid)),
        };
        let limits = Limits { until: Instant::now() + patience.min(PATIENCE), timeout: *timeout, clock: boottime_ns };
        let wanted: BTreeSet<u32> = gpus.iter().filter_map(|gpu| gpu.minor).collect();
        let proof = prove(child, &mut case, &wanted, limits, &alive);
        let slots = gpus.iter().filter_map(|gpu| Some((gpu.slot, proof.gpus.get(&gpu.minor?)?.clone())));
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
