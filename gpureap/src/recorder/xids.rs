//! An Xid is told twice where the driver has a tracepoint: there without the process (580.159.04), in the kernel's log with
//! it. The log's counts; what the log does not tell in time is taken from the tracepoint. Pure.

use crate::{clock::NANOS, history::event::Xid};

/// How far apart the two may be read.
const APART_NS: u64 = 2 * NANOS;

/// What was told by one of the two and waits for the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Xids {
    traced: Vec<(u64, Xid)>,
    logged: Vec<(u64, Xid)>,
}

fn same(one: &Xid, other: &Xid) -> bool {
    one.bdf == other.bdf && one.xid == other.xid
}

/// Takes the one that is meant by `xid`, if it is there.
fn take(list: &mut Vec<(u64, Xid)>, at: u64, xid: &Xid) -> Option<(u64, Xid)> {
    let position = list.iter().position(|(then, other)| at.abs_diff(*then) <= APART_NS && same(other, xid))?;
    Some(list.remove(position))
}

impl Xids {
    /// From the log: told at once. `traces`: whether its other half is to come.
    pub(super) fn logged(&mut self, at: u64, xid: &Xid, traces: bool) {
        if take(&mut self.traced, at, xid).is_none() && traces {
            self.logged.push((at, xid.clone()));
        }
    }

    /// From the tracepoint: waits, unless the log has told it already.
    pub(super) fn traced(&mut self, at: u64, xid: Xid) {
        if take(&mut self.logged, at, &xid).is_none() {
            self.traced.push((at, xid));
        }
    }

    /// Those of which the log has said nothing by now.
    pub(super) fn overdue(&mut self, now: u64) -> Vec<(u64, Xid)> {
        self.logged.retain(|(at, _)| now.saturating_sub(*at) <= APART_NS);
        let (late, rest) =
            std::mem::take(&mut self.traced).into_iter().partition(|(at, _)| now.saturating_sub(*at) > APART_NS);
        self.traced = rest;
        late
    }

    pub(super) fn is_empty(&self) -> bool {
        self.traced.is_empty() && self.logged.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xid(number: u32, pid: Option<u32>) -> Xid {
        let (bdf, message) = ("0000:00:06.0".to_owned(), String::new());
        Xid { bdf, node: None, xid: number, pid, name: None, message, source: String::new() }
    }

    #[test]
    fn each_is_told_once() {
        let mut xids = Xids::default();
        // The log first, the tracepoint first, both within the time.
        xids.logged(NANOS, &xid(31, Some(7)), true);
        xids.traced(NANOS + 5, xid(31, None));
        xids.traced(2 * NANOS, xid(45, None));
        xids.logged(2 * NANOS + 5, &xid(45, None), true);
        assert!(xids.is_empty());
        assert_eq!(xids.overdue(60 * NANOS), []);
        // Two of a kind are two.
        xids.traced(NANOS, xid(31, None));
        xids.traced(NANOS, xid(31, None));
        xids.logged(NANOS, &xid(31, Some(7)), true);
        assert_eq!(xids.overdue(60 * NANOS).len(), 1);
        // What the log did not tell in time, and nothing before that time.
        xids.traced(NANOS, xid(79, None));
        assert_eq!(xids.overdue(2 * NANOS), []);
        assert_eq!(xids.overdue(4 * NANOS), [(NANOS, xid(79, None))]);
        // Without a tracepoint nothing waits.
        xids.logged(NANOS, &xid(31, None), false);
        assert!(xids.is_empty());
    }
}
