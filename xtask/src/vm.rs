//! Runs the kernel tests on real kernels in QEMU: one boot per kernel, every backend in it.
//!
//! Inside, `/init` is `tests/src/bin/vm-init.rs`. It reads `/vm.conf` and answers on the second serial port with the
//! tests' own output and, between it, lines that start with `vm: `.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use walkdir::WalkDir;

use crate::{
    artifacts::{self, Artifacts},
    initramfs::Initramfs,
    kernels::{self, Kernel},
    libtest::Counts,
    process,
    qemu::{Accel, Boot, End},
};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// Kernel to boot, as `cargo xtask kernel list` names it (repeatable)
    #[arg(long = "kernel", value_name = "NAME", default_values = ["6.1", "6.12"])]
    pub(crate) kernels: Vec<String>,
    /// Probe set to test (repeatable)
    #[arg(long = "backend", value_name = "NAME", default_values = ["kprobe", "fentry", "gate"])]
    pub(crate) backends: Vec<String>,
    /// Only the test executable of this name, tests/tests/NAME.rs (repeatable)
    #[arg(long = "test", value_name = "NAME")]
    pub(crate) tests: Vec<String>,
    /// Seconds until a VM is stopped
    #[arg(long, value_name = "SECS", default_value_t = 2700)]
    pub(crate) timeout: u64,
    /// Seconds without a line of output until a VM is stopped
    #[arg(long, value_name = "SECS", default_value_t = 600)]
    pub(crate) silence: u64,
    /// How QEMU runs the guest: a /dev/kvm that is there need not work
    #[arg(long, value_enum, default_value = "tcg")]
    pub(crate) accel: Accel,
    /// Words for the kernel's command line, such as preempt=full (repeatable)
    #[arg(long, value_name = "WORDS", allow_hyphen_values = true)]
    pub(crate) append: Vec<String>,
    /// Arguments for the test executables, such as a test's name
    #[arg(last = true, value_name = "FILTER")]
    pub(crate) filter: Vec<String>,
}

impl Options {
    /// What the continuous tests run: all that is on by default.
    pub(crate) fn everything() -> Self {
        #[derive(clap::Parser)]
        struct Defaults {
            #[command(flatten)]
            options: Options,
        }
        let Defaults { options } = clap::Parser::parse_from(["vm"]);
        options
    }
}

/// One line of the table at the end.
#[derive(Debug)]
struct Row {
    kernel: String,
    backend: String,
    counts: Counts,
    seconds: f64,
}

pub(crate) fn command(options: &Options) -> Result<()> {
    let counts = run(options, &Artifacts::build()?)?;
    ensure!(counts.failed == 0, "{} failed", counts.failed);
    Ok(())
}

/// Boots each kernel and returns the sum over all of them.
pub(crate) fn run(options: &Options, artifacts: &Artifacts) -> Result<Counts> {
    let kernels: Vec<&Kernel> = options.kernels.iter().map(|name| Kernel::named(name)).collect::<Result<_>>()?;
    std::fs::create_dir_all(kernels::cache())?;
    let work = tempfile::tempdir_in(kernels::cache())?;
    let initramfs = pack(options, artifacts, work.path())?;
    let mut images = Vec::new();
    for kernel in kernels {
        images.push((kernel.name, kernel.fetch(false)?, kernel.cached().unwrap_or_default()));
    }
    // One host thread emulates all processors of a machine, so each machine leaves the other cores to the rest.
    let mut rows = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        let machines: Vec<_> = images
            .iter()
            .map(|(name, vmlinuz, package)| {
                println!("vm: booting {name} ({package})");
                let initramfs = &initramfs;
                scope.spawn(move || boot(name, vmlinuz, initramfs, options))
            })
            .collect();
        for machine in machines {
            rows.extend(machine.join().map_err(|_panic| anyhow::anyhow!("a thread that watched a machine panicked"))??);
        }
        Ok(())
    })?;
    print!("{}", table(&rows));
    let mut sum = Counts::default();
    for row in &rows {
        sum += row.counts;
    }
    Ok(sum)
}

fn boot(name: &str, vmlinuz: &Path, initramfs: &Path, options: &Options) -> Result<Vec<Row>> {
    let boot = Boot {
        accel: options.accel,
        kernel: vmlinuz,
        initramfs,
        append: &options.append,
        timeout: Duration::from_secs(options.timeout),
        silence: Duration::from_secs(options.silence),
    };
    let started = Instant::now();
    let mut protocol = Protocol::new(name);
    let end = boot.run(|line| {
        println!("{name} | {line}");
        protocol.line(line);
    })?;
    println!("vm: {name} ended after {:.1} s", started.elapsed().as_secs_f64());
    Ok(protocol.finish(&end))
}

