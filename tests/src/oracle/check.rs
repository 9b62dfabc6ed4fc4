//! What is true against what gpureap sees.
use std::collections::{BTreeMap, BTreeSet};

use gpureap::model::{Backend, Holder, How, Slot, View};

use super::{
    model::{Expected, Files, Held},
    step::{Dev, Task},
    troupe::Cast,
};
use crate::actor::sys::Pid;

/// Boottime of a clock tick, `USER_HZ` of which are a second on every architecture that gpureap runs on.
const TICK_NS: u64 = 10_000_000;

/// Which device a slot is, and who else lives on the host.
pub struct Known<'a> {
    pub slots: &'a BTreeMap<Slot, Dev>,
    /// Whether a process that has no part in the play may hold a device.
    pub stranger: &'a dyn Fn(Pid) -> bool,
}

/// Every difference, one readable line each.
pub fn differences(expected: &Expected, cast: &Cast, view: &View, known: &Known<'_>) -> Vec<String> {
    let mut wrong = Vec::new();
    if !view.complete {
        wrong.push(format!("the view is not complete: {}", view.notes.join("; ")));
    }
    let mut strangers: BTreeSet<Dev> = BTreeSet::new();
    let mut found: BTreeMap<Pid, &Holder> = BTreeMap::new();
    for holder in &view.holders {
        let pid = holder.key.tgid as Pid;
        if !cast.pids.contains(&pid) && (known.stranger)(pid) {
            strangers.extend(holder.held().filter_map(|slot| known.slots.get(&slot)));
        } else if holder.held().any(|slot| known.slots.contains_key(&slot)) && found.insert(pid, holder).is_some() {
            wrong.push(format!("process {pid} is there twice"));
        }
    }
    for (task, held) in &expected.processes {
        match cast.processes.get(task) {
            None => wrong.push(format!("{task} holds {} and has no process", devices(&held.devices))),
            Some((pid, started)) => match found.remove(pid) {
                None => wrong.push(format!("{task} ({pid}) holds {}, seen nothing", devices(&held.devices))),
                Some(holder) => one(*task, (*pid, *started), held, holder, (cast, known), &mut wrong),
            },
        }
    }
    for (pid, holder) in found {
        wrong.push(format!("process {pid} holds nothing, seen {}", devices(&seen_devices(holder, known))));
    }
    let counts = view.backend.is_some_and(Backend::counts);
    for (slot, dev) in known.slots.iter().filter(|(_, dev)| !strangers.contains(dev)) {
        let Files { seen, hidden, descriptors: _ } = expected.files.get(dev).copied().unwrap_or_default();
        let (open, orphans) = if counts { (seen + hidden, hidden) } else { (seen, 0) };
        let seen_open = view.open_files.get(slot).copied().unwrap_or(0);
        if seen_open != open {
            wrong.push(format!("{dev}: {open} open files, seen {seen_open}"));
        }
        let seen_orphans: u32 =
            view.orphans.iter().filter(|orphan| orphan.slot == *slot).map(|orphan| orphan.files).sum();
        if seen_orphans != orphans {
            wrong.push(format!("{dev}: {orphans} files of nobody, seen {seen_orphans}"));
        }
    }
    wrong
}

fn one(
    task: Task,
    (pid, started): (Pid, u64),
    held: &Held,
    holder: &Holder,
    (cast, known): (&Cast, &Known<'_>),
    wrong: &mut Vec<String>,
) {
    let Holder { key, usage: _, how, private_tids, inherited_from: _, from_snapshot: _ } = holder;
    let who = format!("{task} ({pid})");
    if key.start_ns / TICK_NS != started {
        wrong.push(format!("{who} started at tick {started}, seen {} ns", key.start_ns));
    }
    let seen = seen_devices(holder, known);
    if seen != held.devices {
        wrong.push(format!("{who} holds {}, seen {}", devices(&held.devices), devices(&seen)));
    }
    let ways = ways(held);
    if *how != ways {
        wrong.push(format!("{who} holds by {ways:?}, seen {how:?}"));
    }
    // Of the threads that share a table of their own, any may stand for it.
    let tids = |tasks: &BTreeSet<Task>| -> BTreeSet<u32> {
        tasks.iter().filter_map(|task| cast.tids.get(task)).map(|tid| *tid as u32).collect()
    };
    let mut unknown = private_tids.clone();
    for table in &held.private {
        let of_table = tids(table);
        if of_table.is_disjoint(private_tids) {
            wrong.push(format!("{who}: threads {of_table:?} have a table of their own, seen {private_tids:?}"));
        }
        unknown.retain(|tid| !of_table.contains(tid));
    }
    if !unknown.is_empty() {
        wrong.push(format!("{who}: threads {unknown:?} have no table of their own"));
    }
}

fn seen_devices(holder: &Holder, known: &Known<'_>) -> BTreeMap<Dev, (u32, u32)> {
    let held = holder.usage.iter().filter(|(_, usage)| usage.is_held());
    held.filter_map(|(slot, usage)| Some((*known.slots.get(slot)?, (usage.fds, usage.maps)))).collect()
}

fn ways(held: &Held) -> BTreeSet<How> {
    let mut ways = BTreeSet::new();
    let any = |count: fn(&(u32, u32)) -> u32| held.devices.values().any(|counts| count(counts) > 0);
    if any(|counts| counts.0) {
        ways.insert(How::Fd);
        if held.leaderless {
            ways.insert(How::ZombieLeader);
        }
    }
    if any(|counts| counts.1) {
        ways.insert(How::Map);
    }
    if !held.private.is_empty() {
        ways.insert(How::PrivateFdTable);
    }
    ways
}

fn devices(devices: &BTreeMap<Dev, (u32, u32)>) -> String {
    let list: Vec<String> = devices.iter().map(|(dev, (fds, maps))| format!("{dev} {fds} fds {maps} maps")).collect();
    list.join(", ")
}
