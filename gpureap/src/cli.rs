//! The command line. Help, completions and man pages all come from here.

use std::{ffi::OsStr, path::PathBuf, time::Duration};

use clap::{
    Arg, ArgAction, Args, CommandFactory as _, Parser, Subcommand, ValueEnum,
    builder::{EnumValueParser, PossibleValue, TypedValueParser},
    parser::ValueSource,
};

use crate::{
    config::{Overrides, StandIn, duration},
    gpu::select::By,
    model::{Backend, Source},
};

/// Who holds the GPU, and how to get it back.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "gpureap",
    version,
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Example:\n  gpureap holders\n  gpureap reap --gpu 0 --dry-run"
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Config file [default: /etc/gpureap/config.toml, may be absent]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Count a character device as a GPU: kind=standin,major=4,minor=20,node=/dev/tty20 (repeatable)
    #[arg(long, global = true, value_name = "SPEC", action = ArgAction::Append)]
    pub device: Vec<StandIn>,
    /// Probe set of the tracer
    #[arg(long, global = true, value_parser = BackendParser, env = "GPUREAP_BACKEND", default_value = "auto",
        hide_env_values = true)]
    pub backend: BackendChoice,
    /// Say more on stderr (repeatable)
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet")]
    pub verbose: u8,
    /// Say nothing on stderr but errors
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

impl Global {
    pub fn overrides(&self) -> Overrides {
        let Self { config, device, backend, verbose: _, quiet: _ } = self;
        let backend = match backend {
            BackendChoice::Auto => None,
            BackendChoice::Kprobe => Some(Backend::Kprobe),
            BackendChoice::Fentry => Some(Backend::Fentry),
            BackendChoice::Gate => Some(Backend::Gate),
        };
        Overrides { config: config.clone(), devices: device.clone(), backend }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// The first that this kernel lets in: kprobe, fentry, gate
    Auto,
    Kprobe,
    Fentry,
    Gate,
}

/// An empty variable counts as unset, as it does for the paths.
#[derive(Clone, Copy, Debug)]
struct BackendParser;

impl TypedValueParser for BackendParser {
    type Value = BackendChoice;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<BackendChoice, clap::Error> {
        EnumValueParser::new().parse_ref(command, arg, value)
    }

    fn parse_ref_(
        &self,
        command: &clap::Command,
        arg: Option<&Arg>,
        value: &OsStr,
        source: ValueSource,
    ) -> Result<BackendChoice, clap::Error> {
        if source == ValueSource::EnvVariable && value.is_empty() {
            return Ok(BackendChoice::Auto);
        }
        self.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(BackendChoice::value_variants().iter().filter_map(ValueEnum::to_possible_value)))
    }
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Trace who opens and closes GPUs, always on
    #[command(after_help = "Example:\n  gpureap daemon\n  systemctl start gpureap")]
    Daemon(DaemonArgs),
    /// Show who holds what, now
    #[command(visible_alias = "ps", after_help = "Example:\n  gpureap holders\n  gpureap holders --gpu 0 --json")]
    Holders(HoldersArgs),
    /// Free GPUs: choose, plan, signal, wait, verify
    #[command(after_help = REAP_HELP)]
    Reap(ReapArgs),
    /// Wait until GPUs are free
    #[command(after_help = WAIT_HELP)]
    Wait(WaitArgs),
    /// Say what this host allows, and test it
    #[command(after_help = "Example:\n  gpureap doctor")]
    Doctor(DoctorArgs),
    /// Run the whole job with real processes, on a GPU or on stand-in devices
    #[command(after_help = "Example:\n  gpureap demo\n  gpureap demo --standin")]
    Demo(DemoArgs),
    /// Print a completion script
    #[command(after_help = "Example:\n  gpureap completions bash > /etc/bash_completion.d/gpureap")]
    Completions(CompletionsArgs),
    /// Write the man pages into a directory
    #[command(after_help = "Example:\n  gpureap man /usr/local/share/man/man1")]
    Man(ManArgs),
}

