//! Compares the map with a sweep and says what to correct. Hooks go on counting meanwhile, and a hook and the change of
//! the table that it tells of are not one instant; so a difference counts only if it was there twice while the table's
//! sequence number stood still, and the correction is a delta that the kernel adds, which commutes with every event. A file
//! that no map has must be there twice too: many live for less than it takes to look.

use std::collections::{BTreeMap, HashMap, HashSet};

use gpureap_common::{
    record::{File, ProcKey, Table, file_flag, proc_flag, table_flag},
    sweep::{MAPPING, SweepRecord},
};

use super::join::{MapState, SlotOf};
use crate::model::Slot;

/// A correction; see [`gpureap_common::fix`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fix {
    /// A file that no hook has seen the open of.
    InsertFile {
        address: u64,
        file: File,
    },
    Adjust {
        table: u64,
        slot: Slot,
        delta: i32,
        owner: Option<Owner>,
    },
    AdjustFile {
        address: u64,
        delta: i32,
    },
    /// A file that nobody seems to have: it may have been freed unseen.
    CheckFile {
        address: u64,
    },
    Mark {
        key: ProcKey,
        flags: u32,
        slot: Option<Slot>,
    },
    /// A table of no descriptors whose process is gone.
    ForgetTable {
        table: u64,
    },
    /// A process of interest that is gone: it was marked while it ended, or its exit was not seen.
    ForgetProcess {
        key: ProcKey,
    },
}

/// Whose a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub key: ProcKey,
    pub tid: u32,
    pub flags: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Subject {
    Table(u64, Slot),
    File(u64),
}

/// What one round found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// To be applied now.
    pub fixes: Vec<Fix>,
    /// Differences that must be seen once more, or that moved.
    pub pending: usize,
}

impl Round {
    pub fn settled(&self) -> bool {
        self.fixes.is_empty() && self.pending == 0
    }
}

/// Differences of the round before, with the sequence number under which they were seen.
#[derive(Debug, Default)]
pub struct Resync {
    seen: HashMap<Subject, (Option<u64>, i32)>,
    /// Files of the sweep before that no map had.
    unknown: HashSet<u64>,
}

/// What a sweep says of tables, files and processes.
struct Seen {
    counts: BTreeMap<(u64, Slot), i32>,
    files: HashMap<u64, (u32, Slot, i32)>,
    owners: HashMap<u64, Owner>,
    processes: BTreeMap<ProcKey, HashSet<Slot>>,
}

impl Seen {
    fn new(records: &[SweepRecord], slot_of: SlotOf<'_>) -> Self {
        let mut seen =
            Self { counts: BTreeMap::new(), files: HashMap::new(), owners: HashMap::new(), processes: BTreeMap::new() };
        let mut descriptors = HashSet::new();
        for record in records {
            let Some(slot) = slot_of(record.dev) else { continue };
            let key = ProcKey::new(record.tgid, record.start_ns);
            let mapped = seen.processes.entry(key).or_default();
            let file = seen.files.entry(record.file).or_insert((record.dev, slot, 0));
            if record.fd == MAPPING {
                mapped.insert(slot);
                continue;
            }
            // Tables are shown once for each process that shares them; a descriptor is one nevertheless.
            if descriptors.insert((record.table, record.fd)) {
                file.2 += 1;
                *seen.counts.entry((record.table, slot)).or_default() += 1;
            }
            let private = record.leader_table != 0 && record.table != record.leader_table;
            let flags = if private { table_flag::PRIVATE } else { 0 };
            seen.owners
                .entry(record.table)
                .and_modify(|owner| {
                    if owner.key != key {
                        owner.flags |= table_flag::SHARED;
                    }
                })
                .or_insert(Owner { key, tid: record.tid, flags });
        }
        seen
    }
}

