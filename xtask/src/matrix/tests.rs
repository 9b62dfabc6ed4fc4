use std::fs;

use super::{
    JSON, PAGE, ROWS, chosen, page, read,
    results::{Answer, Losses, Results, Run},
};
use crate::{
    kernels::Kernel,
    process::root,
    qemu::End,
    vm::{Finished, Protocol, SETS},
};

fn about(name: &str) -> Run {
    Run {
        name: name.to_owned(),
        package: format!("linux-image-{name} 1-1"),
        append: Vec::new(),
        time: "2026-12-01T09:00:00Z".to_owned(),
        commit: "0123456789ab".to_owned(),
        kernel: None,
        sets: Vec::new(),
    }
}

fn heard(lines: &[&str], end: &End) -> Finished {
    let mut protocol = Protocol::new("k");
    for line in lines {
        protocol.line(line);
    }
    protocol.finish(end)
}

fn run(name: &str, lines: &[&str], end: &End) -> Run {
    Run::new(about(name), heard(lines, end)).unwrap()
}

const KERNEL: &str = r##"vm: record {"kind":"kernel","release":"7.3.4","version":"#1 SMP PREEMPT_DYNAMIC Debian","preemption":"full (lazy)"}"##;
const ATTACHED: &str = r#"vm: record {"kind":"attached","programs":[
    {"name":"fd_dup2_kprobe","hook":"kprobe do_dup2","attached":true,"verified":400,"translated":120,"skipped":0},
    {"name":"sweep_fds","hook":"iterator task_file","attached":false,"verified":90,"translated":80,"skipped":0}]}"#;
const DUP: &str =
    r#"vm: record {"kind":"operation","subject":"dup","name":"dup","steps":3,"differences":[],"skipped":null}"#;
const RING: &str = r#"vm: record {"kind":"operation","subject":"ring","name":"ring_install","steps":0,"differences":[],"skipped":"not before 6.8"}"#;
const LOSSES: &str = r#"vm: record {"kind":"losses","lost_events":0,"skipped":{}}"#;

fn exact() -> Run {
    let reading = r#"vm: record {"kind":"reading","alone":1,"read":222}"#;
    let lines =
        ["vm: run kprobe operations", KERNEL, ATTACHED, DUP, RING, LOSSES, reading, "vm: end kprobe operations ok 8.0"];
    run("new", &lines, &End::Off)
}

fn rendered(run: Run) -> String {
    page::render(&Results { command: "cargo xtask matrix".to_owned(), runs: vec![run] })
}

#[test]
fn a_set_that_ran_shows_its_figures() {
    let text = rendered(exact());
    for line in [
        "| new | 7.3.4 | lazy | 1 hooks; 1 operations, 3 steps: exact, 1 not possible | not run | not run |",
        "| dup, dup2, dup3, fcntl | 1, 3 |",
        "| io_uring | not run |",
        "- new, `kprobe`, ring_install: not before 6.8",
        "| `fd_dup2_kprobe` | kprobe do_dup2 | 400 / 120 |",
        "| `sweep_fds` | iterator task_file | 90 / 80 |",
        "| new | linux-image-new 1-1 | – | 2026-12-01T09:00:00Z | 0123456789ab | 8 |",
        "| new | 0 | not run | not run |",
        "| new | 1 / 222 | not run | not run |",
    ] {
        assert!(text.contains(line), "{line}\nnot in\n{text}");
    }
}

#[test]
fn a_cell_whose_run_did_not_happen_says_so() {
    let text = rendered(run("dead", &["vm: run kprobe operations"], &End::Killed("silent for 240 s".into())));
    assert!(text.contains("| dead | did not say | did not say | not run | not run | not run |"), "{text}");
    assert!(text.contains("- dead, `gate` did not run: silent for 240 s"), "{text}");
}

