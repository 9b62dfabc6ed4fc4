//! The `kprobe` set: runs with preemption off, so nothing is ever skipped.

use aya_ebpf::{
    macros::{kprobe, kretprobe},
    programs::{ProbeContext, RetProbeContext},
};

use crate::{file, mapping, table, task::Me};

/// match-proto: `static int chrdev_open(struct inode *inode, struct file *filp)`
#[kprobe]
pub(crate) fn file_open_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(inode), Some(filp)) = (ctx.arg::<u64>(0), ctx.arg::<u64>(1)) {
        file::opening(inode, filp);
    }
    0
}

/// match-proto: `void fd_install(unsigned int fd, struct file *file)`
#[kprobe]
pub(crate) fn fd_install_kprobe(ctx: ProbeContext) -> u32 {
    if let Some(filp) = ctx.arg::<u64>(1)
        && crate::maps::FILES.get_ptr(filp).is_some()
    {
        table::install(Me::current().files(), filp);
    }
    0
}

/// match-proto 5.10: `void __fd_install(struct files_struct *files, unsigned int fd, struct file *file)`; there
/// `fd_install` is inlined into its callers.
#[kprobe]
pub(crate) fn fd_install_files_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(files), Some(filp)) = (ctx.arg::<u64>(0), ctx.arg::<u64>(2)) {
        table::install(files, filp);
    }
    0
}

/// match-proto: `static int do_dup2(struct files_struct *files, struct file *file, unsigned fd, unsigned flags)`
///
/// At entry: at the exit the descriptor is already visible and its close could come first.
#[kprobe]
pub(crate) fn fd_dup2_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(files), Some(filp)) = (ctx.arg::<u64>(0), ctx.arg::<u64>(1)) {
        table::install(files, filp);
    }
    0
}

/// match-proto: `void locks_remove_posix(struct file *filp, fl_owner_t owner)`
#[kprobe]
pub(crate) fn fd_close_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(filp), Some(owner)) = (ctx.arg::<u64>(0), ctx.arg::<u64>(1)) {
        table::close(filp, owner);
    }
    0
}

/// match-proto 6.1: `struct files_struct *dup_fd(struct files_struct *oldf, unsigned int max_fds, int *errorp)`
#[kretprobe]
pub(crate) fn table_copy_kretprobe(ctx: RetProbeContext) -> u32 {
    table::copied(ctx.ret::<u64>());
    0
}

/// match-proto: `void security_file_free(struct file *file)`
#[kprobe]
pub(crate) fn file_free_kprobe(ctx: ProbeContext) -> u32 {
    if let Some(filp) = ctx.arg::<u64>(0) {
        file::freed(filp);
    }
    0
}

/// match-proto: `int security_mmap_file(struct file *file, unsigned long prot, unsigned long flags)`
#[kprobe]
pub(crate) fn file_map_kprobe(ctx: ProbeContext) -> u32 {
    if let Some(filp) = ctx.arg::<u64>(0) {
        mapping::mapping(filp);
    }
    0
}
