//! Reports and events against docs/schema.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    event::{
        Device, Ended, Event, Exit, FileEvent, Fork, Held, HeldDevice, Lost, Memory, Named, Oom, OomScope, Peer,
        Process, ProcessMemory, Reap, Relative, Sender, Signal, Start, Subject, ThreadEvent, What, Xid,
    },
    report::{DeathReport, GroupBy, HostState, IncidentCause, Part, Report, XidClass},
    rows::{Cause, HoldEnd, HoldOrigin, Key, Place, Thread},
    samples,
};
use crate::{
    holders::report::{ExitReport, Role},
    model::{Backend, DeviceKind},
};

const REPORT: &str = include_str!("../../../docs/schema/report-1.json");
const EVENT: &str = include_str!("../../../docs/schema/event-1.json");

#[track_caller]
fn check_report(report: &Report) {
    let value = serde_json::to_value(report).unwrap();
    crate::schema_check::check(REPORT, &value);
    assert_eq!(serde_json::from_value::<Report>(value).unwrap(), *report);
}

#[test]
fn sample_reports_fit_the_schema() {
    for (_, report) in samples::all() {
        check_report(&report);
    }
}

#[test]
fn every_word_of_a_report_fits_the_schema() {
    let base = samples::watchdog();
    let change = |change: &dyn Fn(&mut Report)| {
        let mut report = base.clone();
        change(&mut report);
        check_report(&report);
    };
    for state in [HostState::Running, HostState::Stopped, HostState::Down] {
        change(&|report| report.hosts[0].state = state);
    }
    for kind in [
        DeviceKind::Gpu,
        DeviceKind::Ctl,
        DeviceKind::Uvm,
        DeviceKind::UvmTools,
        DeviceKind::Modeset,
        DeviceKind::Cap,
        DeviceKind::Imex,
        DeviceKind::Nvswitch,
        DeviceKind::Nvlink,
        DeviceKind::Standin,
    ] {
        change(&|report| report.devices[0].kind = kind);
    }
    for ended in [None, Some(HoldEnd::Closed), Some(HoldEnd::Exited), Some(HoldEnd::HostDown), Some(HoldEnd::Unseen)] {
        change(&|report| report.holds[0].ended = ended);
    }
    for origin in
        [HoldOrigin::Opened, HoldOrigin::Inherited, HoldOrigin::Received, HoldOrigin::Snapshot, HoldOrigin::Unconfirmed]
    {
        change(&|report| report.holds[0].origin = origin);
    }
    for role in [None, Some(Role::Attached), Some(Role::Handle)] {
        change(&|report| report.holds[0].role = role);
    }
    for cause in
        [Cause::Exited, Cause::KilledBy, Cause::OomKill, Cause::Fault, Cause::Reaped, Cause::HostDown, Cause::Unknown]
    {
        change(&|report| report.processes[0].death.as_mut().unwrap().cause = cause);
        change(&|report| report.incidents[0].processes[0].cause = Some(cause));
    }
    for scope in [None, Some(OomScope::Cgroup), Some(OomScope::Global)] {
        change(&|report| {
            report.processes[0].death.as_mut().unwrap().oom = Some(super::report::OomReport { scope, cgroup: None });
        });
    }
    for cause in [
        IncidentCause::Exited,
        IncidentCause::KilledBy,
        IncidentCause::OomKill,
        IncidentCause::Fault,
        IncidentCause::CollectiveTimeout,
        IncidentCause::Reaped,
        IncidentCause::HostDown,
        IncidentCause::Xid,
        IncidentCause::Unknown,
    ] {
        change(&|report| report.incidents[0].cause = cause);
    }
    for by in [
        GroupBy::SlurmJob,
        GroupBy::Pod,
        GroupBy::Container,
        GroupBy::RankSet,
        GroupBy::Lineage,
        GroupBy::Process,
        GroupBy::Device,
        GroupBy::Host,
    ] {
        change(&|report| report.incidents[0].group.by = by);
    }
    for part in [Part::First, Part::Followed, Part::Stalled, Part::Survived] {
        change(&|report| report.incidents[0].processes[0].part = part);
    }
    for class in
        [XidClass::Application, XidClass::Hardware, XidClass::Driver, XidClass::ResultOfAKill, XidClass::Unknown]
    {
        let mut report = samples::xid();
        report.xids[0].class = class;
        check_report(&report);
    }
    for exit in [ExitReport::from_status(0), ExitReport::from_status(9), ExitReport::from_status(0x86)] {
        change(&|report| report.processes[0].exit = Some(exit));
        change(&|report| report.processes[0].lineage[0].exit = Some(exit));
    }
    // Whatever may be null.
    change(&|report| {
        let process = &mut report.processes[0];
        let none = DeathReport {
            cause: Cause::Unknown,
            code: None,
            signal: None,
            core: false,
            time: None,
            sender: None,
            thread: None,
            oom: None,
            evidence: Vec::new(),
        };
        process.death = Some(none);
        (process.exe, process.uid, process.user, process.class, process.unit) = (None, None, None, None, None);
        (process.exited, process.closed, process.exit, process.incident) = (None, None, None, None);
    });
}

