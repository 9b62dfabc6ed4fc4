//! Reports of incidents as they happen in the field: for the tests of the text, the page and the schema, and for
//! `examples/report_page.rs`, which reads this file too.

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

/// Two ranks; one waits for the other, and its watchdog thread aborts it.
pub(crate) fn watchdog() -> Report {
    let mut report = with_gpus(NODE, 2);
    let lineage = [
        ancestor(4_700, &["/opt/venv/bin/torchrun", "--nproc-per-node=2", "train.py"], Some(exited(1))),
        ancestor(4_650, &["-bash"], None),
        ancestor(4_601, &["sshd: alice@pts/3"], None),
    ];
    let argv = ["/opt/venv/bin/python3", "-u", "train.py"];
    let mut ranks: Vec<ProcessReport> = (0..2)
        .map(|rank| ProcessReport { env: rank_env(rank, 2), ..process(NODE, 4_711 + rank, -420.0, &argv, &lineage) })
        .collect();
    for rank in &mut ranks {
        let pid = rank.who.pid;
        rank.threads.extend([
            thread(pid + 40, "cuda-EvtHandlr"),
            thread(pid + 79, "pt_nccl_watchdg"),
            thread(pid + 81, "pt_nccl_heartbt"),
        ]);
    }
    let abort = DeathReport {
        signal: Some("SIGABRT".to_owned()),
        core: true,
        thread: Some(thread(4_790, "pt_nccl_watchdg")),
        ..death(
            Cause::Fault,
            727.412,
            &[
                "thread pt_nccl_watchdg (4790) of the process itself raised SIGABRT",
                "no signal came from another process",
            ],
        )
    };
    dies(&mut ranks[0], ExitReport { core: true, ..signalled(6) }, 1.3, 1, abort);
    let term = DeathReport {
        signal: Some("SIGTERM".to_owned()),
        sender: Some(sender(
            4_700,
            &["/opt/venv/bin/torchrun", "--nproc-per-node=2", "train.py"],
            1_000,
            "alice",
            &lineage[1..],
        )),
        ..death(Cause::KilledBy, 728.101, &["SIGTERM from torchrun (pid 4700), its parent"])
    };
    dies(&mut ranks[1], signalled(15), 0.4, 1, term);
    report.incidents.push(Incident {
        id: 1,
        began: at(727.412),
        ended: at(728.101),
        title: "rank 0 was aborted by its NCCL watchdog: rank 1 had stalled".to_owned(),
        cause: IncidentCause::CollectiveTimeout,
        group: group(GroupBy::RankSet, "10.0.0.7:29500, 2 ranks"),
        processes: vec![
            member(&ranks[0], Part::First, "SIGABRT raised by its own thread pt_nccl_watchdg"),
            member(
                &ranks[1],
                Part::Stalled,
                "slept in futex_wait_queue; then killed by SIGTERM from torchrun (pid 4700)",
            ),
        ],
        devices: held(NODE, 0..2),
        freed: Some(at(728.712)),
        xids: Vec::new(),
        evidence: words(&[
            "the first death is an abort by a watchdog thread, not a signal from outside",
            "rank 1 slept in futex_wait_queue when rank 0 died",
        ]),
    });
    for rank in 0..2 {
        report.holds.push(hold(&ranks[rank as usize], rank, -400.0, Role::Attached));
        report.holds.push(hold(&ranks[rank as usize], 1 - rank, -400.0, Role::Handle));
        report.holds.push(control(&ranks[rank as usize], -400.0));
    }
    report.processes = ranks;
    report
}

const CONTAINER: &str = "3f9c1be2d04a7785aa10c6ef2b9347d15e6c8f0912ab34cd56ef7890a1b2c3d4";

