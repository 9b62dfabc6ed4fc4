//! One reap from the plan to the report.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use super::{
    ladder::{Fate, Ladder, Ledger, Rungs},
    memory::{MemoryWitness, Staying},
    plan::{Action, Class, Plan, Policy, Row, Subject, Via, plan, same_process},
    report::{Identity, Parts, People, Presence, Report, Scene, Unmatch, Unmatched, identify},
    scope::{self, Kinship, Scope},
    signaller::Signaller,
    stuck::Coroner,
    verdict::{Newcomers, Proof, judge, settle},
};
use crate::{
    exit_code::Exit,
    host::Host,
    model::{Device, Eyes, Holder, ProcKey, View},
};

/// Rounds in which newcomers that belong to the targets are reaped too. More mean a job that forks faster than it can be
/// killed; only a cgroup ends that.
pub const ROUNDS: u32 = 8;

/// Longer ancestries are a mistake or an attack.
const MAX_DEPTH: usize = 64;

impl Scene {
    /// This host, now.
    pub fn here(proc_root: &Path) -> Self {
        let host = Host::read(proc_root);
        Self { begun_ns: host.boottime_ns, host }
    }
}

/// What a reap works with. The scene is taken when it begins.
pub struct Reaper<'a> {
    pub eyes: &'a dyn Eyes,
    pub signaller: &'a mut dyn Signaller,
    pub ledger: &'a mut dyn Ledger,
    pub people: &'a dyn People,
    pub kinship: &'a dyn Kinship,
    pub devices: &'a [Device],
    pub policy: &'a Policy,
    /// The filters of the policy, for a later view.
    pub filter: &'a dyn Fn(&View) -> Option<BTreeSet<ProcKey>>,
    pub scope: Scope,
    /// New opens of the chosen devices fail: whoever holds one all the same was on the way in, and is reaped too.
    pub fenced: bool,
    /// Asked for device memory in the end; `None`: nothing chosen has memory.
    pub memory: Option<&'a mut dyn MemoryWitness>,
    pub scene: Scene,
}

/// A plan with the view that it was made from.
pub struct Planned {
    pub view: View,
    pub plan: Plan,
    pub identities: BTreeMap<ProcKey, Identity>,
    pub unmatched: Vec<Unmatched>,
}

