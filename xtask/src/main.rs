//! What cargo itself cannot do for gpureap: `cargo xtask --help`.

#![expect(clippy::print_stdout, reason = "a tool for the terminal")]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod artifacts;
mod bench;
mod dist;
mod ebpf;
mod fuzz;
mod initramfs;
mod kernels;
mod libtest;
mod lint;
mod matrix;
mod process;
mod qemu;
mod setup;
mod test;
mod vm;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, checks and tests gpureap")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what the other tasks need (Debian and Ubuntu, as root), or say what is missing
    Setup,
    /// Build the kernel programs into gpureap/bpf, ready to commit
    Ebpf {
        /// Only say whether the committed object is made from these sources
        #[arg(long)]
        check: bool,
        #[arg(long, value_enum, default_value = "auto")]
        toolchain: ebpf::Choice,
    },
    /// The cache of Debian's kernels
    #[command(subcommand)]
    Kernel(KernelTask),
    /// Run the kernel tests in QEMU
    Vm(vm::Options),
    /// Run every probe set on every kernel in QEMU, and write docs/KERNELS.md from it (hours)
    Matrix(matrix::Options),
    /// Formatting, clippy, licences, documentation: every warning is an error
    Lint,
    /// Run the fuzz targets
    Fuzz(fuzz::Options),
    /// Pack gpureap: a Debian package and a tarball in target/dist, with their sums
    Dist(dist::Options),
    /// Measure gpureap, beside what people use and what it costs others (mostly as root)
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Everything that continuous integration runs
    Test(test::Options),
}

#[derive(Subcommand)]
enum KernelTask {
    /// The kernels there are, and what is in the cache
    List,
    /// Bring the newest build of a kernel into the cache
    Fetch {
        #[arg(required = true)]
        names: Vec<String>,
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
        Task::Setup => setup::setup(),
        Task::Ebpf { check: true, toolchain: _ } => ebpf::check(),
        Task::Ebpf { check: false, toolchain } => ebpf::build(toolchain).map(drop),
        Task::Kernel(KernelTask::List) => {
            kernels::list();
            Ok(())
        }
        Task::Kernel(KernelTask::Fetch { names }) => {
            names.iter().try_for_each(|name| kernels::Kernel::named(name)?.fetch(true).map(drop))
        }
        Task::Vm(options) => vm::command(&options),
        Task::Fuzz(options) => fuzz::command(&options),
        Task::Matrix(options) => matrix::command(&options),
        Task::Bench(bench) => bench::bench(&bench),
        Task::Dist(options) => dist::command(&options),
        Task::Lint => lint::lint().and_then(|()| lint::docs()),
        Task::Test(options) => test::test(options),
    }
}
