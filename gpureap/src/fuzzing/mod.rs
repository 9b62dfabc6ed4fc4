//! What the fuzz targets in `fuzz/` run: one function for each parser of what others write. Each asserts what must be true
//! of any input, beyond not to panic. The committed corpus runs through all of them as a unit test.

mod files;
mod journal;
mod kernel;
mod socket;

use serde::{Serialize, de::DeserializeOwned};

use crate::out::sanitize::is_unsafe;

/// A target by the name of its file in `fuzz/fuzz_targets` and of its directory in `fuzz/corpus`.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: &[Target] = &[
    ("ring", kernel::ring),
    ("sweep", kernel::sweep),
    ("btf", kernel::btf),
    ("kmsg", kernel::kmsg),
    ("proc_stat", files::proc_stat),
    ("proc_status", files::proc_status),
    ("proc_cgroup", files::proc_cgroup),
    ("proc_maps", files::proc_maps),
    ("mountinfo", files::mountinfo),
    ("config", files::config),
    ("request", socket::request),
    ("answer", socket::answer),
    ("events", journal::events),
    ("journal", journal::file),
];

/// Runs the target of this name.
pub fn run(name: &str, input: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target of this name");
    target(input);
}

/// Text as it is shown has line ends and nothing else that steers a terminal.
fn assert_shown(text: &str) {
    let found = text.chars().find(|character| *character != '\n' && is_unsafe(*character));
    assert_eq!(found, None, "{text:?}");
}

/// What is written as JSON is read back the same.
fn assert_json<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T) {
    let text = serde_json::to_string(value).expect("plain data is JSON");
    let read: T = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(read, *value);
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    fn names(directory: &str) -> BTreeSet<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz").join(directory);
        let entries = fs::read_dir(&path).unwrap();
        entries.map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn the_committed_corpus_holds() {
        for (name, target) in TARGETS {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
            let mut inputs = 0;
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                // The name of the input, should it be one that panics.
                eprintln!("{}", path.display());
                target(&fs::read(path).unwrap());
                inputs += 1;
            }
            assert!(inputs > 0, "{name} has no corpus");
            target(b"");
        }
    }

    #[test]
    fn every_target_has_its_file_and_its_corpus() {
        let known: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(known.len(), TARGETS.len());
        assert_eq!(names("fuzz_targets"), known);
        assert_eq!(names("corpus"), known);
    }
}
