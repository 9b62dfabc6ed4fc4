use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::*;
use crate::history::{
    event::Sender,
    rows::{HoldEnd, HoldOrigin, Place},
};

const OFFSET: i64 = 1_700_000_000_000_000_000;
const SECOND: u64 = 1_000_000_000;

fn boot(id: &str) -> Boot {
    Boot { boot_id: id.into(), host: "n1".into(), kernel: "6.8.0".into(), wall_offset_ns: OFFSET, last_ns: 0 }
}

fn row() -> ProcessRow {
    let text = |text: &str| Some(text.to_owned());
    ProcessRow {
        key: Key { pid: 100, start_ns: 5 * SECOND },
        comm: "python3".into(),
        argv: vec!["python3".into(), "train.py".into()],
        exe: text("/usr/bin/python3.11"),
        uid: Some(1000),
        user: text("eve"),
        class: text("job"),
        parent: Some(Key { pid: 50, start_ns: 1 }),
        place: Place {
            cgroup: text("/a"),
            unit: text("b.service"),
            container: text("c0ffee"),
            container_name: text("d"),
            image: text("e:latest"),
            slurm_job: text("4711"),
            slurm_step: text("0"),
            pod: text("f"),
            pod_name: text("g"),
            pod_namespace: text("h"),
        },
        env: [
            ("RANK".to_owned(), "3".to_owned()),
            ("MASTER_ADDR".to_owned(), "10.0.0.7".to_owned()),
            ("MASTER_PORT".to_owned(), "29500".to_owned()),
            ("WORLD_SIZE".to_owned(), "8".to_owned()),
            ("WANDB_NAME".to_owned(), "a secret".to_owned()),
        ]
        .into(),
        ..ProcessRow::default()
    }
}

fn died(cause: Cause, code: Option<u32>) -> ProcessRow {
    let death = Death {
        cause,
        code,
        signal: None,
        core: false,
        boot_ns: Some(9 * SECOND),
        sender: None,
        thread: None,
        oom: None,
        evidence: vec!["because".into()],
    };
    ProcessRow { exit_ns: Some(9 * SECOND), death: Some(death), ..row() }
}

fn item(what: Sent) -> Item {
    Item { boot: boot("b1"), what, process: None }
}

fn event(what: &serde_json::Value) -> Item {
    let mut line = json!({ "time": "2026-11-01T00:00:00Z", "boot_ns": 7 * SECOND });
    line.as_object_mut().unwrap().extend(what.as_object().unwrap().clone());
    let process = line["pid"].as_u64().filter(|_| line["start_ns"].is_u64()).map(|_| Box::new(row()));
    Item { process, ..item(Sent::Event(serde_json::from_value(line).unwrap())) }
}

/// As JSON, in the words of a reader.
fn plain(attributes: &[KeyValue]) -> BTreeMap<String, serde_json::Value> {
    fn one(found: &AnyValue) -> serde_json::Value {
        match found.value.as_ref().unwrap() {
            Value::StringValue(text) => json!(text),
            Value::IntValue(number) => json!(number),
            Value::DoubleValue(number) => json!(number),
            Value::ArrayValue(list) => list.values.iter().map(one).collect(),
            other => panic!("{other:?}"),
        }
    }
    let found: BTreeMap<_, _> =
        attributes.iter().map(|pair| (pair.key.clone(), one(pair.value.as_ref().unwrap()))).collect();
    assert_eq!(found.len(), attributes.len(), "no key comes twice");
    found
}

