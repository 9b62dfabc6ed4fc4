//! The first process of the test VM: mounts what the tests need, runs each test executable once per backend, powers off.
//!
//! What it reads and says is described in `xtask/src/vm.rs`.

#![expect(clippy::print_stdout, reason = "stdout is the console")]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, PipeReader, PipeWriter, Write as _},
    os::unix::{fs::symlink, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use rustix::{io::Errno, process::WaitOptions};

/// Source and type, where, options.
const MOUNTS: &[(&str, &str, &str)] = &[
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", ""),
    ("devpts", "/dev/pts", "mode=620,ptmxmode=666"),
    ("tmpfs", "/dev/shm", "mode=1777"),
    ("tmpfs", "/tmp", "mode=1777"),
    ("tmpfs", "/run", "mode=755"),
    ("tracefs", "/sys/kernel/tracing", ""),
    ("debugfs", "/sys/kernel/debug", ""),
    ("bpf", "/sys/fs/bpf", ""),
    ("cgroup2", "/sys/fs/cgroup", ""),
];

/// The port that carries the tests' output, so that the kernel's messages cannot split a line.
const CHANNEL: &str = "/dev/ttyS1";

fn main() {
    if std::process::id() != 1 {
        println!("vm-init is the first process of the test VM");
        return;
    }
    if let Err(error) = boot() {
        println!("vm-init: {error:#}");
    }
    rustix::fs::sync();
    // Returns only if it fails; the kernel then panics because init ends, which the host notices.
    let failed = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    println!("vm-init: cannot power off: {failed:?}");
}

fn boot() -> Result<()> {
    // The kernel starts its first process without one, and what everybody may write is nobody's to trust.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    for (kind, at, options) in MOUNTS {
        mount(kind, at, options)?;
    }
    for (name, to) in [("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")] {
        symlink(format!("/proc/self/fd{to}"), Path::new("/dev").join(name)).with_context(|| format!("/dev/{name}"))?;
    }
    let status = Command::new("/bin/busybox").args(["ip", "link", "set", "lo", "up"]).status()?;
    ensure!(status.success(), "cannot raise lo: {status}");

    // A pipe, because programs behave differently when they write to a terminal, which the port is.
    let (reader, mut writer) = io::pipe()?;
    let mut channel = OpenOptions::new().write(true).open(CHANNEL).with_context(|| format!("cannot open {CHANNEL}"))?;
    let relay = thread::spawn(move || relay(reader, &mut channel));
    let result = run_all(&mut writer);
    let verdict = match &result {
        Ok(true) => "success",
        Ok(false) | Err(_) => "failure",
    };
    writeln!(writer, "vm: {verdict}")?;

    // Whoever is left may hold the pipe open, and the relay must read it to its end.
    drop(writer);
    bury_all()?;
    relay.join().expect("the relay does not panic")?;
    result.map(drop)
}

fn relay(mut from: PipeReader, to: &mut File) -> io::Result<()> {
    io::copy(&mut from, to)?;
    // What is still in the port's buffer would be lost when the power goes.
    Ok(rustix::termios::tcdrain(to)?)
}

/// Kills every other process and waits until they are gone.
fn bury_all() -> Result<()> {
    // As kill(2) has it, the group of process 1 is everybody else.
    match rustix::process::kill_process_group(rustix::process::Pid::INIT, rustix::process::Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => return Err(error).context("cannot kill what is left"),
    }
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(_) => {}
            Err(Errno::CHILD) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn mount(kind: &str, at: &str, options: &str) -> Result<()> {
    fs::create_dir_all(at).with_context(|| format!("cannot create {at}"))?;
    let options = std::ffi::CString::new(options).expect("no NUL in our own table");
    rustix::mount::mount(kind, at, kind, rustix::mount::MountFlags::empty(), options.as_c_str())
        .with_context(|| format!("cannot mount {kind} at {at}"))
}

/// Tests that depend on the probe set. The others run once: emulated processors are slow.
const OF_PROBES: [&str; 7] = ["churn", "finding", "killing", "operations", "reading", "restart", "support"];

/// Whether all of them passed.
fn run_all(channel: &mut PipeWriter) -> Result<bool> {
    let text = fs::read_to_string("/vm.conf").context("cannot read /vm.conf")?;
    let values = |key: &str| -> Vec<&str> {
        text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(' ')).collect()
    };
    let arguments = values("argument");
    let environment: Vec<(&str, &str)> =
        values("environment").into_iter().filter_map(|variable| variable.split_once('=')).collect();
    // The end of the kernel's command line.
    let words: Vec<String> = std::env::args().skip(1).collect();
    let backends: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix("backend=")).collect();
    ensure!(!backends.is_empty(), "no probe set is asked for in {words:?}");
    let refused: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix("refused=")).collect();
    let left_out: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix("without=")).collect();
    let mut executables: Vec<PathBuf> =
        fs::read_dir("/tests")?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    executables.sort();

    let mut success = true;
    for (position, backend) in backends.iter().enumerate() {
        for executable in &executables {
            let name = executable.file_name().unwrap_or_default().to_string_lossy();
            let of_probes = OF_PROBES.iter().any(|test| name.starts_with(test));
            if position > 0 && !of_probes || left_out.contains(&name.as_ref()) {
                continue;
            }
            writeln!(channel, "vm: run {backend} {name}")?;
            let started = Instant::now();
            let child = Command::new(executable)
                .arg("--test-threads=1")
                .args(&arguments)
                .current_dir("/tmp")
                .env_clear()
                .env("PATH", "/bin")
                .env("HOME", "/root")
                .env("RUST_BACKTRACE", "1")
                .env("GPUREAP_BIN", "/bin/gpureap")
                .env("GPUREAP_ACTOR", "/bin/gpureap-actor")
                .env("GPUREAP_FIXTURES", "/fixtures")
                // Nothing else runs here that the kernel could choose.
                .env("GPUREAP_ALLOW_OOM", "1")
                .env("GPUREAP_TEST_BACKEND", backend)
                .env("GPUREAP_TEST_VM", "1")
                .env("GPUREAP_TEST_RECORDS", "1")
                .envs(refused.contains(backend).then_some(("GPUREAP_TEST_REFUSED", "1")))
                .envs(environment.iter().copied())
                .stdin(Stdio::null())
                .stdout(channel.try_clone()?)
                .stderr(channel.try_clone()?)
                .spawn()
                .with_context(|| format!("cannot start {name}"))?;
            let status = wait_for(child.id())?;
            let how = if status.success() { "ok" } else { "failed" };
            if !status.success() {
                writeln!(channel, "{name}: {status}")?;
            }
            writeln!(channel, "vm: end {backend} {name} {how} {:.1}", started.elapsed().as_secs_f64())?;
            success &= status.success();
        }
    }
    Ok(success)
}

/// Waits for one child and buries the orphans that come to us meanwhile, as the first process must.
fn wait_for(pid: u32) -> Result<ExitStatus> {
    loop {
        let ended = rustix::process::wait(WaitOptions::empty())?;
        if let Some((ended, status)) = ended
            && ended.as_raw_nonzero().get().cast_unsigned() == pid
        {
            return Ok(ExitStatus::from_raw(status.as_raw()));
        }
    }
}
