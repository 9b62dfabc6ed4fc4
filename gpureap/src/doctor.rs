//! Placeholder, replaced at merge.

use crate::{cli::DoctorArgs, config::Config, error::Failure, exit_code::Exit};

pub fn run(_args: &DoctorArgs, _config: &Config) -> anyhow::Result<Exit> {
    Err(Failure::unsupported("doctor is not in this build yet").into())
}
