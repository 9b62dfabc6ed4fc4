//! What a reap must never do, and what it must do for whole jobs: reused pids, trees, cgroups, the unkillable.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use gpureap::{
    bpf::load::cgroup2_root,
    eyes,
    model::{Eyes, ProcKey},
    reap::{
        ladder::{Act, End, Ladder, Ledger, Rungs},
        people::ProcPeople,
        pidfd::Pidfds,
        plan::{Action, Class, Row, Via},
    },
};
use gpureap_tests::harness::{Bench, Device, Freezer, Output, Pid, Scene, Shared, anybody, note, skip, sys, wait_for};
use serde_json::Value;

const DEV: &str = "/dev/full";

fn shared(test: &str) -> Option<Shared> {
    let bench = Shared::new(&[Device::full()]);
    bench.is_free(test).then_some(bench)
}

fn alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().is_empty() && !rest.trim_start().starts_with('Z'))
}

fn reap(bench: &Bench, rest: &[&str]) -> Output {
    bench.run(&[&["reap", "--yes", "--json"], rest].concat())
}

fn process(report: &Value, pid: Pid) -> &Value {
    let list = report["processes"].as_array().expect("processes");
    list.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{pid} in {report:#}"))
}

/// Writes nothing down.
struct NoLedger;

impl Ledger for NoLedger {
    fn before(&mut self, _act: Act<'_>, _to: &[ProcKey]) {}
}

/// A child with that pid, or with any, which holds the device or does not. Forked while other threads run, so the child
/// allocates nothing: another thread may have been in the middle of it.
fn child(pid: Option<Pid>, holds: bool) -> io::Result<Pid> {
    let device = sys::cstr(DEV);
    let (ready, tell) = sys::pipe();
    let child = pid.map_or_else(|| Ok(sys::fork()), sys::fork_as)?;
    if child == 0 {
        // SAFETY: a path that ends in a zero, made before the fork.
        let opened = !holds || unsafe { libc::open(device.as_ptr(), libc::O_RDWR) } >= 0;
        if opened {
            sys::write_all(tell, b"x");
        }
        sys::close(tell);
        loop {
            sys::sleep(1_000_000);
        }
    }
    sys::close(tell);
    let told = sys::read(ready, &mut [0]);
    sys::close(ready);
    if told == 0 {
        sys::kill(child, libc::SIGTERM);
        panic!("the child {child} said nothing, wait status {:#x} (0xf: it could not open {DEV})", sys::reap(child));
    }
    Ok(child)
}

fn end(pid: Pid) -> i32 {
    sys::kill(pid, libc::SIGKILL);
    sys::reap(pid)
}

/// K3, 1,000 times (100 on an emulated processor): between the look and the kill the holder ends and another process gets its pid, often within one
/// tick of the clock that /proc tells starts in, and in half of the rounds while the reap runs.
#[test]
fn k3_whoever_gets_the_pid_of_a_holder_lives() {
    let Some(bench) = shared("K3") else { return };
    let opened = eyes::open(&bench.config(), None).expect("eyes");
    let eyes: &dyn Eyes = opened.eyes.as_ref();
    let people = ProcPeople::new("/proc");
    let slot = opened.devices.gpus().next().expect("the stand-in").slot;
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    let mut one_tick = 0;
    let rounds = if std::env::var_os("GPUREAP_TEST_VM").is_some() { 100 } else { 1_000 };
    for round in 0..rounds {
        let pid = child(None, true).expect("fork");
        let holder = eyes.look_at(pid as u32).expect("a look").expect("it holds");
        let row = Row {
            key: holder.key,
            via: Via::Device,
            slots: [slot].into(),
            class: Class::Job,
            class_rule: "default".to_owned(),
            action: Action::Signal,
            stop_unit: None,
        };
        let innocent_holds = round % 3 != 0;
        let replace = || {
            end(pid);
            child(Some(pid), innocent_holds)
        };
        let mut signaller = Pidfds::new();
        let rungs = Rungs { now: true, grace: Duration::ZERO, timeout: Duration::from_secs(5) };
        let mut ladder = Ladder { eyes, kinship: &people, signaller: &mut signaller, ledger: &mut NoLedger, rungs };
        let (fates, innocent) = if round % 2 == 0 {
            let innocent = replace();
            (ladder.climb(&[&row], &[]), innocent)
        } else {
            std::thread::scope(|scope| {
                let replaced = scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(round % 250));
                    replace()
                });
                let fates = ladder.climb(&[&row], &[]);
                (fates, replaced.join().expect("no panic"))
            })
        };
        let innocent = match innocent {
            Ok(innocent) => innocent,
            Err(error) => return skip("K3", &format!("clone3 with a pid: {error}")),
        };
        assert_eq!(innocent, pid);
        let fate = fates.expect("a climb").remove(0);
        if let Some(held) = eyes.look_at(pid as u32).expect("a look") {
            one_tick += u32::from(held.key.start_ns / 10_000_000 == holder.key.start_ns / 10_000_000);
        }
        assert!(alive(pid), "round {round}: the innocent process was killed: {fate:?}");
        if round % 2 == 0 {
            assert!(matches!(fate.end, End::PidReused | End::Released), "round {round}: {fate:?}");
            assert!(fate.sent.is_empty(), "round {round}: {fate:?}");
        }
        *ends.entry(format!("{:?}", fate.end)).or_default() += 1;
        assert_eq!(end(pid) & 0x7f, libc::SIGKILL);
    }
    note(&format!("{ends:?}, {one_tick} of the innocent started in the tick of the holder"));
    if std::env::var_os("GPUREAP_TEST_VM").is_none() {
        assert!(one_tick > 0, "the rounds were too slow to meet the case that they are for");
    }
}

