//! Descriptors that reach a table from another process.
use super::{
    super::{
        child::Child,
        pass,
        sys::{self, O_CLOEXEC, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("scm_within", scm_within),
    ("scm_dropped", scm_dropped),
    ("scm_to_child", scm_to_child),
    ("pidfd_getfd", pidfd_getfd),
    ("seccomp_addfd", seccomp_addfd),
];

fn mine(fds: usize) -> Truth {
    Truth::files(1).fds(pid(), fds)
}

fn scm_within(s: &Stage) -> Result<(), Skip> {
    let (near, far) = sys::socketpair(libc::SOCK_STREAM);
    let a = s.open(O_RDWR);
    pass::send(near, a, 0)?;
    s.at("send", &mine(1));
    sys::close(a);
    s.at("close_original", &Truth::files(1).in_flight(1));
    let (b, _) = pass::receive(far, true).ok_or("nothing received")?;
    s.at("receive", &mine(1));
    sys::close(b);
    s.at("close_received", &Truth::none());
    sys::close(near);
    sys::close(far);
    Ok(())
}

fn scm_dropped(s: &Stage) -> Result<(), Skip> {
    let (near, far) = sys::socketpair(libc::SOCK_STREAM);
    let a = s.open(O_RDWR);
    pass::send(near, a, 0)?;
    sys::close(a);
    s.at("in_flight", &Truth::files(1).in_flight(1));
    sys::close(near);
    s.at("close_sender", &Truth::files(1).in_flight(1));
    sys::close(far);
    s.at("close_receiver", &Truth::none());
    Ok(())
}

fn scm_to_child(s: &Stage) -> Result<(), Skip> {
    let (near, far) = sys::socketpair(libc::SOCK_STREAM);
    let a = s.open(O_RDWR | O_CLOEXEC);
    let child = Child::fork(|cue| {
        sys::close(a);
        cue.pause();
        pass::receive(far, true).expect("a descriptor");
        cue.pause();
    });
    child.done();
    pass::send(near, a, 0)?;
    s.at("send", &mine(1));
    child.step();
    s.at("child_receive", &Truth::files(1).fds(pid(), 1).fds(child.pid, 1));
    sys::close(a);
    s.at("parent_close", &Truth::files(1).fds(child.pid, 1));
    child.finish();
    s.at("child_exit", &Truth::none());
    sys::close(near);
    sys::close(far);
    Ok(())
}

fn pidfd_getfd(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        cue.send(s.open(O_RDWR) as u8);
        cue.wait();
    });
    let theirs = i32::from(child.done());
    s.at("child_open", &Truth::files(1).fds(child.pid, 1));
    let handle = sys::pidfd_open(child.pid)?;
    let a = sys::pidfd_getfd(handle, theirs)?;
    s.at("pidfd_getfd", &Truth::files(1).fds(child.pid, 1).fds(pid(), 1));
    child.finish();
    s.at("child_exit", &mine(1));
    sys::close(a);
    sys::close(handle);
    s.at("close", &Truth::none());
    Ok(())
}

fn seccomp_addfd(s: &Stage) -> Result<(), Skip> {
    let (near, far) = sys::socketpair(libc::SOCK_STREAM);
    let child = Child::fork(|cue| {
        let Ok(listener) = pass::listen_getppid() else {
            cue.send(b'n');
            return;
        };
        pass::send(far, listener, 0).expect("send the listener");
        sys::close(listener);
        cue.pause();
        pass::call_getppid();
        cue.pause();
        pass::call_getppid();
        cue.pause();
    });
    if child.done() == b'n' {
        child.reap();
        return Err(Skip("no seccomp notifications".into()));
    }
    let (listener, _) = pass::receive(near, true).ok_or("no listener")?;
    let (a, b) = (s.open(O_RDWR | O_CLOEXEC), s.open(O_RDWR | O_CLOEXEC));
    s.at("open_two", &Truth::files(2).fds(pid(), 2));
    child.go();
    let theirs = pass::add_fd(listener, a, None)?;
    child.done();
    s.at("addfd", &Truth::files(2).fds(pid(), 2).fds(child.pid, 1));
    child.go();
    pass::add_fd(listener, b, Some(theirs))?;
    child.done();
    s.at("addfd_over", &Truth::files(2).fds(pid(), 2).fds(child.pid, 1));
    sys::close(b);
    s.at("close_second", &Truth::files(2).fds(pid(), 1).fds(child.pid, 1));
    child.finish();
    s.at("child_exit", &mine(1));
    for fd in [a, listener, near, far] {
        sys::close(fd);
    }
    s.at("close", &Truth::none());
    Ok(())
}
