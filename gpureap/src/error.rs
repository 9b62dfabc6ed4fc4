//! The one error type that carries an exit code. Everything else is context around it.

use crate::exit_code::Exit;

/// What this host has where there is nothing to look at.
pub const NO_DEVICE: &str = "no NVIDIA device, and no stand-in is configured";

/// A failure whose kind decides the exit code. The message is one clear sentence.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub exit: Exit,
    pub message: String,
}

impl Failure {
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Exit::Unsupported, message)
    }
    /// For those who have nothing to look at; `note`: why a daemon that may know better was not asked.
    pub fn no_device(note: Option<&str>) -> Self {
        let note = note.map(|note| format!(" ({note})")).unwrap_or_default();
        Self::unsupported(format!("this host has {NO_DEVICE}{note}"))
    }
    pub fn not_permitted(message: impl Into<String>) -> Self {
        Self::new(Exit::NotPermitted, message)
    }
}

/// The exit code that an error chain asks for.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(|cause| cause.downcast_ref::<Failure>()).map_or(Exit::Internal, |failure| failure.exit)
}
