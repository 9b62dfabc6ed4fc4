//! `gpureap holders` against fuser and lsof, whole processes, in one run.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{
    Binary, build_lookup, check_tools,
    load::{DESCRIPTORS, Load},
    lookup::{Lookup, look_up},
    place::Place,
    report::{Report, Surroundings, push},
    shuffle,
    stats::{Bar, Stats, short},
    timed,
};

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    binary: Binary,
    /// The example lookup_time, built with it [default: that of this tree is made]
    #[arg(long, requires = "binary")]
    lookup: Option<PathBuf>,
    /// Processes to look through; give it several times to see what more of them cost [default: 300, 3000 and 10000]
    #[arg(long, default_values_t = [300, 3000, 10_000], hide_default_value = true)]
    processes: Vec<u32>,
    /// So many of them hold the device
    #[arg(long, default_value_t = 8)]
    holders: u32,
    /// Of gpureap; what looks at every process runs a tenth as often, at least five times
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// What a reader should know, for instance what else ran on the machine
    #[arg(long)]
    note: Vec<String>,
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Who {
    Version,
    Map,
    Snapshot,
    Walk,
    Fuser,
    Lsof,
}

impl Who {
    const ALL: [Self; 6] = [Self::Map, Self::Snapshot, Self::Walk, Self::Version, Self::Fuser, Self::Lsof];

    const fn name(self) -> &'static str {
        match self {
            Self::Version => "gpureap --version",
            Self::Map => "gpureap holders --json",
            Self::Snapshot => "gpureap holders --source snapshot --json",
            Self::Walk => "gpureap holders --source proc --json",
            Self::Fuser => "fuser NODE",
            Self::Lsof => "lsof NODE",
        }
    }

    fn command(self, place: &Place) -> Command {
        let of_node = |program: &str| {
            let mut command = place.command(Path::new(program), &[]);
            command.arg(place.node());
            command
        };
        match self {
            Self::Version => place.gpureap(&["--version"]),
            Self::Map => place.gpureap(&["holders", "--json"]),
            Self::Snapshot => place.gpureap(&["holders", "--source", "snapshot", "--json"]),
            Self::Walk => place.gpureap(&["holders", "--source", "proc", "--json"]),
            Self::Fuser => of_node("fuser"),
            Self::Lsof => of_node("lsof"),
        }
    }

    fn rounds(self, rounds: usize) -> usize {
        match self {
            Self::Version | Self::Map => rounds,
            Self::Snapshot | Self::Walk | Self::Fuser | Self::Lsof => (rounds / 10).max(5),
        }
    }

    /// The processes that an output names; `None` for one that names none.
    fn found(self, stdout: &str) -> Result<Option<Vec<u32>>> {
        let mut pids: Vec<u32> = match self {
            Self::Version => return Ok(None),
            Self::Map | Self::Snapshot | Self::Walk => {
                let Output { holders, .. } = serde_json::from_str(stdout)?;
                holders.iter().map(|holder| holder.pid).collect()
            }
            Self::Fuser => stdout.split_whitespace().map(pid).collect::<Result<_>>()?,
            Self::Lsof => {
                let words = stdout.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1));
                words.map(pid).collect::<Result<_>>()?
            }
        };
        pids.sort_unstable();
        pids.dedup();
        Ok(Some(pids))
    }
}

fn pid(word: &str) -> Result<u32> {
    word.parse().with_context(|| format!("{word} is no pid"))
}

/// What is of interest in `holders --json`.
#[derive(Deserialize)]
struct Output {
    source: String,
    backend: Option<String>,
    holders: Vec<Holder>,
}

#[derive(Deserialize)]
struct Holder {
    pid: u32,
}

#[derive(Serialize)]
struct Results {
    descriptors: u32,
    holders: u32,
    loads: Vec<LoadResult>,
    lookup: Lookup,
}

#[derive(Serialize)]
struct LoadResult {
    processes: u32,
    /// The host's own among them.
    all_processes: usize,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    command: &'static str,
    #[serde(flatten)]
    stats: Stats,
    /// Processor time, in milliseconds.
    cpu: Stats,
    faster_than_fuser: f64,
    /// Rounds in which it named other processes than those that hold the device.
    wrong_rounds: usize,
    #[serde(skip)]
    who: Who,
}

