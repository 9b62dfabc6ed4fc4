//! The database's layout and the way from older layouts to this one.

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::Error;

/// Marks the file as a journal: `gprJ`.
pub const APPLICATION_ID: i32 = 0x6770_724a;

/// Step `n` makes version `n + 1` of version `n`. Never changed once released, only added to: a new kind of event, or a
/// new field in JSON, needs none.
const STEPS: &[&str] = &[include_str!("schema.sql")];

/// What a step may find and leave as it is, and what a reader has to be able to read.
pub const VERSION: i64 = STEPS.len() as i64;

pub fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Whether it is a file without anything in it.
fn is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
}

/// Says no to what this program does not know. `name` is for the sentence.
pub fn check(connection: &Connection, name: &str) -> Result<i64, Error> {
    let read = || -> rusqlite::Result<_> {
        let application: i32 = connection.pragma_query_value(None, "application_id", |row| row.get(0))?;
        Ok((application, version(connection)?, is_empty(connection)?))
    };
    let (application, found, empty) = read().map_err(|error| Error::of(name, &error))?;
    // A header that is damaged says anything.
    if found > VERSION && (application == APPLICATION_ID || empty) {
        return Err(Error::Refused(format!(
            "{name} is of journal version {found} and this gpureap reads up to {VERSION}: a newer gpureap wrote it"
        )));
    }
    if !empty && (application != APPLICATION_ID || found < 1) {
        return Err(Error::Damaged(format!("{name} is no journal of gpureap, or its header is damaged")));
    }
    Ok(found)
}

/// Brings an empty or older database to this version, all or nothing.
pub fn migrate(connection: &mut Connection, name: &str) -> Result<(), Error> {
    migrate_by(STEPS, connection, name)
}

fn migrate_by(steps: &[&str], connection: &mut Connection, name: &str) -> Result<(), Error> {
    let found = check(connection, name)?;
    let known = usize::try_from(found).unwrap_or(0);
    if known >= steps.len() {
        return Ok(());
    }
    let mut run = || -> rusqlite::Result<()> {
        let transaction = Transaction::new(connection, TransactionBehavior::Immediate)?;
        for step in &steps[known..] {
            transaction.execute_batch(step)?;
        }
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", steps.len() as i64)?;
        transaction.commit()
    };
    run().map_err(|error| Error::of(name, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(connection: &Connection) -> Vec<String> {
        let mut statement =
            connection.prepare("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn steps_are_run_from_where_the_file_is_and_once() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, "x").unwrap();
        assert_eq!(version(&connection).unwrap(), VERSION);
        let all = ["boots", "devices", "events", "heartbeats", "holds", "processes", "runs"];
        assert_eq!(tables(&connection), all);
        migrate(&mut connection, "x").unwrap();
        let steps = [STEPS[0], "ALTER TABLE boots ADD COLUMN colour TEXT;", "CREATE TABLE more (a INTEGER) STRICT;"];
        migrate_by(&steps, &mut connection, "x").unwrap();
        assert_eq!(version(&connection).unwrap(), 3);
        assert!(tables(&connection).contains(&"more".to_owned()));
    }

    #[test]
    fn a_step_that_fails_leaves_the_file_as_it_was() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, "x").unwrap();
        let steps = [STEPS[0], "CREATE TABLE more (a INTEGER) STRICT;", "CREATE TABLE boots (a INTEGER) STRICT;"];
        assert!(matches!(migrate_by(&steps, &mut connection, "x"), Err(Error::Damaged(_))));
        assert_eq!(version(&connection).unwrap(), VERSION);
        assert!(!tables(&connection).contains(&"more".to_owned()));
    }

    #[test]
    fn newer_and_foreign_files_are_not_touched() {
        let mut connection = Connection::open_in_memory().unwrap();
        connection.pragma_update(None, "user_version", VERSION + 1).unwrap();
        let message = migrate(&mut connection, "/j").unwrap_err().to_string();
        assert_eq!(message, "/j is of journal version 2 and this gpureap reads up to 1: a newer gpureap wrote it");
        assert!(tables(&connection).is_empty());

        let mut connection = Connection::open_in_memory().unwrap();
        connection.execute_batch("CREATE TABLE mine (a INTEGER)").unwrap();
        assert!(matches!(migrate(&mut connection, "/j"), Err(Error::Damaged(_))));
    }
}
