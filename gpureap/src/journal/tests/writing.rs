use super::*;
use crate::journal::{Error, Limits, schema};

#[test]
fn every_change_comes_back_as_it_was() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let hold = HoldRow {
        ended: Some(HoldEnd::Exited),
        origin: HoldOrigin::Inherited,
        fds: 7,
        maps: 3,
        role: Some(Role::Handle),
        inherited_from: Some(key(50)),
        ..hold(100, GPU0, 2 * SECOND, Some(9 * SECOND))
    };
    let parent = ProcessRow { ancestor: true, ..process(50, None) };
    let mut changes = vec![
        start("b1", SECOND),
        process_change(full_process()),
        process_change(parent.clone()),
        Change::Hold(hold.clone()),
        Change::Heartbeat { boot_ns: 20 * SECOND },
        Change::Stop { boot_ns: 30 * SECOND },
    ];
    changes.extend(events().into_iter().map(Change::Event));
    writer.apply(&changes).unwrap();

    let records = place.all();
    let [record] = &records[..] else { panic!("{records:#?}") };
    let Record { boot: about, runs, devices, processes, holds, events: read } = record;
    assert_eq!(*about, Boot { last_ns: 30 * SECOND, ..boot("b1") });
    assert_eq!(runs[..], [Run { end_ns: Some(30 * SECOND), ..run(SECOND) }]);
    assert_eq!(devices[..], [device(GPU0, 0), device(GPU1, 1)]);
    assert_eq!(processes[..], [parent, full_process()]);
    assert_eq!(holds[..], [hold]);
    assert_eq!(*read, events());
}

#[test]
fn a_clock_that_is_set_moves_all_times_of_the_boot() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    assert!(!writer.is_behind_clock(0).unwrap(), "there is no boot yet");
    writer.apply(&[start("b1", SECOND), Change::Hold(hold(100, GPU0, 2 * SECOND, None))]).unwrap();
    let before = boot("b1").wall_offset_ns;
    let after = before + 3600 * SECOND as i64;
    assert!(!writer.is_behind_clock(before).unwrap() && writer.is_behind_clock(after).unwrap());
    writer.apply(&[Change::Clock { wall_offset_ns: after }]).unwrap();
    assert!(!writer.is_behind_clock(after).unwrap());
    let Record { boot: about, holds, .. } = &place.all()[0];
    assert_eq!((about.wall_offset_ns, about.last_ns), (after, 2 * SECOND));
    assert_eq!(holds[..], [hold(100, GPU0, 2 * SECOND, None)], "times since boot stay");
}

/// More than JSON's numbers hold everywhere, let alone 32 bits.
#[test]
fn times_of_a_boot_of_years_come_back_as_they_were() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let late = (1 << 53) + 1;
    writer.apply(&[start("b1", SECOND), Change::Hold(hold(100, GPU0, late, Some(late + 2)))]).unwrap();
    assert_eq!(place.all()[0].holds[..], [hold(100, GPU0, late, Some(late + 2))]);
}

#[test]
fn rows_replace_the_row_of_the_same_identity() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let changes = [
        start("b1", SECOND),
        Change::Hold(hold(100, GPU0, 2 * SECOND, None)),
        process_change(process(100, None)),
        Change::Heartbeat { boot_ns: 3 * SECOND },
    ];
    writer.apply(&changes).unwrap();
    writer.apply(&changes).unwrap();
    assert_eq!(writer.open_holds().unwrap(), [hold(100, GPU0, 2 * SECOND, None)]);
    writer.apply(&[Change::Hold(hold(100, GPU0, 2 * SECOND, Some(5 * SECOND)))]).unwrap();
    writer.apply(&[process_change(full_process()), start("b1", SECOND)]).unwrap();
    // A second hold of the same device is another one.
    writer.apply(&[Change::Hold(hold(100, GPU0, 6 * SECOND, None))]).unwrap();
    let record = &place.all()[0];
    assert_eq!(record.holds, [hold(100, GPU0, 2 * SECOND, Some(5 * SECOND)), hold(100, GPU0, 6 * SECOND, None)]);
    assert_eq!(record.processes, [full_process()]);
    assert_eq!((record.runs.len(), record.devices.len()), (1, 2));
    let references: i64 =
        place.raw().query_row("SELECT count(*) FROM pragma_foreign_key_check", [], |row| row.get(0)).unwrap();
    assert_eq!(references, 0);
}

#[test]
fn a_node_that_nobody_announced_is_no_device() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND), Change::Hold(hold(100, "slot 9", SECOND, None))]).unwrap();
    let record = &place.all()[0];
    assert_eq!(record.holds[0].node, "slot 9");
    assert_eq!(record.devices.len(), 2);
}

