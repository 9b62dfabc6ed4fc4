//! Running the actor and reading what it says.
use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
};

use serde_json::Value;
use tempfile::TempDir;

use super::{PATIENCE, proc::living, program, settle};
use crate::actor::{
    sys::{self, Pid},
    truth::{self, Truth},
};

/// One line of the actor.
#[derive(Debug)]
pub enum Said {
    Step { step: String, devices: BTreeMap<String, Truth> },
    Ready(Value),
    Pause(Value),
    Skip(String),
    Done,
}

/// A running actor; its whole session dies with this, and holds nothing any more afterwards.
pub struct Actor {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    _place: TempDir,
}

impl Actor {
    fn start(arguments: &[&str]) -> Self {
        let place = tempfile::tempdir().expect("a directory");
        let mut child = Command::new(program("GPUREAP_ACTOR", "gpureap-actor"))
            .args(arguments)
            .env("TMPDIR", place.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the actor");
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().expect("its output"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { name: arguments.join(" "), child, stdin, lines, _place: place }
    }

    /// An operation, before its first step.
    pub fn operation(name: &str, dev: &str) -> Self {
        Self::start(&["ops", name, dev])
    }

    fn scenario(kind: &str, dev: &str, rest: &[&str]) -> Self {
        Self::start(&[&["hold", kind, dev], rest].concat())
    }

    /// The session that every process of this actor is in.
    pub fn session(&self) -> Pid {
        self.child.id() as Pid
    }

    /// The next line.
    pub fn said(&mut self) -> Said {
        let Self { name, lines, .. } = self;
        let line = match lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("actor {name}: silent for {PATIENCE:?}"),
            Err(RecvTimeoutError::Disconnected) => panic!("actor {name}: ended without a last word"),
        };
        let value: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("actor {name}: {error}: {line}"));
        if let Some(step) = value["step"].as_str() {
            return Said::Step { step: step.to_owned(), devices: truth::parse(&value["devices"]) };
        }
        if let Some(reason) = value["skip"].as_str() {
            return Said::Skip(reason.to_owned());
        }
        match &value {
            value if value["done"] == true => Said::Done,
            value if value["ready"] == true => Said::Ready(value.clone()),
            value if value["pause"].is_u64() => Said::Pause(value.clone()),
            _ => panic!("actor {name}: {line}"),
        }
    }

    /// Lets the actor take its next step.
    pub fn go(&mut self) {
        let stdin = self.stdin.as_mut().expect("open until the end");
        stdin
            .write_all(b"x")
            .and_then(|()| stdin.flush())
            .unwrap_or_else(|error| panic!("actor {}: {error}", self.name));
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        drop(self.stdin.take());
        sys::kill_group(self.session());
        let killed = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = killed {
            eprintln!("actor {}: {error}", self.name);
        }
        let session = self.session();
        let ended = settle(PATIENCE / 4, || Some(living(session)).filter(|left| !left.is_empty()));
        if let Err(left) = ended {
            eprintln!("actor {}: {left:?} do not end", self.name);
        }
    }
}

/// A scenario that is ready, and what is true in it.
pub struct Scene {
    pub actor: Actor,
    pub truth: BTreeMap<String, Truth>,
    pub fields: Value,
}

impl Scene {
    /// Starts a scenario; `Err` with the reason where the kernel lacks something.
    pub fn try_start(kind: &str, dev: &str, rest: &[&str]) -> Result<Self, String> {
        let mut actor = Actor::scenario(kind, dev, rest);
        match actor.said() {
            Said::Ready(fields) | Said::Pause(fields) => {
                Ok(Self { actor, truth: truth::parse(&fields["devices"]), fields })
            }
            Said::Skip(reason) => Err(reason),
            other => panic!("{kind}: {other:?}"),
        }
    }

    pub fn start(kind: &str, dev: &str, rest: &[&str]) -> Self {
        Self::try_start(kind, dev, rest).unwrap_or_else(|reason| panic!("scenario {kind}: {reason}"))
    }

    /// The process the scenario is about.
    pub fn pid(&self) -> Pid {
        self.number("pid")
    }

    pub fn number(&self, field: &str) -> Pid {
        self.fields[field].as_i64().unwrap_or_else(|| panic!("{field} in {}", self.fields)) as Pid
    }

    pub fn numbers(&self, field: &str) -> Vec<Pid> {
        let list = self.fields[field].as_array().unwrap_or_else(|| panic!("{field} in {}", self.fields));
        list.iter().map(|value| value.as_i64().expect("a number") as Pid).collect()
    }

    /// Lets a `churn` go on; call [`Scene::pause`] for its next truth.
    pub fn resume(&mut self) {
        self.actor.go();
    }

    /// Waits until a `churn` stands still.
    pub fn pause(&mut self) {
        match self.actor.said() {
            Said::Pause(fields) => {
                self.truth = truth::parse(&fields["devices"]);
                self.fields = fields;
            }
            other => panic!("a pause, not {other:?}"),
        }
    }
}
