//! What the play is made of, and how it is written: one line each, so that a sequence that fails can be kept as a file.
use std::{fmt, str::FromStr};

use crate::actor::sys::Fd;

macro_rules! numbered {
    ($($(#[$doc:meta])* $name:ident = $letter:literal,)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
            pub struct $name(pub u32);

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, "{}{}", $letter, self.0)
                }
            }

            impl FromStr for $name {
                type Err = String;

                fn from_str(text: &str) -> Result<Self, String> {
                    let number = text.strip_prefix($letter).and_then(|number| number.parse().ok());
                    number.map(Self).ok_or_else(|| format!("{} and a number, not `{text}`", $letter))
                }
            }
        )*
    };
}

numbered! {
    /// A thread, by the order in which they begin. A process goes by its first one.
    Task = 't',
    /// One of the devices that are watched.
    Dev = 'd',
    /// Something mapped, by the number it was given when that began.
    Area = 'a',
    /// An io_uring, likewise.
    Ring = 'r',
}

/// What happens next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The test starts a process.
    Begin(Task),
    /// A task does something and says when it is done.
    Do(Task, Act),
    /// SIGKILL for the process.
    Kill(Task),
    /// Several tasks act at the same time, each in its own order, while the test kills processes.
    Together(Vec<Part>),
    /// gpureap compares its map with a sweep, as the daemon does now and then.
    Resync,
    /// Everything stands still and is compared.
    Pause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Do(Task, Act),
    Kill(Task),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Open {
        dev: Dev,
        at: Fd,
        cloexec: bool,
    },
    /// With `O_PATH`, which is no hold.
    OpenPath {
        dev: Dev,
        at: Fd,
    },
    /// An open, a copy and two closes, so many times.
    Spin {
        dev: Dev,
        times: u32,
    },
    Dup2 {
        from: Fd,
        to: Fd,
    },
    /// `dup3` with `O_CLOEXEC`.
    Dup3 {
        from: Fd,
        to: Fd,
    },
    /// `F_DUPFD` with the number, which is free, as the lowest wanted.
    Fcntl {
        from: Fd,
        to: Fd,
    },
    Close {
        fd: Fd,
    },
    CloseRange {
        low: Fd,
        high: Fd,
        mode: RangeMode,
    },
    /// `F_SETFD`
    Cloexec {
        fd: Fd,
        on: bool,
    },
    /// A POSIX lock, after which the kernel calls the hook of a close with another owner, too.
    Lock {
        fd: Fd,
    },
    Fork {
        child: Task,
    },
    /// A vfork whose child executes.
    Vfork {
        child: Task,
    },
    /// A vfork whose child ends.
    VforkExit,
    /// `posix_spawn` of a program that ends at once.
    Spawn,
    /// `clone(CLONE_FILES)`: a process on the same table.
    Share {
        child: Task,
    },
    Thread {
        child: Task,
    },
    /// `unshare(CLONE_FILES)`
    Unshare,
    Exec,
    /// Of the whole process.
    Exit,
    /// Of this task alone.
    ExitThread,
    /// A socket that is connected with itself.
    Mailbox {
        at: Fd,
    },
    Send {
        fd: Fd,
        mailbox: Fd,
    },
    Receive {
        mailbox: Fd,
        at: Fd,
    },
    /// Receives a message without the descriptor in it.
    Discard {
        mailbox: Fd,
    },
    /// `pidfd_getfd` from the main thread of a process.
    Take {
        from: Task,
        fd: Fd,
        at: Fd,
    },
    Ring {
        ring: Ring,
        at: Fd,
    },
    RingOpen {
        ring: Ring,
        via: Fd,
        dev: Dev,
        at: Fd,
    },
    RingClose {
        ring: Ring,
        via: Fd,
        fd: Fd,
    },
    /// Into the ring's own table.
    RingOpenDirect {
        ring: Ring,
        via: Fd,
        dev: Dev,
        slot: u32,
    },
    RingCloseDirect {
        ring: Ring,
        via: Fd,
        slot: u32,
    },
    /// A file that is open goes into the ring's table as well.
    RingRegister {
        via: Fd,
        slot: u32,
        fd: Fd,
    },
    Map {
        area: Area,
        fd: Fd,
        pages: u32,
    },
    Unmap {
        area: Area,
    },
    /// Unmaps the middle of three pages.
    Punch {
        area: Area,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeMode {
    Close,
    /// In a table of the caller's own.
    Unshare,
    Cloexec,
}

impl fmt::Display for RangeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Close => "close",
            Self::Unshare => "unshare",
            Self::Cloexec => "cloexec",
        })
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { dev, at, cloexec: false } => write!(f, "open {dev} {at}"),
            Self::Open { dev, at, cloexec: true } => write!(f, "open {dev} {at} cloexec"),
            Self::OpenPath { dev, at } => write!(f, "open-path {dev} {at}"),
            Self::Spin { dev, times } => write!(f, "spin {dev} {times}"),
            Self::Dup2 { from, to } => write!(f, "dup2 {from} {to}"),
            Self::Dup3 { from, to } => write!(f, "dup3 {from} {to}"),
            Self::Fcntl { from, to } => write!(f, "fcntl {from} {to}"),
            Self::Close { fd } => write!(f, "close {fd}"),
            Self::CloseRange { low, high, mode } => write!(f, "close-range {low} {high} {mode}"),
            Self::Cloexec { fd, on: true } => write!(f, "cloexec {fd} on"),
            Self::Cloexec { fd, on: false } => write!(f, "cloexec {fd} off"),
            Self::Lock { fd } => write!(f, "lock {fd}"),
            Self::Fork { child } => write!(f, "fork {child}"),
            Self::Vfork { child } => write!(f, "vfork {child}"),
            Self::VforkExit => write!(f, "vfork-exit"),
            Self::Spawn => write!(f, "spawn"),
            Self::Share { child } => write!(f, "share {child}"),
            Self::Thread { child } => write!(f, "thread {child}"),
            Self::Unshare => write!(f, "unshare"),
            Self::Exec => write!(f, "exec"),
            Self::Exit => write!(f, "exit"),
            Self::ExitThread => write!(f, "exit-thread"),
            Self::Mailbox { at } => write!(f, "mailbox {at}"),
            Self::Send { fd, mailbox } => write!(f, "send {fd} {mailbox}"),
            Self::Receive { mailbox, at } => write!(f, "receive {mailbox} {at}"),
            Self::Discard { mailbox } => write!(f, "discard {mailbox}"),
            Self::Take { from, fd, at } => write!(f, "take {from} {fd} {at}"),
            Self::Ring { ring, at } => write!(f, "ring {ring} {at}"),
            Self::RingOpen { ring, via, dev, at } => write!(f, "ring-open {ring} {via} {dev} {at}"),
            Self::RingClose { ring, via, fd } => write!(f, "ring-close {ring} {via} {fd}"),
            Self::RingOpenDirect { ring, via, dev, slot } => write!(f, "ring-open-direct {ring} {via} {dev} {slot}"),
            Self::RingCloseDirect { ring, via, slot } => write!(f, "ring-close-direct {ring} {via} {slot}"),
            Self::RingRegister { via, slot, fd } => write!(f, "ring-register {via} {slot} {fd}"),
            Self::Map { area, fd, pages } => write!(f, "map {area} {fd} {pages}"),
            Self::Unmap { area } => write!(f, "unmap {area}"),
            Self::Punch { area } => write!(f, "punch {area}"),
        }
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("a number, not `{text}`"))
}

