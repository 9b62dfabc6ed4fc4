//! Placeholder, replaced at merge.

use crate::{cli::DemoArgs, config::Config, error::Failure, exit_code::Exit};

pub fn run(_args: &DemoArgs, _config: &Config) -> anyhow::Result<Exit> {
    Err(Failure::unsupported("demo is not in this build yet").into())
}

pub fn actor(_args: &[String]) -> anyhow::Result<Exit> {
    Err(Failure::unsupported("demo is not in this build yet").into())
}
