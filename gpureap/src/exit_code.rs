//! Exit codes of all commands.

use std::process::ExitCode;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// Done; for `reap` and `wait`: free, verified.
    Done = 0,
    Internal = 1,
    Usage = 2,
    /// Still held by living processes.
    Held = 3,
    /// Held by a process that cannot be killed.
    Unkillable = 4,
    /// Held only by protected or monitor processes.
    Protected = 5,
    /// No holder left in user space, but memory or a kernel reference remains.
    KernelReference = 6,
    NotPermitted = 7,
    /// This kernel or host cannot do it.
    Unsupported = 8,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
