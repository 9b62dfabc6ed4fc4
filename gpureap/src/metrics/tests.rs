use std::collections::{BTreeMap, BTreeSet};

use super::{
    look::{DeviceNumbers, Look, MapNumbers, numbers_of},
    *,
};
use crate::model::{Device, DeviceKind, Holder, How, Orphan, ProcKey, Source, Usage, View};

const PAGE: &str = include_str!("../../../docs/metrics.md");
const ALERTS: &str = include_str!("../../../packaging/prometheus/alerts.yml");
const ALERT_TESTS: &str = include_str!("../../../packaging/prometheus/alerts.test.yml");
const DASHBOARD: &str = include_str!("../../../packaging/grafana/gpureap.json");

fn device(slot: u32, node: &str, kind: DeviceKind) -> Device {
    Device {
        slot,
        node: node.into(),
        major: 195,
        minor: Some(slot),
        kind,
        gpu: kind.is_gpu().then_some(slot),
        index: None,
        uuid: kind.is_gpu().then(|| format!("GPU-{slot}")),
        bdf: None,
        model: Some("H200 \"NVL\"\\1\nx".to_owned()),
    }
}

fn view(backend: Backend) -> View {
    let usage = |fds, maps| Usage { fds, maps, ..Usage::default() };
    let holder = |pid, slots: &[(u32, Usage)]| Holder {
        key: ProcKey::new(pid, 1),
        usage: slots.iter().cloned().collect(),
        how: BTreeSet::from([How::Fd]),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    };
    View {
        source: Source::Map,
        backend: Some(backend),
        complete: true,
        cannot_see: BTreeSet::new(),
        lost_events: 0,
        swept_ns: Some(5),
        open_files: BTreeMap::from([(0, 4)]),
        holders: vec![
            holder(7, &[(0, usage(2, 0)), (1, usage(1, 0))]),
            holder(8, &[(0, usage(0, 1))]),
            // It has let go.
            holder(9, &[(0, usage(0, 0))]),
        ],
        orphans: vec![Orphan { slot: 0, files: 3, how: How::InFlight, last_owner: None }],
        notes: Vec::new(),
    }
}

fn devices() -> [Device; 3] {
    [
        device(0, "/dev/nvidia0", DeviceKind::Gpu),
        device(1, "/dev/nvidiactl", DeviceKind::Ctl),
        device(2, "/dev/nvidia2", DeviceKind::Gpu),
    ]
}

fn look() -> Look {
    Look {
        devices: numbers_of(&view(Backend::Kprobe), &devices()),
        complete: true,
        swept_unix_ns: Some(1_500_000_000),
        lost: vec![("ring_full", 2), ("skipped", 0)],
        maps: vec![MapNumbers { name: "files", entries: 3, capacity: 64 }],
    }
}

#[test]
fn a_view_in_numbers() {
    let numbers = |backend| {
        let all = numbers_of(&view(backend), &devices());
        let of = |DeviceNumbers { node, about: _, holders, open_files, orphan_files }: DeviceNumbers| {
            (node, holders, open_files, orphan_files)
        };
        all.into_iter().map(of).collect::<Vec<_>>()
    };
    let rows = |free| {
        [
            ("/dev/nvidia0".to_owned(), 2, Some(4), 3),
            ("/dev/nvidiactl".to_owned(), 1, free, 0),
            ("/dev/nvidia2".to_owned(), 0, free, 0),
        ]
    };
    assert_eq!(numbers(Backend::Kprobe), rows(Some(0)));
    // Where files are not counted, there is no number rather than a zero.
    assert_eq!(numbers(Backend::Gate), rows(None));
}

/// Everything that can be told.
fn full() -> Metrics {
    let metrics = Metrics::new(Backend::Gate, true);
    metrics.looked(Some(&look()));
    metrics.journal(&Status { written: 7, dropped: 2, errors: 3, size_bytes: 4096, restarts: 1, ..Status::default() });
    metrics.recorder_lost(5);
    metrics.kernel_log_lost();
    metrics.resynced("loss", 4);
    metrics.fence_denied(6);
    metrics.died(Cause::OomKill);
    metrics.unkillable(2);
    metrics.signalled(Some("SIGTERM"));
    metrics.signalled(None);
    metrics.signalled(Some("SIGHUP, as somebody wrote there"));
    metrics.reaped(Outcome::Freed, Some(0.3));
    metrics.reaped(Outcome::Held, None);
    metrics.reaped(Outcome::NothingToDo, Some(0.3));
    metrics.reaped(Outcome::Freed, Some(f64::NAN));
    metrics
}

