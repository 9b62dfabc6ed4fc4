//! Namespaces and groups: cgroups of thousands of containers, cgroup namespaces, a /proc that hides processes.
use std::{collections::BTreeMap, fs, process::Command};

use gpureap_tests::harness::{Bench, Groups, Holder, NOBODY, Output, Player, Seen, Wanted, World, finish, skip, sys};
use serde_json::Value;

use super::{DEV, bench};

const UNSUPPORTED: i32 = 8;
const NOT_PERMITTED: i32 = 7;

/// As many containers as a host can have.
const CONTAINERS: usize = 4096;
const HOLDERS: usize = 24;

fn id(number: usize) -> String {
    format!("{number:064x}")
}

/// Groups as the runtimes make them, with long names and several levels below.
fn group(number: usize) -> String {
    match number % 4 {
        0 => format!("docker-{}.scope", id(number)),
        1 => format!("kubepods/burstable/pod0a1b2c3d-1111-2222-3333-{number:012x}/{}", id(number)),
        2 => format!("libpod-{}.scope/container/{}/{}", id(number), "deep".repeat(50), "deeper".repeat(40)),
        _ => format!("lxc.payload.box{number}/system.slice/job.service"),
    }
}

/// What podman's list says of all its containers: one file for all of them.
fn podman_list() -> String {
    let entry = |number: usize| {
        let metadata =
            format!(r#"{{\"image-name\":\"image{number}\",\"name\":\"pod{number}\",\"pad\":\"{}\"}}"#, "x".repeat(900));
        format!(r#"{{"id":"{}","names":["pod{number}"],"image":"{}","metadata":"{metadata}"}}"#, id(number), id(0))
    };
    format!("[{}]", (0..CONTAINERS).map(entry).collect::<Vec<_>>().join(","))
}

/// Calls of read(2) of this process.
fn reads() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("syscr: "))?.parse().ok()
}

/// Where each of the holders is, as `holders` tells it.
fn told(seen: &Seen, holders: &BTreeMap<usize, Player>) -> Vec<(Value, Value, Value)> {
    let of = |player: &Player| {
        let holder = seen.holder(player.pid()).unwrap_or_else(|| panic!("{} holds: {:#}", player.pid(), seen.json));
        (holder["cgroup"].clone(), holder["container"].clone(), holder["container_name"].clone())
    };
    holders.values().map(of).collect()
}

