//! The kernel's rules, case by case.
use super::*;
use crate::oracle::step;

/// Plays a sequence; what each process holds in the end as `t0 d0 2 fds 1 maps`, and `d0 3 files 1 hidden`.
fn outcome(text: &str) -> Vec<String> {
    let mut model = Model::default();
    for step in step::read(text).expect("a sequence") {
        model.apply(&step).unwrap_or_else(|illegal| panic!("{step}: {}", illegal.0));
    }
    let Expected { processes, files } = model.expected();
    let mut lines = Vec::new();
    for (task, Held { devices, leaderless, private }) in processes {
        let ended = if leaderless { " leaderless" } else { "" };
        let private: Vec<String> = private.iter().map(|users| format!(" private {}", users.len())).collect();
        let private = private.concat();
        for (dev, (fds, maps)) in devices {
            lines.push(format!("{task} {dev} {fds} fds {maps} maps{ended}{private}"));
        }
    }
    let text = |(dev, Files { seen, hidden, descriptors: _ })| format!("{dev} {seen} files {hidden} hidden");
    lines.extend(files.into_iter().map(text));
    lines
}

#[test]
fn the_kernels_rules_are_kept() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("an open", "t0 open d1 3", &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"]),
        ("a node that is only named", "t0 open-path d1 3", &[]),
        ("a copy", "t0 open d1 3\nt0 fcntl 3 9", &["t0 d1 2 fds 0 maps", "d1 1 files 0 hidden"]),
        (
            "a copy over another",
            "t0 open d1 3\nt0 open d2 4\nt0 dup2 3 4",
            &["t0 d1 2 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        ("a copy onto itself", "t0 open d1 3\nt0 dup2 3 3", &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"]),
        (
            "a range",
            "t0 open d1 3\nt0 open d1 5\nt0 open d1 9\nt0 close-range 3 8 close",
            &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        ("a fork", "t0 open d1 3 cloexec\nt0 fork t1\nt0 close 3", &["t1 d1 1 fds 0 maps", "d1 1 files 0 hidden"]),
        ("an exec", "t0 open d1 3 cloexec\nt0 open d2 4\nt0 exec", &["t0 d2 1 fds 0 maps", "d2 1 files 0 hidden"]),
        (
            "a vfork",
            "t0 open d1 3 cloexec\nt0 open d2 4\nt0 vfork t1\nkill t0",
            &["t1 d2 1 fds 0 maps", "d2 1 files 0 hidden"],
        ),
        (
            "a shared table",
            "t0 share t1\nt1 open d1 3\nt0 dup2 3 4",
            &["t0 d1 2 fds 0 maps", "t1 d1 2 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        (
            "an exec out of a shared table",
            "t0 open d1 3 cloexec\nt0 share t1\nt1 exec",
            &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        (
            "a range in a table of its own",
            "t0 open d1 3\nt0 share t1\nt1 close-range 3 9 unshare",
            &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        ("a thread", "t0 thread t1\nt1 open d1 3", &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"]),
        (
            "a thread's own table",
            "t0 open d1 3\nt0 thread t1\nt1 unshare\nt1 open d1 4",
            &["t0 d1 3 fds 0 maps private 1", "d1 2 files 0 hidden"],
        ),
        (
            "the main thread's own table",
            "t0 open d1 3\nt0 thread t1\nt0 unshare\nt0 close 3",
            &["t0 d1 1 fds 0 maps private 1", "d1 1 files 0 hidden"],
        ),
        (
            "the end of the main thread",
            "t0 open d1 3\nt0 thread t1\nt0 exit-thread",
            &["t0 d1 1 fds 0 maps leaderless", "d1 1 files 0 hidden"],
        ),
        (
            "an exec after it",
            "t0 open d1 3\nt0 thread t1\nt0 exit-thread\nt1 exec",
            &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        ("an exec ends the other threads", "t0 thread t1\nt0 thread t2\nt2 unshare\nt2 open d1 3\nt1 exec", &[]),
        ("the end of the last thread", "t0 open d1 3\nt0 exit-thread", &[]),
        ("the end of all threads", "t0 open d1 3\nt0 thread t1\nt1 exit", &[]),
        ("in flight", "t0 open d1 3\nt0 mailbox 4\nt0 send 3 4\nt0 close 3", &["d1 0 files 1 hidden"]),
        (
            "received",
            "t0 open d1 3\nt0 mailbox 4\nt0 send 3 4\nt0 close 3\nt0 receive 4 9",
            &["t0 d1 1 fds 0 maps", "d1 1 files 0 hidden"],
        ),
        ("read past", "t0 open d1 3\nt0 mailbox 4\nt0 send 3 4\nt0 close 3\nt0 discard 4", &[]),
        ("the end of the socket", "t0 open d1 3\nt0 mailbox 4\nt0 send 3 4\nt0 close-range 3 4 close", &[]),
        (
            "in flight after the sender's end",
            "t0 open d1 3\nt0 mailbox 4\nt0 fork t1\nt0 send 3 4\nkill t0\nt1 close 3",
            &["d1 0 files 1 hidden"],
        ),
        ("taken", "t0 open d1 3\nbegin t1\nt1 take t0 3 7\nkill t0", &["t1 d1 1 fds 0 maps", "d1 1 files 0 hidden"]),
        (
            "mapped",
            "t0 open d0 3\nt0 map a0 3 3\nt0 punch a0\nt0 close 3",
            &["t0 d0 0 fds 2 maps", "d0 1 files 0 hidden"],
        ),
        (
            "mapped in a copy",
            "t0 open d0 3\nt0 map a0 3 1\nt0 fork t1\nt0 unmap a0\nt1 close 3\nt0 close 3",
            &["t1 d0 0 fds 1 maps", "d0 1 files 0 hidden"],
        ),
        ("an exec unmaps", "t0 open d0 3 cloexec\nt0 map a0 3 1\nt0 exec", &[]),
        (
            "in a ring",
            "t0 ring r0 3\nt0 ring-open-direct r0 3 d1 0\nt0 ring-open-direct r0 3 d1 1",
            &["d1 0 files 2 hidden"],
        ),
        (
            "a ring lives by its mapped queues",
            "t0 ring r0 3\nt0 ring-open-direct r0 3 d1 0\nt0 close 3",
            &["d1 0 files 1 hidden"],
        ),
        ("the end of a ring", "t0 ring r0 3\nt0 ring-open-direct r0 3 d1 0\nt0 cloexec 3 on\nt0 exec", &[]),
        (
            "together",
            "t0 fork t1\ntogether\nt0 open d1 200\nt1 open d1 216\nt1 fork t2\nkill t0\nend",
            &["t1 d1 1 fds 0 maps", "t2 d1 1 fds 0 maps", "d1 1 files 0 hidden"],
        ),
    ];
    for (case, text, expected) in cases {
        assert_eq!(outcome(&format!("begin t0\n{text}")), *expected, "{case}");
    }
}

#[test]
fn a_shared_table_is_one() {
    let mut model = Model::default();
    for step in step::read("begin t0\nt0 open d1 3\nt0 share t1\nt0 fork t2\nt2 open d1 4").expect("a sequence") {
        model.apply(&step).expect("a legal step");
    }
    let files = model.expected().files[&Dev(1)];
    assert_eq!(files, Files { seen: 2, hidden: 0, descriptors: 3 });
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let cases = [
        ("", "t0 close 3"),
        ("t0 open d0 3", "t0 open d0 3"),
        ("t0 open d0 3", "t0 fcntl 3 3"),
        ("t0 open d0 3", "t0 dup3 3 3"),
        ("", "t1 open d0 3"),
        ("kill t0", "kill t0"),
        ("t0 fork t1", "t0 fork t1"),
        ("t0 open d1 3", "t0 map a0 3 1"),
        ("t0 open d0 3\nt0 map a0 3 1", "t0 punch a0"),
        ("t0 mailbox 3", "t0 receive 3 4"),
        ("t0 open d0 3\nt0 thread t1\nt0 exit-thread\nbegin t2", "t2 take t0 3 3"),
        ("t0 ring r0 3\nt0 exec", "t0 ring-open r0 3 d0 4"),
        ("t0 fork t1", "together\nt0 open d0 3\nt1 open d0 216\nend"),
        ("t0 share t24", "together\nt0 open d0 200\nt24 open d0 201\nend"),
        ("t0 share t1", "together\nt0 fork t2\nt1 open d0 216\nend"),
        ("t0 share t1", "together\nt0 open d0 200\nkill t0\nend"),
        ("", "together\nt0 exit\nt0 open d0 200\nend"),
    ];
    for (before, refused) in cases {
        let mut model = Model::default();
        for step in step::read(&format!("begin t0\n{before}")).expect("a sequence") {
            model.apply(&step).unwrap_or_else(|illegal| panic!("{step}: {}", illegal.0));
        }
        let unchanged = model.clone();
        let step = step::read(refused).expect("a step").remove(0);
        assert!(model.apply(&step).is_err(), "{refused}");
        assert_eq!(model, unchanged, "{refused}");
    }
}
