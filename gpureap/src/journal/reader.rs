//! Finds what a question asks for. Reads beside a daemon that writes, and from a copy.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::Path,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, Statement, params};
use rustix::fs::Access;

use super::{
    Error, file,
    rows::{
        self, BOOT_COLUMNS, DEVICE_COLUMNS, EVENT_COLUMNS, HOLD_COLUMNS, PROCESS_COLUMNS, RUN_COLUMNS, boottime, ns,
    },
    schema,
};
use crate::{
    clock::wall,
    error::Failure,
    history::{
        event::{Event, Lost, What},
        rows::{Boot, HoldRow, Key, ProcessRow, Record},
    },
};

const BUSY: Duration = Duration::from_secs(2);

/// What led to a death may lie before the window.
const MARGIN: SignedDuration = SignedDuration::from_mins(10);

/// Events of one boot's window that are read at most, the newest of them: those that explain something, and the others.
const EXPLAINING: u32 = 100_000;
const OTHERS: u32 = 20_000;
/// Of one process, outside the window.
const OF_A_PROCESS: u32 = 500;

/// How far up ancestors are followed.
const DEPTH: usize = 64;

/// Kinds of which there are many, and whose sum the holds and the processes have.
const MANY: &str = "('open', 'free', 'held', 'fork', 'thread', 'memory')";
/// Kinds that tell of a process long after.
const TELLING: &str = "('exec', 'signal', 'oom', 'reap', 'exit', 'closed', 'peer')";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BootChoice {
    /// The one of this id, which is the running one.
    Current(String),
    /// So many before the running one, whose id is `from` and which need not be in the journal.
    Back { boots: u32, from: String },
    /// By id, or by how it begins.
    Id(String),
}

/// What is to be read. Without anything, all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    pub since: Option<Timestamp>,
    pub until: Option<Timestamp>,
    pub boot: Option<BootChoice>,
    /// Only processes that held one of these within the time, but with all that they held. Empty: no matter.
    pub nodes: Vec<String>,
    /// Only processes of this number.
    pub pid: Option<u32>,
}

impl Question {
    /// Of one instant.
    pub fn at(time: Timestamp) -> Self {
        Self { since: Some(time), until: Some(time), ..Self::default() }
    }

    fn chooses(&self) -> bool {
        !self.nodes.is_empty() || self.pid.is_some()
    }
}

/// What the journal at `path` has to say to a question: a record of each boot that the time is of, oldest first.
pub fn read(path: &Path, question: &Question) -> anyhow::Result<Vec<Record>> {
    let reader = Reader::open(path)?;
    let boots = reader.boots(question)?;
    boots.into_iter().map(|boot| reader.of(reader.record(boot, question))).collect()
}

/// Hands on every event since then, in the order of time, until `each` fails.
pub fn events(
    path: &Path,
    since: Option<Timestamp>,
    mut each: impl FnMut(Event) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let reader = Reader::open(path)?;
    for (id, boot) in reader.of(reader.all_boots())? {
        let from = since.map_or(0, |since| boottime(boot.wall_offset_ns, since));
        let query = format!(
            "SELECT {EVENT_COLUMNS} FROM events LEFT JOIN devices ON devices.id = events.device
             WHERE events.boot = ?1 AND events.boot_ns >= ?2 ORDER BY events.boot_ns, events.id"
        );
        let mut statement = reader.of(reader.connection.prepare(&query))?;
        let mut rows = reader.of(statement.query(params![id, ns(from)]))?;
        while let Some(row) = reader.of(rows.next())? {
            if let Some((_, event)) = reader.of(rows::event(row))? {
                each(event)?;
            }
        }
    }
    Ok(())
}

pub(super) struct Reader {
    pub(super) connection: Connection,
    name: String,
}

fn failure(error: &Error) -> anyhow::Error {
    match error {
        Error::Damaged(why) => {
            let message = format!("{why}; its daemon moves it aside and begins a new one");
            Failure::unsupported(message).into()
        }
        Error::Refused(why) => Failure::unsupported(why).into(),
        Error::Unwritable(why) | Error::Busy(why) => anyhow::anyhow!("cannot read the journal {why}"),
    }
}

