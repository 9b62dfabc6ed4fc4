-- What version 1 wrote, by `.dump`: never changed.
PRAGMA application_id = 1735422538;
PRAGMA user_version = 1;
PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE boots (
    id INTEGER PRIMARY KEY,
    boot_id TEXT NOT NULL UNIQUE,
    host TEXT NOT NULL,
    kernel TEXT NOT NULL,
    wall_offset_ns INTEGER NOT NULL,
    last_ns INTEGER NOT NULL
) STRICT;
INSERT INTO boots VALUES(1,'b1','n1','6.8.0',1793491200000000000,30000000000);
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
INSERT INTO runs VALUES(1,1,700,'0.1.0','kprobe',0,1000000000,NULL);
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
INSERT INTO devices VALUES(1,1,'/dev/nvidia0',195,0,'gpu',0,NULL,'GPU-0','0000:00:00.0','H200');
INSERT INTO devices VALUES(2,1,'/dev/nvidia1',195,1,'gpu',1,NULL,'GPU-1','0000:01:00.0','H200');
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
INSERT INTO processes VALUES(1,1,50,50000,1000000000,'p50',NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO processes VALUES(2,1,100,100000,9000000000,'python3','["python3","","train.py"]',1,'/usr/bin/python3.11',1000,'eve','job','[100,7]','/a','b.service','c0ffee','d','e:latest','4711','0','f','g','h','{"RANK":"3","WORLD_SIZE":""}','[[100,"python3"],[101,"pt_nccl_watchdg"],[101,"renamed"]]',50,50000,0,9000000000,9,'oom-kill','SIGKILL',0,1,8000000000,'{"sender":{"pid":900,"start_ns":900000,"tid":901,"thread":"main","comm":"pkill","argv":["pkill","-9","py\"thé"],"uid":0,"lineage":[{"pid":899,"start_ns":899000,"comm":"bash","argv":["-bash"]}]},"thread":{"tid":101,"name":"t"},"oom":{"scope":"cgroup","cgroup":"/a"},"evidence":["it was chosen","💀"]}');
INSERT INTO processes VALUES(3,1,101,101000,9000000000,'p101',NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,50,50000,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
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
INSERT INTO holds VALUES(1,2,1,2000000000,9000000000,'closed','opened',1,0,NULL,NULL,NULL);
INSERT INTO holds VALUES(1,3,2,6000000000,NULL,NULL,'opened',1,0,NULL,NULL,NULL);
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
INSERT INTO events VALUES(1,1,1000000000,1793491201000000000,'start',NULL,NULL,NULL,'{"boot_id":"b1","host":"n1","kernel":"6.8.0","version":"0.1.0","backend":"gate","adopted":true,"daemon_pid":700,"wall_offset_ns":1793491200000000000,"devices":[{"node":"/dev/nvidia0","major":195,"minor":0,"kind":"gpu","gpu":0,"index":null,"uuid":"GPU-0","bdf":"0000:00:00.0","model":"H200"}]}');
INSERT INTO events VALUES(2,1,1000000000,1793491201000000000,'open',100,100000,1,'{"tid":101,"comm":"python3","file":18446612686365004340}');
INSERT INTO events VALUES(3,1,2000000000,1793491202000000000,'free',NULL,NULL,1,'{"tid":101,"comm":"python3","file":18446612686365004340,"failed":true}');
INSERT INTO events VALUES(4,1,2000000000,1793491202000000000,'held',100,100000,NULL,'{"inherited_from":{"pid":50,"start_ns":50000},"from_snapshot":true,"devices":[{"node":"/dev/nvidia0","fds":2,"maps":1,"role":"attached","first_ns":7}]}');
INSERT INTO events VALUES(5,1,3000000000,1793491203000000000,'fork',100,100000,NULL,'{"parent":{"pid":50,"start_ns":50000},"comm":"bash"}');
INSERT INTO events VALUES(6,1,3000000000,1793491203000000000,'exec',100,100000,NULL,'{"comm":"python3"}');
INSERT INTO events VALUES(7,1,4000000000,1793491204000000000,'thread',100,100000,NULL,'{"tid":102,"name":"t"}');
INSERT INTO events VALUES(8,1,4000000000,1793491204000000000,'process',100,100000,NULL,'{"comm":"python3","argv":[],"slurm_job":"4711","exit":{"boot_ns":3,"status":256}}');
INSERT INTO events VALUES(9,1,5000000000,1793491205000000000,'signal',100,100000,NULL,'{"tid":101,"thread":"t","signal":"SIGKILL","code":-6,"sender":{"pid":900,"start_ns":900000,"tid":901,"thread":"main","comm":"pkill","argv":["pkill","-9","py\"thé"],"uid":0,"lineage":[{"pid":899,"start_ns":899000,"comm":"bash","argv":["-bash"]}]},"running":{"pid":900,"start_ns":900000,"tid":901,"thread":"main","comm":"pkill","argv":["pkill","-9","py\"thé"],"uid":0,"lineage":[{"pid":899,"start_ns":899000,"comm":"bash","argv":["-bash"]}]}}');
INSERT INTO events VALUES(10,1,5000000000,1793491205000000000,'oom',NULL,NULL,NULL,'{"tid":101,"comm":"python3","scope":"global","source":"kmsg"}');
INSERT INTO events VALUES(11,1,6000000000,1793491206000000000,'xid',NULL,NULL,1,'{"bdf":"0000:00:00.0","xid":31,"pid":100,"name":"python3","message":"MMU Fault","source":"kmsg"}');
INSERT INTO events VALUES(12,1,6000000000,1793491206000000000,'reap',100,100000,NULL,'{"signal":"SIGTERM","cgroup":"/a","by_pid":1,"by_uid":0}');
INSERT INTO events VALUES(13,1,7000000000,1793491207000000000,'exit',100,100000,NULL,'{"tid":101,"comm":"python3","status":9}');
INSERT INTO events VALUES(14,1,7000000000,1793491207000000000,'closed',100,100000,NULL,NULL);
INSERT INTO events VALUES(15,1,8000000000,1793491208000000000,'peer',100,100000,NULL,'{"of":{"pid":50,"start_ns":50000},"state":"D","wchan":"futex_wait"}');
INSERT INTO events VALUES(16,1,8000000000,1793491208000000000,'memory',NULL,NULL,1,'{"used_bytes":1099511627776,"total_bytes":2199023255552,"processes":[{"pid":100,"bytes":null}]}');
INSERT INTO events VALUES(17,1,9000000000,1793491209000000000,'lost',NULL,NULL,NULL,'{"events":3,"at":"ring","note":"full"}');
INSERT INTO events VALUES(18,1,9000000000,1793491209000000000,'stop',NULL,NULL,NULL,NULL);
CREATE TABLE heartbeats (
    boot INTEGER NOT NULL REFERENCES boots (id),
    boot_ns INTEGER NOT NULL,
    holds INTEGER NOT NULL,
    processes INTEGER NOT NULL,
    PRIMARY KEY (boot, boot_ns)
) STRICT, WITHOUT ROWID;
INSERT INTO heartbeats VALUES(1,30000000000,1,1);
CREATE INDEX processes_living ON processes (boot) WHERE exit_ns IS NULL;
CREATE INDEX processes_parent ON processes (boot, parent_pid, parent_start_ns);
CREATE INDEX processes_noted ON processes (boot, noted_ns);
CREATE INDEX holds_released ON holds (boot, released_ns, opened_ns);
CREATE INDEX events_time ON events (boot, boot_ns);
CREATE INDEX events_process ON events (pid, start_ns, event) WHERE pid IS NOT NULL;
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
COMMIT;
