//! What each recipe is for: who must be dead when it has run, and who must live.
use std::{
    fs::{self, File},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use gpureap_tests::harness::{Copy, Groups, Holder, Pid, Scene as Actors, Wanted, anybody, note, sys, wait_for};
use rustix::fs::{Access, access};

use crate::{
    Scene,
    page::Block,
    stage::{FULL, Played, Stage, USER, ZERO},
};

pub(crate) const SCENES: &[(&str, Scene)] = &[
    ("whole-host", whole_host),
    ("at-once", at_once),
    ("one-gpu", one_gpu),
    ("by-user-and-name", by_user_and_name),
    ("renamed-workers", renamed_workers),
    ("launcher", launcher),
    ("dead-launcher", dead_launcher),
    ("forked-after-cuda", forked_after_cuda),
    ("given-pids", given_pids),
    ("reset", reset),
    ("unload", unload),
    ("mig", mig),
    ("lxc", lxc),
    ("docker", docker),
    ("kubernetes", kubernetes),
    ("slurm-job", slurm_job),
    ("slurm-strays", slurm_strays),
    ("slurm-node", slurm_node),
    ("slurm-prolog", slurm_prolog),
    ("between-tests", between_tests),
    ("wait", wait),
    ("wait-then-reap", wait_then_reap),
    ("supervisor", supervisor),
    ("supervisor-tree", supervisor_tree),
    ("checkpoint", checkpoint),
    ("maintenance", maintenance),
    ("too-old", too_old),
    ("environment", environment),
    ("exit-codes", exit_codes),
    ("report-with-jq", report_with_jq),
    ("holders-with-jq", holders_with_jq),
];

type Outcome = Result<(), String>;

fn alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().is_empty() && !rest.trim_start().starts_with('Z'))
}

/// One by one, which of them live.
fn living<const N: usize>(holders: [&mut Holder; N]) -> [bool; N] {
    holders.map(Holder::lives)
}

fn named(comm: &str) -> Holder {
    Holder::with(&Wanted { comm, ..Wanted::default() })
}

/// Uses the device, not only a handle of it.
fn user_of(device: &str) -> Holder {
    Holder::with(&Wanted { device, maps: true, ..Wanted::default() })
}

fn running(copy: &Copy, device: &str) -> Holder {
    Holder::with(&Wanted { program: copy.path.clone(), device, ..Wanted::default() })
}

fn groups() -> Result<Groups, String> {
    Groups::new().ok_or_else(|| "no cgroup2 is mounted".to_owned())
}

fn need(program: &str) -> Outcome {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if found { Ok(()) } else { Err(format!("there is no {program}")) }
}

fn said(played: &Played, word: &str) {
    assert!(played.output.stdout.contains(word), "{word} in {played:#?}");
}

fn whole_host(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL, ZERO])?;
    let persistenced = stage.classed("nvidia-persistenced", "system");
    let headless = Actors::start("zombie-leader", FULL, &[]);
    let [tid] = headless.numbers("tids")[..] else { panic!("one thread") };
    let mut jobs = [user_of(ZERO), named("python3")];
    let played = stage.play(&[0, 0], 0);
    said(&played, "would be signalled");
    said(&played, "verified by a full sweep");
    wait_for("the thread has ended", || sys::session(tid).is_none());
    assert!(jobs.iter_mut().all(|job| !job.lives()));

    let (mut service, mut job) = (running(&persistenced, FULL), named("python3"));
    let played = stage.play(&[0, 5], 5);
    said(&played, "test-nvidia-persistenced");
    assert_eq!(living([&mut service, &mut job]), [true, false]);
    stage.all_was_run();
    Ok(())
}

fn at_once(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    let stubborn = Actors::start("ignore-term", FULL, &[]);
    let begun = Instant::now();
    stage.play(&[0], 0);
    assert!(!alive(stubborn.pid()) && begun.elapsed() < Duration::from_secs(8), "without the 10 s after TERM");
    stage.all_was_run();
    Ok(())
}

fn one_gpu(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL, ZERO])?;
    let mut on_gpu_0 = Holder::with(&Wanted { more: &[ZERO], ..Wanted::default() });
    let mut on_gpu_1 = user_of(ZERO);
    let played = stage.play(&[0], 0);
    said(&played, &format!("process {} has {ZERO} open without using it", on_gpu_0.pid()));
    assert_eq!(living([&mut on_gpu_0, &mut on_gpu_1]), [true, false]);
    stage.all_was_run();
    Ok(())
}