impl Reader {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let none = || Failure::unsupported(format!("there is no journal at {name}: no daemon has recorded there"));
        let not_permitted = || Failure::not_permitted(format!("you may not read {name}: run as root"));
        match fs::metadata(path) {
            Ok(meta) if !meta.is_file() => return Err(Failure::usage(format!("{name} is not a file")).into()),
            // Made and nothing more.
            Ok(meta) if meta.len() == 0 && file::size(path) == 0 => return Err(none().into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(none().into()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(not_permitted().into()),
            Err(error) => return Err(anyhow::anyhow!("cannot read the journal {name}: {error}")),
        }
        if rustix::fs::access(path, Access::READ_OK).is_err() {
            return Err(not_permitted().into());
        }
        // Readers of a database with a log agree by a file beside it. Where none can be made and there is no log, the
        // database does not change, and SQLite can be told so.
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let has_log = fs::metadata(file::log(path)).is_ok_and(|meta| meta.len() > 0);
        let is_fixed = !has_log && rustix::fs::access(dir, Access::WRITE_OK).is_err();
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_URI
            | OpenFlags::SQLITE_OPEN_EXRESCODE;
        let of = |error: rusqlite::Error| failure(&Error::of(&name, &error));
        let connection = Connection::open_with_flags(uri(path, is_fixed), flags).map_err(of)?;
        let setup = |connection: &Connection| -> rusqlite::Result<()> {
            connection.busy_timeout(BUSY)?;
            connection.pragma_update(None, "cell_size_check", true)?;
            connection.pragma_update(None, "trusted_schema", false)?;
            connection.set_prepared_statement_cache_capacity(16);
            // One state for all questions.
            connection.execute_batch("BEGIN")
        };
        setup(&connection).map_err(of)?;
        let found = schema::check(&connection, &name).map_err(|error| failure(&error))?;
        match found {
            schema::VERSION => Ok(Self { connection, name }),
            0 => Err(none().into()),
            _ => {
                let message = format!(
                    "{name} is of journal version {found}, older than this gpureap's {}: the daemon brings it up to \
                     date when it starts",
                    schema::VERSION
                );
                Err(Failure::unsupported(message).into())
            }
        }
    }

    pub(super) fn of<T>(&self, result: rusqlite::Result<T>) -> anyhow::Result<T> {
        result.map_err(|error| failure(&Error::of(&self.name, &error)))
    }

    fn all_boots(&self) -> rusqlite::Result<Vec<(i64, Boot)>> {
        let mut statement = self.connection.prepare(&format!("SELECT {BOOT_COLUMNS}, id FROM boots ORDER BY id"))?;
        statement.query_map([], |row| Ok((row.get(5)?, rows::boot(row)?)))?.collect()
    }

    /// Those that are asked for and whose time overlaps.
    fn boots(&self, question: &Question) -> anyhow::Result<Vec<(i64, Boot)>> {
        let mut boots = self.of(self.all_boots())?;
        let newest = boots.last().map(|(id, _)| *id);
        match &question.boot {
            None => {}
            Some(choice) => boots = choose(&boots, choice)?,
        }
        boots.retain(|(id, boot)| {
            let Boot { wall_offset_ns, last_ns, .. } = boot;
            let over =
                Some(*id) != newest && question.since.is_some_and(|since| since > wall(*wall_offset_ns, *last_ns));
            let to_come = question.until.is_some_and(|until| until < wall(*wall_offset_ns, 0));
            !over && !to_come
        });
        Ok(boots)
    }

    fn record(&self, (id, boot): (i64, Boot), question: &Question) -> rusqlite::Result<Record> {
        let at = |time: Timestamp| boottime(boot.wall_offset_ns, time);
        let from = question.since.map_or(0, at);
        let to = question.until.map_or(i64::MAX.cast_unsigned(), at);
        let holds = self.holds(id, from, to, question)?;
        let holders: BTreeSet<Key> = holds.iter().map(|hold| hold.key).collect();
        let margin = question.since.map_or(0, |since| at(since.checked_sub(MARGIN).unwrap_or(Timestamp::MIN)));
        let mut events = self.window_events(id, margin, to)?;
        if question.chooses() {
            events.retain(|_, event| concerns(&event.what, &holders, question));
        }
        self.add_telling_events(id, &holders, &mut events)?;
        let events: Vec<Event> = events.into_values().collect();
        let processes = self.processes(id, holders, &events)?;
        Ok(Record { runs: self.runs(id)?, devices: self.devices(id)?, boot, processes, holds, events })
    }

    fn holds(&self, boot: i64, from: u64, to: u64, question: &Question) -> rusqlite::Result<Vec<HoldRow>> {
        // The order of a CROSS JOIN is as written: from the index to the rows.
        let joined = format!(
            "SELECT {HOLD_COLUMNS} FROM holds INDEXED BY holds_released
             CROSS JOIN processes ON processes.id = holds.process CROSS JOIN devices ON devices.id = holds.device
             WHERE holds.boot = ?1 AND holds.opened_ns <= ?2 AND (?3 IS NULL OR processes.pid = ?3)"
        );
        let query = format!("{joined} AND holds.released_ns >= ?4 UNION ALL {joined} AND holds.released_ns IS NULL");
        let mut statement = self.connection.prepare_cached(&query)?;
        let mut holds: Vec<HoldRow> = statement
            .query_map(params![boot, ns(to), question.pid, ns(from)], rows::hold)?
            .collect::<rusqlite::Result<_>>()?;
        if !question.nodes.is_empty() {
            let chosen: BTreeSet<Key> =
                holds.iter().filter(|hold| question.nodes.contains(&hold.node)).map(|hold| hold.key).collect();
            holds.retain(|hold| chosen.contains(&hold.key));
        }
        holds.sort_by(|a, b| (a.opened_ns, a.key, &a.node).cmp(&(b.opened_ns, b.key, &b.node)));
        Ok(holds)
    }

    /// By the order of recording.
    fn window_events(&self, boot: i64, from: u64, to: u64) -> rusqlite::Result<BTreeMap<i64, Event>> {
        let mut events = BTreeMap::new();
        let mut newest = |condition: &str, limit: u32| -> rusqlite::Result<Option<u64>> {
            let mut statement = self.connection.prepare_cached(&format!(
                "SELECT {EVENT_COLUMNS} FROM events LEFT JOIN devices ON devices.id = events.device
                 WHERE events.boot = ?1 AND events.boot_ns BETWEEN ?2 AND ?3 AND events.event {condition} {MANY}
                 ORDER BY events.boot_ns DESC, events.id DESC LIMIT ?4"
            ))?;
            let (mut count, mut oldest) = (0, None);
            let mut rows = statement.query(params![boot, ns(from), ns(to), limit])?;
            while let Some(row) = rows.next()? {
                count += 1;
                if let Some((id, event)) = rows::event(row)? {
                    oldest = Some(event.boot_ns);
                    events.insert(id, event);
                }
            }
            Ok(oldest.filter(|_| count == limit))
        };
        newest("IN", OTHERS)?;
        let cut = newest("NOT IN", EXPLAINING)?;
        if let Some(boot_ns) = cut {
            let note =
                format!("only the newest {EXPLAINING} events of the time asked for were read; ask for a shorter one");
            let time =
                events.values().find(|event| event.boot_ns == boot_ns).map_or(Timestamp::MIN, |event| event.time);
            let what = What::Lost(Lost { events: 0, at: "reader".to_owned(), note });
            // Before all others; ids begin at 1.
            events.insert(0, Event { time, boot_ns, what });
        }
        Ok(events)
    }

    /// What is told of the holders at other times.
    fn add_telling_events(
        &self,
        boot: i64,
        holders: &BTreeSet<Key>,
        events: &mut BTreeMap<i64, Event>,
    ) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare(&format!(
            "SELECT {EVENT_COLUMNS} FROM events INDEXED BY events_process
             LEFT JOIN devices ON devices.id = events.device
             WHERE events.pid = ?2 AND events.start_ns = ?3 AND events.event IN {TELLING} AND events.boot = ?1
             ORDER BY events.id DESC LIMIT {OF_A_PROCESS}"
        ))?;
        for Key { pid, start_ns } in holders {
            let mut rows = statement.query(params![boot, pid, ns(*start_ns)])?;
            while let Some(row) = rows.next()? {
                events.extend(rows::event(row)?);
            }
        }
        Ok(())
    }

