mod damage;
mod export;
mod killed;
mod page;
mod place;
mod queue;
mod reading;
mod retention;
mod writing;

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rusqlite::Connection;
use tempfile::TempDir;

use super::{FILE, Question, Writer, read};
use crate::{
    history::{
        event::{
            Device, Ended, Event, Exit, FileEvent, Fork, Held, HeldDevice, Lost, Memory, Named, Oom, OomScope, Peer,
            Process, ProcessMemory, Reap, Relative, Sender, Signal, Start, Subject, ThreadEvent, What, Xid,
        },
        rows::{
            Boot, Cause, Change, Death, HoldEnd, HoldOrigin, HoldRow, Key, OomDeath, Place, ProcessRow, Record, Run,
            Thread,
        },
    },
    holders::report::Role,
    model::{Backend, DeviceKind},
};

pub(super) const SECOND: u64 = 1_000_000_000;
/// Boottime 0 of the sample boots is this wall-clock time.
pub(super) const BOOTED: &str = "2026-11-01T00:00:00Z";
pub(super) const GPU0: &str = "/dev/nvidia0";
pub(super) const GPU1: &str = "/dev/nvidia1";

pub(super) struct Scene {
    dir: TempDir,
}

impl Scene {
    pub(super) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    /// For many rounds: where a sync costs nothing.
    pub(super) fn in_memory() -> Self {
        Self { dir: tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap() }
    }
    pub(super) fn path(&self) -> PathBuf {
        self.dir.path().join(FILE)
    }
    pub(super) fn open(&self, boot: &str) -> Writer {
        let opened = Writer::open(&self.path(), boot).unwrap();
        assert_eq!(opened.loss, None);
        opened.writer
    }
    pub(super) fn all(&self) -> Vec<Record> {
        read(&self.path(), &Question::default()).unwrap()
    }
    pub(super) fn raw(&self) -> Connection {
        Connection::open(self.path()).unwrap()
    }
    pub(super) fn files(&self) -> Vec<String> {
        files(self.dir.path())
    }
}

pub(super) fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(super) fn wall(boot_ns: u64) -> Timestamp {
    BOOTED.parse::<Timestamp>().unwrap() + jiff::SignedDuration::from_nanos(boot_ns as i64)
}

pub(super) fn offset() -> i64 {
    BOOTED.parse::<Timestamp>().unwrap().as_nanosecond() as i64
}

pub(super) fn boot(id: &str) -> Boot {
    Boot { boot_id: id.into(), host: "n1".into(), kernel: "6.8.0".into(), wall_offset_ns: offset(), last_ns: 0 }
}

pub(super) fn run(begin_ns: u64) -> Run {
    let (version, backend) = ("0.1.0".to_owned(), "kprobe".to_owned());
    Run { version, pid: 700, backend, adopted: false, begin_ns, end_ns: None }
}

pub(super) fn device(node: &str, minor: u32) -> Device {
    Device {
        node: node.into(),
        major: 195,
        minor: Some(minor),
        kind: DeviceKind::Gpu,
        gpu: Some(minor),
        index: None,
        uuid: Some(format!("GPU-{minor}")),
        bdf: Some(format!("0000:0{minor}:00.0")),
        model: Some("H200".into()),
    }
}

pub(super) fn start(id: &str, begin_ns: u64) -> Change {
    Change::Start { boot: boot(id), run: run(begin_ns), devices: vec![device(GPU0, 0), device(GPU1, 1)] }
}

pub(super) fn key(pid: u32) -> Key {
    Key { pid, start_ns: u64::from(pid) * 1000 }
}

pub(super) fn process(pid: u32, parent: Option<u32>) -> ProcessRow {
    ProcessRow { key: key(pid), comm: format!("p{pid}"), parent: parent.map(key), ..ProcessRow::default() }
}

pub(super) fn hold(pid: u32, node: &str, opened_ns: u64, released_ns: Option<u64>) -> HoldRow {
    HoldRow {
        key: key(pid),
        node: node.into(),
        opened_ns,
        released_ns,
        ended: released_ns.map(|_| HoldEnd::Closed),
        origin: HoldOrigin::Opened,
        fds: 1,
        maps: 0,
        role: None,
        inherited_from: None,
    }
}

pub(super) fn process_change(row: ProcessRow) -> Change {
    Change::Process(Box::new(row))
}

pub(super) fn event(boot_ns: u64, what: What) -> Event {
    Event { time: wall(boot_ns), boot_ns, what }
}

pub(super) fn lost(boot_ns: u64, events: u64, note: &str) -> Event {
    event(boot_ns, What::Lost(Lost { events, at: "test".into(), note: note.into() }))
}

pub(super) fn sender() -> Sender {
    Sender {
        key: key(900),
        tid: 901,
        thread: "main".into(),
        comm: "pkill".into(),
        argv: vec!["pkill".into(), "-9".into(), "py\"th\u{e9}".into()],
        uid: 0,
        gpureap: false,
        lineage: vec![Relative { key: key(899), comm: "bash".into(), argv: vec!["-bash".into()] }],
    }
}

