//! Who a process is, from /proc, at the moment of asking.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use super::{
    plan::Subject,
    report::{Identity, Parent, People},
};
use crate::{
    model::{ProcKey, View},
    process::Facts,
};

#[derive(Clone, Debug)]
pub struct ProcPeople {
    root: PathBuf,
}

impl ProcPeople {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// What the plan must know of the holders. A process that is gone is left out: it is not signalled anyway.
    pub fn subjects(&self, view: &View) -> BTreeMap<ProcKey, Subject> {
        let subject = |key: ProcKey| {
            let facts = Facts::read(&self.root, key.tgid, key.start_ns)?;
            let Facts { session, is_kernel_thread: kernel_thread, .. } = facts;
            Some((key, Subject { session, kernel_thread, ..Subject::default() }))
        };
        view.holders.iter().filter_map(|holder| subject(holder.key)).collect()
    }

    /// The parent, its parent, and so on.
    pub fn ancestors(&self, pid: u32) -> BTreeSet<u32> {
        let mut ancestors = BTreeSet::new();
        let parent = |pid| Facts::read_any(&self.root, pid).map(|facts| facts.ppid);
        let mut next = parent(pid);
        while let Some(pid) = next.filter(|pid| *pid > 0 && ancestors.insert(*pid)) {
            next = parent(pid);
        }
        ancestors
    }
}

impl People for ProcPeople {
    fn identity(&self, key: ProcKey) -> Identity {
        let unknown = Identity { pid: key.tgid, start_ns: key.start_ns, ..Identity::default() };
        let Some(facts) = Facts::read(&self.root, key.tgid, key.start_ns) else { return unknown };
        let parent = Facts::read_any(&self.root, facts.ppid);
        Identity {
            parent: Some(Parent { pid: facts.ppid, comm: parent.map(|parent| parent.comm).unwrap_or_default() }),
            comm: facts.comm,
            argv: facts.argv,
            uid: facts.uid,
            user: facts.user,
            unit: facts.place.unit,
            container: facts.place.container,
            ..unknown
        }
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
        let other = people.identity(ProcKey::new(pid, start_ns + 1_000_000_000));
        assert_eq!(other, Identity { pid, start_ns: start_ns + 1_000_000_000, ..Identity::default() });
    }
}
