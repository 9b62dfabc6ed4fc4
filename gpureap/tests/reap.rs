//! `gpureap reap` as people and scripts run it. Only processes of the test are ever named to it.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, in its helpers too")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::{
        fs::PermissionsExt as _,
        process::{CommandExt as _, ExitStatusExt as _},
    },
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use gpureap::{
    config::{Config, StandIn},
    demo::stage::Stage,
};
use serde_json::Value;

const GPUREAP: &str = env!("CARGO_BIN_EXE_gpureap");

struct Holder(Child);

impl Holder {
    fn new(kind: &str, node: &Path) -> Self {
        let mut child = Command::new(GPUREAP)
            .args(["actor", kind])
            .arg(node)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("{kind} {}\n", child.id()));
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (_reader, writer) = std::io::pipe().unwrap();
    writer.into()
}

fn gpureap(stage: &Stage, args: &[&str]) -> Output {
    command(stage, args).output().unwrap()
}

fn command(stage: &Stage, args: &[&str]) -> Command {
    let mut command = Command::new(GPUREAP);
    command.args(args).env("GPUREAP_STATE_DIR", &stage.config.paths.state).stdin(Stdio::null());
    for StandIn { major, minor, node } in &stage.devices {
        command.args(["--device", &format!("kind=standin,major={major},minor={minor},node={}", node.display())]);
    }
    command
}

#[test]
fn reap_named_holders() {
    let stage = match Stage::set(&Config::default(), 2) {
        Ok(stage) => stage,
        Err(error) => {
            eprintln!("SKIPPED: stand-in devices need root and a mount namespace: {error:#}");
            return;
        }
    };
    let node = |index: usize| stage.devices[index].node.as_path();
    let (mut first, mut other, mut stubborn) =
        (Holder::new("worker", node(0)), Holder::new("worker", node(1)), Holder::new("stubborn", node(0)));
    let pid = |holder: &Holder| holder.0.id().to_string();

    let plan = gpureap(&stage, &["reap", "--pid", &pid(&first), "--dry-run"]);
    let text = String::from_utf8(plan.stdout).unwrap();
    assert!(plan.status.success() && text.contains("would be signalled") && text.contains(&pid(&first)), "{text}");
    assert!(first.0.try_wait().unwrap().is_none());

    // On device 1 the holder of device 0 is nobody's business, and a descriptor alone is not `attached`.
    let wrong = gpureap(&stage, &["reap", "--gpu", "1", "--match", "any", "--pid", &pid(&first), "--json"]);
    let report: Value = serde_json::from_slice(&wrong.stdout).unwrap();
    assert_eq!((report["outcome"].as_str(), wrong.status.code()), (Some("nothing-to-do"), Some(0)));
    assert_eq!(report["unmatched"][0]["reason"], "holds-nothing");
    let attached = gpureap(&stage, &["reap", "--gpu", "0", "--pid", &pid(&first), "--json"]);
    let report: Value = serde_json::from_slice(&attached.stdout).unwrap();
    assert_eq!((&report["outcome"], &report["skipped"][0]["reason"]), (&"nothing-to-do".into(), &"handle-only".into()));

    // A closed stdout and a full stderr change neither what is done nor the exit code.
    for (stdout, args, code) in [
        ("closed", &["reap", "--gpu", "0", "--match", "any", "--pid", &pid(&first), "--dry-run"][..], 0),
        ("closed", &["reap", "--gpu", "99"][..], 2),
        ("open", &["reap", "--gpu", "99"][..], 2),
        ("open", &["-vvv", "holders"][..], 0),
    ] {
        let mut command = command(&stage, args);
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        command.stderr(full).stdout(if stdout == "closed" { closed_pipe() } else { Stdio::null() });
        assert_eq!(command.status().unwrap().code(), Some(code), "{stdout} {args:?}");
    }

    let done = gpureap(
        &stage,
        &[
            "reap",
            "--gpu",
            "0",
            "--match",
            "any",
            "--pid",
            &pid(&first),
            "--pid",
            &pid(&stubborn),
            "--grace",
            "2s",
            "--json",
        ],
    );
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!((report["outcome"].as_str(), done.status.code()), (Some("freed"), Some(0)), "{report:#}");
    assert_eq!(report["processes"].as_array().unwrap().len(), 2);
    assert_eq!(report["devices"][0]["after"]["holders"], 0);
    assert_eq!(first.0.wait().unwrap().signal(), Some(libc::SIGTERM));
    assert_eq!(stubborn.0.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(other.0.try_wait().unwrap().is_none());
    let records = fs::read_to_string(stage.config.paths.state.join("reaps.ndjson")).unwrap();
    assert_eq!(records.lines().count(), 3, "{records}");

    let text = gpureap(&stage, &["reap", "--pid", &pid(&other), "--now"]);
    let shown = String::from_utf8(text.stdout).unwrap();
    assert!(shown.starts_with("KILL ") && shown.trim_end().lines().last().unwrap().starts_with("freed in "), "{shown}");
    assert_eq!(text.status.code(), Some(0));
    assert!(stage.strike());
}

#[test]
fn without_devices_there_is_nothing_to_reap() {
    let place = tempfile::tempdir().unwrap();
    let output = Command::new(GPUREAP)
        .args(["reap", "--yes"])
        .env("GPUREAP_PROC", place.path())
        .env("GPUREAP_CONFIG", place.path().join("none"))
        .env("GPUREAP_DEV", place.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(8));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no NVIDIA device"));
}

/// The program as nobody runs it, from a place that every user may enter, with /dev/full for a device.
struct Nobody(tempfile::TempDir);

impl Nobody {
    const ID: u32 = 65_534;

    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::copy(GPUREAP, place.path().join("gpureap")).unwrap();
        Some(Self(place))
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.0.path().join("gpureap"));
        command
            .args(words)
            .args(["--device", "kind=standin,major=1,minor=7,node=/dev/full"])
            .env("GPUREAP_PIN_DIR", self.0.path().join("pins"))
            .env("GPUREAP_CONFIG", self.0.path().join("none"))
            .env("GPUREAP_BACKEND", "")
            .stdin(Stdio::null())
            .uid(Self::ID)
            .gid(Self::ID);
        command
    }

    fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = self.command(words).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    }
}

