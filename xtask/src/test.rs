//! The whole run of continuous integration, stage by stage.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use rustix::mount::{MountFlags, mount};

use crate::{
    artifacts::{self, Artifacts, Executable},
    dist, ebpf, fuzz,
    libtest::{self, Counts},
    lint, process, setup, vm,
};

/// A native test executable that hangs is stopped after this many seconds.
const NATIVE_TIMEOUT: &str = "600";

#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Leave out the VMs
    #[arg(long)]
    no_vm: bool,
    /// Leave out the tests that load programs into this machine's kernel
    #[arg(long)]
    no_native: bool,
    /// Leave out the tests that start real servers, and that of the package
    #[arg(long)]
    no_ops: bool,
    /// Run only the tests that start real servers: Slurm, Prometheus and the like
    #[arg(long, conflicts_with_all = ["no_vm", "no_native", "no_ops"])]
    ops: bool,
}

pub(crate) fn test(options: Options) -> Result<()> {
    let mut stages = Stages::default();
    if options.ops {
        if stages.run("setup", || setup::setup().map(none)).is_some() {
            stages.run("ops", || ops(&Artifacts::build(&[])?));
        }
        return stages.finish();
    }
    let ready = stages.run("setup", || setup::setup().map(none)).is_some();
    if ready {
        stages.run("lint", || lint::lint().map(none));
        stages.run("ebpf", || ebpf::check_and_build(ebpf::Choice::Auto).map(none));
        let mut built = None;
        stages.run("build", || {
            built = Some(Artifacts::build(&[])?);
            Ok(Counts::default())
        });
        if let Some(artifacts) = built {
            stages.run("unit", || unit(&artifacts));
            stages.run("fuzz", || fuzz::fuzz(&fuzz::Options::default()));
            if !options.no_native {
                stages.run("native", || native(&artifacts));
            }
            if !options.no_ops {
                stages.run("ops", || ops(&artifacts));
                stages.run("package", || dist::test(&artifacts.gpureap().path));
            }
            if !options.no_vm {
                stages.run("vm", || vm::run(&vm::Options::everything(), &artifacts));
            }
        }
        stages.run("docs", || lint::docs().map(none));
    }
    stages.finish()
}

/// For stages that count no tests.
const fn none((): ()) -> Counts {
    Counts { passed: 0, failed: 0, ignored: 0 }
}

#[derive(Default)]
struct Stages {
    rows: Vec<(&'static str, Counts, f64)>,
}

impl Stages {
    /// Runs a stage; one that fails without a failed test counts as one failure. Some if all went well.
    fn run(&mut self, name: &'static str, stage: impl FnOnce() -> Result<Counts>) -> Option<()> {
        println!("\n== {name}");
        let started = Instant::now();
        let counts = stage().unwrap_or_else(|error| {
            println!("{name} failed: {error:#}");
            Counts::ONE_FAILED
        });
        self.rows.push((name, counts, started.elapsed().as_secs_f64()));
        (counts.failed == 0).then_some(())
    }

