//! `gpureap.blockers/1`: what `blockers --json` prints. Fields may be added, never renamed within a schema number.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Decision, Operation, release::Release};
use crate::{
    classify::Class,
    exit_code::Exit,
    gpu::{modules::Module, nvml::NvmlTrouble},
    holders::report::{HolderReport, HoldersReport},
    model::{Backend, Device, How, Source},
};

pub const SCHEMA: &str = "gpureap.blockers/1";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockersReport {
    pub schema: String,
    pub host: String,
    pub boot_id: String,
    /// RFC 3339.
    pub time: String,
    #[serde(rename = "for")]
    pub operation: Operation,
    pub outcome: Outcome,
    pub exit_code: u8,
    pub source: Source,
    pub backend: Option<Backend>,
    pub complete: bool,
    pub cannot_see: BTreeSet<How>,
    /// The GPUs that the operation is about.
    pub devices: Vec<Target>,
    pub blockers: Vec<Blocker>,
    pub steps: Vec<Step>,
    /// The operation itself, when all steps are done.
    pub then: Vec<String>,
    /// What to start again afterwards.
    pub afterwards: Vec<String>,
    pub modules: Vec<Module>,
    pub nvml: NvmlState,
    pub notes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Nothing that was seen is in the way.
    Clear,
    Jobs,
    /// Monitors and services alone.
    Protected,
    /// No process, but modules, settings or files without one.
    KernelReference,
    /// The caller may not see enough to say.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    pub node: String,
    pub gpu: Option<u32>,
    pub index: Option<u32>,
    pub uuid: Option<String>,
    pub bdf: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockerKind {
    Process,
    Module,
    Setting,
    File,
}

/// What a blocker is to its operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    Job,
    Monitor,
    System,
    Kernel,
}

impl Standing {
    /// Of a process, by the class that its holder row has.
    pub const fn of(class: Class) -> Self {
        match class {
            Class::Monitor => Self::Monitor,
            Class::System => Self::System,
            Class::Job => Self::Job,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocker {
    pub kind: BlockerKind,
    pub standing: Standing,
    pub why: String,
    /// The nodes that have to be closed, or the GPU that a setting is about.
    pub nodes: Vec<String>,
    pub process: Option<ProcessReport>,
    pub module: Option<String>,
    pub release: Release,
}

impl Blocker {
    /// A short name for lists.
    pub fn label(&self) -> String {
        match (&self.process, &self.module) {
            (Some(process), _) => format!("{} ({})", process.service.as_deref().unwrap_or(&process.comm), process.pid),
            (None, Some(module)) => module.clone(),
            (None, None) => self.why.clone(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReport {
    pub pid: u32,
    pub start_ns: u64,
    pub comm: String,
    pub argv: Vec<String>,
    pub exe: Option<String>,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub class: Class,
    pub class_rule: String,
    /// The known service that it is.
    pub service: Option<String>,
    pub unit: Option<String>,
    pub container: Option<String>,
    pub slurm_job: Option<String>,
    pub pod: Option<String>,
}

impl ProcessReport {
    pub fn of(holder: &HolderReport, service: Option<&str>) -> Self {
        let HolderReport {
            pid,
            start_ns,
            comm,
            argv,
            exe,
            uid,
            user,
            class,
            class_rule,
            unit,
            container,
            slurm_job,
            pod,
            ..
        } = holder.clone();
        let service = service.map(str::to_owned);
        Self { pid, start_ns, comm, argv, exe, uid, user, class, class_rule, service, unit, container, slurm_job, pod }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub command: String,
    /// Short names of what it releases.
    pub releases: Vec<String>,
}

/// Whether NVML was asked for the settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlState {
    /// False where there is no NVIDIA GPU.
    pub asked: bool,
    /// Why there is no answer; then settings are not known.
    pub trouble: Option<String>,
}

impl NvmlState {
    pub fn of(trouble: Option<&NvmlTrouble>, asked: bool) -> Self {
        Self { asked, trouble: trouble.map(ToString::to_string) }
    }
}

/// The report of a decision.
pub fn report(
    operation: Operation,
    decision: Decision,
    devices: &[Device],
    seen: &HoldersReport,
    modules: &[Module],
    nvml: NvmlState,
) -> BlockersReport {
    let Decision { targets, blockers, steps, then, afterwards, outcome, exit, notes } = decision;
    let HoldersReport { host, boot_id, time, source, backend, complete, cannot_see, notes: seen_notes, .. } =
        seen.clone();
    let target = |device: &Device| Target {
        node: device.node.display().to_string(),
        gpu: device.gpu,
        index: device.index,
        uuid: device.uuid.clone(),
        bdf: device.bdf.clone(),
    };
    let mut all_notes = notes;
    all_notes.extend(seen_notes);
    if let Some(trouble) = &nvml.trouble {
        all_notes.push(format!("persistence mode and MIG devices are not known: {trouble}"));
    }
    BlockersReport {
        schema: SCHEMA.to_owned(),
        host,
        boot_id,
        time: time.to_string(),
        operation,
        outcome,
        exit_code: exit as u8,
        source,
        backend,
        complete,
        cannot_see,
        devices: devices
            .iter()
            .filter(|device| targets.contains(&device.slot) && device.minor.is_some())
            .map(target)
            .collect(),
        blockers,
        steps,
        then,
        afterwards,
        modules: modules.to_vec(),
        nvml,
        notes: all_notes,
    }
}

impl BlockersReport {
    pub const fn exit(&self) -> Exit {
        match self.outcome {
            Outcome::Clear => Exit::Done,
            Outcome::Jobs => Exit::Held,
            Outcome::Protected => Exit::Protected,
            Outcome::KernelReference => Exit::KernelReference,
            Outcome::Unknown => Exit::NotPermitted,
        }
    }
}
