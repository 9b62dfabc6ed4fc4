//! Opens the best look at the kernel that this caller gets.

use tracing::info;

use crate::{
    bpf,
    config::Config,
    error::exit_of,
    exit_code::Exit,
    gpu::devices::Devices,
    model::{Eyes, Source},
    process::walk::ProcEyes,
};

/// Eyes, and why they are not better ones.
pub struct Opened {
    pub eyes: Box<dyn Eyes>,
    pub note: Option<String>,
}

/// The wanted source or none; without a wish, /proc where the kernel refuses the rest.
pub fn open(config: &Config, devices: &Devices, source: Option<Source>) -> anyhow::Result<Opened> {
    let proc = || -> Box<dyn Eyes> { Box::new(ProcEyes { paths: config.paths.clone(), devices: devices.clone() }) };
    if source == Some(Source::Proc) {
        return Ok(Opened { eyes: proc(), note: None });
    }
    match bpf::open_eyes(config, source) {
        Ok(eyes) => Ok(Opened { eyes, note: None }),
        Err(error) if source.is_none() && matches!(exit_of(&error), Exit::Unsupported | Exit::NotPermitted) => {
            info!("falling back to /proc: {error:#}");
            Ok(Opened { eyes: proc(), note: Some(format!("{error:#}")) })
        }
        Err(error) => Err(error),
    }
}
