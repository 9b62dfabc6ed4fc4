use super::*;
use crate::history::{
    event::{
        self, Device, Exit, Fork, Held, HeldDevice, Oom, OomScope, Peer, Process, Reap, Signal, Start, Subject, Xid,
    },
    replay::replay,
    report::{GroupBy, IncidentCause, Part, XidClass},
    rows::{Cause, Thread},
};
use crate::model::Backend;

/// 2026-12-01T00:00:00Z is the boot.
const BOOT: i64 = 1_796_083_200_000_000_000;

fn key(pid: u32) -> Key {
    Key { pid, start_ns: u64::from(pid) }
}

fn time(ms: u64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(BOOT) + i128::from(ms) * 1_000_000).unwrap()
}

fn at(ms: u64, what: What) -> Event {
    Event { time: time(ms), boot_ns: ms * 1_000_000, what }
}

fn start(ms: u64, boot: &str, host: &str, adopted: bool) -> Event {
    let device = |minor: u32| Device {
        node: format!("/dev/nvidia{minor}"),
        major: 195,
        minor: Some(minor),
        kind: DeviceKind::Gpu,
        gpu: Some(minor),
        index: None,
        uuid: None,
        bdf: Some(format!("0000:0{minor}:00.0")),
        model: None,
    };
    at(
        ms,
        What::Start(Start {
            boot_id: boot.into(),
            host: host.into(),
            kernel: "6.12".into(),
            version: "0.1.0".into(),
            backend: Backend::Kprobe,
            adopted,
            daemon_pid: 1,
            wall_offset_ns: BOOT,
            devices: vec![device(0), device(1)],
        }),
    )
}

/// A process on a GPU: open, look, and who it is.
fn holds(ms: u64, pid: u32, node: u32, env: &[(&str, &str)], parent: u32) -> Vec<Event> {
    let node = format!("/dev/nvidia{node}");
    let comm = "python3".to_owned();
    let open = event::FileEvent {
        key: Some(key(pid)),
        tid: Some(pid),
        comm: comm.clone(),
        node: node.clone(),
        file: u64::from(pid),
        failed: false,
    };
    let device = HeldDevice { node, fds: 23, maps: 3, role: None, first_ns: None };
    let held = Held { key: key(pid), inherited_from: None, from_snapshot: false, devices: vec![device] };
    let process = Process {
        key: key(pid),
        comm: comm.clone(),
        argv: vec![comm, "train.py".to_owned()],
        env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        parent: Some(key(parent)),
        ..Process::default()
    };
    vec![at(ms, What::Open(open)), at(ms + 20, What::Held(held)), at(ms + 21, What::Process(Box::new(process)))]
}

fn ancestor(ms: u64, pid: u32, comm: &str, argv: &[&str], parent: u32) -> Event {
    at(
        ms,
        What::Process(Box::new(Process {
            key: key(pid),
            comm: comm.into(),
            argv: argv.iter().map(|argument| (*argument).to_owned()).collect(),
            parent: Some(key(parent)),
            ancestor: true,
            ..Process::default()
        })),
    )
}

fn ends(ms: u64, pid: u32, status: u32) -> Vec<Event> {
    let exit = Exit { key: key(pid), tid: pid, comm: "python3".into(), status };
    vec![at(ms, What::Exit(exit)), at(ms + 200, What::Closed(Subject { key: key(pid) }))]
}

fn raised(ms: u64, pid: u32, signal: &str, thread: &str) -> Event {
    let sender =
        Sender { key: key(pid), tid: pid + 5, thread: thread.into(), comm: "python3".into(), ..Sender::default() };
    at(
        ms,
        What::Signal(Signal {
            key: key(pid),
            tid: pid + 5,
            thread: thread.into(),
            signal: signal.into(),
            code: Some(-6),
            sender: Some(Box::new(sender)),
            running: None,
        }),
    )
}

