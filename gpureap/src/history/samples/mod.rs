//! Reports of incidents as they happen in the field: for the tests of the text, the page and the schema, and for
//! `examples/report_page.rs`, which reads these files too.

mod crowds;
mod deaths;

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::{
    event::{OomScope, Xid},
    holders::report::{ExitReport, Role},
    model::DeviceKind,
    report::{
        AncestorReport, DeathReport, DeviceReport, Gap, Group, GroupBy, HeldNode, HoldReport, HostReport, HostState,
        Incident, IncidentCause, Member, OomReport, Part, ProcessReport, Report, SCHEMA, SenderReport, Who, XidClass,
        XidReport,
    },
    rows::{Cause, HoldEnd, HoldOrigin, Thread},
};

pub(crate) use self::{
    crowds::{at_an_instant, hostile, slurm, two_hosts},
    deaths::{host_down, oom, pkill, watchdog, xid},
};

const NODE: &str = "node7";

/// Each with the name of its page.
pub(crate) fn all() -> Vec<(&'static str, Report)> {
    vec![
        ("watchdog", watchdog()),
        ("oom", oom()),
        ("pkill", pkill()),
        ("host-down", host_down()),
        ("xid", xid()),
        ("slurm", slurm()),
        ("hostile", hostile()),
        ("empty", empty()),
        ("at", at_an_instant()),
        ("two-hosts", two_hosts()),
    ]
}

/// Seconds after three in the morning.
fn at(seconds: f64) -> Timestamp {
    let three: Timestamp = "2026-03-14T03:00:00Z".parse().expect("a timestamp");
    three + SignedDuration::from_millis((seconds * 1_000.0).round() as i64)
}

fn boot_of(host: &str) -> String {
    let number = host.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    format!("{number:08x}-0000-4000-8000-000000000001")
}

