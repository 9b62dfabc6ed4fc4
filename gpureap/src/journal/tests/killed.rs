//! A writer that is killed in the middle of what it does.

use std::{
    env,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use super::*;

const DIR: &str = "GPUREAP_TEST_KILLED_JOURNAL";
const PARTS: u64 = 5;

/// Not a test: what the test below starts and kills. It says which batch it has written.
#[test]
#[ignore = "started by the next one"]
fn writes_until_it_is_killed() {
    let Some(path) = env::var_os(DIR) else { return };
    let mut writer = Writer::open(Path::new(&path), "b1").unwrap().writer;
    let last: Option<i64> =
        writer.connection.query_row("SELECT max(data ->> 'events') FROM events", [], |row| row.get(0)).unwrap();
    let first = last.map_or(0, |last| last + 1) as u64;
    writer.apply(&[start("b1", first)]).unwrap();
    for batch in first.. {
        // Every other one is not urgent.
        let mut changes: Vec<Change> = (0..PARTS)
            .map(|part| {
                let node = format!("{part}");
                let data = Memory { node, used_bytes: 0, total_bytes: 0, processes: vec![] };
                Change::Event(event(batch, if part == 0 { lost(batch, batch, "x").what } else { What::Memory(data) }))
            })
            .collect();
        changes.push(Change::Hold(hold(batch as u32, GPU0, batch, Some(batch).filter(|_| batch % 2 == 0))));
        writer.apply(&changes).unwrap();
        println!("batch {batch}");
    }
}

#[test]
fn what_was_written_is_there_and_no_half_of_a_batch() {
    let place = Scene::in_memory();
    let mut random = Random::new(7);
    let mut said = None;
    for round in 0..200 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture", "journal::tests::killed::writes_until_it_is_killed"])
            .env(DIR, place.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // At least one of most rounds.
        let wanted = random.below(12);
        let told = |line: &str| line.strip_prefix("batch ").and_then(|batch| batch.parse::<i64>().ok());
        let mut count = 0;
        while count < wanted {
            let line = lines.next().unwrap().unwrap();
            if let Some(batch) = told(&line) {
                said = Some(batch);
                count += 1;
            }
        }
        thread::sleep(Duration::from_micros(random.below(3000)));
        child.kill().unwrap();
        child.wait().unwrap();
        // What it said meanwhile counts; a line that was cut is not whole.
        for batch in lines.map_while(Result::ok).filter_map(|line| told(&line)) {
            said = said.max(Some(batch));
        }
        let writer = place.open("b1");
        let (batches, last, least, most): (i64, Option<i64>, Option<i64>, Option<i64>) = writer
            .connection
            .query_row(
                "SELECT count(*), max(boot_ns), min(parts), max(parts)
                 FROM (SELECT boot_ns, count(*) AS parts FROM events GROUP BY boot_ns)",
                [],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
            )
            .unwrap();
        assert!(last >= said, "round {round}: said {said:?}, found {last:?}");
        assert_eq!(batches, last.map_or(0, |last| last + 1), "round {round}: one is missing");
        assert!(least.is_none_or(|least| least == PARTS as i64) && least == most, "round {round}: half a batch");
        let holds: i64 = writer.connection.query_row("SELECT count(*) FROM holds", [], |row| row.get(0)).unwrap();
        assert_eq!(holds, batches, "round {round}");
    }
    println!("{said:?} batches, none lost");
    assert!(said.is_some_and(|said| said > 200), "{said:?}");
}
