//! Who else goes with the holders: their process trees, or the cgroups of their jobs. Pure: tables go in, rows come out.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use super::plan::{Action, Plan, Policy, Row, Skip, Subject, Via, Whole, same_process};
use crate::{
    model::ProcKey,
    process::{
        cgroup::{JobCgroup, Kind},
        table::{Kin, Table},
    },
};

/// What is signalled beside the holders themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Scope {
    /// The holders alone
    #[default]
    Process,
    /// Their process trees, from the highest ancestor that is neither part of the system nor a shell on a terminal
    Tree,
    /// Everybody in the cgroups of their jobs: Slurm job, container, unit, or a cgroup made by hand
    Cgroup,
}

/// What a scope must know of processes that hold nothing.
pub trait Kinship {
    fn table(&self) -> Table;
    /// The cgroup of a process's job; an error says why there is none.
    fn job_cgroup(&self, pid: u32) -> Result<JobCgroup, String>;
    fn members(&self, cgroup: &JobCgroup) -> BTreeSet<u32>;
    /// Who has that pid now, and what it is.
    fn subject(&self, pid: u32) -> Option<(ProcKey, Subject)>;
    /// Whether a process is still where the plan found it.
    fn belongs(&self, pid: u32, via: &Via) -> bool;
    /// Whether the kernel can kill that cgroup in one step.
    fn can_kill(&self, cgroup: &JobCgroup) -> bool;
}

impl Policy {
    fn is_own(&self, pid: u32) -> bool {
        pid == self.own || self.ancestors.contains(&pid)
    }
}

/// Adds to a plan whoever goes with its targets. Holders that are in it stay as they are.
pub fn extend(plan: &mut Plan, scope: Scope, kinship: &dyn Kinship, policy: &Policy) {
    match scope {
        Scope::Process => {}
        Scope::Tree => extend_by_tree(plan, kinship, policy),
        Scope::Cgroup => extend_by_cgroup(plan, kinship, policy),
    }
}

fn add(plan: &mut Plan, key: ProcKey, via: Via, subject: &Subject, policy: &Policy) {
    if plan.rows.iter().any(|row| same_process(row.key, key)) {
        return;
    }
    plan.rows.push(Row {
        key,
        via,
        slots: BTreeSet::new(),
        class: subject.class,
        class_rule: subject.class_rule.clone(),
        action: policy.action(key, subject),
        stop_unit: None,
    });
}

fn targets(plan: &Plan) -> Vec<u32> {
    plan.targets().map(|row| row.key.tgid).collect()
}

fn extend_by_tree(plan: &mut Plan, kinship: &dyn Kinship, policy: &Policy) {
    let table = kinship.table();
    // The processes of a job have their ancestors in common: each is read once.
    let known: RefCell<BTreeMap<u32, Option<(ProcKey, Subject)>>> = RefCell::default();
    let subject = |pid| known.borrow_mut().entry(pid).or_insert_with(|| kinship.subject(pid)).clone();
    let stops = |kin: &Kin| {
        let pid = kin.key.tgid;
        policy.is_own(pid) || subject(pid).is_none_or(|(key, subject)| policy.action(key, &subject) != Action::Signal)
    };
    let mut done = BTreeSet::new();
    for pid in targets(plan) {
        let Some(root) = table.root_of(pid, &stops) else { continue };
        if !done.insert(root.key.tgid) {
            continue;
        }
        for pid in table.below(root.key.tgid) {
            if let Some((key, subject)) = subject(pid) {
                add(plan, key, Via::Tree(root.key), &subject, policy);
            }
        }
    }
}

fn extend_by_cgroup(plan: &mut Plan, kinship: &dyn Kinship, policy: &Policy) {
    let mut done = BTreeSet::new();
    for pid in targets(plan) {
        let cgroup = match kinship.job_cgroup(pid) {
            Ok(cgroup) => cgroup,
            Err(reason) => {
                plan.notes.push(format!("process {pid} goes alone: {reason}"));
                continue;
            }
        };
        if !done.insert(cgroup.dir.clone()) {
            continue;
        }
        let pids = kinship.members(&cgroup);
        let members: Vec<(ProcKey, Subject)> = pids.iter().filter_map(|pid| kinship.subject(*pid)).collect();
        // A daemon's cgroup may hold the jobs of many; that of a container or of a Slurm job may hold its keeper.
        let stranger = members.iter().find(|(key, subject)| {
            policy.is_own(key.tgid) || cgroup.kind == Kind::Any && policy.action(*key, subject) != Action::Signal
        });
        if let Some((key, subject)) = stranger {
            let what = match policy.action(*key, subject) {
                Action::Skip(Skip::Protected | Skip::Monitor) => subject.class_rule.as_str(),
                Action::Skip(Skip::OwnSession) => "gpureap's own session",
                Action::Skip(Skip::KernelThread) => "the kernel's",
                Action::Skip(Skip::Own | Skip::Ancestor | Skip::Init | Skip::HandleOnly) | Action::Signal => {
                    "gpureap or what started it"
                }
            };
            plan.notes.push(format!(
                "the holders in cgroup {} go alone: process {} ({what}) is in it too",
                cgroup.path, key.tgid
            ));
            continue;
        }
        for (key, subject) in &members {
            add(plan, *key, Via::Cgroup(cgroup.dir.clone()), subject, policy);
        }
        let whole = pids.iter().all(|pid| plan.targets().any(|row| row.key.tgid == *pid));
        if whole && kinship.can_kill(&cgroup) {
            plan.cgroups.push(Whole { dir: cgroup.dir, pids });
        }
    }
}
