//! After the signals: a full sweep of the kernel, and what it proves.

use std::{collections::BTreeSet, time::Duration};

use super::{
    ladder::{End, Fate},
    memory::MemoryFacts,
    plan::{Action, Plan, Policy, Skip, same_process},
    report::{Outcome, Unmatch, Unmatched},
    signaller::{Signal, Signaller},
};
use crate::{
    exit_code::Exit,
    model::{Eyes, Holder, ProcKey, Slot, Source, View},
    out::words::plural,
};

/// Files without an owner are often just being freed by a kernel worker, and a monitor's look takes no longer: they are
/// looked at again for this long.
const SETTLE: u64 = 1_000_000_000;
const PAUSE_MAX: u64 = 20_000_000;

/// How holders that appeared after the plan are judged.
pub struct Newcomers<'a> {
    /// Those of a view that the filters let through; `None`: there is no filter.
    pub filter: &'a dyn Fn(&View) -> Option<BTreeSet<ProcKey>>,
    /// They come from the targets.
    pub descends: &'a dyn Fn(&Holder) -> bool,
    /// Nobody can open the devices any more: who holds one was on the way in.
    pub fenced: bool,
}

impl Newcomers<'_> {
    /// Whether one that counts is reaped as well.
    pub fn goes(&self, holder: &Holder) -> bool {
        self.fenced || (self.descends)(holder)
    }
}

/// What the last sweep saw of the chosen devices.
#[derive(Clone, Debug)]
pub struct Proof {
    pub view: View,
    /// Nobody could look: the view is what was known before.
    pub blind: bool,
    /// Targets that still hold, or hold again.
    pub still: Vec<ProcKey>,
    /// Holders that were not there when the plan was made.
    pub respawned: Vec<Holder>,
    /// Holders that the plan skipped and that still hold.
    pub skipped: Vec<(ProcKey, Skip)>,
    /// Device files that no process refers to.
    pub orphans: u32,
}

