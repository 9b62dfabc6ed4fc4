//! What node-problem-detector is told: the scripts of packaging/kubernetes with a real gpureap, and names of pods from the trees that a
//! kubelet makes.
use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use gpureap_tests::harness::{
    Bench, Daemon, Device, Freezer, Groups, Holder, Log, Output, Pid, Scene, finish, skip, wait_for,
};

const DEV: &str = "/dev/full";
const UID: &str = "0a1b2c3d-1111-2222-3333-444455556666";
const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
/// As node-problem-detector has it by default.
const LONGEST: usize = 80;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/kubernetes").join(name)
}

fn result(bench: &Bench) -> PathBuf {
    bench.path("result")
}

/// One round of the container `check`, without the plugin.
fn check(bench: &Bench) {
    let gpureap = bench.command(&[]);
    let mut command = Command::new("sh");
    command.arg(script("check-loop.sh")).arg("--once").env("GPUREAP", gpureap.get_program());
    for (name, value) in gpureap.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    command.env("GPUREAP_CHECK_FILE", result(bench)).env("GPUREAP_CHECK_XIDS", "1h");
    finish(command).expect_code(0);
}

/// What the plugin says.
fn plugin(bench: &Bench) -> Output {
    let mut command = Command::new("sh");
    command.arg(script("npd-plugin.sh")).env("GPUREAP_CHECK_FILE", result(bench)).env("GPUREAP_CHECK_AGE", "60");
    let output = finish(command);
    assert!(output.stdout.len() <= LONGEST + 1 && output.stdout.lines().count() == 1, "{output:?}");
    output
}

#[track_caller]
fn expect(bench: &Bench, code: i32, words: &[&str]) {
    check(bench);
    let output = plugin(bench).expect_code(code);
    assert!(words.iter().all(|word| output.stdout.contains(word)), "{words:?} in {output:?}");
}

/// A process that its parent has left.
fn orphan() -> Pid {
    let script = format!("setsid sleep 600 <{DEV} >/dev/null 2>&1 & echo $!");
    let output = Command::new("sh").args(["-c", &script]).output().expect("sh");
    let pid = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a pid");
    wait_for("it holds", || fs::read_link(format!("/proc/{pid}/fd/0")).is_ok_and(|target| target == Path::new(DEV)));
    pid
}

#[test]
fn what_node_problem_detector_is_told() {
    let test = "node-problem-detector";
    let bench = Bench::new(&[Device::full()]);
    if !bench.is_free(test) {
        return;
    }
    assert!(plugin(&bench).expect_code(2).stdout.starts_with("gpureap has written nothing"));
    let mut log = Log::of(&bench);
    let mut daemon = Daemon::start(&bench);
    expect(&bench, 0, &["no GPU is held by whom it should not be"]);

    // A job that somebody runs is nobody's business.
    let job = Scene::start("plain", DEV, &[]);
    expect(&bench, 0, &[]);
    drop(job);

    let left = orphan();
    expect(&bench, 1, &[&format!("/dev/full held by sleep (pid {left}, root, orphan)")]);

    // It cannot be freed.
    match Freezer::new(&bench.path("freezer")) {
        Ok(freezer) => {
            freezer.freeze(left);
            bench.run(&["reap", "--yes", "--now", "--timeout", "500ms"]).expect_code(4);
            expect(&bench, 1, &[&format!("pid {left}"), "D state"]);
            freezer.thaw();
        }
        Err(error) => {
            skip(test, &format!("no freezer of version 1: {error}"));
            bench.run(&["reap", "--yes", "--now"]).expect_code(0);
        }
    }
    wait_for("it is gone", || !Path::new(&format!("/proc/{left}/fd/0")).exists());
    expect(&bench, 0, &[]);

    // Errors of a program are its own; the hardware's are the node's.
    log.say("NVRM: Xid (PCI:0000:d8:00): 31, pid=462, name=python3, MMU Fault");
    log.say("NVRM: Xid (PCI:0000:d8:00): 79, GPU has fallen off the bus.");
    wait_for("the daemon has written it down", || {
        check(&bench);
        plugin(&bench).code == 1
    });
    expect(&bench, 1, &["0000:d8:00.0: Xid 79"]);

    daemon.kill();
    expect(&bench, 2, &["no gpureap daemon runs"]);

    // What is old is not believed.
    let old = SystemTime::now() - Duration::from_mins(5);
    File::options().write(true).open(result(&bench)).and_then(|file| file.set_modified(old)).expect("make it old");
    assert!(plugin(&bench).expect_code(2).stdout.starts_with("gpureap has written nothing for "));
    for (text, expected) in [("", "ended with nothing"), ("x\ny\n", "ended with x"), ("124\n\n", "took too long")] {
        fs::write(result(&bench), text).expect("write the result");
        assert!(plugin(&bench).expect_code(2).stdout.contains(expected), "{text:?}");
    }
}

#[test]
fn pods_are_named_and_those_that_are_gone_are_told() {
    let test = "pods";
    let bench = Bench::new(&[Device::full()]);
    let Some(mut groups) = Groups::new() else { return skip(test, "no cgroup2 root") };
    if !bench.is_free(test) {
        return;
    }
    let logs = bench.path("host/var/log/pods");
    let own = logs.join(format!("ml_train-0_{UID}"));
    fs::create_dir_all(own.join("worker")).expect("the logs of a pod");
    let _daemon = Daemon::start(&bench);
    let mut holder = Holder::start();
    groups.put(holder.pid(), &format!("kubepods/burstable/pod{UID}/{ID}"));
    let seen = bench.holders(&[]).json;
    let one = &seen["holders"][0];
    assert_eq!((&one["pod"], &one["container"]), (&UID.into(), &ID.into()), "{one:#}");
    assert_eq!((&one["pod_name"], &one["pod_namespace"]), (&"train-0".into(), &"ml".into()), "{one:#}");
    bench.run(&["check", "--orphans"]).expect_code(0);
    let held = bench.run(&["check", "--free"]).expect_code(3).stdout;
    assert!(held.contains("pod ml/train-0"), "{held}");

    // The kubelet forgets the pod; its process is still there.
    fs::remove_dir_all(&own).expect("remove the logs");
    let gone = bench.run(&["check", "--orphans"]).expect_code(3).stdout;
    assert!(gone.contains(&format!("pid {}", holder.pid())) && gone.contains("orphan"), "{gone}");
    // Where others can make names, nobody is said to be gone.
    fs::set_permissions(&logs, fs::Permissions::from_mode(0o777)).expect("chmod");
    bench.run(&["check", "--orphans"]).expect_code(0);
    assert!(holder.lives());
}