#[test]
fn two_hundred_holders_get_one_kill_each_in_one_pass() {
    let Some(bench) = shared("200") else { return };
    let scene = Scene::start("orphans", DEV, &["200", "4"]);
    let report = reap(&bench, &["--now"]).expect_code(0).json();
    let list = report["processes"].as_array().expect("processes");
    assert_eq!(list.len(), 200);
    for process in list {
        let signals = process["signals"].as_array().expect("signals");
        assert_eq!(signals.len(), 1, "{process:#}");
        assert_eq!(signals[0]["signal"], "SIGKILL");
    }
    assert_eq!(anybody(&Device::full().key()), Vec::<Pid>::new());
    drop(scene);
}

/// K10: the launcher holds nothing and its workers are in process groups of their own.
#[test]
fn k10_a_tree_takes_the_launcher_and_the_helpers() {
    let Some(bench) = shared("K10 tree") else { return };
    let scene = Scene::start("tree", DEV, &["3"]);
    let (launcher, workers, helpers) = (scene.number("launcher"), scene.numbers("workers"), scene.numbers("helpers"));
    let outsider = Scene::start("plain", "/dev/null", &[]);
    let report = reap(&bench, &["--scope", "tree", "--grace", "5s"]).expect_code(0).json();
    for pid in workers.iter().chain(&helpers).chain([&launcher]) {
        assert!(!alive(*pid), "{pid} of {report:#}");
    }
    assert_eq!(process(&report, workers[0])["via"], "device");
    assert_eq!(process(&report, launcher)["via"], "tree");
    assert!(alive(outsider.pid()), "beside the tree");
}

/// A cgroup of the unified hierarchy, removed with what is in it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Option<Self> {
        let path = cgroup2_root(Path::new("/proc"))?.join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a cgroup");
        Some(Self(path))
    }

    fn take(&self, pid: Pid) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("move into the cgroup");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        wait_for("the cgroup is empty", || {
            fs::read_to_string(self.0.join("cgroup.procs")).is_ok_and(|text| text.is_empty())
        });
        fs::remove_dir(&self.0).expect("remove the cgroup");
    }
}

