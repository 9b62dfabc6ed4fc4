//! `gpureap doctor`: what this host allows and which probe set will run. Every failed check says what to do.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::{
    bpf::{
        Tracer,
        fence::{Exemptions, Fence, pinned},
        load::{self, name},
        pins,
    },
    cli::DoctorArgs,
    clock,
    config::{Config, Otlp, StandIn},
    exit_code::Exit,
    gpu::devices::{self, Devices},
    journal,
    kernel::{btf::Btf, offsets::Offsets, rights},
    model::{Backend, Eyes as _},
    otlp::{self, Cursor},
    out::{self, words},
};

/// A receiver that takes what it is sent is never so far behind.
const LATE: SignedDuration = SignedDuration::from_mins(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Works, with less.
    Degraded,
    Failed,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What was found, or what to do.
    detail: String,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    kernel: String,
    /// The set that a daemon started now would run.
    backend: Option<Backend>,
    ok: bool,
    checks: Vec<Check>,
}

pub fn run(args: &DoctorArgs, config: &Config) -> anyhow::Result<Exit> {
    let report = examine(config);
    let exit = if report.ok {
        Exit::Done
    } else if rights::lacking().is_empty() {
        Exit::Unsupported
    } else {
        Exit::NotPermitted
    };
    if args.json {
        out::json::print(&report)?;
    } else {
        out::raw(text(&report).as_bytes())?;
    }
    Ok(exit)
}

fn text(report: &Report) -> String {
    let mut text = format!("kernel {}\n", report.kernel);
    for Check { name, verdict, detail } in &report.checks {
        let mark = match verdict {
            Verdict::Ok => "ok",
            Verdict::Degraded => "less",
            Verdict::Failed => "FAIL",
        };
        writeln!(text, "{mark:>5}  {name:<12} {}", out::sanitize::escape(detail)).expect("writing to a string");
    }
    match report.backend {
        Some(backend) if report.ok => writeln!(text, "\nthe daemon will run the probe set `{}`", name(backend)),
        _ => writeln!(text, "\nthe daemon cannot run here; `holders` falls back to what the checks above allow"),
    }
    .expect("writing to a string");
    text
}

struct Checks(Vec<Check>);

impl Checks {
    fn add(&mut self, name: &'static str, verdict: Verdict, detail: impl Into<String>) {
        self.0.push(Check { name, verdict, detail: detail.into() });
    }

    fn result(&mut self, name: &'static str, result: Result<String, String>) -> bool {
        match result {
            Ok(detail) => self.add(name, Verdict::Ok, detail),
            Err(detail) => {
                self.add(name, Verdict::Failed, detail);
                return false;
            }
        }
        true
    }
}

fn examine(config: &Config) -> Report {
    let kernel = fs::read_to_string(config.paths.proc.join("sys/kernel/osrelease"))
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned());
    let mut checks = Checks(Vec::new());

    let root = checks.result("rights", rights());
    let btf = checks.result("btf", btf(config));
    let bpffs = checks.result(
        "bpffs",
        pins::check_root(&config.paths.pin)
            .map(|()| format!("pins go to {}", config.paths.pin.display()))
            .map_err(|error| format!("{error:#}")),
    );
    match load::cgroup2_root(&config.paths.proc) {
        Some(at) => checks.add("cgroup2", Verdict::Ok, format!("mounted at {}", at.display())),
        None => checks.add("cgroup2", Verdict::Degraded, format!("neither `gate` nor a fence: {}", load::NO_CGROUP2)),
    }
    device_checks(config, &mut checks);
    running(config, &mut checks);
    if let Some(otlp) = &config.otlp {
        let (verdict, detail) = match export(config, otlp) {
            Ok(told) => told,
            Err(error) => (Verdict::Degraded, format!("{error:#}")),
        };
        checks.add("otlp", verdict, detail);
    }

    let mut backend = None;
    if root && btf && bpffs {
        match fence(config) {
            Ok(told) => checks.add("fence", Verdict::Ok, told),
            Err(error) => checks.add("fence", Verdict::Degraded, format!("{error:#}")),
        }
        for candidate in load::order(config) {
            match self_test(config, candidate) {
                Ok(told) => {
                    checks.add(name(candidate), Verdict::Ok, told);
                    backend = backend.or(Some(candidate));
                }
                Err(error) => {
                    let text = format!("{error:#}");
                    let own = format!("no probe set runs on this kernel: `{}`: ", name(candidate));
                    checks.add(name(candidate), Verdict::Degraded, text.strip_prefix(&own).unwrap_or(&text));
                }
            }
        }
        match backend {
            Some(backend) => {
                checks.add("self-test", Verdict::Ok, format!("`{}` saw a real open and close", name(backend)));
            }
            None => {
                checks.add("self-test", Verdict::Failed, "no probe set runs on this kernel; the lines above say why");
            }
        }
    } else {
        checks.add("self-test", Verdict::Failed, "not run: first cure what failed above");
    }
    let ok = checks.0.iter().all(|check| check.verdict != Verdict::Failed);
    Report { schema: "gpureap.doctor/1", kernel, backend, ok, checks: checks.0 }
}

