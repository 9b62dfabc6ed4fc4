//! Reading what Rust's test executables print, and adding it up.

use std::{
    io::{BufRead as _, BufReader},
    ops::AddAssign,
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::process;

/// How long a quiet test executable is left alone before we look whether it has ended.
const PATIENCE: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) ignored: u32,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        let Self { passed, failed, ignored } = other;
        self.passed += passed;
        self.failed += failed;
        self.ignored += ignored;
    }
}

impl Counts {
    pub(crate) const ONE_FAILED: Self = Self { passed: 0, failed: 1, ignored: 0 };

    /// Reads a line such as `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; …`.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let (_, numbers) = line.trim_end().strip_prefix("test result: ")?.split_once(". ")?;
        let number =
            |what: &str| numbers.split("; ").find_map(|part| part.strip_suffix(what)?.trim_end().parse::<u32>().ok());
        Some(Self { passed: number("passed")?, failed: number("failed")?, ignored: number("ignored")? })
    }

    /// A program that failed without saying which test did (a crash, a failed build) is one failure.
    #[must_use]
    pub(crate) fn with_status(mut self, success: bool) -> Self {
        if !success && self.failed == 0 {
            self.failed = 1;
        }
        self
    }
}

/// Runs a test executable, or a cargo that runs several, and passes its output on.
pub(crate) fn run(command: &mut Command) -> Result<Counts> {
    let name = process::shown(command);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start {name}"))?;
    let reader = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        // Ends with the pipe, or when nobody listens any more.
        reader.split(b'\n').map_while(Result::ok).try_for_each(|line| sender.send(line))
    });

    let mut counts = Counts::default();
    let mut ended = None;
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line);
                println!("{line}");
                if let Some(found) = Counts::parse(&line) {
                    counts += found;
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if ended.is_some() => {
                println!("{name} left a process behind that holds its stdout");
                break;
            }
            Err(RecvTimeoutError::Timeout) => ended = child.try_wait()?,
        }
    }
    let status = child.wait()?;
    if !status.success() {
        println!("{name} failed ({status})");
    }
    Ok(counts.with_status(status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_add_up() {
        let output = "running 3 tests\ntest a ... ok\n\
            test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.00s\n\
            test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s\r\n";
        let mut sum = Counts::default();
        for found in output.split_inclusive('\n').filter_map(Counts::parse) {
            sum += found;
        }
        assert_eq!(sum, Counts { passed: 13, failed: 2, ignored: 1 });
    }

    #[test]
    fn other_lines_count_nothing() {
        for line in
            ["", "test a ... ok", "test result: ", "test result: ok. many passed", "  test result: ok. 1 passed;"]
        {
            assert_eq!(Counts::parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_crash_is_a_failure_but_not_counted_twice() {
        assert_eq!(Counts::default().with_status(false).failed, 1);
        assert_eq!(Counts::ONE_FAILED.with_status(false).failed, 1);
        assert_eq!(Counts::default().with_status(true).failed, 0);
    }

    #[test]
    fn run_counts_what_a_program_prints_and_how_it_ends() {
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out'; exit 3";
        let counts = run(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(counts, Counts { passed: 2, failed: 1, ignored: 0 });
    }

    #[test]
    fn run_does_not_wait_for_orphans() {
        let started = std::time::Instant::now();
        run(Command::new("sh").args(["-c", "sleep 20 & echo done"])).unwrap();
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}
