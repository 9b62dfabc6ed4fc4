//! Where something is missing or wrong, gpureap says so in one sentence and with the right exit code.
use std::{fs, os::unix::fs::PermissionsExt as _, process::Command};

use gpureap_common::record::Meta;
use gpureap_tests::harness::{Bench, Device, NOBODY, Output, Scene, World, finish, skip, sys};

const DEV: &str = "/dev/zero";
const USAGE: i32 = 2;
const NOT_PERMITTED: i32 = 7;
const UNSUPPORTED: i32 = 8;

fn bench() -> Bench {
    Bench::new(&[Device::zero()])
}

fn daemon_in(bench: &Bench, world: World) -> Output {
    finish(world.enter(bench.command(&["daemon"])))
}

/// Exactly this code, and one sentence that names the cause.
#[track_caller]
fn refused(output: Output, code: i32, word: &str) {
    let output = output.expect_code(code);
    let complaint = output.complaint().to_lowercase();
    assert!(complaint.contains(&word.to_lowercase()), "`{word}` in the sentence: {complaint}");
}

#[test]
fn pins_outside_a_bpf_file_system() {
    let bench = bench();
    let plain = bench.path("no-bpffs");
    fs::create_dir(&plain).expect("a directory");
    let mut command = bench.command(&["daemon"]);
    command.env("GPUREAP_PIN_DIR", plain.join("gpureap"));
    refused(finish(command), UNSUPPORTED, "bpf");
}

#[test]
fn no_bpf_file_system_at_all() {
    let bench = bench();
    refused(daemon_in(&bench, World::default().without_mounts("bpf")), UNSUPPORTED, "bpf");
}

#[test]
fn no_cgroup2_for_the_gate() {
    let mut bench = bench();
    bench.backend = "gate".into();
    refused(daemon_in(&bench, World::default().without_mounts("cgroup2")), UNSUPPORTED, "cgroup");
}

#[test]
fn no_type_information_of_the_kernel() {
    let bench = bench();
    let world = World::default().without_file("/sys/kernel/btf/vmlinux");
    refused(daemon_in(&bench, world.clone()), UNSUPPORTED, "btf");
    // Looking still works, through /proc.
    let scene = Scene::start("plain", DEV, &[]);
    let output = finish(world.enter(bench.command(&["holders", "--json"]))).expect_code(0);
    assert_eq!(output.json()["source"], "proc");
    assert!(output.stdout.contains(&scene.pid().to_string()), "{output:#?}");
}

#[test]
fn a_daemon_that_is_not_root() {
    let bench = bench();
    let Some(world) = bench.user("daemon not root") else { return };
    refused(daemon_in(&bench, world), NOT_PERMITTED, "root");
}

/// What is lacking is named, of root too.
#[test]
fn root_without_capabilities() {
    const BPF: u64 = 1 << 39;
    const PERFMON: u64 = 1 << 38;
    const SYS_ADMIN: u64 = 1 << 21;
    let mut bench = bench();
    // What the other sets take is another matter.
    bench.backend = "gate".into();
    for (set, lacking) in [
        (0, "CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF, which this process lacks"),
        (BPF, "CAP_PERFMON"),
        (BPF | PERFMON, "CAP_NET_ADMIN, which this process lacks"),
    ] {
        for arguments in [["daemon"].as_slice(), &["fence", "--gpu", DEV]] {
            let world = World::default().with_capabilities(set);
            let output = finish(world.enter(bench.command(arguments))).expect_code(NOT_PERMITTED);
            let complaint = output.complaint();
            assert!(complaint.contains(lacking), "`{lacking}` in {output:#?}");
            assert!(!complaint.contains("needs root") && !complaint.contains("does not load"), "{output:#?}");
        }
    }
    let world = World::default().with_capabilities(SYS_ADMIN);
    finish(world.clone().enter(bench.command(&["fence", "--gpu", DEV]))).expect_code(0);
    finish(world.enter(bench.command(&["unfence"]))).expect_code(0);
    // A directory of somebody else's.
    fs::remove_file(bench.path("run/daemon.lock")).expect("its lock");
    std::os::unix::fs::chown(bench.path("run"), Some(NOBODY), None).expect("chown");
    refused(daemon_in(&bench, World::default().with_capabilities(0)), UNSUPPORTED, "belongs to user 65534");
}

