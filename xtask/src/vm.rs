//! Runs the kernel tests on real kernels in QEMU: one boot per kernel, with one probe set or several in it.
//!
//! Inside, `/init` is `tests/src/bin/vm-init.rs`. It reads `/vm.conf` and answers on the second serial port with the
//! tests' own output and, between it, lines that start with `vm: `.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use walkdir::WalkDir;

use crate::{
    artifacts::{self, Artifacts},
    initramfs::Initramfs,
    kernels::{self, Kernel},
    libtest::Counts,
    process,
    qemu::{Accel, Boot, End, MEMORY, Processors},
};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// Kernel to boot, as `cargo xtask kernel list` names it (repeatable); without it, what the continuous tests boot
    #[arg(long = "kernel", value_name = "NAME")]
    pub(crate) kernels: Vec<String>,
    /// Probe set to test (repeatable); without it, all, or what the continuous tests run
    #[arg(long = "backend", value_name = "NAME")]
    pub(crate) backends: Vec<String>,
    /// Words for the kernel's command line, such as preempt=full (repeatable)
    #[arg(long, value_name = "WORDS", allow_hyphen_values = true)]
    pub(crate) append: Vec<String>,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) selection: Selection,
}

/// What is executed there.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Selection {
    /// Only the test executable of this name, tests/tests/NAME.rs (repeatable)
    #[arg(long = "test", value_name = "NAME")]
    pub(crate) tests: Vec<String>,
    /// An environment variable for the test executables (repeatable)
    #[arg(long = "env", value_name = "NAME=VALUE")]
    environment: Vec<String>,
    /// Arguments for the test executables, such as a test's name
    #[arg(last = true, value_name = "FILTER")]
    filter: Vec<String>,
}

impl Selection {
    pub(crate) fn of(tests: &[&str]) -> Self {
        Self { tests: tests.iter().map(|&test| test.to_owned()).collect(), ..Self::default() }
    }
}

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Limits {
    /// Seconds until a VM is stopped
    #[arg(long, value_name = "SECS", default_value_t = 2700)]
    pub(crate) timeout: u64,
    /// Seconds without a line of output until a VM is stopped
    #[arg(long, value_name = "SECS", default_value_t = 600)]
    pub(crate) silence: u64,
    /// How QEMU runs the guest: a /dev/kvm that is there need not work
    #[arg(long, value_enum, default_value = "tcg")]
    pub(crate) accel: Accel,
}

/// All probe sets, in the order in which gpureap tries them.
pub(crate) const SETS: [&str; 3] = ["kprobe", "fentry", "gate"];

/// What the continuous tests boot, with the sets that they test there. An emulated machine is slow, so no set runs
/// everywhere: `gate` runs natively in the same tests, and everything everywhere is what `cargo xtask matrix` is for.
const CONTINUOUS: [(&str, &[&str]); 2] = [("6.1", &["kprobe"]), ("6.12", &["fentry"])];

/// Of the tests that depend on no probe set, those that the continuous tests leave out on a kernel: the other one has them.
const ELSEWHERE: [(&str, &[&str]); 2] =
    [("6.1", &["fence", "socket", "trust"]), ("6.12", &["actor_truth", "hostile", "waiting"])];

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

    fn machines(&self) -> Result<Vec<Machine>> {
        let machine = |kernel: &str, usual: &[&str]| {
            let usual = || usual.iter().map(|&set| set.to_owned()).collect();
            anyhow::Ok(Machine {
                name: kernel.to_owned(),
                kernel: Kernel::named(kernel)?,
                append: self.append.clone(),
                backends: if self.backends.is_empty() { usual() } else { self.backends.clone() },
                refused: Vec::new(),
                left_out: &[],
            })
        };
        if self.kernels.is_empty() {
            let mut machines: Vec<Machine> =
                CONTINUOUS.iter().map(|(kernel, usual)| machine(kernel, usual)).collect::<Result<_>>()?;
            if self.selection.tests.is_empty() && self.backends.is_empty() {
                for machine in &mut machines {
                    let others = ELSEWHERE.iter().find(|(kernel, _)| *kernel == machine.name);
                    machine.left_out = others.map_or(&[], |(_, tests)| tests);
                }
            }
            return Ok(machines);
        }
        self.kernels.iter().map(|kernel| machine(kernel, &SETS)).collect()
    }
}

