//! What the pages tell people to type is what gpureap understands. `tests/tests/recipes` runs docs/recipes.md; here are all the others.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, in its helpers too")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Parser as _;
use gpureap::cli::Cli;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// README.md, docs, scripts and the like that are handed out, however deep.
fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left: Vec<PathBuf> = ["docs", "packaging"].map(|name| root().join(name)).into();
    for entry in fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|extension| extension == "md") {
            found.push(entry);
        }
    }
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.extension().and_then(|extension| extension.to_str()) {
                _ if entry.is_dir() => left.push(entry),
                Some("md" | "sh" | "yaml" | "yml" | "service") => found.push(entry),
                // A script without an ending.
                None if fs::read(&entry).unwrap().starts_with(b"#!") => found.push(entry),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// What is typed: lines of fenced blocks; where one shows a dialogue only those behind the prompt. A script is typed as a whole.
fn typed(path: &Path, text: &str) -> Vec<String> {
    if path.extension().is_none_or(|extension| extension != "md") {
        return joined(text);
    }
    let mut lines = Vec::new();
    for (position, block) in text.split("\n```").enumerate() {
        if position % 2 == 0 {
            continue;
        }
        let (language, block) = block.split_once('\n').unwrap_or_default();
        if !matches!(language, "" | "sh" | "bash" | "console") {
            continue;
        }
        let lines_of_block = joined(block);
        let typed = |line: &str| line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")).map(str::to_owned);
        let answers: Vec<String> = lines_of_block.iter().filter_map(|line| typed(line)).collect();
        lines.extend(if answers.is_empty() { lines_of_block } else { answers });
    }
    lines
}

/// A backslash at the end goes on.
fn joined(text: &str) -> Vec<String> {
    text.replace("\\\n", "").lines().map(str::to_owned).collect()
}

/// The words of every call of gpureap in a line of shell. A variable stands for a number.
fn calls(line: &str) -> Vec<Vec<String>> {
    let mut calls = Vec::new();
    let mut plain = unbraced(line).replace("\"$@\"", "").replace("2>&1", "").replace(" 2>", " >");
    // From the inside out.
    while let Some(begin) = plain.rfind("$(") {
        let end = plain[begin..].find(')').map_or(plain.len(), |length| begin + length);
        calls.extend(self::calls(&plain[begin + 2..end]));
        plain.replace_range(begin..(end + 1).min(plain.len()), "$V");
    }
    for part in plain.split(['|', '&', ';', '`', '>', '<']) {
        let part = part.trim().trim_end_matches(')');
        // What remains of a quoted word is no call.
        let Some(words) = shlex::split(part).or_else(|| shlex::split(part.trim_matches(['"', '\'']))) else { continue };
        let mut words = words.into_iter().skip_while(|word| {
            matches!(
                word.as_str(),
                "!" | "{" | "sudo" | "exec" | "if" | "while" | "until" | "then" | "do" | "else" | "trap"
            ) || word
                .split_once('=')
                .is_some_and(|(name, _)| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_uppercase()))
        });
        let Some(program) = words.next() else { continue };
        if program == "gpureap" || program.ends_with("/bin/gpureap") {
            let mut call: Vec<String> = words.map(|word| number(&word)).collect();
            // One that every host has.
            if let Some(at) = call.iter().position(|word| word == "--user") {
                "root".clone_into(&mut call[at + 1]);
            }
            calls.push(call);
        }
    }
    calls
}

/// `${X#*:}` as `$X`.
fn unbraced(line: &str) -> String {
    let mut parts = line.split("${");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('}').unwrap_or((part, ""));
        let name = name.split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap_or_default();
        plain.extend(["$", name, rest]);
    }
    plain
}

/// `"$X"`, `--env X=$Y`.
fn number(word: &str) -> String {
    word.find('$').map_or_else(|| word.to_owned(), |at| format!("{}4711", &word[..at]))
}

#[test]
fn every_command_of_every_page_is_understood() {
    let (mut seen, mut wrong) = (0, Vec::new());
    for path in pages() {
        let text = fs::read_to_string(&path).unwrap();
        for line in typed(&path, &text) {
            let line = line.split(" #").next().unwrap_or_default();
            if line.trim_start().starts_with('#') {
                continue;
            }
            for call in calls(line) {
                seen += 1;
                if let Err(error) = Cli::try_parse_from(std::iter::once("gpureap".to_owned()).chain(call))
                    && error.use_stderr()
                {
                    wrong.push(format!("{}: {line}\n{error}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 40, "{seen} commands are few: the pages are not read");
}

#[test]
fn calls_are_found_in_lines_of_shell() {
    let found = |line: &str| calls(line).iter().map(|call| call.join(" ")).collect::<Vec<_>>();
    assert_eq!(found("gpureap holders --json | jq ."), ["holders --json"]);
    assert_eq!(found("sudo gpureap wait --gpu 0 && next"), ["wait --gpu 0"]);
    assert_eq!(
        found("if ! gpureap reap --user \"$USER\" > /dev/null; then gpureap report; fi"),
        ["reap --user root", "report"]
    );
    assert_eq!(found("why=$(/usr/bin/gpureap doctor)"), ["doctor"]);
    assert_eq!(found("gpureap reap --pid \"$(gpureap holders)\" --yes"), ["holders", "reap --pid 4711 --yes"]);
    assert_eq!(found("GPUREAP_BACKEND=gate gpureap daemon"), ["daemon"]);
    assert_eq!(found("echo gpureap holders"), [""; 0]);
    assert_eq!(found("gpureap reap --container \"${ID#*://}\" --yes"), ["reap --container 4711 --yes"]);
}
