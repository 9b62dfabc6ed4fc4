//! A fence refuses new opens of a device, for everybody on the host, and leaves alone what is open.

mod held;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use gpureap::{
    bpf::{
        fence::{Exemptions, Fence, pinned},
        load::cgroup2_root,
        sys as bpf_sys,
    },
    clock,
    config::Config,
    gpu::devices::{self, Devices},
};
use gpureap_common::record::{Meta, ProcKey};
use gpureap_tests::harness::{Bench, Device, Output, Pid, Scene, World, anybody, finish, sys, wait_for};
use serde_json::Value;

/// Opened by next to nobody, so that nobody misses it for a while.
const DEV: &str = "/dev/full";
const SECOND: &str = "/dev/kmsg";
/// In the table of devices and never fenced.
const FREE: &str = "/dev/zero";

fn bench() -> Bench {
    let bench = Bench::new(&[Device::full(), Device::new(1, 11, SECOND), Device::zero()]);
    for node in [DEV, SECOND, FREE] {
        assert_eq!(attempt(node), 0, "{node} can be opened before there is a fence");
    }
    bench
}

/// What a new process meets that does something first and then opens the node: 0, or the error.
fn attempt_after(node: impl AsRef<Path>, first: impl FnOnce() -> io::Result<()>) -> i32 {
    let code = |error: io::Error| error.raw_os_error().unwrap_or(255);
    match sys::fork() {
        0 => sys::exit(match first() {
            Ok(()) => sys::try_open(node, libc::O_RDONLY).map_or_else(code, |_| 0),
            Err(_) => 254,
        }),
        pid => sys::reap(pid) >> 8,
    }
}

fn attempt(node: impl AsRef<Path>) -> i32 {
    attempt_after(node, || Ok(()))
}

#[track_caller]
fn closed(node: &str) {
    assert_eq!(attempt(node), libc::EPERM, "an open of {node} is refused");
}

#[track_caller]
fn open(node: &str) {
    assert_eq!(attempt(node), 0, "an open of {node} is let through");
}

/// `fence --json` with more arguments.
fn fence(bench: &Bench, rest: &[&str]) -> Value {
    report(&bench.run(&[&["fence", "--json"], rest].concat()).expect_code(0))
}

fn unfence(bench: &Bench, rest: &[&str]) -> Value {
    report(&bench.run(&[&["unfence", "--json"], rest].concat()).expect_code(0))
}

fn list(bench: &Bench) -> Value {
    fence(bench, &["--list"])
}

fn report(output: &Output) -> Value {
    let json = output.json();
    assert_eq!(json["schema"], "gpureap.fence/1");
    json
}

fn device<'a>(report: &'a Value, node: &str) -> &'a Value {
    let devices = report["devices"].as_array().expect("devices");
    devices.iter().find(|device| device["node"] == node).unwrap_or_else(|| panic!("{node} in {report:#}"))
}

fn nodes(report: &Value) -> Vec<&str> {
    report["devices"].as_array().expect("devices").iter().map(|device| device["node"].as_str().expect("node")).collect()
}

fn fenced(bench: &Bench, node: &str) -> bool {
    let seen = bench.look();
    device(&seen.json, node)["fenced"].as_bool().expect("fenced")
}

/// A cgroup of the test's own; gone with it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Self {
        let root = cgroup2_root(Path::new("/proc")).expect("the cgroup2 root");
        let path = root.join(format!("gpureap-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).expect("a cgroup");
        Self(path)
    }

    fn below(&self, name: &str) -> Self {
        let path = self.0.join(name);
        fs::create_dir(&path).expect("a cgroup");
        Self(path)
    }

    fn attempt(&self, node: &str) -> i32 {
        let tasks = self.0.join("cgroup.procs");
        attempt_after(node, || fs::write(&tasks, "0"))
    }

    fn text(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).ok();
    }
}

/// What the library needs.
fn library(bench: &Bench) -> (Config, Devices) {
    let config = bench.config();
    let devices = devices::discover(&config.paths, &config.devices).expect("devices");
    (config, devices)
}

