//! `gpureap man DIR`: one page for the program and one for each command.

use std::path::Path;

use anyhow::Context as _;

use crate::{
    cli::{self, ManArgs},
    exit_code::Exit,
};

pub fn run(args: &ManArgs) -> anyhow::Result<Exit> {
    write(&args.dir)?;
    Ok(Exit::Done)
}

fn write(dir: &Path) -> anyhow::Result<()> {
    // The `help` command has a page of its own otherwise, for each command once more.
    let command = cli::command().disable_help_subcommand(true);
    clap_mangen::generate_to(command, dir).with_context(|| format!("cannot write man pages to {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_for_each_command() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let expected = ["-completions", "-daemon", "-demo", "-doctor", "-holders", "-man", "-reap", ""];
        assert_eq!(names, expected.map(|part| format!("gpureap{part}.1")));
        let page = std::fs::read_to_string(dir.path().join("gpureap-reap.1")).unwrap();
        assert!(page.contains("Example"), "{page}");
        assert!(write(&dir.path().join("absent")).is_err());
    }
}
