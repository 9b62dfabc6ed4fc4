//! The whole matrix of kernel operations: after every step, the counts are exact.
use std::{collections::BTreeMap, path::Path, time::Duration};

use gpureap_common::counter;
use gpureap_tests::{
    actor::operations,
    harness::{
        Actor, Bench, Compare, Device, Said, Truth, pinned, preemptible, record, settle, skip, sys, to_be_refused,
    },
};
use serde_json::json;

/// The kernel takes back some files late: io_uring's from a worker, and exits take a moment.
const PATIENCE: Duration = Duration::from_secs(5);

fn devices() -> Vec<Device> {
    let mut devices =
        vec![Device::zero(), Device::mem(), Device::new(1, 11, "/dev/kmsg"), Device::new(5, 2, "/dev/ptmx")];
    devices.retain(|device| Path::new(&device.node).exists());
    devices.extend((0..4).map(|n| Device::new(136, n, &format!("/dev/pts/{n}"))));
    devices
}

/// What one operation led to.
#[derive(Default)]
struct Outcome {
    steps: u32,
    differences: Vec<String>,
    skipped: Option<String>,
}

fn perform(bench: &Bench, known: &[String], name: &str) -> Outcome {
    let mut outcome = Outcome::default();
    let mut actor = Actor::operation(name, "/dev/zero");
    loop {
        match actor.said() {
            Said::Step { step, devices } => {
                outcome.steps += 1;
                let truth: BTreeMap<String, Truth> =
                    devices.into_iter().filter(|(device, _)| known.contains(device)).collect();
                let settled = settle(PATIENCE, || {
                    let seen = bench.look();
                    assert_eq!(seen.source, "map", "the daemon's map is read");
                    let compare = Compare { sessions: vec![actor.session()] };
                    let differences = compare.differences(&truth, &seen);
                    (!differences.is_empty()).then_some(differences)
                });
                let differences = settled.err().unwrap_or_default();
                outcome.differences.extend(differences.into_iter().map(|text| format!("{step}: {text}")));
                actor.go();
            }
            Said::Skip(reason) => {
                skip(name, &reason);
                outcome.skipped = Some(reason);
                return outcome;
            }
            Said::Done => return outcome,
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn every_operation_is_counted_exactly() {
    if to_be_refused() {
        skip("operations", "gpureap does not run this set on this kernel");
        return;
    }
    let bench = Bench::new(&devices());
    let daemon = bench.daemon();
    let backend = bench.look().backend;
    assert_eq!(backend, bench.backend, "the backend that was asked for runs");
    let known: Vec<String> = bench.devices.iter().map(Device::key).collect();
    let mut wrong = Vec::new();
    let mut steps = 0;
    for (position, (subject, name)) in operations().enumerate() {
        if position % 10 == 0 {
            // Past the test runner, which is silent until the end: minutes, in an emulated machine.
            sys::write_all(2, format!("operation {position}, {steps} steps\n").as_bytes());
        }
        let outcome = perform(&bench, &known, name);
        record(&json!({"kind": "operation", "subject": subject, "name": name, "steps": outcome.steps,
            "differences": outcome.differences, "skipped": outcome.skipped}));
        steps += outcome.steps;
        wrong.extend(outcome.differences.into_iter().map(|text| format!("{name} {text}")));
    }
    let lost = bench.holders(&[]).lost_events;
    let programs = pinned(&bench.set());
    let skipped: BTreeMap<&str, u64> =
        programs.iter().filter_map(|one| Some((one.name.as_str(), one.skipped.filter(|n| *n > 0)?))).collect();
    record(&json!({"kind": "losses", "lost_events": lost, "skipped": skipped}));
    eprintln!("{backend}: {steps} steps, {} differences, {lost} lost events, skipped {skipped:?}", wrong.len());
    assert!(wrong.is_empty(), "{backend}: {} differences:\n{}", wrong.len(), wrong.join("\n"));
    // A kernel that preempts its own code skips programs, and says so; then the counts are made anew, and were right.
    let counted = counter::LOSSES.map(|index| (counter::NAMES[index as usize], bench.counter(index)));
    assert!(preemptible() || lost == 0, "{backend} loses nothing here, lost {lost}: {counted:?}");
    drop(daemon);
}