fn sent(ms: u64, pid: u32, signal: &str, by: u32, comm: &str) -> Event {
    let sender = Sender { key: key(by), tid: by, thread: comm.into(), comm: comm.into(), ..Sender::default() };
    at(
        ms,
        What::Signal(Signal {
            key: key(pid),
            tid: pid,
            thread: "python3".into(),
            signal: signal.into(),
            code: None,
            sender: Some(Box::new(sender)),
            running: None,
        }),
    )
}

fn ask(records: &[Record]) -> Report {
    build(records, &window(0, 3_600_000))
}

fn window(since: u64, until: u64) -> Ask {
    Ask {
        now: time(3_600_000),
        since: time(since),
        until: time(until),
        at: None,
        running: Some("b1".to_owned()),
        nodes: None,
        pids: Vec::new(),
    }
}

fn parts(report: &Report, incident: usize) -> Vec<(u32, Part)> {
    report.incidents[incident].processes.iter().map(|member| (member.who.pid, member.part)).collect()
}

#[test]
fn p1_a_kill_by_a_person() {
    let mut events = vec![start(0, "b1", "gpu1", false), ancestor(1, 50, "bash", &["bash", "run.sh"], 1)];
    events.extend(holds(1_000, 100, 0, &[], 50));
    events.push(sent(5_000, 100, "SIGKILL", 812, "pkill"));
    events.extend(ends(5_001, 100, 9));
    let report = ask(&replay(events));
    let [incident] = report.incidents.as_slice() else { panic!("{:?}", report.incidents) };
    assert_eq!(incident.title, "python3 (pid 100 on gpu1) was killed by SIGKILL from pkill (pid 812, uid 0)");
    assert_eq!((incident.cause, incident.freed), (IncidentCause::KilledBy, Some(time(5_201))));
    assert_eq!(incident.group.name, "bash run.sh (pid 50)");
    let process = &report.processes[0];
    assert_eq!(process.lineage.iter().map(|ancestor| ancestor.pid).collect::<Vec<_>>(), [50]);
    assert_eq!((process.exited, process.closed), (Some(time(5_001)), Some(time(5_201))));
    assert_eq!(process.incident, Some(1));
    assert_eq!(report.holds[0].ended, Some(HoldEnd::Exited));
}

#[test]
fn p3_a_code_of_its_own_is_no_kill() {
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[], 1));
    events.extend(ends(5_000, 100, 137 << 8));
    let report = ask(&replay(events));
    assert_eq!(report.incidents[0].title, "python3 (pid 100 on gpu1) ended with code 137");
    assert_eq!(report.processes[0].death.as_ref().unwrap().cause, Cause::Exited);
    // And one that ends well is no incident.
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[], 1));
    events.extend(ends(5_000, 100, 0));
    assert_eq!(ask(&replay(events)).incidents, []);
}

fn ranks(rank: &str) -> Vec<(&str, &str)> {
    vec![("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")]
}