fn body(log: &LogRecord) -> &str {
    match &log.body.as_ref().unwrap().value {
        Some(Value::StringValue(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn records(items: &[Item]) -> Vec<LogRecord> {
    let origin = Origin { host_id: Some("abc".into()) };
    let resources = request(items, &origin).resource_logs;
    resources.into_iter().flat_map(|logs| logs.scope_logs).flat_map(|scope| scope.log_records).collect()
}

fn only(item: Item) -> LogRecord {
    let mut found = records(&[item]);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[test]
fn how_grave_a_death_is() {
    use SeverityNumber::{Error, Info, Warn};
    for (cause, code, expected, name) in [
        (Cause::Exited, Some(0), Info, "exited"),
        (Cause::Exited, None, Info, "exited"),
        (Cause::Exited, Some(1), Warn, "exited"),
        (Cause::KilledBy, None, Warn, "killed-by"),
        (Cause::Unknown, None, Warn, "unknown"),
        (Cause::Reaped, None, Info, "reaped"),
        (Cause::OomKill, None, Error, "oom-kill"),
        (Cause::Fault, None, Error, "fault"),
        (Cause::HostDown, None, Error, "host-down"),
    ] {
        let log = only(item(Sent::Death(Box::new(died(cause, code)))));
        assert_eq!(log.event_name, "gpureap.death");
        assert_eq!(log.severity_number, expected as i32, "{cause:?} {code:?}");
        let text = expected.as_str_name();
        assert_eq!(format!("SEVERITY_NUMBER_{}", log.severity_text), text);
        assert_eq!(body(&log), format!("python3 (pid 100) died ({name}): because"));
        assert_eq!(log.time_unix_nano, OFFSET as u64 + 9 * SECOND);
        assert!(log.observed_time_unix_nano > log.time_unix_nano);
        let attributes = plain(&log.attributes);
        assert_eq!(attributes["gpureap.cause"], name);
        assert_eq!(attributes.get("process.exit.code"), code.map(|code| json!(code)).as_ref());
        assert_eq!(attributes["log.record.uid"], "b1/gpureap.death/100-5000000000");
    }
    assert_eq!(records(&[item(Sent::Death(Box::new(row())))]), [], "who lives");
}

#[test]
fn a_death_has_all_that_is_known_and_no_environment() {
    let mut dead = died(Cause::KilledBy, None);
    let death = dead.death.as_mut().unwrap();
    death.signal = Some("SIGKILL".into());
    death.sender = Some(Sender {
        key: Key { pid: 900, start_ns: 1 },
        tid: 901,
        thread: "main".into(),
        comm: "pkill".into(),
        argv: vec!["pkill".into(), "-9".into()],
        uid: 0,
        gpureap: false,
        lineage: Vec::new(),
    });
    let log = only(item(Sent::Death(Box::new(dead))));
    let expected = json!({
        "process.pid": 100,
        "process.executable.name": "python3",
        "process.executable.path": "/usr/bin/python3.11",
        "process.command": "python3",
        "process.command_args": ["python3", "train.py"],
        "process.owner": "eve",
        "process.user.id": 1000,
        "process.creation.time": "2023-11-14T22:13:25Z",
        "process.parent_pid": 50,
        "process.linux.cgroup": "/a",
        "container.id": "c0ffee",
        "container.name": "d",
        "container.image.name": "e:latest",
        "k8s.pod.uid": "f",
        "k8s.pod.name": "g",
        "k8s.namespace.name": "h",
        "gpureap.unit": "b.service",
        "gpureap.slurm.job.id": "4711",
        "gpureap.slurm.step.id": "0",
        "gpureap.rank": 3,
        "gpureap.rank_set": "10.0.0.7:29500, 8 ranks",
        "gpureap.class": "job",
        "gpureap.cause": "killed-by",
        "gpureap.signal": "SIGKILL",
        "gpureap.sender.pid": 900,
        "gpureap.sender.executable.name": "pkill",
        "gpureap.sender.command_args": ["pkill", "-9"],
        "gpureap.sender.user.id": 0,
        "gpureap.evidence": ["because"],
        "log.record.uid": "b1/gpureap.death/100-5000000000",
    });
    assert_eq!(serde_json::to_value(plain(&log.attributes)).unwrap(), expected);
    assert!(!format!("{log:?}").contains("secret"));
    // Each of them is on the page.
    let page = include_str!("../../../../docs/otlp.md");
    for name in expected.as_object().unwrap().keys() {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn the_end_of_a_hold() {
    let hold = HoldRow {
        key: row().key,
        node: "/dev/nvidia0".into(),
        opened_ns: 6 * SECOND,
        released_ns: Some(8 * SECOND + SECOND / 2),
        ended: Some(HoldEnd::Exited),
        origin: HoldOrigin::Opened,
        fds: 2,
        maps: 1,
        role: None,
        inherited_from: None,
    };
    let log = only(item(Sent::Hold(Box::new(hold.clone()), Some(Box::new(row())))));
    assert_eq!((log.event_name.as_str(), log.severity_text.as_str()), ("gpureap.hold", "INFO"));
    assert_eq!(body(&log), "python3 (pid 100) held /dev/nvidia0 for 2.500 s");
    assert_eq!(log.time_unix_nano, OFFSET as u64 + 8 * SECOND + SECOND / 2);
    let attributes = plain(&log.attributes);
    for (name, expected) in [
        ("gpureap.node", json!("/dev/nvidia0")),
        ("gpureap.hold.begin", json!("2023-11-14T22:13:26Z")),
        ("gpureap.hold.duration", json!(2.5)),
        ("gpureap.hold.ended", json!("exited")),
        ("gpureap.hold.origin", json!("opened")),
        ("gpureap.hold.fds", json!(2)),
        ("gpureap.hold.maps", json!(1)),
        ("process.owner", json!("eve")),
        ("log.record.uid", json!("b1/gpureap.hold/100-5000000000//dev/nvidia0/6000000000")),
    ] {
        assert_eq!(attributes.get(name), Some(&expected), "{name}");
    }
    // Retention took who it was.
    let log = only(item(Sent::Hold(Box::new(hold), None)));
    assert_eq!(body(&log), "a process (pid 100) held /dev/nvidia0 for 2.500 s");
    assert_eq!(plain(&log.attributes)["process.pid"], 100);
}

#[test]
fn events_and_their_names() {
    let key = (100, 5 * SECOND);
    let reap = json!({
        "event": "reap", "pid": key.0, "start_ns": key.1, "signal": "SIGTERM", "by_pid": 1, "by_uid": 0
    });
    let unit = json!({ "event": "reap", "pid": 3, "start_ns": 1, "unit": "x.service", "by_pid": 1, "by_uid": 0 });
    let oom = json!({ "event": "oom", "tid": 101, "comm": "python3", "scope": "cgroup", "source": "kmsg" });
    let xid = json!({
        "event": "xid", "bdf": "0000:01:00.0", "node": "/dev/nvidia0", "xid": 31, "pid": 100, "name": "python3",
        "message": "MMU Fault", "source": "kmsg"
    });
    let lost = json!({ "event": "lost", "events": 3, "at": "ring", "note": "the ring was full" });
    let start = json!({
        "event": "start", "boot_id": "b1", "host": "n1", "kernel": "6.8.0", "version": "0.1.0", "backend": "gate",
        "adopted": false, "daemon_pid": 700, "wall_offset_ns": OFFSET, "devices": []
    });
    for (what, name, severity, text, attribute, found) in [
        (reap, "gpureap.reap", "INFO", "gpureap sent SIGTERM to pid 100", "gpureap.signal", json!("SIGTERM")),
        (
            unit,
            "gpureap.reap",
            "INFO",
            "gpureap sent an order to stop x.service to pid 3",
            "gpureap.reap.unit",
            json!("x.service"),
        ),
        (
            oom,
            "gpureap.oom",
            "ERROR",
            "the kernel chose python3 (pid 101) because memory ran out",
            "gpureap.oom.scope",
            json!("cgroup"),
        ),
        (xid, "gpureap.xid", "ERROR", "Xid 31 on 0000:01:00.0: MMU Fault", "gpureap.xid", json!(31)),
        (lost, "gpureap.lost", "WARN", "the ring was full", "gpureap.lost", json!(3)),
        (start, "gpureap.start", "INFO", "gpureap 0.1.0 begins to record", "gpureap.probe_set", json!("gate")),
        (
            json!({ "event": "stop" }),
            "gpureap.stop",
            "INFO",
            "gpureap ends",
            "log.record.uid",
            json!("b1/gpureap.stop//7000000000"),
        ),
    ] {
        let log = only(event(&what));
        assert_eq!((log.event_name.as_str(), log.severity_text.as_str(), body(&log)), (name, severity, text));
        assert_eq!(log.time_unix_nano, OFFSET as u64 + 7 * SECOND, "{name}");
        assert_eq!(plain(&log.attributes).get(attribute), Some(&found), "{name}");
    }
    for what in [
        json!({ "event": "held", "pid": 1, "start_ns": 1, "devices": [] }),
        json!({ "event": "exec", "pid": 1, "start_ns": 1, "comm": "x" }),
    ] {
        assert_eq!(records(&[event(&what)]), []);
    }
}

#[test]
fn a_record_has_one_id_however_often_it_is_made_and_no_other_has_it() {
    let reap = |pid: u32, signal: &str| {
        event(&json!({ "event": "reap", "pid": pid, "start_ns": 1, "signal": signal, "by_pid": 1, "by_uid": 0 }))
    };
    let hold = |node: &str, opened_ns| HoldRow {
        key: row().key,
        node: node.into(),
        opened_ns,
        released_ns: Some(9 * SECOND),
        ended: None,
        origin: HoldOrigin::Opened,
        fds: 1,
        maps: 0,
        role: None,
        inherited_from: None,
    };
    let hold = |node: &str, opened_ns| item(Sent::Hold(Box::new(hold(node, opened_ns)), None));
    let other = |at: u64, note: &str| {
        let mut found = event(&json!({ "event": "lost", "events": 3, "at": "ring", "note": note }));
        if let Sent::Event(event) = &mut found.what {
            event.boot_ns = at;
        }
        found
    };
    let elsewhere = Item { boot: boot("b2"), ..item(Sent::Death(Box::new(died(Cause::Exited, None)))) };
    let items = [
        item(Sent::Death(Box::new(died(Cause::Exited, None)))),
        elsewhere,
        reap(7, "SIGTERM"),
        reap(8, "SIGTERM"),
        hold("/dev/nvidia0", 1),
        hold("/dev/nvidia1", 1),
        hold("/dev/nvidia0", 2),
        other(1, "a"),
        other(2, "a"),
    ];
    let ids = |items: &[Item]| -> Vec<String> {
        records(items).iter().map(|log| plain(&log.attributes)["log.record.uid"].to_string()).collect()
    };
    let found = ids(&items);
    assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), items.len(), "{found:#?}");
    assert_eq!(found, ids(&items));
}

#[test]
fn each_boot_is_a_resource() {
    let death = |id: &str| Item { boot: boot(id), ..item(Sent::Death(Box::new(died(Cause::Exited, None)))) };
    let origin = Origin { host_id: Some("abc".into()) };
    let found = request(&[death("b1"), death("b1"), death("b2")], &origin).resource_logs;
    let of = |at: usize| plain(&found[at].resource.as_ref().unwrap().attributes);
    let expected = json!({
        "service.name": "gpureap",
        "service.version": env!("CARGO_PKG_VERSION"),
        "host.name": "n1",
        "host.id": "abc",
        "os.type": "linux",
        "os.version": "6.8.0",
        "gpureap.boot.id": "b1",
    });
    assert_eq!(serde_json::to_value(of(0)).unwrap(), expected);
    assert_eq!(of(1)["gpureap.boot.id"], "b2");
    let records = |at: usize| found[at].scope_logs.iter().map(|scope| scope.log_records.len()).sum::<usize>();
    assert_eq!((found.len(), records(0), records(1)), (2, 2, 1));
    assert_eq!(found[0].scope_logs[0].scope.as_ref().unwrap().name, "gpureap");
    let bare = request(&[death("b1")], &Origin::default()).resource_logs;
    assert!(!plain(&bare[0].resource.as_ref().unwrap().attributes).contains_key("host.id"));
}
