//! Plays sequences beside a running tracer and compares.
use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use gpureap::{
    bpf::eyes::{KernelEyes, from_pins},
    gpu::devices::discover,
    model::{Backend, Eyes as _, Slot, View},
};

use super::{
    check::{Known, differences},
    model::{Expected, Illegal, Model},
    step::{Dev, Step},
    troupe::{Cast, Troupe},
};
use crate::{
    actor::sys,
    harness::{self, Bench, Device, settle},
};

/// How long after a step io_uring may still be at it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The eyes of a bench whose tracer runs.
pub struct Stage {
    eyes: KernelEyes,
    slots: BTreeMap<Slot, Dev>,
    nodes: Vec<String>,
    keys: Vec<String>,
    patience: Duration,
    pub tally: Tally,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub steps: usize,
    pub comparisons: u32,
    /// Those that were right only at a second look.
    pub late: u32,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, comparisons, late } = self;
        write!(f, "{steps} steps, {comparisons} comparisons, {late} of them late")
    }
}

/// What went wrong, after how many steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub after: usize,
    pub lines: Vec<String>,
}

/// A sequence that is being played.
pub struct Run {
    troupe: Troupe,
    model: Model,
    /// As the model, less what it was not told.
    truth: Model,
    taken: usize,
}

impl Run {
    pub fn new(devices: &[Device]) -> Self {
        Self::of(&nodes(devices))
    }

    fn of(nodes: &[String]) -> Self {
        Self { troupe: Troupe::new(nodes), model: Model::default(), truth: Model::default(), taken: 0 }
    }

    fn fault(&self, lines: Vec<String>) -> Fault {
        Fault { after: self.taken, lines }
    }

    /// Takes a step, without a look at it.
    pub fn take(&mut self, step: &Step, told: bool) -> Result<(), Fault> {
        self.taken += 1;
        let before = self.model.clone();
        if let Err(Illegal(why)) = self.model.apply(step) {
            return Err(self.fault(vec![format!("`{step}` is not legal: {why}")]));
        }
        if told {
            // What depends on a step that it was not told is none of its business either.
            self.truth.apply(step).ok();
        }
        let played = self.troupe.play(step, &before, &self.model);
        played.map_err(|error| self.fault(vec![format!("`{step}`: {error}")]))
    }
}

fn nodes(devices: &[Device]) -> Vec<String> {
    devices.iter().map(|device| device.node.clone()).collect()
}

impl Stage {
    /// The first device must be one that can be mapped.
    pub fn new(bench: &Bench) -> Self {
        let config = bench.config();
        let devices = discover(&config.paths, &config.devices).expect("the devices");
        let eyes = from_pins(&config, &devices).expect("the pins").expect("a running tracer");
        let slot = |(position, device): (usize, &Device)| {
            let known = eyes.devices().by_number(device.major, device.minor).expect("it is configured");
            (known.slot, Dev(position as u32))
        };
        let slots = bench.devices.iter().enumerate().map(slot).collect();
        let keys = bench.devices.iter().map(Device::key).collect();
        Self { eyes, slots, nodes: nodes(&bench.devices), keys, patience: PATIENCE, tally: Tally::default() }
    }

    /// For differences that are expected: does not wait for what comes late.
    #[must_use]
    pub fn impatient(mut self) -> Self {
        self.patience = Duration::ZERO;
        self
    }

    pub const fn eyes(&self) -> &KernelEyes {
        &self.eyes
    }

    pub fn lost_events(&self) -> u64 {
        self.eyes.handles().losses().expect("the counters")
    }

    /// Plays the steps; the truth is that of all steps but those that it is not told.
    pub fn play_untold(&mut self, steps: &[Step], untold: &dyn Fn(&Step) -> bool) -> Result<(), Fault> {
        let mut run = Run::of(&self.nodes);
        self.go_on(&mut run, steps, untold)?;
        self.end(run)
    }

    /// More steps of a run that has begun.
    pub fn go_on(&mut self, run: &mut Run, steps: &[Step], untold: &dyn Fn(&Step) -> bool) -> Result<(), Fault> {
        for step in steps {
            self.tally.steps += 1;
            run.take(step, !untold(step))?;
            match step {
                Step::Resync => _ = self.eyes.resync().expect("a resync"),
                Step::Pause => self.compare(run, &run.truth, &run.troupe.cast()).map_err(|lines| run.fault(lines))?,
                Step::Begin(_) | Step::Do(..) | Step::Kill(_) | Step::Together(_) => {}
            }
        }
        Ok(())
    }

    /// The end of all processes, after which nothing is seen and the maps are empty.
    pub fn end(&mut self, mut run: Run) -> Result<(), Fault> {
        let cast = Cast { processes: BTreeMap::new(), tids: BTreeMap::new(), ..run.troupe.cast() };
        run.troupe.end().map_err(|error| run.fault(vec![error]))?;
        self.compare(&run, &Model::default(), &cast).map_err(|lines| run.fault(lines))?;
        // The daemon may still be at what it was told of processes that have ended since.
        settle(self.patience, || self.nothing_is_left(&cast).err()).map_err(|lines| run.fault(lines))
    }

