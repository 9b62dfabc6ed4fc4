//! Feeds the flight recorder: a thread of its own takes what the ring gives, looks at processes, reads who they are, and
//! hands rows to the journal and events to whoever follows. The daemon's loop only passes batches on and never waits:
//! what finds no room is counted and told.

mod facts;
mod memory;
pub(crate) mod sources;
pub(crate) mod translate;
mod work;
mod xid_trace;
mod xids;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::{broadcast, mpsc, oneshot};

use crate::{
    bpf::{Tracer, ring},
    clock::boottime_ns,
    config::Config,
    gpu::devices::Devices,
    history::{
        event::{Event, Lost, What, Xid},
        rows::{Change, HoldRow, Key, ProcessRow},
    },
    host::Host,
    journal::{Journal, Limits, Meter, Started, Status},
    metrics::Metrics,
    model::Backend,
};

/// Records of the ring on their way. Batches are no measure: many a batch has a single record.
const RECORDS: usize = 32 << 10;
/// Whatever is on its way, a batch of records counting as one.
const INPUTS: usize = 32 << 10;
/// For what is not written when the daemon ends.
const WRITE_PATIENCE: Duration = Duration::from_secs(2);
/// Events that a follower may be behind.
const FOLLOWED: usize = 4096;

/// Where rows go. Never blocks.
pub trait Keep: Send {
    fn keep(&mut self, change: Change);
    /// With restarts and gaps, all that is held has to be sent again.
    fn status(&self) -> Status {
        Status::default()
    }
}

/// The file. What is still to be written when this is dropped has a time limit.
pub struct KeepJournal(Option<Journal>);

impl KeepJournal {
    pub const fn new(journal: Journal) -> Self {
        Self(Some(journal))
    }
}

impl Keep for KeepJournal {
    fn keep(&mut self, change: Change) {
        if let Some(journal) = &self.0 {
            journal.send(change);
        }
    }

    fn status(&self) -> Status {
        self.0.as_ref().map(Journal::status).unwrap_or_default()
    }
}

impl Drop for KeepJournal {
    fn drop(&mut self) {
        if let Some(journal) = self.0.take()
            && !journal.stop(WRITE_PATIENCE)
        {
            tracing::warn!("the journal's disk does not answer: the last records are not written");
        }
    }
}

/// Nothing is kept; events are told all the same.
#[derive(Clone, Copy, Debug)]
pub struct KeepNothing;

impl Keep for KeepNothing {
    fn keep(&mut self, _change: Change) {}
}

/// An event as it is told, and whose process it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// One line of JSON without its end.
    pub line: String,
    /// The same without what only the process's own user may read of it.
    pub public: String,
    /// `None`: of no process, or of one whose user is not known.
    pub uid: Option<u32>,
    /// It is about a process.
    pub personal: bool,
}

impl Told {
    /// What a user may read of it; nothing, where others' processes are hidden and it is about one.
    pub fn for_peer(&self, uid: u32, hides: bool) -> Option<&str> {
        if uid == 0 || self.uid == Some(uid) {
            return Some(&self.line);
        }
        (!self.personal || !hides).then_some(&self.public)
    }

    /// The record of a reader that was too slow.
    pub fn missed(events: u64) -> String {
        let note = format!("{events} events came faster than this reader took them");
        let what = What::Lost(Lost { events, at: "reader".to_owned(), note });
        let event = Event { time: jiff::Timestamp::now(), boot_ns: boottime_ns(), what };
        serde_json::to_string(&event).unwrap_or_default()
    }
}

/// What the thread is given.
#[derive(Debug)]
enum Input {
    Ring(Vec<ring::Event>),
    /// From another source: a time where the source knows one.
    What(Option<u64>, Box<What>),
    /// From the driver's tracepoint.
    Traced(Box<Xid>),
    /// From the kernel's log: the record's number, its time.
    Log(u64, Option<u64>, Box<What>),
    /// Every holder is looked at; the start's snapshot, and from time to time.
    Look,
    Devices(Box<Devices>),
    /// A process that was exiting is gone.
    Gone(Key),
    /// Facts could not be read or were: the request is done with.
    Read(Key),
    /// Somebody follows from now on.
    Follow(oneshot::Sender<(Vec<Told>, broadcast::Receiver<Arc<Told>>)>),
    Stop,
}

/// For those who follow.
#[derive(Clone, Debug)]
pub struct Feed {
    inputs: mpsc::WeakSender<Input>,
    told: broadcast::Sender<Arc<Told>>,
}

impl Feed {
    /// Of what is sent there, and no more.
    pub fn of(told: broadcast::Sender<Arc<Told>>) -> Self {
        let (inputs, _) = mpsc::channel(1);
        Self { inputs: inputs.downgrade(), told }
    }

    /// First what holds at this moment, then what happens.
    pub async fn follow(&self) -> (Vec<Told>, broadcast::Receiver<Arc<Told>>) {
        let ask = async {
            let (reply, answer) = oneshot::channel();
            self.inputs.upgrade()?.send(Input::Follow(reply)).await.ok()?;
            answer.await.ok()
        };
        match tokio::time::timeout(Duration::from_secs(2), ask).await {
            Ok(Some(answer)) => answer,
            // It has much to do: from now on, then.
            _ => (Vec::new(), self.told.subscribe()),
        }
    }
}

