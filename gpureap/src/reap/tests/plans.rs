//! Properties of plans.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{collection, prelude::*};

use super::Subjects;
use crate::{
    model::{Holder, How, ProcKey, Slot, Source, Usage, View},
    reap::plan::{Action, Class, Matching, Plan, Policy, Skip, Subject, plan, same_process},
};

const fn key(pid: u32, start: u64) -> ProcKey {
    ProcKey::new(pid, start * 1_000_000_000)
}

fn usage() -> impl Strategy<Value = Usage> {
    (0..3u32, 0..2u32, any::<bool>()).prop_map(|(fds, maps, ever_mapped)| Usage {
        fds,
        maps,
        ever_mapped,
        ..Usage::default()
    })
}

fn holder() -> impl Strategy<Value = Holder> {
    (0..12u32, 1..4u64, collection::btree_map(0..4u32, usage(), 0..4)).prop_map(|(pid, start, usage)| Holder {
        key: key(pid, start),
        usage,
        how: [How::Fd].into(),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    })
}

fn view() -> impl Strategy<Value = View> {
    collection::vec(holder(), 0..10).prop_map(|holders| View {
        source: Source::Map,
        backend: None,
        complete: true,
        cannot_see: BTreeSet::new(),
        lost_events: 0,
        swept_ns: None,
        open_files: BTreeMap::new(),
        holders,
        orphans: Vec::new(),
        notes: Vec::new(),
    })
}

fn subjects() -> impl Strategy<Value = Vec<Subject>> {
    let class = prop_oneof![Just(Class::Job), Just(Class::Monitor), Just(Class::System)];
    let subject = (class, 0..4u32, any::<bool>()).prop_map(|(class, session, kernel_thread)| Subject {
        class,
        class_rule: "rule".to_owned(),
        session,
        kernel_thread,
    });
    collection::vec(subject, 12)
}

fn policy() -> impl Strategy<Value = Policy> {
    let pids = || collection::btree_set(0..12u32, 0..4);
    let slots = proptest::option::of(collection::btree_set(0..4u32, 0..4));
    let keys = collection::btree_set((0..12u32, 1..4u64).prop_map(|(pid, start)| key(pid, start)), 0..8);
    let more = (
        collection::btree_set(0..4u32, 0..2),
        collection::btree_map(0..4u32, pids(), 0..3),
        proptest::option::of(keys),
        prop_oneof![Just(None), Just(Some("rule")), Just(Some("all")), Just(Some("other"))],
    );
    (slots, any::<bool>(), pids(), 0..12u32, 0..4u32, pids(), any::<bool>(), more).prop_map(
        |(slots, attached, pids, own, own_session, ancestors, include_own_session, more)| Policy {
            slots,
            matching: if attached { Matching::Attached } else { Matching::Any },
            by_handle: more.0,
            contexts: more.1,
            pids,
            chosen: more.2,
            undecided: BTreeSet::new(),
            own,
            own_session,
            ancestors,
            include_own_session,
            stop_monitors: false,
            privileged: true,
            include_protected: more.3.iter().map(|name| (*name).to_owned()).collect(),
        },
    )
}

fn of_pid(key: ProcKey) -> impl Fn(&&Holder) -> bool {
    move |holder| holder.key == key
}

fn known(view: &View, subjects: &[Subject]) -> Subjects {
    view.holders.iter().map(|holder| (holder.key, subjects[holder.key.tgid as usize].clone())).collect()
}

fn chosen(plan: &Plan) -> BTreeSet<ProcKey> {
    plan.rows.iter().map(|row| row.key).collect()
}

