//! A place with its own configuration, pins, journal and socket, in which gpureap runs.
use std::{
    fmt::Write as _,
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use gpureap::{
    bpf::{handles::Maps, pins::set_name},
    cli::HoldersArgs,
    config::{Config, Overrides, Paths},
    model::Backend,
};
use serde_json::Value;
use tempfile::TempDir;

use super::{Compare, Daemon, NOBODY, PATIENCE, Scene, Seen, World, anybody, program, settle, shared::Turn, skip};
use crate::actor::{sys, truth};

/// A character device that counts as a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
    pub node: String,
}

impl Device {
    pub fn new(major: u32, minor: u32, node: &str) -> Self {
        Self { major, minor, node: node.to_owned() }
    }

    /// Can be mapped privately.
    pub fn zero() -> Self {
        Self::new(1, 5, "/dev/zero")
    }

    /// Can be mapped shared; not on every kernel.
    pub fn mem() -> Self {
        Self::new(1, 1, "/dev/mem")
    }

    /// Opened by next to nobody, so what holds it may be killed.
    pub fn full() -> Self {
        Self::new(1, 7, "/dev/full")
    }

    pub fn key(&self) -> String {
        format!("{}:{}", self.major, self.minor)
    }

    /// Whether nobody has it, so that a test may end, or wait for, whoever holds it; says so if not.
    pub fn is_free(&self, test: &str) -> bool {
        let others = anybody(&self.key());
        if !others.is_empty() {
            skip(test, &format!("{} is held by {others:?}, who might be killed", self.node));
        }
        others.is_empty()
    }
}

/// What a command left.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in the output of {self:#?}"))
    }

    #[track_caller]
    #[expect(clippy::return_self_not_must_use, reason = "often the code is all that is of interest")]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "the exit code of {self:#?}");
        self
    }

    /// The one sentence on stderr that says what is wrong.
    #[track_caller]
    pub fn complaint(&self) -> &str {
        let lines: Vec<&str> = self.stderr.lines().filter(|line| !line.trim().is_empty()).collect();
        assert_eq!(lines.len(), 1, "one sentence on stderr, in {self:#?}");
        assert!(!lines[0].contains("panicked"), "a sentence, not a panic: {}", lines[0]);
        lines[0]
    }
}

pub struct Bench {
    place: TempDir,
    pub devices: Vec<Device>,
    pub backend: String,
    mounted: bool,
    host: Option<String>,
    _turn: Option<Turn>,
}

impl Bench {
    pub fn new(devices: &[Device]) -> Self {
        Self::in_turn(devices, Some(Turn::wait()))
    }

    /// Without a turn it is for whoever has one.
    pub(super) fn in_turn(devices: &[Device], turn: Option<Turn>) -> Self {
        assert!(sys::is_root(), "the kernel tests need root");
        let place = tempfile::Builder::new().prefix("gpureap-test-").tempdir().expect("a directory");
        let backend = std::env::var("GPUREAP_TEST_BACKEND").unwrap_or_else(|_| "gate".to_owned());
        let mut bench = Self { place, devices: devices.to_vec(), backend, mounted: false, host: None, _turn: turn };
        for name in ["bpf", "run", "state"] {
            fs::create_dir(bench.path(name)).expect("a directory");
        }
        sys::mount("bpf", Path::new("bpf"), &bench.path("bpf"), 0).expect("mount a bpffs of our own");
        bench.mounted = true;
        // No help by the periodic sweep: every read must be right by itself. Small maps start sooner.
        let mut config = String::from(
            "[daemon]\nsweep_period = \"1h\"\n\n[maps]\nfiles = 4096\nholders = 4096\ntables = 2048\nprocs = 2048\nlineage = 4096\n\n",
        );
        for Device { major, minor, node } in devices {
            writeln!(config, "[[device]]\nkind = \"standin\"\nmajor = {major}\nminor = {minor}\nnode = \"{node}\"\n")
                .expect("write to a string");
        }
        bench.write_config(&config);
        bench
    }

