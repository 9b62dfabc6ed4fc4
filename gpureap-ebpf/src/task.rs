//! Who is running, and what a `task_struct` says.

use aya_ebpf::helpers::generated::{bpf_get_current_pid_tgid, bpf_get_current_task};
use gpureap_common::record::ProcKey;

use crate::globals::{
    OFF_FILES_COUNT, OFF_SIGNAL_LIVE, OFF_TASK_COMM, OFF_TASK_FILES, OFF_TASK_LEADER, OFF_TASK_PID, OFF_TASK_SIGNAL,
    OFF_TASK_START, OFF_TASK_TGID, at, member, setting,
};

/// The running task.
#[derive(Clone, Copy)]
pub(crate) struct Me {
    pub(crate) task: u64,
    pub(crate) tgid: u32,
    pub(crate) tid: u32,
    pub(crate) start_ns: u64,
}

impl Me {
    #[inline(always)]
    pub(crate) fn current() -> Self {
        // SAFETY: both helpers only return numbers.
        let (ids, task) = unsafe { (bpf_get_current_pid_tgid(), bpf_get_current_task()) };
        Self { task, tgid: (ids >> 32) as u32, tid: ids as u32, start_ns: start_ns(task) }
    }

    #[inline(always)]
    pub(crate) fn key(&self) -> ProcKey {
        ProcKey::new(self.tgid, self.start_ns)
    }

    #[inline(always)]
    pub(crate) fn files(&self) -> u64 {
        files(self.task)
    }

    /// Whether another process may use `table`, too, which is a thread's own if it is `private`.
    #[inline(always)]
    pub(crate) fn may_share(&self, table: u64, private: bool) -> bool {
        let signal = member::<u64>(self.task, &OFF_TASK_SIGNAL).unwrap_or(0);
        signal != 0
            && member::<i32>(signal, &OFF_SIGNAL_LIVE)
                .is_some_and(|threads| may_be_shared(users(table), threads, private))
    }

    /// Whether `table` is this thread's own and not its process's. A leader that has exited has no table.
    #[inline(always)]
    pub(crate) fn is_private(&self, table: u64) -> bool {
        if self.tid == self.tgid {
            return false;
        }
        let leaders = files(leader(self.task));
        leaders != 0 && leaders != table
    }
}

/// Whether a table has other users than the threads of one process: all of them, or one for a table of a thread's own. Only
/// a process that shares its table with as many others as it has threads with tables of their own looks like any other.
#[inline(always)]
pub(crate) fn may_be_shared(users: i32, threads: i32, private: bool) -> bool {
    users != if private { 1 } else { threads }
}

/// How many tasks use a table.
#[inline(always)]
pub(crate) fn users(table: u64) -> i32 {
    member(table, &OFF_FILES_COUNT).unwrap_or(0)
}

/// `start_boottime` of the task's leader: constant over the life of a process, exec by another thread included.
#[inline(always)]
pub(crate) fn start_ns(task: u64) -> u64 {
    member(leader(task), &OFF_TASK_START).unwrap_or(0)
}

#[inline(always)]
pub(crate) fn leader(task: u64) -> u64 {
    member(task, &OFF_TASK_LEADER).unwrap_or(0)
}

/// The name of the task's process.
#[inline(always)]
pub(crate) fn process_comm(task: u64) -> [u8; 16] {
    comm(member(task, &OFF_TASK_LEADER).unwrap_or(task))
}

#[inline(always)]
pub(crate) fn files(task: u64) -> u64 {
    member(task, &OFF_TASK_FILES).unwrap_or(0)
}

#[inline(always)]
pub(crate) fn tgid(task: u64) -> u32 {
    member(task, &OFF_TASK_TGID).unwrap_or(0)
}

#[inline(always)]
pub(crate) fn tid(task: u64) -> u32 {
    member(task, &OFF_TASK_PID).unwrap_or(0)
}

#[inline(always)]
pub(crate) fn key(task: u64) -> ProcKey {
    ProcKey { tgid: tgid(task), pad: 0, start_ns: start_ns(task) }
}

#[inline(always)]
pub(crate) fn comm(task: u64) -> [u8; 16] {
    at::<[u8; 16]>(task + u64::from(setting(&OFF_TASK_COMM))).unwrap_or([0; 16])
}