fn raise(bench: &Bench, minor: u32, exempt: &Exemptions) -> Fence {
    let (config, devices) = library(bench);
    let slots = BTreeSet::from([devices.by_number(1, minor).expect("the device").slot]);
    Fence::raise(&config, &devices, &slots, None, exempt).expect("a fence")
}

#[test]
fn nobody_on_the_host_opens_a_fenced_device() {
    let bench = bench();
    let mut before = File::open(DEV).expect("open");
    let report = fence(&bench, &["--gpu", DEV, "--ttl", "5m"]);
    let row = device(&report, DEV);
    assert_eq!((&row["fenced"], &row["change"]), (&Value::Bool(true), &Value::from("raised")));
    assert_eq!(nodes(&report), [DEV]);
    let left = row["left_ms"].as_u64().expect("a time");
    assert!((200_000..=300_000).contains(&left), "{row:#}");

    closed(DEV);
    assert_eq!(sys::try_open(DEV, libc::O_WRONLY).expect_err("refused").raw_os_error(), Some(libc::EPERM));

    // In another cgroup, and where another node of the device is all there is.
    let elsewhere = Cgroup::new("elsewhere");
    assert_eq!(elsewhere.attempt(DEV), libc::EPERM);
    let place = bench.path("world");
    fs::create_dir(&place).expect("a directory");
    let number = sys::device_number(DEV).expect("stat");
    let alone = attempt_after("/gpu", || {
        sys::unshare(libc::CLONE_NEWNS)?;
        sys::mount("none", Path::new("none"), Path::new("/"), libc::MS_REC | libc::MS_PRIVATE)?;
        sys::mount("tmpfs", Path::new("none"), &place, 0)?;
        // Making the node is not an open, and is let through.
        sys::mknod(&place.join("gpu"), number)?;
        std::os::unix::fs::chroot(&place)
    });
    assert_eq!(alone, libc::EPERM);

    // A descriptor that is no open file becomes none.
    let path_only = sys::open(DEV, sys::O_PATH);
    assert_eq!(attempt(format!("/proc/self/fd/{path_only}")), libc::EPERM);
    sys::close(path_only);
    assert_eq!(attempt(format!("/proc/self/fd/{}", before.as_raw_fd())), libc::EPERM);

    // What is open goes on.
    let mut zeros = [1; 8];
    before.read_exact(&mut zeros).expect("read");
    assert_eq!(zeros, [0; 8]);
    drop(before.try_clone().expect("dup"));

    // Looking is allowed, and other devices and files are as ever.
    assert!(Path::new(DEV).exists());
    for other in [SECOND, FREE, "/dev/null", "/proc/self/stat"] {
        open(other);
    }
    assert!(fenced(&bench, DEV) && !fenced(&bench, FREE));

    let report = unfence(&bench, &[]);
    assert_eq!(device(&report, DEV)["change"], "lowered");
    assert_eq!(report["denied_total"], 6, "{report:#}");
    open(DEV);
    assert!(!fenced(&bench, DEV));
    assert!(!bench.pins().exists(), "nothing is left");
    assert_eq!(nodes(&unfence(&bench, &[])), <[&str; 0]>::default());
}

#[test]
fn existence_may_be_asked_for_and_reading_rights_may_not() {
    let bench = bench();
    fence(&bench, &["--gpu", DEV]);
    let access = |mode| {
        let path = sys::cstr(DEV);
        // SAFETY: the string is live.
        let refused = unsafe { libc::access(path.as_ptr(), mode) } != 0;
        refused.then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
    };
    assert_eq!(
        (access(libc::F_OK), access(libc::R_OK), access(libc::W_OK)),
        (None, Some(libc::EPERM), Some(libc::EPERM))
    );
    unfence(&bench, &[]);
    assert_eq!(access(libc::R_OK), None);
}