#[test]
fn p4_a_watchdog_and_the_rank_that_stalled() {
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &ranks("0"), 1));
    events.extend(holds(1_000, 101, 1, &ranks("1"), 1));
    events.push(raised(30_000, 100, "SIGABRT", "pt_nccl_watchdg"));
    let peer = Peer { key: key(101), of: key(100), state: 'S', wchan: Some("hrtimer_nanosleep".into()) };
    events.push(at(30_000, What::Peer(peer)));
    events.extend(ends(30_010, 100, 0x80 | 6));
    let report = ask(&replay(events.clone()));
    let incident = &report.incidents[0];
    assert_eq!(
        incident.title,
        "rank 0, python3 (pid 100 on gpu1) was ended by its own watchdog: it had waited for rank 1, python3 (pid 101 on gpu1)"
    );
    assert_eq!((incident.cause, incident.group.by), (IncidentCause::CollectiveTimeout, GroupBy::RankSet));
    assert_eq!(parts(&report, 0), [(100, Part::First), (101, Part::Stalled)]);
    let death = report.processes[0].death.as_ref().unwrap();
    assert_eq!((death.cause, death.core), (Cause::Fault, true));
    assert_eq!(death.thread, Some(Thread { tid: 105, name: "pt_nccl_watchdg".into() }));
    assert!(incident.evidence.iter().any(|line| line.contains("state S in hrtimer_nanosleep")), "{incident:?}");

    // Had the other died before, the watchdog is what follows, even after its long time limit.
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &ranks("0"), 1));
    events.extend(holds(1_000, 101, 1, &ranks("1"), 1));
    events.push(sent(2_000, 101, "SIGKILL", 7, "bash"));
    events.extend(ends(2_001, 101, 9));
    events.push(raised(1_802_000, 100, "SIGABRT", "pt_nccl_watchdg"));
    events.extend(ends(1_802_001, 100, 6));
    let report = ask(&replay(events));
    assert_eq!(report.incidents.len(), 1);
    assert_eq!(parts(&report, 0), [(101, Part::First), (100, Part::Followed)]);
    assert_eq!(report.incidents[0].cause, IncidentCause::KilledBy);
    assert!(report.incidents[0].evidence.iter().any(|line| line.contains("watchdog thread")));
}

#[test]
fn p2_out_of_memory_in_a_cgroup() {
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[("SLURM_JOB_ID", "4711")], 1));
    events.extend(holds(1_000, 101, 1, &[("SLURM_JOB_ID", "4711")], 1));
    events.extend(holds(1_000, 102, 1, &[("SLURM_JOB_ID", "4712")], 1));
    let oom = |key, source: &str, scope, cgroup: Option<&str>| {
        What::Oom(Oom {
            key,
            tid: 100,
            comm: "python3".into(),
            scope,
            cgroup: cgroup.map(str::to_owned),
            source: source.into(),
        })
    };
    events.push(at(5_000, oom(Some(key(100)), "tracepoint", None, None)));
    events.push(at(5_000, oom(None, "kmsg", Some(OomScope::Cgroup), Some("/slurm/job_4711"))));
    events.extend(ends(5_001, 100, 9));
    events.extend(ends(6_000, 101, 1 << 8));
    let report = ask(&replay(events));
    assert_eq!(report.incidents.len(), 1);
    let incident = &report.incidents[0];
    assert_eq!(
        incident.title,
        "python3 (pid 100 on gpu1) was killed for memory: the limit of cgroup /slurm/job_4711 was reached; 1 other of \
         Slurm job 4711 followed within 1.0 s"
    );
    assert_eq!(parts(&report, 0), [(100, Part::First), (101, Part::Followed)]);
    assert_eq!(incident.devices.len(), 2);
    assert_eq!(report.holds.iter().filter(|hold| hold.released.is_none()).count(), 1, "the other job goes on");
}

#[test]
fn p7_xids_with_and_without_a_pid() {
    let xid = |ms, number, pid, node: &str| {
        at(
            ms,
            What::Xid(Xid {
                bdf: "0000:00:00.0".into(),
                node: Some(node.into()),
                xid: number,
                pid,
                name: None,
                message: "m".into(),
                source: "kmsg".into(),
            }),
        )
    };
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[], 1));
    events.push(xid(4_000, 31, Some(100), "/dev/nvidia0"));
    events.push(raised(5_000, 100, "SIGABRT", "python3"));
    events.extend(ends(5_001, 100, 6));
    events.push(xid(5_100, 45, None, "/dev/nvidia0"));
    events.push(xid(5_200, 43, Some(100), "/dev/nvidia0"));
    events.push(xid(900_000, 79, None, "/dev/nvidia1"));
    let report = ask(&replay(events));
    let classes: Vec<(u32, XidClass, usize)> =
        report.xids.iter().map(|xid| (xid.xid.xid, xid.class, xid.holders.len())).collect();
    assert_eq!(
        classes,
        [
            (31, XidClass::Application, 1),
            (45, XidClass::ResultOfAKill, 1),
            (43, XidClass::ResultOfAKill, 1),
            (79, XidClass::Hardware, 0),
        ]
    );
    assert_eq!(report.incidents.len(), 2);
    assert_eq!(report.incidents[0].xids, [0, 1, 2]);
    assert_eq!(report.incidents[1].title, "Xid 79 on /dev/nvidia1: the GPU has fallen off the bus (hardware)");
}

