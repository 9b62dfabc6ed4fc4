//! Where and with what was measured, and the two files that tell it.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::stats::{Bar, short};
use crate::process::{self, find_program, root};

/// More work than this for all processors together, before the measurement began, is told as a note.
const BUSY: f64 = 0.5;

#[derive(Serialize)]
pub(super) struct Surroundings {
    command: String,
    time: String,
    kernel: String,
    processor: String,
    cores: usize,
    memory_mib: u64,
    /// Of the last minute, before it began.
    load_average: f64,
    versions: BTreeMap<&'static str, String>,
    /// Character device that counts as a GPU; none of this machine where the measurement is of another.
    stand_in: Option<String>,
    /// The virtual machine that was measured, where it was one.
    guest: Option<String>,
}

impl Surroundings {
    /// `commit`: of a gpureap that was built elsewhere.
    pub(super) fn look(gpureap: &Path, stand_in: Option<(u32, u32)>, commit: Option<&str>) -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| format!("read {path}"));
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo")?, "MemTotal").unwrap_or_default();
        let memory: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        Ok(Self {
            command: shown(&arguments),
            time: process::output(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]))?.trim().to_owned(),
            kernel: without_suffix(read("/proc/sys/kernel/osrelease")?.trim()).to_owned(),
            processor: field(&read("/proc/cpuinfo")?, "model name").unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory / 1024,
            load_average: load_average()?,
            versions: versions(gpureap, commit)?,
            stand_in: stand_in.map(|(major, minor)| format!("{major}:{minor}")),
            guest: None,
        })
    }

    /// For what was measured in a virtual machine on this one, with a kernel of Debian's.
    pub(super) fn of_guest(self, package: impl Into<String>, processors: u32) -> Self {
        let package = package.into();
        Self { guest: Some(format!("QEMU, emulated (TCG), {processors} processor, {package}")), ..self }
    }

    /// What a reader should know before he trusts the figures.
    pub(super) fn notes(&self) -> Vec<String> {
        let load = self.load_average;
        let busy = load > BUSY;
        busy.then(|| format!("the machine was busy with other work: load average {load} before the measurement"))
            .into_iter()
            .collect()
    }

    pub(super) fn kernel(&self) -> &str {
        &self.kernel
    }

    /// How busy the machine was while it was measured.
    pub(super) fn load_after() -> Result<String> {
        Ok(format!("load average right after the measurement, its own work included: {}", load_average()?))
    }

    fn markdown(&self, probe_set: &str) -> String {
        let Self { command, time, kernel, processor, cores, memory_mib, load_average, versions, stand_in, guest } =
            self;
        let mut text =
            format!("Measured by `{command}`.\n\n| | |\n|---|---|\n| time | {time} |\n| kernel | {kernel} |\n");
        push(&mut text, format_args!("| processor | {processor}, {cores} cores |\n"));
        push(&mut text, format_args!("| memory | {memory_mib} MiB |\n"));
        push(&mut text, format_args!("| load average before | {load_average} |\n"));
        for (name, version) in versions {
            push(&mut text, format_args!("| {name} | {version} |\n"));
        }
        if let Some(guest) = guest {
            push(&mut text, format_args!("| virtual machine | {guest} |\n"));
        }
        push(&mut text, format_args!("| probe set | {probe_set} |\n"));
        if let Some(stand_in) = stand_in {
            push(&mut text, format_args!("| stand-in device | {stand_in} |\n"));
        }
        text
    }
}

fn load_average() -> Result<f64> {
    let load = fs::read_to_string("/proc/loadavg").context("read /proc/loadavg")?;
    Ok(load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0))
}

/// The version of a kernel's release. What its builder has added may name a machine or a provider.
fn without_suffix(release: &str) -> &str {
    let end = release.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(release.len());
    release[..end].trim_end_matches('.')
}

/// The command line for readers elsewhere: of a path only its last part, and no notes, which stand in the report themselves.
fn shown(arguments: &[String]) -> String {
    let mut words = vec!["cargo xtask".to_owned()];
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument == "--note" {
            arguments.next();
        } else if !argument.starts_with("--note=") {
            let (name, value) = argument.split_once('=').map_or(("", argument.as_str()), |(name, value)| (name, value));
            let value = if value.starts_with('/') { value.rsplit('/').next().unwrap_or(value) } else { value };
            words.push(if name.is_empty() { value.to_owned() } else { format!("{name}={value}") });
        }
    }
    words.join(" ")
}

