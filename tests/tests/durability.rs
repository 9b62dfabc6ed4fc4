//! The record outlives what kills the daemon, and a disk that is broken, full or stuck stops neither tracing nor reaping.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read as _, Write as _},
    os::unix::{fs::symlink, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gpureap_common::counter;
use gpureap_tests::harness::{
    Bench, Daemon, Device, Holder, PATIENCE, Scene, Wanted, note, settle, skip, sys, wait_for,
};
use rusqlite::{Connection, OpenFlags};
use rustix::mount::{MountFlags, mount, mount_remount};
use serde_json::Value;

/// Opened by next to nobody, so that every holder of it may be killed.
const DEV: &str = "/dev/full";
/// For a daemon that is asked a small thing. It takes a millisecond; a machine may have much else to do.
const AT_ONCE: Duration = Duration::from_secs(2);

/// `None`, loudly, where somebody else holds the device.
fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    bench.is_free(test).then_some(bench)
}

fn journal(bench: &Bench) -> PathBuf {
    bench.path("state/journal.db")
}

/// As anybody reads it beside the daemon.
fn database(bench: &Bench) -> Connection {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(journal(bench), flags).expect("open the journal");
    connection.busy_timeout(PATIENCE).expect("a patience");
    connection
}

fn number(connection: &Connection, query: &str) -> i64 {
    connection.query_row(query, [], |row| row.get(0)).unwrap_or_else(|error| panic!("{query}: {error}"))
}

/// The pids that the journal has as holding now; none where it cannot be read.
fn open_holds(bench: &Bench) -> BTreeSet<i64> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let read = || -> rusqlite::Result<BTreeSet<i64>> {
        Connection::open_with_flags(journal(bench), flags)?
            .prepare("SELECT pid FROM holds JOIN processes ON processes.id = process WHERE released_ns IS NULL")?
            .query_map([], |row| row.get(0))?
            .collect()
    };
    read().unwrap_or_default()
}

fn reap_now(bench: &Bench) -> Value {
    bench.run(&["reap", "--now", "--yes", "--json"]).expect_code(0).json()
}

/// Traced from the map and right, and reaped; the report.
fn holders_are_seen_and_reaped(bench: &Bench, case: &str) -> Value {
    note(case);
    let scene = Scene::start("plain", DEV, &[]);
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map", "{case}");
    let report = reap_now(bench);
    assert_eq!(report["outcome"], "freed", "{case}: {report:#}");
    assert!(bench.holders(&[]).holder(scene.pid()).is_none(), "{case}");
    report
}

/// A file system of its own for the state, for as long as this lives.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(bench: &Bench, options: &str) -> Self {
        let place = bench.path("state");
        let data = std::ffi::CString::new(options).expect("options");
        mount("tmpfs", &place, "tmpfs", MountFlags::empty(), Some(data.as_c_str())).expect("mount a tmpfs");
        Self(place)
    }

    /// On a loop device, as only a file system with a device can be frozen.
    fn ext4(test: &str, bench: &Bench) -> Option<Self> {
        let (image, place) = (bench.path("disk"), bench.path("state"));
        let run = |name: &str, arguments: &[&str]| {
            let status = Command::new(name).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("an image");
        let (image, target) = (image.display().to_string(), place.display().to_string());
        let is = run("fsfreeze", &["--help"])
            && run("mkfs.ext4", &["-q", "-F", &image])
            && run("mount", &["-o", "loop", &image, &target]);
        if !is {
            skip(test, "no loop device with an ext4 that fsfreeze(8) could freeze");
            return None;
        }
        Some(Self(place))
    }

    fn freeze(&self) -> Frozen<'_> {
        assert!(Command::new("fsfreeze").arg("-f").arg(&self.0).status().expect("fsfreeze").success());
        Frozen(&self.0)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH) {
            note(&format!("unmount {}: {error}", self.0.display()));
        }
    }
}

/// Who writes there waits, and cannot be killed, until this is dropped.
struct Frozen<'a>(&'a Path);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        note(&format!("thaw: {:?}", Command::new("fsfreeze").arg("-u").arg(self.0).status()));
    }
}

