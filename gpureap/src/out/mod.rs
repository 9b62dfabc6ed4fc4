//! The only module that prints. Results go to stdout, diagnostics to stderr; what comes from processes is escaped.

pub mod json;
pub mod sanitize;
pub mod text;

use std::{
    env,
    io::{self, IsTerminal as _, Write as _},
};

use sanitize::escape;

/// `gpureap: <sentence>` on stderr.
#[expect(clippy::print_stderr, reason = "this module is the one place for it")]
pub fn diagnostic(error: &anyhow::Error) {
    eprintln!("gpureap: {}", escape(&format!("{error:#}")));
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
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()?;
    Ok(())
}

/// Text of our own making on stderr.
#[expect(clippy::print_stderr, reason = "this module is the one place for it")]
pub fn diagnostic_text(text: &str) -> anyhow::Result<()> {
    eprint!("{text}");
    io::stderr().flush()?;
    Ok(())
}

/// Asks on the terminal; everything but a yes is a no.
pub fn ask(question: &str) -> anyhow::Result<bool> {
    diagnostic_text(question)?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// The reader of our output went away (`| head`): the end of the work, not an error.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_recognised_through_context() {
        use anyhow::Context as _;
        let broken = Err::<(), _>(io::Error::from(io::ErrorKind::BrokenPipe)).context("writing").unwrap_err();
        assert!(is_closed_pipe(&broken));
        assert!(!is_closed_pipe(&anyhow::anyhow!("broken pipe")));
    }
}
