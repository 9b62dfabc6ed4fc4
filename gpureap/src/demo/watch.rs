//! Where the demo looks: a tracer of its own if the kernel lets it, else a sweep at each look.

use super::recording::Recording;
use crate::{
    bpf::{self, Tracer},
    config::Config,
    gpu::devices::discover,
    model::{Eyes, Source},
    process::walk::ProcEyes,
};

/// A source that lives as long as the demo looks.
pub trait Watch {
    fn eyes(&self) -> &dyn Eyes;
    /// What it is, for the first line.
    fn describe(&self) -> String;
    /// Writes down what happens from now on; `None`: it does not see what happens between two looks.
    fn record(&self, config: &Config) -> anyhow::Result<Option<Recording>>;
}

/// A look at a time.
pub struct Looks {
    pub eyes: Box<dyn Eyes>,
    pub name: &'static str,
}

impl Watch for Looks {
    fn eyes(&self) -> &dyn Eyes {
        self.eyes.as_ref()
    }
    fn describe(&self) -> String {
        self.name.to_owned()
    }
    fn record(&self, _config: &Config) -> anyhow::Result<Option<Recording>> {
        Ok(None)
    }
}

impl Watch for Tracer {
    fn eyes(&self) -> &dyn Eyes {
        Self::eyes(self)
    }
    fn describe(&self) -> String {
        format!("a tracer of its own, with the probe set `{}`", bpf::load::name(self.backend))
    }
    fn record(&self, config: &Config) -> anyhow::Result<Option<Recording>> {
        Recording::start(config, self, Self::eyes(self).devices()).map(Some)
    }
}

/// The best that this kernel allows; the sentences say why it is not the first choice.
pub fn start(config: &Config) -> anyhow::Result<(Box<dyn Watch>, Vec<String>)> {
    let devices = discover(&config.paths, &config.devices)?;
    let mut notes = Vec::new();
    match Tracer::start(config, &devices) {
        Ok(tracer) => return Ok((Box::new(tracer), notes)),
        Err(error) => notes.push(format!("no tracer: {error:#}")),
    }
    let looks = match bpf::open_eyes(config, &devices, Some(Source::Snapshot)) {
        Ok((eyes, _)) => Looks { eyes: Box::new(eyes), name: "one-shot sweeps of the kernel" },
        Err(error) => {
            notes.push(format!("no sweeps of the kernel: {error:#}"));
            by_proc(config)?
        }
    };
    Ok((Box::new(looks), notes))
}

/// What needs nothing of the kernel but /proc.
pub fn by_proc(config: &Config) -> anyhow::Result<Looks> {
    let devices = discover(&config.paths, &config.devices)?;
    Ok(Looks { eyes: Box::new(ProcEyes { paths: config.paths.clone(), devices }), name: "/proc" })
}