impl Reaper<'_> {
    /// Chooses from a view. `subjects` says what each of its holders is.
    pub fn plan(&self, view: View, subjects: &BTreeMap<ProcKey, Subject>) -> Planned {
        let mut plan = plan(&view, subjects, self.policy);
        scope::extend(&mut plan, self.scope, self.kinship, self.policy);
        self.mark_units(&mut plan.rows);
        let rows = || plan.rows.iter().chain(&plan.handle_only);
        let identities = rows().map(|row| (row.key, self.identity(row.key))).collect();
        let named = self.policy.pids.iter().filter(|pid| !rows().any(|row| row.key.tgid == **pid));
        let unmatched = named.map(|pid| self.unmatched(*pid, &view)).collect();
        Planned { view, plan, identities, unmatched }
    }

    /// A daemon that is only killed is started again by systemd: its unit is stopped.
    fn mark_units(&self, rows: &mut [Row]) {
        for row in rows.iter_mut().filter(|row| row.action == Action::Signal && row.class != Class::Job) {
            row.stop_unit = self.people.service(row.key);
        }
    }

    fn unmatched(&self, pid: u32, view: &View) -> Unmatched {
        let left_out = |holder: &Holder| holder.key.tgid == pid && !self.policy.names(holder.key);
        if view.holders.iter().any(left_out) {
            return Unmatched { pid, reason: Unmatch::LeftOut, process: None };
        }
        let (reason, process) = match self.people.presence(pid) {
            Presence::Absent => (Unmatch::NoSuchProcess, None),
            Presence::ThreadOf(process) => (Unmatch::Thread, Some(process)),
            Presence::Here if self.eyes.look_at(pid).is_ok() => (Unmatch::HoldsNothing, None),
            Presence::Here | Presence::Hidden => (Unmatch::NotVisible, None),
        };
        Unmatched { pid, reason, process }
    }

    fn identity(&self, key: ProcKey) -> Identity {
        identify(self.people, self.eyes.lineage(), key)
    }

    fn parts<'p>(&'p self, planned: &'p Planned) -> Parts<'p> {
        let Planned { view, plan, identities, unmatched } = planned;
        Parts {
            scene: &self.scene,
            policy: self.policy,
            plan,
            before: view,
            devices: self.devices,
            identities,
            unmatched,
        }
    }

    /// The report of a plan that is not carried out.
    pub fn dry_run(&self, planned: &Planned) -> Report {
        self.parts(planned).dry_run(self.signaller.now_ns())
    }

    /// Signals, waits, and proves; again for newcomers that belong to the targets.
    pub fn carry_out(
        &mut self,
        mut planned: Planned,
        rungs: Rungs,
        coroner: &Coroner,
    ) -> anyhow::Result<(Report, Exit)> {
        let mut fates = Vec::new();
        let mut round = 1;
        let proof = loop {
            let targets: Vec<&Row> = planned.plan.targets().skip(fates.len()).collect();
            let mut ladder = Ladder {
                eyes: self.eyes,
                kinship: self.kinship,
                signaller: self.signaller,
                ledger: self.ledger,
                rungs,
            };
            fates.extend(ladder.climb(&targets, &planned.plan.cgroups)?);
            // The kernel's kill of a cgroup is once and for all.
            planned.plan.cgroups.clear();
            let reaped: BTreeSet<ProcKey> = planned.plan.targets().map(|row| row.key).collect();
            let eyes = self.eyes;
            let descends = |holder: &Holder| descends(eyes, holder, &reaped);
            let newcomer = Newcomers { filter: self.filter, descends: &descends, fenced: self.fenced };
            let taken = Proof::take(self.eyes, self.signaller, &planned.plan, self.policy, &planned.view, &newcomer);
            let proof = match taken {
                Ok(proof) => proof,
                // What was done is told, whatever became of who looks.
                Err(error) if fates.iter().any(Fate::is_touched) => {
                    let view = remembered(&planned.view, &fates, &error);
                    let proof = Proof::of(view, &planned.plan, self.policy, &planned.view, &newcomer);
                    break Proof { blind: true, ..proof };
                }
                Err(error) => return Err(error),
            };
            let rows = self.newcomers(&proof, &newcomer);
            let more = round < ROUNDS && rows.iter().any(|row| row.action == Action::Signal);
            for row in rows.into_iter().filter(|row| more || row.action != Action::Signal) {
                planned.identities.insert(row.key, self.identity(row.key));
                planned.plan.rows.push(row);
            }
            if !more {
                // Those that are left alone are known as such now.
                break Proof::of(proof.view, &planned.plan, self.policy, &planned.view, &newcomer);
            }
            round += 1;
        };
        let now = self.signaller.now_ns();
        settle(&mut fates, &proof, self.policy, now);
        let memory = self.memory.as_mut().map(|witness| {
            let targets: BTreeSet<u32> = planned.plan.targets().map(|row| row.key.tgid).collect();
            let others = proof.view.holders.iter().map(|holder| holder.key.tgid).filter(|pid| !targets.contains(pid));
            let staying = Staying { remaining: others.collect(), view: &proof.view };
            // Whoever still holds keeps its memory: there is nothing to wait for.
            let waits = proof.still.is_empty() && !fates.iter().any(|fate| fate.exiting);
            witness.testify(&staying, if waits { rungs.timeout } else { Duration::ZERO })
        });
        let memory = memory.unwrap_or_default();
        let now = self.signaller.now_ns();
        // Identities are kept from before; only those that appeared meanwhile are new.
        let verdict = judge(&planned.plan, &fates, &proof, &memory, self.policy, &planned.unmatched);
        for holder in &proof.respawned {
            planned.identities.insert(holder.key, self.identity(holder.key));
        }
        let stuck = |key: ProcKey| coroner.examine(key.tgid, now.saturating_sub(key.start_ns) / 1_000_000_000);
        let exit = verdict.exit;
        Ok((self.parts(&planned).done(&fates, &proof, &memory, verdict, stuck, now), exit))
    }

    /// Rows for the holders that appeared meanwhile: those that follow the targets are to be signalled, those that the
    /// policy leaves alone are skipped. Others, as those that a supervisor starts, get no row: they are named.
    fn newcomers(&self, proof: &Proof, newcomers: &Newcomers<'_>) -> Vec<Row> {
        let row = |holder: &Holder| {
            let subject = self.kinship.subject(holder.key.tgid);
            let subject = subject.filter(|(key, _)| same_process(*key, holder.key)).map(|(_, subject)| subject);
            let subject = subject.unwrap_or_default();
            let action = self.policy.action(holder.key, &subject);
            (action != Action::Signal || newcomers.goes(holder)).then(|| Row {
                key: holder.key,
                via: Via::Device,
                slots: self.policy.chosen_slots(holder),
                class: subject.class,
                class_rule: subject.class_rule,
                action,
                stop_unit: None,
            })
        };
        let mut rows: Vec<Row> = proof.respawned.iter().filter_map(row).collect();
        self.mark_units(&mut rows);
        rows
    }
}

/// The view from before, less those who are known to be gone, where no other is to be had.
fn remembered(before: &View, fates: &[Fate], error: &anyhow::Error) -> View {
    let gone = |key: ProcKey| fates.iter().any(|fate| same_process(fate.key, key) && fate.end.is_over());
    let mut view = View { complete: false, ..before.clone() };
    view.holders.retain(|holder| !gone(holder.key));
    view.notes.push(format!("the last look failed, so this is what was known before: {error:#}"));
    view
}

/// Whether a process was forked, at whatever distance, from one of these.
fn descends(eyes: &dyn Eyes, holder: &Holder, from: &BTreeSet<ProcKey>) -> bool {
    let is_one = |key: ProcKey| from.iter().any(|other| same_process(*other, key));
    let mut next = holder.inherited_from.or_else(|| eyes.lineage().lookup(holder.key)?.parent);
    for _ in 0..MAX_DEPTH {
        match next {
            Some(key) if is_one(key) => return true,
            Some(key) => next = eyes.lineage().lookup(key).and_then(|ancestor| ancestor.parent),
            None => break,
        }
    }
    false
}
