//! /proc/PID/stat and /proc/PID/status, from bytes: a process chooses its name, so the name may hold anything.

use std::{fs, path::Path};

/// `PF_KTHREAD`, include/linux/sched.h.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// `PF_EXITING`, include/linux/sched.h: the task will never run in user space again.
const EXITING: u64 = 0x4;

/// The fields of /proc/PID/stat that matter here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    pub pid: u32,
    /// Raw bytes, at most 15 for a process, more for some kernel threads.
    pub comm: Vec<u8>,
    pub state: char,
    pub ppid: u32,
    pub session: u32,
    /// It has a controlling terminal.
    pub terminal: bool,
    /// Processor time in user space and in the kernel, in clock ticks.
    pub user_ticks: u64,
    pub kernel_ticks: u64,
    pub threads: u32,
    /// Since boot, in clock ticks.
    pub start_ticks: u64,
    pub kernel_thread: bool,
    /// This task (not its other threads) is on its way out; a driver may still be releasing what it held.
    pub exiting: bool,
}

impl Stat {
    /// The name ends at the last `)`: what follows it is numbers only.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let open = bytes.iter().position(|byte| *byte == b'(')?;
        let close = bytes.iter().rposition(|byte| *byte == b')')?;
        let comm = bytes.get(open + 1..close)?.to_vec();
        let pid = std::str::from_utf8(&bytes[..open]).ok()?.trim().parse().ok()?;
        let rest = std::str::from_utf8(&bytes[close + 1..]).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let small = |index: usize| u32::try_from(number(index)?).ok();
        Some(Self {
            pid,
            comm,
            state: fields.first()?.chars().next()?,
            ppid: small(1)?,
            session: small(3).unwrap_or(0),
            terminal: number(4).is_some_and(|tty| tty != 0),
            user_ticks: number(11)?,
            kernel_ticks: number(12)?,
            threads: small(17)?,
            start_ticks: number(19)?,
            kernel_thread: number(6)? & KERNEL_THREAD != 0,
            exiting: number(6)? & EXITING != 0,
        })
    }

    /// Of the process or thread with that directory; `None` where there is none.
    pub fn read(dir: &Path) -> Option<Self> {
        Self::parse(&fs::read(dir.join("stat")).ok()?)
    }

    /// Whether this is the process that started at that boottime: the file has ticks, the kernel nanoseconds.
    pub fn started_at(&self, start_ns: u64) -> bool {
        self.start_ticks == start_ns / tick_ns()
    }

    /// The start as precisely as this file tells it.
    pub fn start_ns(&self) -> u64 {
        self.start_ticks.saturating_mul(tick_ns())
    }
}

/// Whether all threads of the process with that directory are on their way out; `None` where there is none.
pub fn all_exiting(dir: &Path) -> Option<bool> {
    let tasks = fs::read_dir(dir.join("task")).ok()?;
    Some(tasks.flatten().filter_map(|task| Stat::read(&task.path())).all(|stat| stat.exiting))
}

/// Whether a SIGKILL waits for the process with that directory, or for its main thread.
pub fn kill_pending(dir: &Path) -> bool {
    let status = fs::read(dir.join("status")).unwrap_or_default();
    let pending = |line: &str| {
        let mask = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    };
    let masks = String::from_utf8_lossy(&status).lines().filter_map(pending).fold(0, |all, mask| all | mask);
    masks & 1 << (libc::SIGKILL - 1) != 0
}

/// Whether two boottimes are the start of one process, one or both of them read here.
pub fn same_start(one_ns: u64, other_ns: u64) -> bool {
    one_ns / tick_ns() == other_ns / tick_ns()
}

/// Nanoseconds of a clock tick.
fn tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

/// The fields of /proc/PID/status that matter here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The process, where the file is a thread's.
    pub tgid: Option<u32>,
    /// Effective user, as ps shows it.
    pub uid: Option<u32>,
    /// The pid in each namespace, outermost first.
    pub nspids: Vec<u32>,
}

impl Status {
    /// Of the process or thread with that directory; `None` where it may not be read.
    pub fn read(dir: &Path) -> Option<Self> {
        fs::read(dir.join("status")).ok().map(|bytes| Self::parse(&bytes))
    }

