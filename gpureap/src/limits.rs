//! The limit of open files: raised as far as this process may, and named where it is too low.

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use crate::error::Failure;

/// Raises the soft limit to the hard one. The soft one is for programs that use select(2), and a host has more holders.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// How many files this process may have open.
pub fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// What is lacking, and how to have more of it.
pub fn too_few() -> String {
    format!(
        "too few descriptors: this process may have {} files open; raise the limit (ulimit -n, or LimitNOFILE= of the unit)",
        open_files()
    )
}

/// Whether an error comes of that limit. Some have the system's words in their own, so the cause is not always in the chain.
pub fn is_cause(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains(&Errno::MFILE.to_string())
}

/// An error that comes of that limit says so, whatever was being done.
pub fn explain(error: anyhow::Error) -> anyhow::Error {
    if !is_cause(&error) {
        return error;
    }
    // What was being done, without what others have put into brackets.
    let text = format!("{error:#}");
    let before = text.split(&Errno::MFILE.to_string()).next().unwrap_or_default();
    let doing = match before.split(" (").next().unwrap_or_default().trim_end_matches([':', ' ']) {
        "" => String::new(),
        doing => format!(" ({doing})"),
    };
    Failure::unsupported(format!("{}{doing}", too_few())).into()
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;
    use crate::{error::exit_of, exit_code::Exit};

    #[test]
    fn an_error_of_the_limit_is_told_as_such() {
        let of = |errno: Errno| std::io::Error::from(errno);
        let error = Err::<(), _>(of(Errno::MFILE)).context("sweep").unwrap_err();
        let told = explain(error);
        assert_eq!(exit_of(&told), Exit::Unsupported);
        let text = format!("{told:#}");
        assert!(text.starts_with("too few descriptors: this process may have ") && text.ends_with("(sweep)"), "{text}");
        assert_eq!(format!("{:#}", explain(Errno::MFILE.into())), too_few());
        let other = Err::<(), _>(of(Errno::NOENT)).context("sweep").unwrap_err();
        assert_eq!(format!("{:#}", explain(other)), format!("sweep: {}", of(Errno::NOENT)));
    }
}
