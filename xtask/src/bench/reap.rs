//! `gpureap reap` against what people type, in turns; and how long after the kernel's last close it knows of it.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{
    Binary, check_tools,
    lags::{LagStats, Lags, Told},
    load::{DESCRIPTORS, Load},
    place::{Place, holding},
    report::{Report, Surroundings, push},
    shuffle,
    stats::{Bar, Stats, short},
    timed,
    trace::Recording,
};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Processes on the host beside the holders
    #[arg(long, default_value_t = 300)]
    processes: u32,
    /// Processes to reap, anew in each round
    #[arg(long, default_value_t = 8)]
    holders: u32,
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Processes to reap in one pass
    #[arg(long, default_value_t = 200)]
    many: u32,
    #[arg(long, default_value_t = 20)]
    many_rounds: usize,
    #[command(flatten)]
    binary: Binary,
    /// What a reader should know, for instance what else ran on the machine
    #[arg(long)]
    note: Vec<String>,
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

const REAP: [&str; 4] = ["reap", "--now", "--yes", "--json"];
/// Where the record of a reap goes that is to show what the disk costs.
const IN_MEMORY: &str = "its record in memory (tmpfs) rather than on the disk";
const USUAL: &str = "fuser -k NODE; sleep 2; fuser NODE";

/// What is of interest in `reap --json`.
#[derive(Deserialize)]
struct Output {
    backend: Option<String>,
    outcome: Option<String>,
    verified: bool,
    processes: Vec<Process>,
    respawned: Vec<serde::de::IgnoredAny>,
    elapsed_ms: f64,
}

#[derive(Deserialize)]
struct Process {
    pid: u32,
    signals: Vec<Sent>,
    closed_ms: Option<f64>,
}

#[derive(Deserialize)]
struct Sent {
    signal: String,
    after_ms: f64,
}

impl Process {
    /// On one clock for all processes. `None` unless it was sent one signal, KILL, and closed the device.
    fn told(&self) -> Option<Told> {
        let Self { pid, signals, closed_ms } = self;
        let [Sent { signal, after_ms }] = signals.as_slice() else { return None };
        let closed_ms = after_ms + (*closed_ms)?;
        (signal == "SIGKILL").then_some(Told { pid: *pid, signal_ms: *after_ms, closed_ms })
    }
}

/// Many reaps of the same number of holders.
#[derive(Serialize)]
struct Reaps {
    holders: u32,
    /// From the start of the process to its end.
    whole: Stats,
    /// Processor time of the process and its children.
    cpu: Stats,
    /// By its own report, from its beginning.
    elapsed: Stats,
    /// By its own report, from the first signal to the last.
    signals: Stats,
    /// By its own report, from the first signal until the last process had closed the device.
    closed: Stats,
    /// Null where the kernel could not be traced.
    after_last_close: Option<LagStats>,
    /// Rounds after which somebody still held the device.
    left: usize,
}

#[derive(Serialize)]
struct Results {
    processes: u32,
    descriptors: u32,
    reap: Reaps,
    /// With the record that is written before the first signal on a file system in memory.
    reap_in_memory: Reaps,
    usual: Stats,
    usual_left: usize,
    /// All in one pass.
    many: Reaps,
}

#[derive(Default)]
struct Times {
    whole: Vec<f64>,
    cpu: Vec<f64>,
    elapsed: Vec<f64>,
    signals: Vec<f64>,
    closed: Vec<f64>,
    lags: Vec<Lags>,
    left: usize,
    probe_set: String,
}