impl Proof {
    /// Sweeps, and again while files without an owner or newcomers are left that may be on their way. `before` is the view
    /// that the plan was made from.
    pub fn take(
        eyes: &dyn Eyes,
        signaller: &mut dyn Signaller,
        plan: &Plan,
        policy: &Policy,
        before: &View,
        newcomers: &Newcomers<'_>,
    ) -> anyhow::Result<Self> {
        let until = signaller.now_ns() + SETTLE;
        let mut pause = Duration::from_millis(1).as_nanos() as u64;
        loop {
            let proof = Self::of(eyes.sweep()?, plan, policy, before, newcomers);
            let now = signaller.now_ns();
            let settled = proof.orphans == 0 && proof.respawned.is_empty();
            if settled
                || plan.targets().next().is_none()
                || now >= until
                || proof.respawned.iter().any(|holder| newcomers.goes(holder))
            {
                return Ok(proof);
            }
            signaller.wait(&[], now + pause)?;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// What a view says of a plan.
    pub fn of(view: View, plan: &Plan, policy: &Policy, before: &View, newcomers: &Newcomers<'_>) -> Self {
        let now = Policy { chosen: (newcomers.filter)(&view), ..policy.clone() };
        let mut proof =
            Self { view, blind: false, still: Vec::new(), respawned: Vec::new(), skipped: Vec::new(), orphans: 0 };
        for holder in &proof.view.holders {
            if policy.chosen_slots(holder).is_empty() {
                continue;
            }
            let row = plan.rows.iter().find(|row| same_process(row.key, holder.key));
            match row.map(|row| row.action) {
                Some(Action::Signal) => proof.still.push(holder.key),
                Some(Action::Skip(reason)) => proof.skipped.push((holder.key, reason)),
                // One that had it open without using it, and uses it now.
                None if plan.handle_only.iter().any(|row| same_process(row.key, holder.key)) => {
                    proof.respawned.push(holder.clone());
                }
                // A holder that was there before and that the filters left out stays as it is.
                None if before.holders.iter().any(|old| same_process(old.key, holder.key)) => {}
                None if holder.key.tgid == policy.own => {}
                // Nobody asked for it, and it is none of those that were reaped.
                None if !now.names(holder.key) && !(newcomers.descends)(holder) => {}
                None => proof.respawned.push(holder.clone()),
            }
        }
        proof.orphans =
            proof.view.orphans.iter().filter(|orphan| policy.wants(orphan.slot)).map(|orphan| orphan.files).sum();
        proof
    }

    /// What a process still holds of the chosen devices.
    pub fn holds(&self, key: ProcKey, policy: &Policy) -> BTreeSet<Slot> {
        let holder = self.view.holders.iter().find(|holder| same_process(holder.key, key));
        holder.map(|holder| policy.chosen_slots(holder)).unwrap_or_default()
    }
}

/// The sweep has the last word: a process that let go at the very end is released, one that took the device again has
/// survived. Opens between the last look and the sweep are thereby seen.
pub fn settle(fates: &mut [Fate], proof: &Proof, policy: &Policy, now_ns: u64) {
    // No sweep sees what a process on its way out still has in the driver's hands.
    for fate in fates.iter_mut().filter(|fate| fate.holder && !fate.exiting) {
        let holds = proof.holds(fate.key, policy);
        let let_go: Vec<Slot> = fate.holds.difference(&holds).copied().collect();
        for slot in let_go {
            fate.closed_ns.insert(slot, now_ns);
        }
        for slot in &holds {
            fate.closed_ns.remove(slot);
        }
        fate.holds = holds;
        match fate.end {
            End::Survived | End::NotPermitted | End::Failed(_) if fate.holds.is_empty() => {
                fate.end = End::Released;
            }
            End::Released if !fate.holds.is_empty() => fate.end = End::Survived,
            _ => {}
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub outcome: Outcome,
    pub exit: Exit,
    /// A complete sweep found no chosen holder.
    pub verified: bool,
    pub notes: Vec<String>,
}

/// Why nobody can say that what was chosen is free.
pub fn unjudged(count: usize) -> String {
    let hold = plural(count, "process holds and could", "processes hold and could");
    format!("{count} {hold} not be judged, so it is not verified that nobody who was meant does")
}

/// Weighs everything. With several causes the first of unkillable (4), held (3), protected (5) and kernel reference (6)
/// wins. Holders that are skipped because gpureap was started by them, or in their session, are living holders that
/// nobody protects: held. `unmatched`: what was named and is no holder.
pub fn judge(
    plan: &Plan,
    fates: &[Fate],
    proof: &Proof,
    memory: &MemoryFacts,
    policy: &Policy,
    unmatched: &[Unmatched],
) -> Verdict {
    let holders = || fates.iter().filter(|fate| fate.holder);
    let unkillable = holders().any(|fate| fate.end == End::Survived && fate.was_sent(Signal::Kill));
    let protected = |reason: &Skip| matches!(reason, Skip::Protected | Skip::Monitor);
    let held = !proof.still.is_empty()
        || !proof.respawned.is_empty()
        || proof.skipped.iter().any(|(_, reason)| !protected(reason));
    let only_protected = proof.skipped.iter().any(|(_, reason)| protected(reason));
    let refused = fates.iter().filter(|fate| fate.end == End::NotPermitted).count();
    let nothing_done = holders().all(|fate| matches!(fate.end, End::NotPermitted | End::Failed(_)));

    let mut notes = plan.notes.clone();
    let companions = fates.iter().filter(|fate| !fate.holder && !fate.end.is_over()).count();
    if companions > 0 {
        notes.push(format!(
            "{companions} processes that went with the holders live on; they hold none of what was chosen"
        ));
    }
    let stopped: BTreeSet<&str> = plan
        .targets()
        .zip(fates)
        .filter(|(_, fate)| fate.unit_stopped_ns.is_some())
        .filter_map(|(row, _)| row.stop_unit.as_deref())
        .collect();
    for unit in stopped {
        notes.push(format!("{unit} stays stopped; `systemctl start {unit}` starts it again"));
    }
    let unit_errors: BTreeSet<(Option<&str>, &str)> = plan
        .targets()
        .zip(fates)
        .filter_map(|(row, fate)| Some((row.stop_unit.as_deref(), fate.unit_error.as_deref()?)))
        .collect();
    for (unit, error) in unit_errors {
        notes.push(format!(
            "{} could not be stopped, so its processes were signalled: {error}",
            unit.unwrap_or_default()
        ));
    }
    if refused > 0 {
        notes.push(format!("not permitted to signal {refused} of {} processes; root may", fates.len()));
    }
    let (outcome, exit) = if unkillable {
        (Outcome::Unkillable, Exit::Unkillable)
    } else if held {
        (Outcome::Held, if refused > 0 && nothing_done { Exit::NotPermitted } else { Exit::Held })
    } else if only_protected {
        (Outcome::Protected, Exit::Protected)
    } else if proof.orphans > 0 {
        notes.push(format!(
            "{} device files are held by no process: in flight between sockets, or a kernel-side reference",
            proof.orphans
        ));
        (Outcome::KernelReference, Exit::KernelReference)
    } else if memory.used().next().is_some() {
        notes.push("no process holds it, but memory is still used: a reference in the kernel is suspected".to_owned());
        notes.extend(memory.modules.iter().map(|module| format!("module {module}")));
        (Outcome::KernelReference, Exit::KernelReference)
    } else if plan.rows.is_empty() {
        (Outcome::NothingToDo, Exit::Done)
    } else {
        (Outcome::Freed, Exit::Done)
    };

    let undecided = policy.undecided_of(&proof.view);
    let verified = exit == Exit::Done && proof.view.complete && proof.view.source != Source::Proc && undecided == 0;
    if exit == Exit::Done && !verified {
        // /proc tells root of every process, if not of files in flight.
        let sees_all = proof.view.complete || proof.view.source == Source::Proc && policy.privileged;
        // What was named is known to hold nothing or to be gone, unless it may not be looked at.
        let unseen = if policy.pids.is_empty() {
            !sees_all
        } else {
            unmatched.iter().any(|entry| entry.reason == Unmatch::NotVisible)
        };
        let unseen = unseen || undecided > 0;
        if undecided > 0 {
            notes.push(unjudged(undecided));
        } else if unseen && policy.pids.is_empty() {
            notes.push("not every process could be seen, so it is not verified that the GPUs are free".to_owned());
        } else {
            notes.push("not verified by a sweep of the kernel, only by what this caller may see".to_owned());
        }
        if unseen && plan.targets().next().is_none() {
            return Verdict { outcome, exit: Exit::NotPermitted, verified, notes };
        }
    }
    let exit = if proof.blind && exit == Exit::Done { Exit::Internal } else { exit };
    Verdict { outcome, exit, verified, notes }
}
