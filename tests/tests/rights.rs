//! The capabilities of the shipped unit: with them, and without the right to gain others, the daemon does all of its work;
//! each of them is for something.
use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
};

use gpureap_tests::harness::{Bench, Device, NOBODY, Scene, World, finish, settle, skip, wait_for};
use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

const DEV: &str = "/dev/zero";
const NOT_PERMITTED: i32 = 7;
const UNIT: &str = include_str!("../../packaging/gpureap.service");

/// Numbers of include/uapi/linux/capability.h.
const NUMBERS: [(&str, u32); 7] = [
    ("CAP_DAC_READ_SEARCH", 2),
    ("CAP_NET_ADMIN", 12),
    ("CAP_SYS_PTRACE", 19),
    ("CAP_SYS_ADMIN", 21),
    ("CAP_SYSLOG", 34),
    ("CAP_PERFMON", 38),
    ("CAP_BPF", 39),
];

fn names_of_the_unit() -> Vec<&'static str> {
    let line = UNIT.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    line.expect("the unit bounds its capabilities").split(' ').collect()
}

fn set(names: &[&str]) -> u64 {
    let bit = |name: &&str| {
        let number = NUMBERS.iter().find(|(known, _)| known == name);
        1 << number.unwrap_or_else(|| panic!("the number of {name}")).1
    };
    names.iter().map(bit).sum()
}

/// What `CAP_SYS_ADMIN` stands for, where the kernel lets whoever has these trace.
const INSTEAD: [&str; 3] = ["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"];

/// As the unit has it, but for some.
fn world(without: &[&str]) -> World {
    let names: Vec<&str> = names_of_the_unit().into_iter().filter(|name| !without.contains(name)).collect();
    World::default().with_capabilities(set(&names)).without_new_privileges()
}

/// With the lesser ones in the place of `CAP_SYS_ADMIN`, but for one.
fn lesser_world(without: Option<&str>) -> World {
    let names = names_of_the_unit().into_iter().filter(|name| *name != "CAP_SYS_ADMIN").chain(INSTEAD);
    let names: Vec<&str> = names.filter(|name| Some(*name) != without).collect();
    World::default().with_capabilities(set(&names)).without_new_privileges()
}

fn bench() -> Bench {
    let bench = Bench::new(&[Device::zero()]);
    bench.open_to_all();
    bench
}

/// A child that ends with this.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill().and_then(|()| self.0.wait()));
    }
}

/// A user's job, with a variable that the record keeps.
fn job() -> Ends {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec 9<>{DEV}; echo ready; exec sleep 1000")]).env("RANK", "3");
    let mut child = World::default().as_user(NOBODY).enter(command).stdout(Stdio::piped()).spawn().expect("a shell");
    child.stdout.as_mut().expect("its output").read_exact(&mut [0; 6]).expect("it is ready");
    Ends(child)
}

/// Starts a daemon and waits until its socket answers.
fn daemon(bench: &Bench, world: World) -> Ends {
    let log = File::create(bench.path("daemon.log")).expect("a log");
    let mut command = bench.command(&["daemon"]);
    command.stdout(Stdio::null()).stderr(Stdio::from(log));
    let mut daemon = Ends(world.enter(command).spawn().expect("start the daemon"));
    let socket = bench.path("run/gpureap.sock");
    wait_for("the daemon's socket", || {
        let ended = daemon.0.try_wait().expect("wait for the daemon");
        assert_eq!(ended, None, "it ended: {}", log_of(bench));
        UnixStream::connect(&socket).is_ok()
    });
    daemon
}

fn log_of(bench: &Bench) -> String {
    fs::read_to_string(bench.path("daemon.log")).unwrap_or_default()
}

