//! What the iterators write, one record for each descriptor or mapping of a device file.

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepRecord {
    /// Address of the `struct file`.
    pub file: u64,
    /// Address of the task's `files_struct`; 0 for a mapping.
    pub table: u64,
    /// The leader's `files_struct`; 0 when the leader has exited.
    pub leader_table: u64,
    /// `start_boottime` of the leader.
    pub start_ns: u64,
    /// References to the file, the iterator's own left out; negative when this kernel's layout is not known.
    pub refs: i64,
    pub tgid: u32,
    pub tid: u32,
    /// Descriptor number, or [`MAPPING`].
    pub fd: u32,
    pub dev: u32,
    /// Links to the inode; 0: the node was unlinked after the open.
    pub nlink: u32,
    /// [`sweep_flag`]s.
    pub flags: u32,
}

pub mod sweep_flag {
    /// The table's users are not just the tasks of this process: another process may use it, too.
    pub const MAY_BE_SHARED: u32 = 1;
}

/// [`SweepRecord::fd`] of a mapping.
pub const MAPPING: u32 = u32::MAX;

const _: () = assert!(size_of::<SweepRecord>() == 64);
