//! Waiting for something to happen to devices, without asking all the time: exits through pidfds, everything that the
//! tracer sees through the daemon's socket.
//!
//! Two sources that look fit are not. The tracer's ring: the kernel wakes all who poll it, but looks again whether there is
//! data before it lets them go, and then the daemon has often taken it (measured with 200 opens 10 ms apart: 199 wake-ups on
//! an idle machine, 6 to 11 on a busy one). So the daemon passes the word on. Inotify on the nodes tells of every close, but
//! a process that has used it takes 11 ms longer to exit (median of 40 on 6.18), while the kernel waits for a grace period.
//!
//! A wake-up is a reason to look, never a proof: what no event tells (with the set `gate`, closes; a daemon that hangs) must be
//! found by looking at times.

use std::{
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::event::{PollFd, PollFlags};

use crate::{
    api::{self, client},
    process::pidfd,
};

/// What ended a wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Woken {
    /// Positions of the processes that have exited, with all their threads.
    pub exited: Vec<usize>,
    /// Something was opened or closed, or a process of interest forked, called exec or is exiting.
    pub event: bool,
}

impl Woken {
    /// The time was up.
    pub fn is_late(&self) -> bool {
        self.exited.is_empty() && !self.event
    }
}

/// Sources of wake-ups. Those that cannot be had are left out.
#[derive(Debug)]
pub struct Watch {
    daemon: Option<UnixStream>,
}

impl Watch {
    /// On what the daemon of a run directory sees, if one runs.
    pub fn new(run: &Path) -> Self {
        let daemon = client::events(&api::path(run))
            .inspect_err(|error| tracing::debug!("no events from a daemon: {error}"))
            .ok();
        Self { daemon }
    }

    /// No source but the pidfds.
    pub const fn of_exits() -> Self {
        Self { daemon: None }
    }

    /// Whether a daemon passes on what it sees.
    pub const fn hears(&self) -> bool {
        self.daemon.is_some()
    }

    /// Blocks until a process has exited, something has happened, or until a boottime. Nothing that happens between two
    /// waits is missed.
    pub fn wait(&mut self, pidfds: &[BorrowedFd<'_>], until_ns: u64) -> io::Result<Woken> {
        let woken = {
            let daemon = self.daemon.as_ref().map(|stream| stream.as_fd());
            let all = pidfds.iter().copied().chain(daemon);
            let mut fds: Vec<PollFd<'_>> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            pidfd::poll_until(&mut fds, until_ns)?;
            let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let (exits, told) = fds.split_at(pidfds.len());
            let exited = exits.iter().enumerate().filter(|(_, fd)| ready(fd)).map(|(position, _)| position).collect();
            Woken { exited, event: told.iter().any(ready) }
        };
        if woken.event {
            self.drain();
        }
        Ok(woken)
    }

    /// What happened where does not matter: whoever waits looks again.
    fn drain(&mut self) {
        let mut buffer = [0; 4096];
        let ended = self.daemon.as_mut().is_some_and(|stream| {
            loop {
                match stream.read(&mut buffer) {
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
                }
            }
        });
        if ended {
            tracing::debug!("the daemon has hung up");
            self.daemon = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::OwnedFd, process::Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;
    use crate::clock::{NANOS, boottime_ns};

    /// Events of a daemon are tested beside its server.
    #[test]
    fn an_exit_wakes_and_is_named() {
        let mut watch = Watch::of_exits();
        assert!(!watch.hears());
        let mut children: Vec<_> = (0..3).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        let pidfds: Vec<OwnedFd> =
            children.iter().map(|child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap()).collect();
        let fds: Vec<BorrowedFd<'_>> = pidfds.iter().map(|fd| fd.as_fd()).collect();
        assert!(watch.wait(&fds, boottime_ns()).unwrap().is_late());
        children[1].kill().unwrap();
        let woken = watch.wait(&fds, boottime_ns() + 60 * NANOS).unwrap();
        assert_eq!(woken, Woken { exited: vec![1], event: false });
        for mut child in children {
            drop(child.kill());
            child.wait().unwrap();
        }
    }
}