#[test]
fn what_was_told_of_an_end_stays_and_so_does_a_holder_that_is_an_ancestor_later() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let ended = |at| ProcessRow { exit_ns: Some(at), status: Some(6), ..full_process() };
    let key = full_process().key;
    let ancestor = |key, exit_ns: Option<u64>| ProcessRow {
        key,
        comm: "again".into(),
        ancestor: true,
        exit_ns,
        status: exit_ns.map(|_| 9),
        ..ProcessRow::default()
    };
    let (shell, gone) = (process(200, None), process(201, None));
    writer
        .apply(&[
            start("b1", SECOND),
            process_change(ended(9 * SECOND)),
            process_change(shell.clone()),
            process_change(ancestor(gone.key, Some(3 * SECOND))),
        ])
        .unwrap();
    let holds = [100, 200, 201].map(|pid| Change::Hold(hold(pid, GPU0, 2 * SECOND, Some(3 * SECOND))));
    writer.apply(&holds).unwrap();
    writer
        .apply(&[
            process_change(ended(9 * SECOND + 321)),
            process_change(ancestor(key, Some(9 * SECOND + 321))),
            process_change(ancestor(shell.key, Some(4 * SECOND))),
            process_change(gone.clone()),
        ])
        .unwrap();
    let record = &place.all()[0];
    let row = |key| record.processes.iter().find(|row| row.key == key).unwrap();
    assert_eq!(*row(key), ended(9 * SECOND));
    // Its end is new.
    assert_eq!(*row(shell.key), ProcessRow { exit_ns: Some(4 * SECOND), status: Some(9), ..shell });
    // And who was an ancestor holds something now.
    assert_eq!(*row(gone.key), ProcessRow { exit_ns: Some(3 * SECOND), status: Some(9), ..gone });
}

#[test]
fn the_same_boot_is_taken_up_again() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let exiting = ProcessRow { exit_ns: Some(5 * SECOND), status: Some(0), ..process(102, None) };
    let dead = ProcessRow { exit_ns: Some(5 * SECOND), status: Some(0), ..process(103, None) };
    let rows = [process(50, None), process(101, Some(50)), exiting, dead];
    let mut changes = vec![start("b1", SECOND)];
    changes.extend(rows.clone().map(process_change));
    let open = [hold(101, GPU0, 2 * SECOND, None), hold(102, GPU1, 3 * SECOND, None)];
    changes.extend(open.clone().map(Change::Hold));
    changes.push(Change::Hold(hold(103, GPU0, 2 * SECOND, Some(5 * SECOND))));
    writer.apply(&changes).unwrap();
    drop(writer);

    let writer = place.open("b1");
    assert_eq!(writer.open_holds().unwrap(), open);
    assert_eq!(writer.open_processes().unwrap(), rows[..3]);
    assert_eq!(place.all()[0].holds.iter().filter(|hold| hold.ended.is_none()).count(), 2);
}

#[test]
fn a_new_boot_ends_what_the_last_one_held_at_its_last_sign_of_life() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let gone = ProcessRow { exit_ns: Some(5 * SECOND), status: Some(0), ..process(102, None) };
    let changes = [
        start("b1", SECOND),
        process_change(process(50, None)),
        process_change(process(101, Some(50))),
        process_change(gone.clone()),
        Change::Hold(hold(101, GPU0, 2 * SECOND, None)),
        Change::Hold(hold(102, GPU0, 2 * SECOND, None)),
        Change::Hold(hold(101, GPU1, 2 * SECOND, Some(3 * SECOND))),
        Change::Heartbeat { boot_ns: 60 * SECOND + SECOND / 2 },
    ];
    writer.apply(&changes).unwrap();
    drop(writer);

    let mut writer = place.open("b2");
    assert_eq!((writer.open_holds().unwrap(), writer.open_processes().unwrap()), (vec![], vec![]));
    writer.apply(&[start("b2", SECOND)]).unwrap();
    // Once closed, it stays as it is.
    drop(writer);
    drop(place.open("b2"));
    let records = place.all();
    assert_eq!(records.iter().map(|record| record.boot.boot_id.as_str()).collect::<Vec<_>>(), ["b1", "b2"]);
    let bound = 60 * SECOND + SECOND / 2;
    let down = |pid| HoldRow { ended: Some(HoldEnd::HostDown), ..hold(pid, GPU0, 2 * SECOND, Some(bound)) };
    let mut holds = records[0].holds.clone();
    holds.retain(|hold| hold.ended != Some(HoldEnd::Closed));
    assert_eq!(holds, [down(101), down(102)]);
    let processes = &records[0].processes;
    assert_eq!((processes[0].death.clone(), processes[0].key), (None, key(50)), "it held nothing");
    let death = processes[1].death.clone().unwrap();
    assert_eq!((death.cause, death.boot_ns), (Cause::HostDown, Some(bound)));
    assert_eq!(
        death.evidence,
        [
            "it held at 2026-11-01T00:01:00.5Z, the last sign of life of its boot; there is no record of that boot after it"
        ]
    );
    assert_eq!(processes[2], gone, "its end is known");
}

