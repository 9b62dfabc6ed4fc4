//! What the record says of the time when nobody wrote it.
use std::fs;

use gpureap_tests::harness::{Bench, Daemon, Pid, Player, sys, wait_for};
use rusqlite::Connection;
use serde_json::{Value, json};

use crate::{
    DEV, bench, elsewhere,
    record::{dead, hold, holds, incident, lineage, list, member, process, report, until, until_held},
};

const OLD: &str = "00000000-1111-2222-3333-444444444444";

fn journal(bench: &Bench) -> Connection {
    Connection::open(bench.path("state").join("journal.db")).expect("the journal")
}

/// As the kernel counts, which no clock moves.
fn opened_ns(bench: &Bench, pid: Pid) -> Vec<i64> {
    let journal = journal(bench);
    let mut statement = journal
        .prepare("SELECT opened_ns FROM holds JOIN processes ON processes.id = holds.process WHERE pid = ?1")
        .expect("a question");
    let rows = statement.query_map([pid], |row| row.get(0)).expect("an answer");
    rows.collect::<Result<_, _>>().expect("numbers")
}

/// Turns what was recorded so far into the record of a boot that ended a minute before this one began.
fn make_it_another_boot(bench: &Bench) {
    let journal = journal(bench);
    let shift: i64 = journal.query_row("SELECT last_ns FROM boots", [], |row| row.get(0)).expect("one boot");
    let shift = shift + 60_000_000_000;
    let changes = [
        "UPDATE boots SET boot_id = ?2, wall_offset_ns = wall_offset_ns - ?1",
        "UPDATE events SET time_ns = time_ns - ?1, data = CASE event WHEN 'start' THEN json_set(data, '$.boot_id', ?2, \
         '$.wall_offset_ns', data ->> '$.wall_offset_ns' - ?1) ELSE data END",
    ];
    for change in changes {
        journal.execute(change, (shift, OLD)).expect(change);
    }
}

#[test]
fn p8_the_host_lost_power() {
    if elsewhere("P8") {
        return;
    }
    let bench = bench();
    let config = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&format!("[journal]\nheartbeat = \"1s\"\n\n{config}"));
    let mut daemon = bench.daemon();
    let (mut ended, held) = (Player::holding(DEV), [Player::holding(DEV), Player::holding(DEV)]);
    let pids = [held[0].pid(), held[1].pid()];
    until_held(&bench, &[ended.pid(), pids[0], pids[1]]);
    ended.tell("exit 0");
    ended.end();
    dead(&bench, ended.pid(), "exited");
    // Nothing happens any more, and yet there are signs of life.
    let last = |report: &Value| list(report, "hosts")[0]["last"].as_str().expect("a time").to_owned();
    let before = report(&bench, &[]);
    let alive = until(&bench, &[], "a sign of life", |report| last(report) > last(&before));

    daemon.kill();
    drop(held);
    fs::remove_dir_all(bench.pins()).expect("pins do not outlive the kernel");
    make_it_another_boot(&bench);
    daemon.start_again();

    let found = report(&bench, &["--boot", "-1"]);
    let [host] = list(&found, "hosts") else { panic!("one boot in {found:#}") };
    assert_eq!((&host["boot_id"], &host["state"]), (&json!(OLD), &json!("down")), "{host:#}");
    let begun = || bench.run(&["report", "--json", "--boot", "0"]).code == 0;
    wait_for("the new boot is in the journal", begun);
    let now = report(&bench, &["--boot", "0"]);
    let [next] = list(&now, "hosts") else { panic!("one boot in {now:#}") };
    assert_eq!(next["state"], "running", "{next:#}");
    assert!(list(&now, "holds").iter().all(|hold| !pids.iter().any(|pid| hold["pid"] == *pid)), "{now:#}");
    for pid in pids {
        let hold = hold(&found, pid);
        assert_eq!((&hold["ended"], &hold["released"]), (&json!("host-down"), &host["last"]), "{hold:#}");
        let death = &process(&found, pid).expect("its entry")["death"];
        assert_eq!((&death["cause"], &death["time"]), (&json!("host-down"), &host["last"]), "{death:#}");
        let evidence = death["evidence"][0].as_str().expect("evidence");
        assert!(evidence.contains("the last sign of life"), "{evidence}");
    }
    assert_eq!(process(&found, ended.pid()).expect("its entry")["death"]["cause"], "exited");

    // With the boot that followed, the bound has two ends.
    let both = report(&bench, &["--since", "2000-01-01"]);
    assert_eq!(list(&both, "hosts").len(), 2, "{both:#}");
    let down = incident(&both, pids[0]);
    assert_eq!((&down["cause"], &down["began"]), (&json!("host-down"), &host["last"]), "{down:#}");
    assert_eq!((&down["ended"], &down["freed"]), (&next["booted"], &next["booted"]), "{down:#}");
    assert!(down["began"].as_str() < down["ended"].as_str(), "{down:#}");
    assert_eq!(list(down, "processes").len(), 2, "{down:#}");
    assert_eq!(member(down, pids[1])["cause"], "host-down");
    let title = down["title"].as_str().expect("a title");
    assert!(title.contains("while 2 processes held 1 GPU; the next boot began at "), "{title}");
    // How far the last sign of life was from the end: not farther than from the one that was waited for.
    assert!(list(&alive, "hosts")[0]["clock_moved_ms"] == 0 && host["clock_moved_ms"] == 0, "{host:#}");
}

