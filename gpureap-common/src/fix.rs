//! Arguments of the program `fix`, which user space runs once per correction. Corrections are made in the kernel,
//! because user space can only replace a whole map value, and would overwrite what a hook adds meanwhile.

/// `[ADJUST, table, slot, delta, tgid, tid, start_ns, flags]`: adds to a table's descriptors of one slot, and says whose
/// the table is.
pub const ADJUST: u64 = 1;
/// `[ADJUST_FILE, file, delta]`: adds to a file's descriptors.
pub const ADJUST_FILE: u64 = 2;
/// `[CHECK_FILE, file]`: removes a file that was freed unseen; returns [`REMOVED`] if so.
pub const CHECK_FILE: u64 = 3;
/// `[MARK, tgid, start_ns, flags, slot]`: notes a process of interest; a slot is marked as mapped unless [`NO_SLOT`].
pub const MARK: u64 = 4;
/// `[FORGET_TABLE, table]`: removes a table of no descriptors whose owner is dead.
pub const FORGET_TABLE: u64 = 5;
/// `[FORGET_PROCESS, tgid, start_ns]`: removes a process of interest that is no more.
pub const FORGET_PROCESS: u64 = 6;

/// Words that are passed; unused ones are 0.
pub const ARGUMENTS: usize = 8;

pub const NO_SLOT: u64 = u64::MAX;

/// Return values.
pub const DONE: u32 = 0;
pub const REMOVED: u32 = 1;
pub const FAILED: u32 = 2;
