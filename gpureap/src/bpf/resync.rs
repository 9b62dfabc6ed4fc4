//! Brings the maps to what a sweep sees: the first snapshot, and the cure for any loss.

use std::{io, os::fd::AsFd as _, path::Path, thread, time::Duration};

use anyhow::Context as _;
use gpureap_common::{
    fix,
    record::{Meta, ProcKey, backend, proc_flag},
    sweep::SweepRecord,
};

use super::{
    handles::{Handles, State},
    sys::{self, Tasks},
};
use crate::{
    clock,
    model::Slot,
    track::{
        join::{MapState, SlotOf},
        resync::{Fix, Resync, Round},
    },
};

/// Between two looks at a difference: long enough for a task between the change of its table and the hook.
const SETTLE: Duration = Duration::from_millis(2);
/// A host whose tables never stand still for this many rounds keeps the rest for the next resync.
const ROUNDS: usize = 50;

/// What a resync did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub corrections: usize,
    /// Differences that were still moving at the end.
    pub pending: usize,
}

pub fn read_maps(handles: &Handles) -> io::Result<MapState> {
    // Counts before owners: an owner that is missing for a count is then not a race.
    let holders = handles.holders()?;
    Ok(MapState {
        holders,
        tables: handles.tables()?.into_iter().collect(),
        files: handles.files()?.into_iter().collect(),
        procs: handles.procs()?.into_iter().collect(),
    })
}

/// Compares and corrects until the map equals a sweep, for the sets that count in the kernel; notes candidates and the
/// base of the gate's reckoning for the other one.
pub fn resync(handles: &Handles, slot_of: SlotOf<'_>) -> anyhow::Result<Outcome> {
    let meta = handles.maps.meta()?;
    // Losses up to here are what this resync heals; later ones ask for the next.
    let losses = handles.losses()?;
    handles.sweep_lineage().context("iterator task")?;
    let outcome =
        if meta.backend == backend::GATE { note_candidates(handles, slot_of)? } else { correct(handles, slot_of)? };
    if outcome.pending == 0 {
        handles.maps.set_state(State::Healed, losses)?;
    }
    handles.maps.set_state(State::Swept, clock::boottime_ns())?;
    if meta.snapshot_ns == 0 && outcome.pending == 0 {
        handles.maps.set_meta(&Meta { snapshot_ns: clock::boottime_ns(), ..meta })?;
    }
    Ok(outcome)
}

fn correct(handles: &Handles, slot_of: SlotOf<'_>) -> anyhow::Result<Outcome> {
    let mut resync = Resync::default();
    let mut outcome = Outcome::default();
    for _ in 0..ROUNDS {
        let before = read_maps(handles)?;
        let records = handles.sweep(Tasks::All).context("sweep")?;
        let after = read_maps(handles)?;
        let Round { fixes, pending } = resync.round(&before, &records, &after, slot_of, &is_gone);
        let mut changed = 0;
        for fix in &fixes {
            if apply(handles, fix)? {
                changed += 1;
            }
        }
        outcome.corrections += changed;
        outcome.pending = pending;
        if changed == 0 && pending == 0 {
            break;
        }
        thread::sleep(SETTLE);
    }
    Ok(outcome)
}

/// A pid that is in use again keeps what is left of a dead process until the next resync, which costs nothing.
fn is_gone(key: ProcKey) -> bool {
    !Path::new("/proc").join(key.tgid.to_string()).exists()
}

/// The gate counts nothing: a sweep finds the holders, which become candidates.
fn note_candidates(handles: &Handles, slot_of: SlotOf<'_>) -> anyhow::Result<Outcome> {
    let (_, corrections) = refresh_candidates(handles, slot_of)?;
    Ok(Outcome { corrections, pending: 0 })
}

