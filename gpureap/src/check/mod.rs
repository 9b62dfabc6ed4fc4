//! `gpureap check`: one line for a cluster's own checks, about GPUs that are held by whom nobody expects.

pub mod report;

use std::collections::{BTreeMap, BTreeSet};

use report::{Finding, Why};

use crate::{
    classify::Class,
    exit_code::Exit,
    holders::report::{HeldReport, HolderReport, HoldersReport, Role},
    out::{sanitize::escape, words},
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
}

impl Question {
    fn counts(&self, held: &HeldReport) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(&held.node))
            && (!self.attached || held.role == Some(Role::Attached))
    }
}

/// What is wrong, the worst first. `dying`: those that were told to die and do not, by pid, with the state that they are in.
pub fn decide(question: &Question, seen: &HoldersReport, dying: &BTreeMap<u32, char>) -> Vec<Finding> {
    let finding = |holder: &HolderReport| {
        let nodes: Vec<String> =
            holder.devices.iter().filter(|held| question.counts(held)).map(|held| held.node.clone()).collect();
        let why = match dying.get(&holder.pid) {
            Some(_) => Why::Dying,
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

/// Of several the worst.
pub fn exit(findings: &[Finding]) -> Exit {
    match findings.first().map(|finding| finding.why) {
        Some(Why::Dying) => Exit::Unkillable,
        Some(Why::Held) => Exit::Held,
        None => Exit::Done,
    }
}

/// Everything in one line of at most so many bytes: less is said of the first before it is cut.
pub fn line(findings: &[Finding], most: usize) -> String {
    let Some(first) = findings.first() else { return String::new() };
    let more = match findings.len() - 1 {
        0 => String::new(),
        count => format!("; {count} more"),
    };
    let candidates = [(true, true), (false, true), (false, false)];
    let said = candidates.map(|(place, nodes)| format!("{}{more}", sentence(first, place, nodes)));
    let [.., shortest] = &said;
    said.iter().find(|text| text.len() <= most).cloned().unwrap_or_else(|| {
        let dots = "...";
        let end = shortest.floor_char_boundary(most.saturating_sub(dots.len()));
        format!("{}{dots}", &shortest[..end])
    })
}

fn sentence(finding: &Finding, with_place: bool, all_nodes: bool) -> String {
    let Finding { why, nodes, pid, comm, uid, user, state, .. } = finding;
    let nodes = match nodes.as_slice() {
        [first, rest @ ..] if !all_nodes && !rest.is_empty() => format!("{first} and {} more", rest.len()),
        all => words::nodes(all),
    };
    let place = if with_place { place(finding) } else { None };
    let state = state.filter(|_| *why == Why::Dying).map(|state| format!("{state} state"));
    let details: Vec<String> =
        [Some(format!("pid {pid}")), Some(words::user(user.as_deref(), *uid).into_owned()), place, state]
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
