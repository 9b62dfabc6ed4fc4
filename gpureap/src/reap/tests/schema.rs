//! Real reports against docs/schema/reap-1.json.

use serde_json::Value;

use super::{
    ladder_of, policy,
    scripted::{Says, With, reap_with, reap_with_memory},
    world::{Actor, React, Told, World, actor},
};
use crate::{
    gpu::nvml::{memory::MemoryState, proof::GpuMemory},
    model::{Eyes as _, How},
    reap::{
        door::{DoorReport, Tried},
        ladder::Rungs,
        memory::MemoryFacts,
        plan::{Class, Matching, Policy, Subject},
        reaper::Reaper,
        record::Ended,
        report::{Outcome, Report},
        scope::Scope,
    },
};

const SCHEMA: &str = include_str!("../../../../docs/schema/reap-1.json");

fn check(value: &Value) {
    crate::schema_check::check(SCHEMA, value);
}

/// The line that whoever counts reaps reads.
fn what_is_counted_of(report: &Report) {
    let Some(ended) = Ended::of(report) else {
        assert_eq!(report.outcome, Some(Outcome::NothingToDo));
        return;
    };
    let signalled = report.processes.iter().filter(|process| !process.signals.is_empty()).count();
    assert_eq!((Some(ended.outcome), ended.touched), (report.outcome, signalled as u32));
    let closed = report.devices.iter().filter_map(|device| device.closed_ms).reduce(f64::max);
    let expected = closed.filter(|_| ended.outcome == Outcome::Freed && signalled > 0);
    assert_eq!(ended.free_ms, expected, "{report:#?}");
}

#[test]
fn reports_fit_their_schema() {
    let worlds = [
        vec![],
        vec![
            Actor { on_term: React::Ignore, ..actor(10) },
            Actor { slots: [0, 1].into(), on_term: React::CloseThenExit(1, 5, 9), ..actor(11) },
            Actor { vanishes: true, ..actor(12) },
            Actor { reused: true, ..actor(13) },
            Actor { after: Some(11), ..actor(20) },
            actor(30),
        ],
        vec![Actor { on_term: React::Refuse, ..actor(10) }, Actor { unreadable: true, ..actor(11) }],
        // Survives; this process stands in for what is read of it in /proc.
        vec![Actor { on_term: React::Ignore, on_kill: React::Ignore, ..actor(std::process::id()) }],
        vec![actor(10)],
        vec![actor(30)],
    ];
    let subjects = [(actor(30).key, Subject { class: Class::System, ..Subject::default() })].into();
    let mut seen = Vec::new();
    for actors in worlds {
        let world = World::new(actors);
        let (report, _) = reap_with(&world, &policy(), &subjects, Rungs { now: false, ..ladder_of(50, 100) });
        let value = serde_json::to_value(&report).unwrap();
        check(&value);
        seen.push(value["outcome"].as_str().unwrap().to_owned());
        what_is_counted_of(&report);
        assert_eq!(serde_json::from_value::<Report>(value).unwrap(), report);
    }
    // Somebody's file in nobody's hands, and memory that stays.
    let orphans = World::new(vec![actor(10)]);
    orphans.orphans_for(60_000);
    let used = MemoryState::StillUsed { mib: 683, by: Vec::new() };
    let mut says = Says(
        MemoryFacts {
            slots: [(0, GpuMemory { state: used, free_ns: None })].into(),
            trouble: Some("NVML did not answer within 5s".to_owned()),
            modules: vec!["nvidia: 3 references".to_owned()],
        },
        None,
    );
    for world in [orphans, World::new(vec![actor(10)])] {
        let (mut report, _) =
            reap_with_memory(&world, &policy(), &subjects, ladder_of(50, 100), With::default(), Some(&mut says));
        let tried =
            Tried { pid: 7, start_ns: 1, comm: "worker".to_owned(), uid: 0, node: "/dev/nvidia0".to_owned(), count: 3 };
        report.fence = Some(DoorReport { denied: 3, tried: vec![tried] });
        let value = serde_json::to_value(&report).unwrap();
        check(&value);
        seen.push(value["outcome"].as_str().unwrap().to_owned());
        assert_eq!(serde_json::from_value::<Report>(value).unwrap(), report);
    }
    let every =
        ["nothing-to-do", "held", "held", "unkillable", "freed", "protected", "kernel-reference", "kernel-reference"];
    assert_eq!(seen, every);

    let world = World::new(vec![actor(10)]);
    let (mut told, mut signaller, policy) = (Told::default(), world.clone(), policy());
    let reaper = Reaper {
        eyes: &world,
        signaller: &mut signaller,
        ledger: &mut told,
        people: &super::Workers,
        kinship: &super::Alone,
        filter: &|_| None,
        scope: Scope::Process,
        fenced: false,
        memory: None,
        devices: &[super::device(0)],
        policy: &policy,
        scene: super::scene(0),
    };
    // Handles alone, and numbers that were named and are no holders.
    let world_of_handles = World::new(vec![Actor { mapped: false, ..actor(10) }, actor(11)]);
    world_of_handles.blind(&[How::InFlight, How::IoUring]);
    let attached = Policy {
        matching: Matching::Attached,
        slots: Some([0].into()),
        pids: [10, 11, 12, 1_500, 2_000].into(),
        ..super::policy()
    };
    let (report, _) = reap_with(&world_of_handles, &attached, &subjects, ladder_of(50, 100));
    let value = serde_json::to_value(&report).unwrap();
    check(&value);
    assert_eq!((report.skipped.len(), report.unmatched.len(), report.cannot_see.len()), (1, 3, 2));
    assert_eq!(serde_json::from_value::<Report>(value).unwrap(), report);

    let report = reaper.dry_run(&reaper.plan(world.view().unwrap(), &subjects));
    check(&serde_json::to_value(report).unwrap());
}

#[test]
fn the_check_finds_mistakes() {
    assert!(std::panic::catch_unwind(|| check(&serde_json::json!({"schema": "gpureap.reap/1"}))).is_err());
}
