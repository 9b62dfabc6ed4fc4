//! The licences of the crates that are linked into gpureap: whoever hands the program out hands these out too.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::process;

/// How the names of files begin that hold a licence or a notice.
const NAMES: [&str; 6] = ["license", "licence", "copying", "copyright", "notice", "unlicense"];

const OTHERS: &str = "\
The Rust standard library: MIT OR Apache-2.0, Copyright (c) The Rust Project Contributors.
SQLite, in libsqlite3-sys: in the public domain.
";

/// One page with all of them; the same text stands there once.
pub(crate) fn third_party() -> Result<String> {
    let directories = directories()?;
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, licence) in linked()? {
        let directory = directories.get(&name).with_context(|| format!("cargo does not say where {name} lies"))?;
        writeln!(list, "{name}: {licence}")?;
        for text in texts_in(directory)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    ensure!(!texts.is_empty(), "no licence was found");
    let mut page =
        format!("Linked into gpureap, with their licences as SPDX expressions; the texts are below.\n\n{list}{OTHERS}");
    let mut texts: Vec<_> = texts.into_iter().collect();
    texts.sort_by(|a, b| a.1.cmp(&b.1));
    for (text, names) in texts {
        write!(page, "\n{}\n{}\n\n{text}\n", "-".repeat(72), names.join(", "))?;
    }
    Ok(page)
}

/// The crates that end up in the program: not what only builds it.
fn linked() -> Result<BTreeMap<String, String>> {
    let tree = process::output(process::cargo().args([
        "tree",
        "--locked",
        "--package=gpureap",
        "--edges=normal,no-proc-macro",
        "--target=x86_64-unknown-linux-gnu",
        "--prefix=none",
        "--format={p}|{l}",
    ]))?;
    Ok(parse_tree(&tree))
}

/// Lines such as `aya v0.14.1|MIT OR Apache-2.0`, some with ` (*)` at their end. Our own crates have a path.
fn parse_tree(tree: &str) -> BTreeMap<String, String> {
    let others = tree.lines().filter_map(|line| {
        let (package, licence) = line.trim_end_matches(" (*)").split_once('|')?;
        (!package.contains(" (/")).then(|| (package.to_owned(), licence.to_owned()))
    });
    others.collect()
}

/// Where the sources of each crate lie, by the name that `cargo tree` gives it.
fn directories() -> Result<BTreeMap<String, PathBuf>> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(serde::Deserialize)]
    struct Package {
        name: String,
        version: String,
        manifest_path: PathBuf,
    }
    let text = process::output(process::cargo().args([
        "metadata",
        "--locked",
        "--format-version=1",
        "--filter-platform=x86_64-unknown-linux-gnu",
    ]))?;
    let Metadata { packages } = serde_json::from_str(&text).context("cargo metadata")?;
    let directory = |manifest: PathBuf| manifest.parent().map(Path::to_path_buf).unwrap_or_default();
    Ok(packages
        .into_iter()
        .map(|Package { name, version, manifest_path }| (format!("{name} v{version}"), directory(manifest_path)))
        .collect())
}

fn texts_in(directory: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_file() && !is_source && NAMES.iter().any(|begin| name.starts_with(begin)) {
            let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            texts.push(String::from_utf8_lossy(&bytes).replace('\r', "").trim().to_owned());
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_others_in_cargos_tree() {
        let tree = "gpureap v0.1.0 (/w/gpureap)|MIT OR Apache-2.0\naya v0.14.1|MIT OR Apache-2.0\nlibc v0.2.1|MIT\naya v0.14.1|MIT OR \
                    Apache-2.0 (*)\n\n";
        let found: Vec<_> = parse_tree(tree).into_iter().collect();
        let line = |name: &str, licence: &str| (name.to_owned(), licence.to_owned());
        assert_eq!(found, [line("aya v0.14.1", "MIT OR Apache-2.0"), line("libc v0.2.1", "MIT")]);
    }

    #[test]
    fn what_is_linked_comes_with_its_licence() {
        let page = third_party().unwrap();
        for part in ["aya v", "serde v", "Permission is hereby granted", "Apache License"] {
            assert!(page.contains(part), "{part}");
        }
        for absent in ["proptest v", "clap_derive v", "jsonschema v"] {
            assert!(!page.contains(absent), "{absent}");
        }
    }
}
