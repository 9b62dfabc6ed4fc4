//! Rows as SQLite has them, and back. What is absent or empty is NULL.

use std::collections::BTreeMap;

use jiff::Timestamp;
use rusqlite::{Row, ToSql, types::Type};
use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IntoDeserializer as _, value::StrDeserializer},
};
use serde_json::{Map, Value};

use crate::{
    history::{
        event::{Device, Event, Sender, What},
        rows::{Boot, Death, HoldRow, Key, OomDeath, Place, ProcessRow, Run, Thread},
    },
    out::words::word,
};

/// Of a process, in the order of [`process_values`] and [`process`].
pub(super) const PROCESS_COLUMNS: &str = "pid, start_ns, comm, argv, argv_cut, exe, uid, user, class, nspids, cgroup, unit, \
    container, container_name, image, slurm_job, slurm_step, pod, pod_name, pod_namespace, env, threads, parent_pid, \
    parent_start_ns, ancestor, exit_ns, status, cause, signal, code, core, died_ns, death";

/// Of a hold with its process and device joined, in the order of [`hold`].
pub(super) const HOLD_COLUMNS: &str = "processes.pid, processes.start_ns, devices.node, holds.opened_ns, holds.released_ns, \
    holds.ended, holds.origin, holds.fds, holds.maps, holds.role, holds.inherited_pid, holds.inherited_start_ns";

/// Of an event with its device joined, in the order of [`event`].
pub(super) const EVENT_COLUMNS: &str = "events.id, events.boot_ns, events.time_ns, events.event, events.pid, events.start_ns, \
    devices.node, events.data";

pub(super) const BOOT_COLUMNS: &str = "boot_id, host, kernel, wall_offset_ns, last_ns";
pub(super) const RUN_COLUMNS: &str = "version, pid, backend, adopted, begin_ns, end_ns";
pub(super) const DEVICE_COLUMNS: &str = "node, major, minor, kind, gpu, nvml_index, uuid, bdf, model";

/// One value to be bound.
pub(super) type Bound = Box<dyn ToSql>;

/// A boottime as a column has it. No clock gets beyond 2^63 ns; whatever is written is read back the same.
pub(crate) const fn ns(time: u64) -> i64 {
    time.cast_signed()
}

fn time(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)?.cast_unsigned())
}

fn maybe_time(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(i64::cast_unsigned))
}

fn wrong(column: usize, error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
}

fn json<T: Serialize>(value: &T) -> Option<String> {
    serde_json::to_string(value).ok()
}

fn json_unless<T: Serialize>(empty: bool, value: &T) -> Option<String> {
    if empty { None } else { json(value) }
}

fn from_json<T: DeserializeOwned + Default>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str_or_null().map_err(|error| wrong(column, error))?;
    text.map_or_else(|| Ok(T::default()), |text| serde_json::from_str(text).map_err(|error| wrong(column, error)))
}

fn from_word<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<T>> {
    let text = row.get_ref(column)?.as_str_or_null().map_err(|error| wrong(column, error))?;
    text.map(|text| {
        let word: StrDeserializer<'_, serde::de::value::Error> = text.into_deserializer();
        T::deserialize(word).map_err(|error| wrong(column, error))
    })
    .transpose()
}

fn needed<T>(column: usize, value: Option<T>) -> rusqlite::Result<T> {
    value.ok_or(rusqlite::Error::InvalidColumnType(column, String::new(), Type::Null))
}

