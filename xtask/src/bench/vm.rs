//! Measurements in a virtual machine: this very program is the first process in it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    churn,
    guest::{DONE, GPUREAP, LOOKUP, TOLD, XTASK},
};
use crate::{
    artifacts,
    initramfs::Initramfs,
    kernels::{self, Kernel},
    process,
    qemu::{Accel, Boot, End, MEMORY, Processors},
    vm::busybox,
};

/// What is to be measured.
pub(super) enum Wish<'a> {
    /// By counted instructions. With gpureap's example `lookup_time`.
    Cost {
        rounds: u32,
        lookup: &'a Path,
    },
    Churn(&'a churn::Plan),
}

impl Wish<'_> {
    fn arguments(&self) -> String {
        match self {
            Self::Cost { rounds, lookup: _ } => format!("cost --rounds {rounds}"),
            Self::Churn(churn::Plan { seconds, rate, workers }) => {
                format!("churn --seconds {seconds} --rate {rate} --workers {workers}")
            }
        }
    }

    const fn processors(&self) -> Processors {
        match self {
            Self::Cost { .. } => Processors::Counted,
            Self::Churn(_) => Processors::Two,
        }
    }
}

const TIMEOUT: Duration = Duration::from_hours(1);
const SILENCE: Duration = Duration::from_mins(20);

/// The Debian package of a kernel, which is brought into the cache.
pub(super) fn package(kernel: &str) -> Result<String> {
    let kernel = Kernel::named(kernel)?;
    fs::create_dir_all(kernels::cache())?;
    kernel.fetch(false)?;
    kernel.cached().context("the kernel is not in the cache")
}

/// Boots and measures; returns what the machine told, a line of JSON for each result.
pub(super) fn run(kernel: &str, gpureap: &Path, wish: &Wish<'_>) -> Result<Vec<String>> {
    let vmlinuz = Kernel::named(kernel)?.fetch(false)?;
    let work = tempfile::tempdir_in(kernels::cache())?;
    let own = std::env::current_exe().context("this program's own path")?;
    let mut programs = vec![(XTASK, artifacts::strip(&own, work.path())?), (GPUREAP, gpureap.to_owned())];
    if let Wish::Cost { rounds: _, lookup } = wish {
        programs.push((LOOKUP, (*lookup).to_owned()));
    }
    let initramfs = pack(&programs, work.path())?;
    let append = [format!("rdinit={XTASK} -- bench guest {}", wish.arguments())];
    let boot = Boot {
        accel: Accel::Tcg,
        kernel: &vmlinuz,
        initramfs: &initramfs,
        processors: wish.processors(),
        memory: MEMORY,
        append: &append,
        timeout: TIMEOUT,
        silence: SILENCE,
    };
    let mut told = Vec::new();
    let end = boot.run(|line| {
        if let Some(result) = line.strip_prefix(TOLD) {
            println!("{kernel} | {} results", told.len() + 1);
            told.push(result.to_owned());
        } else {
            println!("{kernel} | {line}");
        }
    })?;
    let last = told.pop();
    ensure!(end == End::Off && last.as_deref() == Some(DONE), "the measurement ended with {end:?}: {last:?}");
    Ok(told)
}

fn pack(programs: &[(&str, PathBuf)], work: &Path) -> Result<PathBuf> {
    let mut tree = Initramfs::default();
    for directory in ["proc", "sys", "dev", "tmp", "run", "root", "var/lib", "etc"] {
        tree.directory(directory);
    }
    tree.device("dev/console", 5, 1);
    tree.text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    for (inside, program) in programs {
        tree.program(inside, program)?;
        for library in libraries(program)? {
            tree.program(&library, Path::new(&library))?;
        }
    }
    busybox(&mut tree)?;
    tree.write_file(work.join("initramfs"))
}

/// What the loader brings along with a program, by absolute paths.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let text = process::output(Command::new("ldd").arg(program))?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(str::to_owned)
        .collect())
}
