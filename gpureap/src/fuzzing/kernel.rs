//! What comes from the kernel: records, BTF, its log.

use std::collections::{HashMap, HashSet};

use gpureap_common::{
    event::Header,
    global::OFFSETS,
    record::{File, Holder, HolderKey, ProcKey, Table},
    sweep::{MAPPING, SweepRecord},
};
use jiff::Timestamp;

use super::{assert_json, assert_shown};
use crate::{
    bpf::{ring, sys},
    config::StandIn,
    gpu::devices,
    history::{
        event::{Event, What},
        kmsg as log, line,
    },
    kernel::{btf::Btf, offsets::Offsets},
    recorder::{sources, translate},
    track::join::{self, MapState},
};

/// Of a device that the seeds name.
const MAJOR: u32 = 4;
const MINOR: u32 = 20;

fn assert_event(what: What, boot_ns: u64) {
    let event = Event { time: Timestamp::UNIX_EPOCH, boot_ns, what };
    assert_json(&event);
    let shown = line::line(&event);
    assert_shown(&shown);
    assert_eq!(shown.find('\n'), Some(shown.len() - 1), "{shown:?}");
}

/// One record of the ring.
pub(super) fn ring(input: &[u8]) {
    let said = input.get(2..4).map(|size| u16::from_ne_bytes([size[0], size[1]]));
    let Ok(event) = ring::decode(input) else { return };
    assert_eq!(said.map(usize::from), Some(input.len()));
    assert!(input.len() >= size_of::<Header>());
    let stand_in = StandIn::new(MAJOR, MINOR, "/dev/tty20".into()).expect("a device");
    let devices = devices::stand_ins_alone(&[stand_in]).expect("one device has a slot");
    let (boot_ns, what) = translate::translate(event, &devices);
    if let Some(what) = what {
        assert_event(what, boot_ns);
    }
}

/// An entry of each map.
const ELEMENT: usize = size_of::<HolderKey>() + size_of::<Holder>() + size_of::<Table>() + size_of::<File>();

/// What iterators write: as many records of a sweep as the first byte says, then elements of the maps.
pub(super) fn sweep(input: &[u8]) {
    let Some((count, rest)) = input.split_first() else { return };
    let (swept, maps) = rest.split_at(rest.len().min(usize::from(*count) * size_of::<SweepRecord>()));
    let records: Vec<SweepRecord> = sys::records(swept);
    assert_eq!(records.len(), swept.len() / size_of::<SweepRecord>());
    let slot_of = |dev: u32| (dev >> 20 == MAJOR).then_some(dev & 0xff);
    let known = records.iter().filter(|record| slot_of(record.dev).is_some());

    let holders = join::from_sweep(&records, &slot_of);
    let keys: HashSet<ProcKey> = known.clone().map(|record| ProcKey::new(record.tgid, record.start_ns)).collect();
    assert!(holders.keys().all(|key| keys.contains(key)), "a holder that no record tells of");
    let told: u32 = holders.values().flat_map(|holder| holder.usage.values()).map(|usage| usage.fds + usage.maps).sum();
    assert!(told as usize <= known.clone().count(), "more than there are records");
    assert!(holders.values().all(|holder| holder.usage.values().all(|usage| usage.fds + usage.maps > 0)));
    let files: u32 = join::files_in_sweep(&records, &slot_of).values().sum();
    assert!(files as usize <= known.clone().count());
    let mapped = join::mapped(&records, &slot_of);
    assert_eq!(mapped.is_empty(), !known.clone().any(|record| record.fd == MAPPING));
    join::has_unseen_references(&records);

    let mut state = MapState::default();
    for element in maps.chunks_exact(ELEMENT).take(64) {
        let (key, rest) = element.split_at(size_of::<HolderKey>());
        let (count, rest) = rest.split_at(size_of::<Holder>());
        let (table, file) = rest.split_at(size_of::<Table>());
        let key = sys::records::<HolderKey>(key)[0];
        state.holders.push((key, sys::records(count)[0]));
        state.tables.insert(key.table, sys::records(table)[0]);
        state.files.insert(u64::from(key.slot), sys::records(file)[0]);
    }
    join::to_verify(&state);
    join::needs_sweep(&state);
    let mut counted = join::from_map(&state, &records, &slot_of);
    join::remember(&mut counted, &HashMap::new());
    let orphans = join::orphans(&state.files, &records, u64::MAX, &|_| false);
    assert!(orphans.iter().map(|orphan| orphan.files as usize).sum::<usize>() <= state.files.len());
}

/// A kernel's types.
pub(super) fn btf(input: &[u8]) {
    let Ok(btf) = Btf::parse(input.to_vec()) else { return };
    for (_, structure, member, _) in OFFSETS {
        drop(btf.member(structure, member));
    }
    drop(btf.member("outer", "deep"));
    drop(Offsets::resolve(&btf));
    for name in ["fd_install", "dup_fd", "mark_victim"] {
        assert!(btf.parameters(name).is_none() || btf.has_function(name));
        btf.tracepoint_parameters(name);
    }
}

/// A record of the kernel's log, or the driver's line in its trace.
pub(super) fn kmsg(input: &[u8]) {
    let record = String::from_utf8_lossy(input);
    let boot_ns = sources::time(&record, -1).unwrap_or_default();
    let line = log::text(&record).map_or(record.as_ref(), |(_, line)| line);
    assert!(record.contains(line));
    if let Some(what) = log::parse(line) {
        assert_event(what, boot_ns);
    }
}
