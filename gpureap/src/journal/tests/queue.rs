use std::{
    ffi::CStr,
    thread,
    time::{Duration, Instant},
};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change, mount_remount};

use super::*;
use crate::journal::{Journal, Limits, Started, reader};

const LIMITS: Limits = Limits { max_age: Duration::from_hours(365 * 24), max_size: 1 << 30 };
const LONG: Duration = Duration::from_mins(1);

fn begin(path: &Path) -> Started {
    Journal::start(path, LIMITS, "b1", LONG).unwrap()
}

fn until(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn events_at(path: &Path) -> Vec<Event> {
    let mut events = Vec::new();
    reader::events(path, None, |event| {
        events.push(event);
        Ok(())
    })
    .unwrap();
    events
}

/// How many records the journal itself says are lost.
fn said_to_be_lost(path: &Path) -> u64 {
    let lost = |event: Event| match event.what {
        What::Lost(Lost { events, at, note: _ }) if at == "journal" => events,
        _ => 0,
    };
    events_at(path).into_iter().map(lost).sum()
}

#[test]
fn what_is_sent_is_on_file_after_a_flush_and_after_a_stop() {
    let place = Scene::new();
    let Started { journal, holds, processes, recorded_ns: _, notes } = begin(&place.path());
    assert_eq!((holds.len(), processes.len(), notes.len()), (0, 0, 0));
    journal.send(start("b1", SECOND));
    for count in 0..1000 {
        journal.send(Change::Event(lost(count, count, "x")));
    }
    assert!(journal.flush(LONG));
    assert_eq!(events_at(&place.path()).len(), 1000);
    let status = journal.status();
    assert_eq!((status.written, status.dropped, status.errors, status.last_error), (1001, 0, 0, None));
    assert!(status.size_bytes > 4096 && status.restarts == 0);
    // Nothing to wait for.
    assert!(journal.flush(Duration::from_millis(1)));
    journal.send(process_change(process(7, None)));
    journal.send(Change::Hold(hold(7, GPU0, SECOND, None)));
    assert!(journal.stop(LONG));
    // The log is empty and gone.
    assert_eq!(place.files(), [FILE]);
    let again = begin(&place.path());
    assert_eq!((again.holds, again.processes), (vec![hold(7, GPU0, SECOND, None)], vec![process(7, None)]));
}

#[test]
fn a_batch_does_not_wait_for_more() {
    let place = Scene::new();
    let Started { journal, .. } = begin(&place.path());
    journal.send(start("b1", SECOND));
    until("it is written without a flush", || journal.status().written == 1);
    journal.send(Change::Event(lost(1, 1, "x")));
    until("and after a pause", || journal.status().written == 2);
}

#[test]
fn a_lock_that_somebody_else_has_blocks_nobody_who_sends() {
    let place = Scene::new();
    let Started { journal, .. } = begin(&place.path());
    journal.send(start("b1", SECOND));
    assert!(journal.flush(LONG));
    let raw = place.raw();
    raw.execute_batch("BEGIN EXCLUSIVE").unwrap();
    // If one of these waited, it would be for ever.
    for count in 0..20_000 {
        journal.send(Change::Event(lost(count, count, "x")));
    }
    assert!(!journal.flush(Duration::from_millis(300)));
    until("it notices", || journal.status().errors > 0);
    let error = journal.status().last_error.unwrap();
    assert!(error.ends_with("journal.db is locked by another process"), "{error}");
    assert!(journal.status().dropped >= 20_000 - 8192 - 512);
    raw.execute_batch("COMMIT").unwrap();
    until("it is written after all", || journal.status().written > 1 && journal.flush(Duration::from_secs(1)));
    let status = journal.status();
    assert_eq!(status.written + status.dropped, 20_001, "{status:?}");
    assert_eq!(status.last_error, None);
    assert!(status.gaps > 0, "{status:?}");
    assert!(journal.stop(LONG));
    assert_eq!(said_to_be_lost(&place.path()), status.dropped);
    assert_eq!(
        events_at(&place.path())
            .iter()
            .filter(|event| matches!(&event.what, What::Lost(lost) if lost.at == "test"))
            .count() as u64
            + 1,
        status.written
    );
}

#[test]
fn a_file_that_opens_late_gets_all_and_what_is_not_held_any_more_ends() {
    let place = Scene::new();
    let Started { journal, .. } = begin(&place.path());
    let both = [7, 8].map(|pid| Change::Hold(hold(pid, GPU0, SECOND, None)));
    [start("b1", SECOND)].into_iter().chain(both).for_each(|change| journal.send(change));
    assert!(journal.stop(LONG));
    let raw = place.raw();
    raw.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let Started { journal, holds, processes, recorded_ns: _, notes } =
        Journal::start(&place.path(), LIMITS, "b1", Duration::from_millis(10)).unwrap();
    assert!(holds.is_empty() && processes.is_empty());
    assert!(notes.len() == 1 && notes[0].contains("its disk does not answer"), "{notes:?}");
    journal.send(start("b1", 5 * SECOND));
    raw.execute_batch("COMMIT").unwrap();
    until("it is opened", || journal.status().gaps == 1 && journal.status().written == 1);
    journal.send(Change::Now { boot_ns: 9 * SECOND, processes: vec![], holds: vec![hold(8, GPU0, SECOND, None)] });
    assert!(journal.flush(LONG));
    assert_eq!(journal.status().dropped, 0);
    assert!(journal.stop(LONG));
    let record = &place.all()[0];
    assert_eq!(record.runs.len(), 2);
    let ended = |pid| record.holds.iter().find(|hold| hold.key.pid == pid).map(|hold| (hold.released_ns, hold.ended));
    assert_eq!(ended(7), Some((Some(9 * SECOND), Some(HoldEnd::Unseen))));
    assert_eq!(ended(8), Some((None, None)));
}

#[test]
fn a_stop_does_not_wait_for_a_lock() {
    let place = Scene::new();
    let Started { journal, .. } = begin(&place.path());
    let raw = place.raw();
    raw.execute_batch("BEGIN EXCLUSIVE").unwrap();
    journal.send(start("b1", SECOND));
    assert!(!journal.stop(Duration::from_millis(100)));
}

#[test]
fn a_file_that_turns_out_to_be_damaged_is_replaced_and_the_loss_is_recorded() {
    let place = Scene::new();
    let Started { journal, .. } = begin(&place.path());
    journal.send(start("b1", SECOND));
    assert!(journal.flush(LONG));
    // What a page that is gone looks like to a statement.
    place.raw().execute_batch("DROP TABLE heartbeats").unwrap();
    journal.send(Change::Heartbeat { boot_ns: 5 * SECOND });
    assert!(journal.flush(LONG));
    let status = journal.status();
    assert_eq!((status.restarts, status.written, status.dropped), (1, 2, 0));
    // The next one in a row is not the file's fault, and costs the record and not the file.
    place.raw().execute_batch("ALTER TABLE heartbeats RENAME COLUMN processes TO p").unwrap();
    journal.send(Change::Heartbeat { boot_ns: 6 * SECOND });
    assert!(!journal.flush(LONG));
    let status = journal.status();
    assert_eq!((status.restarts, status.written, status.dropped), (1, 2, 1));
    assert!(status.last_error.is_some_and(|error| error.ends_with("soon after a new one was begun")));
    place.raw().execute_batch("ALTER TABLE heartbeats RENAME COLUMN p TO processes").unwrap();
    assert!(journal.stop(LONG));
    let record = &place.all()[0];
    // The new file knows whose it is.
    assert_eq!((record.boot.host.as_str(), record.boot.last_ns >= 5 * SECOND), ("n1", true));
    let notes: Vec<_> = record.events.iter().map(|event| &event.what).collect();
    let [What::Lost(Lost { events: 0, at, note })] = notes[..] else { panic!("{notes:?}") };
    assert_eq!(at, "journal");
    assert!(note.contains("no such table: heartbeats") && note.contains("it was moved to"), "{note}");
}

#[test]
fn a_damaged_file_is_said_at_the_start_and_recorded_after_it() {
    let place = Scene::new();
    std::fs::write(place.path(), "x".repeat(9000)).unwrap();
    let Started { journal, notes, .. } = begin(&place.path());
    assert!(notes.len() == 1 && notes[0].contains("it was moved to"), "{notes:?}");
    journal.send(start("b1", SECOND));
    assert!(journal.stop(LONG));
    let events = events_at(&place.path());
    assert!(matches!(&events[..], [Event { what: What::Lost(lost), .. }] if lost.note == notes[0]), "{events:?}");
}

/// Runs it with a file system of its own that has `size`, in a thread with its own mounts.
fn in_tmpfs(size: &'static CStr, test: impl FnOnce(&Path) + Send + 'static) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipping: needs root to mount a small file system");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let run = move || {
        // SAFETY: it is this thread's own view of the mounts that changes, and nothing else is unshared.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), Some(size)).unwrap();
        test(&path);
    };
    thread::spawn(run).join().unwrap();
}