#[test]
fn the_exempt_get_through() {
    let bench = bench();
    let (group, other) = (Cgroup::new("exempt"), Cgroup::new("other"));
    let (below, deeper) = (group.below("a"), group.below("a/b"));
    let own = std::process::id().to_string();
    let report = fence(&bench, &["--gpu", DEV, "--exempt-cgroup", group.text(), "--exempt-pid", &own]);
    assert_eq!(report["exempt"]["processes"][0]["pid"], std::process::id(), "{report:#}");
    assert_eq!(report["exempt"]["cgroups"][0]["path"], format!("/{}", group.0.file_name().unwrap().to_str().unwrap()));

    File::open(DEV).expect("this process is exempt");
    closed(DEV);
    assert_eq!((group.attempt(DEV), below.attempt(DEV), deeper.attempt(DEV)), (0, 0, 0));
    assert_eq!(other.attempt(DEV), libc::EPERM);
    let row = list(&bench);
    let row = device(&row, DEV);
    assert_eq!((row["denied"].as_u64(), row["exempted"].as_u64()), (Some(2), Some(4)), "{row:#}");

    // Those who are exempt are added, not replaced; a name will do for a cgroup.
    let name = other.0.file_name().unwrap().to_str().unwrap();
    fence(&bench, &["--gpu", DEV, "--exempt-cgroup", name]);
    assert_eq!((group.attempt(DEV), other.attempt(DEV)), (0, 0));
    closed(DEV);
    // With the fence go its exemptions.
    unfence(&bench, &[]);
    fence(&bench, &["--gpu", DEV]);
    assert_eq!(group.attempt(DEV), libc::EPERM);
    File::open(DEV).expect_err("no longer exempt");
    unfence(&bench, &[]);

    let tid = sys::tid().to_string();
    for (arguments, word) in [
        (["--exempt-pid", "4194304"], "no process 4194304"),
        (["--exempt-pid", tid.as_str()], "is a thread of process"),
        (["--exempt-cgroup", "/"], "root cgroup"),
        (["--exempt-cgroup", "gpureap-no-such-unit"], "no such cgroup"),
    ] {
        let output = bench.run(&[&["fence", "--gpu", DEV], &arguments[..]].concat()).expect_code(2);
        assert!(output.complaint().contains(word), "{output:#?}");
        open(DEV);
    }
}

#[test]
fn the_kernel_ends_a_fence_with_nobody_running() {
    let bench = bench();
    fence(&bench, &["--gpu", DEV]);
    // The new deadline by the library: an emulated machine may need longer than that for a command.
    let (config, devices) = library(&bench);
    let slots = BTreeSet::from([devices.by_number(1, 7).expect("the device").slot]);
    let deadline = clock::boottime_ns() + 1_000_000_000;
    pinned::raise(&config, &devices, &slots, deadline, &Exemptions::default()).expect("raise");
    closed(DEV);
    assert!(clock::boottime_ns() < deadline, "too slow a machine for this test");
    wait_for("the fence ends", || attempt(DEV) == 0);
    assert!(clock::boottime_ns() >= deadline);
    assert!(!fenced(&bench, DEV));
    assert_eq!(nodes(&list(&bench)), <[&str; 0]>::default());
    // The next one makes a new fence, which counts anew.
    assert!(bench.pins().join("fence/set").exists());
    let report = fence(&bench, &["--gpu", SECOND]);
    assert_eq!((nodes(&report), report["denied_total"].as_u64()), (vec![SECOND], Some(0)));
    open(DEV);
    closed(SECOND);
    unfence(&bench, &[]);
}

#[test]
fn who_tried_is_named() {
    let bench = bench();
    let group = Cgroup::new("tried");
    fence(&bench, &["--gpu", DEV]);
    for _ in 0..3 {
        let tasks = group.0.join("cgroup.procs");
        let code = attempt_after(DEV, || {
            sys::set_comm(b"respawned\x1b[2J");
            fs::write(&tasks, "0")?;
            sys::become_user(65534)?;
            // Twice in each process; a device that may be read by everybody.
            sys::try_open(DEV, libc::O_RDONLY).map(drop).or(Ok(()))
        });
        assert_eq!(code, libc::EPERM);
    }
    let report = list(&bench);
    let [row] = report["denied"].as_array().expect("denied").as_slice() else { panic!("{report:#}") };
    assert_eq!((&row["comm"], &row["uid"], &row["node"]), (&"respawned\u{1b}[2J".into(), &65534.into(), &DEV.into()));
    assert_eq!((row["count"].as_u64(), row["processes"].as_u64()), (Some(6), Some(3)));
    assert_eq!(row["cgroup"], format!("/{}", group.0.file_name().unwrap().to_str().unwrap()));
    assert_eq!(report["denied_total"], 6);
    let text = bench.run(&["fence", "--list"]).expect_code(0).stdout;
    assert!(text.contains("refused: 6 opens of /dev/full by respawned\\x1b[2J, 3 processes, the last pid "), "{text}");
    unfence(&bench, &[]);
}