/// A container at its memory limit, and the container that follows it.
pub(crate) fn oom() -> Report {
    let mut report = with_gpus(NODE, 1);
    let lineage = [
        ancestor(5_190, &["/bin/sh", "-c", "python3 serve.py --preload all"], Some(exited(137))),
        ancestor(5_170, &["/usr/bin/containerd-shim-runc-v2", "-namespace", "moby"], None),
    ];
    let mut serve = ProcessReport {
        nspids: vec![5_200, 7],
        uid: Some(0),
        user: Some("root".to_owned()),
        cgroup: Some(format!("/system.slice/docker-{CONTAINER}.scope")),
        unit: Some(format!("docker-{CONTAINER}.scope")),
        container: Some(CONTAINER.to_owned()),
        container_name: Some("llm-serve".to_owned()),
        image: Some("registry.example/llm-serve:1.4".to_owned()),
        ..process(NODE, 5_200, -500.0, &["python3", "serve.py", "--preload", "all"], &lineage)
    };
    let oom = DeathReport {
        signal: Some("SIGKILL".to_owned()),
        oom: Some(OomReport {
            scope: Some(OomScope::Cgroup),
            cgroup: Some(format!("/system.slice/docker-{CONTAINER}.scope")),
        }),
        ..death(Cause::OomKill, 301.05, &["the kernel chose it because its cgroup was at its memory limit"])
    };
    dies(&mut serve, signalled(9), 1.2, 1, oom);
    let again = ProcessReport {
        nspids: vec![5_900, 7],
        container_name: Some("llm-serve".to_owned()),
        container: Some(CONTAINER.replace('3', "8")),
        ..process(NODE, 5_900, 330.0, &["python3", "serve.py", "--preload", "all"], &[])
    };
    report.incidents.push(Incident {
        id: 1,
        began: at(301.05),
        ended: at(301.05),
        title: "python3 was killed for want of memory: container llm-serve was at its limit".to_owned(),
        cause: IncidentCause::OomKill,
        group: group(GroupBy::Container, "llm-serve"),
        processes: vec![member(&serve, Part::First, "killed by the kernel at the memory limit of its cgroup")],
        devices: held(NODE, [0]),
        freed: Some(at(302.25)),
        xids: Vec::new(),
        evidence: words(&["the kernel marked pid 5200 as its victim 3 ms before the death"]),
    });
    report.holds = vec![hold(&serve, 0, -495.0, Role::Attached), hold(&again, 0, 334.0, Role::Attached)];
    report.processes = vec![serve, again];
    report
}

/// `sudo pkill -9 python` by a person, and what it hit.
pub(crate) fn pkill() -> Report {
    let mut report = with_gpus(NODE, 2);
    let by = |pid: u32| {
        let lineage = [
            ancestor(810, &["sudo", "pkill", "-9", "python"], Some(exited(0))),
            ancestor(700, &["-bash"], None),
            ancestor(650, &["sshd: bob@pts/0"], None),
        ];
        let sender = sender(812, &["pkill", "-9", "python"], 0, "root", &lineage);
        let time = 95.2 + f64::from(pid - 3_000) * 0.001;
        DeathReport {
            signal: Some("SIGKILL".to_owned()),
            sender: Some(sender),
            ..death(Cause::KilledBy, time, &["SIGKILL from pkill (pid 812), started by bob over ssh"])
        }
    };
    let shell = [ancestor(2_950, &["-bash"], None)];
    let mut jobs: Vec<ProcessReport> = (0..3)
        .map(|number| {
            process(NODE, 3_001 + number, -60.0, &["python3", "sweep.py", &format!("--seed={number}")], &shell)
        })
        .collect();
    for job in &mut jobs {
        dies(job, signalled(9), 0.2, 1, by(job.who.pid));
    }
    report.holds = jobs.iter().map(|job| hold(job, (job.who.pid - 3_001) % 2, -58.0, Role::Attached)).collect();
    report.incidents.push(Incident {
        id: 1,
        began: at(95.201),
        ended: at(95.203),
        title: "3 processes of alice were killed by pkill, which bob had started with sudo".to_owned(),
        cause: IncidentCause::KilledBy,
        group: group(GroupBy::Lineage, "bash 2950"),
        processes: jobs
            .iter()
            .enumerate()
            .map(|(number, job)| {
                let part = if number == 0 { Part::First } else { Part::Followed };
                member(job, part, "killed by SIGKILL from pkill (pid 812)")
            })
            .collect(),
        devices: held(NODE, 0..2),
        freed: Some(at(95.403)),
        xids: Vec::new(),
        evidence: words(&["one pkill (pid 812) sent SIGKILL to all of them within 2 ms"]),
    });
    report.processes = jobs;
    report
}

