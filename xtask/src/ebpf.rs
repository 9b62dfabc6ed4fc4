//! Builds the kernel programs into `gpureap/bpf/gpureap.bpf.o`.
//!
//! The object is committed, so that gpureap itself builds with stable Rust alone. Beside it lies `SOURCES.sha256` with
//! a hash over everything the object is made from; `--check` compares that with the sources at hand.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};
use walkdir::WalkDir;

use crate::process::{self, root};

const TARGET: &str = "bpfel-unknown-none";
/// The crates whose files decide what the object is.
const CRATES: [&str; 2] = ["gpureap-common", "gpureap-ebpf"];

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Choice {
    /// Debian's rustc, which comes with `core` for bpf; else a rustup nightly with rust-src.
    Auto,
    Debian,
    Nightly,
}

/// A compiler that can build for bpf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Toolchain {
    Debian,
    Nightly,
}

impl Toolchain {
    pub(crate) fn find(choice: Choice) -> Result<Self> {
        let found = match choice {
            Choice::Auto => Self::Debian.present().or_else(|| Self::Nightly.present()),
            Choice::Debian => Self::Debian.present(),
            Choice::Nightly => Self::Nightly.present(),
        };
        found.context(
            "no compiler for bpf: needs Debian's rustc-web, cargo-web and libstd-rust-web-dev-bpf, \
             or rustup's nightly with the component rust-src (`cargo xtask setup` installs the former)",
        )
    }

    fn present(self) -> Option<Self> {
        let here = match self {
            Self::Debian => {
                let library = Path::new("/usr/lib/rustlib").join(TARGET);
                Path::new("/usr/bin/rustc").exists() && Path::new("/usr/bin/cargo").exists() && library.exists()
            }
            Self::Nightly => {
                let sysroot = process::probe(self.rustc().args(["--print", "sysroot"]))?;
                Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core").exists()
            }
        };
        here.then_some(self)
    }

    pub(crate) fn rustc(self) -> Command {
        self.program("rustc")
    }

    /// Cargo with none of the settings that rustup or an outer cargo left for another compiler.
    pub(crate) fn cargo(self) -> Command {
        let mut command = self.program("cargo");
        command.current_dir(root());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            // Cargo and rustup put their own libraries first for what they run.
            let foreign = [
                "CARGO",
                "CARGO_ENCODED_RUSTFLAGS",
                "LD_LIBRARY_PATH",
                "RUSTC",
                "RUSTDOC",
                "RUSTFLAGS",
                "RUSTUP_TOOLCHAIN",
            ];
            let prefixes = ["CARGO_BUILD_", "CARGO_PROFILE_", "RUSTC_"];
            if foreign.contains(&&*text) || prefixes.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        if self == Self::Debian {
            // The bpf target and its assembler are unstable; rustc-web is the stable compiler.
            command.env("RUSTC_BOOTSTRAP", "1").env("RUSTC", "/usr/bin/rustc");
        }
        command.env("CARGO_TARGET_DIR", root().join("target/ebpf"));
        command
    }

    /// Clippy of the same release, if it is installed; it understands what cargo does.
    pub(crate) fn clippy(self) -> Option<Command> {
        let mut command = self.cargo();
        match self {
            Self::Debian => {
                // Not `cargo clippy`: that would find rustup's.
                let clippy = Path::new("/usr/bin/cargo-clippy");
                let mut direct = Command::new(clippy);
                direct.arg("clippy").current_dir(root()).env("CARGO", "/usr/bin/cargo");
                for (name, value) in command.get_envs().filter(|(name, _)| *name != "CARGO") {
                    match value {
                        Some(value) => direct.env(name, value),
                        None => direct.env_remove(name),
                    };
                }
                clippy.exists().then_some(direct)
            }
            Self::Nightly => {
                process::probe(self.program("cargo").args(["clippy", "--version"]))?;
                command.arg("clippy");
                Some(command)
            }
        }
    }

    fn program(self, name: &str) -> Command {
        match self {
            Self::Debian => Command::new(Path::new("/usr/bin").join(name)),
            Self::Nightly => {
                let mut command = Command::new("rustup");
                command.args(["run", "nightly", name]);
                command
            }
        }
    }

    /// What to add to a cargo build, check or clippy of the kernel programs.
    pub(crate) fn target_args(self) -> Vec<&'static str> {
        let mut args = vec!["--package", "gpureap-ebpf", "--target", TARGET, "--release", "--locked"];
        if self == Self::Nightly {
            args.extend(["-Z", "build-std=core"]);
        }
        args
    }

    fn version(self) -> Result<String> {
        Ok(process::output(self.rustc().arg("--version"))?.trim().to_owned())
    }
}

