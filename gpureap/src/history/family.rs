//! Who descends from whom, as trees.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::{
    report::{AncestorReport, ProcessReport, Who},
    told::process_end,
};
use crate::out::words::ended;

/// Who descends from whom, for all processes of the report.
pub(super) fn forest(processes: &[ProcessReport]) -> Vec<Branch<'_>> {
    let mut family = Family::default();
    for process in processes {
        family.known.entry(process.who.clone()).or_default().process = Some(process);
        let mut below = process.who.clone();
        for ancestor in &process.lineage {
            let AncestorReport { pid, start_ns, .. } = ancestor;
            let above = Who { pid: *pid, start_ns: *start_ns, ..process.who.clone() };
            family.known.entry(above.clone()).or_default().ancestor.get_or_insert(ancestor);
            family.has_parent.insert(below.clone());
            family.children.entry(above.clone()).or_default().insert((process.started, below));
            below = above;
        }
        family.tops.insert((process.started, below));
    }
    // The lineage of one may end where that of another goes on.
    let tops = family.tops.iter().filter(|(_, who)| !family.has_parent.contains(who)).cloned().collect();
    let mut told = BTreeSet::new();
    let mut forest = family.grow(tops, &mut told);
    // A circle, in a damaged record, has no top.
    let left = processes.iter().map(|process| (process.started, process.who.clone())).collect();
    forest.extend(family.grow(left, &mut told));
    forest
}

/// What is known of one in the tree.
#[derive(Clone, Copy, Default)]
struct Seed<'a> {
    process: Option<&'a ProcessReport>,
    ancestor: Option<&'a AncestorReport>,
}

/// One in a tree, or many alike.
pub(super) struct Branch<'a> {
    pub(super) host: String,
    pub(super) pids: Vec<u32>,
    pub(super) process: Option<&'a ProcessReport>,
    pub(super) comm: &'a str,
    pub(super) argv: &'a [String],
    /// `None`: not known to have ended.
    pub(super) ended: Option<String>,
    pub(super) children: Vec<Self>,
}

#[derive(Default)]
struct Family<'a> {
    known: BTreeMap<Who, Seed<'a>>,
    children: BTreeMap<Who, BTreeSet<(Timestamp, Who)>>,
    has_parent: BTreeSet<Who>,
    tops: BTreeSet<(Timestamp, Who)>,
}

impl<'a> Family<'a> {
    /// Whoever is told already is left out.
    fn grow(&self, list: Vec<(Timestamp, Who)>, told: &mut BTreeSet<Who>) -> Vec<Branch<'a>> {
        let mut branches: Vec<Branch<'a>> = Vec::new();
        for (_, who) in list {
            if !told.insert(who.clone()) {
                continue;
            }
            let Some(Seed { process, ancestor }) = self.known.get(&who).copied() else { continue };
            let (comm, argv) = match (process, ancestor) {
                (Some(process), _) => (process.comm.as_str(), process.argv.as_slice()),
                (None, Some(ancestor)) => (ancestor.comm.as_str(), ancestor.argv.as_slice()),
                (None, None) => continue,
            };
            let ended = match process {
                Some(process) if process.death.is_some() || process.exit.is_some() => Some(process_end(process)),
                _ => ancestor.and_then(|ancestor| ancestor.exit).map(ended),
            };
            let below = self.children.get(&who).into_iter().flatten().cloned().collect();
            let children = self.grow(below, told);
            let alike = branches.iter_mut().find(|other| {
                let leaves = children.is_empty() && other.children.is_empty();
                leaves && other.comm == comm && other.argv == argv && other.ended == ended && other.host == who.host
            });
            if let Some(other) = alike {
                other.pids.push(who.pid);
            } else {
                let (host, pids) = (who.host, vec![who.pid]);
                branches.push(Branch { host, pids, process, comm, argv, ended, children });
            }
        }
        branches
    }
}