/// One boot.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) name: String,
    pub(crate) kernel: &'static Kernel,
    /// Words for the kernel's command line
    pub(crate) append: Vec<String>,
    pub(crate) backends: Vec<String>,
    /// Sets that gpureap has to refuse there
    pub(crate) refused: Vec<String>,
    /// Test executables that do not run there
    pub(crate) left_out: &'static [&'static str],
}

impl Machine {
    /// The kernel hands what follows `--` to its first process.
    fn command_line(&self) -> Vec<String> {
        let mut words = self.append.clone();
        words.push("--".to_owned());
        words.extend(self.backends.iter().map(|backend| format!("backend={backend}")));
        words.extend(self.refused.iter().map(|backend| format!("refused={backend}")));
        words.extend(self.left_out.iter().map(|test| format!("without={test}")));
        words
    }
}

/// One line of the table at the end.
#[derive(Debug)]
pub(crate) struct Row {
    kernel: String,
    pub(crate) backend: String,
    pub(crate) counts: Counts,
    pub(crate) seconds: f64,
}

/// What a machine has said.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) rows: Vec<Row>,
    /// Findings of tests, each with the probe set it is about.
    pub(crate) records: Vec<(String, String)>,
    /// Why it ended before its time.
    pub(crate) problem: Option<String>,
}

pub(crate) fn command(options: &Options) -> Result<()> {
    let counts = run(options, &Artifacts::build(&options.selection.tests)?)?;
    ensure!(counts.failed == 0, "{} failed", counts.failed);
    Ok(())
}

/// Boots each kernel and returns the sum over all of them.
pub(crate) fn run(options: &Options, artifacts: &Artifacts) -> Result<Counts> {
    let machines = options.machines()?;
    let Options { kernels: _, backends: _, append: _, limits, selection } = options;
    // One host thread emulates all processors of a machine, so each machine leaves the other cores to the rest.
    let mut rows = Vec::new();
    boot_all(&machines, machines.len(), limits, selection, artifacts, |_, finished| {
        rows.extend(finished.rows);
        Ok(())
    })?;
    print!("{}", table(&rows));
    let mut sum = Counts::default();
    for row in &rows {
        sum += row.counts;
    }
    Ok(sum)
}

