//! The daemon may be killed at any moment: the kernel's map goes on being right, and a new daemon takes it over.
use std::time::Duration;

use gpureap_tests::harness::{Bench, Daemon, Device, Scene};

const DEV: &str = "/dev/zero";

#[test]
fn churn_is_counted_exactly() {
    let bench = Bench::new(&[Device::zero()]);
    let _daemon = bench.daemon();
    // An emulated processor needs seconds for each look.
    let (seeds, pauses) = if std::env::var_os("GPUREAP_TEST_VM").is_some() { (2, 2) } else { (3, 4) };
    for seed in &["11", "12", "13"][..seeds] {
        let mut scene = Scene::start("churn", DEV, &[seed, "500"]);
        for pause in 0..pauses {
            eprintln!("seed {seed}, pause {pause}");
            let seen = bench.expect_truth(&scene, &[]);
            assert_eq!(seen.source, "map");
            let swept = bench.expect_truth(&scene, &["--source", "snapshot"]);
            assert_eq!(swept.source, "snapshot");
            scene.resume();
            scene.pause();
        }
    }
}

#[test]
fn a_daemon_killed_amid_churn_loses_nothing_and_doubles_nothing() {
    let bench = Bench::new(&[Device::zero()]);
    let mut daemon = bench.daemon();
    let mut scene = Scene::start("churn", DEV, &["7", "2000"]);
    bench.expect_truth(&scene, &[]);
    for round in 0..3 {
        eprintln!("round {round}");
        scene.resume();
        std::thread::sleep(Duration::from_millis(300));
        daemon.kill();
        std::thread::sleep(Duration::from_millis(300));
        daemon.start_again();
        scene.pause();
        let seen = bench.expect_truth(&scene, &[]);
        assert_eq!(seen.source, "map");
        bench.expect_truth(&scene, &["--source", "snapshot"]);
    }
}

#[test]
fn holders_are_known_while_no_daemon_runs() {
    let bench = Bench::new(&[Device::zero()]);
    let mut daemon = bench.daemon();
    let mut scene = Scene::start("churn", DEV, &["21", "300"]);
    bench.expect_truth(&scene, &[]);
    daemon.kill();
    scene.resume();
    scene.pause();
    bench.expect_truth(&scene, &[]);
    daemon.start_again();
    bench.expect_truth(&scene, &[]);
}

#[test]
fn a_holder_keeps_its_first_open_over_a_restart() {
    let bench = Bench::new(&[Device::zero()]);
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    let open = |bench: &Bench| {
        let seen = bench.expect_truth(&scene, &[]);
        seen.holder(scene.pid()).expect("found")["devices"][0]["first_open"].clone()
    };
    // Milliseconds of the day; the clocks are read anew each time, so the last digits may differ.
    let time = |value: &serde_json::Value| -> f64 {
        let text = value.as_str().unwrap_or_else(|| panic!("a time: {value}"));
        let clock = text.split_once('T').expect("RFC 3339").1.trim_end_matches('Z');
        clock.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().expect("a number")) * 1e3
    };
    let before = open(&bench);
    daemon.kill();
    daemon.start_again();
    let after = open(&bench);
    assert!((time(&after) - time(&before)).abs() < 100.0, "{before} became {after}");
}

#[test]
fn a_daemon_that_is_stopped_leaves_no_pins() {
    let bench = Bench::new(&[Device::zero()]);
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&scene, &[]);
    let status = daemon.stop();
    assert!(status.success(), "{status}:\n{}", daemon.log());
    let left: Vec<_> = std::fs::read_dir(bench.pins()).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(seen.source, "snapshot");
}

#[test]
fn a_daemon_that_keeps_leaves_its_programs_counting() {
    let bench = Bench::new(&[Device::zero()]);
    let mut daemon = Daemon::start_with(&bench, &["daemon", "--keep", "-v"]);
    let mut scene = Scene::start("churn", DEV, &["31", "300"]);
    bench.expect_truth(&scene, &[]);
    let status = daemon.stop();
    assert!(status.success(), "{status}:\n{}", daemon.log());
    scene.resume();
    scene.pause();
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map", "it is counted without a daemon");
    daemon.start_again();
    assert!(daemon.log().contains("adopted from pins"), "{}", daemon.log());
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map");
}

#[test]
fn pins_of_other_sizes_are_replaced() {
    let bench = Bench::new(&[Device::zero()]);
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&scene, &[]);
    daemon.kill();
    let config = std::fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&config.replace("files = 4096", "files = 8192"));
    daemon.start_again();
    assert!(daemon.log().contains("maps.files was 4096 and is now 8192"), "{}", daemon.log());
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map");
    let sets = std::fs::read_dir(bench.pins()).expect("the pins").flatten();
    assert_eq!(sets.count(), 1, "the old set is gone");
}
