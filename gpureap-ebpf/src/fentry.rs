//! The `fentry` set: a cheaper trampoline, but a program is skipped when a task is preempted inside it and another
//! task of that CPU calls the same function (`recursion_misses`). User space watches that number and resyncs.

use aya_ebpf::{
    macros::{fentry, fexit},
    programs::{FEntryContext, FExitContext},
};

use crate::{file, mapping, table, task::Me};

/// match-proto: `static int chrdev_open(struct inode *inode, struct file *filp)`
#[fentry]
pub(crate) fn file_open_fentry(ctx: FEntryContext) -> i32 {
    file::opening(ctx.arg::<*const u8>(0) as u64, ctx.arg::<*const u8>(1) as u64);
    0
}

/// match-proto: `void fd_install(unsigned int fd, struct file *file)`
#[fentry]
pub(crate) fn fd_install_fentry(ctx: FEntryContext) -> i32 {
    let filp = ctx.arg::<*const u8>(1) as u64;
    if crate::maps::FILES.get_ptr(filp).is_some() {
        table::install(Me::current().files(), filp);
    }
    0
}

/// match-proto 5.10: `void __fd_install(struct files_struct *files, unsigned int fd, struct file *file)`
#[fentry]
pub(crate) fn fd_install_files_fentry(ctx: FEntryContext) -> i32 {
    table::install(ctx.arg::<*const u8>(0) as u64, ctx.arg::<*const u8>(2) as u64);
    0
}

/// match-proto: `static int do_dup2(struct files_struct *files, struct file *file, unsigned fd, unsigned flags)`
#[fentry]
pub(crate) fn fd_dup2_fentry(ctx: FEntryContext) -> i32 {
    table::install(ctx.arg::<*const u8>(0) as u64, ctx.arg::<*const u8>(1) as u64);
    0
}

/// match-proto: `void locks_remove_posix(struct file *filp, fl_owner_t owner)`
#[fentry]
pub(crate) fn fd_close_fentry(ctx: FEntryContext) -> i32 {
    table::close(ctx.arg::<*const u8>(0) as u64, ctx.arg::<*const u8>(1) as u64);
    0
}

/// match-proto 6.1: `struct files_struct *dup_fd(struct files_struct *oldf, unsigned int max_fds, int *errorp)`; by
/// 6.12 the error number is in the returned pointer and two parameters are left. The return value follows the last
/// parameter in the context, and which one that is must be fixed in the program: a run-time choice makes the verifier
/// see a modified context pointer.
#[fexit]
pub(crate) fn table_copy_3_fexit(ctx: FExitContext) -> i32 {
    table::copied(ctx.arg::<*const u8>(3) as u64);
    0
}

#[fexit]
pub(crate) fn table_copy_2_fexit(ctx: FExitContext) -> i32 {
    table::copied(ctx.arg::<*const u8>(2) as u64);
    0
}

/// match-proto: `void security_file_free(struct file *file)`
#[fentry]
pub(crate) fn file_free_fentry(ctx: FEntryContext) -> i32 {
    file::freed(ctx.arg::<*const u8>(0) as u64);
    0
}

/// match-proto: `int security_mmap_file(struct file *file, unsigned long prot, unsigned long flags)`
#[fentry]
pub(crate) fn file_map_fentry(ctx: FEntryContext) -> i32 {
    mapping::mapping(ctx.arg::<*const u8>(0) as u64);
    0
}
