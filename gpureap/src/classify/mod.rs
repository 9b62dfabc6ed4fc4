//! What a process is to its operator: part of the system, a monitor, or a job. Decided by rules, the first that fits.
//!
//! Whoever runs a process chooses its name, its arguments and, in a namespace of his own, the path of its program. A rule
//! that protects therefore rests on what only root can arrange; see docs/classes.md.

mod program;
mod rules;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

pub use program::Trust;
pub use rules::{Rule, Rules};
use serde::{Deserialize, Serialize};

use crate::{
    config::Paths,
    process::{ContainerNames, Facts, Place, Runtimes, place},
};

/// The rule of those that none fits.
pub const DEFAULT_RULE: &str = "default";

/// What a process is to its operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    #[default]
    Job,
    Monitor,
    System,
}

impl Class {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Job => "job",
            Self::Monitor => "monitor",
            Self::System => "system",
        }
    }
}

/// What rules look at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassInput {
    pub comm: String,
    /// Effective, as the host numbers it.
    pub uid: Option<u32>,
    pub user: Option<String>,
    /// The program as the kernel names it, which is within the process's own root.
    pub exe: Option<PathBuf>,
    /// Whether that name can be believed.
    pub trust: Trust,
    /// The innermost unit, whoever named it.
    pub unit: Option<String>,
    /// The unit of the host's own systemd, where the cgroup proves it.
    pub system_unit: Option<String>,
    /// It is in a container, as far as cgroups tell.
    pub contained: bool,
    /// Of the container that the host's runtime made.
    pub container: ContainerNames,
}

/// A class and the name of the rule that gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classed {
    pub class: Class,
    pub rule: String,
}

/// The first rule that fits.
pub fn classify(input: &ClassInput, rules: &Rules) -> Classed {
    rules.iter().find(|rule| rule.fits(input)).map_or_else(
        || Classed { class: Class::Job, rule: DEFAULT_RULE.to_owned() },
        |rule| Classed { class: rule.class, rule: rule.name.clone() },
    )
}

/// Classes processes, reading of each no more than the rules ask for.
#[derive(Debug)]
pub struct Classifier {
    rules: Rules,
    proc: PathBuf,
    /// The roots in which a path of the host may be looked up: the host's as it was configured, and pid 1's.
    roots: [PathBuf; 2],
    runtimes: Runtimes,
    /// Whether a program is in any rule: most are in none, and many processes run the same one.
    named: RefCell<BTreeMap<PathBuf, bool>>,
}

impl Classifier {
    pub fn new(paths: &Paths, rules: &Rules) -> Self {
        let Paths { proc, host, .. } = paths;
        let roots = [host.clone(), proc.join("1/root")];
        Self {
            rules: rules.clone(),
            proc: proc.clone(),
            runtimes: Runtimes::new(host.clone()),
            roots,
            named: RefCell::default(),
        }
    }

    pub fn class(&self, facts: &Facts) -> Classed {
        classify(&self.input(facts), &self.rules)
    }

    /// What is known of a container by its runtime, and of its pod by the kubelet; each is read once.
    pub fn names(&self, place: &Place) -> ContainerNames {
        self.runtimes.names_in_pod(place.container.as_deref(), place.pod.as_deref())
    }

    fn is_named(&self, exe: &Path) -> bool {
        let mut named = self.named.borrow_mut();
        if let Some(named) = named.get(exe) {
            return *named;
        }
        let is_named = self.rules.iter().any(|rule| rule.names_program(exe));
        named.insert(exe.to_owned(), is_named);
        is_named
    }

    fn input(&self, facts: &Facts) -> ClassInput {
        let Facts { tgid, comm, uid, user, exe, cgroup, place, .. } = facts;
        let cgroup = cgroup.as_deref().unwrap_or_default();
        let container = place::host_container(cgroup);
        let contained = place.container.is_some() || place.pod.is_some();
        let trust = exe.as_deref().filter(|exe| self.is_named(exe)).map_or(Trust::None, |exe| {
            let host = self.roots.iter().any(|root| program::is_hosts(&self.proc, *tgid, exe, root));
            match (host, contained) {
                (true, false) => Trust::Host,
                (_, true) if program::is_containers(&self.proc, *tgid, exe) => Trust::Container,
                _ => Trust::None,
            }
        });
        ClassInput {
            comm: comm.clone(),
            uid: *uid,
            user: user.clone(),
            exe: exe.clone(),
            trust,
            unit: place.unit.clone(),
            system_unit: place::system_unit(cgroup).map(str::to_owned),
            contained,
            container: container.map(|id| self.runtimes.names(&id)).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests;
