//! Joins a view of the kernel with devices and processes into the report that people and scripts read.

mod lineage;
pub mod report;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use lineage::{Chain, Readings};
use report::{DeviceReport, HeldReport, HolderReport, HoldersReport, Origin, OrphanReport, ProcessName, Role, SCHEMA};

use crate::{
    classify::{Class, Classed, Classifier, DEFAULT_RULE, Rules},
    config::Paths,
    gpu::devices::Devices,
    host::Host,
    model::{Device, Holder, LineageSource, Orphan, ProcKey, Slot, Source, Usage, View},
    process::{ContainerNames, Facts},
};

/// What to show.
#[derive(Clone, Debug)]
pub struct Options {
    pub host: Host,
    /// Only holders of these; `None`: of anything.
    pub slots: Option<BTreeSet<Slot>>,
    /// Only these processes; `None`: all.
    pub chosen: Option<BTreeSet<ProcKey>>,
    /// What classes them.
    pub rules: Rules,
    /// Read thread names too.
    pub threads: bool,
}

impl Options {
    pub fn all(host: Host) -> Self {
        Self { host, slots: None, chosen: None, rules: Rules::default(), threads: true }
    }

    fn wants(&self, holder: &Holder) -> bool {
        let Self { host: _, slots, chosen, rules: _, threads: _ } = self;
        chosen.as_ref().is_none_or(|keys| keys.contains(&holder.key))
            && slots.as_ref().is_none_or(|slots| holder.usage.keys().any(|slot| slots.contains(slot)))
    }

    fn wants_slot(&self, slot: Slot) -> bool {
        self.slots.as_ref().is_none_or(|slots| slots.contains(&slot))
    }
}

/// Role on one device; `None` for a node that all GPUs share.
pub fn role(device: &Device, usage: &Usage) -> Option<Role> {
    let attached = usage.maps > 0 || usage.ever_mapped;
    device.kind.is_gpu().then_some(if attached { Role::Attached } else { Role::Handle })
}

pub fn build(
    view: &View,
    devices: &Devices,
    lineage: &dyn LineageSource,
    paths: &Paths,
    options: &Options,
) -> HoldersReport {
    let View { source, backend, complete, cannot_see, lost_events, swept_ns, open_files, holders, orphans, notes } =
        view;
    let Host { name, boot_id, now, boottime_ns: _ } = &options.host;
    let mut counts: BTreeMap<Slot, u32> = BTreeMap::new();
    let mut reports = Vec::new();
    let readings = Readings::new(&paths.proc);
    let classifier = Classifier::new(paths, &options.rules);
    for holder in holders.iter().filter(|holder| options.wants(holder)) {
        if let Some(report) = holder_report(holder, *source, devices, lineage, &readings, &classifier, options) {
            for slot in holder.usage.keys() {
                *counts.entry(*slot).or_default() += 1;
            }
            reports.push(report);
        }
    }
    reports.sort_by_key(|report| (report.pid, report.start_ns));
    let cut = cut_note(reports.iter().filter(|report| report.lineage_cut).count(), lineage);

    let files = |slot: Slot| match open_files.get(&slot) {
        Some(files) => Some(*files),
        // A source that counts files has said nothing of this one because there is none.
        None => (*source != Source::Proc).then_some(0),
    };
    let shown = devices.list().iter().filter(|device| {
        let slot = device.slot;
        let own = device.kind.is_gpu() && device.minor.is_some();
        let used = counts.contains_key(&slot) || files(slot).is_some_and(|files| files > 0);
        // What a shown holder has is always among the devices, chosen or not: its rows refer to them.
        counts.contains_key(&slot) || options.wants_slot(slot) && (own || devices.is_present(slot) || used)
    });
    let device_reports = shown.map(|device| {
        let Device { slot, node, major, minor, kind, gpu, index, uuid, bdf, model } = device.clone();
        DeviceReport {
            node: node.display().to_string(),
            major,
            minor,
            kind,
            gpu,
            index,
            uuid,
            bdf,
            model,
            fenced: false,
            open_files: files(slot),
            holders: counts.get(&slot).copied().unwrap_or(0),
        }
    });
    HoldersReport {
        schema: SCHEMA.to_owned(),
        host: name.clone(),
        boot_id: boot_id.clone(),
        time: *now,
        source: *source,
        backend: *backend,
        complete: *complete && !devices.has_untraced(),
        cannot_see: cannot_see.clone(),
        swept: swept_ns.map(|time| options.host.wall(time)),
        devices: device_reports.collect(),
        holders: reports,
        // A file that no process holds belongs to nobody who could be asked for.
        orphans: orphans
            .iter()
            .filter(|orphan| options.wants_slot(orphan.slot) && options.chosen.is_none())
            .map(|orphan| orphan_report(orphan, devices))
            .collect(),
        lost_events: *lost_events,
        notes: notes.iter().chain(devices.notes()).cloned().chain(cut).collect(),
    }
}

/// What to do about ancestors that were forgotten.
fn cut_note(count: usize, lineage: &dyn LineageSource) -> Option<String> {
    let whose = match count {
        0 => return None,
        1 => "1 holder".to_owned(),
        _ => format!("{count} holders"),
    };
    let dropped = lineage.forgotten().map(|count| format!(" ({count} processes so far)")).unwrap_or_default();
    Some(format!(
        "the lineage of {whose} is cut: the map `lineage` drops who was not seen for longest{dropped}; raise maps.lineage in the configuration and restart the daemon"
    ))
}

