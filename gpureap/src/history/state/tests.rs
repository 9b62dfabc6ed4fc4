use jiff::Timestamp;

use super::*;
use crate::history::{event::Ended, rows::Cause};

fn key(pid: u32) -> Key {
    Key { pid, start_ns: u64::from(pid) * 10 }
}

fn at(seconds: u64, what: What) -> Event {
    Event { time: Timestamp::UNIX_EPOCH, boot_ns: seconds * NANOS, what }
}

fn open(pid: u32, node: &str, file: u64) -> What {
    let comm = "python3".to_owned();
    What::Open(FileEvent { key: Some(key(pid)), tid: Some(pid), comm, node: node.to_owned(), file, failed: false })
}

fn device(node: &str, fds: u32) -> HeldDevice {
    HeldDevice { node: node.to_owned(), fds, maps: 0, role: None, first_ns: None }
}

fn held(pid: u32, devices: &[(&str, u32)]) -> What {
    let devices = devices.iter().map(|(node, fds)| device(node, *fds)).collect();
    What::Held(Held { key: key(pid), inherited_from: None, from_snapshot: false, devices })
}

fn exit(pid: u32, status: u32) -> What {
    What::Exit(Exit { key: key(pid), tid: pid, comm: "python3".to_owned(), status })
}

fn closed(pid: u32) -> What {
    What::Closed(super::super::event::Subject { key: key(pid) })
}

/// The rows that are left in the end.
#[derive(Debug, Default, PartialEq)]
struct Kept {
    processes: BTreeMap<Key, ProcessRow>,
    holds: BTreeMap<(Key, String, u64), HoldRow>,
}

fn keep(kept: &mut Kept, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Process(row) => drop(kept.processes.insert(row.key, *row)),
            Change::Hold(row) => {
                assert!(kept.processes.contains_key(&row.key), "the process comes before what it holds: {row:?}");
                kept.holds.insert((row.key, row.node.clone(), row.opened_ns), row);
            }
            _ => {}
        }
    }
}

fn run(events: &[Event]) -> Kept {
    let (mut state, mut kept) = (State::default(), Kept::default());
    for event in events {
        keep(&mut kept, state.apply(event));
    }
    kept
}

#[test]
fn a_hold_from_open_to_exit() {
    let kept = run(&[
        at(1, open(7, "/dev/nvidia0", 1)),
        at(2, held(7, &[("/dev/nvidia0", 3)])),
        at(3, held(7, &[("/dev/nvidia0", 5)])),
        at(4, exit(7, 3 << 8)),
        at(5, closed(7)),
    ]);
    let hold = &kept.holds[&(key(7), "/dev/nvidia0".to_owned(), NANOS)];
    assert_eq!((hold.released_ns, hold.ended), (Some(5 * NANOS), Some(HoldEnd::Exited)));
    assert_eq!((hold.fds, hold.origin), (5, HoldOrigin::Opened));
    let process = &kept.processes[&key(7)];
    assert_eq!((process.exit_ns, process.death.as_ref().unwrap().cause), (Some(4 * NANOS), Cause::Exited));
}

#[test]
fn a_close_while_the_process_lives_has_its_own_time() {
    let close = |pid| match open(pid, "/dev/nvidia0", 1) {
        What::Open(event) => What::Close(event),
        other => other,
    };
    let kept = run(&[
        at(1, open(7, "/dev/nvidia0", 1)),
        at(2, held(7, &[("/dev/nvidia0", 3)])),
        at(3, close(7)),
        at(4, held(7, &[])),
        at(5, open(7, "/dev/nvidia0", 2)),
        at(6, held(7, &[("/dev/nvidia0", 1)])),
    ]);
    let first = &kept.holds[&(key(7), "/dev/nvidia0".to_owned(), NANOS)];
    assert_eq!((first.released_ns, first.ended), (Some(3 * NANOS), Some(HoldEnd::Closed)));
    assert_eq!(kept.holds[&(key(7), "/dev/nvidia0".to_owned(), 5 * NANOS)].released_ns, None);
}

