//! What stands in the tables, from a report and what is known of memory. Pure.

use std::{
    cmp::{Ordering, Reverse},
    collections::BTreeMap,
};

use jiff::SignedDuration;

use crate::{
    classify::Class,
    gpu::nvml::Snapshot,
    history::rows::Key,
    holders::report::{DeviceReport, HeldReport, HolderReport, HoldersReport, Origin, Role},
    model::DeviceKind,
    out::words,
};

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpuRow {
    /// The N of `/dev/nvidiaN`.
    pub(super) number: Option<u32>,
    pub(super) node: String,
    pub(super) model: Option<String>,
    pub(super) holders: u32,
    pub(super) open_files: Option<u32>,
    pub(super) fenced: bool,
    /// A stand-in has no memory that could be known.
    pub(super) stand_in: bool,
    /// Bytes used and in all.
    pub(super) memory: Option<(u64, u64)>,
}

/// One process on one GPU; without a GPU, on the nodes that all share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HolderRow {
    /// By which the table keeps it apart: a pid can come back.
    pub(super) who: Key,
    /// The number; the node's name without its directory for a stand-in; `-` for nodes that all GPUs share.
    pub(super) gpu: String,
    /// Its place among the devices, where it is a GPU.
    pub(super) order: Option<usize>,
    pub(super) node: String,
    pub(super) user: String,
    pub(super) class: Class,
    pub(super) state: Option<char>,
    pub(super) role: Option<Role>,
    pub(super) fds: u32,
    pub(super) maps: u32,
    /// Bytes of this GPU's memory.
    pub(super) memory: Option<u64>,
    /// And whether it is longer than that.
    pub(super) held: Option<(SignedDuration, bool)>,
    pub(super) comm: String,
    pub(super) command: String,
    /// Job, pod, container or unit, the first that it has.
    pub(super) place: Option<String>,
}

/// NVML's last answer, by minor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Memories {
    gpus: BTreeMap<u32, (u64, u64)>,
    processes: BTreeMap<(u32, u32), u64>,
}

impl Memories {
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        let mut memories = Self::default();
        for gpu in &snapshot.gpus {
            let Some(minor) = gpu.minor else { continue };
            if let Some(memory) = gpu.memory {
                memories.gpus.insert(minor, (memory.used, memory.total));
            }
            for process in gpu.processes.iter().flatten() {
                if let Some(used) = process.used {
                    // One entry for each kind of context: the figure is the process's.
                    let known = memories.processes.entry((minor, process.pid)).or_default();
                    *known = used.max(*known);
                }
            }
        }
        memories
    }
}

pub(super) fn gpus(report: &HoldersReport, memories: &Memories) -> Vec<GpuRow> {
    let row = |device: &DeviceReport| GpuRow {
        number: device.gpu,
        node: device.node.clone(),
        model: device.model.clone(),
        holders: device.holders,
        open_files: device.open_files,
        fenced: device.fenced,
        stand_in: device.kind == DeviceKind::Standin,
        memory: device.gpu.and_then(|minor| memories.gpus.get(&minor).copied()),
    };
    report.devices.iter().filter(|device| device.kind.is_gpu()).map(row).collect()
}

/// `own`: this program, whose child that asks NVML is nobody's business.
pub(super) fn holders(report: &HoldersReport, memories: &Memories, own: u32) -> Vec<HolderRow> {
    let mut rows = Vec::new();
    for holder in &report.holders {
        if holder.parent.as_ref().is_some_and(|parent| parent.pid == own) {
            continue;
        }
        let mut shared: Vec<&HeldReport> = Vec::new();
        let before = rows.len();
        for held in &holder.devices {
            match report.devices.iter().find(|device| device.node == held.node) {
                Some(device) if device.kind.is_gpu() => {
                    rows.push(row(holder, Some(device), &[held], memories, report));
                }
                Some(_) => shared.push(held),
                // No device of this report.
                None => {}
            }
        }
        // Somebody on a GPU holds the shared nodes too, which says nothing more.
        if rows.len() == before && !shared.is_empty() {
            rows.push(row(holder, None, &shared, memories, report));
        }
    }
    rows
}

