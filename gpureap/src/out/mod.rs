//! The only module that prints. Results go to stdout, diagnostics to stderr; what comes from processes is escaped.

pub mod sanitize;

use std::io::{self, Write as _};

use sanitize::escape;

/// `gpureap: <sentence>` on stderr.
#[expect(clippy::print_stderr, reason = "this module is the one place for it")]
pub fn diagnostic(error: &anyhow::Error) {
    eprintln!("gpureap: {}", escape(&format!("{error:#}")));
}

/// Text of our own making, written as it is.
pub fn raw(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()?;
    Ok(())
}

/// One JSON document, readable by people too.
pub fn json(document: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(document)?;
    bytes.push(b'\n');
    raw(&bytes)
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
