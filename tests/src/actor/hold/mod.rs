//! Scenarios: processes that hold devices in the ways that hide a holder from other tools.
//!
//! The director starts them and says what is true. It holds nothing itself, so that killing every holder does not
//! end the scenario. Every process polls the standard input it inherited and ends when that closes.
#![expect(clippy::unnecessary_wraps, reason = "all scenarios have one signature")]

use serde_json::{Map, Value, json};

use super::{
    child::Child,
    sys::{self, Fd, O_RDWR, Pid},
    truth::{Skip, Truth, devices, key, say},
};

mod churn;
mod family;
mod hidden;
mod single;

type Kind = (&'static str, fn(&Scene) -> Result<Report, Skip>);

const KINDS: [&[Kind]; 3] = [single::KINDS, hidden::KINDS, family::KINDS];

/// What a scenario is given.
struct Scene<'a> {
    dev: &'a str,
    device: String,
    arguments: &'a [&'a str],
}

impl Scene<'_> {
    fn open(&self, flags: i32) -> Fd {
        sys::open(self.dev, flags)
    }

    fn argument<T: std::str::FromStr>(&self, index: usize, name: &str) -> Result<T, Skip> {
        let text = self.arguments.get(index).ok_or_else(|| Skip(format!("the argument {name} is missing")))?;
        text.parse().map_err(|_| Skip(format!("{name}: cannot read {text}")))
    }

    fn report(&self, pid: Pid, truth: &Truth) -> Report {
        Report::new(pid, devices([(self.device.as_str(), truth)]))
    }

    /// A child that opens the device once, and what is then true.
    fn holder(&self, body: impl FnOnce(super::child::Cue)) -> Child {
        let child = Child::fork(|cue| {
            self.open(O_RDWR);
            body(cue);
        });
        child.done();
        child
    }
}

/// The `ready` line.
struct Report(Map<String, Value>);

impl Report {
    fn new(pid: Pid, devices: Value) -> Self {
        let mut map = Map::new();
        map.insert("ready".into(), json!(true));
        map.insert("pid".into(), json!(pid));
        map.insert("director".into(), json!(sys::pid()));
        map.insert("devices".into(), devices);
        Self(map)
    }

    fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.into(), value.into());
        self
    }
}

pub(super) fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.into_iter().flatten().map(|(name, _)| *name).chain(["churn"])
}

pub(super) fn run(kind: &str, rest: &[&str]) {
    sys::setsid();
    sys::limit(libc::RLIMIT_CORE, 0);
    let outcome = scene(rest).and_then(|scene| {
        if kind == "churn" {
            return churn::run(&scene);
        }
        let (_, start) =
            KINDS.into_iter().flatten().find(|(known, _)| *known == kind).ok_or_else(|| format!("no kind {kind}"))?;
        let Report(line) = start(&scene)?;
        sys::signal_ignore(libc::SIGCHLD);
        say(&Value::Object(line));
        Ok(())
    });
    if let Err(Skip(reason)) = outcome {
        say(&json!({"skip": reason}));
        return;
    }
    let mut byte = [0];
    while sys::read(0, &mut byte) > 0 {}
    sys::kill(0, sys::SIGKILL);
}

fn scene<'a>(rest: &'a [&'a str]) -> Result<Scene<'a>, Skip> {
    let (dev, arguments) = rest.split_first().ok_or("hold KIND DEV [ARGS]")?;
    let number = sys::device_number(dev).map_err(|error| Skip(format!("{dev}: {error}")))?;
    Ok(Scene { dev, device: key(number), arguments })
}

/// A directory for nodes of the scenario, removed with the scenario's last look at it.
fn place() -> Result<std::path::PathBuf, Skip> {
    Ok(tempfile::Builder::new().prefix("gpureap-actor-").tempdir()?.keep())
}

/// Sends a pid through a pipe to whoever reads the other end.
fn tell_pid(pipe: Fd, pid: Pid) {
    sys::write_all(pipe, &pid.to_ne_bytes());
}

fn hear_pid(pipe: Fd) -> Pid {
    let mut bytes = [0; 4];
    assert_eq!(sys::read(pipe, &mut bytes), 4, "a pid through the pipe");
    i32::from_ne_bytes(bytes)
}
