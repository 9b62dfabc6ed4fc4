//! Whether a probe set runs on this kernel: whole, or refused with the reason and nothing of it left.
use std::{collections::BTreeMap, fs::File};

use gpureap_tests::harness::{
    Bench, Daemon, Device, PATIENCE, held_by_kernel, lacking, pinned, record, settle, to_be_refused,
};
use serde_json::json;

/// In a virtual machine the kernel was chosen for the set, elsewhere all sets are tried: what the host refuses is refused well.
fn sets() -> Vec<String> {
    match std::env::var("GPUREAP_TEST_BACKEND") {
        Ok(asked) if in_vm() => vec![asked],
        _ => ["kprobe", "fentry", "gate"].map(str::to_owned).to_vec(),
    }
}

fn in_vm() -> bool {
    std::env::var_os("GPUREAP_TEST_VM").is_some()
}

#[test]
fn a_probe_set_attaches_whole_or_not_at_all() {
    record(&kernel());
    for set in sets() {
        let mut bench = Bench::new(&[Device::zero()]);
        bench.backend = set;
        // Of somebody else's gpureap.
        let before = held_by_kernel();
        match Daemon::try_start(&bench, &["daemon"]) {
            Ok(mut daemon) => {
                attached(&bench);
                assert!(daemon.stop().success());
            }
            Err(status) => {
                assert_eq!(status.code(), Some(8), "the exit code of a refusal");
                refused(&bench, &before);
            }
        }
    }
}

fn attached(bench: &Bench) {
    assert!(!to_be_refused(), "{}: attached where it has to be refused", bench.backend);
    let programs = pinned(&bench.set());
    assert_eq!(lacking(bench.kind(), &programs), Vec::<String>::new(), "{} is whole", bench.backend);
    record(&json!({"kind": "attached", "programs": programs}));
}

fn refused(bench: &Bench, before: &BTreeMap<u32, String>) {
    let set = &bench.backend;
    let output = bench.run(&["daemon"]).expect_code(8);
    let complaint = output.complaint();
    let reason = complaint.strip_prefix("gpureap: ").unwrap_or(complaint);
    assert!(to_be_refused() || !in_vm(), "{set}: refused, {reason}");
    if to_be_refused() {
        let sentences =
            ["tracing needs Linux 6.1 or later, and this is ", "skips kprobe programs without counting them"];
        assert!(sentences.iter().any(|known| reason.contains(known)), "{set}: said so that one knows why, {reason}");
    }
    assert!(!bench.pins().exists(), "{set}: nothing is pinned");
    let clean = settle(PATIENCE, || {
        let mut left = held_by_kernel();
        left.retain(|id, _| !before.contains_key(id));
        (!left.is_empty()).then_some(left)
    });
    assert_eq!(clean, Ok(()), "{set}: nothing is loaded");

    // What needs no probe set still answers.
    let held = File::open("/dev/zero").expect("/dev/zero");
    let seen = bench.holders(&[]);
    assert!(seen.holder(std::process::id() as i32).is_some(), "{set}: without a daemon, {}", seen.json);
    drop(held);

    // Left to itself gpureap takes another set, if one runs.
    match Daemon::try_start(bench, &["daemon", "--backend", "auto"]) {
        Ok(_daemon) => assert_ne!(&bench.look().backend, set, "refused a moment ago"),
        Err(status) => assert_eq!(status.code(), Some(8), "{set}: none of them runs"),
    }
    record(&json!({"kind": "refused", "code": output.code, "reason": reason, "holders_by": seen.source}));
}

/// What this kernel says of itself.
fn kernel() -> serde_json::Value {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).ok();
    json!({"kind": "kernel", "release": read("/proc/sys/kernel/osrelease"), "version": read("/proc/sys/kernel/version"),
        "preemption": read("/sys/kernel/debug/sched/preempt")})
}