#[test]
fn a_full_disk_costs_records_and_is_told_once_there_is_room() {
    in_tmpfs(c"size=600k,mode=0755", |dir| {
        let path = dir.join(FILE);
        let Started { journal, .. } = begin(&path);
        journal.send(start("b1", SECOND));
        assert!(journal.flush(LONG));
        let long = "a disk that is full has no room for this ".repeat(20);
        for count in 0..3000 {
            journal.send(Change::Event(lost(count, count, &long)));
        }
        until("it is full", || journal.status().dropped > 0);
        let status = journal.status();
        assert!(
            status.errors > 0 && status.last_error.as_ref().is_some_and(|error| error.contains("full")),
            "{status:?}"
        );
        mount_remount(dir, MountFlags::empty(), c"size=64m").unwrap();
        until("it goes on", || {
            journal.send(Change::Event(lost(9999, 1, "y")));
            journal.flush(Duration::from_secs(3)) && journal.status().last_error.is_none()
        });
        let status = journal.status();
        assert!(journal.stop(LONG));
        assert_eq!(said_to_be_lost(&path), status.dropped);
        assert!(!files(dir).iter().any(|name| name.contains("damaged")), "a full disk is no damage");
    });
}

#[test]
fn a_read_only_disk_is_tried_again_until_it_can_be_written() {
    in_tmpfs(c"size=16m,mode=0755", |dir| {
        let path = dir.join(FILE);
        mount_remount(dir, MountFlags::RDONLY, c"").unwrap();
        let Started { journal, notes, .. } = begin(&path);
        assert!(notes.len() == 1 && notes[0].starts_with("nothing is recorded for now: "), "{notes:?}");
        assert!(notes[0].contains("Read-only file system"), "{notes:?}");
        journal.send(start("b1", SECOND));
        until("it is given up", || journal.status().dropped == 1);
        mount_remount(dir, MountFlags::empty(), c"").unwrap();
        journal.send(Change::Hold(hold(7, GPU0, SECOND, None)));
        until("it is written", || journal.status().written == 1);
        assert!(journal.stop(LONG));
        let record = &read(&path, &Question::default()).unwrap()[0];
        // The start had been dropped, and is made good.
        assert_eq!((record.boot.host.as_str(), record.runs.len(), record.holds.len()), ("n1", 1, 1));
        assert_eq!(said_to_be_lost(&path), 1);
        // And it is read where it cannot be written.
        mount_remount(dir, MountFlags::RDONLY, c"").unwrap();
        assert_eq!(read(&path, &Question::default()).unwrap()[0].holds.len(), 1);
    });
}
