//! The command line. Help, completions and man pages all come from here.

mod help;

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    time::Duration,
};

use clap::{
    Arg, ArgAction, Args, CommandFactory as _, Parser, Subcommand, ValueEnum,
    builder::{EnumValueParser, PossibleValue, TypedValueParser},
    parser::ValueSource,
};
use jiff::Timestamp;

use self::help::{BLOCKERS_HELP, CHECK_HELP, FENCE_HELP, REAP_HELP, REPORT_HELP, TOP_HELP, WAIT_HELP};
use crate::{
    blockers::Operation,
    choose::wish::{self, SlurmJob, Variable},
    config::{Overrides, StandIn, duration},
    gpu::select::By,
    model::{Backend, Source},
    reap::{plan::Matching, scope::Scope, signaller::Signal},
    when,
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
        // Not the path that was started: that file may have been replaced since.
        let program = Some(PathBuf::from("/proc/self/exe"));
        Overrides { config: config.clone(), devices: device.clone(), backend, program }
    }

    /// The same options again, for a further gpureap.
    pub fn words(&self) -> Vec<OsString> {
        let Self { config, device, backend, verbose: _, quiet: _ } = self;
        let config = config.iter().flat_map(|path| [OsString::from("--config"), path.into()]);
        let devices = device.iter().flat_map(|device| ["--device".into(), device.to_string().into()]);
        let backend =
            backend.to_possible_value().map(|value| OsString::from(format!("--backend={}", value.get_name())));
        config.chain(devices).chain(backend).collect()
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
    /// Who stands in the way of a GPU reset, an unload of the driver or a MIG change, and how to release each
    #[command(after_help = BLOCKERS_HELP)]
    Blockers(BlockersArgs),
    /// One line and an exit code for the checks of a cluster: who holds a GPU and should not
    #[command(after_help = CHECK_HELP)]
    Check(CheckArgs),
    /// Refuse new opens of GPUs, host-wide, for a time; what is open stays open
    #[command(after_help = FENCE_HELP)]
    Fence(FenceArgs),
    /// Open fenced GPUs again
    #[command(after_help = "Example:\n  gpureap unfence\n  gpureap unfence --gpu 0")]
    Unfence(UnfenceArgs),
    /// Wait until GPUs are free
    #[command(after_help = WAIT_HELP)]
    Wait(WaitArgs),
    /// What held each GPU, how it ended, and what came back when
    #[command(after_help = REPORT_HELP)]
    Report(ReportArgs),
    /// What the flight recorder has seen, and what it sees from now on
    #[command(after_help = "Example:\n  gpureap events --since 10m\n  gpureap events --follow --json")]
    Events(EventsArgs),
    /// GPUs and who holds them, live; end and fence from there
    #[command(after_help = TOP_HELP)]
    Top(TopArgs),
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

/// Which devices and processes.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Choosing")]
pub struct Choosing {
    /// GPU by minor, node path, UUID (or its beginning), PCI address, MIG UUID, or `all` (repeatable) [default: all]
    #[arg(long, value_name = "GPU", action = ArgAction::Append)]
    pub gpu: Vec<String>,
    /// What a bare number in --gpu means: the N of /dev/nvidiaN, or nvidia-smi's index
    #[arg(long, value_enum, default_value_t = By::Minor)]
    pub by: By,
    /// Only these processes (repeatable, like the filters below; values of one filter are alternatives, different filters must all fit)
    #[arg(long, value_name = "PID", action = ArgAction::Append, value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Vec<u32>,
    /// Processes of this user, by name or number
    #[arg(long, value_name = "USER", action = ArgAction::Append, value_parser = wish::user)]
    pub user: Vec<u32>,
    /// Processes of exactly this name, as `ps -o comm` shows it: 15 bytes at most
    #[arg(long, value_name = "NAME", action = ArgAction::Append, value_parser = wish::comm)]
    pub comm: Vec<String>,
    /// Processes in this container: id, the first 4 digits of it or more, or name
    #[arg(long, value_name = "CONTAINER", action = ArgAction::Append, value_parser = wish::container)]
    pub container: Vec<String>,
    /// Processes of this Slurm job, or of one step of it: 123, 123.0; `any`: of whichever
    #[arg(long, value_name = "JOB", action = ArgAction::Append)]
    pub slurm_job: Vec<SlurmJob>,
    /// No processes of these Slurm jobs, such as those that run: 123,124 (repeatable)
    #[arg(long, value_name = "JOB", action = ArgAction::Append, value_delimiter = ',')]
    pub except_slurm_job: Vec<SlurmJob>,
    /// Processes below this systemd unit; `.service` may be left out
    #[arg(long, value_name = "UNIT", action = ArgAction::Append, value_parser = wish::unit)]
    pub unit: Vec<String>,
    /// Processes in this cgroup or below it, from the hierarchy's root or from /sys/fs/cgroup
    #[arg(long, value_name = "PATH", action = ArgAction::Append, value_parser = wish::cgroup)]
    pub cgroup: Vec<String>,
    /// Processes that were started with this in their environment; different variables must all fit
    #[arg(long, value_name = "KEY=VAL", action = ArgAction::Append)]
    pub env: Vec<Variable>,
    /// This process, which may be dead, and all that descend from it
    #[arg(long, value_name = "PID", action = ArgAction::Append, value_parser = clap::value_parser!(u32).range(1..))]
    pub tree_of: Vec<u32>,
    /// Processes that started at least so long ago: 90s, 12h, 3d
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub older_than: Option<Duration>,
}

impl Choosing {
    /// The default of `--match` follows `--gpu`: on GPU 1, a job that works on GPU 0 holds handles too.
    fn matching(&self, wish: Option<Match>) -> Match {
        wish.unwrap_or(if self.gpu.is_empty() { Match::Any } else { Match::Attached })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct DaemonArgs {
    /// Leave the tracer attached when the daemon ends
    #[arg(long)]
    pub keep: bool,
    /// Load the kernel programs with their debug lines, and log these (with -v)
    #[arg(long)]
    pub kernel_log: bool,
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

impl From<Match> for Matching {
    fn from(matching: Match) -> Self {
        match matching {
            Match::Attached => Self::Attached,
            Match::Any => Self::Any,
        }
    }
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
    /// Let nobody open the chosen GPUs while this runs, so that no supervisor can start a new holder
    #[arg(long)]
    pub fence: bool,
    /// What goes with the holders
    #[arg(long, value_enum, default_value_t = Scope::Process)]
    pub scope: Scope,
    /// Also monitors: the systemd units of those that have one are stopped, the others are signalled
    #[arg(long)]
    pub stop_monitors: bool,
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
    /// Also processes of class system or monitor that this rule classed, or of `all` rules (repeatable)
    #[arg(long, value_name = "RULE", action = ArgAction::Append)]
    pub include_protected: Vec<String>,
}

/// As the command line has it without options.
impl Default for ReapArgs {
    fn default() -> Self {
        Self {
            choosing: Choosing::default(),
            matching: None,
            now: false,
            grace: Duration::from_secs(10),
            timeout: Duration::from_mins(1),
            fence: false,
            scope: Scope::default(),
            stop_monitors: false,
            dry_run: false,
            yes: false,
            json: false,
            include_own_session: false,
            include_protected: Vec::new(),
        }
    }
}

impl ReapArgs {
    pub const fn first_signal(&self) -> Signal {
        if self.now { Signal::Kill } else { Signal::Term }
    }

    pub fn matching(&self) -> Match {
        self.choosing.matching(self.matching)
    }
}

#[derive(Clone, Debug, Args)]
pub struct BlockersArgs {
    /// What is to be done
    #[arg(long = "for", value_enum, value_name = "OPERATION")]
    pub operation: Operation,
    #[command(flatten)]
    pub choosing: Choosing,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub choosing: Choosing,
    /// Which handles count [default: attached with --gpu, any without]
    #[arg(long = "match", value_enum, help_heading = "Choosing")]
    pub matching: Option<Match>,
    /// The GPUs are to be free: every job that holds one counts
    #[arg(long)]
    pub free: bool,
    /// Jobs that belong to nothing that still runs count: of a pod that is gone, or left behind outside of any container and
    /// Slurm job
    #[arg(long)]
    pub orphans: bool,
    /// Xids of the hardware or the driver within this time count, as the daemon recorded them: 10m, 1h
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub xids: Option<Duration>,
    /// Exit with 8 where no daemon runs
    #[arg(long)]
    pub daemon: bool,
    /// How long a process that was told to die may take for it: 2s, 500ms, or a number of seconds
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub patience: Duration,
    /// Longest line to print; less is said before it is cut
    #[arg(long, value_name = "BYTES", default_value = "1024", value_parser = max_bytes)]
    pub max_bytes: usize,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

impl CheckArgs {
    pub fn matching(&self) -> Match {
        self.choosing.matching(self.matching)
    }
}

/// Enough for a node and a name.
fn max_bytes(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(bytes @ 40..=65_536) => Ok(bytes),
        _ => Err(format!("`{text}` is not a number between 40 and 65536")),
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

#[derive(Clone, Debug, Default, Args)]
pub struct ReportArgs {
    /// From this time on [default: the last hour]
    #[arg(long, value_name = "TIME", value_parser = when::parse_now, conflicts_with = "at")]
    pub since: Option<Timestamp>,
    /// Until this time [default: now]
    #[arg(long, value_name = "TIME", value_parser = when::parse_now, conflicts_with = "at")]
    pub until: Option<Timestamp>,
    /// Who held what at this instant
    #[arg(long, value_name = "TIME", value_parser = when::parse_now)]
    pub at: Option<Timestamp>,
    /// A boot: 0 for this one, -1 for the one before, or its id
    #[arg(long, value_name = "BOOT", allow_hyphen_values = true)]
    pub boot: Option<String>,
    /// Only these GPUs: minor, node path, UUID (or its beginning) or PCI address (repeatable)
    #[arg(long, value_name = "GPU", action = ArgAction::Append)]
    pub gpu: Vec<String>,
    /// Only this process, its job and its ancestors (repeatable)
    #[arg(long, value_name = "PID", action = ArgAction::Append, value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Vec<u32>,
    /// Journals of one or more hosts, or recorded `events --json` [default: this host's]
    #[arg(long, value_name = "FILE", num_args = 1.., action = ArgAction::Append)]
    pub journal: Vec<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub html: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct EventsArgs {
    /// Go on with what happens from now on
    #[arg(short, long)]
    pub follow: bool,
    /// From the journal, from this time on [default: the last hour; none with --follow]
    #[arg(long, value_name = "TIME", value_parser = when::parse_now)]
    pub since: Option<Timestamp>,
    /// Print NDJSON, one document a line
    #[arg(long)]
    pub json: bool,
}

/// Which devices.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Choosing")]
pub struct FencedGpus {
    /// GPU by minor, node path, UUID (or its beginning), PCI address, MIG UUID, or `all` (repeatable) [default: all]
    #[arg(long, value_name = "GPU", action = ArgAction::Append)]
    pub gpu: Vec<String>,
    /// What a bare number in --gpu means: the N of /dev/nvidiaN, or nvidia-smi's index
    #[arg(long, value_enum, default_value_t = By::Minor)]
    pub by: By,
}

#[derive(Clone, Debug, Args)]
pub struct FenceArgs {
    #[command(flatten)]
    pub gpus: FencedGpus,
    /// Time after which the kernel lets opens through again: 10m, 2h, or a number of seconds, a week at most
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = ttl)]
    pub ttl: Duration,
    /// Let this process through, not its children (repeatable)
    #[arg(long, value_name = "PID", action = ArgAction::Append, value_parser = clap::value_parser!(u32).range(1..))]
    pub exempt_pid: Vec<u32>,
    /// Let the processes of this cgroup through, and of those below it: a path, or a running unit (repeatable)
    #[arg(long, value_name = "PATH|UNIT", action = ArgAction::Append)]
    pub exempt_cgroup: Vec<String>,
    /// Change nothing: show what is fenced, for how long, and who tried
    #[arg(long, conflicts_with_all = ["gpu", "by", "ttl", "exempt_pid", "exempt_cgroup"])]
    pub list: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// A fence that is forgotten must end by itself.
fn ttl(text: &str) -> Result<Duration, String> {
    let (min, max) = (Duration::from_millis(1), Duration::from_hours(7 * 24));
    let ttl = duration(text)?;
    if ttl < min || ttl > max {
        return Err(format!("`{text}` is not between 1ms and 7 days"));
    }
    Ok(ttl)
}

#[derive(Clone, Debug, Default, Args)]
pub struct UnfenceArgs {
    #[command(flatten)]
    pub gpus: FencedGpus,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

impl WaitArgs {
    /// What `reap` would end is what is waited for.
    pub fn matching(&self) -> Match {
        self.choosing.matching(self.matching)
    }
}

#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub choosing: Choosing,
    /// Time between two looks when nothing happens: 2s, 500ms, or a number of seconds
    #[arg(short = 'n', long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    pub interval: Duration,
}

/// Neither a busy loop nor a picture of yesterday.
fn interval(text: &str) -> Result<Duration, String> {
    let (min, max) = (Duration::from_millis(200), Duration::from_hours(1));
    let interval = duration(text)?;
    if interval < min || interval > max {
        return Err(format!("`{text}` is not between 200ms and 1h"));
    }
    Ok(interval)
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
mod tests;
