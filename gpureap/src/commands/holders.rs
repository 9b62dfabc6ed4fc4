//! `gpureap holders`.

use crate::{cli::HoldersArgs, config::Config, error::Failure, exit_code::Exit};

pub fn run(_args: &HoldersArgs, _config: &Config) -> anyhow::Result<Exit> {
    Err(Failure::unsupported("holders is not in this build yet").into())
}
