//! Many processes, hostile names, several hosts.

use super::{
    AncestorReport, Cause, DeathReport, ExitReport, Gap, GroupBy, HoldEnd, HoldOrigin, HoldReport, HostState, Incident,
    IncidentCause, NODE, OomReport, OomScope, Part, ProcessReport, Report, Role, Xid, XidClass, XidReport, add_gpus,
    ancestor, at, boot_of, control, death, dies, exited, group, held, hold, host, member, node, process, rank_env,
    sender, signalled, thread, watchdog, who, with_gpus, words,
};

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