impl LoadResult {
    fn median(&self, who: Who) -> Option<f64> {
        self.rows.iter().find(|row| row.who == who).map(|row| row.stats.median_ms)
    }
}

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { binary, lookup, processes, holders, rounds, note, out } = options;
    check_tools()?;
    ensure!(*rounds > 0 && *holders > 0, "nothing to measure");
    let mut processes = processes.clone();
    processes.sort_unstable();
    processes.dedup();
    let (gpureap, commit) = binary.get()?;
    let lookup = lookup.clone().map_or_else(build_lookup, Ok)?;
    let place = Place::new(&gpureap)?;
    let surroundings = Surroundings::look(&gpureap, Some(place.device), commit)?;
    let mut notes = surroundings.notes();
    notes.extend(note.iter().cloned());
    let mut probe_set = String::new();
    let mut loads = Vec::new();
    for count in processes {
        let load = Load::start(count, *holders, &place.node())?;
        println!("{count} processes of {DESCRIPTORS} descriptors, {holders} holders");
        let first = timed(place.gpureap(&["holders", "--json"]), &place.output())?;
        let Output { source, backend, .. } = serde_json::from_str(&first.stdout).context("holders --json")?;
        ensure!(source == "map", "gpureap does not read the map but takes {source}");
        probe_set = backend.unwrap_or_default();
        loads.push(measure(&place, &load, count, *rounds, &mut notes)?);
    }
    let lookup = look_up(&place, &lookup)?;
    notes.push(Surroundings::load_after()?);
    notes.extend(place.said());

    let bars = bars(&loads, &lookup, &probe_set);
    let results = Results { descriptors: DESCRIPTORS, holders: *holders, loads, lookup };
    let tables = tables(&results);
    let report = Report { bench: "holders".to_owned(), surroundings, probe_set, bars, notes, results };
    report.write(out, "`gpureap holders` against fuser, lsof and a walk through /proc", &tables)
}

/// Of one command.
#[derive(Default)]
struct Times {
    wall: Vec<Duration>,
    cpu: Vec<Duration>,
}

fn measure(place: &Place, load: &Load, processes: u32, rounds: usize, notes: &mut Vec<String>) -> Result<LoadResult> {
    let mut schedule: Vec<Who> = Vec::new();
    for who in Who::ALL {
        schedule.extend(std::iter::repeat_n(who, who.rounds(rounds)));
        // Not counted: brings programs and libraries into memory.
        timed(who.command(place), &place.output())?;
    }
    shuffle(&mut schedule, u64::from(processes));
    let all_processes = std::fs::read_dir("/proc")?
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit())))
        .count();

    let mut times = Who::ALL.map(|who| (who, Times::default(), 0_usize));
    for next in schedule {
        let finished = timed(next.command(place), &place.output())?;
        let name = next.name();
        // fuser and lsof also fail for reasons of their own while they find everything.
        let theirs = matches!(next, Who::Fuser | Who::Lsof);
        ensure!(theirs || finished.status.success(), "{name} failed ({}): {}", finished.status, finished.stderr);
        let found = next.found(&finished.stdout).with_context(|| format!("what {name} printed"))?;
        let (_, times, wrong) =
            times.iter_mut().find(|(who, ..)| *who == next).expect("everyone has a place for his times");
        times.wall.push(finished.wall);
        times.cpu.push(finished.cpu);
        if let Some(found) = found.filter(|found| *found != load.holders) {
            if *wrong == 0 {
                notes.push(format!(
                    "{name} at {processes} processes named {} processes instead of the {} that hold the device",
                    found.len(),
                    load.holders.len()
                ));
            }
            *wrong += 1;
        }
    }
    let fuser = times.iter().find(|(who, ..)| *who == Who::Fuser).and_then(|(_, times, _)| Stats::of(&times.wall));
    let fuser = fuser.context("no time of fuser")?.median_ms;
    let rows = times.into_iter().filter_map(|(who, times, wrong_rounds)| {
        let (stats, cpu) = (Stats::of(&times.wall)?, Stats::of(&times.cpu)?);
        Some(Row { command: who.name(), faster_than_fuser: fuser / stats.median_ms, stats, cpu, wrong_rounds, who })
    });
    Ok(LoadResult { processes, all_processes, rows: rows.collect() })
}

fn bars(loads: &[LoadResult], lookup: &Lookup, probe_set: &str) -> Vec<Bar> {
    let Some((few, more)) = loads.split_first() else { return Vec::new() };
    let over = |whole: Option<f64>, part: Option<f64>| Some(whole? / part?);
    let mut bars = Vec::new();
    for many in if more.is_empty() { loads } else { more } {
        let (at, own) = (many.processes, many.median(Who::Map));
        let own_row = many.rows.iter().find(|row| row.who == Who::Map);
        let whole = format!("`gpureap holders --json`, whole process, {at} processes");
        let spent = own_row.map(|row| row.cpu.median_ms);
        bars.push(Bar::at_most(whole.clone(), 5.0, "ms", own));
        bars.push(Bar::at_most(format!("{whole}: its processor time"), 5.0, "ms", spent));
        let faster = over(many.median(Who::Fuser), own);
        bars.push(Bar::at_least(format!("faster than fuser, {at} processes"), 100.0, "×", faster));
        if few.processes < at {
            let growth = over(own, few.median(Who::Map));
            let what = format!("its time at {at} processes by that at {}", few.processes);
            bars.push(Bar::at_most(what, 1.3, "×", growth));
        }
    }
    let maps = if probe_set == "gate" { lookup.procs } else { lookup.read_maps };
    let looks = [(format!("the maps that `{probe_set}` keeps"), maps), ("the verified view".to_owned(), lookup.view)];
    for (what, stats) in looks {
        let what = format!("map lookup in the library, {} holders: {what}", lookup.holders);
        bars.push(Bar::at_most(what, 50.0, "µs", Some(stats.median_ms * 1e3)));
    }
    bars
}