    /// A further host of this name: whatever runs there has network and host name to itself. It takes part in this one's turn.
    #[must_use]
    pub fn beside(&self, host: &str, devices: &[Device]) -> Self {
        let mut bench = Self::in_turn(devices, None);
        bench.host = Some(host.to_owned());
        bench
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Whether nobody has one of its devices, as [`Device::is_free`].
    pub fn is_free(&self, test: &str) -> bool {
        self.devices.iter().all(|device| device.is_free(test))
    }

    /// For users who are not root to go in.
    pub fn open_to_all(&self) {
        fs::set_permissions(self.path(""), fs::Permissions::from_mode(0o755)).expect("chmod");
    }

    /// An ordinary user, for whom this is open from now on; `None`, with a word on it, where that one cannot reach the
    /// executables.
    pub fn user(&self, test: &str) -> Option<World> {
        self.open_to_all();
        let world = World::default().as_user(NOBODY);
        let program = self.command(&[]).get_program().to_owned();
        let mut trial = Command::new(&program);
        trial.arg("--version");
        if world.clone().enter(trial).output().is_err() {
            skip(test, &format!("an ordinary user cannot reach {}", program.display()));
            return None;
        }
        Some(world)
    }

    /// The probe set that is asked for.
    pub fn kind(&self) -> Backend {
        match self.backend.as_str() {
            "kprobe" => Backend::Kprobe,
            "fentry" => Backend::Fentry,
            "gate" => Backend::Gate,
            other => panic!("no probe set is called {other}"),
        }
    }

    /// Where the pins of the set are that this build makes here.
    pub fn set(&self) -> PathBuf {
        self.pins().join(set_name(self.kind()))
    }

    /// Where the pins go.
    pub fn pins(&self) -> PathBuf {
        self.path("bpf").join("gpureap")
    }

    pub fn write_config(&self, text: &str) {
        fs::write(self.path("config.toml"), text).expect("write the configuration");
    }

    /// Gives a key of the configuration another value.
    pub fn configure(&self, key: &str, value: &str) {
        let path = self.path("config.toml");
        let text = fs::read_to_string(&path).expect("the configuration");
        let is_it = |line: &str| line.split_once(" = ").is_some_and(|(name, _)| name == key);
        assert_eq!(text.lines().filter(|line| is_it(line)).count(), 1, "{key} stands once in {text}");
        let line = |line: &str| if is_it(line) { format!("{key} = {value}\n") } else { format!("{line}\n") };
        self.write_config(&text.lines().map(line).collect::<String>());
    }

    /// The directories of the finished sets of pins.
    pub fn sets(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.pins()).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains("/abi")).collect()
    }

    /// The maps of the one set of pins.
    pub fn maps(&self) -> Maps {
        let sets = self.sets();
        let [set] = sets.as_slice() else { panic!("one set of pins, not {sets:?}") };
        Maps::from_pins(set).expect("our own pins")
    }

    /// A counter of the kernel programs.
    pub fn counter(&self, index: u32) -> u64 {
        self.maps().counter(index).expect("a counter")
    }

    /// The executable in the environment of this bench.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.command_of(program("GPUREAP_BIN", "gpureap"), arguments)
    }

    /// The actor in the environment of this bench.
    pub fn actor_command(&self, arguments: &[&str]) -> Command {
        self.command_of(program("GPUREAP_ACTOR", "gpureap-actor"), arguments)
    }

    fn command_of(&self, program: PathBuf, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("GPUREAP_PIN_DIR", self.pins())
            .env("GPUREAP_CONFIG", self.path("config.toml"))
            .env("GPUREAP_RUN_DIR", self.path("run"))
            .env("GPUREAP_STATE_DIR", self.path("state"))
            .env("GPUREAP_BACKEND", &self.backend)
            .env("NO_COLOR", "1")
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null());
        // Made by tests that play the kernel's log, the nodes, the driver or the files of the host.
        for (variable, name) in [("GPUREAP_DEV", "dev"), ("GPUREAP_HOST", "host"), ("GPUREAP_PROC", "proc")] {
            if self.path(name).exists() {
                command.env(variable, self.path(name));
            }
        }
        if let Some(host) = self.host.clone() {
            let enter = move || {
                sys::unshare(libc::CLONE_NEWUTS | libc::CLONE_NEWNET)?;
                sys::set_host_name(&host)
            };
            // SAFETY: between fork and exec this only makes system calls.
            unsafe { command.pre_exec(enter) };
        }
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        finish(self.command(arguments))
    }

    /// `holders --json` with more arguments.
    pub fn holders(&self, rest: &[&str]) -> Seen {
        Seen::new(self.run(&[&["holders", "--json"], rest].concat()).expect_code(0).json())
    }

    /// What `holders --json` would print, by the library in this process: for tests that look hundreds of times in an
    /// emulated machine.
    pub fn look(&self) -> Seen {
        let report =
            gpureap::commands::holders::report(&HoldersArgs { json: true, ..HoldersArgs::default() }, &self.config());
        Seen::new(serde_json::to_value(report.expect("a report")).expect("a report is JSON"))
    }

    /// What the executable of this bench would work with, for tests that use the library.
    pub fn config(&self) -> Config {
        let own = |name: &str| Some(self.path(name)).filter(|path| path.exists());
        let Paths { dev, host, proc, .. } = Paths::default();
        let paths = Paths {
            pin: self.pins(),
            config: self.path("config.toml"),
            run: self.path("run"),
            state: self.path("state"),
            dev: own("dev").unwrap_or(dev),
            host: own("host").unwrap_or(host),
            proc: own("proc").unwrap_or(proc),
            ..Paths::default()
        };
        Config::load(paths, Overrides::default()).expect("the configuration")
    }

    /// Waits until `holders` shows the truth; panics with what differs.
    #[track_caller]
    pub fn expect_truth(&self, scene: &Scene, rest: &[&str]) -> Seen {
        self.expect_truths(std::slice::from_ref(scene), rest)
    }

    /// As [`Bench::expect_truth`], of several scenes at once.
    #[track_caller]
    pub fn expect_truths(&self, scenes: &[Scene], rest: &[&str]) -> Seen {
        let mut last = None;
        let compare = Compare { sessions: scenes.iter().map(|scene| scene.actor.session()).collect() };
        let truth = truth::sum(&scenes.iter().map(|scene| &scene.truth).collect::<Vec<_>>());
        let outcome = settle(PATIENCE / 4, || {
            let seen = self.holders(rest);
            let wrong = compare.differences(&truth, &seen);
            let backend = &seen.backend;
            let wrong = (!wrong.is_empty()).then(|| format!("{} {backend}:\n{}", seen.source, wrong.join("\n")));
            last = Some(seen);
            wrong
        });
        let seen = last.expect("looked once at least");
        outcome.unwrap_or_else(|wrong| panic!("{wrong}\nin {:#}", seen.json));
        seen
    }

    pub fn daemon(&self) -> Daemon<&Self> {
        Daemon::start(self)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = sys::unmount(&self.path("bpf"))
        {
            eprintln!("unmount {}: {error}", self.path("bpf").display());
        }
    }
}

/// Runs a command to its end, with a limit on the time.
pub fn finish(mut command: Command) -> Output {
    let name = format!("{command:?}");
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("start {name}: {error}"));
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let status = wait(&mut child, PATIENCE * 2);
    let stderr = stderr.join().expect("the reader of stderr");
    let stdout = stdout.join().expect("the reader of stdout");
    match status {
        Some(status) => Output { code: status.code().unwrap_or(-1), stdout, stderr },
        None => panic!("{name}: does not end; stdout {stdout}; stderr {stderr}"),
    }
}

fn drain(pipe: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            pipe.by_ref().read_to_end(&mut bytes).expect("read a pipe");
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for the end; kills and gives `None` when the time is over.
pub(super) fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait().expect("wait for a child") {
            return Some(status);
        }
        if Instant::now() > until {
            child.kill().expect("kill a child");
            child.wait().expect("wait for a killed child");
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