#[test]
fn among_thousands_of_containers_each_holder_has_its_own() {
    let bench = bench();
    let Some(mut groups) = Groups::new() else { return skip("containers", "no cgroup2 is mounted") };
    // The files of the runtimes.
    let docker = bench.path("host/var/lib/docker/containers");
    let podman = bench.path("host/var/lib/containers/storage/overlay-containers");
    fs::create_dir_all(&podman).expect("a directory");
    fs::write(podman.join("containers.json"), podman_list()).expect("write");
    let _daemon = bench.daemon();
    let step = CONTAINERS / HOLDERS + 1;
    let mut holders = BTreeMap::new();
    let mut expected = Vec::new();
    for number in (0..HOLDERS).map(|position| position * step) {
        let player = Player::holding(DEV);
        let path = groups.put(player.pid(), &group(number));
        let (container, name) = match number % 4 {
            0 => {
                let dir = docker.join(id(number));
                fs::create_dir_all(&dir).expect("a directory");
                fs::write(dir.join("config.v2.json"), format!(r#"{{"Name":"/box{number}"}}"#)).expect("write");
                (id(number), Value::from(format!("box{number}")))
            }
            1 | 2 => (id(number), Value::from(format!("pod{number}"))),
            _ => (format!("box{number}"), Value::Null),
        };
        expected.push((Value::from(path), Value::from(container), name));
        holders.insert(number, player);
    }
    let look = || told(&bench.holders(&[]), &holders);
    assert_eq!(look(), expected);
    bench.look();
    let before = reads();
    bench.look();
    let few = reads();
    for number in 0..CONTAINERS {
        groups.make(&group(number));
    }
    assert_eq!(look(), expected);
    // Work goes with the holders, not with the groups of the host.
    let begun = reads();
    bench.look();
    let many = reads();
    let (Some(before), Some(few), Some(begun), Some(many)) = (before, few, begun, many) else {
        return skip("containers", "this kernel counts no reads of a process");
    };
    let (few, many) = (few - before, many - begun);
    assert!(many < few + few / 4 + 50, "{many} reads with {CONTAINERS} groups, {few} with {HOLDERS}");
}

#[test]
fn a_holder_in_a_cgroup_namespace_is_shown_where_the_host_has_it() {
    let bench = bench();
    let Some(mut groups) = Groups::new() else { return skip("cgroup namespace", "no cgroup2 is mounted") };
    let _daemon = bench.daemon();
    let mut player = Player::holding(DEV);
    let path = groups.put(player.pid(), &group(0));
    player.ask(&format!("unshare {}", libc::CLONE_NEWCGROUP));
    for source in ["map", "snapshot", "proc"] {
        let seen = bench.holders(&["--source", source]);
        let holder = seen.holder(player.pid()).expect("found");
        assert_eq!((&holder["cgroup"], &holder["container"]), (&path.as_str().into(), &id(0).into()), "{source}");
    }
}

/// A command in namespaces of its own, by the flags of unshare(1) and what a shell does before and within them; `None` where
/// there are none to be had.
fn unshared(test: &str, bench: &Bench, wrap: [&str; 3], arguments: &[&str]) -> Option<Output> {
    let [before, flags, within] = wrap;
    let wrap = |command: Command| {
        let mut outer = Command::new("sh");
        let script = format!("{before} exec unshare {flags} sh -c '{within} exec \"$0\" \"$@\"' \"$0\" \"$@\"");
        outer.args(["-c", &script]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => outer.env(name, value),
                None => outer.env_remove(name),
            };
        }
        outer
    };
    if !wrap(bench.command(&["--version"])).output().is_ok_and(|output| output.status.success()) {
        skip(test, &format!("no unshare(1) here that knows {flags}"));
        return None;
    }
    Some(finish(wrap(bench.command(arguments))))
}

#[test]
fn in_a_cgroup_namespace_of_its_own_a_look_is_right_and_a_gate_is_refused() {
    let mut bench = bench();
    let Some(mut groups) = Groups::new() else { return skip("cgroup namespace", "no cgroup2 is mounted") };
    let mut daemon = bench.daemon();
    let player = Player::holding(DEV);
    groups.put(player.pid(), &group(0));
    let (_, own) = groups.make("own");
    let enter = format!("echo $$ > {}/cgroup.procs;", own.display());
    let run = |bench: &Bench, within: &str, arguments: &[&str]| {
        unshared("cgroup namespace", bench, [&enter, "--cgroup --mount", within], arguments)
    };
    let Some(output) = run(&bench, "", &["holders", "--json"]) else { return };
    let seen = Seen::new(output.expect_code(0).json());
    assert_eq!(seen.source, "map");
    let holder = seen.holder(player.pid()).expect("found");
    // As the kernel tells it there: from the namespace's root.
    assert_eq!(holder["cgroup"], format!("/../{}", group(0)), "{holder:#}");
    assert_eq!(holder["container"], id(0), "{holder:#}");
    // A set of pins would be taken over, and rightly: its gate stands at the real root.
    daemon.stop();
    drop(daemon);
    "gate".clone_into(&mut bench.backend);
    let hierarchy = groups.mount.display().to_string();
    let within = format!("umount {hierarchy}; mount -t cgroup2 none {hierarchy} &&");
    let output = run(&bench, &within, &["daemon"]).expect("as before").expect_code(UNSUPPORTED);
    assert!(output.complaint().contains("in the host's cgroup namespace"), "{output:#?}");
}

/// Times of the kernel's programs mean nothing there, so they are not used; whoever looks by /proc is told why.
#[test]
fn in_a_time_namespace_nothing_is_told_by_the_wrong_clock() {
    let bench = bench();
    let daemon = bench.daemon();
    let player = Player::holding(DEV);
    let flags = "--time --boottime 864000 --fork";
    let run = |arguments: &[&str]| unshared("time namespace", &bench, ["", flags, ""], arguments);
    let Some(output) = run(&["holders", "--json"]) else { return };
    let seen = Seen::new(output.expect_code(0).json());
    assert_eq!((seen.source.as_str(), seen.complete), ("proc", false), "{:#}", seen.json);
    let holder = seen.holder(player.pid()).expect("found");
    assert_eq!(holder["comm"], "gpureap-actor", "it is known by its start");
    assert!(seen.json["notes"].to_string().contains("time namespace"), "{:#}", seen.json["notes"]);
    drop(daemon);
    for arguments in [&["daemon"][..], &["holders", "--source", "map"], &["fence", "--gpu", DEV]] {
        let output = run(arguments).expect("as before").expect_code(UNSUPPORTED);
        assert!(output.complaint().contains("time namespace"), "{output:#?}");
    }
}

/// A holder in one: the host's clock counts for all.
#[test]
fn a_holder_in_a_time_namespace_began_when_the_host_says() {
    let bench = bench();
    let _daemon = bench.daemon();
    let mut child = {
        let mut command = Command::new("unshare");
        command.args(["--time", "--boottime", "864000", "--fork", "sh", "-c", &format!("exec 9<>{DEV}; exec cat")]);
        match command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => return skip("holder in a time namespace", &error.to_string()),
        }
    };
    let parent = child.id();
    let holder = || {
        let seen = bench.holders(&[]);
        let list = seen.json["holders"].as_array().expect("holders").clone();
        list.into_iter().find(|holder| holder["parent"]["pid"] == parent)
    };
    let found = gpureap_tests::harness::settle(std::time::Duration::from_secs(10), || holder().is_none().then_some(()));
    let ended = child.try_wait().expect("wait").is_some();
    let seen = holder();
    drop(child.stdin.take());
    child.wait().expect("wait for it");
    if ended {
        return skip("holder in a time namespace", "no unshare(1) here that knows them");
    }
    assert!(found.is_ok(), "it is found");
    let seen = seen.expect("it is found");
    let started = seen["start_ns"].as_u64().expect("a start");
    assert!(started <= gpureap::clock::boottime_ns(), "by the host's clock: {seen:#}");
    assert_eq!((&seen["comm"], seen["state"].is_string()), (&"cat".into(), true), "{seen:#}");
    let first = seen["devices"][0]["first_open"].as_str().expect("a time").to_owned();
    assert!(first.as_str() <= bench.holders(&[]).json["time"].as_str().expect("a time"), "{first} is past");
}