#[test]
fn too_short_to_be_looked_at() {
    // With the gate an open that fails looks the same.
    let kept = run(&[at(1, open(7, "/dev/nvidia0", 0)), at(2, exit(7, 0)), at(3, closed(7))]);
    assert_eq!(kept.holds.values().next().unwrap().origin, HoldOrigin::Unconfirmed);
    let kept = run(&[at(1, open(7, "/dev/nvidia0", 5)), at(2, exit(7, 0)), at(3, closed(7))]);
    assert_eq!(kept.holds.values().next().unwrap().origin, HoldOrigin::Opened);
    // One that failed is no hold, and its process no holder.
    let failed = What::Free(FileEvent {
        key: Some(key(7)),
        tid: None,
        comm: String::new(),
        node: "/dev/nvidia0".to_owned(),
        file: 5,
        failed: true,
    });
    let kept = run(&[at(1, open(7, "/dev/nvidia0", 5)), at(1, failed), at(2, exit(7, 0))]);
    assert_eq!(kept, Kept::default());
}

#[test]
fn a_child_holds_what_a_look_finds_and_nothing_else() {
    let fork = |child| What::Fork(Fork { key: key(child), parent: key(7), comm: "python3".to_owned() });
    let inherited = What::Held(Held {
        key: key(8),
        inherited_from: Some(key(7)),
        from_snapshot: false,
        devices: vec![device("/dev/nvidia0", 1)],
    });
    let kept = run(&[
        at(1, open(7, "/dev/nvidia0", 1)),
        at(2, held(7, &[("/dev/nvidia0", 1)])),
        at(3, fork(8)),
        at(3, fork(9)),
        at(4, inherited),
        at(5, exit(9, 0)),
        at(6, exit(7, 9)),
        at(7, closed(7)),
    ]);
    assert!(!kept.processes.contains_key(&key(9)), "it held nothing");
    let child = &kept.holds[&(key(8), "/dev/nvidia0".to_owned(), 4 * NANOS)];
    assert_eq!((child.origin, child.inherited_from, child.released_ns), (HoldOrigin::Inherited, Some(key(7)), None));
    assert_eq!(kept.processes[&key(8)].parent, Some(key(7)));
}

#[test]
fn a_look_that_comes_late_reopens_nothing() {
    let kept = run(&[
        at(1, open(7, "/dev/nvidia0", 1)),
        at(2, held(7, &[("/dev/nvidia0", 1)])),
        at(3, exit(7, 9)),
        at(4, closed(7)),
        at(4, held(7, &[("/dev/nvidia0", 1)])),
    ]);
    assert_eq!(kept.holds.len(), 1);
    assert_eq!(kept.holds.values().next().unwrap().released_ns, Some(4 * NANOS));
}

fn signal(pid: u32, tid: u32, name: &str) -> What {
    let (thread, signal) = ("python3".to_owned(), name.to_owned());
    What::Signal(Signal { key: key(pid), tid, thread, signal, code: None, sender: None, running: None })
}

fn oom(key: Option<Key>, tid: u32, source: &str) -> What {
    let source = source.to_owned();
    What::Oom(Oom { key, tid, comm: "python3".to_owned(), scope: None, cgroup: None, source })
}

