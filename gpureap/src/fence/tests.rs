//! Reports from plain data: who and what is in them, that they fit their schema, and how they read.

use gpureap_common::{
    abi::dev,
    fence::{Fence, NO_DEADLINE, Tally},
    record::Device,
};
use serde_json::Value;

use super::{
    report::{Action, Change, FenceReport, Names, Scene, build},
    text,
};
use crate::{
    bpf::fence::{Denied, Exemptions, Standing},
    config::{Paths, StandIn},
    gpu::devices::{Devices, discover},
    host::Host,
    model::ProcKey,
};

const SCHEMA: &str = include_str!("../../../docs/schema/fence-1.json");
const SECOND: u64 = 1_000_000_000;

/// Pid 10 lives.
struct Few;

impl Names for Few {
    fn process(&self, tgid: u32, _start_ns: u64) -> Option<(String, Option<String>)> {
        (tgid == 10).then(|| ("dcgm\u{1b}".to_owned(), Some("/system.slice/train.service".to_owned())))
    }

    fn cgroup(&self, id: u64) -> Option<String> {
        (id == 5).then(|| "/some/where".to_owned())
    }

    fn user(&self, uid: u32) -> Option<String> {
        (uid == 0).then(|| "root".to_owned())
    }
}

fn host() -> Host {
    Host {
        name: "h".to_owned(),
        boot_id: "b".to_owned(),
        now: "2026-11-30T12:00:00Z".parse().unwrap(),
        boottime_ns: 1_000 * SECOND,
    }
}

fn devices() -> Devices {
    let paths = Paths { proc: "/nonexistent".into(), ..Paths::default() };
    let stand_ins: Vec<StandIn> =
        [20, 21, 22].map(|minor| StandIn::new(4, minor, format!("/dev/tty{minor}").into()).unwrap()).into();
    discover(&paths, &stand_ins).unwrap()
}

fn denied(tgid: u32, slot: u32, count: u64, last: u64) -> Denied {
    Denied {
        key: ProcKey::new(tgid, 7),
        comm: "worker".to_owned(),
        uid: 0,
        cgroup_id: 5,
        slot,
        count,
        first_ns: 950 * SECOND,
        last_ns: last * SECOND,
    }
}

fn standing() -> Standing {
    let until = |deadline| Fence { raised_ns: 900 * SECOND, deadline_ns: deadline };
    Standing {
        table: [20, 21, 22].map(|minor| (dev(4, minor), Device { slot: minor - 20, kind: 9 })).into(),
        fences: [(0, until(1_060 * SECOND + 1)), (1, until(NO_DEADLINE)), (2, until(1_000 * SECOND))].into(),
        tallies: [(0, Tally { denied: 9, exempted: 2 }), (1, Tally { denied: 1, exempted: 0 })].into(),
        exempt: Exemptions { processes: [ProcKey::new(10, 1), ProcKey::new(11, 1)].into(), cgroups: [5, 6].into() },
        denied: vec![
            denied(20, 0, 1, 960),
            denied(21, 0, 5, 990),
            denied(22, 0, 1, 980),
            Denied { comm: "other".to_owned(), uid: 7, cgroup_id: 0, ..denied(30, 0, 1, 970) },
            denied(10, 1, 1, 995),
        ],
    }
}

fn report(action: Action, chosen: &[u32], before: &[u32]) -> FenceReport {
    let numbers = |minors: &[u32]| minors.iter().map(|minor| dev(4, *minor)).collect();
    let (standing, devices) = (standing(), devices());
    let scene = Scene {
        action,
        standing: &standing,
        devices: &devices,
        chosen: &numbers(chosen),
        before: &numbers(before),
        notes: vec!["a note".to_owned()],
    };
    build(scene, &host(), &Few)
}

fn mistakes(value: &Value) -> Vec<String> {
    crate::schema_check::mistakes(SCHEMA, value)
}

