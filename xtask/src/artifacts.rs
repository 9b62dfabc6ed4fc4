//! One static build of everything the test runners execute, on this machine or in a VM.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use crate::process::{self, root};

/// An explicit target keeps build scripts and macros out of the flags, and shared with plain cargo.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const STATIC: &str = "-Ctarget-feature=+crt-static";
/// Always built together: another selection would unify other features and compile the dependencies again.
const PACKAGES: [&str; 3] = ["gpureap", "gpureap-common", "gpureap-tests"];
pub(crate) const KERNEL_TESTS: &str = "gpureap-tests";
/// How the names of the tests begin that start Slurm, Prometheus and the like.
const OPS: &str = "ops_";

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Executable {
    pub(crate) name: String,
    pub(crate) package: String,
    pub(crate) path: PathBuf,
    /// Where the package lies: its tests run from there.
    pub(crate) directory: PathBuf,
}

#[derive(Debug, Default)]
pub(crate) struct Artifacts {
    pub(crate) binaries: Vec<Executable>,
    pub(crate) tests: Vec<Executable>,
}

impl Artifacts {
    /// The named tests, or all if none is named.
    pub(crate) fn build(tests: &[String]) -> Result<Self> {
        let mut command = process::cargo();
        command.args(["build", "--lib", "--bins"]).args(selection());
        if tests.is_empty() {
            command.arg("--tests");
        }
        for test in tests {
            command.args(["--test", test]);
        }
        command.arg("--message-format=json-render-diagnostics").env("RUSTFLAGS", STATIC).stdout(Stdio::piped());
        let messages = process::output(&mut command)?;
        let artifacts = Self::parse(&messages)?;
        ensure!(artifacts.binaries.iter().any(|binary| binary.name == "gpureap"), "cargo built no gpureap");
        Ok(artifacts)
    }

    fn parse(messages: &str) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Message {
            reason: String,
            executable: Option<PathBuf>,
            manifest_path: Option<PathBuf>,
            target: Option<Target>,
            profile: Option<Profile>,
        }
        #[derive(serde::Deserialize)]
        struct Target {
            name: String,
        }
        #[derive(serde::Deserialize)]
        struct Profile {
            test: bool,
        }
        let mut artifacts = Self::default();
        for line in messages.lines().filter(|line| line.starts_with('{')) {
            let Message { reason, executable, manifest_path, target, profile } =
                serde_json::from_str(line).with_context(|| format!("cargo said {line}"))?;
            let (Some(path), Some(manifest), Some(target), Some(profile)) =
                (executable, manifest_path, target, profile)
            else {
                continue;
            };
            if reason != "compiler-artifact" {
                continue;
            }
            let directory = manifest.parent().unwrap_or(Path::new("/")).to_path_buf();
            let package = match directory.file_name().and_then(|name| name.to_str()) {
                Some("tests") => KERNEL_TESTS.to_owned(),
                Some(name) => name.to_owned(),
                None => String::new(),
            };
            let list = if profile.test { &mut artifacts.tests } else { &mut artifacts.binaries };
            list.push(Executable { name: target.name, package, path, directory });
        }
        artifacts.binaries.sort_by(|a, b| a.name.cmp(&b.name));
        artifacts.tests.sort_by(|a, b| (&a.package, &a.name).cmp(&(&b.package, &b.name)));
        Ok(artifacts)
    }

    /// The tests that need a kernel and root.
    pub(crate) fn kernel_tests(&self) -> impl Iterator<Item = &Executable> {
        self.host_tests().filter(|test| !test.name.starts_with(OPS))
    }

    /// Those that need other people's servers as well.
    pub(crate) fn ops_tests(&self) -> impl Iterator<Item = &Executable> {
        self.host_tests().filter(|test| test.name.starts_with(OPS))
    }

    fn host_tests(&self) -> impl Iterator<Item = &Executable> {
        self.tests.iter().filter(|test| test.package == KERNEL_TESTS && !self.is_binary(test))
    }

    pub(crate) fn unit_tests(&self) -> impl Iterator<Item = &Executable> {
        self.tests.iter().filter(|test| test.package != KERNEL_TESTS)
    }

    /// The test build of a helper program holds no tests.
    fn is_binary(&self, test: &Executable) -> bool {
        self.binaries.iter().any(|binary| binary.name == test.name && binary.package == test.package)
    }

    pub(crate) fn gpureap(&self) -> &Executable {
        self.binaries.iter().find(|binary| binary.name == "gpureap").expect("checked when built")
    }
}

