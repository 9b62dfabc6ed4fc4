use super::*;
use crate::{
    error::exit_of,
    exit_code,
    journal::{BootChoice, reader},
};

/// Two boots. In the first, 100 held GPU 0 from 100 s to 200 s, 101 both from 150 s to 400 s, 102 (a child of 101) GPU 1
/// from 500 s on; 60 sent 101 a signal at 390 s. The host went down at 600 s. In the second, a day later, 103 holds GPU 0.
fn two_boots() -> Scene {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let ancestor = |pid, parent| process_change(ProcessRow { ancestor: true, ..process(pid, parent) });
    let died = |pid, parent, at| process_change(ProcessRow { exit_ns: Some(at), ..process(pid, parent) });
    let from = Sender { key: key(60), ..sender() };
    let signal = What::Signal(Signal {
        key: key(101),
        tid: 101,
        thread: "p101".into(),
        signal: "SIGKILL".into(),
        code: Some(0),
        sender: Some(Box::new(from)),
        running: None,
    });
    let node = |node: &str, boot_ns| {
        let file = FileEvent { key: None, tid: None, comm: String::new(), node: node.into(), file: 1, failed: false };
        Change::Event(event(boot_ns, What::Free(file)))
    };
    let exit = |pid, at| {
        let exit = Exit { key: key(pid), tid: pid, comm: format!("p{pid}"), status: 0 };
        Change::Event(event(at, What::Exit(exit)))
    };
    writer
        .apply(&[
            start("b1", SECOND),
            ancestor(1, None),
            ancestor(50, Some(1)),
            ancestor(60, Some(1)),
            ancestor(70, Some(1)),
            died(100, Some(50), 200 * SECOND),
            died(101, Some(50), 400 * SECOND),
            process_change(process(102, Some(101))),
            Change::Hold(hold(100, GPU0, 100 * SECOND, Some(200 * SECOND))),
            Change::Hold(hold(101, GPU0, 150 * SECOND, Some(400 * SECOND))),
            Change::Hold(hold(101, GPU1, 150 * SECOND, Some(400 * SECOND))),
            Change::Hold(hold(102, GPU1, 500 * SECOND, None)),
            node(GPU0, 200 * SECOND),
            exit(100, 200 * SECOND),
            Change::Event(event(390 * SECOND, signal)),
            exit(101, 400 * SECOND),
            node(GPU1, 400 * SECOND),
            Change::Heartbeat { boot_ns: 600 * SECOND },
        ])
        .unwrap();
    drop(writer);
    let mut writer = place.open("b2");
    let later = Boot { wall_offset_ns: offset() + 86_400 * SECOND as i64, ..boot("b2") };
    let begin = Change::Start { boot: later, run: run(SECOND), devices: vec![device(GPU0, 0)] };
    writer
        .apply(&[begin, process_change(process(103, None)), Change::Hold(hold(103, GPU0, 10 * SECOND, None))])
        .unwrap();
    place
}

fn ask(place: &Scene, question: &Question) -> Vec<Record> {
    read(&place.path(), question).unwrap()
}

/// Pids of holds, of processes and names of events, of each boot.
fn told(records: &[Record]) -> Vec<(Vec<u32>, Vec<u32>, usize)> {
    let of = |record: &Record| {
        let holds = record.holds.iter().map(|hold| hold.key.pid).collect();
        let mut pids: Vec<u32> = record.processes.iter().map(|row| row.key.pid).collect();
        pids.sort_unstable();
        (holds, pids, record.events.len())
    };
    records.iter().map(of).collect()
}

fn between(since: u64, until: u64) -> Question {
    Question { since: Some(wall(since * SECOND)), until: Some(wall(until * SECOND)), ..Question::default() }
}

#[test]
fn holds_that_overlap_the_window_with_their_ancestors_and_the_sender() {
    let place = two_boots();
    // Nothing asked for is everything: 70 has nothing to do with anybody.
    let everything = told(&ask(&place, &Question::default()));
    assert_eq!(everything, [(vec![100, 101, 101, 102], vec![1, 50, 60, 100, 101, 102], 5), (vec![103], vec![103], 0)]);
    // Events of ten minutes before, too, and the exit of a holder after the window.
    assert_eq!(told(&ask(&place, &between(120, 140))), [(vec![100], vec![1, 50, 100], 1)]);
    assert_eq!(told(&ask(&place, &between(200, 250))), [(vec![100, 101, 101], vec![1, 50, 60, 100, 101], 4)]);
    assert_eq!(told(&ask(&place, &between(201, 250))), [(vec![101, 101], vec![1, 50, 60, 101], 4)]);
    // Who held when the host went down.
    let down = ask(&place, &between(550, 700));
    assert_eq!(told(&down), [(vec![102], vec![1, 50, 60, 101, 102], 5)]);
    assert_eq!(down[0].holds[0].ended, Some(HoldEnd::HostDown));
    // After the record of the first boot and before the second.
    assert_eq!(told(&ask(&place, &between(700, 800))), []);
    assert_eq!(told(&ask(&place, &between(86_405, 86_500))), [(vec![103], vec![103], 0)]);
}

