//! Filters pick exactly the processes that were meant, and classes protect exactly what root put there.
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpureap_tests::harness::{
    Bench, Copy, Device, Groups, Holder, NOBODY, Output, Pid, Scene, Shared, Wanted, finish, program, skip, sys,
};
use serde_json::Value;

const DEV: &str = "/dev/full";

/// No daemon; on a device that nobody else on the host holds, for its holders are killed.
fn bench(test: &str, devices: &[Device]) -> Option<Bench> {
    let bench = Bench::new(devices);
    bench.is_free(test).then_some(bench)
}

fn pids(report: &Value, list: &str) -> BTreeSet<Pid> {
    let list = report[list].as_array().unwrap_or_else(|| panic!("{list} in {report:#}"));
    list.iter().map(|entry| entry["pid"].as_i64().expect("a pid") as Pid).collect()
}

fn entry(report: &Value, list: &str, pid: Pid) -> Value {
    let list = report[list].as_array().unwrap_or_else(|| panic!("{list} in {report:#}"));
    list.iter().find(|entry| entry["pid"] == pid).cloned().unwrap_or_else(|| panic!("{pid} in {report:#}"))
}

fn run(bench: &Bench, host: Option<&Path>, arguments: &[&str]) -> Output {
    let mut command = bench.command(arguments);
    if let Some(host) = host {
        command.env("GPUREAP_HOST", host);
    }
    finish(command)
}

/// `holders` shows exactly these, and `reap` would signal exactly these.
#[track_caller]
fn picks(bench: &Bench, host: Option<&Path>, filter: &[&str], expected: &[&Holder]) {
    let expected: BTreeSet<Pid> = expected.iter().map(|holder| holder.pid()).collect();
    let shown = run(bench, host, &[&["holders", "--json"], filter].concat()).expect_code(0).json();
    assert_eq!(pids(&shown, "holders"), expected, "holders {filter:?} in {shown:#}");
    let plan = run(bench, host, &[&["reap", "--dry-run", "--json"], filter].concat()).expect_code(0).json();
    assert_eq!(pids(&plan, "processes"), expected, "reap {filter:?} in {plan:#}");
}

#[test]
fn users_names_and_environments() {
    let Some(bench) = bench("users", &[Device::full()]) else { return };
    let program = Copy::in_home("worker", 0);
    let program = || program.path.clone();
    let alpha = Holder::with(&Wanted {
        program: program(),
        comm: "gr-alpha",
        user: Some(NOBODY),
        environment: &[("JOB", "a"), ("RANK", "0")],
        ..Wanted::default()
    });
    let beta =
        Holder::with(&Wanted { comm: "gr-beta", environment: &[("JOB", "b"), ("RANK", "0")], ..Wanted::default() });
    // A process may have any name, those that look like an option or another process's included.
    let odd = Holder::with(&Wanted { comm: "gr-alpha ) S 1", environment: &[("JOBS", "a")], ..Wanted::default() });
    let nobody = NOBODY.to_string();
    for (filter, expected) in [
        (vec![], vec![&alpha, &beta, &odd]),
        (vec!["--user", &nobody], vec![&alpha]),
        (vec!["--user", "root"], vec![&beta, &odd]),
        (vec!["--user", "0", "--user", &nobody], vec![&alpha, &beta, &odd]),
        (vec!["--comm", "gr-alpha"], vec![&alpha]),
        (vec!["--comm", "gr-alpha ) S 1"], vec![&odd]),
        (vec!["--comm", "gr-alpha", "--comm", "gr-beta"], vec![&alpha, &beta]),
        (vec!["--comm", "gr-alp"], vec![]),
        (vec!["--env", "JOB=a"], vec![&alpha]),
        (vec!["--env", "JOB=a", "--env", "JOB=b"], vec![&alpha, &beta]),
        (vec!["--env", "JOB=b", "--env", "RANK=0"], vec![&beta]),
        (vec!["--env", "JOB=b", "--env", "RANK=1"], vec![]),
        (vec!["--env", "JOB="], vec![]),
        (vec!["--user", "root", "--env", "RANK=0"], vec![&beta]),
        (vec!["--user", "root", "--comm", "gr-alpha"], vec![]),
    ] {
        picks(&bench, None, &filter, &expected);
    }
    // A pid that is named, and that another filter does not fit, is told apart from one that holds nothing.
    let pid = alpha.pid().to_string();
    let report = bench.run(&["reap", "--yes", "--json", "--pid", &pid, "--user", "root"]).expect_code(0).json();
    assert_eq!(
        (&report["outcome"], &entry(&report, "unmatched", alpha.pid())["reason"]),
        (&"nothing-to-do".into(), &"left-out".into())
    );
    // And the real thing.
    let (mut alpha, mut beta, mut odd) = (alpha, beta, odd);
    let report = bench.run(&["reap", "--yes", "--json", "--user", "root", "--env", "RANK=0"]).expect_code(0).json();
    assert_eq!(pids(&report, "processes"), [beta.pid()].into());
    assert!(alpha.lives() && !beta.lives() && odd.lives());
    let none = bench.run(&["reap", "--yes", "--json", "--comm", "gr-gamma"]).expect_code(0).json();
    assert_eq!(none["outcome"], "nothing-to-do");
    assert!(alpha.lives() && odd.lives());
}

