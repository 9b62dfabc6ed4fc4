use std::time::Duration;

use super::*;
use crate::journal::{
    Limits,
    export::{Batch, Position, Sent, after, newest, pending},
};

const BEGIN: Position = Position { id: 0, time_ns: 0 };
/// Long after everything.
const LATE: u64 = 1000 * SECOND;

fn exit(pid: u32, at: u64) -> Change {
    let what = What::Exit(Exit { key: key(pid), tid: pid, comm: format!("p{pid}"), status: 9 });
    Change::Event(event(at, what))
}

fn dead(pid: u32, at: u64, cause: Cause) -> ProcessRow {
    let death = Death { cause, ..full_process().death.unwrap() };
    ProcessRow { exit_ns: Some(at), status: Some(9), death: Some(death), ..process(pid, None) }
}

fn held(pid: u32, at: u64) -> Change {
    let what = What::Held(Held { key: key(pid), inherited_from: None, from_snapshot: false, devices: Vec::new() });
    Change::Event(event(at, what))
}

fn closed(pid: u32, at: u64) -> Change {
    Change::Event(event(at, What::Closed(Subject { key: key(pid) })))
}

fn ended(pid: u32, node: &str, from: u64, until: u64, ended: HoldEnd) -> Change {
    Change::Hold(HoldRow { ended: Some(ended), ..hold(pid, node, from, Some(until)) })
}

fn told(batch: &Batch) -> Vec<String> {
    let one = |sent: &Sent| match sent {
        Sent::Death(row) => format!("death {} {:?}", row.key.pid, row.death.as_ref().unwrap().cause),
        Sent::Hold(hold, process) => {
            format!("hold {} {} {}", hold.key.pid, hold.node, process.as_ref().map_or("?", |row| row.comm.as_str()))
        }
        Sent::Event(event) => match &event.what {
            What::Lost(lost) => format!("lost {}", lost.note),
            what => serde_json::to_value(what).unwrap()["event"].as_str().unwrap().to_owned(),
        },
    };
    batch.items.iter().map(|item| one(&item.what)).collect()
}

#[test]
fn what_is_sent_comes_in_the_order_of_recording_and_once() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let mut changes = vec![start("b1", SECOND), process_change(full_process())];
    changes.extend(events().into_iter().map(Change::Event));
    writer.apply(&changes).unwrap();
    let batch = after(&place.path(), BEGIN, LATE).unwrap();
    assert_eq!(told(&batch), ["start", "oom", "xid", "reap", "death 100 OomKill", "lost full", "stop"]);
    let reaped =
        batch.items.iter().find(|item| matches!(&item.what, Sent::Event(event) if matches!(event.what, What::Reap(_))));
    assert_eq!(reaped.unwrap().process.as_deref(), Some(&full_process()), "with who it is");
    assert_eq!((batch.gone, batch.behind, batch.is_new), (0, 0, false));
    assert_eq!(batch.looked, events().len() as u64);
    let end = batch.end.unwrap();
    assert_eq!(pending(&place.path(), BEGIN).unwrap(), (events().len() as u64, Some(wall(SECOND))));
    assert_eq!(pending(&place.path(), end).unwrap(), (0, None));
    let again = after(&place.path(), end, LATE).unwrap();
    assert_eq!(again, Batch::default(), "nothing more");
    writer.apply(&[Change::Event(lost(20 * SECOND, 1, "later"))]).unwrap();
    assert_eq!(told(&after(&place.path(), end, LATE).unwrap()), ["lost later"]);
}

#[test]
fn holds_are_sent_when_they_end() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer
        .apply(&[
            start("b1", SECOND),
            process_change(process(7, None)),
            held(7, 2 * SECOND),
            // Closed by a process that lives on, at its next look.
            ended(7, GPU0, 2 * SECOND, 4 * SECOND, HoldEnd::Closed),
            held(7, 4 * SECOND),
            held(7, 5 * SECOND),
            // With the process.
            ended(7, GPU1, 2 * SECOND, 6 * SECOND, HoldEnd::Exited),
            process_change(dead(7, 6 * SECOND, Cause::KilledBy)),
            exit(7, 6 * SECOND),
            closed(7, 6 * SECOND),
            // Held still.
            Change::Hold(hold(8, GPU0, 7 * SECOND, None)),
            held(8, 7 * SECOND),
        ])
        .unwrap();
    let batch = after(&place.path(), BEGIN, LATE).unwrap();
    assert_eq!(told(&batch), ["hold 7 /dev/nvidia0 p7", "death 7 KilledBy", "hold 7 /dev/nvidia1 p7"]);
}