fn maybe_key(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Key>> {
    Ok(match (row.get(column)?, maybe_time(row, column + 1)?) {
        (Some(pid), Some(start_ns)) => Some(Key { pid, start_ns }),
        _ => None,
    })
}

pub(super) fn key(row: &Row<'_>, column: usize) -> rusqlite::Result<Key> {
    Ok(Key { pid: row.get(column)?, start_ns: time(row, column + 1)? })
}

pub(super) fn boot(row: &Row<'_>) -> rusqlite::Result<Boot> {
    Ok(Boot {
        boot_id: row.get(0)?,
        host: row.get(1)?,
        kernel: row.get(2)?,
        wall_offset_ns: row.get(3)?,
        last_ns: time(row, 4)?,
    })
}

pub(super) fn run(row: &Row<'_>) -> rusqlite::Result<Run> {
    Ok(Run {
        version: row.get(0)?,
        pid: row.get(1)?,
        backend: row.get(2)?,
        adopted: row.get(3)?,
        begin_ns: time(row, 4)?,
        end_ns: maybe_time(row, 5)?,
    })
}

pub(super) fn device(row: &Row<'_>) -> rusqlite::Result<Device> {
    Ok(Device {
        node: row.get(0)?,
        major: row.get(1)?,
        minor: row.get(2)?,
        kind: needed(3, from_word(row, 3)?)?,
        gpu: row.get(4)?,
        index: row.get(5)?,
        uuid: row.get(6)?,
        bdf: row.get(7)?,
        model: row.get(8)?,
    })
}

pub(super) fn hold(row: &Row<'_>) -> rusqlite::Result<HoldRow> {
    Ok(HoldRow {
        key: key(row, 0)?,
        node: row.get(2)?,
        opened_ns: time(row, 3)?,
        released_ns: maybe_time(row, 4)?,
        ended: from_word(row, 5)?,
        origin: needed(6, from_word(row, 6)?)?,
        fds: row.get(7)?,
        maps: row.get(8)?,
        role: from_word(row, 9)?,
        inherited_from: maybe_key(row, 10)?,
    })
}

/// The part of a death that has no column of its own.
#[derive(Default, Serialize, Deserialize)]
struct Story {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sender: Option<Sender>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    thread: Option<Thread>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    oom: Option<OomDeath>,
    #[serde(default)]
    evidence: Vec<String>,
}

/// In the order of [`PROCESS_COLUMNS`].
pub(super) fn process_values(row: &ProcessRow) -> Vec<Bound> {
    let ProcessRow {
        key,
        comm,
        argv,
        argv_cut,
        exe,
        uid,
        user,
        class,
        nspids,
        place,
        env,
        threads,
        parent,
        ancestor,
        exit_ns,
        status,
        death,
    } = row;
    let Place { cgroup, unit, container, container_name, image, slurm_job, slurm_step, pod, pod_name, pod_namespace } =
        place;
    let threads: Vec<(u32, &str)> = threads.iter().map(|Thread { tid, name }| (*tid, name.as_str())).collect();
    let (cause, signal, code, core, died_ns, story) = match death.clone() {
        None => (None, None, None, None, None, None),
        Some(Death { cause, code, signal, core, boot_ns, sender, thread, oom, evidence }) => {
            let story = Story { sender, thread, oom, evidence };
            (Some(word(&cause)), signal, code, Some(core), boot_ns.map(ns), json(&story))
        }
    };
    vec![
        Box::new(key.pid),
        Box::new(ns(key.start_ns)),
        Box::new(comm.clone()),
        Box::new(json_unless(argv.is_empty(), argv)),
        Box::new(*argv_cut),
        Box::new(exe.clone()),
        Box::new(*uid),
        Box::new(user.clone()),
        Box::new(class.clone()),
        Box::new(json_unless(nspids.is_empty(), nspids)),
        Box::new(cgroup.clone()),
        Box::new(unit.clone()),
        Box::new(container.clone()),
        Box::new(container_name.clone()),
        Box::new(image.clone()),
        Box::new(slurm_job.clone()),
        Box::new(slurm_step.clone()),
        Box::new(pod.clone()),
        Box::new(pod_name.clone()),
        Box::new(pod_namespace.clone()),
        Box::new(json_unless(env.is_empty(), env)),
        Box::new(json_unless(threads.is_empty(), &threads)),
        Box::new(parent.map(|parent| parent.pid)),
        Box::new(parent.map(|parent| ns(parent.start_ns))),
        Box::new(*ancestor),
        Box::new(exit_ns.map(ns)),
        Box::new(*status),
        Box::new(cause),
        Box::new(signal),
        Box::new(code),
        Box::new(core),
        Box::new(died_ns),
        Box::new(story),
    ]
}

pub(super) fn process(row: &Row<'_>) -> rusqlite::Result<ProcessRow> {
    let threads: Vec<(u32, String)> = from_json(row, 21)?;
    let env: BTreeMap<String, String> = from_json(row, 20)?;
    let death = match from_word(row, 27)? {
        None => None,
        Some(cause) => {
            let Story { sender, thread, oom, evidence } = from_json(row, 32)?;
            Some(Death {
                cause,
                signal: row.get(28)?,
                code: row.get(29)?,
                core: row.get::<_, Option<bool>>(30)?.unwrap_or_default(),
                boot_ns: maybe_time(row, 31)?,
                sender,
                thread,
                oom,
                evidence,
            })
        }
    };
    Ok(ProcessRow {
        key: key(row, 0)?,
        comm: row.get(2)?,
        argv: from_json(row, 3)?,
        argv_cut: row.get(4)?,
        exe: row.get(5)?,
        uid: row.get(6)?,
        user: row.get(7)?,
        class: row.get(8)?,
        nspids: from_json(row, 9)?,
        place: Place {
            cgroup: row.get(10)?,
            unit: row.get(11)?,
            container: row.get(12)?,
            container_name: row.get(13)?,
            image: row.get(14)?,
            slurm_job: row.get(15)?,
            slurm_step: row.get(16)?,
            pod: row.get(17)?,
            pod_name: row.get(18)?,
            pod_namespace: row.get(19)?,
        },
        env,
        threads: threads.into_iter().map(|(tid, name)| Thread { tid, name }).collect(),
        parent: maybe_key(row, 22)?,
        ancestor: row.get(24)?,
        exit_ns: maybe_time(row, 25)?,
        status: row.get(26)?,
        death,
    })
}

/// An event taken apart: what has a column, and the rest as JSON.
pub(crate) struct EventParts {
    pub(crate) kind: String,
    pub(crate) key: Option<Key>,
    pub(crate) node: Option<String>,
    pub(crate) data: Option<String>,
}

/// `None` of what cannot be put into JSON, which no event is.
pub(crate) fn event_parts(what: &What) -> Option<EventParts> {
    let Ok(Value::Object(mut data)) = serde_json::to_value(what) else { return None };
    let Some(Value::String(kind)) = data.shift_remove("event") else { return None };
    // Both or none: an Xid has the pid that the driver said, which is no identity and stays where it is.
    let key = match (data.get("pid").and_then(Value::as_u64), data.get("start_ns").and_then(Value::as_u64)) {
        (Some(pid), Some(start_ns)) => u32::try_from(pid).ok().map(|pid| Key { pid, start_ns }),
        _ => None,
    };
    if key.is_some() {
        data.shift_remove("pid");
        data.shift_remove("start_ns");
    }
    let node = match data.shift_remove("node") {
        Some(Value::String(node)) => Some(node),
        _ => None,
    };
    let data = json_unless(data.is_empty(), &data);
    Some(EventParts { kind, key, node, data })
}

/// The id that the row has, and the event; `None` of a kind that only a newer gpureap knows.
pub(crate) fn event(row: &Row<'_>) -> rusqlite::Result<Option<(i64, Event)>> {
    let kind: String = row.get(3)?;
    let mut data: Map<String, Value> = from_json(row, 7)?;
    if let Some(key) = maybe_key(row, 4)? {
        data.insert("pid".to_owned(), key.pid.into());
        data.insert("start_ns".to_owned(), key.start_ns.into());
    }
    if let Some(node) = row.get::<_, Option<String>>(6)? {
        data.insert("node".to_owned(), node.into());
    }
    data.insert("event".to_owned(), kind.as_str().into());
    let what = match serde_json::from_value(Value::Object(data)) {
        Ok(what) => what,
        Err(error) if error.to_string().starts_with("unknown variant") => return Ok(None),
        Err(error) => return Err(wrong(7, error)),
    };
    let time = Timestamp::from_nanosecond(row.get::<_, i64>(2)?.into()).map_err(|error| wrong(2, error))?;
    Ok(Some((row.get(0)?, Event { time, boot_ns: time_of(row)?, what })))
}

fn time_of(row: &Row<'_>) -> rusqlite::Result<u64> {
    time(row, 1)
}

/// Boottime of a wall-clock time; what is before the boot is 0.
pub(super) fn boottime(wall_offset_ns: i64, time: Timestamp) -> u64 {
    let ns = time.as_nanosecond() - i128::from(wall_offset_ns);
    // As far as a column goes.
    ns.clamp(0, i128::from(i64::MAX)) as u64
}
