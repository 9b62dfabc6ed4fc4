//! A place of its own for one measurement: mounts, stand-in device, configuration, pins, and a running daemon.

use std::{
    fs::{self, File},
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
        net::UnixDatagram,
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::{
    fs::{CWD, FileType, Mode, major, makedev, minor, mknodat},
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    process::{Pid, Signal, kill_process, set_parent_process_death_signal},
    thread::{UnshareFlags, unshare_unsafe},
};
use tempfile::TempDir;

use super::trace::Inode;

/// Numbers that next to nobody uses: what holds them may be killed. The first that is free and can be opened.
const NUMBERS: [(u32, u32); 5] = [(4, 63), (4, 62), (4, 61), (4, 60), (1, 7)];
const PATIENCE: Duration = Duration::from_mins(1);

pub(super) struct Place {
    dir: TempDir,
    gpureap: PathBuf,
    pub(super) device: (u32, u32),
    mounted: Vec<PathBuf>,
    daemon: Option<Child>,
    /// To which the daemon says how it is.
    notify: Option<UnixDatagram>,
}

impl Place {
    /// Makes everything and starts the daemon. To be called while this process has one thread.
    pub(super) fn new(gpureap: &Path) -> Result<Self> {
        let mut place = Self::without_daemon(gpureap)?;
        place.start_daemon(None)?;
        Ok(place)
    }

    /// As above, for whoever starts daemons himself.
    pub(super) fn without_daemon(gpureap: &Path) -> Result<Self> {
        // SAFETY: only the table of mounts is left behind, no memory and no descriptors.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("a mount namespace of its own")?;
        // Nobody else sees the mounts below, and they go with this process, however that ends.
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .context("keep mounts private")?;
        let dir = tempfile::Builder::new().prefix("gpureap-bench-").tempdir()?;
        let mut place =
            Self { dir, gpureap: gpureap.to_owned(), device: (0, 0), mounted: Vec::new(), daemon: None, notify: None };
        // Device nodes do not work on every /tmp.
        for (kind, name) in [("bpf", "bpf"), ("tmpfs", "dev")] {
            let at = place.path(name);
            fs::create_dir(&at)?;
            mount(kind, &at, kind, MountFlags::empty(), None).with_context(|| format!("mount a {kind} of our own"))?;
            place.mounted.push(at);
        }
        place.device = place.make_node()?;
        let (major, minor) = place.device;
        let config = format!(
            "[[device]]\nkind = \"standin\"\nmajor = {major}\nminor = {minor}\nnode = \"{}\"\n",
            place.node().display()
        );
        fs::write(place.path("config.toml"), config)?;
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where the daemon pins its programs.
    pub(super) fn pins(&self) -> PathBuf {
        self.path("bpf/gpureap")
    }

    /// For files of the measurement, in memory.
    pub(super) fn files(&self) -> PathBuf {
        self.path("dev")
    }

    /// A tracefs for this measurement.
    pub(super) fn mount_tracing(&mut self) -> Result<PathBuf> {
        let at = self.path("tracing");
        fs::create_dir(&at)?;
        mount("tracefs", &at, "tracefs", MountFlags::empty(), None).context("mount a tracefs")?;
        self.mounted.push(at.clone());
        Ok(at)
    }

    /// The stand-in's node; nobody else has this path.
    pub(super) fn node(&self) -> PathBuf {
        self.path("dev/standin")
    }

    /// As a trace tells it.
    pub(super) fn inode(&self) -> Result<Inode> {
        let meta = fs::metadata(self.node()).context("look at the stand-in's node")?;
        Ok(Inode { device: (major(meta.dev()), minor(meta.dev())), number: meta.ino() })
    }

    /// Where the output of a measured command goes.
    pub(super) fn output(&self) -> PathBuf {
        self.path("dev/output")
    }

    fn make_node(&self) -> Result<(u32, u32)> {
        let mut reasons = Vec::new();
        for (major, minor) in NUMBERS {
            let held = holding((major, minor))?;
            if !held.is_empty() {
                reasons.push(format!("{major}:{minor} is held by {held:?}"));
                continue;
            }
            let node = self.node();
            let rights = Mode::RUSR | Mode::WUSR;
            mknodat(CWD, &node, FileType::CharacterDevice, rights, makedev(major, minor)).context("mknod")?;
            match File::options().read(true).write(true).custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK).open(&node) {
                Ok(_) => return Ok((major, minor)),
                Err(error) => reasons.push(format!("{major}:{minor}: {error}")),
            }
            fs::remove_file(&node)?;
        }
        bail!("no device number is free as a stand-in: {}", reasons.join("; "))
    }

    /// `program` in the environment of this place.
    pub(super) fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("GPUREAP_PIN_DIR", self.pins())
            .env("GPUREAP_CONFIG", self.path("config.toml"))
            .env("GPUREAP_RUN_DIR", self.path("run"))
            .env("GPUREAP_STATE_DIR", self.path("state"))
            .env_remove("NOTIFY_SOCKET");
        command
    }

    pub(super) fn gpureap(&self, arguments: &[&str]) -> Command {
        self.command(&self.gpureap, arguments)
    }

    /// With the probe set that is named. Returns how long it took to get ready.
    pub(super) fn start_daemon(&mut self, backend: Option<&str>) -> Result<Duration> {
        let address = self.path("notify");
        if address.exists() {
            fs::remove_file(&address)?;
        }
        let socket = UnixDatagram::bind(&address).context("a socket for readiness")?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let log = self.path("daemon.log");
        let mut command = self.gpureap(&["daemon"]);
        if let Some(backend) = backend {
            command.env("GPUREAP_BACKEND", backend);
        }
        command.env("NOTIFY_SOCKET", &address).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        // SAFETY: one system call without memory. Told to end, the daemon detaches its programs.
        unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?)) };
        let started = Instant::now();
        let daemon = self.daemon.insert(command.spawn().context("start the daemon")?);
        let until = started + PATIENCE;
        let mut message = [0; 4096];
        let said = || fs::read_to_string(&log).unwrap_or_default();
        loop {
            let length = socket.recv(&mut message).unwrap_or(0);
            if message[..length].split(|byte| *byte == b'\n').any(|line| line == b"READY=1") {
                self.notify = Some(socket);
                return Ok(started.elapsed());
            }
            ensure!(daemon.try_wait()?.is_none(), "the daemon ended before it was ready:\n{}", said());
            ensure!(Instant::now() < until, "the daemon does not get ready:\n{}", said());
        }
    }

    /// Ends the daemon, which takes its programs along.
    pub(super) fn stop_daemon(&mut self) -> Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        // Not waited for yet: the pid is still its own.
        kill_process(Pid::from_child(&daemon), Signal::TERM).context("end the daemon")?;
        let status = daemon.wait().context("wait for the daemon")?;
        ensure!(status.success(), "the daemon ended with {status}:\n{}", self.log().join("\n"));
        Ok(())
    }

    pub(super) fn daemon(&self) -> Result<Pid> {
        Ok(Pid::from_child(self.daemon.as_ref().context("no daemon runs")?))
    }

    /// The same as notes of a report.
    pub(super) fn said(&self) -> Vec<String> {
        self.log().into_iter().map(|line| format!("the daemon said: {line}")).collect()
    }

    /// What the daemon has complained of.
    pub(super) fn log(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("daemon.log")).unwrap_or_default();
        log.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = self.stop_daemon() {
            println!("{error:#}");
        }
        for at in self.mounted.iter().rev() {
            if let Err(error) = unmount(at, UnmountFlags::DETACH) {
                println!("unmount {}: {error}", at.display());
            }
        }
    }
}

/// Who has a device open, as /proc tells; one that ends meanwhile has not.
pub(super) fn holding((major, minor): (u32, u32)) -> Result<Vec<u32>> {
    let wanted = makedev(major, minor);
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc").context("list /proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else { continue };
        let holds = descriptors.flatten().any(|descriptor| {
            let meta = fs::metadata(descriptor.path());
            meta.is_ok_and(|meta| meta.file_type().is_char_device() && meta.rdev() == wanted)
        });
        if holds {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    Ok(pids)
}