#[test]
fn devices_come_and_go_one_by_one() {
    let bench = bench();
    fence(&bench, &["--gpu", DEV, "--ttl", "10m"]);
    let report = fence(&bench, &["--gpu", SECOND, "--ttl", "20m"]);
    assert_eq!(nodes(&report), [DEV, SECOND]);
    assert_eq!((&device(&report, DEV)["change"], &device(&report, SECOND)["change"]), (&Value::Null, &"raised".into()));
    closed(DEV);
    closed(SECOND);
    // The new time counts, longer or shorter, and so do the opens that were refused before.
    let report = fence(&bench, &["--gpu", DEV, "--ttl", "5m"]);
    let row = device(&report, DEV);
    assert_eq!((&row["change"], &row["denied"]), (&"updated".into(), &1.into()));
    assert!(row["left_ms"].as_u64().is_some_and(|left| left <= 300_000), "{row:#}");

    let report = unfence(&bench, &["--gpu", DEV]);
    assert_eq!((&device(&report, DEV)["fenced"], &device(&report, SECOND)["fenced"]), (&false.into(), &true.into()));
    open(DEV);
    closed(SECOND);
    let report = unfence(&bench, &["--gpu", DEV]);
    assert_eq!(report["notes"][0], "/dev/full was not fenced");

    // Under a configuration that knows other devices, in another order, what is fenced stays fenced and can be named.
    bench.write_config("[[device]]\nkind = \"standin\"\nmajor = 1\nminor = 7\nnode = \"/dev/full\"\n");
    let report = fence(&bench, &["--gpu", DEV]);
    assert_eq!(nodes(&report).len(), 2, "{report:#}");
    closed(DEV);
    closed(SECOND);
    let report = unfence(&bench, &["--gpu", SECOND]);
    assert_eq!(device(&report, "/dev/char/1:11")["change"], "lowered");
    open(SECOND);
    closed(DEV);
    unfence(&bench, &["--gpu", DEV]);
    assert!(!bench.pins().exists(), "nothing is left");
}

#[test]
fn the_daemon_leaves_a_fence_alone_and_says_who_tried() {
    let bench = bench();
    fence(&bench, &["--gpu", DEV, "--ttl", "1h"]);
    let mut daemon = bench.daemon();
    closed(DEV);
    wait_for("the daemon says who tried", || daemon.log().contains("the fence refused 1 open of /dev/full by "));
    assert!(!daemon.log().contains("left alone"), "{}", daemon.log());
    assert!(fenced(&bench, DEV));
    daemon.stop();
    closed(DEV);
    assert!(fenced(&bench, DEV));
    daemon.start_again();
    daemon.kill();
    closed(DEV);
    // An expired fence goes with the daemon's next look.
    daemon.start_again();
    fence(&bench, &["--gpu", DEV, "--ttl", "10ms"]);
    wait_for("the fence is removed", || !bench.pins().join("fence").exists());
    open(DEV);
    daemon.stop();
    assert!(!bench.pins().exists());
}

