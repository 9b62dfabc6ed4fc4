//! The recorder's thread.

mod journal;
mod looks;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use jiff::Timestamp;
use tokio::{
    sync::{broadcast, mpsc},
    time::{Instant, sleep_until},
};

use super::{
    Begin, Input, Keep, Told, facts::Reader, memory, sources, sources::LogRead, translate, xid_trace::XidTrace,
    xids::Xids,
};
use crate::{
    bpf::{eyes, eyes::KernelEyes, handles::State as Word, ring},
    clock::{self, NANOS, boottime_ns, wall_offset_ns},
    config::Config,
    gpu::{devices::Devices, nvml},
    history::{
        build::to_microseconds,
        event::{Device, Event, Lost, Process, Reap, Relative, Sender, Signal, Start, What},
        rows::{Change, Key},
        state::State,
    },
    host::Host,
    journal::Status,
    metrics::{Metrics, deaths::Deaths},
    model::{Ancestor, Backend, Eyes as _},
    reap::record::Ended,
};

/// Inputs in a row before looks that are due get their turn.
const INPUTS_A_TURN: u64 = 64;
/// With the gate no event tells of a close.
const GATE_PERIOD: Duration = Duration::from_secs(5);
/// Time between two checks of files and of facts that do not come.
const TICK: Duration = Duration::from_secs(1);
/// Between two times that the journal is told all that is held.
const TELL_APART: Duration = Duration::from_secs(10);
/// The wall clock was set, or has drifted so far: the journal is told, whose times are all since boot.
const CLOCK_MOVED: u64 = NANOS / 10;
/// Whoever lives so long after a SIGKILL hangs in the kernel, most likely in a driver.
const UNKILLABLE_NS: u64 = 10 * NANOS;
/// Of a sender.
const ANCESTORS: usize = 16;

/// What both ends of the channel know.
pub(super) struct Counts {
    /// Records that found no room.
    pub(super) dropped: Arc<AtomicU64>,
    /// Records of the ring on their way.
    pub(super) waiting: Arc<AtomicUsize>,
}

pub(super) struct Work {
    config: Config,
    eyes: KernelEyes,
    devices: Devices,
    backend: Backend,
    host: Host,
    state: State,
    keep: Box<dyn Keep>,
    told: broadcast::Sender<Arc<Told>>,
    counts: Counts,
    /// Drops that were told already.
    dropped_told: u64,
    inputs: mpsc::WeakSender<Input>,
    facts: Reader,
    reaps: sources::Reaps,
    outcomes: sources::Outcomes,
    metrics: Arc<Metrics>,
    deaths: Deaths,
    /// Processes that will be looked at: when, and which of [`LOOKS`] it is.
    looks: BTreeMap<u32, (Instant, usize)>,
    /// Exits whose files are being closed, and those of them that were seen to live on for that.
    closing: BTreeSet<Key>,
    watched: BTreeSet<Key>,
    /// gpureap's own processes that open devices: they ask NVML, and are nobody's job.
    own: BTreeSet<Key>,
    /// For who samples memory: whether anybody holds anything.
    held: Arc<AtomicBool>,
    /// Peers were looked at for this death.
    peers_of: BTreeMap<Key, u64>,
    adopted: bool,
    recorded_ns: u64,
    xid_trace: Option<XidTrace>,
    xids: Xids,
    /// Whether the kernel's log is read.
    reads_log: bool,
    /// As of the last look at it.
    kept: Status,
    /// Why it cannot be written, as it was told last.
    journal_fails: Option<String>,
    /// The last look did.
    look_fails: bool,
    /// When the journal was last told all that is held.
    told_at: Option<Instant>,
    /// As the journal has it.
    wall_offset_ns: i64,
}

