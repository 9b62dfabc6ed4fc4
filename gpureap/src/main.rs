//! Parse, run, map the result to an exit code.

use std::process::ExitCode;

use clap::Parser as _;
use gpureap::{cli::Cli, error::exit_of, out, run};

fn main() -> ExitCode {
    match run::run(&Cli::parse()) {
        Ok(exit) => exit.into(),
        Err(error) if out::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            out::diagnostic(&error);
            exit_of(&error).into()
        }
    }
}