/// How long the daemon takes to say how it is.
fn answer_time(bench: &Bench) -> Duration {
    let begun = Instant::now();
    let mut stream = UnixStream::connect(bench.path("run/gpureap.sock")).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    stream.write_all(b"{\"v\":1,\"get\":\"status\"}\n").expect("ask");
    let mut byte = [0; 4096];
    assert!(stream.read(&mut byte).expect("an answer") > 0);
    begun.elapsed()
}

fn ring_full(bench: &Bench) -> u64 {
    bench.counter(counter::RING_FULL)
}

/// The actor's churn without a pause.
struct Churn(Child);

impl Churn {
    fn start(bench: &Bench, seed: u64) -> Self {
        let mut command = bench.actor_command(&["hold", "churn", DEV, &seed.to_string(), "100000"]);
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("start the actor"))
    }

    /// Its whole session.
    fn kill(&self) {
        sys::kill_group(self.0.id() as i32);
    }
}

impl Drop for Churn {
    fn drop(&mut self) {
        self.kill();
        drop(self.0.kill().and_then(|()| self.0.wait()));
    }
}

/// What the journal has acknowledged, as another process read it.
#[derive(Default)]
struct Read {
    /// By id, with everything that they say.
    events: BTreeMap<i64, String>,
    /// Process, device and time of opening; of release.
    holds: BTreeMap<(i64, i64, i64), Option<i64>>,
    /// Those whose end is known.
    exits: BTreeMap<i64, i64>,
}

