//! Numbers for Prometheus (`[metrics]`): of the host and its devices, never of a process or a user, so that there are as
//! many series as there are devices and no more. What happens is counted where it is known, in the recorder and in the
//! daemon's loop; how things are is looked at when somebody asks, by a thread that nobody waits for.

pub mod deaths;
pub mod look;
pub mod serve;

#[cfg(test)]
mod tests;

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use jiff::Timestamp;
use prometheus_client::{
    encoding::prometheus_text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};
use serde::Serialize;

use self::look::{DeviceNumbers, Look, MapNumbers};
use crate::{
    history::rows::Cause, journal::Status, model::Backend, otlp::Cursor, out::words::word, reap::report::Outcome,
};

pub use prometheus_text::CONTENT_TYPE;

/// Seconds. From the release of a small process to that of one with a terabyte of pinned memory that does not want to go.
const FREE_SECONDS: [f64; 13] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// A death that nobody can know of while it happens is none of these.
pub const CAUSES: [Cause; 6] =
    [Cause::Exited, Cause::KilledBy, Cause::OomKill, Cause::Fault, Cause::Reaped, Cause::Unknown];
/// Those that are recorded: of a reap that found nothing to do nothing is.
pub const OUTCOMES: [Outcome; 5] =
    [Outcome::Freed, Outcome::Held, Outcome::Unkillable, Outcome::Protected, Outcome::KernelReference];
/// What gpureap does to a process.
pub const ACTS: [&str; 3] = ["SIGTERM", "SIGKILL", "unit-stop"];
/// Why the maps are compared with a sweep.
pub const REASONS: [&str; 3] = ["period", "loss", "devices"];
/// Losses outside of the kernel's maps; those of the maps have the names of their counters.
pub const LOST_ELSEWHERE: [&str; 3] = ["recorder", "kernel_log", "journal"];

/// Why something is never sent: the receiver refused it, retention or another journal took its place.
pub const UNSENT: [&str; 3] = ["rejected", "retention", "replaced"];

