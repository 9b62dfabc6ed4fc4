//! Every probe set on every kernel: boots them, and writes docs/measurements/kernels.json and the middle of
//! docs/KERNELS.md from what the tests said there.

mod page;
mod results;
#[cfg(test)]
mod tests;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use self::results::{Results, Run};
use crate::{
    artifacts::Artifacts,
    kernels::Kernel,
    process::{self, root},
    vm::{self, Limits, Machine, SETS, Selection},
};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// Run only this row of the matrix, and keep the others' results (repeatable)
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// VMs at a time; each keeps one processor busy
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Run nothing: write the page again from the results that are there
    #[arg(long, conflicts_with = "only")]
    page: bool,
    #[command(flatten)]
    limits: Limits,
}

/// A row: a kernel and how it is booted.
struct Row {
    name: &'static str,
    kernel: &'static str,
    append: &'static [&'static str],
    /// Sets that gpureap has to refuse there
    refused: &'static [&'static str],
}

const fn row(name: &'static str, kernel: &'static str, append: &'static [&'static str]) -> Row {
    Row { name, kernel, append, refused: &[] }
}

/// In the order of the page.
const ROWS: &[Row] = &[
    Row { name: "5.10", kernel: "5.10", append: &[], refused: &SETS },
    row("6.1", "6.1", &[]),
    Row { name: "6.1-full", kernel: "6.1", append: &["preempt=full"], refused: &["kprobe"] },
    Row { name: "6.1-rt", kernel: "6.1-rt", append: &[], refused: &["kprobe"] },
    row("6.12", "6.12", &[]),
    row("6.12-rt", "6.12-rt", &[]),
    row("forky", "forky", &[]),
    row("backports", "backports", &["preempt=lazy"]),
    row("backports-full", "backports", &["preempt=full"]),
];

/// What the tests of a machine have to say.
const TESTS: [&str; 3] = ["operations", "reading", "support"];

pub(crate) fn command(options: &Options) -> Result<()> {
    let (json, page) = (root().join(JSON), root().join(PAGE));
    let mut results = read(&json)?;
    if !options.page {
        let failed = run(options, &mut results, |results| write(results, &json, &page))?;
        ensure!(failed == 0, "{failed} tests failed; the page says where");
        return Ok(());
    }
    write(&results, &json, &page)
}

const JSON: &str = "docs/measurements/kernels.json";
const PAGE: &str = "docs/KERNELS.md";

fn read(json: &Path) -> Result<Results> {
    match fs::read_to_string(json) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("{} is not what we write", json.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Results::default()),
        Err(error) => Err(error).with_context(|| format!("read {}", json.display())),
    }
}

fn write(results: &Results, json: &Path, page: &PathBuf) -> Result<()> {
    fs::write(json, serde_json::to_string_pretty(results)? + "\n")
        .with_context(|| format!("write {}", json.display()))?;
    let text = fs::read_to_string(page).with_context(|| format!("read {}", page.display()))?;
    fs::write(page, page::put_into(&text, results)?).with_context(|| format!("write {}", page.display()))
}

/// Boots the rows; whatever has ended is saved at once, for the whole takes hours on a slow machine.
fn run(options: &Options, results: &mut Results, save: impl Fn(&Results) -> Result<()>) -> Result<u32> {
    let rows = chosen(&options.only)?;
    let machines = rows
        .iter()
        .map(|row| {
            Ok(Machine {
                name: row.name.to_owned(),
                kernel: Kernel::named(row.kernel)?,
                append: row.append.iter().map(|&word| word.to_owned()).collect(),
                backends: SETS.map(str::to_owned).to_vec(),
                refused: row.refused.iter().map(|&set| set.to_owned()).collect(),
                left_out: &[],
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let commit = process::output(Command::new("git").current_dir(root()).args([
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]))?;
    "cargo xtask matrix".clone_into(&mut results.command);
    results.runs.retain(|run| ROWS.iter().any(|row| row.name == run.name));
    let mut failed = 0;
    let selection = Selection::of(&TESTS);
    let artifacts = Artifacts::build(&selection.tests)?;
    vm::boot_all(&machines, options.jobs, &options.limits, &selection, &artifacts, |machine, finished| {
        let now = process::output(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]))?;
        let about = Run {
            name: machine.name.clone(),
            package: machine.kernel.cached().unwrap_or_default(),
            append: machine.append.clone(),
            time: now.trim().to_owned(),
            commit: commit.trim().to_owned(),
            kernel: None,
            sets: Vec::new(),
        };
        failed += finished.rows.iter().map(|row| row.counts.failed).sum::<u32>();
        results.put(Run::new(about, finished)?);
        results.runs.sort_by_key(|run| ROWS.iter().position(|row| row.name == run.name));
        save(results)
    })?;
    Ok(failed)
}

fn chosen(only: &[String]) -> Result<Vec<&'static Row>> {
    for name in only {
        let names = || ROWS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
        ensure!(ROWS.iter().any(|row| row.name == name), "no row {name:?}; there are {}", names());
    }
    Ok(ROWS.iter().filter(|row| only.is_empty() || only.iter().any(|name| name == row.name)).collect())
}