/// A sweep whose records are also what the next read is measured against.
pub fn refresh_candidates(handles: &Handles, slot_of: SlotOf<'_>) -> anyhow::Result<(Vec<SweepRecord>, usize)> {
    let base = Base::begin(handles)?;
    let records = handles.sweep(Tasks::All).context("sweep")?;
    let state = MapState { procs: handles.procs()?.into_iter().collect(), ..MapState::default() };
    let mut corrections = 0;
    for fix in Resync::default().round(&state, &records, &state, slot_of, &is_gone).fixes {
        if matches!(fix, Fix::Mark { .. } | Fix::ForgetProcess { .. }) && apply(handles, &fix)? {
            corrections += 1;
        }
    }
    base.end(handles, crate::track::join::files_in_sweep(&records, slot_of).values().sum())?;
    handles.maps.set_state(State::Swept, clock::boottime_ns())?;
    Ok((records, corrections))
}

/// Notes that a process has mapped a device.
pub fn mark_mapped(handles: &Handles, key: ProcKey, slot: Slot) -> io::Result<bool> {
    apply(handles, &Fix::Mark { key, flags: proc_flag::MAY_MAP, slot: Some(slot) })
}

/// Applies a correction; whether it changed anything.
fn apply(handles: &Handles, correction: &Fix) -> io::Result<bool> {
    let arguments = match correction {
        Fix::InsertFile { address, file } => {
            return sys::update(handles.maps.files.as_fd(), address, file, sys::NOEXIST);
        }
        Fix::Adjust { table, slot, delta, owner } => {
            let (key, tid, flags) = owner.map_or_else(Default::default, |owner| (owner.key, owner.tid, owner.flags));
            vec![
                fix::ADJUST,
                *table,
                u64::from(*slot),
                *delta as u64,
                u64::from(key.tgid),
                u64::from(tid),
                key.start_ns,
                u64::from(flags),
            ]
        }
        Fix::AdjustFile { address, delta } => vec![fix::ADJUST_FILE, *address, *delta as u64],
        Fix::CheckFile { address } => vec![fix::CHECK_FILE, *address],
        Fix::Mark { key, flags, slot } => {
            vec![fix::MARK, u64::from(key.tgid), key.start_ns, u64::from(*flags), slot.map_or(fix::NO_SLOT, u64::from)]
        }
        Fix::ForgetTable { table } => vec![fix::FORGET_TABLE, *table],
        Fix::ForgetProcess { key } => vec![fix::FORGET_PROCESS, u64::from(key.tgid), key.start_ns],
    };
    let result = handles.fix(&arguments)?;
    Ok(match correction {
        Fix::CheckFile { .. } | Fix::ForgetTable { .. } | Fix::ForgetProcess { .. } => result == fix::REMOVED,
        _ => result == fix::DONE,
    })
}

/// The gate's reckoning. Every device file there is was found by the last sweep or opened since; each open makes one
/// file. So if the files seen now are as many as those two together, no file is hidden anywhere, and a read need not
/// sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    pub opens: u64,
    pub files: u64,
}

impl Base {
    fn check(self) -> u64 {
        // Any mixing of both words will do: it must differ when one of them is from another update.
        (self.opens ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(self.files.wrapping_mul(2).wrapping_add(0x1_0001))
    }

    /// Opens counted before a sweep begins: one that happens during the sweep makes the next read sweep again.
    pub fn begin(handles: &Handles) -> io::Result<Self> {
        Ok(Self { opens: handles.maps.counter(gpureap_common::counter::GATE_OPENS)?, files: 0 })
    }

    pub fn end(self, handles: &Handles, files: u32) -> io::Result<()> {
        let base = Self { files: u64::from(files), ..self };
        handles.maps.set_state(State::BaseCheck, 0)?;
        handles.maps.set_state(State::BaseOpens, base.opens)?;
        handles.maps.set_state(State::BaseFiles, base.files)?;
        handles.maps.set_state(State::BaseCheck, base.check())
    }

    /// What the last sweep left; `None` if it is not whole.
    pub fn last(handles: &Handles) -> io::Result<Option<Self>> {
        let check = handles.maps.state(State::BaseCheck)?;
        let base = Self { opens: handles.maps.state(State::BaseOpens)?, files: handles.maps.state(State::BaseFiles)? };
        Ok((check != 0 && check == base.check()).then_some(base))
    }
}