const REAP_HELP: &str = "\
Example:
  gpureap reap --gpu 0 --dry-run
  gpureap reap --gpu 0 --grace 30s --yes
  gpureap reap --now --yes

Exit codes:
  0 free, verified; 3 still held; 4 held by a process that cannot be killed; 5 held only by protected processes;
  6 no process left but a kernel reference remains; 7 not permitted; 8 this host cannot do it";

const WAIT_HELP: &str = "\
Example:
  gpureap wait --gpu 0
  gpureap wait --gpu 0 --timeout 5m --json
  gpureap wait --match any --ignore-monitors --timeout 1m

Exit codes:
  0 free, verified; when the time is up: 3 still held, 4 held by a process that SIGKILL does not end, 5 held only by
  monitors and protected processes, 6 no process left but a kernel reference remains; 7 not permitted to see who holds;
  8 this host cannot do it";

/// Which devices and processes.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Choosing")]
pub struct Choosing {
    /// GPU by minor, node path, UUID (or its beginning), PCI address, or `all` (repeatable) [default: all]
    #[arg(long, value_name = "GPU", action = ArgAction::Append)]
    pub gpu: Vec<String>,
    /// What a bare number in --gpu means: the N of /dev/nvidiaN, or nvidia-smi's index
    #[arg(long, value_enum, default_value_t = By::Minor)]
    pub by: By,
    /// Only these processes (repeatable)
    #[arg(long, value_name = "PID", action = ArgAction::Append, value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Vec<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct DaemonArgs {
    /// Leave the tracer attached when the daemon ends
    #[arg(long)]
    pub keep: bool,
}

#[derive(Clone, Debug, Default, Args)]
pub struct HoldersArgs {
    #[command(flatten)]
    pub choosing: Choosing,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Where to look [default: the tracer's map, else a sweep, else /proc]
    #[arg(long, value_enum)]
    pub source: Option<Source>,
    /// Walk all tasks in the kernel instead of reading the map
    #[arg(long, conflicts_with = "source")]
    pub sweep: bool,
}

/// Which handles count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Match {
    /// Processes that use the GPU: it is mapped, or was by the process they were forked from
    Attached,
    /// Every process with a handle, as a reset needs
    Any,
}

#[derive(Clone, Debug, Args)]
pub struct ReapArgs {
    #[command(flatten)]
    pub choosing: Choosing,
    /// Which handles count [default: attached with --gpu, any without]
    #[arg(long = "match", value_enum, help_heading = "Choosing")]
    pub matching: Option<Match>,
    /// KILL at once, without TERM
    #[arg(long, conflicts_with = "grace")]
    pub now: bool,
    /// Time between TERM and KILL: 10s, 2m, or a number of seconds
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub grace: Duration,
    /// Time to wait for the GPUs to be free after the last signal
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,
    /// Print the plan and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Also processes of the session that this command runs in
    #[arg(long)]
    pub include_own_session: bool,
}

impl ReapArgs {
    /// The default of `--match` follows `--gpu`: on GPU 1, a job that works on GPU 0 holds handles too.
    pub fn matching(&self) -> Match {
        self.matching.unwrap_or(if self.choosing.gpu.is_empty() { Match::Any } else { Match::Attached })
    }
}

#[derive(Clone, Debug, Default, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub choosing: Choosing,
    /// Which handles count [default: attached with --gpu, any without]
    #[arg(long = "match", value_enum, help_heading = "Choosing")]
    pub matching: Option<Match>,
    /// Give up after this time: 10s, 2m, or a number of seconds [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Do not wait for monitors and protected system processes
    #[arg(long)]
    pub ignore_monitors: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

