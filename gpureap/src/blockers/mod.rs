//! Who stands in the way of a GPU reset, of unloading the driver, or of a change of the MIG mode, and how to release each.
//! Pure: what was seen goes in, a decision comes out.

pub mod release;
pub mod report;
pub mod services;
pub mod text;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use self::{
    release::{Release, job},
    report::{Blocker, BlockerKind, Outcome, ProcessReport, Standing, Step},
    services::Service,
};
use crate::{
    exit_code::Exit,
    gpu::{
        modules::{self, Module},
        nvml::Snapshot,
    },
    holders::report::{HolderReport, HoldersReport, OrphanReport},
    model::{Device, DeviceKind, Slot, Source},
    out::words::{self, plural},
};

/// `nvidia-nvswitchctl`, which every driver registers, with or without a switch.
const NVSWITCH_CTL_MINOR: u32 = 255;

/// What is to be done to the driver or the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// nvidia-smi --gpu-reset
    Reset,
    /// rmmod nvidia: an update of the driver
    Unload,
    /// nvidia-smi -mig 0|1
    Mig,
}

impl Operation {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reset => "GPU reset",
            Self::Unload => "unloading the driver",
            Self::Mig => "change of the MIG mode",
        }
    }
}

/// All that was seen.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    pub operation: Operation,
    /// The chosen GPUs; of no meaning for an unload.
    pub chosen: &'a BTreeSet<Slot>,
    pub devices: &'a [Device],
    pub holders: &'a HoldersReport,
    pub modules: &'a [Module],
    /// NVML's answer, where there is one.
    pub nvml: Option<&'a Snapshot>,
    /// Whether /proc shows this caller every process of the host.
    pub sees_all: bool,
}

/// What follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The GPUs that the operation is about.
    pub targets: BTreeSet<Slot>,
    pub blockers: Vec<Blocker>,
    /// What to do, in this order.
    pub steps: Vec<Step>,
    /// The operation itself.
    pub then: Vec<String>,
    /// What to start again.
    pub afterwards: Vec<String>,
    pub outcome: Outcome,
    pub exit: Exit,
    pub notes: Vec<String>,
}

pub fn decide(scene: &Scene<'_>) -> Decision {
    let mut notes = Vec::new();
    let reach = Reach::of(scene, &mut notes);
    let mut found = Found::default();
    let mut elsewhere = 0;
    for holder in &scene.holders.holders {
        match reach.holds(holder) {
            Held::InTheWay(nodes) => found.process(scene, &reach, holder, nodes),
            Held::Elsewhere => elsewhere += 1,
            Held::Nothing => {}
        }
    }
    if elsewhere > 0 {
        notes.push(format!(
            "{elsewhere} {} only other GPUs and stay out of it",
            plural(elsewhere, "process uses", "processes use")
        ));
    }
    for orphan in &scene.holders.orphans {
        if reach.counts(&orphan.node) {
            found.file(orphan);
        }
    }
    found.settings(scene, &reach);
    found.modules(scene);
    let Found { mut items } = found;
    items.sort_by_key(|item| item.rank);
    let (outcome, exit) = verdict(&items, scene);
    if outcome == Outcome::Unknown {
        notes.push("not every process could be seen: root sees all, in the host's pid and user namespaces".to_owned());
    }
    if scene.operation == Operation::Mig {
        notes.extend(undividable(scene, &reach));
    }
    let steps = steps(&items);
    let mut afterwards: Vec<String> = Vec::new();
    for item in items.iter().rev() {
        for command in &item.afterwards {
            if !afterwards.contains(command) {
                afterwards.push(command.clone());
            }
        }
    }
    Decision {
        targets: reach.targets.clone(),
        then: then(scene, &reach),
        blockers: items.into_iter().map(|item| item.blocker).collect(),
        steps,
        afterwards,
        outcome,
        exit,
        notes,
    }
}

/// Of several kinds the first of jobs, protected and kernel counts.
fn verdict(items: &[Item], scene: &Scene<'_>) -> (Outcome, Exit) {
    let unseen = scene.holders.source == Source::Proc && !scene.sees_all;
    let any = |standings: &[Standing]| items.iter().any(|item| standings.contains(&item.blocker.standing));
    if any(&[Standing::Job]) {
        (Outcome::Jobs, Exit::Held)
    } else if any(&[Standing::Monitor, Standing::System]) {
        (Outcome::Protected, Exit::Protected)
    } else if unseen {
        // What was not seen may be a job.
        (Outcome::Unknown, Exit::NotPermitted)
    } else if any(&[Standing::Kernel]) {
        (Outcome::KernelReference, Exit::KernelReference)
    } else {
        (Outcome::Clear, Exit::Done)
    }
}

