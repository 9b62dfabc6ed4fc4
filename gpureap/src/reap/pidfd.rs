//! The real [`Signaller`]: a pidfd for each process, so that a signal can only reach the process that was looked at.

use std::{
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
    thread,
};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    process,
};

use super::{
    signaller::{Delivery, Handle, Opened, Signal, Signaller},
    units,
};
use crate::{
    clock::boottime_ns,
    limits,
    model::ProcKey,
    process::{
        cgroup, pidfd,
        stat::{Stat, all_exiting},
    },
};

/// Descriptors that are left for everything else: looks, the proof, the record.
const RESERVED: u64 = 32;

#[derive(Debug)]
pub struct Pidfds {
    /// With their pids.
    open: Vec<(OwnedFd, u32)>,
    /// The limit of open files.
    limit: u64,
}

impl Pidfds {
    /// A reap may need a descriptor for each of some thousand holders.
    pub fn new() -> Self {
        Self { open: Vec::new(), limit: limits::open_files() }
    }

    /// The kernel gives the lowest number that is free, so a high one says how many are in use.
    fn has_room(&self, last: &OwnedFd) -> bool {
        (last.as_raw_fd() as u64).saturating_add(RESERVED) < self.limit
    }
}

impl Default for Pidfds {
    fn default() -> Self {
        Self::new()
    }
}

impl Signaller for Pidfds {
    fn now_ns(&self) -> u64 {
        boottime_ns()
    }

    fn open(&mut self, key: ProcKey) -> io::Result<Opened> {
        let Some(pidfd) = pidfd::open(key.tgid)? else { return Ok(Opened::Gone) };
        if !self.has_room(&pidfd) {
            return Err(io::Error::other(limits::too_few()));
        }
        // The pidfd pins the identity; what stat says after the open is said of this process or of one after its death.
        let stat = fs::read(format!("/proc/{}/stat", key.tgid));
        if pidfd::has_ended(&pidfd)? {
            return Ok(Opened::Gone);
        }
        let stat = Stat::parse(&stat?).ok_or_else(|| io::Error::other("its stat line has no start time"))?;
        if !stat.started_at(key.start_ns) {
            return Ok(Opened::Reused);
        }
        self.open.push((pidfd, key.tgid));
        Ok(Opened::Here(Handle(self.open.len() - 1)))
    }

    fn send(&mut self, handle: Handle, signal: Signal) -> io::Result<Delivery> {
        let signal = match signal {
            Signal::Term => process::Signal::TERM,
            Signal::Kill => process::Signal::KILL,
        };
        match process::pidfd_send_signal(self.open[handle.0].0.as_fd(), signal) {
            Ok(()) => Ok(Delivery::Delivered),
            Err(Errno::SRCH) => Ok(Delivery::Gone),
            Err(Errno::PERM) => Ok(Delivery::NotPermitted),
            Err(error) => Err(error.into()),
        }
    }

    fn kill_cgroup(&mut self, dir: &Path) -> io::Result<()> {
        cgroup::kill(dir)
    }

    fn stop_unit(&mut self, unit: &str) -> Result<(), String> {
        units::stop(unit)
    }

    fn release_memory(&mut self, handle: Handle) {
        let Ok(pidfd) = self.open[handle.0].0.try_clone() else { return };
        thread::spawn(move || {
            // SAFETY: process_mrelease(2), since 5.15, takes a descriptor and no flags; it refuses a process that is not
            // dying.
            let answer = unsafe { libc::syscall(libc::SYS_process_mrelease, pidfd.as_raw_fd(), 0) };
            tracing::debug!(answer, "process_mrelease");
        });
    }

    fn wait(&mut self, handles: &[Handle], until_ns: u64) -> io::Result<Vec<Handle>> {
        let mut fds: Vec<PollFd<'_>> =
            handles.iter().map(|handle| PollFd::new(&self.open[handle.0].0, PollFlags::IN)).collect();
        pidfd::poll_until(&mut fds, until_ns)?;
        Ok(handles.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|(handle, _)| *handle).collect())
    }

    fn exiting(&self, handle: Handle) -> bool {
        // The pid stays this process's until it has been collected, and then the directory is gone.
        all_exiting(&Path::new("/proc").join(self.open[handle.0].1.to_string())).unwrap_or(true)
    }

    fn exit_status(&self, handle: Handle) -> Option<u32> {
        exit_info(&self.open[handle.0].0)
    }
}

/// `struct pidfd_info` in its first version, include/uapi/linux/pidfd.h.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    ids: [u32; 8],
    exit_code: i32,
}

const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: libc::c_ulong = 0xC040_FF0B;
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// The wait status, since 6.15 and once the parent has collected the zombie.
fn exit_info(pidfd: &OwnedFd) -> Option<u32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the number encodes the size of this structure, which lives until the call returns; kernels without the
    // request refuse it.
    let answer = unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
    (answer == 0 && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code as u32)
}
