//! `gpureap reap` against what people type, in turns.

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{
    build_gpureap, check_tools,
    load::{DESCRIPTORS, Load},
    place::{Place, holding},
    report::{Report, Surroundings, push},
    shuffle,
    stats::{Bar, Stats, short},
    timed,
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
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

const REAP: [&str; 4] = ["reap", "--now", "--yes", "--json"];
const USUAL: &str = "fuser -k NODE; sleep 2; fuser NODE";

/// What is of interest in `reap --json`.
#[derive(Deserialize)]
struct Output {
    backend: Option<String>,
    outcome: Option<String>,
    verified: bool,
    processes: Vec<Process>,
    elapsed_ms: f64,
}

#[derive(Deserialize)]
struct Process {
    closed_ms: Option<f64>,
}

#[derive(Serialize)]
struct Results {
    processes: u32,
    descriptors: u32,
    holders: u32,
    /// From the start of the process to its end.
    reap: Stats,
    /// By its own report.
    elapsed: Stats,
    /// By its own report, until the last process had closed the device.
    closed: Stats,
    usual: Stats,
    /// Rounds after which somebody still held the device.
    reap_left: usize,
    usual_left: usize,
}

#[derive(Default)]
struct Times {
    reap: Vec<f64>,
    elapsed: Vec<f64>,
    closed: Vec<f64>,
    usual: Vec<f64>,
    reap_left: usize,
    usual_left: usize,
    probe_set: String,
}

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { processes, holders, rounds, out } = options;
    check_tools()?;
    ensure!(*rounds > 0 && *holders > 0, "nothing to measure");
    let place = Place::new(&build_gpureap()?)?;
    let surroundings = Surroundings::look(&place)?;
    let mut notes = surroundings.notes();
    let others = Load::start(*processes, 0, &place.node())?;
    println!("{processes} processes of {DESCRIPTORS} descriptors, and {holders} holders to reap");

    let mut times = Times::default();
    for round in 0..*rounds {
        let mut both = [true, false];
        shuffle(&mut both, round as u64);
        for ours in both {
            let load = Load::start(*holders, *holders, &place.node())?;
            if ours {
                times.ours(&place, &load)?;
            } else {
                times.usual(&place)?;
            }
        }
    }
    drop(others);
    notes.extend(place.log().into_iter().map(|line| format!("the daemon said: {line}")));

    let Times { reap, elapsed, closed, usual, reap_left, usual_left, probe_set } = times;
    let stats = |ms: Vec<f64>| Stats::of_ms(ms).context("no times");
    let (reap, elapsed, closed, usual) = (stats(reap)?, stats(elapsed)?, stats(closed)?, stats(usual)?);
    let bars = vec![
        Bar::at_most(format!("reap of {holders} holders by KILL, whole process"), 20.0, "ms", Some(reap.median_ms)),
        Bar::at_least("faster than the usual line", 50.0, "×", Some(usual.median_ms / reap.median_ms)),
    ];
    let results = Results {
        processes: *processes,
        descriptors: DESCRIPTORS,
        holders: *holders,
        reap,
        elapsed,
        closed,
        usual,
        reap_left,
        usual_left,
    };
    let tables = tables(&results);
    let report = Report { bench: "reap", surroundings, probe_set, bars, notes, results };
    report.write(out, "`gpureap reap` against `fuser -k`", &tables)
}

impl Times {
    fn ours(&mut self, place: &Place, load: &Load) -> Result<()> {
        let finished = timed(place.gpureap(&REAP), &place.output())?;
        self.reap_left += usize::from(!holding(place.device)?.is_empty());
        let (status, stderr) = (finished.status, finished.stderr);
        ensure!(status.success(), "reap failed ({status}): {stderr}{}", finished.stdout);
        let Output { backend, outcome, verified, processes, elapsed_ms } =
            serde_json::from_str(&finished.stdout).context("reap --json")?;
        let outcome = outcome.unwrap_or_default();
        ensure!(outcome == "freed" && verified, "reap says {outcome}, verified: {verified}");
        ensure!(processes.len() == load.holders.len(), "reap found {} processes", processes.len());
        let closed: Option<Vec<f64>> = processes.iter().map(|process| process.closed_ms).collect();
        let closed = closed.context("reap did not see every process close the device")?;
        self.reap.push(finished.wall.as_secs_f64() * 1e3);
        self.elapsed.push(elapsed_ms);
        self.closed.extend(closed.into_iter().max_by(f64::total_cmp));
        self.probe_set = backend.unwrap_or_default();
        Ok(())
    }

    fn usual(&mut self, place: &Place) -> Result<()> {
        let node = place.node();
        let line = USUAL.replace("NODE", node.to_str().context("the node's path is not UTF-8")?);
        let mut command = Command::new("sh");
        command.args(["-c", &line]);
        let finished = timed(command, &place.output())?;
        self.usual_left += usize::from(!holding(place.device)?.is_empty());
        self.usual.push(finished.wall.as_secs_f64() * 1e3);
        Ok(())
    }
}

fn tables(results: &Results) -> String {
    let Results { processes, descriptors, holders, reap, elapsed, closed, usual, reap_left, usual_left } = results;
    let mut text = format!(
        "## {holders} holders, beside {processes} processes of {descriptors} descriptors\n\n\
         Times in ms; new holders in each round, the two in random order.\n\n\
         | what | rounds | min | median | p90 | rounds with holders left |\n|---|--:|--:|--:|--:|--:|\n"
    );
    let command = format!("`gpureap {}`", REAP.join(" "));
    for (what, stats, left) in [
        (command.as_str(), reap, Some(reap_left)),
        ("… `elapsed_ms` of its report", elapsed, None),
        ("… the last `closed_ms` of its report", closed, None),
        (&format!("`{USUAL}`"), usual, Some(usual_left)),
    ] {
        let Stats { rounds, min_ms, median_ms, p90_ms } = *stats;
        let [min, median, p90] = [min_ms, median_ms, p90_ms].map(short);
        let left = left.map_or_else(String::new, ToString::to_string);
        push(&mut text, format_args!("| {what} | {rounds} | {min} | {median} | {p90} | {left} |\n"));
    }
    text
}
