//! Ancestors: from the kernel's memory where it has them, else from /proc as long as they live.

use std::{collections::BTreeSet, path::Path};

use super::report::{AncestorReport, ExitReport};
use crate::{
    model::{Ancestor, LineageSource, ProcKey},
    process::Facts,
};

/// Longer chains are a mistake or an attack.
const MAX_DEPTH: usize = 64;

/// From the parent upwards. Ends before pid 1, or where nobody knows further.
pub(super) fn chain(
    key: ProcKey,
    source: &dyn LineageSource,
    proc: &Path,
    facts: Option<&Facts>,
) -> Vec<AncestorReport> {
    let mut list = Vec::new();
    let mut seen = BTreeSet::from([key]);
    let mut next = parent(source.lookup(key).as_ref(), facts, proc);
    while let Some(key) = next {
        if key.tgid <= 1 || list.len() == MAX_DEPTH || !seen.insert(key) {
            break;
        }
        let known = source.lookup(key);
        // One that is known to be dead need not be looked for.
        let dead = known.as_ref().is_some_and(|ancestor| ancestor.exit.is_some());
        let alive = if dead { None } else { Facts::read(proc, key.tgid, key.start_ns) };
        next = parent(known.as_ref(), alive.as_ref(), proc);
        match (known, alive) {
            (None, None) => break,
            (known, alive) => list.push(report(key, known.as_ref(), alive)),
        }
    }
    list
}

/// The parent at fork if that was recorded, else the present one.
fn parent(known: Option<&Ancestor>, alive: Option<&Facts>, proc: &Path) -> Option<ProcKey> {
    known.and_then(|ancestor| ancestor.parent).or_else(|| {
        let ppid = alive?.ppid;
        Facts::read_any(proc, ppid).map(|facts| ProcKey::new(ppid, facts.start_ns))
    })
}

fn report(key: ProcKey, known: Option<&Ancestor>, alive: Option<Facts>) -> AncestorReport {
    let Ancestor { key: _, parent: _, comm, argv, argv_cut, uid, cgroup_id: _, exit } =
        known.cloned().unwrap_or_default();
    let is_alive = alive.is_some();
    // What lives tells more than what was kept of it.
    let (comm, argv, argv_cut, uid) = match alive {
        Some(Facts { comm, argv: full, uid: now, .. }) if !full.is_empty() || known.is_none() => {
            (comm, full, false, now)
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