impl Work {
    pub(super) fn new(
        config: Config,
        begin: Begin,
        keep: Box<dyn Keep>,
        told: broadcast::Sender<Arc<Told>>,
        counts: Counts,
        inputs: mpsc::WeakSender<Input>,
    ) -> anyhow::Result<Self> {
        let Begin { backend, adopted, devices, processes, holds, recorded_ns, metrics } = begin;
        let eyes = eyes::from_pins(&config, &devices)?
            .map_err(|notes| anyhow::anyhow!("no pins to read: {}", notes.join("; ")))?;
        let host = Host::read(&config.paths.proc);
        let facts = Reader::start(&config, eyes.devices(), inputs.clone()).context("start the reader of facts")?;
        let reaps = sources::Reaps::new(&config.paths.state, &host.boot_id);
        let outcomes = sources::Outcomes::new(&config.paths.state, &host.boot_id);
        Ok(Self {
            devices: eyes.devices().clone(),
            eyes,
            backend,
            host,
            state: State::resume(processes, holds),
            kept: Status::default(),
            told_at: None,
            look_fails: false,
            wall_offset_ns: wall_offset_ns(),
            // Said at the start.
            journal_fails: keep.status().last_error,
            keep,
            told,
            counts,
            dropped_told: 0,
            inputs,
            facts,
            reaps,
            outcomes,
            metrics,
            deaths: Deaths::default(),
            looks: BTreeMap::new(),
            closing: BTreeSet::new(),
            watched: BTreeSet::new(),
            own: BTreeSet::new(),
            held: Arc::default(),
            peers_of: BTreeMap::new(),
            adopted,
            recorded_ns,
            xid_trace: None,
            xids: Xids::default(),
            reads_log: false,
            config,
        })
    }

