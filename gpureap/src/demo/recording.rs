//! The demo's own flight recorder: what the daemon does with the ring, in a thread, for as long as the story lasts.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    bpf::{Tracer, ring::decode},
    config::Config,
    gpu::devices::Devices,
    history::{
        build::{self, Ask},
        report::Report,
        rows::{HoldOrigin, HoldRow, Record},
    },
    host::Host,
    journal::{self, Question},
    recorder::{Begin, Recorder},
};

/// Between two looks into the ring.
const PAUSE: Duration = Duration::from_millis(5);
/// For the last records to be written.
const PATIENCE: Duration = Duration::from_secs(3);

pub struct Recording {
    config: Config,
    host: Host,
    recorder: Arc<Recorder>,
    stop: Arc<AtomicBool>,
    pump: JoinHandle<()>,
}

impl Recording {
    pub fn start(config: &Config, tracer: &Tracer, devices: &Devices) -> anyhow::Result<Self> {
        let host = Host::read(&config.paths.proc);
        // Of the kernel's log only what comes from now on.
        let begin = Begin { recorded_ns: host.boottime_ns, ..Begin::new(tracer, devices) };
        let (recorder, _) = Recorder::with_journal(config, begin, PATIENCE)?;
        let recorder = Arc::new(recorder);
        let mut ring = tracer.events()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (to, ends) = (Arc::clone(&recorder), Arc::clone(&stop));
        let pump = thread::Builder::new().name("ring".to_owned()).spawn(move || {
            loop {
                let last = ends.load(Ordering::Relaxed);
                let mut events = Vec::new();
                while let Some(record) = ring.next() {
                    events.extend(decode(&record));
                }
                to.ring(events);
                if last {
                    return;
                }
                thread::sleep(PAUSE);
            }
        })?;
        Ok(Self { config: config.clone(), host, recorder, stop, pump })
    }

    /// Until these processes were looked at. A record of a host with `gate` knows who has inherited only by looking, some
    /// milliseconds after a fork, and this story is told faster than that.
    pub fn until_known(&self, pids: &BTreeSet<u32>) -> anyhow::Result<()> {
        let seen = |hold: &&HoldRow| hold.origin != HoldOrigin::Unconfirmed;
        let known = |records: &[Record]| {
            let holds = records.iter().flat_map(|record| &record.holds);
            pids.is_subset(&holds.filter(seen).map(|hold| hold.key.pid).collect())
        };
        self.records_once(known).map(drop)
    }

    /// What is written when that is so, or when patience ends.
    fn records_once(&self, is_so: impl Fn(&[Record]) -> bool) -> anyhow::Result<Vec<Record>> {
        let question = Question { since: Some(self.host.now), ..Question::default() };
        let until = Instant::now() + PATIENCE;
        loop {
            let records = journal::read(&self.config.paths.journal(), &question)?;
            if is_so(&records) || Instant::now() > until {
                return Ok(records);
            }
            thread::sleep(PAUSE);
        }
    }

    /// What is written of the story, once all that it tells of is over.
    pub fn report(self) -> anyhow::Result<Report> {
        let since = self.host.now;
        let is_over =
            |record: &Record| !record.holds.is_empty() && record.holds.iter().all(|hold| hold.released_ns.is_some());
        let records = self.records_once(|records| !records.is_empty() && records.iter().all(is_over))?;
        self.stop.store(true, Ordering::Relaxed);
        drop(self.pump.join());
        if let Some(recorder) = Arc::into_inner(self.recorder) {
            recorder.stop(PATIENCE);
        }
        let host = Host::read(&self.config.paths.proc);
        let ask = Ask {
            now: host.now,
            since,
            until: host.now,
            at: None,
            running: Some(host.boot_id),
            nodes: None,
            pids: Vec::new(),
        };
        Ok(build::build(&records, &ask))
    }
}
