//! Tables over a scripted host with a virtual clock.

use std::time::Duration;

use super::{Alone, Subjects, Workers, device, ladder_of, policy, scene};
use crate::{
    exit_code::Exit,
    gpu::nvml::memory::MemoryState,
    model::Eyes as _,
    process::cgroup::Kind,
    reap::{
        ladder::Rungs,
        memory::{MemoryFacts, MemoryWitness, MemoryWord, SlotMemory, Staying},
        plan::{Class, Matching, Policy, Skip, Subject},
        reaper::Reaper,
        report::{Ending, Entry, ExitStatus, Outcome, Report},
        scope::Scope,
        signaller::{
            Signal::{self, Kill, Term},
            Signaller as _,
        },
        stuck::Coroner,
        text,
        world::{Actor, MS, React, Told, World, actor},
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
pub(super) struct Says(pub(super) MemoryFacts, pub(super) Option<Staying>);

impl MemoryWitness for Says {
    fn testify(&mut self, staying: &Staying, _patience: Duration) -> MemoryFacts {
        self.1 = Some(staying.clone());
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

fn reap(actors: Vec<Actor>, rungs: Rungs) -> (Report, World) {
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
    assert!(text.contains("\nincomplete: ") && text.ends_with("not verified: the sweep was not complete\n"), "{text}");
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
fn the_text_has_a_line_for_each_process_and_a_proof() {
    let (report, _) = reap(
        vec![
            Actor { on_term: React::Ignore, ..actor(10) },
            actor(11),
            Actor { slots: [0, 1].into(), on_term: React::Close(1), ..actor(12) },
            Actor { after: Some(11), ..actor(20) },
        ],
        ladder_of(1_000, 2_000),
    );
    let text = text::report(&report);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        r"TERM+KILL      10  root        /dev/nvidia0  worker '\x1b[31m--rank=10'  killed by signal 9 after 1.00 s"
    );
    assert_eq!(
        lines[1],
        r"TERM           11  root        /dev/nvidia0  worker '\x1b[31m--rank=11'  killed by signal 15 after 5.0 ms"
    );
    assert!(lines[2].starts_with("TERM           12") && lines[2].ends_with("and lives on"), "{text}");
    assert!(lines[3].starts_with("appeared       20") && lines[3].ends_with("started by train.service"), "{text}");
    assert_eq!(lines[4], "still held after 2.01 s: /dev/nvidia0 (1 appeared meanwhile)");
    assert_eq!(lines.len(), 5);
}

#[test]
fn a_dry_run_does_nothing() {
    let world = World::new(vec![actor(10)]);
    let (mut told, mut signaller, policy) = (Told::default(), world.clone(), policy());
    let reaper = Reaper {
        eyes: &world,
        signaller: &mut signaller,
        ledger: &mut told,
        people: &Workers,
        kinship: &Alone,
        devices: &[device(0)],
        policy: &policy,
        filter: &|_| None,
        scope: Scope::Process,
        fenced: false,
        memory: None,
        scene: scene(0),
    };
    let planned = reaper.plan(world.view().unwrap(), &Subjects::new());
    let report = reaper.dry_run(&planned);
    assert!(report.dry_run && report.outcome.is_none() && world.sent().is_empty());
    let text = text::plan(&report, "SIGTERM");
    assert!(text.starts_with("TERM           10  root") && text.ends_with("would be signalled\n"), "{text}");
    // With nobody to be seen, it says how much that is worth.
    let world = World::new(vec![]);
    world.proc_only();
    let reaper = Reaper { eyes: &world, signaller: &mut world.clone(), ledger: &mut Told::default(), ..reaper };
    let mut view = world.view().unwrap();
    view.notes.push("40 processes may not be read".to_owned());
    let text = text::plan(&reaper.dry_run(&reaper.plan(view, &Subjects::new())), "SIGTERM");
    let expected = [
        "nobody that was seen holds what was chosen",
        "incomplete: there may be holders that were not seen",
        "note: 40 processes may not be read",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn zero_grace_still_terms_first() {
    let (_, world) = reap(
        vec![Actor { on_term: React::Ignore, ..actor(10) }],
        Rungs { now: false, grace: Duration::ZERO, timeout: Duration::from_secs(1) },
    );
    assert_eq!(world.sent(), [(10, Term), (10, Kill)]);
}

fn last_line(report: &Report) -> String {
    text::report(report).lines().last().unwrap().to_owned()
}

#[test]
fn an_ordinary_user_reaps_what_is_theirs() {
    let user = Policy { privileged: false, ..policy() };
    let reap = |actors: Vec<Actor>, policy: &Policy| {
        let world = World::new(actors);
        world.proc_only();
        reap_with(&world, policy, &Subjects::new(), ladder_of(10, 100)).0
    };
    let report = reap(vec![actor(10)], &user);
    assert_eq!((report.outcome, report.exit_code, report.verified), (Some(Outcome::Freed), 0, false));
    assert!(last_line(&report).ends_with("1 process gone, as far as /proc shows to this caller"), "{report:?}");
    let report = reap(vec![], &user);
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::NothingToDo), Exit::NotPermitted as u8));
    assert!(last_line(&report).starts_with("nothing was done: nobody that was seen holds"), "{report:?}");
    // /proc hides no process from root.
    assert_eq!(reap(vec![], &policy()).exit_code, 0);
}

#[test]
fn what_the_source_cannot_see_is_part_of_the_proof() {
    use crate::model::How::{InFlight, IoUring};
    for (blind, actors, end) in [
        (&[][..], vec![actor(10)], "1 process gone, verified by a full sweep of the kernel"),
        (
            &[InFlight, IoUring][..],
            vec![actor(10)],
            "1 process gone, verified by a full sweep of the kernel (which cannot see in-flight, io_uring)",
        ),
        (&[InFlight][..], vec![], "verified by a full sweep of the kernel (which cannot see in-flight)"),
    ] {
        let world = World::new(actors);
        world.blind(blind);
        let (report, _) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
        assert!(report.verified && report.complete && report.exit_code == 0);
        assert_eq!(report.cannot_see, blind.iter().copied().collect());
        assert!(last_line(&report).ends_with(end), "{report:?}");
    }
}

#[test]
fn a_pid_that_is_no_holder_is_named() {
    let reap = |actors: Vec<Actor>, pids: &[u32], proc_only: bool| {
        let world = World::new(actors);
        if proc_only {
            world.proc_only();
        }
        let policy = Policy { pids: pids.iter().copied().collect(), privileged: false, ..policy() };
        reap_with(&world, &policy, &Subjects::new(), ladder_of(10, 100)).0
    };
    let unreadable = || Actor { slots: [].into(), unreadable: true, ..actor(11) };
    for (pids, proc_only, exit, line) in [
        (&[1_500][..], false, Exit::Done, "no process 1500"),
        (
            &[12][..],
            false,
            Exit::Done,
            "process 12 holds nothing of what was chosen, verified by a full sweep of the kernel",
        ),
        (
            &[12, 1_500][..],
            true,
            Exit::Done,
            "process 12 holds nothing of what was chosen, as far as /proc shows to this caller; no process 1500",
        ),
        (&[2_000][..], false, Exit::Done, "2000 is a thread of process 10; name the process"),
        (
            &[11][..],
            true,
            Exit::NotPermitted,
            "process 11: not permitted, what it holds is not visible to this caller; root may look",
        ),
    ] {
        let report = reap(vec![actor(10), unreadable()], pids, proc_only);
        assert_eq!((report.outcome, report.exit_code), (Some(Outcome::NothingToDo), exit as u8), "{pids:?}");
        assert_eq!(last_line(&report), line, "{pids:?}");
    }
    // Beside one that was reaped, it is a note.
    let report = reap(vec![actor(10), unreadable()], &[10, 11, 1_500], true);
    assert_eq!((report.outcome, report.exit_code, report.unmatched.len()), (Some(Outcome::Freed), 0, 2));
    let text = text::report(&report);
    assert!(text.contains("note: no process 1500\n") && text.contains("note: process 11: not permitted"), "{text}");
}

#[test]
fn those_with_a_handle_alone_are_named_and_left_alone() {
    let attached = Policy { slots: Some([0].into()), matching: Matching::Attached, ..policy() };
    let handle = |pid| Actor { mapped: false, ..actor(pid) };
    let reap = |actors: Vec<Actor>, policy: &Policy| {
        let world = World::new(actors);
        (reap_with(&world, policy, &Subjects::new(), ladder_of(10, 100)).0, world.sent())
    };
    let (report, sent) = reap(vec![handle(10), handle(11), actor(12), handle(20)], &attached);
    assert_eq!((report.outcome, report.exit_code, sent), (Some(Outcome::Freed), 0, vec![(12, Term)]));
    let skipped: Vec<_> = report.skipped.iter().map(|entry| (entry.identity.pid, entry.reason)).collect();
    assert_eq!(skipped, [10, 11, 20].map(|pid| (pid, Skip::HandleOnly)));
    let text = text::report(&report);
    let note = "3 processes have /dev/nvidia0 open without using it (pids 10-11, 20); `--match any` includes them";
    assert!(text.contains(&format!("note: {note}\n")) && !text.contains("skipped"), "{text}");
    let (report, sent) = reap(vec![handle(10)], &attached);
    assert_eq!((report.outcome, report.exit_code, sent), (Some(Outcome::NothingToDo), 0, vec![]));
    let text = text::report(&report);
    assert!(text.contains("note: process 10 has /dev/nvidia0 open without using it; `--match any` includes it\n"));
    assert!(text.ends_with("nothing to do: nobody uses what was chosen, verified by a full sweep of the kernel\n"));
    // Named by pid, it is told all the same; those that were not named are not.
    let named = Policy { pids: [10].into(), ..attached.clone() };
    let (report, _) = reap(vec![handle(10), handle(11)], &named);
    assert_eq!((report.skipped.len(), report.unmatched.len()), (1, 0));
    // Another device, and any handle.
    assert!(reap(vec![Actor { slots: [1].into(), ..handle(10) }], &attached).0.skipped.is_empty());
    let any = Policy { matching: Matching::Any, ..attached };
    assert_eq!(reap(vec![handle(10)], &any).1, [(10, Term)]);
}

#[test]
fn a_child_that_a_target_forks_meanwhile_is_reaped_in_the_next_round() {
    let world = World::new(vec![actor(10), Actor { after: Some(10), parent: 10, ..actor(20) }]);
    let (report, told) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Freed), 0));
    assert_eq!(world.sent(), [(10, Term), (20, Term)]);
    assert_eq!(told.0, [("SIGTERM".to_owned(), vec![10]), ("SIGTERM".to_owned(), vec![20])]);
    assert!(report.respawned.is_empty());
    // What the policy leaves alone is told as skipped and not as respawned.
    let monitor = Subject { class: Class::Monitor, class_rule: "exporter".to_owned(), ..Subject::default() };
    let world = World::new(vec![actor(10), Actor { after: Some(10), subject: monitor, ..actor(20) }]);
    let (report, _) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Protected), 5));
    assert_eq!((report.skipped[0].reason, report.respawned.len()), (Skip::Monitor, 0));
}

