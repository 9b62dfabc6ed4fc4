//! Whether a GPU's memory is free again. Pure: two answers of NVML and what is known of the processes go in.

use std::collections::{BTreeMap, BTreeSet};

use super::{Gpu, Memory, Snapshot};
use crate::model::{Device, DeviceKind, ProcKey, View};

const MIB: u64 = 1 << 20;

/// A GPU that nobody uses shows a few MiB at times (0 to 4 on an H200); the smallest context takes hundreds.
const SLACK: u64 = 64 * MIB;

/// An old library counts the driver's reserve as used. How much that is it does not tell: some hundred MiB, at most this
/// part of the whole.
const RESERVE_PART: u64 = 32;

/// A dead process whose device files a living one inherited: the driver charges the memory to the dead one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inheritance {
    pub dead: u32,
    pub living: u32,
    /// The GPUs, by minor, whose files were inherited.
    pub minors: BTreeSet<u32>,
}

/// What is known beside NVML's answers.
#[derive(Clone, Debug, Default)]
pub struct Case {
    /// NVML's answer before the first signal, if there was one.
    pub before: Option<Snapshot>,
    /// Processes that were not to be ended: those skipped, monitors, users of other GPUs. Their memory is no fault.
    pub remaining: BTreeSet<u32>,
    /// Processes that live, of all that the answers name.
    pub alive: BTreeSet<u32>,
    pub inherited: Vec<Inheritance>,
}

/// Who holds GPU files that a dead process had opened.
pub fn inherited(view: &View, devices: &[Device], is_alive: &dyn Fn(ProcKey) -> bool) -> Vec<Inheritance> {
    let minors = |slots: &mut dyn Iterator<Item = u32>| -> BTreeSet<u32> {
        let real = |slot| devices.iter().find(|device| device.slot == slot && device.kind == DeviceKind::Gpu);
        slots.filter_map(|slot| real(slot)?.minor).collect()
    };
    let dead = |key: &ProcKey| !is_alive(*key);
    view.holders
        .iter()
        .filter_map(|holder| {
            let from = holder.inherited_from.filter(dead)?;
            let minors = minors(&mut holder.usage.keys().copied());
            Some(Inheritance { dead: from.tgid, living: holder.key.tgid, minors })
        })
        .filter(|entry| !entry.minors.is_empty())
        .collect()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryState {
    /// Nothing is used but by those who remain.
    Free,
    StillUsed {
        /// Not counting the memory of those who remain.
        mib: u64,
        /// As far as anybody can be named.
        by: Vec<MemoryUser>,
    },
    /// One sentence.
    Unknown(String),
}

/// Whom memory is charged to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUser {
    pub pid: u32,
    /// `None`: NVML does not tell.
    pub mib: Option<u64>,
    pub alive: bool,
    /// The living processes that inherited the dead one's device files, and keep its memory.
    pub inherited_by: BTreeSet<u32>,
}

impl MemoryState {
    /// One sentence.
    pub fn sentence(&self) -> String {
        match self {
            Self::Free => "memory is free".to_owned(),
            Self::Unknown(reason) => format!("memory is not known: {reason}"),
            Self::StillUsed { mib, by } if by.is_empty() => {
                format!("{mib} MiB are still used and charged to no process that NVML names")
            }
            Self::StillUsed { mib, by } => {
                let users: Vec<String> = by.iter().map(MemoryUser::phrase).collect();
                format!("{mib} MiB are still used: {}", users.join(", "))
            }
        }
    }
}

impl MemoryUser {
    fn phrase(&self) -> String {
        let Self { pid, mib, alive, inherited_by } = self;
        let amount = mib.map(|mib| format!("{mib} MiB ")).unwrap_or_default();
        let pids: Vec<String> = inherited_by.iter().map(ToString::to_string).collect();
        match (alive, pids.as_slice()) {
            (true, _) => format!("{amount}by process {pid}"),
            (false, []) => format!("{amount}charged to process {pid}, which is dead"),
            (false, heirs) => {
                format!(
                    "{amount}charged to process {pid}, which is dead, and kept by {}, who inherited its files",
                    heirs.join(" and ")
                )
            }
        }
    }
}