type Labels = Vec<(&'static str, String)>;
type Seconds = Gauge<f64, AtomicU64>;

/// All of them. Whoever counts shares this with whoever serves it.
pub struct Metrics {
    registry: Registry,
    devices: Family<Labels, Gauge>,
    holders: Family<Labels, Gauge>,
    open_files: Family<Labels, Gauge>,
    orphan_files: Family<Labels, Gauge>,
    view_complete: Gauge,
    last_sweep: Seconds,
    look_errors: Counter,
    map_entries: Family<Labels, Gauge>,
    map_capacity: Family<Labels, Gauge>,
    lost: Family<Labels, Counter>,
    resyncs: Family<Labels, Counter>,
    corrections: Counter,
    fence_denials: Counter,
    deaths: Family<Labels, Counter>,
    unkillable: Gauge,
    signals: Family<Labels, Counter>,
    reaps: Family<Labels, Counter>,
    time_to_free: Histogram,
    journal_written: Counter,
    journal_errors: Counter,
    journal_size: Gauge,
    journal_files: Counter,
    otlp_records: Counter,
    otlp_lost: Family<Labels, Counter>,
    otlp_errors: Counter,
    otlp_behind: Gauge,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

fn one(name: &'static str, value: impl Into<String>) -> Labels {
    vec![(name, value.into())]
}

/// For a count that somebody else keeps. One that went back, as at an attach anew, begins anew here too.
fn follow(counter: &Counter, total: u64) {
    counter.inner().store(total, Ordering::Relaxed);
}

/// From the beginning all series are there: a rate over one that comes with its first event would miss that event.
fn zeros(family: &Family<Labels, Counter>, label: &'static str, values: impl IntoIterator<Item = String>) {
    for value in values {
        drop(family.get_or_create(&one(label, value)));
    }
}

fn words<T: Serialize>(values: &[T]) -> impl Iterator<Item = String> {
    values.iter().map(word)
}

fn register<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    register_as(registry, name, help, M::default())
}

fn register_as<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

impl Metrics {
    pub fn new(backend: Backend, adopted: bool) -> Self {
        let mut registry = Registry::with_prefix("gpureap");
        let add = &mut registry;
        let build: Family<Labels, Gauge> = register(add, "build_info", "1, with the version of the daemon");
        let probes: Family<Labels, Gauge> =
            register(add, "probe_set_info", "1, with the probe set and whether it was taken over from a daemon before");
        let started: Seconds = register(add, "start_time_seconds", "When the daemon started, since 1970");
        let metrics = Self {
            devices: register(add, "device_info", "1 for each device that is traced, with what else is known of it"),
            holders: register(add, "holders", "Processes that hold the device by a descriptor or a mapping"),
            open_files: register(add, "open_files", "Open files of the device; absent where they cannot be counted"),
            orphan_files: register(add, "orphan_files", "Open files of the device that no process refers to"),
            unkillable: register(add, "unkillable_holders", "Holders that live 10 s after a SIGKILL"),
            view_complete: register(add, "view_complete", "1 if the last look saw all that the probe set can see"),
            last_sweep: register(add, "last_sweep_timestamp_seconds", "The last full walk of all tasks, since 1970"),
            look_errors: register(add, "look_errors", "Looks at the kernel's maps that failed"),
            map_entries: register(add, "map_entries", "Entries of the kernel's map, at most"),
            map_capacity: register(add, "map_capacity", "Room for entries in the kernel's map"),
            lost: register(add, "events_lost", "Events that were lost, by where"),
            resyncs: register(add, "resyncs", "Comparisons of the maps with a full walk of all tasks, by reason"),
            corrections: register(add, "resync_corrections", "What such comparisons corrected in the maps"),
            fence_denials: register(add, "fence_denials", "Opens that the pinned fence refused"),
            deaths: register(add, "deaths", "Holders that died, by cause, 10 s after their death"),
            signals: register(add, "signals", "Signals of gpureap reap, and units that it stopped, by process"),
            reaps: register(add, "reaps", "Reaps that ended, by outcome"),
            time_to_free: register_as(
                add,
                "reap_time_to_free_seconds",
                "From the first signal of a reap that freed its devices to the last of them being free",
                Histogram::new(FREE_SECONDS),
            ),
            journal_written: register(add, "journal_records", "Records written to the journal"),
            journal_errors: register(add, "journal_errors", "Failed attempts to open or write the journal"),
            journal_size: register(add, "journal_size_bytes", "Size of the journal with its log"),
            journal_files: register(add, "journal_restarts", "Journals begun anew after the first"),
            otlp_records: register(add, "otlp_records", "Log records that the receiver has taken"),
            otlp_lost: register(add, "otlp_lost", "What was not sent and never will be, by reason"),
            otlp_errors: register(add, "otlp_errors", "Failed attempts to send"),
            otlp_behind: register(add, "otlp_backlog_events", "Events of the journal that were not looked at yet"),
            registry,
        };
        build.get_or_create(&one("version", env!("CARGO_PKG_VERSION"))).set(1);
        let set = vec![("probe_set", word(&backend)), ("adopted", adopted.to_string())];
        probes.get_or_create(&set).set(1);
        started.set(Timestamp::now().as_nanosecond() as f64 / 1e9);
        zeros(&metrics.lost, "kind", LOST_ELSEWHERE.map(str::to_owned));
        zeros(&metrics.otlp_lost, "reason", UNSENT.map(str::to_owned));
        zeros(&metrics.resyncs, "reason", REASONS.map(str::to_owned));
        zeros(&metrics.deaths, "cause", words(&CAUSES));
        zeros(&metrics.signals, "signal", ACTS.map(str::to_owned));
        zeros(&metrics.reaps, "outcome", words(&OUTCOMES));
        metrics
    }

    /// The text format. The lines of a metric are together, in no order.
    pub fn render(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Takes over a look. One that failed leaves no numbers behind that could be taken for those of now.
    pub fn looked(&self, look: Option<&Look>) {
        for family in [&self.devices, &self.holders, &self.open_files, &self.orphan_files] {
            family.clear();
        }
        let Some(Look { devices, complete, swept_unix_ns, lost, maps }) = look else {
            self.look_errors.inc();
            self.view_complete.set(0);
            return;
        };
        for DeviceNumbers { node, about, holders, open_files, orphan_files } in devices {
            let mut labels = one("node", node);
            labels.extend(about.iter().cloned());
            self.devices.get_or_create(&labels).set(1);
            let node = one("node", node);
            self.holders.get_or_create(&node).set(i64::from(*holders));
            if let Some(files) = open_files {
                self.open_files.get_or_create(&node).set(i64::from(*files));
            }
            self.orphan_files.get_or_create(&node).set(i64::from(*orphan_files));
        }
        self.view_complete.set(i64::from(*complete));
        if let Some(at) = swept_unix_ns {
            self.last_sweep.set(*at as f64 / 1e9);
        }
        for (kind, total) in lost {
            follow(&self.lost.get_or_create(&one("kind", *kind)), *total);
        }
        for MapNumbers { name, entries, capacity } in maps {
            self.map_entries.get_or_create(&one("map", *name)).set(*entries as i64);
            self.map_capacity.get_or_create(&one("map", *name)).set(*capacity as i64);
        }
    }

    pub fn journal(&self, status: &Status) {
        let Status { written, dropped, errors, last_error: _, size_bytes, restarts, gaps: _ } = status;
        follow(&self.journal_written, *written);
        follow(&self.lost.get_or_create(&one("kind", "journal")), *dropped);
        follow(&self.journal_errors, *errors);
        self.journal_size.set(*size_bytes as i64);
        follow(&self.journal_files, *restarts);
    }

    /// As the cursor on the disk has it, over restarts.
    pub fn otlp(&self, cursor: &Cursor, behind: u64) {
        let Cursor { position: _, sent, rejected, gone, replaced } = cursor;
        follow(&self.otlp_records, *sent);
        for (reason, total) in UNSENT.iter().zip([rejected, gone, replaced]) {
            follow(&self.otlp_lost.get_or_create(&one("reason", *reason)), *total);
        }
        self.otlp_behind.set(behind as i64);
    }

    pub fn otlp_failed(&self) {
        self.otlp_errors.inc();
    }

    /// Records that the recorder had no room for, since it began.
    pub fn recorder_lost(&self, total: u64) {
        follow(&self.lost.get_or_create(&one("kind", "recorder")), total);
    }

    pub fn kernel_log_lost(&self) {
        self.lost.get_or_create(&one("kind", "kernel_log")).inc();
    }

    pub fn resynced(&self, reason: &'static str, corrections: usize) {
        self.resyncs.get_or_create(&one("reason", reason)).inc();
        self.corrections.inc_by(corrections as u64);
    }

    /// Since the daemon began.
    pub fn fence_denied(&self, total: u64) {
        follow(&self.fence_denials, total);
    }

    pub fn died(&self, cause: Cause) {
        self.deaths.get_or_create(&one("cause", word(&cause))).inc();
    }

    pub fn unkillable(&self, holders: usize) {
        self.unkillable.set(holders as i64);
    }

    /// What is none of [`ACTS`] is somebody's mistake, and must not become a series.
    pub fn signalled(&self, signal: Option<&str>) {
        let act = signal.unwrap_or("unit-stop");
        if ACTS.contains(&act) {
            self.signals.get_or_create(&one("signal", act)).inc();
        }
    }

    pub fn reaped(&self, outcome: Outcome, free_seconds: Option<f64>) {
        if !OUTCOMES.contains(&outcome) {
            return;
        }
        self.reaps.get_or_create(&one("outcome", word(&outcome))).inc();
        if let Some(seconds) = free_seconds.filter(|seconds| seconds.is_finite() && *seconds >= 0.0) {
            self.time_to_free.observe(seconds);
        }
    }
}
