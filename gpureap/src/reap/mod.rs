//! Free GPUs: choose, plan, signal, wait, prove.

mod aside;
pub mod door;
pub mod ladder;
pub mod memory;
pub mod people;
pub mod pidfd;
pub mod plan;
pub mod reaper;
pub mod record;
pub mod report;
pub mod scope;
pub mod signaller;
pub mod stuck;
pub mod text;
pub mod units;
pub mod verdict;
pub mod without;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::IsTerminal as _,
};

use self::{
    door::Door,
    ladder::Rungs,
    people::ProcPeople,
    pidfd::Pidfds,
    plan::{Matching, Policy},
    reaper::Reaper,
    record::{Ended, Record},
    report::{Report, Scene},
    stuck::Coroner,
    without::Without,
};
use crate::{
    choose::{self, Chooser, Chosen},
    cli::ReapArgs,
    clock::boottime_ns,
    config::Config,
    error::Failure,
    exit_code::Exit,
    eyes::{self, Opened},
    gpu::{devices::Devices, nvml::NvmlTrouble},
    kernel::rights,
    model::{Eyes, Slot},
    out::{self, words::plural},
};

/// A note, with the reason behind it.
const WITHOUT_CONTEXTS: &str = "nobody could be asked for contexts, so who only has one and no mapping does not count";

pub fn run(args: &ReapArgs, config: &Config) -> anyhow::Result<Exit> {
    let Opened { eyes, devices, note } = eyes::open_configured(config)?;
    if devices.is_empty() {
        return Err(Failure::no_device(note.as_deref()).into());
    }
    reap(args, config, &devices, eyes.as_ref(), note)
}

/// How a reap ended.
#[derive(Debug)]
pub enum Reaped {
    /// It was only to be planned.
    Planned(Report),
    /// Whoever was asked said no, and nothing was done.
    Declined,
    Done {
        report: Report,
        exit: Exit,
        /// Whether its signals are on the disk.
        recorded: bool,
    },
}

/// Whether a plan is to be carried out.
pub type Ask<'a> = &'a dyn Fn(&Report) -> anyhow::Result<bool>;

/// Puts how it ended into the record of signals: after it is told, as a disk may hang.
pub fn remember(report: &Report, recorded: bool, config: &Config) {
    if let Some(ended) = Ended::of(report).filter(|_| recorded) {
        ended.write(&config.paths.state);
    }
}

/// The holders of some devices, with nobody out of bounds.
pub fn choice(slots: Option<BTreeSet<Slot>>, matching: Matching, devices: &Devices, people: &ProcPeople) -> Policy {
    Policy {
        slots,
        matching,
        by_handle: devices.by_handle(),
        contexts: BTreeMap::new(),
        pids: BTreeSet::new(),
        chosen: None,
        undecided: BTreeSet::new(),
        own: std::process::id(),
        own_session: 0,
        ancestors: people.ancestors(std::process::id()),
        include_own_session: true,
        stop_monitors: false,
        include_protected: BTreeSet::new(),
        privileged: rights::sees_every_process(),
    }
}

fn policy(args: &ReapArgs, config: &Config, devices: &Devices, people: &ProcPeople) -> anyhow::Result<Policy> {
    let unknown = |name: &&String| *name != "all" && !config.classes.has(name);
    if let Some(name) = args.include_protected.iter().find(unknown) {
        return Err(
            Failure::usage(format!("--include-protected {name}: no rule has that name; the plan names them")).into()
        );
    }
    let slots = choose::slots(&args.choosing, devices, config)?;
    Ok(Policy {
        pids: args.choosing.pid.iter().copied().collect(),
        own_session: people.session(std::process::id()),
        include_own_session: args.include_own_session,
        stop_monitors: args.stop_monitors,
        include_protected: args.include_protected.iter().cloned().collect(),
        ..choice(slots, args.matching().into(), devices, people)
    })
}

/// A whole reap over any source, with a person who is asked and told; `note` says why it is not a better one.
pub fn reap(
    args: &ReapArgs,
    config: &Config,
    devices: &Devices,
    eyes: &dyn Eyes,
    note: Option<String>,
) -> anyhow::Result<Exit> {
    let first = args.first_signal();
    let ask = |plan: &Report| {
        let targets = plan.processes.len();
        if targets == 0 {
            return Ok(true);
        }
        out::diagnostic_text(&text::plan(plan, first.name()));
        out::ask(&format!("send {first} to {targets} {}? [y/N] ", plural(targets, "process", "processes")))
    };
    let asks = !args.yes && std::io::stdin().is_terminal();
    match carry_out(args, config, devices, eyes, note, if asks { Some(&ask) } else { None })? {
        Reaped::Planned(plan) => {
            print(args, &plan, || text::plan(&plan, first.name()))?;
            Ok(Exit::Done)
        }
        Reaped::Declined => {
            out::diagnostic_text("nothing was done\n");
            Ok(Exit::Held)
        }
        Reaped::Done { report, exit, recorded } => {
            let printed = print(args, &report, || text::report(&report));
            remember(&report, recorded, config);
            printed.map(|()| exit)
        }
    }
}

