//! The operations of the matrix, one function each, by subject.
#![expect(clippy::unnecessary_wraps, reason = "all operations have one signature")]

use serde_json::json;

use super::truth::{Skip, Stage, say};

mod close;
mod dup;
mod exec;
mod fork;
mod map;
mod open;
mod other;
mod pass;
mod ring;
mod table;

type Op = fn(&Stage) -> Result<(), Skip>;
type Named = (&'static str, Op);

fn all() -> impl Iterator<Item = &'static Named> {
    [open::OPS, dup::OPS, fork::OPS, close::OPS, exec::OPS, pass::OPS, map::OPS, ring::OPS, table::OPS, other::OPS]
        .into_iter()
        .flatten()
}

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    all().map(|(name, _)| *name)
}

pub(super) fn run(name: &str, dev: &str) {
    super::sys::setsid();
    super::sys::limit(libc::RLIMIT_CORE, 0);
    let Some((_, op)) = all().find(|(known, _)| *known == name) else {
        say(&json!({"error": format!("no operation is named {name}")}));
        super::sys::exit(2)
    };
    match Stage::new(dev).and_then(|stage| op(&stage)) {
        Ok(()) => say(&json!({"done": true})),
        Err(Skip(reason)) => say(&json!({"skip": reason})),
    }
}
