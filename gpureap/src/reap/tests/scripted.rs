//! Tables over a scripted host with a virtual clock.

use std::{collections::BTreeSet, time::Duration};

use super::{
    Alone, Subjects, Workers, device, ladder_of, policy, scene,
    world::{Actor, React, Told, World, actor},
};
use crate::{
    exit_code::Exit,
    model::Eyes as _,
    reap::{
        ladder::Rungs,
        memory::{MemoryFacts, MemoryWitness, Staying},
        plan::{Class, Policy, Skip, Subject},
        reaper::Reaper,
        report::{Ending, Outcome, Report},
        scope::Scope,
        signaller::{
            Signal::{self, Kill, Term},
            Signaller as _,
        },
        stuck::Coroner,
        text,
    },
};

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct With {
    pub(super) scope: Scope,
    pub(super) fenced: bool,
}

pub(super) fn reap_with(world: &World, policy: &Policy, subjects: &Subjects, rungs: Rungs) -> (Report, Told) {
    reap_so(world, policy, subjects, rungs, With::default())
}

pub(super) fn reap_so(
    world: &World,
    policy: &Policy,
    subjects: &Subjects,
    rungs: Rungs,
    options: With,
) -> (Report, Told) {
    reap_with_memory(world, policy, subjects, rungs, options, None)
}

/// Says the same whenever it is asked, and keeps whom it was told about.
pub(super) struct Says(pub(super) MemoryFacts, pub(super) Option<BTreeSet<u32>>);

impl MemoryWitness for Says {
    fn testify(&mut self, staying: &Staying<'_>, _patience: Duration) -> MemoryFacts {
        self.1 = Some(staying.remaining.clone());
        self.0.clone()
    }
}

pub(super) fn reap_with_memory(
    world: &World,
    policy: &Policy,
    subjects: &Subjects,
    rungs: Rungs,
    options: With,
    memory: Option<&mut dyn MemoryWitness>,
) -> (Report, Told) {
    let mut told = Told::default();
    let begun = scene(world.now_ns());
    let devices = [device(0), device(1)];
    let mut signaller = world.clone();
    let mut reaper = Reaper {
        eyes: world,
        signaller: &mut signaller,
        ledger: &mut told,
        people: &Workers,
        kinship: world,
        devices: &devices,
        policy,
        filter: &|_| None,
        scope: options.scope,
        fenced: options.fenced,
        memory: match memory {
            Some(witness) => Some(witness),
            None => None,
        },
        scene: begun,
    };
    let planned = reaper.plan(world.view().unwrap(), subjects);
    let (report, exit) = reaper.carry_out(planned, rungs, &Coroner::default()).unwrap();
    assert_eq!(report.exit_code, exit as u8);
    (report, told)
}

pub(super) fn reap(actors: Vec<Actor>, rungs: Rungs) -> (Report, World) {
    let world = World::new(actors);
    let (report, _) = reap_with(&world, &policy(), &Subjects::new(), rungs);
    (report, world)
}

struct Case {
    name: &'static str,
    actors: Vec<Actor>,
    rungs: Rungs,
    sent: &'static [(u32, Signal)],
    ends: &'static [(u32, Ending)],
    outcome: Outcome,
    exit: Exit,
}

