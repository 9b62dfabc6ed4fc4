//! `gpureap wait` ends when the last holder has let go, and not before.
use std::{
    fs::{self, File},
    io::Read as _,
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime},
};

use gpureap_tests::harness::{Bench, Device, NOBODY, Output, Scene, World, note, skip, sys, wait_for};
use serde_json::{Value, json};

/// Held by next to nobody.
const DEV: &str = "/dev/full";
/// Generous: what is measured is printed.
const SOON: Duration = Duration::from_secs(2);

fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    bench.open_to_all();
    bench.is_free(test).then_some(bench)
}

fn with_and_without_daemon(test: &str, body: impl Fn(&Bench, &str)) {
    let Some(bench) = bench(test) else { return };
    note("no daemon");
    body(&bench, "snapshot");
    note("a daemon");
    let _daemon = bench.daemon();
    body(&bench, "map");
}

/// A running `gpureap wait`.
struct Waiting {
    child: Child,
}

impl Waiting {
    fn start(mut command: Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start");
        let mut waiting = Self { child };
        let wchan = format!("/proc/{}/wchan", waiting.child.id());
        wait_for("it waits", || {
            assert!(waiting.runs(), "it ended at once");
            fs::read_to_string(&wchan).is_ok_and(|place| place.contains("poll"))
        });
        waiting
    }

    fn on(bench: &Bench, rest: &[&str]) -> Self {
        Self::start(bench.command(&[&["wait", "--json"], rest].concat()))
    }

    fn runs(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// It has not ended after a while.
    #[track_caller]
    fn goes_on(&mut self) {
        std::thread::sleep(Duration::from_millis(400));
        assert!(self.runs(), "it ended too early: {:#?}", self.output());
    }

    fn output(&mut self) -> Output {
        let status = self.child.wait().expect("wait");
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.child.stdout.take().expect("stdout").read_to_string(&mut stdout).expect("read");
        self.child.stderr.take().expect("stderr").read_to_string(&mut stderr).expect("read");
        Output { code: status.code().unwrap_or(-1), stdout, stderr }
    }

    /// Its end, which comes soon after `since`, and the time in between.
    #[track_caller]
    fn ends(mut self, since: Instant) -> (Value, Duration) {
        wait_for("it ends", || !self.runs() || since.elapsed() > SOON * 10);
        let took = since.elapsed();
        let output = self.output().expect_code(0);
        assert!(took < SOON, "it ended after {took:?}: {output:#?}");
        let json = output.json();
        assert_eq!((&json["schema"], &json["outcome"]), (&json!("gpureap.wait/1"), &json!("free")));
        (json, took)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            drop(self.child.kill().and_then(|()| self.child.wait()));
        }
    }
}

fn pids(json: &Value, list: &str) -> Vec<i64> {
    let mut pids: Vec<i64> =
        json[list].as_array().expect("a list").iter().map(|entry| entry["pid"].as_i64().expect("a pid")).collect();
    pids.sort_unstable();
    pids
}

#[test]
fn at_once_when_it_is_free() {
    with_and_without_daemon("free", |bench, source| {
        for rest in [&[][..], &["--timeout", "0"], &["--gpu", DEV], &["--gpu", DEV, "--match", "any"]] {
            let json = bench.run(&[&["wait", "--json"], rest].concat()).expect_code(0).json();
            assert_eq!(
                (&json["outcome"], &json["verified"], &json["source"]),
                (&json!("free"), &json!(true), &json!(source)),
                "{json:#}"
            );
            assert_eq!((&json["holders"], &json["ended"]), (&json!([]), &json!([])));
        }
    });
}

#[test]
fn until_the_last_of_several_has_exited() {
    with_and_without_daemon("several", |bench, source| {
        let scenes: Vec<Scene> =
            ["plain", "zombie-leader", "ignore-term"].map(|kind| Scene::start(kind, DEV, &[])).into();
        let mut expected: Vec<i64> = scenes.iter().map(|scene| scene.pid().into()).collect();
        expected.sort_unstable();
        let mut waiting = Waiting::on(bench, &[]);
        for scene in &scenes[1..] {
            sys::kill(scene.pid(), sys::SIGKILL);
            waiting.goes_on();
        }
        let killed = Instant::now();
        sys::kill(scenes[0].pid(), sys::SIGKILL);
        let (json, _) = waiting.ends(killed);
        assert_eq!(pids(&json, "ended"), expected, "{json:#}");
        assert_eq!((&json["verified"], &json["source"]), (&json!(true), &json!(source)));
        assert!(json["ended"].as_array().expect("ended").iter().all(|entry| entry["released_ms"].is_f64()));
    });
}

