//! The only module that prints. Results go to stdout, diagnostics to stderr; what comes from processes is escaped.

pub mod complaint;
pub mod json;
pub mod sanitize;
pub mod text;
pub mod words;

use std::{
    env,
    io::{self, IsTerminal as _, Write},
};

use anyhow::Context as _;
use sanitize::escape;

/// `gpureap: <sentence>` on stderr.
pub fn diagnostic(error: &anyhow::Error) {
    diagnostic_text(&format!("gpureap: {}\n", escape(&format!("{error:#}"))));
}

/// How text may look on stdout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// Columns of the terminal; `None`: not a terminal, nothing is cut.
    pub width: Option<usize>,
    pub colours: bool,
}

impl Style {
    pub fn of_stdout() -> Self {
        let stdout = io::stdout();
        if !stdout.is_terminal() {
            return Self::default();
        }
        let columns = rustix::termios::tcgetwinsize(&stdout).map_or(0, |size| size.ws_col);
        let no_color = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_some_and(|value| value == "dumb");
        Self { width: Some(if columns == 0 { 80 } else { columns.into() }), colours: !no_color && !dumb }
    }
}

/// Text of our own making, written as it is.
pub fn raw(bytes: &[u8]) -> anyhow::Result<()> {
    write_to(&mut io::stdout().lock(), bytes).context("cannot write to stdout")
}

/// As [`raw`], for what has no end: says whether there is still a reader.
pub fn stream(bytes: &[u8]) -> anyhow::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("cannot write to stdout"),
    }
}

/// A reader that went away (`| head`) is no error: the command goes on to its end and tells by its exit code how it went.
fn write_to(stdout: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Text of our own making on stderr. Where stderr cannot be written there is no other place to say so.
pub fn diagnostic_text(text: &str) {
    drop(write_diagnostic(text));
}

fn write_diagnostic(text: &str) -> io::Result<()> {
    let mut stderr = io::stderr().lock();
    stderr.write_all(text.as_bytes())?;
    stderr.flush()
}

/// Asks on the terminal; everything but a yes is a no, and so is a question that cannot be shown.
pub fn ask(question: &str) -> anyhow::Result<bool> {
    if write_diagnostic(question).is_err() {
        return Ok(false);
    }
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_went_away_is_no_error() {
        struct Fails(io::ErrorKind);
        impl Write for Fails {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(write_to(&mut Fails(io::ErrorKind::BrokenPipe), b"x").is_ok());
        assert!(write_to(&mut Fails(io::ErrorKind::StorageFull), b"x").is_err());
    }
}
