//! What survives an exec.
use super::{
    super::{
        child::Child,
        sys::{self, O_CLOEXEC, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("exec_cloexec", exec_cloexec),
    ("exec_inherit", exec_inherit),
    ("exec_fails", exec_fails),
    ("exec_by_thread", exec_by_thread),
    ("exec_shared_table", exec_shared_table),
];

fn exec(s: &Stage, flags: i32, after: usize) {
    let a = s.open(flags);
    let child = Child::fork(|cue| {
        cue.pause();
        cue.exec_pause();
    });
    child.done();
    s.at("fork", &Truth::files(1).fds(pid(), 1).fds(child.pid, 1));
    child.step();
    s.at("child_exec", &Truth::files(1).fds(pid(), 1).fds(child.pid, after));
    sys::close(a);
    s.at("parent_close", &Truth::files(after).fds(child.pid, after));
    child.finish();
    s.at("child_exit", &Truth::none());
}

fn exec_cloexec(s: &Stage) -> Result<(), Skip> {
    exec(s, O_RDWR | O_CLOEXEC, 0);
    Ok(())
}

fn exec_inherit(s: &Stage) -> Result<(), Skip> {
    exec(s, O_RDWR, 1);
    Ok(())
}

fn exec_fails(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR | O_CLOEXEC);
    sys::try_exec(&sys::cstr("/nonexistent/program"), &[sys::cstr("x")]);
    s.at("exec_fails", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

/// A thread that is not the leader executes: it takes over the leader's pid.
fn exec_by_thread(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        s.open(O_RDWR | O_CLOEXEC);
        s.open(O_RDWR);
        std::thread::spawn(move || {
            cue.pause();
            cue.exec_pause();
        });
        sys::live();
    });
    child.done();
    s.at("child_open_two", &Truth::files(2).fds(child.pid, 2));
    child.step();
    s.at("thread_exec", &Truth::files(1).fds(child.pid, 1));
    child.finish();
    s.at("exit", &Truth::none());
    Ok(())
}

/// The table is shared with the parent: exec makes a copy first, and closes only in the copy.
fn exec_shared_table(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR | O_CLOEXEC), s.open(O_RDWR));
    let child = Child::fork_sharing_files(|cue| {
        cue.pause();
        cue.exec_pause();
    });
    child.done();
    s.at("share", &Truth::files(2).fds(pid(), 2).fds(child.pid, 2));
    child.step();
    s.at("child_exec", &Truth::files(2).fds(pid(), 2).fds(child.pid, 1));
    child.finish();
    s.at("child_exit", &Truth::files(2).fds(pid(), 2));
    sys::close(a);
    sys::close(b);
    s.at("close_both", &Truth::none());
    Ok(())
}