#[test]
fn every_way_a_reap_can_go() {
    let usual = ladder_of(10_000, 60_000);
    let now = Rungs { now: true, ..usual };
    let cases = [
        Case {
            name: "nobody holds",
            actors: vec![],
            rungs: usual,
            sent: &[],
            ends: &[],
            outcome: Outcome::NothingToDo,
            exit: Exit::Done,
        },
        Case {
            name: "exits on TERM",
            actors: vec![actor(10)],
            rungs: usual,
            sent: &[(10, Term)],
            ends: &[(10, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "TERM ignored: KILL after the grace period, once (K1)",
            actors: vec![Actor { on_term: React::Ignore, ..actor(10) }],
            rungs: usual,
            sent: &[(10, Term), (10, Kill)],
            ends: &[(10, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "three nodes, one signal for each step (K2)",
            actors: vec![Actor { slots: [0, 1, 2].into(), on_term: React::Ignore, ..actor(10) }],
            rungs: usual,
            sent: &[(10, Term), (10, Kill)],
            ends: &[(10, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "KILL at once",
            actors: vec![actor(10), actor(11)],
            rungs: now,
            sent: &[(10, Kill), (11, Kill)],
            ends: &[(10, Ending::Exited), (11, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "the pid is another process's now (K3)",
            actors: vec![Actor { reused: true, ..actor(10) }, actor(11)],
            rungs: usual,
            sent: &[(11, Term)],
            ends: &[(10, Ending::PidReused), (11, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "gone between plan and signal (K4)",
            actors: vec![Actor { vanishes: true, ..actor(10) }],
            rungs: usual,
            sent: &[],
            ends: &[(10, Ending::Vanished)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "takes the device again after it was left alone",
            actors: vec![Actor { lets_go: true, reopens: true, ..actor(10) }],
            rungs: usual,
            sent: &[],
            ends: &[(10, Ending::Survived)],
            outcome: Outcome::Held,
            exit: Exit::Held,
        },
        Case {
            name: "closes on TERM and lives on: no KILL",
            actors: vec![Actor { on_term: React::Close(40), ..actor(10) }],
            rungs: usual,
            sent: &[(10, Term)],
            ends: &[(10, Ending::Released)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "a checkpoint takes most of the grace period (K11)",
            actors: vec![Actor { on_term: React::Exit(9_999), ..actor(10) }],
            rungs: usual,
            sent: &[(10, Term)],
            ends: &[(10, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "SIGKILL does not end it (V2)",
            actors: vec![Actor { on_term: React::Ignore, on_kill: React::Ignore, ..actor(10) }, actor(11)],
            rungs: usual,
            sent: &[(10, Term), (11, Term), (10, Kill)],
            ends: &[(10, Ending::Survived), (11, Ending::Exited)],
            outcome: Outcome::Unkillable,
            exit: Exit::Unkillable,
        },
        Case {
            name: "a grace period longer than the timeout is kept",
            actors: vec![Actor { on_term: React::Exit(90_000), ..actor(10) }],
            rungs: ladder_of(100_000, 60_000),
            sent: &[(10, Term)],
            ends: &[(10, Ending::Exited)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "a supervisor starts another (K9)",
            actors: vec![actor(10), Actor { after: Some(10), ..actor(20) }],
            rungs: usual,
            sent: &[(10, Term)],
            ends: &[(10, Ending::Exited)],
            outcome: Outcome::Held,
            exit: Exit::Held,
        },
        Case {
            name: "killed, and its files closed, but it does not finish exiting",
            actors: vec![Actor { on_kill: React::Close(5), ..actor(10) }],
            rungs: now,
            sent: &[(10, Kill)],
            ends: &[(10, Ending::Released)],
            outcome: Outcome::Freed,
            exit: Exit::Done,
        },
        Case {
            name: "not permitted to signal anyone (K12)",
            actors: vec![Actor { on_term: React::Refuse, ..actor(10) }],
            rungs: usual,
            sent: &[(10, Term)],
            ends: &[(10, Ending::NotPermitted)],
            outcome: Outcome::Held,
            exit: Exit::NotPermitted,
        },
        Case {
            name: "not permitted to signal one of two",
            actors: vec![Actor { on_term: React::Refuse, ..actor(10) }, actor(11)],
            rungs: usual,
            sent: &[(10, Term), (11, Term)],
            ends: &[(10, Ending::NotPermitted), (11, Ending::Exited)],
            outcome: Outcome::Held,
            exit: Exit::Held,
        },
        Case {
            name: "what cannot be checked is not signalled",
            actors: vec![Actor { unreadable: true, ..actor(10) }],
            rungs: usual,
            sent: &[],
            ends: &[(10, Ending::Failed)],
            outcome: Outcome::Held,
            exit: Exit::Held,
        },
        Case {
            name: "unkillable wins over a respawn",
            actors: vec![
                Actor { on_kill: React::Ignore, ..actor(10) },
                actor(11),
                Actor { after: Some(11), ..actor(20) },
            ],
            rungs: now,
            sent: &[(10, Kill), (11, Kill)],
            ends: &[(10, Ending::Survived), (11, Ending::Exited)],
            outcome: Outcome::Unkillable,
            exit: Exit::Unkillable,
        },
    ];
    for Case { name, actors, rungs, sent, ends, outcome, exit } in cases {
        let (report, world) = reap(actors, rungs);
        assert_eq!(world.sent(), sent, "{name}");
        let got: Vec<_> = report.processes.iter().map(|entry| (entry.identity.pid, entry.result.unwrap())).collect();
        assert_eq!(got, ends, "{name}");
        assert_eq!(report.outcome, Some(outcome), "{name}");
        assert_eq!(report.exit_code, exit as u8, "{name}");
        assert_eq!(report.verified, exit == Exit::Done, "{name}");
    }
}

#[test]
fn one_that_let_go_before_the_signal_is_left_alone() {
    let world = World::new(vec![Actor { lets_go: true, ..actor(10) }]);
    let mut told = Told::default();
    let mut signaller = world.clone();
    let policy = policy();
    let plan = crate::reap::plan::plan(&world.view().unwrap(), &Subjects::new(), &policy);
    let rungs = ladder_of(10, 20);
    let mut ladder = crate::reap::ladder::Ladder {
        eyes: &world,
        kinship: &Alone,
        signaller: &mut signaller,
        ledger: &mut told,
        rungs,
    };
    let fates = ladder.climb(&plan.targets().collect::<Vec<_>>(), &[]).unwrap();
    assert_eq!(fates[0].end, crate::reap::ladder::End::Released);
    assert!(world.sent().is_empty() && told.0.is_empty());
}

#[test]
fn the_record_comes_before_the_signals_and_names_each_once() {
    let world = World::new(vec![Actor { on_term: React::Ignore, ..actor(10) }, actor(11)]);
    let (_, told) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(1_000, 2_000));
    assert_eq!(told.0, [("SIGTERM".to_owned(), vec![10, 11]), ("SIGKILL".to_owned(), vec![10])]);
}

#[test]
fn times_are_told_for_each_process_and_device() {
    let stubborn = Actor { on_term: React::Ignore, ..actor(10) };
    let slow = Actor { slots: [0, 1].into(), on_term: React::CloseThenExit(1, 100, 400), ..actor(11) };
    let (report, _) = reap(vec![stubborn, slow], ladder_of(1_000, 2_000));
    let [killed, slow] = report.processes.as_slice() else { panic!("two processes") };
    let exit_ms = killed.exited_ms.unwrap();
    assert!((exit_ms - 1_003.0).abs() < 0.01, "{exit_ms}");
    assert_eq!(killed.closed_ms, killed.exited_ms);
    assert_eq!(killed.exit.as_ref().unwrap().signal, Some(9));
    assert_eq!(killed.signals.iter().map(|sent| sent.signal.as_str()).collect::<Vec<_>>(), ["SIGTERM", "SIGKILL"]);
    assert!((killed.signals[1].after_ms - 1_000.0).abs() < 0.01);
    assert_eq!(slow.exit.as_ref().unwrap().code, Some(0));
    // The early close of one device is seen within one pause between looks.
    let early = slow.devices[1].closed_ms.unwrap();
    assert!((100.0..=120.0).contains(&early), "{early}");
    assert!((slow.devices[0].closed_ms.unwrap() - 400.0).abs() < 0.01);
    let closed: Vec<_> = report.devices.iter().map(|device| device.closed_ms.unwrap()).collect();
    assert!((closed[0] - 1_003.0).abs() < 0.01 && (100.0..=120.0).contains(&closed[1]), "{closed:?}");
    assert_eq!(report.devices[0].before.holders, 2);
    assert_eq!(report.devices[0].after.unwrap().holders, 0);
}

#[test]
fn waiting_is_by_events_and_looks_are_few() {
    let (_, world) = reap(vec![Actor { on_term: React::Exit(8_000), ..actor(10) }], ladder_of(10_000, 60_000));
    assert!(world.looked() <= 8_000 / 20 + 10, "{} looks", world.looked());
    let (_, world) = reap(vec![actor(10)], Rungs { now: true, ..ladder_of(0, 1_000) });
    assert_eq!(world.looked(), 1);
}

#[test]
fn who_is_out_of_bounds_is_told_and_left_alone() {
    let subject = |class, session| Subject { class, session, ..Subject::default() };
    let mut policy = policy();
    policy.ancestors = [12].into();
    let subjects: Subjects = [
        (actor(11).key, subject(Class::Job, 900)),
        (actor(12).key, subject(Class::Job, 1)),
        (actor(13).key, subject(Class::System, 1)),
        (actor(14).key, subject(Class::Monitor, 1)),
    ]
    .into();
    let reap = |pids: &[u32], policy: &Policy| {
        let world = World::new(pids.iter().map(|pid| actor(*pid)).collect());
        let (report, _) = reap_with(&world, policy, &subjects, ladder_of(10, 100));
        let skipped: Vec<_> = report.skipped.iter().map(|entry| (entry.identity.pid, entry.reason)).collect();
        (report.exit_code, skipped, world.sent())
    };
    assert_eq!(reap(&[10, 11], &policy), (Exit::Held as u8, vec![(11, Skip::OwnSession)], vec![(10, Term)]));
    assert_eq!(reap(&[12], &policy), (Exit::Held as u8, vec![(12, Skip::Ancestor)], vec![]));
    assert_eq!(reap(&[10, 13], &policy), (Exit::Protected as u8, vec![(13, Skip::Protected)], vec![(10, Term)]));
    assert_eq!(reap(&[14], &policy), (Exit::Protected as u8, vec![(14, Skip::Monitor)], vec![]));
    // Both causes: living holders come first.
    assert_eq!(reap(&[12, 14], &policy).0, Exit::Held as u8);
    policy.include_own_session = true;
    policy.include_protected = ["default".to_owned()].into();
    assert_eq!(reap(&[11, 13], &policy), (Exit::Done as u8, vec![], vec![(11, Term), (13, Term)]));
}

#[test]
fn holders_that_the_choice_leaves_out_do_not_matter() {
    let mut policy = policy();
    policy.slots = Some([1].into());
    let other = Actor { slots: [0].into(), ..actor(10) };
    let chosen = Actor { slots: [0, 1].into(), ..actor(11) };
    let world = World::new(vec![other.clone(), chosen.clone()]);
    let (report, _) = reap_with(&world, &policy, &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.exit_code, world.sent()), (0, vec![(11, Term)]));
    assert_eq!(report.devices.len(), 1);
    // By pid: the other holder of the device stays, and is not called a respawn.
    let mut by_pid = super::policy();
    by_pid.pids = [11].into();
    let world = World::new(vec![other, chosen]);
    let (report, _) = reap_with(&world, &by_pid, &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.exit_code, world.sent(), report.respawned.len()), (0, vec![(11, Term)], 0));
}

#[test]
fn files_without_an_owner_are_waited_for_and_then_told() {
    for (lasts_ms, outcome, exit) in
        [(500, Outcome::Freed, Exit::Done), (5_000, Outcome::KernelReference, Exit::KernelReference)]
    {
        let world = World::new(vec![actor(10)]);
        world.orphans_for(lasts_ms);
        let (report, _) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
        assert_eq!((report.outcome, report.exit_code), (Some(outcome), exit as u8));
    }
}

#[test]
fn an_incomplete_sweep_proves_nothing() {
    let world = World::new(vec![actor(10)]);
    world.incomplete();
    let (report, _) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.outcome, report.exit_code, report.verified), (Some(Outcome::Freed), Exit::Done as u8, false));
    assert!(report.notes.iter().any(|note| note.contains("it is not verified")), "{:?}", report.notes);
    let text = text::report(&report);
    assert!(
        text.contains("\nincomplete: ") && text.ends_with("not verified: not everybody could be seen and judged\n"),
        "{text}"
    );
    // With nobody to reap, nothing was done and nothing is known.
    let world = World::new(vec![]);
    world.incomplete();
    let (report, _) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.exit_code, report.verified), (Exit::NotPermitted as u8, false));
    assert!(!text::report(&report).contains("free:"), "{report:?}");
    // Chosen by pid, the process itself is the proof.
    let mut by_pid = policy();
    by_pid.pids = [10].into();
    let world = World::new(vec![actor(10)]);
    world.incomplete();
    let (report, _) = reap_with(&world, &by_pid, &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.exit_code, report.verified), (Exit::Done as u8, false));
}

#[test]
fn zero_grace_still_terms_first() {
    let (_, world) = reap(
        vec![Actor { on_term: React::Ignore, ..actor(10) }],
        Rungs { now: false, grace: Duration::ZERO, timeout: Duration::from_secs(1) },
    );
    assert_eq!(world.sent(), [(10, Term), (10, Kill)]);
}
