//! The wall clock is set while things happen. Only in a machine of the test's own.
use std::{process::Stdio, time::Duration};

use gpureap_tests::harness::{Bench, Daemon, Player, Scene, note, skip, sys, wait_for};
use serde_json::Value;

use super::{DEV, all_agree, in_vm};

const DAY: i64 = 86_400;

/// A clock that is put right again.
struct Clock(i64);

impl Clock {
    fn set(&mut self, seconds: i64) {
        sys::move_wall_clock(seconds);
        self.0 += seconds;
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        sys::move_wall_clock(-self.0);
    }
}

/// With signs of life every second, which is how soon a daemon learns of it; `None` where the clock is not ours.
fn bench(test: &str) -> Option<Bench> {
    if !in_vm() {
        skip(test, "the wall clock of this machine is not ours to set");
        return None;
    }
    let bench = super::bench();
    let config = std::fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&format!("[journal]\nheartbeat = \"1s\"\n\n{config}"));
    Some(bench)
}

fn time<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("{name} in {value:#}"))
}

/// The hold of this process in the report.
fn hold(report: &Value, pid: i32) -> Value {
    let holds = report["holds"].as_array().expect("holds");
    holds.iter().find(|hold| hold["pid"] == pid).unwrap_or_else(|| panic!("{pid} in {report:#}")).clone()
}

#[test]
fn a_clock_that_is_set_changes_no_order_and_all_times_are_told_by_it() {
    let Some(bench) = bench("clock") else { return };
    let daemon = Daemon::start(&bench);
    let mut clock = Clock(0);
    let mut first = Player::holding(DEV);
    bench.holders(&[]);
    clock.set(2 * DAY);
    wait_for("forward is said", || daemon.log().contains("the wall clock was set forward by 172800 s"));
    let second = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&second, &[]);
    clock.set(-3 * DAY);
    wait_for("back is said", || daemon.log().contains("the wall clock was set back by 259200 s"));
    let third = Player::holding(DEV);
    first.tell("exit 0");
    first.end();
    let pids = [first.pid(), second.pid(), third.pid()];
    let now = time(&bench.holders(&[]).json, "time").to_owned();
    let report = || bench.run(&["report", "--json", "--since", "10d"]);
    wait_for("all are recorded", || {
        let text = report().stdout;
        pids.iter().all(|pid| text.contains(&format!("\"pid\":{pid}"))) && text.contains("\"released\":\"")
    });
    let report = report().expect_code(0).json();
    let opened = pids.map(|pid| time(&hold(&report, pid), "opened").to_owned());
    assert!(opened.is_sorted(), "as it happened: {opened:?}");
    let released = hold(&report, pids[0]);
    assert!(time(&released, "released") > opened[2].as_str(), "it ended last: {released:#}");
    // All of it within the last minutes, by the clock as it is now.
    let date = |time: &str| time[..10].to_owned();
    assert!(opened.iter().all(|time| date(time) == date(&now)), "{opened:?}, and it is {now}");
    let moved = report["hosts"][0]["clock_moved_ms"].as_i64().expect("a number");
    assert_eq!((moved as f64 / 86_400_000.0).round() as i64, -1, "{moved} ms in all");
    let seen = bench.holders(&[]);
    let shown = seen.holder(second.pid()).expect("found")["devices"][0]["first_open"].clone();
    note(&format!("opened {opened:?}, shown {shown}"));
    assert_eq!(date(shown.as_str().expect("a time")), date(&now));
    all_agree(&bench, &second);
}

#[test]
fn a_clock_that_is_set_ends_no_wait_and_no_grace_period() {
    let Some(bench) = bench("time-outs") else { return };
    let _daemon = Daemon::start(&bench);
    let mut clock = Clock(0);
    let slow = Scene::start("term-slow", DEV, &["3000"]);
    let holder = Scene::start("plain", DEV, &[]);
    let start = |arguments: &[&str]| {
        bench.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start it")
    };
    let pid = holder.pid().to_string();
    let mut wait = start(&["wait", "--pid", &pid, "--timeout", "1h", "--json"]);
    let slow = slow.pid().to_string();
    let reap = start(&["reap", "--pid", &slow, "--grace", "30m", "--yes", "--json"]);
    std::thread::sleep(Duration::from_secs(1));
    for seconds in [2 * DAY, -3 * DAY] {
        clock.set(seconds);
        std::thread::sleep(Duration::from_millis(500));
        assert!(wait.try_wait().expect("wait").is_none(), "an hour is not over");
    }
    let reaped = reap.wait_with_output().expect("wait for the reap");
    let report: Value = serde_json::from_slice(&reaped.stdout).expect("a report");
    let signals = report["processes"][0]["signals"].as_array().expect("signals").clone();
    assert_eq!((reaped.status.code(), signals.len()), (Some(0), 1), "SIGTERM was enough: {report:#}");
    assert_eq!(signals[0]["signal"], "SIGTERM");
    let elapsed = report["elapsed_ms"].as_f64().expect("a length of time");
    assert!((0.0..600_000.0).contains(&elapsed), "{elapsed} ms");
    sys::kill(holder.pid(), libc::SIGKILL);
    let waited = wait.wait_with_output().expect("wait for the wait");
    assert_eq!(waited.status.code(), Some(0), "{}", String::from_utf8_lossy(&waited.stdout));
}