#[test]
fn containers_jobs_units_and_groups() {
    let Some(bench) = bench("groups", &[Device::full()]) else { return };
    let Some(mut groups) = Groups::new() else { return skip("groups", "no cgroup2 is mounted") };
    let id = format!("abcd{}", "0123456789ef".repeat(5));
    let other = format!("abce{}", "0123456789ef".repeat(5));
    let host = bench.path("host");
    let record = host.join("var/lib/docker/containers").join(&id);
    fs::create_dir_all(&record).expect("the container's directory");
    fs::write(record.join("config.v2.json"), r#"{"Name":"/train","Config":{"Image":"example.com/train:1"}}"#)
        .expect("the container's record");
    let holders: Vec<Holder> = (0..7).map(|_| Holder::start()).collect();
    let [boxed, neighbour, job, step, service, deeper, plain] = &holders[..] else { unreachable!() };
    let docker = groups.put(boxed.pid(), &format!("docker/{id}"));
    groups.put(neighbour.pid(), &format!("docker/{other}"));
    groups.put(job.pid(), "slurmstepd.scope/job_77/step_0");
    groups.put(step.pid(), "slurmstepd.scope/job_77/step_batch");
    let unit = groups.put(service.pid(), "gr-train.service");
    groups.put(deeper.pid(), "gr-train.service/payload");
    let mount = format!("{}{unit}", groups.mount.display());
    let pick = |filter: &[&str], expected: &[&Holder]| picks(&bench, Some(&host), filter, expected);
    pick(&["--container", &id], &[boxed]);
    pick(&["--container", "abcd"], &[boxed]);
    pick(&["--container", "train"], &[boxed]);
    pick(&["--container", "train", "--container", "abce"], &[boxed, neighbour]);
    pick(&["--container", "abc"], &[]);
    pick(&["--slurm-job", "77"], &[job, step]);
    pick(&["--slurm-job", "77.batch"], &[step]);
    pick(&["--slurm-job", "7"], &[]);
    pick(&["--unit", "gr-train"], &[service, deeper]);
    pick(&["--unit", "gr-train.service"], &[service, deeper]);
    pick(&["--unit", "slurmstepd.scope"], &[job, step]);
    pick(&["--unit", "gr-trai"], &[]);
    pick(&["--cgroup", &unit], &[service, deeper]);
    pick(&["--cgroup", &mount], &[service, deeper]);
    pick(&["--cgroup", &format!("{mount}/payload")], &[deeper]);
    pick(&["--cgroup", &unit[..unit.len() - 3]], &[]);
    pick(&["--cgroup", &groups.top], &[boxed, neighbour, job, step, service, deeper]);
    pick(&["--cgroup", &docker, "--cgroup", &unit], &[boxed, service, deeper]);
    pick(&["--pid", &plain.pid().to_string(), "--pid", &job.pid().to_string(), "--slurm-job", "77"], &[job]);

    let shown = run(&bench, Some(&host), &["holders", "--json", "--container", "train"]).json();
    let shown = entry(&shown, "holders", boxed.pid());
    assert_eq!((&shown["container"], &shown["container_name"]), (&id.as_str().into(), &"train".into()));
    assert_eq!((&shown["image"], &shown["pod_name"]), (&"example.com/train:1".into(), &Value::Null));
    let shown = run(&bench, Some(&host), &["holders", "--json", "--slurm-job", "77.0"]).json();
    let shown = entry(&shown, "holders", job.pid());
    assert_eq!((&shown["slurm_job"], &shown["slurm_step"]), (&"77".into(), &"0".into()));

    run(&bench, Some(&host), &["reap", "--yes", "--container", "train", "--now"]).expect_code(0);
    run(&bench, Some(&host), &["reap", "--yes", "--slurm-job", "77.batch", "--now"]).expect_code(0);
    let mut holders = holders;
    let lives: Vec<bool> = holders.iter_mut().map(Holder::lives).collect();
    assert_eq!(lives, [false, true, true, false, true, true, true]);
    drop(holders);
}

#[test]
fn the_beginning_of_two_ids_is_refused() {
    let Some(bench) = bench("two ids", &[Device::full()]) else { return };
    let Some(mut groups) = Groups::new() else { return skip("two ids", "no cgroup2 is mounted") };
    let (mut one, mut two) = (Holder::start(), Holder::start());
    groups.put(one.pid(), &format!("docker/abcd1{}", "0".repeat(59)));
    groups.put(two.pid(), &format!("docker/abcd2{}", "0".repeat(59)));
    let output = bench.run(&["reap", "--yes", "--now", "--container", "abcd"]).expect_code(2);
    assert!(output.complaint().contains("fits more than one: abcd10000000, abcd20000000"), "{output:#?}");
    assert!(one.lives() && two.lives());
    bench.run(&["reap", "--yes", "--now", "--container", "abcd2"]).expect_code(0);
    assert!(one.lives() && !two.lives());
    drop((one, two));
}

#[test]
fn ages() {
    let Some(bench) = bench("ages", &[Device::full()]) else { return };
    let mut old = Holder::start();
    // An emulated machine takes seconds to look.
    let gap = Duration::from_secs(if std::env::var_os("GPUREAP_TEST_VM").is_some() { 40 } else { 4 });
    std::thread::sleep(gap);
    let begun = Instant::now();
    let mut young = Holder::start();
    picks(&bench, None, &["--older-than", "0s"], &[&old, &young]);
    picks(&bench, None, &["--older-than", "1d"], &[]);
    // The older one is, and the younger one will not be for most of the gap.
    let limit = format!("{}ms", (begun.elapsed() + gap).as_millis());
    let report = bench.run(&["reap", "--yes", "--json", "--older-than", &limit]).expect_code(0).json();
    assert_eq!(pids(&report, "processes"), [old.pid()].into());
    assert!(!old.lives() && young.lives());
}

/// The process between the root of the tree and the holder is dead: only the record of forks leads there.
#[test]
fn trees_with_a_dead_ancestor_in_the_middle() {
    let bench = Shared::new(&[Device::full()]);
    if !bench.is_free("trees") {
        return;
    }
    let ghost = Scene::start("ghost", DEV, &[]);
    let orphans = Scene::start("orphans", DEV, &["6", "2"]);
    let stranger = Holder::start();
    let workers = |pid: Pid| -> BTreeSet<Pid> {
        let group = orphans.fields["groups"].as_array().expect("groups").iter().find(|group| group["launcher"] == pid);
        let list = group.expect("a group")["workers"].as_array().expect("workers");
        list.iter().map(|pid| pid.as_i64().expect("a pid") as Pid).collect()
    };
    let tree = |pid: Pid| {
        let shown = bench.run(&["holders", "--json", "--tree-of", &pid.to_string()]).expect_code(0).json();
        pids(&shown, "holders")
    };
    let [first, second] = orphans.numbers("dead")[..] else { panic!("two launchers") };
    let all: BTreeSet<Pid> = workers(first).union(&workers(second)).copied().collect();
    assert_eq!(tree(ghost.pid()), [ghost.pid()].into());
    assert_eq!(tree(ghost.numbers("dead")[0]), [ghost.pid()].into());
    assert_eq!(tree(ghost.number("director")), [ghost.pid()].into(), "over the dead one");
    assert_eq!(tree(first), workers(first));
    assert_eq!(tree(orphans.number("director")), all);
    assert_eq!(tree(stranger.pid()), [stranger.pid()].into());
    let own = tree(std::process::id() as Pid);
    assert!(own.is_superset(&all) && own.contains(&stranger.pid()) && own.contains(&ghost.pid()));

    let report =
        bench.run(&["reap", "--yes", "--json", "--now", "--tree-of", &first.to_string()]).expect_code(0).json();
    assert_eq!(pids(&report, "processes"), workers(first));
    assert_eq!(tree(orphans.number("director")), workers(second));
    let report = report["notes"].as_array().expect("notes");
    assert!(report.iter().any(|note| note.as_str().is_some_and(|note| note.contains("is dead"))), "{report:?}");
    // Nobody, and nobody's child: nothing to do, and said.
    let none = bench.run(&["reap", "--yes", "--json", "--tree-of", "4194304"]).expect_code(0).json();
    assert_eq!(none["outcome"], "nothing-to-do");
    assert!(none["notes"].to_string().contains("there is no such process"), "{none:#}");
}

#[test]
fn what_cannot_be_meant_is_a_usage_error() {
    let bench = Bench::new(&[Device::full()]);
    let tid = sys::tid().to_string();
    for (filter, word) in [
        (["--user", "no-such-user-here"], "no such user"),
        (["--comm", "a-name-that-is-too-long"], "say `a-name-that-is-`"),
        (["--env", "WORD"], "not KEY=VAL"),
        (["--cgroup", "/a/../b"], "not the path of a cgroup"),
        (["--cgroup", "/sys/fs/cgroup-no/../x"], "not the path of a cgroup"),
        (["--slurm-job", "12_3"], "its own number"),
        (["--unit", "a/b"], "not the name of a unit"),
        (["--older-than", "soon"], "not a length of time"),
        (["--tree-of", &tid], "is a thread of process"),
        (["--pid", &tid], "is a thread of process"),
        (["--gpu", "MIG-GPU-0/1/0"], "no such GPU"),
    ] {
        for command in [&["holders"][..], &["reap", "--yes"], &["wait", "--timeout", "0"]] {
            let output = bench.run(&[command, &filter].concat()).expect_code(2);
            assert!(output.stderr.contains(word), "{filter:?}: {output:#?}");
            assert_eq!(output.stdout, "", "{filter:?}");
        }
    }
    let output = bench.run(&["reap", "--yes", "--include-protected", "no-such-rule"]).expect_code(2);
    assert!(output.complaint().contains("no rule has that name"), "{output:#?}");
    // The instance behind such a name is known by NVML alone.
    let output = bench.run(&["holders", "--gpu", "MIG-0a1b2c3d-1111-2222-3333-444455556666"]).expect_code(8);
    assert!(output.complaint().contains("NVML"), "{output:#?}");
}

#[test]
fn k5_the_own_session_is_skipped_and_told() {
    let Some(bench) = bench("K5 session", &[Device::full()]) else { return };
    if sys::session(0).is_none_or(|session| session <= 0) {
        return skip("K5 session", "this session has no number here");
    }
    let mut own = Holder::with(&Wanted { own_session: false, ..Wanted::default() });
    let mut other = Holder::start();
    let output = bench.run(&["reap", "--yes", "--json"]);
    assert!(matches!(output.code, 3 | 5), "{output:#?}");
    assert_eq!(entry(&output.json(), "skipped", own.pid())["reason"], "own-session");
    assert!(own.lives() && !other.lives());
    // Naming its user is not naming it.
    let output = bench.run(&["reap", "--yes", "--user", "root"]);
    assert!(matches!(output.code, 3 | 5) && own.lives(), "{output:#?}");
    bench.run(&["reap", "--yes", "--pid", &own.pid().to_string()]).expect_code(0);
    assert!(!own.lives());
}

/// Adds rules of a user to the bench.
fn rules(bench: &Bench, text: &str) {
    let before = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&format!("{before}\n{text}"));
}