#[test]
fn p10_a_daemon_that_was_killed_and_started_again() {
    let bench = bench();
    let mut daemon = Daemon::start_with(&bench, &["daemon", "--keep"]);
    let stays = Player::holding(DEV);
    let (mut dies, mut closes) = (Player::holding(DEV), Player::start());
    let fd = closes.ask(&format!("open {DEV}"));
    until_held(&bench, &[stays.pid(), dies.pid(), closes.pid()]);
    let opened = opened_ns(&bench, stays.pid());
    daemon.kill();

    // While nobody reads along.
    dies.tell("exit 4");
    dies.end();
    closes.ask(&format!("close {fd}"));
    let comes = Player::holding(DEV);
    let mut passes = Player::holding(DEV);
    sys::kill(passes.pid(), sys::SIGKILL);
    passes.end();

    daemon.start_again();
    until_held(&bench, &[stays.pid(), comes.pid()]);
    let died = dead(&bench, dies.pid(), "exited");
    assert_eq!(died["death"]["code"], 4, "{died:#}");
    let passed = dead(&bench, passes.pid(), "killed-by");
    assert_eq!(passed["death"]["signal"], "SIGKILL", "{passed:#}");
    assert_eq!(passed["death"]["sender"]["pid"], sys::pid(), "{passed:#}");
    assert_eq!(lineage(&passed)[0], sys::pid(), "{passed:#}");
    let found = until(&bench, &[], "it has closed", |report| {
        holds(report, closes.pid()).iter().all(|hold| !hold["released"].is_null())
    });
    assert_eq!(opened_ns(&bench, stays.pid()), opened, "neither lost nor doubled");
    for player in [&stays, &comes, &dies, &closes, &passes] {
        hold(&found, player.pid());
    }
    assert_eq!(hold(&found, closes.pid())["ended"], "closed");
    assert_eq!(process(&found, closes.pid()).expect("its entry")["death"], Value::Null);
    let [gap] = list(&found, "gaps") else { panic!("one gap in {found:#}") };
    let note = gap["note"].as_str().expect("a note");
    assert!(note.starts_with("no daemon ran; the kernel went on counting"), "{note}");
    // The gap is where the death is that nobody read of at the time.
    for time in [&died["exited"], &passed["exited"]] {
        assert!(gap["from"].as_str() <= time.as_str() && time.as_str() <= gap["to"].as_str(), "{time} in {gap:#}");
    }

    // A daemon that is stopped and leaves its programs counting.
    assert!(daemon.stop().success());
    let stopped = report(&bench, &[]);
    assert_eq!(list(&stopped, "hosts")[0]["state"], "stopped");
    daemon.start_again();
    let found = until(&bench, &[], "a second gap", |report| list(report, "gaps").len() == 2);
    for player in [&stays, &comes] {
        hold(&found, player.pid());
    }
    assert_eq!(opened_ns(&bench, stays.pid()), opened, "neither lost nor doubled");
    assert!([&stays, &comes].iter().all(|player| hold(&found, player.pid())["released"].is_null()), "{found:#}");
}
