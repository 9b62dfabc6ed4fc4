//! `gpureap-actor task NAME`: a task of the oracle's play. It connects to the socket that the environment names, says who
//! it is, and does what it is told there, as do all threads and processes that it makes, each over a connection of its
//! own.
//!
//! A line holds acts ([`Act`]) with `;` between them and is answered by `ok` or by what went wrong. `take` names the
//! process by its pid, after an `@`. The nodes of the devices are in the environment.
use std::{
    cell::Cell,
    os::{fd::IntoRawFd as _, unix::net::UnixStream},
};

use super::{
    deeds::{self, Next},
    sys::{self, Fd},
};
use crate::oracle::step::{Act, Task};

/// Where a new task connects.
pub const SOCKET: &str = "GPUREAP_PLAY_SOCKET";
/// The devices' nodes, with colons between them.
pub const NODES: &str = "GPUREAP_PLAY_NODES";
/// The first number of connections: the play uses those below.
const CONTROL: Fd = 600;

thread_local! {
    static CONNECTION: Cell<Fd> = const { Cell::new(-1) };
}

/// Who panics says so to the test and ends.
fn tell_panics() {
    std::panic::set_hook(Box::new(|panic| {
        say(CONNECTION.get(), &panic.to_string().replace('\n', " "));
        sys::exit(101);
    }));
}

fn say(connection: Fd, words: &str) {
    sys::write_all(connection, format!("{words}\n").as_bytes());
}

/// The first task of a process that was executed.
pub(super) fn begin(name: &str) -> ! {
    drop_connections();
    prepare();
    enter(name.parse().unwrap_or_else(|error| panic!("{error}")))
}

/// A task that called exec goes on.
pub(super) fn go_on(connection: Fd) -> ! {
    prepare();
    say(connection, "ok");
    serve(connection)
}

fn prepare() {
    tell_panics();
    // Not to be found any more when the main thread has ended.
    sys::own_path();
    // Children vanish by themselves when they end.
    sys::signal_ignore(libc::SIGCHLD);
}

/// Those of whom this process was copied from.
fn drop_connections() {
    sys::close_range(CONTROL, u32::MAX, 0).expect("close_range");
}

/// A copy of the process that called fork.
fn enter_copied(task: Task) -> ! {
    drop_connections();
    enter(task)
}

fn enter(task: Task) -> ! {
    let path = std::env::var_os(SOCKET).expect("the path of the test's socket");
    let stream = UnixStream::connect(path).expect("the test listens").into_raw_fd();
    let connection = sys::fcntl(stream, libc::F_DUPFD, CONTROL).expect("a number for the connection") as Fd;
    sys::close(stream);
    say(connection, &format!("{task} {} {}", sys::pid(), sys::tid()));
    serve(connection)
}

fn serve(connection: Fd) -> ! {
    CONNECTION.set(connection);
    let mut line = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        let n = sys::read(connection, &mut bytes);
        if n == 0 {
            sys::exit(0);
        }
        line.extend_from_slice(&bytes[..n]);
        if line.last() == Some(&b'\n') {
            let text = String::from_utf8(std::mem::take(&mut line)).expect("text");
            for order in text.trim().split(';') {
                obey(order, connection);
            }
            say(connection, "ok");
        }
    }
}

fn obey(order: &str, connection: Fd) {
    let (text, pid) = order.split_once('@').map_or((order, None), |(text, pid)| (text, pid.parse().ok()));
    let act: Act = text.parse().unwrap_or_else(|error| panic!("{error}"));
    match deeds::perform(&act, pid) {
        Next::Done => {}
        Next::Copied(child) => enter_copied(child),
        Next::Entered(child) => enter(child),
        Next::Thread(child) => drop(std::thread::spawn(move || enter(child))),
        Next::Exec => {
            sys::exec_self(&["gpureap-actor", "task-again", &connection.to_string()].map(sys::cstr));
        }
    }
}
