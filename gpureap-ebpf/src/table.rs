//! Descriptor tables (`files_struct`): how many descriptors of which device each one has. Exact per (table, slot) from
//! five hooks; docs/KERNELS.md says which operation fires which.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use gpureap_common::{
    abi::MAX_SLOTS,
    counter, event, fix,
    record::{File, Holder, HolderKey, ProcKey, Table, file_flag, table_flag},
};

use crate::{
    atomic::{add_i32, add_u64, or_u64},
    count, emit, file,
    globals::{OFF_FDT_FD, OFF_FDT_MAX_FDS, OFF_FILES_FDT, at, member},
    maps::{FILES, HOLDERS, TABLES},
    task::{self, Me},
};

/// `BPF_NOEXIST`
const NOEXIST: u64 = 1;
/// Pointers at or above this are error numbers (`MAX_ERRNO`, include/linux/err.h).
const ERR_PTR: u64 = -4095_i64 as u64;
/// Longest table that a walk reads; `fs.nr_open` is 2^20 by default.
const WALK_LIMIT: u32 = 1 << 20;

/// `fd_install` / `__fd_install` / `do_dup2`: one more descriptor for `file` in `table`.
#[inline(always)]
pub(crate) fn install(table: u64, file: u64) {
    if FILES.get_ptr(file).is_none() {
        return;
    }
    let Some(entry) = file::lookup(file) else { return };
    let now = emit::now_ns();
    let me = Me::current();
    // SAFETY: a live map value. INSTALLED is set by the first install, before any other task can know the file.
    unsafe {
        if (*entry).flags & file_flag::INSTALLED == 0 {
            (*entry).flags |= file_flag::INSTALLED;
        }
    }
    file::received(&me, now);
    account(table, entry, 1, now, &me);
    told(table, entry, file, 1, now);
}

/// `locks_remove_posix(file, owner)`: one descriptor less in the table `owner`. The argument and not `current->files`:
/// that one is NULL during exit and another table during `close_range(CLOSE_RANGE_UNSHARE)`. `owner == file` is
/// `__fput`'s own call after a POSIX lock, `owner == NULL` an in-kernel close.
#[inline(always)]
pub(crate) fn close(file: u64, owner: u64) {
    if owner == 0 || owner == file || FILES.get_ptr(file).is_none() {
        return;
    }
    let Some(entry) = file::lookup(file) else { return };
    let me = Me::current();
    let now = emit::now_ns();
    account(owner, entry, -1, now, &me);
    told(owner, entry, file, 0, now);
    // SAFETY: a live map value.
    unsafe {
        if (&raw const (*entry).fds).read_volatile() == 0 {
            (*entry).last_tgid = me.tgid;
            (*entry).last_start_ns = me.start_ns;
            (*entry).last_comm = task::comm(me.task);
        }
    }
}

/// Tells of the first descriptor of a device in a table and of the last, for who keeps a record. Threads that race may
/// have it told twice or not at all: it is a reason to look, the counts are the truth.
#[inline(always)]
fn told(table: u64, entry: *mut File, file: u64, fds: i32, now: u64) {
    // SAFETY: live map values.
    unsafe {
        let slot = (*entry).slot & (MAX_SLOTS - 1);
        let Some(holder) = HOLDERS.get_ptr(HolderKey { table, slot, pad: 0 }) else { return };
        if (&raw const (*holder).fds).read_volatile() != fds {
            return;
        }
        let Some(owner) = TABLES.get_ptr(table) else { return };
        // What an exit closes, the exit tells.
        if (*owner).flags & table_flag::DYING == 0 {
            let kind = if fds == 0 { event::kind::LAST } else { event::kind::FIRST };
            let of = emit::Of { file, dev: (*entry).dev, slot, flags: 0 };
            emit::file(kind, now, ProcKey::new((*owner).tgid, (*owner).start_ns), (*owner).tid, of, [0; 16]);
        }
    }
}