impl Resync {
    /// One round: the map read before and after the sweep. `gone` tells that a process is no more.
    pub fn round(
        &mut self,
        before: &MapState,
        records: &[SweepRecord],
        after: &MapState,
        slot_of: SlotOf<'_>,
        gone: &dyn Fn(ProcKey) -> bool,
    ) -> Round {
        let seen = Seen::new(records, slot_of);
        let mut round = Round::default();
        let mut differences = HashMap::new();

        let mut unknown = HashSet::new();
        for (address, (dev, slot, fds)) in &seen.files {
            if after.files.contains_key(address) || before.files.contains_key(address) {
                continue;
            }
            if self.unknown.contains(address) {
                let flags = file_flag::SNAPSHOT | file_flag::INSTALLED;
                let file = File { dev: *dev, slot: *slot, fds: *fds, flags, ..File::default() };
                round.fixes.push(Fix::InsertFile { address: *address, file });
            } else {
                round.pending += 1;
                unknown.insert(*address);
            }
        }
        self.unknown = unknown;
        for (key, mapped) in &seen.processes {
            let known = after.procs.get(&key.tgid).filter(|process| process.start_ns == key.start_ns);
            if known.is_none() {
                round.fixes.push(Fix::Mark { key: *key, flags: proc_flag::SNAPSHOT, slot: None });
            }
            for slot in mapped {
                let marked = known.is_some_and(|process| {
                    process.flags & proc_flag::MAY_MAP != 0
                        && process.mapped[(*slot / 64) as usize % process.mapped.len()] & 1 << (slot % 64) != 0
                });
                if !marked {
                    let flags = proc_flag::SNAPSHOT | proc_flag::MAY_MAP;
                    round.fixes.push(Fix::Mark { key: *key, flags, slot: Some(*slot) });
                }
            }
        }

        for (tgid, process) in &after.procs {
            let key = ProcKey::new(*tgid, process.start_ns);
            if !seen.processes.contains_key(&key) && gone(key) {
                round.fixes.push(Fix::ForgetProcess { key });
            }
        }

        let have: BTreeMap<(u64, Slot), i32> =
            after.holders.iter().map(|(key, count)| ((key.table, key.slot), count.fds)).collect();
        let mut subjects: Vec<(u64, Slot)> = have.keys().chain(seen.counts.keys()).copied().collect();
        subjects.sort_unstable();
        subjects.dedup();
        for (table, slot) in subjects {
            let want = seen.counts.get(&(table, slot)).copied().unwrap_or(0);
            let delta = want - have.get(&(table, slot)).copied().unwrap_or(0);
            let owner = seen.owners.get(&table).copied();
            let record = after.tables.get(&table);
            let misnamed = want > 0 && record.is_none_or(|record| !names(record, owner));
            if delta == 0 && !misnamed {
                continue;
            }
            let (first, last) = (before.tables.get(&table), record);
            let fix = Fix::Adjust { table, slot, delta, owner };
            self.judge(
                Subject::Table(table, slot),
                (first.map(|table| table.seq), last.map(|table| table.seq)),
                delta,
                fix,
                &mut differences,
                &mut round,
            );
        }
        for (address, file) in &after.files {
            let want = seen.files.get(address).map_or(0, |file| file.2);
            let delta = want - file.fds;
            let sequence = (before.files.get(address).map(|file| file.seq), Some(file.seq));
            if delta != 0 {
                let fix = Fix::AdjustFile { address: *address, delta };
                self.judge(Subject::File(*address), sequence, delta, fix, &mut differences, &mut round);
            } else if file.fds <= 0 && !seen.files.contains_key(address) && sequence.0 == sequence.1 {
                round.fixes.push(Fix::CheckFile { address: *address });
            }
        }
        for (address, table) in &after.tables {
            // Most tables go when their last user exits. What is left is of threads that exited at the same instant, and
            // of tables that several processes shared.
            let idle = table.total == 0
                && !seen.owners.contains_key(address)
                && before.tables.get(address).is_some_and(|first| first.seq == table.seq);
            if idle && (table.flags & table_flag::DYING != 0 || gone(ProcKey::new(table.tgid, table.start_ns))) {
                round.fixes.push(Fix::ForgetTable { table: *address });
            }
        }
        self.seen = differences;
        round
    }

    fn judge(
        &self,
        subject: Subject,
        (first, last): (Option<u64>, Option<u64>),
        delta: i32,
        fix: Fix,
        differences: &mut HashMap<Subject, (Option<u64>, i32)>,
        round: &mut Round,
    ) {
        if first == last && self.seen.get(&subject) == Some(&(last, delta)) {
            round.fixes.push(fix);
            return;
        }
        round.pending += 1;
        if first == last {
            differences.insert(subject, (last, delta));
        }
    }
}