#[test]
fn an_ordinary_user_closes_no_device_for_others() {
    let bench = bench();
    let Some(world) = bench.user("fence not root") else { return };
    for arguments in [
        ["fence", "--gpu", DEV].as_slice(),
        &["fence", "--list"],
        &["unfence"],
        &["reap", "--fence", "--dry-run"],
        &["reap", "--fence", "--yes"],
    ] {
        refused(finish(world.clone().enter(bench.command(arguments))), NOT_PERMITTED, "root");
    }
}

#[test]
fn holders_for_an_ordinary_user_shows_what_it_may() {
    let bench = bench();
    let Some(world) = bench.user("holders not root") else { return };
    let scene = Scene::start("plain", DEV, &[]);
    let output = finish(world.clone().enter(bench.command(&["holders", "--json"]))).expect_code(0);
    let json = output.json();
    assert_eq!(json["source"], "proc");
    assert_eq!(json["complete"], false, "root's processes cannot be looked into: {json:#}");
    // The map is there and root's.
    fs::create_dir(bench.pins()).expect("a directory");
    fs::set_permissions(bench.pins(), fs::Permissions::from_mode(0o700)).expect("chmod");
    refused(finish(world.enter(bench.command(&["holders", "--source", "map"]))), NOT_PERMITTED, "run as root");
    assert!(sys::session(scene.pid()).is_some());
}

#[test]
fn k12_an_ordinary_user_reaps_nobody_elses_process() {
    let bench = bench();
    let Some(world) = bench.user("reap not root") else { return };
    let scene = Scene::start("plain", DEV, &[]);
    let pid = scene.pid().to_string();
    let output = finish(world.enter(bench.command(&["reap", "--yes", "--now", "--json", "--pid", &pid])));
    assert_eq!(output.code, NOT_PERMITTED, "{output:#?}");
    assert!(sys::signal(scene.pid(), 0), "it lives");
}

/// The pins of this version, each replaced by a map that is something else.
#[test]
fn pins_that_are_not_ours_are_never_believed() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&scene, &[]);
    daemon.kill();
    drop(daemon);
    let sets: Vec<_> = fs::read_dir(bench.pins()).expect("the pins").flatten().collect();
    let maps: Vec<_> = sets
        .iter()
        .flat_map(|set| fs::read_dir(set.path()).expect("a set of pins").flatten())
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    assert!(maps.len() > 5, "the daemon left its maps: {maps:?}");
    for path in maps {
        fs::remove_file(&path).expect("unpin");
        sys::pin_foreign_map(&path).expect("pin");
    }
    let output = bench.run(&["holders", "--json"]);
    if output.code == 0 {
        assert_ne!(output.json()["source"], "map", "the map is not ours: {output:#?}");
        assert!(output.stdout.contains(&scene.pid().to_string()), "{output:#?}");
    } else {
        refused(output, UNSUPPORTED, "pin");
    }
    // A new daemon replaces them, or refuses in one sentence; it never adopts them.
    let started = std::panic::catch_unwind(|| bench.daemon());
    match started {
        Ok(daemon) => {
            let seen = bench.expect_truth(&scene, &[]);
            assert_eq!(seen.source, "map");
            drop(daemon);
        }
        Err(_) => refused(bench.run(&["daemon"]), UNSUPPORTED, "pin"),
    }
}

#[test]
fn an_unrelated_pin_directory_is_left_alone() {
    let bench = bench();
    fs::create_dir(bench.pins()).expect("a directory in bpffs");
    let stranger = bench.pins().join("stranger");
    sys::pin_foreign_map(&stranger).expect("pin");
    let scene = Scene::start("plain", DEV, &[]);
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(seen.source, "snapshot");
    assert!(stranger.exists(), "what is not ours stays");
}

