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
    /// A process of interest has a new thread, or one of its threads a new name; [`super::ProcEvent`].
    pub const THREAD: u16 = 7;
    /// A signal to a process of interest that may end it; the header names the target; [`super::SignalEvent`].
    pub const SIGNAL: u16 = 8;
    /// A victim of the kernel's out-of-memory killer, of any process; [`super::ProcEvent`]. Where the tracepoint tells a
    /// thread id alone the header has no process.
    pub const OOM: u16 = 9;
    /// A table has its first descriptor of a device, not by fork; [`super::FileEvent`] of the table's process.
    pub const FIRST: u16 = 10;
    /// A table has lost its last descriptor of a device, its process lives; [`super::FileEvent`] of the table's process.
    pub const LAST: u16 = 11;
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileEvent {
    pub header: Header,
    pub file: u64,
    pub dev: u32,
    pub slot: u32,
    /// [`crate::record::file_flag`]s, for `FREE`.
    pub flags: u32,
    pub pad: u32,
    pub comm: [u8; COMM_LEN],
}

/// What the kernel says of a signal when it is sent (`trace_signal_generate`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignalEvent {
    /// The target; `tid` is the thread that it was sent to, of which the process may take any.
    pub header: Header,
    /// The running task: the sender, unless [`origin::KERNEL`].
    pub sender_start_ns: u64,
    pub sender_tgid: u32,
    pub sender_tid: u32,
    pub sender_uid: u32,
    pub signal: u32,
    /// `si_code`; 0 without a `siginfo`.
    pub code: i32,
    /// An [`origin`].
    pub origin: u32,
    /// Whether the whole process was meant, not one thread.
    pub group: u32,
    pub pad: u32,
    pub thread: [u8; COMM_LEN],
    pub sender_thread: [u8; COMM_LEN],
    pub sender_comm: [u8; COMM_LEN],
}

/// Who a signal comes from, by its `siginfo` (`SEND_SIG_NOINFO`, `SEND_SIG_PRIV`, include/linux/sched/signal.h).
pub mod origin {
    /// The kernel, on its own behalf: a fault of the target, the out-of-memory killer, a terminal, a timer.
    pub const KERNEL: u32 = 0;
    /// The running task, by a system call.
    pub const TASK: u32 = 1;
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
    assert!(size_of::<FileEvent>() == 72);
    assert!(size_of::<SignalEvent>() == 32 + 8 + 8 * 4 + 3 * COMM_LEN);
    assert!(size_of::<ProcEvent>() == 64);
};
