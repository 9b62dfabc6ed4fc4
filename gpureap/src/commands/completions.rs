//! `gpureap completions SHELL`.

use crate::{
    cli::{self, CompletionsArgs},
    exit_code::Exit,
    out,
};

pub fn run(args: &CompletionsArgs) -> anyhow::Result<Exit> {
    let CompletionsArgs { shell } = args;
    let mut script = Vec::new();
    clap_complete::generate(*shell, &mut cli::command(), "gpureap", &mut script);
    out::raw(&script)?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_knows_the_commands() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut cli::command(), "gpureap", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("holders") && script.contains("dry-run"), "{shell}");
            assert!(!script.contains("actor"), "{shell}");
        }
    }
}
