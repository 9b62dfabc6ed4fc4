//! Joins the kernel's records into a view of who holds what.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use gpureap_common::{
    record::{File, Holder as Count, HolderKey, Proc, ProcKey, Table, file_flag, proc_flag, table_flag},
    sweep::{MAPPING, SweepRecord, sweep_flag},
};

use crate::model::{Holder, How, Orphan, Slot};

/// The contents of the maps at one moment.
#[derive(Clone, Debug, Default)]
pub struct MapState {
    pub tables: HashMap<u64, Table>,
    pub holders: Vec<(HolderKey, Count)>,
    pub files: Files,
    pub procs: Procs,
}

impl MapState {
    /// Forgets what is told of other slots.
    pub fn retain_slots(&mut self, known: &dyn Fn(Slot) -> bool) {
        self.holders.retain(|(key, _)| known(key.slot));
        self.files.retain(|_, file| known(file.slot));
    }
}

/// Device files by the address of their `struct file`.
pub type Files = HashMap<u64, File>;

/// Processes of interest by tgid.
pub type Procs = HashMap<u32, Proc>;

/// Which slot a device number has.
pub type SlotOf<'a> = &'a dyn Fn(u32) -> Option<Slot>;

/// An open that is under way is nobody's file yet; one that takes longer than this is told.
const OPENING_NS: u64 = 50_000_000;

const fn empty(key: ProcKey) -> Holder {
    Holder {
        key,
        usage: BTreeMap::new(),
        how: BTreeSet::new(),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    }
}

/// What a sweep's record says of the way its file is held.
fn note_how(holder: &mut Holder, record: &SweepRecord) {
    if record.fd == MAPPING {
        holder.how.insert(How::Map);
    } else {
        holder.how.insert(How::Fd);
        if record.leader_table == 0 {
            holder.how.insert(How::ZombieLeader);
        } else if record.table != record.leader_table {
            holder.how.insert(How::PrivateFdTable);
            holder.private_tids.insert(record.tid);
        }
    }
    if record.nlink == 0 {
        holder.how.insert(How::DeletedNode);
    }
}

/// A table is shown once per process that uses it, and once per thread when its leader has exited; so is an address
/// space, which all threads share: the first thread of a process stands for it.
fn distinct(records: &[SweepRecord]) -> impl Iterator<Item = &SweepRecord> {
    let mut seen = HashSet::new();
    let mut mappers = HashMap::new();
    records.iter().filter(move |record| {
        if record.fd == MAPPING {
            *mappers.entry(record.tgid).or_insert(record.tid) == record.tid
        } else {
            seen.insert((record.tgid, record.table, record.fd))
        }
    })
}

/// Holders as a sweep sees them: the truth for descriptors and mappings.
pub fn from_sweep(records: &[SweepRecord], slot_of: SlotOf<'_>) -> BTreeMap<ProcKey, Holder> {
    let mut holders: BTreeMap<ProcKey, Holder> = BTreeMap::new();
    for record in distinct(records) {
        let Some(slot) = slot_of(record.dev) else { continue };
        let key = ProcKey::new(record.tgid, record.start_ns);
        let holder = holders.entry(key).or_insert_with(|| empty(key));
        let usage = holder.usage.entry(slot).or_default();
        if record.fd == MAPPING {
            usage.maps += 1;
        } else {
            usage.fds += 1;
        }
        note_how(holder, record);
    }
    holders
}

/// Slots that processes have mapped.
pub fn mapped(records: &[SweepRecord], slot_of: SlotOf<'_>) -> BTreeMap<ProcKey, BTreeSet<Slot>> {
    let mut mapped: BTreeMap<ProcKey, BTreeSet<Slot>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.fd == MAPPING) {
        if let Some(slot) = slot_of(record.dev) {
            mapped.entry(ProcKey::new(record.tgid, record.start_ns)).or_default().insert(slot);
        }
    }
    mapped
}

