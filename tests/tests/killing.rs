//! Reaping kills what holds the device, once, and nothing else.
use std::{fs::File, time::Duration};

use gpureap_tests::harness::{Bench, Device, Output, Pid, Scene, Shared, Terminal, anybody, note, skip, sys, wait_for};
use serde_json::Value;

/// Opened by next to nobody, so every holder of it may be killed.
const DEV: &str = "/dev/full";

/// A bench without a daemon, on devices that nobody else on the host holds; `None`, loudly, where somebody does.
fn bench(test: &str, devices: &[Device]) -> Option<Bench> {
    let bench = Bench::new(devices);
    bench.is_free(test).then_some(bench)
}

/// The bench with the daemon that is there for all tests, on a device that nobody else holds.
fn shared(test: &str) -> Option<Shared> {
    let bench = Shared::new(&[Device::full()]);
    bench.is_free(test).then_some(bench)
}

fn with_and_without_daemon(test: &str, body: impl Fn(&Bench)) {
    if let Some(bench) = shared(test) {
        body(&bench);
    }
    if let Some(bench) = bench(test, &[Device::full()]) {
        body(&bench);
    }
}

fn alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().is_empty() && !rest.trim_start().starts_with('Z'))
}

fn reap(bench: &Bench, rest: &[&str]) -> Output {
    bench.run(&[&["reap", "--yes", "--json"], rest].concat())
}

fn report(output: &Output) -> Value {
    let json = output.json();
    assert_eq!(json["schema"], "gpureap.reap/1");
    json
}

