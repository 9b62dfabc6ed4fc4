//! One reap from the plan to the report.

use std::{collections::BTreeMap, path::Path};

use super::{
    ladder::{Ladder, Ledger, Rungs},
    plan::{Plan, Policy, Row, Subject, plan},
    report::{Identity, Parts, People, Presence, Report, Scene, Unmatch, Unmatched},
    signaller::Signaller,
    stuck::Coroner,
    verdict::{Proof, judge, settle},
};
use crate::{
    exit_code::Exit,
    host::Host,
    model::{Ancestor, Device, Eyes, Holder, ProcKey, View},
};

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
    pub devices: &'a [Device],
    pub policy: &'a Policy,
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
        let plan = plan(&view, subjects, self.policy);
        let rows = || plan.rows.iter().chain(&plan.handle_only);
        let identities = rows().map(|row| (row.key, self.identity(row.key))).collect();
        let named = self.policy.pids.iter().filter(|pid| !rows().any(|row| row.key.tgid == **pid));
        let unmatched = named.map(|pid| self.unmatched(*pid, &view)).collect();
        Planned { view, plan, identities, unmatched }
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

    /// One that is gone already may still be remembered by the kernel side.
    fn identity(&self, key: ProcKey) -> Identity {
        let identity = self.people.identity(key);
        let remembered = || self.eyes.lineage().lookup(key);
        match Some(&identity).filter(|identity| identity.comm.is_empty()).and_then(|_| remembered()) {
            Some(Ancestor { comm, argv, uid, .. }) => Identity { comm, argv, uid: Some(uid), ..identity },
            None => identity,
        }
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

    /// Signals, waits, and proves.
    pub fn carry_out(
        &mut self,
        mut planned: Planned,
        rungs: Rungs,
        coroner: &Coroner,
    ) -> anyhow::Result<(Report, Exit)> {
        let targets: Vec<&Row> = planned.plan.targets().collect();
        let mut ladder = Ladder { eyes: self.eyes, signaller: self.signaller, ledger: self.ledger, rungs };
        let mut fates = ladder.climb(&targets)?;
        let proof = Proof::take(self.eyes, self.signaller, &planned.plan, self.policy, &planned.view)?;
        let now = self.signaller.now_ns();
        settle(&mut fates, &proof, self.policy, now);
        // Identities are kept from before; only those that appeared meanwhile are new.
        let verdict = judge(&planned.plan, &fates, &proof, self.policy, &planned.unmatched);
        for holder in &proof.respawned {
            planned.identities.insert(holder.key, self.identity(holder.key));
        }
        let stuck = |key: ProcKey| coroner.examine(key.tgid, now.saturating_sub(key.start_ns) / 1_000_000_000);
        let exit = verdict.exit;
        Ok((self.parts(&planned).done(&fates, &proof, verdict, stuck, now), exit))
    }
}
