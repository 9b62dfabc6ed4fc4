//! Settings: the config file, `GPUREAP_*` and the command line, read once into one immutable [`Config`].

mod file;

use std::{
    ffi::OsString,
    fmt, fs, io,
    net::SocketAddr,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::Context as _;
use gpureap_common::abi::{ANY_MINOR, MAX_MAJOR};
use hyper::{
    Uri,
    header::{HeaderName, HeaderValue},
};
use jiff::{Span, SpanRelativeTo};

use self::file::{
    MapSize, RawConfig, RawDaemon, RawDevice, RawJournal, RawKind, RawMaps, RawMetrics, RawNvml, RawOtlp,
};
use crate::{
    classify::Rules,
    error::Failure,
    journal,
    model::Backend,
    trust::{self, Distrust},
};

/// Where things are. Every path can be moved, so that tests and a second instance run beside the real one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// `GPUREAP_PIN_DIR`: pinned maps and programs.
    pub pin: PathBuf,
    /// `GPUREAP_RUN_DIR`: the daemon's lock and socket.
    pub run: PathBuf,
    /// `GPUREAP_STATE_DIR`: the record of signals.
    pub state: PathBuf,
    /// `GPUREAP_CONFIG`.
    pub config: PathBuf,
    /// `GPUREAP_PROC`.
    pub proc: PathBuf,
    /// `GPUREAP_SYS`.
    pub sys: PathBuf,
    /// `GPUREAP_DEV`: where device nodes are looked for. What is shown always begins with `/dev`.
    pub dev: PathBuf,
    /// `GPUREAP_HOST`: the host's root, where the files of container runtimes and of the system's programs are.
    pub host: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self::from_env(|_| None)
    }
}

impl Paths {
    /// The flight recorder's file.
    pub fn journal(&self) -> PathBuf {
        self.state.join(journal::FILE)
    }

    /// The defaults, overridden by what `env` knows. An empty variable counts as unset.
    pub fn from_env(env: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name, default: &str| {
            env(name).filter(|value| !value.is_empty()).map_or_else(|| PathBuf::from(default), PathBuf::from)
        };
        Self {
            pin: path("GPUREAP_PIN_DIR", "/sys/fs/bpf/gpureap"),
            run: path("GPUREAP_RUN_DIR", "/run/gpureap"),
            state: path("GPUREAP_STATE_DIR", "/var/lib/gpureap"),
            config: path("GPUREAP_CONFIG", "/etc/gpureap/config.toml"),
            proc: path("GPUREAP_PROC", "/proc"),
            sys: path("GPUREAP_SYS", "/sys"),
            dev: path("GPUREAP_DEV", "/dev"),
            host: path("GPUREAP_HOST", "/"),
        }
    }
}

/// A character device that counts as a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandIn {
    pub major: u32,
    pub minor: u32,
    pub node: PathBuf,
}

impl StandIn {
    /// Refuses numbers that no device can have.
    pub fn new(major: u32, minor: u32, node: PathBuf) -> Result<Self, String> {
        if major == 0 || major >= MAX_MAJOR {
            return Err(format!("major {major} is not between 1 and {}", MAX_MAJOR - 1));
        }
        // The last minor marks a wildcard entry in the kernel's table.
        if minor >= ANY_MINOR {
            return Err(format!("minor {minor} is not between 0 and {}", ANY_MINOR - 1));
        }
        if !node.is_absolute() {
            return Err(format!("node {} is not an absolute path", node.display()));
        }
        Ok(Self { major, minor, node })
    }
}