#[test]
fn what_is_not_a_report_does_not_fit() {
    for (path, value) in [
        ("/holds/0/role", Value::from("owner")),
        ("/incidents/0/cause", "bad luck".into()),
        ("/incidents/0/id", 0.into()),
        ("/processes/0/exit", serde_json::json!({})),
        ("/since", "yesterday".into()),
        ("/hosts/0/clock_moved_ms", Value::Null),
    ] {
        let mut report = serde_json::to_value(samples::watchdog()).unwrap();
        *report.pointer_mut(path).unwrap() = value;
        assert!(!crate::schema_check::mistakes(REPORT, &report).is_empty(), "{path}");
    }
}

/// Each kind with all that it can have, and with as little as it can.
fn events() -> Vec<What> {
    let key = Key { pid: 7, start_ns: 9 };
    let thread = Thread { tid: 8, name: "t".to_owned() };
    let text = || "x".to_owned();
    let file = FileEvent {
        key: Some(key),
        tid: Some(8),
        comm: text(),
        node: "/dev/nvidia0".to_owned(),
        file: u64::MAX,
        failed: true,
    };
    let bare_file = FileEvent {
        key: None,
        tid: None,
        comm: String::new(),
        node: "/dev/nvidia0".to_owned(),
        file: 0,
        failed: false,
    };
    let device = Device {
        node: text(),
        major: 195,
        minor: None,
        kind: DeviceKind::Gpu,
        gpu: Some(0),
        index: None,
        uuid: Some(text()),
        bdf: None,
        model: None,
    };
    let start = Start {
        boot_id: text(),
        host: text(),
        kernel: text(),
        version: text(),
        backend: Backend::Gate,
        adopted: false,
        daemon_pid: 1,
        wall_offset_ns: -1,
        devices: vec![device],
    };
    let held = HeldDevice { node: text(), fds: 1, maps: 0, role: Some(Role::Handle), first_ns: Some(3) };
    let place = Place {
        cgroup: Some(text()),
        unit: Some(text()),
        container: Some(text()),
        container_name: Some(text()),
        image: Some(text()),
        slurm_job: Some(text()),
        slurm_step: Some(text()),
        pod: Some(text()),
        pod_name: Some(text()),
        pod_namespace: Some(text()),
    };
    let process = Process {
        key,
        comm: text(),
        argv: vec![text()],
        argv_cut: true,
        exe: Some(text()),
        uid: Some(0),
        user: Some(text()),
        class: Some("monitor".to_owned()),
        nspids: vec![7, 1],
        place,
        env: [("RANK".to_owned(), "0".to_owned())].into(),
        threads: vec![thread.clone()],
        parent: Some(key),
        ancestor: true,
        exit: Some(Ended { boot_ns: 1, status: 9 }),
    };
    let sender = Sender {
        key,
        tid: 8,
        thread: text(),
        comm: text(),
        argv: vec![text()],
        uid: 0,
        gpureap: true,
        lineage: vec![Relative { key, comm: text(), argv: Vec::new() }],
    };
    let signal = Signal {
        key,
        tid: 8,
        thread: text(),
        signal: "SIGKILL".to_owned(),
        code: Some(-6),
        sender: Some(Box::new(sender)),
        running: None,
    };
    let by_kernel = Signal { sender: None, running: signal.sender.clone(), ..signal.clone() };
    let oom = Oom {
        key: Some(key),
        tid: 8,
        comm: text(),
        scope: Some(OomScope::Global),
        cgroup: Some(text()),
        source: "kmsg".to_owned(),
    };
    let xid = samples::xid().xids;
    let reap = Reap { key, signal: Some(text()), unit: Some(text()), cgroup: Some(text()), by_pid: 1, by_uid: 0 };
    let no_place = Reap { signal: None, unit: None, cgroup: None, ..reap };
    let memory = Memory {
        node: text(),
        used_bytes: 1,
        total_bytes: 2,
        processes: vec![ProcessMemory { pid: 7, bytes: None }, ProcessMemory { pid: 8, bytes: Some(1) }],
    };
    vec![
        What::Start(start),
        What::Stop,
        What::Open(file.clone()),
        What::Open(bare_file.clone()),
        What::Close(file.clone()),
        What::Free(file),
        What::Free(bare_file),
        What::Held(Held { key, inherited_from: Some(key), from_snapshot: true, devices: vec![held.clone()] }),
        What::Held(Held {
            key,
            inherited_from: None,
            from_snapshot: false,
            devices: vec![HeldDevice { role: None, first_ns: None, ..held }],
        }),
        What::Fork(Fork { key, parent: key, comm: text() }),
        What::Exec(Named { key, comm: text() }),
        What::Thread(ThreadEvent { key, thread }),
        What::Process(Box::new(process)),
        What::Process(Box::default()),
        What::Signal(Signal { code: None, sender: None, ..signal.clone() }),
        What::Signal(by_kernel),
        What::Signal(signal),
        What::Oom(Oom { key: None, scope: None, cgroup: None, source: "tracepoint".to_owned(), ..oom.clone() }),
        What::Oom(oom),
        What::Xid(xid[0].xid.clone()),
        What::Xid(Xid { node: None, ..xid[1].xid.clone() }),
        What::Reap(reap),
        What::Reap(no_place),
        What::Exit(Exit { key, tid: 8, comm: text(), status: 9 }),
        What::Closed(Subject { key }),
        What::Peer(Peer { key, of: key, state: 'S', wchan: Some(text()) }),
        What::Peer(Peer { key, of: key, state: 'R', wchan: None }),
        What::Memory(memory),
        What::Lost(Lost { events: 3, at: "ring".to_owned(), note: text() }),
    ]
}

