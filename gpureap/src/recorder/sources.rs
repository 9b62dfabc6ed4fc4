//! What comes from files: the kernel's log, and the record of reaps.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tokio::sync::mpsc;

use super::Input;
use crate::{
    clock,
    history::{
        event::{Lost, Reap, What},
        kmsg,
        rows::Key,
    },
    reap::record::{self, Ended, Line},
    trust,
};

/// Longest record of the kernel's log (`CONSOLE_EXT_LOG_MAX`, include/linux/printk.h).
const LONGEST: usize = 8192;

/// What an earlier daemon has read.
#[derive(Clone, Copy, Debug)]
pub(super) enum LogRead {
    /// Up to the record of this number.
    Record(u64),
    /// Up to this boottime; 0: nothing.
    Until(u64),
}

/// Reads the kernel's log in a thread of its own, from its beginning: what the driver said before the daemon came counts
/// too.
pub(super) fn follow_log(path: &Path, read: LogRead, out: mpsc::WeakSender<Input>) -> io::Result<()> {
    let mut file = File::open(path)?;
    let offset = clock::asleep_ns();
    std::thread::Builder::new().name("kernel-log".to_owned()).spawn(move || {
        let mut buffer = vec![0; LONGEST];
        loop {
            let record = match file.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => String::from_utf8_lossy(&buffer[..length]).into_owned(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The oldest records went before they were read; the next read goes on behind them.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {
                    let note = "the kernel's log ran over: an Xid or an out-of-memory kill may be missing".to_owned();
                    let lost = What::Lost(Lost { events: 1, at: "kmsg".to_owned(), note });
                    let Some(out) = out.upgrade() else { return };
                    if out.blocking_send(Input::What(None, Box::new(lost))).is_err() {
                        return;
                    }
                    continue;
                }
                Err(error) => {
                    tracing::warn!("the kernel's log cannot be read any more: {error}");
                    return;
                }
            };
            let Some((sequence, line)) = kmsg::text(&record) else { continue };
            let at = time(&record, offset);
            let was_read = match read {
                LogRead::Record(last) => sequence <= last,
                LogRead::Until(until) => at.is_some_and(|at| at <= until),
            };
            if was_read {
                continue;
            }
            let Some(what) = kmsg::parse(line) else { continue };
            let Some(out) = out.upgrade() else { return };
            if out.blocking_send(Input::Log(sequence, at, Box::new(what))).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Boottime of a record, which has microseconds without the time asleep, which is `offset`.
pub(crate) fn time(record: &str, offset: i64) -> Option<u64> {
    let microseconds: u64 = record.split_once(';')?.0.split(',').nth(2)?.parse().ok()?;
    Some(microseconds.saturating_mul(1_000).saturating_add_signed(offset))
}

/// The record of reaps, which `gpureap reap` writes before it signals.
#[derive(Debug)]
pub(super) struct Reaps {
    tail: Tail,
    boot_id: String,
}

/// What reaps came to, which `gpureap reap` writes at its end.
#[derive(Debug)]
pub(super) struct Outcomes {
    tail: Tail,
    boot_id: String,
}

/// A file of lines that others append to.
#[derive(Debug)]
struct Tail {
    path: PathBuf,
    read: u64,
    inode: u64,
    /// Somebody else could have written it, which was said.
    distrusted: bool,
}

/// Of a long record only the end matters: what came before is about processes that are gone.
const TAIL: u64 = 1 << 20;

impl Reaps {
    pub(super) fn new(state: &Path, boot_id: &str) -> Self {
        Self { tail: Tail::new(state.join(record::FILE)), boot_id: boot_id.to_owned() }
    }

    /// What is new since the last time, with its wall-clock time.
    pub(super) fn take(&mut self) -> Vec<(jiff::Timestamp, Reap)> {
        let mut found = Vec::new();
        for line in self.tail.take() {
            if let Ok(Line { schema: _, time, boot_id, signal, cgroup, unit, pid, start_ns, by_pid, by_uid }) =
                serde_json::from_slice(&line)
                && boot_id == self.boot_id
                && let Ok(time) = time.parse()
            {
                found.push((time, Reap { key: Key { pid, start_ns }, signal, unit, cgroup, by_pid, by_uid }));
            }
        }
        found
    }
}

impl Outcomes {
    pub(super) fn new(state: &Path, boot_id: &str) -> Self {
        Self { tail: Tail::new(state.join(record::OUTCOMES)), boot_id: boot_id.to_owned() }
    }

    /// What is new since the last time.
    pub(super) fn take(&mut self) -> Vec<Ended> {
        let lines = self.tail.take();
        let ended = lines.iter().filter_map(|line| serde_json::from_slice::<Ended>(line).ok());
        ended.filter(|ended| ended.boot_id == self.boot_id).collect()
    }
}

impl Tail {
    const fn new(path: PathBuf) -> Self {
        Self { path, read: 0, inode: 0, distrusted: false }
    }

    /// What is new since the last time. Whole lines only.
    fn take(&mut self) -> Vec<Vec<u8>> {
        // What says who was killed is believed only where nobody else could have written it.
        let Ok(metadata) = std::fs::symlink_metadata(&self.path) else { return Vec::new() };
        if !metadata.is_file() {
            return Vec::new();
        }
        let trusted = trust::no_others(&self.path, &metadata);
        let before = std::mem::replace(&mut self.distrusted, trusted.is_err());
        if let Err(error) = trusted {
            if !before {
                tracing::warn!("the record of reaps is not believed: {error}");
            }
            return Vec::new();
        }
        if metadata.ino() != self.inode || metadata.len() < self.read {
            self.inode = metadata.ino();
            self.read = metadata.len().saturating_sub(TAIL);
        }
        if metadata.len() == self.read {
            return Vec::new();
        }
        self.lines().unwrap_or_default()
    }

    fn lines(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut file = OpenOptions::new().read(true).open(&self.path)?;
        file.seek(SeekFrom::Start(self.read))?;
        let mut reader = BufReader::new(file.take(TAIL * 4));
        let mut found = Vec::new();
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
            self.read += line.len() as u64;
            found.push(std::mem::take(&mut line));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn reaps_are_read_once_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(record::FILE);
        let mut reaps = Reaps::new(dir.path(), "b");
        assert_eq!(reaps.take(), []);
        let line = |pid: u32, boot: &str| {
            format!(
                "{{\"schema\":\"gpureap.signal/1\",\"time\":\"1970-01-01T00:00:01.5Z\",\"boot_id\":\"{boot}\",\
                 \"signal\":\"SIGKILL\",\"pid\":{pid},\"start_ns\":70,\"by_pid\":3,\"by_uid\":0}}\n"
            )
        };
        let pids = |found: Vec<(jiff::Timestamp, Reap)>| found.iter().map(|(_, reap)| reap.key.pid).collect::<Vec<_>>();
        // Half a line waits for its other half; what is of another boot or no record is left out.
        let (begin, end) = (line(9, "b")[..40].to_owned(), line(9, "b")[40..].to_owned());
        fs::write(&path, format!("{}{}not json\n{begin}", line(7, "b"), line(8, "a"))).unwrap();
        assert_eq!(pids(reaps.take()), [7]);
        assert_eq!(reaps.take(), []);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(end.as_bytes()).unwrap();
        assert_eq!(pids(reaps.take()), [9]);
        // A new file under the same name is read from its beginning.
        fs::remove_file(&path).unwrap();
        fs::write(&path, line(11, "b")).unwrap();
        assert_eq!(pids(reaps.take()), [11]);
        // What others could have written is not believed, nor what a link leads to.
        fs::rename(&path, dir.path().join("other")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), &path).unwrap();
        assert_eq!(reaps.take(), []);
        fs::remove_file(&path).unwrap();
        fs::write(&path, line(12, "b")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(reaps.take(), []);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(pids(reaps.take()), [12]);
    }

    #[test]
    fn outcomes_are_read_once_and_only_those_of_this_boot() {
        use crate::reap::report::Outcome;
        let dir = tempfile::tempdir().unwrap();
        let mut outcomes = Outcomes::new(dir.path(), "b");
        let ended = |boot: &str, outcome, free_ms| Ended {
            schema: "gpureap.outcome/1".to_owned(),
            time: "1970-01-01T00:00:01Z".to_owned(),
            boot_id: boot.to_owned(),
            outcome,
            verified: true,
            touched: 2,
            free_ms,
            by_pid: 3,
            by_uid: 0,
        };
        let freed = ended("b", Outcome::Freed, Some(1.5));
        freed.write(dir.path());
        ended("a", Outcome::Held, None).write(dir.path());
        assert_eq!(outcomes.take(), [freed]);
        assert_eq!(outcomes.take(), []);
        let held = ended("b", Outcome::Held, None);
        held.write(dir.path());
        assert_eq!(outcomes.take(), [held]);
        // Whoever could have written there could count what never was.
        fs::set_permissions(dir.path().join(record::OUTCOMES), fs::Permissions::from_mode(0o666)).unwrap();
        ended("b", Outcome::Freed, None).write(dir.path());
        assert_eq!(outcomes.take(), []);
    }

    #[test]
    fn times_of_log_records() {
        assert_eq!(time("6,339", 0), None);
        // More than 32 bits of microseconds are 72 minutes, and more than a boot can last is what somebody wrote there.
        for (text, asleep, expected) in [
            ("6,339,5140900,-;NVRM: x", 7, 5_140_900_007),
            ("6,339,4294967297,-;x", 0, 4_294_967_297_000),
            ("6,339,4294967297,-;x", 5, 4_294_967_297_005),
            ("6,339,18446744073709551615,-;x", 5, u64::MAX),
            ("6,339,1,-;x", -2_000, 0),
        ] {
            assert_eq!(time(text, asleep), Some(expected), "{text}");
        }
    }
}
