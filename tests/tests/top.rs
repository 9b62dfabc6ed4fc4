//! `gpureap top` on a real terminal: what it shows, and what its keys do to real processes.
use std::fs;

use gpureap_tests::harness::{Bench, Device, NOBODY, Player, Role, Tmux, sys};

/// Held by next to nobody, so whoever holds it may be killed.
const NODE: &str = "/dev/full";

fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    bench.is_free(test).then_some(bench)
}

fn top(bench: &Bench, arguments: &[&str], columns: u16, lines: u16) -> Tmux {
    Tmux::start(&bench.command(&[&["top"], arguments].concat()), columns, lines)
}

fn row_of(screen: &[String], pid: i32) -> Option<&String> {
    screen.iter().find(|line| line.split_whitespace().nth(1) == Some(&pid.to_string()))
}

#[test]
fn without_a_daemon_it_shows_snapshots() {
    let Some(bench) = bench("without_a_daemon_it_shows_snapshots") else { return };
    let screen = top(&bench, &[], 80, 24);
    let seen = screen.expect_text("nobody holds a GPU");
    assert!(seen[0].contains("snapshot"), "{seen:#?}");
    screen.expect_text("no events");
    let player = Player::holding(NODE);
    let seen = screen.expect("the holder is not shown", |screen| row_of(screen, player.pid()).is_some());
    let row: Vec<&str> = row_of(&seen, player.pid()).expect("a row").split_whitespace().collect();
    assert_eq!((row[0], row[3], row[4], row[5]), ("0", "S", "handle", "1+0"), "{seen:#?}");
    screen.keys(&["q"]);
    screen.expect_text("it ended with 0");
}

#[test]
fn what_happens_is_shown_as_it_happens_and_scrolls() {
    let Some(bench) = bench("what_happens_is_shown_as_it_happens_and_scrolls") else { return };
    let daemon = bench.daemon();
    // Only the daemon's word makes it look before an hour is over.
    let screen = top(&bench, &["--interval", "1h"], 100, 30);
    let seen = screen.expect_text("nobody holds a GPU");
    assert!(seen[0].contains("map"), "{seen:#?}");
    let player = Player::holding(NODE);
    screen.expect("the holder is not shown", |screen| row_of(screen, player.pid()).is_some());
    screen.expect_text(&format!("{} gpureap-actor opens {NODE}", player.pid()));
    drop(player);
    screen.expect_text("nobody holds a GPU");
    drop(daemon);
}

#[test]
fn it_kills_after_a_yes_and_only_then() {
    let Some(bench) = bench("it_kills_after_a_yes_and_only_then") else { return };
    let _daemon = bench.daemon();
    let mut victim = Player::holding(NODE);
    let mut other = Player::holding(NODE);
    let screen = top(&bench, &["--interval", "500ms"], 80, 24);
    let shown = |screen: &[String]| row_of(screen, victim.pid()).is_some() && row_of(screen, other.pid()).is_some();
    screen.expect("both are not shown", shown);
    let question = format!("to gpureap-actor (pid {})? y/N", victim.pid());
    // Sorted by GPU and pid, the first is the one that began first; the pids may have wrapped.
    let first = victim.pid().min(other.pid());
    let moves: &[&str] = if first == victim.pid() { &["Down"] } else { &["Down", "Down"] };
    screen.keys(moves);
    screen.keys(&["k"]);
    screen.expect_text(&question);
    screen.keys(&["n"]);
    screen.expect_text("nothing was done");
    assert!(victim.runs() && other.runs(), "a no is a no");
    screen.keys(&["K"]);
    screen.expect_text(&format!("send KILL to gpureap-actor (pid {}) at once? y/N", victim.pid()));
    screen.keys(&["y"]);
    screen.expect_text(&format!("gpureap-actor (pid {}): freed", victim.pid()));
    assert!(!victim.runs(), "a yes is a yes");
    assert!(other.runs(), "and nobody else");
    screen.expect("the dead one is still shown", |screen| row_of(screen, victim.pid()).is_none());
}

