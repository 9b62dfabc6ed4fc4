//! The real processes that play a sequence. Each task has a connection; each step is over when those who took it have said
//! so, and when those whom it ended are gone.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt as _,
        },
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid as ProcessId, PidfdFlags, pidfd_open},
};
use tempfile::TempDir;

use super::{
    model::Model,
    step::{Act, Part, Step, Task},
};
use crate::{
    actor::{
        sys::{self, Pid, SIGKILL},
        task,
    },
    harness::{PATIENCE, note, program},
};

struct Member {
    tid: Pid,
    connection: BufReader<UnixStream>,
}

/// A living process.
struct Process {
    pid: Pid,
    started: u64,
    handle: OwnedFd,
    /// Of those that the test has started.
    child: Option<Child>,
}

/// Who plays which part now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cast {
    /// Pid, and clock ticks between the boot and the start, as /proc has it.
    pub processes: BTreeMap<Task, (Pid, u64)>,
    pub tids: BTreeMap<Task, Pid>,
    /// Every pid that ever had a part.
    pub pids: BTreeSet<Pid>,
}

pub struct Troupe {
    place: TempDir,
    listener: UnixListener,
    nodes: String,
    members: BTreeMap<Task, Member>,
    processes: BTreeMap<Task, Process>,
    pids: BTreeSet<Pid>,
}

type Done = Result<(), String>;

fn text<T: std::fmt::Display>(what: &str) -> impl Fn(T) -> String {
    move |error| format!("{what}: {error}")
}

