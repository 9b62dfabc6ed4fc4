//! What ends a process of interest, and by whom: signals, the out-of-memory killer, and the names of the threads that
//! raise them.

use core::ffi::c_void;

use aya_ebpf::{
    helpers::generated::{bpf_get_current_uid_gid, bpf_probe_read_kernel_str},
    macros::{btf_tracepoint, raw_tracepoint},
    programs::{BtfTracePointContext, RawTracePointContext},
};
use gpureap_common::{
    event::{self, SignalEvent, origin},
    global::SIGACTION_SIZE,
    record::{Proc, ProcKey, proc_flag},
};

use crate::{
    emit,
    globals::{OFF_SIGHAND_ACTION, OFF_TASK_SIGHAND, at, member},
    maps::PROCS,
    task::{self, Me},
};

/// Signal numbers as bits; the same on all that gpureap runs on (include/uapi/asm-generic/signal.h).
const fn bit(signal: u32) -> u64 {
    1 << signal
}

/// By default ignored, or to be stopped by a terminal's background rule: CHLD, CONT, TTIN, TTOU, URG, WINCH.
const HARMLESS: u64 = bit(17) | bit(18) | bit(21) | bit(22) | bit(23) | bit(28);
/// ILL, TRAP, BUS, FPE, SEGV: raised by the kernel in the thread that did it.
const FAULTS: u64 = bit(4) | bit(5) | bit(7) | bit(8) | bit(11);
/// Told even if the process handles them, since they are sent to end it: HUP, INT, QUIT, ABRT, KILL, TERM, STOP, TSTP,
/// XCPU, SYS.
const MEANT: u64 = bit(1) | bit(2) | bit(3) | bit(6) | bit(9) | bit(15) | bit(19) | bit(20) | bit(24) | bit(31);

/// `TRACE_SIGNAL_IGNORED` (include/trace/events/signal.h)
const IGNORED: u32 = 1;
/// `SEND_SIG_NOINFO` is 0 and `SEND_SIG_PRIV` is 1; anything else points to a `struct kernel_siginfo`.
const SEND_SIG_PRIV: u64 = 1;
/// Offset of `si_code`, behind `si_signo` and `si_errno` (include/uapi/asm-generic/siginfo.h; MIPS alone differs).
const SI_CODE: u64 = 8;
/// `si_code` of a timer, whose signal is sent from whatever runs when it expires.
const SI_TIMER: i32 = -2;

/// The entry of a process that has to do with a device.
#[inline(always)]
fn interest(key: ProcKey) -> Option<*mut Proc> {
    let entry = PROCS.get_ptr_mut(key.tgid)?;
    // SAFETY: a live map value.
    if unsafe { (*entry).start_ns } == key.start_ns { Some(entry) } else { None }
}

/// Whether the process leaves this signal to the kernel, which then ends it.
#[inline(always)]
fn is_default(task: u64, signal: u32) -> bool {
    let Some(sighand) = member::<u64>(task, &OFF_TASK_SIGHAND) else { return true };
    let actions = sighand + u64::from(crate::globals::setting(&OFF_SIGHAND_ACTION));
    at::<u64>(actions + u64::from((signal - 1) * SIGACTION_SIZE)).unwrap_or(0) == 0
}

