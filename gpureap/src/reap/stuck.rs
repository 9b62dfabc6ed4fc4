//! Why a process does not die: what the kernel says of its threads.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::process::stat::Stat;

/// Ten ticks of the clock that processor time is told in.
const SAMPLE: Duration = Duration::from_millis(100);

/// Lines of a kernel stack that are kept.
const STACK_LINES: usize = 32;

/// The thread that most likely keeps the process from exiting.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stuck {
    pub tid: u32,
    pub thread: String,
    /// State letter as in /proc/PID/stat.
    pub state: String,
    /// For a running thread: all the processor time that it got in a sample was spent in the kernel, as by one that waits
    /// in a loop of the driver. Null where it is not running, or got no time.
    pub in_kernel: Option<bool>,
    /// Kernel function that it sleeps in.
    pub wchan: Option<String>,
    /// Innermost first; empty when the caller may not see it.
    pub stack: Vec<String>,
    /// A SIGKILL waits for it.
    pub kill_pending: bool,
    /// Age of the process.
    pub age_s: u64,
}

/// Where threads are looked up: /proc, or a tree like it.
#[derive(Clone, Debug)]
pub struct Coroner {
    proc_root: PathBuf,
}

impl Default for Coroner {
    fn default() -> Self {
        Self::new("/proc")
    }
}

impl Coroner {
    pub fn new(proc_root: impl Into<PathBuf>) -> Self {
        Self { proc_root: proc_root.into() }
    }

    /// The worst thread of a process: one in uninterruptible sleep before a running one before any other; threads
    /// that have ended count last. `None` if the process is not there.
    pub fn examine(&self, tgid: u32, age_s: u64) -> Option<Stuck> {
        let tasks = fs::read_dir(self.proc_root.join(tgid.to_string()).join("task")).ok()?;
        let worst = tasks.flatten().filter_map(|task| look(&task.path(), age_s)).min_by_key(|stuck| {
            let rank = ["D", "R", "S", "T", "t"].iter().position(|state| stuck.state == *state).unwrap_or(usize::MAX);
            (rank, stuck.tid)
        })?;
        let dir = self.proc_root.join(tgid.to_string()).join("task").join(worst.tid.to_string());
        let in_kernel = if worst.state == "R" { in_kernel(&dir) } else { None };
        Some(Stuck { in_kernel, ..worst })
    }
}

/// Where a thread spends its time, over [`SAMPLE`].
fn in_kernel(dir: &Path) -> Option<bool> {
    let times = || Stat::read(dir).map(|stat| (stat.user_ticks, stat.kernel_ticks));
    let (user, kernel) = times()?;
    thread::sleep(SAMPLE);
    let (later_user, later_kernel) = times()?;
    let (user, kernel) = (later_user.saturating_sub(user), later_kernel.saturating_sub(kernel));
    (user + kernel > 0).then_some(user == 0)
}

fn look(dir: &Path, age_s: u64) -> Option<Stuck> {
    let status = fs::read(dir.join("status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let pending = |name| field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    let wchan = fs::read_to_string(dir.join("wchan")).ok().filter(|wchan| !wchan.is_empty() && wchan != "0");
    let stack = fs::read_to_string(dir.join("stack")).unwrap_or_default();
    let kill_bit = 1 << (libc::SIGKILL - 1);
    Some(Stuck {
        tid: dir.file_name()?.to_str()?.parse().ok()?,
        thread: field("Name:")?.to_owned(),
        state: field("State:")?.chars().take(1).collect(),
        in_kernel: None,
        wchan,
        stack: stack.lines().take(STACK_LINES).map(|line| frame(line).to_owned()).collect(),
        kill_pending: (pending("SigPnd:") | pending("ShdPnd:")) & kill_bit != 0,
        age_s,
    })
}

/// `[<0>] do_sys_poll+0x1/0x2` without its empty address.
fn frame(line: &str) -> &str {
    line.split_once("] ").map_or(line, |(_, frame)| frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(root: &Path, tid: u32, state: &str, pending: &str, stack: &str) {
        let dir = root.join("7/task").join(tid.to_string());
        fs::create_dir_all(&dir).unwrap();
        let status =
            format!("Name:\twork er\nState:\t{state} (whatever)\nSigPnd:\t{pending}\nShdPnd:\t0000000000000000\n");
        fs::write(dir.join("status"), status).unwrap();
        fs::write(dir.join("wchan"), "nv_lock").unwrap();
        fs::write(dir.join("stack"), stack).unwrap();
    }

    #[test]
    fn the_sleeping_thread_is_named_not_the_zombie_leader() {
        let root = tempfile::tempdir().unwrap();
        task(root.path(), 7, "Z", "0000000000000000", "");
        task(root.path(), 8, "S", "0000000000000000", "");
        task(root.path(), 9, "D", "0000000000000100", "[<0>] nv_lock+0x1/0x2\n[<0>] ioctl+0x3/0x4\n");
        let stuck = Coroner::new(root.path()).examine(7, 60).unwrap();
        assert_eq!((stuck.tid, stuck.state.as_str(), stuck.kill_pending), (9, "D", true));
        assert_eq!(stuck.stack, ["nv_lock+0x1/0x2", "ioctl+0x3/0x4"]);
        assert_eq!((stuck.thread.as_str(), stuck.wchan.as_deref(), stuck.age_s), ("work er", Some("nv_lock"), 60));
        assert_eq!(Coroner::new(root.path()).examine(8, 0), None);
    }

    #[test]
    fn it_reads_a_real_process() {
        let stuck = Coroner::default().examine(std::process::id(), 0).unwrap();
        assert!(!stuck.kill_pending);
        assert!(stuck.tid > 0 && !stuck.state.is_empty());
    }

    #[test]
    fn a_loop_in_the_kernel_is_told_from_one_outside() {
        for (script, expected) in
            [("exec dd if=/dev/zero of=/dev/null bs=256M status=none", true), ("while :; do :; done", false)]
        {
            let mut child = std::process::Command::new("sh").args(["-c", script]).spawn().unwrap();
            let begun = std::time::Instant::now();
            // On a busy host a sample may meet it waiting for a processor, or in the other half.
            let seen = loop {
                let stuck = Coroner::default().examine(child.id(), 0);
                if stuck.as_ref().is_some_and(|stuck| stuck.in_kernel == Some(expected)) {
                    break true;
                }
                if begun.elapsed() > Duration::from_secs(20) {
                    break false;
                }
            };
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(seen, "{script}");
        }
    }
}