#[test]
fn what_was_counted_is_rendered() {
    let text = full().render().unwrap();
    for line in [
        "gpureap_holders{node=\"/dev/nvidia0\"} 2",
        "gpureap_open_files{node=\"/dev/nvidia0\"} 4",
        "gpureap_orphan_files{node=\"/dev/nvidia0\"} 3",
        "gpureap_device_info{node=\"/dev/nvidia0\",kind=\"gpu\",gpu=\"0\",index=\"\",uuid=\"GPU-0\",pci_address=\"\",\
         model=\"H200 \\\"NVL\\\"\\\\1\\nx\"} 1",
        "gpureap_probe_set_info{probe_set=\"gate\",adopted=\"true\"} 1",
        "gpureap_last_sweep_timestamp_seconds 1.5",
        "gpureap_events_lost_total{kind=\"ring_full\"} 2",
        "gpureap_events_lost_total{kind=\"skipped\"} 0",
        "gpureap_events_lost_total{kind=\"recorder\"} 5",
        "gpureap_events_lost_total{kind=\"journal\"} 2",
        "gpureap_events_lost_total{kind=\"kernel_log\"} 1",
        "gpureap_map_entries{map=\"files\"} 3",
        "gpureap_map_capacity{map=\"files\"} 64",
        "gpureap_resyncs_total{reason=\"loss\"} 1",
        "gpureap_resyncs_total{reason=\"period\"} 0",
        "gpureap_resync_corrections_total 4",
        "gpureap_fence_denials_total 6",
        "gpureap_deaths_total{cause=\"oom-kill\"} 1",
        "gpureap_deaths_total{cause=\"killed-by\"} 0",
        "gpureap_unkillable_holders 2",
        "gpureap_signals_total{signal=\"SIGTERM\"} 1",
        "gpureap_signals_total{signal=\"SIGKILL\"} 0",
        "gpureap_signals_total{signal=\"unit-stop\"} 1",
        "gpureap_reaps_total{outcome=\"freed\"} 2",
        "gpureap_reaps_total{outcome=\"held\"} 1",
        "gpureap_reap_time_to_free_seconds_bucket{le=\"0.25\"} 0",
        "gpureap_reap_time_to_free_seconds_bucket{le=\"0.5\"} 1",
        "gpureap_reap_time_to_free_seconds_count 1",
        "gpureap_journal_records_total 7",
        "gpureap_journal_errors_total 3",
        "gpureap_journal_size_bytes 4096",
        "gpureap_journal_restarts_total 1",
        "gpureap_look_errors_total 0",
        "gpureap_view_complete 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    // What is on no list is no series.
    assert!(!text.contains("nothing-to-do") && !text.contains("SIGHUP"), "{text}");
}

#[test]
fn a_look_that_fails_leaves_no_old_numbers() {
    let metrics = full();
    metrics.looked(None);
    let text = metrics.render().unwrap();
    assert!(!text.contains("gpureap_holders{") && !text.contains("gpureap_device_info{"), "{text}");
    assert!(text.contains("gpureap_view_complete 0\n") && text.contains("gpureap_look_errors_total 1\n"), "{text}");
    // A device that is gone takes its series along.
    metrics.looked(Some(&look()));
    metrics.looked(Some(&Look { devices: Vec::new(), ..look() }));
    assert!(!metrics.render().unwrap().contains("nvidia0"));
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Family {
    kind: String,
    labels: BTreeSet<String>,
}

/// Names, types and labels of what is told. A histogram's `le` is part of its type.
fn families() -> BTreeMap<String, Family> {
    let mut found = BTreeMap::<String, Family>::new();
    for line in full().render().unwrap().lines() {
        if let Some(line) = line.strip_prefix("# TYPE ") {
            let (name, kind) = line.split_once(' ').unwrap();
            found.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if !line.starts_with('#') {
            let end = line.find(['{', ' ']).unwrap();
            let name = found.keys().rev().find(|name| line[..end].starts_with(name.as_str())).unwrap().clone();
            let inside =
                line[end..].strip_prefix('{').and_then(|rest| rest.rsplit_once('}')).map_or("", |(inside, _)| inside);
            let names = inside.split('"').step_by(2).filter_map(|part| part.trim_start_matches(',').strip_suffix('='));
            let labels = names.filter(|name| *name != "le").map(str::to_owned);
            found.get_mut(&name).unwrap().labels.extend(labels.filter(|name| !name.contains('\\')));
        }
    }
    found
}

#[test]
fn the_page_lists_every_metric_as_it_is() {
    let told = families();
    assert!(told.len() > 20 && told.values().all(|family| !family.kind.is_empty()), "{told:?}");
    let mut listed = BTreeMap::new();
    for line in PAGE.lines().filter(|line| line.starts_with("| `gpureap_")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, kind, labels, unit, meaning] = cells[..] else { panic!("five columns in {line}") };
        let name = name.trim_matches('`');
        let labels = labels.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        listed.insert(name.to_owned(), Family { kind: kind.to_owned(), labels });
        assert!(!meaning.is_empty(), "{line}");
        for base in ["seconds", "bytes"] {
            assert_eq!(name.contains(base), unit == base, "{line}");
        }
    }
    assert_eq!(listed, told);
    // The values of labels are told too.
    let kinds = gpureap_common::counter::LOSSES.map(|index| gpureap_common::counter::NAMES[index as usize]);
    let words = kinds.into_iter().chain(ACTS).chain(REASONS).chain(LOST_ELSEWHERE).chain(UNSENT).map(str::to_owned);
    for value in words.chain(super::words(&CAUSES)).chain(super::words(&OUTCOMES)) {
        assert!(PAGE.contains(&format!("`{value}`")), "{value} is not on the page");
    }
}

/// Words of a text that look like metrics.
fn named(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !is_part(c)).filter(|word| word.starts_with("gpureap_")).collect()
}

#[test]
fn alerts_and_dashboard_ask_for_what_there_is() {
    let told = families();
    let exists = |name: &str| {
        let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let of = |name: &str, kind: &str| told.get(name).is_some_and(|family| family.kind == kind);
        of(name, "counter") || of(name, "gauge") || histogram.is_some_and(|name| of(name, "histogram"))
    };
    for (text, least) in [(ALERTS, 8), (ALERT_TESTS, 8), (DASHBOARD, 14)] {
        let names = named(text);
        assert!(names.len() >= least, "{names:?}");
        let missing: Vec<_> = names.into_iter().filter(|name| !exists(name)).collect();
        assert_eq!(missing, [""; 0]);
    }
    assert!(!exists("gpureap_holders_total") && !exists("gpureap_reap_time_to_free_seconds"));
    // Every question of the dashboard is in the place where Grafana looks for it.
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets: Vec<&serde_json::Value> =
        panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten().collect();
    assert!(targets.len() >= 12 && targets.iter().all(|target| target["expr"].is_string()), "{targets:#?}");
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
}