/// Whether the map knows the owner as the sweep does. Any of the processes that share a table may be named.
fn names(record: &Table, owner: Option<Owner>) -> bool {
    let Some(owner) = owner else { return true };
    if owner.flags & table_flag::SHARED != 0 {
        return record.flags & table_flag::SHARED != 0;
    }
    // SHARED once is SHARED for good: a reader then sweeps, which is right in any case.
    record.flags & table_flag::SHARED != 0 || (record.tgid == owner.key.tgid && record.start_ns == owner.key.start_ns)
}

#[cfg(test)]
mod tests {
    use gpureap_common::record::{Holder, HolderKey};

    use super::*;

    fn slot_of(dev: u32) -> Option<Slot> {
        (dev == 5).then_some(0)
    }

    fn record(tgid: u32, table: u64, fd: u32, file: u64) -> SweepRecord {
        SweepRecord {
            file,
            table,
            leader_table: table,
            start_ns: 1,
            tgid,
            tid: tgid,
            fd,
            dev: 5,
            nlink: 1,
            ..SweepRecord::default()
        }
    }

    fn state(fds: i32, seq: u64, file_fds: i32) -> MapState {
        let table = Table { tgid: 7, tid: 7, start_ns: 1, seq, total: fds, ..Table::default() };
        let process = gpureap_common::record::Proc { start_ns: 1, ..Default::default() };
        MapState {
            tables: HashMap::from([(0x10, table)]),
            holders: vec![(HolderKey { table: 0x10, slot: 0, pad: 0 }, Holder { fds, ..Holder::default() })],
            files: HashMap::from([(0xa, File { dev: 5, fds: file_fds, seq: 3, ..File::default() })]),
            procs: HashMap::from([(7, process)]),
        }
    }

    #[test]
    fn agreement_settles_at_once() {
        let map = state(1, 1, 1);
        let round = Resync::default().round(&map, &[record(7, 0x10, 3, 0xa)], &map, &slot_of, &|_| false);
        assert!(round.settled(), "{round:?}");
    }

    #[test]
    fn a_lost_close_is_corrected_when_seen_twice() {
        let map = state(2, 1, 2);
        let records = [record(7, 0x10, 3, 0xa)];
        let mut resync = Resync::default();
        let first = resync.round(&map, &records, &map, &slot_of, &|_| false);
        assert_eq!((first.fixes.len(), first.pending), (0, 2));
        let second = resync.round(&map, &records, &map, &slot_of, &|_| false);
        assert_eq!(second.pending, 0);
        assert!(second.fixes.contains(&Fix::AdjustFile { address: 0xa, delta: -1 }));
        assert!(second.fixes.iter().any(|fix| matches!(fix, Fix::Adjust { table: 0x10, slot: 0, delta: -1, .. })));
    }

    #[test]
    fn a_table_in_motion_is_left_alone() {
        let records = [record(7, 0x10, 3, 0xa)];
        let mut resync = Resync::default();
        for seq in 1..10 {
            let round = resync.round(&state(2, seq, 1), &records, &state(2, seq + 1, 1), &slot_of, &|_| false);
            assert_eq!(round.fixes, [], "the sequence number moved while the sweep ran");
            assert_eq!(round.pending, 1);
        }
        // Still between two rounds, but it moved in between: seen once only.
        let mut resync = Resync::default();
        for seq in 1..10 {
            let map = state(2, seq, 1);
            assert_eq!(resync.round(&map, &records, &map, &slot_of, &|_| false).fixes, []);
        }
    }

    #[test]
    fn the_first_snapshot_inserts_files_and_counts() {
        let records = [record(7, 0x10, 3, 0xa), record(8, 0x20, 4, 0xa), record(8, 0, MAPPING, 0xa)];
        let mut resync = Resync::default();
        let map = MapState::default();
        let first = resync.round(&map, &records, &map, &slot_of, &|_| false);
        assert!(
            first.fixes.iter().any(|fix| matches!(fix, Fix::Mark { key: ProcKey { tgid: 8, .. }, slot: Some(0), .. }))
        );
        assert_eq!(first.pending, 3, "two tables and the file");
        let second = resync.round(&map, &records, &map, &slot_of, &|_| false);
        let inserted = second.fixes.iter().find_map(|fix| match fix {
            Fix::InsertFile { address: 0xa, file } => Some(file.fds),
            _ => None,
        });
        assert_eq!(inserted, Some(2));
        let deltas: Vec<i32> = second
            .fixes
            .iter()
            .filter_map(|fix| if let Fix::Adjust { delta, .. } = fix { Some(*delta) } else { None })
            .collect();
        assert_eq!(deltas, [1, 1]);
        assert_eq!(second.pending, 0);
    }