fn by_user_and_name(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let worker = Copy::in_home("worker", 0);
    let holder = |device, user, comm| {
        Holder::with(&Wanted { program: worker.path.clone(), device, user, comm, ..Wanted::default() })
    };
    let user = Some(USER.1);
    let mut meant = holder(FULL, user, "python3");
    let (mut roots, mut other) = (holder(FULL, None, "python3"), holder(FULL, user, "julia"));
    let mut without_gpu = holder("/dev/null", user, "python3");
    stage.set("JOB_USER", USER.1);
    stage.play(&[0], 0);
    let lives = living([&mut meant, &mut roots, &mut other, &mut without_gpu]);
    assert_eq!(lives, [false, true, true, true]);
    stage.all_was_run();
    Ok(())
}

fn renamed_workers(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    let [mut engine, mut worker, mut other] = ["VLLM::EngineCore", "VLLM::Worker_TP0", "python3"].map(named);
    stage.play(&[0], 0);
    assert_eq!(living([&mut engine, &mut worker, &mut other]), [false, false, true]);
    stage.all_was_run();
    Ok(())
}

fn launcher(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let (job, other) = (Actors::start("tree", FULL, &["3"]), Actors::start("tree", FULL, &["2"]));
    let family =
        |scene: &Actors| [vec![scene.number("launcher")], scene.numbers("workers"), scene.numbers("helpers")].concat();
    stage.set("LAUNCHER", job.number("launcher"));
    stage.play(&[0], 0);
    assert!(family(&job).into_iter().all(|pid| !alive(pid)));
    assert!(family(&other).into_iter().all(alive));
    stage.all_was_run();
    Ok(())
}

fn dead_launcher(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    stage.start_daemon();
    let orphans = Actors::start("orphans", FULL, &["6", "2"]);
    let launcher = orphans.numbers("dead")[0];
    let workers = |of_it: bool| -> Vec<Pid> {
        let groups = orphans.fields["groups"].as_array().expect("groups").iter();
        let groups = groups.filter(|group| (group["launcher"] == launcher) == of_it);
        let lists = groups.flat_map(|group| group["workers"].as_array().expect("workers"));
        lists.map(|pid| pid.as_i64().expect("a pid") as Pid).collect()
    };
    stage.set("LAUNCHER", launcher);
    stage.play(&[0], 0);
    assert_eq!(workers(true).len(), 3);
    assert!(workers(true).into_iter().all(|pid| !alive(pid)));
    assert!(workers(false).into_iter().all(alive));
    stage.all_was_run();
    Ok(())
}

fn forked_after_cuda(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[ZERO, FULL])?;
    let ghost = Actors::start("ghost", ZERO, &["mapped"]);
    let mut elsewhere = named("python3");
    stage.play(&[0], 0);
    assert!(!alive(ghost.pid()) && elsewhere.lives());
    stage.all_was_run();
    Ok(())
}

fn given_pids(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let (mut meant, mut not_named) = (Holder::start(), Holder::start());
    let mut without_gpu = Holder::with(&Wanted { device: "/dev/null", ..Wanted::default() });
    stage.set("PID", meant.pid());
    stage.set("OTHER", without_gpu.pid());
    let played = stage.play(&[0], 0);
    said(&played, &format!("process {} holds nothing", without_gpu.pid()));
    assert_eq!(living([&mut meant, &mut not_named, &mut without_gpu]), [false, true, true]);
    stage.all_was_run();
    Ok(())
}

/// A change of GPU 0 that needs every handle of it closed.
fn change_of_gpu_0(block: &Block, tool: &str) -> Outcome {
    let stage = Stage::new(block, &[ZERO, FULL])?;
    stage.stub("nvidia-smi");
    let service = stage.classed("nv-hostengine", "system");
    let mut job = Holder::with(&Wanted { device: ZERO, ..Wanted::default() });
    let mut service = running(&service, ZERO);
    let mut elsewhere = named("python3");
    let played = stage.play(&[5, 5], 5);
    said(&played, "in the way: 1 system process");
    assert_eq!(stage.noted("nvidia-smi"), "", "not while something is in the way");
    assert_eq!(living([&mut job, &mut service, &mut elsewhere]), [false, true, true]);
    drop(service);

    let mut job = Holder::with(&Wanted { device: ZERO, ..Wanted::default() });
    let played = stage.play(&[0, 0], 0);
    said(&played, "nothing is in the way");
    assert_eq!(stage.noted("nvidia-smi"), format!("{tool}\n"));
    assert_eq!(living([&mut job, &mut elsewhere]), [false, true]);
    stage.all_was_run();
    Ok(())
}