fn rule(name: &str, class: &str, exe: &Path) -> String {
    format!("[[class]]\nname = \"{name}\"\nclass = \"{class}\"\nexe = \"{}\"\n", exe.display())
}

#[test]
fn k6_a_users_program_of_a_protected_name_is_not_protected() {
    let Some(bench) = bench("K6", &[Device::full()]) else { return };
    for name in ["nv-hostengine", "Xorg"] {
        let copy = Copy::in_home(name, NOBODY);
        // Not even where a rule names the very path: it is not root's.
        rules(&bench, &rule("trap", "system", &copy.path));
        let wanted = Wanted { program: copy.path.clone(), comm: name, user: Some(NOBODY), ..Wanted::default() };
        let mut disguised = Holder::with(&wanted);
        let plan = bench.run(&["reap", "--dry-run", "--json"]).expect_code(0).json();
        let row = entry(&plan, "processes", disguised.pid());
        assert_eq!((&row["class"], &row["class_rule"]), (&"job".into(), &"default".into()), "{plan:#}");
        let shown = bench.run(&["holders", "--json"]).expect_code(0).json();
        assert_eq!(entry(&shown, "holders", disguised.pid())["class_rule"], "default");
        bench.run(&["reap", "--yes", "--json"]).expect_code(0);
        assert!(!disguised.lives());
    }
    // A root's process that only calls itself so.
    let mut renamed = Holder::with(&Wanted { comm: "nv-hostengine", ..Wanted::default() });
    bench.run(&["reap", "--yes"]).expect_code(0);
    assert!(!renamed.lives());
}

