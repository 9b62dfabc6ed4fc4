//! `reaps.ndjson`: every signal, on disk before it is sent. `outcomes.ndjson`: what each reap came to.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    aside,
    ladder::{Act, Ledger},
    report::{Outcome, Report, Scene},
    signaller::Signal,
};
use crate::{model::ProcKey, trust};

pub const FILE: &str = "reaps.ndjson";
pub const OUTCOMES: &str = "outcomes.ndjson";

/// For the disk. A reap that waits for a disk that hangs frees nothing.
const PATIENCE: Duration = Duration::from_secs(1);

const SCHEMA: &str = "gpureap.signal/1";
const OUTCOME_SCHEMA: &str = "gpureap.outcome/1";

/// One signal to one process, as the file has it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Line {
    #[serde(default)]
    pub schema: String,
    /// RFC 3339.
    pub time: String,
    pub boot_id: String,
    /// Null where a unit is stopped.
    #[serde(default)]
    pub signal: Option<String>,
    /// The cgroup that is killed as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The unit that is ordered to stop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    pub pid: u32,
    pub start_ns: u64,
    pub by_pid: u32,
    pub by_uid: u32,
}

/// The end of one reap, as the file has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    #[serde(default)]
    pub schema: String,
    /// RFC 3339, of its begin.
    pub time: String,
    pub boot_id: String,
    pub outcome: Outcome,
    pub verified: bool,
    /// Processes to which something was done.
    pub touched: u32,
    /// From the first signal until the last device was free, memory included where somebody could say; null where it was
    /// not freed by a signal.
    #[serde(default)]
    pub free_ms: Option<f64>,
    pub by_pid: u32,
    pub by_uid: u32,
}

impl Ended {
    /// `None`: nothing was to be done, and there is nothing to be remembered.
    pub fn of(report: &Report) -> Option<Self> {
        let outcome = report.outcome.filter(|outcome| *outcome != Outcome::NothingToDo)?;
        let is_touched =
            |process: &&super::report::Process| !process.signals.is_empty() || process.unit_stopped.is_some();
        let touched = report.processes.iter().filter(is_touched).count() as u32;
        let free = report.devices.iter().filter_map(|device| {
            Some(device.closed_ms?.max(device.memory_free_ms.unwrap_or(0.0))).filter(|ms| ms.is_finite())
        });
        Some(Self {
            schema: OUTCOME_SCHEMA.to_owned(),
            time: report.time.clone(),
            boot_id: report.boot_id.clone(),
            outcome,
            verified: report.verified,
            touched,
            free_ms: free.reduce(f64::max).filter(|_| outcome == Outcome::Freed && touched > 0),
            by_pid: std::process::id(),
            by_uid: rustix::process::getuid().as_raw(),
        })
    }

    /// For who counts reaps; a reap is no less done where it cannot be written.
    pub fn write(&self, state_dir: &Path) {
        let written = serde_json::to_vec(self).map_err(io::Error::other).and_then(|mut text| {
            text.push(b'\n');
            aside::append(&state_dir.join(OUTCOMES), &text, PATIENCE)
        });
        if let Err(error) = written {
            tracing::debug!("{OUTCOMES}: {error}");
        }
    }
}

/// Appends to the file in the state directory. A reap goes on without it: [`Record::complaint`] says why it is missing.
pub struct Record {
    path: PathBuf,
    scene: Scene,
    now_ns: fn() -> u64,
    complaint: Option<String>,
}

impl Record {
    /// The file is made with the first signal.
    pub fn new(state_dir: &Path, scene: Scene, now_ns: fn() -> u64) -> Self {
        Self { path: state_dir.join(FILE), scene, now_ns, complaint: None }
    }

    fn complain(&mut self, error: &io::Error) {
        // The process that writes can only say that it was refused; it has answered, so the disk does not hang.
        let refused = error.kind() == io::ErrorKind::PermissionDenied;
        let place = self.path.parent().filter(|_| refused).and_then(|directory| trust::place(directory).err());
        let why = place.map_or_else(|| error.to_string(), |distrust| distrust.to_string());
        self.complaint = Some(format!("signals are not recorded in {}: {why}", self.path.display()));
    }

    /// Why signals were sent without a record.
    pub fn complaint(&self) -> Option<&str> {
        self.complaint.as_deref()
    }
}

