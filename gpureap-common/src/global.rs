//! Names of the read-only globals that user space sets before a load. An absent structure member is [`ABSENT`].

/// Value of an offset that this kernel does not have.
pub const ABSENT: u32 = u32::MAX;

/// Each offset global: its name in the object, then structure and member as BTF names them, and the member's size in
/// bytes; a kernel where one is absent or has another size is refused.
pub const OFFSETS: &[(&str, &str, &str, u32)] = &[
    ("OFF_FILE_INODE", "file", "f_inode", 8),
    ("OFF_FILE_MODE", "file", "f_mode", 4),
    ("OFF_INODE_MODE", "inode", "i_mode", 2),
    ("OFF_INODE_RDEV", "inode", "i_rdev", 4),
    ("OFF_INODE_NLINK", "inode", "i_nlink", 4),
    ("OFF_TASK_FILES", "task_struct", "files", 8),
    ("OFF_TASK_TGID", "task_struct", "tgid", 4),
    ("OFF_TASK_PID", "task_struct", "pid", 4),
    ("OFF_TASK_LEADER", "task_struct", "group_leader", 8),
    ("OFF_TASK_REAL_PARENT", "task_struct", "real_parent", 8),
    ("OFF_TASK_START", "task_struct", "start_boottime", 8),
    ("OFF_TASK_COMM", "task_struct", "comm", 16),
    ("OFF_TASK_EXIT_CODE", "task_struct", "exit_code", 4),
    ("OFF_TASK_MM", "task_struct", "mm", 8),
    ("OFF_TASK_SIGNAL", "task_struct", "signal", 8),
    ("OFF_SIGNAL_LIVE", "signal_struct", "live", 4),
    ("OFF_SIGNAL_EXIT_CODE", "signal_struct", "group_exit_code", 4),
    ("OFF_SIGNAL_FLAGS", "signal_struct", "flags", 4),
    ("OFF_TASK_SIGHAND", "task_struct", "sighand", 8),
    // 64 of `struct k_sigaction`, which begins with the handler.
    ("OFF_SIGHAND_ACTION", "sighand_struct", "action", 64 * SIGACTION_SIZE),
    ("OFF_FILES_COUNT", "files_struct", "count", 4),
    ("OFF_FILES_FDT", "files_struct", "fdt", 8),
    ("OFF_FDT_MAX_FDS", "fdtable", "max_fds", 4),
    ("OFF_FDT_FD", "fdtable", "fd", 8),
    ("OFF_VMA_FILE", "vm_area_struct", "vm_file", 8),
    ("OFF_MM_ARG_START", "mm_struct", "arg_start", 8),
    ("OFF_MM_ARG_END", "mm_struct", "arg_end", 8),
];

/// Bytes of a `struct k_sigaction` on x86-64 and arm64.
pub const SIGACTION_SIZE: u32 = 32;

/// Where a file's reference count is, and by how much the stored number is less than the number of references:
/// `f_count` counts from 1; `f_ref` (since 6.13) stores one less than the references.
pub const OFF_FILE_REFS: &str = "OFF_FILE_REFS";
pub const FILE_REFS_BIAS: &str = "FILE_REFS_BIAS";
