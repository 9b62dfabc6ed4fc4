//! Opens the best look at the kernel that this caller gets.

use tracing::info;

use crate::{
    bpf,
    config::Config,
    error::exit_of,
    exit_code::Exit,
    gpu::devices::{Devices, discover},
    model::{Eyes, Source},
    process::walk::ProcEyes,
};

/// Eyes, what they look at, and why they are not better ones.
pub struct Opened {
    pub eyes: Box<dyn Eyes>,
    /// A running tracer's table, else this host's.
    pub devices: Devices,
    pub note: Option<String>,
}

/// The wanted source or none; without a wish, /proc where the kernel refuses the rest.
pub fn open(config: &Config, source: Option<Source>) -> anyhow::Result<Opened> {
    let own = discover(&config.paths, &config.devices)?;
    let proc = |note| Opened {
        eyes: Box::new(ProcEyes { paths: config.paths.clone(), devices: own.clone() }),
        devices: own.clone(),
        note,
    };
    if source == Some(Source::Proc) {
        return Ok(proc(None));
    }
    match bpf::open_eyes(config, &own, source) {
        Ok((eyes, devices)) => Ok(Opened { eyes: Box::new(eyes), devices, note: None }),
        Err(error) if source.is_none() && matches!(exit_of(&error), Exit::Unsupported | Exit::NotPermitted) => {
            info!("falling back to /proc: {error:#}");
            Ok(proc(Some(format!("{error:#}"))))
        }
        Err(error) => Err(error),
    }
}