#[test]
fn k10_a_cgroup_takes_everybody_in_it_by_the_kernel() {
    let Some(bench) = shared("K10 cgroup") else { return };
    let Some(cgroup) = Cgroup::new("gpureap-test-job") else { return skip("K10 cgroup", "no cgroup2 root") };
    let scene = Scene::start("tree", DEV, &["2"]);
    let (launcher, workers, helpers) = (scene.number("launcher"), scene.numbers("workers"), scene.numbers("helpers"));
    // The launcher stays outside: it is in the tree and not in the cgroup.
    for pid in workers.iter().chain(&helpers) {
        cgroup.take(*pid);
    }
    let report = reap(&bench, &["--scope", "cgroup", "--now"]).expect_code(0).json();
    for pid in workers.iter().chain(&helpers) {
        assert!(!alive(*pid), "{pid} of {report:#}");
    }
    assert_eq!(process(&report, helpers[0])["via"], "cgroup");
    assert!(alive(launcher));
    let record = fs::read_to_string(bench.path("state").join("reaps.ndjson")).expect("the record");
    let last: Vec<Value> = record.lines().rev().take(4).map(|line| serde_json::from_str(line).expect("JSON")).collect();
    if cgroup.0.join("cgroup.kill").exists() {
        assert!(last.iter().all(|line| line["cgroup"].as_str() == cgroup.0.to_str()), "{last:#?}");
    }
}

#[test]
fn v2_a_holder_that_cannot_die_is_diagnosed_within_the_time() {
    let Some(bench) = shared("V2") else { return };
    let freezer = match Freezer::new(&bench.path("freezer")) {
        Ok(freezer) => freezer,
        Err(error) => return skip("V2", &format!("no freezer of version 1: {error}")),
    };
    let scene = Scene::start("plain", DEV, &[]);
    let other = Scene::start("plain", DEV, &[]);
    freezer.freeze(scene.pid());
    let output = reap(&bench, &["--grace", "200ms", "--timeout", "1s"]).expect_code(4);
    let report = output.json();
    assert_eq!(report["outcome"], "unkillable");
    let entry = process(&report, scene.pid());
    let signals: Vec<&Value> = entry["signals"].as_array().expect("signals").iter().map(|s| &s["signal"]).collect();
    assert_eq!(signals, ["SIGTERM", "SIGKILL"], "bounded attempts");
    let stuck = &entry["stuck"];
    assert_eq!((&stuck["state"], &stuck["kill_pending"]), (&"D".into(), &true.into()), "{stuck:#}");
    assert!(!stuck["stack"].as_array().expect("a stack").is_empty() && stuck["wchan"].is_string(), "{stuck:#}");
    assert!(!alive(other.pid()), "the others are reaped all the same");
    // It is told to people too.
    let text = bench.run(&["reap", "--yes", "--now", "--timeout", "300ms"]).expect_code(4).stdout;
    assert!(text.contains("in state D") && text.contains("SIGKILL is pending"), "{text}");
    freezer.thaw();
    wait_for("it dies once it may", || !alive(scene.pid()));
    reap(&bench, &[]).expect_code(0);
}

/// The kernel's own record of signals, in a trace instance of our own.
struct SignalTrace(PathBuf);

impl SignalTrace {
    fn start() -> io::Result<Self> {
        let path = PathBuf::from("/sys/kernel/tracing/instances").join(format!("gpureap-test-{}", std::process::id()));
        fs::create_dir(&path)?;
        let trace = Self(path);
        fs::write(trace.0.join("events/signal/signal_generate/enable"), "1")?;
        Ok(trace)
    }

    /// The signals that were sent to these processes.
    fn sent_to(&self, pids: &BTreeSet<Pid>) -> Vec<String> {
        let text = fs::read_to_string(self.0.join("trace")).expect("the trace");
        let field = |line: &str, name: &str| {
            let at = line.find(name)? + name.len();
            line[at..].split(' ').next()?.parse::<i32>().ok()
        };
        let mine = |line: &&str| {
            line.contains("signal_generate:")
                && field(line, " pid=").is_some_and(|pid| pids.contains(&pid))
                && field(line, " sig=") != Some(libc::SIGCHLD)
        };
        text.lines().filter(mine).map(str::to_owned).collect()
    }
}

impl Drop for SignalTrace {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).expect("remove the trace instance");
    }
}

