//! Iterators over every task of the kernel: the start snapshot, the resync after a loss, the proof of a reap. aya-ebpf
//! has no macro for them; the section name is what counts.

use core::ffi::c_void;

use aya_ebpf::{bindings::seq_file, helpers::generated::bpf_seq_write};
use gpureap_common::{
    counter,
    global::ABSENT,
    record::{ProcKey, lineage_flag},
    sweep::{MAPPING, SweepRecord, sweep_flag},
};

use crate::{
    count,
    file::device,
    globals::{
        FILE_REFS_BIAS, OFF_FILE_INODE, OFF_FILE_MODE, OFF_FILE_REFS, OFF_FILES_COUNT, OFF_INODE_MODE, OFF_INODE_NLINK,
        OFF_INODE_RDEV, OFF_SIGNAL_LIVE, OFF_TASK_COMM, OFF_TASK_FILES, OFF_TASK_LEADER, OFF_TASK_PID,
        OFF_TASK_REAL_PARENT, OFF_TASK_SIGNAL, OFF_TASK_START, OFF_TASK_TGID, OFF_VMA_FILE, direct, setting,
    },
    lineage,
    maps::LINEAGE,
    task,
};

/// `S_IFMT` and `S_IFCHR` of `i_mode`.
const FORMAT: u16 = 0xf000;
const CHARACTER_DEVICE: u16 = 0x2000;

/// `FMODE_PATH` (include/linux/fs.h): an `O_PATH` descriptor never reached the driver.
const PATH_ONLY: u32 = 0x4000;

#[repr(C)]
pub(crate) struct Meta {
    seq: *mut seq_file,
    session: u64,
    number: u64,
}

#[repr(C)]
pub(crate) struct TaskFile {
    meta: *const Meta,
    task: *const u8,
    fd: u32,
    file: *const u8,
}

#[repr(C)]
pub(crate) struct TaskVma {
    meta: *const Meta,
    task: *const u8,
    vma: *const u8,
}

#[repr(C)]
pub(crate) struct Task {
    meta: *const Meta,
    task: *const u8,
}

/// # Safety
/// Pointers as the iterator hands them in, not null.
#[inline(always)]
unsafe fn write(seq: *mut seq_file, record: &SweepRecord) {
    count::up(counter::SWEEP_RECORDS);
    // SAFETY: a full record; when the buffer has no room the kernel enlarges it and asks again.
    unsafe { bpf_seq_write(seq, (&raw const *record).cast::<c_void>(), size_of::<SweepRecord>() as u32) };
}

/// Fills what is told of `file`, if it is a device that we know.
///
/// # Safety
/// `file` must be a pointer that the verifier tracks, not null.
#[inline(always)]
unsafe fn describe(file: *const u8, own_references: i64) -> Option<SweepRecord> {
    // SAFETY: the caller's promise, and `f_inode` of a file that is in a table or a mapping is set.
    unsafe {
        let inode: *const u8 = direct(file, &OFF_FILE_INODE);
        let mode: u16 = direct(inode, &OFF_INODE_MODE);
        if mode & FORMAT != CHARACTER_DEVICE {
            return None;
        }
        let rdev: u32 = direct(inode, &OFF_INODE_RDEV);
        device(rdev)?;
        if direct::<u32>(file, &OFF_FILE_MODE) & PATH_ONLY != 0 {
            return None;
        }
        let refs = if setting(&OFF_FILE_REFS) == ABSENT {
            -1
        } else {
            direct::<i64>(file, &OFF_FILE_REFS) + i64::from(setting(&FILE_REFS_BIAS)) - own_references
        };
        Some(SweepRecord {
            file: file as u64,
            dev: rdev,
            nlink: direct(inode, &OFF_INODE_NLINK),
            refs,
            ..SweepRecord::default()
        })
    }
}

