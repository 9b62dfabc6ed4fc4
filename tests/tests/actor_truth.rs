//! The actor is what the other tests believe, so what it says is compared with /proc, where /proc can see it.
use std::{collections::BTreeMap, time::Duration};

use gpureap_tests::harness::{Actor, Pid, Said, Scene, Truth, observe, settle, skip, sys, truth};

const DEV: &str = "/dev/zero";
const PATIENCE: Duration = Duration::from_secs(5);

fn differences(session: Pid, devices: &BTreeMap<String, Truth>) -> Option<String> {
    let wrong: Vec<String> = devices
        .iter()
        .filter_map(|(device, truth)| {
            let mut said = truth.procs.clone();
            said.retain(|_, counts| *counts != (0, 0));
            let seen = observe(session, device);
            (said != seen).then(|| format!("{device}: pid: (fds, maps) said {said:?}, /proc shows {seen:?}"))
        })
        .collect();
    (!wrong.is_empty()).then(|| wrong.join("; "))
}

/// Whether `files` can be right: every file is in a process or counted as hidden.
fn arithmetic(devices: &BTreeMap<String, Truth>) -> Option<String> {
    devices.iter().find_map(|(device, truth)| {
        let Truth { procs, files, in_flight, io_uring } = truth;
        let held: u32 = procs.values().map(|(fds, maps)| fds + maps).sum();
        let open = files.checked_sub(in_flight + io_uring);
        let possible = open.is_some_and(|open| open <= held && (open > 0) == (held > 0));
        (!possible).then(|| format!("{device}: {truth:?} cannot be"))
    })
}

#[test]
fn every_operation_says_what_proc_shows() {
    assert!(sys::is_root(), "looking at map_files needs root");
    let mut wrong = Vec::new();
    let mut steps = 0;
    let operations: Vec<&str> = gpureap_tests::actor::operations().map(|(_, name)| name).collect();
    assert!(operations.len() > 60, "the whole matrix: {operations:?}");
    for name in &operations {
        let mut actor = Actor::operation(name, DEV);
        loop {
            match actor.said() {
                Said::Step { step, devices } => {
                    steps += 1;
                    let outcome = settle(PATIENCE, || differences(actor.session(), &devices));
                    wrong.extend(outcome.err().or(arithmetic(&devices)).map(|text| format!("{name} {step}: {text}")));
                    actor.go();
                }
                Said::Skip(reason) => {
                    skip(name, &reason);
                    break;
                }
                Said::Done => break,
                other => panic!("{name}: {other:?}"),
            }
        }
    }
    eprintln!("{} operations, {steps} steps", operations.len());
    assert!(wrong.is_empty(), "{} of {steps} steps differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_scenario_says_what_proc_shows() {
    assert!(sys::is_root(), "looking at map_files needs root");
    let file = tempfile::tempdir().expect("a directory");
    let file = file.path().join("counts");
    let scenarios: &[(&str, &[&str])] = &[
        ("plain", &[]),
        ("alt-node", &[]),
        ("unlinked", &[]),
        ("map", &[]),
        ("private-table", &[]),
        ("in-flight", &[]),
        ("in-flight-dead", &[]),
        ("io-uring", &[]),
        ("zombie-leader", &[]),
        ("ghost", &[]),
        ("orphans", &["20", "3"]),
        ("subreaper", &[]),
        ("inherit-exec", &[]),
        ("cloexec-exec", &[]),
        ("passed", &["keep"]),
        ("passed", &["close"]),
        ("pidns", &[]),
        ("hostile-name", &[]),
        ("named", &["Xorg"]),
        ("many", &["70"]),
        ("three-nodes", &["/dev/full", "/dev/random"]),
        ("ignore-term", &[]),
        ("term-slow", &["100"]),
        ("respawn", &[]),
        ("tree", &["3"]),
        ("signal-count", &[file.to_str().expect("a path in UTF-8")]),
        ("quick-exit", &["60000"]),
    ];
    let mut wrong = Vec::new();
    for (kind, rest) in scenarios {
        match Scene::try_start(kind, DEV, rest) {
            Ok(scene) => {
                let outcome = settle(PATIENCE, || differences(scene.actor.session(), &scene.truth));
                wrong.extend(outcome.err().or(arithmetic(&scene.truth)).map(|text| format!("{kind}: {text}")));
            }
            Err(reason) => skip(kind, &reason),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn churn_says_what_proc_shows() {
    for seed in ["1", "2", "3"] {
        let mut scene = Scene::start("churn", DEV, &[seed, "200"]);
        for pause in 0..4 {
            let outcome = settle(PATIENCE, || differences(scene.actor.session(), &scene.truth));
            assert!(outcome.is_ok(), "seed {seed}, pause {pause}: {}", outcome.unwrap_err());
            assert_eq!(arithmetic(&scene.truth), None);
            scene.resume();
            scene.pause();
        }
    }
}

#[test]
fn a_signal_count_counts_what_it_got() {
    let place = tempfile::tempdir().expect("a directory");
    let file = place.path().join("counts");
    let scene = Scene::start("signal-count", DEV, &[file.to_str().expect("a path in UTF-8")]);
    sys::kill(scene.pid(), sys::SIGTERM);
    let outcome = settle(PATIENCE, || {
        let text = std::fs::read_to_string(&file).expect("the counts");
        (!text.contains("\"TERM\":1")).then_some(text)
    });
    assert_eq!(outcome, Ok(()));
}

#[test]
fn processes_end_when_their_standard_input_closes() {
    let scene = Scene::start("orphans", DEV, &["6", "2"]);
    let pids = scene.truth[&truth::key(sys::device_number(DEV).expect(DEV))].procs.clone();
    drop(scene);
    for pid in pids.keys() {
        let outcome = settle(PATIENCE, || observe_any(*pid).then_some(*pid));
        assert_eq!(outcome, Ok(()), "an orphan lives on");
    }
}

fn observe_any(pid: Pid) -> bool {
    std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|mut fds| fds.next().is_some())
}