#[test]
fn behind_a_fence_whoever_slipped_in_is_reaped() {
    let world = World::new(vec![actor(10), Actor { after: Some(10), ..actor(20) }]);
    let with = With { fenced: true, ..With::default() };
    let (report, _) = reap_so(&world, &policy(), &Subjects::new(), ladder_of(10, 100), with);
    assert_eq!((report.outcome, world.sent()), (Some(Outcome::Freed), vec![(10, Term), (20, Term)]));
}

#[test]
fn a_job_that_forks_for_ever_ends_the_rounds() {
    let chain = (0..40).map(|n| Actor { after: (n > 0).then_some(9 + n), parent: 9 + n, ..actor(10 + n) });
    let world = World::new(chain.collect());
    let (report, _) = reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Held), 3));
    assert_eq!((world.sent().len(), report.respawned.len()), (8, 1));
}

#[test]
fn a_tree_takes_the_launcher_that_holds_nothing() {
    let nothing = |pid, parent| Actor { slots: [].into(), parent, ..actor(pid) };
    let system = Subject { class: Class::System, class_rule: "sshd".to_owned(), ..Subject::default() };
    let actors = || {
        vec![
            Actor { subject: system.clone(), ..nothing(5, 1) },
            nothing(6, 5),
            Actor { on_term: React::Ignore, ..nothing(7, 6) },
            Actor { parent: 7, ..actor(10) },
            Actor { left: true, ..nothing(8, 6) },
            nothing(9, 1),
        ]
    };
    let with = With { scope: Scope::Tree, ..With::default() };
    let world = World::new(actors());
    let (report, _) = reap_so(&world, &policy(), &Subjects::new(), ladder_of(10, 100), with);
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Freed), 0));
    let ends: Vec<_> =
        report.processes.iter().map(|entry| (entry.identity.pid, entry.via, entry.result.unwrap())).collect();
    let expected = [
        (10, Entry::Device, Ending::Exited),
        (6, Entry::Tree, Ending::Exited),
        (7, Entry::Tree, Ending::Exited),
        // Somebody else's by the time of the signal.
        (8, Entry::Tree, Ending::Released),
    ];
    assert_eq!(ends, expected);
    assert_eq!(world.sent(), [(10, Term), (6, Term), (7, Term), (7, Kill)]);
    let text = text::report(&report);
    assert!(text.contains("(process tree)"), "{text}");
    // A launcher that cannot be killed keeps no device.
    let mut actors = actors();
    actors[2].on_kill = React::Ignore;
    let (report, _) = reap_so(&World::new(actors), &policy(), &Subjects::new(), ladder_of(10, 100), with);
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Freed), 0));
    assert!(report.notes.iter().any(|note| note.starts_with("1 processes that went")), "{:?}", report.notes);
    // Without a scope only the holder goes.
    let world = World::new(vec![nothing(6, 1), Actor { parent: 6, ..actor(10) }]);
    reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100));
    assert_eq!(world.sent(), [(10, Term)]);
}