impl Ledger for Record {
    fn before(&mut self, act: Act<'_>, to: &[ProcKey]) {
        if self.complaint.is_some() {
            return;
        }
        let now = (self.now_ns)();
        let (signal, cgroup, unit) = match act {
            Act::Signal(signal) => (Some(signal), None, None),
            Act::KillCgroup(dir) => (Some(Signal::Kill), Some(dir.display().to_string()), None),
            Act::StopUnit(unit) => (None, None, Some(unit)),
        };
        let line = |key: &ProcKey| Line {
            schema: SCHEMA.to_owned(),
            time: self.scene.wall(now),
            boot_id: self.scene.host.boot_id.clone(),
            signal: signal.map(|signal| signal.name().to_owned()),
            cgroup: cgroup.clone(),
            unit: unit.map(str::to_owned),
            pid: key.tgid,
            start_ns: key.start_ns,
            by_pid: std::process::id(),
            by_uid: rustix::process::getuid().as_raw(),
        };
        let mut text = Vec::new();
        let written = to
            .iter()
            .try_for_each(|key| {
                serde_json::to_writer(&mut text, &line(key))?;
                text.push(b'\n');
                Ok::<(), io::Error>(())
            })
            .and_then(|()| aside::append(&self.path, &text, PATIENCE));
        if let Err(error) = written {
            self.complain(&error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        io::{Read as _, Write as _},
        os::unix::fs::OpenOptionsExt as _,
        time::Instant,
    };

    use super::*;

    fn scene() -> Scene {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let host = crate::host::Host { name: String::new(), boot_id: "b".to_owned(), now, boottime_ns: 0 };
        Scene { host, begun_ns: 0 }
    }

    #[test]
    fn every_signal_is_a_line_and_an_unwritable_place_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut record = Record::new(&state, scene(), || 1_500_000_000);
        record.before(Act::Signal(Signal::Term), &[ProcKey::new(7, 70), ProcKey::new(8, 80)]);
        record.before(Act::Signal(Signal::Kill), &[ProcKey::new(8, 80)]);
        assert_eq!(record.complaint(), None);
        let text = fs::read_to_string(state.join(FILE)).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[2]["signal"], "SIGKILL");
        assert_eq!(lines[2]["time"], "1970-01-01T00:00:01.5Z");
        assert_eq!((lines[1]["pid"].as_u64(), lines[1]["start_ns"].as_u64()), (Some(8), Some(80)));

        let mut nowhere = Record::new(&state.join(FILE), scene(), || 0);
        nowhere.before(Act::Signal(Signal::Kill), &[ProcKey::new(8, 80)]);
        assert!(nowhere.complaint().unwrap().contains("reaps.ndjson: Not a directory"));
    }

    #[test]
    fn what_somebody_else_could_have_put_there_is_not_written_to() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        let state = dir.path().join("state");
        fs::create_dir(&state).unwrap();
        let complaint = || {
            let mut record = Record::new(&state, scene(), || 0);
            record.before(Act::Signal(Signal::Term), &[ProcKey::new(7, 70)]);
            record.complaint().unwrap_or_default().to_owned()
        };
        symlink(&victim, state.join(FILE)).unwrap();
        assert!(complaint().contains("reaps.ndjson: Too many levels of symbolic links"), "{}", complaint());
        fs::remove_file(state.join(FILE)).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(complaint().ends_with("state may be written by others than its owner"), "{}", complaint());
        assert!(!state.join(FILE).exists());
        fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(complaint(), "");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(state.join(FILE), Some(65534), None).unwrap();
            assert!(complaint().contains("reaps.ndjson: Operation not permitted"), "{}", complaint());
        }
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    }

    #[test]
    fn a_disk_that_hangs_costs_the_record_and_a_second() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        // Full, so that who writes waits for a reader who does not read.
        let mut fifo = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        let mut size = 0;
        while let Ok(count) = fifo.write(&[b'x'; 4096]) {
            size += count;
        }
        let begun = Instant::now();
        let mut record = Record::new(dir.path(), scene(), || 0);
        record.before(Act::Signal(Signal::Term), &[ProcKey::new(7, 70)]);
        assert!(begun.elapsed() >= PATIENCE);
        let complaint = record.complaint().unwrap().to_owned();
        assert!(complaint.ends_with("reaps.ndjson: the disk did not answer within 1 s"), "{complaint}");
        // It has been tried once.
        record.before(Act::Signal(Signal::Kill), &[ProcKey::new(7, 70)]);
        assert_eq!(record.complaint(), Some(complaint.as_str()));
        let mut all = vec![0; size];
        fifo.read_exact(&mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == b'x'));
    }
}