#[test]
fn a_configuration_that_is_wrong() {
    let bench = bench();
    let cases = [
        ("no TOML", "[[device]\n"),
        ("an unknown key", "[[device]]\nkind = \"standin\"\nmajor = 1\nminor = 5\nnode = \"/dev/zero\"\ncolour = 1\n"),
        ("a missing key", "[[device]]\nkind = \"standin\"\nmajor = 1\n"),
        ("a wrong type", "[[device]]\nkind = \"standin\"\nmajor = \"one\"\nminor = 5\nnode = \"/dev/zero\"\n"),
        ("an unknown kind", "[[device]]\nkind = \"toaster\"\nmajor = 1\nminor = 5\nnode = \"/dev/zero\"\n"),
    ];
    for (case, text) in cases {
        bench.write_config(text);
        for command in [&["daemon"][..], &["holders"], &["reap", "--dry-run"]] {
            eprintln!("{case}: {command:?}");
            refused(bench.run(command), USAGE, "config.toml");
        }
    }
}

#[test]
fn a_configuration_that_was_named_and_is_absent() {
    let bench = bench();
    refused(bench.run(&["holders", "--config", "/nonexistent/gpureap.toml"]), USAGE, "/nonexistent/gpureap.toml");
}

#[test]
fn a_device_that_is_not_there() {
    let bench = bench();
    for gpu in ["77", "/dev/nonexistent", "GPU-00000000-0000-0000-0000-000000000000"] {
        refused(bench.run(&["holders", "--gpu", gpu]), USAGE, gpu);
        refused(bench.run(&["reap", "--yes", "--gpu", gpu]), USAGE, gpu);
    }
}

#[test]
fn a_second_daemon() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let pid = daemon.pid().to_string();
    refused(bench.run(&["daemon"]), UNSUPPORTED, &pid);
    assert!(daemon.runs(), "the first is not disturbed");
    let scene = Scene::start("plain", DEV, &[]);
    bench.expect_truth(&scene, &[]);
}

#[test]
fn an_unknown_word_on_the_command_line() {
    let bench = bench();
    for (arguments, word) in [
        (&["frobnicate"][..], "frobnicate"),
        (&["holders", "--frobnicate"], "--frobnicate"),
        (&["reap", "--grace", "soon"], "not a length of time"),
        (&["reap", "--older-than", "1d18446744073709549568"], "not a length of time"),
        (&["holders", "--user", "a\n\u{202e}b"], "no such user: a\\n\\u{202e}b"),
        (&["holders", "--user", "4294967295"], "nobody's number"),
    ] {
        let output = bench.run(arguments);
        assert!(output.stdout.is_empty(), "{output:#?}");
        refused(output, USAGE, word);
    }
}

#[test]
fn a_second_daemon_on_the_same_pins() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let mut command = bench.command(&["daemon"]);
    command.env("GPUREAP_RUN_DIR", bench.path("another-run"));
    refused(finish(command), UNSUPPORTED, "another gpureap");
    assert!(daemon.runs(), "the first is not disturbed");
    let scene = Scene::start("plain", DEV, &[]);
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map");
}

#[test]
fn pins_that_are_deleted_end_the_daemon() {
    let bench = bench();
    let mut daemon = bench.daemon();
    for set in fs::read_dir(bench.pins()).expect("the pins").flatten() {
        for link in fs::read_dir(set.path().join("links")).expect("links").flatten() {
            fs::remove_file(link.path()).expect("unpin");
        }
    }
    assert_eq!(daemon.end().code(), Some(1), "so that its supervisor starts it again");
    assert!(daemon.log().contains("nothing is traced any more"), "{}", daemon.log());
}

