//! What the probe sets cost in instructions: in a virtual machine whose clock counts them.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::{
    Binary, build_lookup,
    conditions::{Condition, Set, Visit},
    guest::Cost,
    lookup::Lookup,
    report::{Report, Surroundings, push},
    stats::{Bar, median, short},
    vm,
    work::Work,
};

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    binary: Binary,
    /// The example lookup_time, built with it [default: that of this tree is made]
    #[arg(long, requires = "binary")]
    lookup: Option<PathBuf>,
    /// Kernel to boot, as `cargo xtask kernel list` names it
    #[arg(long, default_value = "6.12")]
    kernel: String,
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// What a reader should know
    #[arg(long)]
    note: Vec<String>,
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

pub(super) const CONDITIONS: [Condition; 8] = [
    Condition::Nothing,
    Condition::Empty(Set::Kprobe),
    Condition::Gpureap(Set::Kprobe),
    Condition::Empty(Set::Fentry),
    Condition::Gpureap(Set::Fentry),
    Condition::Empty(Set::Gate),
    Condition::Gpureap(Set::Gate),
    Condition::SystemCallTracer,
];

/// What two decimals show as 1.00.
pub(super) const ONE: f64 = 1.005;

/// What a work that has nothing to do with gpureap may cost at most: so much noise, or [`ONE`].
pub(super) fn limit(noise: f64) -> f64 {
    (((1.0 + noise) * 1e4).round() / 1e4).max(ONE)
}

/// For a set over empty programs on its hooks.
const BAR: f64 = 1.3;

#[derive(Serialize)]
struct Results {
    rounds: u32,
    rows: Vec<Row>,
    lookups: Vec<SetLookup>,
}

#[derive(Serialize)]
struct SetLookup {
    set: Set,
    lookup: Lookup,
}

#[derive(Serialize)]
struct Row {
    work: &'static str,
    nothing: f64,
    /// How far apart the blocks with nothing attached are, as a part of their median.
    spread: f64,
    sets: Vec<Pair>,
    tracer: f64,
    #[serde(skip)]
    of: Work,
}

/// Instructions of one operation.
#[derive(Clone, Copy, Serialize)]
struct Pair {
    set: Set,
    empty: f64,
    gpureap: f64,
}

impl Pair {
    fn over_empty(self) -> f64 {
        self.gpureap / self.empty
    }
}

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { binary, lookup, kernel, rounds, note, out } = options;
    ensure!(*rounds > 0, "nothing to measure");
    let (gpureap, commit) = binary.get()?;
    let surroundings = Surroundings::look(&gpureap, None, commit)?.of_guest(vm::package(kernel)?, 1);
    let lookup = lookup.clone().map_or_else(build_lookup, Ok)?;
    let told = vm::run(kernel, &gpureap, &vm::Wish::Cost { rounds: *rounds, lookup: &lookup })?;
    let (mut visits, mut lookups) = (Vec::new(), Vec::new());
    for line in told {
        match serde_json::from_str(&line)? {
            Cost::Visit(visit) => visits.push(visit),
            Cost::Lookup(set, lookup) => lookups.push(SetLookup { set, lookup }),
        }
    }
    let rows = Work::ALL.into_iter().map(|work| row(&visits, work)).collect::<Result<_>>()?;
    let results = Results { rounds: *rounds, rows, lookups };
    let (bars, tables) = (bars(&results), tables(&results));
    let probe_set = Set::ALL.map(Set::name).join(", ");
    let report = Report { bench: "cost-vm".to_owned(), surroundings, probe_set, bars, notes: note.clone(), results };
    report.write(out, "What the probe sets cost, in instructions", &tables)
}

fn row(visits: &[Visit], work: Work) -> Result<Row> {
    let of = |condition: Condition| -> Vec<f64> {
        let visits = visits.iter().filter(|visit| visit.work == work && visit.condition == condition);
        visits.flat_map(|visit| visit.samples.iter().map(|sample| sample.wall_ns)).collect()
    };
    let figure = |condition: Condition| median(of(condition)).with_context(|| format!("no time of {condition:?}"));
    let nothing = figure(Condition::Nothing)?;
    let blocks = of(Condition::Nothing);
    let (low, high) = blocks.iter().fold((f64::INFINITY, 0.0_f64), |(low, high), ns| (low.min(*ns), high.max(*ns)));
    let sets = Set::ALL
        .into_iter()
        .map(|set| Ok(Pair { set, empty: figure(Condition::Empty(set))?, gpureap: figure(Condition::Gpureap(set))? }));
    Ok(Row {
        work: work.name(),
        nothing,
        spread: (high - low) / nothing,
        sets: sets.collect::<Result<_>>()?,
        tracer: figure(Condition::SystemCallTracer)?,
        of: work,
    })
}

