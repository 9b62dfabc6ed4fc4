use super::*;
use crate::holders::tests::{left_behind, sample};

const TERMINAL: Style = Style { width: Some(80), colours: false };

#[test]
fn one_job() {
    let text = holders(&sample(), Style::default());
    let expected = r"source: map, backend: kprobe, swept 1s ago
GPU  NODE          PID  USER  STATE  ROLE      FDS  MAPS  HELD FOR  COMMAND
  0  /dev/nvidia0  498  root  S      attached   23     3     9m 0s  /opt/venv/bin/python3 -c 'import torch\nx=";
    assert!(text.starts_with(expected), "{text}");
    let rest: Vec<&str> = text.lines().skip(3).collect();
    let expected = [
        "shared: /dev/nvidiactl (8 files, 1 process), /dev/nvidia-uvm (3 files, 1 process)",
        "left behind by p400 (pid 400, killed by SIGKILL): 498",
        "held by no process: /dev/nvidia0 1 file in-flight, last held by sender (pid 12)",
    ];
    assert_eq!(rest, expected);
}

#[test]
fn classes_are_shown_where_they_differ() {
    let mut report = sample();
    report.holders[0].class = Class::System;
    report.holders[0].class_rule = "dcgm\u{1b}".to_owned();
    let text = holders(&report, Style::default());
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("GPU  NODE          PID  USER  CLASS            STATE  ROLE"), "{text}");
    assert!(lines[2].starts_with(r"  0  /dev/nvidia0  498  root  system/dcgm\x1b  S      attached"), "{text}");
    assert!(!holders(&sample(), Style::default()).contains("CLASS"));
}

#[test]
fn fenced_devices_are_named() {
    let mut report = sample();
    assert!(!holders(&report, Style::default()).contains("fenced"));
    report.devices[0].fenced = true;
    assert!(holders(&report, Style::default()).contains("\nfenced, new opens fail: /dev/nvidia0\n"));
}

#[test]
fn a_crowd_is_one_row() {
    let text = holders(&left_behind(126), Style::default());
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[2].starts_with("  0  /dev/nvidia0  126 pids  ?"), "{text}");
    assert!(lines[2].ends_with("(left behind by p50 50)"), "{text}");
    assert!(text.contains("left behind by p50 (pid 50, killed by SIGKILL): 1000-1125\n"), "{text}");
    assert_eq!(
        holders(&left_behind(7), Style::default()).lines().filter(|line| line.contains("/dev/nvidia0")).count(),
        8
    );
}

#[test]
fn lines_are_cut_on_a_terminal_only() {
    let table =
        |style| -> Vec<String> { holders(&sample(), style).lines().skip(1).take(2).map(str::to_owned).collect() };
    assert!(table(TERMINAL).iter().all(|line| line.width() <= 80));
    assert!(table(TERMINAL)[1].ends_with('…'));
    assert!(table(Style::default())[1].width() > 100);
    for (line, width, expected) in
        [("日本語", 5, "日本…"), ("日本語", 6, "日本語"), ("日本語", 4, "日…"), ("abc", 1, "…")]
    {
        assert_eq!(cut(line, Some(width)), expected);
    }
}

#[test]
fn colours_only_when_asked_for() {
    assert!(!holders(&sample(), TERMINAL).contains('\u{1b}'));
    assert!(holders(&sample(), Style { colours: true, ..TERMINAL }).contains("\u{1b}[33m"));
}

#[test]
fn names_cannot_reach_the_terminal() {
    let mut report = left_behind(9);
    let evil = "\u{1b}]0;owned\u{7}\u{202e}\n".to_owned();
    report.notes.push(evil.clone());
    report.orphans[0].last_owner.as_mut().unwrap().comm = evil.clone();
    for holder in &mut report.holders {
        holder.comm = evil.clone();
        holder.argv = vec![evil.clone(), "b".to_owned()];
        holder.user = Some(evil.clone());
        holder.orphan_of.as_mut().unwrap().comm = evil.clone();
    }
    for count in [9, 2] {
        report.holders.truncate(count);
        let text = holders(&report, TERMINAL);
        assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with('\'')), "{text:?}");
    }
}

#[test]
fn nothing_to_show() {
    let mut report = sample();
    report.holders.clear();
    for device in &mut report.devices {
        (device.holders, device.open_files) = (0, Some(0));
    }
    assert!(holders(&report, TERMINAL).contains("No process holds a GPU.\n"));
    report.complete = false;
    let text = holders(&report, TERMINAL);
    assert!(text.contains("No process that was seen holds a GPU.\n"), "{text}");
    assert!(text.contains("\nincomplete: there may be holders that were not seen\n"), "{text}");
    report.devices.clear();
    assert!(holders(&report, TERMINAL).contains("This host has no NVIDIA device"));
}

#[test]
fn holders_of_shared_nodes_alone() {
    let mut report = sample();
    report.holders[0].devices.remove(0);
    let text = holders(&report, Style::default());
    assert!(text.contains("\n  -  /dev/nvidiactl,/dev/nvidia-uvm  498  root  S      -      11     7  "), "{text}");
}

#[test]
fn commands() {
    let line =
        |comm: &str, argv: &[&str]| command(comm, &argv.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
    assert_eq!(line("kworker/0:1", &[]), "[kworker/0:1]");
    assert_eq!(line("python3", &["/usr/bin/python3", "a.py"]), "/usr/bin/python3 a.py");
    assert_eq!(line("pt_main_thread", &["python3", "a.py"]), "[pt_main_thread] python3 a.py");
    assert_eq!(line("a-very-long-nam", &["/bin/a-very-long-name"]), "/bin/a-very-long-name");
}