/// The power went; the report is read after the next boot.
pub(crate) fn host_down() -> Report {
    let mut report = with_gpus(NODE, 2);
    let down = HostReport { last: at(412.0), state: HostState::Down, ..host(NODE) };
    let next = HostReport { boot_id: boot_of("node7 again"), booted: at(640.0), ..host(NODE) };
    report.hosts = vec![down, next];
    let mut job = ProcessReport {
        slurm_job: Some("4802".to_owned()),
        slurm_step: Some("0".to_owned()),
        ..process(
            NODE,
            8_101,
            -300.0,
            &["./simulate", "--steps=1e9"],
            &[ancestor(8_090, &["slurmstepd: [4802.0]"], None)],
        )
    };
    job.death = Some(death(
        Cause::HostDown,
        412.0,
        &["it held at the last sign of life of this boot, 03:06:52; the next boot began 03:10:40"],
    ));
    job.incident = Some(1);
    report.holds = (0..2)
        .map(|gpu| HoldReport { ended: Some(HoldEnd::HostDown), ..hold(&job, gpu, -298.0, Role::Attached) })
        .collect();
    report.incidents.push(Incident {
        id: 1,
        began: at(412.0),
        ended: at(640.0),
        title: "node7 went down between 03:06:52 and 03:10:40 while 2 GPUs were held".to_owned(),
        cause: IncidentCause::HostDown,
        group: group(GroupBy::Host, NODE),
        processes: vec![member(&job, Part::First, "held when the record of its boot ends")],
        devices: held(NODE, 0..2),
        freed: None,
        xids: Vec::new(),
        evidence: words(&["the record ends without a stop, and the next one is of another boot"]),
    });
    report.processes = vec![job];
    report.gaps.push(Gap {
        host: NODE.to_owned(),
        boot_id: boot_of("node7 again"),
        from: at(640.0),
        to: Some(at(662.5)),
        events: None,
        note: "the host had booted, the daemon had not started".to_owned(),
    });
    report
}

/// An illegal address: the driver names it, then the process falls.
pub(crate) fn xid() -> Report {
    let mut report = with_gpus(NODE, 2);
    let lineage = [ancestor(6_150, &["/usr/lib/jupyter-kernelmanager"], None)];
    let mut job =
        process(NODE, 6_200, 20.0, &["python3", "-m", "ipykernel_launcher", "-f", "/run/user/1000/k.json"], &lineage);
    let fault = DeathReport {
        signal: Some("SIGSEGV".to_owned()),
        core: true,
        thread: Some(thread(6_233, "cuda-EvtHandlr")),
        ..death(Cause::Fault, 505.9, &["thread cuda-EvtHandlr (6233) raised SIGSEGV 412 ms after Xid 31"])
    };
    dies(&mut job, ExitReport { core: true, ..signalled(11) }, 0.3, 1, fault);
    let other = process(NODE, 6_500, 100.0, &["./bench"], &[]);
    report.holds = vec![
        hold(&job, 0, 24.0, Role::Attached),
        HoldReport {
            released: Some(at(700.0)),
            ended: Some(HoldEnd::Closed),
            ..hold(&other, 1, 104.0, Role::Attached)
        },
    ];
    report.xids = vec![
        XidReport {
            host: NODE.to_owned(),
            time: at(505.488),
            xid: Xid {
                bdf: "0000:18:00.0".to_owned(),
                node: Some(node(0)),
                xid: 31,
                pid: Some(6_200),
                name: Some("python3".to_owned()),
                message: "pid=6200, name=python3, Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_40000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ".to_owned(),
                source: "tracepoint".to_owned(),
            },
            class: XidClass::Application,
            meaning: "GPU memory page fault".to_owned(),
            holders: vec![job.who.clone()],
        },
        XidReport {
            host: NODE.to_owned(),
            time: at(900.0),
            xid: Xid {
                bdf: "0000:28:00.0".to_owned(),
                node: Some(node(1)),
                xid: 63,
                pid: None,
                name: None,
                message: "Row Remapper: New row marked for remapping, reset gpu to activate.".to_owned(),
                source: "kmsg".to_owned(),
            },
            class: XidClass::Hardware,
            meaning: "row remapping recorded".to_owned(),
            holders: Vec::new(),
        },
    ];
    report.incidents = vec![
        Incident {
            id: 1,
            began: at(505.488),
            ended: at(505.9),
            title: "python3 read a wrong address on GPU 0 (Xid 31) and ended with SIGSEGV".to_owned(),
            cause: IncidentCause::Fault,
            group: group(GroupBy::Process, "python3 6200"),
            processes: vec![member(&job, Part::First, "SIGSEGV raised by its own thread cuda-EvtHandlr")],
            devices: held(NODE, [0]),
            freed: Some(at(506.2)),
            xids: vec![0],
            evidence: words(&["Xid 31 names pid 6200, which held GPU 0", "it ended 412 ms after"]),
        },
        Incident {
            id: 2,
            began: at(900.0),
            ended: at(900.0),
            title: "GPU 1 marked a row of its memory for remapping (Xid 63); it wants a reset".to_owned(),
            cause: IncidentCause::Xid,
            group: group(GroupBy::Device, "/dev/nvidia1"),
            processes: Vec::new(),
            devices: held(NODE, [1]),
            freed: Some(at(900.0)),
            xids: vec![1],
            evidence: words(&["nobody held GPU 1 at that instant"]),
        },
    ];
    report.processes = vec![job, other];
    report
}