#[test]
fn a_cgroup_is_killed_in_one_step_where_everybody_in_it_is_a_target() {
    let member = |pid| Actor { in_cgroup: true, on_term: React::Ignore, ..actor(pid) };
    let with = With { scope: Scope::Cgroup, ..With::default() };
    let run = |actors: Vec<Actor>, kind: Kind, killable: bool| {
        let world = World::new(actors);
        world.cgroup(kind, killable);
        let (report, told) = reap_so(&world, &policy(), &Subjects::new(), ladder_of(10, 100), with);
        (report, told, world)
    };
    let idle = |pid| Actor { slots: [].into(), ..member(pid) };
    let (report, told, world) = run(vec![member(10), idle(11)], Kind::Any, true);
    assert_eq!((report.outcome, world.cgroups_killed()), (Some(Outcome::Freed), 1));
    assert_eq!(world.sent(), [(10, Term), (11, Term)]);
    assert_eq!(told.0[1], ("kill /cg/job".to_owned(), vec![10, 11]));
    assert_eq!(report.processes[1].signals.len(), 2, "TERM, and KILL by way of the cgroup");
    // Without cgroup.kill each gets its own.
    let (_, _, world) = run(vec![member(10), idle(11)], Kind::Any, false);
    assert_eq!(world.sent(), [(10, Term), (11, Term), (10, Kill), (11, Kill)]);
    // A container's keeper stays, so the cgroup is not killed as a whole.
    let system = Subject { class: Class::System, class_rule: "slurmstepd".to_owned(), ..Subject::default() };
    let keeper = Actor { subject: system, ..idle(12) };
    let (report, _, world) = run(vec![member(10), idle(11), keeper.clone()], Kind::Job, true);
    assert_eq!((world.cgroups_killed(), world.sent().len(), report.outcome), (0, 4, Some(Outcome::Freed)));
    assert_eq!((report.skipped.len(), report.skipped[0].identity.pid), (1, 12));
    // A daemon's own cgroup, or ours: the holder goes alone.
    for stranger in [keeper, Actor { key: crate::model::ProcKey::new(999, 1), ..idle(999) }] {
        let (report, _, world) = run(vec![member(10), idle(11), stranger], Kind::Any, true);
        assert_eq!(world.sent(), [(10, Term), (10, Kill)]);
        assert!(report.notes.iter().any(|note| note.contains("in cgroup /job go alone")), "{:?}", report.notes);
    }
    // No cgroup of its own.
    let world = World::new(vec![actor(10)]);
    let (report, _) = reap_so(&world, &policy(), &Subjects::new(), ladder_of(10, 100), with);
    assert!(report.notes.contains(&"process 10 goes alone: / is no job's cgroup".to_owned()), "{:?}", report.notes);
}

