//! Deaths, reaps, holds and what else matters of the journal as logs of OpenTelemetry (`[otlp]`). The journal is the queue, on
//! disk and bounded by its retention: a thread of its own reads what was committed, sends it, and moves its cursor only
//! after the receiver has taken it. Nobody waits for that thread.

pub mod record;
pub mod send;

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use prost::Message as _;
use serde::{Deserialize, Serialize};

use self::{
    record::Origin,
    send::{Answer, Later, Sender},
};
use crate::{
    clock::boottime_ns,
    config::{Config, Otlp},
    journal::export::{self, Batch, Position},
    metrics::Metrics,
    out::complaint::Complaint,
};

/// Beside the journal.
pub const FILE: &str = "otlp.json";

/// Between two looks at the journal while there is nothing new.
const IDLE: Duration = Duration::from_secs(1);
/// Between two attempts, the first and the longest.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_mins(1);
/// However long a receiver asks to be left alone.
const ASKED_MAX: Duration = Duration::from_mins(10);

/// How far it has come, and what was lost on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    #[serde(flatten)]
    pub position: Position,
    /// Log records that a receiver has taken.
    pub sent: u64,
    /// Those that it will not take, however often.
    pub rejected: u64,
    /// Events that left the journal before they were sent.
    pub gone: u64,
    /// Times that the journal's numbers began anew: what of the earlier ones was not sent is not known.
    pub replaced: u64,
}

impl Cursor {
    pub const fn at(position: Position) -> Self {
        Self { position, sent: 0, rejected: 0, gone: 0, replaced: 0 }
    }

    /// `None`: nothing was ever sent, or the file is no cursor.
    pub fn read(state: &Path) -> io::Result<Option<Self>> {
        match fs::read(state.join(FILE)) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// On the disk when this returns, whole or as it was.
    pub fn write(&self, state: &Path) -> io::Result<()> {
        let new = state.join(format!("{FILE}.new"));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o640).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&new)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&new, state.join(FILE))?;
        fs::File::open(state)?.sync_all()
    }
}

/// Starts the thread. It ends with the process: what is not sent then is sent by the next.
pub fn start(config: &Config, otlp: &Otlp, metrics: Arc<Metrics>) -> io::Result<()> {
    if !config.journal.enabled {
        tracing::warn!("[otlp] has nothing to send: the journal is off");
        return Ok(());
    }
    let exporter = Exporter {
        journal: config.paths.journal(),
        state: config.paths.state.clone(),
        sender: Sender::new(otlp)?,
        origin: Origin { host_id: host_id(&config.paths.host) },
        metrics,
        since_ns: boottime_ns(),
        cursor: None,
        complaint: Complaint::none(),
    };
    std::thread::Builder::new().name("otlp".to_owned()).spawn(move || exporter.run())?;
    Ok(())
}

fn host_id(host: &Path) -> Option<String> {
    let text = fs::read_to_string(host.join("etc/machine-id")).ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

struct Exporter {
    journal: PathBuf,
    state: PathBuf,
    sender: Sender,
    origin: Origin,
    metrics: Arc<Metrics>,
    since_ns: u64,
    cursor: Option<Cursor>,
    complaint: Complaint,
}

/// How long to wait after so many failures in a row. Daemons of many hosts that lost one receiver do not all come back at once.
fn pause(failures: u32, asked: Option<Duration>, noise: u64) -> Duration {
    let pause = AGAIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(AGAIN_MAX);
    let scatter = pause / 4 * u32::try_from(noise % 256).unwrap_or(0) / 256;
    (pause + scatter).max(asked.unwrap_or_default().min(ASKED_MAX))
}

impl Exporter {
    fn run(mut self) {
        let mut failures = 0;
        loop {
            match self.step() {
                Ok(more) => {
                    if self.complaint.end() {
                        tracing::info!("otlp: {} takes records again", self.sender.name());
                    }
                    failures = 0;
                    if !more {
                        std::thread::sleep(IDLE);
                    }
                }
                Err(error) => {
                    self.metrics.otlp_failed();
                    let reason = format!("{error:#}");
                    if self.complaint.is_news(&reason) {
                        tracing::warn!("otlp: {reason}; what is recorded waits in the journal");
                    }
                    failures += 1;
                    let asked = error.downcast_ref::<Later>().and_then(|later| later.after);
                    std::thread::sleep(pause(failures, asked, boottime_ns() / 1_000));
                }
            }
        }
    }

    /// Sends what is next; whether there may be more.
    fn step(&mut self) -> anyhow::Result<bool> {
        // The recorder's thread is about to make it, or cannot, which the journal's own numbers say.
        if !self.journal.exists() {
            return Ok(false);
        }
        let mut cursor = if let Some(cursor) = self.cursor {
            cursor
        } else {
            let cursor = match Cursor::read(&self.state)? {
                Some(cursor) => cursor,
                // What was recorded before somebody wanted it sent is history.
                None => Cursor::at(export::newest(&self.journal, self.since_ns)?),
            };
            cursor.write(&self.state)?;
            *self.cursor.insert(cursor)
        };
        let now_ns = boottime_ns();
        let Batch { items, end, gone, is_new, looked, behind } = export::after(&self.journal, cursor.position, now_ns)?;
        let before = cursor;
        cursor.gone += gone;
        cursor.replaced += u64::from(is_new);
        let Some(end) = end else {
            self.metrics.otlp(&before, behind);
            return Ok(false);
        };
        // What is lost is lost, whether or not the rest can be sent now.
        self.metrics.otlp(&cursor, looked + behind);
        let request = record::request(&items, &self.origin);
        let logs = request.resource_logs.iter().flat_map(|logs| &logs.scope_logs);
        let count = logs.map(|scope| scope.log_records.len() as u64).sum::<u64>();
        if count > 0 {
            match self.sender.send(request.encode_to_vec())? {
                Answer::Taken { rejected: 0 } => cursor.sent += count,
                Answer::Taken { rejected } => {
                    let rejected = rejected.min(count);
                    tracing::warn!("otlp: {} did not take {rejected} of {count} records", self.sender.name());
                    cursor.sent += count - rejected;
                    cursor.rejected += rejected;
                }
                Answer::Refused(why) => {
                    tracing::warn!("otlp: {} refuses {count} records for good: {why}", self.sender.name());
                    cursor.rejected += count;
                }
            }
        }
        if gone > 0 {
            tracing::warn!("otlp: {gone} events left the journal before they were sent");
        }
        if is_new {
            tracing::warn!("otlp: the journal began anew; what of the earlier one was not sent is lost");
        }
        cursor.position = end;
        // Before it is on the disk the same records may be sent again: their ids tell.
        self.cursor = Some(cursor);
        cursor.write(&self.state)?;
        self.metrics.otlp(&cursor, behind);
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