/// A user who makes a namespace of his own mounts any of root's programs over the path of a protected one.
#[test]
fn k6_a_mount_over_a_protected_path_protects_nobody() {
    let Some(bench) = bench("K6 mount", &[Device::full()]) else { return };
    let (genuine, other) = (Copy::guarded("nv-hostengine"), Copy::guarded("python3"));
    rules(&bench, &rule("hostengine", "system", &genuine.path));
    let wanted = Wanted {
        program: genuine.path.clone(),
        user: Some(NOBODY),
        mounted: Some((&other.path, &genuine.path)),
        ..Wanted::default()
    };
    let mut disguised = match Holder::try_with(&wanted) {
        Ok(holder) => holder,
        Err(error) => return skip("K6 mount", &format!("no user namespace for an ordinary user: {error}")),
    };
    let exe = fs::read_link(format!("/proc/{}/exe", disguised.pid())).expect("its program");
    assert_eq!(exe, genuine.path, "to everybody who looks it is the protected program");
    let plan = bench.run(&["reap", "--dry-run", "--json"]).expect_code(0).json();
    assert_eq!(entry(&plan, "processes", disguised.pid())["class_rule"], "default", "{plan:#}");
    bench.run(&["reap", "--yes"]).expect_code(0);
    assert!(!disguised.lives());
}