#[test]
fn the_unit_of_a_monitor_is_stopped() {
    let monitor = Subject { class: Class::Monitor, class_rule: "exporter".to_owned(), ..Subject::default() };
    let policy = Policy { stop_monitors: true, ..policy() };
    let run = |answer: Result<(), String>, on_stop: bool| {
        let watcher = Actor { subject: monitor.clone(), ..actor(10) };
        let world = World::new(vec![watcher.clone()]);
        world.unit("unit10.service", answer);
        let subjects: Subjects = [(watcher.key, monitor.clone())].into();
        let rungs = Rungs { now: on_stop, ..ladder_of(100, 200) };
        let (report, told) = reap_with(&world, &policy, &subjects, rungs);
        (report, told, world)
    };
    let (report, told, world) = run(Ok(()), false);
    assert_eq!((report.outcome, world.sent()), (Some(Outcome::Freed), vec![]));
    assert_eq!(told.0, [("stop unit10.service".to_owned(), vec![10])]);
    assert_eq!(report.processes[0].unit_stopped.as_deref(), Some("unit10.service"));
    assert_eq!((report.processes[0].result, report.processes[0].exited_ms), (Some(Ending::Exited), Some(30.0)));
    let text = text::report(&report);
    assert!(text.starts_with("STOP ") && text.contains("`systemctl start unit10.service`"), "{text}");
    // --now stops the unit first, so that nobody starts it again.
    let (_, told, world) = run(Ok(()), true);
    assert_eq!((told.0.len(), world.sent()), (2, vec![(10, Kill)]));
    // Where there is no systemd, the process is signalled.
    let (report, _, world) = run(Err("no bus".to_owned()), false);
    assert_eq!((world.sent(), report.processes[0].unit_stopped.clone()), (vec![(10, Term)], None));
    assert!(
        report.notes.iter().any(|note| note.ends_with("its processes were signalled: no bus")),
        "{:?}",
        report.notes
    );
}