/// The state of one GPU, by minor, in the answer `after`.
pub fn judge(case: &Case, after: &Snapshot, minor: u32) -> MemoryState {
    let Some(gpu) = after.gpu(minor) else {
        return MemoryState::Unknown(format!("NVML lists no GPU with the minor {minor}"));
    };
    let Some(memory) = gpu.memory else {
        let error = gpu.errors.iter().find(|error| error.starts_with("memory") || error.starts_with("handle"));
        return MemoryState::Unknown(
            error.map_or_else(|| "NVML does not tell it of this GPU".to_owned(), |error| format!("NVML, {error}")),
        );
    };
    let charges = charges(gpu);
    let legitimate = |pid: u32| case.remaining.contains(&pid);
    let theirs: u64 = charges.iter().filter(|(pid, _)| legitimate(**pid)).filter_map(|(_, used)| *used).sum();
    let rest = memory.used.saturating_sub(theirs);
    if rest <= slack(gpu) {
        return MemoryState::Free;
    }
    let by = users(case, gpu, minor, &charges, rest);
    if by.is_empty() {
        // Nobody can be named: is it really memory that somebody failed to give back?
        if let Some((pid, _)) = charges.iter().find(|(pid, used)| legitimate(**pid) && used.is_none()) {
            return MemoryState::Unknown(format!(
                "{} MiB are used, and NVML does not tell how much of it process {pid} has, which remains",
                rest / MIB
            ));
        }
        if gpu.processes.is_none() && !case.remaining.is_empty() {
            return MemoryState::Unknown(format!("{} MiB are used, and NVML does not tell by whom", rest / MIB));
        }
        if rest <= reserve(gpu, memory) {
            return MemoryState::Unknown(format!(
                "{} MiB are used, and this version of NVML counts the driver's own reserve in",
                rest / MIB
            ));
        }
    }
    MemoryState::StillUsed { mib: rest / MIB, by }
}

/// What may be the driver's own although it counts as used.
fn reserve(gpu: &Gpu, memory: Memory) -> u64 {
    match memory.reserved {
        Some(_) => slack(gpu),
        None => memory.total / RESERVE_PART,
    }
}

/// Each instance of a divided GPU has a little of its own.
fn slack(gpu: &Gpu) -> u64 {
    let instances = gpu.mig.as_ref().map_or(0, |mig| mig.devices.len() as u64);
    SLACK * (1 + instances)
}

/// Bytes by process; one that is listed with several kinds of context has the same bytes in each row.
fn charges(gpu: &Gpu) -> BTreeMap<u32, Option<u64>> {
    let mut charges: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    let mut rows: BTreeMap<(u32, Option<u32>, Option<u32>), Option<u64>> = BTreeMap::new();
    for process in gpu.processes.iter().flatten() {
        // On a divided GPU a process may have memory in several instances.
        let row = rows.entry((process.pid, process.gi, process.ci)).or_default();
        *row = (*row).max(process.used);
    }
    for ((pid, ..), used) in rows {
        let sum = charges.entry(pid).or_insert(Some(0));
        *sum = sum.zip(used).map(|(sum, used)| sum + used);
    }
    charges
}

/// Everybody whom the rest can be charged to: those listed who do not remain, and the dead whose files were inherited,
/// whom NVML does not list.
fn users(case: &Case, gpu: &Gpu, minor: u32, charges: &BTreeMap<u32, Option<u64>>, rest: u64) -> Vec<MemoryUser> {
    let heirs = |dead: u32| -> BTreeSet<u32> {
        let inherited = case.inherited.iter().filter(|entry| entry.dead == dead && entry.minors.contains(&minor));
        inherited.map(|entry| entry.living).collect()
    };
    let user = |pid: u32, used: Option<u64>, alive: bool| {
        let inherited_by = if alive { BTreeSet::new() } else { heirs(pid) };
        MemoryUser { pid, mib: used.map(|used| used / MIB), alive, inherited_by }
    };
    let mut by: Vec<MemoryUser> = charges
        .iter()
        .filter(|(pid, _)| !case.remaining.contains(pid))
        .map(|(pid, used)| user(*pid, *used, case.alive.contains(pid)))
        .collect();
    let listed: u64 =
        charges.iter().filter(|(pid, _)| !case.remaining.contains(pid)).filter_map(|(_, used)| *used).sum();
    let unlisted = rest.saturating_sub(listed);
    if unlisted <= slack(gpu) {
        return by;
    }
    let dead: BTreeSet<u32> = case
        .inherited
        .iter()
        .filter(|entry| entry.minors.contains(&minor) && !charges.contains_key(&entry.dead))
        .map(|entry| entry.dead)
        .collect();
    // What one of them had is known if it is the only one, or if NVML still listed it before.
    let old = case.before.as_ref().and_then(|before| before.gpu(minor)).map(charges_of_before(gpu)).unwrap_or_default();
    let alone = dead.len() == 1;
    for pid in dead {
        let used = if alone { Some(unlisted) } else { old.get(&pid).copied().flatten() };
        // Known to be dead by more than its number, which somebody else may have by now.
        by.push(user(pid, used, false));
    }
    by
}

