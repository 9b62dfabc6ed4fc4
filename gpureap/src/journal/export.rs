//! What is to be sent elsewhere, in the order in which it was written. The journal is the queue: whoever sends remembers how
//! far it has come, and what retention takes away before that is known by the gap in the numbers.

use std::path::Path;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use super::{
    reader::Reader,
    rows::{self, BOOT_COLUMNS, EVENT_COLUMNS, HOLD_COLUMNS, PROCESS_COLUMNS, ns},
};
use crate::{
    clock::NANOS,
    history::{
        event::{Event, What},
        rows::{Boot, HoldRow, Key, ProcessRow},
    },
};

/// Rows that are looked at in one step. A death has a dozen events, most of which nobody sends.
const ROWS: u32 = 512;

/// The cause of a death may change for 10 s after it; then it is with the journal's thread for a moment.
const DECIDED_NS: u64 = 12 * NANOS;
/// Rows that an event announces may be in the batch after its own.
const WRITTEN_NS: u64 = 2 * NANOS;
/// A reap has its time from the wall clock, which may have been set back since. Such a time says nothing.
const AHEAD_NS: u64 = 60 * NANOS;

/// An event of the journal. Numbers begin anew with a new journal, times do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub id: i64,
    pub time_ns: i64,
}

/// What is sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Sent {
    Event(Event),
    Death(Box<ProcessRow>),
    /// It is over.
    Hold(Box<HoldRow>, Option<Box<ProcessRow>>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub boot: Boot,
    pub what: Sent,
    /// Of the process that an event is about.
    pub process: Option<Box<ProcessRow>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub items: Vec<Item>,
    /// How far this has come; `None`: nowhere.
    pub end: Option<Position>,
    /// Events that were removed before they were looked at.
    pub gone: u64,
    /// Events up to the end, and after it.
    pub looked: u64,
    pub behind: u64,
    /// Another journal than the one of the position, or one that nothing was left in.
    pub is_new: bool,
}

/// The newest event that is not of this boot since `since_ns`: where one begins who has sent nothing yet.
pub fn newest(path: &Path, since_ns: u64) -> anyhow::Result<Position> {
    let reader = Reader::open(path)?;
    let query = "SELECT id, time_ns FROM events
                 WHERE boot <> (SELECT max(id) FROM boots) OR boot_ns < ?1 ORDER BY id DESC LIMIT 1";
    let position = |row: &rusqlite::Row<'_>| Ok(Position { id: row.get(0)?, time_ns: row.get(1)? });
    let found = reader.of(reader.connection.query_row(query, [ns(since_ns)], position).optional())?;
    Ok(found.unwrap_or(Position { id: 0, time_ns: 0 }))
}

/// What comes after a position, up to the first event of which not everything may be written at `now_ns`.
pub fn after(path: &Path, position: Position, now_ns: u64) -> anyhow::Result<Batch> {
    let reader = Reader::open(path)?;
    reader.of(read(&reader.connection, position, now_ns))
}

/// How many events are not sent yet, and when the oldest of them was.
pub fn pending(path: &Path, position: Position) -> anyhow::Result<(u64, Option<Timestamp>)> {
    let reader = Reader::open(path)?;
    let query = "SELECT count(*), min(time_ns) FROM events WHERE id > ?1";
    let found = reader.connection.query_row(query, [position.id], |row| Ok((row.get(0)?, row.get(1)?)));
    let (events, oldest): (i64, Option<i64>) = reader.of(found)?;
    let oldest = oldest.and_then(|time_ns| Timestamp::from_nanosecond(time_ns.into()).ok());
    Ok((events.max(0).cast_unsigned(), oldest))
}

fn is_ripe(kind: &str, boot_ns: u64, now_ns: u64) -> bool {
    let wait = if kind == "exit" { DECIDED_NS } else { WRITTEN_NS };
    boot_ns > now_ns.saturating_add(AHEAD_NS) || boot_ns.saturating_add(wait) <= now_ns
}

fn read(connection: &Connection, position: Position, now_ns: u64) -> rusqlite::Result<Batch> {
    let mut batch = Batch::default();
    let found: Option<i64> = connection
        .prepare_cached("SELECT time_ns FROM events WHERE id = ?1")?
        .query_row([position.id], |row| row.get(0))
        .optional()?;
    let newest: i64 = connection.query_row("SELECT coalesce(max(id), 0) FROM events", [], |row| row.get(0))?;
    batch.is_new = position.id > 0 && (found.is_some_and(|time| time != position.time_ns) || newest < position.id);
    // Numbers of a journal begin with 1, and again if nothing is left in it.
    let mut last = if batch.is_new { 0 } else { position.id };
    let query = format!(
        "SELECT {EVENT_COLUMNS}, events.boot FROM events LEFT JOIN devices ON devices.id = events.device
         WHERE events.id > ?1 ORDER BY events.id LIMIT {ROWS}"
    );
    let newest_boot: Option<i64> = connection.query_row("SELECT max(id) FROM boots", [], |row| row.get(0))?;
    let mut boot: Option<(i64, Boot)> = None;
    let mut statement = connection.prepare_cached(&query)?;
    let mut found = statement.query([last])?;
    while let Some(row) = found.next()? {
        let (id, boot_ns, time_ns, boot_id): (i64, i64, i64, i64) =
            (row.get(0)?, row.get(1)?, row.get(2)?, row.get(8)?);
        let kind: String = row.get(3)?;
        if Some(boot_id) == newest_boot && !is_ripe(&kind, boot_ns.cast_unsigned(), now_ns) {
            break;
        }
        batch.gone += (id - last - 1).max(0).cast_unsigned();
        batch.looked += 1;
        batch.end = Some(Position { id, time_ns });
        last = id;
        let Some((_, event)) = rows::event(row)? else { continue };
        if boot.as_ref().is_none_or(|(known, _)| *known != boot_id) {
            let query = format!("SELECT {BOOT_COLUMNS} FROM boots WHERE id = ?1");
            boot = connection.query_row(&query, [boot_id], rows::boot).optional()?.map(|boot| (boot_id, boot));
        }
        if let Some((_, boot)) = &boot {
            items(connection, (boot_id, boot), id, event, &mut batch.items)?;
        }
    }
    batch.behind = (newest - last).max(0).cast_unsigned();
    Ok(batch)
}

