//! Settings: the config file, `GPUREAP_*` and the command line, read once into one immutable [`Config`].

use std::{
    ffi::OsString,
    fmt, fs, io,
    marker::PhantomData,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::Context as _;
use gpureap_common::abi::{ANY_MINOR, MAX_MAJOR};
use jiff::{Span, SpanRelativeTo};
use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

use crate::{
    classify::{Rule, Rules},
    error::Failure,
    journal,
    model::Backend,
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

/// How NVIDIA's management library is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvml {
    pub enabled: bool,
    /// A name for the loader, or a path.
    pub library: PathBuf,
    /// Time limit of one question.
    pub timeout: Duration,
}

impl Default for Nvml {
    fn default() -> Self {
        // Without persistence mode the first question initialises the GPUs, which takes a second or two.
        Self { enabled: true, library: "libnvidia-ml.so.1".into(), timeout: Duration::from_secs(5) }
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
}

impl Config {
    pub fn load(mut paths: Paths, overrides: Overrides) -> anyhow::Result<Self> {
        let Overrides { config, devices, backend } = overrides;
        let named = config.is_some();
        if let Some(config) = config {
            paths.config = config;
        }
        let mut result = match fs::read_to_string(&paths.config) {
            Ok(text) => Self::parse(&text, &paths.config)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !named => Self::default(),
            Err(error) => {
                let failure = Failure::usage(format!("{}: {error}", paths.config.display()));
                return Err(failure).context("cannot read the config file");
            }
        };
        result.paths = paths;
        result.backend = backend;
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
    fn parse(text: &str, path: &Path) -> Result<Self, Failure> {
        let at = |span: Option<std::ops::Range<usize>>, message: &str| {
            // The parser points at the start of a table for what is missing in it.
            let line = span.map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let message = message.trim_end().replace('\n', ", ");
            Failure::usage(format!("{}:{line}: {message}", path.display()))
        };
        let raw: RawConfig = toml::from_str(text).map_err(|error| at(error.span(), error.message()))?;
        let RawConfig { device, daemon, maps, nvml, journal, class } = raw;
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
            ..default
        })
    }
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a configuration")]
struct RawConfig {
    #[serde(default, deserialize_with = "tables")]
    device: Vec<toml::Spanned<RawDevice>>,
    #[serde(default)]
    daemon: RawDaemon,
    #[serde(default)]
    maps: RawMaps,
    #[serde(default)]
    nvml: RawNvml,
    #[serde(default)]
    journal: RawJournal,
    #[serde(default, deserialize_with = "tables")]
    class: Vec<Rule>,
}

/// A list of tables. One in single brackets is a likely mistake.
fn tables<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Tables<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Tables<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("tables in double brackets, such as [[device]]")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut tables = Vec::new();
            while let Some(table) = list.next_element()? {
                tables.push(table);
            }
            Ok(tables)
        }
    }

    deserializer.deserialize_seq(Tables(PhantomData))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a device: a table [[device]]")]
struct RawDevice {
    kind: RawKind,
    major: u32,
    minor: u32,
    node: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RawKind {
    Standin,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [daemon]")]
struct RawDaemon {
    sweep_period: Option<Period<1_000>>,
    loss_poll: Option<Period<10>>,
    socket: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [maps]")]
struct RawMaps {
    files: Option<MapSize>,
    holders: Option<MapSize>,
    tables: Option<MapSize>,
    procs: Option<MapSize>,
    lineage: Option<MapSize>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [nvml]")]
struct RawNvml {
    enabled: Option<bool>,
    library: Option<Library>,
    timeout: Option<Period<10>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawJournal {
    enabled: Option<bool>,
    max_age: Option<Age>,
    max_size: Option<Size>,
    environment: Option<Vec<Variable>>,
    heartbeat: Option<Period<1_000>>,
    memory_period: Option<PeriodOrOff>,
}

impl<'de> Deserialize<'de> for Variable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let name = text.strip_suffix('*').unwrap_or(&text);
        // A `*` alone would keep everybody's passwords.
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            let message =
                format!("`{text}` is not the name of a variable, nor the beginning of one with a * behind it");
            return Err(serde::de::Error::custom(message));
        }
        Ok(Self(text))
    }
}

/// How long something is kept.
struct Age(Duration);

impl<'de> Deserialize<'de> for Age {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let age = duration(&text).map_err(serde::de::Error::custom)?;
        let (min, max) = (Duration::from_hours(1), Duration::from_hours(24 * 3650));
        if age < min || age > max {
            return Err(serde::de::Error::custom(format!("`{text}` is not between 1h and 3650d")));
        }
        Ok(Self(age))
    }
}

/// A number of bytes, such as `1GiB` or `500 MB`.
struct Size(u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.len() - text.trim_start_matches(|char: char| char.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let unit: u64 = match unit.trim() {
            "" | "B" => 1,
            "kB" => 1000,
            "KiB" => 1 << 10,
            "MB" => 1_000_000,
            "MiB" => 1 << 20,
            "GB" => 1_000_000_000,
            "GiB" => 1 << 30,
            "TB" => 1_000_000_000_000,
            "TiB" => 1 << 40,
            _ => return Err(format!("`{text}` is not a size such as 1GiB, 500MB or 1048576")),
        };
        let number: u64 =
            number.parse().map_err(|_| format!("`{text}` is not a size such as 1GiB, 500MB or 1048576"))?;
        let bytes = number.saturating_mul(unit);
        // Less would not hold what a busy host has open.
        if !((1 << 20)..=(1 << 50)).contains(&bytes) {
            return Err(format!("`{text}` is not between 1MiB and 1024TiB"));
        }
        Ok(Self(bytes))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(text) => text.parse(),
            toml::Value::Integer(bytes) => bytes.to_string().parse(),
            _ => Err("a size is a number of bytes, or a string such as \"1GiB\"".to_owned()),
        }
        .map_err(serde::de::Error::custom)
    }
}

