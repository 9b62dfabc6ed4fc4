//! Indices of the per-CPU array `COUNTERS`. What can be lost is counted here; a rise of a [`LOSSES`] index means that
//! the maps may be wrong until a resync.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident = $index:literal => $label:literal,)*) => {
        $($(#[$doc])* pub const $name: u32 = $index;)*
        /// Number of counters.
        pub const COUNT: u32 = [$($index),*].len() as u32;
        /// Their names, by index.
        pub const NAMES: [&str; COUNT as usize] = [$($label),*];
    };
}

counters! {
    /// Records put into the ring.
    EVENTS = 0 => "events",
    /// Records that found the ring full.
    RING_FULL = 1 => "ring_full",
    FILES_FULL = 2 => "files_full",
    TABLES_FULL = 3 => "tables_full",
    HOLDERS_FULL = 4 => "holders_full",
    PROCS_FULL = 5 => "procs_full",
    /// A kernel structure could not be read.
    READ_FAULT = 6 => "read_fault",
    /// A fork copied a table that holds devices, and the copy was not seen.
    COPY_MISSED = 7 => "copy_missed",
    /// A descriptor table was longer than the walk.
    WALK_CUT = 8 => "walk_cut",
    /// A `FILES` entry whose file had been freed unseen.
    STALE_FILE = 9 => "stale_file",
    /// Opens of device nodes that passed the gate (attempts: the driver may still refuse).
    GATE_OPENS = 10 => "gate_opens",
    /// Device files whose driver open began.
    FILE_OPENS = 11 => "file_opens",
    /// Device files freed.
    FILE_FREES = 12 => "file_frees",
    /// Entries ever put into `LINEAGE`; less its present size, the evictions.
    LINEAGE_INSERTS = 13 => "lineage_inserts",
    /// Records that the iterators wrote; one that did not fit the buffer and was asked for again counts twice.
    SWEEP_RECORDS = 14 => "sweep_records",
}

/// Counters whose rise means that holders may be missing or wrong until a resync.
pub const LOSSES: [u32; 8] =
    [FILES_FULL, TABLES_FULL, HOLDERS_FULL, PROCS_FULL, READ_FAULT, COPY_MISSED, WALK_CUT, STALE_FILE];

/// Room in the map, so that counters can be added without a new ABI.
pub const CAPACITY: u32 = 64;

const _: () = assert!(COUNT <= CAPACITY);