/// What only root can have put there is protected, by a user's rule and by a shipped one, until it is named.
#[test]
fn k6_k7_roots_program_is_protected_by_its_rule() {
    let Some(bench) = bench("K7", &[Device::full()]) else { return };
    let own = Copy::guarded("gpu-broker");
    let shipped = Copy::at(format!("/usr/local/bin/containerd-shim-gpureap-test-{}", std::process::id()).into(), None);
    rules(&bench, &rule("our-broker", "system", &own.path));
    for (copy, name) in [(&own, "our-broker"), (&shipped, "container-runtime")] {
        let mut daemon = Holder::with(&Wanted { program: copy.path.clone(), comm: "anything", ..Wanted::default() });
        let mut job = Holder::start();
        let report = bench.run(&["reap", "--yes", "--json", "--now"]).expect_code(5).json();
        assert_eq!(report["outcome"], "protected", "{report:#}");
        let row = entry(&report, "skipped", daemon.pid());
        assert_eq!(
            (&row["class"], &row["class_rule"], &row["reason"]),
            (&"system".into(), &name.into(), &"protected".into())
        );
        assert!(daemon.lives() && !job.lives(), "the job is reaped all the same");
        // Not by its pid, nor by the name of another rule.
        let pid = daemon.pid().to_string();
        bench.run(&["reap", "--yes", "--now", "--pid", &pid, "--include-protected", "dcgm"]).expect_code(5);
        assert!(daemon.lives());
        let text = bench.run(&["reap", "--dry-run"]).expect_code(0).stdout;
        assert!(text.contains(&format!("--include-protected {name} takes it along")), "{text}");
        let text = bench.run(&["holders"]).expect_code(0).stdout;
        assert!(text.contains(&format!("system/{name}")), "{text}");
        let report = bench.run(&["reap", "--yes", "--json", "--include-protected", name]).expect_code(0).json();
        assert_eq!(entry(&report, "processes", daemon.pid())["class_rule"], name);
        assert!(!daemon.lives());
    }
    // The directory can be written by others: anybody may have put it there.
    let mut daemon = Holder::with(&Wanted { program: own.path.clone(), ..Wanted::default() });
    let parent = own.path.parent().expect("a directory");
    fs::set_permissions(parent, fs::Permissions::from_mode(0o777)).expect("chmod");
    bench.run(&["reap", "--yes", "--now"]).expect_code(0);
    assert!(!daemon.lives());
}