#[test]
fn memory_of_one_that_does_not_finish_dying_is_taken_away() {
    let stuck = Actor { on_kill: React::Exit(5_000), ..actor(10) };
    let world = World::new(vec![stuck, actor(11)]);
    let (report, _) = reap_with(&world, &policy(), &Subjects::new(), Rungs { now: true, ..ladder_of(0, 60_000) });
    assert_eq!((report.outcome, world.released()), (Some(Outcome::Freed), vec![10]));
}

#[test]
fn memory_is_the_last_of_the_three_facts() {
    let used = MemoryState::StillUsed { mib: 683, by: Vec::new() };
    let facts = |state: MemoryState, free_ms: Option<u64>| MemoryFacts {
        slots: [(0, SlotMemory { state, free_ns: free_ms.map(|ms| 100_000 * MS + ms * MS) })].into(),
        trouble: None,
        modules: vec!["nvidia_uvm: 3 references".to_owned()],
    };
    let run = |actors: Vec<Actor>, facts: MemoryFacts| {
        let world = World::new(actors);
        let mut says = Says(facts, None);
        let (report, _) =
            reap_with_memory(&world, &policy(), &Subjects::new(), ladder_of(10, 100), With::default(), Some(&mut says));
        (report, says.1.unwrap())
    };
    let (report, staying) = run(vec![actor(10)], facts(MemoryState::Free, Some(12)));
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Freed), 0));
    assert_eq!((report.devices[0].closed_ms, report.devices[0].memory_free_ms), (Some(5.0), Some(12.0)));
    assert_eq!(report.devices[0].memory.as_ref().unwrap().state, MemoryWord::Free);
    assert!(staying.remaining.is_empty());
    // V3: nobody holds a file, whether somebody did before or not, and memory is used.
    for actors in [vec![actor(10)], vec![]] {
        let (report, _) = run(actors, facts(used.clone(), None));
        assert_eq!((report.outcome, report.exit_code), (Some(Outcome::KernelReference), 6));
        let memory = report.devices[0].memory.as_ref().unwrap();
        assert_eq!((memory.state, memory.used_mib), (MemoryWord::StillUsed, Some(683)));
        let text = text::report(&report);
        assert!(text.contains("note: module nvidia_uvm: 3 references\n"), "{text}");
        assert!(text.contains("/dev/nvidia0: 683 MiB are still used"), "{text}");
    }
    // A holder that is left explains it; its memory is not looked at as a fault.
    let own = Actor { key: crate::model::ProcKey::new(999, 1), ..actor(999) };
    let (report, staying) = run(vec![own], facts(used, None));
    assert_eq!((report.outcome, staying.remaining), (Some(Outcome::Held), [999].into()));
    // V4: no answer changes nothing but a note.
    let silent = MemoryFacts { trouble: Some("NVML did not answer within 2 s".to_owned()), ..MemoryFacts::default() };
    let (report, _) = run(vec![actor(10)], silent);
    assert_eq!((report.outcome, report.exit_code, report.verified), (Some(Outcome::Freed), 0, true));
    assert_eq!(report.notes, ["device memory is not confirmed: NVML did not answer within 2 s"]);
}