fn tables(results: &Results) -> String {
    let Results { descriptors, holders, loads, lookup } = results;
    let mut text = String::new();
    for LoadResult { processes, all_processes, rows } in loads {
        push(
            &mut text,
            format_args!(
                "## {processes} processes of {descriptors} descriptors, {holders} of them hold the device\n\n\
                 {all_processes} processes on the host; times of whole processes in ms, in random order.\n\n\
                 | command | rounds | min | median | p90 | processor time, median | times faster than fuser | wrong rounds |\n\
                 |---|--:|--:|--:|--:|--:|--:|--:|\n"
            ),
        );
        for Row { command, stats, cpu, faster_than_fuser, wrong_rounds, who: _ } in rows {
            let Stats { rounds, min_ms, median_ms, p90_ms, p95_ms: _, max_ms: _ } = *stats;
            let [min, median, p90, cpu, faster] =
                [min_ms, median_ms, p90_ms, cpu.median_ms, *faster_than_fuser].map(short);
            push(
                &mut text,
                format_args!(
                    "| `{command}` | {rounds} | {min} | {median} | {p90} | {cpu} | {faster} | {wrong_rounds} |\n"
                ),
            );
        }
        text.push('\n');
    }
    let Lookup { holders, open, view, read_maps, procs } = lookup;
    push(
        &mut text,
        format_args!(
            "## Inside one process, {holders} holders\n\n| call | rounds | min µs | median µs | p90 µs |\n|---|--:|--:|--:|--:|\n"
        ),
    );
    let calls = [("Handles::procs", procs), ("read_maps", read_maps), ("Eyes::view", view), ("from_pins", open)];
    for (call, stats) in calls {
        let Stats { rounds, min_ms, median_ms, p90_ms, p95_ms: _, max_ms: _ } = *stats;
        let [min, median, p90] = [min_ms, median_ms, p90_ms].map(|ms| short(ms * 1e3));
        push(&mut text, format_args!("| `{call}` | {rounds} | {min} | {median} | {p90} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_from_each_output() {
        let found = |who: Who, text: &str| who.found(text).unwrap();
        assert_eq!(found(Who::Version, "gpureap 0.1.0\n"), None);
        let json = r#"{"source":"map","backend":"gate","holders":[{"pid":9,"comm":"b"},{"pid":7,"comm":"a"}]}"#;
        assert_eq!(found(Who::Map, json), Some(vec![7, 9]));
        assert_eq!(found(Who::Fuser, "   7   9"), Some(vec![7, 9]));
        let lsof = "COMMAND PID USER FD TYPE DEVICE SIZE/OFF NODE NAME\nx 9 root 3u CHR 4,63 0t0 5 /n\n\
                    x 9 root 4u CHR 4,63 0t0 5 /n\nx 7 root 3u CHR 4,63 0t0 5 /n\n";
        assert_eq!(found(Who::Lsof, lsof), Some(vec![7, 9]));
        assert_eq!(found(Who::Lsof, ""), Some(Vec::new()));
        Who::Fuser.found("7 x").unwrap_err();
    }

    #[test]
    fn bars_compare_the_ends() {
        let stats = |ms| Stats::of_ms(vec![ms]).unwrap();
        let load = |processes, own, fuser| {
            let row = |who: Who, median| Row {
                command: who.name(),
                stats: stats(median),
                cpu: stats(median),
                faster_than_fuser: fuser / median,
                wrong_rounds: 0,
                who,
            };
            LoadResult { processes, all_processes: 0, rows: vec![row(Who::Map, own), row(Who::Fuser, fuser)] }
        };
        let lookup =
            Lookup { holders: 64, open: stats(1.0), view: stats(0.1), read_maps: stats(0.04), procs: stats(0.02) };
        let measured =
            |loads: &[LoadResult]| bars(loads, &lookup, "kprobe").iter().map(|bar| bar.measured).collect::<Vec<_>>();
        let both = measured(&[load(300, 2.0, 50.0), load(3000, 3.0, 600.0)]);
        assert_eq!(both, [3.0, 3.0, 200.0, 1.5, 40.0, 100.0].map(Some));
        assert_eq!(measured(&[load(300, 2.0, 50.0)]), [2.0, 2.0, 25.0, 40.0, 100.0].map(Some));
        let three = measured(&[load(300, 2.0, 50.0), load(3000, 3.0, 600.0), load(10_000, 4.0, 2000.0)]);
        assert_eq!(three[4..8], [4.0, 4.0, 500.0, 2.0].map(Some));
    }
}