#[test]
fn until_a_process_that_lives_on_has_closed_it() {
    with_and_without_daemon("close", |bench, _| {
        let own = File::open(DEV).expect(DEV);
        let again = own.try_clone().expect("dup");
        let mut waiting = Waiting::on(bench, &[]);
        drop(again);
        waiting.goes_on();
        let closed = Instant::now();
        drop(own);
        let (json, _) = waiting.ends(closed);
        assert_eq!(pids(&json, "ended"), [i64::from(std::process::id())], "{json:#}");
    });
}

#[test]
fn when_the_time_is_up_the_holders_are_named() {
    with_and_without_daemon("timeout", |bench, _| {
        let scene = Scene::start("plain", DEV, &[]);
        for (timeout, at_least) in [("0", 0.0), ("300ms", 300.0)] {
            let json = bench.run(&["wait", "--json", "--timeout", timeout]).expect_code(3).json();
            assert_eq!(json["outcome"], "held");
            assert_eq!(pids(&json, "holders"), [i64::from(scene.pid())]);
            assert_eq!(json["holders"][0]["nodes"], json!([DEV]));
            assert!(json["waited_ms"].as_f64().is_some_and(|waited| waited >= at_least), "{json:#}");
        }
        let text = bench.run(&["wait", "--timeout", "10ms"]).expect_code(3).stdout;
        assert!(text.contains(&scene.pid().to_string()) && text.contains("still held after"), "{text}");
        // Not a use of that GPU: as reap, so wait.
        bench.run(&["wait", "--gpu", DEV, "--timeout", "10ms"]).expect_code(0);
        bench.run(&["wait", "--gpu", DEV, "--match", "any", "--timeout", "10ms"]).expect_code(3);
        bench.run(&["wait", "--pid", &scene.pid().to_string(), "--timeout", "10ms"]).expect_code(3);
        bench.run(&["wait", "--pid", &std::process::id().to_string(), "--timeout", "10ms"]).expect_code(0);
        bench.run(&["wait", "--gpu", "/dev/nothing"]).expect_code(2);
    });
}

#[test]
fn a_holder_that_comes_meanwhile_is_waited_for_too() {
    with_and_without_daemon("newcomer", |bench, _| {
        let first = Scene::start("plain", DEV, &[]);
        let mut waiting = Waiting::on(bench, &["--timeout", "60s"]);
        let second = Scene::start("plain", DEV, &[]);
        sys::kill(first.pid(), sys::SIGKILL);
        waiting.goes_on();
        let killed = Instant::now();
        sys::kill(second.pid(), sys::SIGKILL);
        let (json, _) = waiting.ends(killed);
        assert_eq!(pids(&json, "ended").len(), 2, "{json:#}");
    });
}

#[test]
fn whoever_started_the_wait_is_waited_for_and_told() {
    let Some(bench) = bench("ancestor") else { return };
    let _daemon = bench.daemon();
    let _own = File::open(DEV).expect(DEV);
    let output = bench.run(&["wait", "--timeout", "500ms"]).expect_code(3);
    assert!(output.stderr.contains("has started this wait"), "{output:#?}");
    assert!(bench.run(&["-q", "wait", "--timeout", "500ms"]).expect_code(3).stderr.is_empty());
}

#[test]
fn the_daemon_may_go_meanwhile() {
    let Some(bench) = bench("daemon gone") else { return };
    for gently in [false, true] {
        let mut daemon = bench.daemon();
        let scene = Scene::start("plain", DEV, &[]);
        let mut waiting = Waiting::on(&bench, &[]);
        if gently {
            assert!(daemon.stop().success());
        } else {
            daemon.kill();
        }
        waiting.goes_on();
        let killed = Instant::now();
        sys::kill(scene.pid(), sys::SIGKILL);
        waiting.ends(killed);
    }
}