#[test]
fn an_ordinary_user_is_told_what_is_out_of_sight() {
    let Some(nobody) = Nobody::new() else {
        eprintln!("SKIPPED: becoming another user needs root");
        return;
    };
    let (code, text) = nobody.run(&["reap", "--dry-run"]);
    assert!(code == Some(0) && text.starts_with("nobody that was seen holds what was chosen\n"), "{text}");
    assert!(text.contains("may not be read") && text.contains("incomplete: "), "{text}");
    let (code, text) = nobody.run(&["reap", "--pid", "1"]);
    assert!(code == Some(7) && text.contains("process 1: not permitted") && !text.contains("free"), "{text}");
    let (code, text) = nobody.run(&["reap", "--pid", "4194305"]);
    assert!(code == Some(0) && text.ends_with("no process 4194305\n"), "{text}");
    // The failure is told by the exit code even where nobody reads the text.
    let closed = nobody.command(&["reap", "--pid", "1"]).stdout(closed_pipe()).status().unwrap();
    assert_eq!(closed.code(), Some(7));
    let closed = nobody.command(&["doctor"]).stdout(closed_pipe()).status().unwrap();
    assert_eq!(closed.code(), Some(7));

    let (code, text) = nobody.run(&["man", "/gpureap-test-man"]);
    assert_eq!(code, Some(7), "{text}");
    assert_eq!(text, "gpureap: cannot write man pages to /gpureap-test-man: Permission denied (os error 13)\n");

    let mut own = Command::new("sleep")
        .arg("100")
        .stdin(fs::File::open("/dev/full").unwrap())
        .uid(Nobody::ID)
        .gid(Nobody::ID)
        .spawn()
        .unwrap();
    let output = nobody.command(&["reap", "--include-own-session", "--json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["outcome"], output.status.code()), (&"freed".into(), Some(0)), "{report:#}");
    assert_eq!((&report["verified"], &report["complete"]), (&false.into(), &false.into()));
    assert_eq!(own.wait().unwrap().signal(), Some(libc::SIGTERM));
}
