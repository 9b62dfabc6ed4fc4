//! How a process ended, and by whom.
use std::{
    fs,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use gpureap_tests::harness::{Device, NOBODY, Player, Role, finish, sys};
use serde_json::{Value, json};

use crate::{
    DEV, elsewhere, in_vm,
    record::{dead, hold, incident, lineage, report, strings, until, until_held},
    shared,
};

fn find_program(name: &str) -> Option<PathBuf> {
    ["/bin", "/usr/bin"].iter().map(|place| Path::new(place).join(name)).find(|path| path.exists())
}

fn expect(death: &Value, field: &str, value: impl Into<Value>) {
    assert_eq!(death[field], value.into(), "{field} in {death:#}");
}

#[test]
fn p1_killed_by_a_person_at_a_shell() {
    let bench = shared();
    let mut player = Player::holding(DEV);
    until_held(&bench, &[player.pid()]);
    let line = format!("kill -9 {}; :", player.pid());
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &line]);
    let mut shell = shell.spawn().expect("a shell");
    let by = shell.id();
    assert!(shell.wait().expect("wait").success());
    assert_eq!(player.end().signal(), Some(9));
    let process = dead(&bench, player.pid(), "killed-by");
    let death = &process["death"];
    expect(death, "signal", "SIGKILL");
    expect(death, "code", Value::Null);
    expect(death, "core", false);
    let sender = &death["sender"];
    expect(sender, "pid", by);
    expect(sender, "comm", "sh");
    expect(sender, "uid", 0);
    expect(sender, "user", "root");
    expect(sender, "argv", json!(["/bin/sh", "-c", line]));
    assert_eq!(lineage(sender)[0], sys::pid(), "who started the shell: {sender:#}");
    assert_eq!(process["exit"], json!({"signal": 9}), "{process:#}");
    let report = report(&bench, &[]);
    assert_eq!(hold(&report, player.pid())["ended"], "exited");
    let incident = incident(&report, player.pid());
    assert_eq!(incident["cause"], "killed-by", "{incident:#}");
    assert!(
        incident["title"].as_str().is_some_and(|title| title.contains(&format!("SIGKILL from sh (pid {by}, uid 0)")))
    );
}

#[test]
fn p1_killed_by_the_pkill_of_a_script() {
    let bench = shared();
    let mark = format!("job-of-test-{}", sys::pid());
    let mut player = Player::with(&Role { arguments: &[&mark], ..Role::default() });
    player.ask(&format!("open {DEV}"));
    until_held(&bench, &[player.pid()]);
    let place = tempfile::tempdir().expect("a directory");
    let script = place.path().join("stop-jobs");
    // Not the last word, so that the shell stays.
    let pid = player.pid().to_string();
    // busybox need not have a pkill.
    let (program, arguments) = match find_program("pkill") {
        Some(pkill) => (pkill, vec!["-9", "-f", &mark]),
        None => (find_program("kill").expect("a program that kills"), vec!["-9", &pid]),
    };
    let argv: Vec<&str> = std::iter::once(program.to_str().expect("a path")).chain(arguments).collect();
    fs::write(&script, format!("{}\nexit 0\n", argv.join(" "))).expect("write the script");
    let mut command = Command::new("/bin/sh");
    command.arg(&script);
    finish(command).expect_code(0);
    assert_eq!(player.end().signal(), Some(9));
    let process = dead(&bench, player.pid(), "killed-by");
    let sender = &process["death"]["sender"];
    let comm = program.file_name().and_then(std::ffi::OsStr::to_str).expect("a name");
    expect(sender, "comm", comm);
    expect(sender, "argv", json!(argv));
    expect(&sender["lineage"][0], "argv", json!(["/bin/sh", script]));
    expect(&sender["lineage"][0], "comm", "sh");
    assert_eq!(lineage(sender)[1], sys::pid(), "{sender:#}");
}

#[test]
fn p1_killed_by_an_ordinary_user() {
    if elsewhere("P1 by a user") {
        return;
    }
    let bench = shared();
    let Some(world) = bench.user("P1 by a user") else { return };
    let mut player = Player::with(&Role { user: Some(NOBODY), ..Role::default() });
    // Only root may write to some devices.
    player.ask(&format!("open {DEV}"));
    until_held(&bench, &[player.pid()]);
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &format!("kill -TERM {}; :", player.pid())]);
    finish(world.enter(shell)).expect_code(0);
    assert_eq!(player.end().signal(), Some(15));
    let process = dead(&bench, player.pid(), "killed-by");
    expect(&process, "uid", NOBODY);
    expect(&process["death"], "signal", "SIGTERM");
    expect(&process["death"]["sender"], "uid", NOBODY);
    expect(&process["death"]["sender"], "user", process["user"].clone());
}

