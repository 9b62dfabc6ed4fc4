//! Which host and boot this is, and the way from boottime to wall-clock time.

use std::{fs, path::Path};

use jiff::{SignedDuration, Timestamp};

use crate::clock::{self, boottime_ns, wall_offset_ns};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub boot_id: String,
    /// One instant on both clocks.
    pub now: Timestamp,
    pub boottime_ns: u64,
}

impl Host {
    pub fn read(proc: &Path) -> Self {
        let boottime_ns = boottime_ns();
        let now = clock::wall(wall_offset_ns(), boottime_ns);
        let boot_id = fs::read_to_string(proc.join("sys/kernel/random/boot_id")).unwrap_or_default();
        Self {
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: boot_id.trim().to_owned(),
            now,
            boottime_ns,
        }
    }

    /// Wall-clock time of a boottime. A clock that was set meanwhile moves past times with it.
    pub fn wall(&self, boottime_ns: u64) -> Timestamp {
        let ago = self.boottime_ns as i64 - boottime_ns as i64;
        // To the millisecond: the two clocks are not read at the same instant.
        let time = self.now - SignedDuration::from_nanos(ago);
        time.round(jiff::Unit::Millisecond).unwrap_or(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_boottime_to_wall_clock() {
        let now = "2026-11-30T12:00:00Z".parse().unwrap();
        let host = Host { name: String::new(), boot_id: String::new(), now, boottime_ns: 100_000_000_000 };
        assert_eq!(host.wall(97_500_400_000).to_string(), "2026-11-30T11:59:57.5Z");
        assert_eq!(host.wall(100_000_000_000), now);
    }
}