/// Device files that a sweep saw, by slot.
pub fn files_in_sweep(records: &[SweepRecord], slot_of: SlotOf<'_>) -> BTreeMap<Slot, u32> {
    let mut seen = HashSet::new();
    let mut files = BTreeMap::new();
    for record in records {
        if let Some(slot) = slot_of(record.dev)
            && seen.insert(record.file)
        {
            *files.entry(slot).or_default() += 1;
        }
    }
    files
}

/// References to files that a sweep's records do not account for: a descriptor in flight, a table of another process, a
/// system call under way.
pub fn has_unseen_references(records: &[SweepRecord]) -> bool {
    #[derive(Default)]
    struct Seen {
        refs: i64,
        unknown: bool,
        descriptors: HashSet<(u64, u32)>,
        maps: i64,
    }
    let mut files: HashMap<u64, Seen> = HashMap::new();
    for record in distinct(records) {
        let seen = files.entry(record.file).or_default();
        seen.refs = seen.refs.max(record.refs);
        seen.unknown |= record.refs < 0;
        if record.fd == MAPPING {
            seen.maps += 1;
        } else {
            seen.descriptors.insert((record.table, record.fd));
        }
    }
    files.values().any(|seen| seen.unknown || seen.refs > seen.descriptors.len() as i64 + seen.maps)
}

/// Whether a table that a sweep of some processes saw may be used by a process outside of it.
pub fn may_be_shared(records: &[SweepRecord]) -> bool {
    records.iter().any(|record| record.flags & sweep_flag::MAY_BE_SHARED != 0)
}

/// Processes that a reader must look at one by one: owners of tables with devices, and those that may have a mapping.
pub fn to_verify(state: &MapState) -> BTreeSet<u32> {
    let mut tgids: BTreeSet<u32> = state
        .holders
        .iter()
        .filter(|(_, count)| count.fds > 0)
        .filter_map(|(key, _)| state.tables.get(&key.table))
        .filter(|table| table.flags & table_flag::SHARED == 0)
        .map(|table| table.tgid)
        .collect();
    tgids.extend(
        state.procs.iter().filter(|(_, process)| process.flags & proc_flag::MAY_MAP != 0).map(|(tgid, _)| *tgid),
    );
    tgids
}

/// Whether a table that several processes use holds a device: then only a sweep can say who they are.
pub fn needs_sweep(state: &MapState) -> bool {
    state.holders.iter().any(|(key, count)| {
        count.fds > 0 && state.tables.get(&key.table).is_some_and(|table| table.flags & table_flag::SHARED != 0)
    })
}

/// Holders by the map: descriptors are the kernel's own counts, mappings and the way of holding come from `records` of
/// the processes in [`to_verify`] (or of all, when [`needs_sweep`]).
pub fn from_map(state: &MapState, records: &[SweepRecord], slot_of: SlotOf<'_>) -> BTreeMap<ProcKey, Holder> {
    let mut holders: BTreeMap<ProcKey, Holder> = BTreeMap::new();
    let mut add = |key: ProcKey, slot: Slot, count: &Count, table: &Table| {
        let holder = holders.entry(key).or_insert_with(|| empty(key));
        let usage = holder.usage.entry(slot).or_default();
        usage.fds = usage.fds.saturating_add(count.fds as u32);
        usage.first_open_ns = Some(usage.first_open_ns.map_or(count.first_ns, |first| first.min(count.first_ns)));
        usage.last_open_ns = usage.last_open_ns.max(Some(count.last_ns));
        holder.how.insert(How::Fd);
        holder.from_snapshot |= table.flags & table_flag::SNAPSHOT != 0;
    };
    for (key, count) in state.holders.iter().filter(|(_, count)| count.fds > 0) {
        let Some(table) = state.tables.get(&key.table) else { continue };
        if table.flags & table_flag::SHARED == 0 {
            add(ProcKey::new(table.tgid, table.start_ns), key.slot, count, table);
            continue;
        }
        let sharers: BTreeSet<ProcKey> = records
            .iter()
            .filter(|record| record.fd != MAPPING && record.table == key.table)
            .map(|record| ProcKey::new(record.tgid, record.start_ns))
            .collect();
        for sharer in sharers {
            add(sharer, key.slot, count, table);
        }
    }
    for record in distinct(records) {
        let Some(slot) = slot_of(record.dev) else { continue };
        let key = ProcKey::new(record.tgid, record.start_ns);
        if record.fd == MAPPING {
            holders.entry(key).or_insert_with(|| empty(key)).usage.entry(slot).or_default().maps += 1;
        }
        if let Some(holder) = holders.get_mut(&key) {
            note_how(holder, record);
        }
    }
    holders
}