/// Which devices the operation needs to be closed.
struct Reach<'a> {
    operation: Operation,
    targets: BTreeSet<Slot>,
    devices: &'a [Device],
    by_node: BTreeMap<String, &'a Device>,
    /// Minors of the targets that are real GPUs, for the nodes of their instances.
    minors: BTreeSet<u32>,
}

enum Held {
    /// The nodes that matter.
    InTheWay(Vec<String>),
    Elsewhere,
    Nothing,
}

impl<'a> Reach<'a> {
    fn of(scene: &Scene<'a>, notes: &mut Vec<String>) -> Self {
        let Scene { operation, chosen, devices, .. } = *scene;
        let gpus: BTreeSet<Slot> =
            devices.iter().filter(|device| device.kind.is_gpu()).map(|device| device.slot).collect();
        let switches = devices.iter().any(|device| {
            device.kind == DeviceKind::Nvswitch && device.minor.is_some_and(|minor| minor != NVSWITCH_CTL_MINOR)
        });
        let targets = match operation {
            Operation::Unload => gpus,
            Operation::Reset if switches && *chosen != gpus => {
                notes.push(
                    "this host has NVSwitches: all its GPUs are taken together here, as those before Ampere have to be; \
                     later ones may be reset alone"
                        .to_owned(),
                );
                gpus
            }
            Operation::Reset | Operation::Mig => chosen.clone(),
        };
        let minors = devices
            .iter()
            .filter(|device| device.kind == DeviceKind::Gpu && targets.contains(&device.slot))
            .filter_map(|device| device.minor)
            .collect();
        let by_node = devices.iter().map(|device| (device.node.display().to_string(), device)).collect();
        Self { operation, targets, devices, by_node, minors }
    }

    /// Whether a file of this node has to be closed, whoever has it.
    fn counts(&self, node: &str) -> bool {
        let Some(device) = self.by_node.get(node) else { return true };
        if self.operation == Operation::Unload {
            return true;
        }
        match device.kind {
            DeviceKind::Gpu | DeviceKind::Standin => self.is_target(device),
            DeviceKind::Cap => instance_of(device).is_some_and(|minor| self.minors.contains(&minor)),
            // Of whom they serve they do not tell.
            _ => false,
        }
    }

    fn is_target(&self, device: &Device) -> bool {
        // A GPU that has no entry of its own may be any.
        self.targets.contains(&device.slot) || device.minor.is_none()
    }

    fn holds(&self, holder: &HolderReport) -> Held {
        let all: Vec<&str> = holder.devices.iter().map(|held| held.node.as_str()).collect();
        let nodes: Vec<String> = all.iter().filter(|node| self.counts(node)).map(|node| (*node).to_owned()).collect();
        if !nodes.is_empty() {
            return Held::InTheWay(nodes);
        }
        let of_a_gpu = |node: &&str| {
            self.by_node.get(*node).is_some_and(|device| device.kind.is_gpu() || instance_of(device).is_some())
        };
        if all.is_empty() {
            Held::Nothing
        } else if all.iter().any(of_a_gpu) {
            // The nodes that all GPUs share serve its own GPU.
            Held::Elsewhere
        } else {
            // Shared nodes alone: it may be about to open, or to manage, any GPU.
            Held::InTheWay(all.into_iter().map(str::to_owned).collect())
        }
    }

    fn target_devices(&self) -> impl Iterator<Item = &'a Device> {
        self.devices.iter().filter(|device| self.targets.contains(&device.slot) && device.minor.is_some())
    }

    /// The targets as nvidia-smi takes them.
    fn ids(&self) -> Vec<String> {
        self.target_devices().filter(|device| device.kind == DeviceKind::Gpu).filter_map(id).collect()
    }
}

/// As nvidia-smi takes it, which knows nothing of minors.
fn id(device: &Device) -> Option<String> {
    device.uuid.clone().or_else(|| device.bdf.clone()).or_else(|| Some(device.index?.to_string()))
}

/// The GPU whose instance a capability node is for: `gpu0/gi1/access`.
fn instance_of(device: &Device) -> Option<u32> {
    if device.kind != DeviceKind::Cap {
        return None;
    }
    let (gpu, _) = device.model.as_deref()?.split_once('/')?;
    gpu.strip_prefix("gpu")?.parse().ok()
}