#[test]
fn p8_the_host_went_down() {
    let mut events = vec![start(0, "b0", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[], 1));
    events.extend(holds(1_000, 101, 1, &[], 1));
    events.extend(ends(2_000, 101, 0));
    let records = replay(events);
    let report = build(&records, &window(0, 3_600_000));
    assert_eq!(report.hosts[0].state, HostState::Down);
    let death = report.processes.iter().find(|process| process.who.pid == 100).unwrap().death.clone().unwrap();
    assert_eq!((death.cause, death.time), (Cause::HostDown, Some(time(2_200))));
    let hold = report.holds.iter().find(|hold| hold.who.pid == 100).unwrap();
    assert_eq!((hold.released, hold.ended), (Some(time(2_200)), Some(HoldEnd::HostDown)));
    let [incident] = report.incidents.as_slice() else { panic!("{:?}", report.incidents) };
    assert_eq!(
        incident.title,
        "the host gpu1 went down after 2026-12-01T00:00:02Z while 1 process held 1 GPU; it has not been seen again"
    );
    // The same record while its boot is this one: it goes on.
    let report = build(&records, &Ask { running: Some("b0".to_owned()), ..window(0, 3_600_000) });
    assert_eq!((report.hosts[0].state, report.incidents.len()), (HostState::Running, 0));
}

#[test]
fn p10_a_daemon_that_was_away() {
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[], 1));
    events.push(start(60_000, "b1", "gpu1", true));
    events.extend(ends(61_000, 100, 0));
    let report = ask(&replay(events));
    assert_eq!((report.holds.len(), report.hosts.len()), (1, 1));
    let [gap] = report.gaps.as_slice() else { panic!("{:?}", report.gaps) };
    assert_eq!(gap.to, Some(time(60_000)));
    assert!(gap.note.contains("went on counting"), "{}", gap.note);

    // What the ring had kept of the time between is recorded late, and makes the gap no shorter.
    let mut events = vec![start(0, "b1", "gpu1", false)];
    events.extend(holds(1_000, 100, 0, &[], 1));
    events.push(start(60_000, "b1", "gpu1", true));
    events.extend(ends(59_000, 100, 0));
    let report = ask(&replay(events));
    assert_eq!(report.gaps[0].from, time(1_020));
}

/// The process that a tree begins with is one of its tree, and one without any is alone.
#[test]
fn the_root_of_a_tree_is_one_of_it() {
    let mut events = vec![start(0, "b1", "gpu1", false), ancestor(1, 40, "bash", &["-bash"], 1)];
    for (pid, parent) in [(100, 40), (101, 100), (200, 40)] {
        events.extend(holds(1_000, pid, 0, &[], parent));
    }
    for pid in [100, 101, 200] {
        events.extend(ends(5_000, pid, 9));
    }
    let report = ask(&replay(events));
    let mut groups: Vec<(GroupBy, &str, usize)> = report
        .incidents
        .iter()
        .map(|incident| (incident.group.by, incident.group.name.as_str(), incident.processes.len()))
        .collect();
    groups.sort_unstable();
    let (tree, alone) = ("python3 train.py (pid 100)", "python3 train.py (pid 200)");
    assert_eq!(groups, [(GroupBy::Lineage, tree, 2), (GroupBy::Process, alone, 1)]);
}

