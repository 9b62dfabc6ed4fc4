//! Descriptor tables that are shared, and threads that have their own.
use std::sync::mpsc;

use super::{
    super::{
        child::Child,
        sys::{self, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("thread_opens", thread_opens),
    ("thread_closes", thread_closes),
    ("thread_own_table", thread_own_table),
    ("thread_outlives_leader", thread_outlives_leader),
    ("shared_table", shared_table),
    ("shared_table_last_exit", shared_table_last_exit),
];

/// A thread that takes one step at a time.
struct Worker {
    go: mpsc::Sender<()>,
    done: mpsc::Receiver<()>,
    thread: std::thread::JoinHandle<()>,
}

impl Worker {
    fn start(steps: Vec<Box<dyn FnOnce() + Send>>) -> Self {
        let (go, wait) = mpsc::channel();
        let (say, done) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            for step in steps {
                wait.recv().expect("the main thread lives");
                step();
                say.send(()).expect("the main thread listens");
            }
            wait.recv().expect("the main thread lives");
        });
        Self { go, done, thread }
    }

    fn step(&self) {
        self.go.send(()).expect("the thread waits");
        self.done.recv().expect("the thread answers");
    }

    fn finish(self) {
        self.go.send(()).expect("the thread waits");
        self.thread.join().expect("the thread ends");
    }
}

fn mine(files: usize, fds: usize) -> Truth {
    Truth::files(files).fds(pid(), fds)
}

fn thread_opens(s: &Stage) -> Result<(), Skip> {
    let dev = s.dev.clone();
    let (tell, told) = mpsc::channel();
    let worker = Worker::start(vec![Box::new(move || tell.send(sys::open(&dev, O_RDWR)).expect("heard"))]);
    worker.step();
    let a = told.recv()?;
    s.at("thread_open", &mine(1, 1));
    worker.finish();
    s.at("thread_exit", &mine(1, 1));
    sys::close(a);
    s.at("main_close", &Truth::none());
    Ok(())
}

fn thread_closes(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        let (a, _) = (s.open(O_RDWR), s.open(O_RDWR));
        let worker = Worker::start(vec![Box::new(move || sys::close(a))]);
        cue.pause();
        worker.step();
        cue.pause();
        sys::exit(0);
    });
    child.done();
    s.at("thread_create", &Truth::files(2).fds(child.pid, 2));
    child.step();
    s.at("thread_close", &Truth::files(1).fds(child.pid, 1));
    child.finish();
    s.at("exit_group", &Truth::none());
    Ok(())
}

fn thread_own_table(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    let dev = s.dev.clone();
    let worker = Worker::start(vec![
        Box::new(|| sys::unshare(libc::CLONE_FILES).expect("unshare")),
        Box::new(move || sys::close(a)),
        Box::new(move || {
            sys::open(dev, O_RDWR);
        }),
    ]);
    worker.step();
    s.at("thread_unshare", &mine(2, 4));
    worker.step();
    s.at("thread_close", &mine(2, 3));
    worker.step();
    s.at("thread_open", &mine(3, 4));
    sys::close(a);
    sys::close(b);
    s.at("main_close", &mine(2, 2));
    worker.finish();
    s.at("thread_exit", &Truth::none());
    Ok(())
}

/// The main thread has ended: /proc/PID/fd is empty and the state is Z, but the table lives.
fn thread_outlives_leader(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        s.open(O_RDWR);
        std::thread::spawn(move || {
            cue.pause();
            sys::sleep(20);
            cue.pause();
            sys::exit(0);
        });
        cue.wait();
        sys::exit_thread();
    });
    child.done();
    s.at("thread_create", &Truth::files(1).fds(child.pid, 1));
    child.go();
    child.go();
    child.done();
    s.at("leader_exit", &Truth::files(1).fds(child.pid, 1));
    child.finish();
    s.at("exit_group", &Truth::none());
    Ok(())
}

fn shared_table(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let child = Child::fork_sharing_files(|cue| {
        cue.pause();
        let b = s.open(O_RDWR);
        cue.send(b as u8);
        cue.wait();
    });
    child.done();
    s.at("share", &Truth::files(1).fds(pid(), 1).fds(child.pid, 1));
    child.go();
    let b = i32::from(child.done());
    s.at("child_open", &Truth::files(2).fds(pid(), 2).fds(child.pid, 2));
    child.finish();
    s.at("child_exit", &mine(2, 2));
    sys::close(a);
    sys::close(b);
    s.at("parent_close", &Truth::none());
    Ok(())
}

/// The process that made the table exits first; the one that shares it keeps it.
fn shared_table_last_exit(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let (pid_in, pid_out) = sys::pipe();
    let (end_in, end_out) = sys::pipe();
    let child = Child::fork(|cue| {
        let sharer = sys::fork_sharing_files();
        if sharer == 0 {
            s.open(O_RDWR);
            cue.done();
            sys::wait_byte(end_in);
            sys::exit(0);
        }
        sys::write_all(pid_out, &sharer.to_ne_bytes());
        cue.wait();
    });
    let mut number = [0; 4];
    assert_eq!(sys::read(pid_in, &mut number), 4, "the pid of the sharer");
    let sharer = i32::from_ne_bytes(number);
    child.done();
    s.at("share", &Truth::files(2).fds(pid(), 1).fds(child.pid, 2).fds(sharer, 2));
    child.finish();
    s.at("first_exit", &Truth::files(2).fds(pid(), 1).fds(sharer, 2));
    sys::write_all(end_out, b"x");
    s.at("last_exit", &mine(1, 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}