/// With everything that a row can have.
pub(super) fn full_process() -> ProcessRow {
    let text = |text: &str| Some(text.to_owned());
    ProcessRow {
        key: key(100),
        comm: "python3".into(),
        argv: vec!["python3".into(), String::new(), "train.py".into()],
        argv_cut: true,
        exe: text("/usr/bin/python3.11"),
        uid: Some(1000),
        user: text("eve"),
        class: text("job"),
        nspids: vec![100, 7],
        place: Place {
            cgroup: text("/a"),
            unit: text("b.service"),
            container: text("c0ffee"),
            container_name: text("d"),
            image: text("e:latest"),
            slurm_job: text("4711"),
            slurm_step: text("0"),
            pod: text("f"),
            pod_name: text("g"),
            pod_namespace: text("h"),
        },
        env: [("RANK".to_owned(), "3".to_owned()), ("WORLD_SIZE".to_owned(), String::new())].into(),
        threads: vec![
            Thread { tid: 100, name: "python3".into() },
            Thread { tid: 101, name: "pt_nccl_watchdg".into() },
            Thread { tid: 101, name: "renamed".into() },
        ],
        parent: Some(key(50)),
        ancestor: false,
        exit_ns: Some(9 * SECOND),
        status: Some(9),
        death: Some(Death {
            cause: Cause::OomKill,
            code: Some(0),
            signal: text("SIGKILL"),
            core: true,
            boot_ns: Some(8 * SECOND),
            sender: Some(sender()),
            thread: Some(Thread { tid: 101, name: "t".into() }),
            oom: Some(OomDeath { scope: Some(OomScope::Cgroup), cgroup: text("/a") }),
            evidence: vec!["it was chosen".into(), "\u{1f480}".into()],
        }),
    }
}

/// One of each kind, in a time order of their own.
pub(super) fn events() -> Vec<Event> {
    let key = key(100);
    let node = GPU0.to_owned();
    let file = |key, failed| FileEvent {
        key,
        tid: Some(101),
        comm: "python3".into(),
        node: GPU0.into(),
        file: 0xffff_8881_0000_1234,
        failed,
    };
    let kinds = vec![
        What::Start(Start {
            boot_id: "b1".into(),
            host: "n1".into(),
            kernel: "6.8.0".into(),
            version: "0.1.0".into(),
            backend: Backend::Gate,
            adopted: true,
            daemon_pid: 700,
            wall_offset_ns: offset(),
            devices: vec![device(GPU0, 0)],
        }),
        What::Open(file(Some(key), false)),
        What::Free(file(None, true)),
        What::Held(Held {
            key,
            inherited_from: Some(self::key(50)),
            from_snapshot: true,
            devices: vec![HeldDevice {
                node: node.clone(),
                fds: 2,
                maps: 1,
                role: Some(Role::Attached),
                first_ns: Some(7),
            }],
        }),
        What::Fork(Fork { key, parent: self::key(50), comm: "bash".into() }),
        What::Exec(Named { key, comm: "python3".into() }),
        What::Thread(ThreadEvent { key, thread: Thread { tid: 102, name: "t".into() } }),
        What::Process(Box::new(Process {
            key,
            comm: "python3".into(),
            place: Place { slurm_job: Some("4711".into()), ..Place::default() },
            exit: Some(Ended { boot_ns: 3, status: 256 }),
            ..Process::default()
        })),
        What::Signal(Signal {
            key,
            tid: 101,
            thread: "t".into(),
            signal: "SIGKILL".into(),
            code: Some(-6),
            sender: Some(Box::new(sender())),
            running: Some(Box::new(sender())),
        }),
        What::Oom(Oom {
            key: None,
            tid: 101,
            comm: "python3".into(),
            scope: Some(OomScope::Global),
            cgroup: None,
            source: "kmsg".into(),
        }),
        What::Xid(Xid {
            bdf: "0000:00:00.0".into(),
            node: Some(node.clone()),
            xid: 31,
            pid: Some(100),
            name: Some("python3".into()),
            message: "MMU Fault".into(),
            source: "kmsg".into(),
        }),
        What::Reap(Reap {
            key,
            signal: Some("SIGTERM".into()),
            unit: None,
            cgroup: Some("/a".into()),
            by_pid: 1,
            by_uid: 0,
        }),
        What::Exit(Exit { key, tid: 101, comm: "python3".into(), status: 9 }),
        What::Closed(Subject { key }),
        What::Peer(Peer { key, of: self::key(50), state: 'D', wchan: Some("futex_wait".into()) }),
        What::Memory(Memory {
            node,
            used_bytes: 1 << 40,
            total_bytes: 1 << 41,
            processes: vec![ProcessMemory { pid: 100, bytes: None }],
        }),
        What::Lost(Lost { events: 3, at: "ring".into(), note: "full".into() }),
        What::Stop,
    ];
    kinds.into_iter().enumerate().map(|(at, what)| event(SECOND * (1 + at as u64 / 2), what)).collect()
}

/// Different numbers for every seed, and the same for one.
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub(super) const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