#[test]
fn a_dry_run_sends_no_signal_as_the_kernel_tells() {
    let Some(bench) = shared("dry run") else { return };
    let trace = match SignalTrace::start() {
        Ok(trace) => trace,
        Err(error) => return skip("dry run", &format!("no trace instance: {error}")),
    };
    let (plain, tree) = (Scene::start("plain", DEV, &[]), Scene::start("tree", DEV, &["2"]));
    let mut all: BTreeSet<Pid> = [plain.pid(), tree.number("launcher")].into();
    all.extend(tree.numbers("workers").into_iter().chain(tree.numbers("helpers")));
    for scope in ["process", "tree", "cgroup"] {
        for how in [&["--now"][..], &["--grace", "1s"], &["--stop-monitors"]] {
            let report = reap(&bench, &[&["--dry-run", "--scope", scope], how].concat()).expect_code(0).json();
            assert!(report["processes"].as_array().is_some_and(|list| list.len() >= 3), "{report:#}");
        }
    }
    assert_eq!(trace.sent_to(&all), Vec::<String>::new());
    assert!(all.iter().all(|pid| alive(*pid)));
    // The same trace shows a reap that is meant.
    reap(&bench, &["--scope", "tree", "--grace", "5s"]).expect_code(0);
    assert!(trace.sent_to(&all).len() >= all.len(), "{:?}", trace.sent_to(&all));
}

/// A child that reap cannot end for as long as its grace period lasts, so that the reap is in the middle of it.
fn in_the_middle(bench: &Bench, grace: &str) -> (Scene, std::process::Child) {
    let stubborn = Scene::start("ignore-term", DEV, &[]);
    let reap = bench
        .command(&["reap", "--yes", "--json", "--fence", "--grace", grace, "--include-own-session"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("gpureap");
    wait_for("the door is closed", refused);
    (stubborn, reap)
}

fn refused() -> bool {
    sys::try_open(DEV, libc::O_RDWR).map(sys::close).is_err_and(|error| error.raw_os_error() == Some(libc::EPERM))
}

/// K9: 1,000 times a new worker is started at once and tries, while a reap with a fence runs.
#[test]
fn k9_behind_the_fence_of_a_reap_no_open_gets_through_in_a_thousand_rounds() {
    let Some(bench) = shared("K9 fence") else { return };
    if cgroup2_root(Path::new("/proc")).is_none() {
        return skip("K9 fence", "no cgroup2 root");
    }
    let supervised = Scene::start("respawn", DEV, &[]);
    let (stubborn, reap) = in_the_middle(&bench, "5s");
    let rounds = if std::env::var_os("GPUREAP_TEST_VM").is_some() { 100 } else { 1_000 };
    let mut through = 0;
    for _ in 0..rounds {
        let worker = sys::fork();
        if worker == 0 {
            sys::exit(i32::from(sys::try_open(DEV, libc::O_RDWR).is_ok()));
        }
        through += sys::reap(worker);
    }
    assert_eq!(through, 0, "opens that got through in {rounds} rounds");
    assert!(alive(stubborn.pid()), "the reap was still waiting for it");
    let output = reap.wait_with_output().expect("the reap ends");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((output.status.code(), &report["outcome"]), (Some(0), &"freed".into()), "{report:#}");
    assert_eq!(report["respawned"], Value::Array(Vec::new()), "{report:#}");
    let denied = report["fence"]["denied"].as_u64().expect("a count");
    assert!(denied > rounds, "the rounds, and the supervisor's workers: {denied}");
    let tried = report["fence"]["tried"].as_array().expect("who tried");
    assert!(tried.iter().any(|one| one["comm"] == "worker"), "the supervisor's workers are named: {report:#}");
    assert!(!alive(supervised.pid()) && !alive(stubborn.pid()));
    // The door is open again, and the supervisor, which was not asked for, goes on.
    wait_for("the door is open", || !refused());
    wait_for("a new worker holds", || !anybody(&Device::full().key()).is_empty());
}

#[test]
fn a_reap_that_is_killed_leaves_no_fence_and_no_harm() {
    let Some(bench) = shared("killed reap") else { return };
    if cgroup2_root(Path::new("/proc")).is_none() {
        return skip("killed reap", "no cgroup2 root");
    }
    let (stubborn, mut reap) = in_the_middle(&bench, "60s");
    reap.kill().expect("kill gpureap");
    reap.wait().expect("gpureap is gone");
    wait_for("the door is open", || !refused());
    assert!(alive(stubborn.pid()));
    // Whoever comes next finishes the work.
    bench.run(&["reap", "--yes", "--now"]).expect_code(0);
    assert!(!alive(stubborn.pid()));
}