    /// Of the holders, of who sent them signals, and of the ancestors of both.
    fn processes(&self, boot: i64, holders: BTreeSet<Key>, events: &[Event]) -> rusqlite::Result<Vec<ProcessRow>> {
        let mut statement = self.connection.prepare(&format!(
            "SELECT {PROCESS_COLUMNS} FROM processes WHERE boot = ?1 AND pid = ?2 AND start_ns = ?3"
        ))?;
        let mut found: BTreeMap<Key, ProcessRow> = BTreeMap::new();
        let mut next: BTreeSet<Key> = holders;
        next.extend(events.iter().filter_map(|event| match &event.what {
            What::Signal(signal) => signal.sender.as_ref().map(|sender| sender.key),
            _ => None,
        }));
        for _ in 0..=DEPTH {
            let mut parents = BTreeSet::new();
            for key in std::mem::take(&mut next) {
                let Some(row) = process(&mut statement, boot, key)? else { continue };
                parents.extend(row.parent);
                let sender = row.death.as_ref().and_then(|death| death.sender.as_ref());
                parents.extend(sender.map(|sender| sender.key));
                found.insert(key, row);
            }
            next = parents.into_iter().filter(|key| !found.contains_key(key)).collect();
            if next.is_empty() {
                break;
            }
        }
        let mut processes: Vec<ProcessRow> = found.into_values().collect();
        processes.sort_by_key(|row| (row.key.start_ns, row.key.pid));
        Ok(processes)
    }

