//! The thread that writes. Whoever sends never waits: not for a slow disk, not for a full one, not for a lock.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use jiff::Timestamp;

use super::{
    Error,
    retention::{Limits, Tidied},
    writer::{Opened, Writer},
};
use crate::{
    clock::{boottime_ns, wall_offset_ns},
    history::{
        event::{Event, Lost, What},
        rows::{Change, HoldRow, ProcessRow},
    },
};

/// Changes that may wait for the disk.
const QUEUE: usize = 8192;
/// A batch is written when it has this many, or is this old.
const BATCH: usize = 256;
const WINDOW: Duration = Duration::from_millis(200);
/// Between attempts after a failure, and how often one batch is tried.
const RETRY: Duration = Duration::from_secs(1);
const ATTEMPTS: u32 = 5;
/// Between two new files. A file that is damaged so soon after the last one is not what is wrong, and those that were moved
/// aside would push each other out.
const ANEW: Duration = Duration::from_mins(10);
/// Between looks at what is too old, while there is nothing.
const TIDY: Duration = Duration::from_mins(1);

enum Message {
    Change(Box<Change>),
    /// Look at what is wanted: a flush or a stop.
    Wake,
}

/// What the journal has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Changes on file.
    pub written: u64,
    /// Changes that were not written: the queue was full, or writing failed.
    pub dropped: u64,
    /// Failed attempts to open or to write.
    pub errors: u64,
    /// Kept until writing works again.
    pub last_error: Option<String>,
    /// With its log.
    pub size_bytes: u64,
    /// Files begun after the first. With each, what is held has to be sent again, or the new file does not have it.
    pub restarts: u64,
    /// Times that writing worked again after something had been dropped, or that the file was opened only later. With each,
    /// it is to be told what is held, as it may have more or less.
    pub gaps: u64,
}

impl Status {
    /// Whether anything but the amount is other than it was.
    pub fn differs(&self, before: &Self) -> bool {
        let Self { written: _, dropped, errors: _, last_error, size_bytes: _, restarts, gaps } = self;
        (dropped, last_error, restarts, gaps) != (&before.dropped, &before.last_error, &before.restarts, &before.gaps)
    }
}

#[derive(Default)]
struct State {
    status: Status,
    /// Nobody waits any more for the file to be opened.
    late: bool,
    /// Changes that were taken into the queue, and those of them that were written or given up.
    taken: u64,
    settled: u64,
    /// Lost and not recorded as lost yet.
    unrecorded: u64,
    /// Somebody waits until so many are settled.
    wanted: u64,
    stop: bool,
    ended: bool,
}

/// For whoever shows how the journal does.
#[derive(Clone)]
pub struct Meter(Arc<Shared>);

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meter").finish_non_exhaustive()
    }
}

