//! What is too old, or too much, goes: in small steps, so that none of them keeps a batch waiting.

use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use super::{
    Error,
    rows::{boottime, ns},
    writer::Writer,
};
use crate::clock::CLOCK_SET;
use crate::config;

/// Rows of each table that one step removes at most.
const ROWS: i64 = 500;

/// Free pages that one step gives back to the file system at most, and that are worth a step.
const PAGES: i64 = 256;

/// So much of the boot that is recorded stays, however large it is.
const RECENT_NS: i64 = 60_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub max_age: Duration,
    /// Of what is in use, in bytes.
    pub max_size: u64,
}

impl From<&config::Journal> for Limits {
    fn from(journal: &config::Journal) -> Self {
        Self { max_age: journal.max_age, max_size: journal.max_size }
    }
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tidied {
    pub rows: usize,
    /// Another step has something to do.
    pub more: bool,
}

impl Writer {
    /// One step. What is held, by whom, and their ancestors stay however old they are.
    pub fn tidy(&mut self, limits: Limits, now: Timestamp) -> Result<Tidied, Error> {
        self.step(limits, now).map_err(|error| Error::of(&self.name, &error))
    }

    fn step(&mut self, limits: Limits, now: Timestamp) -> rusqlite::Result<Tidied> {
        let Limits { max_age, max_size } = limits;
        let oldest = now.checked_sub(max_age).unwrap_or(Timestamp::MIN);
        let mut rows = 0;
        for boot in boots(&self.connection)? {
            let Boot { id, offset, last_ns: _, newest: _ } = boot;
            let cutoff = boottime(offset, oldest);
            // Of a later boot nothing can be older.
            if cutoff == 0 {
                break;
            }
            rows += remove(&mut self.connection, id, ns(cutoff))?;
            rows += forget_boot(&self.connection, boot, ns(cutoff))?;
            if rows > 0 {
                break;
            }
        }
        let used = used(&self.connection)?;
        // Some room is made at once, or every batch would be followed by a step.
        self.shrinking = used > max_size || self.shrinking && used > max_size - max_size / 16;
        let mut crowded = 0;
        if self.shrinking && rows == 0 {
            crowded = self.remove_oldest()?;
            // Nothing that may go is left.
            self.shrinking &= crowded > 0;
        }
        let freed = vacuum(&self.connection)?;
        Ok(Tidied { rows: rows + crowded, more: rows > 0 || crowded > 0 || freed })
    }

    /// Of the oldest boot that has something to spare.
    fn remove_oldest(&mut self) -> rusqlite::Result<usize> {
        for boot in boots(&self.connection)? {
            let cutoff = oldest_part(&self.connection, &boot)?;
            let rows = remove(&mut self.connection, boot.id, cutoff)?;
            let rows = rows + forget_boot(&self.connection, boot, cutoff)?;
            if rows > 0 {
                return Ok(rows);
            }
        }
        Ok(0)
    }

    /// Whether the wall clock has been set, and the times of this boot are not told by it yet: nothing is as old as it seems.
    pub fn is_behind_clock(&self, wall_offset_ns: i64) -> Result<bool, Error> {
        let Some(boot) = self.boot else { return Ok(false) };
        let query = "SELECT wall_offset_ns FROM boots WHERE id = ?1";
        let known: i64 = self
            .connection
            .query_row(query, [boot], |row| row.get(0))
            .map_err(|error| Error::of(&self.name, &error))?;
        Ok(known.abs_diff(wall_offset_ns) >= CLOCK_SET)
    }

