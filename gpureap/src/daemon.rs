//! `gpureap daemon`: keeps the tracer attached, heals losses, follows the driver. The kernel keeps the truth; when this
//! process dies, the pinned programs go on counting and the next one adopts them.

use std::{
    collections::BTreeSet,
    env, fs,
    io::{Read as _, Seek as _, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aya::maps::{MapData, RingBuf};
use gpureap_common::counter;
use rustix::fs::{FlockOperation, flock};
use sd_notify::NotifyState;
use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use crate::{
    api::{
        privacy::Hiding,
        server::{Ask, Desk, Server},
        wire,
    },
    bpf::{
        Tracer,
        handles::State as Word,
        load::KernelLog,
        ring::{Event, decode},
    },
    cli::DaemonArgs,
    config::Config,
    error::Failure,
    exit_code::Exit,
    fence::watch::FenceWatch,
    footprint,
    gpu::devices::{self, Devices},
    history::event::{self, What},
    metrics::{self, Metrics},
    model::Backend,
    otlp,
    recorder::{Begin, KeepNothing, Recorder},
    trust::{self, Distrust},
};

/// A CUDA process opens its devices in a burst and maps them in the same second; then it is looked at once.
const OBSERVE_AFTER: Duration = Duration::from_millis(500);
/// For the journal to be opened, with a check of it. Then the daemon goes on, and the journal comes later.
const JOURNAL_PATIENCE: Duration = Duration::from_secs(3);
/// Records taken from the ring before timers and signals get their turn.
const DRAIN: usize = 1024;

pub fn run(args: &DaemonArgs, config: &Config) -> anyhow::Result<Exit> {
    if !rustix::process::geteuid().is_root() {
        return Err(
            Failure::not_permitted("the daemon needs root: it attaches kernel programs and pins their maps").into()
        );
    }
    footprint::one_heap();
    let _lock = Lock::take(&config.paths.run)?;
    let devices = devices::discover(&config.paths, &config.devices)?;
    let mut tracer = Tracer::start(config, &devices)?;
    if args.keep {
        tracer.keep();
    }
    announce(&tracer, &devices);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let fence = FenceWatch::default();
    let begin = Begin::new(&tracer, &devices);
    let metrics = Arc::clone(&begin.metrics);
    let (recorder, journal_notes) = record(config, begin)?;
    for note in journal_notes {
        tracing::warn!("{note}");
    }
    let maps = &tracer.eyes().handles().maps;
    let lost = Lost { maps: maps.state(Word::ToldLost)?, ring: maps.state(Word::ToldFull)? };
    let known_devices = watch::Sender::new(devices.clone());
    let to_observe = BTreeSet::new();
    let daemon = Daemon { config, tracer, devices, known_devices, to_observe, lost, fence, recorder, metrics };
    daemon.serve_metrics();
    daemon.export();
    runtime.block_on(daemon.serve())
}

/// Starts the flight recorder.
fn record(config: &Config, begin: Begin) -> anyhow::Result<(Recorder, Vec<String>)> {
    if config.journal.enabled {
        return Ok(Recorder::with_journal(config, begin, JOURNAL_PATIENCE)?);
    }
    Ok((Recorder::start(config, begin, Box::new(KeepNothing))?, Vec::new()))
}

fn announce(tracer: &Tracer, devices: &Devices) {
    for refusal in &tracer.refusals {
        tracing::warn!("{} does not run here: {}", crate::bpf::load::name(refusal.backend), refusal.reason);
    }
    for note in tracer.notes.iter().map(String::as_str).chain(devices.notes().iter().map(String::as_str)) {
        tracing::warn!("{note}");
    }
    if devices.is_empty() {
        tracing::warn!("no NVIDIA driver is loaded and no stand-in is configured: waiting for the driver");
    }
    tracing::info!(
        "tracing {} devices with {}{}",
        devices.list().len(),
        crate::bpf::load::name(tracer.backend),
        if tracer.adopted { ", adopted from pins" } else { "" }
    );
}

/// Makes a directory that users can reach the socket in, whatever the umask.
fn make_for_all(run: &Path) -> Result<PathBuf, Distrust> {
    let is_new = fs::symlink_metadata(run).is_err();
    let run = trust::make_directory(run, 0o755)?;
    if is_new {
        let io = |error| Distrust::Io { path: run.display().to_string(), error };
        fs::set_permissions(&run, fs::Permissions::from_mode(0o755)).map_err(io)?;
    }
    Ok(run)
}

/// One daemon per run directory. The lock is the kernel's: it goes with the process, however that ends.
struct Lock {
    _file: fs::File,
}

impl Lock {
    fn take(run: &Path) -> anyhow::Result<Self> {
        let path = make_for_all(run).map_err(crate::bpf::distrusted)?.join("daemon.lock");
        let mut file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|error| crate::bpf::denied_or(&path, error))?;
        // Whoever can open it could lock it, and keep the next daemon from starting.
        file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(|error| crate::bpf::denied_or(&path, error))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            file.read_to_string(&mut pid).ok();
            let pid = pid.trim();
            let who = if pid.is_empty() { String::new() } else { format!(" (pid {pid})") };
            return Err(
                Failure::unsupported(format!("another gpureap daemon{who} runs: it holds {}", path.display())).into()
            );
        }
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Self { _file: file })
    }
}

