//! `events --follow`: the same story as it happens.
use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use gpureap_tests::harness::{Bench, Device, NOBODY, PATIENCE, Pid, Player, Role, Schema, World, settle, sys};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    DEV, bench, elsewhere,
    record::{dead, holds, process, report, until_held},
    shared,
};

static SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::new(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schema/event-1.json"))));

#[track_caller]
fn check(events: &[Value]) {
    for event in events {
        SCHEMA.check(event);
    }
}

/// `events --follow --json`, into a file.
struct Follower {
    child: Child,
    place: TempDir,
}

impl Follower {
    fn start(bench: &Bench) -> Self {
        Self::of(bench.command(&["events", "--follow", "--json"]))
    }

    fn of(mut command: Command) -> Self {
        let place = tempfile::tempdir().expect("a directory");
        let file = File::create(place.path().join("events")).expect("a file");
        let child = command.stdout(file).stderr(Stdio::inherit()).spawn().expect("start gpureap");
        let follower = Self { child, place };
        follower.until("it follows", |events| !events.is_empty());
        follower
    }

    fn pid(&self) -> Pid {
        self.child.id() as Pid
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("events")
    }

    /// All whole lines so far.
    fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path()).expect("the file");
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
    }

    #[track_caller]
    fn until(&self, what: &str, is: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let mut last = Vec::new();
        let outcome = settle(PATIENCE / 4, || {
            last = self.events();
            (!is(&last)).then_some(())
        });
        let end: Vec<String> = last.iter().rev().take(50).rev().map(Value::to_string).collect();
        assert!(outcome.is_ok(), "{what}, in {} events, at the end {end:#?}", last.len());
        last
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait for it").is_some()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        drop(self.child.kill().and_then(|()| self.child.wait()));
    }
}

fn of<'a>(events: &'a [Value], pid: Pid, kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["pid"] == pid && event["event"] == kind).collect()
}

#[test]
fn a_killed_process_is_told_in_order() {
    let bench = shared();
    let follower = Follower::start(&bench);
    let mut player = Player::holding(DEV);
    until_held(&bench, &[player.pid()]);
    sys::kill(player.pid(), sys::SIGKILL);
    player.end();
    let pid = player.pid();
    let events = follower.until("it is closed", |events| !of(events, pid, "closed").is_empty());
    check(&events);
    let first = |kind: &str| {
        let found = events.iter().position(|event| event["pid"] == pid && event["event"] == kind);
        found.unwrap_or_else(|| panic!("{kind} in {events:#?}"))
    };
    let order = ["open", "held", "signal", "exit", "closed"];
    let places: Vec<usize> = order.iter().map(|kind| first(kind)).collect();
    assert!(places.is_sorted(), "{order:?} at {places:?} in {events:#?}");
    let times: Vec<u64> = places.iter().map(|place| events[*place]["boot_ns"].as_u64().expect("a time")).collect();
    assert!(times.is_sorted(), "{order:?} at {times:?}");
    let signal = &events[first("signal")];
    assert_eq!((&signal["signal"], &signal["sender"]["pid"]), (&json!("SIGKILL"), &json!(sys::pid())), "{signal:#}");
    assert_eq!(events[first("held")]["devices"][0]["node"], DEV);
    assert_eq!(events[first("exit")]["status"], 9);
    assert_eq!(of(&events, pid, "process")[0]["argv"][1], "play");
    // What is read from the file afterwards is the same, without what only the moment needs.
    dead(&bench, pid, "killed-by");
    let written = bench.run(&["events", "--json"]).expect_code(0);
    let written: Vec<Value> =
        written.stdout.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
    check(&written);
    for kind in ["held", "signal", "exit", "closed"] {
        assert_eq!(of(&written, pid, kind), of(&events, pid, kind), "{kind}");
    }
}

/// What only the daemon can answer, at once.
fn status(bench: &Bench) -> Duration {
    let begun = Instant::now();
    let mut stream = UnixStream::connect(bench.path("run").join("gpureap.sock")).expect("connect");
    stream.set_read_timeout(Some(PATIENCE / 4)).expect("a time limit");
    stream.write_all(b"{\"v\":1,\"get\":\"status\"}\n").expect("ask");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("an answer");
    let answer: Value = serde_json::from_str(&line).expect("JSON");
    assert!(answer["answer"]["pid"].is_u64(), "{line}");
    begun.elapsed()
}

