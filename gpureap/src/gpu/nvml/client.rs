//! The parent's side: starts the child, asks, and never waits longer than it was told to.

use std::{
    env,
    ffi::OsString,
    fs::File,
    io::{Read as _, Write as _},
    os::{
        fd::OwnedFd,
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    NvmlTrouble, Snapshot,
    child::{self, Answer},
};
use crate::{
    config::Nvml,
    model::ProcKey,
    process::{Facts, pidfd},
};

/// An answer of a host with more GPUs than there are is no answer.
const MOST: usize = 16 << 20;
/// How long a killed child may take before it is left to its fate: it may be stuck in the driver.
const BURIAL: Duration = Duration::from_millis(100);

/// Whoever answers as NVML does; scripted by tests.
pub trait Ask {
    fn ask(&mut self, timeout: Duration) -> Result<Snapshot, NvmlTrouble>;
}

/// A child that asks NVML. Killed when this is dropped, and by the kernel when the thread that started it ends.
#[derive(Debug)]
pub struct NvmlChild {
    /// `None` once it was given up.
    running: Option<Running>,
    key: ProcKey,
    timeout: Duration,
    /// Why it was given up: the answer to every further question.
    trouble: Option<NvmlTrouble>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    questions: File,
    answers: File,
}

impl NvmlChild {
    /// Starts the child, which touches nothing of NVIDIA's until [`NvmlChild::start`] or a question.
    pub fn spawn(config: &Nvml) -> Result<Self, NvmlTrouble> {
        let Nvml { enabled, library, program, timeout } = config;
        if !enabled {
            return Err(NvmlTrouble::Disabled);
        }
        let mut child = Command::new(program)
            .arg0("gpureap")
            .arg(child::WORD)
            .arg(std::process::id().to_string())
            .arg(library)
            .env_clear()
            .envs(env::vars_os().filter(|(name, _)| is_needed(name)))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| NvmlTrouble::Ended(format!("({}) cannot be started: {error}", program.display())))?;
        let (Some(questions), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both were asked for")
        };
        let start_ns = Facts::read_any(Path::new("/proc"), child.id()).map_or(0, |facts| facts.start_ns);
        let key = ProcKey::new(child.id(), start_ns);
        let (questions, answers) = (File::from(OwnedFd::from(questions)), File::from(OwnedFd::from(answers)));
        Ok(Self { running: Some(Running { child, questions, answers }), key, timeout: *timeout, trouble: None })
    }

    pub const fn pid(&self) -> u32 {
        self.key.tgid
    }

    /// With the start time of /proc, to the clock tick; 0 where /proc does not show it.
    pub const fn key(&self) -> ProcKey {
        self.key
    }

    /// The configured time limit of one question.
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Lets it load the library, while the caller does something else.
    pub fn start(&mut self) -> Result<(), NvmlTrouble> {
        self.say(child::START)
    }

    /// Asks, and waits at most that long. A child that does not answer is killed and asked no more.
    pub fn ask(&mut self, timeout: Duration) -> Result<Snapshot, NvmlTrouble> {
        let until = Instant::now() + timeout;
        self.say(child::ASK)?;
        let Some(running) = &mut self.running else { return Err(self.why()) };
        let line = match running.line(until) {
            Ok(Some(line)) => line,
            Ok(None) => return Err(self.give_up(&NvmlTrouble::Silent(span(timeout)))),
            Err(()) => return Err(self.ended()),
        };
        match serde_json::from_slice(&line) {
            Ok(Answer::Snapshot(snapshot)) => Ok(snapshot),
            Ok(Answer::Trouble(trouble)) => Err(trouble),
            Err(error) => Err(self.give_up(&NvmlTrouble::Ended(format!("says something else: {error}")))),
        }
    }

    /// Ends it and waits at most that long; true when it is gone, with all device files that it had open.
    pub fn close(mut self, patience: Duration) -> bool {
        let Some(Running { mut child, questions, answers }) = self.running.take() else { return false };
        drop((questions, answers));
        if exits_within(&mut child, patience / 2).is_some() {
            return true;
        }
        kill(&mut child);
        let gone = exits_within(&mut child, patience / 2).is_some();
        if !gone {
            bury(child);
        }
        gone
    }

    fn say(&mut self, word: &str) -> Result<(), NvmlTrouble> {
        let Some(running) = &mut self.running else { return Err(self.why()) };
        // A few bytes into an empty pipe: this does not block.
        match running.questions.write_all(format!("{word}\n").as_bytes()) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.ended()),
        }
    }

    fn why(&self) -> NvmlTrouble {
        self.trouble.clone().unwrap_or_else(|| NvmlTrouble::Ended("was ended".to_owned()))
    }

    /// It closed its side: say how it ended.
    fn ended(&mut self) -> NvmlTrouble {
        let status = self.running.as_mut().and_then(|running| exits_within(&mut running.child, BURIAL));
        let text = status.map_or_else(|| "closed its output".to_owned(), ending);
        self.give_up(&NvmlTrouble::Ended(text))
    }

    fn give_up(&mut self, trouble: &NvmlTrouble) -> NvmlTrouble {
        self.trouble = Some(trouble.clone());
        self.end();
        trouble.clone()
    }

    fn end(&mut self) {
        let Some(Running { mut child, questions, answers }) = self.running.take() else { return };
        drop((questions, answers));
        kill(&mut child);
        if exits_within(&mut child, BURIAL).is_none() {
            bury(child);
        }
    }
}

