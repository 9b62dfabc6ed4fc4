//! `gpureap holders`.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    bpf::fence::pinned::Pinned,
    choose::{self, Chooser, Chosen},
    cli::HoldersArgs,
    config::Config,
    error::exit_of,
    exit_code::Exit,
    eyes::{self, Opened},
    holders::{Options, build, report::HoldersReport},
    host::Host,
    model::{Source, View},
    out,
};

pub fn run(args: &HoldersArgs, config: &Config) -> anyhow::Result<Exit> {
    let report = report(args, config)?;
    if args.json {
        out::json::print(&report)?;
    } else {
        out::text::print(&report)?;
    }
    Ok(Exit::Done)
}

/// What the command prints.
pub fn report(args: &HoldersArgs, config: &Config) -> anyhow::Result<HoldersReport> {
    let HoldersArgs { choosing, json, source, sweep } = args;
    let Opened { eyes, devices, note } = eyes::open(config, *source)?;
    let slots = choose::slots(choosing, &devices, config)?;
    let mut view = if devices.is_empty() {
        // Nothing can be held: no look needed, nothing missed.
        nothing(source.unwrap_or(Source::Proc))
    } else if *sweep {
        eyes.sweep()?
    } else {
        eyes.view()?
    };
    if !devices.is_empty() {
        view.notes.extend(note);
    }
    let Chosen { keys: chosen, undecided: _, notes } =
        Chooser::new(choosing, &config.paths, eyes.lineage())?.chosen(&view)?;
    view.notes.extend(notes);
    let host = Host::read(&config.paths.proc);
    let boottime_ns = host.boottime_ns;
    let options = Options { host, slots, chosen, rules: config.classes.clone(), threads: *json };
    let mut report = build(&view, &devices, eyes.lineage(), &config.paths, &options);
    match Pinned::open(config).and_then(|fence| fence.map(|fence| fence.outline()).transpose()) {
        Ok(None) => {}
        Ok(Some(fence)) => {
            for device in &mut report.devices {
                device.fenced = fence.refuses_device(device.major, device.minor, boottime_ns);
            }
        }
        // Its pins are root's: for anybody else nothing is known to be fenced.
        Err(error) if exit_of(&error) == Exit::NotPermitted => {}
        Err(error) => report.notes.push(format!("what is fenced is not known: {error:#}")),
    }
    Ok(report)
}

fn nothing(source: Source) -> View {
    View {
        source,
        backend: None,
        complete: true,
        cannot_see: BTreeSet::new(),
        lost_events: 0,
        swept_ns: None,
        open_files: BTreeMap::new(),
        holders: Vec::new(),
        orphans: Vec::new(),
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cli::Choosing,
        config::{Paths, StandIn},
    };

    #[test]
    fn a_host_without_devices_is_no_error() {
        let paths = Paths { proc: "/nonexistent".into(), dev: "/nonexistent".into(), ..Paths::default() };
        let config = Config { paths, ..Config::default() };
        let report = report(&HoldersArgs::default(), &config).unwrap();
        assert!(report.complete && report.devices.is_empty() && report.holders.is_empty());
        let wrong = HoldersArgs {
            choosing: Choosing { gpu: vec!["3".to_owned()], ..Choosing::default() },
            ..HoldersArgs::default()
        };
        assert_eq!(exit_of(&super::report(&wrong, &config).unwrap_err()), Exit::Usage);
    }

    #[test]
    fn from_proc_with_a_stand_in() {
        // /dev/random: 1:8.
        let file = std::fs::File::open("/dev/random").unwrap();
        let devices = vec![StandIn::new(1, 8, "/dev/random".into()).unwrap()];
        let config = Config { devices, ..Config::default() };
        let me = std::process::id();
        let args = HoldersArgs {
            choosing: Choosing { gpu: vec!["/dev/random".to_owned()], pid: vec![me], ..Choosing::default() },
            json: true,
            source: Some(Source::Proc),
            sweep: false,
        };
        let report = report(&args, &config).unwrap();
        drop(file);
        assert_eq!(report.source, Source::Proc);
        let [holder] = report.holders.as_slice() else { panic!("{report:?}") };
        assert_eq!((holder.pid, holder.devices[0].node.as_str()), (me, "/dev/random"));
        assert!(holder.devices[0].fds >= 1 && !holder.threads.is_empty());
    }
}