/// `kind=standin,major=4,minor=20,node=/path`, in any order.
impl FromStr for StandIn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut kind, mut major, mut minor, mut node) = (None, None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not KEY=VALUE"))?;
            let place = match key.trim() {
                "kind" => &mut kind,
                "major" => &mut major,
                "minor" => &mut minor,
                "node" => &mut node,
                other => return Err(format!("unknown key `{other}`, expected kind, major, minor and node")),
            };
            if place.replace(value.trim()).is_some() {
                return Err(format!("`{key}` is given twice"));
            }
        }
        if kind != Some("standin") {
            return Err("kind=standin is the only kind there is".to_owned());
        }
        let number = |name: &str, value: Option<&str>| {
            let value = value.ok_or_else(|| format!("{name} is missing"))?;
            value.parse::<u32>().map_err(|_| format!("{name} `{value}` is not a number"))
        };
        let node = node.ok_or("node is missing")?;
        Self::new(number("major", major)?, number("minor", minor)?, PathBuf::from(node))
    }
}

impl fmt::Display for StandIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { major, minor, node } = self;
        write!(f, "kind=standin,major={major},minor={minor},node={}", node.display())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Daemon {
    /// Time between full sweeps, and between checks for a reloaded driver.
    pub sweep_period: Duration,
    /// Time between looks at the loss counters.
    pub loss_poll: Duration,
    /// Whether users who are not root may ask it.
    pub socket: bool,
}

/// Sizes of the kernel's maps, in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maps {
    pub files: u32,
    pub holders: u32,
    pub tables: u32,
    pub procs: u32,
    pub lineage: u32,
}

impl Default for Maps {
    fn default() -> Self {
        Self { files: 16384, holders: 32768, tables: 16384, procs: 16384, lineage: 16384 }
    }
}

/// Numbers for Prometheus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Where they are served; `None`: nowhere.
    pub listen: Option<SocketAddr>,
}

/// Who is sent logs of OpenTelemetry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Otlp {
    pub endpoint: Uri,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Otlp {
    fn new(raw: Option<RawOtlp>) -> Result<Option<Self>, String> {
        let Some(RawOtlp { endpoint, headers }) = raw else { return Ok(None) };
        let header = |name: &str, value: &str| {
            let name = name.parse().map_err(|_| format!("[otlp] `{name}` is not the name of a header"))?;
            let mut value: HeaderValue = value.parse().map_err(|_| format!("[otlp] the header {name} has no value"))?;
            value.set_sensitive(true);
            Ok((name, value))
        };
        let headers = headers.iter().map(|(name, value)| header(&name.0, &value.0)).collect::<Result<_, String>>()?;
        Ok(endpoint.map(|endpoint| Self { endpoint: endpoint.0, headers }))
    }
}

/// How NVIDIA's management library is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvml {
    pub enabled: bool,
    /// A name for the loader, or a path.
    pub library: PathBuf,
    /// The gpureap that is started to ask; not in the file. In the command line tool it is that program itself.
    pub program: PathBuf,
    /// Time limit of one question.
    pub timeout: Duration,
}

impl Default for Nvml {
    fn default() -> Self {
        // Without persistence mode the first question initialises the GPUs, which takes a second or two.
        Self {
            enabled: true,
            library: "libnvidia-ml.so.1".into(),
            program: "/usr/bin/gpureap".into(),
            timeout: Duration::from_secs(5),
        }
    }
}

/// What is recorded of those who hold a device, and how long it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    pub enabled: bool,
    pub max_age: Duration,
    /// Bytes.
    pub max_size: u64,
    /// Names of the variables of a holder that are kept.
    pub environment: Vec<Variable>,
    /// Time between signs of life while something is held: the bound of what is known when the host goes down.
    pub heartbeat: Duration,
    /// Time between looks at device memory by process; `None`: none.
    pub memory_period: Option<Duration>,
}

/// Of jobs, ranks and where they run; nothing that has a secret in it by habit.
const VARIABLES: [&str; 28] = [
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMIX_RANK",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "RAY_JOB_ID",
    "KUBERNETES_*",
];

impl Default for Journal {
    fn default() -> Self {
        Self {
            enabled: true,
            max_age: Duration::from_hours(30 * 24),
            max_size: 1 << 30,
            environment: VARIABLES.into_iter().map(|name| Variable(name.to_owned())).collect(),
            heartbeat: Duration::from_secs(10),
            memory_period: None,
        }
    }
}