fn versions(gpureap: &Path, commit: Option<&str>) -> Result<BTreeMap<&'static str, String>> {
    let gpureap = process::output(Command::new(gpureap).arg("--version"))?;
    let mut git = Command::new("git");
    git.current_dir(root()).args(["describe", "--always", "--dirty", "--abbrev=12"]);
    let here = || process::probe(&mut git).unwrap_or_else(|| "unknown".to_owned());
    let commit = commit.map_or_else(here, ToOwned::to_owned);
    // Both tell it on stderr.
    let said = |program: &str, option: &str, what: &str| {
        let output = Command::new(program).arg(option).output().with_context(|| format!("cannot start {program}"))?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = text.lines().find_map(|line| line.trim().strip_prefix(what));
        anyhow::Ok(line.unwrap_or("unknown").trim().to_owned())
    };
    let mut versions = BTreeMap::from([(
        "gpureap",
        format!("{}, commit {}", gpureap.trim().trim_start_matches("gpureap "), commit.trim()),
    )]);
    for (program, option, what) in [("fuser", "-V", "fuser"), ("lsof", "-v", "revision:")] {
        if find_program(program).is_some() {
            versions.insert(program, said(program, option, what)?);
        }
    }
    Ok(versions)
}

/// One measurement, ready to be written.
#[derive(Serialize)]
pub(super) struct Report<T> {
    pub(super) bench: String,
    #[serde(flatten)]
    pub(super) surroundings: Surroundings,
    pub(super) probe_set: String,
    pub(super) bars: Vec<Bar>,
    pub(super) notes: Vec<String>,
    #[serde(flatten)]
    pub(super) results: T,
}

impl<T: Serialize> Report<T> {
    /// Writes `bench-NAME.json` and `bench-NAME.md`; `tables` is the middle of the latter.
    pub(super) fn write(&self, out: &Path, title: &str, tables: &str) -> Result<()> {
        let out = if out.is_absolute() { out.to_owned() } else { root().join(out) };
        fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
        let bars = bars(&self.bars);
        let mut text =
            format!("# {title}\n\n{}\n{tables}\n## Bars\n\n{bars}", self.surroundings.markdown(&self.probe_set));
        if !self.notes.is_empty() {
            text.push_str("\n## Notes\n\n");
            for note in &self.notes {
                push(&mut text, format_args!("- {note}\n"));
            }
        }
        let file = |suffix: &str| -> PathBuf { out.join(format!("bench-{}.{suffix}", self.bench)) };
        for (suffix, content) in [("json", serde_json::to_string_pretty(self)? + "\n"), ("md", text)] {
            let path = file(suffix);
            fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
            println!("wrote {}", path.display());
        }
        println!("\n{tables}\n{bars}");
        for note in &self.notes {
            println!("note: {note}");
        }
        Ok(())
    }
}

fn bars(bars: &[Bar]) -> String {
    let mut text = String::from("| bar | limit | measured | |\n|---|--:|--:|---|\n");
    for Bar { what, limit, at_least, unit, measured, verdict } in bars {
        let sign = if *at_least { '≥' } else { '≤' };
        let measured = measured.map_or_else(|| "–".to_owned(), |measured| format!("{} {unit}", short(measured)));
        push(&mut text, format_args!("| {what} | {sign} {limit} {unit} | {measured} | {verdict} |\n"));
    }
    text
}

pub(super) fn push(text: &mut String, more: std::fmt::Arguments<'_>) {
    text.write_fmt(more).expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_local_is_told() {
        for (release, kernel) in [
            ("6.18.44", "6.18.44"),
            ("6.18.44-xyz", "6.18.44"),
            ("5.14.0-570.el9.x86_64", "5.14.0"),
            ("6.1.0-18-amd64", "6.1.0"),
            ("6.12.9.x1", "6.12.9"),
            ("6.19.0+", "6.19.0"),
        ] {
            assert_eq!(without_suffix(release), kernel);
        }
        let line = |words: &str| shown(&words.split(' ').map(ToOwned::to_owned).collect::<Vec<_>>());
        assert_eq!(line("bench reap --rounds 8"), "cargo xtask bench reap --rounds 8");
        assert_eq!(
            line("bench reap --binary /some/where/gpureap --note busy --out=/tmp/x --note=more --out docs/y"),
            "cargo xtask bench reap --binary gpureap --out=x --out docs/y"
        );
    }

    #[test]
    fn bars_as_a_table() {
        let text = bars(&[
            Bar::at_most("whole process", 5.0, "ms", Some(7.25)),
            Bar::at_least("against fuser", 100.0, "×", None),
        ]);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "| whole process | ≤ 5 ms | 7.25 ms | misses by 2.25 ms |",
                "| against fuser | ≥ 100 × | – | not measured |",
            ]
        );
    }
}
