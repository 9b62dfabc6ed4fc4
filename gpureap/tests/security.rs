//! Every claim of SECURITY.md names tests, and they are there.
use std::{collections::BTreeSet, fs, path::Path};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// The names of all functions below that are marked as tests.
fn tests_below(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            tests_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            for (at, marker) in text.match_indices("test]\n") {
                let rest = &text[at + marker.len()..];
                let name = rest.split_once("fn ").and_then(|(_, rest)| rest.split_once('('));
                found.extend(name.map(|(name, _)| name.to_owned()));
            }
        }
    }
}

/// The claims by their numbers, with what is said to show them.
fn claims(text: &str) -> Vec<(&str, Vec<&str>)> {
    let numbered = text.split("\n**").skip(1);
    numbered
        .map(|part| {
            let (number, rest) = part.split_once("** ").expect("a number");
            let shown = rest.split_once("\nShown by ").map_or("", |(_, shown)| shown);
            let shown = shown.split_once(".\n").map_or("", |(shown, _)| shown);
            (number, shown.split('`').skip(1).step_by(2).collect())
        })
        .collect()
}

#[test]
fn every_claim_is_shown_by_tests_that_exist() {
    let mut known = BTreeSet::new();
    for directory in ["gpureap/src", "gpureap/tests", "tests/tests"] {
        tests_below(&root().join(directory), &mut known);
    }
    assert!(known.contains("every_claim_is_shown_by_tests_that_exist"));
    let text = fs::read_to_string(root().join("SECURITY.md")).expect("SECURITY.md");
    let claims = claims(&text);
    assert!(claims.len() > 30, "{} claims", claims.len());
    let numbers: BTreeSet<&str> = claims.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers.len(), claims.len(), "each has a number of its own");
    for (number, tests) in claims {
        assert!(!tests.is_empty(), "{number} has no test");
        for test in tests {
            assert!(known.contains(test), "{number}: there is no test `{test}`");
        }
    }
}
