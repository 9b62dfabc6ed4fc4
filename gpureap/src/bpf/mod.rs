//! Everything that talks bpf: the object, its maps and programs, and views over them.

pub mod eyes;
pub mod fence;
pub mod handles;
pub mod load;
pub mod object;
pub mod pins;
pub mod resync;
pub mod ring;
pub mod sys;
pub mod tracer;

pub use tracer::Tracer;

use crate::{config::Config, error::Failure, gpu::devices::Devices, kernel::rights, model::Source, trust::Distrust};

/// Opens the best source, or the one that is asked for: the pinned map of a running tracer, else a one-shot snapshot;
/// with it, the devices that it looks at. `Source::Proc` is not the kernel's: the caller falls back to it when this fails
/// and no source was asked for.
pub fn open_eyes(
    config: &Config,
    devices: &Devices,
    source: Option<Source>,
) -> anyhow::Result<(eyes::KernelEyes, Devices)> {
    rights::require_host_namespaces()?;
    let mut notes = Vec::new();
    if source != Some(Source::Snapshot) {
        match eyes::from_pins(config, devices) {
            Ok(Ok(found)) => {
                let traced = found.devices().clone();
                return Ok((found, traced));
            }
            Ok(Err(unreadable)) => notes = unreadable,
            // Pins are root's; without rights there may still be other sources.
            Err(error) if source == Some(Source::Map) => return Err(error),
            Err(error) => notes.push(format!("{error:#}")),
        }
        if source == Some(Source::Map) {
            let reason = notes.pop().unwrap_or_else(|| format!("nothing is pinned in {}", config.paths.pin.display()));
            return Err(Failure::unsupported(format!("no tracer's map can be read: {reason}")).into());
        }
    }
    let handles = load::Loaded::new(config, devices)?.into_snapshot()?;
    Ok((eyes::KernelEyes::new(handles, devices.clone(), None, config).with_notes(notes), devices.clone()))
}

/// A directory that somebody else could have made, or changed.
pub(crate) fn distrusted(error: Distrust) -> anyhow::Error {
    match error {
        Distrust::Io { path, error } => denied_or(path.as_ref(), error),
        Distrust::Owner { .. } | Distrust::Writable { .. } | Distrust::Links { .. } => {
            Failure::unsupported(error.to_string()).into()
        }
    }
}

/// A failed step on a directory of ours, as a sentence with the right exit code.
#[expect(clippy::needless_pass_by_value, reason = "as map_err hands it in")]
pub(crate) fn denied_or(path: &std::path::Path, error: std::io::Error) -> anyhow::Error {
    if error.kind() == std::io::ErrorKind::PermissionDenied {
        return Failure::not_permitted(format!("{}: {}", path.display(), rights::file_refused())).into();
    }
    Failure::unsupported(format!("{} cannot be used: {error}", path.display())).into()
}