/// The program and the kept variables of a process, once it is in the journal.
fn recorded(bench: &Bench, pid: u32) -> (Option<String>, Option<String>) {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let find = || -> rusqlite::Result<Option<(Option<String>, Option<String>)>> {
        let connection = Connection::open_with_flags(bench.path("state/journal.db"), flags)?;
        // It is there when it opens, and once more when it was read who it is.
        let query = "SELECT exe, env FROM processes WHERE pid = ?1 AND nspids IS NOT NULL";
        connection.query_row(query, [pid], |row| Ok((row.get(0)?, row.get(1)?))).optional()
    };
    let mut found = None;
    wait_for("the job is recorded", || {
        found = find().ok().flatten();
        found.is_some()
    });
    found.expect("it was waited for")
}

#[test]
fn the_capabilities_of_the_unit_suffice() {
    let bench = bench();
    let _daemon = daemon(&bench, world(&[]));
    let job = job();
    let scene = Scene::start("plain", DEV, &[]);
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map");
    let mut stream = UnixStream::connect(bench.path("run/gpureap.sock")).expect("the socket");
    stream.write_all(b"{\"v\":1,\"get\":\"sweep\"}\n").expect("ask");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\n") {
        let mut part = [0; 4096];
        let count = stream.read(&mut part).expect("an answer");
        assert!(count > 0, "an end instead of an answer");
        answer.extend_from_slice(&part[..count]);
    }
    assert!(String::from_utf8_lossy(&answer).contains(&format!("\"pid\":{}", scene.pid())));
    let (exe, env) = recorded(&bench, job.0.id());
    assert!(exe.is_some_and(|exe| exe.starts_with('/')));
    assert_eq!(env.as_deref(), Some(r#"{"RANK":"3"}"#));
    let log = log_of(&bench);
    assert!(!log.contains("are not read from") && !log.contains("WARN"), "{log}");
}

#[test]
fn without_one_of_the_units_capabilities_something_is_missing() {
    let names = names_of_the_unit();
    let mut tried = vec!["CAP_SYSLOG", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"];

    // The lesser ones are enough for `gate`. Its pins would outlive it, and to take those over needs less.
    {
        let mut bench = bench();
        bench.backend = "gate".into();
        drop(daemon(&bench, lesser_world(None)));
    }

    // Without these there is no daemon.
    let mut gate = bench();
    gate.backend = "gate".into();
    finish(world(&["CAP_SYS_ADMIN"]).enter(gate.command(&["daemon"]))).expect_code(NOT_PERMITTED);
    tried.push("CAP_SYS_ADMIN");
    for name in INSTEAD {
        let output = finish(lesser_world(Some(name)).enter(gate.command(&["daemon"]))).expect_code(NOT_PERMITTED);
        assert!(output.complaint().contains(name), "{output:#?}");
    }
    drop(gate);

    // Without these, the program or the environment of another user's process cannot be read; the holders are found all
    // the same. (Before 6.13 the first is for both.)
    for name in ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"] {
        let bench = bench();
        let _daemon = daemon(&bench, world(&[name]));
        let job = job();
        let (exe, env) = recorded(&bench, job.0.id());
        let missing = if name == "CAP_SYS_PTRACE" { exe } else { env };
        assert_eq!(missing, None, "without {name}");
        let pid = i32::try_from(job.0.id()).expect("a pid");
        let missed = settle(gpureap_tests::harness::PATIENCE / 4, || {
            bench.holders(&[]).holder(pid).is_none().then_some("the job holds")
        });
        assert_eq!(missed, Ok(()), "without {name}");
    }

    // Without this the kernel's log is closed, where it is closed to users at all.
    if fs::read_to_string("/proc/sys/kernel/dmesg_restrict").is_ok_and(|text| text.trim() == "1") {
        // Older kernels take CAP_SYS_ADMIN for it too.
        let mut bench = bench();
        bench.backend = "gate".into();
        let _daemon = daemon(&bench, lesser_world(Some("CAP_SYSLOG")));
        wait_for("it says that it cannot read the log", || log_of(&bench).contains("are not read from"));
    } else {
        skip("rights", "everybody may read the kernel's log: CAP_SYSLOG is not tried");
    }
    let untried: Vec<&&str> = names.iter().filter(|name| !tried.contains(name)).collect();
    assert!(untried.is_empty(), "the unit has what nothing here needs: {untried:?}");
}