    fn finish(self) -> Result<()> {
        let mut sum = Counts::default();
        println!("\n{:<8} {:<6} {:>7} {:>7} {:>8} {:>8}", "stage", "result", "passed", "failed", "ignored", "seconds");
        for (name, counts, seconds) in self.rows {
            sum += counts;
            let Counts { passed, failed, ignored } = counts;
            let result = if failed == 0 { "ok" } else { "FAILED" };
            println!("{name:<8} {result:<6} {passed:>7} {failed:>7} {ignored:>8} {seconds:>8.1}");
        }
        let Counts { passed, failed, ignored: _ } = sum;
        println!("{passed} passed, {failed} failed");
        ensure!(failed == 0, "not everything passed");
        Ok(())
    }
}

fn unit(artifacts: &Artifacts) -> Result<Counts> {
    let mut sum = libtest::run(process::cargo().args(["test", "--quiet", "--locked", "--package", "xtask"]))?;
    let fake_nvml = artifacts::fake_nvml()?;
    for Executable { name: _, package: _, path, directory } in artifacts.unit_tests() {
        println!("{}", path.display());
        sum += libtest::run(
            Command::new(path)
                .arg("--quiet")
                .current_dir(directory)
                .env("CARGO_MANIFEST_DIR", directory)
                .env("GPUREAP_FAKE_NVML_LIBRARY", &fake_nvml),
        )?;
    }
    sum += libtest::run(&mut artifacts::doc_tests())?;
    Ok(sum)
}

/// The kernel tests on this machine: only the `gate` set is sure to load on a host that we do not choose.
fn native(artifacts: &Artifacts) -> Result<Counts> {
    ensure!(rustix::process::geteuid().is_root(), "the kernel tests need root (or leave them out: --no-native)");
    on_this_kernel(artifacts, &artifacts.kernel_tests().collect::<Vec<_>>())
}

/// The tests with real servers, on loopback.
fn ops(artifacts: &Artifacts) -> Result<Counts> {
    ensure!(rustix::process::geteuid().is_root(), "the tests with servers need root (or leave them out: --no-ops)");
    setup::servers()?;
    on_this_kernel(artifacts, &artifacts.ops_tests().collect::<Vec<_>>())
}

fn on_this_kernel(artifacts: &Artifacts, tests: &[&Executable]) -> Result<Counts> {
    mount_filesystems()?;
    let mut sum = Counts::default();
    for Executable { name, package: _, path, directory } in tests.iter().copied() {
        println!("native: {name}");
        sum += libtest::run(
            Command::new("timeout")
                .args(["--kill-after=10", NATIVE_TIMEOUT])
                .arg(path)
                .arg("--test-threads=1")
                .current_dir(directory)
                .env("CARGO_MANIFEST_DIR", directory)
                .env("GPUREAP_BIN", &artifacts.gpureap().path)
                .env("GPUREAP_TEST_BACKEND", "gate")
                .env("GPUREAP_OTELTAP", setup::oteltap())
                .stdin(Stdio::null()),
        )?;
    }
    Ok(sum)
}

/// Mounts what a bare host or container lacks. They stay: others may use them by the time we end.
fn mount_filesystems() -> Result<()> {
    let mounted = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
    for (kind, candidates) in [
        ("bpf", &["/sys/fs/bpf"][..]),
        ("tracefs", &["/sys/kernel/tracing"]),
        ("cgroup2", &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]),
    ] {
        if is_mounted(&mounted, kind) {
            continue;
        }
        // Version 1 of cgroups sits on the usual place, with a directory for version 2 by convention.
        let at = candidates.iter().copied().find(|at| !is_mountpoint(&mounted, at));
        let at = at.with_context(|| format!("no place to mount {kind}"))?;
        if !Path::new(at).exists() {
            fs::create_dir(at).with_context(|| format!("cannot create {at}"))?;
        }
        mount(kind, at, kind, MountFlags::empty(), None).with_context(|| format!("cannot mount {kind} at {at}"))?;
        println!("native: mounted {kind} at {at}");
    }
    Ok(())
}

fn is_mounted(mounts: &str, kind: &str) -> bool {
    mounts.lines().any(|line| line.split(' ').nth(2) == Some(kind))
}

fn is_mountpoint(mounts: &str, at: &str) -> bool {
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_recognised() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert!(is_mounted(mounts, "cgroup2") && !is_mounted(mounts, "bpf"));
        assert!(is_mountpoint(mounts, "/sys/fs/cgroup") && !is_mountpoint(mounts, "/sys/fs/bpf"));
    }

    #[test]
    fn a_failed_stage_counts_once_and_fails_the_run() {
        let mut stages = Stages::default();
        assert!(stages.run("good", || Ok(Counts { passed: 2, failed: 0, ignored: 0 })).is_some());
        assert!(stages.run("bad", || anyhow::bail!("no")).is_none());
        assert_eq!(stages.rows[1].1, Counts::ONE_FAILED);
        stages.finish().unwrap_err();
    }
}