#[derive(Default)]
struct Usual {
    whole: Vec<f64>,
    left: usize,
}

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { processes, holders, rounds, many, many_rounds, binary, note, out } = options;
    check_tools()?;
    ensure!(*rounds > 0 && *holders > 0 && *many > 0 && *many_rounds > 0, "nothing to measure");
    let (gpureap, commit) = binary.get()?;
    let mut place = Place::new(&gpureap)?;
    let surroundings = Surroundings::look(&gpureap, Some(place.device), commit)?;
    let mut notes = surroundings.notes();
    notes.extend(note.iter().cloned());
    let tracing = place.mount_tracing();
    if let Err(error) = &tracing {
        notes.push(format!("the kernel could not be traced: {error:#}"));
    }
    let tracing = tracing.ok();
    let tracing = tracing.as_deref();
    let others = Load::start(*processes, 0, &place.node())?;
    println!("{processes} processes of {DESCRIPTORS} descriptors, and {holders} holders to reap");

    let (mut reap, mut in_memory, mut usual) = (Times::default(), Times::default(), Usual::default());
    for round in 0..*rounds {
        let mut ways = [Way::Disk, Way::Memory, Way::Usual];
        shuffle(&mut ways, round as u64);
        for way in ways {
            let load = Load::start(*holders, *holders, &place.node())?;
            match way {
                Way::Disk => reap.once(place.gpureap(&REAP), &place, &load, tracing)?,
                Way::Memory => {
                    let mut command = place.gpureap(&REAP);
                    command.env("GPUREAP_STATE_DIR", place.files().join("state"));
                    in_memory.once(command, &place, &load, tracing)?;
                }
                Way::Usual => usual.once(&place)?,
            }
        }
    }
    println!("{many} holders in one pass");
    let mut pass = Times::default();
    for _ in 0..*many_rounds {
        let load = Load::start(*many, *many, &place.node())?;
        pass.once(place.gpureap(&REAP), &place, &load, tracing)?;
    }
    drop(others);
    notes.push(Surroundings::load_after()?);
    notes.extend(place.said());

    let probe_set = reap.probe_set.clone();
    let results = Results {
        processes: *processes,
        descriptors: DESCRIPTORS,
        reap: reap.reaps(*holders)?,
        reap_in_memory: in_memory.reaps(*holders)?,
        usual: Stats::of_ms(usual.whole).context("no times")?,
        usual_left: usual.left,
        many: pass.reaps(*many)?,
    };
    let (bars, tables) = (bars(&results), tables(&results, surroundings.kernel()));
    let report = Report { bench: "reap".to_owned(), surroundings, probe_set, bars, notes, results };
    report.write(out, "`gpureap reap` against `fuser -k`", &tables)
}

impl Times {
    fn once(&mut self, reap: Command, place: &Place, load: &Load, tracing: Option<&Path>) -> Result<()> {
        let recording = tracing.map(Recording::start).transpose()?;
        let finished = timed(reap, &place.output())?;
        let events = recording.map(Recording::finish).transpose()?;
        self.left += usize::from(!holding(place.device)?.is_empty());
        let (status, stderr) = (finished.status, finished.stderr);
        ensure!(status.success(), "reap failed ({status}): {stderr}{}", finished.stdout);
        let Output { backend, outcome, verified, processes, respawned, elapsed_ms } =
            serde_json::from_str(&finished.stdout).context("reap --json")?;
        let outcome = outcome.unwrap_or_default();
        ensure!(outcome == "freed" && verified, "reap says {outcome}, verified: {verified}");
        let mut reaped: Vec<u32> = processes.iter().map(|process| process.pid).collect();
        reaped.sort_unstable();
        ensure!(reaped == load.holders, "reap found {reaped:?} instead of {:?}", load.holders);
        ensure!(respawned.is_empty(), "reap says that {} holders came anew", respawned.len());
        let told: Option<Vec<Told>> = processes.iter().map(Process::told).collect();
        let told = told.context("reap did not kill every process once and see it close the device")?;
        let first = told.iter().map(|told| told.signal_ms).fold(f64::INFINITY, f64::min);
        let last = |time: fn(&Told) -> f64| told.iter().map(time).fold(first, f64::max) - first;
        self.whole.push(finished.wall.as_secs_f64() * 1e3);
        self.cpu.push(finished.cpu.as_secs_f64() * 1e3);
        self.elapsed.push(elapsed_ms);
        self.signals.push(last(|told| told.signal_ms));
        self.closed.push(last(|told| told.closed_ms));
        if let Some(events) = events {
            self.lags.push(Lags::of(&events, place.inode()?, &told, elapsed_ms, &finished.ran_us)?);
        }
        self.probe_set = backend.unwrap_or_default();
        Ok(())
    }

    fn reaps(self, holders: u32) -> Result<Reaps> {
        let Self { whole, cpu, elapsed, signals, closed, lags, left, probe_set: _ } = self;
        let stats = |ms: Vec<f64>| Stats::of_ms(ms).context("no times");
        Ok(Reaps {
            holders,
            whole: stats(whole)?,
            cpu: stats(cpu)?,
            elapsed: stats(elapsed)?,
            signals: stats(signals)?,
            closed: stats(closed)?,
            after_last_close: LagStats::of(&lags),
            left,
        })
    }
}