const RANKS: u32 = 8;
const WORKERS: u32 = 5;

/// A job of eight ranks with five helper processes each: with the monitor and a notebook fifty processes hold eight GPUs.
pub(crate) fn slurm() -> Report {
    let mut report = with_gpus("gpu-a-017", RANKS);
    let name = "gpu-a-017";
    let step = [
        ancestor(20_450, &["/usr/bin/srun", "python3", "pretrain.py"], None),
        ancestor(20_400, &["slurmstepd: [771204.0]"], None),
    ];
    let place = |process: ProcessReport| ProcessReport {
        slurm_job: Some("771204".to_owned()),
        slurm_step: Some("0".to_owned()),
        cgroup: Some("/system.slice/slurmstepd.scope/job_771204/step_0/user/task_0".to_owned()),
        unit: Some("slurmstepd.scope".to_owned()),
        ..process
    };
    let mut incident = Vec::new();
    let mut before = Vec::new();
    // What ran before, one process on each GPU.
    for gpu in 0..RANKS {
        let mut old = process(name, 19_000 + gpu, -590.0, &["python3", "eval.py", "--suite=all"], &[]);
        let time = -60.0 + f64::from(gpu) * 6.0;
        dies(&mut old, exited(0), 0.3, 0, DeathReport { code: Some(0), ..death(Cause::Exited, time, &[]) });
        old.incident = None;
        report.holds.push(hold(&old, gpu, -585.0, Role::Attached));
        before.push(old);
    }
    for rank in 0..RANKS {
        let pid = 20_500 + rank;
        let mut main = place(ProcessReport {
            env: rank_env(rank, RANKS),
            ..process(name, pid, 60.0, &["/opt/conda/bin/python3", "-u", "pretrain.py", "--config=7b.toml"], &step)
        });
        main.threads.extend([
            thread(pid + 300, "cuda-EvtHandlr"),
            thread(pid + 400, "pt_nccl_watchdg"),
            thread(pid + 500, "pt_autograd_0"),
        ]);
        // Rank 3 runs out of memory; the watchdogs of the others wait for it, then fire.
        let (exit, record, part, why) = if rank == 3 {
            let death = DeathReport {
                signal: Some("SIGKILL".to_owned()),
                oom: Some(OomReport {
                    scope: Some(OomScope::Cgroup),
                    cgroup: Some("/system.slice/slurmstepd.scope/job_771204".to_owned()),
                }),
                ..death(Cause::OomKill, 752.4, &["the kernel chose it because job_771204 was at its memory limit"])
            };
            (signalled(9), death, Part::First, "killed by the kernel at the memory limit of job_771204")
        } else {
            let death = DeathReport {
                signal: Some("SIGABRT".to_owned()),
                core: true,
                thread: Some(thread(pid + 400, "pt_nccl_watchdg")),
                ..death(
                    Cause::Fault,
                    812.5 + f64::from(rank) * 0.31,
                    &["thread pt_nccl_watchdg of the process itself raised SIGABRT"],
                )
            };
            (
                ExitReport { core: true, ..signalled(6) },
                death,
                Part::Followed,
                "SIGABRT raised by its own thread pt_nccl_watchdg, 60 s after rank 3 was gone",
            )
        };
        let time = record.time.expect("a time");
        dies(&mut main, exit, 1.1, 2, record);
        incident.push(member(&main, part, why));
        for gpu in 0..RANKS {
            report.holds.push(hold(&main, gpu, 75.0, if gpu == rank { Role::Attached } else { Role::Handle }));
        }
        report.holds.push(control(&main, 75.0));
        let lineage: Vec<AncestorReport> = [AncestorReport {
            exit: main.exit,
            ..ancestor(pid, &["/opt/conda/bin/python3", "-u", "pretrain.py", "--config=7b.toml"], None)
        }]
        .into_iter()
        .chain(step.iter().cloned())
        .collect();
        for number in 0..WORKERS {
            let pid = 20_600 + rank * WORKERS + number;
            let mut helper = place(ProcessReport {
                comm: "pt_data_worker".to_owned(),
                threads: vec![thread(pid, "pt_data_worker"), thread(pid + 900, "pt_data_pin")],
                ..process(
                    name,
                    pid,
                    90.0,
                    &["/opt/conda/bin/python3", "-u", "pretrain.py", "--config=7b.toml"],
                    &lineage,
                )
            });
            let after = (time - at(0.0)).get_milliseconds() as f64 / 1_000.0 + (time - at(0.0)).get_seconds() as f64;
            let gone = after + 4.0 + f64::from(number) * 0.05;
            dies(
                &mut helper,
                exited(1),
                0.1,
                2,
                DeathReport { code: Some(1), ..death(Cause::Exited, gone, &["its parent had died 4 s before"]) },
            );
            incident.push(member(&helper, Part::Followed, "exited 1 after its parent had died"));
            for gpu in 0..RANKS {
                report.holds.push(HoldReport {
                    origin: HoldOrigin::Inherited,
                    inherited_from: Some(20_500 + rank),
                    ..hold(&helper, gpu, 91.0, if gpu == rank { Role::Attached } else { Role::Handle })
                });
            }
            report.processes.push(helper);
        }
        report.processes.push(main);
    }
    // The monitor holds all the time and goes on; somebody's notebook came afterwards.
    let monitor = ProcessReport {
        uid: Some(0),
        user: Some("root".to_owned()),
        class: Some("monitor".to_owned()),
        unit: Some("dcgm-exporter.service".to_owned()),
        cgroup: Some("/system.slice/dcgm-exporter.service".to_owned()),
        ..process(name, 1_412, -80_000.0, &["/usr/bin/dcgm-exporter"], &[])
    };
    for gpu in 0..RANKS {
        report.holds.push(HoldReport { origin: HoldOrigin::Snapshot, ..hold(&monitor, gpu, -600.0, Role::Handle) });
    }
    let notebook = process(name, 22_010, 1_010.0, &["python3", "-m", "ipykernel_launcher"], &[]);
    report.holds.push(hold(&notebook, 0, 1_015.0, Role::Attached));
    report.processes.extend([monitor, notebook]);
    report.processes.extend(before);
    report.processes.sort_by_key(|process| process.started);
    incident.sort_by_key(|member| member.time);
    report.xids = (0..RANKS)
        .filter(|rank| *rank == 5)
        .map(|rank| XidReport {
            host: name.to_owned(),
            time: at(816.0),
            xid: Xid {
                bdf: format!("0000:{:02x}:00.0", 0x18 + rank * 0x10),
                node: Some(node(rank)),
                xid: 45,
                pid: Some(20_500 + rank),
                name: Some("python3".to_owned()),
                message: format!("pid={}, name=python3, Ch 00000014", 20_500 + rank),
                source: "tracepoint".to_owned(),
            },
            class: XidClass::ResultOfAKill,
            meaning: "preemptive cleanup, due to previous errors".to_owned(),
            holders: vec![who(name, 20_500 + rank)],
        })
        .collect();
    report.gaps.push(Gap {
        host: name.to_owned(),
        boot_id: boot_of(name),
        from: at(-180.0),
        to: Some(at(-132.0)),
        events: Some(3),
        note: "the daemon was restarted; the kernel went on counting".to_owned(),
    });
    let mut stopped = process(name, 18_500, -595.0, &["python3", "debug.py"], &[]);
    let reaped = DeathReport {
        signal: Some("SIGTERM".to_owned()),
        sender: Some(sender(
            18_900,
            &["gpureap", "reap", "--gpu", "6", "--yes"],
            0,
            "root",
            &[ancestor(18_880, &["-bash"], None)],
        )),
        ..death(Cause::Reaped, -420.0, &["gpureap (pid 18900) had written that it would signal it"])
    };
    dies(&mut stopped, signalled(15), 0.2, 1, reaped);
    report.holds.push(hold(&stopped, 6, -594.0, Role::Attached));
    report.incidents.push(Incident {
        id: 1,
        began: at(-420.0),
        ended: at(-420.0),
        title: "python3 was reaped by gpureap, which root ran".to_owned(),
        cause: IncidentCause::Reaped,
        group: group(GroupBy::Process, "python3 18500"),
        processes: vec![member(&stopped, Part::First, "reaped with SIGTERM")],
        devices: held(name, [6]),
        freed: Some(at(-419.8)),
        xids: Vec::new(),
        evidence: words(&["gpureap (pid 18900) had written that it would signal it"]),
    });
    report.processes.insert(0, stopped);
    report.incidents.push(Incident {
        id: 2,
        began: at(752.4),
        ended: at(818.87),
        title: "rank 3 of job 771204 was killed for want of memory; the NCCL watchdogs of 7 ranks fired 60 s later"
            .to_owned(),
        cause: IncidentCause::OomKill,
        group: group(GroupBy::SlurmJob, "771204"),
        processes: incident,
        devices: held(name, 0..RANKS),
        freed: Some(at(818.97)),
        xids: vec![0],
        evidence: words(&[
            "the first death is an out-of-memory kill at the limit of job_771204",
            "the other ranks were alive for 60 s more and were aborted by their own pt_nccl_watchdg threads",
            "Xid 45 on GPU 5 came after the process it names had been aborted",
        ]),
    });
    report
}