#[test]
fn a_user_waits_for_everybody_through_the_socket() {
    let Some(bench) = bench("user") else { return };
    let mut daemon = bench.daemon();
    let world = World::default().as_user(NOBODY);
    let command = || bench.command(&["wait", "--json"]);
    let program = command().get_program().to_owned();
    let mut trial = Command::new(&program);
    trial.arg("--version").stdout(Stdio::null());
    if world.clone().enter(trial).status().is_err() {
        return skip("user", &format!("an ordinary user cannot reach {}", program.display()));
    }
    for restart in [false, true] {
        let scene = Scene::start("plain", DEV, &[]);
        let mut waiting = Waiting::start(world.clone().enter(command()));
        waiting.goes_on();
        if restart {
            daemon.kill();
            daemon.start_again();
            waiting.goes_on();
        }
        let killed = Instant::now();
        sys::kill(scene.pid(), sys::SIGKILL);
        let (json, took) = waiting.ends(killed);
        note(&format!("V7 as a user, from SIGKILL to the end of wait: {took:?}"));
        assert_eq!((&json["source"], &json["verified"]), (&json!("map"), &json!(true)), "{json:#}");
        assert_eq!(pids(&json, "ended"), [i64::from(scene.pid())]);
    }
    // Whose environment may not be read may be the one that is meant.
    let scene = Scene::start("plain", DEV, &[]);
    let wanting = bench.command(&["wait", "--json", "--env", "RANK=0"]);
    let json = gpureap_tests::harness::finish(world.clone().enter(wanting)).expect_code(7).json();
    assert_eq!((&json["outcome"], &json["source"]), (&json!("not-permitted"), &json!("map")), "{json:#}");
    assert!(json["notes"].to_string().contains("may not be read, so --env leaves it out"), "{json:#}");
    // A daemon that goes and does not come back takes neither the time nor the answer along.
    let time = Duration::from_secs(if std::env::var_os("GPUREAP_TEST_VM").is_some() { 20 } else { 2 });
    let limit = format!("{}s", time.as_secs());
    let mut waiting = Waiting::start(world.clone().enter(bench.command(&["wait", "--json", "--timeout", &limit])));
    let begun = Instant::now();
    daemon.kill();
    let output = waiting.output();
    let took = begun.elapsed();
    let json = output.expect_code(3).json();
    assert_eq!(pids(&json, "holders"), [i64::from(scene.pid())]);
    assert!(json["notes"].to_string().contains("the last look failed"), "{json:#}");
    assert!(took < time + Duration::from_secs(5), "{took:?}");
    daemon.start_again();
    drop(scene);
    // Without a daemon nobody can say that nobody holds it.
    daemon.kill();
    let output = gpureap_tests::harness::finish(world.enter(command())).expect_code(7);
    assert_eq!(output.json()["outcome"], "not-permitted");
}

/// Prints what an idle wait costs and how soon it ends.
#[test]
fn v7_it_ends_within_milliseconds_and_costs_next_to_nothing() {
    // An emulated processor says little about time.
    let rounds = if std::env::var_os("GPUREAP_TEST_VM").is_some() { 2 } else { 10 };
    with_and_without_daemon("V7", |bench, source| {
        for ending in ["close", "exit"] {
            let (mut answers, mut ends) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                let scene = (ending == "exit").then(|| Scene::start("plain", DEV, &[]));
                let own = (ending == "close").then(|| File::open(DEV).expect(DEV));
                let mut waiting = Waiting::on(bench, &[]);
                waiting.goes_on();
                if round == 0 {
                    let (before, begun) = (cpu_ms(waiting.child.id()), Instant::now());
                    std::thread::sleep(Duration::from_secs(3));
                    let used = cpu_ms(waiting.child.id()) - before;
                    let share = 100.0 * used / begun.elapsed().as_secs_f64() / 1_000.0;
                    note(&format!("V7 {source}: an idle wait uses {share:.2} % of a processor"));
                    assert!(share < 20.0, "{share} %");
                }
                let (free, wall) = (Instant::now(), SystemTime::now());
                match (scene, own) {
                    (Some(scene), _) => sys::kill(scene.pid(), sys::SIGKILL),
                    (None, own) => drop(own),
                }
                let status = waiting.child.wait().expect("wait");
                ends.push(free.elapsed().as_secs_f64() * 1_000.0);
                assert!(status.success());
                answers.push(end_of(&waiting.output().json()) - epoch_ms(wall));
            }
            for (what, times) in [("a verified answer", &mut answers), ("the end of the process", &mut ends)] {
                times.sort_by(f64::total_cmp);
                let (median, most) = (times[rounds / 2], times[rounds - 1]);
                note(&format!("V7 {source}: from {ending} to {what}: median {median:.2} ms, most {most:.2} ms"));
                assert!(median < SOON.as_secs_f64() * 1_000.0, "{times:?}");
            }
        }
    });
}

fn epoch_ms(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs_f64() * 1_000.0
}

/// When a wait had its answer, which the rest of the process's end follows.
fn end_of(json: &Value) -> f64 {
    let text = json["time"].as_str().expect("a time");
    let (_, time) = text.trim_end_matches('Z').split_once('T').expect("RFC 3339");
    let seconds = time.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().expect("a number"));
    let day = 86_400_000.0;
    let today = (epoch_ms(SystemTime::now()) / day).floor() * day;
    today + seconds * 1_000.0 + json["waited_ms"].as_f64().expect("a number")
}

/// Time on a processor.
fn cpu_ms(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/schedstat")).expect("schedstat");
    let ns: f64 = stat.split(' ').next().and_then(|text| text.parse().ok()).expect("a number");
    ns / 1e6
}