impl WaitArgs {
    /// As for `reap`: what it would end is what is waited for.
    pub fn matching(&self) -> Match {
        self.matching.unwrap_or(if self.choosing.gpu.is_empty() { Match::Any } else { Match::Attached })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct DoctorArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct DemoArgs {
    /// Use stand-in devices even when there is a GPU
    #[arg(long)]
    pub standin: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

#[derive(Clone, Debug, Args)]
pub struct ManArgs {
    /// Directory for the pages, made if it is not there
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// The definitions, for completions and man pages.
pub fn command() -> clap::Command {
    Cli::command()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("gpureap").chain(line.split_whitespace()))
    }

    #[test]
    fn definitions_are_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_help_has_an_example() {
        let mut all = command();
        all.build();
        for sub in all.get_subcommands_mut().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
            let help = sub.render_long_help().to_string();
            assert!(help.contains("Example:\n  gpureap "), "{} has no example", sub.get_name());
        }
    }

    #[test]
    fn examples_in_the_help_parse() {
        let mut all = command();
        all.build();
        let helps: Vec<String> =
            all.get_subcommands().filter_map(|sub| sub.get_after_help()).map(ToString::to_string).collect();
        for line in helps.iter().flat_map(|help| help.lines()).filter_map(|line| line.strip_prefix("  gpureap ")) {
            let line = line.split(" > ").next().unwrap();
            parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn reap_defaults() {
        let args = |line: &str| match parse(line).unwrap().command {
            Command::Reap(args) => args,
            other => panic!("{other:?}"),
        };
        let plain = args("reap");
        assert_eq!((plain.matching(), plain.grace, plain.now), (Match::Any, Duration::from_secs(10), false));
        assert_eq!(args("reap --gpu 1").matching(), Match::Attached);
        assert_eq!(args("reap --gpu 1 --match any --timeout 1m30s").timeout, Duration::from_secs(90));
        let bare = args("reap --grace 5 --timeout 60");
        assert_eq!((bare.grace, bare.timeout), (Duration::from_secs(5), Duration::from_mins(1)));
        let both = args("reap --gpu 1 --gpu 2 --pid 7 --by index -y");
        assert_eq!((both.choosing.gpu.len(), both.choosing.pid, both.choosing.by), (2, vec![7], By::Index));
    }

    #[test]
    fn usage_errors_exit_2() {
        for line in [
            "reap --now --grace 3s",
            "reap --grace -1s",
            "reap --pid 0",
            "holders --sweep --source map",
            "holders --device kind=standin,major=4",
            "holders --backend lsm",
            "nonsense",
            "-q -v holders",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn global_options_go_anywhere() {
        let device = "kind=standin,major=4,minor=20,node=/dev/tty20";
        let cli = parse(&format!("ps --json --device {device} --backend gate -vv")).unwrap();
        let Overrides { config, devices, backend } = cli.global.overrides();
        assert_eq!((config, devices.len(), backend), (None, 1, Some(Backend::Gate)));
        assert_eq!(cli.global.verbose, 2);
        assert!(matches!(cli.command, Command::Holders(HoldersArgs { json: true, .. })));
    }

    #[test]
    fn nothing_is_hidden() {
        let mut all = command();
        all.build();
        assert!(!all.get_subcommands().any(clap::Command::is_hide_set));
        assert!(parse("actor worker").is_err());
    }

    #[test]
    fn an_empty_backend_is_unset_in_the_environment_alone() {
        let parser = BackendParser;
        let value = |source| parser.parse_ref_(&command(), None, OsStr::new(""), source);
        assert_eq!(value(ValueSource::EnvVariable).unwrap(), BackendChoice::Auto);
        assert_eq!(value(ValueSource::CommandLine).unwrap_err().exit_code(), 2);
        assert!(parse("holders --backend=").is_err());
        assert_eq!(parse("holders --backend=gate").unwrap().global.backend, BackendChoice::Gate);
        assert!(parser.possible_values().is_some_and(|values| values.count() == 4));
    }
}