#[test]
fn after_a_stop_nobody_knows_what_the_host_did() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let changes = [
        start("b1", SECOND),
        process_change(process(101, None)),
        Change::Hold(hold(101, GPU0, 2 * SECOND, None)),
        Change::Stop { boot_ns: 60 * SECOND },
    ];
    writer.apply(&changes).unwrap();
    drop(writer);
    drop(place.open("b2"));
    let record = &place.all()[0];
    assert_eq!((record.holds[0].ended, record.holds[0].released_ns), (Some(HoldEnd::Unseen), Some(60 * SECOND)));
    let death = record.processes[0].death.clone().unwrap();
    assert_eq!((death.cause, death.boot_ns), (Cause::Unknown, None));
    assert_eq!(
        death.evidence,
        [
            "it held when the daemon was stopped at 2026-11-01T00:01:00Z; the host went down at some later time, and nobody \
          recorded what happened in between"
        ]
    );
}

#[test]
fn a_hold_does_not_end_before_it_began() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND), Change::Hold(hold(101, GPU0, 90 * SECOND, None))]).unwrap();
    writer.connection.execute("UPDATE boots SET last_ns = 5", []).unwrap();
    drop(writer);
    drop(place.open("b2"));
    assert_eq!(place.all()[0].holds[0].released_ns, Some(90 * SECOND));
}

#[test]
fn the_last_heartbeats_are_kept_with_how_much_was_held() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let held = [GPU0, GPU1].map(|node| Change::Hold(hold(101, node, SECOND, None)));
    writer.apply(&held).unwrap();
    for beat in 1..=20 {
        writer.apply(&[Change::Heartbeat { boot_ns: beat * 10 * SECOND }]).unwrap();
    }
    let raw = place.raw();
    let (count, first, holds, processes): (i64, i64, i64, i64) = raw
        .query_row("SELECT count(*), min(boot_ns), min(holds), max(processes) FROM heartbeats", [], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })
        .unwrap();
    assert_eq!((count, first, holds, processes), (8, 130 * SECOND as i64, 2, 1));
    assert_eq!(place.all()[0].boot.last_ns, 200 * SECOND);
}

#[test]
fn a_batch_is_written_as_a_whole_or_not_at_all() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    let pages: i64 = writer.connection.pragma_query_value(None, "page_count", |row| row.get(0)).unwrap();
    writer.connection.pragma_update(None, "max_page_count", pages + 4).unwrap();
    let many: Vec<Change> =
        (0..2000).map(|at| Change::Event(lost(at, at, "a disk that is full has no room for this"))).collect();
    match writer.apply(&many) {
        Err(Error::Unwritable(message)) => assert!(message.ends_with("database or disk is full"), "{message}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(place.all()[0].events, []);
    writer.apply(&many[..3]).unwrap();
    writer.connection.pragma_update(None, "max_page_count", i64::from(u32::MAX)).unwrap();
    writer.apply(&many).unwrap();
    assert_eq!(place.all()[0].events.len(), 2003);
}

#[test]
fn urgent_batches_are_synced_and_others_are_not() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let level = |writer: &Writer| -> i64 {
        writer.connection.pragma_query_value(None, "synchronous", |row| row.get(0)).unwrap()
    };
    let calm = Change::Hold(hold(101, GPU0, SECOND, None));
    writer.apply(&[start("b1", SECOND), calm.clone()]).unwrap();
    assert_eq!(level(&writer), 2);
    writer.apply(std::slice::from_ref(&calm)).unwrap();
    assert_eq!(level(&writer), 1);
    writer.apply(&[calm, Change::Event(lost(1, 1, ""))]).unwrap();
    assert_eq!(level(&writer), 2);
}

#[test]
fn the_file_is_set_up_once_and_for_all() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    drop(writer);
    let raw = place.raw();
    let text = |name: &str| raw.pragma_query_value(None, name, |row| row.get::<_, rusqlite::types::Value>(0)).unwrap();
    assert_eq!(text("journal_mode"), "wal".to_owned().into());
    assert_eq!(text("auto_vacuum"), 2.into());
    assert_eq!(text("user_version"), schema::VERSION.into());
    assert_eq!(text("application_id"), i64::from(schema::APPLICATION_ID).into());
}

/// What version 1 has written, all versions after it read.
#[test]
fn a_file_of_version_1_is_taken_over() {
    let place = Scene::new();
    place.raw().execute_batch(include_str!("version-1.sql")).unwrap();
    let mut writer = place.open("b1");
    assert_eq!(writer.open_holds().unwrap(), [hold(101, GPU1, 6 * SECOND, None)]);
    writer.apply(&[start("b1", 40 * SECOND)]).unwrap();
    writer.tidy(Limits { max_age: std::time::Duration::MAX, max_size: 1 << 30 }, wall(SECOND)).unwrap();
    let record = &place.all()[0];
    assert_eq!(record.processes, [process(50, None), full_process(), process(101, Some(50))]);
    assert_eq!(record.events, events());
    assert_eq!(record.runs.len(), 2);
}