struct Daemon<'a> {
    config: &'a Config,
    tracer: Tracer,
    devices: Devices,
    /// The same, for the thread that serves metrics.
    known_devices: watch::Sender<Devices>,
    /// Processes that opened a device and have not been looked at since (`gate` has no hook on mmap).
    to_observe: BTreeSet<u32>,
    lost: Lost,
    fence: FenceWatch,
    recorder: Recorder,
    metrics: Arc<Metrics>,
}

/// Losses that were told already, by this daemon or one before it.
struct Lost {
    maps: u64,
    ring: u64,
}

/// When the recorder is told to end.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

impl Daemon<'_> {
    async fn serve(mut self) -> anyhow::Result<Exit> {
        let events = self.tracer.events()?;
        // SAFETY: the ring owns its descriptor and keeps it until it is dropped, after its registration.
        let ring = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) }
            .map_err(|_error| anyhow::anyhow!("the ring's descriptor cannot be watched"))?;
        let mut ring = Ring { ring };
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut loss_poll = interval(self.config.daemon.loss_poll);
        let mut sweep = interval(self.config.daemon.sweep_period);
        for timer in [&mut loss_poll, &mut sweep] {
            timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
            timer.reset();
        }
        let watchdog = watchdog_period();
        let mut watchdog_timer = interval(watchdog.unwrap_or(Duration::from_hours(24)));
        let mut observe_at: Option<Instant> = None;
        let mut kernel_log = self.kernel_log();
        let mut server = self.listen();
        // What an earlier daemon did not read any more comes first, then what is held now.
        let unread = ring.rest();
        self.note(&unread);
        self.recorder.look();

        footprint::forget_the_start();
        notify(&[NotifyState::Ready, NotifyState::Status(&self.status())]);
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => self.follow_driver(true)?,
                _ = loss_poll.tick() => {
                    self.heal()?;
                    self.fence.look(self.config, &self.devices);
                    self.metrics.fence_denied(self.fence.denied());
                }
                _ = sweep.tick() => {
                    self.follow_driver(false)?;
                    self.resync("period")?;
                    // Whatever the recorder missed, as while it had no descriptors, it finds now.
                    self.recorder.look();
                }
                _ = watchdog_timer.tick(), if watchdog.is_some() => notify(&[NotifyState::Watchdog]),
                () = kernel_lines(&mut kernel_log) => {}
                asks = next(&mut server) => if let Some(server) = &mut server {
                    self.answer(server, asks);
                },
                events = ring.take() => {
                    let events = events?;
                    self.note(&events);
                    if let Some(server) = &server {
                        server.burst();
                    }
                    if !self.to_observe.is_empty() && observe_at.is_none() {
                        observe_at = Some(Instant::now() + OBSERVE_AFTER);
                    }
                }
                () = sleep_until(observe_at.unwrap_or_else(Instant::now)), if observe_at.is_some() => {
                    observe_at = None;
                    self.observe();
                }
            }
        }
        notify(&[NotifyState::Stopping]);
        tracing::info!("stopping");
        let rest = ring.rest();
        self.note(&rest);
        self.recorder.stop(STOP_PATIENCE);
        Ok(Exit::Done)
    }

    /// Tracing goes on without the debug lines.
    fn kernel_log(&mut self) -> Option<AsyncFd<KernelLog>> {
        let log = self.tracer.take_log()?;
        // SAFETY: the logger owns its ring's descriptor and keeps it until it is dropped, after its registration.
        unsafe { AsyncFd::register_with_interest(log, Interest::READABLE) }.ok()
    }

    /// Tracing goes on without a socket.
    fn listen(&self) -> Option<Server> {
        if !self.config.daemon.socket {
            return None;
        }
        Server::start(&self.config.paths.run, &self.config.paths.proc, self.recorder.feed())
            .inspect_err(|error| tracing::warn!("no socket for users who are not root: {error}"))
            .ok()
    }

    /// Tracing goes on without metrics.
    fn serve_metrics(&self) {
        let Some(listen) = self.config.metrics.listen else { return };
        let (metrics, devices) = (Arc::clone(&self.metrics), self.known_devices.subscribe());
        let sources =
            metrics::serve::Sources { metrics, journal: self.recorder.meter(), recorder_lost: self.recorder.dropped() };
        if let Err(error) = metrics::serve::start(self.config, listen, sources, devices) {
            tracing::warn!("no metrics: {error}");
        }
    }

    /// Tracing goes on without anybody who is told.
    fn export(&self) {
        let Some(otlp) = &self.config.otlp else { return };
        if let Err(error) = otlp::start(self.config, otlp, Arc::clone(&self.metrics)) {
            tracing::warn!("nothing is sent to {}: {error}", otlp.endpoint);
        }
    }

    fn answer(&self, server: &mut Server, asks: Vec<Ask>) {
        let eyes = self.tracer.eyes();
        let devices = || {
            // As a reader of the pins sees them.
            let table = eyes.devices().traced(&eyes.handles().maps.devices()?);
            let list = table.list().iter();
            let devices = list.map(|device| wire::Device::new(device, table.is_present(device.slot))).collect();
            Ok(wire::Devices { devices, notes: table.notes().to_vec() })
        };
        let status = || {
            Ok(wire::Status {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                backend: self.tracer.backend,
                adopted: self.tracer.adopted,
                devices: self.devices.list().len() as u32,
                lost_events: eyes.handles().losses()?,
            })
        };
        let hiding = || Hiding::here(&self.config.paths.proc);
        server.answer(asks, &Desk { eyes, devices: &devices, status: &status, hiding: &hiding });
    }

    fn status(&self) -> String {
        format!("{}, {} devices", crate::bpf::load::name(self.tracer.backend), self.devices.list().len())
    }

    fn note(&mut self, records: &[Vec<u8>]) {
        let mut events = Vec::with_capacity(records.len());
        for bytes in records {
            match decode(bytes) {
                Ok(event) => {
                    tracing::debug!(?event);
                    if let Event::Gate(event) = event {
                        self.to_observe.insert(event.header.tgid);
                    }
                    events.push(event);
                }
                Err(error) => tracing::warn!("ring: {error}"),
            }
        }
        self.recorder.ring(events);
    }

    fn observe(&mut self) {
        if self.tracer.backend != Backend::Gate {
            self.to_observe.clear();
            return;
        }
        for tgid in std::mem::take(&mut self.to_observe) {
            if let Err(error) = self.tracer.eyes().observe(tgid) {
                tracing::debug!("look at {tgid}: {error:#}");
            }
        }
    }

    /// Any loss is healed by a sweep, and told.
    fn heal(&mut self) -> anyhow::Result<()> {
        self.tracer.check()?;
        let handles = self.tracer.eyes().handles();
        let (maps, losses) = (&handles.maps, handles.losses()?);
        if losses > self.lost.maps {
            let events = losses - self.lost.maps;
            tracing::warn!("{events} events were lost; the maps are resynchronised");
            self.lost.maps = losses;
            maps.set_state(Word::ToldLost, losses)?;
            self.resync("loss")?;
            self.tell_loss(events, "map", format!("{events} events were lost in the kernel; the maps were put right"));
        }
        let full = maps.counter(counter::RING_FULL)?;
        if full > self.lost.ring {
            let events = full - self.lost.ring;
            tracing::warn!("{events} records found the ring full: the maps are right, the record has a gap");
            self.lost.ring = full;
            maps.set_state(Word::ToldFull, full)?;
            self.tell_loss(events, "ring", format!("{events} records found the ring full"));
        }
        Ok(())
    }

    fn tell_loss(&self, events: u64, at: &str, note: String) {
        self.recorder.what(What::Lost(event::Lost { events, at: at.to_owned(), note }));
        self.recorder.look();
    }

    /// Whoever asks for it lets the recorder look afterwards.
    fn resync(&self, why: &'static str) -> anyhow::Result<()> {
        let outcome = self.tracer.resync()?;
        self.metrics.resynced(why, outcome.corrections);
        if outcome.corrections > 0 || outcome.pending > 0 {
            tracing::info!("resync ({why}): {} corrections, {} pending", outcome.corrections, outcome.pending);
        }
        Ok(())
    }

    fn follow_driver(&mut self, asked: bool) -> anyhow::Result<()> {
        let devices = match devices::discover(&self.config.paths, &self.config.devices) {
            Ok(devices) => devices,
            Err(error) => {
                tracing::warn!("devices: {error}");
                return Ok(());
            }
        };
        if asked || devices.fingerprint() != self.devices.fingerprint() {
            let why = if asked { "was read again as asked" } else { "changed" };
            tracing::info!("the device table {why}: {} devices", devices.list().len());
            self.tracer.set_devices(&devices)?;
            self.recorder.devices(devices.clone());
            self.known_devices.send_replace(devices.clone());
            self.devices = devices;
            self.resync("devices")?;
            self.recorder.look();
            notify(&[NotifyState::Status(&self.status())]);
        }
        Ok(())
    }
}