/// The same without a word; `ask`, where there is one, decides on the plan.
pub fn carry_out(
    args: &ReapArgs,
    config: &Config,
    devices: &Devices,
    eyes: &dyn Eyes,
    note: Option<String>,
    ask: Option<Ask<'_>>,
) -> anyhow::Result<Reaped> {
    rights::require_own_proc(&config.paths.proc)?;
    let mut signaller = Pidfds::new();
    let scene = Scene::here(&config.paths.proc);
    let people = ProcPeople::classed(&config.paths, &config.classes);
    if args.fence {
        door::check()?;
    }
    let mut policy = policy(args, config, devices, &people)?;
    let chooser = Chooser::new(&args.choosing, &config.paths, eyes.lineage())?;
    // A plan asks for contexts alone, and those count only where use does.
    let asks_nvml = !args.dry_run || policy.matching == Matching::Attached;
    let mut nvml = if asks_nvml { memory::Nvml::prepare(config, devices, &policy) } else { None };
    let helper = nvml.as_ref().and_then(memory::Nvml::helper);
    let eyes = &Without { eyes, pids: helper.iter().map(|key| key.tgid).collect() };
    let door = if args.fence && !args.dry_run {
        Some(Door::close(
            config,
            devices,
            &policy,
            helper,
            args.grace.saturating_add(args.timeout).saturating_mul(reaper::ROUNDS),
        )?)
    } else {
        None
    };
    let mut without_contexts = None;
    if let Some(nvml) = &mut nvml {
        nvml.start();
        if policy.matching == Matching::Attached {
            match nvml.contexts() {
                Ok(contexts) => policy.contexts = contexts,
                // As it was wished.
                Err(NvmlTrouble::Disabled) => {}
                Err(trouble) => without_contexts = Some(format!("{WITHOUT_CONTEXTS}: {trouble}")),
            }
        }
    }
    let view = eyes.view()?;
    let Chosen { keys, undecided, notes: mut filter_notes } = chooser.chosen(&view)?;
    filter_notes.extend(without_contexts);
    policy.chosen = keys;
    policy.undecided = undecided;
    let subjects = people.subjects(&view);
    if let Some(door) = &door {
        door.exempt(subjects.iter())?;
    }
    let mut record = Record::new(&config.paths.state, scene.clone(), boottime_ns);
    let mut reaper = Reaper {
        eyes,
        signaller: &mut signaller,
        ledger: &mut record,
        people: &people,
        kinship: &people,
        devices: devices.list(),
        policy: &policy,
        filter: &|view| chooser.chosen(view).map_or_else(|_| policy.chosen.clone(), |chosen| chosen.keys),
        scope: args.scope,
        fenced: door.is_some(),
        memory: match &mut nvml {
            Some(nvml) => Some(nvml),
            None => None,
        },
        scene,
    };
    let planned = reaper.plan(view, &subjects);
    let preview = || {
        let mut preview = reaper.dry_run(&planned);
        preview.notes.extend(note.iter().chain(&filter_notes).cloned());
        preview
    };
    if args.dry_run {
        return Ok(Reaped::Planned(preview()));
    }
    if let Some(ask) = ask
        && !ask(&preview())?
    {
        return Ok(Reaped::Declined);
    }
    let rungs = Rungs { now: args.now, grace: args.grace, timeout: args.timeout };
    let (mut report, exit) = reaper.carry_out(planned, rungs, &Coroner::new(&config.paths.proc))?;
    report.fence = door.as_ref().map(|door| door.report(devices)).transpose()?;
    report.notes.extend(note.into_iter().chain(filter_notes).chain(record.complaint().map(str::to_owned)));
    let recorded = record.complaint().is_none();
    Ok(Reaped::Done { report, exit, recorded })
}

fn print(args: &ReapArgs, report: &Report, text: impl Fn() -> String) -> anyhow::Result<()> {
    if args.json { out::json::print(report) } else { out::raw(text().as_bytes()) }
}