#[test]
fn an_instant() {
    let place = two_boots();
    for (second, expected) in
        [(99, vec![]), (160, vec![100, 101, 101]), (300, vec![101, 101]), (450, vec![]), (599, vec![102])]
    {
        let records = ask(&place, &Question::at(wall(second * SECOND)));
        assert_eq!(told(&records)[0].0, expected, "{second}");
    }
}

#[test]
fn processes_are_chosen_by_device_or_number_and_come_with_all_that_they_held() {
    let place = two_boots();
    let question = Question { nodes: vec![GPU1.into()], ..between(0, 1000) };
    let records = ask(&place, &question);
    assert_eq!(told(&records), [(vec![101, 101, 102], vec![1, 50, 60, 101, 102], 3)]);
    let question = Question { pid: Some(100), ..Question::default() };
    assert_eq!(told(&ask(&place, &question)), [(vec![100], vec![1, 50, 100], 1), (vec![], vec![], 0)]);
    let question = Question { nodes: vec!["/dev/nvidia7".into()], ..between(0, 1000) };
    assert_eq!(told(&ask(&place, &question)), [(vec![], vec![], 0)]);
}

#[test]
fn boots_are_chosen_by_number_and_id() {
    let place = two_boots();
    let by = |choice| {
        let question = Question { boot: Some(choice), ..Question::default() };
        read(&place.path(), &question)
            .map(|records| records.into_iter().map(|record| record.boot.boot_id).collect::<Vec<_>>().join(" "))
            .map_err(|error| (exit_of(&error), format!("{error:#}")))
    };
    let back = |boots, from: &str| by(BootChoice::Back { boots, from: from.into() });
    assert_eq!(by(BootChoice::Current("b2".into())).as_deref(), Ok("b2"));
    assert_eq!(back(0, "b2").as_deref(), Ok("b2"));
    assert_eq!(back(1, "b2").as_deref(), Ok("b1"));
    // The daemon has not recorded since the host came up.
    assert_eq!(back(1, "b3").as_deref(), Ok("b2"));
    assert_eq!(back(2, "b3").as_deref(), Ok("b1"));
    assert_eq!(by(BootChoice::Id("b1".into())).as_deref(), Ok("b1"));
    let unsupported = |text: &str| Err((exit_code::Exit::Unsupported, text.to_owned()));
    assert_eq!(back(2, "b2"), unsupported("the journal has 1 boots before the running one, and not 2"));
    assert_eq!(by(BootChoice::Current("b3".into())), unsupported("the journal has no record of the running boot"));
    assert_eq!(by(BootChoice::Id("c".into())), unsupported("the journal has no boot c"));
    assert_eq!(by(BootChoice::Id("b".into())), Err((exit_code::Exit::Usage, "several boots begin with b".into())));
}

#[test]
fn ancestors_are_followed_as_far_as_is_sensible() {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let mut changes: Vec<Change> = (1..=200).map(|pid| process_change(process(pid + 1, Some(pid)))).collect();
    // Rows that are wrong have no end.
    changes.push(process_change(process(1, Some(201))));
    changes.push(Change::Hold(hold(201, GPU0, 1, None)));
    writer.apply(&changes).unwrap();
    assert_eq!(place.all()[0].processes.len(), 65);
}

#[test]
fn events_are_handed_on_in_the_order_of_time() {
    let place = two_boots();
    let since = |since| {
        let mut times = Vec::new();
        reader::events(&place.path(), since, |event| {
            times.push(event.boot_ns / SECOND);
            Ok(())
        })
        .unwrap();
        times
    };
    assert_eq!(since(None), [200, 200, 390, 400, 400]);
    assert_eq!(since(Some(wall(390 * SECOND))), [390, 400, 400]);
    assert_eq!(since(Some(wall(401 * SECOND))), [0; 0]);
    let stop = reader::events(&place.path(), None, |_| anyhow::bail!("the pipe is closed"));
    assert_eq!(stop.unwrap_err().to_string(), "the pipe is closed");
}

#[test]
fn an_event_of_a_newer_gpureap_is_passed_over_and_a_senseless_one_is_damage() {
    let place = two_boots();
    place.raw().execute("UPDATE events SET event = 'teleport' WHERE event = 'signal'", []).unwrap();
    assert_eq!(place.all()[0].events.len(), 4);
    place.raw().execute("UPDATE events SET data = '{\"tid\": \"x\"}' WHERE event = 'exit'", []).unwrap();
    let error = read(&place.path(), &Question::default()).unwrap_err();
    assert_eq!(exit_of(&error), exit_code::Exit::Unsupported);
    assert!(error.to_string().contains("is damaged"), "{error}");
}

#[test]
fn more_events_than_are_read_are_said_to_be_more() {
    let place = Scene::in_memory();
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    let fill = "WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < 100001)
                INSERT INTO events (boot, boot_ns, time_ns, event) SELECT 1, n, n, 'stop' FROM count";
    writer.connection.execute(fill, []).unwrap();
    let events = &place.all()[0].events;
    assert_eq!(events.len(), 100_001);
    let What::Lost(Lost { events: 0, at, note }) = &events[0].what else { panic!("{:?}", events[0]) };
    assert_eq!((at.as_str(), events[0].boot_ns, events[1].boot_ns), ("reader", 2, 2));
    assert_eq!(note, "only the newest 100000 events of the time asked for were read; ask for a shorter one");
}