/// Follows what vm-init says. Its lines:
///
/// ```text
/// vm: run BACKEND EXECUTABLE
/// vm: end BACKEND EXECUTABLE ok|failed SECONDS
/// vm: success | vm: failure
/// ```
struct Protocol {
    kernel: String,
    rows: Vec<Row>,
    /// The backend and name of the executable that runs, and what it has counted.
    running: Option<(String, String, Counts)>,
    verdict: Option<bool>,
}

impl Protocol {
    fn new(kernel: &str) -> Self {
        Self { kernel: kernel.to_owned(), rows: Vec::new(), running: None, verdict: None }
    }

    fn line(&mut self, line: &str) {
        if let Some(found) = Counts::parse(line) {
            if let Some((_, _, counts)) = &mut self.running {
                *counts += found;
            }
            return;
        }
        let Some(words) = line.strip_prefix("vm: ") else { return };
        match *words.split_whitespace().collect::<Vec<_>>() {
            ["run", backend, name] => self.running = Some((backend.to_owned(), name.to_owned(), Counts::default())),
            ["end", backend, _, how, seconds] => {
                let counts = self.running.take().map(|(_, _, counts)| counts).unwrap_or_default();
                self.add(backend, counts.with_status(how == "ok"), seconds.parse().unwrap_or_default());
            }
            ["success"] => self.verdict = Some(true),
            ["failure"] => self.verdict = Some(false),
            _ => {}
        }
    }

    fn add(&mut self, backend: &str, counts: Counts, seconds: f64) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.backend == backend) {
            row.counts += counts;
            row.seconds += seconds;
        } else {
            let (kernel, backend) = (self.kernel.clone(), backend.to_owned());
            self.rows.push(Row { kernel, backend, counts, seconds });
        }
    }

    /// A VM that did not say how it went has failed, whatever was counted before.
    fn finish(mut self, end: &End) -> Vec<Row> {
        let running = self.running.take();
        let problem = match (end, self.verdict) {
            (End::Killed(why), _) => Some(why.clone()),
            (End::Off, None) => Some("it went off without a verdict".to_owned()),
            (End::Off, Some(true)) => None,
            (End::Off, Some(false)) => {
                self.rows.iter().all(|row| row.counts.failed == 0).then(|| "vm-init failed".to_owned())
            }
        };
        if let Some(problem) = problem {
            if let Some((backend, name, counts)) = running {
                println!("vm: {} stopped in {name} with {backend}: {problem}", self.kernel);
                self.add(&backend, counts.with_status(false), 0.0);
            } else {
                println!("vm: {} stopped: {problem}", self.kernel);
                self.add("-", Counts::ONE_FAILED, 0.0);
            }
        }
        self.rows
    }
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "\n{:<12} {:<8} {:>7} {:>7} {:>8} {:>8}\n",
        "kernel", "backend", "passed", "failed", "ignored", "seconds"
    );
    for Row { kernel, backend, counts: Counts { passed, failed, ignored }, seconds } in rows {
        writeln!(text, "{kernel:<12} {backend:<8} {passed:>7} {failed:>7} {ignored:>8} {seconds:>8.1}")
            .expect("a String takes everything");
    }
    text
}

