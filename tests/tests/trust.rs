//! Root neither writes through what somebody else has put in its way nor believes it; and nobody else can hold what it
//! needs.
use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown, symlink},
    path::Path,
    process::Command,
};

use gpureap_tests::harness::{Bench, Device, NOBODY, Output, Scene, World, finish};

const DEV: &str = "/dev/zero";
const USAGE: i32 = 2;
const UNSUPPORTED: i32 = 8;

fn bench() -> Bench {
    let bench = Bench::new(&[Device::zero()]);
    bench.open_to_all();
    bench
}

#[track_caller]
fn refused(output: Output, code: i32, word: &str) {
    let output = output.expect_code(code);
    assert!(output.complaint().contains(word), "`{word}` in {output:#?}");
}

/// Whether an ordinary user can open it for reading, which is all that a lock takes.
fn opens(path: &Path) -> bool {
    let mut command = Command::new("sh");
    command.args(["-c", "exec 9<\"$0\""]).arg(path);
    finish(World::default().as_user(NOBODY).enter(command)).code == 0
}

/// bpffs is often mounted for all to write to: whoever is first makes the directory.
#[test]
fn a_pin_directory_of_somebody_else_is_neither_used_nor_cleaned() {
    let bench = bench();
    let victim = bench.path("victim");
    fs::create_dir_all(victim.join("links")).expect("a directory");
    fs::write(victim.join("precious"), "").expect("a file");
    fs::write(victim.join("links/precious"), "").expect("a file");
    fs::create_dir(bench.pins()).expect("a directory in bpffs");
    // What a start or a fence would remove as half made.
    symlink(&victim, bench.pins().join("new")).expect("a link in bpffs");
    fs::create_dir(bench.pins().join("fence")).expect("a directory in bpffs");
    symlink(&victim, bench.pins().join("fence/new")).expect("a link in bpffs");
    chown(bench.pins(), Some(NOBODY), Some(NOBODY)).expect("chown");

    for arguments in [["daemon"].as_slice(), &["fence", "--gpu", DEV], &["unfence"]] {
        refused(bench.run(arguments), UNSUPPORTED, "belongs to user 65534, not to root");
    }
    assert!(victim.join("precious").exists() && victim.join("links/precious").exists());
    let scene = Scene::start("plain", DEV, &[]);
    assert_eq!(bench.expect_truth(&scene, &[]).source, "snapshot", "no map there is believed");
}

#[test]
fn nobody_else_can_hold_the_locks() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let lock = bench.path("run/daemon.lock");
    assert!(opens(&bench.path("config.toml")), "a user gets there");
    assert!(!opens(&lock) && !opens(&bench.pins()));
    daemon.kill();
    bench.run(&["fence", "--gpu", DEV]).expect_code(0);
    assert!(!opens(&lock) && !opens(&bench.pins()) && !opens(&bench.pins().join("fence")));
    bench.run(&["unfence"]).expect_code(0);
    // One that an older gpureap has left open to all.
    fs::set_permissions(&lock, fs::Permissions::from_mode(0o644)).expect("chmod");
    fs::set_permissions(bench.pins(), fs::Permissions::from_mode(0o755)).expect("chmod");
    daemon.start_again();
    assert!(!opens(&lock) && !opens(&bench.pins()));
}

#[test]
fn no_run_directory_of_somebody_else_and_no_lock_through_a_link() {
    let bench = bench();
    let victim = bench.path("victim");
    fs::write(&victim, "precious").expect("a file");
    symlink(&victim, bench.path("run/daemon.lock")).expect("a link");
    refused(bench.run(&["daemon"]), UNSUPPORTED, "daemon.lock");
    assert_eq!(fs::read_to_string(&victim).expect("the file"), "precious");
    fs::remove_file(bench.path("run/daemon.lock")).expect("remove the link");

    chown(bench.path("run"), Some(NOBODY), None).expect("chown");
    refused(bench.run(&["daemon"]), UNSUPPORTED, "run belongs to user 65534, not to root");
    chown(bench.path("run"), Some(0), None).expect("chown");
    fs::set_permissions(bench.path("run"), fs::Permissions::from_mode(0o777)).expect("chmod");
    refused(bench.run(&["daemon"]), UNSUPPORTED, "run may be written by others than its owner");
}

#[test]
fn a_journal_in_a_directory_of_somebody_else_is_refused_and_the_daemon_runs() {
    let bench = bench();
    chown(bench.path("state"), Some(NOBODY), None).expect("chown");
    let daemon = bench.daemon();
    assert!(daemon.log().contains("state belongs to user 65534, not to root"), "{}", daemon.log());
    assert!(!bench.path("state/journal.db").exists());
}

#[test]
fn no_configuration_that_others_could_have_written() {
    let bench = bench();
    let path = bench.path("config.toml");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("chmod");
    for arguments in [["daemon"].as_slice(), &["holders"], &["reap", "--yes"]] {
        refused(bench.run(arguments), USAGE, "config.toml may be written by others than its owner");
    }
}