fn rights() -> Result<String, String> {
    let lacking = rights::lacking();
    if let Err(error) = rights::require_host_namespaces() {
        return Err(error.to_string());
    }
    if lacking.is_empty() {
        Ok("root, in the host's pid and time namespaces".to_owned())
    } else if rustix::process::geteuid().is_root() {
        Err(format!("root without {}: tracing needs them", lacking.join(", ")))
    } else {
        Err("not root: the daemon needs it; `holders` sees everything with CAP_BPF and CAP_PERFMON too".to_owned())
    }
}

fn btf(config: &Config) -> Result<String, String> {
    let path = config.paths.sys.join("kernel/btf/vmlinux");
    let btf = Btf::read(&path).map_err(|error| error.to_string())?;
    let offsets = Offsets::resolve(&btf).map_err(|error| error.to_string())?;
    Ok(format!("{} members found in {}", offsets.0.len(), path.display()))
}

fn device_checks(config: &Config, checks: &mut Checks) {
    match devices::discover(&config.paths, &config.devices) {
        Ok(devices) if devices.is_empty() => checks.add(
            "devices",
            Verdict::Degraded,
            "no NVIDIA driver is loaded and no stand-in is configured: nothing will be traced until the driver comes",
        ),
        Ok(devices) => {
            checks.add(
                "devices",
                Verdict::Ok,
                format!(
                    "{} GPUs, {} device nodes in all",
                    devices.gpus().filter(|gpu| gpu.minor.is_some()).count(),
                    devices.list().len()
                ),
            );
            for note in devices.notes() {
                checks.add("devices", Verdict::Degraded, note.clone());
            }
        }
        Err(error) => checks.add("devices", Verdict::Failed, error.to_string()),
    }
}

/// What is pinned now.
fn running(config: &Config, checks: &mut Checks) {
    let Ok((sets, _)) = pins::list(&config.paths.pin) else { return };
    for set in sets {
        match crate::bpf::handles::Handles::from_pins(&set.dir) {
            Ok(handles) => {
                let lost = handles.losses().unwrap_or(0);
                let verdict = if lost == 0 { Verdict::Ok } else { Verdict::Degraded };
                checks.add("tracer", verdict, format!("`{}` is attached, {lost} events lost since", name(set.backend)));
                let forgotten = handles.maps.forgotten().unwrap_or(0);
                if forgotten > 0 {
                    // As it should be on a host that runs for long: who matters is the ancestor of somebody who holds.
                    let told =
                        format!("{forgotten} processes were dropped from the map `lineage`, the longest unseen first");
                    checks.add("lineage", Verdict::Ok, told);
                }
            }
            Err(error) => checks.add("tracer", Verdict::Degraded, error.to_string()),
        }
    }
}

/// What was sent, what never will be, and what waits.
fn export(config: &Config, otlp: &Otlp) -> anyhow::Result<(Verdict, String)> {
    let to = &otlp.endpoint;
    let state = &config.paths.state;
    let cursor = Cursor::read(state).with_context(|| format!("cannot read {}", state.join(otlp::FILE).display()))?;
    let Some(Cursor { position, sent, rejected, gone, replaced }) = cursor else {
        return Ok((Verdict::Degraded, format!("no daemon has begun to send to {to}")));
    };
    let (waiting, oldest) = journal::export::pending(&config.paths.journal(), position)?;
    let late = oldest.map(|oldest| Timestamp::now().duration_since(oldest)).filter(|age| *age > LATE);
    let mut told = format!("{sent} records were sent to {to}, {waiting} events wait");
    if let Some(age) = late {
        write!(told, ", the oldest for {}", words::span(age)).expect("writing to a string");
    }
    if rejected + gone + replaced > 0 {
        let lost = format!("; lost: {rejected} records rejected, {gone} events removed by retention");
        told.push_str(&lost);
    }
    if replaced > 0 {
        write!(told, ", and what was not sent when the journal began anew ({replaced})").expect("writing to a string");
    }
    let is_well = late.is_none() && rejected + gone + replaced == 0;
    Ok((if is_well { Verdict::Ok } else { Verdict::Degraded }, told))
}

/// Attaches a fence of no device for a moment.
fn fence(config: &Config) -> anyhow::Result<String> {
    drop(Fence::raise(config, &Devices::default(), &BTreeSet::new(), None, &Exemptions::default())?);
    let now_ns = clock::boottime_ns();
    let fenced = match pinned::Pinned::open(config)? {
        Some(pinned) => pinned.outline()?.closed(now_ns).len(),
        None => 0,
    };
    Ok(match fenced {
        0 => "can be raised; nothing is fenced now".to_owned(),
        count => format!("can be raised; devices that are fenced now: {count} (gpureap fence --list)"),
    })
}