fn pack(options: &Options, artifacts: &Artifacts, work: &Path) -> Result<PathBuf> {
    let mut tree = Initramfs::default();
    for directory in ["proc", "sys", "dev", "tmp", "run", "root", "var/lib", "etc"] {
        tree.directory(directory);
    }
    // Until devtmpfs is mounted, init needs somewhere to say what went wrong.
    tree.device("dev/console", 5, 1);
    tree.text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n");
    tree.text("etc/group", "root:x:0:\nnogroup:x:65534:\n");
    tree.text("etc/hosts", "127.0.0.1 localhost\n");

    for binary in &artifacts.binaries {
        let inside = format!("bin/{}", binary.name);
        tree.program(&inside, &artifacts::strip(&binary.path, work)?)?;
        // Tests know their helpers by the path that cargo compiled in (CARGO_BIN_EXE_…).
        tree.symlink(&binary.path.display().to_string(), &format!("/{inside}"));
    }
    tree.symlink("init", "bin/vm-init");
    ensure!(tree.contains("bin/vm-init"), "cargo built no vm-init");

    let mut packed = 0;
    for test in artifacts.kernel_tests() {
        let wanted = if options.tests.is_empty() {
            !NATIVE_ONLY.contains(&test.name.as_str())
        } else {
            options.tests.contains(&test.name)
        };
        if wanted {
            let inside = format!("tests/{}", test.name);
            ensure!(!tree.contains(&inside), "two test executables are called {}", test.name);
            tree.program(&inside, &artifacts::strip(&test.path, work)?)?;
            packed += 1;
        }
    }
    ensure!(packed > 0, "no test executable is called {}", options.tests.join(" or "));
    if let Some(directory) = artifacts::fixtures() {
        for entry in WalkDir::new(directory) {
            let entry = entry?;
            if entry.file_type().is_file() {
                tree.program(&entry.path().display().to_string(), entry.path())?;
            }
        }
    }

    busybox(&mut tree)?;
    tree.text("vm.conf", &configuration(options)?);
    tree.write_file(work.join("initramfs"))
}

/// About processes, files and other programs rather than the kernel: the machine that we run on is as good, and quicker.
/// `--test` runs them in a virtual machine all the same.
const NATIVE_ONLY: [&str; 6] = ["blockers", "choosing", "durability", "faults", "recipes", "units"];

/// The shell and its company, for tests that run commands. Our own programs keep their names.
fn busybox(tree: &mut Initramfs) -> Result<()> {
    let busybox = Path::new("/bin/busybox");
    tree.program("bin/busybox", busybox).context("busybox-static is missing: `cargo xtask setup` installs it")?;
    for applet in process::output(Command::new(busybox).arg("--list"))?.lines() {
        let path = format!("bin/{applet}");
        if !tree.contains(&path) {
            tree.symlink(&path, "busybox");
        }
    }
    Ok(())
}

/// One `key value` per line.
fn configuration(options: &Options) -> Result<String> {
    let mut text = String::new();
    let mut add = |key: &str, values: &[String]| {
        for value in values {
            if value.contains('\n') {
                bail!("{value:?} holds a line break");
            }
            writeln!(text, "{key} {value}")?;
        }
        Ok(())
    };
    add("backend", &options.backends)?;
    add("argument", &options.filter)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(lines: &[&str], end: &End) -> Vec<Row> {
        let mut protocol = Protocol::new("6.1");
        for line in lines {
            protocol.line(line);
        }
        protocol.finish(end)
    }

    const OK: &str = "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s";

    #[test]
    fn counts_go_to_the_backend_that_ran() {
        let rows = follow(
            &[
                "vm: run kprobe open",
                OK,
                "vm: end kprobe open ok 1.5",
                "vm: run kprobe reap",
                OK,
                "vm: end kprobe reap ok 0.5",
                "vm: run gate open",
                OK,
                "vm: end gate open ok 1.0",
                "vm: success",
            ],
            &End::Off,
        );
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].counts, Counts { passed: 4, failed: 0, ignored: 2 });
        assert!((rows[0].seconds - 2.0).abs() < 1e-9);
        assert_eq!((rows[1].backend.as_str(), rows[1].counts.passed), ("gate", 2));
    }

    #[test]
    fn a_crashed_executable_is_one_failure() {
        let rows = follow(&["vm: run gate open", "vm: end gate open failed 0.1", "vm: failure"], &End::Off);
        assert_eq!(rows[0].counts, Counts::ONE_FAILED);
    }

    #[test]
    fn a_vm_that_dies_fails_the_executable_that_ran() {
        let rows = follow(
            &["vm: run gate a", OK, "vm: end gate a ok 1", "vm: run gate b"],
            &End::Killed("silent for 240 s".into()),
        );
        assert_eq!(rows[0].counts, Counts { passed: 2, failed: 1, ignored: 1 });
    }

    #[test]
    fn a_vm_without_a_verdict_has_failed() {
        let rows = follow(&["vm: run gate a", OK, "vm: end gate a ok 1"], &End::Off);
        assert_eq!((rows.len(), rows[1].counts), (2, Counts::ONE_FAILED));
        assert_eq!(follow(&[], &End::Off)[0].counts, Counts::ONE_FAILED);
        assert_eq!(follow(&["vm: failure"], &End::Off)[0].counts, Counts::ONE_FAILED);
    }
}