/// Adds what is remembered of the processes: from whom they inherited, what they have ever mapped.
pub fn remember(holders: &mut BTreeMap<ProcKey, Holder>, procs: &Procs) {
    for holder in holders.values_mut() {
        let Some(process) = procs.get(&holder.key.tgid).filter(|process| process.start_ns == holder.key.start_ns)
        else {
            continue;
        };
        if process.flags & proc_flag::INHERITED != 0 {
            holder.inherited_from = Some(ProcKey::new(process.from_tgid, process.from_start_ns));
        }
        holder.from_snapshot |= process.flags & proc_flag::SNAPSHOT != 0;
        for (slot, usage) in &mut holder.usage {
            let word = process.mapped[(*slot / 64) as usize % process.mapped.len()];
            usage.ever_mapped |= word & 1 << (slot % 64) != 0;
            if usage.first_open_ns.is_none() {
                usage.first_open_ns = Some(process.first_ns);
                usage.last_open_ns = Some(process.last_ns);
            }
        }
    }
}

/// Files that no table and no mapping refers to. `uses_uring` tells whether a process has an io_uring.
pub fn orphans(
    files: &Files,
    records: &[SweepRecord],
    now_ns: u64,
    uses_uring: &dyn Fn(ProcKey) -> bool,
) -> Vec<Orphan> {
    let mapped: HashSet<u64> = records.iter().filter(|record| record.fd == MAPPING).map(|record| record.file).collect();
    let mut groups: BTreeMap<(Slot, How, ProcKey), (u32, String)> = BTreeMap::new();
    for (address, file) in files {
        if file.fds > 0 || mapped.contains(address) {
            continue;
        }
        let installed = file.flags & file_flag::INSTALLED != 0;
        let (owner, comm) = if installed {
            (ProcKey::new(file.last_tgid, file.last_start_ns), file.last_comm)
        } else {
            (ProcKey::new(file.opener_tgid, file.opener_start_ns), file.comm)
        };
        let how = if uses_uring(owner) { How::IoUring } else { How::InFlight };
        if !installed && how == How::InFlight && now_ns.saturating_sub(file.opened_ns) < OPENING_NS {
            continue;
        }
        groups.entry((file.slot, how, owner)).or_insert_with(|| (0, text(&comm))).0 += 1;
    }
    groups
        .into_iter()
        .map(|((slot, how, owner), (files, comm))| Orphan {
            slot,
            files,
            how,
            last_owner: (owner.tgid != 0).then_some((owner, comm)),
        })
        .collect()
}