fn holder_report(
    holder: &Holder,
    source: Source,
    devices: &Devices,
    lineage: &dyn LineageSource,
    readings: &Readings<'_>,
    classifier: &Classifier,
    options: &Options,
) -> Option<HolderReport> {
    let Holder { key, usage, how, private_tids, inherited_from, from_snapshot } = holder;
    let facts = readings.of(*key);
    let known = lineage.lookup(*key);
    let exited = known.as_ref().is_some_and(|ancestor| ancestor.exit.is_some());
    if facts.is_none() && (exited || source == Source::Proc || is_gone(*key, readings.root)) {
        // It ended between the look and now: no holder any more.
        return None;
    }
    let Chain { list: ancestors, cut: lineage_cut } = lineage::chain(*key, lineage, readings, facts.as_deref());
    let parent = facts.as_ref().map(|facts| facts.ppid).filter(|ppid| *ppid > 0).map(|ppid| {
        let facts = readings.any(ppid);
        ProcessName {
            pid: ppid,
            start_ns: facts.as_ref().map(|facts| facts.start_ns),
            comm: facts.map(|facts| facts.comm.clone()).unwrap_or_default(),
        }
    });
    // Only one whose own parent is dead was left behind; the farthest of the dead names the job.
    let left_behind = ancestors.iter().take_while(|ancestor| !ancestor.alive).last();
    let orphan_of = left_behind.map(|ancestor| ProcessName {
        pid: ancestor.pid,
        start_ns: Some(ancestor.start_ns),
        comm: ancestor.comm.clone(),
    });
    let mut threads = Vec::new();
    if options.threads {
        for thread in facts.iter().flat_map(|facts| facts.threads(readings.root)) {
            if !threads.contains(&thread.comm) {
                threads.push(thread.comm);
            }
        }
    }
    let held = usage.iter().map(|(slot, usage)| {
        let device = devices.get(*slot);
        let Usage { fds, maps, first_open_ns, last_open_ns, ever_mapped: _ } = usage;
        HeldReport {
            node: devices.node(*slot),
            fds: *fds,
            maps: *maps,
            role: device.and_then(|device| role(device, usage)),
            inherited_from: inherited_from.map(|key| key.tgid),
            first_open: first_open_ns.map(|time| options.host.wall(time)),
            last_open: last_open_ns.map(|time| options.host.wall(time)),
        }
    });
    let devices = held.collect();
    let known = known.unwrap_or_default();
    let state = facts.as_ref().map(|facts| facts.state);
    // What /proc does not show, the kernel may remember.
    let unknown = || Facts {
        tgid: key.tgid,
        start_ns: key.start_ns,
        state: '?',
        ppid: 0,
        session: 0,
        nspids: vec![key.tgid],
        comm: known.comm,
        argv: known.argv,
        exe: None,
        exe_deleted: false,
        uid: None,
        user: None,
        cgroup: None,
        place: crate::process::Place::default(),
        thread_count: 0,
        is_kernel_thread: false,
    };
    let classed = facts.as_deref().map(|facts| classifier.class(facts));
    let Classed { class, rule: class_rule } =
        classed.unwrap_or_else(|| Classed { class: Class::Job, rule: DEFAULT_RULE.to_owned() });
    let place = facts.as_ref().map(|facts| facts.whole_place(readings.root)).unwrap_or_default();
    let seen = facts.map_or_else(unknown, |facts| Facts::clone(&facts));
    let Facts { nspids, comm, argv, exe, exe_deleted, uid, user, cgroup, .. } = seen;
    let names = classifier.names(&place);
    let crate::process::Place { unit, container, slurm_job, slurm_step, pod } = place;
    let ContainerNames { name: container_name, image, pod: pod_name, namespace: pod_namespace } = names;
    Some(HolderReport {
        pid: key.tgid,
        start_ns: key.start_ns,
        nspids,
        state,
        comm,
        argv,
        exe: exe.map(|exe| exe.display().to_string()),
        exe_deleted,
        uid,
        user,
        class,
        class_rule,
        cgroup,
        unit,
        container,
        container_name,
        image,
        slurm_job,
        slurm_step,
        pod,
        pod_name,
        pod_namespace,
        parent,
        lineage: ancestors,
        lineage_cut,
        orphan_of,
        threads,
        private_tids: private_tids.clone(),
        devices,
        how: how.clone(),
        origin: if *from_snapshot { Origin::Snapshot } else { Origin::Traced },
    })
}

/// Where /proc shows others' processes at all, one that it does not show is gone.
fn is_gone(key: ProcKey, proc: &Path) -> bool {
    proc.join("1/stat").exists() || proc.join(key.tgid.to_string()).exists()
}

fn orphan_report(orphan: &Orphan, devices: &Devices) -> OrphanReport {
    let Orphan { slot, files, how, last_owner } = orphan;
    OrphanReport {
        node: devices.node(*slot),
        files: *files,
        how: *how,
        last_owner: last_owner.as_ref().map(|(key, comm)| ProcessName {
            pid: key.tgid,
            start_ns: Some(key.start_ns),
            comm: comm.clone(),
        }),
    }
}

#[cfg(test)]
pub(crate) mod tests;
