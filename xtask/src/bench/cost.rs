//! What gpureap costs programs that have nothing to do with it: the same work with it, without it, and with a tracer of all
//! system calls.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::{
    Binary, check_root,
    conditions::{Condition, Plan, Set, Visit, measure},
    cost_vm::limit,
    place::Place,
    report::{Report, Surroundings, push},
    stats::{Bar, Ratio, median, short},
    work::{Site, Work, stay_on_one_processor},
};

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    binary: Binary,
    #[arg(long, default_value_t = 30)]
    rounds: u32,
    /// Blocks of each work in a round
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    /// What a reader should know, for instance what else ran on the machine
    #[arg(long)]
    note: Vec<String>,
    /// Directory for the report
    #[arg(long, default_value = "docs/measurements")]
    out: PathBuf,
}

const GATE: Condition = Condition::Gpureap(Set::Gate);
const CONDITIONS: [Condition; 4] = [Condition::Nothing, Condition::NothingAgain, GATE, Condition::SystemCallTracer];

#[derive(Serialize)]
struct Results {
    rounds: u32,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    work: &'static str,
    operations: u32,
    /// Processor time of one operation with nothing attached, and its time by the clock.
    nothing_ns: f64,
    nothing_wall_ns: f64,
    cpu: Ratios,
    wall: Ratios,
    /// Of gpureap's daemon, for each operation, median.
    daemon_ns: f64,
    #[serde(skip)]
    of: Work,
}

/// To nothing in the same round.
#[derive(Serialize)]
struct Ratios {
    again: Ratio,
    gate: Ratio,
    tracer: Ratio,
}

pub(super) fn run(options: &Options) -> Result<()> {
    let Options { binary, rounds, repeats, note, out } = options;
    check_root()?;
    ensure!(*rounds > 0 && *repeats > 0, "nothing to measure");
    let (gpureap, commit) = binary.get()?;
    let mut place = Place::without_daemon(&gpureap)?;
    let surroundings = Surroundings::look(&gpureap, Some(place.device), commit)?;
    let mut notes = surroundings.notes();
    notes.extend(note.iter().cloned());
    stay_on_one_processor()?;
    let site = Site::new(&place.files(), &place.node(), false)?;
    let plan = Plan { conditions: CONDITIONS.to_vec(), rounds: *rounds, repeats: *repeats, stop_daemon: false };
    let mut visits = Vec::new();
    measure(&mut place, &site, &plan, |visit| {
        if visit.work == Work::ALL[0] {
            println!("round {} of {rounds}: {:?}", visit.round + 1, visit.condition);
        }
        visits.push(visit);
        Ok(())
    })?;
    notes.push(Surroundings::load_after()?);
    notes.extend(place.said());

    let rows = Work::ALL.into_iter().map(|work| row(&site, &visits, work)).collect::<Result<_>>()?;
    let results = Results { rounds: *rounds, rows };
    let (bars, tables) = (bars(&results), tables(&results));
    let report = Report { bench: "cost".to_owned(), surroundings, probe_set: "gate".to_owned(), bars, notes, results };
    report.write(out, "What `gate` costs others", &tables)
}

fn row(site: &Site, visits: &[Visit], work: Work) -> Result<Row> {
    type Figure = fn(&super::work::Sample) -> f64;
    let of = |condition: Condition, figure: Figure| -> Vec<f64> {
        let visits = visits.iter().filter(|visit| visit.work == work && visit.condition == condition);
        visits.filter_map(|visit| median(visit.samples.iter().map(figure).collect())).collect()
    };
    let ratios = |figure: Figure| {
        let nothing = of(Condition::Nothing, figure);
        let ratio = |condition| Ratio::of(&of(condition, figure), &nothing).context("no times");
        anyhow::Ok(Ratios {
            again: ratio(Condition::NothingAgain)?,
            gate: ratio(GATE)?,
            tracer: ratio(Condition::SystemCallTracer)?,
        })
    };
    let with_daemon = visits.iter().filter(|visit| visit.work == work && visit.condition == GATE);
    Ok(Row {
        work: work.name(),
        operations: site.operations(work),
        nothing_ns: median(of(Condition::Nothing, |sample| sample.cpu_ns)).context("no times")?,
        nothing_wall_ns: median(of(Condition::Nothing, |sample| sample.wall_ns)).context("no times")?,
        cpu: ratios(|sample| sample.cpu_ns)?,
        wall: ratios(|sample| sample.wall_ns)?,
        daemon_ns: median(with_daemon.map(|visit| visit.daemon_ns).collect()).context("no times")?,
        of: work,
    })
}

