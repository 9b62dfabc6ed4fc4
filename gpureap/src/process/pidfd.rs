//! Descriptors that stand for a process: they stay with it, where a number may be given to another one.

use std::{io, os::fd::OwnedFd};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::clock::{NANOS, boottime_ns};

/// `None` where no process has that number.
pub fn open(tgid: u32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(tgid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        // EINVAL, since 6.16 ENOENT: the number now names a thread that leads no process, so the process is gone.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether all its threads have: at most a zombie without files is left, which waits for its parent.
pub fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll_until(&mut fds, 0)?;
    Ok(!fds[0].revents().is_empty())
}

/// Until one is ready, or that boottime.
pub fn poll_until(fds: &mut [PollFd<'_>], until_ns: u64) -> io::Result<()> {
    loop {
        let left = until_ns.saturating_sub(boottime_ns());
        let timeout = Timespec { tv_sec: (left / NANOS) as i64, tv_nsec: (left % NANOS) as i64 };
        match poll(fds, Some(&timeout)) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
