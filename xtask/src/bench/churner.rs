//! A process that opens and closes a device at a steady rate.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Which of several it is
    #[arg(long)]
    number: u32,
    #[arg(long)]
    seconds: u32,
    /// Opens a second
    #[arg(long)]
    rate: u32,
    #[arg(long)]
    node: PathBuf,
}

/// What it did, and what it holds now.
#[derive(Serialize, Deserialize)]
pub(super) struct Told {
    pub(super) pid: u32,
    pub(super) seconds: f64,
    pub(super) opens: u64,
    pub(super) dups: u64,
    pub(super) forks: u64,
    pub(super) descriptors: u64,
}

/// That are open at a time.
const KEPT: usize = 16;

pub(super) fn serve(options: &Options) -> Result<()> {
    let Options { number, seconds, rate, node } = options;
    let (mut opens, mut dups, mut forks) = (0_u64, 0_u64, 0_u64);
    let mut kept = VecDeque::new();
    let started = Instant::now();
    let end = Duration::from_secs(u64::from(*seconds));
    let wanted = u64::from(*seconds) * u64::from(*rate);
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK);
    while opens < wanted && started.elapsed() < end {
        // What it should have done by now; what it was kept from it does as fast as it can.
        let due = (started.elapsed().as_secs_f64() * f64::from(*rate)) as u64;
        while opens < due.min(wanted) && started.elapsed() < end {
            let file = options.open(node).context("open the device")?;
            opens += 1;
            if opens.is_multiple_of(8) {
                drop(file.try_clone().context("duplicate the device")?);
                dups += 1;
            }
            kept.push_back(file);
            if opens.is_multiple_of(1024) {
                child()?;
                forks += 1;
            }
            if kept.len() == KEPT {
                kept.pop_front();
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    let elapsed = started.elapsed();
    while kept.len() > *number as usize + 1 {
        kept.pop_front();
    }
    let seconds = elapsed.as_secs_f64();
    let told = Told { pid: std::process::id(), seconds, opens, dups, forks, descriptors: held(&kept)? };
    println!("{}", serde_json::to_string(&told)?);
    io::stdout().flush()?;
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

/// Inherits all descriptors, and exits.
fn child() -> Result<()> {
    // SAFETY: the child makes one system call.
    let pid = unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::_exit(0);
        }
        pid
    };
    ensure!(pid > 0, "fork: {}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: the status outlives the call.
    ensure!(unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid, "waitpid: {}", io::Error::last_os_error());
    Ok(())
}

/// How many of them there are, as this process's own table in /proc has it.
fn held(kept: &VecDeque<File>) -> Result<u64> {
    let there = |file: &&File| std::fs::exists(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or(false);
    let count = kept.iter().filter(there).count();
    ensure!(count == kept.len(), "{count} descriptors of {}", kept.len());
    Ok(count as u64)
}