    /// Gives the log's pages to the file, so that it has the size that it needs. Where somebody reads, later.
    pub fn checkpoint(&self) -> Result<(), Error> {
        self.connection
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
            .map_err(|error| Error::of(&self.name, &error))
    }
}

#[derive(Clone, Copy)]
struct Boot {
    id: i64,
    offset: i64,
    last_ns: i64,
    newest: bool,
}

fn boots(connection: &Connection) -> rusqlite::Result<Vec<Boot>> {
    let mut statement = connection.prepare_cached(
        "SELECT id, wall_offset_ns, last_ns, id = (SELECT max(id) FROM boots) FROM boots ORDER BY id",
    )?;
    statement
        .query_map([], |row| {
            Ok(Boot { id: row.get(0)?, offset: row.get(1)?, last_ns: row.get(2)?, newest: row.get(3)? })
        })?
        .collect()
}

/// Bytes of the pages that are in use.
fn used(connection: &Connection) -> rusqlite::Result<u64> {
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let pages = pragma("page_count")? - pragma("freelist_count")?;
    Ok(pages.saturating_mul(pragma("page_size")?).max(0).cast_unsigned())
}

/// A boottime before which there is about one step's worth of rows.
fn oldest_part(connection: &Connection, boot: &Boot) -> rusqlite::Result<i64> {
    let edge = |query: &str| -> rusqlite::Result<Option<i64>> {
        connection.prepare_cached(query)?.query_row(params![boot.id, ROWS], |row| row.get(0))
    };
    // The newest of the oldest rows of each kind.
    let events =
        edge("SELECT max(boot_ns) FROM (SELECT boot_ns FROM events WHERE boot = ?1 ORDER BY boot_ns LIMIT ?2)")?;
    let holds = edge(
        "SELECT max(released_ns) FROM (SELECT released_ns FROM holds WHERE boot = ?1 AND released_ns IS NOT NULL
         ORDER BY released_ns LIMIT ?2)",
    )?;
    let edge = match (events, holds) {
        (Some(events), Some(holds)) => events.min(holds),
        (Some(edge), None) | (None, Some(edge)) => edge,
        // Only processes are left, and whatever they are waiting for is over when the boot is.
        (None, None) => boot.last_ns,
    };
    // What the daemon is about to refer to is left alone.
    let recent = if boot.newest { boot.last_ns.saturating_sub(RECENT_NS) } else { i64::MAX };
    Ok(edge.saturating_add(1).min(recent))
}

/// Removes what was over before `cutoff`: at most [`ROWS`] of each table.
fn remove(connection: &mut Connection, boot: i64, cutoff: i64) -> rusqlite::Result<usize> {
    let transaction = Transaction::new(connection, TransactionBehavior::Immediate)?;
    let statements = [
        "DELETE FROM events WHERE id IN
         (SELECT id FROM events WHERE boot = ?1 AND boot_ns < ?2 ORDER BY boot_ns LIMIT ?3)",
        "DELETE FROM holds WHERE (process, device, opened_ns) IN
         (SELECT process, device, opened_ns FROM holds WHERE boot = ?1 AND released_ns < ?2 ORDER BY released_ns LIMIT ?3)",
        // Parents follow when their last child is gone.
        "DELETE FROM processes WHERE id IN
         (SELECT id FROM processes AS old WHERE boot = ?1 AND noted_ns < ?2 AND coalesce(exit_ns, 0) < ?2
          AND NOT EXISTS (SELECT 1 FROM holds WHERE process = old.id)
          AND NOT EXISTS (SELECT 1 FROM processes WHERE boot = ?1 AND parent_pid = old.pid
                          AND parent_start_ns = old.start_ns)
          ORDER BY noted_ns LIMIT ?3)",
    ];
    let mut rows = 0;
    for statement in statements {
        rows += transaction.prepare_cached(statement)?.execute(params![boot, cutoff, ROWS])?;
    }
    transaction.commit()?;
    Ok(rows)
}

/// Removes a boot that nothing is left of. Never the newest, which is the one that is recorded.
fn forget_boot(connection: &Connection, boot: Boot, cutoff: i64) -> rusqlite::Result<usize> {
    let Boot { id, offset: _, last_ns, newest } = boot;
    if newest || last_ns >= cutoff {
        return Ok(0);
    }
    let used: bool = connection.query_row(
        "SELECT EXISTS (SELECT 1 FROM events WHERE boot = ?1) OR EXISTS (SELECT 1 FROM processes WHERE boot = ?1)
         OR EXISTS (SELECT 1 FROM holds WHERE boot = ?1)",
        [id],
        |row| row.get(0),
    )?;
    if used {
        return Ok(0);
    }
    // Half of it would be a boot without devices, which harms nobody; the boot itself goes last.
    let mut rows = 0;
    for table in ["heartbeats", "devices", "runs"] {
        rows += connection.execute(&format!("DELETE FROM {table} WHERE boot = ?1"), [id])?;
    }
    Ok(rows + connection.execute("DELETE FROM boots WHERE id = ?1", [id])?)
}

/// Whether there were enough free pages to be worth it.
fn vacuum(connection: &Connection) -> rusqlite::Result<bool> {
    let free: i64 = connection.pragma_query_value(None, "freelist_count", |row| row.get(0))?;
    if free < PAGES {
        return Ok(false);
    }
    let mut statement = connection.prepare(&format!("PRAGMA incremental_vacuum({PAGES})"))?;
    // Each row is a page: whoever asks for one only gets one freed.
    let mut pages = statement.query([])?;
    while pages.next()?.is_some() {}
    Ok(true)
}
