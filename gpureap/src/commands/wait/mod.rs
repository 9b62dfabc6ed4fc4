//! `gpureap wait`: until nobody holds the chosen GPUs any more.

pub mod decide;
mod held;
pub mod report;
mod vigil;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use self::{report::Scene, vigil::Vigil};
use crate::{
    choose::{self, Chooser},
    cli::WaitArgs,
    config::Config,
    error::Failure,
    exit_code::Exit,
    eyes::{self, Opened},
    gpu::devices::Devices,
    host::Host,
    kernel::rights,
    model::Source,
    out,
    reap::{people::ProcPeople, plan::Policy, stuck::Coroner},
    watch::Watch,
};

pub fn run(args: &WaitArgs, config: &Config) -> anyhow::Result<Exit> {
    let Opened { eyes, devices, note } = eyes::open_configured(config)?;
    if devices.is_empty() {
        return Err(Failure::unsupported("this host has no NVIDIA device, and no stand-in is configured").into());
    }
    let host = Host::read(&config.paths.proc);
    let people = ProcPeople::classed(&config.paths, &config.classes);
    let policy = policy(args, config, &devices, &people)?;
    let chooser = Chooser::new(&args.choosing, &config.paths, eyes.lineage())?;
    let mut vigil = Vigil {
        eyes: eyes.as_ref(),
        watch: Watch::of_exits(),
        run: &config.paths.run,
        people: &people,
        policy: &policy,
        chooser: &chooser,
        ignore_monitors: args.ignore_monitors,
        proc: &config.paths.proc,
        begun_ns: host.boottime_ns,
        told: BTreeSet::new(),
    };
    let outcome = vigil.keep(args.timeout, &Coroner::new(&config.paths.proc))?;
    let exit = outcome.verdict.exit;
    let scene = Scene {
        host: &host,
        devices: &devices,
        policy: &policy,
        timeout: args.timeout,
        ignore_monitors: args.ignore_monitors,
    };
    let mut report = scene.report(outcome);
    // Whoever looks through /proc is told why.
    report.notes.extend(note.filter(|_| report.source == Source::Proc));
    if args.json {
        out::json::print(&report)?;
    } else {
        out::raw(report::text(&report).as_bytes())?;
    }
    Ok(exit)
}

/// The choice of `reap`, with nobody out of bounds: whoever holds is waited for.
fn policy(args: &WaitArgs, config: &Config, devices: &Devices, people: &ProcPeople) -> anyhow::Result<Policy> {
    let choosing = &args.choosing;
    Ok(Policy {
        slots: choose::slots(choosing, devices, config)?,
        matching: args.matching().into(),
        by_handle: devices.by_handle(),
        contexts: BTreeMap::new(),
        pids: choosing.pid.iter().copied().collect(),
        chosen: None,
        own: std::process::id(),
        own_session: 0,
        ancestors: people.ancestors(std::process::id()),
        include_own_session: true,
        stop_monitors: false,
        include_protected: BTreeSet::new(),
        privileged: rights::sees_every_process(),
    })
}
