//! Kernel times are nanoseconds of `CLOCK_BOOTTIME`; people read wall-clock time.

use rustix::time::{ClockId, Timespec, clock_gettime};

fn ns(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

pub fn boottime_ns() -> u64 {
    ns(clock_gettime(ClockId::Boottime)).max(0) as u64
}

/// Wall clock minus boottime, now. It moves when the wall clock is set.
pub fn wall_offset_ns() -> i64 {
    ns(clock_gettime(ClockId::Realtime)) - ns(clock_gettime(ClockId::Boottime))
}