/// A supervisor starts the job again, which dies again: two incidents, and nobody is in none.
#[test]
fn the_next_attempt_is_another_incident() {
    let mut events = vec![start(0, "b1", "gpu1", false), ancestor(1, 50, "torchrun", &["torchrun"], 1)];
    // Their pids are the nanoseconds of their start here, so the attempts need starts of their own.
    let attempt = |ms: u64, pids: [u32; 2]| {
        pids.into_iter().flat_map(move |pid| {
            let mut life = holds(ms, pid, 0, &[], 50);
            life.extend(ends(ms + 5_000 + u64::from(pid % 2), pid, 9));
            for event in &mut life {
                let key = match &mut event.what {
                    What::Open(open) => open.key.as_mut().expect("an open has one"),
                    What::Held(held) => &mut held.key,
                    What::Process(process) => &mut process.key,
                    What::Exit(exit) => &mut exit.key,
                    What::Closed(subject) => &mut subject.key,
                    _ => unreachable!("not among these"),
                };
                key.start_ns = ms * 1_000_000;
            }
            life
        })
    };
    events.extend(attempt(1_000, [100, 101]));
    events.extend(attempt(10_000, [110, 111]));
    events.sort_by_key(|event| event.boot_ns);
    let report = ask(&replay(events));
    assert_eq!(report.incidents.len(), 2, "{:#?}", report.incidents);
    assert_eq!(parts(&report, 0), [(100, Part::First), (101, Part::Followed)]);
    assert_eq!(parts(&report, 1), [(110, Part::First), (111, Part::Followed)]);
    let incidents: Vec<Option<u32>> = report.processes.iter().map(|process| process.incident).collect();
    assert_eq!(incidents, [Some(1), Some(1), Some(2), Some(2)]);
}

#[test]
fn f8_one_report_for_a_job_s_orphans() {
    let mut events = vec![
        start(0, "b1", "gpu1", false),
        ancestor(1, 50, "torchrun", &["torchrun", "train.py"], 40),
        ancestor(1, 40, "bash", &["-bash"], 30),
    ];
    for pid in 100..142 {
        events.extend(holds(1_000, pid, pid % 2, &[], 50));
    }
    for pid in 200..203 {
        events.extend(holds(1_000, pid, 0, &[], 40));
    }
    for pid in 100..142 {
        let reap =
            Reap { key: key(pid), signal: Some("SIGKILL".into()), unit: None, cgroup: None, by_pid: 900, by_uid: 0 };
        events.push(at(9_000, What::Reap(reap)));
        events.push(sent(9_001, pid, "SIGKILL", 900, "gpureap"));
        events.extend(ends(9_002, pid, 9));
    }
    let report = ask(&replay(events));
    let [incident] = report.incidents.as_slice() else { panic!("{}", report.incidents.len()) };
    assert_eq!((incident.cause, incident.processes.len()), (IncidentCause::Reaped, 42));
    assert_eq!(incident.group.name, "torchrun train.py (pid 50)");
    assert!(incident.title.contains("41 others of the tree of torchrun train.py"), "{}", incident.title);
}

#[test]
fn what_was_held_at_an_instant_and_by_a_choice() {
    let mut events = vec![start(0, "b1", "gpu1", false), ancestor(1, 50, "torchrun", &["torchrun"], 1)];
    events.extend(holds(1_000, 100, 0, &[], 50));
    events.extend(holds(1_000, 101, 1, &[], 1));
    events.extend(ends(5_000, 100, 9));
    let fork = Fork { key: key(102), parent: key(101), comm: "x".into() };
    events.push(at(6_000, What::Fork(fork)));
    let records = replay(events);
    let pids = |ask: Ask| build(&records, &ask).holds.iter().map(|hold| hold.who.pid).collect::<Vec<_>>();
    let at = |ms| Ask { at: Some(time(ms)), ..window(ms, ms) };
    assert!(pids(at(500)).is_empty());
    assert_eq!(pids(at(4_000)), [100, 101]);
    assert_eq!(pids(at(5_100)), [100, 101], "exited is not released");
    assert_eq!(pids(at(5_300)), [101]);
    assert_eq!(pids(window(6_000, 7_000)), [101]);
    assert_eq!(pids(Ask { nodes: Some(["/dev/nvidia0".to_owned()].into()), ..window(0, 9_000) }), [100]);
    assert_eq!(pids(Ask { pids: vec![50], ..window(0, 9_000) }), [100], "an ancestor stands for its tree");
    assert!(pids(Ask { pids: vec![7], ..window(0, 9_000) }).is_empty());
}

