//! A child process that moves one step at a time.
use std::ffi::CString;

use super::sys::{self, Fd, Pid};

/// The child's side: says that a step is done, waits for the next.
#[derive(Clone, Copy)]
pub struct Cue {
    from_parent: Fd,
    to_parent: Fd,
}

impl Cue {
    pub fn done(self) {
        self.send(b'x');
    }

    pub fn send(self, byte: u8) {
        sys::write_all(self.to_parent, &[byte]);
    }

    pub fn wait(self) {
        sys::wait_byte(self.from_parent);
    }

    /// Says done and waits for the next step.
    pub fn pause(self) {
        self.done();
        self.wait();
    }

    /// The arguments with which this program, executed, says done once, waits once and ends.
    pub fn pause_arguments(self) -> Vec<CString> {
        ["gpureap-actor", "pause", &self.from_parent.to_string(), &self.to_parent.to_string()].map(sys::cstr).into()
    }

    pub fn exec_pause(self) -> ! {
        sys::exec_self(&self.pause_arguments())
    }
}

/// The body of `gpureap-actor pause`.
pub fn pause(from_parent: Fd, to_parent: Fd) -> ! {
    Cue { from_parent, to_parent }.pause();
    sys::exit(0)
}

/// The parent's side.
pub struct Child {
    pub pid: Pid,
    cue: Cue,
    go: Fd,
    done: Fd,
}

/// Two pipes, before there is a child.
pub struct Pipes {
    cue: Cue,
    go: Fd,
    done: Fd,
}

impl Pipes {
    pub fn new() -> Self {
        let (from_parent, go) = sys::pipe();
        let (done, to_parent) = sys::pipe();
        Self { cue: Cue { from_parent, to_parent }, go, done }
    }

    pub fn cue(&self) -> Cue {
        self.cue
    }

    pub fn child(self, pid: Pid) -> Child {
        Child { pid, cue: self.cue, go: self.go, done: self.done }
    }

    fn run(&self, body: impl FnOnce(Cue)) -> ! {
        body(self.cue);
        sys::exit(0)
    }
}

impl Default for Pipes {
    fn default() -> Self {
        Self::new()
    }
}

impl Child {
    /// Forks; the child runs the body and exits with 0.
    pub fn fork(body: impl FnOnce(Cue)) -> Self {
        let pipes = Pipes::new();
        match sys::fork() {
            0 => {
                sys::close(pipes.go);
                sys::close(pipes.done);
                pipes.run(body)
            }
            pid => pipes.child(pid),
        }
    }

    /// As [`Child::fork`], with one descriptor table for both.
    pub fn fork_sharing_files(body: impl FnOnce(Cue)) -> Self {
        let pipes = Pipes::new();
        match sys::fork_sharing_files() {
            0 => pipes.run(body),
            pid => pipes.child(pid),
        }
    }

    /// Waits until the child has said done.
    pub fn done(&self) -> u8 {
        sys::wait_byte(self.done)
    }

    /// Lets the child take its next step.
    pub fn go(&self) {
        sys::write_all(self.go, b"x");
    }

    /// Lets the child take its next step and waits until it has.
    pub fn step(&self) {
        self.go();
        self.done();
    }

    /// Waits for the end of the child; its raw wait status.
    pub fn reap(self) -> i32 {
        let status = sys::reap(self.pid);
        for fd in [self.go, self.done, self.cue.from_parent, self.cue.to_parent] {
            sys::close(fd);
        }
        status
    }

    /// Lets the child take its last step and waits for its end.
    pub fn finish(self) -> i32 {
        self.go();
        self.reap()
    }
}

impl Cue {
    /// Executes this program as a process that says done and then lives.
    pub fn exec_live(self) -> ! {
        sys::exec_self(&["gpureap-actor", "live", &self.to_parent.to_string()].map(sys::cstr))
    }

    /// As [`Cue::exec_live`], with a name of its own and more arguments.
    pub fn exec_live_named(self, comm: &str, arguments: &[&str]) -> ! {
        let own = ["gpureap-actor", "live-named", &self.to_parent.to_string(), comm];
        sys::exec_self(&own.iter().chain(arguments).map(sys::cstr).collect::<Vec<_>>())
    }
}

/// The body of `gpureap-actor live` and `live-named`.
pub fn live(to_parent: Fd, comm: Option<&str>) -> ! {
    if let Some(comm) = comm {
        sys::set_comm(comm.as_bytes());
    }
    sys::write_all(to_parent, b"x");
    sys::live()
}

/// The body of `gpureap-actor live-mapped`: as [`live`], with its standard error mapped.
pub fn live_mapped(to_parent: Fd, comm: &str) -> ! {
    sys::map(2, libc::PROT_READ, libc::MAP_PRIVATE, 0).expect("map the standard error");
    live(to_parent, Some(comm))
}