impl Read {
    fn of(connection: &Connection, after: i64) -> rusqlite::Result<Self> {
        // One state for all questions.
        connection.execute_batch("BEGIN")?;
        let events = connection
            .prepare(
                "SELECT id, boot_ns || event || coalesce(pid, '') || coalesce(data, '') FROM events WHERE id > ?1",
            )?
            .query_map([after], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<rusqlite::Result<_>>()?;
        let holds = connection
            .prepare("SELECT process, device, opened_ns, released_ns FROM holds")?
            .query_map([], |row| Ok(((row.get(0)?, row.get(1)?, row.get(2)?), row.get(3)?)))?
            .collect::<rusqlite::Result<_>>()?;
        let exits = connection
            .prepare("SELECT id, exit_ns FROM processes WHERE exit_ns IS NOT NULL")?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<rusqlite::Result<_>>()?;
        connection.execute_batch("COMMIT")?;
        Ok(Self { events, holds, exits })
    }

    /// Everything of it is in what is there now.
    fn is_within(&self, later: &Self) {
        for (id, event) in &self.events {
            assert_eq!(later.events.get(id), Some(event), "event {id}");
        }
        for (hold, released) in &self.holds {
            let now = later.holds.get(hold).unwrap_or_else(|| panic!("hold {hold:?} is lost"));
            assert!(released.is_none() || now == released, "{hold:?} ended at {released:?} and now at {now:?}");
        }
        for (process, exit) in &self.exits {
            assert_eq!(later.exits.get(process), Some(exit), "the end of process {process}");
        }
    }
}

/// No row refers to one that is not there, and what is JSON can be read.
fn no_half_record(connection: &Connection) {
    let verdict: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("a verdict");
    assert_eq!(verdict, "ok");
    let dangling = connection.prepare("PRAGMA foreign_key_check").expect("a check").exists([]).expect("a verdict");
    assert!(!dangling, "a record without what it is of");
    for query in [
        "SELECT count(*) FROM events WHERE data IS NOT NULL AND NOT json_valid(data)",
        "SELECT count(*) FROM processes WHERE death IS NOT NULL AND NOT json_valid(death)",
        "SELECT count(*) FROM holds WHERE (released_ns IS NULL) != (ended IS NULL)",
    ] {
        assert_eq!(number(connection, query), 0, "{query}");
    }
}

/// All processes are killed at any moment: 200 rounds with `GPUREAP_TEST_ROUNDS=200`.
#[test]
fn what_was_recorded_survives_a_kill_of_everything() {
    let Some(bench) = bench("kill of everything") else { return };
    let rounds: u64 = std::env::var("GPUREAP_TEST_ROUNDS").map_or(60, |text| text.parse().expect("a number"));
    let mut daemon = bench.daemon();
    let (mut events, mut held, mut after) = (0, 0, 0);
    for round in 0..rounds {
        let churn = Churn::start(&bench, round);
        let connection = database(&bench);
        wait_for("something is recorded", || {
            number(&connection, "SELECT count(*) FROM holds") > held && !open_holds(&bench).is_empty()
        });
        // At another moment in each round; nothing depends on it.
        std::thread::sleep(Duration::from_millis(round * 37 % 180));
        let before = Read::of(&connection, after).expect("what is recorded");
        if round % 2 == 0 {
            churn.kill();
            daemon.kill();
        } else {
            daemon.kill();
            churn.kill();
        }
        drop((connection, churn));
        let connection = database(&bench);
        no_half_record(&connection);
        let later = Read::of(&connection, after).expect("what is recorded");
        before.is_within(&later);
        events += before.events.len();
        held = later.holds.len() as i64;
        after = later.events.keys().last().copied().unwrap_or(after);
        drop(connection);
        daemon.start_again();
    }
    note(&format!("{rounds} rounds, {events} events, {held} holds"));
    assert!(events > 0 && held > 0);
    assert!(!daemon.log().contains("damaged"), "{}", daemon.log());
}

#[test]
fn what_was_held_when_the_power_went_is_said_at_the_next_boot() {
    let Some(bench) = bench("power") else { return };
    let mut daemon = bench.daemon();
    let scene = Scene::start("plain", DEV, &[]);
    let pid = i64::from(scene.pid());
    wait_for("it is recorded", || open_holds(&bench).contains(&pid));
    daemon.kill();
    drop(scene);
    database(&bench).execute("UPDATE boots SET boot_id = '00000000-1111'", []).expect("another boot");
    let ended = |bench: &Bench| {
        let report = bench.run(&["report", "--json", "--boot", "00000000-1111"]).expect_code(0).json();
        let text = report.to_string();
        assert!(text.contains(&format!("\"pid\":{pid}")), "{report:#}");
        assert!(text.contains("host-down"), "{report:#}");
    };
    ended(&bench);
    daemon.start_again();
    wait_for("it is closed", || open_holds(&bench).is_empty());
    ended(&bench);
    let connection = database(&bench);
    let query = format!(
        "SELECT count(*) FROM holds JOIN processes ON processes.id = process WHERE pid = {pid} AND ended = 'host-down'
         AND cause = 'host-down'"
    );
    assert_eq!(number(&connection, &query), 1);
}

/// What is done to the file, and what the daemon says then.
type Damage = (&'static str, fn(&Path), &'static str);

const DAMAGES: [Damage; 7] = [
    ("bits that flip in the first page", |path| flip(path, 20..90), "it was moved to"),
    ("bits that flip in the middle", |path| flip(path, 4096 * 3..4096 * 8), "it was moved to"),
    ("half of the file", |path| truncate(path, 2), "it was moved to"),
    ("something else", |path| fs::write(path, "not a journal".repeat(1000)).expect("write"), "it was moved to"),
    (
        "a directory",
        |path| {
            fs::remove_file(path).expect("remove");
            fs::create_dir(path).expect("a directory");
        },
        "is not a plain file",
    ),
    (
        "a symbolic link",
        |path| {
            let to = path.with_file_name("elsewhere");
            fs::rename(path, &to).expect("rename");
            symlink(to, path).expect("a link");
        },
        "is not a plain file",
    ),
    (
        "the file of another user",
        |path| std::os::unix::fs::chown(path, Some(12345), None).expect("chown"),
        "belongs to user 12345",
    ),
];

fn flip(path: &Path, range: std::ops::Range<usize>) {
    let mut bytes = fs::read(path).expect("read");
    let end = range.end.min(bytes.len());
    for byte in bytes[range.start..end].iter_mut().step_by(7) {
        *byte ^= 0x55;
    }
    fs::write(path, bytes).expect("write");
}

fn truncate(path: &Path, part: u64) {
    let file = fs::File::options().write(true).open(path).expect("open");
    let size = file.metadata().expect("its size").len();
    file.set_len(size / part + 100).expect("truncate");
}

#[test]
fn a_damaged_journal_stops_nothing_and_is_said() {
    let Some(bench) = bench("damage") else { return };
    let mut daemon = bench.daemon();
    for (case, damage, said) in DAMAGES {
        let scene = Scene::start("plain", DEV, &[]);
        wait_for("it is recorded", || open_holds(&bench).contains(&i64::from(scene.pid())));
        drop(scene);
        daemon.kill();
        // All of it into the file, so that the damage is not healed from the log.
        database(&bench).query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("a checkpoint");
        damage(&journal(&bench));
        let log = daemon.log().len();
        daemon.start_again();
        holders_are_seen_and_reaped(&bench, case);
        wait_for(case, || daemon.log()[log..].contains(said));
        if said == "it was moved to" {
            wait_for("the new journal has it", || {
                number(&database(&bench), "SELECT count(*) FROM events WHERE event = 'lost'") > 0
            });
        }
        daemon.kill();
        fs::remove_dir_all(bench.path("state")).expect("remove the state");
        fs::create_dir(bench.path("state")).expect("a directory");
        daemon.start_again();
    }
}

#[test]
fn a_full_or_read_only_disk_stops_nothing_and_is_said() {
    let Some(bench) = bench("full disk") else { return };
    let disk = Mounted::tmpfs(&bench, "size=16m,mode=0755");
    let fill = || {
        let path = bench.path("state/filler");
        let mut file = fs::File::options().create(true).append(true).open(path).expect("a file");
        while file.write_all(&[1; 4096]).is_ok() {}
    };
    fill();
    let mut daemon = bench.daemon();
    let report = holders_are_seen_and_reaped(&bench, "full at the start");
    assert!(report["notes"].to_string().contains("signals are not recorded"), "{report:#}");
    wait_for("it is said", || daemon.log().contains("nothing is recorded for now"));
    fs::remove_file(bench.path("state/filler")).expect("remove");
    let scene = Scene::start("plain", DEV, &[]);
    wait_for("it is recorded", || open_holds(&bench) == BTreeSet::from([i64::from(scene.pid())]));

    let query = "SELECT total(data ->> '$.events') FROM events WHERE event = 'lost' AND data ->> '$.at' = 'journal'";
    let lost = || database(&bench).query_row(query, [], |row| row.get::<_, f64>(0)).expect("a number");
    let before = lost();

    // In mid-run, again and again, as SQLite's log gives some back when the file is opened anew.
    let log = daemon.log().len();
    let churn = Churn::start(&bench, 3);
    wait_for("it is said", || {
        fill();
        daemon.log()[log..].contains("the journal cannot be written")
    });
    // A batch is given up after some attempts; nothing outside says when.
    let mut time = Duration::from_secs(6);
    wait_for("the loss is recorded", || {
        let until = Instant::now() + time;
        while Instant::now() < until {
            fill();
            std::thread::sleep(Duration::from_millis(50));
        }
        time *= 2;
        fs::remove_file(bench.path("state/filler")).expect("remove");
        settle(PATIENCE / 4, || (lost() <= before).then_some(())).is_ok()
    });
    drop(churn);
    wait_for("what is held is right again", || open_holds(&bench) == BTreeSet::from([i64::from(scene.pid())]));
    drop(scene);

    daemon.kill();
    mount_remount(&disk.0, MountFlags::RDONLY, c"").expect("remount");
    let log = daemon.log().len();
    daemon.start_again();
    let report = holders_are_seen_and_reaped(&bench, "read-only");
    wait_for("it is said", || daemon.log()[log..].contains("nothing is recorded for now"));
    assert!(report["notes"].to_string().contains("Read-only file system"), "{report:#}");
    mount_remount(&disk.0, MountFlags::empty(), c"").expect("remount");
    let scene = Scene::start("plain", DEV, &[]);
    wait_for("it is recorded again", || open_holds(&bench) == BTreeSet::from([i64::from(scene.pid())]));
    drop(daemon);
}

/// Churns beside a journal that cannot be written; the ring is emptied, the daemon answers and gpureap reaps.
fn churn_beside(bench: &Bench, time: Duration) {
    let full = ring_full(bench);
    let mut churn = Command::new("sh").args(["-c", &short_holders(u32::MAX)]).spawn().expect("a shell");
    let begun = Instant::now();
    let mut longest = Duration::ZERO;
    while begun.elapsed() < time {
        longest = longest.max(answer_time(bench));
        std::thread::sleep(Duration::from_millis(20));
    }
    note(&format!("the longest answer took {longest:?}"));
    assert!(longest < AT_ONCE, "{longest:?}");
    assert_eq!(ring_full(bench), full, "nothing found the ring full");
    churn.kill().and_then(|()| churn.wait()).expect("end the shell");
}

#[test]
fn a_lock_on_the_journal_stops_nothing_and_the_gap_is_said() {
    let Some(bench) = bench("lock") else { return };
    let daemon = bench.daemon();
    let early = Holder::with(&Wanted { device: DEV, ..Wanted::default() });
    let stays = Scene::start("plain", DEV, &[]);
    let (early_pid, pid) = (i64::from(early.pid()), i64::from(stays.pid()));
    wait_for("both are recorded", || open_holds(&bench) == BTreeSet::from([early_pid, pid]));
    let connection = database(&bench);
    connection.execute_batch("BEGIN EXCLUSIVE").expect("a lock");
    drop(early);
    churn_beside(&bench, Duration::from_secs(12));
    wait_for("it is said", || daemon.log().contains("is locked by another process"));
    connection.execute_batch("COMMIT").expect("unlock");
    wait_for("the loss is recorded", || {
        let query =
            "SELECT total(data ->> '$.events') FROM events WHERE event = 'lost' AND data ->> '$.at' = 'journal'";
        connection.query_row(query, [], |row| row.get::<_, f64>(0)).expect("a number") > 0.0
    });
    // What ended meanwhile is not held for ever.
    wait_for("what is held is right again", || open_holds(&bench) == BTreeSet::from([pid]));
    no_half_record(&connection);
}

#[test]
fn a_disk_that_hangs_stops_neither_the_daemon_nor_a_reap() {
    let Some(bench) = bench("frozen disk") else { return };
    let Some(disk) = Mounted::ext4("frozen disk", &bench) else { return };
    // It ends before the disk goes, and after it has thawed.
    let mut daemon = {
        let frozen = disk.freeze();
        let daemon = Daemon::start(&bench);
        assert!(daemon.log().contains("its disk does not answer"), "{}", daemon.log());
        let report = holders_are_seen_and_reaped(&bench, "frozen at the start");
        assert!(report["notes"].to_string().contains("the disk did not answer"), "{report:#}");
        drop(frozen);
        daemon
    };
    let stays = Scene::start("plain", DEV, &[]);
    let pid = i64::from(stays.pid());
    wait_for("it is recorded", || open_holds(&bench) == BTreeSet::from([pid]));
    wait_for("it is said", || daemon.log().contains("the journal can be written"));
    {
        let _frozen = disk.freeze();
        churn_beside(&bench, Duration::from_secs(5));
        let begun = Instant::now();
        let other = Holder::with(&Wanted { device: DEV, ..Wanted::default() });
        let pid = other.pid().to_string();
        let report = bench.run(&["reap", "--now", "--yes", "--json", "--pid", &pid]);
        note(&format!("the reap took {:?}", begun.elapsed()));
        assert!(report.json()["notes"].to_string().contains("the disk did not answer"), "{report:#?}");
    }
    wait_for("what is held is right again", || open_holds(&bench) == BTreeSet::from([pid]));
    no_half_record(&database(&bench));
    assert!(daemon.stop().success());
    drop(daemon);
}

/// In KiB.
fn resident(daemon: &Daemon<&Bench>) -> i64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// A script whose processes hold for a moment, every twentieth for long enough to be looked at.
fn short_holders(count: u32) -> String {
    format!(
        "i=0; while [ $i -lt {count} ]; do i=$((i+1)); \
         if [ $((i % 20)) = 0 ]; then (exec 9<>{DEV}; exec sleep 0.1) & else (exec 9<>{DEV}); fi; done; wait"
    )
}

#[test]
fn the_daemons_memory_does_not_grow_with_what_happens() {
    let bench = Bench::new(&[Device::full()]);
    let daemon = bench.daemon();
    let idle = resident(&daemon);
    let hold = |count| {
        let status = Command::new("sh").args(["-c", &short_holders(count)]).status();
        assert!(status.expect("a shell").success());
    };
    hold(2000);
    wait_for("the queue is empty", || open_holds(&bench).is_empty());
    let before = resident(&daemon);
    hold(5000);
    wait_for("the queue is empty", || open_holds(&bench).is_empty());
    let after = resident(&daemon);
    note(&format!("idle {idle} KiB, after 2,000 holders {before} KiB, after 7,000 {after} KiB"));
    // A kibibyte kept for each would be 5 MiB; the rest is how an allocator keeps pages.
    assert!(after - before < 4096, "from {before} to {after} KiB");
    assert_eq!(ring_full(&bench), 0);
}
