//! Running other programs: every failure names the whole command.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

/// The workspace's root, wherever the command was started.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Runs `command` with our own stdout and stderr.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", shown(command)))?;
    ensure!(status.success(), "{} failed ({status})", shown(command));
    Ok(())
}

/// Runs `command` and returns its stdout; stderr stays ours.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start {}", shown(command)))?;
    ensure!(output.status.success(), "{} failed ({})", shown(command), output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{} did not print UTF-8", shown(command)))
}

/// As [`output`], for questions where "no" or "not there" is an answer.
pub(crate) fn probe(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command as one would type it, its own environment variables in front.
pub(crate) fn shown(command: &Command) -> String {
    let quote = |word: &OsStr| {
        let word = word.to_string_lossy();
        if word.contains([' ', '"', '\x1f']) { format!("{word:?}") } else { word.into_owned() }
    };
    let mut words: Vec<String> = command
        .get_envs()
        .filter_map(|(name, value)| Some(format!("{}={}", name.to_string_lossy(), quote(value?))))
        .collect();
    words.push(quote(command.get_program()));
    words.extend(command.get_args().map(quote));
    words.join(" ")
}

/// Where cargo keeps its files, and `cargo install` its programs.
pub(crate) fn cargo_home() -> PathBuf {
    let home = || std::env::var_os("HOME").map_or_else(|| "/root".into(), PathBuf::from);
    std::env::var_os("CARGO_HOME").map_or_else(|| home().join(".cargo"), PathBuf::from)
}

/// Finds a program in cargo's own bin directory or on PATH.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(cargo_home().join("bin"))
        .chain(std::env::split_paths(&path))
        .map(|directory| directory.join(name))
        .find(|file| file.is_file())
}

/// The cargo that runs us, so that every step uses the same toolchain.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}