    pub(super) fn run(mut self, mut inputs: mpsc::Receiver<Input>) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async move {
            self.begin();
            let mut tick = tokio::time::interval(TICK);
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let period = if self.backend == Backend::Gate { GATE_PERIOD } else { self.config.daemon.sweep_period };
            let mut all = tokio::time::interval_at(Instant::now() + period, period);
            all.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let mut heartbeat = tokio::time::interval(self.config.journal.heartbeat);
            heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let mut taken: u64 = 0;
            loop {
                let next = self.looks.values().map(|(at, _)| *at).min();
                tokio::select! {
                    biased;
                    // First what comes seldom: there may always be another record.
                    _ = heartbeat.tick() => self.heartbeat(),
                    _ = all.tick(), if self.state.holders().next().is_some() => self.look_at_holders(),
                    // Nothing happens on a host where nothing is held.
                    _ = tick.tick(), if self.is_busy() => self.tick(),
                    input = inputs.recv() => match input {
                        None | Some(Input::Stop) => break,
                        Some(input) => {
                            self.take(input);
                            taken += 1;
                            if taken.is_multiple_of(INPUTS_A_TURN) {
                                self.look_at_some();
                            }
                        }
                    },
                    () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => self.look_at_some(),
                }
            }
            self.tell(What::Stop);
        });
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.state.keys().next().is_some()
            || !self.xids.is_empty()
            || !self.closing.is_empty()
            || !self.deaths.is_empty()
            || self.counts.dropped.load(Ordering::Relaxed) != self.dropped_told
            || self.keep.status().differs(&self.kept)
    }

    fn begin(&mut self) {
        let start = self.start(self.adopted);
        self.tell(What::Start(start));
        // Of the time before this daemon: recorded, where it was not, and not counted.
        for (at, reap) in self.read_reaps() {
            self.reaped(at, reap);
        }
        drop(self.outcomes.take());
        self.trace_xids();
        if let Some(period) = self.config.journal.memory_period {
            let (devices, held) = (self.devices.clone(), Arc::clone(&self.held));
            if let Err(error) = memory::sample(&self.config, period, devices, held, self.inputs.clone()) {
                tracing::warn!("no samples of device memory: {error}");
            }
        }
        // A stand-in may be the log itself, and then reading it would be holding it.
        let log = self.config.paths.dev.join("kmsg");
        let is_device = std::fs::metadata(&log).is_ok_and(|metadata| {
            use std::os::unix::fs::MetadataExt as _;
            self.devices.by_rdev(metadata.rdev()).is_some()
        });
        if !is_device {
            let sequence = self.eyes.handles().maps.state(Word::LogRead).ok().filter(|sequence| *sequence > 0);
            // Without the pins of the earlier daemon the journal says how far it had come.
            let after = sequence.map_or(LogRead::Until(self.recorded_ns), LogRead::Record);
            let followed = sources::follow_log(&log, after, self.inputs.clone());
            self.reads_log = followed.is_ok();
            if let Err(error) = followed {
                let said = format!("Xids and out-of-memory kills are not read from {}: {error}", log.display());
                // A host without the file is one thing, a right that somebody forgot another.
                if error.kind() == std::io::ErrorKind::PermissionDenied {
                    tracing::warn!("{said}");
                } else {
                    tracing::info!("{said}");
                }
            }
        }
    }

    fn trace_xids(&mut self) {
        if let Some(trace) = &self.xid_trace {
            if let Err(error) = trace.enable() {
                tracing::info!("Xids are read from the kernel's log: {error}");
                self.xid_trace = None;
            }
            return;
        }
        self.xid_trace = XidTrace::start(&self.config.paths.sys, &self.config.paths.run, self.inputs.clone());
    }

    fn start(&self, adopted: bool) -> Start {
        Start {
            boot_id: self.host.boot_id.clone(),
            host: self.host.name.clone(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: self.backend,
            adopted,
            daemon_pid: std::process::id(),
            wall_offset_ns: wall_offset_ns(),
            devices: self.device_list(),
        }
    }

    /// So that a recording that begins now can be replayed.
    fn preamble(&self) -> Vec<Told> {
        let now = boottime_ns();
        let start = std::iter::once((None, What::Start(self.start(self.adopted))));
        let events = start.chain(self.state.preamble()).map(|(at, what)| {
            let boot_ns = at.unwrap_or(now);
            Event { time: wall(boot_ns), boot_ns, what }
        });
        events.filter_map(|event| self.render(&event)).collect()
    }

    fn device_list(&self) -> Vec<Device> {
        self.devices.list().iter().filter(|device| device.minor.is_some()).map(translate::device).collect()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Ring(events) => {
                self.counts.waiting.fetch_sub(events.len(), Ordering::Relaxed);
                self.ring(events);
            }
            Input::What(at, what) => self.other(at, *what),
            Input::Log(sequence, at, what) => {
                if let What::Xid(xid) = what.as_ref() {
                    let now = boottime_ns();
                    // Of the time before the tracepoint was listened to there is no other half.
                    let recent = at.is_none_or(|at| now.saturating_sub(at) < NANOS);
                    self.xids.logged(at.unwrap_or(now), xid, recent && self.xid_trace.is_some());
                }
                self.other(at, *what);
                if let Err(error) = self.eyes.handles().maps.set_state(Word::LogRead, sequence) {
                    tracing::debug!("remember what was read of the kernel's log: {error}");
                }
            }
            Input::Traced(xid) if self.reads_log => self.xids.traced(boottime_ns(), *xid),
            Input::Traced(xid) => self.other(None, What::Xid(*xid)),
            Input::Look => self.look_at_all(),
            Input::Devices(devices) => self.set_devices(&devices),
            Input::Gone(key) => self.gone(key),
            Input::Read(key) => self.facts.answered(key),
            Input::Follow(reply) => drop(reply.send((self.preamble(), self.told.subscribe()))),
            Input::Stop => {}
        }
    }

    fn ring(&mut self, events: Vec<ring::Event>) {
        for event in events {
            if self.is_own(&event) {
                continue;
            }
            if let Some(key) = looks::reason_to_look(&event) {
                self.look_soon(key.pid);
            }
            let (at, what) = translate::translate(event, &self.devices);
            let Some(what) = what else { continue };
            let what = match what {
                What::Signal(signal) => self.with_sender(signal),
                other => other,
            };
            let known = |state: &State, key: Key| state.is_known(key) || state.has_exited(key);
            let ask = match &what {
                What::Open(file) => file.key,
                What::Exec(named) => Some(named.key),
                _ => None,
            };
            let dying = match &what {
                What::Signal(signal) => Some(signal.key),
                _ => None,
            };
            let exited = match &what {
                What::Exit(exit) => Some(exit.key),
                _ => None,
            };
            self.tell_at(at, what);
            if let Some(key) = ask.filter(|key| self.state.process(*key).is_some() && !known(&self.state, *key)) {
                self.facts.ask(key);
            }
            if let Some(key) = dying {
                self.take_reaps();
                self.look_at_peers(key);
            }
            if let Some(key) = exited {
                self.looks.remove(&key.pid);
                if self.state.process(key).is_some() {
                    self.wait_for_end(key);
                }
            }
        }
    }

    /// Whether it is about a process of gpureap's that asks NVML.
    fn is_own(&mut self, event: &ring::Event) -> bool {
        let (header, comm) = match event {
            ring::Event::Open(file) | ring::Event::Gate(file) => (&file.header, Some(&file.comm)),
            ring::Event::First(file) | ring::Event::Last(file) => (&file.header, None),
            ring::Event::Fork(process) | ring::Event::Exec(process) | ring::Event::Thread(process) => {
                (&process.header, None)
            }
            ring::Event::Exit(process) => {
                return self.own.remove(&Key { pid: process.header.tgid, start_ns: process.header.start_ns });
            }
            ring::Event::Free(_) | ring::Event::Signal(_) | ring::Event::Oom(_) => return false,
        };
        let key = Key { pid: header.tgid, start_ns: header.start_ns };
        if self.own.contains(&key) {
            return true;
        }
        // The child is started as /proc/self/exe, from which it has its name.
        let may_be = comm.is_some_and(|comm| comm.starts_with(b"exe\0") || comm.starts_with(b"gpureap"));
        let is = may_be && self.asks_nvml(key);
        if is {
            self.own.insert(key);
        }
        is
    }

    fn asks_nvml(&self, key: Key) -> bool {
        let is_word = |argument: Option<&[u8]>| argument == Some(nvml::child::WORD.as_bytes());
        // One that asks for this process may have ended already.
        let known = self.eyes.lineage().lookup(key.into());
        if let Some(Ancestor { parent: Some(parent), argv, .. }) = known
            && parent.tgid == std::process::id()
            && is_word(argv.get(1).map(String::as_bytes))
        {
            return true;
        }
        // The arguments of a program that is not this one are not read here: that may wait for its memory lock.
        let cmdline = || std::fs::read(self.config.paths.proc.join(key.pid.to_string()).join("cmdline"));
        self.is_this_program(key.pid) && cmdline().is_ok_and(|cmdline| is_word(cmdline.split(|byte| *byte == 0).nth(1)))
    }

    fn is_this_program(&self, pid: u32) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        let exe = |pid: &str| std::fs::metadata(self.config.paths.proc.join(pid).join("exe")).ok();
        exe("self")
            .zip(exe(&pid.to_string()))
            .is_some_and(|(own, other)| (own.dev(), own.ino()) == (other.dev(), other.ino()))
    }

    fn other(&mut self, at: Option<u64>, what: What) {
        match what {
            // A holder that is an ancestor of another has told of itself.
            What::Process(process) if process.ancestor && self.state.process(process.key).is_some() => {}
            What::Xid(mut xid) => {
                let device = self.devices.gpus().find(|device| device.bdf.as_deref() == Some(xid.bdf.as_str()));
                xid.node = device.map(|device| device.node.display().to_string());
                self.tell_at(at.unwrap_or_else(boottime_ns), What::Xid(xid));
            }
            other => self.tell_at(at.unwrap_or_else(boottime_ns), other),
        }
    }

    fn tick(&mut self) {
        self.facts.check();
        self.take_reaps();
        for (at, xid) in self.xids.overdue(boottime_ns()) {
            self.other(Some(at), What::Xid(xid));
        }
        self.look_at_journal();
        self.count();
        let dropped = self.counts.dropped.load(Ordering::Relaxed);
        if dropped > self.dropped_told {
            let events = dropped - self.dropped_told;
            self.dropped_told = dropped;
            let note = format!("{events} records came faster than they could be recorded");
            self.tell(What::Lost(Lost { events, at: "recorder".to_owned(), note }));
            self.look_at_all();
        }
    }

    fn tell(&mut self, what: What) {
        self.tell_at(boottime_ns(), what);
    }

    fn tell_at(&mut self, boot_ns: u64, what: What) {
        let event = Event { time: wall(boot_ns), boot_ns, what };
        let changes = self.state.apply(&event);
        // A look that found what the last one had found is no news.
        let is_news = !matches!(event.what, What::Held(_)) || !changes.is_empty();
        for change in changes {
            if let Change::Process(row) = &change
                && let Some(death) = &row.death
            {
                self.deaths.decided(row.key, death.cause, boottime_ns());
            }
            self.keep.keep(change);
        }
        if matches!(&event.what, What::Lost(lost) if lost.at == "kmsg") {
            self.metrics.kernel_log_lost();
        }
        if is_news
            && self.told.receiver_count() > 0
            && let Some(told) = self.render(&event)
        {
            drop(self.told.send(Arc::new(told)));
        }
    }

    fn render(&self, event: &Event) -> Option<Told> {
        let line = serde_json::to_string(event).ok()?;
        let key = subject(&event.what);
        let uid = match &event.what {
            What::Process(process) => process.uid,
            _ => key.and_then(|key| self.state.process(key)).and_then(|row| row.uid),
        };
        let public = match &event.what {
            What::Process(process) => {
                let hidden = Process { env: BTreeMap::new(), ..Process::clone(process) };
                serde_json::to_string(&Event { what: What::Process(Box::new(hidden)), ..event.clone() }).ok()?
            }
            _ => line.clone(),
        };
        Some(Told { line, public, uid, personal: key.is_some() })
    }

    fn set_devices(&mut self, devices: &Devices) {
        match eyes::from_pins(&self.config, devices) {
            Ok(Ok(eyes)) => {
                self.devices = eyes.devices().clone();
                self.eyes = eyes;
            }
            Ok(Err(notes)) => tracing::warn!("the recorder has lost the pins: {}", notes.join("; ")),
            Err(error) => tracing::warn!("the recorder has lost the pins: {error:#}"),
        }
        // The driver may have come, gone, or be a new one.
        self.trace_xids();
    }

    /// Who sent it: gone in a moment, so it is asked at once, and from the kernel's memory.
    fn with_sender(&self, mut signal: Signal) -> What {
        let target = signal.key;
        for sender in [&mut signal.sender, &mut signal.running].into_iter().flatten() {
            if sender.key != target {
                self.describe(sender);
            }
        }
        What::Signal(signal)
    }

    fn describe(&self, sender: &mut Sender) {
        let known = self.eyes.lineage().lookup(sender.key.into());
        let mut next = known.as_ref().and_then(|known| known.parent);
        sender.argv = known.map(|known| known.argv).unwrap_or_default();
        while let Some(key) = next.filter(|key| key.tgid > 1 && sender.lineage.len() < ANCESTORS) {
            let Some(known) = self.eyes.lineage().lookup(key) else { break };
            next = known.parent;
            sender.lineage.push(Relative { key: key.into(), comm: known.comm, argv: known.argv });
        }
        // A name is anybody's; the program is looked at.
        if sender.comm.starts_with("gpureap") {
            sender.gpureap = self.is_this_program(sender.key.pid);
        }
    }

    fn read_reaps(&mut self) -> Vec<(u64, Reap)> {
        let offset = wall_offset_ns();
        let at = |time: Timestamp| {
            i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX).saturating_sub(offset).max(0) as u64
        };
        self.reaps.take().into_iter().map(|(time, reap)| (at(time), reap)).collect()
    }

    fn reaped(&mut self, at: u64, reap: Reap) {
        if self.state.process(reap.key).is_some() {
            self.tell_at(at, What::Reap(reap));
        }
    }

    fn take_reaps(&mut self) {
        for (at, reap) in self.read_reaps() {
            self.metrics.signalled(reap.signal.as_deref());
            self.reaped(at, reap);
        }
        for Ended { outcome, free_ms, .. } in self.outcomes.take() {
            self.metrics.reaped(outcome, free_ms.map(|ms| ms / 1_000.0));
        }
    }

    /// What is counted only when no more evidence comes, and what time alone makes true.
    fn count(&mut self) {
        let now = boottime_ns();
        for cause in self.deaths.settled(now) {
            self.metrics.died(cause);
        }
        self.metrics.unkillable(self.state.unkillable(now, UNKILLABLE_NS));
    }
}

/// Wall-clock time of a boottime, by the clock as it is set now.
fn wall(boot_ns: u64) -> Timestamp {
    to_microseconds(clock::wall(wall_offset_ns(), boot_ns))
}

/// The process that an event is about.
fn subject(what: &What) -> Option<Key> {
    match what {
        What::Open(file) | What::Close(file) | What::Free(file) => file.key,
        What::Held(held) => Some(held.key),
        What::Fork(fork) => Some(fork.key),
        What::Exec(named) => Some(named.key),
        What::Thread(thread) => Some(thread.key),
        What::Process(process) => Some(process.key),
        What::Signal(signal) => Some(signal.key),
        What::Oom(oom) => oom.key,
        What::Reap(reap) => Some(reap.key),
        What::Exit(exit) => Some(exit.key),
        What::Closed(subject) => Some(subject.key),
        What::Peer(peer) => Some(peer.key),
        What::Start(_) | What::Stop | What::Xid(_) | What::Memory(_) | What::Lost(_) => None,
    }
}