fn reset(block: &Block) -> Outcome {
    change_of_gpu_0(block, "--gpu-reset -i 0")
}

fn mig(block: &Block) -> Outcome {
    change_of_gpu_0(block, "-i 0 -mig 1")
}

fn unload(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    stage.stub("modprobe");
    let exporter = stage.classed("gpu-exporter", "monitor");
    let service = stage.classed("nv-fabricmanager", "system");
    let (mut monitor, mut service, mut job) = (running(&exporter, FULL), running(&service, FULL), Holder::start());
    stage.play(&[5, 5], 5);
    assert_eq!(living([&mut monitor, &mut service, &mut job]), [false, true, false]);
    assert_eq!(stage.noted("modprobe"), "");
    drop(service);

    let mut job = Holder::start();
    stage.play(&[0, 0], 0);
    assert!(!job.lives());
    assert_eq!(stage.noted("modprobe"), "-r nvidia_drm nvidia_modeset nvidia_uvm nvidia\n");
    stage.all_was_run();
    Ok(())
}

fn lxc(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    let mut groups = groups()?;
    let (mut inside, mut neighbour, mut outside) = (Holder::start(), Holder::start(), Holder::start());
    groups.put(inside.pid(), "lxc.payload.129");
    groups.put(neighbour.pid(), "lxc.payload.130");
    stage.play(&[0], 0);
    assert_eq!(living([&mut inside, &mut neighbour, &mut outside]), [false, true, true]);

    // As Proxmox lays them out.
    let mut inside = Holder::start();
    groups.put(inside.pid(), "lxc/129/ns/system.slice/train.service");
    groups.put(neighbour.pid(), "lxc/130/ns");
    stage.play(&[0], 0);
    assert_eq!(living([&mut inside, &mut neighbour, &mut outside]), [false, true, true]);
    stage.all_was_run();
    Ok(())
}

fn docker(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let mut groups = groups()?;
    let (id, other) = ("3fa9".repeat(16), "3fa8".repeat(16));
    let host = stage.bench.path("host");
    let record = host.join("var/lib/docker/containers").join(&id);
    fs::create_dir_all(&record).expect("the container's directory");
    fs::write(record.join("config.v2.json"), r#"{"Name":"/train","Config":{"Image":"example.com/train:1"}}"#)
        .expect("the container's record");
    stage.set("GPUREAP_HOST", host.display());
    let (mut inside, mut neighbour) = (Holder::start(), Holder::start());
    groups.put(inside.pid(), &format!("system.slice/docker-{id}.scope"));
    groups.put(neighbour.pid(), &format!("system.slice/docker-{other}.scope"));
    stage.play(&[0], 0);
    assert_eq!(living([&mut inside, &mut neighbour]), [false, true]);
    stage.all_was_run();
    Ok(())
}

fn kubernetes(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let mut groups = groups()?;
    let (id, other) = ("7b01".repeat(16), "7b02".repeat(16));
    let pod =
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_1111_2222_3333_444455556666.slice";
    let job = Actors::start("tree", FULL, &["2"]);
    let members = [job.numbers("workers"), job.numbers("helpers")].concat();
    for pid in &members {
        groups.put(*pid, &format!("{pod}/cri-containerd-{id}.scope"));
    }
    let mut neighbour = Holder::start();
    groups.put(neighbour.pid(), &format!("{pod}/cri-containerd-{other}.scope"));
    stage.set("CONTAINER_ID", format!("containerd://{id}"));
    stage.play(&[0], 0);
    assert!(members.into_iter().all(|pid| !alive(pid)), "the helpers too");
    assert!(neighbour.lives());
    stage.all_was_run();
    Ok(())
}

fn slurm_job(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let mut groups = groups()?;
    let service = stage.classed("nvidia-persistenced", "system");
    let mut service = running(&service, FULL);
    let (mut task, mut batch, mut other) = (Holder::start(), Holder::start(), Holder::start());
    groups.put(task.pid(), "slurmstepd.scope/job_4711/step_0/user/task_0");
    groups.put(batch.pid(), "slurmstepd.scope/job_4711/step_batch");
    groups.put(other.pid(), "slurmstepd.scope/job_471/step_0");
    stage.set("SLURM_JOB_ID", 4711);
    stage.play(&[0], 0);
    assert_eq!(living([&mut task, &mut batch, &mut other, &mut service]), [false, false, true, true]);
    stage.all_was_run();
    Ok(())
}

fn slurm_strays(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let of_job = |id: &str| Holder::with(&Wanted { environment: &[("SLURM_JOB_ID", id)], ..Wanted::default() });
    let (mut stray, mut other, mut none) = (of_job("4711"), of_job("471"), Holder::start());
    stage.set("SLURM_JOB_ID", 4711);
    stage.play(&[0], 0);
    assert_eq!(living([&mut stray, &mut other, &mut none]), [false, true, true]);
    stage.all_was_run();
    Ok(())
}

fn slurm_node(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    stage.stub("scontrol");
    stage.set("SLURMD_NODENAME", "node7");
    let service = stage.classed("nvidia-persistenced", "system");
    let (mut service, mut job) = (running(&service, FULL), Holder::start());
    stage.play(&[5], 0);
    assert_eq!(living([&mut service, &mut job]), [true, false]);
    assert_eq!(stage.noted("scontrol"), "");

    // Whoever started the recipe holds it, and is not signalled.
    let own = File::open(FULL).expect(FULL);
    stage.play(&[3], 0);
    assert_eq!(stage.noted("scontrol"), "update nodename=node7 state=drain reason=GPUs are not free\n");
    drop(own);
    stage.all_was_run();
    Ok(())
}

fn slurm_prolog(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    let exporter = stage.classed("gpu-exporter", "monitor");
    let mut monitor = running(&exporter, FULL);
    let ending = Actors::start("quick-exit", FULL, &["700"]);
    stage.play(&[0], 0);
    assert!(!alive(ending.pid()) && monitor.lives());
    stage.all_was_run();
    Ok(())
}

/// Kills somebody in a while, as if it ended by itself.
fn later(pid: Pid) -> Instant {
    std::thread::spawn(move || {
        std::thread::sleep(WHILE);
        sys::kill(pid, libc::SIGKILL);
    });
    Instant::now()
}

const WHILE: Duration = Duration::from_millis(700);

fn between_tests(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[ZERO])?;
    stage.as_user()?;
    stage.start_daemon();
    let worker = Copy::in_home("worker", 0);
    let mut left_over = Holder::with(&Wanted {
        program: worker.path.clone(),
        device: ZERO,
        maps: true,
        user: Some(USER.1),
        own_session: false,
        ..Wanted::default()
    });
    let mut of_another_user = user_of(ZERO);
    let begun = later(of_another_user.pid());
    let played = stage.play(&[0, 0], 0);
    assert!(begun.elapsed() >= WHILE, "it waits for the other's process: {played:#?}");
    assert_eq!(living([&mut left_over, &mut of_another_user]), [false, false]);
    stage.all_was_run();
    Ok(())
}

