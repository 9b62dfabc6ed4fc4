//! Small things that everybody's programs do, timed in blocks of many.

use std::{
    ffi::{CStr, CString},
    fs,
    io::{self, PipeReader, PipeWriter, Read as _, Write as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use walkdir::WalkDir;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Work {
    Getppid,
    Dup,
    PlainFile,
    Pipe,
    ForkExec,
    Tree,
    OtherDevice,
    Device,
    DeviceDup,
}

impl Work {
    pub(super) const ALL: [Self; 9] = [
        Self::Getppid,
        Self::Dup,
        Self::PlainFile,
        Self::Pipe,
        Self::ForkExec,
        Self::Tree,
        Self::OtherDevice,
        Self::Device,
        Self::DeviceDup,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Getppid => "getppid",
            Self::Dup => "dup + close, plain file",
            Self::PlainFile => "open + close, plain file",
            Self::Pipe => "round trip through two pipes",
            Self::ForkExec => "fork + exec + exit",
            Self::Tree => "a file of a tree walk (lstat)",
            Self::OtherDevice => "open + close, /dev/null",
            Self::Device => "open + close, the GPU",
            Self::DeviceDup => "dup + close, the GPU",
        }
    }

    /// Of a block; and of one in an emulated machine, whose clock is as exact as one wants.
    const fn operations(self) -> (u32, u32) {
        match self {
            Self::Getppid => (200_000, 4_000),
            Self::Dup => (100_000, 4_000),
            Self::PlainFile | Self::OtherDevice => (20_000, 1_000),
            Self::Pipe | Self::Device => (4_000, 1_000),
            Self::ForkExec => (40, 20),
            Self::Tree => (DIRECTORIES.0 * FILES, DIRECTORIES.1 * FILES),
            Self::DeviceDup => (50_000, 4_000),
        }
    }

    /// Whether gpureap has something to do with it: its cost is no noise.
    pub(super) fn is_tracked(self) -> bool {
        self.of_devices() || self == Self::ForkExec
    }

    /// Whether it opens a device.
    pub(super) const fn of_devices(self) -> bool {
        matches!(self, Self::OtherDevice | Self::Device | Self::DeviceDup)
    }
}

/// Of the tree, and in an emulated machine; and files in each.
const DIRECTORIES: (u32, u32) = (100, 10);
const FILES: u32 = 200;

/// Of one operation, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Sample {
    pub(super) wall_ns: f64,
    /// Of this process and the children that it had meanwhile: what others do with the processor is not in it.
    pub(super) cpu_ns: f64,
}

/// Where the work is done.
pub(super) struct Site {
    plain: CString,
    device: CString,
    tree: PathBuf,
    program: CString,
    emulated: bool,
}

impl Site {
    /// Makes the files in a directory.
    pub(super) fn new(directory: &Path, device: &Path, emulated: bool) -> Result<Self> {
        let (plain, tree) = (directory.join("plain"), directory.join("tree"));
        fs::write(&plain, "x")?;
        for number in 0..if emulated { DIRECTORIES.1 } else { DIRECTORIES.0 } {
            let directory = tree.join(number.to_string());
            fs::create_dir_all(&directory)?;
            for file in 0..FILES {
                fs::File::create(directory.join(file.to_string()))?;
            }
        }
        let c = |path: &Path| CString::new(path.as_os_str().as_bytes());
        Ok(Self { plain: c(&plain)?, device: c(device)?, tree, program: c"/bin/true".to_owned(), emulated })
    }

    /// In one block.
    pub(super) fn operations(&self, work: Work) -> u32 {
        let (native, emulated) = work.operations();
        if self.emulated { emulated } else { native }
    }

    /// One block.
    pub(super) fn time(&self, work: Work) -> Result<Sample> {
        let operations = self.operations(work);
        let (cpu, started) = (cpu_ns(), Instant::now());
        self.run(work, operations).with_context(|| work.name())?;
        let wall = started.elapsed();
        let each = |ns: f64| ns / f64::from(operations);
        Ok(Sample { wall_ns: each(wall.as_secs_f64() * 1e9), cpu_ns: each(cpu_ns() - cpu) })
    }

