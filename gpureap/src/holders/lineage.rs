//! Ancestors: from the kernel's memory where it has them, else from /proc as long as they live.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    path::Path,
    rc::Rc,
};

use super::report::{AncestorReport, ExitReport};
use crate::{
    model::{Ancestor, LineageSource, ProcKey},
    process::Facts,
};

/// Longer chains are a mistake or an attack.
const MAX_DEPTH: usize = 64;

/// Processes by pid, each read once: the holders of one job have the same ancestors.
pub(super) struct Readings<'a> {
    pub(super) root: &'a Path,
    read: RefCell<HashMap<u32, Option<Rc<Facts>>>>,
}

impl<'a> Readings<'a> {
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, read: RefCell::default() }
    }

    /// Whoever has that pid.
    pub(super) fn any(&self, tgid: u32) -> Option<Rc<Facts>> {
        let read = || Facts::read_any(self.root, tgid).map(Rc::new);
        self.read.borrow_mut().entry(tgid).or_insert_with(read).clone()
    }

    /// `None` when it is gone.
    pub(super) fn of(&self, key: ProcKey) -> Option<Rc<Facts>> {
        self.any(key.tgid).filter(|facts| facts.started_at(key.start_ns))
    }
}

/// Ancestors by nearness.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) list: Vec<AncestorReport>,
    /// Somebody is missing, or may be, since the source has forgotten processes.
    pub(super) cut: bool,
}

/// From the parent upwards. Ends before pid 1, or where nobody knows further.
pub(super) fn chain(key: ProcKey, source: &dyn LineageSource, readings: &Readings<'_>, facts: Option<&Facts>) -> Chain {
    let Chain { mut list, mut cut } = Chain::default();
    let mut seen = BTreeSet::from([key]);
    // The present parent stands for the one at the fork where that one was forgotten.
    let is_cut = |known: Option<&Ancestor>| {
        known.map_or_else(|| source.forgotten().is_some_and(|count| count > 0), |known| known.renewed)
    };
    let own = source.lookup(key);
    cut |= is_cut(own.as_ref());
    let mut next = parent(own.as_ref(), facts, readings);
    while let Some(key) = next {
        if key.tgid <= 1 || list.len() == MAX_DEPTH || !seen.insert(key) {
            break;
        }
        let known = source.lookup(key);
        // One that is known to be dead need not be looked for.
        let dead = known.as_ref().is_some_and(|ancestor| ancestor.exit.is_some());
        let alive = if dead { None } else { readings.of(key) };
        next = parent(known.as_ref(), alive.as_deref(), readings);
        if known.is_none() && alive.is_none() {
            cut = true;
            break;
        }
        cut |= is_cut(known.as_ref());
        list.push(report(key, known.as_ref(), alive.as_deref()));
    }
    Chain { list, cut }
}

/// The parent at fork if that was recorded, else the present one.
fn parent(known: Option<&Ancestor>, alive: Option<&Facts>, readings: &Readings<'_>) -> Option<ProcKey> {
    known.and_then(|ancestor| ancestor.parent).or_else(|| {
        let ppid = alive?.ppid;
        readings.any(ppid).map(|facts| ProcKey::new(ppid, facts.start_ns))
    })
}

fn report(key: ProcKey, known: Option<&Ancestor>, alive: Option<&Facts>) -> AncestorReport {
    let Ancestor { key: _, parent: _, comm, argv, argv_cut, uid, cgroup_id: _, exit, renewed: _ } =
        known.cloned().unwrap_or_default();
    let is_alive = alive.is_some();
    // What lives tells more than what was kept of it.
    let (comm, argv, argv_cut, uid) = match alive {
        Some(Facts { comm, argv: full, uid: now, .. }) if !full.is_empty() || known.is_none() => {
            (comm.clone(), full.clone(), false, *now)
        }
        _ => (comm, argv, argv_cut, Some(uid)),
    };
    AncestorReport {
        pid: key.tgid,
        start_ns: key.start_ns,
        comm,
        argv,
        argv_cut,
        uid,
        alive: is_alive,
        exit: exit.map(|(_, status)| ExitReport::from_status(status)),
    }
}