#[test]
fn what_a_killed_or_another_gpureap_left_is_cleaned() {
    let bench = bench();
    // Half made, and not finished by anybody.
    fence(&bench, &["--gpu", DEV]);
    let place = bench.pins().join("fence");
    fs::rename(place.join("set"), place.join("new")).expect("rename");
    closed(DEV);
    assert!(!fenced(&bench, DEV));
    let report = fence(&bench, &["--gpu", SECOND]);
    assert_eq!(nodes(&report), [SECOND]);
    wait_for("the half-made one is detached", || attempt(DEV) == 0);

    // Of another version: its records cannot be read.
    let meta = bpf_sys::get(&place.join("set/META")).expect("META");
    let meta = std::os::fd::AsFd::as_fd(&meta);
    let record: Meta = bpf_sys::lookup(meta, &0_u32).expect("read").expect("there");
    bpf_sys::update(meta, &0_u32, &Meta { abi: record.abi + 1, ..record }, bpf_sys::ANY).expect("write");
    let output = bench.run(&["fence", "--list"]);
    assert!(output.expect_code(8).complaint().contains("ABI"));
    assert!(!fenced(&bench, SECOND));
    let output = bench.run(&["unfence", "--gpu", SECOND]).expect_code(8);
    assert!(output.complaint().contains("`gpureap unfence` without --gpu removes it"), "{output:#?}");
    closed(SECOND);
    let report = fence(&bench, &["--gpu", DEV]);
    assert!(report["notes"][0].as_str().is_some_and(|note| note.contains("is replaced")), "{report:#}");
    closed(DEV);
    wait_for("the old one is detached", || attempt(SECOND) == 0);

    // Without a part of it nobody can tell what it does.
    fs::remove_file(place.join("set/EXEMPT")).expect("unpin");
    assert!(bench.run(&["fence", "--list"]).expect_code(8).complaint().contains("EXEMPT"));
    let notes = bench.holders(&[]).json["notes"].to_string();
    assert!(notes.contains("what is fenced is not known: ") && notes.contains("EXEMPT"), "{notes}");
    // Removed is said of what is gone.
    fs::create_dir(place.join("set/strange")).expect("a directory");
    assert!(bench.run(&["unfence"]).expect_code(8).complaint().contains("fence/set cannot be used: "));
    fs::remove_dir(place.join("set/strange")).expect("remove");
    let output = bench.run(&["unfence"]).expect_code(0);
    assert!(output.stdout.starts_with("note: a fence that this gpureap cannot read is removed"), "{output:#?}");
    fence(&bench, &["--gpu", DEV]);

    // Without its program it is no fence.
    fs::remove_file(place.join("set/links/node_open_fence")).expect("unpin");
    assert!(bench.run(&["fence", "--list"]).expect_code(8).complaint().contains("fences nothing"));
    wait_for("it is detached", || attempt(DEV) == 0);
    let report = fence(&bench, &["--gpu", DEV]);
    assert!(report["notes"][0].as_str().is_some_and(|note| note.contains("fences nothing")), "{report:#}");
    closed(DEV);
    let report = unfence(&bench, &[]);
    assert_eq!(nodes(&report), [DEV]);
    open(DEV);
    assert!(!bench.pins().exists(), "nothing is left");
}

#[test]
fn two_at_once_take_turns() {
    let bench = bench();
    let (config, devices) = library(&bench);
    let slot = |minor| BTreeSet::from([devices.by_number(1, minor).expect("the device").slot]);
    let deadline = clock::boottime_ns() + 600_000_000_000;
    thread::scope(|scope| {
        for minor in [11, 7] {
            let (config, devices, slots) = (&config, &devices, slot(minor));
            scope.spawn(move || {
                for _ in 0..5 {
                    pinned::raise(config, devices, &slots, deadline, &Exemptions::default()).expect("raise");
                    let numbers = BTreeSet::from([gpureap_common::abi::dev(1, minor)]);
                    pinned::lower(config, Some(&numbers)).expect("lower");
                }
                pinned::raise(config, devices, &slots, deadline, &Exemptions::default()).expect("raise");
            });
        }
    });
    assert_eq!(nodes(&list(&bench)), [DEV, SECOND]);
    closed(DEV);
    closed(SECOND);
    unfence(&bench, &[]);
}

#[test]
fn the_doctor_tries_a_fence_and_tells_of_one() {
    let bench = bench();
    let told = || {
        let report = bench.run(&["doctor", "--json"]).json();
        let checks = report["checks"].as_array().expect("checks");
        let check = checks.iter().find(|check| check["name"] == "fence").unwrap_or_else(|| panic!("{report:#}"));
        check["detail"].as_str().expect("a sentence").to_owned()
    };
    assert_eq!(told(), "can be raised; nothing is fenced now");
    open(DEV);
    fence(&bench, &["--gpu", DEV, "--gpu", SECOND]);
    assert_eq!(told(), "can be raised; devices that are fenced now: 2 (gpureap fence --list)");
    closed(DEV);
    unfence(&bench, &[]);
}

