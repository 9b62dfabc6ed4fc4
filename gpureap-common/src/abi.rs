//! Version and names of what is pinned.

/// Raised with every change of a shared record, a map's type or a pinned program's meaning.
pub const ABI_VERSION: u32 = 2;

/// First word of [`crate::record::Meta`]: "gpureap\0" read as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"gpureap\0");

/// Kernel device numbers are `major << 20 | minor` (`MKDEV`, include/linux/kdev_t.h).
pub const MINOR_BITS: u32 = 20;

/// Most device nodes that get a slot of their own; the last one stands for all others of a wildcard entry.
pub const MAX_SLOTS: u32 = 256;

/// Words of a bit set over all slots.
pub const SLOT_WORDS: usize = (MAX_SLOTS / 64) as usize;

/// Length of `task_struct.comm`, the terminating zero included.
pub const COMM_LEN: usize = 16;

/// Bytes of a process's arguments that the kernel keeps at exec.
pub const ARGS_LEN: usize = 256;

/// Minor of a `DEVICES` key that stands for every minor of its major without an entry of its own.
pub const ANY_MINOR: u32 = (1 << MINOR_BITS) - 1;

/// Majors are 12 bits wide (`MAJOR`, include/linux/kdev_t.h).
pub const MAX_MAJOR: u32 = 4096;

pub const fn dev(major: u32, minor: u32) -> u32 {
    major << MINOR_BITS | minor
}

pub const fn major(dev: u32) -> u32 {
    dev >> MINOR_BITS
}

pub const fn minor(dev: u32) -> u32 {
    dev & ((1 << MINOR_BITS) - 1)
}