impl FromStr for Act {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.split_whitespace().collect::<Vec<_>>()[..] {
            ["open", dev, at] => Self::Open { dev: dev.parse()?, at: number(at)?, cloexec: false },
            ["open", dev, at, "cloexec"] => Self::Open { dev: dev.parse()?, at: number(at)?, cloexec: true },
            ["open-path", dev, at] => Self::OpenPath { dev: dev.parse()?, at: number(at)? },
            ["spin", dev, times] => Self::Spin { dev: dev.parse()?, times: number(times)? },
            ["dup2", from, to] => Self::Dup2 { from: number(from)?, to: number(to)? },
            ["dup3", from, to] => Self::Dup3 { from: number(from)?, to: number(to)? },
            ["fcntl", from, to] => Self::Fcntl { from: number(from)?, to: number(to)? },
            ["close", fd] => Self::Close { fd: number(fd)? },
            ["close-range", low, high, mode] => {
                let mode = match mode {
                    "close" => RangeMode::Close,
                    "unshare" => RangeMode::Unshare,
                    "cloexec" => RangeMode::Cloexec,
                    _ => return Err(format!("how to close a range is not `{mode}`")),
                };
                Self::CloseRange { low: number(low)?, high: number(high)?, mode }
            }
            ["cloexec", fd, "on"] => Self::Cloexec { fd: number(fd)?, on: true },
            ["cloexec", fd, "off"] => Self::Cloexec { fd: number(fd)?, on: false },
            ["lock", fd] => Self::Lock { fd: number(fd)? },
            ["fork", child] => Self::Fork { child: child.parse()? },
            ["vfork", child] => Self::Vfork { child: child.parse()? },
            ["vfork-exit"] => Self::VforkExit,
            ["spawn"] => Self::Spawn,
            ["share", child] => Self::Share { child: child.parse()? },
            ["thread", child] => Self::Thread { child: child.parse()? },
            ["unshare"] => Self::Unshare,
            ["exec"] => Self::Exec,
            ["exit"] => Self::Exit,
            ["exit-thread"] => Self::ExitThread,
            ["mailbox", at] => Self::Mailbox { at: number(at)? },
            ["send", fd, mailbox] => Self::Send { fd: number(fd)?, mailbox: number(mailbox)? },
            ["receive", mailbox, at] => Self::Receive { mailbox: number(mailbox)?, at: number(at)? },
            ["discard", mailbox] => Self::Discard { mailbox: number(mailbox)? },
            ["take", from, fd, at] => Self::Take { from: from.parse()?, fd: number(fd)?, at: number(at)? },
            ["ring", ring, at] => Self::Ring { ring: ring.parse()?, at: number(at)? },
            ["ring-open", ring, via, dev, at] => {
                Self::RingOpen { ring: ring.parse()?, via: number(via)?, dev: dev.parse()?, at: number(at)? }
            }
            ["ring-close", ring, via, fd] => {
                Self::RingClose { ring: ring.parse()?, via: number(via)?, fd: number(fd)? }
            }
            ["ring-open-direct", ring, via, dev, slot] => {
                Self::RingOpenDirect { ring: ring.parse()?, via: number(via)?, dev: dev.parse()?, slot: number(slot)? }
            }
            ["ring-close-direct", ring, via, slot] => {
                Self::RingCloseDirect { ring: ring.parse()?, via: number(via)?, slot: number(slot)? }
            }
            ["ring-register", via, slot, fd] => {
                Self::RingRegister { via: number(via)?, slot: number(slot)?, fd: number(fd)? }
            }
            ["map", area, fd, pages] => Self::Map { area: area.parse()?, fd: number(fd)?, pages: number(pages)? },
            ["unmap", area] => Self::Unmap { area: area.parse()? },
            ["punch", area] => Self::Punch { area: area.parse()? },
            _ => return Err(format!("what is `{text}`?")),
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Do(task, act) => write!(f, "{task} {act}"),
            Self::Kill(process) => write!(f, "kill {process}"),
        }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(' ') {
            Some(("kill", process)) => Ok(Self::Kill(process.parse()?)),
            Some((task, act)) => Ok(Self::Do(task.parse()?, act.parse()?)),
            None => Err(format!("what is `{text}`?")),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin(task) => write!(f, "begin {task}"),
            Self::Do(task, act) => write!(f, "{task} {act}"),
            Self::Kill(process) => write!(f, "kill {process}"),
            Self::Together(parts) => {
                writeln!(f, "together")?;
                parts.iter().try_for_each(|part| writeln!(f, "  {part}"))?;
                write!(f, "end")
            }
            Self::Resync => write!(f, "resync"),
            Self::Pause => write!(f, "pause"),
        }
    }
}