/// Logs what the kernel programs have to say; never, where they were loaded without it.
async fn kernel_lines(log: &mut Option<AsyncFd<KernelLog>>) {
    let Some(log) = log else { return std::future::pending().await };
    if let Ok(mut guard) = log.readable_mut().await {
        guard.get_inner_mut().flush();
        guard.clear_ready();
    }
}

/// Never, without a socket.
async fn next(server: &mut Option<Server>) -> Vec<Ask> {
    match server {
        Some(server) => server.next().await,
        None => std::future::pending().await,
    }
}

/// The ring as a source of batches.
struct Ring {
    ring: AsyncFd<RingBuf<MapData>>,
}

impl Ring {
    /// What is there at this moment, without waiting.
    fn rest(&mut self) -> Vec<Vec<u8>> {
        let ring = self.ring.get_mut();
        let mut records = Vec::new();
        while let Some(item) = ring.next() {
            records.push(item.to_vec());
        }
        records
    }

    /// Waits for records and copies them out. The ring is emptied before readiness is cleared: the kernel wakes a reader
    /// only when it had caught up.
    async fn take(&mut self) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut guard = self.ring.readable_mut().await?;
        let mut batch = Vec::new();
        let ring = guard.get_inner_mut();
        while batch.len() < DRAIN {
            let Some(item) = ring.next() else {
                guard.clear_ready();
                break;
            };
            batch.push(item.to_vec());
        }
        Ok(batch)
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if env::var_os("NOTIFY_SOCKET").is_some()
        && let Err(error) = sd_notify::notify(states)
    {
        tracing::warn!("sd_notify: {error}");
    }
}

/// Half of what systemd allows between two signs of life.
fn watchdog_period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|period| period / 2)
}