/// A command where /proc hides the processes of others.
fn hiding(level: &str, world: World, command: Command) -> Command {
    world.hiding_processes(level).enter(command)
}

/// Where others can reach the executable, and /proc can hide processes.
fn nobody(test: &str, bench: &Bench) -> Option<World> {
    let world = bench.user(test)?;
    let mut trial = Command::new(bench.command(&[]).get_program());
    trial.arg("--version");
    if hiding("2", world.clone(), trial).output().is_err() {
        skip(test, "/proc cannot be mounted with hidepid");
        return None;
    }
    Some(world)
}

#[test]
fn where_proc_hides_processes_a_user_is_told_so_and_root_sees_all() {
    let bench = bench();
    let Some(world) = nobody("hidepid", &bench) else { return };
    let player = Player::holding(DEV);
    let own = Holder::with(&Wanted { device: DEV, user: Some(NOBODY), ..Wanted::default() });
    for (level, said) in [("1", "processes may not be read"), ("2", "does not show the processes of others")] {
        let look = |world: World, arguments: &[&str]| finish(hiding(level, world, bench.command(arguments)));
        let seen = Seen::new(look(world.clone(), &["holders", "--json"]).expect_code(0).json());
        assert_eq!((seen.source.as_str(), seen.complete), ("proc", false), "hidepid={level}");
        assert!(
            seen.holder(own.pid()).is_some() && seen.holder(player.pid()).is_none(),
            "hidepid={level}: {:#}",
            seen.json
        );
        assert!(seen.json["notes"].to_string().contains(said), "hidepid={level}: {:#}", seen.json["notes"]);
        let text = look(world.clone(), &["holders"]).expect_code(0);
        assert!((text.stdout + &text.stderr).contains(said), "hidepid={level}: in the text too");
        // Nobody says that it is free, who cannot see.
        let waited = look(world.clone(), &["wait", "--timeout", "0", "--json", "--pid", &player.pid().to_string()]);
        assert_eq!(waited.code, NOT_PERMITTED, "{waited:#?}");
        let seen = Seen::new(look(World::default(), &["holders", "--json"]).expect_code(0).json());
        assert_eq!(seen.source, "snapshot");
        assert!(seen.holder(own.pid()).is_some() && seen.holder(player.pid()).is_some(), "{:#}", seen.json);
        assert_eq!(seen.holder(player.pid()).expect("found")["comm"], "gpureap-actor", "with all that /proc tells");
    }
    assert!(sys::signal(player.pid(), 0), "it lives");
}
