//! `gpureap check`: one line for a cluster's own checks, about GPUs that are held by whom nobody expects.

pub mod report;

use std::collections::{BTreeMap, BTreeSet};

use report::{Fault, Finding, Why};

use crate::{
    classify::Class,
    exit_code::Exit,
    holders::report::{HeldReport, HolderReport, HoldersReport, Role},
    out::{sanitize::escape, words},
    process::Place,
};

/// What counts.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// Only these nodes; `None`: all.
    pub nodes: Option<BTreeSet<String>>,
    /// Only who is attached.
    pub attached: bool,
    /// Every job that holds, not only those that cannot die.
    pub free: bool,
    /// Jobs that belong to nothing that still runs.
    pub orphans: bool,
}

/// Those that are in trouble, as far as the holders' report does not say so.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Told to die and not dead, by pid, with the state that they are in.
    pub dying: BTreeMap<u32, char>,
    /// In the cgroup of a pod that the kubelet does not know any more.
    pub podless: BTreeSet<u32>,
}

/// Left behind by whoever forked it, and in nothing that would end it: no container, no Slurm job, no pod that there is. The first
/// process of a container was forked by a runtime that has ended, and is no orphan for it.
fn is_orphan(holder: &HolderReport, known: &Known) -> bool {
    let HolderReport { pid, pod, container, cgroup, orphan_of, .. } = holder;
    // Not by its environment, which ends nothing.
    let in_job = || cgroup.as_deref().is_some_and(|cgroup| Place::of(cgroup).slurm_job.is_some());
    known.podless.contains(pid) || orphan_of.is_some() && pod.is_none() && container.is_none() && !in_job()
}

impl Question {
    fn counts(&self, held: &HeldReport) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(&held.node))
            && (!self.attached || held.role == Some(Role::Attached))
    }
}

/// Who should not hold, the worst first.
pub fn decide(question: &Question, seen: &HoldersReport, known: &Known) -> Vec<Finding> {
    let Known { dying, podless: _ } = known;
    let finding = |holder: &HolderReport| {
        let nodes: Vec<String> =
            holder.devices.iter().filter(|held| question.counts(held)).map(|held| held.node.clone()).collect();
        let why = match dying.get(&holder.pid) {
            Some(_) => Why::Dying,
            None if question.orphans && holder.class == Class::Job && is_orphan(holder, known) => Why::Orphan,
            None if question.free && holder.class == Class::Job => Why::Held,
            None => return None,
        };
        let HolderReport { pid, start_ns, comm, uid, user, slurm_job, pod_name, pod_namespace, container, .. } = holder;
        (!nodes.is_empty()).then(|| Finding {
            why,
            nodes,
            pid: *pid,
            start_ns: *start_ns,
            comm: comm.clone(),
            uid: *uid,
            user: user.clone(),
            state: dying.get(pid).copied().or(holder.state),
            slurm_job: slurm_job.clone(),
            pod: pod_name.clone(),
            pod_namespace: pod_namespace.clone(),
            container: holder.container_name.clone().or_else(|| container.clone()),
        })
    };
    let mut findings: Vec<Finding> = seen.holders.iter().filter_map(finding).collect();
    findings.sort_by(|a, b| (a.why, &a.nodes, a.pid).cmp(&(b.why, &b.nodes, b.pid)));
    findings
}

/// Of several the worst: what a process holds can be freed, unlike a GPU that is broken.
pub fn exit(findings: &[Finding], faults: &[Fault]) -> Exit {
    match findings.first().map(|finding| finding.why) {
        Some(Why::Dying) => Exit::Unkillable,
        _ if !faults.is_empty() => Exit::KernelReference,
        Some(Why::Orphan | Why::Held) => Exit::Held,
        None => Exit::Done,
    }
}

/// Everything in one line of at most so many bytes: less is said of the first before it is cut.
pub fn line(findings: &[Finding], faults: &[Fault], most: usize) -> String {
    let more = match findings.len() + faults.len() {
        0 => return String::new(),
        1 => String::new(),
        count => format!("; {} more", count - 1),
    };
    let candidates = [(true, true), (false, true), (false, false)];
    let first = findings.first().filter(|first| first.why == Why::Dying || faults.is_empty());
    let said = candidates.map(|(place, nodes)| {
        let worst = match (first, faults.first()) {
            (Some(first), _) => sentence(first, place, nodes),
            (None, Some(fault)) => fault_sentence(fault, place),
            (None, None) => String::new(),
        };
        format!("{worst}{more}")
    });
    let [.., shortest] = &said;
    said.iter().find(|text| text.len() <= most).cloned().unwrap_or_else(|| {
        let dots = "...";
        let end = shortest.floor_char_boundary(most.saturating_sub(dots.len()));
        format!("{}{dots}", &shortest[..end])
    })
}

fn fault_sentence(fault: &Fault, with_meaning: bool) -> String {
    let Fault { bdf, node, xid, meaning } = fault;
    let meaning = if with_meaning { format!(", {}", escape(meaning)) } else { String::new() };
    format!("{}: Xid {xid}{meaning}", escape(node.as_deref().unwrap_or(bdf)))
}

fn sentence(finding: &Finding, with_place: bool, all_nodes: bool) -> String {
    let Finding { why, nodes, pid, comm, uid, user, state, .. } = finding;
    let nodes = match nodes.as_slice() {
        [first, rest @ ..] if !all_nodes && !rest.is_empty() => format!("{first} and {} more", rest.len()),
        all => words::nodes(all),
    };
    let place = if with_place { place(finding) } else { None };
    let state = state.filter(|_| *why == Why::Dying).map(|state| format!("{state} state"));
    let orphan = (*why == Why::Orphan).then(|| "orphan".to_owned());
    let details: Vec<String> =
        [Some(format!("pid {pid}")), Some(words::user(user.as_deref(), *uid).into_owned()), orphan, place, state]
            .into_iter()
            .flatten()
            .collect();
    format!("{nodes} held by {} ({})", escape(comm), details.join(", "))
}

fn place(finding: &Finding) -> Option<String> {
    let Finding { slurm_job, pod, pod_namespace, container, .. } = finding;
    match (slurm_job, pod, container) {
        (Some(job), ..) => Some(format!("job {}", escape(job))),
        (None, Some(pod), _) => {
            let namespace = pod_namespace.as_deref().map(|name| format!("{}/", escape(name))).unwrap_or_default();
            Some(format!("pod {namespace}{}", escape(pod)))
        }
        (None, None, Some(container)) => {
            let short = if container.len() == 64 { &container[..container.floor_char_boundary(12)] } else { container };
            Some(format!("container {}", escape(short)))
        }
        (None, None, None) => None,
    }
}

#[cfg(test)]
mod tests;