impl Journal {
    /// Whether the variable of this name is kept.
    pub fn keeps(&self, name: &str) -> bool {
        self.environment.iter().any(|variable| variable.fits(name))
    }
}

/// The name of a variable, or the beginning of some with a `*` behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable(String);

impl Variable {
    fn fits(&self, name: &str) -> bool {
        self.0.strip_suffix('*').map_or(self.0 == name, |prefix| name.starts_with(prefix))
    }
}

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub paths: Paths,
    /// No two have the same device number.
    pub devices: Vec<StandIn>,
    pub daemon: Daemon,
    pub maps: Maps,
    pub nvml: Nvml,
    pub journal: Journal,
    pub metrics: Metrics,
    /// `None`: nobody.
    pub otlp: Option<Otlp>,
    /// `None`: the first set that works, in order of preference.
    pub backend: Option<Backend>,
    /// `daemon --kernel-log`.
    pub kernel_log: bool,
    /// What is part of the system and what is a monitor: the file's rules, then the shipped ones.
    pub classes: Rules,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            paths: Paths::default(),
            devices: Vec::new(),
            daemon: Daemon { sweep_period: Duration::from_secs(30), loss_poll: Duration::from_secs(1), socket: true },
            maps: Maps::default(),
            metrics: Metrics::default(),
            otlp: None,
            nvml: Nvml::default(),
            journal: Journal::default(),
            backend: None,
            kernel_log: false,
            classes: Rules::default(),
        }
    }
}

/// What the command line and the environment say on top of the file.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Given with `--config`: it has to exist.
    pub config: Option<PathBuf>,
    pub devices: Vec<StandIn>,
    pub backend: Option<Backend>,
    /// [`Nvml::program`].
    pub program: Option<PathBuf>,
}

impl Config {
    /// What the file, `GPUREAP_*` and the defaults say on this host, for programs that use gpureap as a library.
    pub fn of_this_host() -> anyhow::Result<Self> {
        Self::load(Paths::from_env(|name| std::env::var_os(name)), Overrides::default())
    }

    pub fn load(mut paths: Paths, overrides: Overrides) -> anyhow::Result<Self> {
        let Overrides { config, devices, backend, program } = overrides;
        let named = config.is_some();
        if let Some(config) = config {
            paths.config = config;
        }
        let mut result = match read(&paths.config)? {
            Ok(text) => Self::parse(&text, &paths.config)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !named => Self::default(),
            Err(error) => {
                let failure = Failure::usage(format!("{}: {error}", paths.config.display()));
                return Err(failure).context("cannot read the config file");
            }
        };
        result.paths = paths;
        result.backend = backend;
        if let Some(program) = program {
            result.nvml.program = program;
        }
        for device in devices {
            // Said twice in the same words is harmless.
            if !result.devices.contains(&device) {
                check_unique(&result.devices, &device)
                    .map_err(|message| Failure::usage(format!("--device: {message}")))?;
                result.devices.push(device);
            }
        }
        Ok(result)
    }