/// Noise is what nothing differs from itself: the farther end of that interval.
fn bars(results: &Results) -> Vec<Bar> {
    let Results { rounds: _, rows } = results;
    let others = rows.iter().filter(|row| !row.of.is_tracked());
    others
        .map(|Row { work, cpu: Ratios { again, gate, tracer: _ }, .. }| {
            let noise = (again.high - 1.0).abs().max((1.0 - again.low).abs());
            let limit = limit(noise);
            Bar::at_most(format!("`gate` by nothing, {work}: 1.00 or the noise"), limit, "×", Some(gate.median))
        })
        .collect()
}

fn tables(results: &Results) -> String {
    let Results { rounds, rows } = results;
    let mut text = format!(
        "## Processor time of one operation\n\n\
         In {rounds} rounds the four conditions took turns in random order; in each the works took turns. The process stayed on \
         one processor, and its own processor time is told, with its children's, so that what others did meanwhile is not \
         in it. A ratio is the median over rounds of the quotient to nothing in the same round; in brackets 95 % of the \
         medians of 2,000 resamplings of the rounds. “Nothing again” is the same as nothing: what it differs from 1.00 is noise. \
         The tracer of system calls has one empty program at `sys_enter` and one at `sys_exit`: any that does something \
         costs more. The last column is what gpureap's daemon spent beside it.\n\n"
    );
    let head = "gate | nothing again | tracer of system calls";
    push(&mut text, format_args!("| operation | nothing, ns | {head} | daemon, ns |\n|---|--:|--:|--:|--:|--:|\n"));
    for Row { work, nothing_ns, cpu, daemon_ns, .. } in rows {
        let (ns, daemon) = (short(*nothing_ns), short(*daemon_ns));
        push(&mut text, format_args!("| {work} | {ns} | {} | {daemon} |\n", cpu.cells()));
    }
    push(&mut text, format_args!("\n## Time by the clock\n\nThe same, with what others did meanwhile.\n\n"));
    push(&mut text, format_args!("| operation | nothing, ns | {head} |\n|---|--:|--:|--:|--:|\n"));
    for Row { work, nothing_wall_ns, wall, .. } in rows {
        push(&mut text, format_args!("| {work} | {} | {} |\n", short(*nothing_wall_ns), wall.cells()));
    }
    text
}

impl Ratios {
    fn cells(&self) -> String {
        let Self { again, gate, tracer } = self;
        [gate, again, tracer].map(ToString::to_string).join(" | ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_is_held_against_the_noise() {
        let ratio = |low, median, high| Ratio { median, low, high };
        let row = |of: Work, gate| Row {
            work: of.name(),
            operations: 1,
            nothing_ns: 100.0,
            nothing_wall_ns: 100.0,
            cpu: Ratios { again: ratio(0.97, 1.0, 1.01), gate, tracer: ratio(2.0, 2.0, 2.0) },
            wall: Ratios { again: ratio(0.9, 1.0, 1.1), gate, tracer: ratio(2.0, 2.0, 2.0) },
            daemon_ns: 0.0,
            of,
        };
        let rows = vec![
            row(Work::Getppid, ratio(0.99, 1.02, 1.05)),
            row(Work::PlainFile, ratio(1.03, 1.04, 1.05)),
            row(Work::ForkExec, ratio(1.1, 1.2, 1.3)),
            row(Work::Device, ratio(1.1, 1.2, 1.3)),
        ];
        let bars = bars(&Results { rounds: 1, rows });
        let verdicts: Vec<(f64, &str)> = bars.iter().map(|bar| (bar.limit, bar.verdict.as_str())).collect();
        assert_eq!(verdicts, [(1.03, "holds"), (1.03, "misses by 0.010 ×")]);
    }
}
