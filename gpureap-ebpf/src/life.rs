//! Fork, exec and exit, for all probe sets: lineage of every process, and what a process of interest hands on.

use core::ffi::c_void;

use aya_ebpf::{
    helpers::generated::{bpf_get_current_cgroup_id, bpf_get_current_uid_gid, bpf_probe_read_user},
    macros::btf_tracepoint,
    programs::BtfTracePointContext,
};
use gpureap_common::{
    abi::ARGS_LEN,
    counter, event,
    record::{Lineage, Proc, ProcKey, lineage_flag, proc_flag},
};

use aya_log_ebpf::debug;

use crate::{
    count, emit,
    globals::{
        OFF_MM_ARG_END, OFF_MM_ARG_START, OFF_SIGNAL_EXIT_CODE, OFF_SIGNAL_FLAGS, OFF_SIGNAL_LIVE, OFF_TASK_EXIT_CODE,
        OFF_TASK_MM, OFF_TASK_SIGNAL, member,
    },
    lineage,
    maps::{LINEAGE, PROCS},
    table,
    task::{self, Me},
};

/// include/linux/sched/signal.h
const SIGNAL_GROUP_EXIT: u32 = 4;

/// match-proto: `TP_PROTO(struct task_struct *parent, struct task_struct *child)`
///
/// The child does not run yet. `parent` is the forking task, which is not the later `real_parent` under `CLONE_PARENT`.
#[btf_tracepoint(function = "sched_process_fork")]
pub(crate) fn process_fork(ctx: BtfTracePointContext) -> i32 {
    let parent = ctx.arg::<*const u8>(0) as u64;
    let child = ctx.arg::<*const u8>(1) as u64;
    let child_key = task::key(child);
    let parent_key = task::key(parent);
    let same_process = child_key.tgid == parent_key.tgid;
    table::forked(task::files(parent), child, task::files(child), same_process);
    if same_process {
        return 0;
    }
    let comm = task::comm(child);
    // SAFETY: the helpers return numbers.
    let (cgroup_id, uid) = unsafe { (bpf_get_current_cgroup_id(), bpf_get_current_uid_gid() as u32) };
    if let Some(entry) = lineage::entry(child_key) {
        // SAFETY: a live map value of a process that does not run yet.
        unsafe {
            (*entry).parent_start_ns = parent_key.start_ns;
            (*entry).parent_tgid = parent_key.tgid;
            (*entry).cgroup_id = cgroup_id;
            (*entry).uid = uid;
            (*entry).comm = comm;
        }
    }
    inherit(parent_key, child_key, comm);
    0
}

/// What a process of interest hands to its child.
#[inline(always)]
fn inherit(parent: ProcKey, child: ProcKey, comm: [u8; 16]) {
    let Some(entry) = PROCS.get_ptr(parent.tgid) else { return };
    // SAFETY: a live map value.
    let from = unsafe { *entry };
    if from.start_ns != parent.start_ns {
        return;
    }
    let now = emit::now_ns();
    let record = Proc {
        start_ns: child.start_ns,
        first_ns: now,
        last_ns: now,
        from_start_ns: parent.start_ns,
        from_tgid: parent.tgid,
        flags: proc_flag::INHERITED | from.flags & proc_flag::MAY_MAP,
        mapped: from.mapped,
        ..Proc::default()
    };
    if PROCS.insert(child.tgid, record, 0).is_err() {
        count::up(counter::PROCS_FULL);
    }
    emit::process(event::kind::FORK, now, child, child.tgid, parent, 0, comm);
}