/// The flags that aya needs, separated as cargo wants them, and paths that are the same on every machine.
pub(crate) fn encoded_rustflags() -> Result<String> {
    let mut flags = vec![
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
        // A dot, not a name: LLVM copies source lines into BTF, and finds them from where cargo runs rustc.
        format!("--remap-path-prefix={}=.", root().display()),
    ];
    let registries = process::cargo_home().join("registry/src");
    if registries.exists() {
        for entry in fs::read_dir(&registries).with_context(|| format!("cannot list {}", registries.display()))? {
            flags.push(format!("--remap-path-prefix={}=/registry", entry?.path().display()));
        }
    }
    Ok(flags.join("\x1f"))
}

pub(crate) fn object_path() -> PathBuf {
    root().join("gpureap/bpf/gpureap.bpf.o")
}

fn record_path() -> PathBuf {
    root().join("gpureap/bpf/SOURCES.sha256")
}

/// Builds the object and its record afresh, and returns the record.
pub(crate) fn build(choice: Choice) -> Result<Record> {
    let toolchain = Toolchain::find(choice)?;
    let linker =
        process::find_program("bpf-linker").context("bpf-linker is missing: `cargo xtask setup` installs it")?;
    process::run(
        toolchain
            .cargo()
            .arg("build")
            .args(toolchain.target_args())
            .env("CARGO_ENCODED_RUSTFLAGS", encoded_rustflags()?)
            .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &linker),
    )?;

    let built = root().join("target/ebpf").join(TARGET).join("release/gpureap-ebpf");
    let object = object_path();
    fs::create_dir_all(object.parent().expect("has a parent"))?;
    strip(&built, &object)?;

    let versions =
        format!("{}; {}", toolchain.version()?, process::output(Command::new(&linker).arg("--version"))?.trim());
    let record = Record { sources: hash_sources()?, object: hash_file(&object)?, versions };
    fs::write(record_path(), record.to_string())
        .with_context(|| format!("cannot write {}", record_path().display()))?;
    println!("{}: {} bytes, {}", object.display(), fs::metadata(&object)?.len(), record.versions);
    Ok(record)
}

/// Drops DWARF; BTF and the symbols, which name the programs and maps, stay.
fn strip(from: &Path, to: &Path) -> Result<()> {
    let objcopy = objcopy().context("llvm-objcopy is missing: install Debian's llvm-22 or newer")?;
    process::run(Command::new(objcopy).args(["--strip-debug", "--remove-section=.comment"]).args([from, to]))
}

fn objcopy() -> Option<PathBuf> {
    let versioned = (18..=30).rev().map(|major| format!("llvm-objcopy-{major}"));
    versioned.chain(["llvm-objcopy".to_owned()]).find_map(|name| process::find_program(&name))
}

/// Fails if the committed object was not made from these sources.
pub(crate) fn check() -> Result<()> {
    let record = Record::read()?;
    ensure!(
        record.sources == hash_sources()?,
        "gpureap/bpf/gpureap.bpf.o is older than its sources: run `cargo xtask ebpf` and commit gpureap/bpf"
    );
    ensure!(
        record.object == hash_file(&object_path())?,
        "gpureap/bpf/gpureap.bpf.o is not the object that SOURCES.sha256 names: run `cargo xtask ebpf` and commit gpureap/bpf"
    );
    println!("gpureap.bpf.o matches its sources ({})", record.versions);
    Ok(())
}

/// Checks the committed object, then builds it afresh; the tests run on the fresh one either way.
pub(crate) fn check_and_build(choice: Choice) -> Result<()> {
    let committed = check().and_then(|()| Record::read());
    let fresh = build(choice)?;
    let committed = committed?;
    ensure!(
        committed.versions != fresh.versions || committed.object == fresh.object,
        "the same sources and tools gave another gpureap.bpf.o than the committed one: commit gpureap/bpf as it is now"
    );
    Ok(())
}

/// What `SOURCES.sha256` says. The object's line is in `sha256sum`'s format.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) sources: String,
    pub(crate) object: String,
    pub(crate) versions: String,
}

