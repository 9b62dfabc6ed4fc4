//! A daemon that is killed or stands still at any moment, and one that takes over from another version.
use std::{
    fs,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use gpureap_common::record::Meta;
use gpureap_tests::{
    harness::{Bench, Pid, Scene, note, sys, wait_for},
    random::Random,
};
use libc::{SIGCONT, SIGSTOP};

use super::{DEV, all_agree, bench, in_vm};

#[test]
fn a_daemon_that_stands_still_amid_churn_makes_no_count_wrong() {
    let bench = bench();
    let daemon = bench.daemon();
    let mut scene = Scene::start("churn", DEV, &["41", "500"]);
    bench.expect_truth(&scene, &[]);
    sys::kill(daemon.pid(), SIGSTOP);
    scene.resume();
    scene.pause();
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!((seen.source.as_str(), seen.complete), ("map", true), "root needs no daemon to look");
    sys::kill(daemon.pid(), SIGCONT);
    scene.resume();
    scene.pause();
    all_agree(&bench, &scene);
}

/// Between 0 and 1.
fn part(random: &mut Random) -> f64 {
    random.below(1 << 24) as f64 / f64::from(1 << 24)
}

/// Kills a daemon that is starting, at moments over the whole of its start: from the first map to the name of the set.
fn killed_while_it_starts(bench: &Bench, random: &mut Random, rounds: usize, adopts: bool) {
    let begun = Instant::now();
    let mut daemon = bench.daemon();
    let start = begun.elapsed();
    // A churn leaves descriptors in flight. Those of a time without a tracer are out of the sight of any snapshot, which
    // `gate` says of all.
    let churns = adopts || bench.backend == "gate";
    let mut scene = if churns { Scene::start("churn", DEV, &["51", "200"]) } else { Scene::start("plain", DEV, &[]) };
    bench.expect_truth(&scene, &[]);
    let mut met = (0, 0);
    for round in 0..rounds {
        if adopts {
            daemon.kill();
        } else {
            daemon.stop();
        }
        if churns {
            scene.resume();
        }
        let mut child =
            bench.command(&["daemon"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start the daemon");
        // The first half of a start from nothing is the reading of the kernel's types.
        let delay = start.mul_f64(if adopts { part(random) } else { 0.5 + part(random) * 0.6 });
        std::thread::sleep(delay);
        child.kill().and_then(|()| child.wait()).expect("kill the daemon");
        let half = bench.pins().join("new").exists();
        met = (met.0 + usize::from(half), met.1 + bench.sets().len());
        note(&format!("round {round}: killed after {delay:?} of {start:?}, half a set: {half}"));
        if churns {
            scene.pause();
        }
        let seen = bench.expect_truth(&scene, &[]);
        assert_eq!(seen.source == "map", bench.sets().len() == 1, "half a set is not believed: {:#}", seen.json);
        assert!(!adopts || seen.source == "map", "the set from before is there all the time");
        daemon.start_again();
        assert!(!bench.pins().join("new").exists(), "what was half made is gone");
        assert_eq!(bench.sets().len(), 1);
        all_agree(bench, &scene);
    }
    note(&format!("{} half sets, {} whole ones", met.0, met.1));
}

#[test]
fn a_daemon_killed_at_any_moment_of_its_start_leaves_nothing_half_believed() {
    let bench = bench();
    let rounds = if in_vm() { 3 } else { 8 };
    let mut random = Random::new(20_261_201);
    killed_while_it_starts(&bench, &mut random, rounds, false);
    killed_while_it_starts(&bench, &mut random, rounds / 2, true);
}

/// What the earlier version has left, under the name that it would have: its ABI and its object are others.
fn as_of_another_version(bench: &Bench, abi: Option<u32>) {
    let sets = bench.sets();
    let [set] = sets.as_slice() else { panic!("one set: {sets:?}") };
    let maps = bench.maps();
    let meta = maps.meta().expect("the record");
    let number = abi.unwrap_or(meta.abi);
    maps.set_meta(&Meta { abi: number, object: 0x0123_4567_89ab_cdef, ..meta }).expect("write the record");
    drop(maps);
    let name = format!("abi{number}-0123456789abcdef-{}", bench.backend);
    fs::rename(set, bench.pins().join(name)).expect("rename the set");
}

/// Looks again and again until told to stop: who is never missing, and from which sources it was told.
fn always_there(bench: &Bench, pid: Pid, stop: &AtomicBool) -> Vec<String> {
    let mut sources = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let seen = bench.look();
        assert!(seen.holder(pid).is_some(), "it holds all the time: {:#}", seen.json);
        sources.push(seen.source);
    }
    sources
}

fn upgraded(abi: Option<u32>, said: &str) {
    let bench = bench();
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&scene, &[]);
    daemon.kill();
    as_of_another_version(&bench, abi);
    // Of the same ABI it is read, of another one it is not; the hold is told either way.
    let source = if abi.is_none() { "map" } else { "snapshot" };
    assert_eq!(bench.expect_truth(&scene, &[]).source, source);
    let waiting = bench
        .command(&["wait", "--gpu", DEV, "--pid", &scene.pid().to_string(), "--timeout", "100s"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("start to wait");
    let (pid, stop) = (scene.pid(), AtomicBool::new(false));
    let sources = std::thread::scope(|scope| {
        let looks = scope.spawn(|| always_there(&bench, pid, &stop));
        daemon.start_again();
        std::thread::sleep(Duration::from_millis(100));
        stop.store(true, Ordering::Relaxed);
        looks.join().expect("it is seen at every look")
    });
    note(&format!("{} looks", sources.len()));
    assert!(sources.iter().all(|source| source == "map" || source == "snapshot"), "{sources:?}");
    assert!(daemon.log().contains(said) && daemon.log().contains("are replaced"), "{}", daemon.log());
    let sets = bench.sets();
    assert_eq!(sets.len(), 1, "the old set is gone: {sets:?}");
    all_agree(&bench, &scene);
    // Who waits since before the change learns of the end.
    sys::kill(pid, libc::SIGKILL);
    let output = waiting.wait_with_output().expect("wait for it");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    wait_for("it is gone", || bench.holders(&[]).holder(pid).is_none());
}

#[test]
fn an_upgrade_over_pins_of_another_abi_loses_no_hold() {
    upgraded(Some(1), "of another ABI");
}

#[test]
fn an_upgrade_over_pins_of_another_build_loses_no_hold() {
    upgraded(None, "of another build or probe set");
}