/// Attaches a set beside whatever runs, opens a real character device, looks, closes it, looks again.
fn self_test(config: &Config, backend: Backend) -> anyhow::Result<String> {
    const NODE: &str = "/dev/zero";
    let pin = pin_beside(&config.paths.pin);
    let mut private = Config { backend: Some(backend), devices: Vec::new(), ..config.clone() };
    private.paths.pin.clone_from(&pin);
    // No driver's devices here: the test must not depend on a GPU, and gpureap never opens one.
    private.paths.proc = PathBuf::from("/proc");
    let stand_in = StandIn::new(1, 5, NODE.into()).map_err(anyhow::Error::msg)?;
    let devices = devices::stand_ins_alone(&[stand_in])?;
    let tracer = Tracer::start(&private, &devices)?;
    let own = std::process::id();
    let held = |tracer: &Tracer| -> anyhow::Result<u32> {
        let view = tracer.eyes().view()?;
        let holder = view.holders.iter().find(|holder| holder.key.tgid == own);
        Ok(holder.map_or(0, |holder| holder.usage.values().map(|usage| usage.fds).sum()))
    };
    let before = held(&tracer)?;
    let file = File::open(NODE)?;
    let during = held(&tracer)?;
    drop(file);
    let after = held(&tracer)?;
    anyhow::ensure!(
        (during, after) == (before + 1, before),
        "attached, but an open and close of {NODE} counted {before}, {during}, {after} instead of {before}, {}, {before}",
        before + 1
    );
    Ok(match backend {
        Backend::Kprobe | Backend::Fentry => {
            "runs: exact, also in-flight descriptors; resynchronised when a preemptible kernel skips a program"
                .to_owned()
        }
        Backend::Gate => "runs: every read is verified; it cannot see in-flight and io_uring files".to_owned(),
    })
}

fn pin_beside(pin: &Path) -> PathBuf {
    let name = format!("gpureap-doctor-{}", std::process::id());
    pin.parent().unwrap_or(Path::new("/sys/fs/bpf")).join(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Paths,
        history::{
            event::{Event, Lost, What},
            rows::Change,
        },
    };

    #[test]
    fn every_line_is_explained() {
        let page = include_str!("../../docs/troubleshooting.md");
        let nowhere = || PathBuf::from("/nonexistent");
        let paths = Paths { proc: nowhere(), sys: nowhere(), dev: nowhere(), pin: nowhere(), ..Paths::default() };
        let report = examine(&Config { paths, ..Config::default() });
        assert!(!report.ok);
        let names = report.checks.iter().map(|check| check.name);
        // Those that come only where there is something to look at.
        for name in names
            .chain(["tracer", "lineage", "fence", "otlp"])
            .chain([Backend::Kprobe, Backend::Fentry, Backend::Gate].map(name))
        {
            assert!(page.contains(&format!("\n| `{name}` | ")), "{name}");
        }
    }

    #[test]
    fn what_waits_to_be_sent_and_what_is_lost_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { state: dir.path().to_owned(), ..Paths::default() };
        let config = Config { paths, ..Config::default() };
        let otlp = Otlp { endpoint: "http://127.0.0.1:4318".parse().unwrap(), headers: Vec::new() };
        let told = || export(&config, &otlp).unwrap();
        let none = "no daemon has begun to send to http://127.0.0.1:4318/";
        assert_eq!(told(), (Verdict::Degraded, none.to_owned()));
        let mut writer = journal::Writer::open(&config.paths.journal(), "b1").unwrap().writer;
        let lost = |age: i64| {
            let time = Timestamp::now() - SignedDuration::from_secs(age);
            let lost = Lost { events: 1, at: "test".into(), note: "x".into() };
            Change::Event(Event { time, boot_ns: 1, what: What::Lost(lost) })
        };
        writer.apply(&[lost(3700), lost(1)]).unwrap();
        let put = |id, rejected, gone, replaced| {
            let cursor =
                Cursor { position: journal::export::Position { id, time_ns: 0 }, sent: 9, rejected, gone, replaced };
            cursor.write(dir.path()).unwrap();
        };
        let sent = "9 records were sent to http://127.0.0.1:4318/";
        put(1, 0, 0, 0);
        assert_eq!(told(), (Verdict::Ok, format!("{sent}, 1 events wait")));
        put(0, 0, 0, 0);
        let (verdict, detail) = told();
        assert_eq!(verdict, Verdict::Degraded);
        assert!(detail.starts_with(&format!("{sent}, 2 events wait, the oldest for 1h")), "{detail}");
        put(2, 3, 4, 1);
        let lost = "lost: 3 records rejected, 4 events removed by retention, and what was not sent when the journal began anew (1)";
        assert_eq!(told(), (Verdict::Degraded, format!("{sent}, 0 events wait; {lost}")));
    }
}
