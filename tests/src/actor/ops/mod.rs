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

/// Every operation with its subject.
pub fn operations() -> impl Iterator<Item = (&'static str, &'static str)> {
    all().map(|(subject, (name, _))| (subject, *name))
}

fn all() -> impl Iterator<Item = (&'static str, &'static Named)> {
    [
        ("open", open::OPS),
        ("dup", dup::OPS),
        ("fork", fork::OPS),
        ("close", close::OPS),
        ("exec", exec::OPS),
        ("pass", pass::OPS),
        ("map", map::OPS),
        ("ring", ring::OPS),
        ("table", table::OPS),
        ("other", other::OPS),
    ]
    .into_iter()
    .flat_map(|(subject, named)| named.iter().map(move |one| (subject, one)))
}

pub(super) fn run(name: &str, dev: &str) {
    super::sys::setsid();
    super::sys::limit(libc::RLIMIT_CORE, 0);
    let Some((_, op)) = all().map(|(_, named)| named).find(|(known, _)| *known == name) else {
        say(&json!({"error": format!("no operation is named {name}")}));
        super::sys::exit(2)
    };
    match Stage::new(dev).and_then(|stage| op(&stage)) {
        Ok(()) => say(&json!({"done": true})),
        Err(Skip(reason)) => say(&json!({"skip": reason})),
    }
}
