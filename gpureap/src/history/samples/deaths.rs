//! One job and its end.

use super::{
    Cause, DeathReport, ExitReport, Gap, GroupBy, HoldEnd, HoldReport, HostReport, HostState, Incident, IncidentCause,
    NODE, OomReport, OomScope, Part, ProcessReport, Report, Role, Xid, XidClass, XidReport, ancestor, at, boot_of,
    control, death, dies, exited, group, held, hold, host, member, node, process, rank_env, sender, signalled, thread,
    with_gpus, words,
};

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
