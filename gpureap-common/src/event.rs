//! Records of the ring `EVENTS`.

use crate::abi::COMM_LEN;

/// Every record begins with this.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// A [`kind`].
    pub kind: u16,
    /// Bytes of the whole record.
    pub size: u16,
    pub cpu: u32,
    pub time_ns: u64,
    pub tgid: u32,
    pub tid: u32,
    pub start_ns: u64,
}

pub mod kind {
    /// A driver open began; [`super::FileEvent`].
    pub const OPEN: u16 = 1;
    /// The last reference is gone and the driver's release has returned; [`super::FileEvent`].
    pub const FREE: u16 = 2;
    /// A process of interest forked; the header names the child; [`super::ProcEvent`].
    pub const FORK: u16 = 3;
    pub const EXEC: u16 = 4;
    /// The last thread of a process of interest is exiting; its files are still open; [`super::ProcEvent`].
    pub const EXIT: u16 = 5;
    /// The gate let an open of a device node through (`gate` only); [`super::FileEvent`] with `file` 0.
    pub const GATE: u16 = 6;
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileEvent {
    pub header: Header,
    pub file: u64,
    pub dev: u32,
    pub slot: u32,
    pub comm: [u8; COMM_LEN],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcEvent {
    pub header: Header,
    /// The forking process, for `FORK`.
    pub parent_start_ns: u64,
    pub parent_tgid: u32,
    /// Wait status, for `EXIT`.
    pub exit_code: u32,
    pub comm: [u8; COMM_LEN],
}

const _: () = {
    assert!(size_of::<Header>() == 32);
    assert!(size_of::<FileEvent>() == 64);
    assert!(size_of::<ProcEvent>() == 64);
};