#[test]
fn many_of_a_kind_share_a_line() {
    let jobs = |actors: Vec<Actor>| text::report(&reap(actors, ladder_of(10, 100)).0);
    // The arguments of the world's processes tell their pids, so each is of its own kind.
    assert_eq!(jobs((10..20).map(actor).collect()).lines().count(), 11);
    let (mut report, _) = reap((10..136).map(actor).collect(), ladder_of(10, 100));
    for entry in &mut report.processes {
        entry.identity.argv = vec!["python3".to_owned(), "train.py".to_owned()];
    }
    report.processes[3].exited_ms = Some(90.0);
    let text = text::report(&report);
    let lines: Vec<&str> = text.lines().collect();
    let all =
        "TERM        126 ×  root        /dev/nvidia0  python3 train.py  killed by signal 15 after 5.0 ms to 90.0 ms";
    assert_eq!(lines[..2], [all, "          pids 10-135"]);
    assert_eq!(lines.len(), 3, "{text}");
    // One that ended otherwise stands out.
    report.processes[5].exit = Some(ExitStatus { code: Some(1), ..ExitStatus::default() });
    let text = text::report(&report);
    assert!(text.contains("125 ×") && text.contains("\n          pids 10-14, 16-135\n"), "{text}");
    assert!(text.lines().any(|line| line.starts_with("TERM           15") && line.contains("exited 1")), "{text}");
}

#[test]
fn what_was_done_is_told_when_nobody_can_look_any_more() {
    let run = |actors: Vec<Actor>| {
        let world = World::new(actors);
        world.sweeps_fail();
        reap_with(&world, &policy(), &Subjects::new(), ladder_of(10, 100)).0
    };
    let report = run(vec![actor(10), Actor { on_term: React::Refuse, ..actor(11) }]);
    assert_eq!((report.outcome, report.exit_code, report.verified), (Some(Outcome::Held), 3, false));
    let ends: Vec<_> = report.processes.iter().map(|entry| entry.result.unwrap()).collect();
    assert_eq!(ends, [Ending::Exited, Ending::NotPermitted]);
    let told = |note: &String| note.starts_with("the last look failed") && note.ends_with("no daemon listens any more");
    assert!(report.notes.iter().any(told), "{:?}", report.notes);
    // Nobody is left that is known of, which proves nothing.
    let report = run(vec![actor(10)]);
    assert_eq!((report.outcome, report.exit_code, report.verified), (Some(Outcome::Freed), 1, false));
}
