//! `--stop-monitors` stops the units of monitors by D-Bus: a real bus, and behind it somebody who does what systemd does.
use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use gpureap::bpf::load::cgroup2_root;
use gpureap_tests::harness::{Bench, Device, Output, Pid, Scene, skip, sys, wait_for};
use serde_json::Value;
use zbus::{blocking::connection::Builder, fdo, interface, zvariant::OwnedObjectPath};

const DEV: &str = "/dev/full";
const UNIT: &str = "gpureap-test-exporter.service";

/// A bus daemon of our own.
struct Bus {
    daemon: Child,
    address: String,
}

impl Bus {
    fn start(place: &Path) -> Option<Self> {
        let address = format!("unix:path={}", place.join("bus").display());
        let mut daemon = Command::new("dbus-daemon")
            .args(["--session", "--nofork", "--nopidfile", "--print-address", "--address", &address])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let mut line = String::new();
        BufReader::new(daemon.stdout.take()?).read_line(&mut line).expect("the address");
        Some(Self { daemon, address: line.trim().to_owned() })
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        self.daemon.kill().expect("end the bus");
        self.daemon.wait().expect("end the bus");
    }
}

/// A unit's cgroup where systemd has it.
struct Unit(PathBuf);

impl Unit {
    fn new() -> Option<Self> {
        let path = cgroup2_root(Path::new("/proc"))?.join("system.slice").join(UNIT);
        fs::create_dir_all(&path).expect("a cgroup");
        Some(Self(path))
    }

    fn take(&self, pid: Pid) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("move into the cgroup");
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        wait_for("the cgroup is empty", || {
            fs::read_to_string(self.0.join("cgroup.procs")).is_ok_and(|text| text.is_empty())
        });
        fs::remove_dir(&self.0).expect("remove the cgroup");
        // Somebody else may have made it, or use it.
        fs::remove_dir(self.0.parent().expect("a parent")).ok();
    }
}

/// Ends the processes of the unit, as systemd does.
struct Manager {
    procs: PathBuf,
    asked: Arc<Mutex<Vec<(String, String)>>>,
}

#[interface(name = "org.freedesktop.systemd1.Manager")]
impl Manager {
    #[expect(clippy::needless_pass_by_value, reason = "the bus gives values")]
    fn stop_unit(&self, name: String, mode: String) -> fdo::Result<OwnedObjectPath> {
        self.asked.lock().expect("not poisoned").push((name.clone(), mode));
        if name != UNIT {
            return Err(fdo::Error::Failed(format!("Unit {name} not loaded.")));
        }
        for line in fs::read_to_string(&self.procs).expect("the processes").lines() {
            sys::kill(line.parse().expect("a pid"), libc::SIGTERM);
        }
        Ok(OwnedObjectPath::try_from("/org/freedesktop/systemd1/job/7").expect("a path"))
    }
}

fn bench() -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    if !bench.is_free("units") {
        return None;
    }
    let config = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    let class = format!("[[class]]\nname = \"test-exporter\"\nclass = \"monitor\"\nunit = \"{UNIT}\"\n");
    bench.write_config(&(config + &class));
    Some(bench)
}

fn reap(bench: &Bench, bus: &str, rest: &[&str]) -> Output {
    let mut command = bench.command(&[&["reap", "--yes", "--json"], rest].concat());
    command.env("DBUS_SYSTEM_BUS_ADDRESS", bus);
    gpureap_tests::harness::finish(command)
}

fn entry(report: &Value, pid: Pid) -> &Value {
    let list = report["processes"].as_array().expect("processes");
    list.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{pid} in {report:#}"))
}

#[test]
fn k8_the_unit_of_a_monitor_is_stopped_by_systemd() {
    let Some(bench) = bench() else { return };
    let Some(unit) = Unit::new() else { return skip("K8", "no cgroup2 root") };
    let Some(bus) = Bus::start(&bench.path("run")) else { return skip("K8", "no dbus-daemon") };
    let asked = Arc::new(Mutex::new(Vec::new()));
    let manager = Manager { procs: unit.0.join("cgroup.procs"), asked: Arc::clone(&asked) };
    let _served = Builder::address(bus.address.as_str())
        .and_then(|builder| builder.name("org.freedesktop.systemd1"))
        .and_then(|builder| builder.serve_at("/org/freedesktop/systemd1", manager))
        .and_then(Builder::build)
        .expect("a manager on the bus");

    let scene = Scene::start("plain", DEV, &[]);
    unit.take(scene.pid());
    // It is named and left alone unless it is asked for.
    let report = reap(&bench, &bus.address, &[]).expect_code(5).json();
    assert_eq!(report["skipped"][0]["class_rule"], "test-exporter", "{report:#}");
    assert!(asked.lock().expect("not poisoned").is_empty());
    let dry = reap(&bench, &bus.address, &["--stop-monitors", "--dry-run"]).expect_code(0).json();
    assert_eq!(entry(&dry, scene.pid())["unit_stopped"], UNIT);
    assert!(asked.lock().expect("not poisoned").is_empty(), "a dry run asks for nothing");

    let report = reap(&bench, &bus.address, &["--stop-monitors"]).expect_code(0).json();
    let process = entry(&report, scene.pid());
    assert_eq!((&process["unit_stopped"], &process["result"]), (&UNIT.into(), &"exited".into()), "{report:#}");
    assert_eq!(process["signals"], Value::Array(Vec::new()), "the manager ended it");
    assert_eq!(*asked.lock().expect("not poisoned"), [(UNIT.to_owned(), "replace".to_owned())]);
    let record = fs::read_to_string(bench.path("state").join("reaps.ndjson")).expect("the record");
    assert!(record.lines().any(|line| line.contains(&format!("\"unit\":\"{UNIT}\""))), "{record}");
}

#[test]
fn k8_without_systemd_the_monitor_is_signalled() {
    let Some(bench) = bench() else { return };
    let Some(unit) = Unit::new() else { return skip("K8", "no cgroup2 root") };
    let scene = Scene::start("plain", DEV, &[]);
    unit.take(scene.pid());
    let report = reap(&bench, "unix:path=/nonexistent/bus", &["--stop-monitors"]).expect_code(0).json();
    let process = entry(&report, scene.pid());
    assert_eq!((&process["unit_stopped"], &process["signals"][0]["signal"]), (&Value::Null, &"SIGTERM".into()));
    let notes = report["notes"].as_array().expect("notes");
    let told = notes.iter().filter_map(Value::as_str).any(|note| note.contains("could not be stopped"));
    assert!(told, "{report:#}");
}