#[test]
fn two_hosts_and_one_job() {
    let mut one = vec![start(0, "b1", "gpu1", false)];
    one.extend(holds(1_000, 100, 0, &[("SLURM_JOB_ID", "9"), ("RANK", "0")], 1));
    one.push(sent(5_000, 100, "SIGKILL", 7, "bash"));
    one.extend(ends(5_001, 100, 9));
    let mut two = vec![start(0, "b2", "gpu2", false)];
    two.extend(holds(1_000, 100, 0, &[("SLURM_JOB_ID", "9"), ("RANK", "1")], 1));
    two.extend(ends(6_000, 100, 1 << 8));
    let records: Vec<Record> = replay(one).into_iter().chain(replay(two)).collect();
    let report = ask(&records);
    let [incident] = report.incidents.as_slice() else { panic!("{:?}", report.incidents) };
    let hosts: Vec<(&str, Part)> =
        incident.processes.iter().map(|member| (member.who.host.as_str(), member.part)).collect();
    assert_eq!(hosts, [("gpu1", Part::First), ("gpu2", Part::Followed)]);
    assert_eq!(report.hosts.len(), 2);
}

#[test]
fn a_recording_gives_the_same_report() {
    let mut events = vec![start(0, "b1", "gpu1", false), ancestor(1, 50, "torchrun", &["torchrun"], 1)];
    events.extend(holds(1_000, 100, 0, &ranks("0"), 50));
    events.push(raised(30_000, 100, "SIGABRT", "pt_nccl_watchdg"));
    events.extend(ends(30_010, 100, 6));
    let text: String = events.iter().map(|event| serde_json::to_string(event).unwrap() + "\n").collect();
    let again = crate::history::replay::read(text.as_bytes()).unwrap();
    assert_eq!(again, events);
    assert_eq!(ask(&replay(again)), ask(&replay(events)));
    let error = crate::history::replay::read("\n{\"event\":\"nonsense\"}\n".as_bytes()).unwrap_err();
    assert!(error.starts_with("line 2 is no event"), "{error}");
}

#[test]
fn the_next_job_of_a_script_is_another_incident() {
    let mut events = vec![start(0, "b1", "gpu1", false), ancestor(1, 50, "bash", &["bash", "all.sh"], 1)];
    let mut two = holds(1_000, 100, 0, &[], 50);
    two.push(sent(5_000, 100, "SIGKILL", 812, "pkill"));
    two.extend(ends(5_001, 100, 9));
    // A process's start is its pid in these tests, in nanoseconds: this one comes after the first death.
    let later = Key { pid: 7, start_ns: 6_000_000_000 };
    for event in holds(6_000, 7, 0, &[], 50).into_iter().chain(ends(8_000, 7, 1 << 8)) {
        let text = serde_json::to_string(&event)
            .unwrap()
            .replace("\"pid\":7,\"start_ns\":7", &format!("\"pid\":7,\"start_ns\":{}", later.start_ns));
        two.push(serde_json::from_str(&text).unwrap());
    }
    events.extend(two);
    let report = ask(&replay(events));
    assert_eq!(report.incidents.len(), 2, "{:?}", report.incidents);
    assert_eq!(parts(&report, 1), [(7, Part::First)]);
}
