//! From a parsed command line to the command.

use std::{env, ffi::OsString, fmt, io, io::IsTerminal as _};

use clap::{Parser as _, error::ErrorKind};
use tracing::{Level, level_filters::LevelFilter};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Full, Writer},
    },
    registry::LookupSpan,
};

use crate::{
    cli::{Cli, Command, Global},
    commands,
    config::{Config, Paths},
    daemon, demo, doctor,
    error::Failure,
    exit_code::Exit,
    limits, reap, top,
};

/// Help and the version are printed here, and end the process.
pub fn parse(words: Vec<OsString>) -> Result<Cli, Failure> {
    Cli::try_parse_from(words).map_err(|error| {
        let asks = !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
        if asks { error.exit() } else { Failure::usage(sentence(&error.render().to_string())) }
    })
}

/// What clap writes in paragraphs, as one sentence like any other.
fn sentence(text: &str) -> String {
    // From the end: a value that is quoted may hold anything.
    let cut = |text: &str, at: &str| text.rfind(at).map_or(text, |end| &text[..end]).to_owned();
    let text = cut(&cut(text, "\n\nFor more information"), "\n\nUsage: gpureap ");
    let text = text.trim_end().strip_prefix("error: ").unwrap_or(&text).to_owned();
    let joined = text.replace("\n\n  ", "; ").replace(":\n  ", ": ").replace("\n  [", " [").replace("\n  ", ", ");
    format!("{joined}; try --help")
}

pub fn run(cli: &Cli) -> anyhow::Result<Exit> {
    let Cli { global, command } = cli;
    log(global);
    limits::raise();
    command_of(global, command).map_err(limits::explain)
}

fn command_of(global: &Global, command: &Command) -> anyhow::Result<Exit> {
    let config = || Config::load(Paths::from_env(|name| env::var_os(name)), global.overrides());
    match command {
        Command::Daemon(args) => daemon::run(args, &Config { kernel_log: args.kernel_log, ..config()? }),
        Command::Holders(args) => commands::holders::run(args, &config()?),
        Command::Reap(args) => reap::run(args, &config()?),
        Command::Blockers(args) => commands::blockers::run(args, &config()?),
        Command::Check(args) => commands::check::run(args, &config()?),
        Command::Fence(args) => commands::fence::run(args, &config()?),
        Command::Unfence(args) => commands::fence::unfence(args, &config()?),
        Command::Events(args) => commands::events::run(args, &config()?),
        Command::Report(args) => commands::report::run(args, &config()?),
        Command::Wait(args) => commands::wait::run(args, &config()?),
        Command::Top(args) => top::run(args, global, &config()?),
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
        // It would say on stderr that stderr cannot be written, and panic.
        .log_internal_errors(false)
        .event_format(Line { plain: Format::default().without_time().with_target(false), journal: is_journal() })
        .finish();
    drop(tracing::subscriber::set_global_default(subscriber));
}

/// Whether stderr is systemd's journal (`JOURNAL_STREAM`, systemd.exec(5)), which reads a level from each line's begin.
fn is_journal() -> bool {
    let stream = env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(io::stderr()).is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// One line for each event: `LEVEL text`, or for the journal `<N>text` (sd-daemon(3)).
struct Line {
    plain: Format<Full, ()>,
    journal: bool,
}

const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        if !self.journal {
            return self.plain.format_event(context, writer, event);
        }
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_as_the_journal_knows_them() {
        let levels = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        assert_eq!(levels.map(priority), [3, 4, 6, 7, 7]);
        assert!(!is_journal(), "tests do not write into the journal");
    }
    use crate::exit_code::Exit;

    #[test]
    fn a_wrong_command_line_is_one_sentence() {
        for (line, expected) in [
            (&["frobnicate"][..], "unrecognized subcommand 'frobnicate'"),
            (&["holders", "--frobnicate"], "unexpected argument '--frobnicate' found"),
            (&["holders", "--by", "x"], "invalid value 'x' for '--by <BY>' [possible values: minor, index]"),
            (&["blockers"], "the following required arguments were not provided: --for <OPERATION>"),
            (&["reap", "--now", "--grace", "3s"], "the argument '--now' cannot be used with '--grace <TIME>'"),
            (
                &["holders", "--env", "a\n\nUsage: b\u{202e}"],
                "invalid value 'a\n\nUsage: b\u{202e}' for '--env <KEY=VAL>': `a\n\nUsage: b\u{202e}` is not KEY=VAL",
            ),
        ] {
            let words = std::iter::once("gpureap").chain(line.iter().copied()).map(OsString::from).collect();
            let Failure { exit, message } = parse(words).unwrap_err();
            assert_eq!((exit, message), (Exit::Usage, format!("{expected}; try --help")));
        }
    }
}