    /// It would stay until its memory is another file's, and count as a loss then.
    #[test]
    fn a_file_that_lived_for_one_look_alone_is_not_inserted() {
        let map = MapState { procs: state(0, 1, 0).procs, ..MapState::default() };
        let mut resync = Resync::default();
        for file in 0xa..0x1a {
            let round = resync.round(&map, &[record(7, 0x10, 3, file)], &map, &slot_of, &|_| false);
            assert!(!round.fixes.iter().any(|fix| matches!(fix, Fix::InsertFile { .. })), "{round:?}");
            assert!(round.pending > 0);
        }
        let gone = resync.round(&map, &[], &map, &slot_of, &|_| false);
        assert!(gone.settled(), "{gone:?}");
    }

    #[test]
    fn a_close_before_the_snapshot_counted_it_comes_out_right() {
        // The file was inserted, then its only descriptor closed: the hook counted to -1, the sweep sees none.
        let map = state(-1, 4, -1);
        let mut resync = Resync::default();
        resync.round(&map, &[], &map, &slot_of, &|_| false);
        let second = resync.round(&map, &[], &map, &slot_of, &|_| false);
        assert!(second.fixes.contains(&Fix::AdjustFile { address: 0xa, delta: 1 }));
        assert!(second.fixes.iter().any(|fix| matches!(fix, Fix::Adjust { delta: 1, .. })));
    }

    #[test]
    fn a_file_that_nobody_has_is_checked_against_its_memory() {
        let map = state(0, 1, 0);
        let round = Resync::default().round(&map, &[], &map, &slot_of, &|_| false);
        assert_eq!(round.fixes, [Fix::CheckFile { address: 0xa }]);
    }

    #[test]
    fn an_empty_table_goes_with_its_process() {
        let map = state(0, 1, 1);
        let forgets = |gone: bool| {
            let round = Resync::default().round(&map, &[], &map, &slot_of, &|_| gone);
            round.fixes.contains(&Fix::ForgetTable { table: 0x10 })
        };
        assert!(forgets(true) && !forgets(false));
        let held = state(1, 1, 1);
        let round = Resync::default().round(&held, &[record(7, 0x10, 3, 0xa)], &held, &slot_of, &|_| true);
        assert!(round.settled(), "one that holds stays: {round:?}");
    }

    #[test]
    fn a_process_that_is_gone_is_forgotten() {
        let map = MapState { procs: state(0, 1, 0).procs, ..MapState::default() };
        let forgets = |records: &[SweepRecord], gone: bool| {
            let round = Resync::default().round(&map, records, &map, &slot_of, &|_| gone);
            round.fixes.contains(&Fix::ForgetProcess { key: ProcKey::new(7, 1) })
        };
        assert!(forgets(&[], true) && !forgets(&[], false));
        assert!(!forgets(&[record(7, 0x10, 3, 0xa)], true), "it was there a moment ago");
    }

    #[test]
    fn a_table_under_a_wrong_name_is_renamed() {
        let map = state(1, 1, 1);
        let records = [record(9, 0x10, 3, 0xa)];
        let mut resync = Resync::default();
        resync.round(&map, &records, &map, &slot_of, &|_| false);
        let second = resync.round(&map, &records, &map, &slot_of, &|_| false);
        assert!(second.fixes.iter().any(|fix| matches!(
            fix,
            Fix::Adjust { delta: 0, owner: Some(Owner { key: ProcKey { tgid: 9, .. }, .. }), .. }
        )));
    }

    #[test]
    fn processes_that_share_a_table_mark_it_shared() {
        let records = [record(7, 0x10, 3, 0xa), record(8, 0x10, 3, 0xa)];
        let seen = Seen::new(&records, &slot_of);
        assert_eq!(seen.counts[&(0x10, 0)], 1, "one descriptor, however many processes show it");
        assert_ne!(seen.owners[&0x10].flags & table_flag::SHARED, 0);
    }
}
