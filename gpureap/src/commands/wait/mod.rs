//! `gpureap wait`: until nobody holds the chosen GPUs any more.

pub mod decide;
mod held;
pub mod report;
mod vigil;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use self::{report::Scene, vigil::Vigil};
use crate::{
    choose::{self, Chooser},
    cli::WaitArgs,
    config::Config,
    error::Failure,
    exit_code::Exit,
    eyes::{self, Opened},
    host::Host,
    model::Source,
    out,
    reap::{self, people::ProcPeople, plan::Policy, stuck::Coroner},
    watch::Watch,
};

pub fn run(args: &WaitArgs, config: &Config) -> anyhow::Result<Exit> {
    let Opened { eyes, devices, note } = eyes::open_configured(config)?;
    if devices.is_empty() {
        return Err(Failure::no_device(note.as_deref()).into());
    }
    let host = Host::read(&config.paths.proc);
    let people = ProcPeople::classed(&config.paths, &config.classes);
    // The choice of `reap`, but whoever holds is waited for.
    let slots = choose::slots(&args.choosing, &devices, config)?;
    let policy = Policy {
        pids: args.choosing.pid.iter().copied().collect(),
        ..reap::choice(slots, args.matching().into(), &devices, &people)
    };
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