fn wait(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[ZERO])?;
    let mut job = user_of(ZERO);
    let begun = later(job.pid());
    stage.play(&[0], 0);
    assert!(begun.elapsed() >= WHILE && !job.lives());
    stage.all_was_run();
    Ok(())
}

fn wait_then_reap(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[ZERO])?;
    let mut job = user_of(ZERO);
    let played = stage.play(&[3, 0], 0);
    said(&played, &job.pid().to_string());
    assert!(!job.lives());
    stage.all_was_run();
    Ok(())
}

fn supervisor(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    let respawn = Actors::start("respawn", FULL, &[]);
    // The supervisor is not always quick enough to try while the door is closed.
    let mut refused = false;
    for _ in 0..60 {
        wait_for("the worker is back", || !anybody("1:7").is_empty());
        let workers = anybody("1:7");
        let played = stage.play(&[0], 0);
        assert!(workers.into_iter().all(|pid| !alive(pid)));
        refused |= played.output.stdout.contains("refused (worker)");
        if refused {
            break;
        }
    }
    assert!(refused, "the supervisor tried meanwhile");
    assert!(alive(respawn.number("supervisor")));
    stage.all_was_run();
    Ok(())
}

fn supervisor_tree(block: &Block) -> Outcome {
    let stage = Stage::new(block, &[FULL])?;
    let respawn = Actors::start("respawn", FULL, &[]);
    stage.play(&[0], 0);
    assert!(!alive(respawn.number("supervisor")) && !alive(respawn.pid()));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(anybody("1:7"), Vec::<Pid>::new(), "and nobody comes back");
    stage.all_was_run();
    Ok(())
}

fn checkpoint(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let trainer = Actors::start("term-slow", FULL, &["1000"]);
    stage.set("PID", trainer.pid());
    let begun = Instant::now();
    let played = stage.play(&[0], 0);
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(30), "{took:?}");
    assert!(!alive(trainer.pid()) && !played.output.stdout.contains("KILL"), "{played:#?}");
    stage.all_was_run();
    Ok(())
}