/// Names made to break out of a terminal, of markup and of reading order.
pub(crate) fn hostile() -> Report {
    let script = "</script><img src=x onerror=\"alert(1)\">";
    let vector = "\"><svg onload=alert(2)>";
    let bidi = "a\u{202e}gpj.exe\u{2066}\u{200b}";
    let terminal = "\u{1b}]0;owned\u{7}\u{9b}31m\r\n";
    let long = "x".repeat(5_000);
    let mut report = with_gpus(NODE, 2);
    let lineage = [
        ancestor(901, &[script, vector, bidi], Some(signalled(9))),
        ancestor(900, &["</style><style>*{display:none}"], None),
    ];
    let mut jobs: Vec<ProcessReport> =
        [script, vector, bidi, terminal, long.as_str(), "' onmouseover='alert(3)", "{{7*7}}<!--"]
            .iter()
            .enumerate()
            .map(|(number, name)| ProcessReport {
                comm: (*name).to_owned(),
                user: Some(vector.to_owned()),
                container_name: Some(script.to_owned()),
                image: Some("javascript:alert(4)".to_owned()),
                pod_name: Some(bidi.to_owned()),
                pod_namespace: Some(terminal.to_owned()),
                cgroup: Some(format!("/{script}")),
                unit: Some(long.clone()),
                slurm_job: Some(vector.to_owned()),
                exe: Some(terminal.to_owned()),
                env: [("RANK".to_owned(), script.to_owned()), (vector.to_owned(), terminal.to_owned())].into(),
                threads: vec![thread(1_001, script), thread(1_002, bidi)],
                ..process(NODE, 1_000 + number as u32, 10.0 * number as f64, &[name, script, bidi, terminal], &lineage)
            })
            .collect();
    let killed = DeathReport {
        signal: Some(script.to_owned()),
        sender: Some(sender(905, &[vector, terminal], 0, script, &lineage)),
        thread: Some(thread(1_001, vector)),
        oom: Some(OomReport { scope: None, cgroup: Some(script.to_owned()) }),
        ..death(Cause::KilledBy, 300.0, &[script, terminal])
    };
    dies(&mut jobs[0], signalled(9), 0.5, 1, killed);
    report.holds = jobs.iter().map(|job| hold(job, job.who.pid % 2, 12.0, Role::Attached)).collect();
    report.devices[1].model = Some(script.to_owned());
    report.devices[1].uuid = Some(vector.to_owned());
    script.clone_into(&mut report.hosts[0].kernel);
    report.incidents.push(Incident {
        id: 1,
        began: at(300.0),
        ended: at(300.0),
        title: format!("{script} was killed by {bidi}{terminal}"),
        cause: IncidentCause::KilledBy,
        group: group(GroupBy::Container, vector),
        processes: vec![member(&jobs[0], Part::First, &format!("killed by {script} {terminal}"))],
        devices: held(NODE, [0]),
        freed: Some(at(300.5)),
        xids: vec![0],
        evidence: words(&[vector, terminal, &long]),
    });
    report.xids.push(XidReport {
        host: NODE.to_owned(),
        time: at(301.0),
        xid: Xid {
            bdf: script.to_owned(),
            node: Some(node(0)),
            xid: 13,
            pid: None,
            name: Some(vector.to_owned()),
            message: format!("{terminal}{script}"),
            source: "kmsg".to_owned(),
        },
        class: XidClass::Unknown,
        meaning: script.to_owned(),
        holders: vec![jobs[0].who.clone()],
    });
    report.gaps.push(Gap {
        host: NODE.to_owned(),
        boot_id: boot_of(NODE),
        from: at(400.0),
        to: None,
        events: None,
        note: script.to_owned(),
    });
    report.notes = words(&[script, terminal]);
    report.processes = jobs;
    report
}