/// The charges of an earlier answer, if it is about the same GPU: a reset or a hot plug may have renumbered them.
fn charges_of_before(now: &Gpu) -> impl Fn(&Gpu) -> BTreeMap<u32, Option<u64>> {
    let uuid = now.uuid.clone();
    move |before| if before.uuid == uuid { charges(before) } else { BTreeMap::new() }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Context, GpuProcess, Mig, MigDevice},
        *,
    };

    /// An H200 as NVML's version 2 tells it: nothing used when nobody uses it.
    const TOTAL: u64 = 143_771 * MIB;
    const RESERVED: u64 = 603 * MIB;
    /// A CUDA context and what the driver adds to it.
    const CONTEXT: u64 = 683;

    fn process(pid: u32, mib: u64) -> GpuProcess {
        GpuProcess { pid, used: Some(mib * MIB), context: Context::Compute, gi: None, ci: None }
    }

    fn h200(used_mib: u64, processes: &[GpuProcess]) -> Gpu {
        Gpu {
            minor: Some(0),
            uuid: Some("GPU-1".to_owned()),
            memory: Some(Memory { total: TOTAL, used: used_mib * MIB, reserved: Some(RESERVED) }),
            processes: Some(processes.to_vec()),
            ..Gpu::default()
        }
    }

    /// The same GPU by version 1.
    fn old(used_mib: u64, processes: &[GpuProcess]) -> Gpu {
        let used = used_mib * MIB + RESERVED;
        Gpu { memory: Some(Memory { total: TOTAL, used, reserved: None }), ..h200(0, processes) }
    }

    fn of(gpu: Gpu) -> Snapshot {
        Snapshot { driver: None, gpus: vec![gpu] }
    }

    fn inheritance(dead: u32, living: u32) -> Inheritance {
        Inheritance { dead, living, minors: [0].into() }
    }

    fn used(mib: u64, by: &[(u32, Option<u64>, bool, &[u32])]) -> MemoryState {
        let user = |(pid, mib, alive, heirs): &(u32, Option<u64>, bool, &[u32])| MemoryUser {
            pid: *pid,
            mib: *mib,
            alive: *alive,
            inherited_by: heirs.iter().copied().collect(),
        };
        MemoryState::StillUsed { mib, by: by.iter().map(user).collect() }
    }

    fn case(remaining: &[u32], alive: &[u32], inherited: &[Inheritance]) -> Case {
        Case {
            before: None,
            remaining: remaining.iter().copied().collect(),
            alive: alive.iter().copied().collect(),
            inherited: inherited.to_vec(),
        }
    }

    #[test]
    fn an_h200_after_a_reap() {
        let unavailable = GpuProcess { used: None, ..process(8, 0) };
        let both = GpuProcess { context: Context::Graphics, ..process(8, 700) };
        let unknown = |text: &str| MemoryState::Unknown(text.to_owned());
        let cases = [
            ("all went well", h200(0, &[]), case(&[], &[], &[]), MemoryState::Free),
            ("cuInit on another GPU", h200(4, &[]), case(&[], &[], &[]), MemoryState::Free),
            ("just at the limit", h200(64, &[]), case(&[], &[], &[]), MemoryState::Free),
            // V3: no file is open, nobody is listed.
            ("nobody has it", h200(CONTEXT, &[]), case(&[], &[], &[]), used(683, &[])),
            ("100 GiB", h200(103_019, &[]), case(&[], &[], &[]), used(103_019, &[])),
            // F7: the child of the dead 7 lives on and has its files; nvidia-smi lists no process.
            (
                "ghost",
                h200(CONTEXT, &[]),
                case(&[], &[9], &[inheritance(7, 9)]),
                used(683, &[(7, Some(683), false, &[9])]),
            ),
            (
                "two heirs",
                h200(CONTEXT, &[]),
                case(&[], &[9, 10], &[inheritance(7, 9), inheritance(7, 10)]),
                used(683, &[(7, Some(683), false, &[9, 10])]),
            ),
            (
                "two dead",
                h200(2 * CONTEXT, &[]),
                case(&[], &[9, 10], &[inheritance(6, 9), inheritance(7, 10)]),
                used(1366, &[(6, None, false, &[9]), (7, None, false, &[10])]),
            ),
            (
                "files of another GPU",
                h200(CONTEXT, &[]),
                case(&[], &[9], &[Inheritance { minors: [1].into(), ..inheritance(7, 9) }]),
                used(683, &[]),
            ),
            (
                "listed and dead",
                h200(CONTEXT, &[process(7, 674)]),
                case(&[], &[9], &[inheritance(7, 9)]),
                used(683, &[(7, Some(674), false, &[9])]),
            ),
            (
                "listed and alive",
                h200(CONTEXT, &[process(7, 674)]),
                case(&[], &[7], &[]),
                used(683, &[(7, Some(674), true, &[])]),
            ),
            ("it was not to be ended", h200(CONTEXT, &[process(8, 674)]), case(&[8], &[8], &[]), MemoryState::Free),
            ("beside one that remains", h200(1400, &[process(8, 700)]), case(&[8], &[8], &[]), used(700, &[])),
            (
                "beside one that remains, a ghost",
                h200(1383, &[process(8, 700)]),
                case(&[8], &[8, 9], &[inheritance(7, 9)]),
                used(683, &[(7, Some(683), false, &[9])]),
            ),
            ("listed twice", h200(710, &[process(8, 700), both]), case(&[8], &[8], &[]), MemoryState::Free),
            (
                "one remains whose memory is not told",
                h200(CONTEXT, &[unavailable]),
                case(&[8], &[8], &[]),
                unknown("683 MiB are used, and NVML does not tell how much of it process 8 has, which remains"),
            ),
            (
                "nobody is told, and somebody remains",
                Gpu { processes: None, ..h200(CONTEXT, &[]) },
                case(&[8], &[8], &[]),
                unknown("683 MiB are used, and NVML does not tell by whom"),
            ),
            (
                "nobody is told, and nobody may have it",
                Gpu { processes: None, ..h200(CONTEXT, &[]) },
                case(&[], &[], &[]),
                used(683, &[]),
            ),
            (
                "version 1, free",
                old(0, &[]),
                case(&[], &[], &[]),
                unknown("603 MiB are used, and this version of NVML counts the driver's own reserve in"),
            ),
            (
                "version 1, a ghost",
                old(CONTEXT, &[]),
                case(&[], &[], &[]),
                unknown("1286 MiB are used, and this version of NVML counts the driver's own reserve in"),
            ),
            ("version 1, more than any reserve", old(8192, &[]), case(&[], &[], &[]), used(8795, &[])),
            (
                "version 1, somebody is listed",
                old(CONTEXT, &[process(7, 674)]),
                case(&[], &[7], &[]),
                used(1286, &[(7, Some(674), true, &[])]),
            ),
            (
                "no memory",
                Gpu { memory: None, ..h200(0, &[]) },
                case(&[], &[], &[]),
                unknown("NVML does not tell it of this GPU"),
            ),
            (
                "lost",
                Gpu { memory: None, errors: vec!["memory: fell off the bus".to_owned()], ..h200(0, &[]) },
                case(&[], &[], &[]),
                unknown("NVML, memory: fell off the bus"),
            ),
        ];
        for (name, after, case, expected) in cases {
            assert_eq!(judge(&case, &of(after), 0), expected, "{name}");
        }
        let missing = judge(&Case::default(), &of(h200(0, &[])), 3);
        assert_eq!(missing, unknown("NVML lists no GPU with the minor 3"));
    }

    #[test]
    fn what_each_of_several_dead_had_comes_from_the_answer_before() {
        let mut case = case(&[], &[9, 10], &[inheritance(6, 9), inheritance(7, 10)]);
        case.before = Some(of(h200(2000, &[process(6, 1300), process(7, 674)])));
        let after = of(h200(1990, &[]));
        let expected = used(1990, &[(6, Some(1300), false, &[9]), (7, Some(674), false, &[10])]);
        assert_eq!(judge(&case, &after, 0), expected);
        // Another GPU by now: its numbers say nothing.
        case.before.as_mut().unwrap().gpus[0].uuid = Some("GPU-2".to_owned());
        assert_eq!(judge(&case, &after, 0), used(1990, &[(6, None, false, &[9]), (7, None, false, &[10])]));
    }

    #[test]
    fn heirs_are_those_whose_parent_is_dead() {
        use crate::model::{Holder, Source, Usage};
        let key = |pid| ProcKey::new(pid, 1);
        let holder = |pid, from: Option<u32>, slots: &[u32]| Holder {
            key: key(pid),
            usage: slots.iter().map(|slot| (*slot, Usage { fds: 1, ..Usage::default() })).collect(),
            how: BTreeSet::new(),
            private_tids: BTreeSet::new(),
            inherited_from: from.map(key),
            from_snapshot: false,
        };
        let device = |slot, kind, minor| Device {
            slot,
            node: "/dev/x".into(),
            major: 195,
            minor,
            kind,
            gpu: None,
            index: None,
            uuid: None,
            bdf: None,
            model: None,
        };
        let devices = [
            device(0, DeviceKind::Gpu, Some(3)),
            device(1, DeviceKind::Ctl, Some(255)),
            device(2, DeviceKind::Standin, Some(20)),
        ];
        let view = View {
            source: Source::Map,
            backend: None,
            complete: true,
            cannot_see: BTreeSet::new(),
            lost_events: 0,
            swept_ns: None,
            open_files: BTreeMap::new(),
            holders: vec![
                holder(9, Some(7), &[0, 1]),
                holder(10, Some(8), &[0]),
                holder(11, Some(7), &[1, 2]),
                holder(12, None, &[0]),
            ],
            orphans: Vec::new(),
            notes: Vec::new(),
        };
        let found = inherited(&view, &devices, &|key| key.tgid == 8);
        assert_eq!(found, [Inheritance { dead: 7, living: 9, minors: [3].into() }]);
    }

    #[test]
    fn a_dead_pid_that_another_has_by_now_is_still_dead() {
        let case = case(&[], &[7, 9], &[inheritance(7, 9)]);
        assert_eq!(judge(&case, &of(h200(CONTEXT, &[])), 0), used(683, &[(7, Some(683), false, &[9])]));
    }

    #[test]
    fn idle_instances_of_a_divided_gpu_are_free() {
        let part = |number| MigDevice { uuid: format!("MIG-{number}"), gi: Some(number), ci: Some(0), memory: None };
        let mig = Mig { enabled: true, pending: true, devices: (1..=7).map(part).collect() };
        let divided = |used| of(Gpu { mig: Some(mig.clone()), ..h200(used, &[]) });
        assert_eq!(judge(&Case::default(), &divided(300), 0), MemoryState::Free);
        assert_eq!(judge(&Case::default(), &divided(683), 0), used(683, &[]));
    }

    #[test]
    fn memory_in_several_instances_adds_up() {
        let part = |gi, mib| GpuProcess { gi: Some(gi), ci: Some(0), ..process(8, mib) };
        let after = of(h200(2700, &[part(1, 1300), part(2, 1300)]));
        assert_eq!(judge(&case(&[8], &[8], &[]), &after, 0), used(100, &[]));
    }

    #[test]
    fn sentences() {
        for (state, expected) in [
            (MemoryState::Free, "memory is free"),
            (used(683, &[]), "683 MiB are still used and charged to no process that NVML names"),
            (
                used(1366, &[(6, None, false, &[]), (7, Some(683), true, &[])]),
                "1366 MiB are still used: charged to process 6, which is dead, 683 MiB by process 7",
            ),
            (
                used(683, &[(7, Some(683), false, &[9, 10])]),
                "683 MiB are still used: 683 MiB charged to process 7, which is dead, and kept by 9 and 10, who inherited its files",
            ),
            (
                MemoryState::Unknown("NVML did not answer within 2 s".to_owned()),
                "memory is not known: NVML did not answer within 2 s",
            ),
        ] {
            assert_eq!(state.sentence(), expected);
        }
    }
}
