//! What cargo itself cannot do for gpureap: `cargo xtask --help`.

#![expect(clippy::print_stdout, reason = "a tool for the terminal")]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod ebpf;
mod process;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, checks and tests gpureap")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the kernel programs into gpureap/bpf, ready to commit
    Ebpf {
        /// Only say whether the committed object is made from these sources
        #[arg(long)]
        check: bool,
        #[arg(long, value_enum, default_value = "auto")]
        toolchain: ebpf::Choice,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Ebpf { check: true, toolchain: _ } => ebpf::check(),
        Task::Ebpf { check: false, toolchain } => ebpf::build(toolchain).map(drop),
    }
}
