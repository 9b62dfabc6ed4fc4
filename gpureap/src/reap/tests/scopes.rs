//! Who goes along: children forked meanwhile, trees, cgroups, units.

use super::{
    Subjects, ladder_of, policy,
    scripted::{With, reap_so, reap_with},
    world::{Actor, React, World, actor},
};
use crate::{
    process::cgroup::Kind,
    reap::{
        ladder::Rungs,
        plan::{Class, Policy, Skip, Subject},
        report::{Ending, Entry, Outcome},
        scope::Scope,
        signaller::Signal::{Kill, Term},
        text,
    },
};

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