/// Looks whether the device may be opened, without holding it, until it may not.
fn refused_once(node: &str) -> bool {
    access(node, Access::READ_OK).is_err()
}

fn maintenance(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let mut groups = groups()?;
    let unit = format!("gpureap-test-unit-{}.service", std::process::id());
    let exempt = match sys::fork() {
        0 => loop {
            if refused_once(FULL) {
                sys::exit(1);
            }
            sys::sleep(1);
        },
        pid => pid,
    };
    groups.put(exempt, &unit);
    stage.set("UNIT", unit.trim_end_matches(".service"));
    let mut job = Holder::start();
    let (done, refused) = (AtomicBool::new(false), AtomicBool::new(false));
    let played = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) && !refused.load(Ordering::Relaxed) {
                refused.store(refused_once(FULL), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stage.play(&[0, 0, 0, 0], 0)));
        done.store(true, Ordering::Relaxed);
        played
    });
    sys::kill(exempt, libc::SIGKILL);
    let status = sys::reap(exempt);
    let played = played.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert_eq!(status & 0x7f, libc::SIGKILL, "the exempt was never refused");
    assert!(refused.into_inner(), "others were: {played:#?}");
    said(&played, &format!("/{unit}"));
    assert!(!job.lives());
    assert!(!refused_once(FULL), "it is open again");
    assert_eq!(played.calls.last().map(|(_, arguments)| arguments.as_str()), Some("unfence"));
    stage.all_was_run();
    Ok(())
}

fn too_old(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let mut old = Holder::start();
    let gap = Duration::from_secs(4);
    std::thread::sleep(gap);
    let mut young = Holder::start();
    stage.set("JOB_USER", "root");
    stage.set("AGE", format!("{}s", gap.as_secs()));
    stage.play(&[0], 0);
    assert_eq!(living([&mut old, &mut young]), [false, true]);
    stage.all_was_run();
    Ok(())
}

fn environment(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let rank = |port: &str, rank: &str| {
        let environment = [("MASTER_PORT", port), ("WORLD_SIZE", "2"), ("RANK", rank)];
        Holder::with(&Wanted { environment: &environment, ..Wanted::default() })
    };
    let (mut first, mut second, mut other) = (rank("29500", "0"), rank("29500", "1"), rank("29501", "0"));
    stage.set("PORT", 29_500);
    let played = stage.play(&[0, 0], 0);
    said(&played, "would be signalled");
    assert_eq!(living([&mut first, &mut second, &mut other]), [false, false, true]);
    stage.all_was_run();
    Ok(())
}

fn exit_codes(block: &Block) -> Outcome {
    let mut stage = Stage::new(block, &[FULL])?;
    let last = |played: &Played| played.output.stdout.lines().last().unwrap_or_default().to_owned();
    assert_eq!(last(&stage.play(&[0], 0)), "free");
    let service = stage.classed("nvidia-persistenced", "system");
    let (mut service, mut job) = (running(&service, FULL), Holder::start());
    assert_eq!(last(&stage.play(&[5], 0)), "free of jobs");
    assert_eq!(living([&mut service, &mut job]), [true, false]);
    let own = File::open(FULL).expect(FULL);
    assert_eq!(last(&stage.play(&[3], 0)), "still held: drain this node");
    drop((own, service));
    stage.all_was_run();
    match stage.as_user() {
        Ok(()) => assert_eq!(last(&stage.play(&[7], 0)), "could not be done"),
        Err(reason) => note(&reason),
    }
    Ok(())
}

fn report_with_jq(block: &Block) -> Outcome {
    need("jq")?;
    let mut stage = Stage::new(block, &[FULL])?;
    let mut job = Holder::start();
    let report = stage.bench.path("report.json");
    stage.set("REPORT", report.display());
    let played = stage.play(&[0], 0);
    assert_eq!(played.output.stdout, format!("{} root exited\n", job.pid()));
    assert!(!job.lives() && Path::new(&report).exists());

    let own = File::open(FULL).expect(FULL);
    stage.play(&[3], 3);
    drop(own);
    stage.all_was_run();
    Ok(())
}

fn holders_with_jq(block: &Block) -> Outcome {
    need("jq")?;
    let stage = Stage::new(block, &[FULL])?;
    let exporter = stage.classed("gpu-exporter", "monitor");
    let (mut monitor, mut job) = (running(&exporter, FULL), Holder::start());
    let played = stage.play(&[0], 0);
    assert_eq!(played.output.stdout, format!("{}\n", job.pid()));
    assert_eq!(living([&mut monitor, &mut job]), [true, true]);
    stage.all_was_run();
    Ok(())
}