#[test]
fn evidence_may_come_in_any_order_around_the_death() {
    let begin = [at(1, open(7, "/dev/nvidia0", 1)), at(2, held(7, &[("/dev/nvidia0", 1)]))];
    let cases: [Vec<Event>; 4] = [
        vec![at(3, signal(7, 71, "SIGKILL")), at(3, oom(Some(key(7)), 71, "tracepoint")), at(3, exit(7, 9))],
        // A kernel that tells the thread alone, before and after the signal that says whose it is.
        vec![at(3, oom(None, 71, "tracepoint")), at(3, signal(7, 71, "SIGKILL")), at(3, exit(7, 9))],
        vec![at(3, signal(7, 71, "SIGKILL")), at(3, oom(None, 71, "tracepoint")), at(3, exit(7, 9))],
        // The kernel's log is read later than the ring.
        vec![at(3, signal(7, 71, "SIGKILL")), at(3, exit(7, 9)), at(4, closed(7)), at(4, oom(None, 7, "kmsg"))],
    ];
    for case in cases {
        let kept = run(&[begin.to_vec(), case.clone()].concat());
        assert_eq!(kept.processes[&key(7)].death.as_ref().unwrap().cause, Cause::OomKill, "{case:?}");
    }
}

#[test]
fn threads_are_listed_with_their_last_names() {
    let thread =
        |tid, name: &str| What::Thread(ThreadEvent { key: key(7), thread: Thread { tid, name: name.to_owned() } });
    let kept = run(&[
        at(1, open(7, "/dev/nvidia0", 1)),
        at(2, thread(71, "python3")),
        at(2, thread(71, "pt_autograd_0")),
        at(2, thread(72, "cuda-EvtHandlr")),
        at(3, held(7, &[("/dev/nvidia0", 1)])),
        at(4, exit(7, 0)),
    ]);
    let names: Vec<&str> = kept.processes[&key(7)].threads.iter().map(|thread| thread.name.as_str()).collect();
    assert_eq!(names, ["pt_autograd_0", "cuda-EvtHandlr"]);
}

#[test]
fn processes_in_any_order_give_the_same_rows() {
    let life = |pid: u32| {
        vec![
            at(1, open(pid, "/dev/nvidia0", u64::from(pid))),
            at(2, held(pid, &[("/dev/nvidia0", 1)])),
            at(3, signal(pid, pid, "SIGTERM")),
            at(4, exit(pid, 15)),
            at(5, closed(pid)),
        ]
    };
    let lives: Vec<Vec<Event>> = (1..=4).map(life).collect();
    let one_after_the_other = run(&lives.concat());
    // Every way to take them in turns, by a seeded walk.
    for seed in 0..200_u64 {
        let mut queues: Vec<VecDeque<Event>> = lives.iter().cloned().map(Into::into).collect();
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut mixed = Vec::new();
        while queues.iter().any(|queue| !queue.is_empty()) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) as usize % queues.len();
            mixed.extend(queues[at].pop_front());
        }
        assert_eq!(run(&mixed), one_after_the_other, "seed {seed}");
    }
}

#[test]
fn a_restart_goes_on_where_the_other_stopped() {
    let events = [
        at(1, open(7, "/dev/nvidia0", 1)),
        at(2, held(7, &[("/dev/nvidia0", 3)])),
        at(4, exit(7, 9)),
        at(5, closed(7)),
    ];
    let whole = run(&events);
    let (mut state, mut kept) = (State::default(), Kept::default());
    for event in &events[..2] {
        keep(&mut kept, state.apply(event));
    }
    let mut resumed = State::resume(
        kept.processes.values().cloned().collect(),
        kept.holds.values().filter(|hold| hold.released_ns.is_none()).cloned().collect(),
    );
    // The same hold is found again, and is not another one.
    keep(&mut kept, resumed.apply(&at(3, held(7, &[("/dev/nvidia0", 3)]))));
    for event in &events[2..] {
        keep(&mut kept, resumed.apply(event));
    }
    assert_eq!(kept.holds, whole.holds);
}

