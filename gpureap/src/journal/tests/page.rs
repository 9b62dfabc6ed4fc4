//! docs/journal.md says how to ask: every question there has an answer.

use rusqlite::types::Value;

use super::*;
use crate::journal::schema;

const PAGE: &str = include_str!("../../../../docs/journal.md");

fn filled() -> Scene {
    let place = Scene::new();
    let mut writer = place.open("b1");
    let held = HoldRow { role: Some(Role::Attached), ..hold(100, GPU0, SECOND, Some(13 * 3600 * SECOND)) };
    let mut changes = vec![start("b1", SECOND), process_change(full_process()), Change::Hold(held)];
    changes.extend(events().into_iter().map(Change::Event));
    writer.apply(&changes).unwrap();
    place
}

#[test]
fn every_query_of_the_page_finds_something() {
    let place = filled();
    let raw = place.raw();
    let blocks: Vec<&str> =
        PAGE.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect();
    assert!(blocks.len() >= 5);
    for block in blocks {
        let mut statement = raw.prepare(block).unwrap();
        let columns = statement.column_count();
        let rows: Vec<Vec<Value>> = statement
            .query_map([], |row| (0..columns).map(|column| row.get(column)).collect())
            .unwrap()
            .map(Result::unwrap)
            .collect();
        assert!(!rows.is_empty(), "{block}");
        for column in 0..columns {
            assert!(rows.iter().any(|row| row[column] != Value::Null), "column {column} of {block}");
        }
    }
}

#[test]
fn the_page_has_every_table_view_and_column() {
    let place = filled();
    let raw = place.raw();
    let names = |query: &str| -> Vec<String> {
        raw.prepare(query).unwrap().query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    for table in names("SELECT name FROM sqlite_schema WHERE type = 'table'") {
        let (_, section) = PAGE.split_once(&format!("**{table}**")).unwrap_or_else(|| panic!("{table}"));
        let section = section.split("\n**").next().unwrap();
        for column in names(&format!("SELECT name FROM pragma_table_info('{table}')")) {
            let is_there = section.contains(&format!("`{column}`"));
            assert!(
                is_there
                    || table == "runs" && column == "id"
                    || table == "events" && column == "id"
                    || table == "heartbeats",
                "{table}.{column}"
            );
        }
    }
    for view in names("SELECT name FROM sqlite_schema WHERE type = 'view'") {
        assert!(PAGE.contains(&format!("`{view}`")), "{view}");
    }
    let kinds = names("SELECT DISTINCT event FROM events");
    assert_eq!(kinds.len(), 18);
    for kind in kinds {
        assert!(PAGE.contains(&format!("`{kind}`")), "{kind}");
    }
    assert!(PAGE.contains("journal.db.damaged-") && schema::VERSION == 1);
}

#[test]
fn views_have_dates() {
    let place = filled();
    let raw = place.raw();
    let dates: (String, String, f64, String, String) = raw
        .query_row(
            "SELECT opened, released, seconds, died, time FROM holds_view, deaths, events_view WHERE event = 'xid'",
            [],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)),
        )
        .unwrap();
    let [opened, released, died, time] =
        ["00:00:01.000", "13:00:00.000", "00:00:08.000", "00:00:06.000"].map(|time| format!("2026-11-01T{time}Z"));
    assert_eq!(dates, (opened, released, 46799.0, died, time));
}
