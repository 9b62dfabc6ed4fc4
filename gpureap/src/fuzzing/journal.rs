//! Journals and recordings that may come from another host, and the reports that are made of them.

use std::cell::OnceCell;

use jiff::Timestamp;
use rusqlite::{Connection, params};

use super::assert_shown;
use crate::{
    history::{
        build::{self, Ask},
        event::Event,
        html, line, replay,
        rows::Record,
        text,
    },
    journal::{
        Question, reader,
        rows::{self, EventParts, ns},
    },
    out::Style,
};

/// A recording, as `gpureap events --json` writes it.
pub(super) fn events(input: &[u8]) {
    let Ok(events) = replay::read(input) else { return };
    for event in &events {
        assert_line(event);
        assert_eq!(through_columns(event).as_ref(), Some(event));
    }
    assert_reports(&replay::replay(events));
}

/// A file that is taken for a journal.
pub(super) fn file(input: &[u8]) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("journal.db");
    std::fs::write(&path, input).expect("a file");
    if let Ok(records) = reader::read(&path, &Question::default()) {
        assert_reports(&records);
    }
    let each = |event: Event| {
        assert_line(&event);
        Ok(())
    };
    drop(reader::events(&path, None, each));
}

fn assert_line(event: &Event) {
    let line = line::line(event);
    assert_shown(&line);
    assert_eq!(line.find('\n'), Some(line.len() - 1), "{line:?}");
}

/// The event after the journal has taken it apart and put it together.
fn through_columns(event: &Event) -> Option<Event> {
    thread_local! {
        static CONNECTION: OnceCell<Connection> = const { OnceCell::new() };
    }
    let EventParts { kind, key, node, data } = rows::event_parts(&event.what)?;
    let time = i64::try_from(event.time.as_nanosecond()).ok();
    // A time that a column has no room for is never recorded.
    let Some(time) = time else { return Some(event.clone()) };
    CONNECTION.with(|connection| {
        let connection = connection.get_or_init(|| Connection::open_in_memory().expect("memory"));
        let mut statement =
            connection.prepare_cached("SELECT 1, ?1, ?2, ?3, ?4, ?5, ?6, ?7").expect("a question without tables");
        let key = key.map(|key| (key.pid, ns(key.start_ns))).unzip();
        let values = params![ns(event.boot_ns), time, kind, key.0, key.1, node, data];
        let found = statement.query_row(values, rows::event).unwrap_or_else(|error| panic!("{error}: {event:?}"));
        found.map(|(_, event)| event)
    })
}

fn assert_reports(records: &[Record]) {
    let ask = Ask {
        now: Timestamp::MAX,
        since: Timestamp::MIN,
        until: Timestamp::MAX,
        at: None,
        running: None,
        nodes: None,
        pids: Vec::new(),
    };
    let report = build::build(records, &ask);
    serde_json::to_string(&report).expect("a report is JSON");
    assert_shown(&text::render(&report, Style::default()));
    assert_shown(&text::render(&report, Style { width: Some(80), colours: false }));
    let page = html::render(&report);
    assert!(!page.contains("<script"));
    let at = Ask { at: Some(Timestamp::UNIX_EPOCH), since: Timestamp::UNIX_EPOCH, until: Timestamp::UNIX_EPOCH, ..ask };
    assert_shown(&text::render(&build::build(records, &at), Style::default()));
}
