use std::{os::unix::fs::PermissionsExt as _, path::PathBuf};

use super::*;
use crate::{
    error::exit_of,
    exit_code::Exit,
    journal::{Error, schema},
};

fn message(result: anyhow::Result<Vec<Record>>) -> (Exit, String) {
    let error = result.unwrap_err();
    (exit_of(&error), format!("{error:#}"))
}

#[test]
fn a_newer_file_is_refused_and_left_alone() {
    let place = Scene::new();
    drop(place.open("b1"));
    place.raw().pragma_update(None, "user_version", schema::VERSION + 1).unwrap();
    let Err(Error::Refused(why)) = Writer::open(&place.path(), "b1") else { panic!() };
    assert!(
        why.ends_with("journal.db is of journal version 2 and this gpureap reads up to 1: a newer gpureap wrote it")
    );
    assert_eq!(message(read(&place.path(), &Question::default())), (Exit::Unsupported, why));
    assert_eq!(schema::version(&place.raw()).unwrap(), 2);
}

#[test]
fn nothing_to_read_is_said() {
    let place = Scene::new();
    let path = place.path();
    let expected = format!("there is no journal at {}: no daemon has recorded there", path.display());
    assert_eq!(message(read(&path, &Question::default())), (Exit::Unsupported, expected.clone()));
    std::fs::write(&path, "").unwrap();
    assert_eq!(message(read(&path, &Question::default())), (Exit::Unsupported, expected));
    assert_eq!(place.files(), [FILE]);
    let (exit, text) = message(read(path.parent().unwrap(), &Question::default()));
    assert!(exit == Exit::Usage && text.ends_with("is not a file"), "{text}");
}

/// Copies the database alone, as somebody would who does not know of the log.
fn copy(place: &Scene, name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::copy(place.path(), &path).unwrap();
    (dir, path)
}

#[test]
fn it_is_read_while_the_daemon_writes() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    for count in 1..=50 {
        writer.apply(&[Change::Event(lost(count, count, "x"))]).unwrap();
        assert_eq!(place.all()[0].events.len(), count as usize);
    }
    writer.connection.execute_batch("BEGIN IMMEDIATE; DELETE FROM events").unwrap();
    assert_eq!(place.all()[0].events.len(), 50);
}

/// Somebody else's journal in somebody else's directory.
#[test]
fn links_beside_a_journal_that_is_read_lead_nowhere() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    drop(writer);
    let (dir, path) = copy(&place, "a.db");
    for suffix in ["-wal", "-shm", "-journal"] {
        let link = dir.path().join(format!("a.db{suffix}"));
        std::fs::remove_file(&link).ok();
        std::os::unix::fs::symlink(dir.path().join(format!("victim{suffix}")), link).unwrap();
    }
    // Whether it can be read so is of no interest.
    drop(read(&path, &Question::default()));
    let names = files(dir.path());
    assert!(!names.iter().any(|name| name.starts_with("victim")), "{names:?}");
}

#[test]
fn a_copy_is_read_where_nothing_can_be_written() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND), Change::Event(lost(1, 1, "x"))]).unwrap();
    drop(writer);
    let (dir, path) = copy(&place, "a ?#%41.db");
    let as_nobody = move || {
        if rustix::process::geteuid().is_root() {
            // Of this thread alone, and with it go the rights that overrule modes.
            rustix::thread::set_thread_res_uid(
                rustix::process::Uid::from_raw(65534),
                rustix::process::Uid::from_raw(65534),
                rustix::process::Uid::from_raw(65534),
            )
            .unwrap();
        }
        let records = read(&path, &Question::default());
        let written = std::fs::write(path.with_extension("x"), "");
        (records.map_err(|error| format!("{error:#}")), written.is_err())
    };
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    std::fs::set_permissions(dir.path().join("a ?#%41.db"), std::fs::Permissions::from_mode(0o444)).unwrap();
    let (records, nothing_written) = std::thread::spawn(as_nobody).join().unwrap();
    assert!(nothing_written);
    assert_eq!(records.unwrap()[0].events.len(), 1);
    assert_eq!(files(dir.path()), ["a ?#%41.db"]);
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn who_may_not_read_is_told_so() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipping: needs root to become somebody else");
        return;
    }
    let place = Scene::new();
    drop(place.open("b1"));
    let path = place.path();
    // The group is root's still.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let ask = move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let (exit, text) = message(read(&path, &Question::default()));
        (exit, text)
    };
    let (exit, text) = std::thread::spawn(ask).join().unwrap();
    assert_eq!(exit, Exit::NotPermitted);
    assert!(text.ends_with("journal.db: run as root"), "{text}");
}