/// How the thread begins.
#[derive(Debug)]
pub struct Begin {
    pub backend: Backend,
    pub adopted: bool,
    pub devices: Devices,
    /// What an earlier daemon of this boot left open.
    pub processes: Vec<ProcessRow>,
    pub holds: Vec<HoldRow>,
    /// Boottime of the last record of this boot; what the kernel's log says of earlier times was read. 0: none.
    pub recorded_ns: u64,
    /// What is counted of it.
    pub metrics: Arc<Metrics>,
}

/// The daemon's end of it.
#[derive(Debug)]
pub struct Recorder {
    inputs: mpsc::Sender<Input>,
    told: broadcast::Sender<Arc<Told>>,
    dropped: Arc<AtomicU64>,
    waiting: Arc<AtomicUsize>,
    meter: Option<Meter>,
    thread: Option<JoinHandle<()>>,
}

impl Begin {
    pub fn new(tracer: &Tracer, devices: &Devices) -> Self {
        let (backend, adopted) = (tracer.backend, tracer.adopted);
        let metrics = Arc::new(Metrics::new(backend, adopted));
        let (processes, holds) = (Vec::new(), Vec::new());
        Self { backend, adopted, devices: devices.clone(), processes, holds, recorded_ns: 0, metrics }
    }
}

impl Recorder {
    /// Takes up what an earlier daemon of this boot left open, and keeps what comes, as far as a journal can be had: that it
    /// cannot never stops tracing. With sentences for the log.
    pub fn with_journal(config: &Config, begin: Begin, patience: Duration) -> std::io::Result<(Self, Vec<String>)> {
        let boot_id = Host::read(&config.paths.proc).boot_id;
        let started = Journal::start(&config.paths.journal(), Limits::from(&config.journal), &boot_id, patience)?;
        let Started { journal, holds, processes, recorded_ns, notes } = started;
        let begin = Begin { processes, holds, recorded_ns: recorded_ns.max(begin.recorded_ns), ..begin };
        let meter = journal.meter();
        let recorder = Self::start(config, begin, Box::new(KeepJournal::new(journal)))?;
        Ok((Self { meter: Some(meter), ..recorder }, notes))
    }

    /// Its thread opens the tracer's pins itself: nothing is shared but what goes through the channel.
    pub fn start(config: &Config, begin: Begin, keep: Box<dyn Keep>) -> std::io::Result<Self> {
        let (inputs, receiver) = mpsc::channel(INPUTS);
        let (told, _) = broadcast::channel(FOLLOWED);
        let dropped = Arc::new(AtomicU64::new(0));
        let waiting = Arc::new(AtomicUsize::new(0));
        let counts = work::Counts { dropped: Arc::clone(&dropped), waiting: Arc::clone(&waiting) };
        let work = work::Work::new(config.clone(), begin, keep, told.clone(), counts, inputs.downgrade());
        let thread = std::thread::Builder::new().name("recorder".to_owned()).spawn(move || {
            if let Err(error) = work.and_then(|work| work.run(receiver)) {
                tracing::error!("nothing is recorded any more: {error:#}");
            }
        })?;
        Ok(Self { inputs, told, dropped, waiting, meter: None, thread: Some(thread) })
    }

    /// Passes on what the ring gave.
    pub fn ring(&self, events: Vec<ring::Event>) {
        if events.is_empty() {
            return;
        }
        let count = events.len();
        let waiting = self.waiting.fetch_add(count, Ordering::Relaxed);
        if waiting + count > RECORDS || self.inputs.try_send(Input::Ring(events)).is_err() {
            self.waiting.fetch_sub(count, Ordering::Relaxed);
            self.dropped.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    pub fn look(&self) {
        self.pass(Input::Look);
    }

    pub fn devices(&self, devices: Devices) {
        self.pass(Input::Devices(Box::new(devices)));
    }

    pub fn what(&self, what: What) {
        self.pass(Input::What(None, Box::new(what)));
    }

    fn pass(&self, input: Input) {
        if self.inputs.try_send(input).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Where events from now on can be had.
    pub fn feed(&self) -> Feed {
        Feed { inputs: self.inputs.downgrade(), told: self.told.clone() }
    }

    /// Records that found no room; goes on counting.
    pub fn dropped(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.dropped)
    }

    /// How the journal does, where there is one.
    pub fn meter(&self) -> Option<Meter> {
        self.meter.clone()
    }

    /// Lets it finish what it has been given, for so long.
    pub fn stop(mut self, patience: Duration) {
        let begin = Instant::now();
        let mut stop = Some(Input::Stop);
        while let Some(input) = stop.take() {
            match self.inputs.try_send(input) {
                Err(mpsc::error::TrySendError::Full(input)) if begin.elapsed() < patience => {
                    stop = Some(input);
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => {}
            }
        }
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() && begin.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(2));
        }
        // One that hangs in the kernel is left alone: the process ends, and it with it.
        if thread.is_finished() {
            drop(thread.join());
        }
    }
}