    pub fn play(&mut self, steps: &[Step]) -> Result<(), Fault> {
        self.play_untold(steps, &|_| false)
    }

    /// The usual look, the full sweep, and the look that the sweep has made cheap.
    fn look(&self, truth: &Model, cast: &Cast) -> Vec<String> {
        let expected = truth.expected();
        // Nobody else is in a VM; on another machine one may have ended since.
        let alone = std::env::var_os("GPUREAP_TEST_VM").is_some();
        let known = Known { slots: &self.slots, stranger: &|pid| !alone || sys::session(pid).is_some() };
        let mut wrong = Vec::new();
        let looks: [(&str, &dyn Fn() -> anyhow::Result<View>); 3] =
            [("view", &|| self.eyes.view()), ("sweep", &|| self.eyes.sweep()), ("view again", &|| self.eyes.view())];
        for (name, look) in looks {
            let view = look().unwrap_or_else(|error| panic!("{name}: {error:#}"));
            wrong.extend(differences(&expected, cast, &view, &known).into_iter().map(|line| format!("{name}: {line}")));
            if view.backend.is_some_and(Backend::counts) {
                wrong.extend(self.counts_differ(&expected).into_iter().map(|line| format!("after {name}: {line}")));
            }
        }
        wrong
    }

    /// The kernel's counts by themselves: no reader sees one that is below zero.
    fn counts_differ(&self, expected: &Expected) -> Vec<String> {
        let handles = self.eyes.handles();
        let files = handles.files().expect("the map FILES");
        let holders = handles.holders().expect("the map HOLDERS");
        let mut wrong = Vec::new();
        for (slot, dev) in &self.slots {
            let want = expected.files.get(dev).map_or(0, |files| files.descriptors) as i32;
            let by_file: i32 = files.iter().filter(|(_, file)| file.slot == *slot).map(|(_, file)| file.fds).sum();
            let by_table: i32 = holders.iter().filter(|(key, _)| key.slot == *slot).map(|(_, count)| count.fds).sum();
            if (by_file, by_table) != (want, want) {
                wrong.push(format!("{dev}: {want} descriptors, FILES has {by_file}, HOLDERS {by_table}"));
            }
        }
        let negative = holders.iter().filter(|(_, count)| count.fds < 0);
        wrong.extend(negative.map(|(key, count)| format!("HOLDERS has {key:?}: {count:?}")));
        wrong
    }

    fn compare(&mut self, run: &Run, truth: &Model, cast: &Cast) -> Result<(), Vec<String>> {
        self.tally.comparisons += 1;
        // All else is over when the step is.
        let patience = if run.model.has_rings() { self.patience } else { Duration::ZERO };
        let limit = Instant::now() + patience;
        let mut late = false;
        loop {
            let mut wrong = self.look(truth, cast);
            if wrong.is_empty() {
                self.tally.late += u32::from(late);
                return Ok(());
            }
            late = true;
            if Instant::now() > limit {
                wrong.extend(self.proc_differs(truth, cast));
                return Err(wrong);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What /proc shows and the truth does not say: then the truth is at fault, or a process that was told to act.
    fn proc_differs(&self, truth: &Model, cast: &Cast) -> Vec<String> {
        let expected = truth.expected();
        let mut wrong = Vec::new();
        for (task, (pid, _)) in &cast.processes {
            for (position, key) in self.keys.iter().enumerate() {
                let held = expected.processes.get(task).and_then(|held| held.devices.get(&Dev(position as u32)));
                let (want, seen) = (held.copied().unwrap_or_default(), harness::counts(*pid, key));
                if want != seen {
                    wrong.push(format!("/proc shows for {task} ({pid}) {seen:?} of d{position}, not {want:?}"));
                }
            }
        }
        wrong
    }

    /// The maps keep nothing of processes that are gone.
    fn nothing_is_left(&self, cast: &Cast) -> Result<(), Vec<String>> {
        let handles = self.eyes.handles();
        let ours = |tgid: u32| cast.pids.contains(&(tgid as sys::Pid));
        let mut left = Vec::new();
        // What was noted of processes and tables at the moment of their end is left to the next resync.
        self.eyes.resync().expect("a resync");
        for (tgid, process) in handles.procs().expect("the map PROCS") {
            if ours(tgid) {
                left.push(format!("PROCS has {tgid}: {process:?}"));
            }
        }
        for (address, table) in handles.tables().expect("the map TABLES") {
            if ours(table.tgid) {
                left.push(format!("TABLES has {address:x}: {table:?}"));
            }
        }
        for (address, file) in handles.files().expect("the map FILES") {
            if ours(file.opener_tgid) {
                left.push(format!("FILES has {address:x}: {file:?}"));
            }
        }
        let tables: Vec<u64> =
            handles.tables().expect("the map TABLES").into_iter().map(|(address, _)| address).collect();
        for (key, count) in handles.holders().expect("the map HOLDERS") {
            if !tables.contains(&key.table) {
                left.push(format!("HOLDERS has {key:?} without a table: {count:?}"));
            }
        }
        if left.is_empty() { Ok(()) } else { Err(left) }
    }
}