    fn runs(&self, boot: i64) -> rusqlite::Result<Vec<crate::history::rows::Run>> {
        let query = format!("SELECT {RUN_COLUMNS} FROM runs WHERE boot = ?1 ORDER BY id");
        self.connection.prepare(&query)?.query_map([boot], rows::run)?.collect()
    }

    fn devices(&self, boot: i64) -> rusqlite::Result<Vec<crate::history::event::Device>> {
        let query = format!("SELECT {DEVICE_COLUMNS} FROM devices WHERE boot = ?1 AND kind IS NOT NULL ORDER BY id");
        self.connection.prepare(&query)?.query_map([boot], rows::device)?.collect()
    }
}

fn process(statement: &mut Statement<'_>, boot: i64, key: Key) -> rusqlite::Result<Option<ProcessRow>> {
    statement.query_row(params![boot, key.pid, ns(key.start_ns)], rows::process).optional()
}

fn choose(boots: &[(i64, Boot)], choice: &BootChoice) -> anyhow::Result<Vec<(i64, Boot)>> {
    let only = |wanted: &dyn Fn(&Boot) -> bool| boots.iter().find(|(_, boot)| wanted(boot)).cloned();
    let current = |id: &str| {
        only(&|boot| boot.boot_id == id)
            .ok_or_else(|| Failure::unsupported("the journal has no record of the running boot"))
    };
    let found = match choice {
        BootChoice::Current(id) | BootChoice::Back { boots: 0, from: id } => current(id)?,
        BootChoice::Back { boots: back, from } => {
            let earlier: Vec<_> = boots.iter().filter(|(_, boot)| boot.boot_id != *from).collect();
            let at = usize::try_from(*back).ok().and_then(|back| earlier.len().checked_sub(back));
            at.and_then(|at| earlier.get(at)).copied().cloned().ok_or_else(|| {
                Failure::unsupported(format!(
                    "the journal has {} boots before the running one, and not {back}",
                    earlier.len()
                ))
            })?
        }
        BootChoice::Id(id) => {
            let fits: Vec<_> =
                boots.iter().filter(|(_, boot)| !id.is_empty() && boot.boot_id.starts_with(id.as_str())).collect();
            match fits[..] {
                [one] => one.clone(),
                [] => return Err(Failure::unsupported(format!("the journal has no boot {id}")).into()),
                _ => return Err(Failure::usage(format!("several boots begin with {id}")).into()),
            }
        }
    };
    Ok(vec![found])
}

/// Whether an event is of a chosen process or device, or of the host as a whole.
fn concerns(what: &What, holders: &BTreeSet<Key>, question: &Question) -> bool {
    let of = |key: Option<Key>| key.is_none_or(|key| holders.contains(&key) || question.pid == Some(key.pid));
    let on = |node: &str| question.nodes.is_empty() || question.nodes.iter().any(|wanted| wanted == node);
    match what {
        What::Start(_) | What::Stop | What::Lost(_) => true,
        What::Open(file) | What::Close(file) | What::Free(file) => match file.key {
            Some(key) => of(Some(key)),
            None => question.pid.is_none() && on(&file.node),
        },
        What::Memory(memory) => on(&memory.node),
        What::Xid(xid) => xid.node.as_deref().is_none_or(on),
        What::Oom(oom) => of(oom.key),
        What::Held(held) => of(Some(held.key)),
        What::Fork(fork) => of(Some(fork.key)) || of(Some(fork.parent)),
        What::Exec(named) => of(Some(named.key)),
        What::Thread(thread) => of(Some(thread.key)),
        What::Process(process) => of(Some(process.key)),
        What::Signal(signal) => of(Some(signal.key)),
        What::Reap(reap) => of(Some(reap.key)),
        What::Exit(exit) => of(Some(exit.key)),
        What::Closed(subject) => of(Some(subject.key)),
        What::Peer(peer) => of(Some(peer.key)) || of(Some(peer.of)),
    }
}

/// As SQLite takes it, with every byte that could mean something escaped.
fn uri(path: &Path, is_fixed: bool) -> String {
    let mut uri = "file:".to_owned();
    for byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-".contains(byte) {
            uri.push(char::from(*byte));
        } else {
            uri.push('%');
            uri.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])));
        }
    }
    if is_fixed { uri + "?immutable=1" } else { uri }
}
