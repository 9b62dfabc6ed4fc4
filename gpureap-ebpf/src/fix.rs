//! Corrections after a sweep, run by user space (`BPF_PROG_TEST_RUN`), never attached to anything.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use gpureap_common::{
    abi::MAX_SLOTS,
    counter, fix,
    global::ABSENT,
    record::{Proc, file_flag, proc_flag},
};

use crate::{
    atomic::{add_i32, add_u64, or_u64},
    count,
    emit::now_ns,
    globals::{FILE_REFS_BIAS, OFF_FILE_INODE, OFF_FILE_REFS, OFF_INODE_RDEV, member, setting},
    maps::{FILES, PROCS, TABLES},
    table,
    task::Me,
};

#[raw_tracepoint]
pub(crate) fn fix(ctx: RawTracePointContext) -> i32 {
    let argument = |n: usize| ctx.arg::<u64>(n);
    let result = match argument(0) {
        fix::ADJUST => {
            let owner = Me { task: 0, tgid: argument(4) as u32, tid: argument(5) as u32, start_ns: argument(6) };
            table::adjust(argument(1), argument(2) as u32, argument(3) as i32, &owner, argument(7) as u32)
        }
        fix::ADJUST_FILE => adjust_file(argument(1), argument(2) as i32),
        fix::CHECK_FILE => check_file(argument(1)),
        fix::MARK => mark(argument(1) as u32, argument(2), argument(3) as u32, argument(4)),
        fix::FORGET_TABLE => forget_table(argument(1)),
        fix::FORGET_PROCESS => forget_process(argument(1) as u32, argument(2)),
        _ => fix::FAILED,
    };
    result as i32
}

#[inline(always)]
fn adjust_file(file: u64, delta: i32) -> u32 {
    let Some(entry) = FILES.get_ptr_mut(file) else { return fix::FAILED };
    // SAFETY: a live map value.
    unsafe {
        add_u64(&raw mut (*entry).seq, 1);
        add_i32(&raw mut (*entry).fds, delta);
        if delta > 0 {
            (*entry).flags |= file_flag::INSTALLED;
        }
    }
    fix::DONE
}

/// A file nobody refers to any more has a count of 0 or, in `f_ref`, a negative one; one whose memory became another
/// file's shows another device.
#[inline(always)]
fn check_file(address: u64) -> u32 {
    let Some(entry) = FILES.get_ptr(address) else { return fix::DONE };
    if setting(&OFF_FILE_REFS) == ABSENT {
        return fix::FAILED;
    }
    let references = member::<i64>(address, &OFF_FILE_REFS).unwrap_or(0);
    let references = references.wrapping_add(i64::from(setting(&FILE_REFS_BIAS)));
    let inode = member::<u64>(address, &OFF_FILE_INODE).unwrap_or(0);
    let rdev = member::<u32>(inode, &OFF_INODE_RDEV);
    // SAFETY: a live map value.
    if references > 0 && rdev == Some(unsafe { (*entry).dev }) {
        return fix::DONE;
    }
    if FILES.remove(address).is_ok() {
        count::up(counter::STALE_FILE);
        return fix::REMOVED;
    }
    fix::DONE
}

#[inline(always)]
fn mark(tgid: u32, start_ns: u64, flags: u32, slot: u64) -> u32 {
    if PROCS.get_ptr(tgid).is_none() {
        let now = now_ns();
        let record = Proc { start_ns, first_ns: now, last_ns: now, flags, ..Proc::default() };
        if PROCS.insert(tgid, record, 0).is_err() {
            count::up(counter::PROCS_FULL);
            return fix::FAILED;
        }
    }
    let Some(entry) = PROCS.get_ptr_mut(tgid) else { return fix::FAILED };
    // SAFETY: a live map value.
    unsafe {
        if (*entry).start_ns != start_ns {
            return fix::FAILED;
        }
        (*entry).flags |= flags & (proc_flag::MAY_MAP | proc_flag::RECEIVED);
        if slot < u64::from(MAX_SLOTS) {
            or_u64(&raw mut (*entry).mapped[((slot / 64) & 3) as usize], 1 << (slot % 64));
        }
    }
    fix::DONE
}

#[inline(always)]
fn forget_table(address: u64) -> u32 {
    let Some(entry) = TABLES.get_ptr(address) else { return fix::DONE };
    // SAFETY: a live map value.
    if unsafe { (&raw const (*entry).total).read_volatile() } != 0 {
        return fix::FAILED;
    }
    table::forget(address);
    fix::REMOVED
}

#[inline(always)]
fn forget_process(tgid: u32, start_ns: u64) -> u32 {
    let Some(entry) = PROCS.get_ptr(tgid) else { return fix::DONE };
    // SAFETY: a live map value.
    if unsafe { (*entry).start_ns } == start_ns && PROCS.remove(tgid).is_ok() {
        return fix::REMOVED;
    }
    fix::DONE
}
