//! Every process of the host with its parent: for the tree that a job makes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::stat::Stat;
use crate::model::ProcKey;

/// One process, as far as its place in a tree goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kin {
    /// The start in whole ticks.
    pub key: ProcKey,
    pub ppid: u32,
    /// It leads a session that has a terminal: a shell that somebody types into.
    pub leads_terminal: bool,
    pub kernel_thread: bool,
}

/// By pid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table(pub BTreeMap<u32, Kin>);

impl Table {
    pub fn read(proc_root: &Path) -> Self {
        let kin = |entry: fs::DirEntry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, kin(&Stat::read(&entry.path())?)))
        };
        Self(fs::read_dir(proc_root).into_iter().flatten().flatten().filter_map(kin).collect())
    }

    /// The highest ancestor below the first one that `stops`, or the process itself.
    pub fn root_of(&self, pid: u32, stops: &dyn Fn(&Kin) -> bool) -> Option<&Kin> {
        let mut root = self.0.get(&pid)?;
        let mut seen = BTreeSet::from([pid]);
        while let Some(parent) = self.0.get(&root.ppid).filter(|parent| seen.insert(parent.key.tgid)) {
            if parent.key.tgid <= 1 || parent.kernel_thread || parent.leads_terminal || stops(parent) {
                break;
            }
            root = parent;
        }
        Some(root)
    }

    /// A process and all below it.
    pub fn below(&self, root: u32) -> BTreeSet<u32> {
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for kin in self.0.values() {
            children.entry(kin.ppid).or_default().push(kin.key.tgid);
        }
        let mut found = BTreeSet::new();
        let mut next = vec![root];
        while let Some(pid) = next.pop() {
            if self.0.contains_key(&pid) && found.insert(pid) {
                next.extend(children.get(&pid).into_iter().flatten());
            }
        }
        found
    }
}

fn kin(stat: &Stat) -> Kin {
    Kin {
        key: ProcKey::new(stat.pid, stat.start_ns()),
        ppid: stat.ppid,
        leads_terminal: stat.terminal && stat.session == stat.pid,
        kernel_thread: stat.kernel_thread,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[(u32, u32, bool)]) -> Table {
        let kin = |&(pid, ppid, leads_terminal): &(u32, u32, bool)| {
            (pid, Kin { key: ProcKey::new(pid, 0), ppid, leads_terminal, kernel_thread: false })
        };
        Table(rows.iter().map(kin).collect())
    }

    #[test]
    fn a_tree_ends_below_what_is_not_the_job() {
        // systemd, sshd, a login shell, mpirun, orted, two ranks; a batch shell under a scheduler.
        let host = table(&[
            (1, 0, false),
            (10, 1, false),
            (11, 10, true),
            (12, 11, false),
            (13, 12, false),
            (14, 13, false),
            (15, 13, false),
            (20, 1, false),
            (21, 20, false),
            (22, 21, false),
        ]);
        let stops = |kin: &Kin| [10, 20].contains(&kin.key.tgid);
        let root = |pid| host.root_of(pid, &stops).map(|kin| kin.key.tgid);
        for (pid, expected) in
            [(14, Some(12)), (12, Some(12)), (22, Some(21)), (11, Some(11)), (1, Some(1)), (99, None)]
        {
            assert_eq!(root(pid), expected, "{pid}");
        }
        assert_eq!(host.below(12), [12, 13, 14, 15].into());
        assert_eq!(host.below(99), [].into());
        // A circle, as a torn reading may show, ends too.
        let circle = table(&[(5, 6, false), (6, 5, false)]);
        assert_eq!(circle.root_of(5, &|_| false).map(|kin| kin.key.tgid), Some(6));
        assert_eq!(circle.below(5), [5, 6].into());
    }

    #[test]
    fn this_process_is_below_its_parent() {
        let host = Table::read(Path::new("/proc"));
        let own = &host.0[&std::process::id()];
        assert!(host.below(own.ppid).contains(&std::process::id()));
        assert!(!own.kernel_thread);
    }
}