#[test]
fn a_reader_that_stands_still_stops_nobody() {
    if elsewhere("a slow reader") {
        return;
    }
    let bench = bench();
    let mut daemon = bench.daemon();
    let (mut slow, quick) = (Follower::start(&bench), Follower::start(&bench));
    let mut player = Player::holding(DEV);
    until_held(&bench, &[player.pid()]);
    sys::kill(slow.pid(), libc::SIGSTOP);
    let mut longest = Duration::ZERO;
    // More than the daemon keeps for a reader, and than a socket takes.
    for _ in 0..10 {
        player.ask(&format!("churn 1000 {DEV}"));
        longest = longest.max(status(&bench));
    }
    assert!(longest < PATIENCE / 20, "{longest:?}");
    let mut after = Player::holding(DEV);
    let pid = after.pid();
    after.tell("exit 0");
    after.end();
    quick.until("the other one has all", |events| !of(events, pid, "closed").is_empty());
    dead(&bench, pid, "exited");
    sys::kill(slow.pid(), libc::SIGCONT);
    let lost = |events: &[Value]| events.iter().any(|event| event["event"] == "lost" && event["at"] == "reader");
    let mut last = Vec::new();
    let outcome = settle(PATIENCE / 4, || {
        let ended = slow.has_ended();
        last = slow.events();
        // It is told how many it has missed, or was hung up on.
        (!ended && !lost(&last)).then_some(())
    });
    assert!(outcome.is_ok(), "{} events and no word on what is missing", last.len());
    check(&last);
    assert!(daemon.runs(), "{}", daemon.log());
}

#[test]
fn an_ordinary_user_sees_no_environment_of_others() {
    if elsewhere("events of others") {
        return;
    }
    let bench = shared();
    let Some(world) = bench.user("events of others") else { return };
    let environment = [("RANK", "7"), ("SLURM_JOB_ID", "4711")];
    let start = |user: Option<u32>| {
        let mut player = Player::with(&Role { environment: &environment, user, ..Role::default() });
        player.ask(&format!("open {DEV}"));
        player
    };
    // Known before anybody follows, and after.
    let before = [start(None), start(Some(NOBODY))];
    until_held(&bench, &[before[0].pid(), before[1].pid()]);
    let root = Follower::start(&bench);
    let user = Follower::of(world.enter(bench.command(&["events", "--follow", "--json"])));
    let after = [start(None), start(Some(NOBODY))];
    let all: Vec<Pid> = before.iter().chain(&after).map(Player::pid).collect();
    let known = |events: &[Value]| all.iter().all(|pid| !of(events, *pid, "process").is_empty());
    let (by_root, by_user) = (root.until("root knows all", known), user.until("the user knows all", known));
    check(&by_user);
    for (position, pid) in all.iter().enumerate() {
        for told in of(&by_root, *pid, "process") {
            assert_eq!(told["env"], json!({"RANK": "7", "SLURM_JOB_ID": "4711"}), "{told:#}");
        }
        for told in of(&by_user, *pid, "process") {
            let is_own = position % 2 == 1;
            assert_eq!(told["env"] == json!({"RANK": "7", "SLURM_JOB_ID": "4711"}), is_own, "{told:#}");
            assert_eq!(told["env"].is_null(), !is_own, "{told:#}");
        }
    }
    // Who is not allowed to read the journal is told so.
    let mut journal = bench.command(&["report", "--json"]);
    journal.stdout(Stdio::null()).stderr(Stdio::null());
    let status = World::default().as_user(NOBODY).enter(journal).status().expect("start gpureap");
    assert_eq!(status.code(), Some(7), "the journal is root's");
}

#[test]
fn a_recording_gives_the_same_report_as_the_journal() {
    if elsewhere("a recording") {
        return;
    }
    let bench = shared();
    // One holds already when the recording begins.
    let mut early = Player::holding(DEV);
    early.ask("thread pt_autograd_0");
    until_held(&bench, &[early.pid()]);
    let follower = Follower::start(&bench);
    let environment = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29503")];
    let mut late = Player::with(&Role { environment: &environment, ..Role::default() });
    late.ask(&format!("open {DEV}"));
    late.ask("thread worker");
    let worker = late.ask("fork pt_data_worker");
    until_held(&bench, &[late.pid(), worker]);
    late.tell("raise worker 6");
    late.end();
    sys::kill(early.pid(), sys::SIGKILL);
    early.end();
    let pids = [early.pid(), late.pid(), worker];
    let stays = Player::holding(DEV);
    until_held(&bench, &[stays.pid()]);
    drop(late);
    for pid in pids {
        dead(&bench, pid, if pid == pids[1] { "fault" } else { "killed-by" });
    }
    follower.until("all is told", |events| pids.iter().all(|pid| !of(events, *pid, "closed").is_empty()));
    let path = follower.path();
    let replayed = report(&bench, &["--journal", path.to_str().expect("a path")]);
    let journal = report(&bench, &[]);
    for pid in pids.iter().chain([&stays.pid()]) {
        assert_eq!(holds(&replayed, *pid), holds(&journal, *pid), "holds of {pid}");
        let (told, kept) = (process(&replayed, *pid), process(&journal, *pid));
        let (told, kept) = (told.expect("in the recording"), kept.expect("in the journal"));
        for field in told.as_object().expect("an object").keys().filter(|field| *field != "incident") {
            assert_eq!(told[field], kept[field], "{field} of {pid}");
        }
    }
}

#[test]
fn without_a_daemon_there_is_nothing_to_follow() {
    let bench = Bench::new(&[Device::full()]);
    let output = bench.run(&["events", "--follow"]).expect_code(8);
    let socket = bench.path("run/gpureap.sock");
    let expected =
        format!("gpureap: no daemon listens on {}: No such file or directory (os error 2)", socket.display());
    assert_eq!(output.complaint(), expected);
}
