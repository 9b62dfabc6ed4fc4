//! What a filter looks at, and the reading of it.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use super::Filter;
use crate::{
    clock::boottime_ns,
    model::{LineageSource, ProcKey},
    process::{
        Facts, Runtimes,
        stat::{Stat, same_start},
    },
};

/// A family tree is not higher.
const MAX_ANCESTORS: usize = 1024;

/// One holder, as far as the filter asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    pub pid: u32,
    pub uid: Option<u32>,
    pub comm: Option<String>,
    pub container: Option<String>,
    pub container_name: Option<String>,
    /// Whether it could be read of which Slurm job it is, if of any.
    pub job_known: bool,
    pub slurm_job: Option<String>,
    pub slurm_step: Option<String>,
    /// In every hierarchy.
    pub cgroups: Vec<String>,
    /// Those variables that were asked for; `None` where it may not be read.
    pub environment: Option<BTreeMap<String, String>>,
    /// By fork and by present parent, itself included.
    pub ancestors: BTreeSet<ProcKey>,
    pub age: Option<Duration>,
}

pub(super) struct Gatherer<'a> {
    filter: &'a Filter,
    proc: &'a Path,
    lineage: &'a dyn LineageSource,
    now_ns: u64,
    runtimes: Runtimes,
    /// Present parents, each process read once: many holders share their ancestors.
    parents: RefCell<BTreeMap<u32, Option<(ProcKey, u32)>>>,
}

impl<'a> Gatherer<'a> {
    pub(super) fn new(filter: &'a Filter, proc: &'a Path, host: &Path, lineage: &'a dyn LineageSource) -> Self {
        let now_ns = boottime_ns();
        let runtimes = Runtimes::new(host.to_owned());
        Self { filter, proc, lineage, now_ns, runtimes, parents: RefCell::default() }
    }

    pub(super) fn candidate(&self, key: ProcKey) -> Candidate {
        let Self { filter, proc, now_ns, .. } = self;
        let age = Some(Duration::from_nanos(now_ns.saturating_sub(key.start_ns)));
        let bare = Candidate { pid: key.tgid, age, ..Candidate::default() };
        if !filter.pids.is_empty() && !filter.pids.contains(&key.tgid) || !filter.needs_facts() {
            return bare;
        }
        let ancestors = if filter.trees.is_empty() { BTreeSet::new() } else { self.ancestors(key) };
        let Some(facts) = Facts::read(proc, key.tgid, key.start_ns) else { return Candidate { ancestors, ..bare } };
        let groups = !filter.units.is_empty() || !filter.cgroups.is_empty();
        let mut place = facts.place.clone();
        let mut job_known = true;
        if !filter.slurm_jobs.is_empty() || !filter.other_jobs.is_empty() {
            place.or_job_of(|| {
                let environment = facts.environment(proc);
                job_known = environment.is_some();
                environment
            });
        }
        let container = place.container;
        let container_name = container.as_ref().filter(|_| !filter.containers.is_empty()).and_then(|id| self.name(id));
        Candidate {
            uid: facts.uid,
            container,
            container_name,
            job_known,
            slurm_job: place.slurm_job,
            slurm_step: place.slurm_step,
            cgroups: if groups { facts.cgroups(proc) } else { Vec::new() },
            environment: if filter.environment.is_empty() { None } else { self.environment(&facts) },
            comm: Some(facts.comm),
            ancestors,
            ..bare
        }
    }

    fn name(&self, id: &str) -> Option<String> {
        self.runtimes.names(id).name
    }

    /// As it was at the exec, which is all that the kernel shows. Of a variable that is there twice the first counts, as
    /// getenv(3) has it.
    fn environment(&self, facts: &Facts) -> Option<BTreeMap<String, String>> {
        let bytes = facts.environment(self.proc)?;
        let mut found = BTreeMap::new();
        for entry in bytes.split(|byte| *byte == 0) {
            let entry = String::from_utf8_lossy(entry);
            if let Some((key, value)) = entry.split_once('=')
                && self.filter.environment.contains_key(key)
            {
                found.entry(key.to_owned()).or_insert_with(|| value.to_owned());
            }
        }
        Some(found)
    }

    fn present(&self, pid: u32) -> Option<(ProcKey, u32)> {
        let read = || {
            let stat = Stat::read(&self.proc.join(pid.to_string()))?;
            Some((ProcKey::new(pid, stat.start_ns()), stat.ppid))
        };
        *self.parents.borrow_mut().entry(pid).or_insert_with(read)
    }

    /// Everybody above: whoever forked it, as far as that is remembered, and whoever is its parent now.
    fn ancestors(&self, key: ProcKey) -> BTreeSet<ProcKey> {
        let mut known = BTreeSet::new();
        let mut next = vec![key];
        while let Some(key) = next.pop() {
            if known.len() == MAX_ANCESTORS || !known.insert(key) {
                continue;
            }
            let forked_by = self.lineage.lookup(key).and_then(|ancestor| ancestor.parent);
            let present = self.present(key.tgid).filter(|(own, _)| same_start(own.start_ns, key.start_ns));
            let parent = present.filter(|(_, ppid)| *ppid > 0).and_then(|(_, ppid)| self.present(ppid));
            next.extend(forked_by.into_iter().chain(parent.map(|(parent, _)| parent)));
        }
        known
    }
}