/// One thing in the way, and when its turn comes.
struct Item {
    rank: u32,
    blocker: Blocker,
    afterwards: Vec<String>,
}

/// Turns.
mod rank {
    pub(super) const JOB: u32 = 10;
    pub(super) const FILE: u32 = 15;
    /// Of the system, and not known; the known ones have ranks of their own between 20 and 65.
    pub(super) const OTHER: u32 = 30;
    pub(super) const INSTANCES: u32 = 60;
    pub(super) const PERSISTENCE: u32 = 70;
    pub(super) const MODULE: u32 = 80;
}

#[derive(Default)]
struct Found {
    items: Vec<Item>,
}

impl Found {
    fn process(&mut self, scene: &Scene<'_>, reach: &Reach<'_>, holder: &HolderReport, nodes: Vec<String>) {
        let service = Service::of(holder);
        let standing = match (Standing::of(holder.class), service) {
            (Standing::Job, Some(service)) => service.standing,
            (classed, _) => classed,
        };
        let host = &scene.holders.host;
        let (rank, release, afterwards) = if let Some(service) = service {
            let ids = reach.ids();
            let release = service.release(holder, scene.operation, &ids, host);
            (service.rank, release, service.start(holder, scene.operation, &ids, host))
        } else {
            let gpus: Vec<String> = reach
                .target_devices()
                .filter(|device| nodes.contains(&device.node.display().to_string()))
                .map(name_for_choosing)
                .collect();
            let every = scene.operation == Operation::Unload;
            let rank = if standing == Standing::Job { rank::JOB } else { rank::OTHER };
            (rank, job(holder, &gpus, every, standing, host), Vec::new())
        };
        let why = format!("has {} open", words::nodes(&nodes));
        let process = Some(ProcessReport::of(holder, service.map(|service| service.name)));
        self.items.push(Item {
            rank,
            afterwards,
            blocker: Blocker { kind: BlockerKind::Process, standing, why, nodes, process, module: None, release },
        });
    }

    fn file(&mut self, orphan: &OrphanReport) {
        let OrphanReport { node, files, how: _, last_owner } = orphan;
        let owner = last_owner
            .as_ref()
            .map_or_else(String::new, |owner| format!(", last held by {} (pid {})", owner.comm, owner.pid));
        self.items.push(Item {
            rank: rank::FILE,
            afterwards: Vec::new(),
            blocker: Blocker {
                kind: BlockerKind::File,
                standing: Standing::Kernel,
                why: format!(
                    "{files} open {} of {node} with no process{owner}",
                    plural(*files as usize, "file", "files")
                ),
                nodes: vec![node.clone()],
                process: None,
                module: None,
                release: Release::note(
                    "it is in flight in a socket or in an io_uring: end the process that could still receive it",
                ),
            },
        });
    }

    /// What NVML says is set.
    fn settings(&mut self, scene: &Scene<'_>, reach: &Reach<'_>) {
        for device in reach.target_devices().filter(|device| device.kind == DeviceKind::Gpu) {
            let Some(gpu) = scene.nvml.zip(device.minor).and_then(|(nvml, minor)| nvml.gpu(minor)) else { continue };
            let node = device.node.display().to_string();
            let name = id(device).unwrap_or_else(|| gpu.index.to_string());
            let mut setting = |rank, why: String, commands: Vec<String>, afterwards: Vec<String>| {
                self.items.push(Item {
                    rank,
                    afterwards,
                    blocker: Blocker {
                        kind: BlockerKind::Setting,
                        standing: Standing::Kernel,
                        why,
                        nodes: vec![node.clone()],
                        process: None,
                        module: None,
                        release: Release { commands, note: None },
                    },
                });
            };
            // The GPU's state is kept in the driver while nobody has it open. MIG mode can be changed all the same.
            if gpu.persistence == Some(true) && scene.operation != Operation::Mig {
                let why = format!("persistence mode is on for {node}");
                let commands = |mode| vec![release::persistence(&name, mode)];
                setting(rank::PERSISTENCE, why, commands(0), commands(1));
            }
            let parts = gpu.mig.as_ref().map_or(0, |mig| mig.devices.len());
            if parts > 0 && scene.operation != Operation::Unload {
                let why = format!("{node} is divided into {parts} MIG {}", plural(parts, "device", "devices"));
                let commands = ["-dci", "-dgi"].map(|what| format!("nvidia-smi mig -i {name} {what}"));
                setting(rank::INSTANCES, why, commands.to_vec(), Vec::new());
            }
        }
    }