/// `off`, or a length of time.
struct PeriodOrOff(Option<Duration>);

impl<'de> Deserialize<'de> for PeriodOrOff {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::{IntoDeserializer as _, value::StringDeserializer};
        let text = String::deserialize(deserializer)?;
        if text == "off" {
            return Ok(Self(None));
        }
        let text: StringDeserializer<D::Error> = text.into_deserializer();
        Period::<1_000>::deserialize(text).map(|period| Self(Some(period.0)))
    }
}

/// What the loader looks for: a name in its own places, or an absolute path. A relative path would depend on where
/// gpureap is started.
struct Library(PathBuf);

impl<'de> Deserialize<'de> for Library {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() || text.contains('\0') || text.contains('/') && !text.starts_with('/') {
            return Err(serde::de::Error::custom(format!("`{text}` is neither a name nor an absolute path")));
        }
        Ok(Self(text.into()))
    }
}

/// A length of time: at least `MIN` milliseconds, at most a day.
struct Period<const MIN: u64>(Duration);

impl<'de, const MIN: u64> Deserialize<'de> for Period<MIN> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let period = duration(&text).map_err(serde::de::Error::custom)?;
        let (min, max) = (Duration::from_millis(MIN), Duration::from_hours(24));
        if period < min || period > max {
            return Err(serde::de::Error::custom(format!("`{text}` is not between {min:?} and 24h")));
        }
        Ok(Self(period))
    }
}

/// Entries of a kernel map: below the least, a busy host overflows at once; above the most, the memory is a mistake.
struct MapSize(u32);

