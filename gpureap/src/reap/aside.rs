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
        let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
        let mut fd = libc::open(file.as_ptr(), flags, 0o640);
        if fd < 0 && *libc::__errno_location() == libc::ENOENT {
            for dir in dirs.iter().rev() {
                libc::mkdir(dir.as_ptr(), 0o755);
            }
            fd = libc::open(file.as_ptr(), flags, 0o640);
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
