use std::time::Duration;

use super::*;
use crate::journal::{Limits, Tidied};

const DAY: u64 = 86400 * SECOND;

fn ended(pid: u32, parent: Option<u32>, at: u64) -> Change {
    process_change(ProcessRow { exit_ns: Some(at), status: Some(0), ..process(pid, parent) })
}

/// Until nothing is left to do; how many rows went.
fn tidy(writer: &mut Writer, limits: Limits, now: Timestamp) -> usize {
    let mut rows = 0;
    for _ in 0..10_000 {
        let Tidied { rows: step, more } = writer.tidy(limits, now).unwrap();
        assert!(step <= 1600, "{step}");
        rows += step;
        if !more {
            return rows;
        }
    }
    panic!("it does not end")
}

fn count(place: &Scene, table: &str) -> i64 {
    place.raw().query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
}

#[test]
fn what_is_too_old_goes_and_what_is_held_stays() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let mut changes = vec![
        start("b1", SECOND),
        // 20 held on the first day and holds still; 10 and 11 are its ancestors, 12 is nobody's.
        process_change(ProcessRow { ancestor: true, ..process(10, None) }),
        process_change(ProcessRow { ancestor: true, ..process(11, Some(10)) }),
        process_change(ProcessRow { ancestor: true, ..process(12, Some(10)) }),
        process_change(process(20, Some(11))),
        Change::Hold(hold(20, GPU0, SECOND, None)),
        Change::Hold(hold(20, GPU1, SECOND, Some(2 * SECOND))),
    ];
    for day in 0..40 {
        let pid = 100 + day as u32;
        let at = day * DAY + 3600 * SECOND;
        changes.push(ended(pid, Some(12), at));
        changes.push(Change::Hold(hold(pid, GPU0, at - SECOND, Some(at))));
        changes.push(Change::Event(lost(at, day, "x")));
    }
    writer.apply(&changes).unwrap();
    let limits = Limits { max_age: Duration::from_hours(30 * 24), max_size: 1 << 40 };
    tidy(&mut writer, limits, wall(40 * DAY));
    let record = &place.all()[0];
    let days: Vec<u64> = record.events.iter().map(|event| event.boot_ns / DAY).collect();
    assert_eq!(days, (10..40).collect::<Vec<u64>>());
    let holders: Vec<u32> = record.holds.iter().map(|hold| hold.key.pid).collect();
    assert_eq!(holders, [20].into_iter().chain(110..140).collect::<Vec<u32>>());
    let mut pids: Vec<u32> = record.processes.iter().map(|row| row.key.pid).collect();
    pids.sort_unstable();
    assert_eq!(pids, [10, 11, 12, 20].into_iter().chain(110..140).collect::<Vec<u32>>());
    assert_eq!(count(&place, "processes"), 34);

    // The ancestor whose last child is gone goes as well.
    tidy(&mut writer, limits, wall(80 * DAY));
    let pids: Vec<u32> = place.all()[0].processes.iter().map(|row| row.key.pid).collect();
    assert_eq!(pids, [10, 11, 20]);
    assert_eq!((count(&place, "processes"), count(&place, "holds"), count(&place, "boots")), (3, 1, 1));
}

#[test]
fn a_boot_that_nothing_is_left_of_is_forgotten() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let held = [process_change(process(20, None)), Change::Hold(hold(20, GPU0, SECOND, None))];
    writer.apply(&[start("b1", SECOND), Change::Heartbeat { boot_ns: DAY }]).unwrap();
    writer.apply(&held).unwrap();
    drop(writer);
    let mut writer = place.open("b2");
    let later = Boot { wall_offset_ns: offset() + 2 * DAY as i64, ..boot("b2") };
    writer.apply(&[Change::Start { boot: later, run: run(SECOND), devices: vec![device(GPU0, 0)] }]).unwrap();
    let limits = Limits { max_age: Duration::from_hours(30 * 24), max_size: 1 << 40 };
    tidy(&mut writer, limits, wall(30 * DAY));
    assert_eq!(place.all().len(), 2);
    tidy(&mut writer, limits, wall(32 * DAY));
    let records = place.all();
    assert_eq!(records.iter().map(|record| record.boot.boot_id.as_str()).collect::<Vec<_>>(), ["b2"]);
    let left = ["boots", "runs", "devices", "holds", "processes", "heartbeats"].map(|table| count(&place, table));
    assert_eq!(left, [1, 1, 1, 0, 0, 0]);
}

#[test]
fn the_oldest_goes_when_it_is_too_much_and_the_file_shrinks() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer
        .apply(&[start("b1", SECOND), process_change(process(20, None)), Change::Hold(hold(20, GPU0, 1, None))])
        .unwrap();
    let last = 6000;
    for pid in 1000..1000 + last {
        let at = u64::from(pid) * SECOND;
        let row = ProcessRow { key: key(pid), exit_ns: Some(at), ..full_process() };
        let row = ProcessRow { parent: None, death: None, ..row };
        let closed = Change::Hold(hold(pid, GPU0, at - 1, Some(at)));
        writer.apply(&[process_change(row), closed, Change::Event(lost(at, 1, "x"))]).unwrap();
    }
    writer.checkpoint().unwrap();
    let before = writer.size();
    let limit = before / 3;
    let rows = tidy(&mut writer, Limits { max_age: Duration::MAX, max_size: limit }, wall(DAY));
    writer.checkpoint().unwrap();
    let after = writer.size();
    println!("{before} bytes, {after} after {rows} rows went; {limit} were allowed");
    assert!(after <= limit + (2 << 20), "{after} of {limit}");
    assert!(after >= limit / 2, "{after} of {limit}: more went than had to");
    let record = &place.all()[0];
    assert_eq!(record.holds[0], hold(20, GPU0, 1, None), "it is held");
    assert_eq!(record.holds.last().unwrap().key.pid, 1000 + last - 1);
    // From some time on everything is there, and before it nothing.
    let kept: Vec<u32> = record.holds[1..].iter().map(|hold| hold.key.pid).collect();
    assert!(kept.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{kept:?}");
    assert!(kept.len() > 500, "{}", kept.len());
    assert!(record.processes.len() == record.holds.len());
}

#[test]
fn too_little_room_for_what_is_held_ends_in_peace() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let mut changes = vec![start("b1", SECOND)];
    for pid in 1000..1500 {
        changes.push(process_change(ProcessRow { key: key(pid), exit_ns: None, death: None, ..full_process() }));
        changes.push(Change::Hold(hold(pid, GPU0, SECOND, None)));
    }
    writer.apply(&changes).unwrap();
    tidy(&mut writer, Limits { max_age: Duration::from_secs(1), max_size: 1 }, wall(DAY));
    assert_eq!(writer.open_holds().unwrap().len(), 500);
    assert_eq!(writer.open_processes().unwrap().len(), 500);
}
