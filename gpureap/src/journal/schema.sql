-- Version 1. docs/journal.md says what each column is. Times end in _ns and are nanoseconds of the boot's CLOCK_BOOTTIME,
-- but for events.time_ns, which is Unix time. Nothing that is long stands in holds or events: they name rows by id.

CREATE TABLE boots (
    id INTEGER PRIMARY KEY,
    boot_id TEXT NOT NULL UNIQUE,
    host TEXT NOT NULL,
    kernel TEXT NOT NULL,
    wall_offset_ns INTEGER NOT NULL,
    last_ns INTEGER NOT NULL
) STRICT;

CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    boot INTEGER NOT NULL REFERENCES boots (id),
    pid INTEGER NOT NULL,
    version TEXT NOT NULL,
    backend TEXT NOT NULL,
    adopted INTEGER NOT NULL,
    begin_ns INTEGER NOT NULL,
    end_ns INTEGER,
    UNIQUE (boot, begin_ns)
) STRICT;

-- kind is null of a node that a hold or an event named and no start did.
CREATE TABLE devices (
    id INTEGER PRIMARY KEY,
    boot INTEGER NOT NULL REFERENCES boots (id),
    node TEXT NOT NULL,
    major INTEGER,
    minor INTEGER,
    kind TEXT,
    gpu INTEGER,
    nvml_index INTEGER,
    uuid TEXT,
    bdf TEXT,
    model TEXT,
    UNIQUE (boot, node)
) STRICT;

CREATE TABLE processes (
    id INTEGER PRIMARY KEY,
    boot INTEGER NOT NULL REFERENCES boots (id),
    pid INTEGER NOT NULL,
    start_ns INTEGER NOT NULL,
    noted_ns INTEGER NOT NULL,
    comm TEXT NOT NULL,
    argv TEXT,
    argv_cut INTEGER NOT NULL DEFAULT 0,
    exe TEXT,
    uid INTEGER,
    user TEXT,
    class TEXT,
    nspids TEXT,
    cgroup TEXT,
    unit TEXT,
    container TEXT,
    container_name TEXT,
    image TEXT,
    slurm_job TEXT,
    slurm_step TEXT,
    pod TEXT,
    pod_name TEXT,
    pod_namespace TEXT,
    env TEXT,
    threads TEXT,
    parent_pid INTEGER,
    parent_start_ns INTEGER,
    ancestor INTEGER NOT NULL DEFAULT 0,
    exit_ns INTEGER,
    status INTEGER,
    cause TEXT,
    signal TEXT,
    code INTEGER,
    core INTEGER,
    died_ns INTEGER,
    death TEXT,
    UNIQUE (boot, pid, start_ns)
) STRICT;

CREATE INDEX processes_living ON processes (boot) WHERE exit_ns IS NULL;
CREATE INDEX processes_parent ON processes (boot, parent_pid, parent_start_ns);
CREATE INDEX processes_noted ON processes (boot, noted_ns);

CREATE TABLE holds (
    boot INTEGER NOT NULL REFERENCES boots (id),
    process INTEGER NOT NULL REFERENCES processes (id),
    device INTEGER NOT NULL REFERENCES devices (id),
    opened_ns INTEGER NOT NULL,
    released_ns INTEGER,
    ended TEXT,
    origin TEXT NOT NULL,
    fds INTEGER NOT NULL,
    maps INTEGER NOT NULL,
    role TEXT,
    inherited_pid INTEGER,
    inherited_start_ns INTEGER,
    PRIMARY KEY (process, device, opened_ns)
) STRICT, WITHOUT ROWID;

-- The primary key's columns are part of every index, so this one answers what overlaps a window by itself.
CREATE INDEX holds_released ON holds (boot, released_ns, opened_ns);

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    boot INTEGER NOT NULL REFERENCES boots (id),
    boot_ns INTEGER NOT NULL,
    time_ns INTEGER NOT NULL,
    event TEXT NOT NULL,
    pid INTEGER,
    start_ns INTEGER,
    device INTEGER REFERENCES devices (id),
    data TEXT
) STRICT;

CREATE INDEX events_time ON events (boot, boot_ns);
CREATE INDEX events_process ON events (pid, start_ns, event) WHERE pid IS NOT NULL;

CREATE TABLE heartbeats (
    boot INTEGER NOT NULL REFERENCES boots (id),
    boot_ns INTEGER NOT NULL,
    holds INTEGER NOT NULL,
    processes INTEGER NOT NULL,
    PRIMARY KEY (boot, boot_ns)
) STRICT, WITHOUT ROWID;

CREATE VIEW holds_view AS
SELECT
    boots.host,
    devices.node,
    processes.pid,
    processes.comm,
    processes.user,
    strftime('%Y-%m-%dT%H:%M:%fZ', (boots.wall_offset_ns + holds.opened_ns) / 1e9, 'unixepoch') AS opened,
    strftime('%Y-%m-%dT%H:%M:%fZ', (boots.wall_offset_ns + holds.released_ns) / 1e9, 'unixepoch') AS released,
    (coalesce(holds.released_ns, boots.last_ns) - holds.opened_ns) / 1e9 AS seconds,
    holds.ended,
    holds.origin,
    holds.role,
    holds.fds,
    holds.maps,
    processes.slurm_job,
    processes.container_name,
    processes.pod_name,
    processes.start_ns,
    boots.boot_id
FROM holds
JOIN processes ON processes.id = holds.process
JOIN devices ON devices.id = holds.device
JOIN boots ON boots.id = holds.boot;

CREATE VIEW deaths AS
SELECT
    boots.host,
    strftime('%Y-%m-%dT%H:%M:%fZ', (boots.wall_offset_ns + coalesce(died_ns, exit_ns)) / 1e9, 'unixepoch') AS died,
    processes.pid,
    processes.comm,
    processes.user,
    processes.cause,
    processes.signal,
    processes.code,
    processes.core,
    death ->> '$.sender.pid' AS sender_pid,
    death ->> '$.sender.comm' AS sender,
    death ->> '$.evidence[0]' AS because,
    processes.slurm_job,
    processes.container_name,
    processes.pod_name,
    processes.start_ns,
    boots.boot_id
FROM processes
JOIN boots ON boots.id = processes.boot
WHERE processes.cause IS NOT NULL;

CREATE VIEW events_view AS
SELECT
    boots.host,
    strftime('%Y-%m-%dT%H:%M:%fZ', events.time_ns / 1e9, 'unixepoch') AS time,
    events.event,
    events.pid,
    devices.node,
    events.data,
    events.start_ns,
    boots.boot_id
FROM events
JOIN boots ON boots.id = events.boot
LEFT JOIN devices ON devices.id = events.device;
