//! Values and keys of the pinned maps.

use crate::abi::{ARGS_LEN, COMM_LEN, SLOT_WORDS};

/// A process: thread-group id and `start_boottime` of its leader. A bare pid is never an identity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcKey {
    pub tgid: u32,
    pub pad: u32,
    pub start_ns: u64,
}

impl ProcKey {
    pub const fn new(tgid: u32, start_ns: u64) -> Self {
        Self { tgid, pad: 0, start_ns }
    }
}

/// `META`: who made the pinned maps. One element.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    pub magic: u64,
    pub abi: u32,
    /// A [`backend`] number.
    pub backend: u32,
    /// Boottime at which the programs were attached.
    pub attached_ns: u64,
    /// First eight bytes of the SHA-256 of the object that is attached.
    pub object: u64,
    /// Boottime of the first complete snapshot after the attach; 0 until then the map may lack older holders.
    pub snapshot_ns: u64,
    /// Wall clock minus boottime when attached.
    pub wall_offset_ns: i64,
}

/// Numbers of the probe sets in [`Meta::backend`].
pub mod backend {
    pub const KPROBE: u32 = 1;
    pub const FENTRY: u32 = 2;
    pub const GATE: u32 = 3;
    /// No probe set: the maps of a fence.
    pub const FENCE: u32 = 4;
}

/// `DEVICES`: kernel device number → what it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    pub slot: u32,
    /// The kind's number; only user space looks at it.
    pub kind: u32,
}

/// `FILES`: address of a live `struct file` on a device → its record. Inserted when the driver's open begins, removed
/// when the last reference is gone and the driver's release has returned.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct File {
    pub opened_ns: u64,
    pub opener_start_ns: u64,
    /// The process that closed the last descriptor while the file lived on.
    pub last_start_ns: u64,
    /// Counts the events on this file, so that a reader can tell a stable state.
    pub seq: u64,
    pub opener_tgid: u32,
    pub opener_tid: u32,
    pub last_tgid: u32,
    pub slot: u32,
    pub dev: u32,
    /// Descriptors over all tables. Negative only between the attach and the end of the first snapshot.
    pub fds: i32,
    /// [`file_flag`]s.
    pub flags: u32,
    pub pad: u32,
    pub comm: [u8; COMM_LEN],
    pub last_comm: [u8; COMM_LEN],
}

pub mod file_flag {
    /// Found by a sweep: it was open before the programs were attached, or its open was lost.
    pub const SNAPSHOT: u32 = 1;
    /// It has been in a descriptor table. Without it the open is still under way, failed, or was an io_uring direct open.
    pub const INSTALLED: u32 = 2;
    /// Someone mapped it.
    pub const MAPPED: u32 = 4;
}

/// `TABLES`: address of a `files_struct` that holds or held a device → its owner.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub start_ns: u64,
    pub born_ns: u64,
    /// Counts the events on this table.
    pub seq: u64,
    pub tgid: u32,
    /// The task that made the table.
    pub tid: u32,
    /// Device descriptors in it.
    pub total: i32,
    /// [`table_flag`]s.
    pub flags: u32,
    /// Slots that have a `HOLDERS` entry under this table.
    pub slots: [u64; SLOT_WORDS],
}

pub mod table_flag {
    /// Belongs to one thread, not to the whole process (`unshare(CLONE_FILES)`).
    pub const PRIVATE: u32 = 1;
    /// More than one process uses it (`clone(CLONE_FILES)`): a reader must ask a sweep who they are.
    pub const SHARED: u32 = 2;
    /// Its last user is exiting: only closes follow.
    pub const DYING: u32 = 4;
    /// First seen by a sweep.
    pub const SNAPSHOT: u32 = 8;
    /// Came from `dup_fd` in a task that holds devices.
    pub const COPIED: u32 = 16;
}

/// Key of `HOLDERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderKey {
    pub table: u64,
    pub slot: u32,
    pub pad: u32,
}