#[test]
fn where_it_cannot_be_had_one_sentence_says_why() {
    let bench = bench();
    let refused = |output: Output, code, word: &str| {
        let output = output.expect_code(code);
        assert!(output.complaint().contains(word), "`{word}` in {output:#?}");
    };
    let no_cgroup = World::default().without_mounts("cgroup2");
    refused(finish(no_cgroup.enter(bench.command(&["fence", "--gpu", DEV]))), 8, "cgroup2");
    let plain = bench.path("no-bpffs");
    fs::create_dir(&plain).expect("a directory");
    let mut command = bench.command(&["fence", "--gpu", DEV]);
    command.env("GPUREAP_PIN_DIR", plain.join("gpureap"));
    refused(finish(command), 8, "mount -t bpf");
    refused(bench.run(&["fence", "--gpu", "/dev/null"]), 2, "no such GPU");
    refused(bench.run(&["fence", "--gpu", "MIG-"]), 2, "not the UUID of a MIG device");
    // Asked for, and not there.
    let uuid = "MIG-0a1b2c3d-1111-2222-3333-444455556666";
    for arguments in [["fence", "--gpu", uuid], ["unfence", "--gpu", uuid]] {
        let output = bench.run(&arguments);
        // A host with NVML knows that there is no such device.
        if output.code != 2 {
            refused(output, 8, "takes NVML, and ");
        }
    }
    bench.write_config("");
    if !Path::new("/proc/driver/nvidia").exists() {
        for arguments in [["fence"].as_slice(), &["fence", "--gpu", "0"]] {
            refused(bench.run(arguments), 8, "nothing to fence");
        }
        refused(bench.run(&["unfence", "--gpu", "0"]), 8, "no NVIDIA device");
    }
    open(DEV);
    assert!(!bench.pins().exists());
}

/// K9: the worker comes back again and again, and finds the door closed.
#[test]
fn k9_a_reap_behind_a_fence_frees_the_device_for_good() {
    let bench = bench();
    if !Device::full().is_free("K9") {
        return;
    }
    let scene = Scene::start("respawn", DEV, &[]);
    fence(&bench, &["--gpu", DEV]);
    let reaped = bench.run(&["reap", "--yes", "--json", "--gpu", DEV, "--match", "any"]).expect_code(0).json();
    assert_eq!(reaped["outcome"], "freed", "{reaped:#}");
    wait_for("the supervisor tries again", || device(&list(&bench), DEV)["denied"].as_u64() > Some(3));
    let report = list(&bench);
    assert_eq!(report["denied"][0]["comm"], "worker", "{report:#}");
    assert!(bench.holders(&["--sweep", "--gpu", DEV]).json["holders"].as_array().is_some_and(Vec::is_empty));
    assert!(sys::signal(scene.number("supervisor"), 0), "it lives");
    unfence(&bench, &[]);
    wait_for("the worker is back", || !anybody(&Device::full().key()).is_empty());
}

/// The pid of a process in the report is one of the host.
#[test]
fn a_trier_is_known_by_its_own_identity() {
    let bench = bench();
    let fence = raise(&bench, 7, &Exemptions::default());
    let (go, wait) = sys::pipe();
    let pid: Pid = match sys::fork() {
        0 => {
            assert_eq!(attempt(DEV), libc::EPERM);
            sys::try_open(DEV, libc::O_RDONLY).expect_err("refused");
            sys::write_all(wait, b"x");
            sys::sleep(60_000);
            sys::exit(0)
        }
        pid => pid,
    };
    sys::wait_byte(go);
    let denied = fence.denied().expect("denied");
    let own = denied.iter().find(|denied| denied.key.tgid == pid as u32).expect("the process itself");
    let facts = gpureap::process::Facts::read(Path::new("/proc"), own.key.tgid, own.key.start_ns).expect("it lives");
    assert_eq!((facts.comm, own.count), (own.comm.clone(), 1));
    sys::kill(pid, sys::SIGKILL);
    sys::reap(pid);
}
