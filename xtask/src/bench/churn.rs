//! Many opens of a device a second by several processes, and whether the counts are right when they stop.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use gpureap_common::counter;
use serde::{Deserialize, Serialize};

use super::{
    Binary, bpf, check_root,
    churner::Told,
    conditions::{Set, cpu_of},
    guest,
    load::Load,
    place::Place,
    report::{Report, Surroundings, push},
    stats::{Bar, short},
    timed, vm,
};

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    binary: Binary,
    #[command(flatten)]
    plan: Plan,
    /// In a virtual machine with this kernel, with every probe set, rather than here with `gate`
    #[arg(long, value_name = "KERNEL")]
    vm: Option<String>,
    /// What a reader should know, for instance what else ran on the machine
    #[arg(long)]
    note: Vec<String>,
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

#[derive(clap::Args, Clone, Debug, Serialize)]
pub(crate) struct Plan {
    #[arg(long, default_value_t = 60)]
    pub(super) seconds: u32,
    /// Opens a second, of all processes together
    #[arg(long, default_value_t = 10_000)]
    pub(super) rate: u32,
    #[arg(long, default_value_t = 4)]
    pub(super) workers: u32,
}

/// One churn with one probe set.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Churn {
    pub(super) set: Set,
    pub(super) seconds: f64,
    pub(super) opens: u64,
    pub(super) dups: u64,
    pub(super) forks: u64,
    /// Opens as the kernel programs counted them, from the daemon's start on.
    pub(super) opens_counted: u64,
    /// Records for the ring: those that went in, and those that found it full.
    pub(super) records: u64,
    pub(super) ring_full: u64,
    /// As the first read after the stop tells it: what the maps missed, until a sweep has put them right.
    pub(super) lost_events: u64,
    /// Those of them that have a counter of their own; the rest are programs that the kernel skipped.
    pub(super) losses: BTreeMap<String, u64>,
    /// Processes that hold the device in the end, and their descriptors.
    pub(super) holders: usize,
    pub(super) descriptors: u64,
    /// Processes of which the first read tells another number of descriptors, or that it misses or invents.
    pub(super) wrong: usize,
    pub(super) open_files: Option<u32>,
    /// Of the daemon: part of one processor, and what is resident afterwards.
    pub(super) daemon_cpu: f64,
    pub(super) daemon_rss_kib: u64,
    /// Of it, what is its own and not pages of files.
    pub(super) daemon_own_kib: u64,
}

/// What is of interest in `holders --json`.
#[derive(Deserialize)]
struct Output {
    source: String,
    lost_events: u64,
    devices: Vec<Device>,
    holders: Vec<Holder>,
}

#[derive(Deserialize)]
struct Device {
    open_files: Option<u32>,
}

#[derive(Deserialize)]
struct Holder {
    pid: u32,
    devices: Vec<Held>,
}

#[derive(Deserialize)]
struct Held {
    fds: u64,
}

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { binary, plan, vm, note, out } = options;
    let (gpureap, commit) = binary.get()?;
    let (surroundings, churns, mut notes) = if let Some(kernel) = vm {
        let surroundings = Surroundings::look(&gpureap, None, commit)?.of_guest(vm::package(kernel)?, 2);
        let told = vm::run(kernel, &gpureap, &vm::Wish::Churn(plan))?;
        let churns = told.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        (surroundings, churns, Vec::new())
    } else {
        check_root()?;
        let mut place = Place::without_daemon(&gpureap)?;
        let surroundings = Surroundings::look(&gpureap, Some(place.device), commit)?;
        let churn = churn(&mut place, Set::Gate, plan)?;
        let notes = place.said();
        (surroundings, vec![churn], notes)
    };
    notes.splice(0..0, surroundings.notes().into_iter().chain(note.iter().cloned()));
    notes.push(Surroundings::load_after()?);
    let (bars, tables) = (bars(&churns, plan), tables(&churns, plan));
    let probe_set = churns.iter().map(|churn| churn.set.name()).collect::<Vec<_>>().join(", ");
    let (bench, place) = match vm {
        Some(kernel) => (format!("churn-vm-{kernel}"), ", in a virtual machine"),
        None => ("churn".to_owned(), ""),
    };
    let report =
        Report { bench, surroundings, probe_set, bars, notes, results: Results { plan: plan.clone(), churns } };
    report.write(out, &format!("Counts after many opens a second{place}"), &tables)
}