proptest! {
    #[test]
    fn nobody_out_of_bounds_is_a_target(view in view(), subjects in subjects(), policy in policy()) {
        let plan = plan(&view, &known(&view, &subjects), &policy);
        for row in plan.targets() {
            let pid = row.key.tgid;
            let subject = &subjects[pid as usize];
            prop_assert!(pid > 1 && pid != policy.own && !policy.ancestors.contains(&pid));
            prop_assert!(!subject.kernel_thread);
            prop_assert!(
                subject.session != policy.own_session
                    || policy.own_session == 0
                    || policy.include_own_session
                    || policy.pids.contains(&pid)
            );
            let included = ["rule", "all"].iter().any(|name| policy.include_protected.contains(*name));
            prop_assert!(subject.class == Class::Job || included);
            prop_assert!(policy.chosen.as_ref().is_none_or(|keys| keys.contains(&row.key)));
        }
    }

    #[test]
    fn every_row_holds_what_was_chosen(view in view(), subjects in subjects(), policy in policy()) {
        let plan = plan(&view, &known(&view, &subjects), &policy);
        for row in &plan.rows {
            let of_row = |holder: &&Holder| holder.key == row.key;
            prop_assert!(!row.slots.is_empty());
            prop_assert!(policy.pids.is_empty() || policy.pids.contains(&row.key.tgid));
            for slot in &row.slots {
                prop_assert!(policy.slots.as_ref().is_none_or(|slots| slots.contains(slot)));
                prop_assert!(view.holders.iter().filter(of_row).any(|holder| holder.usage.contains_key(slot)));
            }
        }
        // What counts as `attached` is a mapping, now or before, a context, or a handle where there is no more to have.
        for row in plan.rows.iter().filter(|_| policy.matching == Matching::Attached) {
            let holder = view.holders.iter().filter(of_pid(row.key)).find(|holder| row.slots.iter().all(|slot| holder.usage.contains_key(slot)));
            let holder = holder.unwrap();
            for slot in &row.slots {
                let Usage { maps, ever_mapped, .. } = holder.usage[slot];
                let context = policy.contexts.get(slot).is_some_and(|pids| pids.contains(&row.key.tgid));
                let any_holder_mapped = view.holders.iter().filter(of_pid(row.key)).any(|holder| {
                    holder.usage.get(slot).is_some_and(|usage| usage.maps > 0 || usage.ever_mapped)
                });
                prop_assert!(maps > 0 || ever_mapped || any_holder_mapped || context || policy.by_handle.contains(slot));
            }
        }
        // Those with a handle alone are others, and they hold something that was chosen too.
        for row in &plan.handle_only {
            prop_assert!(policy.matching == Matching::Attached);
            prop_assert!(row.action == Action::Skip(Skip::HandleOnly) && !row.slots.is_empty());
            prop_assert!(row.slots.iter().all(|slot| policy.wants(*slot)));
        }
        // And each process is in it once: one signal for each step.
        prop_assert_eq!(chosen(&plan).len(), plan.rows.len());
    }

    #[test]
    fn a_plan_of_its_own_holders_is_the_same(view in view(), subjects in subjects(), policy in policy()) {
        let known = known(&view, &subjects);
        let first = plan(&view, &known, &policy);
        prop_assert_eq!(&first, &plan(&view, &known, &policy));
        let keys = chosen(&first);
        let mut rest = view;
        rest.holders.retain(|holder| keys.contains(&holder.key));
        prop_assert_eq!(&first.rows, &plan(&rest, &known, &policy).rows);
        // With the targets gone there is nobody left to signal.
        let targets: BTreeSet<ProcKey> = first.targets().map(|row| row.key).collect();
        rest.holders.retain(|holder| !targets.contains(&holder.key));
        prop_assert_eq!(plan(&rest, &known, &policy).targets().count(), 0);
    }

    #[test]
    fn a_narrower_choice_takes_nobody_new(
        view in view(), subjects in subjects(), policy in policy(), slot in 0..4u32, pid in 0..12u32,
    ) {
        let known = known(&view, &subjects);
        let wide = plan(&view, &known, &policy);
        let slots = policy.slots.clone().unwrap_or_else(|| (0..4).collect::<BTreeSet<Slot>>());
        let mut fewer_slots = policy.clone();
        fewer_slots.slots = Some(slots.into_iter().filter(|other| *other != slot).collect());
        let attached = Policy { matching: Matching::Attached, ..policy.clone() };
        let keys = policy.chosen.clone().unwrap_or_else(|| view.holders.iter().map(|holder| holder.key).collect());
        let fewer_chosen = Policy {
            chosen: Some(keys.into_iter().filter(|key| key.tgid != pid).collect()),
            ..policy.clone()
        };
        let no_contexts = Policy { contexts: BTreeMap::new(), ..policy.clone() };
        let nobody_included = Policy { include_protected: BTreeSet::new(), ..policy.clone() };
        for narrow in [&fewer_slots, &attached, &fewer_chosen, &no_contexts, &nobody_included] {
            let narrow = plan(&view, &known, narrow);
            prop_assert!(chosen(&narrow).is_subset(&chosen(&wide)));
            prop_assert!(narrow.targets().all(|row| wide.targets().any(|other| other.key == row.key)));
        }
        // Naming a pid may only add one that its own session kept out.
        let one = plan(&view, &known, &Policy { pids: [pid].into(), ..policy.clone() });
        if policy.pids.is_empty() || policy.pids.contains(&pid) {
            prop_assert!(chosen(&one).is_subset(&chosen(&wide)));
            for row in one.targets() {
                let before = wide.rows.iter().find(|other| other.key == row.key).unwrap().action;
                prop_assert!(matches!(before, Action::Signal | Action::Skip(Skip::OwnSession)));
            }
        }
    }
}

