//! The fuzz targets, with stable Rust: the compiler instruments, libFuzzer is in the target. What they assert is in
//! `gpureap/src/fuzzing`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    libtest::Counts,
    process::{self, root},
};

/// An explicit target keeps build scripts and macros out of the flags.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// As cargo-fuzz has them, without the sanitizer, which takes a nightly.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";
/// Of each target in continuous integration: a few seconds.
const RUNS: u32 = 1_000;

#[derive(clap::Args, Debug, Default)]
pub(crate) struct Options {
    /// One of fuzz/fuzz_targets; all by default
    target: Option<String>,
    /// As long as this for each target, with what was found before in target/fuzz/corpus. By default a fixed number of
    /// runs from fuzz/corpus alone, which are the same every time
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
}

pub(crate) fn command(options: &Options) -> Result<()> {
    let Counts { passed: _, failed, ignored: _ } = fuzz(options)?;
    ensure!(failed == 0, "{failed} targets failed");
    Ok(())
}

/// Each target counts as a test.
pub(crate) fn fuzz(Options { target, seconds }: &Options) -> Result<Counts> {
    let known = targets(&root().join("fuzz/fuzz_targets"))?;
    let chosen: Vec<&String> =
        known.iter().filter(|name| target.as_ref().is_none_or(|target| target == *name)).collect();
    ensure!(!chosen.is_empty(), "there is no such target, but {}", known.join(", "));
    let place = root().join("target/fuzz");
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target", TARGET]);
    match target {
        Some(name) => build.args(["--bin", name]),
        None => build.arg("--bins"),
    };
    process::run(build.arg("--target-dir").arg(&place).env("RUSTFLAGS", FLAGS))?;
    let artifacts = place.join("artifacts");
    fs::create_dir_all(&artifacts)?;
    let mut counts = Counts::default();
    for name in chosen {
        println!("fuzz: {name}");
        let result = process::run(&mut run(&place, &artifacts, name, *seconds)?);
        match result {
            Ok(()) => counts.passed += 1,
            Err(error) => {
                println!("fuzz: {error:#}");
                counts.failed += 1;
            }
        }
    }
    Ok(counts)
}

fn run(place: &Path, artifacts: &Path, name: &str, seconds: Option<u32>) -> Result<Command> {
    // libFuzzer writes what it finds into the first directory.
    let found = place.join(if seconds.is_some() { "corpus" } else { "once" }).join(name);
    if seconds.is_none() && found.exists() {
        fs::remove_dir_all(&found).with_context(|| format!("cannot empty {}", found.display()))?;
    }
    fs::create_dir_all(&found)?;
    let mut command = Command::new(place.join(TARGET).join("debug").join(name));
    command.arg(&found).arg(root().join("fuzz/corpus").join(name));
    match seconds {
        Some(seconds) => command.args([format!("-max_total_time={seconds}"), "-print_final_stats=1".to_owned()]),
        None => command.args(["-seed=1".to_owned(), format!("-runs={RUNS}"), "-print_funcs=0".to_owned()]),
    };
    command.args(["-timeout=10", "-rss_limit_mb=1024"]);
    command.arg(format!("-artifact_prefix={}/{name}-", artifacts.display()));
    command.current_dir(root().join("fuzz"));
    Ok(command)
}

fn targets(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let mut names: Vec<String> = paths.iter().filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}