/// A new kind does not compile here until it is named; it belongs into `events` and into the schema.
const fn kind(what: &What) -> &'static str {
    match what {
        What::Start(_) => "start",
        What::Stop => "stop",
        What::Open(_) => "open",
        What::Close(_) => "close",
        What::Free(_) => "free",
        What::Held(_) => "held",
        What::Fork(_) => "fork",
        What::Exec(_) => "exec",
        What::Thread(_) => "thread",
        What::Process(_) => "process",
        What::Signal(_) => "signal",
        What::Oom(_) => "oom",
        What::Xid(_) => "xid",
        What::Reap(_) => "reap",
        What::Exit(_) => "exit",
        What::Closed(_) => "closed",
        What::Peer(_) => "peer",
        What::Memory(_) => "memory",
        What::Lost(_) => "lost",
    }
}

#[test]
fn every_kind_of_event_fits_the_schema() {
    let mut seen = BTreeSet::new();
    for what in events() {
        let kind = kind(&what);
        let event = Event { time: "2026-03-14T03:00:00Z".parse().unwrap(), boot_ns: 5, what };
        let value = serde_json::to_value(&event).unwrap();
        assert_eq!(value["event"], kind);
        // The kind's own part of the schema says more than that none of all fits.
        let mut schema: Value = serde_json::from_str(EVENT).unwrap();

        schema.as_object_mut().unwrap().remove("oneOf");
        schema["$ref"] = format!("#/$defs/event-{kind}").into();
        crate::schema_check::check(&schema.to_string(), &value);
        crate::schema_check::check(EVENT, &value);
        assert_eq!(serde_json::from_value::<Event>(value).unwrap(), event);
        seen.insert(kind);
    }
    let schema: Value = serde_json::from_str(EVENT).unwrap();
    assert_eq!(seen.len(), schema["oneOf"].as_array().unwrap().len());
}

#[test]
fn many_incidents_are_told_by_their_headlines() {
    let mut report = samples::pkill();
    let one = report.incidents[0].clone();
    report.incidents = (1..=40).map(|id| super::report::Incident { id, ..one.clone() }).collect();
    let text = super::text::render(&report, crate::out::Style::default());
    assert_eq!(text.lines().filter(|line| line.starts_with('#')).count(), 40);
    assert_eq!(text.matches("    because ").count(), 5, "{text}");
    assert!(text.contains("The older ones in full"), "{text}");
}
