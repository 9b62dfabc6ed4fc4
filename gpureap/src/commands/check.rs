//! `gpureap check`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    thread,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};

use crate::{
    api::client,
    check::{
        Known, Question, decide, exit, line,
        report::{CheckReport, Fault, SCHEMA},
    },
    choose::{self, Chooser, Chosen},
    cli::{CheckArgs, Match},
    config::Config,
    error::Failure,
    exit_code::Exit,
    eyes::{self, Opened},
    history::{event::What, report::XidClass, xid},
    holders::{
        Options, build,
        report::{HolderReport, HoldersReport},
    },
    host::Host,
    journal::reader,
    out,
    process::{
        Runtimes,
        stat::{self, Stat},
    },
    reap::stuck::Coroner,
};

/// Between two looks at one that is dying: an orderly end, of much pinned memory too, may take its time.
const STEP: Duration = Duration::from_millis(100);

pub fn run(args: &CheckArgs, config: &Config) -> anyhow::Result<Exit> {
    let report = examine(args, config)?;
    if args.json {
        out::json::print(&report)?;
    } else {
        out::raw(format!("{}\n", report.message).as_bytes())?;
        for note in &report.notes {
            out::diagnostic_text(note);
        }
    }
    Ok(match report.exit_code {
        code if code == Exit::Unkillable as u8 => Exit::Unkillable,
        code if code == Exit::Held as u8 => Exit::Held,
        code if code == Exit::KernelReference as u8 => Exit::KernelReference,
        code if code == Exit::NotPermitted as u8 => Exit::NotPermitted,
        _ => Exit::Done,
    })
}

/// What the command prints.
pub fn examine(args: &CheckArgs, config: &Config) -> anyhow::Result<CheckReport> {
    let CheckArgs { choosing, free, orphans, xids, daemon, patience, max_bytes, .. } = args;
    if *daemon {
        require_daemon(config)?;
    }
    let Opened { eyes, devices, note } = eyes::open_configured(config)?;
    if devices.is_empty() {
        return Err(Failure::no_device(note.as_deref()).into());
    }
    let slots = choose::slots(choosing, &devices, config)?;
    let mut view = eyes.view()?;
    view.notes.extend(note);
    let Chosen { keys: chosen, undecided, notes } =
        Chooser::new(choosing, &config.paths, eyes.lineage())?.chosen(&view)?;
    view.notes.extend(notes);
    let host = Host::read(&config.paths.proc);
    let question = Question {
        nodes: slots.as_ref().map(|slots| slots.iter().map(|slot| devices.node(*slot)).collect()),
        attached: args.matching() == Match::Attached,
        free: *free,
        orphans: *orphans,
    };
    let now = host.now;
    let options = Options { host, slots, chosen, rules: config.classes.clone(), threads: false };
    let seen = build(&view, &devices, eyes.lineage(), &config.paths, &options);
    let known = Known {
        dying: dying(&seen, &config.paths.proc, *patience),
        podless: if *orphans { podless(&seen, &Runtimes::new(config.paths.host.clone())) } else { BTreeSet::new() },
    };
    let findings = decide(&question, &seen, &known);
    let faults = match xids {
        Some(within) => faults(config, now, *within)?,
        None => Vec::new(),
    };
    let faults: Vec<Fault> = faults.into_iter().filter(|fault| concerns(&question, fault)).collect();
    let HoldersReport { host, time, complete, notes, .. } = seen;
    let code = match exit(&findings, &faults) {
        // Nothing was seen, and not everything could be.
        Exit::Done if !complete || !undecided.is_empty() => Exit::NotPermitted,
        code => code,
    };
    let message = match code {
        Exit::Done => "no GPU is held by whom it should not be".to_owned(),
        Exit::NotPermitted if complete => {
            "not everybody who holds a GPU can be told to be in a job: the environment of some may not be read"
                .to_owned()
        }
        Exit::NotPermitted => "not everybody who holds a GPU can be seen".to_owned(),
        _ => line(&findings, &faults, *max_bytes),
    };
    Ok(CheckReport {
        schema: SCHEMA.to_owned(),
        host,
        time: time.to_string(),
        exit_code: code as u8,
        message,
        findings,
        xids: faults,
        complete,
        notes,
    })
}

/// Counts kept by the kernel outlive a daemon; its record and its repairs do not.
fn require_daemon(config: &Config) -> Result<(), Failure> {
    client::open(&config.paths.run)
        .map(drop)
        .map_err(|error| Failure::unsupported(format!("the gpureap daemon does not answer: {error}")))
}

/// In a pod that has ended, and all of whose containers should have.
fn podless(seen: &HoldersReport, runtimes: &Runtimes) -> BTreeSet<u32> {
    let gone = |holder: &&HolderReport| holder.pod.as_ref().is_some_and(|uid| runtimes.pod_is_gone(uid) == Some(true));
    seen.holders.iter().filter(gone).map(|holder| holder.pid).collect()
}

/// What the journal has of that time and of this boot, one of each kind and GPU. What a program did wrong is its own matter.
fn faults(config: &Config, now: Timestamp, within: Duration) -> anyhow::Result<Vec<Fault>> {
    let within = SignedDuration::try_from(within).unwrap_or(SignedDuration::MAX);
    let since = now.checked_sub(within).unwrap_or(Timestamp::MIN);
    let mut found: BTreeMap<(String, u32), Fault> = BTreeMap::new();
    let path = config.paths.journal();
    if !path.exists() {
        return Ok(Vec::new());
    }
    reader::events(&path, Some(since), |event| {
        if let What::Xid(seen) = event.what {
            let (class, meaning) = xid::classify(seen.xid, false);
            if matches!(class, XidClass::Hardware | XidClass::Driver) {
                let fault = Fault { bdf: seen.bdf, node: seen.node, xid: seen.xid, meaning: meaning.to_owned() };
                found.insert((fault.bdf.clone(), fault.xid), fault);
            }
        }
        Ok(())
    })?;
    Ok(found.into_values().collect())
}

fn concerns(question: &Question, fault: &Fault) -> bool {
    match (&question.nodes, &fault.node) {
        (Some(nodes), Some(node)) => nodes.contains(node),
        // Of which GPU it is nobody knows: then it is of any.
        _ => true,
    }
}

/// Those that have been told to die and still are not dead when the patience is over, with the state of the thread that keeps
/// them.
fn dying(seen: &HoldersReport, proc: &Path, patience: Duration) -> BTreeMap<u32, char> {
    let coroner = Coroner::new(proc);
    let state = |holder: &HolderReport| {
        let dir = proc.join(holder.pid.to_string());
        let stat = Stat::read(&dir).filter(|stat| stat.started_at(holder.start_ns))?;
        let ends = stat::kill_pending(&dir) || stat.exiting;
        let stuck = ends.then(|| coroner.examine(holder.pid, 0)).flatten()?;
        let ends = stuck.kill_pending || stat::all_exiting(&dir) == Some(true);
        // Where the worst of its threads is a zombie all of them are: it has closed everything and waits for its parent.
        stuck.state.chars().next().filter(|state| ends && !matches!(state, 'Z' | 'X'))
    };
    let mut left: Vec<&HolderReport> = seen.holders.iter().filter(|holder| state(holder).is_some()).collect();
    let begun = std::time::Instant::now();
    while !left.is_empty() && begun.elapsed() < patience {
        thread::sleep(STEP.min(patience));
        left.retain(|holder| state(holder).is_some());
    }
    left.into_iter().filter_map(|holder| Some((holder.pid, state(holder)?))).collect()
}