/// match-proto: `TP_PROTO(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)`
///
/// Close-on-exec descriptors are closed already, the old address space is gone, and the thread that called exec has
/// become the leader.
#[btf_tracepoint(function = "sched_process_exec")]
pub(crate) fn process_exec(ctx: BtfTracePointContext) -> i32 {
    let task = ctx.arg::<*const u8>(0) as u64;
    let key = task::key(task);
    let comm = task::comm(task);
    let now = emit::now_ns();
    if let Some(entry) = lineage::entry(key) {
        // SAFETY: a live map value of this process, which only its own task writes.
        unsafe {
            (*entry).exec_ns = now;
            (*entry).comm = comm;
            (*entry).uid = bpf_get_current_uid_gid() as u32;
            (*entry).cgroup_id = bpf_get_current_cgroup_id();
            read_args(task, entry);
        }
    }
    if let Some(entry) = PROCS.get_ptr_mut(key.tgid) {
        // SAFETY: a live map value.
        unsafe {
            if (*entry).start_ns == key.start_ns {
                (*entry).flags &= !proc_flag::MAY_MAP;
                emit::process(event::kind::EXEC, now, key, key.tgid, ProcKey::default(), 0, comm);
            }
        }
    }
    0
}

/// The first bytes of the argument area of the new program; its pages were written a moment ago, so they are present.
///
/// # Safety
/// `entry` must be a live map value.
#[inline(always)]
unsafe fn read_args(task: u64, entry: *mut Lineage) {
    let Some(mm) = member::<u64>(task, &OFF_TASK_MM) else { return };
    let (Some(start), Some(end)) = (member::<u64>(mm, &OFF_MM_ARG_START), member::<u64>(mm, &OFF_MM_ARG_END)) else {
        return;
    };
    let wanted = end.wrapping_sub(start);
    let (length, cut) = if wanted > ARGS_LEN as u64 { (ARGS_LEN as u64, lineage_flag::ARGS_CUT) } else { (wanted, 0) };
    // SAFETY: the caller's promise; the length is bounded by the field.
    unsafe {
        let failed =
            bpf_probe_read_user((&raw mut (*entry).args).cast::<c_void>(), length as u32, start as *const c_void);
        (*entry).args_len = if failed == 0 { length as u32 } else { 0 };
        (*entry).flags = (*entry).flags & !lineage_flag::ARGS_CUT | cut;
    }
}

/// match-proto 6.1: `TP_PROTO(struct task_struct *p)`; since 6.16 a second argument says whether the group is dead.
///
/// Before `exit_files` on every kernel: the descriptors are still open and their closes follow.
#[btf_tracepoint(function = "sched_process_exit")]
pub(crate) fn process_exit(ctx: BtfTracePointContext) -> i32 {
    let task = ctx.arg::<*const u8>(0) as u64;
    let signal = member::<u64>(task, &OFF_TASK_SIGNAL).unwrap_or(0);
    // `live` was lowered before: the last thread sees 0, and so may one that exits at the same instant.
    let last_thread = signal != 0 && member::<i32>(signal, &OFF_SIGNAL_LIVE) == Some(0);
    table::exiting(task::files(task), last_thread);
    if !last_thread {
        return 0;
    }
    let key = task::key(task);
    let comm = task::comm(task);
    // As wait(2) has it: of the group if something ended it as a whole, else of the leader, whenever that one ended.
    let whole = member::<u32>(signal, &OFF_SIGNAL_FLAGS).unwrap_or(0) & SIGNAL_GROUP_EXIT != 0;
    let code = if whole {
        member::<u32>(signal, &OFF_SIGNAL_EXIT_CODE).unwrap_or(0)
    } else {
        member::<u32>(task::leader(task), &OFF_TASK_EXIT_CODE).unwrap_or(0)
    };
    let mut now = emit::now_ns();
    if let Some(entry) = LINEAGE.get_ptr_mut(key) {
        // SAFETY: a live map value.
        unsafe {
            // Of two threads that both believe to be the last, the first one's time stays.
            if (*entry).exit_ns == 0 {
                (*entry).exit_ns = now;
            }
            now = (*entry).exit_ns;
            (*entry).exit_code = code;
            (*entry).comm = comm;
        }
    }
    if let Some(entry) = PROCS.get_ptr(key.tgid) {
        // SAFETY: a live map value. Of two threads that both believe to be the last, one removes the entry.
        if unsafe { (*entry).start_ns } == key.start_ns && PROCS.remove(key.tgid).is_ok() {
            debug!((), "{} exits with status {:x}", key.tgid, code);
            emit::process(event::kind::EXIT, now, key, Me::current().tid, ProcKey::default(), code, comm);
        }
    }
    0
}