fn start_ns(pid: u32) -> u64 {
    86_400_000_000_000 + u64::from(pid) * 10_000_000
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

/// As the kernel names a process that was just started.
fn comm_of(argv: &[&str]) -> String {
    let program = argv.first().copied().unwrap_or("python3");
    // `sshd: alice@pts/3` and `-bash` are called sshd and bash.
    let program = program.split(':').next().unwrap_or(program).trim_start_matches('-');
    program.rsplit('/').next().unwrap_or(program).chars().take(15).collect()
}

fn who(host: &str, pid: u32) -> Who {
    Who { host: host.to_owned(), boot_id: boot_of(host), pid, start_ns: start_ns(pid) }
}

fn ancestor(pid: u32, argv: &[&str], exit: Option<ExitReport>) -> AncestorReport {
    AncestorReport { pid, start_ns: start_ns(pid), comm: comm_of(argv), argv: words(argv), exit }
}

const fn exited(code: u32) -> ExitReport {
    ExitReport { code: Some(code), signal: None, core: false }
}

const fn signalled(signal: u32) -> ExitReport {
    ExitReport { code: None, signal: Some(signal), core: false }
}

fn thread(tid: u32, name: &str) -> Thread {
    Thread { tid, name: name.to_owned() }
}

fn host(name: &str) -> HostReport {
    HostReport {
        host: name.to_owned(),
        boot_id: boot_of(name),
        kernel: "6.8.0-58-generic".to_owned(),
        booted: at(-86_400.0),
        last: at(1_200.0),
        state: HostState::Running,
        clock_moved_ms: 0,
    }
}

/// From ten to three until twenty past.
pub(crate) fn empty() -> Report {
    Report {
        schema: SCHEMA.to_owned(),
        time: at(1_200.0),
        since: at(-600.0),
        until: at(1_200.0),
        at: None,
        hosts: vec![host(NODE)],
        devices: Vec::new(),
        incidents: Vec::new(),
        holds: Vec::new(),
        processes: Vec::new(),
        xids: Vec::new(),
        gaps: Vec::new(),
        notes: Vec::new(),
    }
}

fn with_gpus(name: &str, count: u32) -> Report {
    let mut report = Report { hosts: vec![host(name)], ..empty() };
    add_gpus(&mut report, name, count);
    report
}

fn node(gpu: u32) -> String {
    format!("/dev/nvidia{gpu}")
}

fn add_gpus(report: &mut Report, host: &str, count: u32) {
    let shared = |node: &str, kind| DeviceReport {
        host: host.to_owned(),
        node: node.to_owned(),
        kind,
        gpu: None,
        index: None,
        uuid: None,
        bdf: None,
        model: None,
    };
    report.devices.extend((0..count).map(|gpu| DeviceReport {
        gpu: Some(gpu),
        index: Some(gpu),
        uuid: Some(format!("GPU-{gpu}a6e21c4-93b7-4f0d-8e15-5d2c7b0f9a{gpu}1")),
        bdf: Some(format!("0000:{:02x}:00.0", 0x18 + gpu * 0x10)),
        model: Some("NVIDIA H200".to_owned()),
        ..shared(&node(gpu), DeviceKind::Gpu)
    }));
    report.devices.push(shared("/dev/nvidiactl", DeviceKind::Ctl));
    report.devices.push(shared("/dev/nvidia-uvm", DeviceKind::Uvm));
}

fn process(host: &str, pid: u32, started: f64, argv: &[&str], lineage: &[AncestorReport]) -> ProcessReport {
    ProcessReport {
        who: who(host, pid),
        started: at(started),
        nspids: vec![pid],
        comm: comm_of(argv),
        argv: words(argv),
        argv_cut: false,
        exe: Some("/usr/bin/python3.11".to_owned()),
        uid: Some(1_000),
        user: Some("alice".to_owned()),
        class: Some("job".to_owned()),
        cgroup: Some("/user.slice/user-1000.slice/session-3.scope".to_owned()),
        unit: Some("session-3.scope".to_owned()),
        container: None,
        container_name: None,
        image: None,
        slurm_job: None,
        slurm_step: None,
        pod: None,
        pod_name: None,
        pod_namespace: None,
        env: BTreeMap::new(),
        threads: vec![thread(pid, &comm_of(argv))],
        lineage: lineage.to_vec(),
        exited: None,
        closed: None,
        exit: None,
        death: None,
        incident: None,
    }
}

fn hold(process: &ProcessReport, gpu: u32, opened: f64, role: Role) -> HoldReport {
    let ended = process.exited.map(|_| HoldEnd::Exited);
    HoldReport {
        who: process.who.clone(),
        comm: process.comm.clone(),
        node: node(gpu),
        opened: at(opened),
        released: process.closed.or(process.exited),
        ended,
        origin: HoldOrigin::Opened,
        fds: if role == Role::Attached { 23 } else { 3 },
        maps: if role == Role::Attached { 3 } else { 0 },
        role: Some(role),
        inherited_from: None,
    }
}

/// The same for the node that all share.
fn control(process: &ProcessReport, opened: f64) -> HoldReport {
    HoldReport {
        node: "/dev/nvidiactl".to_owned(),
        role: None,
        fds: 8,
        maps: 0,
        ..hold(process, 0, opened, Role::Handle)
    }
}

fn death(cause: Cause, time: f64, evidence: &[&str]) -> DeathReport {
    DeathReport {
        cause,
        code: None,
        signal: None,
        core: false,
        time: Some(at(time)),
        sender: None,
        thread: None,
        oom: None,
        evidence: words(evidence),
    }
}

fn sender(pid: u32, argv: &[&str], uid: u32, user: &str, lineage: &[AncestorReport]) -> SenderReport {
    SenderReport {
        pid,
        start_ns: start_ns(pid),
        tid: pid,
        thread: comm_of(argv),
        comm: comm_of(argv),
        argv: words(argv),
        uid,
        user: Some(user.to_owned()),
        lineage: lineage.to_vec(),
    }
}

/// `closed` comes a while after.
fn dies(process: &mut ProcessReport, exit: ExitReport, closed_after: f64, incident: u32, death: DeathReport) {
    process.exited = death.time;
    process.closed = death.time.map(|time| time + SignedDuration::from_millis((closed_after * 1_000.0) as i64));
    process.exit = Some(exit);
    process.death = Some(death);
    process.incident = Some(incident);
}

fn member(process: &ProcessReport, part: Part, why: &str) -> Member {
    Member {
        who: process.who.clone(),
        comm: process.comm.clone(),
        rank: process.env.get("RANK").and_then(|rank| rank.parse().ok()),
        part,
        time: process.exited,
        cause: process.death.as_ref().map(|death| death.cause),
        why: why.to_owned(),
    }
}

fn group(by: GroupBy, name: &str) -> Group {
    Group { by, name: name.to_owned() }
}

fn held(host: &str, gpus: impl IntoIterator<Item = u32>) -> Vec<HeldNode> {
    gpus.into_iter().map(|gpu| HeldNode { host: host.to_owned(), node: node(gpu) }).collect()
}

fn rank_env(rank: u32, world: u32) -> BTreeMap<String, String> {
    [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("MASTER_ADDR", "10.0.0.7".to_owned()),
        ("MASTER_PORT", "29500".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}