#[test]
fn operations_that_stopped_are_not_called_exact() {
    let text = rendered(run(
        "half",
        &["vm: run gate operations", ATTACHED, DUP, r#"vm: record {"kind":"reading","alone":0,"read":0}"#],
        &End::Killed("panic".into()),
    ));
    assert!(text.contains("| half | not run | not run | 0 / 0 |"), "{text}");
    assert!(text.contains("1 operations, 3 steps: not to the end; **failed tests: 1**"), "{text}");
}

#[test]
fn a_refusal_is_told_with_its_reason() {
    let refused = r#"vm: record {"kind":"refused","code":8,"reason":"too old | really","holders_by":"proc"}"#;
    let text = rendered(run("5.10", &["vm: run fentry support", refused], &End::Off));
    assert!(text.contains("| not run | refused, exit 8 | not run |"), "{text}");
    assert!(text.contains("- 5.10, `fentry`: \"too old | really\"; `holders` answered from `proc`"), "{text}");
}

#[test]
fn differences_and_losses_are_listed() {
    let wrong = r#"vm: record {"kind":"operation","subject":"dup","name":"dup","steps":3,"differences":["close: 1:5: 2 | 1"],"skipped":null}"#;
    let lost = r#"vm: record {"kind":"losses","lost_events":4,"skipped":{"fd_close_fentry":4}}"#;
    let text = rendered(run("lossy", &["vm: run fentry operations", ATTACHED, wrong, lost], &End::Off));
    for line in [
        "**differences: 1**; lost events: 4",
        "| dup, dup2, dup3, fcntl | **0 of 1**, 3 steps, 1 differences |",
        "- lossy, `fentry`, dup, close: 1:5: 2 | 1",
        "| lossy | not run | 4, `fd_close_fentry` 4 | not run |",
    ] {
        assert!(text.contains(line), "{line}\nnot in\n{text}");
    }
}

#[test]
fn what_no_test_says_is_an_error() {
    let strange = heard(&["vm: run gate support", r#"vm: record {"kind":"weather"}"#], &End::Off);
    assert!(Run::new(about("x"), strange).is_err());
}

#[test]
fn a_new_run_takes_the_place_of_the_old() {
    let mut results = Results::default();
    results.put(run("a", &[], &End::Off));
    results.put(exact());
    results.put(Run { commit: "new".to_owned(), ..about("a") });
    let names: Vec<_> = results.runs.iter().map(|run| (run.name.as_str(), run.commit.as_str())).collect();
    assert_eq!(names, [("a", "new"), ("new", "0123456789ab")]);
}

#[test]
fn only_the_middle_of_the_page_is_ours() {
    let results = Results { command: "c".to_owned(), runs: vec![exact()] };
    let page = format!("before\n{}old\n{}after\n", page::BEGIN, page::END);
    let new = page::put_into(&page, &results).unwrap();
    assert!(new.starts_with("before\n") && new.ends_with("after\n") && !new.contains("old"));
    assert_eq!(page::put_into(&new, &results).unwrap(), new);
    page::put_into("no marks", &results).unwrap_err();
}

#[test]
fn rows_have_names_of_their_own_and_kernels() {
    for (position, row) in ROWS.iter().enumerate() {
        assert!(Kernel::named(row.kernel).is_ok(), "{}", row.kernel);
        assert!(!ROWS[..position].iter().any(|other| other.name == row.name), "{} twice", row.name);
    }
    assert_eq!(chosen(&[]).unwrap().len(), ROWS.len());
    assert_eq!(chosen(&["6.12".to_owned()]).unwrap()[0].name, "6.12");
    assert!(chosen(&["6.13".to_owned()]).is_err());
}

/// The page that is in the repository is the one that its results give, and they are of real runs.
#[test]
fn the_committed_page_comes_from_the_committed_results() {
    let results = read(&root().join(JSON)).unwrap();
    let text = fs::read_to_string(root().join(PAGE)).unwrap();
    // Not assert_eq, which would print it twice.
    assert!(page::put_into(&text, &results).unwrap() == text, "`cargo xtask matrix --page` writes it again");
    let whole = |run: &&Run| {
        let ran = |set: &super::results::Set| {
            matches!((&set.answer, &set.losses), (Answer::Attached(_), Some(Losses { .. })))
        };
        run.sets.len() == SETS.len() && run.sets.iter().all(ran)
    };
    assert!(results.runs.iter().filter(whole).count() >= 4, "all sets on four kernels at least");
}