    /// Reads the text of a config file; `path` is for messages.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, Failure> {
        let at = |span: Option<std::ops::Range<usize>>, message: &str| {
            // The parser points at the start of a table for what is missing in it.
            let line = span.map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let message = message.trim_end().replace('\n', ", ");
            Failure::usage(format!("{}:{line}: {message}", path.display()))
        };
        let raw: RawConfig = toml::from_str(text).map_err(|error| at(error.span(), error.message()))?;
        let RawConfig { device, daemon, maps, nvml, journal, metrics, otlp, class } = raw;
        let mut devices = Vec::new();
        for entry in device {
            let span = Some(entry.span());
            let RawDevice { kind: RawKind::Standin, major, minor, node } = entry.into_inner();
            let checked = StandIn::new(major, minor, node).and_then(|device| {
                check_unique(&devices, &device)?;
                Ok(device)
            });
            devices.push(checked.map_err(|message| at(span, &message))?);
        }
        let default = Self::default();
        let RawDaemon { sweep_period, loss_poll, socket } = daemon;
        let RawNvml { enabled, library, timeout } = nvml;
        let RawJournal { enabled: records, max_age, max_size, environment, heartbeat, memory_period } = journal;
        let RawMetrics { listen } = metrics;
        let otlp = Otlp::new(otlp).map_err(|message| at(None, &message))?;
        let RawMaps { files, holders, tables, procs, lineage } = maps;
        let size = |entries: Option<MapSize>, default: u32| entries.map_or(default, |entries| entries.0);
        Ok(Self {
            devices,
            daemon: Daemon {
                sweep_period: sweep_period.map_or(default.daemon.sweep_period, |period| period.0),
                loss_poll: loss_poll.map_or(default.daemon.loss_poll, |period| period.0),
                socket: socket.unwrap_or(default.daemon.socket),
            },
            maps: Maps {
                files: size(files, default.maps.files),
                holders: size(holders, default.maps.holders),
                tables: size(tables, default.maps.tables),
                procs: size(procs, default.maps.procs),
                lineage: size(lineage, default.maps.lineage),
            },
            classes: Rules::with(class),
            nvml: Nvml {
                enabled: enabled.unwrap_or(default.nvml.enabled),
                library: library.map_or(default.nvml.library, |library| library.0),
                program: default.nvml.program,
                timeout: timeout.map_or(default.nvml.timeout, |timeout| timeout.0),
            },
            journal: Journal {
                enabled: records.unwrap_or(default.journal.enabled),
                max_age: max_age.map_or(default.journal.max_age, |age| age.0),
                max_size: max_size.map_or(default.journal.max_size, |size| size.0),
                environment: environment.unwrap_or(default.journal.environment),
                heartbeat: heartbeat.map_or(default.journal.heartbeat, |period| period.0),
                memory_period: memory_period.map_or(default.journal.memory_period, |period| period.0),
            },
            metrics: Metrics { listen: listen.map(|listen| listen.0) },
            otlp,
            ..default
        })
    }
}

/// Root believes no file that somebody else could have written: it may name a library that is loaded.
fn read(path: &Path) -> anyhow::Result<io::Result<String>> {
    if rustix::process::geteuid().is_root() {
        if fs::metadata(path).is_ok_and(|meta| meta.file_type().is_fifo()) {
            let told = format!("{} is a pipe, and root believes no configuration but a file's", path.display());
            return Err(Failure::usage(told).into());
        }
        match trust::place(path) {
            Ok(_) => {}
            Err(Distrust::Io { error, .. }) => return Ok(Err(error)),
            Err(error) => {
                return Err(Failure::usage(error.to_string())).context("root does not believe the config file");
            }
        }
    }
    Ok(fs::read_to_string(path))
}

fn check_unique(devices: &[StandIn], new: &StandIn) -> Result<(), String> {
    match devices.iter().find(|old| (old.major, old.minor) == (new.major, new.minor)) {
        None => Ok(()),
        Some(old) => Err(format!("device {}:{} is already {}", new.major, new.minor, old.node.display())),
    }
}

/// A length of time such as `30s`, `1m 30s` or `250ms`, or a number of seconds; not negative.
pub fn duration(text: &str) -> Result<Duration, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if let Some(seconds) = text.parse::<f64>().ok().filter(|_| plain) {
        return Duration::try_from_secs_f64(seconds).map_err(|_| format!("`{text}` seconds are too long"));
    }
    let signed = text
        .parse::<Span>()
        .and_then(|span| span.to_duration(SpanRelativeTo::days_are_24_hours()))
        .map_err(|_| format!("`{text}` is not a length of time such as 30s, 5m or 250ms"))?;
    Duration::try_from(signed).map_err(|_| format!("`{text}` is negative"))
}

#[cfg(test)]
mod tests;