fn process(report: &Value, pid: Pid) -> &Value {
    let list = report["processes"].as_array().expect("processes");
    list.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{pid} in {report:#}"))
}

fn signals(report: &Value, pid: Pid) -> Vec<&str> {
    let list = process(report, pid)["signals"].as_array().expect("signals");
    list.iter().map(|signal| signal["signal"].as_str().expect("a name")).collect()
}

#[test]
fn a_holder_is_reaped_and_the_device_is_free() {
    let Some(bench) = shared("plain") else { return };
    let scene = Scene::start("plain", DEV, &[]);
    let report = report(&reap(&bench, &[]).expect_code(0));
    assert_eq!(report["outcome"], "freed");
    assert_eq!(signals(&report, scene.pid()), ["SIGTERM"]);
    assert!(!alive(scene.pid()));
    assert!(bench.holders(&["--source", "snapshot"]).holder(scene.pid()).is_none());
}

/// What the tests with a daemon do one by one, at once: a look without a daemon takes longer.
#[test]
fn holders_of_every_kind_are_reaped_without_a_daemon() {
    let Some(bench) = bench("untraced", &[Device::full()]) else { return };
    let plain = Scene::start("plain", DEV, &[]);
    let stubborn = Scene::start("ignore-term", DEV, &[]);
    let headless = Scene::start("zombie-leader", DEV, &[]);
    let [tid] = headless.numbers("tids")[..] else { panic!("one thread") };
    let ghost = Scene::start("ghost", DEV, &[]);
    let orphans = Scene::start("orphans", DEV, &["126", "3"]);
    let nested = Scene::try_start("pidns", DEV, &[]).map_err(|reason| skip("F14", &reason)).ok();
    let mut expected = 1 + 1 + 1 + 1 + 126;

    let dry = report(&bench.run(&["reap", "--dry-run", "--json"]).expect_code(0));
    assert_eq!(process(&dry, plain.pid())["signals"], Value::Array(Vec::new()));
    assert!(alive(plain.pid()));

    let report = report(&reap(&bench, &["--grace", "2s"]).expect_code(0));
    assert_eq!(report["outcome"], "freed");
    for scene in [&plain, &ghost] {
        assert_eq!(signals(&report, scene.pid()), ["SIGTERM"]);
        assert!(!alive(scene.pid()));
    }
    assert!(!alive(orphans.pid()));
    assert_eq!(signals(&report, stubborn.pid()), ["SIGTERM", "SIGKILL"]);
    assert!(!alive(stubborn.pid()));
    wait_for("the thread has ended", || sys::session(tid).is_none());
    if let Some(nested) = &nested {
        expected += 1;
        assert_eq!(signals(&report, nested.pid()).first(), Some(&"SIGTERM"));
        assert!(!alive(nested.pid()));
    }
    assert_eq!(report["processes"].as_array().map(Vec::len), Some(expected));
    assert_eq!(anybody(&Device::full().key()), Vec::<Pid>::new());
}

#[test]
fn nothing_to_do_is_success() {
    with_and_without_daemon("nothing", |bench| {
        assert_eq!(report(&reap(bench, &[]).expect_code(0))["outcome"], "nothing-to-do");
    });
}

#[test]
fn a_dry_run_kills_nobody() {
    let Some(bench) = shared("dry run") else { return };
    let scene = Scene::start("plain", DEV, &[]);
    let report = report(&bench.run(&["reap", "--dry-run", "--json"]).expect_code(0));
    assert_eq!(process(&report, scene.pid())["signals"], Value::Array(Vec::new()));
    assert!(alive(scene.pid()));
}

#[test]
fn k1_who_ignores_term_is_killed_once_after_the_grace_period() {
    let Some(bench) = shared("K1") else { return };
    let scene = Scene::start("ignore-term", DEV, &[]);
    let report = report(&reap(&bench, &["--grace", "500ms"]).expect_code(0));
    assert_eq!(signals(&report, scene.pid()), ["SIGTERM", "SIGKILL"]);
    assert!(!alive(scene.pid()));
}

#[test]
fn k1_now_is_kill_at_once() {
    with_and_without_daemon("K1 --now", |bench| {
        let scene = Scene::start("ignore-term", DEV, &[]);
        let report = report(&reap(bench, &["--now"]).expect_code(0));
        assert_eq!(signals(&report, scene.pid()), ["SIGKILL"]);
    });
}

#[test]
fn k2_one_signal_a_step_however_many_devices() {
    let devices = [Device::full(), Device::zero(), Device::new(1, 8, "/dev/random")];
    let Some(bench) = bench("K2", &devices) else { return };
    let mut daemon = None;
    for when in ["no daemon", "a daemon", "a killed daemon"] {
        match when {
            "a daemon" => daemon = Some(bench.daemon()),
            _ => drop(daemon.take()),
        }
        note(when);
        let file = bench.path(when);
        let path = file.to_str().expect("a path in UTF-8");
        let scene = Scene::start("signal-count", DEV, &[path, "/dev/zero", "/dev/random"]);
        let seen = bench.expect_truth(&scene, &[]);
        if when != "a killed daemon" {
            assert_eq!(seen.source, if daemon.is_some() { "map" } else { "snapshot" });
        }
        let report = report(&reap(&bench, &["--grace", "1s"]).expect_code(0));
        assert_eq!(signals(&report, scene.pid()), ["SIGTERM", "SIGKILL"]);
        let counts: Value = serde_json::from_slice(&std::fs::read(&file).expect("the counts")).expect("JSON");
        assert_eq!(counts["TERM"], 1, "{counts}");
        assert_eq!(counts["INT"], 0, "{counts}");
        assert_eq!(report["devices"].as_array().map(Vec::len), Some(3));
    }
}

/// The plan is made; then the holder dies and another process gets its pid; then the plan is agreed to.
fn pid_is_reused(test: &str, innocent_holds: bool) {
    let Some(bench) = shared(test) else { return };
    let victim = Scene::start("plain", DEV, &[]);
    let pid = victim.pid();
    let mut terminal = Terminal::start(bench.command(&["reap", "--now"]));
    terminal.question();
    sys::kill(pid, sys::SIGKILL);
    wait_for("the pid is free", || sys::session(pid).is_none());
    let mode = if innocent_holds { "hold" } else { "idle" };
    let innocent = match Scene::try_start("at-pid", DEV, &[&pid.to_string(), mode]) {
        Ok(innocent) => innocent,
        Err(reason) => return skip(test, &reason),
    };
    assert_eq!(innocent.pid(), pid);
    terminal.answer("y");
    let (code, text) = terminal.finish();
    assert!(alive(pid), "the innocent process lives:\n{text}");
    assert_eq!(code, if innocent_holds { 3 } else { 0 }, "{text}");
}

#[test]
fn k3_a_process_that_got_the_pid_is_not_killed() {
    pid_is_reused("K3", false);
}

#[test]
fn k3_a_process_that_got_the_pid_and_holds_is_named_and_not_killed() {
    pid_is_reused("K3 holding", true);
}

#[test]
fn k4_a_holder_that_ends_before_the_signal_is_success() {
    with_and_without_daemon("K4", |bench| {
        let scene = Scene::start("plain", DEV, &[]);
        let mut terminal = Terminal::start(bench.command(&["reap"]));
        terminal.question();
        sys::kill(scene.pid(), sys::SIGKILL);
        wait_for("the holder has ended", || !alive(scene.pid()));
        terminal.answer("y");
        let (code, text) = terminal.finish();
        assert_eq!(code, 0, "{text}");
    });
}

#[test]
fn k4_holders_that_come_and_go_are_never_an_error() {
    let Some(bench) = shared("K4 race") else { return };
    for ms in ["0", "20", "40", "60", "80", "100", "150"] {
        let _scene = Scene::start("quick-exit", DEV, &[ms]);
        reap(&bench, &[]).expect_code(0);
    }
}

#[test]
fn a_refusal_at_the_terminal_kills_nobody() {
    let Some(bench) = shared("refusal") else { return };
    let scene = Scene::start("plain", DEV, &[]);
    let mut terminal = Terminal::start(bench.command(&["reap"]));
    terminal.question();
    terminal.answer("n");
    let (code, text) = terminal.finish();
    assert!(alive(scene.pid()), "{text}");
    assert_eq!(code, 3, "{text}");
}

#[test]
fn k5_an_ancestor_is_skipped_and_told() {
    let Some(bench) = shared("K5") else { return };
    let own = File::open(DEV).expect(DEV);
    let scene = Scene::start("plain", DEV, &[]);
    let output = reap(&bench, &["--now"]);
    // 3 and 5 both say that a living process that was left alone still holds it.
    assert!(matches!(output.code, 3 | 5), "{output:#?}");
    let report = report(&output);
    let skipped = report["skipped"].as_array().expect("skipped");
    let entry = skipped.iter().find(|entry| entry["pid"] == std::process::id());
    assert_eq!(entry.expect("this test is named")["reason"], "ancestor");
    assert!(!alive(scene.pid()), "the others are reaped all the same");
    drop(own);
}

#[test]
fn k9_a_worker_that_is_started_again_is_named() {
    let Some(bench) = shared("K9") else { return };
    let scene = Scene::start("respawn", DEV, &[]);
    // Keeps the reap waiting long enough for the supervisor to be back before the last look.
    let stubborn = Scene::start("ignore-term", DEV, &[]);
    let report = report(&reap(&bench, &["--grace", "2s", "--timeout", "20s"]).expect_code(3));
    assert!(!alive(stubborn.pid()));
    assert_eq!(report["outcome"], "held");
    let respawned = report["respawned"].as_array().expect("respawned");
    assert!(!respawned.is_empty(), "{report:#}");
    assert_ne!(respawned[0]["pid"], scene.pid(), "the new one: {report:#}");
    assert!(alive(scene.number("supervisor")), "which holds nothing");
}

#[test]
fn k13_others_are_left_alone() {
    let Some(bench) = bench("K13", &[Device::full(), Device::zero()]) else { return };
    let _daemon = bench.daemon();
    let target = Scene::start("plain", DEV, &[]);
    let same_device = Scene::start("plain", DEV, &[]);
    let other_device = Scene::start("plain", "/dev/zero", &[]);
    reap(&bench, &["--gpu", "/dev/zero", "--match", "any"]).expect_code(0);
    assert!(!alive(other_device.pid()));
    assert!(alive(target.pid()) && alive(same_device.pid()));
    let output = reap(&bench, &["--pid", &target.pid().to_string(), "--now"]);
    assert!(!alive(target.pid()), "{output:#?}");
    assert!(alive(same_device.pid()), "{output:#?}");
}

#[test]
fn f6_a_process_whose_main_thread_has_ended_is_reaped() {
    let Some(bench) = shared("F6") else { return };
    let scene = Scene::start("zombie-leader", DEV, &[]);
    let [tid] = scene.numbers("tids")[..] else { panic!("one thread") };
    reap(&bench, &["--grace", "1s"]).expect_code(0);
    wait_for("the thread has ended", || sys::session(tid).is_none());
    assert_eq!(anybody(&Device::full().key()), Vec::<Pid>::new());
}

#[test]
fn f8_all_orphans_are_reaped_in_one_report() {
    let Some(bench) = shared("F8") else { return };
    let scene = Scene::start("orphans", DEV, &["126", "3"]);
    bench.expect_truth(&scene, &[]);
    let report = report(&reap(&bench, &["--grace", "5s"]).expect_code(0));
    assert_eq!(report["processes"].as_array().map(Vec::len), Some(126));
    assert_eq!(anybody(&Device::full().key()), Vec::<Pid>::new());
}

/// K11, and what V7 asks of waiting, seen through reap: it ends when the holder has ended by itself, with one signal.
#[test]
fn k11_v7_a_slow_holder_ends_by_itself_within_the_grace_period() {
    let Some(bench) = shared("K11") else { return };
    let scene = Scene::start("term-slow", DEV, &["1000"]);
    let begun = std::time::Instant::now();
    let report = report(&reap(&bench, &["--grace", "300s"]).expect_code(0));
    assert_eq!(signals(&report, scene.pid()), ["SIGTERM"]);
    assert!(begun.elapsed() < Duration::from_mins(2), "it does not wait for the whole grace period");
    assert!(!alive(scene.pid()));
}

#[test]
fn f14_a_holder_in_a_pid_namespace_is_reaped() {
    let Some(bench) = shared("F14") else { return };
    let scene = match Scene::try_start("pidns", DEV, &[]) {
        Ok(scene) => scene,
        Err(reason) => return skip("F14", &reason),
    };
    let report = report(&reap(&bench, &["--grace", "500ms"]).expect_code(0));
    assert_eq!(signals(&report, scene.pid()).first(), Some(&"SIGTERM"));
    assert!(!alive(scene.pid()));
}
