//! `gpureap man DIR`: one page for the program and one for each command.

use std::{fs, io, path::Path};

use crate::{
    cli::{self, ManArgs},
    error::Failure,
    exit_code::Exit,
};

pub fn run(args: &ManArgs) -> anyhow::Result<Exit> {
    write(&args.dir)?;
    Ok(Exit::Done)
}

fn write(dir: &Path) -> anyhow::Result<()> {
    // The `help` command has a page of its own otherwise, for each command once more.
    let command = cli::command().disable_help_subcommand(true);
    fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(command, dir)).map_err(|error| {
        let exit = if error.kind() == io::ErrorKind::PermissionDenied { Exit::NotPermitted } else { Exit::Internal };
        Failure::new(exit, format!("cannot write man pages to {}: {error}", dir.display())).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::exit_of;

    #[test]
    fn a_page_for_each_command() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).unwrap();
        let mut names: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let command = cli::command();
        let commands = command.get_subcommands().map(|command| format!("gpureap-{}.1", command.get_name()));
        let mut expected: Vec<String> = commands.chain(["gpureap.1".to_owned()]).collect();
        expected.sort();
        assert_eq!(names, expected);
        let page = fs::read_to_string(dir.path().join("gpureap-reap.1")).unwrap();
        assert!(page.contains("Example"), "{page}");
        assert!(!fs::read_to_string(dir.path().join("gpureap.1")).unwrap().contains("actor"));
    }

    #[test]
    fn the_directory_is_made_or_one_sentence_says_why_not() {
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("share/man/man1");
        write(&absent).unwrap();
        assert!(absent.join("gpureap.1").exists());
        let in_a_file = absent.join("gpureap.1/man1");
        let error = write(&in_a_file).unwrap_err();
        assert_eq!(exit_of(&error), Exit::Internal);
        assert!(format!("{error:#}").starts_with(&format!("cannot write man pages to {}: ", in_a_file.display())));
    }
}