#[test]
fn a_death_waits_until_its_cause_is_decided_and_holds_up_what_comes_after() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    writer
        .apply(&[
            start("b1", SECOND),
            Change::Event(lost(2 * SECOND, 1, "a")),
            process_change(dead(7, 3 * SECOND, Cause::Unknown)),
            exit(7, 3 * SECOND),
            Change::Event(lost(3 * SECOND, 1, "b")),
            // A reap's time by a wall clock that was set back meanwhile.
            Change::Event(lost(9000 * SECOND, 1, "c")),
        ])
        .unwrap();
    let at = |seconds| told(&after(&place.path(), BEGIN, seconds * SECOND).unwrap());
    assert_eq!(at(3), [""; 0]);
    assert_eq!(at(4), ["lost a"]);
    assert_eq!(at(14), ["lost a"]);
    assert_eq!(at(15), ["lost a", "death 7 Unknown", "lost b", "lost c"]);
    let batch = after(&place.path(), BEGIN, 4 * SECOND).unwrap();
    assert_eq!((batch.looked, batch.behind), (1, 3));
    // Of an earlier boot everything is decided.
    place.open("b2").apply(&[start("b2", SECOND)]).unwrap();
    assert_eq!(at(3), ["lost a", "death 7 Unknown", "lost b", "lost c"]);
}

#[test]
fn who_has_sent_nothing_begins_with_what_is_recorded_from_then_on() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let lost = |second: u64| Change::Event(lost(second * SECOND, 1, &second.to_string()));
    writer.apply(&[start("b1", SECOND)]).unwrap();
    assert_eq!(newest(&place.path(), 5 * SECOND).unwrap(), BEGIN);
    writer.apply(&[lost(4), lost(5), lost(6)]).unwrap();
    let from = newest(&place.path(), 5 * SECOND).unwrap();
    assert_eq!(told(&after(&place.path(), from, LATE).unwrap()), ["lost 5", "lost 6"]);
    // Times of another boot say nothing.
    place.open("b2").apply(&[start("b2", SECOND)]).unwrap();
    let from = newest(&place.path(), 5 * SECOND).unwrap();
    assert_eq!(from.id, 3);
}

#[test]
fn what_retention_removes_first_is_counted() {
    const DAY: u64 = 86400 * SECOND;
    let place = Scene::new();
    let mut writer = place.open("b1");
    let mut changes = vec![start("b1", SECOND)];
    changes.extend((0..40).map(|day| Change::Event(lost(day * DAY + SECOND, 1, &day.to_string()))));
    writer.apply(&changes).unwrap();
    let third = Position { id: 3, time_ns: wall(2 * DAY + SECOND).as_nanosecond() as i64 };
    let look = |position| after(&place.path(), position, 50 * DAY).unwrap();
    assert_eq!((look(third).gone, look(third).looked), (0, 37));
    let limits = Limits { max_age: Duration::from_hours(30 * 24), max_size: 1 << 40 };
    while writer.tidy(limits, wall(40 * DAY)).unwrap().more {}
    // Days 0 to 9 went, of which three were sent.
    let batch = look(third);
    assert_eq!((batch.gone, batch.looked, batch.is_new), (7, 30, false));
    assert_eq!(told(&batch)[0], "lost 10");
    // Nobody had sent anything.
    assert_eq!(look(BEGIN).gone, 10);
    // Where rows go from the middle, too.
    place.raw().execute("DELETE FROM events WHERE id IN (20, 21, 30)", []).unwrap();
    assert_eq!((look(third).gone, look(third).looked), (10, 27));
    // What was sent may go.
    let last = look(third).end.unwrap();
    place.raw().execute("DELETE FROM events WHERE id < 38", []).unwrap();
    assert_eq!(look(last), Batch::default());
}