/// In a container the path of a program counts together with the image, which the runtime's files tell.
#[test]
fn k7_a_containers_program_is_protected_by_its_image() {
    let Some(bench) = bench("K7 image", &[Device::full()]) else { return };
    let Some(mut groups) = Groups::new() else { return skip("K7 image", "no cgroup2 is mounted") };
    let host = bench.path("host");
    let exporter = Copy::guarded("dcgm-exporter");
    rules(
        &bench,
        &format!("{}image = \"example.com/exporter[:@]*\"\n", rule("our-exporter", "system", &exporter.path)),
    );
    let mut inside = |program: PathBuf, id: &str, image: &str| {
        let id = id.repeat(16);
        let record = host.join("var/lib/docker/containers").join(&id);
        fs::create_dir_all(&record).expect("the container's directory");
        let text = format!(r#"{{"Name":"/c","Config":{{"Image":"{image}"}}}}"#);
        fs::write(record.join("config.v2.json"), text).expect("the container's record");
        let holder = Holder::with(&Wanted { program, ..Wanted::default() });
        groups.put(holder.pid(), &format!("docker/{id}"));
        holder
    };
    let own = program("GPUREAP_ACTOR", "gpureap-actor");
    let mut genuine = inside(exporter.path.clone(), "abcd", "example.com/exporter:1");
    let mut other_image = inside(exporter.path.clone(), "abce", "evil.io/example.com/exporter:1");
    let mut other_program = inside(own, "abcf", "example.com/exporter:1");
    // Outside of containers the rule says nothing.
    let mut outside = Holder::with(&Wanted { program: exporter.path.clone(), ..Wanted::default() });
    let report = run(&bench, Some(&host), &["reap", "--yes", "--json", "--now"]).expect_code(5).json();
    assert_eq!(pids(&report, "skipped"), [genuine.pid()].into(), "{report:#}");
    assert_eq!(entry(&report, "skipped", genuine.pid())["class_rule"], "our-exporter");
    assert!(genuine.lives() && !other_image.lives() && !other_program.lives() && !outside.lives());
    drop((genuine, other_image, other_program, outside));
}

#[test]
fn k8_a_monitor_is_skipped_and_named() {
    let Some(bench) = bench("K8", &[Device::full()]) else { return };
    // By a shipped rule.
    let exporter = Copy::at(format!("/usr/local/bin/gpureap-test-{}_exporter", std::process::id()).into(), None);
    let mut monitor = Holder::with(&Wanted { program: exporter.path.clone(), ..Wanted::default() });
    let report = bench.run(&["reap", "--yes", "--json", "--now"]).expect_code(5).json();
    let row = entry(&report, "skipped", monitor.pid());
    assert_eq!(
        (&row["class"], &row["class_rule"], &row["reason"]),
        (&"monitor".into(), &"exporter".into(), &"monitor".into())
    );
    assert!(monitor.lives());
    bench.run(&["reap", "--yes", "--now", "--include-protected", "all"]).expect_code(0);
    assert!(!monitor.lives());
    // A user's own program of that kind of name is a job.
    let home = Copy::in_home("my_exporter", NOBODY);
    let mut job = Holder::with(&Wanted { program: home.path.clone(), user: Some(NOBODY), ..Wanted::default() });
    bench.run(&["reap", "--yes", "--now"]).expect_code(0);
    assert!(!job.lives());
}

/// Workers in sessions and process groups of their own, whose launcher holds nothing: the device leads to all of them.
#[test]
fn k10_workers_are_found_by_the_device_and_their_launcher_is_left() {
    let Some(bench) = bench("K10", &[Device::full()]) else { return };
    let family = Scene::start("tree", DEV, &["3"]);
    let mut elsewhere = [Holder::start(), Holder::start()];
    let workers: BTreeSet<Pid> = family.numbers("workers").into_iter().collect();
    let expected = elsewhere.iter().map(Holder::pid).chain(workers).collect();
    let report = bench.run(&["reap", "--yes", "--json"]).expect_code(0).json();
    assert_eq!(pids(&report, "processes"), expected);
    assert!(elsewhere.iter_mut().all(|holder| !holder.lives()));
    for bystander in [vec![family.number("launcher")], family.numbers("helpers")].concat() {
        assert!(sys::signal(bystander, 0), "{bystander} holds nothing");
    }
}

#[test]
fn k13_the_same_users_job_on_another_device_is_untouched() {
    let devices = [Device::full(), Device::new(1, 8, "/dev/random")];
    let Some(bench) = bench("K13", &devices) else { return };
    let program = Copy::in_home("worker", 0);
    let holder = |device, user| {
        Holder::with(&Wanted { program: program.path.clone(), device, user: Some(user), ..Wanted::default() })
    };
    let (mut target, mut elsewhere) = (holder(DEV, NOBODY), holder("/dev/random", NOBODY));
    let mut another = holder(DEV, NOBODY - 1);
    let user = NOBODY.to_string();
    let arguments = ["reap", "--yes", "--json", "--gpu", DEV, "--match", "any", "--user", &user];
    let report = bench.run(&arguments).expect_code(0).json();
    assert_eq!(pids(&report, "processes"), [target.pid()].into());
    assert!(!target.lives() && elsewhere.lives() && another.lives());
}