impl std::fmt::Display for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { sources, object, versions } = self;
        writeln!(f, "# Written by `cargo xtask ebpf`. Sources: gpureap-ebpf, gpureap-common and the locked aya-ebpf.")?;
        writeln!(f, "# Built with: {versions}")?;
        writeln!(f, "# Sources: {sources}")?;
        writeln!(f, "{object}  gpureap.bpf.o")
    }
}

impl Record {
    pub(crate) fn read() -> Result<Self> {
        let path = record_path();
        let text = fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}: run `cargo xtask ebpf`", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is damaged: run `cargo xtask ebpf`", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let after = |prefix: &str| text.lines().find_map(|line| line.strip_prefix(prefix));
        let object = text.lines().find_map(|line| line.strip_suffix("  gpureap.bpf.o"));
        match (after("# Sources: "), object, after("# Built with: ")) {
            (Some(sources), Some(object), Some(versions)) if !sources.contains(' ') => {
                Ok(Self { sources: sources.into(), object: object.into(), versions: versions.into() })
            }
            _ => bail!("no hashes found"),
        }
    }
}

fn hash_file(path: &Path) -> Result<String> {
    Ok(hex(&Sha256::digest(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?)))
}

/// A hash over the kernel programs' files and the versions of the crates that they are built on.
fn hash_sources() -> Result<String> {
    let mut parts = Vec::new();
    for name in CRATES {
        for entry in WalkDir::new(root().join(name)) {
            let entry = entry?;
            if entry.file_type().is_file() {
                let path = entry.path().strip_prefix(root()).expect("lies below the root");
                let path = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
                parts.push((path.to_owned(), fs::read(entry.path())?));
            }
        }
    }
    let lock = fs::read_to_string(root().join("Cargo.lock"))?;
    parts.push(("Cargo.lock".to_owned(), locked(&lock, "aya-ebpf")?.into_bytes()));
    Ok(hash_parts(parts))
}

/// The versions and checksums of the locked packages whose name starts with `prefix`.
fn locked(lock: &str, prefix: &str) -> Result<String> {
    #[derive(serde::Deserialize)]
    struct Lock {
        package: Vec<Package>,
    }
    #[derive(serde::Deserialize)]
    struct Package {
        name: String,
        version: String,
        checksum: Option<String>,
    }
    let mut text = String::new();
    for Package { name, version, checksum } in toml::from_str::<Lock>(lock)?.package {
        if name.starts_with(prefix) {
            writeln!(text, "{name} {version} {}", checksum.unwrap_or_default())?;
        }
    }
    Ok(text)
}

/// Names and lengths go in too, so that no two trees run together to the same bytes.
fn hash_parts(mut parts: Vec<(String, Vec<u8>)>) -> String {
    parts.sort();
    let mut hash = Sha256::new();
    for (name, contents) in &parts {
        hash.update(format!("{name}\0{}\0", contents.len()));
        hash.update(contents);
    }
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(list: &[(&str, &str)]) -> Vec<(String, Vec<u8>)> {
        list.iter().map(|(name, contents)| ((*name).to_owned(), contents.as_bytes().to_vec())).collect()
    }

    #[test]
    fn source_hash_does_not_depend_on_the_order_of_files() {
        let one = hash_parts(parts(&[("a/lib.rs", "x"), ("a/Cargo.toml", "y")]));
        let other = hash_parts(parts(&[("a/Cargo.toml", "y"), ("a/lib.rs", "x")]));
        assert_eq!(one, other);
    }

    #[test]
    fn source_hash_sees_renames_edits_and_moved_borders() {
        let base = hash_parts(parts(&[("a", "xy"), ("b", "z")]));
        for changed in [[("a", "xy"), ("c", "z")], [("a", "xz"), ("b", "z")], [("a", "x"), ("b", "yz")]] {
            assert_ne!(base, hash_parts(parts(&changed)), "{changed:?}");
        }
    }

    #[test]
    fn record_survives_the_file() {
        let record = Record { sources: "ab".into(), object: "cd".into(), versions: "rustc 1.96.0; bpf-linker".into() };
        assert_eq!(Record::parse(&record.to_string()).unwrap(), record);
        Record::parse("").unwrap_err();
    }

    #[test]
    fn locked_takes_only_the_named_packages() {
        let lock = "[[package]]\nname = \"aya\"\nversion = \"0.14.0\"\nchecksum = \"1\"\n\
                    [[package]]\nname = \"aya-ebpf\"\nversion = \"0.2.1\"\nchecksum = \"2\"\n";
        assert_eq!(locked(lock, "aya-ebpf").unwrap(), "aya-ebpf 0.2.1 2\n");
    }
}