/// # Safety
/// `task` must be a pointer that the verifier tracks, not null.
#[inline(always)]
unsafe fn name(record: &mut SweepRecord, task: *const u8) {
    // SAFETY: the caller's promise; the leader of a task is never null.
    unsafe {
        let leader: *const u8 = direct(task, &OFF_TASK_LEADER);
        record.tgid = direct(task, &OFF_TASK_TGID);
        record.tid = direct(task, &OFF_TASK_PID);
        record.start_ns = direct(leader, &OFF_TASK_START);
        record.leader_table = direct(leader, &OFF_TASK_FILES);
    }
}

/// Every descriptor of every task. The kernel leaves out threads that share their leader's table, and shows the table
/// once per thread when the leader has exited.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task_file")]
pub(crate) extern "C" fn sweep_fds(ctx: *const TaskFile) -> i32 {
    // SAFETY: the kernel hands in a valid context; task and file are null on the last call.
    unsafe {
        let (meta, task, file) = ((*ctx).meta, (*ctx).task, (*ctx).file);
        if task.is_null() || file.is_null() {
            return 0;
        }
        // The iterator itself holds a reference while it shows the file.
        if let Some(mut record) = describe(file, 1) {
            name(&mut record, task);
            record.fd = (*ctx).fd;
            record.table = direct(task, &OFF_TASK_FILES);
            let (files, signal): (*const u8, *const u8) =
                (direct(task, &OFF_TASK_FILES), direct(task, &OFF_TASK_SIGNAL));
            let own = record.leader_table != 0 && record.table != record.leader_table;
            if task::may_be_shared(direct(files, &OFF_FILES_COUNT), direct(signal, &OFF_SIGNAL_LIVE), own) {
                record.flags = sweep_flag::MAY_BE_SHARED;
            }
            write((*meta).seq, &record);
        }
    }
    0
}

/// Every mapping of every process (since 6.1).
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task_vma")]
pub(crate) extern "C" fn sweep_maps(ctx: *const TaskVma) -> i32 {
    // SAFETY: as in `sweep_fds`.
    unsafe {
        let (meta, task, vma) = ((*ctx).meta, (*ctx).task, (*ctx).vma);
        if task.is_null() || vma.is_null() {
            return 0;
        }
        let file: *const u8 = direct(vma, &OFF_VMA_FILE);
        if file.is_null() {
            return 0;
        }
        if let Some(mut record) = describe(file, 0) {
            name(&mut record, task);
            record.fd = MAPPING;
            write((*meta).seq, &record);
        }
    }
    0
}

/// Every process into `LINEAGE`, unless the fork was seen. Writes no records.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
pub(crate) extern "C" fn sweep_lineage(ctx: *const Task) -> i32 {
    // SAFETY: as in `sweep_fds`; leader and real_parent of a live task are never null.
    unsafe {
        let task = (*ctx).task;
        if task.is_null() {
            return 0;
        }
        let tgid: u32 = direct(task, &OFF_TASK_TGID);
        let tid: u32 = direct(task, &OFF_TASK_PID);
        if tgid != tid {
            return 0;
        }
        let key = ProcKey { tgid, pad: 0, start_ns: direct(task, &OFF_TASK_START) };
        if LINEAGE.get_ptr(key).is_some() {
            return 0;
        }
        let parent: *const u8 = direct(task, &OFF_TASK_REAL_PARENT);
        let leader: *const u8 = direct(parent, &OFF_TASK_LEADER);
        let comm: [u64; 2] = direct(task, &OFF_TASK_COMM);
        if let Some(entry) = lineage::entry(key) {
            (*entry).parent_tgid = direct(parent, &OFF_TASK_TGID);
            (*entry).parent_start_ns = direct(leader, &OFF_TASK_START);
            (*entry).flags = lineage_flag::SNAPSHOT;
            // Eight bytes at a time: the verifier takes no loads of a structure's member by bytes on older kernels.
            #[expect(clippy::cast_ptr_alignment, reason = "the record asserts its layout: comm is at a multiple of 8")]
            let words = (&raw mut (*entry).comm).cast::<[u64; 2]>();
            words.write(comm);
        }
    }
    0
}
