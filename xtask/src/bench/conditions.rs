//! What may be attached to the kernel while work is timed, one after the other and again.

use std::{collections::BTreeMap, fs, path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, Result};
use rustix::process::{Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::{
    empty::{self, EVERY_SYSTEM_CALL, Empty, Hook},
    place::Place,
    shuffle,
    work::{Sample, Site, Work},
};

/// A probe set of gpureap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Set {
    Kprobe,
    Fentry,
    Gate,
}

impl Set {
    /// In the order in which gpureap tries them.
    pub(super) const ALL: [Self; 3] = [Self::Kprobe, Self::Fentry, Self::Gate];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Kprobe => "kprobe",
            Self::Fentry => "fentry",
            Self::Gate => "gate",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Condition {
    Nothing,
    /// As `Nothing`: how far apart the same is from itself is what cannot be told from nothing.
    NothingAgain,
    /// Of all system calls, with programs that do nothing.
    SystemCallTracer,
    /// Programs that do nothing on the hooks of a set.
    Empty(Set),
    Gpureap(Set),
}

/// After programs came or went, before work is timed: the kernel frees and patches for a while.
const SETTLE: Duration = Duration::from_millis(500);

pub(super) struct Plan {
    pub(super) conditions: Vec<Condition>,
    pub(super) rounds: u32,
    /// Blocks of each work in a visit to a condition, in turns with those of the other works.
    pub(super) repeats: u32,
    /// The one processor is gpureap's daemon's as well: it is stopped while work is timed, so that what is counted are the
    /// programs. What it reads from them waits for it.
    pub(super) stop_daemon: bool,
}

/// One work under one condition in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Visit {
    pub(super) round: u32,
    pub(super) condition: Condition,
    pub(super) work: Work,
    pub(super) samples: Vec<Sample>,
    /// What the daemon spent meanwhile, for each operation.
    pub(super) daemon_ns: f64,
}

/// What is attached; it goes when dropped.
enum Scenery {
    Bare,
    Programs { _attached: Vec<Empty> },
    Daemon,
}

pub(super) fn measure(
    place: &mut Place,
    site: &Site,
    plan: &Plan,
    mut tell: impl FnMut(Visit) -> Result<()>,
) -> Result<()> {
    let Plan { conditions, rounds, repeats, stop_daemon } = plan;
    let mut hooks = BTreeMap::new();
    for condition in conditions {
        if let Condition::Empty(set) = *condition {
            place.start_daemon(Some(set.name()))?;
            hooks.insert(set, empty::hooks(&place.pins())?);
            place.stop_daemon()?;
        }
    }
    for round in 0..*rounds {
        let mut order = conditions.clone();
        shuffle(&mut order, u64::from(round));
        for condition in order {
            let scenery = set_up(place, condition, &hooks)?;
            thread::sleep(SETTLE);
            let daemon = matches!(scenery, Scenery::Daemon).then(|| place.daemon()).transpose()?;
            let stopped = daemon.filter(|_| *stop_daemon);
            if let Some(daemon) = stopped {
                kill_process(daemon, Signal::STOP).context("stop the daemon")?;
            }
            let mut visits = Work::ALL.map(|work| (work, Vec::new(), 0.0));
            // Once it has opened a device, what this process does is of interest, and recorded: that comes last.
            for of_devices in [false, true] {
                for _ in 0..*repeats {
                    for (work, samples, daemon_ns) in &mut visits {
                        if work.of_devices() == of_devices {
                            let spent = || daemon.map_or(Ok(0.0), |daemon| cpu_of(daemon.as_raw_nonzero().get()));
                            let before = spent()?;
                            samples.push(site.time(*work)?);
                            *daemon_ns += (spent()? - before) / f64::from(*repeats * site.operations(*work));
                        }
                    }
                }
            }
            if let Some(daemon) = stopped {
                kill_process(daemon, Signal::CONT).context("let the daemon go on")?;
                thread::sleep(SETTLE);
            }
            for (work, samples, daemon_ns) in visits {
                tell(Visit { round, condition, work, samples, daemon_ns })?;
            }
            drop(scenery);
            place.stop_daemon()?;
        }
    }
    Ok(())
}

fn set_up(place: &mut Place, condition: Condition, hooks: &BTreeMap<Set, Vec<Hook>>) -> Result<Scenery> {
    let programs = match condition {
        Condition::Nothing | Condition::NothingAgain => return Ok(Scenery::Bare),
        Condition::Gpureap(set) => {
            place.start_daemon(Some(set.name()))?;
            return Ok(Scenery::Daemon);
        }
        Condition::SystemCallTracer => EVERY_SYSTEM_CALL.map(|name| Hook::RawTracepoint(name.to_owned())).to_vec(),
        Condition::Empty(set) => hooks.get(&set).context("hooks of a set that was not looked at")?.clone(),
    };
    let cgroup = cgroup2()?;
    let attached = programs.iter().map(|hook| empty::attach(hook, &cgroup)).collect::<Result<_>>()?;
    Ok(Scenery::Programs { _attached: attached })
}

fn cgroup2() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("read the mounts")?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    mounts
        .find_map(|fields| (fields.get(2) == Some(&"cgroup2")).then(|| PathBuf::from(fields[1])))
        .context("no cgroup2 is mounted")
}

/// What all threads of a process have spent, in nanoseconds.
pub(super) fn cpu_of(pid: i32) -> Result<f64> {
    let mut sum = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("list the daemon's threads")? {
        let text = fs::read_to_string(task?.path().join("schedstat")).context("read schedstat")?;
        sum += text.split(' ').next().unwrap_or_default().parse::<f64>().context("schedstat")?;
    }
    Ok(sum)
}
