//! Opening: which ways make an open file, and which do not.
use super::{
    super::{
        sys::{self, O_CLOEXEC, O_PATH, O_RDONLY, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("open", open),
    ("open_cloexec", open_cloexec),
    ("open_path_only", open_path_only),
    ("open_path_only_reopened", open_path_only_reopened),
    ("open_procfd", open_procfd),
    ("open_without_driver", open_without_driver),
    ("open_unlinked_node", open_unlinked_node),
    ("open_kmsg", open_kmsg),
    ("access_is_not_open", access_is_not_open),
];

fn mine(fds: usize) -> Truth {
    Truth::files(fds).fds(pid(), fds)
}

fn open(s: &Stage) -> Result<(), Skip> {
    s.at("start", &Truth::none());
    let a = s.open(O_RDWR);
    s.at("open", &mine(1));
    let b = s.open(O_RDONLY);
    s.at("open_again", &mine(2));
    sys::close(a);
    s.at("close_first", &mine(1));
    sys::close(b);
    s.at("close_second", &Truth::none());
    Ok(())
}

fn open_cloexec(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR | O_CLOEXEC);
    s.at("open", &mine(1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

fn open_path_only(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_PATH);
    s.at("open", &Truth::none());
    let b = sys::dup(a);
    s.at("dup", &Truth::none());
    sys::close(a);
    sys::close(b);
    s.at("close", &Truth::none());
    Ok(())
}

fn open_path_only_reopened(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_PATH);
    let b = sys::open(format!("/proc/self/fd/{a}"), O_RDWR);
    s.at("reopen", &mine(1));
    sys::close(b);
    s.at("close", &Truth::none());
    sys::close(a);
    Ok(())
}

fn open_procfd(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let b = sys::open(format!("/proc/self/fd/{a}"), O_RDWR);
    s.at("reopen", &mine(2));
    sys::close(a);
    s.at("close_first", &mine(1));
    sys::close(b);
    s.at("close_second", &Truth::none());
    Ok(())
}

/// A node of a number that no driver has, and a terminal that does not exist: both opens fail.
fn open_without_driver(s: &Stage) -> Result<(), Skip> {
    let place = tempfile::tempdir()?;
    let node = place.path().join("nobody");
    sys::mknod(&node, libc::makedev(240, 7))?;
    let failed = sys::try_open(&node, O_RDWR);
    assert_eq!(failed.err().and_then(|error| error.raw_os_error()), Some(libc::ENXIO), "240:7 has no driver");
    s.at("open_no_driver", &Truth::none());
    if let Ok(fd) = sys::try_open("/dev/tty", O_RDWR) {
        sys::close(fd);
    }
    s.at("open_no_terminal", &Truth::none());
    Ok(())
}

fn open_unlinked_node(s: &Stage) -> Result<(), Skip> {
    let place = tempfile::tempdir()?;
    let node = place.path().join("node");
    sys::mknod(&node, sys::device_number(&s.dev)?)?;
    let a = sys::open(&node, O_RDWR);
    s.at("open_other_node", &mine(1));
    std::fs::remove_file(&node)?;
    s.at("unlink", &mine(1));
    let b = sys::dup(a);
    s.at("dup", &Truth::files(1).fds(pid(), 2));
    sys::close(a);
    sys::close(b);
    s.at("close", &Truth::none());
    Ok(())
}

/// A device whose release does real work; spoken of as 1:11.
fn open_kmsg(s: &Stage) -> Result<(), Skip> {
    let a = sys::try_open("/dev/kmsg", O_RDONLY).map_err(|error| Skip(format!("/dev/kmsg: {error}")))?;
    let at = |step: &str, truth: &Truth| s.at_all(step, [("1:11", truth)]);
    at("open", &mine(1));
    let b = sys::dup(a);
    at("dup", &Truth::files(1).fds(pid(), 2));
    let child = sys::fork();
    if child == 0 {
        sys::exit(0);
    }
    sys::reap(child);
    at("fork_exit", &Truth::files(1).fds(pid(), 2));
    sys::close(a);
    at("close_first", &mine(1));
    sys::close(b);
    at("close_last", &Truth::none());
    let child = super::super::child::Child::fork(|cue| {
        sys::open("/dev/kmsg", O_RDONLY);
        cue.pause();
    });
    child.done();
    at("child_open", &Truth::files(1).fds(child.pid, 1));
    child.finish();
    at("child_exit", &Truth::none());
    Ok(())
}

fn access_is_not_open(s: &Stage) -> Result<(), Skip> {
    let path = sys::cstr(&s.dev);
    // SAFETY: the path is NUL-terminated and outlives the call.
    unsafe { libc::access(path.as_ptr(), libc::R_OK | libc::W_OK) };
    s.at("access", &Truth::none());
    let number = sys::device_number(&s.dev)?;
    s.at("stat", &Truth::none());
    let place = tempfile::tempdir()?;
    sys::mknod(&place.path().join("node"), number)?;
    s.at("mknod", &Truth::none());
    Ok(())
}
