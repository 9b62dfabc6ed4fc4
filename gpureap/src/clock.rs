//! Kernel times are nanoseconds of `CLOCK_BOOTTIME`; people read wall-clock time.

use std::time::Duration;

use jiff::Timestamp;
use rustix::time::{ClockId, Timespec, clock_gettime};

pub const NANOS: u64 = 1_000_000_000;

/// Nanoseconds: more than a wall clock drifts between two signs of life, so somebody has set it.
pub const CLOCK_SET: u64 = NANOS;

/// A time that somebody gave, which may be longer than any that this clock tells.
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn ns(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

pub fn boottime_ns() -> u64 {
    ns(clock_gettime(ClockId::Boottime)).max(0) as u64
}

/// Wall-clock time of a boottime, by the offset between the two.
pub fn wall(wall_offset_ns: i64, boot_ns: u64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(boot_ns) + i128::from(wall_offset_ns)).unwrap_or(Timestamp::MAX)
}

/// Boottime minus `CLOCK_MONOTONIC`, by which the kernel's log goes: the time asleep.
pub fn asleep_ns() -> i64 {
    ns(clock_gettime(ClockId::Boottime)) - ns(clock_gettime(ClockId::Monotonic))
}

/// Wall clock minus boottime, now. It moves when the wall clock is set. Of several readings the one that took least time
/// counts: a task may be preempted between the two clocks.
pub fn wall_offset_ns() -> i64 {
    let reading = || {
        let before = ns(clock_gettime(ClockId::Boottime));
        let wall = ns(clock_gettime(ClockId::Realtime));
        let took = ns(clock_gettime(ClockId::Boottime)) - before;
        (took, wall - before - took / 2)
    };
    (0..5).map(|_| reading()).min().map_or(0, |(_, offset)| offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn years_after_the_boot() {
        let offset = 1_700_000_000_000_000_000;
        for (boot_ns, expected) in [
            (0, "2023-11-14T22:13:20Z"),
            // 32 bits of nanoseconds, of milliseconds and of ticks of 10 ms.
            (1 << 32, "2023-11-14T22:13:24.294967296Z"),
            ((1 << 32) * 1_000_000, "2024-01-03T15:16:07.296Z"),
            ((1 << 32) * 10_000_000, "2025-03-26T00:41:12.96Z"),
        ] {
            assert_eq!(wall(offset, boot_ns).to_string(), expected);
        }
        assert_eq!(wall(offset, u64::MAX).to_string(), "2608-06-04T21:47:53.709551615Z");
        assert_eq!(nanos(Duration::MAX), u64::MAX);
    }
}
