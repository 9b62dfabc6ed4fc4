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

#[cfg(test)]
mod tests {
    use std::io;

    use crate::{
        api::{client::Unanswered, socket::Refused},
        bpf::handles::PinError,
        trust::Distrust,
    };

    /// A message that names its cause has no source besides: printed with its chain, it would say so twice.
    #[test]
    fn a_cause_is_told_once() {
        let path = || "/run/x".to_owned();
        let error = || io::Error::from(io::ErrorKind::NotFound);
        for told in [
            anyhow::Error::from(Unanswered::Absent { path: path(), error: error() }),
            Unanswered::Broken { path: path(), error: error() }.into(),
            Refused::Io { path: path(), error: error() }.into(),
            PinError::Io { path: path(), error: error() }.into(),
            Distrust::Io { path: path(), error: error() }.into(),
        ] {
            let text = format!("{told:#}");
            assert_eq!(text.matches("not found").count(), 1, "{text}");
        }
    }
}
