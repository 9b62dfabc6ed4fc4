//! Opens the best look at the kernel that this caller gets.

use tracing::info;

use crate::{
    api::client,
    bpf,
    config::{Config, StandIn},
    error::{Failure, exit_of},
    exit_code::Exit,
    gpu::devices::{Devices, discover},
    kernel::rights,
    limits,
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

/// As [`open`], for those who say that a device is free: one that is configured and that nobody looks at is an error.
pub fn open_configured(config: &Config) -> anyhow::Result<Opened> {
    let opened = open(config, None)?;
    require_configured(config, &opened.devices)?;
    Ok(opened)
}

/// A running tracer looks at the devices of its own configuration.
pub fn require_configured(config: &Config, devices: &Devices) -> Result<(), Failure> {
    let known = |wanted: &&StandIn| {
        devices.list().iter().any(|device| (device.major, device.minor) == (wanted.major, Some(wanted.minor)))
    };
    match config.devices.iter().find(|wanted| !known(wanted)) {
        None => Ok(()),
        Some(StandIn { node, .. }) => Err(Failure::unsupported(format!(
            "{} is not traced by the running daemon: put it into the daemon's configuration, and restart that",
            node.display()
        ))),
    }
}

/// The wanted source or none; without a wish the best that there is: root reads the tracer's map, or sweeps; others ask the
/// daemon; where all that is refused there is /proc.
pub fn open(config: &Config, source: Option<Source>) -> anyhow::Result<Opened> {
    let own = discover(&config.paths, &config.devices)?;
    if source == Some(Source::Proc) {
        return Ok(proc(config, own, None));
    }
    let asks = source != Some(Source::Snapshot);
    let mut silent = None;
    if asks && !rustix::process::geteuid().is_root() {
        match daemon(config) {
            Ok(opened) => return Ok(opened),
            Err(reason) => silent = Some(reason),
        }
    }
    let error = match bpf::open_eyes(config, &own, source) {
        Ok((eyes, devices)) => return Ok(Opened { eyes: Box::new(eyes), devices, note: silent.flatten() }),
        Err(error) => error,
    };
    // Too few descriptors are no reason to look by less.
    if !matches!(exit_of(&error), Exit::Unsupported | Exit::NotPermitted) || limits::is_cause(&error) {
        return Err(error);
    }
    // Root without the capabilities, as in some containers.
    if asks && silent.is_none() {
        match daemon(config) {
            Ok(opened) => return Ok(opened),
            Err(reason) => silent = Some(reason),
        }
    }
    if source.is_some() {
        return Err(error);
    }
    info!("falling back to /proc: {error:#}");
    let note = silent.flatten().unwrap_or_else(|| format!("{error:#}"));
    Ok(proc(config, own, Some(note)))
}

fn proc(config: &Config, devices: Devices, note: Option<String>) -> Opened {
    Opened { eyes: Box::new(ProcEyes { paths: config.paths.clone(), devices: devices.clone() }), devices, note }
}

/// The daemon's socket. `Err(None)`: there is no daemon, which is nothing worth a word.
fn daemon(config: &Config) -> Result<Opened, Option<String>> {
    // Its pids and times are the host's.
    rights::require_host_namespaces().map_err(|error| Some(error.to_string()))?;
    match client::open(&config.paths.run) {
        Ok((eyes, devices)) => Ok(Opened { eyes: Box::new(eyes), devices, note: None }),
        Err(error @ client::Unanswered::Absent { .. }) => {
            info!("{error}");
            Err(None)
        }
        Err(error) => Err(Some(error.to_string())),
    }
}