#[test]
fn it_fences_and_opens_again() {
    let Some(bench) = bench("it_fences_and_opens_again") else { return };
    let screen = top(&bench, &["--interval", "500ms"], 80, 24);
    screen.expect_text("nobody holds a GPU");
    screen.keys(&["f"]);
    screen.expect_text(&format!("refuse new opens of {NODE}, host-wide, for 10 min? y/N"));
    screen.keys(&["y"]);
    screen.expect_text("is fenced for 10 min");
    screen.expect_text("FENCED");
    assert!(fs::File::open(NODE).is_err(), "the fence stands");
    screen.keys(&["f", "y"]);
    screen.expect_text("can be opened again");
    screen.expect("still shown as fenced", |screen| !screen.iter().any(|line| line.contains("FENCED")));
    assert!(fs::File::open(NODE).is_ok());
}

#[test]
fn it_filters_helps_and_takes_another_size() {
    let Some(bench) = bench("it_filters_helps_and_takes_another_size") else { return };
    let player = Player::holding(NODE);
    let screen = top(&bench, &[], 80, 24);
    screen.expect("the holder is not shown", |screen| row_of(screen, player.pid()).is_some());
    screen.keys(&["/"]);
    screen.keys(&["-l", "nobody-is-called-this"]);
    screen.expect_text("nobody who fits the filter holds a GPU");
    screen.keys(&["Escape"]);
    screen.expect("the filter is not taken back", |screen| row_of(screen, player.pid()).is_some());
    screen.keys(&["?"]);
    screen.expect_text("one GPU after the other");
    screen.keys(&["Escape"]);
    screen.resize(60, 12);
    let seen = screen.expect("it does not take the size", |screen| {
        screen.len() == 12 && row_of(screen, player.pid()).is_some() && screen[11].contains("quit")
    });
    assert!(seen.iter().all(|line| line.chars().count() <= 60), "{seen:#?}");
    screen.keys(&["C-c"]);
    screen.expect_text("it ended with 0");
}

#[test]
fn an_ordinary_user_sees_by_the_daemon_and_kills_nobody_else() {
    let test = "an_ordinary_user_sees_by_the_daemon_and_kills_nobody_else";
    let Some(bench) = bench(test) else { return };
    if bench.user(test).is_none() {
        return;
    }
    let _daemon = bench.daemon();
    let mut own = Player::with(&Role { user: Some(NOBODY), ..Role::default() });
    own.ask(&format!("open {NODE}"));
    let mut others = Player::holding(NODE);
    let top = bench.command(&["top", "--interval", "500ms"]);
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(top.get_program()).args(top.get_args());
    for (name, value) in top.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    let screen = Tmux::start(&command, 80, 24);
    screen.expect("both are not shown", |screen| {
        row_of(screen, own.pid()).is_some() && row_of(screen, others.pid()).is_some()
    });
    screen.keys(&["/"]);
    screen.keys(&["-l", &others.pid().to_string()]);
    screen.keys(&["Enter", "Down", "K", "y"]);
    let seen = screen.expect("it does not say how it went", |screen| screen[23].contains("not permitted"));
    assert!(others.runs(), "{seen:#?}");
    assert!(own.runs());
}

#[test]
fn without_a_terminal_it_says_so() {
    let Some(bench) = bench("without_a_terminal_it_says_so") else { return };
    let output = bench.run(&["top"]).expect_code(2);
    assert!(output.complaint().contains("top needs a terminal"), "{output:?}");
}

#[test]
fn a_signal_gives_the_terminal_back() {
    let Some(bench) = bench("a_signal_gives_the_terminal_back") else { return };
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let screen = top(&bench, &[], 80, 24);
        screen.expect_text("nobody holds a GPU");
        assert!(screen.is_taken());
        sys::kill(screen.program(), signal);
        screen.expect_text("it ended with 0");
        assert!(!screen.is_taken(), "after signal {signal}");
    }
}