/// match-proto: `TP_PROTO(int sig, struct kernel_siginfo *info, struct task_struct *task, int group, int result)`
#[btf_tracepoint(function = "signal_generate")]
pub(crate) fn signal_generate(ctx: BtfTracePointContext) -> i32 {
    let signal = ctx.arg::<i32>(0) as u32;
    let info = ctx.arg::<*const u8>(1) as u64;
    let target = ctx.arg::<*const u8>(2) as u64;
    let group = ctx.arg::<i32>(3) as u32;
    let result = ctx.arg::<i32>(4) as u32;
    if signal == 0 || signal > 64 || result == IGNORED {
        return 0;
    }
    // 64 has no bit, and like all real-time signals none of the sets has it.
    let this = if signal < 64 { bit(signal) } else { 0 };
    if HARMLESS & this != 0 {
        return 0;
    }
    let key = task::key(target);
    let Some(entry) = interest(key) else { return 0 };
    if MEANT & this == 0 && !is_default(target, signal) {
        if FAULTS & this == 0 {
            return 0;
        }
        // SAFETY: a live map value; a flag that two threads set at once is set.
        unsafe {
            if (*entry).flags & proc_flag::FAULT_TOLD != 0 {
                return 0;
            }
            (*entry).flags |= proc_flag::FAULT_TOLD;
        }
    }
    let code = if info > SEND_SIG_PRIV { at::<i32>(info + SI_CODE).unwrap_or(0) } else { 0 };
    // Above 0 the kernel speaks for itself (`SI_FROMUSER`, include/linux/signal.h).
    let by_kernel = info == SEND_SIG_PRIV || code > 0 || code == SI_TIMER;
    let me = Me::current();
    emit::signal(
        key,
        task::tid(target),
        SignalEvent {
            sender_start_ns: me.start_ns,
            sender_tgid: me.tgid,
            sender_tid: me.tid,
            // SAFETY: returns a number.
            sender_uid: unsafe { bpf_get_current_uid_gid() } as u32,
            signal,
            code,
            origin: if by_kernel { origin::KERNEL } else { origin::TASK },
            group,
            thread: task::comm(target),
            sender_thread: task::comm(me.task),
            sender_comm: task::process_comm(me.task),
            ..SignalEvent::default()
        },
    );
    0
}

/// match-proto 6.12: `TP_PROTO(struct task_struct *task, uid_t uid)`
#[btf_tracepoint(function = "mark_victim")]
pub(crate) fn oom_victim_task(ctx: BtfTracePointContext) -> i32 {
    let task = ctx.arg::<*const u8>(0) as u64;
    emit::process(
        event::kind::OOM,
        emit::now_ns(),
        task::key(task),
        task::tid(task),
        ProcKey::default(),
        0,
        task::comm(task),
    );
    0
}

/// match-proto 5.10: `TP_PROTO(int pid)`, the id of a thread
#[btf_tracepoint(function = "mark_victim")]
pub(crate) fn oom_victim_tid(ctx: BtfTracePointContext) -> i32 {
    let tid = ctx.arg::<i32>(0) as u32;
    emit::process(event::kind::OOM, emit::now_ns(), ProcKey::default(), tid, ProcKey::default(), 0, [0; 16]);
    0
}

/// match-proto: `TP_PROTO(struct task_struct *task, unsigned long clone_flags)`
#[btf_tracepoint(function = "task_newtask")]
pub(crate) fn thread_new(ctx: BtfTracePointContext) -> i32 {
    let task = ctx.arg::<*const u8>(0) as u64;
    let key = task::key(task);
    let tid = task::tid(task);
    if tid != key.tgid && interest(key).is_some() {
        emit::process(event::kind::THREAD, emit::now_ns(), key, tid, ProcKey::default(), 0, task::comm(task));
    }
    0
}

/// match-proto: `TP_PROTO(struct task_struct *task, const char *comm)`
///
/// Before the name is changed, so it comes from the second argument. Raw: 5.10 lets no program with BTF read a pointer
/// to char.
#[raw_tracepoint(tracepoint = "task_rename")]
pub(crate) fn thread_rename(ctx: RawTracePointContext) -> i32 {
    let task = ctx.arg::<u64>(0);
    let name = ctx.arg::<u64>(1);
    let key = task::key(task);
    if interest(key).is_some() {
        let mut comm = [0_u8; 16];
        // SAFETY: the helper writes at most as many bytes as the array has.
        unsafe { bpf_probe_read_kernel_str((&raw mut comm).cast::<c_void>(), 16, name as *const c_void) };
        emit::process(event::kind::THREAD, emit::now_ns(), key, task::tid(task), ProcKey::default(), 0, comm);
    }
    0
}