/// A kernel name: up to its first zero byte.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Arguments as the kernel keeps them: each ended by a zero byte, the last one perhaps cut.
pub fn arguments(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEV: u32 = 195 << 20;

    fn slot_of(dev: u32) -> Option<Slot> {
        (dev >> 20 == 195).then_some(dev & 0xfffff)
    }

    fn record(tgid: u32, tid: u32, table: u64, fd: u32, file: u64) -> SweepRecord {
        SweepRecord {
            file,
            table: if fd == MAPPING { 0 } else { table },
            leader_table: 0x100 + u64::from(tgid),
            start_ns: u64::from(tgid) * 10,
            refs: 1,
            tgid,
            tid,
            fd,
            dev: DEV,
            nlink: 1,
            flags: 0,
        }
    }

    #[test]
    fn a_table_shown_by_several_threads_of_a_dead_leader_counts_once() {
        let mut records = vec![record(7, 8, 0x500, 3, 0xa), record(7, 9, 0x500, 3, 0xa)];
        for record in &mut records {
            record.leader_table = 0;
        }
        let holders = from_sweep(&records, &slot_of);
        let holder = &holders[&ProcKey::new(7, 70)];
        assert_eq!(holder.usage[&0].fds, 1);
        assert!(holder.how.contains(&How::ZombieLeader) && !holder.how.contains(&How::PrivateFdTable));
    }

    #[test]
    fn a_threads_own_table_is_told_with_its_tid() {
        let records = [record(7, 7, 0x107, 3, 0xa), record(7, 9, 0x900, 3, 0xa), record(7, 7, 0, MAPPING, 0xa)];
        let holders = from_sweep(&records, &slot_of);
        let holder = &holders[&ProcKey::new(7, 70)];
        assert_eq!((holder.usage[&0].fds, holder.usage[&0].maps), (2, 1));
        assert_eq!(holder.private_tids, BTreeSet::from([9]));
        assert!(holder.how.contains(&How::PrivateFdTable) && holder.how.contains(&How::Map));
    }

    #[test]
    fn an_address_space_shown_by_several_threads_counts_once() {
        let records = [
            record(7, 8, 0, MAPPING, 0xa),
            record(7, 8, 0, MAPPING, 0xb),
            record(7, 9, 0, MAPPING, 0xa),
            record(7, 9, 0, MAPPING, 0xb),
        ];
        assert_eq!(from_sweep(&records, &slot_of)[&ProcKey::new(7, 70)].usage[&0].maps, 2);
        assert!(!has_unseen_references(&records));
        let more = records.map(|record| SweepRecord { refs: 2, ..record });
        assert!(has_unseen_references(&more), "two threads that show one mapping do not hide a second reference");
    }

    #[test]
    fn a_node_without_links_is_a_deleted_node() {
        let mut deleted = record(7, 7, 0x107, 3, 0xa);
        deleted.nlink = 0;
        let holders = from_sweep(&[deleted], &slot_of);
        assert!(holders[&ProcKey::new(7, 70)].how.contains(&How::DeletedNode));
    }

    #[test]
    fn a_table_that_may_have_other_users_is_noticed() {
        let records = vec![record(7, 7, 0x107, 3, 0xa), record(7, 7, 0x107, 4, 0xa)];
        assert!(!may_be_shared(&records));
        let mut shared = records;
        shared[1].flags = sweep_flag::MAY_BE_SHARED;
        assert!(may_be_shared(&shared));
    }

    #[test]
    fn references_beyond_descriptors_and_mappings_are_noticed() {
        let case = |refs: i64, records: &mut Vec<SweepRecord>| {
            for record in records.iter_mut() {
                record.refs = refs;
            }
            has_unseen_references(records)
        };
        let two = || vec![record(1, 1, 0x101, 3, 0xa), record(2, 2, 0x102, 3, 0xa)];
        assert!(!case(2, &mut two()), "two descriptors, two references");
        assert!(case(3, &mut two()), "one more than descriptors");
        assert!(case(-1, &mut two()), "a kernel without a known count can hide anything");
        // Two threads show one table: one reference.
        assert!(!case(1, &mut vec![record(1, 1, 0x101, 3, 0xa), record(1, 2, 0x101, 3, 0xa)]));
        assert!(!case(2, &mut vec![record(1, 1, 0x101, 3, 0xa), record(1, 1, 0, MAPPING, 0xa)]));
    }

    fn one_table(flags: u32, fds: i32) -> MapState {
        let table = Table { tgid: 7, tid: 7, start_ns: 70, total: fds, flags, ..Table::default() };
        MapState {
            tables: HashMap::from([(0x107, table)]),
            holders: vec![(
                HolderKey { table: 0x107, slot: 0, pad: 0 },
                Count { first_ns: 5, last_ns: 9, fds, pad: 0 },
            )],
            ..MapState::default()
        }
    }

    #[test]
    fn the_map_counts_descriptors_and_the_sweep_mappings() {
        let state = one_table(0, 2);
        assert_eq!(to_verify(&state), BTreeSet::from([7]));
        let holders = from_map(&state, &[record(7, 7, 0, MAPPING, 0xa)], &slot_of);
        let usage = &holders[&ProcKey::new(7, 70)].usage[&0];
        assert_eq!((usage.fds, usage.maps, usage.first_open_ns, usage.last_open_ns), (2, 1, Some(5), Some(9)));
    }

    #[test]
    fn entries_at_zero_or_below_hold_nothing() {
        for fds in [0, -1] {
            assert!(from_map(&one_table(0, fds), &[], &slot_of).is_empty());
            assert!(to_verify(&one_table(0, fds)).is_empty());
        }
    }

    #[test]
    fn every_process_of_a_shared_table_holds() {
        let state = one_table(table_flag::SHARED, 1);
        assert!(needs_sweep(&state) && to_verify(&state).is_empty());
        let holders = from_map(&state, &[record(7, 7, 0x107, 3, 0xa), record(8, 8, 0x107, 3, 0xa)], &slot_of);
        assert_eq!(holders.keys().map(|key| key.tgid).collect::<Vec<_>>(), [7, 8]);
    }

    #[test]
    fn a_reused_pid_remembers_nothing_of_the_one_before() {
        let mut holders = from_map(&one_table(0, 1), &[], &slot_of);
        let stale = Proc { start_ns: 69, flags: proc_flag::INHERITED, from_tgid: 3, ..Proc::default() };
        remember(&mut holders, &HashMap::from([(7, stale)]));
        assert_eq!(holders[&ProcKey::new(7, 70)].inherited_from, None);
        let own = Proc { start_ns: 70, mapped: [1, 0, 0, 0], from_start_ns: 30, ..stale };
        remember(&mut holders, &HashMap::from([(7, own)]));
        let holder = &holders[&ProcKey::new(7, 70)];
        assert_eq!(holder.inherited_from, Some(ProcKey::new(3, 30)));
        assert!(holder.usage[&0].ever_mapped);
    }

    #[test]
    fn orphans_are_files_of_no_table_and_no_mapping() {
        let base = File { flags: file_flag::INSTALLED, last_tgid: 4, last_start_ns: 40, ..File::default() };
        let files = HashMap::from([
            (1, File { fds: 1, ..base }),
            (2, base),
            (3, base),
            (4, base),
            (5, File { flags: 0, opened_ns: 1000, opener_tgid: 6, ..File::default() }),
        ]);
        let records = [SweepRecord { file: 4, fd: MAPPING, ..SweepRecord::default() }];
        let found = orphans(&files, &records, 2000, &|_| false);
        assert_eq!(found.len(), 1, "an open under way is not told yet: {found:?}");
        assert_eq!((found[0].files, found[0].how), (2, How::InFlight));
        assert_eq!(found[0].last_owner.as_ref().map(|(key, _)| key.tgid), Some(4));
        let later = orphans(&files, &records, 2000 + OPENING_NS, &|key| key.tgid == 6);
        assert_eq!(later.iter().map(|orphan| orphan.how).collect::<Vec<_>>(), [How::InFlight, How::IoUring]);
    }

    #[test]
    fn arguments_are_split_at_zero_bytes() {
        assert_eq!(arguments(b"python3\0train.py\0"), ["python3", "train.py"]);
        assert_eq!(arguments(b"a\0\0b"), ["a", "", "b"]);
        assert_eq!(arguments(b""), Vec::<String>::new());
        assert_eq!(text(b"na\xffme\0junk"), "na\u{fffd}me");
    }
}