#[derive(Serialize)]
struct Results {
    plan: Plan,
    churns: Vec<Churn>,
}

/// A process that opens and closes; it ends with its standard input.
struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Worker {
    fn start(number: u32, plan: &Plan, node: &Path) -> Result<Self> {
        let Plan { seconds, rate, workers } = plan;
        let mut child = Command::new(std::env::current_exe().context("this program's own path")?)
            .args(["bench", "churner", "--number", &number.to_string(), "--seconds", &seconds.to_string()])
            .args(["--rate", &(rate / workers).to_string(), "--node"])
            .arg(node)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a process that opens and closes")?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("its stdout")?);
        Ok(Self { child, stdin, stdout })
    }

    fn told(&mut self) -> Result<Told> {
        let mut line = String::new();
        self.stdout.read_line(&mut line).context("listen to a process that opens and closes")?;
        serde_json::from_str(&line).with_context(|| format!("it said {line:?}"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.stdin.take());
        if let Err(error) = self.child.wait() {
            println!("a process that opens and closes: {error}");
        }
    }
}

/// Processes that hold the device from before the daemon's start on, with one descriptor each.
const HELD_BEFORE: u32 = 8;

/// With a daemon of its own.
pub(super) fn churn(place: &mut Place, set: Set, plan: &Plan) -> Result<Churn> {
    let before = Load::start(HELD_BEFORE, HELD_BEFORE, &place.node())?;
    place.start_daemon(Some(set.name()))?;
    let daemon = place.daemon()?.as_raw_nonzero().get();
    let spent = cpu_of(daemon)?;
    let started = Instant::now();
    let mut workers =
        (0..plan.workers).map(|number| Worker::start(number, plan, &place.node())).collect::<Result<Vec<_>>>()?;
    let told = workers.iter_mut().map(Worker::told).collect::<Result<Vec<_>>>()?;
    let seconds = told.iter().map(|told| told.seconds).fold(0.0, f64::max);
    // At once: nothing has been put right since the last close but what a reader puts right.
    let read = timed(place.gpureap(&["holders", "--json"]), &place.output())?;
    ensure!(read.status.success(), "holders failed ({}): {}", read.status, read.stderr);
    let Output { source, lost_events, devices, holders } =
        serde_json::from_str(&read.stdout).context("holders --json")?;
    ensure!(source == "map", "gpureap does not read the map but takes {source}");
    let daemon_cpu = (cpu_of(daemon)? - spent) / started.elapsed().as_secs_f64() / 1e9;
    // The daemon tells of a full ring on a timer, and reads the rest.
    thread::sleep(Duration::from_secs(1));
    let counted = bpf::counters(&place.pins())?;
    let counted = |index: u32| counted.get(counter::NAMES[index as usize]).copied().unwrap_or(0);
    let losses = counter::LOSSES
        .into_iter()
        .map(|index| (counter::NAMES[index as usize].to_owned(), counted(index)))
        .filter(|(_, count)| *count > 0)
        .collect();
    let mut truth: BTreeMap<u32, u64> = told.iter().map(|told| (told.pid, told.descriptors)).collect();
    truth.extend(before.holders.iter().map(|pid| (*pid, 1)));
    let held = |holder: &Holder| holder.devices.iter().map(|held| held.fds).sum();
    let seen: BTreeMap<u32, u64> = holders.iter().map(|holder| (holder.pid, held(holder))).collect();
    let (daemon_rss_kib, daemon_own_kib) = (memory(daemon, "VmRSS")?, memory(daemon, "RssAnon")?);
    drop((workers, before));
    place.stop_daemon()?;
    Ok(Churn {
        set,
        seconds,
        opens: told.iter().map(|told| told.opens).sum(),
        dups: told.iter().map(|told| told.dups).sum(),
        forks: told.iter().map(|told| told.forks).sum(),
        opens_counted: counted(if set == Set::Gate { counter::GATE_OPENS } else { counter::FILE_OPENS }),
        records: counted(counter::EVENTS),
        ring_full: counted(counter::RING_FULL),
        lost_events,
        losses,
        holders: truth.len(),
        descriptors: truth.values().sum(),
        wrong: wrong(&truth, &seen),
        open_files: devices.first().and_then(|device| device.open_files),
        daemon_cpu,
        daemon_rss_kib,
        daemon_own_kib,
    })
}

/// A line of `/proc/PID/status` in KiB.
pub(super) fn memory(pid: i32, field: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("read the daemon's status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let value = line.and_then(|line| line.split_whitespace().next()).context("no such line in its status")?;
    Ok(value.parse()?)
}

fn wrong(truth: &BTreeMap<u32, u64>, seen: &BTreeMap<u32, u64>) -> usize {
    let missed = truth.iter().filter(|(pid, descriptors)| seen.get(pid) != Some(descriptors)).count();
    missed + seen.keys().filter(|pid| !truth.contains_key(pid)).count()
}

fn bars(churns: &[Churn], plan: &Plan) -> Vec<Bar> {
    let bars = churns.iter().flat_map(|churn| {
        let name = churn.set.name();
        let uncounted = churn.opens.abs_diff(churn.opens_counted);
        [
            Bar::at_most(format!("`{name}`: wrong counts after it stops"), 0.0, "processes", Some(churn.wrong as f64)),
            Bar::at_most(format!("`{name}`: opens that are not counted"), 0.0, "opens", Some(uncounted as f64)),
            Bar::at_least(
                format!("`{name}`: device opens a second for {} s", plan.seconds),
                // What a process does late it does not catch up with for ever.
                f64::from(plan.rate) * 0.99,
                "/s",
                Some(churn.opens as f64 / churn.seconds),
            ),
        ]
    });
    bars.collect()
}

type Cell = fn(&Churn) -> String;

fn tables(churns: &[Churn], plan: &Plan) -> String {
    let Plan { seconds, rate, workers } = plan;
    let mut text = format!(
        "## {workers} processes for {seconds} s\n\n\
         Each opens the device, keeps it for its next 15 opens, and closes it; beside that, of eight opens one is duplicated \
         and the copy closed, and of 1,024 one is followed by a child that inherits all and exits. Asked for: {rate} opens a \
         second. In the end each keeps a different number of descriptors; {HELD_BEFORE} processes have held one each since before \
         the daemon's start. The first `gpureap holders --json` is held against that. A full ring makes a gap in the record of what happened, never a wrong count.\n\n"
    );
    let head = churns.iter().map(|churn| format!("`{}`", churn.set.name())).collect::<Vec<_>>().join(" | ");
    push(&mut text, format_args!("| | {head} |\n|---|{}\n", "--:|".repeat(churns.len())));
    let rows: [(&str, Cell); 12] = [
        ("seconds", |churn| short(churn.seconds)),
        ("opens", |churn| churn.opens.to_string()),
        ("opens a second", |churn| short(churn.opens as f64 / churn.seconds)),
        ("duplicates; children", |churn| format!("{}; {}", churn.dups, churn.forks)),
        ("opens that the programs counted", |churn| churn.opens_counted.to_string()),
        ("records in the ring", |churn| churn.records.to_string()),
        ("records that found it full, counted", |churn| churn.ring_full.to_string()),
        ("losses of the maps, counted", |churn| {
            let named = churn.losses.iter().map(|(name, count)| format!("; `{name}` {count}"));
            format!("{}{}", churn.lost_events, named.collect::<String>())
        }),
        ("holders and descriptors in the end", |churn| format!("{}; {}", churn.holders, churn.descriptors)),
        ("wrong counts in the first read", |churn| churn.wrong.to_string()),
        ("daemon: part of one processor", |churn| format!("{:.1} %", churn.daemon_cpu * 100.0)),
        ("daemon: resident afterwards; of it its own, MiB", |churn| {
            format!("{:.1}; {:.1}", churn.daemon_rss_kib as f64 / 1024.0, churn.daemon_own_kib as f64 / 1024.0)
        }),
    ];
    for (what, cell) in rows {
        let cells = churns.iter().map(cell).collect::<Vec<_>>().join(" | ");
        push(&mut text, format_args!("| {what} | {cells} |\n"));
    }
    text
}

/// In the virtual machine: every set, one after the other.
pub(super) fn in_guest(place: &mut Place, plan: &Plan) -> Result<()> {
    for set in Set::ALL {
        guest::tell(&churn(place, set, plan)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_is_what_is_missed_miscounted_or_invented() {
        let map = |pairs: &[(u32, u64)]| pairs.iter().copied().collect::<BTreeMap<_, _>>();
        let truth = map(&[(1, 1), (2, 2), (3, 3)]);
        assert_eq!(wrong(&truth, &truth), 0);
        assert_eq!(wrong(&truth, &map(&[(1, 1), (2, 3), (4, 1)])), 3);
    }
}
