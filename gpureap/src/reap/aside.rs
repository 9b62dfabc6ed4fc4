//! Writing to a disk that may hang. Who waits for one cannot be killed, and a thread that does keeps its process from
//! ending; so it is a process of its own that waits, and is left behind.

use std::{ffi::CString, io, os::unix::ffi::OsStrExt as _, path::Path, time::Duration};

use rustix::{
    event::{PollFd, PollFlags},
    process::{Pid, Signal, WaitOptions},
};

use crate::{
    clock::{boottime_ns, nanos},
    process::pidfd,
};

/// Appends to a file, which is made with its directory where it is missing. It is on the disk when this returns.
pub(super) fn append(path: &Path, text: &[u8], patience: Duration) -> io::Result<()> {
    let name = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    let file = name(path)?;
    let dirs = path.ancestors().skip(1).map(name).collect::<io::Result<Vec<_>>>()?;
    // SAFETY: the child makes system calls and nothing else, as one of a process with several threads has to.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        // SAFETY: this is the child.
        0 => unsafe { child(&file, &dirs, text) },
        child => child,
    };
    let pid = Pid::from_raw(child).ok_or_else(|| io::Error::other("a process without a number"))?;
    let ended = match pidfd::open(child.cast_unsigned())? {
        Some(pidfd) => {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            pidfd::poll_until(&mut fds, boottime_ns().saturating_add(nanos(patience)))?;
            !fds[0].revents().is_empty()
        }
        None => true,
    };
    if !ended {
        // It may have to wait for the disk even for that.
        rustix::process::kill_process(pid, Signal::KILL).ok();
        return Err(io::Error::other(format!("the disk did not answer within {} s", patience.as_secs())));
    }
    let status = rustix::process::waitpid(Some(pid), WaitOptions::empty())?;
    match status.and_then(|(_, status)| status.exit_status()) {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(error)),
        None => Err(io::Error::other("who was to write it was killed")),
    }
}

/// Whether what is in a directory, or a link to one, may be somebody else's (`trust`, which may not be used after a fork).
unsafe fn others_may_change(dir: &CString) -> bool {
    // SAFETY: a structure of numbers, which the call fills, for a string that lives.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::lstat(dir.as_ptr(), &raw mut stat) < 0 {
            return false;
        }
        let is_open = stat.st_mode & 0o022 != 0 && stat.st_mode & libc::S_ISVTX == 0;
        !is_ours(&stat) || is_open && stat.st_mode & libc::S_IFMT == libc::S_IFDIR
    }
}

fn is_ours(stat: &libc::stat) -> bool {
    // SAFETY: it only asks for a number.
    stat.st_uid == 0 || stat.st_uid == unsafe { libc::geteuid() }
}

/// Ends with the number of the error.
///
/// # Safety
///
/// For the child of a fork: it gives up all descriptors, and does not come back.
unsafe fn child(file: &CString, dirs: &[CString], text: &[u8]) -> ! {
    // SAFETY: only calls that may be made after a fork, with strings and bytes that live.
    unsafe {
        // Nobody waits for the end of a pipe that is only open here, and nothing is locked by what hangs.
        libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0);
        let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        for dir in dirs.iter().rev() {
            if libc::mkdir(dir.as_ptr(), 0o755) < 0 && others_may_change(dir) {
                libc::_exit(libc::EPERM);
            }
        }
        let fd = libc::open(file.as_ptr(), flags, 0o640);
        let mut stat: libc::stat = std::mem::zeroed();
        if fd >= 0 && libc::fstat(fd, &raw mut stat) == 0 && !is_ours(&stat) {
            libc::_exit(libc::EPERM);
        }
        let mut rest = text;
        while fd >= 0 && !rest.is_empty() {
            let count = libc::write(fd, rest.as_ptr().cast(), rest.len());
            if count < 0 {
                libc::_exit(*libc::__errno_location());
            }
            rest = &rest[count.cast_unsigned().min(rest.len())..];
        }
        if fd < 0 || libc::fdatasync(fd) < 0 {
            libc::_exit(*libc::__errno_location());
        }
        libc::_exit(0)
    }
}
