//! Waiting for something to happen to devices, without asking all the time: exits through pidfds, closes through inotify on
//! the nodes, everything that the tracer sees through the daemon's socket.
//!
//! The tracer's ring itself is no source of wake-ups for a second reader: the kernel wakes all who poll it, but looks
//! again whether there is data before it lets them go, and then the daemon has often taken it (measured with 200 opens 10 ms
//! apart: 199 wake-ups on an idle machine, 6 to 11 on a busy one). So the daemon passes the word on.
//!
//! A wake-up is a reason to look, never a proof: what no event tells (a node in a container's own /dev, a daemon that hangs)
//! must be found by looking at times.

use std::{
    io::{self, Read as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify,
    io::Errno,
};

use crate::{
    api::{self, client},
    clock::boottime_ns,
};

const NANOS: u64 = 1_000_000_000;

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
    nodes: Option<OwnedFd>,
    daemon: Option<UnixStream>,
}

impl Watch {
    /// On these nodes, and on what the daemon of a run directory sees, if one runs.
    pub fn new(nodes: impl IntoIterator<Item = impl AsRef<Path>>, run: &Path) -> Self {
        let daemon = client::events(&api::path(run))
            .inspect_err(|error| tracing::debug!("no events from a daemon: {error}"))
            .ok();
        Self { nodes: watch_nodes(nodes), daemon }
    }

    /// No source but the pidfds.
    pub const fn of_exits() -> Self {
        Self { nodes: None, daemon: None }
    }

    /// Whether closes are told of, as far as the usual nodes go.
    pub const fn hears_closes(&self) -> bool {
        self.nodes.is_some()
    }

    /// Blocks until a process has exited, something has happened, or until a boottime. Nothing that happens between two
    /// waits is missed.
    pub fn wait(&mut self, pidfds: &[BorrowedFd<'_>], until_ns: u64) -> io::Result<Woken> {
        let (woken, told) = {
            let nodes = self.nodes.as_ref().map(|fd| fd.as_fd());
            let daemon = self.daemon.as_ref().map(|stream| stream.as_fd());
            let extra = [nodes, daemon];
            let mut fds: Vec<PollFd<'_>> = pidfds
                .iter()
                .chain(extra.iter().flatten())
                .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
                .collect();
            loop {
                let left = until_ns.saturating_sub(boottime_ns());
                let timeout = Timespec { tv_sec: (left / NANOS) as i64, tv_nsec: (left % NANOS) as i64 };
                match poll(&mut fds, Some(&timeout)) {
                    Ok(_) => break,
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let (exits, told) = fds.split_at(pidfds.len());
            let exited = exits.iter().enumerate().filter(|(_, fd)| ready(fd)).map(|(position, _)| position).collect();
            let told = told.iter().any(ready);
            (Woken { exited, event: told }, told)
        };
        if told {
            self.drain();
        }
        Ok(woken)
    }

    fn drain(&mut self) {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        if let Some(nodes) = &self.nodes {
            // What happened where does not matter: whoever waits looks again.
            while rustix::io::read(nodes, &mut buffer).is_ok_and(|(some, _)| !some.is_empty()) {}
        }
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

/// Closes of files that were opened through these nodes, or through links and bind mounts of them.
fn watch_nodes(nodes: impl IntoIterator<Item = impl AsRef<Path>>) -> Option<OwnedFd> {
    let all = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).ok()?;
    let events = inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::CLOSE_NOWRITE;
    let mut watched = false;
    for node in nodes {
        let node = node.as_ref();
        match inotify::add_watch(&all, node, events) {
            Ok(_) => watched = true,
            Err(error) => tracing::debug!("{}: closes are not told of: {error}", node.display()),
        }
    }
    watched.then_some(all)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, process::Command, thread, time::Duration};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn soon() -> u64 {
        boottime_ns() + 60 * NANOS
    }

    #[test]
    fn a_close_of_a_device_wakes() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new([Path::new("/dev/random"), Path::new("/nonexistent")], dir.path());
        assert!(watch.hears_closes());
        let file = File::open("/dev/random").unwrap();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            drop(file);
        });
        let woken = watch.wait(&[], soon()).unwrap();
        assert!(woken.event && woken.exited.is_empty() && !woken.is_late());
        // Other processes may use the device too, but not all the time.
        let quiet = (0..100).any(|_| watch.wait(&[], boottime_ns() + NANOS / 100).unwrap().is_late());
        assert!(quiet, "a wake-up is taken once");
    }

    #[test]
    fn what_happened_before_the_wait_is_not_missed() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new([Path::new("/dev/random")], dir.path());
        drop(File::open("/dev/random").unwrap());
        assert!(watch.wait(&[], soon()).unwrap().event);
    }

    #[test]
    fn an_exit_wakes_and_is_named() {
        let mut watch = Watch::of_exits();
        assert!(!watch.hears_closes());
        let mut children: Vec<_> = (0..3).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        let pidfds: Vec<OwnedFd> =
            children.iter().map(|child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap()).collect();
        let fds: Vec<BorrowedFd<'_>> = pidfds.iter().map(|fd| fd.as_fd()).collect();
        assert!(watch.wait(&fds, boottime_ns()).unwrap().is_late());
        children[1].kill().unwrap();
        assert_eq!(watch.wait(&fds, soon()).unwrap(), Woken { exited: vec![1], event: false });
        for mut child in children {
            drop(child.kill());
            child.wait().unwrap();
        }
    }
}