impl Ask for NvmlChild {
    fn ask(&mut self, timeout: Duration) -> Result<Snapshot, NvmlTrouble> {
        Self::ask(self, timeout)
    }
}

impl Drop for NvmlChild {
    fn drop(&mut self) {
        self.end();
    }
}

impl Running {
    /// One line; `None` when the time is over, an error when the child closed its output or says too much.
    fn line(&mut self, until: Instant) -> Result<Option<Vec<u8>>, ()> {
        let mut line = Vec::new();
        let mut buffer = [0; 8192];
        loop {
            if !readable(&self.answers, until) {
                return Ok(None);
            }
            // There is something to read, or the end.
            let count = self.answers.read(&mut buffer).map_err(drop)?;
            line.extend_from_slice(&buffer[..count]);
            if line.last() == Some(&b'\n') {
                return Ok(Some(line));
            }
            if count == 0 || line.len() > MOST {
                return Err(());
            }
        }
    }
}

/// The loader's path, and what moves gpureap's own.
fn is_needed(name: &OsString) -> bool {
    let name = name.to_string_lossy();
    name == "LD_LIBRARY_PATH" || name.starts_with("GPUREAP_")
}

/// Whether there is something to read before that time, the end included.
fn readable(file: &impl std::os::fd::AsFd, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
        match poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Its status, if it ends in time.
fn exits_within(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    // Its pid is its own as long as it was not waited for.
    let pidfd = pidfd::open(child.id()).ok()??;
    if readable(&pidfd, Instant::now() + patience) { child.try_wait().ok().flatten() } else { None }
}

fn kill(child: &mut Child) {
    // The one error that there is: it has ended already.
    drop(child.kill());
}

/// Stuck in the driver, it cannot die. Whenever it does, this thread takes its status; nobody waits for the thread.
fn bury(mut child: Child) {
    drop(thread::Builder::new().name("nvml-burial".to_owned()).spawn(move || child.wait()));
}

fn ending(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, code) => format!("exited {}", code.unwrap_or(0)),
    }
}

/// `2 s`, `250 ms`.
fn span(time: Duration) -> String {
    if time.subsec_millis() == 0 { format!("{} s", time.as_secs()) } else { format!("{} ms", time.as_millis()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_with_their_unit() {
        assert_eq!(span(Duration::from_secs(2)), "2 s");
        assert_eq!(span(Duration::from_millis(1500)), "1500 ms");
    }

    #[test]
    fn switched_off_means_no_child() {
        let config = Nvml { enabled: false, ..Nvml::default() };
        assert_eq!(NvmlChild::spawn(&config).unwrap_err(), NvmlTrouble::Disabled);
    }

    #[test]
    fn only_what_is_needed_is_handed_down() {
        for (name, needed) in
            [("LD_LIBRARY_PATH", true), ("GPUREAP_PROC", true), ("LD_PRELOAD", false), ("CUDA_VISIBLE_DEVICES", false)]
        {
            assert_eq!(is_needed(&name.into()), needed, "{name}");
        }
    }

    #[test]
    fn a_program_that_is_not_there() {
        let config = Nvml { program: "/nonexistent".into(), ..Nvml::default() };
        let trouble = NvmlChild::spawn(&config).unwrap_err();
        let told = "the process that asks NVML (/nonexistent) cannot be started: ";
        assert!(trouble.to_string().starts_with(told), "{trouble}");
    }
}