#[test]
fn reports_fit_their_schema() {
    for (action, chosen, before) in [
        (Action::Fence, [20, 21].as_slice(), [21].as_slice()),
        (Action::Unfence, &[20, 21, 22], &[20, 21]),
        (Action::List, &[], &[]),
    ] {
        let report = report(action, chosen, before);
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(mistakes(&value), <[String; 0]>::default());
        assert_eq!(serde_json::from_value::<FenceReport>(value).unwrap(), report);
    }
    let nothing = Standing::default();
    let scene = Scene {
        action: Action::List,
        standing: &nothing,
        devices: &Devices::default(),
        chosen: &[].into(),
        before: &[].into(),
        notes: Vec::new(),
    };
    let report = build(scene, &host(), &Few);
    assert_eq!(mistakes(&serde_json::to_value(&report).unwrap()), <[String; 0]>::default());
    assert_eq!(text::fence(&report), "Nothing is fenced.\n");
    let unfenced = FenceReport { action: Action::Unfence, ..report };
    assert_eq!(text::fence(&unfenced), "Nothing was fenced.\n");
    let removed = FenceReport { notes: vec!["one that cannot be read is removed".to_owned()], ..unfenced };
    assert_eq!(text::fence(&removed), "note: one that cannot be read is removed\n");
    assert!(!mistakes(&serde_json::json!({"schema": "gpureap.fence/1"})).is_empty());
}

#[test]
fn what_became_of_each_device() {
    let changes = |action, chosen: &[u32], before: &[u32]| -> Vec<(String, bool, Option<Change>, Option<u64>)> {
        let devices = report(action, chosen, before).devices;
        devices.into_iter().map(|device| (device.node, device.fenced, device.change, device.left_ms)).collect()
    };
    let row = |minor: u32, fenced, change, left| (format!("/dev/tty{minor}"), fenced, change, left);
    assert_eq!(
        changes(Action::Fence, &[20, 21], &[21]),
        [row(20, true, Some(Change::Raised), Some(60_000)), row(21, true, Some(Change::Updated), None)]
    );
    // The time of the third is over: it is open already, and is told only to whoever opens it.
    assert_eq!(changes(Action::List, &[], &[]), [row(20, true, None, Some(60_000)), row(21, true, None, None)]);
    assert_eq!(
        changes(Action::Unfence, &[20, 22], &[20]),
        [
            row(20, false, Some(Change::Lowered), None),
            row(21, true, None, None),
            row(22, false, Some(Change::Lowered), None)
        ]
    );
}

#[test]
fn those_that_look_alike_are_one_row() {
    let report = report(Action::List, &[], &[]);
    let rows: Vec<_> = report
        .denied
        .iter()
        .map(|row| (row.comm.as_str(), row.node.as_str(), row.count, row.processes, row.pids.as_slice()))
        .collect();
    assert_eq!(
        rows,
        [
            ("worker", "/dev/tty21", 1, 1, [10].as_slice()),
            ("worker", "/dev/tty20", 7, 3, &[21, 22, 20]),
            ("other", "/dev/tty20", 1, 1, &[30]),
        ]
    );
    assert_eq!(report.denied_total, 10);
    // /proc goes before the id; where neither knows it there is nothing.
    let cgroups: Vec<_> = report.denied.iter().map(|row| (row.cgroup.as_deref(), row.unit.as_deref())).collect();
    assert_eq!(
        cgroups,
        [(Some("/system.slice/train.service"), Some("train.service")), (Some("/some/where"), None), (None, None)]
    );
    assert_eq!(report.denied[1].first, "2026-11-30T11:59:10Z");
    assert_eq!(report.denied[1].last, "2026-11-30T11:59:50Z");
}

#[test]
fn how_it_reads() {
    let text = text::fence(&report(Action::Fence, &[20], &[]));
    assert_eq!(
        text,
        "\
NODE        STATE   LEFT   REFUSED  LET THROUGH
/dev/tty20  fenced  1m 0s  9        2
/dev/tty21  fenced  -      1        0
refused: 1 open of /dev/tty21 by worker, pid 10, user root, unit train.service
refused: 7 opens of /dev/tty20 by worker, 3 processes, the last pid 21, user root, cgroup /some/where
refused: 1 open of /dev/tty20 by other, pid 30, user 7
exempt: dcgm\\x1b (pid 10), pid 11 (gone), cgroup /some/where, cgroup 6 (gone)
New opens fail with EPERM, in containers too. What is open stays open.
note: a note
"
    );
    let text = text::fence(&report(Action::Unfence, &[20, 21, 22], &[20, 21]));
    assert!(text.starts_with("NODE        STATE   REFUSED  LET THROUGH\n/dev/tty20  opened  9        2\n"), "{text}");
    assert!(!text.contains("exempt"), "{text}");
}