fn row(
    holder: &HolderReport,
    device: Option<&DeviceReport>,
    held: &[&HeldReport],
    memories: &Memories,
    report: &HoldersReport,
) -> HolderRow {
    let HolderReport { pid, start_ns, state, comm, argv, uid, user, class, origin, .. } = holder;
    let HolderReport { container, container_name, slurm_job, pod, pod_name, unit, .. } = holder;
    let minor = device.and_then(|device| device.gpu);
    let label = |device: &DeviceReport| match device.gpu {
        Some(minor) => minor.to_string(),
        None => device.node.rsplit('/').next().unwrap_or_default().to_owned(),
    };
    let first = held.iter().filter_map(|held| held.first_open).min();
    let job = slurm_job.as_ref().map(|job| format!("job {job}"));
    HolderRow {
        who: Key { pid: *pid, start_ns: *start_ns },
        gpu: device.map_or_else(|| "-".to_owned(), label),
        order: device.and_then(|device| report.devices.iter().position(|other| other.node == device.node)),
        node: device.map_or_else(|| held[0].node.clone(), |device| device.node.clone()),
        user: words::user(user.as_deref(), *uid).into_owned(),
        class: *class,
        state: *state,
        role: held.iter().find_map(|held| held.role),
        fds: held.iter().map(|held| held.fds).sum(),
        maps: held.iter().map(|held| held.maps).sum(),
        memory: minor.and_then(|minor| memories.processes.get(&(minor, *pid)).copied()),
        held: first.map(|first| (report.time.duration_since(first), *origin == Origin::Snapshot)),
        comm: comm.clone(),
        command: words::command(comm, &short(argv)),
        place: job
            .or_else(|| pod_name.clone().or_else(|| pod.clone()))
            .or_else(|| container_name.clone().or_else(|| container.clone()))
            .or_else(|| unit.clone()),
    }
}