#[test]
fn p1_reaped_by_gpureap() {
    if !Device::full().is_free("P1 reap") {
        return;
    }
    let bench = shared();
    let mut player = Player::holding(DEV);
    until_held(&bench, &[player.pid()]);
    let mut gpureap = bench.command(&["reap", "--now", "--yes", "--json"]);
    let mut gpureap = gpureap.stdout(std::process::Stdio::null()).spawn().expect("start gpureap");
    let by = gpureap.id();
    assert!(gpureap.wait().expect("wait").success());
    assert_eq!(player.end().signal(), Some(9));
    let process = dead(&bench, player.pid(), "reaped");
    let death = &process["death"];
    expect(death, "signal", "SIGKILL");
    expect(&death["sender"], "pid", by);
    expect(&death["sender"], "comm", "gpureap");
    expect(&death["sender"], "uid", 0);
    assert!(strings(&death["sender"]["argv"]).ends_with(&["reap", "--now", "--yes", "--json"]), "{death:#}");
    assert_eq!(lineage(&death["sender"])[0], sys::pid(), "{death:#}");
    let evidence = death["evidence"].to_string();
    assert!(evidence.contains(&format!("gpureap (pid {by}, uid 0) sent SIGKILL")), "{death:#}");
    assert_eq!(incident(&report(&bench, &[]), player.pid())["cause"], "reaped");
}

#[test]
fn p1_a_request_of_gpureap_that_is_handled_is_a_reap() {
    if elsewhere("P1 TERM") || !Device::full().is_free("P1 reap with TERM") {
        return;
    }
    let bench = shared();
    let mut player = Player::holding(DEV);
    player.ask("on-term 0");
    until_held(&bench, &[player.pid()]);
    bench.run(&["reap", "--yes", "--json"]).expect_code(0);
    assert_eq!(player.end().code(), Some(0));
    let death = &dead(&bench, player.pid(), "reaped")["death"];
    expect(death, "code", 0);
    expect(death, "signal", Value::Null);
}

#[test]
fn p3_an_exit_with_137_is_no_kill() {
    if elsewhere("P3 137") {
        return;
    }
    let bench = shared();
    let mut player = Player::holding(DEV);
    until_held(&bench, &[player.pid()]);
    player.tell("exit 137");
    assert_eq!(player.end().code(), Some(137));
    let process = dead(&bench, player.pid(), "exited");
    let death = &process["death"];
    expect(death, "code", 137);
    expect(death, "signal", Value::Null);
    expect(death, "sender", Value::Null);
    assert!(death["evidence"].to_string().contains("no signal ended this process"), "{death:#}");
    assert_eq!(process["exit"], json!({"code": 137}), "{process:#}");
    assert_eq!(incident(&report(&bench, &[]), player.pid())["cause"], "exited");
}

#[test]
fn p3_a_request_that_is_handled_is_an_exit() {
    if elsewhere("P3 TERM") {
        return;
    }
    let bench = shared();
    let mut player = Player::holding(DEV);
    player.ask("on-term 0");
    until_held(&bench, &[player.pid()]);
    sys::kill(player.pid(), sys::SIGTERM);
    assert_eq!(player.end().code(), Some(0));
    let process = dead(&bench, player.pid(), "exited");
    let death = &process["death"];
    expect(death, "code", 0);
    expect(death, "signal", Value::Null);
    expect(&death["sender"], "pid", sys::pid());
    assert!(death["evidence"].to_string().contains("which it handled"), "{death:#}");
    assert_eq!(process["incident"], Value::Null, "nothing went wrong: {process:#}");
}

/// Over before anybody can look.
#[test]
fn p3_a_life_of_a_moment_is_in_the_record() {
    let bench = shared();
    let mut player = Player::start();
    player.tell(&format!("open {DEV}"));
    player.tell("exit 3");
    assert_eq!(player.end().code(), Some(3));
    let process = dead(&bench, player.pid(), "exited");
    expect(&process["death"], "code", 3);
    assert_eq!(lineage(&process)[0], sys::pid(), "{process:#}");
    let report = until(&bench, &[], "it held", |report| !crate::record::holds(report, player.pid()).is_empty());
    expect(hold(&report, player.pid()), "ended", "exited");
}

/// Lets cores be written, where the machine is the test's own.
fn allow_cores() {
    if in_vm() {
        fs::write("/proc/sys/kernel/core_pattern", "/tmp/core").expect("the pattern of cores");
    }
}

#[test]
fn p5_a_segmentation_fault_in_a_thread() {
    allow_cores();
    let bench = shared();
    for core in [false, true] {
        let mut player = Player::holding(DEV);
        let tid = player.ask("thread pt_autograd_0");
        if core {
            player.ask("core");
        }
        until_held(&bench, &[player.pid()]);
        player.tell("fault pt_autograd_0");
        let status = player.end();
        assert_eq!(status.signal(), Some(11));
        if !core || in_vm() {
            assert_eq!(status.core_dumped(), core);
        }
        let process = dead(&bench, player.pid(), "fault");
        let death = &process["death"];
        expect(death, "signal", "SIGSEGV");
        expect(death, "core", status.core_dumped());
        expect(death, "thread", json!({"tid": tid, "name": "pt_autograd_0"}));
        expect(death, "sender", Value::Null);
        assert_eq!(incident(&report(&bench, &[]), player.pid())["cause"], "fault");
    }
    fs::remove_file("/tmp/core").ok();
}