/// The library that plays NVML. A static build makes no shared libraries, so it is one of its own.
pub(crate) fn fake_nvml() -> Result<PathBuf> {
    let mut command = process::cargo();
    command.args(["build", "--locked", "--package", "fake-nvml", "--message-format=json-render-diagnostics"]);
    let messages = process::output(command.env("RUSTFLAGS", ""))?;
    shared_library(&messages).context("cargo built no library that plays NVML")
}

fn shared_library(messages: &str) -> Option<PathBuf> {
    #[derive(serde::Deserialize)]
    struct Message {
        #[serde(default)]
        filenames: Vec<PathBuf>,
    }
    messages
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .flat_map(|Message { filenames }| filenames)
        .find(|path| path.file_name().is_some_and(|name| name == "libfake_nvml.so"))
}

/// Runs the documentation's examples with the same build.
pub(crate) fn doc_tests() -> Command {
    let mut command = process::cargo();
    command.args(["test", "--doc"]).args(selection()).env("RUSTFLAGS", STATIC).env("RUSTDOCFLAGS", STATIC);
    command
}

fn selection() -> Vec<&'static str> {
    let mut args = vec!["--locked", "--target", TARGET];
    for package in PACKAGES {
        args.extend(["--package", package]);
    }
    args
}

/// A copy without symbols for the initramfs, where every byte is memory.
pub(crate) fn strip(executable: &Path, into: &Path) -> Result<PathBuf> {
    let name = executable.file_name().with_context(|| format!("{} has no name", executable.display()))?;
    let stripped = into.join(name);
    strip_to(executable, &stripped)?;
    Ok(stripped)
}

pub(crate) fn strip_to(executable: &Path, to: &Path) -> Result<()> {
    process::run(Command::new("strip").arg("--strip-all").arg("-o").args([to, executable]))
}

/// gpureap as users get it, dynamic, for NVML is loaded at run time.
pub(crate) fn program(profile: &str) -> Result<PathBuf> {
    let mut command = process::cargo();
    command.args(["build", "--locked", "--package=gpureap", "--bin=gpureap", "--profile", profile]);
    command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let Artifacts { binaries, tests: _ } = Artifacts::parse(&process::output(&mut command)?)?;
    let found = binaries.into_iter().find(|binary| binary.name == "gpureap");
    Ok(found.context("cargo built no gpureap")?.path)
}

/// Files that tests read at run time, by the paths they were compiled with.
pub(crate) fn fixtures() -> Option<PathBuf> {
    let directory = root().join("tests/fixtures");
    directory.is_dir().then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_that_plays_nvml() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","filenames":["/t/deps/libserde_derive.so"]}"#,
            "\n",
            r#"{"reason":"compiler-artifact","filenames":["/t/libfake_nvml.rlib","/t/libfake_nvml.so"]}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        assert_eq!(shared_library(messages).as_deref(), Some(Path::new("/t/libfake_nvml.so")));
        assert_eq!(shared_library(""), None);
    }

    #[test]
    fn executables_from_cargos_messages() {
        let messages = r#"
{"reason":"compiler-artifact","manifest_path":"/w/gpureap/Cargo.toml","target":{"name":"gpureap","kind":["lib"]},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/w/gpureap/Cargo.toml","target":{"name":"gpureap","kind":["bin"]},"profile":{"test":false},"executable":"/w/t/gpureap"}
{"reason":"compiler-artifact","manifest_path":"/w/gpureap/Cargo.toml","target":{"name":"gpureap","kind":["lib"]},"profile":{"test":true},"executable":"/w/t/gpureap-1"}
{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","target":{"name":"vm-init","kind":["bin"]},"profile":{"test":false},"executable":"/w/t/vm-init"}
{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","target":{"name":"vm-init","kind":["bin"]},"profile":{"test":true},"executable":"/w/t/vm-init-2"}
{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","target":{"name":"reap","kind":["test"]},"profile":{"test":true},"executable":"/w/t/reap-3"}
{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","target":{"name":"ops_slurm","kind":["test"]},"profile":{"test":true},"executable":"/w/t/ops_slurm-4"}
{"reason":"build-finished","success":true}
"#;
        let artifacts = Artifacts::parse(messages).unwrap();
        let names =
            |list: Vec<&Executable>| list.iter().map(|item| item.path.display().to_string()).collect::<Vec<_>>();
        assert_eq!(names(artifacts.binaries.iter().collect()), ["/w/t/gpureap", "/w/t/vm-init"]);
        assert_eq!(names(artifacts.unit_tests().collect()), ["/w/t/gpureap-1"]);
        assert_eq!(names(artifacts.kernel_tests().collect()), ["/w/t/reap-3"]);
        assert_eq!(names(artifacts.ops_tests().collect()), ["/w/t/ops_slurm-4"]);
        assert_eq!(artifacts.gpureap().directory, Path::new("/w/gpureap"));
    }
}
