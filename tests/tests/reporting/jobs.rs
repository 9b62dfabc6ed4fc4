//! Whose processes they were: ranks, jobs and containers, threads and helpers.
use std::{fs, os::unix::process::ExitStatusExt as _};

use gpureap_tests::harness::{Bench, Daemon, Groups, Player, Role, skip, sys};
use serde_json::{Value, json};

use crate::{
    DEV, bench, elsewhere,
    record::{dead, hold, holds, incident, lineage, list, member, process, report, until, until_held},
    shared,
};

const CONTAINER: &str = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0";

fn rank(number: &str, port: &str) -> Player {
    let environment = [("RANK", number), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", port)];
    let mut player = Player::with(&Role { environment: &environment, ..Role::default() });
    player.ask(&format!("open {DEV}"));
    player
}

#[test]
fn p4_a_watchdog_that_ends_its_process_because_another_rank_is_stalled() {
    let bench = shared();
    let (mut first, mut second) = (rank("0", "29501"), rank("1", "29501"));
    let (first_pid, second_pid) = (first.pid(), second.pid());
    let tid = first.ask("thread pt_nccl_watchdg");
    // Of another job, and no part of this.
    let other = rank("1", "29502");
    until_held(&bench, &[first_pid, second_pid, other.pid()]);
    first.tell("raise pt_nccl_watchdg 6");
    assert_eq!(first.end().signal(), Some(6));
    let process = dead(&bench, first_pid, "fault");
    assert_eq!(process["death"]["signal"], "SIGABRT", "{process:#}");
    assert_eq!(process["death"]["thread"], json!({"tid": tid, "name": "pt_nccl_watchdg"}), "{process:#}");
    assert_eq!(process["env"]["RANK"], "0", "{process:#}");

    let found = report(&bench, &[]);
    let timeout = incident(&found, first_pid);
    assert_eq!(timeout["cause"], "collective-timeout", "{timeout:#}");
    assert_eq!(timeout["group"], json!({"by": "rank-set", "name": "10.0.0.1:29501, 2 ranks"}), "{timeout:#}");
    assert_eq!(list(timeout, "processes").len(), 2, "{timeout:#}");
    let one = member(timeout, first_pid);
    assert_eq!((&one["part"], &one["rank"], &one["cause"]), (&json!("first"), &json!(0), &json!("fault")));
    let stalled = member(timeout, second_pid);
    assert_eq!((&stalled["part"], &stalled["rank"], &stalled["cause"]), (&json!("stalled"), &json!(1), &Value::Null));
    let why = stalled["why"].as_str().expect("why");
    assert!(why.starts_with("its main thread was in state S"), "{stalled:#}");
    assert!(timeout["evidence"].to_string().contains("was in state S"), "{timeout:#}");
    let title = timeout["title"].as_str().expect("a title");
    assert!(title.contains("was ended by its own watchdog: it had waited for rank 1"), "{title}");

    // The other one gives up as well: the same incident, and still the one that was waited for.
    second.tell("exit 1");
    assert_eq!(second.end().code(), Some(1));
    dead(&bench, second_pid, "exited");
    let found = report(&bench, &["--pid", &first_pid.to_string()]);
    let timeout = incident(&found, second_pid);
    assert_eq!(timeout["cause"], "collective-timeout", "{timeout:#}");
    assert_eq!(member(timeout, second_pid)["part"], "stalled", "{timeout:#}");
    assert!(!timeout["freed"].is_null(), "both have let go: {timeout:#}");
}

#[test]
fn p9_a_slurm_job_that_is_gone_when_the_report_is_read() {
    if elsewhere("P9 Slurm") {
        return;
    }
    let bench = shared();
    let Some(mut groups) = Groups::new() else { return skip("P9 Slurm", "no cgroup2 hierarchy is mounted") };
    let mut player = Player::start();
    let cgroup = groups.put(player.pid(), "slurmstepd.scope/job_4711/step_0/user/task_0");
    player.ask(&format!("open {DEV}"));
    until_held(&bench, &[player.pid()]);
    sys::kill(player.pid(), sys::SIGTERM);
    player.end();
    dead(&bench, player.pid(), "killed-by");
    drop(groups);
    let found = report(&bench, &[]);
    let process = process(&found, player.pid()).expect("its entry");
    assert_eq!(process["cgroup"], cgroup, "{process:#}");
    assert_eq!((&process["slurm_job"], &process["slurm_step"]), (&json!("4711"), &json!("0")), "{process:#}");
    let incident = incident(&found, player.pid());
    assert_eq!(incident["group"], json!({"by": "slurm-job", "name": "4711"}), "{incident:#}");
}

/// What dockerd writes of a container.
fn container_file(bench: &Bench) {
    let place = bench.path("host/var/lib/docker/containers").join(CONTAINER);
    fs::create_dir_all(&place).expect("a directory");
    let text = json!({"Name": "/train-7b", "Config": {"Image": "registry.example/train:1"}});
    fs::write(place.join("config.v2.json"), text.to_string()).expect("write");
}

#[test]
fn p9_a_container_that_is_gone_when_the_report_is_read() {
    if elsewhere("P9 container") {
        return;
    }
    let bench = bench();
    let Some(mut groups) = Groups::new() else { return skip("P9 container", "no cgroup2 hierarchy is mounted") };
    container_file(&bench);
    let _daemon = Daemon::start(&bench);
    let mut player = Player::start();
    groups.put(player.pid(), &format!("system.slice/docker-{CONTAINER}.scope"));
    player.ask(&format!("open {DEV}"));
    until_held(&bench, &[player.pid()]);
    player.tell("exit 1");
    player.end();
    dead(&bench, player.pid(), "exited");
    drop(groups);
    fs::remove_dir_all(bench.path("host/var")).expect("the container is removed");
    let found = report(&bench, &[]);
    let process = process(&found, player.pid()).expect("its entry");
    assert_eq!(process["container"], CONTAINER, "{process:#}");
    assert_eq!(process["container_name"], "train-7b", "{process:#}");
    assert_eq!(process["image"], "registry.example/train:1", "{process:#}");
    let incident = incident(&found, player.pid());
    assert_eq!(incident["group"], json!({"by": "container", "name": "train-7b"}), "{incident:#}");
}

#[test]
fn p11_helpers_and_threads_are_listed_with_their_process() {
    let bench = shared();
    let mut player = Player::start();
    player.ask("comm train.py");
    // Before the device is opened, and after.
    let mut threads = vec![("pt_autograd_0", player.ask("thread pt_autograd_0"))];
    player.ask(&format!("open {DEV}"));
    for name in ["cuda-EvtHandlr", "pt_nccl_heartbt"] {
        threads.push((name, player.ask(&format!("thread {name}"))));
    }
    let workers = [0, 1].map(|number| player.ask(&format!("fork pt_data_worker{number}")));
    let pid = player.pid();
    until_held(&bench, &[pid, workers[0], workers[1]]);
    let look = |report: &Value| {
        let main = process(report, pid).expect("the main process");
        assert_eq!(main["comm"], "train.py", "{main:#}");
        for (number, worker) in workers.iter().enumerate() {
            let entry = process(report, *worker).expect("a worker");
            // Cut by the kernel at 15 characters.
            assert_eq!(entry["comm"], format!("pt_data_worker{number}"), "{entry:#}");
            assert_eq!(lineage(entry)[0], pid, "{entry:#}");
            let hold = hold(report, *worker);
            assert_eq!((&hold["origin"], &hold["inherited_from"]), (&json!("inherited"), &json!(pid)), "{hold:#}");
        }
    };
    let named = |report: &Value| {
        threads.iter().all(|(name, tid)| {
            let list = process(report, pid).map(|process| list(process, "threads"));
            list.is_some_and(|list| list.contains(&json!({"tid": tid, "name": name})))
        })
    };
    let living = report(&bench, &[]);
    look(&living);
    // The main process ends; names and helpers stay in the record, and the helpers hold on.
    player.tell("exit 0");
    player.end();
    let found = until(&bench, &[], "it has ended, and its threads have their names", |report| {
        named(report) && process(report, pid).is_some_and(|process| !process["death"].is_null())
    });
    look(&found);
    assert!(workers.iter().all(|worker| holds(&found, *worker).iter().all(|hold| hold["released"].is_null())));
    drop(player);
    for worker in workers {
        dead(&bench, worker, "killed-by");
    }
    // Asking for the main process brings its helpers.
    let family = report(&bench, &["--pid", &pid.to_string()]);
    look(&family);
}
