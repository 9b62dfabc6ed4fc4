//! What the kernel tests share: running the actor ([`Actor`]), running gpureap ([`Bench`], [`Daemon`]) and comparing
//! what is true with what is seen (`compare`).
#![expect(clippy::print_stderr, reason = "test output")]

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use serde::Serialize;

mod actor;
mod bench;
mod compare;
mod daemon;
mod freezer;
mod groups;
mod holder;
mod log;
mod page;
mod player;
mod proc;
mod programs;
mod schema;
mod shared;
mod terminal;
mod tmux;
mod world;

pub use actor::{Actor, Said, Scene};
pub use bench::{Bench, Device, Output, finish};
pub use compare::{Compare, Seen, SeenDevice};
pub use daemon::Daemon;
pub use freezer::Freezer;
pub use groups::Groups;
pub use holder::{Copy, Holder, Wanted};
pub use log::Log;
pub use page::tests_named_by;
pub use player::{Player, Role};
pub use proc::{anybody, counts, observe};
pub use programs::{Loaded, held_by_kernel, lacking, pinned};
pub use schema::Schema;
pub use shared::Shared;
pub use terminal::Terminal;
pub use tmux::Tmux;
pub use world::World;

pub use crate::actor::{
    sys::{self, Pid},
    truth::{self, Truth},
};

/// How long anything may take that should take no time. Generous: the machine may be an emulated one.
pub const PATIENCE: Duration = Duration::from_mins(1);
/// The user who has nothing.
pub const NOBODY: u32 = 65534;

/// Tries until it gives `None`, which means that nothing is wrong any more; otherwise what was wrong at the end.
pub fn settle<T>(patience: Duration, mut wrong: impl FnMut() -> Option<T>) -> Result<(), T> {
    let until = Instant::now() + patience;
    loop {
        match wrong() {
            None => return Ok(()),
            Some(last) if Instant::now() > until => return Err(last),
            Some(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Waits until the condition is true.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let outcome = settle(PATIENCE, || (!condition()).then_some(()));
    assert!(outcome.is_ok(), "{what}: not within {PATIENCE:?}");
}

/// An executable of this workspace: named by the variable, or beside the test executables.
pub fn program(variable: &str, name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        return path.into();
    }
    let own = std::env::current_exe().expect("the path of the test executable");
    let path = own.parent().and_then(|deps| deps.parent()).expect("target/PROFILE/deps").join(name);
    assert!(path.exists(), "{} does not exist: build it, or set {variable}", path.display());
    path
}

/// Says why a test does not run here.
pub fn skip(test: &str, reason: &str) {
    // Not by a macro: the test runner would hide it when the test passes.
    sys::write_all(2, format!("SKIP {test}: {reason}\n").as_bytes());
}

/// A finding for `cargo xtask matrix`, which knows its shape (`xtask/src/matrix/results.rs`).
pub fn record(finding: &impl Serialize) {
    if std::env::var_os("GPUREAP_TEST_RECORDS").is_some() {
        let finding = serde_json::to_string(finding).expect("a finding is JSON");
        // The test runner has begun a line.
        sys::write_all(2, format!("\nvm: record {finding}\n").as_bytes());
    }
}

/// Whether gpureap has to refuse this probe set on this kernel.
pub fn to_be_refused() -> bool {
    std::env::var_os("GPUREAP_TEST_REFUSED").is_some()
}

/// Whether this kernel preempts its own code. Where it does not say so it is taken for one that does not.
pub fn preemptible() -> bool {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let mode = read("/sys/kernel/debug/sched/preempt");
    mode.contains("(full)") || mode.contains("(lazy)") || read("/proc/sys/kernel/version").contains("PREEMPT_RT")
}

/// A word on what goes on, shown when the test fails.
pub fn note(text: &str) {
    eprintln!("{text}");
}
