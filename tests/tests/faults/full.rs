//! Rooms of the kernel's that are too small: the ring, the maps, the memory of processes that have ended.
use std::process::Command;

use gpureap_common::counter;
use gpureap_tests::harness::{Bench, Daemon, Player, Scene, note, sys, wait_for};
use libc::{SIGCONT, SIGSTOP};

use super::{DEV, all_agree, bench};

/// Opens and closes the device until records have found the ring full.
fn fill_the_ring(bench: &Bench) {
    let mut player = Player::start();
    let before = bench.counter(counter::RING_FULL);
    let mut opens = 0;
    while bench.counter(counter::RING_FULL) == before {
        player.ask(&format!("churn 500 {DEV}"));
        opens += 500;
        assert!(opens < 100_000, "a ring that nobody empties is full some time");
    }
    note(&format!("full after {opens} opens"));
}

#[test]
fn a_full_ring_is_told_and_the_counts_stay_right() {
    let bench = bench();
    let daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&scene, &[]);
    sys::kill(daemon.pid(), SIGSTOP);
    fill_the_ring(&bench);
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!((seen.source.as_str(), seen.complete, seen.lost_events), ("map", true, 0), "{:#}", seen.json);
    sys::kill(daemon.pid(), SIGCONT);
    let said = "records found the ring full";
    wait_for("the daemon says it", || {
        daemon.log().contains(&format!("{said}: the maps are right, the record has a gap"))
    });
    // Whoever reads the record is told of the gap in it.
    wait_for("the report says it", || {
        bench
            .run(&["report"])
            .expect_code(0)
            .stdout
            .lines()
            .any(|line| line.starts_with("gap: ") && line.contains(said))
    });
    all_agree(&bench, &scene);
}

/// What is said while a map of 64 entries has too many to keep, and that it is over with a larger one.
fn too_small(map: &str, scene: (&str, &[&str])) {
    note(map);
    let bench = bench();
    bench.configure(map, "64");
    let mut daemon = Daemon::start(&bench);
    let (kind, rest) = scene;
    let scene = Scene::start(kind, DEV, rest);
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(seen.source, "map");
    assert!(!seen.complete && seen.lost_events > 0, "{map}: {} lost: {:#}", seen.lost_events, seen.json["notes"]);
    let remedy = format!("raise maps.{map} in the configuration and restart the daemon");
    let notes = seen.json["notes"].to_string();
    assert!(notes.contains(&format!("the map `{map}` was full")) && notes.contains(&remedy), "{notes}");
    let text = bench.run(&["holders"]).expect_code(0);
    assert!((text.stdout + &text.stderr).contains(&remedy), "{map}: in the text too");
    wait_for("the daemon says it", || daemon.log().contains("events were lost; the maps are resynchronised"));
    bench.expect_truth(&scene, &["--source", "snapshot"]);
    // The advice is followed.
    bench.configure(map, "4096");
    daemon.stop();
    daemon.start_again();
    let seen = bench.expect_truth(&scene, &[]);
    assert!(seen.complete && seen.lost_events == 0, "{map}: {:#}", seen.json["notes"]);
    all_agree(&bench, &scene);
}

#[test]
fn a_full_map_is_named_with_the_remedy_and_nobody_is_missed() {
    too_small("procs", ("orphans", &["90", "3"]));
    // `gate` keeps nothing in the others.
    if bench().backend != "gate" {
        too_small("tables", ("orphans", &["90", "3"]));
        too_small("holders", ("orphans", &["90", "3"]));
        too_small("files", ("many", &["90"]));
    }
}

/// Starts and ends so many processes that a small memory of them is used up.
fn many_processes(count: u32) {
    let script = format!("i=0; while [ $i -lt {count} ]; do (:); i=$((i+1)); done");
    assert!(Command::new("sh").args(["-c", &script]).status().expect("a shell").success());
}

#[test]
fn ancestors_that_were_dropped_are_told_to_be_missing() {
    let bench = bench();
    bench.configure("lineage", "64");
    let mut daemon = Daemon::start(&bench);
    let scene = Scene::start("ghost", DEV, &[]);
    let told = |bench: &Bench| {
        let seen = bench.expect_truth(&scene, &[]);
        assert!(seen.complete, "{:#}", seen.json["notes"]);
        let holder = seen.holder(scene.pid()).expect("found").clone();
        let note = seen.json["notes"].to_string();
        (holder["lineage_cut"] == true, holder["lineage"].to_string(), note)
    };
    many_processes(600);
    let dead = format!("\"pid\":{}", scene.numbers("dead")[0]);
    wait_for("its dead parent is forgotten", || {
        let (cut, lineage, note) = told(&bench);
        if !cut {
            many_processes(200);
            return false;
        }
        assert!(!lineage.contains(&dead), "it is not among those that are told: {lineage}");
        let is = note.contains("the lineage of ") && note.contains("raise maps.lineage in the configuration");
        assert!(is && note.contains(" processes so far)"), "{note}");
        true
    });
    let doctor = bench.run(&["doctor", "--json"]).json();
    assert!(doctor["checks"].to_string().contains("processes were dropped from the map `lineage`"), "{doctor:#}");
    // A memory that is large enough forgets nobody.
    bench.configure("lineage", "4096");
    daemon.stop();
    daemon.start_again();
    let other = Scene::start("ghost", DEV, &[]);
    many_processes(200);
    let seen = bench.expect_truths(&[scene, other], &[]);
    let whole = |holder: &serde_json::Value| holder["lineage_cut"] == false;
    assert!(seen.json["holders"].as_array().expect("holders").iter().all(whole), "{:#}", seen.json);
}