    pub fn parse(bytes: &[u8]) -> Self {
        let mut status = Self::default();
        for line in bytes.split(|byte| *byte == b'\n') {
            let numbers = |prefix: &[u8]| {
                let rest = std::str::from_utf8(line.strip_prefix(prefix)?).ok()?;
                Some(rest.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect::<Vec<u32>>())
            };
            if let Some(tgids) = numbers(b"Tgid:") {
                status.tgid = tgids.first().copied();
            } else if let Some(uids) = numbers(b"Uid:") {
                status.uid = uids.get(1).copied();
            } else if let Some(pids) = numbers(b"NSpid:") {
                status.nspids = pids;
            }
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(comm: &[u8]) -> Vec<u8> {
        let mut line = b"498 (".to_vec();
        line.extend_from_slice(comm);
        line.extend_from_slice(
            b") S 494 410 411 0 -1 4194560 90274 0 319 0 473 65 0 0 20 0 18 0 2666 18364227584 15\n",
        );
        line
    }

    #[test]
    fn names_cannot_confuse_it() {
        let names: [&[u8]; 7] =
            [b"python3", b"", b")", b"a) R 1 1 1 (", b"a\nb", b"\xff\xfe", b") S 0 0 0 0 0 0 0 0 0 0 0"];
        for comm in names {
            let stat = Stat::parse(&line(comm)).unwrap();
            assert_eq!(stat.comm, comm);
            assert_eq!((stat.pid, stat.state, stat.ppid, stat.session), (498, 'S', 494, 411));
            assert_eq!((stat.threads, stat.start_ticks, stat.kernel_thread), (18, 2666, false));
        }
    }

    #[test]
    fn identity_at_tick_resolution() {
        let stat = Stat::parse(&line(b"x")).unwrap();
        let tick = tick_ns();
        assert!(stat.started_at(2666 * tick) && stat.started_at(2667 * tick - 1));
        assert!(!stat.started_at(2667 * tick) && !stat.started_at(2666 * tick - 1) && !stat.started_at(0));
        assert!(stat.started_at(stat.start_ns()));
    }

    /// 497 days of ticks are more than 32 bits hold.
    #[test]
    fn a_start_beyond_32_bits_of_ticks() {
        let text = |ticks: u64| format!("7 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {ticks} 0 0");
        for ticks in [(1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 33) + 5, 1 << 40] {
            let stat = Stat::parse(text(ticks).as_bytes()).unwrap();
            let start_ns = ticks * tick_ns();
            assert_eq!((stat.start_ticks, stat.start_ns()), (ticks, start_ns));
            assert_eq!(gpureap_common::fence::ticks(start_ns), ticks, "as the kernel's programs divide");
            assert!(stat.started_at(start_ns) && stat.started_at(start_ns + tick_ns() - 1));
            // Another one, whose start has the same lower half.
            assert!(!stat.started_at(start_ns ^ ((1 << 32) * tick_ns())));
            assert!(!same_start(start_ns, start_ns + (1 << 32) * tick_ns()));
        }
    }

    #[test]
    fn status_lines() {
        let status =
            Status::parse(b"Name:\tUid:\\n1\nTgid:\t498\nUid:\t1000\t1001\t0\t0\nNSpid:\t498\t7\t1\nNSpgid:\t410\n");
        assert_eq!(status, Status { tgid: Some(498), uid: Some(1001), nspids: vec![498, 7, 1] });
        assert_eq!(Status::parse(b"Uid:\nNSpid:\tx\n\xff"), Status::default());
    }

    proptest::proptest! {
        #[test]
        fn hostile_bytes_do_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            proptest::prop_assert!(Stat::parse(&bytes).is_none_or(|stat| stat.comm.len() < 200));
            proptest::prop_assert!(Status::parse(&bytes).nspids.len() < 200);
        }

        #[test]
        fn any_name_survives(comm in proptest::collection::vec(proptest::num::u8::ANY, 0..16)) {
            proptest::prop_assert_eq!(Stat::parse(&line(&comm)).map(|stat| stat.comm), Some(comm));
        }
    }
}