/// `--at`: who held what at a quarter past.
pub(crate) fn at_an_instant() -> Report {
    let instant = at(900.0);
    let mut report = with_gpus(NODE, 2);
    let jobs: Vec<ProcessReport> = (0..2)
        .map(|number| {
            process(NODE, 7_001 + number, -60.0, &["python3", "finetune.py"], &[ancestor(6_990, &["tmux"], None)])
        })
        .collect();
    report.holds = jobs
        .iter()
        .map(|job| HoldReport {
            released: Some(at(1_000.0)),
            ended: Some(HoldEnd::Closed),
            ..hold(job, 0, -50.0, Role::Attached)
        })
        .collect();
    report.holds[1].role = Some(Role::Handle);
    report.processes = jobs;
    Report { at: Some(instant), since: instant, until: instant, ..report }
}

/// The records of two hosts, one of which had its clock set.
pub(crate) fn two_hosts() -> Report {
    let mut report = watchdog();
    add_gpus(&mut report, "node8", 1);
    let mut other = host("node8");
    other.clock_moved_ms = -3_250;
    other.state = HostState::Stopped;
    other.last = at(1_100.0);
    report.hosts.push(other);
    let job = process("node8", 4_711, -100.0, &["python3", "train.py"], &[]);
    report.holds.push(HoldReport {
        origin: HoldOrigin::Received,
        ended: Some(HoldEnd::Unseen),
        released: Some(at(800.0)),
        ..hold(&job, 0, -90.0, Role::Attached)
    });
    report.holds.push(HoldReport {
        origin: HoldOrigin::Unconfirmed,
        opened: at(850.0),
        released: Some(at(850.002)),
        ended: Some(HoldEnd::Closed),
        ..hold(&job, 0, -90.0, Role::Handle)
    });
    report.processes.push(job);
    report.notes.push("the clocks of 2 hosts were not compared: times of different hosts may be apart".to_owned());
    report
}