    fn run(&self, work: Work, operations: u32) -> Result<()> {
        match work {
            Work::Getppid => {
                for _ in 0..operations {
                    // SAFETY: no memory is passed.
                    unsafe { libc::syscall(libc::SYS_getppid) };
                }
            }
            Work::Dup => dup_often(&self.plain, operations)?,
            Work::DeviceDup => dup_often(&self.device, operations)?,
            Work::PlainFile => open_often(&self.plain, operations)?,
            Work::OtherDevice => open_often(c"/dev/null", operations)?,
            Work::Device => open_often(&self.device, operations)?,
            Work::Pipe => ping_pong(operations)?,
            Work::ForkExec => {
                for _ in 0..operations {
                    fork_exec(&self.program)?;
                }
            }
            Work::Tree => {
                let mut files = 0;
                for entry in WalkDir::new(&self.tree) {
                    files += u32::from(entry?.metadata()?.is_file());
                }
                ensure!(files == operations, "{files} files in a tree of {operations}");
            }
        }
        Ok(())
    }
}

fn cpu_ns() -> f64 {
    let own = clock_gettime(ClockId::ProcessCPUTime);
    // SAFETY: a structure of zeros is valid, and the call fills it.
    let children = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let times = [children.ru_utime, children.ru_stime];
    let children: f64 = times.iter().map(|time| time.tv_sec as f64 * 1e9 + time.tv_usec as f64 * 1e3).sum();
    own.tv_sec as f64 * 1e9 + own.tv_nsec as f64 + children
}

/// From now on this process has one processor, the last: what it does is not told apart by where it ran.
pub(super) fn stay_on_one_processor() -> Result<()> {
    let last = thread::available_parallelism()?.get() - 1;
    let mut set = rustix::thread::CpuSet::new();
    set.set(last);
    rustix::thread::sched_setaffinity(None, &set).context("stay on one processor")
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn open(path: &CStr) -> io::Result<i32> {
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_CLOEXEC) })
}

fn close(descriptor: i32) -> io::Result<()> {
    // SAFETY: the descriptor is this function's caller's own.
    check(unsafe { libc::close(descriptor) }).map(drop)
}

fn open_often(path: &CStr, times: u32) -> io::Result<()> {
    (0..times).try_for_each(|_| close(open(path)?))
}

fn dup_often(path: &CStr, times: u32) -> io::Result<()> {
    let file = open(path)?;
    for _ in 0..times {
        // SAFETY: no memory is passed.
        close(check(unsafe { libc::dup(file) })?)?;
    }
    close(file)
}

/// Between two threads, which the caller keeps on one processor.
fn ping_pong(times: u32) -> Result<()> {
    fn answer((mut from, mut to): (PipeReader, PipeWriter)) -> io::Result<()> {
        let mut byte = [0];
        while from.read(&mut byte)? == 1 {
            to.write_all(&byte)?;
        }
        Ok(())
    }
    let (there, mut ask) = io::pipe()?;
    let (mut hear, back) = io::pipe()?;
    let other = thread::spawn(move || answer((there, back)));
    let mut byte = [0];
    for _ in 0..times {
        ask.write_all(&byte)?;
        hear.read_exact(&mut byte)?;
    }
    drop(ask);
    other.join().expect("the other thread does not panic")?;
    Ok(())
}

fn fork_exec(program: &CStr) -> Result<()> {
    let arguments = [program.as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null()];
    // SAFETY: between fork and exec the child makes one system call, with memory that was there before.
    let pid = check(unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
            libc::_exit(127);
        }
        pid
    })?;
    let mut status = 0;
    // SAFETY: the status outlives the call.
    check(unsafe { libc::waitpid(pid, &raw mut status, 0) })?;
    ensure!(status == 0, "{} ended with {status:#x}", program.to_string_lossy());
    Ok(())
}
