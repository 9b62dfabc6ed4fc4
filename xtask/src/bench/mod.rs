//! Measurements against the bars of the design: `cargo xtask bench --help`.

mod bpf;
mod churn;
mod churner;
mod conditions;
mod cost;
mod cost_vm;
mod daemon;
mod empty;
mod guest;
mod holders;
mod lags;
mod load;
mod lookup;
mod place;
mod reap;
mod report;
mod stats;
mod trace;
mod vm;
mod work;

use std::{
    fs::File,
    io,
    ops::RangeInclusive,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use rustix::time::{ClockId, clock_gettime};

use crate::process::{self, root, shown};

#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    /// `gpureap holders` against fuser and lsof
    Holders(holders::Options),
    /// `gpureap reap` against `fuser -k; sleep 2; fuser`
    Reap(reap::Options),
    /// What others pay for gpureap's programs in their own work
    Cost(cost::Options),
    /// The same for every probe set, in the instructions of a virtual machine
    CostVm(cost_vm::Options),
    /// What the daemon needs for itself
    Daemon(daemon::Options),
    /// Whether the counts are right after many opens a second
    Churn(churn::Options),
    /// The processes that a measurement looks through; ends with its standard input
    #[command(hide = true)]
    Load(load::Options),
    /// A process that opens and closes a device; ends with its standard input
    #[command(hide = true)]
    Churner(churner::Options),
    /// The first process of a virtual machine
    #[command(hide = true, subcommand)]
    Guest(guest::Measure),
}

pub(crate) fn bench(command: &Bench) -> Result<()> {
    match command {
        Bench::Holders(options) => holders::run(options),
        Bench::Reap(options) => reap::run(options),
        Bench::Cost(options) => cost::run(options),
        Bench::CostVm(options) => cost_vm::run(options),
        Bench::Daemon(options) => daemon::run(options),
        Bench::Churn(options) => churn::run(options),
        Bench::Churner(options) => churner::serve(options),
        Bench::Guest(measure) => guest::serve(measure),
        Bench::Load(options) => load::serve(options),
    }
}

/// What is measured.
#[derive(clap::Args)]
pub(crate) struct Binary {
    /// A release build of gpureap to measure [default: one of this tree is made]
    #[arg(long, requires = "commit")]
    binary: Option<PathBuf>,
    /// What it was built from
    #[arg(long, requires = "binary")]
    commit: Option<String>,
}

impl Binary {
    /// The executable, and the commit where it was told.
    fn get(&self) -> Result<(PathBuf, Option<&str>)> {
        let Self { binary, commit } = self;
        let gpureap = match binary {
            Some(binary) => binary.canonicalize().with_context(|| format!("no {}", binary.display()))?,
            None => build_gpureap()?,
        };
        Ok((gpureap, commit.as_deref()))
    }
}

/// The gpureap that users get.
fn build_gpureap() -> Result<PathBuf> {
    let arguments = ["build", "--profile", "dist", "--locked", "--package", "gpureap", "--bin", "gpureap"];
    process::run(process::cargo().args(arguments))?;
    Ok(dist().join("gpureap"))
}

/// The measurement from inside, through the library.
fn build_lookup() -> Result<PathBuf> {
    let arguments = ["build", "--profile", "dist", "--locked", "--package", "gpureap", "--example", "lookup_time"];
    process::run(process::cargo().args(arguments))?;
    Ok(dist().join("examples/lookup_time"))
}

fn dist() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    root().join(target).join("dist")
}

fn check_root() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "the measurements need root: they load kernel programs");
    Ok(())
}

fn check_tools() -> Result<()> {
    check_root()?;
    for (program, package) in [("fuser", "psmisc"), ("lsof", "lsof")] {
        ensure!(process::find_program(program).is_some(), "no {program} here (Debian: apt-get install {package})");
    }
    Ok(())
}

/// A finished process.
struct Finished {
    wall: Duration,
    /// That it and its children spent, without what others did meanwhile.
    cpu: Duration,
    /// The same on the clock of a trace: boottime in microseconds.
    ran_us: RangeInclusive<i64>,
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// Runs a command and takes the time from its start to its end. What it says goes to files with this beginning, so that
/// nobody has to read while the clock runs.
fn timed(mut command: Command, output: &Path) -> Result<Finished> {
    let paths = ["out", "err"].map(|suffix| output.with_extension(suffix));
    let create = |path: &PathBuf| File::create(path).with_context(|| format!("create {}", path.display()));
    command.stdin(Stdio::null()).stdout(create(&paths[0])?).stderr(create(&paths[1])?);
    let name = shown(&command);
    let started_us = boottime_us();
    let started = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let (status, cpu) = wait(&child).with_context(|| format!("wait for {name}"))?;
    let wall = started.elapsed();
    let ran_us = started_us..=boottime_us();
    let read = |path: &PathBuf| {
        let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        anyhow::Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok(Finished { wall, cpu, ran_us, status, stdout: read(&paths[0])?, stderr: read(&paths[1])? })
}

/// The end of a child that nobody else waits for, and its processor time.
fn wait(child: &Child) -> io::Result<(ExitStatus, Duration)> {
    let mut status = 0;
    // SAFETY: a structure of zeros is valid; it and the status outlive the call.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::wait4(child.id() as i32, &raw mut status, 0, &raw mut usage), usage)
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    let micros = [usage.ru_utime, usage.ru_stime].map(|time| time.tv_sec * 1_000_000 + time.tv_usec);
    Ok((ExitStatus::from_raw(status), Duration::from_micros(micros.iter().sum::<i64>() as u64)))
}

fn boottime_us() -> i64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1_000
}

/// Random numbers that are the same in every run: splitmix64.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Puts a list into a random order that is the same in every run.
fn shuffle<T>(list: &mut [T], seed: u64) {
    let mut random = random(seed);
    for last in (1..list.len()).rev() {
        list.swap(last, (random() % (last as u64 + 1)) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_is_complete_and_the_same_again() {
        let shuffled = |seed| {
            let mut list: Vec<u32> = (0..50).collect();
            shuffle(&mut list, seed);
            list
        };
        assert_eq!(shuffled(1), shuffled(1));
        assert_ne!(shuffled(1), shuffled(2));
        let mut sorted = shuffled(3);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<u32>>());
    }
}
