//! The one writer: changes become rows, a batch at a time, all of it or nothing.

use std::{
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use jiff::Timestamp;
use rusqlite::{
    Connection, OpenFlags, OptionalExtension as _, Transaction, TransactionBehavior, named_params, params,
    params_from_iter,
};

use super::{
    Error, file,
    rows::{self, Bound, EventParts, HOLD_COLUMNS, PROCESS_COLUMNS, event_parts, ns, process_values},
    schema,
};
use crate::{
    history::{
        death,
        event::{Device, Event},
        rows::{Boot, Change, HoldEnd, HoldRow, Key, ProcessRow, Run},
    },
    out::words::word,
};

/// A lock that lasts longer is the next batch's business.
const BUSY: Duration = Duration::from_secs(1);

/// After a daemon that was killed, a file of up to this size is checked to the last page, which takes a fraction of a
/// second. A larger one is believed as far as its newest rows: SQLite's log survives a kill, and damage that is found
/// later is dealt with then.
const CHECKED_SIZE: u64 = 32 << 20;

/// Heartbeats that are kept of a boot.
const HEARTBEATS: u32 = 8;

/// The log is cut to this size when it is empty.
const LOG_SIZE: u32 = 16 << 20;

/// Pages in memory: what a batch touches.
const CACHE_KIB: i32 = 512;

pub struct Writer {
    pub(super) connection: Connection,
    path: PathBuf,
    pub(super) name: String,
    boot_id: String,
    /// The row of `boots`, once there is one.
    pub(super) boot: Option<i64>,
    /// The latest boottime that a change told of.
    now_ns: u64,
    full_sync: bool,
    /// Being made smaller than the most that it may be.
    pub(super) shrinking: bool,
}

pub struct Opened {
    pub writer: Writer,
    /// What was lost: the file was damaged, and a new one is begun.
    pub loss: Option<String>,
}

impl Writer {
    /// Opens the journal of this host, makes it if there is none, and closes the record of earlier boots.
    pub fn open(path: &Path, boot_id: &str) -> Result<Opened, Error> {
        match Self::open_as_it_is(path, boot_id) {
            Err(Error::Damaged(why)) => Self::begin_anew(path, boot_id, &why),
            opened => Ok(Opened { writer: opened?, loss: None }),
        }
    }

    /// Moves the file aside and starts with an empty one. `why` is a sentence.
    pub fn begin_anew(path: &Path, boot_id: &str, why: &str) -> Result<Opened, Error> {
        let path = file::prepare(path)?;
        let aside = file::move_aside(&path, Timestamp::now())?;
        let writer = Self::open_as_it_is(&path, boot_id)?;
        let loss = format!("{why}; it was moved to {} and a new journal begun", aside.display());
        Ok(Opened { writer, loss: Some(loss) })
    }

    fn open_as_it_is(path: &Path, boot_id: &str) -> Result<Self, Error> {
        let path = file::prepare(path)?;
        let name = path.display().to_string();
        let of = |error: rusqlite::Error| Error::of(&name, &error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_NOFOLLOW
            | OpenFlags::SQLITE_OPEN_EXRESCODE;
        let mut connection = Connection::open_with_flags(&path, flags).map_err(of)?;
        // SQLite takes what it gets, and would keep it: once opened for reading alone, no attempt to write would do.
        if connection.is_readonly("main").map_err(of)? {
            return Err(Error::Unwritable(format!("{name}: it can only be read")));
        }
        connection.busy_timeout(BUSY).map_err(of)?;
        let found = schema::check(&connection, &name)?;
        let setup = |connection: &Connection| -> rusqlite::Result<()> {
            // The order matters: the first page is written with the switch to the log, and then it is too late for it.
            if found == 0 {
                connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
            }
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.pragma_update(None, "foreign_keys", false)?;
            connection.pragma_update(None, "journal_size_limit", LOG_SIZE)?;
            connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
            // A damaged page is an error and not a wild pointer.
            connection.pragma_update(None, "cell_size_check", true)?;
            connection.pragma_update(None, "trusted_schema", false)
        };
        setup(&connection).map_err(of)?;
        schema::migrate(&mut connection, &name)?;
        connection.set_prepared_statement_cache_capacity(64);
        let mut writer = Self {
            connection,
            path,
            name,
            boot_id: boot_id.to_owned(),
            boot: None,
            now_ns: 0,
            full_sync: true,
            shrinking: false,
        };
        writer.check()?;
        let of = |error: rusqlite::Error| Error::of(&writer.name, &error);
        let known = writer
            .connection
            .query_row("SELECT id, last_ns FROM boots WHERE boot_id = ?1", [boot_id], |row| {
                Ok((row.get(0)?, row.get::<_, i64>(1)?))
            })
            .optional()
            .map_err(of)?;
        if let Some((boot, last_ns)) = known {
            writer.boot = Some(boot);
            writer.now_ns = last_ns.cast_unsigned();
        }
        writer.close_earlier_boots().map_err(|error| Error::of(&writer.name, &error))?;
        Ok(writer)
    }

    /// Boottime of the last record of this boot; 0: there is none.
    pub const fn recorded_ns(&self) -> u64 {
        self.now_ns
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file with its log.
    pub fn size(&self) -> u64 {
        file::size(&self.path)
    }

    fn check(&self) -> Result<(), Error> {
        let of = |error: rusqlite::Error| Error::of(&self.name, &error);
        // Missing columns are found here, and pages that are no pages where the newest rows are.
        let newest = [
            "SELECT count(*), total(last_ns), min(host) FROM boots",
            "SELECT count(*), total(begin_ns), min(backend) FROM runs",
            "SELECT count(*), min(node), min(kind) FROM devices",
            "SELECT count(*), total(length(comm)), 0 FROM (SELECT * FROM processes ORDER BY id DESC LIMIT 50)",
            "SELECT count(*), total(fds), 0 FROM (SELECT * FROM holds ORDER BY process DESC LIMIT 50)",
            "SELECT count(*), total(length(data)), 0 FROM (SELECT * FROM events ORDER BY id DESC LIMIT 50)",
            "SELECT count(*), total(holds), 0 FROM heartbeats",
        ];
        for query in newest {
            self.connection.query_row(query, [], |_| Ok(())).map_err(of)?;
        }
        if self.stopped_as_told().map_err(of)? || self.size() > CHECKED_SIZE {
            return Ok(());
        }
        let verdict: String = self.connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(of)?;
        if verdict == "ok" {
            return Ok(());
        }
        let verdict = verdict.lines().find(|line| !line.starts_with("***")).unwrap_or_default();
        Err(Error::Damaged(format!("{} is damaged: {verdict}", self.name)))
    }

    /// Whether the last daemon had the time to say that it stops.
    fn stopped_as_told(&self) -> rusqlite::Result<bool> {
        let end: Option<Option<i64>> = self
            .connection
            .query_row("SELECT end_ns FROM runs ORDER BY id DESC LIMIT 1", [], |row| row.get(0))
            .optional()?;
        Ok(end.is_none_or(|end| end.is_some()))
    }

    /// What earlier boots held is held no more. When it ended is known only as far as their record goes.
    fn close_earlier_boots(&mut self) -> rusqlite::Result<()> {
        let transaction = Transaction::new(&mut self.connection, TransactionBehavior::Immediate)?;
        let mut boots = transaction.prepare(
            "SELECT id, wall_offset_ns, last_ns, (SELECT end_ns FROM runs WHERE boot = boots.id ORDER BY id DESC LIMIT 1)
             FROM boots WHERE boot_id != ?1
             AND EXISTS (SELECT 1 FROM holds WHERE boot = boots.id AND released_ns IS NULL)",
        )?;
        let open: Vec<(i64, i64, i64, Option<i64>)> = boots
            .query_map([&self.boot_id], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?
            .collect::<rusqlite::Result<_>>()?;
        drop(boots);
        for (boot, offset, last_ns, stopped_ns) in open {
            let (ended, death) = death::of_boot(offset, last_ns.cast_unsigned(), stopped_ns.map(i64::cast_unsigned));
            let columns = PROCESS_COLUMNS;
            let mut statement = transaction.prepare(&format!(
                "SELECT {columns} FROM processes WHERE exit_ns IS NULL AND cause IS NULL AND boot = ?1 AND id IN
                 (SELECT process FROM holds WHERE boot = ?1 AND released_ns IS NULL)"
            ))?;
            let holders: Vec<ProcessRow> =
                statement.query_map([boot], rows::process)?.collect::<rusqlite::Result<_>>()?;
            drop(statement);
            for holder in holders {
                let row = ProcessRow { death: Some(death.clone()), ..holder };
                put_process(&transaction, boot, last_ns.cast_unsigned(), &row)?;
            }
            // A hold cannot end before it began, whatever the last sign of life was.
            transaction.execute(
                "UPDATE holds SET released_ns = max(opened_ns, ?2), ended = ?3 WHERE boot = ?1 AND released_ns IS NULL",
                params![boot, last_ns, word(&ended)],
            )?;
        }
        transaction.commit()
    }

    /// Writes all of them or none. The changes of a batch with an urgent one are on the disk when this returns; the others
    /// survive the end of this process, but not that of the host within seconds.
    pub fn apply(&mut self, changes: &[Change]) -> Result<(), Error> {
        self.write(changes).map_err(|error| Error::of(&self.name, &error))
    }

    fn write(&mut self, changes: &[Change]) -> rusqlite::Result<()> {
        let urgent = changes.iter().any(Change::is_urgent);
        if urgent != self.full_sync {
            // Within a transaction it would have no effect.
            self.connection.pragma_update(None, "synchronous", if urgent { "FULL" } else { "NORMAL" })?;
            self.full_sync = urgent;
        }
        let transaction = Transaction::new(&mut self.connection, TransactionBehavior::Immediate)?;
        let boot = match self.boot {
            Some(boot) => boot,
            None => boot_row(&transaction, &self.boot_id)?,
        };
        let mut now_ns = self.now_ns;
        for change in changes {
            now_ns = now_ns.max(told(change));
            put(&transaction, boot, now_ns, change)?;
        }
        transaction
            .prepare_cached("UPDATE boots SET last_ns = max(last_ns, ?2) WHERE id = ?1")?
            .execute(params![boot, ns(now_ns)])?;
        transaction.commit()?;
        self.boot = Some(boot);
        self.now_ns = now_ns;
        Ok(())
    }

    /// The holds of this boot that have not ended: what a daemon takes up again.
    pub fn open_holds(&self) -> Result<Vec<HoldRow>, Error> {
        let query = format!(
            "SELECT {HOLD_COLUMNS} FROM holds JOIN processes ON processes.id = holds.process
             JOIN devices ON devices.id = holds.device
             WHERE holds.boot = ?1 AND holds.released_ns IS NULL ORDER BY holds.opened_ns"
        );
        self.of_this_boot(&query, rows::hold)
    }

    /// The processes of this boot that are not known to have ended, and those that have but hold still.
    pub fn open_processes(&self) -> Result<Vec<ProcessRow>, Error> {
        let query = format!(
            "SELECT {PROCESS_COLUMNS} FROM processes WHERE id IN (
                 SELECT id FROM processes WHERE boot = ?1 AND exit_ns IS NULL
                 UNION SELECT process FROM holds WHERE boot = ?1 AND released_ns IS NULL
             ) ORDER BY start_ns, pid"
        );
        self.of_this_boot(&query, rows::process)
    }

    fn of_this_boot<T>(
        &self,
        query: &str,
        read: fn(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, Error> {
        let Some(boot) = self.boot else { return Ok(Vec::new()) };
        let run = || -> rusqlite::Result<Vec<T>> { self.connection.prepare(query)?.query_map([boot], read)?.collect() };
        run().map_err(|error| Error::of(&self.name, &error))
    }
}

/// The boottime that a change tells of; 0 if it has none.
fn told(change: &Change) -> u64 {
    match change {
        Change::Start { boot, run, devices: _ } => boot.last_ns.max(run.begin_ns),
        Change::Stop { boot_ns } | Change::Heartbeat { boot_ns } | Change::Now { boot_ns, .. } => *boot_ns,
        Change::Clock { wall_offset_ns: _ } => 0,
        Change::Process(row) => row.exit_ns.unwrap_or(0),
        Change::Hold(row) => row.released_ns.unwrap_or(row.opened_ns),
        Change::Event(event) => event.boot_ns,
    }
}

fn boot_row(transaction: &Transaction<'_>, boot_id: &str) -> rusqlite::Result<i64> {
    transaction.query_row(
        "INSERT INTO boots (boot_id, host, kernel, wall_offset_ns, last_ns) VALUES (?1, '', '', ?2, 0)
         ON CONFLICT (boot_id) DO UPDATE SET boot_id = excluded.boot_id RETURNING id",
        params![boot_id, crate::clock::wall_offset_ns()],
        |row| row.get(0),
    )
}

fn put(transaction: &Transaction<'_>, boot: i64, now_ns: u64, change: &Change) -> rusqlite::Result<()> {
    match change {
        Change::Start { boot: about, run, devices } => put_start(transaction, boot, about, run, devices),
        Change::Stop { boot_ns } => {
            let mut statement = transaction.prepare_cached(
                "UPDATE runs SET end_ns = ?2 WHERE id = (SELECT id FROM runs WHERE boot = ?1 ORDER BY id DESC LIMIT 1)",
            )?;
            statement.execute(params![boot, ns(*boot_ns)]).map(drop)
        }
        Change::Process(row) => put_process(transaction, boot, now_ns, row),
        Change::Hold(row) => put_hold(transaction, boot, now_ns, row),
        Change::Event(event) => put_event(transaction, boot, event),
        Change::Heartbeat { boot_ns } => put_heartbeat(transaction, boot, *boot_ns),
        Change::Clock { wall_offset_ns } => transaction
            .execute("UPDATE boots SET wall_offset_ns = ?2 WHERE id = ?1", params![boot, wall_offset_ns])
            .map(drop),
        Change::Now { boot_ns, processes, holds } => put_now(transaction, boot, *boot_ns, processes, holds),
    }
}

/// Who has ended is not said: a process that holds nothing may live, and the next daemon finds out.
fn put_now(
    transaction: &Transaction<'_>,
    boot: i64,
    boot_ns: u64,
    processes: &[ProcessRow],
    holds: &[HoldRow],
) -> rusqlite::Result<()> {
    // What is held comes after this and opens its own again.
    transaction.execute(
        "UPDATE holds SET released_ns = max(opened_ns, ?2), ended = ?3 WHERE boot = ?1 AND released_ns IS NULL",
        params![boot, ns(boot_ns), word(&HoldEnd::Unseen)],
    )?;
    processes.iter().try_for_each(|row| put_process(transaction, boot, boot_ns, row))?;
    holds.iter().try_for_each(|row| put_hold(transaction, boot, boot_ns, row))
}

fn put_start(
    transaction: &Transaction<'_>,
    boot: i64,
    about: &Boot,
    run: &Run,
    devices: &[Device],
) -> rusqlite::Result<()> {
    // The id of the boot is the one that the journal was opened with.
    let Boot { boot_id: _, host, kernel, wall_offset_ns, last_ns } = about;
    transaction.execute(
        "UPDATE boots SET host = ?2, kernel = ?3, wall_offset_ns = ?4, last_ns = max(last_ns, ?5) WHERE id = ?1",
        params![boot, host, kernel, wall_offset_ns, ns(*last_ns)],
    )?;
    let Run { version, pid, backend, adopted, begin_ns, end_ns } = run;
    transaction.execute(
        "INSERT INTO runs (boot, pid, version, backend, adopted, begin_ns, end_ns) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT (boot, begin_ns) DO UPDATE SET pid = excluded.pid, version = excluded.version,
         backend = excluded.backend, adopted = excluded.adopted, end_ns = excluded.end_ns",
        params![boot, pid, version, backend, adopted, ns(*begin_ns), end_ns.map(ns)],
    )?;
    for device in devices {
        let Device { node, major, minor, kind, gpu, index, uuid, bdf, model } = device;
        transaction.execute(
            "INSERT INTO devices (boot, node, major, minor, kind, gpu, nvml_index, uuid, bdf, model)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
             ON CONFLICT (boot, node) DO UPDATE SET major = excluded.major, minor = excluded.minor, kind = excluded.kind,
             gpu = excluded.gpu, nvml_index = excluded.nvml_index, uuid = excluded.uuid, bdf = excluded.bdf,
             model = excluded.model",
            params![boot, node, major, minor, word(kind), gpu, index, uuid, bdf, model],
        )?;
    }
    Ok(())
}

fn put_process(transaction: &Transaction<'_>, boot: i64, now_ns: u64, row: &ProcessRow) -> rusqlite::Result<()> {
    static UPSERT: LazyLock<String> = LazyLock::new(process_upsert);
    let mut values: Vec<Bound> = vec![Box::new(boot), Box::new(ns(now_ns))];
    values.extend(process_values(row));
    transaction.prepare_cached(&UPSERT)?.execute(params_from_iter(values)).map(drop)
}

/// When a process ended stays as it was told first. Who is noted as an ancestor may have held something before, and then keeps
/// what was recorded of it; a row without a name has nothing to keep.
fn process_upsert() -> String {
    const KEPT: &str = "excluded.ancestor AND NOT processes.ancestor AND processes.comm != ''";
    let columns: Vec<&str> = PROCESS_COLUMNS.split(',').map(str::trim).collect();
    let places = vec!["?"; columns.len() + 2].join(", ");
    let set = columns.iter().map(|column| {
        let kept = if matches!(*column, "exit_ns" | "status") { "true" } else { KEPT };
        format!(
            "{column} = CASE WHEN {kept} THEN coalesce(processes.{column}, excluded.{column}) ELSE excluded.{column} END"
        )
    });
    let set: Vec<String> = set.collect();
    format!(
        "INSERT INTO processes (boot, noted_ns, {PROCESS_COLUMNS}) VALUES ({places})
         ON CONFLICT (boot, pid, start_ns) DO UPDATE SET noted_ns = excluded.noted_ns, {}",
        set.join(", ")
    )
}

/// The row of a process, made with no more than its identity if it has none yet.
fn process_id(transaction: &Transaction<'_>, boot: i64, now_ns: u64, key: Key) -> rusqlite::Result<i64> {
    let Key { pid, start_ns } = key;
    let found = transaction
        .prepare_cached("SELECT id FROM processes WHERE boot = ?1 AND pid = ?2 AND start_ns = ?3")?
        .query_row(params![boot, pid, ns(start_ns)], |row| row.get(0))
        .optional()?;
    match found {
        Some(id) => Ok(id),
        None => transaction
            .prepare_cached(
                "INSERT INTO processes (boot, pid, start_ns, noted_ns, comm) VALUES (?1, ?2, ?3, ?4, '') RETURNING id",
            )?
            .query_row(params![boot, pid, ns(start_ns), ns(now_ns)], |row| row.get(0)),
    }
}

fn device_id(transaction: &Transaction<'_>, boot: i64, node: &str) -> rusqlite::Result<i64> {
    let found = transaction
        .prepare_cached("SELECT id FROM devices WHERE boot = ?1 AND node = ?2")?
        .query_row(params![boot, node], |row| row.get(0))
        .optional()?;
    match found {
        Some(id) => Ok(id),
        None => transaction
            .prepare_cached("INSERT INTO devices (boot, node) VALUES (?1, ?2) RETURNING id")?
            .query_row(params![boot, node], |row| row.get(0)),
    }
}

fn put_hold(transaction: &Transaction<'_>, boot: i64, now_ns: u64, row: &HoldRow) -> rusqlite::Result<()> {
    let HoldRow { key, node, opened_ns, released_ns, ended, origin, fds, maps, role, inherited_from } = row;
    let process = process_id(transaction, boot, now_ns, *key)?;
    let device = device_id(transaction, boot, node)?;
    transaction
        .prepare_cached(
            "INSERT INTO holds (boot, process, device, opened_ns, released_ns, ended, origin, fds, maps, role,
                 inherited_pid, inherited_start_ns)
             VALUES (:boot, :process, :device, :opened, :released, :ended, :origin, :fds, :maps, :role, :pid, :start)
             ON CONFLICT (process, device, opened_ns) DO UPDATE SET released_ns = excluded.released_ns,
             ended = excluded.ended, origin = excluded.origin, fds = excluded.fds, maps = excluded.maps,
             role = excluded.role, inherited_pid = excluded.inherited_pid,
             inherited_start_ns = excluded.inherited_start_ns",
        )?
        .execute(named_params! {
            ":boot": boot,
            ":process": process,
            ":device": device,
            ":opened": ns(*opened_ns),
            ":released": released_ns.map(ns),
            ":ended": ended.as_ref().map(word),
            ":origin": word(origin),
            ":fds": fds,
            ":maps": maps,
            ":role": role.as_ref().map(word),
            ":pid": inherited_from.map(|from| from.pid),
            ":start": inherited_from.map(|from| ns(from.start_ns)),
        })
        .map(drop)
}

fn put_event(transaction: &Transaction<'_>, boot: i64, event: &Event) -> rusqlite::Result<()> {
    let Event { time, boot_ns, what } = event;
    let Some(EventParts { kind, key, node, data }) = event_parts(what) else { return Ok(()) };
    let device = node.map(|node| device_id(transaction, boot, &node)).transpose()?;
    let time_ns = i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX);
    transaction
        .prepare_cached(
            "INSERT INTO events (boot, boot_ns, time_ns, event, pid, start_ns, device, data)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?
        .execute(params![
            boot,
            ns(*boot_ns),
            time_ns,
            kind,
            key.map(|key| key.pid),
            key.map(|key| ns(key.start_ns)),
            device,
            data
        ])
        .map(drop)
}

fn put_heartbeat(transaction: &Transaction<'_>, boot: i64, boot_ns: u64) -> rusqlite::Result<()> {
    transaction
        .prepare_cached(
            "INSERT OR REPLACE INTO heartbeats (boot, boot_ns, holds, processes)
             SELECT ?1, ?2, count(*), count(DISTINCT process) FROM holds WHERE boot = ?1 AND released_ns IS NULL",
        )?
        .execute(params![boot, ns(boot_ns)])?;
    transaction
        .prepare_cached(
            "DELETE FROM heartbeats WHERE boot = ?1 AND boot_ns <
             (SELECT boot_ns FROM heartbeats WHERE boot = ?1 ORDER BY boot_ns DESC LIMIT 1 OFFSET ?2)",
        )?
        .execute(params![boot, HEARTBEATS - 1])
        .map(drop)
}
