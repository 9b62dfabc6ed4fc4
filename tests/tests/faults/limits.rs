//! Limits of the process itself: too few descriptors.
use std::{collections::BTreeSet, os::unix::process::CommandExt as _, process::Command};

use gpureap_tests::harness::{Bench, Device, Pid, Scene, finish, note, sys, wait_for};

/// Opened by next to nobody, so that every holder of it may be killed.
const DEV: &str = "/dev/full";
const UNSUPPORTED: i32 = 8;
const HELD: i32 = 3;
const SAID: &str = "too few descriptors: this process may have ";
const REMEDY: &str = "raise the limit (ulimit -n, or LimitNOFILE= of the unit)";

/// With at most so many descriptors.
fn limited(mut command: Command, files: u64) -> Command {
    let limit = move || {
        sys::limit(libc::RLIMIT_NOFILE, files);
        Ok(())
    };
    // SAFETY: between fork and exec this only makes a system call.
    unsafe { command.pre_exec(limit) };
    command
}

fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    bench.is_free(test).then_some(bench)
}

/// Those of them that hold the device.
fn holding(bench: &Bench, pids: &BTreeSet<Pid>) -> BTreeSet<Pid> {
    let seen = bench.holders(&["--source", "snapshot"]);
    pids.iter().copied().filter(|pid| seen.holder(*pid).is_some()).collect()
}

#[test]
fn with_too_few_descriptors_one_sentence_says_so() {
    let Some(bench) = bench("too few descriptors") else { return };
    for files in [8, 32] {
        for arguments in [&["daemon"][..], &["holders", "--source", "snapshot"], &["reap", "--yes"]] {
            let output = finish(limited(bench.command(arguments), files)).expect_code(UNSUPPORTED);
            let complaint = output.complaint();
            assert!(complaint.contains(&format!("{SAID}{files} files open")), "{output:#?}");
            assert!(complaint.contains(REMEDY), "{output:#?}");
        }
    }
    assert!(bench.sets().is_empty(), "nothing half made is left");
}

#[test]
fn a_daemon_that_gets_no_more_descriptors_goes_on() {
    let Some(bench) = bench("limited daemon") else { return };
    // What the recorder missed altogether it finds by its periodic look.
    bench.configure("sweep_period", "\"2s\"");
    let mut daemon = bench.daemon();
    let scene = Scene::start("orphans", DEV, &["60", "3"]);
    bench.expect_truth(&scene, &[]);
    // Below what it has open: not even what it closes meanwhile gives it room.
    sys::soft_limit_files_of(daemon.pid(), 3);
    let more = Scene::start("orphans", DEV, &["30", "2"]);
    let scenes = [scene, more];
    let seen = bench.expect_truths(&scenes, &[]);
    assert_eq!((seen.source.as_str(), seen.complete), ("map", true));
    bench.expect_truths(&scenes, &["--source", "snapshot"]);
    wait_for("the daemon says it", || daemon.log().contains("the recorder cannot look, and tries again: "));
    // With room again the record has all of them, and their ends.
    sys::soft_limit_files_of(daemon.pid(), 4096);
    let count = |released: bool| {
        let report = bench.run(&["report", "--json"]).expect_code(0).json();
        let holds = report["holds"].as_array().expect("holds");
        holds.iter().filter(|hold| hold["role"].is_string() && hold["released"].is_string() == released).count()
    };
    wait_for("all who hold are recorded", || count(false) == 90);
    drop(scenes);
    wait_for("nobody is left", || bench.holders(&[]).json["holders"].as_array().is_some_and(Vec::is_empty));
    wait_for("all ends are recorded", || count(false) == 0 && count(true) >= 90);
    assert!(daemon.runs());
}

#[test]
fn a_reap_with_few_descriptors_tells_whom_it_could_not_take() {
    let Some(bench) = bench("limited reap") else { return };
    let _daemon = bench.daemon();
    let scene = Scene::start("orphans", DEV, &["120", "3"]);
    bench.expect_truth(&scene, &[]);
    let output = finish(limited(bench.command(&["reap", "--now", "--yes", "--json"]), 112)).expect_code(HELD);
    let report = output.json();
    let (mut killed, mut left) = (BTreeSet::new(), BTreeSet::new());
    for process in report["processes"].as_array().expect("processes") {
        let pid = process["pid"].as_i64().expect("a pid") as Pid;
        match process["result"].as_str() {
            Some("exited") => drop(killed.insert(pid)),
            Some("failed") => {
                let reason = process["reason"].as_str().expect("a reason");
                assert!(reason.contains(SAID) && reason.contains(REMEDY), "{reason}");
                assert_eq!(process["signals"].as_array().map(Vec::len), Some(0), "nothing was sent: {process:#}");
                left.insert(pid);
            }
            _ => panic!("{process:#}"),
        }
    }
    note(&format!("{} killed, {} left", killed.len(), left.len()));
    assert!(!killed.is_empty() && !left.is_empty() && killed.len() + left.len() == 120, "{report:#}");
    assert_eq!((holding(&bench, &killed), holding(&bench, &left)), (BTreeSet::new(), left), "as it was told");
    // With enough of them the rest goes too.
    let report = bench.run(&["reap", "--now", "--yes", "--json"]).expect_code(0).json();
    assert_eq!((&report["outcome"], &report["verified"]), (&"freed".into(), &true.into()), "{report:#}");
}