impl Usual {
    fn once(&mut self, place: &Place) -> Result<()> {
        let node = place.node();
        let line = USUAL.replace("NODE", node.to_str().context("the node's path is not UTF-8")?);
        let mut command = Command::new("sh");
        command.args(["-c", &line]);
        let finished = timed(command, &place.output())?;
        self.left += usize::from(!holding(place.device)?.is_empty());
        self.whole.push(finished.wall.as_secs_f64() * 1e3);
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Way {
    Disk,
    Memory,
    Usual,
}

type Figure = fn(Stats) -> f64;

/// That the detection is held against its bar with.
const FIGURES: [(&str, Figure); 3] =
    [("median", |stats| stats.median_ms), ("p95", |stats| stats.p95_ms), ("max", |stats| stats.max_ms)];

fn bars(results: &Results) -> Vec<Bar> {
    let Results { processes: _, descriptors: _, reap, reap_in_memory, usual, usual_left: _, many } = results;
    let whole = format!("reap of {} holders by KILL, whole process, median", reap.holders);
    let mut bars = vec![
        Bar::at_most(whole.clone(), 20.0, "ms", Some(reap.whole.median_ms)),
        Bar::at_most(format!("{whole}; {IN_MEMORY}"), 20.0, "ms", Some(reap_in_memory.whole.median_ms)),
        Bar::at_most(format!("{whole}: processor time"), 20.0, "ms", Some(reap.cpu.median_ms)),
        Bar::at_least("faster than the usual line, medians", 50.0, "×", Some(usual.median_ms / reap.whole.median_ms)),
    ];
    for Reaps { holders, after_last_close, .. } in [reap, many] {
        for (which, time) in FIGURES {
            let known = after_last_close.as_ref().map(|lags| time(lags.known));
            let what = format!("free is detected after the last close of {holders} holders, {which}");
            bars.push(Bar::at_most(what, 2.0, "ms", known));
        }
    }
    bars
}

fn tables(results: &Results, kernel: &str) -> String {
    let Results { processes, descriptors, reap, reap_in_memory, usual, usual_left, many } = results;
    let holders = reap.holders;
    let mut text = format!(
        "## {holders} holders, beside {processes} processes of {descriptors} descriptors\n\n\
         Times in ms; new holders in each round, the three in random order.\n\n\
         | what | rounds | min | median | p90 | rounds with holders left |\n|---|--:|--:|--:|--:|--:|\n"
    );
    let command = format!("`gpureap {}`", REAP.join(" "));
    for (what, stats, left) in [
        (command.as_str(), reap.whole, Some(reap.left)),
        ("… `elapsed_ms` of its report", reap.elapsed, None),
        ("… from its first signal to the last close that it reports", reap.closed, None),
        ("… processor time", reap.cpu, None),
        (&format!("the same, {IN_MEMORY}"), reap_in_memory.whole, Some(reap_in_memory.left)),
        (&format!("`{USUAL}`"), *usual, Some(*usual_left)),
    ] {
        let Stats { rounds, min_ms, median_ms, p90_ms, p95_ms: _, max_ms: _ } = stats;
        let [min, median, p90] = [min_ms, median_ms, p90_ms].map(short);
        let left = left.map_or_else(String::new, |left| left.to_string());
        push(&mut text, format_args!("| {what} | {rounds} | {min} | {median} | {p90} | {left} |\n"));
    }
    if let Some(lags) = &reap.after_last_close {
        push(
            &mut text,
            format_args!("\n## From the last close to knowing it, {holders} holders\n\n{}\n", method(kernel)),
        );
        lag_rows(&mut text, lags);
    }
    push(
        &mut text,
        format_args!(
            "\n## {} holders in one pass\n\n\
             Each was sent one signal, KILL, in the same pass, and nobody came anew; in {} of {} rounds somebody still \
             held the device afterwards. Times in ms.\n\n{COLUMNS}",
            many.holders, many.left, many.whole.rounds
        ),
    );
    for (what, stats) in [
        ("from the first signal to the last", many.signals),
        ("from the first signal to the last close that it reports", many.closed),
        ("`elapsed_ms` of its report", many.elapsed),
        ("whole process", many.whole),
    ] {
        row(&mut text, what, stats);
    }
    if let Some(lags) = &many.after_last_close {
        text.push_str("\nFrom the last close, as above:\n\n");
        lag_rows(&mut text, lags);
    }
    text
}

const COLUMNS: &str = "| what | rounds | min | median | p95 | max |\n|---|--:|--:|--:|--:|--:|\n";

fn row(text: &mut String, what: &str, stats: Stats) {
    let Stats { rounds, min_ms, median_ms, p90_ms: _, p95_ms, max_ms } = stats;
    let [min, median, p95, max] = [min_ms, median_ms, p95_ms, max_ms].map(short);
    push(text, format_args!("| {what} | {rounds} | {min} | {median} | {p95} | {max} |\n"));
}

fn lag_rows(text: &mut String, lags: &LagStats) {
    let LagStats { ended, known, known_after_end, proved, returned, closed_elsewhere } = lags;
    text.push_str(COLUMNS);
    for (what, stats) in [
        ("last close → the kernel has ended the last holder (`exit_notify`)", ended),
        ("last close → gpureap knows (its last `closed_ms`)", known),
        ("… counted from `exit_notify`", known_after_end),
        ("last close → the final look has proved it, the report is made (`elapsed_ms`)", proved),
        ("last close → gpureap has exited, as its parent sees it", returned),
    ] {
        row(text, what, *stats);
    }
    push(
        text,
        format_args!(
            "\nLast closes that another process made, as it had the file in hand: \
             {closed_elsewhere}.\n"
        ),
    );
}

/// How the two clocks are brought together, and what stands for the close.
fn method(kernel: &str) -> String {
    format!(
        "Each round has a trace of its own, on the clock `boot`, which is gpureap's clock too. The close is where the \
         kernel takes off the lock that each holder keeps on its open device (`filelock:flock_lock_inode` with \
         `FL_CLOSE`): in `__fput`, right before the driver's `release`. `exit_notify` is the SIGCHLD that the holder \
         causes (`signal:signal_generate`). For a holder that makes the last close itself it comes after that, and is an \
         upper bound that covers the driver's part too: so it was in every round, on this kernel ({kernel}). But \
         who looks at the files of a process, as gpureap and its daemon do, has each of them in hand for a moment; if \
         the holder lets go just then, the look makes the last close. Those are counted below the tables, and a negative \
         time means that such a close came later.\n\n\
         gpureap's times count from its beginning. They are laid on the trace at the signal that followed its time in \
         the report soonest, so they are late by the way of that signal into the kernel, and not early. gpureap is woken \
         by the pidfd on the way through `exit_notify`, shortly before the SIGCHLD. Times in ms.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kill_and_a_close_for_each() {
        let told = |json: &str| serde_json::from_str::<Process>(json).unwrap().told();
        let sent = |signals: &str, closed: &str| format!(r#"{{"pid":7,"signals":[{signals}],"closed_ms":{closed}}}"#);
        let kill = r#"{"signal":"SIGKILL","time":"2026-11-30T12:00:00Z","after_ms":5.5}"#;
        let Told { pid, signal_ms, closed_ms } = told(&sent(kill, "0.75")).unwrap();
        assert_eq!((pid, signal_ms, closed_ms), (7, 5.5, 6.25));
        for (signals, closed) in [
            (kill.to_owned(), "null"),
            (String::new(), "0.75"),
            (format!("{kill},{kill}"), "0.75"),
            (kill.replace("KILL", "TERM"), "0.75"),
        ] {
            assert!(told(&sent(&signals, closed)).is_none(), "{signals} {closed}");
        }
    }

    fn results(lags: &[Lags]) -> Results {
        let stats = |ms: f64| Stats::of_ms(vec![ms]).unwrap();
        let reaps = |holders, whole| Reaps {
            holders,
            whole: stats(whole),
            cpu: stats(whole / 4.0),
            elapsed: stats(whole),
            signals: stats(1.0),
            closed: stats(2.0),
            after_last_close: LagStats::of(lags),
            left: 0,
        };
        let (reap, many) = (reaps(8, 10.0), reaps(200, 30.0));
        let reap_in_memory = reaps(8, 8.0);
        Results { processes: 300, descriptors: 50, reap, reap_in_memory, usual: stats(2200.0), usual_left: 0, many }
    }

    #[test]
    fn bars_with_and_without_a_trace() {
        let measured = |lags: &[Lags]| bars(&results(lags)).iter().map(|bar| bar.measured).collect::<Vec<_>>();
        let lags = |known| Lags {
            ended: 0.1,
            known,
            proved: 5.0,
            returned: 6.0,
            known_after_end: known - 0.1,
            closed_elsewhere: 0,
        };
        let many: Vec<Lags> = (1..=30).map(|tenth| lags(f64::from(tenth) / 10.0)).collect();
        let known = [1.55, 2.9, 3.0].map(Some);
        assert_eq!(measured(&many), [[10.0, 8.0, 2.5, 220.0].map(Some).as_slice(), &known, &known].concat());
        assert_eq!(measured(&[])[4..], [None; 6]);
    }

    #[test]
    fn tables_have_a_part_for_the_trace_only_with_one() {
        let lags =
            Lags { ended: 0.1, known: 0.25, proved: 5.0, returned: 6.0, known_after_end: -0.02, closed_elsewhere: 3 };
        let text = tables(&results(&[lags]), "6.18.44");
        assert_eq!(
            text.matches("| … counted from `exit_notify` | 1 | -0.020 | -0.020 | -0.020 | -0.020 |\n").count(),
            2
        );
        assert!(text.contains("on this kernel (6.18.44)"));
        assert_eq!(text.matches("in hand: 3.\n").count(), 2);
        assert!(!tables(&results(&[]), "6.18.44").contains("exit_notify"));
    }
}
