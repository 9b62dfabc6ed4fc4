//! Every map: who writes it, who reads it, what happens when it is full. Sizes are defaults; the loader sets them.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf},
};
use gpureap_common::{
    abi, counter,
    record::{Device, File, Holder, HolderKey, Lineage, Meta, Proc, ProcKey, Table},
};

/// Written by user space at start; says what made the pins.
#[map]
pub(crate) static META: Array<Meta> = Array::with_max_entries(1, 0);

/// Major → 1 when `DEVICES` knows any of its minors. An array, because every character device opened on the host asks it.
#[map]
pub(crate) static MAJORS: Array<u32> = Array::with_max_entries(abi::MAX_MAJOR, 0);

/// Device number → slot and kind. Written by user space at start and when the driver was reloaded.
#[map]
pub(crate) static DEVICES: HashMap<u32, Device> = HashMap::with_max_entries(4096, 0);

/// Live device files. Full: the file is not tracked, `files_full` is counted, readers sweep.
#[map]
pub(crate) static FILES: HashMap<u64, File> = HashMap::with_max_entries(16384, 0);

/// Descriptor tables that hold or held a device. Full: as `FILES`, `tables_full`.
#[map]
pub(crate) static TABLES: HashMap<u64, Table> = HashMap::with_max_entries(16384, 0);

/// Descriptors by table and slot. An entry lives as long as its table: removing it earlier could lose a count that
/// another thread is adding. Full: as `FILES`, `holders_full`.
#[map]
pub(crate) static HOLDERS: HashMap<HolderKey, Holder> = HashMap::with_max_entries(32768, 0);

/// Processes of interest. Full: `procs_full`, readers sweep.
#[map]
pub(crate) static PROCS: HashMap<u32, Proc> = HashMap::with_max_entries(16384, 0);

/// Every process, for ancestors that are gone. Full: the least recently used entry is dropped; evictions are
/// `lineage_inserts` less the entries present.
#[map]
pub(crate) static LINEAGE: LruHashMap<ProcKey, Lineage> = LruHashMap::with_max_entries(16384, 0);

/// Records for the daemon. Full: the record is dropped and counted; the maps above stay right.
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// See [`counter`].
#[map]
pub(crate) static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::CAPACITY, 0);

/// Words that user space keeps across restarts; the kernel does not look at them.
#[map]
pub(crate) static STATE: Array<u64> = Array::with_max_entries(64, 0);