/// `dup_fd` has copied the running task's table into `copy`, which nobody else can see yet.
#[inline(always)]
pub(crate) fn copied(copy: u64) {
    if copy == 0 || copy >= ERR_PTR {
        return;
    }
    let me = Me::current();
    // An address used before: what stands under it belongs to a table that is gone.
    if TABLES.get_ptr(copy).is_some() {
        forget(copy);
    }
    let Some(from) = TABLES.get_ptr(me.files()) else { return };
    // SAFETY: a live map value.
    if unsafe { (&raw const (*from).total).read_volatile() } <= 0 {
        return;
    }
    let now = emit::now_ns();
    // Whose it is shows later: `sched_process_fork` gives a child's table to the child; what is left was unshared.
    let private = if me.tid == me.tgid { 0 } else { table_flag::PRIVATE };
    if !create(copy, &me, now, table_flag::COPIED | private) {
        return;
    }
    let Some(fdt) = member::<u64>(copy, &OFF_FILES_FDT) else {
        count::up(counter::READ_FAULT);
        return;
    };
    let (Some(max), Some(array)) = (member::<u32>(fdt, &OFF_FDT_MAX_FDS), member::<u64>(fdt, &OFF_FDT_FD)) else {
        count::up(counter::READ_FAULT);
        return;
    };
    if max > WALK_LIMIT {
        count::up(counter::WALK_CUT);
    }
    let mut walk = Walk { table: copy, array, now, me };
    // SAFETY: the callback matches bpf_loop's signature and `walk` outlives the call.
    unsafe {
        bpf_loop(if max > WALK_LIMIT { WALK_LIMIT } else { max }, visit as *mut c_void, (&raw mut walk).cast(), 0);
    }
}

struct Walk {
    table: u64,
    array: u64,
    now: u64,
    me: Me,
}

extern "C" fn visit(index: u32, walk: *mut Walk) -> i64 {
    // SAFETY: bpf_loop hands back the pointer it was given.
    let walk = unsafe { &*walk };
    let Some(file) = at::<u64>(walk.array + u64::from(index) * 8) else { return 0 };
    if file != 0
        && let Some(entry) = FILES.get_ptr_mut(file)
    {
        account(walk.table, entry, 1, walk.now, &walk.me);
    }
    0
}

/// Adds `delta` descriptors of `entry`'s device to `table`. The sequence numbers move first, so that a reader who sees
/// them unchanged around its own look knows that nothing happened.
#[inline(always)]
fn account(table: u64, entry: *mut File, delta: i32, now: u64, me: &Me) {
    // SAFETY: a live map value.
    let slot = unsafe {
        add_u64(&raw mut (*entry).seq, 1);
        add_i32(&raw mut (*entry).fds, delta);
        (*entry).slot
    };
    let Some(owner) = owner(table, me, now) else { return };
    change(table, owner, slot, delta, now);
}

/// The record of `table`, made for the running task if there is none.
#[inline(always)]
fn owner(table: u64, me: &Me, now: u64) -> Option<*mut Table> {
    if let Some(owner) = TABLES.get_ptr_mut(table) {
        return Some(owner);
    }
    let private = me.is_private(table);
    let mut flags = if private { table_flag::PRIVATE } else { 0 };
    // A fork that shared it before there was a device in it left no trace.
    if me.may_share(table, private) {
        flags |= table_flag::SHARED;
    }
    if create(table, me, now, flags) { TABLES.get_ptr_mut(table) } else { None }
}

#[inline(always)]
fn change(table: u64, owner: *mut Table, slot: u32, delta: i32, now: u64) {
    let slot = slot & (MAX_SLOTS - 1);
    // SAFETY: live map values throughout; counts are added atomically, and entries are removed only when no thread can
    // add to them any more (`DYING`).
    unsafe {
        add_u64(&raw mut (*owner).seq, 1);
        let key = HolderKey { table, slot, pad: 0 };
        let mut holder = HOLDERS.get_ptr_mut(key);
        if holder.is_none() {
            let fresh = Holder { first_ns: now, last_ns: now, fds: 0, pad: 0 };
            // EEXIST: another thread of the table was first, which is as good.
            HOLDERS.insert(key, fresh, NOEXIST).ok();
            or_u64(&raw mut (*owner).slots[(slot / 64) as usize], 1 << (slot % 64));
            holder = HOLDERS.get_ptr_mut(key);
        }
        if let Some(holder) = holder {
            add_i32(&raw mut (*holder).fds, delta);
            if delta > 0 {
                (*holder).last_ns = now;
            }
        } else {
            count::up(counter::HOLDERS_FULL);
        }
        add_i32(&raw mut (*owner).total, delta);
        if delta < 0 && (*owner).flags & table_flag::DYING != 0 && (&raw const (*owner).total).read_volatile() <= 0 {
            forget(table);
        }
    }
}