/// The text of a sequence, a line for each step.
pub fn write(steps: &[Step]) -> String {
    steps.iter().map(|step| format!("{step}\n")).collect::<Vec<_>>().concat()
}

/// Reads what [`write()`] wrote; empty lines and those that begin with `#` are for people.
pub fn read(text: &str) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let mut together: Option<Vec<Part>> = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        let at = |what: String| format!("line {}: {what}", number + 1);
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [] => {}
            [first, ..] if first.starts_with('#') => {}
            ["together"] if together.is_none() => together = Some(Vec::new()),
            ["end"] => {
                let parts = together.take().ok_or_else(|| at("nothing to end".to_owned()))?;
                steps.push(Step::Together(parts));
            }
            ["begin", task] if together.is_none() => steps.push(Step::Begin(task.parse().map_err(at)?)),
            ["resync"] if together.is_none() => steps.push(Step::Resync),
            ["pause"] if together.is_none() => steps.push(Step::Pause),
            _ => match (line.parse().map_err(at)?, &mut together) {
                (part, Some(parts)) => parts.push(part),
                (Part::Do(task, act), None) => steps.push(Step::Do(task, act)),
                (Part::Kill(process), None) => steps.push(Step::Kill(process)),
            },
        }
    }
    if together.is_some() { Err("`together` without `end`".to_owned()) } else { Ok(steps) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::generate::{Script, sequence};

    #[test]
    fn what_is_written_can_be_read() {
        for seed in 0..40 {
            let steps = sequence(seed, Script { devices: 3, rings: true, steps: 80 });
            assert_eq!(read(&write(&steps)).as_ref(), Ok(&steps), "seed {seed}");
        }
    }

    #[test]
    fn a_line_that_means_nothing_is_named() {
        let cases = [
            ("begin t0\nt0 opne d0 3\n", "line 2: what is `opne d0 3`?"),
            ("begin 0\n", "line 1: t and a number, not `0`"),
            ("t0 close x\n", "line 1: a number, not `x`"),
            ("together\nt0 exit\n", "`together` without `end`"),
            ("end\n", "line 1: nothing to end"),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text), Err(expected.to_owned()), "{text}");
        }
        assert_eq!(read("# for people\n\n  pause\n"), Ok(vec![Step::Pause]));
    }
}