#[test]
fn it_forgets_what_is_over() {
    let mut state = State::default();
    for pid in 1..=1_000 {
        let second = u64::from(pid) * 2;
        state.apply(&at(second, open(pid, "/dev/nvidia0", 1)));
        state.apply(&at(second, held(pid, &[("/dev/nvidia0", 1)])));
        state.apply(&at(second + 1, exit(pid, 0)));
        state.apply(&at(second + 1, closed(pid)));
        assert!(state.live.len() <= CLOSED + 1, "{} lives", state.live.len());
    }
    // Those of whom all is known go as soon as no evidence can come any more.
    let process = |pid| What::Process(Box::new(Process { key: key(pid), ..Process::default() }));
    for pid in 1..=1_000 {
        state.apply(&at(4_000, process(pid)));
    }
    state.apply(&at(4_000, What::Stop));
    assert_eq!(state.live.len(), 0);
    // One that opened something for a moment is no holder for ever.
    state.apply(&at(5_000, open(9_000, "/dev/nvidia0", 1)));
    state.apply(&at(5_001, held(9_000, &[])));
    assert!(!state.live.contains_key(&key(9_000)));
}

/// Whoever begins to read in the middle can tell the same story from there on.
#[test]
fn a_reader_who_comes_late_learns_what_is_held_and_by_whose_child() {
    let process = |pid: u32, ancestor: bool| {
        let parent = (pid == 7).then(|| key(5));
        What::Process(Box::new(Process {
            key: key(pid),
            comm: format!("p{pid}"),
            parent,
            ancestor,
            ..Process::default()
        }))
    };
    let mut state = State::default();
    for event in
        [at(1, open(7, "a", 3)), at(2, held(7, &[("a", 2)])), at(3, process(7, false)), at(3, process(5, true))]
    {
        state.apply(&event);
    }
    let mut late = State::default();
    let mut kept = Kept::default();
    for (when, what) in state.preamble() {
        let event = Event { time: Timestamp::UNIX_EPOCH, boot_ns: when.unwrap_or(9 * NANOS), what };
        keep(&mut kept, late.apply(&event));
    }
    let hold = &kept.holds.values().next().expect("a hold");
    assert_eq!((hold.origin, hold.opened_ns, hold.fds), (HoldOrigin::Opened, NANOS, 2));
    assert_eq!(kept.processes[&key(7)].parent, Some(key(5)));
    assert!(kept.processes[&key(5)].ancestor);

    // The end of an ancestor is told once.
    let [ancestor] = &late.living_ancestors(key(7))[..] else { panic!("one ancestor") };
    let ended = Process { exit: Some(Ended { boot_ns: 10 * NANOS, status: 256 }), ..ancestor.clone() };
    keep(&mut kept, late.apply(&at(11, What::Process(Box::new(ended)))));
    assert_eq!((late.living_ancestors(key(7)), kept.processes[&key(5)].status), (Vec::new(), Some(256)));
}

#[test]
fn whoever_holds_long_after_a_kill_cannot_be_killed() {
    const PATIENCE: u64 = 10 * NANOS;
    let mut state = State::default();
    for pid in [7, 8, 9] {
        state.apply(&at(1, open(pid, "/dev/nvidia0", u64::from(pid))));
        state.apply(&at(1, held(pid, &[("/dev/nvidia0", 1)])));
    }
    state.apply(&at(20, signal(7, 7, "SIGKILL")));
    state.apply(&at(20, signal(8, 8, "SIGTERM")));
    assert_eq!(state.unkillable(29 * NANOS, PATIENCE), 0);
    assert_eq!(state.unkillable(30 * NANOS, PATIENCE), 1);
    // Its tables are gone, and the driver has not released what was in them.
    state.apply(&at(31, exit(7, 9)));
    assert_eq!(state.unkillable(40 * NANOS, PATIENCE), 1);
    state.apply(&at(41, closed(7)));
    assert_eq!(state.unkillable(41 * NANOS, PATIENCE), 0);
    // One that was killed and has let go holds nothing.
    state.apply(&at(42, signal(9, 9, "SIGKILL")));
    state.apply(&at(43, held(9, &[])));
    assert_eq!(state.unkillable(60 * NANOS, PATIENCE), 0);
}
