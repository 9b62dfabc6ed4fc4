//! `gpureap report`.

use crate::{cli::ReportArgs, config::Config, exit_code::Exit};

pub fn run(_args: &ReportArgs, _config: &Config) -> anyhow::Result<Exit> {
    Ok(Exit::Done)
}
