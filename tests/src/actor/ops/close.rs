//! `close_range` in all its forms.
use super::{
    super::{
        child::Child,
        sys::{self, CLOSE_RANGE_CLOEXEC, CLOSE_RANGE_UNSHARE, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("close_range", close_range),
    ("close_range_unshare", close_range_unshare),
    ("close_range_unshare_tail", close_range_unshare_tail),
    ("close_range_cloexec", close_range_cloexec),
];

fn mine(fds: usize) -> Truth {
    Truth::files(fds).fds(pid(), fds)
}

fn close_range(s: &Stage) -> Result<(), Skip> {
    let fds = [0; 3].map(|_| s.open(O_RDWR));
    s.at("open_three", &mine(3));
    sys::close_range(fds[0], fds[1] as u32, 0)?;
    s.at("close_two", &mine(1));
    sys::close_range(fds[0], u32::MAX, 0)?;
    s.at("close_rest", &Truth::none());
    Ok(())
}

/// A thread leaves the shared table while closing a part; the process then has two tables.
fn unshare(s: &Stage, tail: bool) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    let last = if tail { u32::MAX } else { b as u32 };
    // The tail takes every later descriptor from the thread, so it waits on a lock and not on a pipe.
    let gate = std::sync::Mutex::new(());
    let result = std::thread::scope(|scope| {
        let closed = gate.lock().expect("gate");
        let (report, answer) = std::sync::mpsc::channel();
        let gate = &gate;
        let thread = scope.spawn(move || {
            report.send(sys::close_range(b, last, CLOSE_RANGE_UNSHARE)).expect("the main thread listens");
            drop(gate.lock());
        });
        let result = answer.recv().expect("the thread answers");
        if result.is_ok() {
            // The thread's copy keeps only what is below `b`; the main table is as it was.
            s.at("thread_close_range", &Truth::files(2).fds(pid(), 3));
        }
        drop(closed);
        thread.join().expect("the thread ends");
        result
    });
    result?;
    s.at("thread_exit", &mine(2));
    sys::close(a);
    sys::close(b);
    s.at("close_both", &Truth::none());
    Ok(())
}

fn close_range_unshare(s: &Stage) -> Result<(), Skip> {
    unshare(s, false)
}

fn close_range_unshare_tail(s: &Stage) -> Result<(), Skip> {
    unshare(s, true)
}

fn close_range_cloexec(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let child = Child::fork(|cue| {
        cue.pause();
        if sys::close_range(a, a as u32, CLOSE_RANGE_CLOEXEC).is_err() {
            cue.send(b'n');
            sys::exit(0);
        }
        cue.pause();
        cue.exec_pause();
    });
    child.done();
    let both = Truth::files(1).fds(pid(), 1).fds(child.pid, 1);
    s.at("fork", &both);
    child.go();
    if child.done() == b'n' {
        child.reap();
        return Err(Skip("close_range has no CLOEXEC flag".into()));
    }
    s.at("child_close_range", &both);
    child.step();
    s.at("child_exec", &mine(1));
    child.finish();
    s.at("child_exit", &mine(1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}
