//! Placeholder, replaced at merge.

use crate::{cli::DaemonArgs, config::Config, error::Failure, exit_code::Exit};

pub fn run(_args: &DaemonArgs, _config: &Config) -> anyhow::Result<Exit> {
    Err(Failure::unsupported("daemon is not in this build yet").into())
}