#[test]
fn a_journal_that_begins_anew_is_sent_from_its_beginning() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let lost = |second: u64| Change::Event(lost(second * SECOND, 1, &second.to_string()));
    writer.apply(&[start("b1", SECOND), lost(1), lost(2), lost(3)]).unwrap();
    let end = after(&place.path(), BEGIN, LATE).unwrap().end.unwrap();
    assert_eq!(end.id, 3);
    // Nothing is left in it.
    place.raw().execute("DELETE FROM events", []).unwrap();
    assert_eq!(after(&place.path(), end, LATE).unwrap().end, None);
    writer.apply(&[lost(4)]).unwrap();
    let batch = after(&place.path(), end, LATE).unwrap();
    assert_eq!((told(&batch), batch.is_new, batch.gone), (vec!["lost 4".to_owned()], true, 0));
    // Another one, which has more events by now.
    let mut writer = Writer::begin_anew(&place.path(), "b1", "it is damaged").unwrap().writer;
    writer.apply(&[start("b1", SECOND)]).unwrap();
    writer.apply(&(5..15).map(lost).collect::<Vec<_>>()).unwrap();
    let batch = after(&place.path(), end, LATE).unwrap();
    assert_eq!((batch.looked, batch.is_new, batch.gone), (10, true, 0));
}

#[test]
fn a_host_that_went_down_is_told_at_the_first_start_after_it_and_once() {
    let place = Scene::new();
    let began = |id: &str, at: u64| {
        let what = What::Start(Start {
            boot_id: id.into(),
            host: "n1".into(),
            kernel: "6.8.0".into(),
            version: "0.1.0".into(),
            backend: Backend::Gate,
            adopted: false,
            daemon_pid: 700,
            wall_offset_ns: offset(),
            devices: Vec::new(),
        });
        [start(id, at), Change::Event(event(at, what))]
    };
    let mut writer = place.open("b1");
    writer.apply(&began("b1", SECOND)).unwrap();
    writer
        .apply(&[
            process_change(process(7, None)),
            Change::Hold(hold(7, GPU0, 2 * SECOND, None)),
            // Decided in time, and sent then.
            process_change(dead(8, 3 * SECOND, Cause::KilledBy)),
            exit(8, 3 * SECOND),
            Change::Heartbeat { boot_ns: 9 * SECOND },
        ])
        .unwrap();
    drop(writer);
    let mut writer = place.open("b2");
    writer.apply(&began("b2", SECOND)).unwrap();
    writer.apply(&began("b2", 5 * SECOND)).unwrap();
    let batch = after(&place.path(), BEGIN, LATE).unwrap();
    assert_eq!(told(&batch), ["start", "death 8 KilledBy", "death 7 HostDown", "start", "start"]);
    let boots: Vec<&str> = batch.items.iter().map(|item| item.boot.boot_id.as_str()).collect();
    assert_eq!(boots, ["b1", "b1", "b1", "b2", "b2"]);
}

#[test]
fn many_events_take_several_steps_and_none_is_left_out() {
    let place = Scene::in_memory();
    let mut writer = place.open("b1");
    let changes: Vec<Change> = (0..1300).map(|at| Change::Event(lost(SECOND + at, 1, &at.to_string()))).collect();
    writer.apply(&[start("b1", SECOND)]).unwrap();
    writer.apply(&changes).unwrap();
    let (mut position, mut seen, mut left) = (BEGIN, Vec::new(), Vec::new());
    while let Batch { end: Some(end), items, behind, .. } = after(&place.path(), position, LATE).unwrap() {
        seen.extend(told(&Batch { items, ..Batch::default() }));
        left.push(behind);
        position = end;
    }
    assert_eq!(seen, (0..1300).map(|at| format!("lost {at}")).collect::<Vec<_>>());
    assert_eq!(left, [788, 276, 0]);
}
