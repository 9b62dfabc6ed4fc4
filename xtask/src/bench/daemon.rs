//! What the daemon needs for itself: time to start, memory, processor time when nothing happens, bytes of the executable.

use std::{fs, path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::{
    Binary, check_root,
    churn::memory,
    conditions::{Set, cpu_of},
    place::Place,
    report::{Report, Surroundings, push},
    stats::{Bar, Stats, short},
};

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    binary: Binary,
    /// Starts, each with an end
    #[arg(long, default_value_t = 20)]
    starts: u32,
    /// Seconds to be watched with nothing to do
    #[arg(long, default_value_t = 60)]
    idle: u64,
    /// What a reader should know, for instance what else ran on the machine
    #[arg(long)]
    note: Vec<String>,
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

#[derive(Serialize)]
struct Results {
    /// From the start of the process until it says that it is ready.
    start: Stats,
    executable_bytes: u64,
    idle_seconds: u64,
    idle: Idle,
    after_start: Memory,
    after_idle: Memory,
}

/// What it did while nothing happened to a device.
#[derive(Serialize)]
struct Idle {
    cpu_ms: f64,
    /// Times that a thread of it stopped waiting.
    wakeups: u64,
    /// Processes that ended on the host meanwhile, which the programs see and the daemon does not.
    forks_on_host: u64,
}

/// In KiB.
#[derive(Serialize)]
struct Memory {
    resident: u64,
    peak: u64,
    /// Of it, what is this process's own and not pages of files.
    anonymous: u64,
}

impl Memory {
    fn of(pid: i32) -> Result<Self> {
        Ok(Self { resident: memory(pid, "VmRSS")?, peak: memory(pid, "VmHWM")?, anonymous: memory(pid, "RssAnon")? })
    }
}

/// After the start, before it is looked at: the journal is opened, the first records are written.
const SETTLE: Duration = Duration::from_secs(5);

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { binary, starts, idle, note, out } = options;
    check_root()?;
    ensure!(*starts > 0 && *idle > 0, "nothing to measure");
    let (gpureap, commit) = binary.get()?;
    let mut place = Place::without_daemon(&gpureap)?;
    let surroundings = Surroundings::look(&gpureap, Some(place.device), commit)?;
    let mut notes = surroundings.notes();
    notes.extend(note.iter().cloned());
    let mut times = Vec::new();
    for _ in 0..*starts {
        times.push(place.start_daemon(Some(Set::Gate.name()))?);
        place.stop_daemon()?;
    }
    place.start_daemon(Some(Set::Gate.name()))?;
    let pid = place.daemon()?.as_raw_nonzero().get();
    thread::sleep(SETTLE);
    let after_start = Memory::of(pid)?;
    let look = || anyhow::Ok((cpu_of(pid)?, wakeups(pid)?, forks()?));
    let (cpu, woken, forked) = look()?;
    thread::sleep(Duration::from_secs(*idle));
    let (cpu_now, woken_now, forked_now) = look()?;
    let idle_figures =
        Idle { cpu_ms: (cpu_now - cpu) / 1e6, wakeups: woken_now - woken, forks_on_host: forked_now - forked };
    let after_idle = Memory::of(pid)?;
    notes.push(Surroundings::load_after()?);
    notes.extend(place.said());

    let results = Results {
        start: Stats::of(&times).context("no starts")?,
        executable_bytes: fs::metadata(&gpureap)?.len(),
        idle_seconds: *idle,
        idle: idle_figures,
        after_start,
        after_idle,
    };
    let (bars, tables) = (bars(&results), tables(&results));
    let report = Report {
        bench: "daemon".to_owned(),
        surroundings,
        probe_set: Set::Gate.name().to_owned(),
        bars,
        notes,
        results,
    };
    report.write(out, "What the daemon needs for itself", &tables)
}

/// By all threads.
fn wakeups(pid: i32) -> Result<u64> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("list the daemon's threads")? {
        let status = fs::read_to_string(task?.path().join("status")).context("read a thread's status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum += line.context("no voluntary_ctxt_switches")?.trim().parse::<u64>()?;
    }
    Ok(sum)
}

/// On the whole host since it was booted.
fn forks() -> Result<u64> {
    let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat.lines().find_map(|line| line.strip_prefix("processes "));
    Ok(line.context("no count of processes")?.trim().parse()?)
}

const MIB: f64 = 1024.0 * 1024.0;

fn bars(results: &Results) -> Vec<Bar> {
    let Results { start: _, executable_bytes, idle_seconds, idle, after_start, after_idle } = results;
    let resident = after_start.resident.max(after_idle.resident) as f64 / 1024.0;
    let percent = idle.cpu_ms / (*idle_seconds as f64 * 1e3) * 100.0;
    vec![
        Bar::at_most("daemon, resident", 16.0, "MiB", Some(resident)),
        // As top and ps would show it.
        Bar::at_most("daemon, one processor when nothing happens: 0 with one decimal", 0.05, "%", Some(percent)),
        Bar::at_most("executable", 10.0, "MiB", Some(*executable_bytes as f64 / MIB)),
    ]
}

fn tables(results: &Results) -> String {
    let Results { start, executable_bytes, idle_seconds, idle, after_start, after_idle } = results;
    let Stats { rounds, min_ms, median_ms, p90_ms, p95_ms: _, max_ms } = *start;
    let [min, median, p90, max] = [min_ms, median_ms, p90_ms, max_ms].map(short);
    let mut text = format!(
        "## Start\n\nFrom the start of the process until it says that it is ready, in ms; {rounds} starts.\n\n\
         | min | median | p90 | max |\n|--:|--:|--:|--:|\n| {min} | {median} | {p90} | {max} |\n\n\
         ## Memory, MiB\n\n| | resident | of it its own | peak |\n|---|--:|--:|--:|\n"
    );
    let named = [("5 s after the start", after_start), (&format!("after {idle_seconds} s more"), after_idle)];
    for (when, Memory { resident, peak, anonymous }) in named {
        let [resident, anonymous, peak] = [resident, anonymous, peak].map(|kib| short(*kib as f64 / 1024.0));
        push(&mut text, format_args!("| {when} | {resident} | {anonymous} | {peak} |\n"));
    }
    let Idle { cpu_ms, wakeups, forks_on_host } = idle;
    push(
        &mut text,
        format_args!(
            "\n## {idle_seconds} s in which nothing happened to a device\n\n| | |\n|---|--:|\n\
             | processor time, ms | {} |\n| times that one of its threads stopped waiting | {wakeups} |\n\
             | processes and threads that others started meanwhile | {forks_on_host} |\n\n\
             ## Executable\n\n{executable_bytes} bytes, {} MiB.\n",
            short(*cpu_ms),
            short(*executable_bytes as f64 / MIB)
        ),
    );
    text
}
