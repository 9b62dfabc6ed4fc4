//! What the report and its text say.

use super::{
    Alone, Subjects, Workers, device, ladder_of, policy, scene,
    scripted::{Says, With, reap, reap_with, reap_with_memory},
    world::{Actor, MS, React, Told, World, actor},
};
use crate::{
    exit_code::Exit,
    gpu::nvml::{memory::MemoryState, proof::GpuMemory},
    holders::report::ExitReport,
    model::Eyes as _,
    reap::{
        memory::{MemoryFacts, MemoryWord},
        plan::{Matching, Policy, Skip},
        reaper::Reaper,
        report::{Ending, Outcome, Report},
        scope::Scope,
        signaller::Signal::Term,
        text,
    },
};

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
        r"TERM+KILL      10  root        /dev/nvidia0  worker '\x1b[31m--rank=10'  killed by SIGKILL after 1.00 s"
    );
    assert_eq!(
        lines[1],
        r"TERM           11  root        /dev/nvidia0  worker '\x1b[31m--rank=11'  killed by SIGTERM after 5.0 ms"
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
fn whom_the_filters_cannot_judge_is_not_told_to_be_free() {
    for (chosen, exit, outcome) in
        [(&[][..], Exit::NotPermitted, Outcome::NothingToDo), (&[10][..], Exit::Done, Outcome::Freed)]
    {
        let world = World::new(vec![actor(10), actor(11)]);
        let key = |pid: u32| world.view().unwrap().holders.iter().find(|holder| holder.key.tgid == pid).unwrap().key;
        let chosen = chosen.iter().map(|pid| key(*pid)).collect();
        let policy = Policy { chosen: Some(chosen), undecided: [key(11)].into(), ..policy() };
        let (report, _) = reap_with(&world, &policy, &Subjects::new(), ladder_of(10, 100));
        assert_eq!((report.outcome, report.exit_code), (Some(outcome), exit as u8), "{report:?}");
        assert!(!report.verified && report.notes.iter().any(|note| note.contains("could not be judged")), "{report:?}");
    }
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
fn memory_is_the_last_of_the_three_facts() {
    let used = MemoryState::StillUsed { mib: 683, by: Vec::new() };
    let facts = |state: MemoryState, free_ms: Option<u64>| MemoryFacts {
        slots: [(0, GpuMemory { state, free_ns: free_ms.map(|ms| 100_000 * MS + ms * MS) })].into(),
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
    let (report, remaining) = run(vec![actor(10)], facts(MemoryState::Free, Some(12)));
    assert_eq!((report.outcome, report.exit_code), (Some(Outcome::Freed), 0));
    assert_eq!((report.devices[0].closed_ms, report.devices[0].memory_free_ms), (Some(5.0), Some(12.0)));
    assert_eq!(report.devices[0].memory.as_ref().unwrap().state, MemoryWord::Free);
    assert!(remaining.is_empty());
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
    let (report, remaining) = run(vec![own], facts(used, None));
    assert_eq!((report.outcome, remaining), (Some(Outcome::Held), [999].into()));
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
        "TERM        126 ×  root        /dev/nvidia0  python3 train.py  killed by SIGTERM after 5.0 ms to 90.0 ms";
    assert_eq!(lines[..2], [all, "          pids 10-135"]);
    assert_eq!(lines.len(), 3, "{text}");
    // One that ended otherwise stands out.
    report.processes[5].exit = Some(ExitReport { code: Some(1), ..ExitReport::default() });
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
