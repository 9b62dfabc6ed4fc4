//! What the ladder needs from the world: a clock, handles on processes, signals through them, and waiting.

use std::{fmt, io, path::Path};

use crate::model::ProcKey;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    Term,
    Kill,
}

impl Signal {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Term => "SIGTERM",
            Self::Kill => "SIGKILL",
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Names an open process for the signaller that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub usize);

/// What stands behind a pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The process that was asked for; the handle can never come to mean another.
    Here(Handle),
    /// It has exited, its zombie included.
    Gone,
    /// The pid belongs to another process now.
    Reused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Delivered,
    /// It exited before.
    Gone,
    NotPermitted,
}

pub trait Signaller {
    /// Boottime.
    fn now_ns(&self) -> u64;
    /// Takes hold of a process and checks that it is the one meant.
    fn open(&mut self, key: ProcKey) -> io::Result<Opened>;
    fn send(&mut self, handle: Handle, signal: Signal) -> io::Result<Delivery>;
    /// Kills everybody in a cgroup in one step.
    fn kill_cgroup(&mut self, dir: &Path) -> io::Result<()>;
    /// Orders systemd to stop a unit; the error is for people.
    fn stop_unit(&mut self, unit: &str) -> Result<(), String>;
    /// Has the kernel free the memory of a process that was killed and does not get on with its exit. May take a while and
    /// is not waited for.
    fn release_memory(&mut self, handle: Handle);
    /// Blocks until one of the processes has exited with all its threads, or until a boottime. Returns those that have.
    fn wait(&mut self, handles: &[Handle], until_ns: u64) -> io::Result<Vec<Handle>>;
    /// Whether every thread of the process is on its way out: what it held is then being released by the kernel, and only
    /// its exit tells when that is done (measured: 1.2 s for 8 GiB of pinned memory).
    fn exiting(&self, handle: Handle) -> bool;
    /// The wait status of a process that has exited, where the kernel tells it to those who are not its parent.
    fn exit_status(&self, handle: Handle) -> Option<u32>;
}
