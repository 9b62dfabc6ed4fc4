//! Whether the wait is over, and what came of it. Pure: a view and a plan go in.

use serde::{Deserialize, Serialize};

use crate::{
    exit_code::Exit,
    model::{Source, View},
    reap::{
        plan::{Class, Plan, Policy, Row},
        verdict::unjudged,
    },
};

/// How things stand with the chosen devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Those that are waited for.
    pub holders: Vec<Row>,
    /// Monitors and protected processes that were left out by wish.
    pub ignored: Vec<Row>,
    /// Files of the chosen devices that no process refers to.
    pub orphans: u32,
    /// Holders of which the filters could not tell whether they were meant.
    pub undecided: usize,
}

impl Standing {
    /// `plan` was made from `view` by `policy`. Everybody counts whom the plan names, signalled or not: gpureap's ancestors
    /// and pid 1 keep a GPU as busy as others do.
    pub fn of(view: &View, plan: &Plan, policy: &Policy, ignore_monitors: bool) -> Self {
        let undecided = policy.undecided_of(view);
        let counted = plan.rows.iter().filter(|row| row.key.tgid != policy.own).cloned();
        let (ignored, holders) = counted.partition(|row| ignore_monitors && row.class != Class::Job);
        // A file that no process has is none of a process that was named.
        let orphans = view.orphans.iter().filter(|orphan| policy.pids.is_empty() && policy.wants(orphan.slot));
        Self { holders, ignored, orphans: orphans.map(|orphan| orphan.files).sum(), undecided }
    }

    /// Nobody is left who is known to be meant.
    pub fn is_free(&self) -> bool {
        let Self { holders, ignored: _, orphans, undecided: _ } = self;
        holders.is_empty() && *orphans == 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Free,
    Held,
    Unkillable,
    Protected,
    KernelReference,
    /// Nobody was seen, and not everybody could be.
    NotPermitted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub outcome: Outcome,
    pub exit: Exit,
    /// A complete sweep of the kernel found no chosen holder.
    pub verified: bool,
    pub notes: Vec<String>,
}

/// What is known beside the standing at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// A SIGKILL waits for one of the holders and does not end it.
    pub kill_pending: bool,
    /// A process that was named may not be looked at.
    pub named_unseen: bool,
    /// The view is an old one, less those who are known to have let go.
    pub blind: bool,
}

/// With several causes the first of unkillable (4), held (3), protected (5) and kernel reference (6) wins.
pub fn judge(standing: &Standing, view: &View, policy: &Policy, findings: Findings) -> Verdict {
    let Standing { holders, ignored, orphans, undecided } = standing;
    let Findings { kill_pending, named_unseen, blind } = findings;
    let mut notes = Vec::new();
    if !ignored.is_empty() {
        notes.push(format!("{} monitors or protected processes hold and were not waited for", ignored.len()));
    }
    let blocked = |outcome, exit, notes| Verdict { outcome, exit, verified: false, notes };
    if kill_pending && !holders.is_empty() {
        return blocked(Outcome::Unkillable, Exit::Unkillable, notes);
    }
    if holders.iter().any(|row| row.class == Class::Job) {
        return blocked(Outcome::Held, Exit::Held, notes);
    }
    if !holders.is_empty() {
        return blocked(Outcome::Protected, Exit::Protected, notes);
    }
    if *orphans > 0 {
        notes.push(format!(
            "{orphans} device files are held by no process: in flight between sockets, or a kernel-side reference"
        ));
        return blocked(Outcome::KernelReference, Exit::KernelReference, notes);
    }
    if *undecided > 0 {
        notes.push(unjudged(*undecided));
        return blocked(Outcome::NotPermitted, Exit::NotPermitted, notes);
    }
    let verified = view.complete && view.source != Source::Proc;
    // /proc tells root of every process, if not of files in flight.
    let sees_all = verified || view.source == Source::Proc && policy.privileged && !blind;
    let unseen = if policy.pids.is_empty() { !sees_all } else { named_unseen };
    if unseen {
        notes.push("not every process could be seen, so it is not verified that the GPUs are free".to_owned());
        return blocked(Outcome::NotPermitted, Exit::NotPermitted, notes);
    }
    if !verified {
        notes.push("not verified by a sweep of the kernel, only by what this caller may see".to_owned());
    }
    Verdict { outcome: Outcome::Free, exit: Exit::Done, verified, notes }
}
