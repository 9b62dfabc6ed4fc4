//! `gpureap-actor`: real processes that perform real kernel operations on a device and say what is true.
//!
//! What it says is known by construction; it never looks at /proc and never asks a tracer.
//!
//! # Truth
//!
//! Every statement is a `devices` object, keyed by `major:minor`:
//!
//! ```json
//! {"1:5":{"procs":[{"pid":12,"fds":2,"maps":0}],"files":1,"in_flight":0,"io_uring":0}}
//! ```
//!
//! `procs` lists every process that has a descriptor on the device in the table of any of its threads (`fds`, over
//! all its tables) or maps it (`maps`, counted in areas). A table shared by several processes counts for each of them.
//! `files` is the number of open files, `in_flight` and `io_uring` say how many of these are in no table and no
//! mapping but in a socket's queue or in an io_uring table. A device that is not named is not spoken of. The kernel
//! takes back some files a little later (io_uring, sockets, threads), so an observer waits a moment for equality.
//!
//! # Operations
//!
//! `gpureap-actor ops` lists the names, one a line. `gpureap-actor ops NAME DEV` performs one. After each step it
//! prints `{"step":"dup","devices":{…}}` and waits for one byte on its standard input. It ends with `{"done":true}`,
//! or with `{"skip":"reason"}` where the kernel lacks something, or with `{"error":"…"}`. Some operations speak of
//! other devices than DEV: /dev/mem (1:1), /dev/kmsg (1:11), /dev/ptmx (5:2) with 136:N. `oom_kill` lets the kernel
//! choose a process to kill and runs only with `GPUREAP_ALLOW_OOM` in the environment, as in a virtual machine.
//!
//! # Scenarios
//!
//! `gpureap-actor hold` lists the kinds. `gpureap-actor hold KIND DEV [ARGS]` starts processes in a session of their
//! own, prints `{"ready":true,"pid":P,"director":D,"devices":{…}, …}` and lives until its standard input closes. `pid`
//! is the process the scenario is about; the director, which holds nothing, is the process that was started.
//! Each kind's own fields are described where it is defined. `churn` prints `{"pause":N,"devices":{…}}` in place of
//! `ready`, goes on after a byte, and so forth.
use std::process::ExitCode;

use serde_json::json;

pub mod child;
mod deeds;
mod fence;
mod hold;
mod ops;
pub mod pass;
mod play;
pub mod ring;
mod slots;
pub mod sys;
pub mod task;
pub mod truth;

pub use ops::operations;

pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        truth::say(&json!({"error": panic.to_string()}));
        sys::exit(101);
    }));
    sys::signal_ignore(libc::SIGPIPE);
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["noop"] => {}
        ["live", to] => child::live(sys::fd_argument(to), None),
        ["live-named", to, comm, ..] => child::live(sys::fd_argument(to), Some(comm)),
        ["live-mapped", to, comm, ..] => child::live_mapped(sys::fd_argument(to), comm),
        ["pause", from, to, ..] => child::pause(sys::fd_argument(from), sys::fd_argument(to)),
        ["fence"] => fence::hold(),
        ["play", ..] => play::play(),
        ["task", name] => task::begin(name),
        ["task-again", connection] => task::go_on(sys::fd_argument(connection)),
        ["ops"] => list(operations().map(|(_, name)| name)),
        ["ops", name, dev] => ops::run(name, dev),
        ["hold"] => list(hold::kinds()),
        ["hold", kind, ref rest @ ..] => hold::run(kind, rest),
        _ => {
            truth::say(
                &json!({"error": "usage: gpureap-actor ops [NAME DEV] | hold [KIND DEV [ARGS]] | play | fence"}),
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn list(names: impl Iterator<Item = &'static str>) {
    for name in names {
        sys::write_all(1, format!("{name}\n").as_bytes());
    }
}