fn items(
    connection: &Connection,
    (boot_id, boot): (i64, &Boot),
    id: i64,
    event: Event,
    items: &mut Vec<Item>,
) -> rusqlite::Result<()> {
    let mut add = |what, process| items.push(Item { boot: boot.clone(), what, process });
    let process = |key: Key| process(connection, boot_id, key);
    match &event.what {
        What::Exit(exit) => {
            if let Some(row) = process(exit.key)?.filter(|row| row.death.is_some()) {
                add(Sent::Death(row), None);
            }
        }
        What::Closed(subject) => {
            for hold in holds(connection, boot_id, subject.key, "holds.ended <> 'closed'", 0, i64::MAX)? {
                add(Sent::Hold(Box::new(hold), process(subject.key)?), None);
            }
        }
        What::Held(held) => {
            let before: i64 = connection
                .prepare_cached(
                    "SELECT coalesce(max(boot_ns), 0) FROM events
                     WHERE pid = ?1 AND start_ns = ?2 AND event = 'held' AND boot = ?3 AND id < ?4",
                )?
                .query_row(params![held.key.pid, ns(held.key.start_ns), boot_id, id], |row| row.get(0))?;
            for hold in holds(connection, boot_id, held.key, "holds.ended = 'closed'", before, ns(event.boot_ns))? {
                add(Sent::Hold(Box::new(hold), process(held.key)?), None);
            }
        }
        What::Reap(reap) => {
            let process = process(reap.key)?;
            add(Sent::Event(event), process);
        }
        What::Oom(oom) => {
            let process = oom.key.map(process).transpose()?.flatten();
            add(Sent::Event(event), process);
        }
        What::Start(_) => {
            ends_of_earlier_boot(connection, boot_id, event.boot_ns, items)?;
            items.push(Item { boot: boot.clone(), what: Sent::Event(event), process: None });
        }
        What::Xid(_) | What::Lost(_) | What::Stop => add(Sent::Event(event), None),
        _ => {}
    }
    Ok(())
}

/// That a host went down is no event: it is found out at the first start after it.
fn ends_of_earlier_boot(
    connection: &Connection,
    boot: i64,
    start_ns: u64,
    items: &mut Vec<Item>,
) -> rusqlite::Result<()> {
    let is_first: bool = connection
        .prepare_cached("SELECT NOT EXISTS (SELECT 1 FROM runs WHERE boot = ?1 AND begin_ns < ?2)")?
        .query_row(params![boot, ns(start_ns)], |row| row.get(0))?;
    if !is_first {
        return Ok(());
    }
    let query = format!("SELECT {BOOT_COLUMNS}, id FROM boots WHERE id < ?1 ORDER BY id DESC LIMIT 1");
    let earlier = |row: &rusqlite::Row<'_>| Ok((rows::boot(row)?, row.get::<_, i64>(5)?));
    let Some((boot, id)) = connection.query_row(&query, [boot], earlier).optional()? else { return Ok(()) };
    let query = format!(
        "SELECT {PROCESS_COLUMNS} FROM processes WHERE boot = ?1 AND cause IS NOT NULL AND exit_ns IS NULL ORDER BY id"
    );
    let mut statement = connection.prepare(&query)?;
    let dead: Vec<ProcessRow> = statement.query_map([id], rows::process)?.collect::<rusqlite::Result<_>>()?;
    for row in dead {
        items.push(Item { boot: boot.clone(), what: Sent::Death(Box::new(row)), process: None });
    }
    Ok(())
}

fn process(connection: &Connection, boot: i64, key: Key) -> rusqlite::Result<Option<Box<ProcessRow>>> {
    let query = format!("SELECT {PROCESS_COLUMNS} FROM processes WHERE boot = ?1 AND pid = ?2 AND start_ns = ?3");
    let mut statement = connection.prepare_cached(&query)?;
    Ok(statement.query_row(params![boot, key.pid, ns(key.start_ns)], rows::process).optional()?.map(Box::new))
}

/// Holds of a process that ended so, after one time and not after another.
fn holds(
    connection: &Connection,
    boot: i64,
    key: Key,
    ended: &str,
    after_ns: i64,
    until_ns: i64,
) -> rusqlite::Result<Vec<HoldRow>> {
    let query = format!(
        "SELECT {HOLD_COLUMNS} FROM holds
         JOIN processes ON processes.id = holds.process JOIN devices ON devices.id = holds.device
         WHERE processes.boot = ?1 AND processes.pid = ?2 AND processes.start_ns = ?3 AND {ended}
         AND holds.released_ns > ?4 AND holds.released_ns <= ?5"
    );
    let mut statement = connection.prepare_cached(&query)?;
    statement.query_map(params![boot, key.pid, ns(key.start_ns), after_ns, until_ns], rows::hold)?.collect()
}
