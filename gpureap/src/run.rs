//! From a parsed command line to the command.

use std::{env, io, io::IsTerminal as _};

use tracing::level_filters::LevelFilter;

use crate::{
    cli::{Cli, Command, Global},
    commands,
    config::{Config, Paths},
    daemon, demo, doctor,
    exit_code::Exit,
    reap,
};

pub fn run(cli: &Cli) -> anyhow::Result<Exit> {
    let Cli { global, command } = cli;
    log(global);
    let config = || Config::load(Paths::from_env(|name| env::var_os(name)), global.overrides());
    match command {
        Command::Daemon(args) => daemon::run(args, &config()?),
        Command::Holders(args) => commands::holders::run(args, &config()?),
        Command::Reap(args) => reap::run(args, &config()?),
        Command::Blockers(args) => commands::blockers::run(args, &config()?),
        Command::Fence(args) => commands::fence::run(args, &config()?),
        Command::Unfence(args) => commands::fence::unfence(args, &config()?),
        Command::Events(args) => commands::events::run(args, &config()?),
        Command::Report(args) => commands::report::run(args, &config()?),
        Command::Wait(args) => commands::wait::run(args, &config()?),
        Command::Doctor(args) => doctor::run(args, &config()?),
        Command::Demo(args) => demo::run(args, &config()?),
        Command::Completions(args) => commands::completions::run(args),
        Command::Man(args) => commands::man::run(args),
    }
}

/// Diagnostics on stderr; a later subscriber, as in tests, leaves the first in place.
fn log(global: &Global) {
    let level = match (global.quiet, global.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, 2) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let colours = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(colours)
        .without_time()
        .with_target(false)
        // It would say on stderr that stderr cannot be written, and panic.
        .log_internal_errors(false)
        .finish();
    drop(tracing::subscriber::set_global_default(subscriber));
}