/// `HOLDERS`: descriptors of one device in one table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    pub first_ns: u64,
    pub last_ns: u64,
    pub fds: i32,
    pub pad: u32,
}

/// `PROCS`: tgid → a process of interest: it opened, received, inherited or mapped a device file. With the `gate` set
/// these are candidates that every read verifies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proc {
    pub start_ns: u64,
    pub first_ns: u64,
    pub last_ns: u64,
    /// The process this one was forked from, if that one was of interest then.
    pub from_start_ns: u64,
    pub from_tgid: u32,
    /// [`proc_flag`]s.
    pub flags: u32,
    /// Opens of device nodes begun by the process itself.
    pub opens: u32,
    pub pad: u32,
    /// Slots that this process, or one it was forked from, has mapped.
    pub mapped: [u64; SLOT_WORDS],
}

pub mod proc_flag {
    /// Its address space may hold a device mapping: a reader verifies with `task_vma`. Cleared by exec.
    pub const MAY_MAP: u32 = 1;
    pub const INHERITED: u32 = 2;
    pub const SNAPSHOT: u32 = 4;
    /// It got a device descriptor without opening one.
    pub const RECEIVED: u32 = 8;
    /// A fault that it handles itself was told once: virtual machines of languages cause and handle them all the time.
    pub const FAULT_TOLD: u32 = 16;
}

/// `LINEAGE` (LRU): every process, so that ancestors which are gone when a child opens a GPU are still known.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lineage {
    pub parent_start_ns: u64,
    pub exec_ns: u64,
    pub exit_ns: u64,
    pub cgroup_id: u64,
    pub parent_tgid: u32,
    pub uid: u32,
    /// Wait status as `wait(2)` reports it; valid when `exit_ns` is not 0.
    pub exit_code: u32,
    /// [`lineage_flag`]s.
    pub flags: u32,
    /// Bytes of `args` in use.
    pub args_len: u32,
    pub pad: u32,
    pub comm: [u8; COMM_LEN],
    pub args: [u8; ARGS_LEN],
}

impl Default for Lineage {
    fn default() -> Self {
        Self {
            parent_start_ns: 0,
            exec_ns: 0,
            exit_ns: 0,
            cgroup_id: 0,
            parent_tgid: 0,
            uid: 0,
            exit_code: 0,
            flags: 0,
            args_len: 0,
            pad: 0,
            comm: [0; COMM_LEN],
            args: [0; ARGS_LEN],
        }
    }
}

pub mod lineage_flag {
    /// Recorded by the start snapshot: the parent is the one at that time, not the one at fork.
    pub const SNAPSHOT: u32 = 1;
    /// The arguments were longer than what was kept.
    pub const ARGS_CUT: u32 = 2;
}

const _: () = {
    assert!(size_of::<ProcKey>() == 16);
    assert!(size_of::<Meta>() == 48);
    assert!(size_of::<Device>() == 8);
    assert!(size_of::<File>() == 96);
    assert!(size_of::<Table>() == 72);
    assert!(size_of::<HolderKey>() == 16);
    assert!(size_of::<Holder>() == 24);
    assert!(size_of::<Proc>() == 80);
    assert!(size_of::<Lineage>() == 56 + COMM_LEN + ARGS_LEN);
    assert!(core::mem::offset_of!(Lineage, comm) % 8 == 0);
};

#[cfg(feature = "user")]
mod pod {
    use super::{Device, File, Holder, HolderKey, Lineage, Meta, Proc, ProcKey, Table};
    use crate::{
        event::{FileEvent, Header, ProcEvent, SignalEvent},
        sweep::SweepRecord,
    };

    macro_rules! pod {
        ($($record:ty),*) => {
            $(
                // SAFETY: repr(C), every bit pattern is a value, no implicit padding (sizes are asserted above).
                unsafe impl aya::Pod for $record {}
            )*
        };
    }
    pod!(ProcKey, Meta, Device, File, Table, HolderKey, Holder, Proc, Lineage);
    pod!(Header, FileEvent, ProcEvent, SignalEvent, SweepRecord);
}
