//! A process that is waited for.

use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::{
    model::{Holder, Slot},
    process::stat::Stat,
    reap::{plan::Row, plan::same_process, report::Identity},
};

#[derive(Debug)]
pub(super) struct Held {
    pub(super) row: Row,
    /// As of the time when it was first seen: afterwards there is nobody left to ask.
    pub(super) identity: Identity,
    /// Tells of its end, and the end of what it held with it. `None` where there was no descriptor left for it.
    pub(super) pidfd: Option<OwnedFd>,
}

impl Held {
    /// `None` if it is gone already.
    pub(super) fn open(row: Row, identity: Identity, proc: &Path) -> Option<Self> {
        let pid = i32::try_from(row.key.tgid).ok().and_then(Pid::from_raw)?;
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Some(pidfd),
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return None,
            Err(error) => {
                tracing::debug!("pidfd of {}: {error}", row.key.tgid);
                None
            }
        };
        // Of a process that /proc hides the number has to do: its end only means that one looks again.
        let stat = fs::read(proc.join(row.key.tgid.to_string()).join("stat")).ok().and_then(|stat| Stat::parse(&stat));
        if stat.is_some_and(|stat| !stat.started_at(row.key.start_ns)) {
            return None;
        }
        Some(Self { row, identity, pidfd })
    }

    /// Whether it still has one of the devices, by a look at it.
    pub(super) fn holds(&self, seen: Option<&Holder>) -> bool {
        seen.filter(|holder| same_process(holder.key, self.row.key)).is_some_and(|holder| {
            let held = holder.usage.iter().filter(|(_, usage)| usage.fds + usage.maps > 0).map(|(slot, _)| *slot);
            !held.collect::<BTreeSet<Slot>>().is_disjoint(&self.row.slots)
        })
    }

    /// All its threads are on their way out: what it held is being released, and only its end tells when that is done.
    pub(super) fn is_exiting(&self, proc: &Path) -> bool {
        let Some(pidfd) = &self.pidfd else { return false };
        let mut fds = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
        let ended = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0);
        let tasks = fs::read_dir(proc.join(self.row.key.tgid.to_string()).join("task"));
        let Some(tasks) = tasks.ok().filter(|_| !ended) else { return false };
        let mut stats = tasks.flatten().filter_map(|task| Stat::parse(&fs::read(task.path().join("stat")).ok()?));
        stats.all(|stat| stat.exiting)
    }
}
