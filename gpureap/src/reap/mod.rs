//! Placeholder, replaced at merge.

use crate::{cli::ReapArgs, config::Config, error::Failure, exit_code::Exit};

pub fn run(_args: &ReapArgs, _config: &Config) -> anyhow::Result<Exit> {
    Err(Failure::unsupported("reap is not in this build yet").into())
}