/// Waits until it is true.
fn until(what: &str, mut condition: impl FnMut() -> bool) -> Done {
    let limit = Instant::now() + PATIENCE;
    while !condition() {
        if Instant::now() > limit {
            return Err(format!("{what}: not within {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

fn stat(pid: Pid, tid: Pid) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

/// When a process started, in clock ticks since the boot.
fn started(pid: Pid) -> Option<u64> {
    stat(pid, pid)?.get(19)?.parse().ok()
}

/// Whether a thread has no descriptors any more: it is gone, or is the zombie of a main thread.
fn has_ended(pid: Pid, tid: Pid) -> bool {
    stat(pid, tid).is_none_or(|fields| matches!(fields[0].as_str(), "Z" | "X"))
}

impl Troupe {
    pub fn new(nodes: &[String]) -> Self {
        let place = tempfile::Builder::new().prefix("gpureap-play-").tempdir().expect("a directory");
        let listener = UnixListener::bind(place.path().join("socket")).expect("a socket");
        listener.set_nonblocking(true).expect("a socket that does not block");
        // Those whose parent ends are this process's to bury: the first process of a container may not.
        sys::prctl(libc::PR_SET_CHILD_SUBREAPER, 1).expect("PR_SET_CHILD_SUBREAPER");
        Self {
            place,
            listener,
            nodes: nodes.join(":"),
            members: BTreeMap::new(),
            processes: BTreeMap::new(),
            pids: BTreeSet::new(),
        }
    }

    pub fn cast(&self) -> Cast {
        Cast {
            processes: self.processes.iter().map(|(task, process)| (*task, (process.pid, process.started))).collect(),
            tids: self.members.iter().map(|(task, member)| (*task, member.tid)).collect(),
            pids: self.pids.clone(),
        }
    }

    /// Takes the step, which leads from the one model to the other.
    pub fn play(&mut self, step: &Step, before: &Model, after: &Model) -> Done {
        let acts: Vec<(Task, Act)> = match step {
            Step::Begin(task) => {
                self.start(*task)?;
                Vec::new()
            }
            Step::Do(task, act) => vec![(*task, *act)],
            Step::Kill(process) => {
                self.kill(*process)?;
                Vec::new()
            }
            Step::Together(parts) => {
                let acts = parts.iter().filter_map(|part| match part {
                    Part::Do(task, act) => Some((*task, *act)),
                    Part::Kill(_) => None,
                });
                acts.collect()
            }
            Step::Resync | Step::Pause => return Ok(()),
        };
        let acting = self.tell(&acts)?;
        if let Step::Together(parts) = step {
            for part in parts {
                if let Part::Kill(process) = part {
                    self.kill(*process)?;
                }
            }
        }
        let living = after.tasks();
        for task in acting.iter().filter(|task| living.contains(task)) {
            self.hear(*task)?;
        }
        self.await_ends(before, after, acts.iter().any(|(_, act)| *act == Act::Exec))?;
        if let [(task, Act::Exec)] = acts[..] {
            let process = after.process_of(task).expect("it goes on");
            self.member(task)?.tid = self.processes[&process].pid;
        }
        self.await_newcomers(after)
    }

    /// Gives each its acts, in order, all at once.
    fn tell(&mut self, acts: &[(Task, Act)]) -> Result<BTreeSet<Task>, String> {
        let mut lines: BTreeMap<Task, Vec<String>> = BTreeMap::new();
        for (task, act) in acts {
            let mut line = act.to_string();
            if let Act::Take { from, .. } = act {
                let pid = self.processes.get(from).ok_or("nobody to take from")?.pid;
                line = format!("{line}@{pid}");
            }
            lines.entry(*task).or_default().push(line);
        }
        for (task, lines) in &lines {
            let line = format!("{}\n", lines.join(";"));
            let member = self.member(*task)?;
            member.connection.get_mut().write_all(line.as_bytes()).map_err(text(&format!("tell {task}")))?;
        }
        Ok(lines.into_keys().collect())
    }

    fn member(&mut self, task: Task) -> Result<&mut Member, String> {
        self.members.get_mut(&task).ok_or_else(|| format!("{task} is not there"))
    }

    fn hear(&mut self, task: Task) -> Done {
        let mut line = String::new();
        let member = self.member(task)?;
        member.connection.read_line(&mut line).map_err(text(&format!("{task} does not answer")))?;
        if line == "ok\n" { Ok(()) } else { Err(format!("{task} says `{}`", line.trim())) }
    }

    fn start(&mut self, task: Task) -> Done {
        let mut command = Command::new(program("GPUREAP_ACTOR", "gpureap-actor"));
        command
            .args(["task", &task.to_string()])
            .env(task::SOCKET, self.place.path().join("socket"))
            .env(task::NODES, &self.nodes)
            .stdin(Stdio::null());
        let enter = || {
            sys::setsid();
            // A table with nothing in it but what the play puts there.
            sys::close_range(3, u32::MAX, sys::CLOSE_RANGE_CLOEXEC)
        };
        // SAFETY: between fork and exec this only makes system calls.
        let child = unsafe { command.pre_exec(enter) }.spawn().map_err(text("start the actor"))?;
        let process = self.process(child.id() as Pid, Some(child))?;
        self.processes.insert(task, process);
        Ok(())
    }

    fn process(&mut self, pid: Pid, child: Option<Child>) -> Result<Process, String> {
        self.pids.insert(pid);
        let id = ProcessId::from_raw(pid).ok_or("no pid")?;
        let handle = pidfd_open(id, PidfdFlags::empty()).map_err(text("pidfd_open"))?;
        Ok(Process { pid, started: started(pid).ok_or("it is not in /proc")?, handle, child })
    }

    fn kill(&self, process: Task) -> Done {
        let process = self.processes.get(&process).ok_or_else(|| format!("{process} is not there"))?;
        // It may have ended by itself at this very moment.
        sys::signal(process.pid, SIGKILL);
        Ok(())
    }

    /// Waits for those who live before and not after.
    fn await_ends(&mut self, before: &Model, after: &Model, exec: bool) -> Done {
        let living = after.processes();
        for process in before.processes().into_iter().filter(|process| !living.contains(process)) {
            let ended = self.processes.remove(&process).ok_or_else(|| format!("{process} was not there"))?;
            ended.bury()?;
        }
        let tasks = after.tasks();
        for task in before.tasks().into_iter().filter(|task| !tasks.contains(task)) {
            let member = self.members.remove(&task).ok_or_else(|| format!("{task} was not there"))?;
            let process = before.process_of(task).and_then(|process| self.processes.get(&process));
            // An exec has waited for the other threads itself, and then has the number of the main one.
            if let Some(process) = process
                && !exec
            {
                until("a thread ends", || has_ended(process.pid, member.tid))?;
            }
        }
        Ok(())
    }

    /// Waits for those who live after and not yet.
    fn await_newcomers(&mut self, after: &Model) -> Done {
        let mut missing: BTreeSet<Task> = after.tasks().into_iter().collect();
        missing.retain(|task| !self.members.contains_key(task));
        while !missing.is_empty() {
            let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            let mut wait = [PollFd::new(&self.listener, PollFlags::IN)];
            poll(&mut wait, Some(&limit)).map_err(text("wait for a new task"))?;
            let (stream, _) = self.listener.accept().map_err(text("no new task"))?;
            stream.set_nonblocking(false).map_err(text("a connection"))?;
            stream.set_read_timeout(Some(PATIENCE)).map_err(text("a connection"))?;
            let mut connection = BufReader::new(stream);
            let mut line = String::new();
            connection.read_line(&mut line).map_err(text("a new task does not speak"))?;
            let words: Vec<&str> = line.split_whitespace().collect();
            let &[name, pid, tid] = &words[..] else { return Err(format!("a new task says `{line}`")) };
            let task: Task = name.parse()?;
            let (pid, tid): (Pid, Pid) = (pid.parse().map_err(text(name))?, tid.parse().map_err(text(name))?);
            if !missing.remove(&task) {
                return Err(format!("{task} is not awaited"));
            }
            let process = after.process_of(task).ok_or("a task without a process")?;
            if !self.processes.contains_key(&process) {
                let made = self.process(pid, None)?;
                self.processes.insert(process, made);
            }
            if self.processes[&process].pid != pid {
                return Err(format!("{task} is in process {pid}"));
            }
            self.members.insert(task, Member { tid, connection });
        }
        Ok(())
    }

    /// Kills all and waits until they are gone.
    pub fn end(&mut self) -> Done {
        for process in self.processes.values() {
            sys::signal(process.pid, SIGKILL);
        }
        self.members.clear();
        let mut outcome = Ok(());
        while let Some((_, process)) = self.processes.pop_first() {
            outcome = outcome.and(process.bury());
        }
        outcome
    }
}

impl Process {
    /// Waits for the end.
    fn bury(self) -> Done {
        let Self { pid, started: _, handle, child } = self;
        let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&handle.as_fd(), PollFlags::IN)], Some(&limit)).map_err(text("a pidfd"))?;
        if ended == 0 {
            return Err(format!("process {pid} does not end"));
        }
        if let Some(mut child) = child {
            return child.wait().map(drop).map_err(text("wait for a child"));
        }
        sys::bury(pid);
        Ok(())
    }
}

impl Drop for Troupe {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            note(&format!("the troupe: {error}"));
        }
    }
}
