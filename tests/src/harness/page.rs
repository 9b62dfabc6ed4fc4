//! Pages of the documentation that name tests: `FILE::TEST` in backquotes.
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the repository")
}

/// The names of tests in a text: what is in backquotes and has a `::`.
fn named(text: &str) -> Vec<&str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| word.contains("::") && !word.contains(char::is_whitespace)).collect()
}

/// The Rust files that a name may mean: one from the root of the repository, or those of an executable of kernel tests.
fn files(name: &str) -> Vec<PathBuf> {
    if name.contains('/') {
        return vec![root().join(name)];
    }
    let tests = root().join("tests/tests");
    let inside = fs::read_dir(tests.join(name)).into_iter().flatten().flatten().map(|entry| entry.path());
    inside.chain([tests.join(format!("{name}.rs"))]).collect()
}

/// Whether a source has the test.
fn has_test(source: &str, test: &str) -> bool {
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        if line.strip_prefix("fn ").and_then(|rest| rest.strip_prefix(test)).is_some_and(|rest| rest.starts_with('(')) {
            return is_test;
        }
        // Other attributes and comments may stand between.
        is_test = line == "#[test]" || is_test && (line.starts_with('#') || line.starts_with("//"));
    }
    false
}

/// What a page names, and which of that is no test. A test is named `FILE::TEST`, where FILE is the name of an executable in
/// `tests/tests`, or the path of a Rust file from the root of the repository.
pub fn tests_named_by(page: &Path) -> (Vec<String>, Vec<String>) {
    let path = root().join(page);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let all: Vec<String> = named(&text).into_iter().map(str::to_owned).collect();
    let is_missing = |name: &&String| {
        let (file, test) = name.rsplit_once("::").expect("there is one");
        !files(file).iter().any(|path| fs::read_to_string(path).is_ok_and(|source| has_test(&source, test)))
    };
    let missing = all.iter().filter(is_missing).cloned().collect();
    (all, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_a_text() {
        let text = "| a | `ring full` says `x`, `faults::one` and `a/b.rs::two` | `let x::y = 1` |";
        assert_eq!(named(text), ["faults::one", "a/b.rs::two"]);
    }

    #[test]
    fn only_a_test_is_one() {
        let source = "#[test]\n#[ignore]\n/// Words.\nfn one() {}\n\nfn two() {}\n#[test]\nfn three_more() {\n    fn one_more() {}\n}\n";
        let is = |name: &str| has_test(source, name);
        assert!(is("one") && is("three_more"));
        assert!(!is("two") && !is("three") && !is("one_more") && !is("four"));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let place = tempfile::tempdir().expect("a directory");
        let page = place.path().join("page.md");
        let own = "tests/src/harness/page.rs::only_a_test_is_one";
        fs::write(&page, format!("`{own}` `restart::churn_is_counted_exactly` `restart::gone` `nowhere::at_all`"))
            .expect("write");
        let (all, missing) = tests_named_by(&page);
        assert_eq!((all.len(), all[0].as_str()), (4, own));
        assert_eq!(missing, ["restart::gone", "nowhere::at_all"]);
    }
}
