//! What the machines said, set by set: the contents of docs/measurements/kernels.json.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::vm::{Finished, SETS};

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Results {
    pub(super) command: String,
    pub(super) runs: Vec<Run>,
}

/// One boot of a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) package: String,
    /// Words on the kernel's command line.
    pub(super) append: Vec<String>,
    pub(super) time: String,
    pub(super) commit: String,
    /// None if it did not come so far.
    pub(super) kernel: Option<Kernel>,
    pub(super) sets: Vec<Set>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kernel {
    pub(super) release: String,
    pub(super) version: String,
    /// As the scheduler tells it, the one in force in brackets; kernels whose preemption is fixed tell nothing.
    pub(super) preemption: Option<String>,
}

/// One probe set on one kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Set {
    pub(super) name: String,
    pub(super) answer: Answer,
    pub(super) operations: Vec<Operation>,
    /// None if the operations did not come to their end.
    pub(super) losses: Option<Losses>,
    /// None if that test did not come to its end.
    pub(super) reading: Option<Reading>,
    pub(super) failed_tests: u32,
    pub(super) seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    Attached(Vec<Program>),
    Refused(Refusal),
    /// No test has said how it went, because of this.
    NotRun(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refusal {
    /// Of the daemon
    pub(super) code: i32,
    pub(super) reason: String,
    /// The source that `holders` used all the same
    pub(super) holders_by: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) hook: String,
    pub(super) attached: bool,
    pub(super) verified: Option<u32>,
    pub(super) translated: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Operation {
    pub(super) subject: String,
    pub(super) name: String,
    pub(super) steps: u32,
    pub(super) differences: Vec<String>,
    pub(super) skipped: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Losses {
    pub(super) lost_events: u64,
    /// Programs that the kernel skipped, and how often.
    pub(super) skipped: BTreeMap<String, u64>,
}

/// Lost events of processes that open and close as fast as they can.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reading {
    /// While nobody read a map
    pub(super) alone: u64,
    /// While two threads did nothing else
    pub(super) read: u64,
}

/// A finding as a test says it (`record` in `tests/src/harness/mod.rs`).
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum Finding {
    Kernel(Kernel),
    Attached { programs: Vec<Program> },
    Refused(Refusal),
    Operation(Operation),
    Losses(Losses),
    Reading(Reading),
}

impl Run {
    /// `about` names the boot; the rest is in what the machine has said.
    pub(super) fn new(about: Self, finished: Finished) -> Result<Self> {
        let Finished { rows, records, problem } = finished;
        let why = problem.unwrap_or_else(|| "the tests ended without a word on it".to_owned());
        let mut run = Self { kernel: None, sets: SETS.iter().map(|name| Set::silent(name, &why)).collect(), ..about };
        for row in rows {
            if let Some(set) = run.sets.iter_mut().find(|set| set.name == row.backend) {
                set.failed_tests += row.counts.failed;
                set.seconds += row.seconds;
            }
        }
        for (backend, text) in records {
            let finding: Finding = serde_json::from_str(&text).with_context(|| format!("a test said {text}"))?;
            let set = run.sets.iter_mut().find(|set| set.name == backend);
            let set = set.with_context(|| format!("a test spoke of the probe set {backend}"))?;
            match finding {
                Finding::Kernel(kernel) => run.kernel = Some(kernel),
                Finding::Attached { programs } => set.answer = Answer::Attached(programs),
                Finding::Refused(refusal) => set.answer = Answer::Refused(refusal),
                Finding::Operation(operation) => set.operations.push(operation),
                Finding::Losses(losses) => set.losses = Some(losses),
                Finding::Reading(reading) => set.reading = Some(reading),
            }
        }
        Ok(run)
    }
}

impl Set {
    fn silent(name: &str, why: &str) -> Self {
        Self {
            name: name.to_owned(),
            answer: Answer::NotRun(why.to_owned()),
            operations: Vec::new(),
            losses: None,
            reading: None,
            failed_tests: 0,
            seconds: 0.0,
        }
    }
}

impl Kernel {
    /// The preemption in force.
    pub(super) fn preemption(&self) -> &str {
        if self.version.contains("PREEMPT_RT") {
            return "real time";
        }
        let told = self.preemption.as_deref().unwrap_or_default();
        told.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map_or("fixed when built", |(word, _)| word)
    }
}

impl Results {
    /// Puts a run in the place of the one with its name.
    pub(super) fn put(&mut self, run: Run) {
        match self.runs.iter_mut().find(|old| old.name == run.name) {
            Some(old) => *old = run,
            None => self.runs.push(run),
        }
    }
}