#[test]
fn a_map_that_is_too_small_is_told_and_nobody_is_missed() {
    let bench = bench();
    let config = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    let config = config.replace("holders = 4096", "holders = 64").replace("procs = 2048", "procs = 64");
    bench.write_config(&config);
    let _daemon = bench.daemon();
    let scene = Scene::start("orphans", DEV, &["126", "3"]);
    let seen = bench.expect_truth(&scene, &[]);
    assert!(!seen.complete, "{:#}", seen.json["notes"]);
    assert!(seen.json["notes"].to_string().contains("was full"), "{:#}", seen.json["notes"]);
    assert!(seen.lost_events > 0);
}

/// What gpureap says in namespaces of its own, by the flags of unshare(1); `None` where there are none to be had.
fn inside<'a>(test: &str, bench: &'a Bench, namespaces: &'a [&'a str]) -> Option<impl Fn(&[&str]) -> Output + use<'a>> {
    let run = move |arguments: &[&str]| {
        let host = bench.command(arguments);
        let mut command = Command::new("unshare");
        command.args(namespaces).arg(host.get_program()).args(host.get_args());
        for (name, value) in host.get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        command
    };
    if run(&["--version"]).output().is_ok_and(|output| output.status.success()) {
        return Some(move |arguments: &[&str]| finish(run(arguments)));
    }
    skip(test, &format!("no unshare(1) here that knows {namespaces:?}"));
    None
}

#[test]
fn a_pid_namespace_of_its_own() {
    let bench = bench();
    let scene = Scene::start("plain", DEV, &[]);
    let Some(inside) = inside("pid namespace", &bench, &["--pid", "--fork", "--mount-proc"]) else { return };
    refused(inside(&["daemon"]), UNSUPPORTED, "pid namespace");
    let seen = inside(&["holders", "--json"]).expect_code(0).json();
    assert_eq!((&seen["source"], &seen["complete"]), (&"proc".into(), &false.into()), "{seen:#}");
    let report = inside(&["reap", "--yes", "--json"]).json();
    assert_eq!(report["verified"], false, "{report:#}");
    for arguments in [["reap", "--fence", "--yes"], ["reap", "--fence", "--dry-run"]] {
        refused(inside(&arguments), UNSUPPORTED, "pid namespace");
    }
    assert!(sys::signal(scene.pid(), 0), "it lives");
}

/// Nobody there could be told from gpureap's own ancestors.
#[test]
fn a_proc_of_another_pid_namespace() {
    let bench = bench();
    let scene = Scene::start("plain", DEV, &[]);
    let Some(inside) = inside("another /proc", &bench, &["--pid", "--fork"]) else { return };
    for dry_run in [false, true] {
        let arguments: &[&str] = if dry_run { &["reap", "--dry-run"] } else { &["reap", "--yes", "--now"] };
        refused(inside(arguments), UNSUPPORTED, "mount -t proc");
    }
    assert!(sys::signal(scene.pid(), 0), "it lives");
}

#[test]
fn root_of_a_user_namespace_is_not_told_that_a_device_is_free() {
    let bench = bench();
    let _scene = Scene::start("plain", DEV, &[]);
    let Some(inside) = inside("user namespace", &bench, &["--user", "--map-root-user"]) else { return };
    for arguments in [["wait", "--timeout", "0", "--json"].as_slice(), &["reap", "--yes", "--json"]] {
        let report = inside(arguments).expect_code(NOT_PERMITTED).json();
        assert_eq!((&report["source"], &report["verified"]), (&"proc".into(), &false.into()), "{report:#}");
    }
}

#[test]
fn pins_of_another_abi() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map");
    daemon.kill();
    let maps = bench.maps();
    let meta = maps.meta().expect("the record");
    maps.set_meta(&Meta { abi: 99, ..meta }).expect("write the record");
    drop(maps);
    // Not believed by a reader, replaced by a daemon.
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(seen.source, "snapshot");
    assert!(seen.json["notes"].to_string().contains("ABI 99"), "{:#}", seen.json["notes"]);
    refused(bench.run(&["holders", "--source", "map"]), UNSUPPORTED, "ABI 99");
    daemon.start_again();
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map");
    assert!(daemon.log().contains("ABI 99"), "{}", daemon.log());
}
