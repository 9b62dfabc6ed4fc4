//! Many processes with many descriptors, some of which hold the stand-in device. All end with the measurement.

use std::{
    ffi::{CStr, CString},
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::fd::FromRawFd as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Signal, set_parent_process_death_signal};

#[derive(clap::Args)]
pub(crate) struct Options {
    #[arg(long)]
    processes: u32,
    /// That each of them has
    #[arg(long)]
    descriptors: u32,
    /// So many of them hold the node
    #[arg(long)]
    holders: u32,
    #[arg(long)]
    node: PathBuf,
}

/// That each process has.
pub(super) const DESCRIPTORS: u32 = 50;

/// A running load.
pub(super) struct Load {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Processes with the node open, by pid.
    pub(super) holders: Vec<u32>,
}

impl Load {
    /// Starts the processes and waits until the last has all its descriptors.
    pub(super) fn start(processes: u32, holders: u32, node: &Path) -> Result<Self> {
        ensure!(holders <= processes, "{holders} of {processes} processes cannot hold the device");
        let mut child = Command::new(std::env::current_exe().context("this program's own path")?)
            .args(["bench", "load", "--processes", &processes.to_string(), "--holders", &holders.to_string()])
            .args(["--descriptors", &DESCRIPTORS.to_string(), "--node"])
            .arg(node)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the load")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the load's stdout")?;
        let mut load = Self { child, stdin, holders: Vec::new() };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).context("listen to the load")?;
        let pids = line.trim_end().strip_prefix(READY).with_context(|| format!("the load did not start: {line}"))?;
        load.holders = pids.split_whitespace().map(str::parse).collect::<Result<_, _>>().context("pids of the load")?;
        load.holders.sort_unstable();
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        drop(self.stdin.take());
        if let Err(error) = self.child.wait() {
            println!("the load: {error}");
        }
    }
}

const READY: &str = "ready";

/// The parent of the load: forks, tells the pids, waits for the end of its standard input, and takes all with it.
pub(super) fn serve(options: &Options) -> Result<()> {
    let Options { processes, descriptors, holders, node } = options;
    let node = CString::new(node.to_str().context("the node's path is not UTF-8")?)?;
    // A session of its own, as jobs have: gpureap spares the session that it runs in.
    rustix::process::setsid().context("setsid")?;
    no_zombies().context("sigaction")?;
    let null = open(c"/dev/null", libc::O_RDWR).context("open /dev/null")?;
    let mut ends = [0; 2];
    // SAFETY: the array has room for both ends.
    check(unsafe { libc::pipe(ends.as_mut_ptr()) }).context("pipe")?;
    let [answers, answer] = ends;
    // Above all that a child opens.
    // SAFETY: no memory is passed.
    let answer_high = check(unsafe { libc::fcntl(answer, libc::F_DUPFD, *descriptors as i32) }).context("fcntl")?;
    let parent = rustix::process::getpid();

    let mut pids = Vec::new();
    for number in 0..*processes {
        let node = (number < *holders).then_some(node.as_c_str());
        // SAFETY: this process has one thread, so the child may go on as it likes.
        match check(unsafe { libc::fork() }) {
            Ok(0) => {
                let ready = furnish(null, *descriptors, answer_high, node).is_ok();
                let ready = ready && rustix::process::getppid() == Some(parent);
                // SAFETY: the buffer has one byte; the descriptor is this process's own.
                unsafe {
                    libc::write(answer_high, [u8::from(ready)].as_ptr().cast(), 1);
                    libc::close(answer_high);
                }
                loop {
                    // SAFETY: no memory is passed.
                    unsafe { libc::pause() };
                }
            }
            Ok(pid) => pids.push(pid),
            Err(error) => bail!("only {number} of {processes} processes could be started: {error}"),
        }
    }
    for end in [answer, answer_high] {
        // SAFETY: both are this process's own, and closed once.
        unsafe { libc::close(end) };
    }
    let mut ready = vec![0; pids.len()];
    // SAFETY: the descriptor was made above and nothing else owns it.
    unsafe { File::from_raw_fd(answers) }.read_exact(&mut ready).context("listen to the processes")?;
    ensure!(ready.iter().all(|answer| *answer == 1), "not every process got its descriptors");

    let words: Vec<String> = pids[..*holders as usize].iter().map(ToString::to_string).collect();
    println!("{READY} {}", words.join(" "));
    io::stdout().flush()?;
    io::copy(&mut io::stdin(), &mut io::sink())?;
    for pid in pids {
        // SAFETY: no memory is passed. One that has ended is no error.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    // SAFETY: no status is asked for. It returns, with an error, when the last child is gone.
    unsafe { libc::wait(std::ptr::null_mut()) };
    Ok(())
}

/// Children are collected by the kernel. With `SIG_IGN` it would not send their signals either, and those are what a trace
/// tells their end by.
fn no_zombies() -> io::Result<()> {
    // SAFETY: a disposition of zeros is the default one, with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_flags = libc::SA_NOCLDWAIT;
    // SAFETY: the structure outlives the call, and the old disposition is not asked for.
    check(unsafe { libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut()) }).map(drop)
}

/// Gives a child its descriptors, and nothing else but `keep`.
fn furnish(null: i32, descriptors: u32, keep: i32, node: Option<&CStr>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    for standard in 0..3 {
        // SAFETY: no memory is passed.
        check(unsafe { libc::dup2(null, standard) })?;
    }
    for (first, last) in [(3, keep as u32 - 1), (keep as u32 + 1, u32::MAX)] {
        // SAFETY: no memory is passed; nothing in this process uses what is closed.
        check(unsafe { libc::close_range(first, last, 0) })?;
    }
    let mut next = 3;
    if let Some(node) = node {
        let device = open(node, libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK)?;
        // Whose removal a trace shows when the kernel closes the file.
        // SAFETY: no memory is passed.
        check(unsafe { libc::flock(device, libc::LOCK_SH | libc::LOCK_NB) })?;
        next += 1;
    }
    for _ in next..descriptors {
        // SAFETY: no memory is passed.
        check(unsafe { libc::dup(0) })?;
    }
    Ok(())
}

fn open(path: &CStr, flags: i32) -> io::Result<i32> {
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::open(path.as_ptr(), flags) })
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