#[test]
fn a_handle_on_another_gpu_is_not_a_reason_to_die() {
    // F11: 23 handles and 3 maps on GPU 0, 3 handles on GPU 1.
    let usage = |fds, maps| Usage { fds, maps, ever_mapped: maps > 0, ..Usage::default() };
    let job = Holder {
        key: ProcKey::new(7, 70),
        usage: [(0, usage(23, 3)), (1, usage(3, 0)), (2, usage(8, 0))].into(),
        how: [How::Fd].into(),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    };
    let view = View { holders: vec![job], ..empty() };
    let targets = |slots: Option<&[Slot]>, matching| {
        let policy = Policy { slots: slots.map(|slots| slots.iter().copied().collect()), matching, ..super::policy() };
        plan(&view, &Subjects::new(), &policy).targets().count()
    };
    assert_eq!(targets(Some(&[1]), Matching::Attached), 0);
    assert_eq!(targets(Some(&[0]), Matching::Attached), 1);
    assert_eq!(targets(Some(&[1]), Matching::Any), 1);
    assert_eq!(targets(None, Matching::Any), 1);
    assert_eq!(targets(Some(&[]), Matching::Any), 0);
}

fn empty() -> View {
    View {
        source: Source::Map,
        backend: None,
        complete: true,
        cannot_see: BTreeSet::new(),
        lost_events: 0,
        swept_ns: None,
        open_files: BTreeMap::new(),
        holders: Vec::new(),
        orphans: Vec::new(),
        notes: Vec::new(),
    }
}

#[test]
fn f12_handles_alone_and_what_makes_more_of_them() {
    // F12: three handles on each GPU, no map.
    let usage = Usage { fds: 3, ..Usage::default() };
    let counter = Holder {
        key: ProcKey::new(7, 70),
        usage: [(0, usage.clone()), (1, usage.clone()), (5, usage)].into(),
        how: [How::Fd].into(),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    };
    let view = View { holders: vec![counter], ..empty() };
    let slots = |policy: Policy| {
        let policy = Policy { matching: Matching::Attached, ..policy };
        let plan = plan(&view, &Subjects::new(), &policy);
        plan.targets().flat_map(|row| row.slots.clone()).collect::<Vec<_>>()
    };
    assert_eq!(slots(super::policy()), <[Slot; 0]>::default());
    // NVML saw a context of it on GPU 1, and one of somebody else on GPU 0.
    let contexts = BTreeMap::from([(1, [7].into()), (0, [8].into())]);
    assert_eq!(slots(Policy { contexts, ..super::policy() }), [1]);
    // A capability of a compute instance is never mapped.
    assert_eq!(slots(Policy { by_handle: [5].into(), ..super::policy() }), [5]);
    assert_eq!(
        slots(Policy { by_handle: [5].into(), slots: Some([0, 1].into()), ..super::policy() }),
        <[Slot; 0]>::default()
    );
}

#[test]
fn protected_ones_are_taken_by_the_name_of_their_rule() {
    let usage = Usage { fds: 1, ..Usage::default() };
    let holder = |pid| Holder {
        key: ProcKey::new(pid, 70),
        usage: [(0, usage.clone())].into(),
        how: [How::Fd].into(),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    };
    let view = View { holders: vec![holder(10), holder(11), holder(12)], ..empty() };
    let subject = |class, rule: &str| Subject { class, class_rule: rule.to_owned(), ..Subject::default() };
    let subjects: Subjects = [
        (ProcKey::new(10, 70), subject(Class::System, "dcgm")),
        (ProcKey::new(11, 70), subject(Class::Monitor, "nvtop")),
        (ProcKey::new(12, 70), subject(Class::Job, "default")),
    ]
    .into();
    let targets = |names: &[&str]| {
        let include_protected = names.iter().map(|name| (*name).to_owned()).collect();
        let plan = plan(&view, &subjects, &Policy { include_protected, ..super::policy() });
        plan.targets().map(|row| row.key.tgid).collect::<Vec<_>>()
    };
    assert_eq!(targets(&[]), [12]);
    assert_eq!(targets(&["dcgm"]), [10, 12]);
    assert_eq!(targets(&["nvtop"]), [11, 12]);
    assert_eq!(targets(&["system", "default"]), [12]);
    assert_eq!(targets(&["all"]), [10, 11, 12]);
}

#[test]
fn ticks_and_nanoseconds_name_one_process() {
    let key = ProcKey::new;
    assert!(same_process(key(7, 1_234_567_890), key(7, 1_230_000_000)));
    assert!(!same_process(key(7, 1_234_567_890), key(7, 1_240_000_000)));
    // Two exact times in one tick are two processes (K3).
    assert!(!same_process(key(7, 1_234_567_890), key(7, 1_234_567_891)));
    assert!(same_process(key(7, 1_234_567_890), key(7, 1_234_567_890)));
    assert!(!same_process(key(7, 1), key(8, 1)));
}
