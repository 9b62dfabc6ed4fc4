//! gpureap's programs as the kernel has them.
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use aya::programs::{
    ProgramInfo,
    links::{FdLink, PinnedLink},
    loaded_links, loaded_programs,
};
use gpureap::{
    bpf::{
        handles::{LINKS, PROGRAMS},
        load::describe,
        object::{self, COMMON, FENCE, ITERATORS, Program, When},
        sys,
    },
    model::Backend,
};
use serde::Serialize;

/// A program that is loaded and pinned.
#[derive(Debug, Serialize)]
pub struct Loaded {
    pub name: String,
    pub hook: String,
    /// Otherwise it runs when it is asked.
    pub attached: bool,
    /// Instructions that the verifier looked at, over all paths (since 5.16).
    pub verified: Option<u32>,
    /// Instructions of the program after the verifier's changes.
    pub translated: Option<u32>,
    /// How often the kernel did not run it because it was running on that processor.
    pub skipped: Option<u64>,
}

/// What is pinned in this directory of a set.
pub fn pinned(set: &Path) -> Vec<Loaded> {
    let links = names(&set.join(LINKS));
    names(&set.join(PROGRAMS)).into_iter().map(|name| loaded(set, name, &links)).collect()
}

fn loaded(set: &Path, name: String, links: &BTreeSet<String>) -> Loaded {
    let path = set.join(PROGRAMS).join(&name);
    let info = ProgramInfo::from_pin(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let attached = links.contains(&name);
    if attached {
        let link: FdLink = PinnedLink::from_pin(set.join(LINKS).join(&name)).expect("a pinned link").into();
        let linked = link.info().expect("facts of a link").program_id();
        assert_eq!(linked, info.id(), "the link {name} runs the program of this name");
    }
    let fd = sys::get(&path).expect("a pinned program");
    Loaded {
        hook: known().find(|program| program.name == name).map(describe).unwrap_or_default(),
        name,
        attached,
        verified: info.verified_instruction_count(),
        // Eight bytes each.
        translated: info.size_translated().map(|bytes| bytes / 8),
        skipped: sys::skipped(std::os::fd::AsFd::as_fd(&fd)).expect("facts of a program"),
    }
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

fn known() -> impl Iterator<Item = &'static Program> {
    let sets = [Backend::Kprobe, Backend::Fentry, Backend::Gate].map(object::set);
    [COMMON, ITERATORS].into_iter().chain(sets).flatten().chain(std::iter::once(&FENCE))
}

/// What lacks to a whole set: of forms for different kernels there must be one.
pub fn lacking(backend: Backend, loaded: &[Loaded]) -> Vec<String> {
    let there =
        |program: &Program| loaded.iter().any(|one| one.name == program.name && one.attached == attaches(program));
    let set: Vec<&Program> = COMMON.iter().chain(object::set(backend)).collect();
    let mut wrong = Vec::new();
    for program in &set {
        let forms: Vec<&&Program> = match subject(program.when) {
            None => vec![program],
            subject => set.iter().filter(|other| self::subject(other.when) == subject).collect(),
        };
        let found = forms.iter().filter(|form| there(form)).count();
        if found != 1 {
            wrong.push(format!("{}: {found} of {} forms", describe(program), forms.len()));
        }
    }
    wrong
}

fn attaches(program: &Program) -> bool {
    program.hook != object::Hook::OnDemand
}

/// What the forms of a program differ in.
const fn subject(when: When) -> Option<&'static str> {
    match when {
        When::Always => None,
        When::Has(function)
        | When::Lacks(function)
        | When::Parameters(function, _)
        | When::TracepointParameters(function, _) => Some(function),
    }
}

/// Programs of gpureap that the kernel holds, by their numbers, with how many links each has.
pub fn held_by_kernel() -> BTreeMap<u32, String> {
    // The kernel cuts names.
    let ours: BTreeSet<&[u8]> = known().map(|program| &program.name.as_bytes()[..program.name.len().min(15)]).collect();
    let linked: Vec<u32> = loaded_links().filter_map(|link| Some(link.ok()?.program_id())).collect();
    loaded_programs()
        .filter_map(Result::ok)
        .filter(|program| ours.contains(program.name()))
        .map(|program| {
            let links = linked.iter().filter(|id| **id == program.id()).count();
            (program.id(), format!("{} with {links} links", String::from_utf8_lossy(program.name())))
        })
        .collect()
}
