//! The journal: what `history/` says is worth keeping, in a SQLite file that outlives the daemon and the boot. Its columns
//! are documented for people with the `sqlite3` shell in docs/journal.md.
//!
//! One thread writes ([`thread::Journal`]), so that a slow disk stops nobody else; anyone who may read the file reads it
//! ([`reader`]) meanwhile. A damaged file is moved aside and a new one begun.

pub mod export;
mod file;
pub mod reader;
mod retention;
pub(crate) mod rows;
pub mod schema;
#[cfg(test)]
mod tests;
pub mod thread;
pub mod writer;

use rusqlite::ErrorCode;

pub use self::{
    reader::{BootChoice, Question, read},
    retention::{Limits, Tidied},
    thread::{Journal, Meter, Started, Status},
    writer::{Opened, Writer},
};

/// In the state directory.
pub const FILE: &str = "journal.db";

/// Why the journal cannot be used, as one sentence; the kind says what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Somebody has to decide: it is not ours, not safe, or of a newer gpureap. Nothing was touched.
    #[error("{0}")]
    Refused(String),
    /// The file is to be moved aside.
    #[error("{0}")]
    Damaged(String),
    /// The disk is full, read-only or broken, or a right is missing: later, perhaps.
    #[error("{0}")]
    Unwritable(String),
    /// Another process has it locked.
    #[error("{0}")]
    Busy(String),
}

impl Error {
    /// What SQLite said about `name`.
    fn of(name: &str, error: &rusqlite::Error) -> Self {
        // Of a damaged schema SQLite quotes all of it.
        let said = error.to_string();
        let said: String = said.lines().next().unwrap_or_default().chars().take(200).collect();
        let Some(code) = error.sqlite_error_code() else {
            // A value that is not what its column says.
            return Self::Damaged(format!("{name} is damaged: {said}"));
        };
        match code {
            // Of the statements here, which are fixed, `Unknown` says that a table or a column is missing.
            ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::Unknown => {
                Self::Damaged(format!("{name} is damaged: {said}"))
            }
            ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed => {
                Self::Busy(format!("{name} is locked by another process"))
            }
            _ => Self::Unwritable(format!("{name}: {said}")),
        }
    }
}
