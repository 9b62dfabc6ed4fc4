//! `gpureap reap` as people and scripts run it. Only processes of the test are ever named to it.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, in its helpers too")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
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

fn gpureap(stage: &Stage, args: &[&str]) -> Output {
    let mut command = Command::new(GPUREAP);
    command.args(args).env("GPUREAP_STATE_DIR", &stage.config.paths.state).stdin(Stdio::null());
    for StandIn { major, minor, node } in &stage.devices {
        command.args(["--device", &format!("kind=standin,major={major},minor={minor},node={}", node.display())]);
    }
    command.output().unwrap()
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
    let attached = gpureap(&stage, &["reap", "--gpu", "0", "--pid", &pid(&first), "--json"]);
    let report: Value = serde_json::from_slice(&attached.stdout).unwrap();
    assert_eq!(report["outcome"], "nothing-to-do");

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
            "200ms",
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