fn bars(results: &Results) -> Vec<Bar> {
    let Results { rounds: _, rows, lookups: _ } = results;
    let mut bars = Vec::new();
    for set in [Set::Kprobe, Set::Fentry] {
        for row in rows {
            let cost = row.sets.iter().find(|cost| cost.set == set).map(|cost| cost.over_empty());
            let name = set.name();
            bars.push(Bar::at_most(format!("`{name}` over empty programs on its hooks, {}", row.work), BAR, "×", cost));
        }
    }
    for row in rows.iter().filter(|row| !row.of.is_tracked()) {
        let gate = row.sets.iter().find(|cost| cost.set == Set::Gate).map(|cost| cost.gpureap / row.nothing);
        let limit = limit(row.spread);
        bars.push(Bar::at_most(format!("`gate` by nothing, {}: 1.00 or the spread", row.work), limit, "×", gate));
    }
    bars
}

fn tables(results: &Results) -> String {
    let Results { rounds, rows, lookups } = results;
    let mut text = format!(
        "## Instructions of one operation, in user space and kernel\n\n\
         QEMU emulates one processor whose clock goes on by a nanosecond with every instruction (`-icount shift=0,sleep=off`), so \
         what is told is the clock of the machine: neither caches nor other work of the host are in it, and an instruction is \
         as dear as any other. Timer interrupts and what else the kernel does by itself are. In {rounds} rounds the conditions \
         took turns in random order; told are medians. “Empty” is a program of two instructions (`r0 = 0; exit`) on each hook \
         that the daemon had attached one to, of the same type and attached in the same way, as the kernel lists the daemon's \
         own links: what the hooks cost whoever uses them. The daemon is stopped (SIGSTOP) while work is timed, so that the one \
         processor runs the programs and not their reader. The tracer of system calls has an empty program at `sys_enter` and \
         one at `sys_exit`.\n\n"
    );
    push(&mut text, format_args!("| operation | nothing | spread |"));
    for set in Set::ALL.map(Set::name) {
        push(&mut text, format_args!(" empty, `{set}` | `{set}` | by empty |"));
    }
    push(
        &mut text,
        format_args!(" tracer of system calls |\n|---|--:|--:|{}--:|\n", "--:|".repeat(3 * Set::ALL.len())),
    );
    for Row { work, nothing, spread, sets, tracer, of: _ } in rows {
        push(&mut text, format_args!("| {work} | {} | {:.2} % |", short(*nothing), spread * 100.0));
        for cost in sets {
            let Pair { set: _, empty, gpureap } = *cost;
            let (over, empty, gpureap) = (cost.over_empty(), short(empty), short(gpureap));
            push(&mut text, format_args!(" {empty} | {gpureap} | {over:.3} × |"));
        }
        push(&mut text, format_args!(" {} |\n", short(*tracer)));
    }
    text.push_str(
        "\n## What is added to an operation, in instructions\n\n\
         | operation | hooks of `kprobe` | `kprobe` itself | hooks of `fentry` | `fentry` itself | hooks of `gate` | `gate` itself | \
         tracer of system calls |\n|---|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    for Row { work, nothing, spread: _, sets, tracer, of: _ } in rows {
        push(&mut text, format_args!("| {work} |"));
        for Pair { set: _, empty, gpureap } in sets {
            push(&mut text, format_args!(" {:.0} | {:.0} |", empty - nothing, gpureap - empty));
        }
        push(&mut text, format_args!(" {:.0} |\n", tracer - nothing));
    }
    text.push_str(
        "\n## A look at the holders through the library, in instructions\n\nInside one process, the daemon running; medians.\n\n\
         | probe set | holders | its maps (`read_maps`) | candidates (`Handles::procs`) | verified view (`Eyes::view`) | \
         opening the pins |\n|---|--:|--:|--:|--:|--:|\n",
    );
    for SetLookup { set, lookup } in lookups {
        let Lookup { holders, open, view, read_maps, procs } = lookup;
        let [open, view, maps, procs] = [open, view, read_maps, procs].map(|stats| short(stats.median_ms * 1e6));
        push(&mut text, format_args!("| `{}` | {holders} | {maps} | {procs} | {view} | {open} |\n", set.name()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::work::Sample;

    #[test]
    fn rows_from_visits() {
        let mut visits = Vec::new();
        for (number, condition) in (1_u32..).zip(CONDITIONS) {
            for (round, noise) in [(0, 0.0), (1, 1.0), (2, -1.0)] {
                let sample = Sample { wall_ns: 100.0 * f64::from(number) + noise, cpu_ns: 0.0 };
                visits.push(Visit { round, condition, work: Work::Dup, samples: vec![sample; 2], daemon_ns: 0.0 });
            }
        }
        let row = row(&visits, Work::Dup).unwrap();
        assert!(
            (row.nothing - 100.0).abs() < 1e-9 && (row.spread - 0.02).abs() < 1e-9 && (row.tracer - 800.0).abs() < 1e-9
        );
        let over: Vec<String> = row.sets.iter().map(|cost| format!("{:.2}", cost.over_empty())).collect();
        assert_eq!(over, ["1.50", "1.25", "1.17"]);
        let bars = bars(&Results { rounds: 3, rows: vec![row], lookups: Vec::new() });
        let verdicts: Vec<&str> = bars.iter().map(|bar| bar.verdict.as_str()).collect();
        assert_eq!(verdicts, ["misses by 0.200 ×", "holds", "misses by 5.98 ×"]);
    }

    #[test]
    fn what_was_not_measured_is_no_row() {
        assert!(row(&[], Work::Dup).is_err());
    }
}
