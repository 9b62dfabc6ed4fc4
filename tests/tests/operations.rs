//! The whole matrix of kernel operations: after every step, the counts are exact.
use std::{collections::BTreeMap, path::Path, time::Duration};

use gpureap_tests::harness::{Actor, Bench, Compare, Device, Said, Truth, settle, skip, sys};

/// The kernel takes back some files late: io_uring's from a worker, and exits take a moment.
const PATIENCE: Duration = Duration::from_secs(5);

fn devices() -> Vec<Device> {
    let mut devices =
        vec![Device::zero(), Device::mem(), Device::new(1, 11, "/dev/kmsg"), Device::new(5, 2, "/dev/ptmx")];
    devices.retain(|device| Path::new(&device.node).exists());
    devices.extend((0..4).map(|n| Device::new(136, n, &format!("/dev/pts/{n}"))));
    devices
}

#[test]
fn every_operation_is_counted_exactly() {
    let bench = Bench::new(&devices());
    let daemon = bench.daemon();
    let backend = bench.holders(&[]).backend;
    assert_eq!(backend, bench.backend, "the backend that was asked for runs");
    let known: Vec<String> = bench.devices.iter().map(Device::key).collect();
    let mut wrong = Vec::new();
    let mut steps = 0;
    for (position, name) in Actor::operations().iter().enumerate() {
        if position % 10 == 0 {
            // Past the test runner, which is silent until the end: minutes, in an emulated machine.
            sys::write_all(2, format!("operation {position}, {steps} steps\n").as_bytes());
        }
        let mut actor = Actor::operation(name, "/dev/zero");
        loop {
            match actor.said() {
                Said::Step { step, devices } => {
                    steps += 1;
                    let truth: BTreeMap<String, Truth> =
                        devices.into_iter().filter(|(device, _)| known.contains(device)).collect();
                    let outcome = settle(PATIENCE, || {
                        let seen = bench.look();
                        assert_eq!(seen.source, "map", "the daemon's map is read");
                        let compare = Compare { sessions: vec![actor.session()] };
                        let differences = compare.differences(&truth, &seen);
                        (!differences.is_empty()).then_some(differences)
                    });
                    let differences = outcome.err().unwrap_or_default();
                    wrong.extend(differences.into_iter().map(|text| format!("{name} {step}: {text}")));
                    actor.go();
                }
                Said::Skip(reason) => {
                    skip(name, &reason);
                    break;
                }
                Said::Done => break,
                other => panic!("{name}: {other:?}"),
            }
        }
    }
    let lost = bench.holders(&[]).lost_events;
    eprintln!("{backend}: {steps} steps, {} differences, {lost} lost events", wrong.len());
    assert!(wrong.is_empty(), "{backend}: {} differences:\n{}", wrong.len(), wrong.join("\n"));
    assert!(backend == "fentry" || lost == 0, "{backend} loses nothing, lost {lost}");
    drop(daemon);
}
