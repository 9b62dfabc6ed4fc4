//! What the journal is told beside what happens: that it has a gap, how the clock goes, that somebody holds.

use super::{
    CLOCK_MOVED, Change, Event, Instant, NANOS, Ordering, Status, TELL_APART, What, Work, boottime_ns, wall,
    wall_offset_ns,
};
use crate::clock::CLOCK_SET;

impl Work {
    /// Whether it lacks something, and whether it can be written.
    pub(super) fn look_at_journal(&mut self) {
        let mut status = self.keep.status();
        if self.told_at.is_some_and(|at| at.elapsed() < TELL_APART) {
            // Later: a disk that is nearly full fails again and again.
            status.gaps = self.kept.gaps;
        }
        let before = std::mem::replace(&mut self.kept, status);
        let Status { restarts, gaps, .. } = &self.kept;
        if *restarts != before.restarts || *gaps != before.gaps {
            let (boot_ns, is_new) = (boottime_ns(), *restarts != before.restarts);
            if *gaps != before.gaps {
                tracing::warn!("the journal can be written; it is told anew what is held");
            }
            if is_new {
                let event = Event { time: wall(boot_ns), boot_ns, what: What::Start(self.start(true)) };
                for change in self.state.apply(&event) {
                    self.keep.keep(change);
                }
            }
            self.keep.keep(self.state.now(boot_ns));
            self.keep.keep(Change::Clock { wall_offset_ns: self.wall_offset_ns });
            self.told_at = Some(Instant::now());
            // What fails from here on is news.
            self.journal_fails = None;
            return;
        }
        let fails = self.kept.last_error.is_some() || self.kept.dropped != before.dropped;
        if !fails {
            self.journal_fails = None;
            return;
        }
        // Records may be dropped for a while before the reason is known: each reason is told.
        let why = self.kept.last_error.as_deref().unwrap_or("its disk is too slow");
        if self.journal_fails.as_deref() != Some(why) {
            tracing::warn!("the journal cannot be written: {why}");
            self.journal_fails = Some(why.to_owned());
        }
    }

    pub(super) fn follow_clock(&mut self) {
        let offset = wall_offset_ns();
        let moved = offset.saturating_sub(self.wall_offset_ns);
        if moved.unsigned_abs() < CLOCK_MOVED {
            return;
        }
        if moved.unsigned_abs() >= CLOCK_SET {
            let (seconds, way) =
                (moved.unsigned_abs().saturating_add(NANOS / 2) / NANOS, if moved < 0 { "back" } else { "forward" });
            tracing::warn!(
                "the wall clock was set {way} by {seconds} s: all times since boot are told by it as it is now"
            );
        }
        self.wall_offset_ns = offset;
        self.keep.keep(Change::Clock { wall_offset_ns: offset });
    }

    pub(super) fn heartbeat(&mut self) {
        self.follow_clock();
        self.count();
        let held = self.state.holders().next().is_some();
        self.held.store(held, Ordering::Relaxed);
        if held {
            self.keep.keep(Change::Heartbeat { boot_ns: boottime_ns() });
        }
    }
}
