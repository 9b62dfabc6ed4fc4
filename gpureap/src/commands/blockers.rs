//! `gpureap blockers`.

use std::time::Duration;

use crate::{
    blockers::{
        Operation, Scene, decide,
        report::{BlockersReport, NvmlState, report},
        text,
    },
    choose::{self, Filter},
    cli::{BlockersArgs, Choosing},
    config::Config,
    error::Failure,
    exit_code::Exit,
    eyes::{self, Opened},
    gpu::{
        devices::{Devices, discover},
        modules,
        nvml::{NvmlChild, NvmlTrouble, Snapshot},
    },
    holders::{Options, build},
    host::Host,
    kernel::rights::sees_every_process,
    model::{DeviceKind, Eyes as _},
    out,
    reap::without::Without,
};

/// For the child that asked NVML to be gone: it has GPUs open itself.
const CLOSING: Duration = Duration::from_secs(2);

pub fn run(args: &BlockersArgs, config: &Config) -> anyhow::Result<Exit> {
    let report = examine(args, config)?;
    if args.json {
        out::json::print(&report)?;
    } else {
        out::raw(text::text(&report).as_bytes())?;
    }
    Ok(report.exit())
}

/// What the command prints.
pub fn examine(args: &BlockersArgs, config: &Config) -> anyhow::Result<BlockersReport> {
    let BlockersArgs { operation, choosing, json: _ } = args;
    let Choosing { gpu, .. } = choosing;
    if *operation == Operation::Unload && !gpu.is_empty() {
        return Err(Failure::usage("unloading the driver concerns every GPU, so --gpu has no meaning for it").into());
    }
    if !Filter::new(choosing, &config.paths.proc)?.is_empty() {
        return Err(Failure::usage(
            "whoever is in the way is in the way: blockers takes --gpu, and no filter such as --user or --pid",
        )
        .into());
    }
    let modules = modules::read(&config.paths.sys);
    // It initialises while the kernel's programs are loaded.
    let question = Question::begin(&discover(&config.paths, &config.devices)?, config);
    let Opened { eyes, devices, note } = eyes::open_configured(config)?;
    // A daemon may trace what this host does not show here.
    if devices.is_empty() && modules.is_empty() {
        return Err(Failure::no_device(note.as_deref()).into());
    }
    let chosen = match choose::slots(choosing, &devices, config)? {
        Some(slots) => slots,
        None => devices.gpus().map(|device| device.slot).collect(),
    };
    let Answer { nvml, child } = question.end();
    // Neither this process nor the one that asked NVML is anybody's blocker: both are about to end.
    let own = [Some(std::process::id()), child].into_iter().flatten().collect();
    let mut view = Without { eyes: eyes.as_ref(), pids: own }.view()?;
    view.notes.extend(note);
    let host = Host::read(&config.paths.proc);
    let options = Options { host, slots: None, chosen: None, rules: config.classes.clone(), threads: false };
    let seen = build(&view, &devices, eyes.lineage(), &config.paths, &options);
    let asked = !matches!(nvml, Err(None));
    let (snapshot, trouble) = match nvml {
        Ok(snapshot) => (Some(snapshot), None),
        Err(trouble) => (None, trouble),
    };
    let scene = Scene {
        operation: *operation,
        chosen: &chosen,
        devices: devices.list(),
        holders: &seen,
        modules: &modules,
        nvml: snapshot.as_ref(),
        sees_all: sees_every_process(),
    };
    let state = NvmlState::of(trouble.as_ref(), asked);
    Ok(report(*operation, decide(&scene), devices.list(), &seen, &modules, state))
}

/// NVML is being asked, on a host that has it.
struct Question {
    child: Option<Result<NvmlChild, NvmlTrouble>>,
    timeout: Duration,
}

struct Answer {
    /// `Err(None)`: nobody was asked.
    nvml: Result<Snapshot, Option<NvmlTrouble>>,
    /// The child's pid, if it is not known to be gone.
    child: Option<u32>,
}

impl Question {
    fn begin(devices: &Devices, config: &Config) -> Self {
        let real = devices.list().iter().any(|device| device.kind == DeviceKind::Gpu && device.minor.is_some());
        let child = real.then(|| {
            let mut child = NvmlChild::spawn(&config.nvml)?;
            child.start()?;
            Ok(child)
        });
        Self { child, timeout: config.nvml.timeout }
    }

    fn end(self) -> Answer {
        match self.child {
            None => Answer { nvml: Err(None), child: None },
            Some(Err(trouble)) => Answer { nvml: Err(Some(trouble)), child: None },
            Some(Ok(mut child)) => {
                let pid = child.pid();
                let nvml = child.ask(self.timeout).map_err(Some);
                let gone = child.close(CLOSING);
                Answer { nvml, child: (!gone).then_some(pid) }
            }
        }
    }
}