impl Meter {
    pub fn status(&self) -> Status {
        self.0.lock().status.clone()
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Nothing that can panic runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`; whether it came to that in time.
    fn wait(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> bool {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| !done(state))
            .unwrap_or_else(PoisonError::into_inner);
        done(&state)
    }

    fn fail(&self, error: &Error) {
        let mut state = self.lock();
        state.status.errors += 1;
        state.status.last_error = Some(error.to_string());
    }
}

/// The daemon's hand on the journal.
pub struct Journal {
    sender: SyncSender<Message>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A journal, and what the same boot's last daemon left open in it.
pub struct Started {
    pub journal: Journal,
    pub holds: Vec<HoldRow>,
    pub processes: Vec<ProcessRow>,
    /// Boottime of the last record of this boot; 0: there is none.
    pub recorded_ns: u64,
    /// For the log: what was lost, or why nothing can be written yet.
    pub notes: Vec<String>,
}

impl Journal {
    /// Starts the thread, which opens the file, and waits that long for it. If it cannot be opened, the journal begins
    /// without one and tries again; while a disk does not answer, what is sent waits. That something was lost is recorded by
    /// the thread itself, after the first [`Change::Start`].
    pub fn start(path: &Path, limits: Limits, boot_id: &str, patience: Duration) -> std::io::Result<Started> {
        let shared = Arc::new(Shared::default());
        let (sender, receiver) = sync_channel(QUEUE);
        let (tell, first) = channel();
        let mut clerk = Clerk {
            path: path.to_owned(),
            boot_id: boot_id.to_owned(),
            limits,
            shared: Arc::clone(&shared),
            receiver,
            writer: None,
            start: None,
            losses: Vec::new(),
            tidied: None,
            begun_anew: None,
            gap: false,
        };
        let run = move || {
            clerk.open(&tell);
            clerk.run();
        };
        let thread = thread::Builder::new().name("journal".to_owned()).spawn(run)?;
        let journal = Self { sender, shared, thread: Some(thread) };
        let found = first.recv_timeout(patience).or_else(|_| {
            // The thread tells under the lock as well, so it knows whether it was heard.
            let mut state = journal.shared.lock();
            let found = first.try_recv();
            state.late = found.is_err();
            found
        });
        let Found { holds, processes, recorded_ns, notes } = found.unwrap_or_else(|_| Found {
            notes: vec![format!(
                "{} does not open: its disk does not answer, or is slow; the record waits in memory",
                path.display()
            )],
            ..Found::default()
        });
        Ok(Started { journal, holds, processes, recorded_ns, notes })
    }

    /// Hands a change over, or counts it as dropped. Never waits.
    pub fn send(&self, change: Change) {
        // Under the lock, so that no flush counts fewer than the queue has.
        let mut state = self.shared.lock();
        match self.sender.try_send(Message::Change(Box::new(change))) {
            Ok(()) => state.taken += 1,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                state.status.dropped += 1;
                state.unrecorded += 1;
            }
        }
    }

    /// Waits until all that was sent is written; whether it is. Those of a batch with an urgent change are on the disk.
    pub fn flush(&self, timeout: Duration) -> bool {
        let (taken, dropped) = {
            let mut state = self.shared.lock();
            state.wanted = state.taken;
            (state.taken, state.status.dropped)
        };
        self.wake();
        let settled = self.shared.wait(timeout, |state| state.settled >= taken || state.ended);
        let state = self.shared.lock();
        settled && state.settled >= taken && state.status.dropped == dropped
    }

    /// Writes what is left and ends the thread; whether it did in time. One that hangs on its disk is left behind.
    pub fn stop(mut self, timeout: Duration) -> bool {
        self.shared.lock().stop = true;
        self.wake();
        let ended = self.shared.wait(timeout, |state| state.ended);
        match self.thread.take() {
            Some(thread) if ended => thread.join().is_ok(),
            _ => false,
        }
    }

    pub fn status(&self) -> Status {
        self.shared.lock().status.clone()
    }

    /// Outlives this.
    pub fn meter(&self) -> Meter {
        Meter(Arc::clone(&self.shared))
    }

    fn wake(&self) {
        // A full queue keeps the thread awake by itself.
        drop(self.sender.try_send(Message::Wake));
    }
}

type Left = (Vec<HoldRow>, Vec<ProcessRow>);

/// By the first opening.
#[derive(Default)]
struct Found {
    holds: Vec<HoldRow>,
    processes: Vec<ProcessRow>,
    recorded_ns: u64,
    notes: Vec<String>,
}

fn left(writer: &Writer) -> Result<Left, Error> {
    Ok((writer.open_holds()?, writer.open_processes()?))
}

/// The thread.
struct Clerk {
    path: PathBuf,
    boot_id: String,
    limits: Limits,
    shared: Arc<Shared>,
    receiver: Receiver<Message>,
    writer: Option<Writer>,
    /// The last one, for a file that is begun later.
    start: Option<Change>,
    /// Sentences that are to be recorded.
    losses: Vec<String>,
    tidied: Option<Instant>,
    begun_anew: Option<Instant>,
    /// Something may be missing, and nothing was written since.
    gap: bool,
}

impl Clerk {
    /// The first opening.
    fn open(&mut self, tell: &Sender<Found>) {
        let Self { path, boot_id, .. } = &*self;
        let opened = Writer::open(path, boot_id).and_then(|opened| match left(&opened.writer) {
            Ok(left) => Ok((opened, left)),
            // The newest rows are the damaged ones.
            Err(Error::Damaged(why)) => {
                let Opened { writer, loss } = opened;
                drop(writer);
                let mut opened = Writer::begin_anew(path, boot_id, &why)?;
                opened.loss = opened.loss.or(loss);
                Ok((opened, (Vec::new(), Vec::new())))
            }
            Err(error) => Err(error),
        });
        let mut found = Found::default();
        match opened {
            Ok((Opened { writer, loss }, left)) => {
                (found.holds, found.processes) = left;
                found.recorded_ns = writer.recorded_ns();
                found.notes.extend(loss.clone());
                self.losses.extend(loss);
                self.writer = Some(writer);
            }
            Err(error) => {
                found.notes.push(format!("nothing is recorded for now: {error}"));
                self.shared.fail(&error);
            }
        }
        self.measure();
        let state = self.shared.lock();
        if !state.late {
            drop(tell.send(found));
        } else if self.writer.is_some() {
            self.gap = true;
        }
    }

    fn run(&mut self) {
        loop {
            let (batch, go_on) = self.collect();
            if !batch.is_empty() {
                self.settle(&batch);
            }
            if !go_on {
                break;
            }
            if self.is_time_to_tidy() {
                self.tidy();
            }
        }
        if let Some(writer) = &self.writer {
            drop(writer.checkpoint());
        }
        self.measure();
        // Closed before anybody hears of it.
        self.writer = None;
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }

    /// The next batch, and whether there may be another.
    fn collect(&mut self) -> (Vec<Change>, bool) {
        let mut batch = Vec::new();
        let idle = if self.tidied.is_some() { TIDY } else { WINDOW };
        let mut until = Instant::now() + idle;
        loop {
            let (hurry, stop) = {
                let state = self.shared.lock();
                (state.settled < state.wanted, state.stop)
            };
            let wait = if hurry || stop { Duration::ZERO } else { until.saturating_duration_since(Instant::now()) };
            match self.receiver.recv_timeout(wait) {
                Ok(Message::Change(change)) => {
                    if batch.is_empty() {
                        until = Instant::now() + WINDOW;
                    }
                    if matches!(*change, Change::Start { .. }) {
                        self.start = Some((*change).clone());
                    }
                    batch.push(*change);
                    if batch.len() >= BATCH {
                        return (batch, true);
                    }
                }
                Ok(Message::Wake) => {}
                // Stopped, and the queue is empty.
                Err(RecvTimeoutError::Timeout) => return (batch, !stop),
                Err(RecvTimeoutError::Disconnected) => return (batch, false),
            }
        }
    }

    /// Writes a batch or gives it up.
    fn settle(&mut self, batch: &[Change]) {
        let count = batch.len() as u64;
        let mut attempt = 0;
        let written = loop {
            attempt += 1;
            match self.write(batch) {
                Ok(()) => break true,
                Err(error) => {
                    self.shared.fail(&error);
                    // An earlier batch has waited already, and whoever stops cannot wait.
                    let failing = self.shared.lock().unrecorded > 0;
                    if attempt >= ATTEMPTS || self.pause(RETRY) || failing {
                        break false;
                    }
                }
            }
        };
        {
            let mut state = self.shared.lock();
            state.settled += count;
            if written {
                state.status.written += count;
                state.status.last_error = None;
                state.status.gaps += u64::from(std::mem::take(&mut self.gap));
            } else {
                state.status.dropped += count;
                state.unrecorded += count;
            }
        }
        if !written && batch.iter().any(|change| matches!(change, Change::Start { .. })) {
            // It is made good when the file is opened again.
            self.writer = None;
        }
        if written {
            self.record_losses();
        }
        self.measure();
        self.shared.changed.notify_all();
    }

    fn write(&mut self, batch: &[Change]) -> Result<(), Error> {
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => self.reopen()?,
        };
        match writer.apply(batch) {
            Ok(()) => {
                self.writer = Some(writer);
                Ok(())
            }
            Err(Error::Damaged(why)) => {
                drop(writer);
                let mut writer = self.begin_anew(&why)?;
                writer.apply(batch)?;
                self.writer = Some(writer);
                Ok(())
            }
            Err(error @ Error::Busy(_)) => {
                self.writer = Some(writer);
                Err(error)
            }
            // Opened again, as a file that was moved or a disk that was mounted anew is another file.
            Err(error) => Err(error),
        }
    }

    fn reopen(&mut self) -> Result<Writer, Error> {
        let opened = Writer::open(&self.path, &self.boot_id)?;
        let writer = self.begin(opened)?;
        self.gap = true;
        Ok(writer)
    }

    fn begin_anew(&mut self, why: &str) -> Result<Writer, Error> {
        if self.begun_anew.is_some_and(|at| at.elapsed() < ANEW) {
            return Err(Error::Unwritable(format!("{why}, soon after a new one was begun")));
        }
        let opened = Writer::begin_anew(&self.path, &self.boot_id, why)?;
        self.begun_anew = Some(Instant::now());
        self.begin(opened)
    }

    /// A file that is opened in mid-run has to know whose it is.
    fn begin(&mut self, opened: Opened) -> Result<Writer, Error> {
        let Opened { mut writer, loss } = opened;
        if let Some(start) = &self.start {
            writer.apply(std::slice::from_ref(start))?;
        }
        if let Some(loss) = loss {
            self.losses.push(loss);
            self.shared.lock().status.restarts += 1;
        }
        Ok(writer)
    }

    /// Writing works: now it can be told what is missing.
    fn record_losses(&mut self) {
        let unrecorded = self.shared.lock().unrecorded;
        // A record of a loss needs a boot that it belongs to.
        if self.start.is_none() || unrecorded == 0 && self.losses.is_empty() {
            return;
        }
        let Some(writer) = &mut self.writer else { return };
        let mut lost: Vec<Change> = self.losses.iter().map(|note| loss(0, note.clone())).collect();
        if unrecorded > 0 {
            let note = format!("{unrecorded} records could not be written to the journal in time");
            lost.push(loss(unrecorded, note));
        }
        match writer.apply(&lost) {
            Ok(()) => {
                self.losses.clear();
                let mut state = self.shared.lock();
                state.unrecorded -= unrecorded;
                state.status.gaps += u64::from(unrecorded > 0);
            }
            // With the next batch.
            Err(error) => self.shared.fail(&error),
        }
    }

    fn is_time_to_tidy(&self) -> bool {
        self.tidied.is_none_or(|at| at.elapsed() >= TIDY)
    }

    fn tidy(&mut self) {
        let Some(writer) = &mut self.writer else { return };
        if !writer.path().exists() {
            // What is written now goes with the last descriptor.
            self.losses.push(format!("{} was removed, and a new journal begun", self.path.display()));
            self.shared.lock().status.restarts += 1;
            self.writer = None;
            self.tidied = Some(Instant::now());
            return;
        }
        if writer.is_behind_clock(wall_offset_ns()).unwrap_or(false) {
            // The recorder says so within a sign of life.
            self.tidied = Some(Instant::now());
            return;
        }
        match writer.tidy(self.limits, Timestamp::now()) {
            // The next step comes after the next batch.
            Ok(Tidied { more: true, rows: _ }) => self.tidied = None,
            Ok(Tidied { more: false, rows: _ }) => {
                if self.tidied.is_none() {
                    // Only now does the file itself get smaller.
                    drop(writer.checkpoint());
                }
                self.tidied = Some(Instant::now());
            }
            Err(error) => {
                self.shared.fail(&error);
                self.tidied = Some(Instant::now());
                if let Error::Damaged(why) = error {
                    self.start_over(&why);
                }
            }
        }
        self.measure();
    }

    fn start_over(&mut self, why: &str) {
        self.writer = None;
        match self.begin_anew(why) {
            Ok(writer) => self.writer = Some(writer),
            Err(error) => self.shared.fail(&error),
        }
    }

    /// Waits, but for nobody who stops; whether somebody does.
    fn pause(&self, time: Duration) -> bool {
        // Whoever stops wakes the channel and not this, which is looked at ten times.
        let step = time / 10;
        (0..10).any(|_| {
            let stop = self.shared.lock().stop;
            if !stop {
                thread::sleep(step);
            }
            stop
        })
    }

    fn measure(&self) {
        let size = self.writer.as_ref().map(Writer::size);
        if let Some(size) = size {
            self.shared.lock().status.size_bytes = size;
        }
    }
}

fn loss(events: u64, note: String) -> Change {
    let what = What::Lost(Lost { events, at: "journal".to_owned(), note });
    Change::Event(Event { time: Timestamp::now(), boot_ns: boottime_ns(), what })
}
