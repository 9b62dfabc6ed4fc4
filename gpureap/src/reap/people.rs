//! Who a process is, from /proc, at the moment of asking.

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use rustix::{
    io::Errno,
    process::{Pid, test_kill_process},
};

use super::{
    plan::{Subject, Via},
    report::{Identity, Parent, People, Presence},
    scope::Kinship,
};
use crate::{
    classify::{Classed, Classifier, Rules},
    config::Paths,
    model::{ProcKey, View},
    process::{
        Facts,
        cgroup::{self, Hierarchies, JobCgroup},
        place,
        stat::{Stat, Status},
        table::Table,
    },
};

/// Reads each process once: plan and report ask for the same ones.
#[derive(Debug)]
pub struct ProcPeople {
    root: PathBuf,
    classifier: Classifier,
    known: RefCell<BTreeMap<ProcKey, Option<Facts>>>,
    hierarchies: OnceCell<Hierarchies>,
}

impl ProcPeople {
    /// Classes them by the shipped rules.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::classed(&Paths { proc: root.into(), ..Paths::default() }, &Rules::default())
    }

    pub fn classed(paths: &Paths, rules: &Rules) -> Self {
        Self {
            root: paths.proc.clone(),
            classifier: Classifier::new(paths, rules),
            known: RefCell::default(),
            hierarchies: OnceCell::new(),
        }
    }

    fn facts(&self, key: ProcKey) -> Option<Facts> {
        let read = || Facts::read(&self.root, key.tgid, key.start_ns);
        self.known.borrow_mut().entry(key).or_insert_with(read).clone()
    }

    fn hierarchies(&self) -> &Hierarchies {
        self.hierarchies.get_or_init(|| Hierarchies::read(&self.root))
    }

    fn subject_of(&self, facts: &Facts) -> Subject {
        let Classed { class, rule: class_rule } = self.classifier.class(facts);
        Subject { class, class_rule, session: facts.session, kernel_thread: facts.is_kernel_thread }
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        Stat::read(&self.root.join(pid.to_string()))
    }

    /// What the plan must know of the holders. A process that is gone is left out: it is not signalled anyway.
    pub fn subjects(&self, view: &View) -> BTreeMap<ProcKey, Subject> {
        let subject = |key: ProcKey| Some((key, self.subject_of(&self.facts(key)?)));
        view.holders.iter().filter_map(|holder| subject(holder.key)).collect()
    }

    /// The parent, its parent, and so on.
    pub fn ancestors(&self, pid: u32) -> BTreeSet<u32> {
        let mut ancestors = BTreeSet::new();
        let parent = |pid| self.stat(pid).map(|stat| stat.ppid);
        let mut next = parent(pid);
        while let Some(pid) = next.filter(|pid| *pid > 0 && ancestors.insert(*pid)) {
            next = parent(pid);
        }
        ancestors
    }

    /// 0 where it is not known.
    pub fn session(&self, pid: u32) -> u32 {
        self.stat(pid).map_or(0, |stat| stat.session)
    }
}

impl People for ProcPeople {
    fn service(&self, key: ProcKey) -> Option<String> {
        let cgroup = self.facts(key)?.cgroup?;
        place::system_unit(&cgroup).filter(|unit| unit.ends_with(".service")).map(str::to_owned)
    }

    fn identity(&self, key: ProcKey) -> Identity {
        let unknown = Identity { pid: key.tgid, start_ns: key.start_ns, ..Identity::default() };
        let Some(facts) = self.facts(key) else { return unknown };
        let parent = self.stat(facts.ppid).map(|parent| String::from_utf8_lossy(&parent.comm).into_owned());
        Identity {
            parent: Some(Parent { pid: facts.ppid, comm: parent.unwrap_or_default() }),
            comm: facts.comm,
            argv: facts.argv,
            uid: facts.uid,
            user: facts.user,
            unit: facts.place.unit,
            container: facts.place.container,
            ..unknown
        }
    }

    fn presence(&self, pid: u32) -> Presence {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Presence::Absent };
        // The kernel knows every process, where /proc may be mounted to hide those of others.
        if test_kill_process(number) == Err(Errno::SRCH) {
            return Presence::Absent;
        }
        let Some(status) = Status::read(&self.root.join(pid.to_string())) else { return Presence::Hidden };
        status.tgid.filter(|process| *process != pid).map_or(Presence::Here, Presence::ThreadOf)
    }
}

impl Kinship for ProcPeople {
    fn table(&self) -> Table {
        Table::read(&self.root)
    }

    fn job_cgroup(&self, pid: u32) -> Result<JobCgroup, String> {
        self.hierarchies().job(&self.root, pid)
    }

    fn members(&self, cgroup: &JobCgroup) -> BTreeSet<u32> {
        cgroup.members()
    }

    fn subject(&self, pid: u32) -> Option<(ProcKey, Subject)> {
        let facts = Facts::read_any(&self.root, pid)?;
        let key = ProcKey::new(pid, facts.start_ns);
        let subject = self.subject_of(&facts);
        self.known.borrow_mut().entry(key).or_insert(Some(facts));
        Some((key, subject))
    }

    fn belongs(&self, pid: u32, via: &Via) -> bool {
        match via {
            Via::Device => true,
            Via::Cgroup(dir) => self.hierarchies().is_in(&self.root, pid, dir),
            Via::Tree(root) => {
                let is_below = || pid == root.tgid || self.ancestors(pid).contains(&root.tgid);
                is_below() && self.stat(root.tgid).is_some_and(|stat| stat.started_at(root.start_ns))
            }
        }
    }

    fn can_kill(&self, cgroup: &JobCgroup) -> bool {
        cgroup::can_kill(&cgroup.dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let people = ProcPeople::new("/proc");
        let pid = std::process::id();
        let start_ns = Facts::read_any("/proc".as_ref(), pid).unwrap().start_ns;
        let identity = people.identity(ProcKey::new(pid, start_ns));
        assert!(!identity.comm.is_empty() && !identity.argv.is_empty());
        assert_eq!(identity.uid, Some(rustix::process::geteuid().as_raw()));
        let parent = identity.parent.unwrap().pid;
        assert!(people.ancestors(pid).contains(&parent));
        assert_eq!(people.ancestors(u32::MAX), BTreeSet::new());
        assert_eq!(people.presence(pid), Presence::Here);
        assert_eq!(people.presence(u32::MAX), Presence::Absent);
        // The highest that a kernel can be set to give.
        assert_eq!(people.presence((1 << 22) + 1), Presence::Absent);
        let thread = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            ProcPeople::new("/proc").presence(tid)
        });
        assert_eq!(thread.join().unwrap(), Presence::ThreadOf(pid));
        assert_eq!(ProcPeople::new("/nonexistent").presence(pid), Presence::Hidden);
        let other = people.identity(ProcKey::new(pid, start_ns + 1_000_000_000));
        assert_eq!(other, Identity { pid, start_ns: start_ns + 1_000_000_000, ..Identity::default() });
    }
}