/// Without the program's directory: room is short.
fn short(argv: &[String]) -> Vec<String> {
    let mut short = argv.to_vec();
    if let Some(program) = short.first_mut()
        && let Some(base) = program.rsplit('/').next().filter(|base| !base.is_empty())
    {
        *program = base.to_owned();
    }
    short
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sort {
    #[default]
    Gpu,
    Memory,
    Held,
    Files,
    Pid,
    User,
}

impl Sort {
    pub(super) const fn next(self) -> Self {
        match self {
            Self::Gpu => Self::Memory,
            Self::Memory => Self::Held,
            Self::Held => Self::Files,
            Self::Files => Self::Pid,
            Self::Pid => Self::User,
            Self::User => Self::Gpu,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Memory => "memory",
            Self::Held => "held for",
            Self::Files => "files",
            Self::Pid => "pid",
            Self::User => "user",
        }
    }

    /// What is most comes first where that is what is looked for.
    fn order(self, a: &HolderRow, b: &HolderRow) -> Ordering {
        match self {
            // Whoever holds no GPU comes last.
            Self::Gpu => (a.order.is_none(), a.order).cmp(&(b.order.is_none(), b.order)),
            Self::Memory => Reverse(a.memory).cmp(&Reverse(b.memory)),
            Self::Held => Reverse(a.held).cmp(&Reverse(b.held)),
            Self::Files => Reverse(a.fds + a.maps).cmp(&Reverse(b.fds + b.maps)),
            Self::Pid => a.who.cmp(&b.who),
            Self::User => a.user.cmp(&b.user),
        }
    }
}

/// What is shown: of one GPU or of all, with the words in it, sorted. Equal ones keep the order of their pids, so that nothing jumps.
pub(super) fn shown(
    rows: Vec<HolderRow>,
    node: Option<&str>,
    filter: &str,
    sort: Sort,
    reverse: bool,
) -> Vec<HolderRow> {
    let words: Vec<String> = filter.split_whitespace().map(str::to_lowercase).collect();
    let fits = |row: &HolderRow| {
        let HolderRow { who, user, class, command, comm, place, node, .. } = row;
        let pid = who.pid.to_string();
        let fields = [&pid, user, class.name(), command, comm, place.as_deref().unwrap_or_default(), node];
        let text = fields.join("\n").to_lowercase();
        words.iter().all(|word| text.contains(word))
    };
    let mut rows: Vec<HolderRow> =
        rows.into_iter().filter(|row| node.is_none_or(|node| node == row.node) && fits(row)).collect();
    rows.sort_by(|a, b| {
        let order = sort.order(a, b);
        let order = if reverse { order.reverse() } else { order };
        order.then_with(|| (a.who, &a.node).cmp(&(b.who, &b.node)))
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::tests::{memories, report};

    fn rows() -> Vec<HolderRow> {
        holders(&report(), &memories(), 1)
    }

    fn pids(rows: &[HolderRow]) -> Vec<(u32, &str)> {
        rows.iter().map(|row| (row.who.pid, row.node.as_str())).collect()
    }

    #[test]
    fn a_row_for_each_gpu_and_one_for_whoever_holds_shared_nodes_alone() {
        let rows = rows();
        let expected =
            [(900, "/dev/nvidiactl"), (4711, "/dev/nvidia0"), (4711, "/dev/nvidia1"), (4800, "/dev/nvidia1")];
        assert_eq!(pids(&rows), expected);
        assert_eq!((rows[0].gpu.as_str(), rows[1].memory, rows[2].memory), ("-", Some(40 << 30), None));
        assert_eq!(rows[1].place.as_deref(), Some("job 77"));
        assert!(holders(&report(), &memories(), 4000).iter().all(|row| row.who.pid != 4711), "its child is left out");
    }

    #[test]
    fn gpus_with_what_is_known_of_their_memory() {
        let gpus = gpus(&report(), &memories());
        let told: Vec<_> = gpus.iter().map(|gpu| (gpu.number, gpu.memory, gpu.fenced)).collect();
        assert_eq!(told, [(Some(0), Some((41 << 30, 80 << 30)), false), (Some(1), None, true)]);
    }

    #[test]
    fn filters_and_orders() {
        for (node, filter, sort, reverse, expected) in [
            (None, "", Sort::Gpu, false, vec![(4711, 0), (4711, 1), (4800, 1), (900, 9)]),
            (None, "", Sort::Gpu, true, vec![(900, 9), (4711, 1), (4800, 1), (4711, 0)]),
            (None, "", Sort::Pid, false, vec![(900, 9), (4711, 0), (4711, 1), (4800, 1)]),
            (None, "", Sort::Pid, true, vec![(4800, 1), (4711, 0), (4711, 1), (900, 9)]),
            (None, "", Sort::Memory, false, vec![(4711, 0), (900, 9), (4711, 1), (4800, 1)]),
            (None, "", Sort::Held, false, vec![(900, 9), (4711, 0), (4711, 1), (4800, 1)]),
            (None, "", Sort::Files, false, vec![(4711, 0), (4800, 1), (4711, 1), (900, 9)]),
            (None, "", Sort::User, false, vec![(4711, 0), (4711, 1), (4800, 1), (900, 9)]),
            (Some("/dev/nvidia1"), "", Sort::Pid, false, vec![(4711, 1), (4800, 1)]),
            (None, "ALICE train", Sort::Pid, false, vec![(4711, 0), (4711, 1)]),
            (None, "monitor", Sort::Pid, false, vec![(900, 9)]),
            (None, "job 77 bob", Sort::Pid, false, vec![]),
        ] {
            let rows = shown(rows(), node, filter, sort, reverse);
            let gpus: Vec<(u32, u32)> = rows.iter().map(|row| (row.who.pid, row.gpu.parse().unwrap_or(9))).collect();
            assert_eq!(gpus, expected, "{filter:?} by {}", sort.name());
        }
    }
}