    fn modules(&mut self, scene: &Scene<'_>) {
        let order = modules::unload_order(scene.modules);
        let unload = scene.operation == Operation::Unload;
        for (position, name) in order.iter().enumerate() {
            let Some(module) = scene.modules.iter().find(|module| module.name == *name) else { continue };
            let users = module.by_others().unwrap_or(0);
            let console = module.modeset == Some(true);
            let why = if name == modules::ROOT {
                // References by open files are the business of those who have them.
                let explained = !scene.holders.complete
                    || !scene.holders.orphans.is_empty()
                    || !scene.holders.holders.is_empty()
                    || scene.holders.devices.iter().any(|device| device.open_files.is_some_and(|files| files > 0));
                if !unload || explained || users == 0 {
                    continue;
                }
                format!("{}, {users} of them by neither a module nor an open file", module.sentence())
            } else if console {
                format!("{name} sets display modes (modeset=1) and keeps the GPUs in use for the console")
            } else if unload {
                format!("{name} needs nvidia; {}", module.sentence())
            } else if users > 0 && services::is_for_transfers(name) {
                format!("{name} has {users} {} of its own", plural(users as usize, "user", "users"))
            } else {
                continue;
            };
            let (commands, note) = release::module(name, console, users);
            self.items.push(Item {
                rank: rank::MODULE + position as u32,
                // The driver brings its own modules back when it is loaded.
                afterwards: if unload { Vec::new() } else { vec![format!("modprobe {name}")] },
                blocker: Blocker {
                    kind: BlockerKind::Module,
                    standing: Standing::Kernel,
                    why,
                    nodes: Vec::new(),
                    process: None,
                    module: Some(name.clone()),
                    release: Release { commands, note },
                },
            });
        }
    }
}

/// Targets whose MIG mode nobody can change.
fn undividable(scene: &Scene<'_>, reach: &Reach<'_>) -> Vec<String> {
    let gpu = |device: &Device| scene.nvml.zip(device.minor).and_then(|(nvml, minor)| nvml.gpu(minor));
    reach
        .target_devices()
        .filter(|device| device.kind == DeviceKind::Gpu)
        .filter(|device| gpu(device).is_some_and(|gpu| gpu.mig.is_none() && gpu.errors.is_empty()))
        .map(|device| format!("{} cannot be divided: NVML knows no MIG mode of it", device.node.display()))
        .collect()
}

/// Each command once, at its first turn.
fn steps(items: &[Item]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for Item { blocker, .. } in items {
        for command in &blocker.release.commands {
            let label = blocker.label();
            match steps.iter_mut().find(|step| step.command == *command) {
                Some(step) if step.releases.contains(&label) => {}
                Some(step) => step.releases.push(label),
                None => steps.push(Step { command: command.clone(), releases: vec![label] }),
            }
        }
    }
    steps
}

fn then(scene: &Scene<'_>, reach: &Reach<'_>) -> Vec<String> {
    let ids = reach.ids();
    match scene.operation {
        Operation::Unload => vec!["modprobe -r nvidia".to_owned()],
        // Stand-ins alone.
        _ if ids.is_empty() => Vec::new(),
        Operation::Reset => vec![format!("nvidia-smi --gpu-reset -i {}", ids.join(","))],
        Operation::Mig => {
            let enabled = |device: &Device| {
                let gpu = scene.nvml.zip(device.minor).and_then(|(nvml, minor)| nvml.gpu(minor));
                gpu.and_then(|gpu| Some(gpu.mig.as_ref()?.enabled))
            };
            let command = |device: &Device| {
                let mode = match enabled(device) {
                    Some(true) => "0",
                    Some(false) => "1",
                    None => "0|1",
                };
                Some(format!("nvidia-smi -i {} -mig {mode}", id(device)?))
            };
            reach.target_devices().filter(|device| device.kind == DeviceKind::Gpu).filter_map(command).collect()
        }
    }
}

/// How `gpureap reap --gpu` is told of it.
fn name_for_choosing(device: &Device) -> String {
    match (device.kind, device.gpu) {
        (DeviceKind::Gpu, Some(minor)) => minor.to_string(),
        _ => device.node.display().to_string(),
    }
}