impl<'de> Deserialize<'de> for MapSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (min, max) = (64, 1 << 22);
        let entries = i64::deserialize(deserializer)?;
        u32::try_from(entries)
            .ok()
            .filter(|entries| (min..=max).contains(entries))
            .map(Self)
            .ok_or_else(|| serde::de::Error::custom(format!("{entries} is not between {min} and {max} entries")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::exit_of, exit_code::Exit};

    const EXAMPLE: &str = include_str!("../../packaging/config.example.toml");

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("c.toml")).map_err(|failure| failure.message)
    }

    #[test]
    fn example_shows_the_defaults() {
        assert_eq!(parse(EXAMPLE), Ok(Config::default()));
        // With every commented setting made live, the sections still are the defaults and the device is read.
        let live: String = EXAMPLE
            .lines()
            .map(|line| line.strip_prefix("#").filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
            .fold(String::new(), |text, line| text + line + "\n");
        let config = parse(&live).unwrap();
        assert_eq!(config.devices, [StandIn { major: 4, minor: 20, node: "/dev/tty20".into() }]);
        assert!(config.classes.has("gpu-broker") && config.classes.has("dcgm"));
        assert_eq!(Config { devices: Vec::new(), classes: Rules::default(), ..config }, Config::default());
        // The shipped rules are in it too, to be read.
        let shipped: String = include_str!("classify/rules.toml")
            .lines()
            .map(|line| format!("# {line}").trim_end().to_owned() + "\n")
            .collect();
        assert!(
            EXAMPLE.ends_with(&shipped),
            "copy classify/rules.toml, each line after `# `, to the end of the example"
        );
        let keys = ["sweep_period", "loss_poll", "files", "holders", "tables", "procs", "lineage", "major", "node"];
        let nvml = ["enabled", "library", "timeout"];
        let rules = ["name", "class", "exe", "unit", "uid", "comm", "image", "container", "pod", "namespace"];
        let journal = ["enabled", "max_age", "max_size", "environment", "heartbeat", "memory_period"];
        for key in keys.into_iter().chain(nvml).chain(journal).chain(rules) {
            assert!(live.lines().any(|line| line.starts_with(&format!("{key} ="))), "{key} is not documented");
        }
    }

    #[test]
    fn mistakes_are_one_sentence_with_the_line() {
        let device = |major: i64, minor: i64, node: &str| {
            format!("[[device]]\nkind = \"standin\"\nmajor = {major}\nminor = {minor}\nnode = \"{node}\"\n")
        };
        let cases = [
            ("a = 1".to_owned(), "c.toml:1: unknown field `a`"),
            ("\n[daemon]\nsweep = 1".to_owned(), "c.toml:3: unknown field `sweep`"),
            ("[daemon]\nsweep_period = 30".to_owned(), "c.toml:2: invalid type: integer `30`"),
            ("[daemon]\nsweep_period = \"soon\"".to_owned(), "c.toml:2: `soon` is not a length of time"),
            ("[daemon]\nsweep_period = \"-3s\"".to_owned(), "c.toml:2: `-3s` is negative"),
            ("[daemon]\nloss_poll = \"1ms\"".to_owned(), "c.toml:2: `1ms` is not between 10ms and 24h"),
            ("[maps]\nfiles = 3".to_owned(), "c.toml:2: 3 is not between 64 and"),
            ("[maps]\n\nfiles = \"3\"".to_owned(), "c.toml:3: invalid type: string \"3\""),
            ("[maps]\nfiles = 99999999999".to_owned(), "c.toml:2: 99999999999 is not between"),
            ("[nvml]\ntimeout = \"1ms\"".to_owned(), "c.toml:2: `1ms` is not between 10ms and 24h"),
            ("[nvml]\nlibrary = \"lib/x.so\"".to_owned(), "c.toml:2: `lib/x.so` is neither a name nor an absolute"),
            ("[nvml]\nenabled = 1".to_owned(), "c.toml:2: invalid type: integer `1`"),
            ("[journal]\nmax_age = \"5m\"".to_owned(), "c.toml:2: `5m` is not between 1h and 3650d"),
            ("[journal]\nmax_age = 30".to_owned(), "c.toml:2: invalid type: integer `30`"),
            ("[journal]\nmax_size = \"big\"".to_owned(), "c.toml:2: `big` is not a size such as 1GiB"),
            ("[journal]\nmax_size = \"1GiBs\"".to_owned(), "c.toml:2: `1GiBs` is not a size"),
            ("[journal]\nmax_size = 1000".to_owned(), "c.toml:2: `1000` is not between 1MiB and"),
            ("[journal]\nmax_size = -1".to_owned(), "c.toml:2: `-1` is not a size"),
            ("[journal]\nmax_size = \"5KiB\"".to_owned(), "c.toml:2: `5KiB` is not between 1MiB and"),
            ("[journal]\nenvironment = [\"*\"]".to_owned(), "c.toml:2: `*` is not the name of a variable"),
            ("[journal]\nenvironment = [\"A*B\"]".to_owned(), "c.toml:2: `A*B` is not the name of a variable"),
            ("[journal]\nmemory_period = \"1ms\"".to_owned(), "c.toml:2: `1ms` is not between 1s and 24h"),
            ("x = [".to_owned(), "c.toml:1: "),
            ("[[device]]\nkind = \"gpu\"".to_owned(), "c.toml:2: unknown variant `gpu`, expected `standin`"),
            ("\n[[device]]\nkind = \"standin\"".to_owned(), "c.toml:2: missing field `major`"),
            (device(4, 1 << 20, "/dev/x"), "c.toml:1: minor 1048576 is not between"),
            (device(4, (1 << 20) - 1, "/dev/x"), "c.toml:1: minor 1048575 is not between"),
            (device(0, 1, "/dev/x"), "c.toml:1: major 0 is not between 1 and 4095"),
            (device(4, 1, "dev/x"), "c.toml:1: node dev/x is not an absolute path"),
            (device(4, -1, "/dev/x"), "c.toml:4: invalid value: integer `-1`"),
            (device(4, 1, "/dev/x") + &device(4, 1, "/dev/y"), "c.toml:6: device 4:1 is already /dev/x"),
            (
                "[[class]]\nname = \"a\"\nclass = \"system\"\ncomm = \"b\"".to_owned(),
                "c.toml:1: whoever runs a process",
            ),
            (
                "[[class]]\nname = \"a\"\nclass = \"b\"".to_owned(),
                "c.toml:3: unknown variant `b`, expected one of `job`",
            ),
        ];
        for (text, expected) in cases {
            let message = parse(&text).unwrap_err();
            assert!(message.starts_with(expected), "{text:?}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }

    /// What Rust calls things is nobody's business.
    #[test]
    fn mistakes_name_what_was_expected() {
        let rule = |condition: &str| format!("[[class]]\nname = \"a\"\nclass = \"system\"\n{condition}");
        for (text, expected) in [
            ("device = 3".to_owned(), "expected tables in double brackets"),
            (
                "[device]\nkind = \"standin\"".to_owned(),
                "c.toml:1: invalid type: map, expected tables in double brackets",
            ),
            ("[class]".to_owned(), "expected tables in double brackets"),
            ("device = [3]".to_owned(), "expected a device: a table [[device]]"),
            ("[[device]]\nkind = 3".to_owned(), ""),
            ("daemon = 3".to_owned(), "expected a table [daemon]"),
            ("maps = \"x\"".to_owned(), "expected a table [maps]"),
            ("nvml = []".to_owned(), "expected a table [nvml]"),
            ("class = [3]".to_owned(), "expected a rule: a table [[class]]"),
            (rule("exe = 3"), "c.toml:4: `exe` must be a pattern or a list of patterns"),
            (rule("unit = []"), "c.toml:4: `unit` is a list without patterns"),
            (rule("image = [\"a\", \"\"]"), "c.toml:4: `image` has an empty pattern"),
            (rule("pod = \"[\""), "c.toml:4: `pod` has the pattern `[`: "),
            (rule("uid = []"), "a list of users that is empty fits nothing"),
            (rule("uid = \"\""), "a user's name is not empty"),
            (rule("uid = -1"), "`uid` must be a number"),
            (rule("uid = 4294967295"), "uid 4294967295 is nobody's"),
            (rule("exe = \"/x\"\ncomm = \"a-name-of-16-byt\""), "the kernel keeps 15 bytes"),
            (rule("exe = \"/x\"\ncomm = [\"b\", \"*a-name-of-16-byt*\"]"), "fits nothing"),
            (rule("unit = \"a/b.service\""), "the name of a unit has no `/`"),
        ] {
            let message = parse(&text).unwrap_err();
            assert!(message.contains(expected), "{text:?}: {message}");
            assert!(!message.contains("Raw") && !message.contains("struct"), "{text:?}: {message}");
        }
        for condition in ["comm = \"[a-zA-Z0-9_-]name-of-15*\"", "comm = \"\"", "comm = \"*a-name-of-15-by*\""] {
            parse(&rule(&format!("exe = \"/x\"\n{condition}"))).unwrap();
        }
    }

    #[test]
    fn what_the_journal_keeps() {
        let text = "[journal]\nenabled = false\nmax_age = \"7d\"\nmax_size = \"500 MB\"\nheartbeat = \"1m\"\n\
                    memory_period = \"30s\"\nenvironment = [\"RANK\", \"SLURM_*\"]";
        let journal = parse(text).unwrap().journal;
        let kept = ["RANK", "SLURM_JOB_ID", "SLURM_"].map(|name| journal.keeps(name));
        assert_eq!(kept, [true; 3]);
        let left_out = ["RANKS", "LOCAL_RANK", "SLURM", "xSLURM_JOB_ID", ""].map(|name| journal.keeps(name));
        assert_eq!(left_out, [false; 5]);
        let Journal { enabled, max_age, max_size, environment: _, heartbeat, memory_period } = journal;
        assert_eq!((enabled, max_age, max_size), (false, Duration::from_hours(7 * 24), 500_000_000));
        assert_eq!((heartbeat, memory_period), (Duration::from_mins(1), Some(Duration::from_secs(30))));
        for (text, bytes) in [("1GiB", 1 << 30), ("1048576", 1 << 20), ("2 TiB", 1 << 41), ("2000kB", 2_000_000)] {
            assert_eq!(text.parse::<Size>().map(|size| size.0), Ok(bytes), "{text}");
        }
        for name in ["SLURM_JOB_ID", "LOCAL_RANK", "MASTER_PORT", "KUBERNETES_SERVICE_HOST"] {
            assert!(Journal::default().keeps(name), "{name}");
        }
        assert!(!Journal::default().keeps("AWS_SECRET_ACCESS_KEY"));
    }

    #[test]
    fn command_line_devices_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        fs::write(&file, "[[device]]\nkind = \"standin\"\nmajor = 4\nminor = 20\nnode = \"/dev/tty20\"\n").unwrap();
        let load = |device: &str| {
            let overrides = Overrides {
                config: Some(file.clone()),
                devices: vec![device.parse().unwrap()],
                backend: Some(Backend::Gate),
            };
            Config::load(Paths::default(), overrides)
        };
        let config = load("kind=standin,major=4,minor=21,node=/dev/tty21").unwrap();
        assert_eq!(config.devices.len(), 2);
        assert_eq!(config.backend, Some(Backend::Gate));
        assert_eq!(load("kind=standin,node=/dev/tty20,minor=20,major=4").unwrap().devices.len(), 1);
        let error = load("kind=standin,major=4,minor=20,node=/dev/other").unwrap_err();
        assert_eq!(exit_of(&error), Exit::Usage);
        assert_eq!(format!("{error:#}"), "--device: device 4:20 is already /dev/tty20");
    }

    #[test]
    fn stand_ins_on_the_command_line() {
        for (text, expected) in [
            ("major=4,minor=1,node=/x", "kind=standin is the only kind"),
            ("kind=standin,major=4,node=/x", "minor is missing"),
            ("kind=standin,major=a,minor=1,node=/x", "major `a` is not a number"),
            ("kind=standin,major=1,major=2", "`major` is given twice"),
            ("kind=standin,colour=red", "unknown key `colour`"),
            ("standin", "`standin` is not KEY=VALUE"),
        ] {
            let message = text.parse::<StandIn>().unwrap_err();
            assert!(message.starts_with(expected), "{text}: {message}");
        }
    }

    #[test]
    fn a_missing_file_matters_only_when_named() {
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("absent.toml");
        let paths = Paths::from_env(|name| (name == "GPUREAP_CONFIG").then(|| absent.clone().into()));
        assert_eq!(Config::load(paths.clone(), Overrides::default()).unwrap().maps, Maps::default());
        let error = Config::load(paths, Overrides { config: Some(absent), ..Overrides::default() }).unwrap_err();
        assert_eq!(exit_of(&error), Exit::Usage);
    }

    #[test]
    fn lengths_of_time() {
        for (text, expected) in [
            ("5", Some(Duration::from_secs(5))),
            ("0", Some(Duration::ZERO)),
            ("0.25", Some(Duration::from_millis(250))),
            ("250ms", Some(Duration::from_millis(250))),
            ("1m 30s", Some(Duration::from_secs(90))),
            ("12h", Some(Duration::from_hours(12))),
            ("3d", Some(Duration::from_hours(72))),
            ("1 day", Some(Duration::from_hours(24))),
            ("2days 1h", Some(Duration::from_hours(49))),
            ("1d12h", Some(Duration::from_hours(36))),
            ("0d", Some(Duration::ZERO)),
            ("1w", Some(Duration::from_hours(7 * 24))),
            ("2 weeks 1d", Some(Duration::from_hours(15 * 24))),
            ("d", None),
            ("1decade", None),
            ("-1d", None),
            ("1d-1h", None),
            ("3d3d", None),
            ("1h2d", None),
            ("99999999999d", None),
            ("1d18446744073709549568", None),
            ("3d 18446744073709549568s", None),
            ("", None),
            (".", None),
            ("-5", None),
            ("-3s", None),
            ("1e3", None),
            ("inf", None),
            ("99999999999999999999999", None),
            ("soon", None),
        ] {
            assert_eq!(duration(text).ok(), expected, "{text:?}");
        }
    }

    #[test]
    fn paths_follow_the_environment() {
        let paths = Paths::from_env(|name| (name == "GPUREAP_PROC").then(|| "/p".into()));
        assert_eq!((paths.proc.to_str(), paths.sys.to_str()), (Some("/p"), Some("/sys")));
        assert_eq!(Paths::from_env(|_| Some(OsString::new())), Paths::default());
    }
}