/// A correction by user space, which has seen in a sweep whose table it is.
#[inline(always)]
pub(crate) fn adjust(table: u64, slot: u32, delta: i32, seen: &Me, flags: u32) -> u32 {
    let now = emit::now_ns();
    if !create(table, seen, now, table_flag::SNAPSHOT) {
        return fix::FAILED;
    }
    let Some(owner) = TABLES.get_ptr_mut(table) else { return fix::FAILED };
    // SAFETY: a live map value. A dead owner (tgid 0) leaves the old one.
    unsafe {
        if seen.tgid != 0 {
            (*owner).tgid = seen.tgid;
            (*owner).tid = seen.tid;
            (*owner).start_ns = seen.start_ns;
            (*owner).flags = (*owner).flags & !(table_flag::PRIVATE | table_flag::SHARED) | flags;
        }
    }
    if delta != 0 {
        change(table, owner, slot, delta, now);
    }
    fix::DONE
}

#[inline(always)]
fn create(table: u64, me: &Me, now: u64, flags: u32) -> bool {
    let record = Table { start_ns: me.start_ns, born_ns: now, tgid: me.tgid, tid: me.tid, flags, ..Table::default() };
    if TABLES.insert(table, record, NOEXIST).is_err() && TABLES.get_ptr(table).is_none() {
        count::up(counter::TABLES_FULL);
        return false;
    }
    true
}

/// Removes a table and its holders.
#[inline(always)]
pub(crate) fn forget(table: u64) {
    let Some(entry) = TABLES.get_ptr(table) else { return };
    // SAFETY: a live map value; the callback matches bpf_loop's signature and `sweep` outlives the call.
    unsafe {
        let mut sweep = Forget { table, slots: (*entry).slots };
        bpf_loop(MAX_SLOTS, drop_slot as *mut c_void, (&raw mut sweep).cast(), 0);
    }
    // ENOENT: another thread was first.
    TABLES.remove(table).ok();
}

struct Forget {
    table: u64,
    slots: [u64; 4],
}

extern "C" fn drop_slot(slot: u32, sweep: *mut Forget) -> i64 {
    // SAFETY: bpf_loop hands back the pointer it was given; the mask keeps the index inside.
    let sweep = unsafe { &*sweep };
    if sweep.slots[((slot / 64) & 3) as usize] & 1 << (slot % 64) != 0 {
        HOLDERS.remove(HolderKey { table: sweep.table, slot, pad: 0 }).ok();
    }
    0
}

/// The task's table when a task exits: from now on only closes follow, if nobody else uses it. Threads that exit at one
/// instant all see each other as users, but the last one of a process knows that it is.
#[inline(always)]
pub(crate) fn exiting(table: u64, last_thread: bool) {
    let Some(entry) = TABLES.get_ptr_mut(table) else { return };
    // SAFETY: a live map value.
    unsafe {
        let flags = (*entry).flags;
        if last_thread && flags & table_flag::SHARED == 0 || task::users(table) == 1 {
            (*entry).flags = flags | table_flag::DYING;
            if (&raw const (*entry).total).read_volatile() <= 0 {
                forget(table);
            }
        }
    }
}

/// A fork: gives the child its table, or marks one that two processes now use.
#[inline(always)]
pub(crate) fn forked(parent_table: u64, child: u64, child_table: u64, same_process: bool) {
    if child_table == 0 {
        return;
    }
    let entry = TABLES.get_ptr_mut(child_table);
    if child_table == parent_table {
        // One that has never held a device has no record, and gets its flag with that.
        let Some(entry) = entry else { return };
        // SAFETY: a live map value.
        unsafe {
            // Of threads only one that shares a private table: its maker's exit no longer ends it.
            if !same_process || (*entry).flags & table_flag::PRIVATE != 0 {
                (*entry).flags |= table_flag::SHARED;
            }
        }
    } else if let Some(entry) = entry {
        // SAFETY: a live map value; the child does not run yet.
        unsafe {
            (*entry).start_ns = task::start_ns(child);
            (*entry).tgid = task::tgid(child);
            (*entry).tid = task::tid(child);
            (*entry).flags &= !table_flag::PRIVATE;
            if same_process {
                (*entry).flags |= table_flag::PRIVATE;
            }
        }
    } else if let Some(entry) = TABLES.get_ptr(parent_table) {
        // SAFETY: a live map value.
        if unsafe { (&raw const (*entry).total).read_volatile() } > 0 {
            count::up(counter::COPY_MISSED);
        }
    }
}