/// Boots the machines, some at a time, and gives what each has said to `done`, in the order in which they end.
pub(crate) fn boot_all(
    machines: &[Machine],
    at_a_time: usize,
    limits: &Limits,
    selection: &Selection,
    artifacts: &Artifacts,
    mut done: impl FnMut(&Machine, Finished) -> Result<()>,
) -> Result<()> {
    std::fs::create_dir_all(kernels::cache())?;
    let work = tempfile::tempdir_in(kernels::cache())?;
    let initramfs = pack(selection, artifacts, work.path())?;
    for machine in machines {
        machine.kernel.fetch(false)?;
    }
    let waiting = Mutex::new(machines.iter());
    let (sender, finished) = mpsc::channel();
    std::thread::scope(|scope| {
        // It goes when this ends, also by an error: then no further machine is booted.
        let finished = finished;
        for _ in 0..at_a_time.clamp(1, machines.len()) {
            let (sender, waiting, initramfs) = (sender.clone(), &waiting, &initramfs);
            scope.spawn(move || {
                let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
                while let Some(machine) = next() {
                    if sender.send((machine, boot(machine, initramfs, limits))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        finished.iter().try_for_each(|(machine, outcome)| done(machine, outcome?))
    })
}

fn boot(machine: &Machine, initramfs: &Path, limits: &Limits) -> Result<Finished> {
    let Limits { timeout, silence, accel } = *limits;
    let name = &machine.name;
    println!("vm: booting {name} ({})", machine.kernel.cached().unwrap_or_default());
    let boot = Boot {
        accel,
        kernel: &machine.kernel.vmlinuz(),
        initramfs,
        processors: Processors::Two,
        memory: MEMORY,
        append: &machine.command_line(),
        timeout: Duration::from_secs(timeout),
        silence: Duration::from_secs(silence),
    };
    let started = Instant::now();
    let mut protocol = Protocol::new(name);
    let end = boot.run(|line| {
        if !line.starts_with(RECORD) {
            println!("{name} | {line}");
        }
        protocol.line(line);
    })?;
    println!("vm: {name} ended after {:.1} s", started.elapsed().as_secs_f64());
    Ok(protocol.finish(&end))
}

/// Before a finding of a test: see `record` in `tests/src/harness/mod.rs`.
const RECORD: &str = "vm: record ";

/// Follows what vm-init says. Its lines:
///
/// ```text
/// vm: run BACKEND EXECUTABLE
/// vm: record JSON
/// vm: end BACKEND EXECUTABLE ok|failed SECONDS
/// vm: success | vm: failure
/// ```
pub(crate) struct Protocol {
    kernel: String,
    rows: Vec<Row>,
    records: Vec<(String, String)>,
    /// The backend and name of the executable that runs, and what it has counted.
    running: Option<(String, String, Counts)>,
    verdict: Option<bool>,
}

impl Protocol {
    pub(crate) fn new(kernel: &str) -> Self {
        Self { kernel: kernel.to_owned(), rows: Vec::new(), records: Vec::new(), running: None, verdict: None }
    }

    pub(crate) fn line(&mut self, line: &str) {
        if let Some(found) = Counts::parse(line) {
            if let Some((_, _, counts)) = &mut self.running {
                *counts += found;
            }
            return;
        }
        if let Some(record) = line.strip_prefix(RECORD) {
            if let Some((backend, ..)) = &self.running {
                self.records.push((backend.clone(), record.to_owned()));
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
    pub(crate) fn finish(mut self, end: &End) -> Finished {
        let running = self.running.take();
        let problem = match (end, self.verdict) {
            (End::Killed(why), _) => Some(why.clone()),
            (End::Off, None) => Some("it went off without a verdict".to_owned()),
            (End::Off, Some(true)) => None,
            (End::Off, Some(false)) => {
                self.rows.iter().all(|row| row.counts.failed == 0).then(|| "vm-init failed".to_owned())
            }
        };
        if let Some(problem) = &problem {
            if let Some((backend, name, counts)) = running {
                println!("vm: {} stopped in {name} with {backend}: {problem}", self.kernel);
                self.add(&backend, counts.with_status(false), 0.0);
            } else {
                println!("vm: {} stopped: {problem}", self.kernel);
                self.add("-", Counts::ONE_FAILED, 0.0);
            }
        }
        let Self { kernel: _, rows, records, running: _, verdict: _ } = self;
        Finished { rows, records, problem }
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

fn pack(selection: &Selection, artifacts: &Artifacts, work: &Path) -> Result<PathBuf> {
    let tests = &selection.tests;
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
        let wanted =
            if tests.is_empty() { !NATIVE_ONLY.contains(&test.name.as_str()) } else { tests.contains(&test.name) };
        if wanted {
            let inside = format!("tests/{}", test.name);
            ensure!(!tree.contains(&inside), "two test executables are called {}", test.name);
            tree.program(&inside, &artifacts::strip(&test.path, work)?)?;
            packed += 1;
        }
    }
    ensure!(packed > 0, "no test executable is called {}", tests.join(" or "));
    if let Some(directory) = artifacts::fixtures() {
        for entry in WalkDir::new(&directory) {
            let entry = entry?;
            if entry.file_type().is_file() {
                // Not where the checkout has them: that may be a place where the machine mounts something.
                let inside = Path::new("fixtures").join(entry.path().strip_prefix(&directory)?);
                tree.program(&inside.display().to_string(), entry.path())?;
            }
        }
    }

    busybox(&mut tree)?;
    tree.text("vm.conf", &configuration(selection)?);
    tree.write_file(work.join("initramfs"))
}

/// About processes, files and other programs rather than the kernel: the machine that we run on is as good, and quicker.
/// `--test` runs them in a virtual machine all the same.
const NATIVE_ONLY: [&str; 8] =
    ["blockers", "choosing", "durability", "faults", "gpureap_tests", "recipes", "top", "units"];

/// The shell and its company, for tests that run commands. Our own programs keep their names.
pub(crate) fn busybox(tree: &mut Initramfs) -> Result<()> {
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

/// A line for each variable and each argument of the test executables.
fn configuration(selection: &Selection) -> Result<String> {
    let mut text = String::new();
    for (key, values) in [("environment", &selection.environment), ("argument", &selection.filter)] {
        for value in values {
            ensure!(!value.contains('\n'), "{value:?} holds a line break");
            writeln!(text, "{key} {value}")?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(lines: &[&str], end: &End) -> Vec<Row> {
        finish(lines, end).rows
    }

    fn finish(lines: &[&str], end: &End) -> Finished {
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

    #[test]
    fn findings_go_to_the_set_that_ran() {
        let Finished { rows: _, records, problem } = finish(
            &[
                "vm: record {\"of\": \"nobody\"}",
                "vm: run kprobe support",
                "vm: record {\"kind\": \"kernel\"}",
                "vm: end kprobe support ok 1.5",
                "vm: run gate support",
                "vm: record {\"kind\": \"losses\"}",
            ],
            &End::Killed("silent for 240 s".into()),
        );
        let record = |set: &str, text: &str| (set.to_owned(), text.to_owned());
        assert_eq!(records, [record("kprobe", "{\"kind\": \"kernel\"}"), record("gate", "{\"kind\": \"losses\"}")]);
        assert_eq!(problem.as_deref(), Some("silent for 240 s"));
    }

    fn options(words: &[&str]) -> Options {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: Options,
        }
        <Line as clap::Parser>::parse_from([&["vm"], words].concat()).options
    }

    #[test]
    fn what_is_asked_for_is_booted() {
        let planned = |words: &[&str]| -> Vec<String> {
            let machines = options(words).machines().unwrap();
            machines.iter().map(|machine| format!("{} {}", machine.name, machine.command_line().join(" "))).collect()
        };
        assert_eq!(planned(&["--kernel", "6.12"]), ["6.12 -- backend=kprobe backend=fentry backend=gate"]);
        assert_eq!(
            planned(&["--kernel", "forky", "--backend", "gate", "--append", "preempt=full"]),
            ["forky preempt=full -- backend=gate"]
        );
        assert_eq!(planned(&["--backend", "fentry"]), ["6.1 -- backend=fentry", "6.12 -- backend=fentry"]);
        assert!(options(&["--kernel", "2.6"]).machines().is_err());
    }

    #[test]
    fn the_continuous_tests_leave_no_set_out() {
        let machines = Options::everything().machines().unwrap();
        let tested = |set: &str| machines.iter().any(|machine| machine.backends.iter().any(|backend| backend == set));
        // `gate` runs natively.
        assert!(tested("kprobe") && tested("fentry"));
        let left_out = |test: &str| machines.iter().filter(|machine| machine.left_out.contains(&test)).count();
        for test in machines.iter().flat_map(|machine| machine.left_out) {
            assert_eq!(left_out(test), 1, "{test} runs somewhere");
        }
    }
}
