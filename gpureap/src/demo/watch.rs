//! Where the demo looks: a tracer of its own if the kernel lets it, else a sweep at each look.

use crate::{
    bpf::{self, Tracer, eyes::KernelEyes},
    config::Config,
    error::Failure,
    gpu::devices::discover,
    model::{Eyes, Source},
};

/// A source that lives as long as the demo looks.
pub trait Watch {
    fn eyes(&self) -> &dyn Eyes;
    /// What it is, for the first line.
    fn describe(&self) -> String;
}

/// One-shot sweeps.
struct Sweeps(KernelEyes);

impl Watch for Sweeps {
    fn eyes(&self) -> &dyn Eyes {
        &self.0
    }
    fn describe(&self) -> String {
        "one-shot sweeps of the kernel's tables".to_owned()
    }
}

impl Watch for Tracer {
    fn eyes(&self) -> &dyn Eyes {
        Self::eyes(self)
    }
    fn describe(&self) -> String {
        format!("a tracer of its own, with the probe set `{}`", bpf::load::name(self.backend))
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
    match bpf::open_eyes(config, &devices, Some(Source::Snapshot)) {
        Ok((eyes, _)) => Ok((Box::new(Sweeps(eyes)), notes)),
        Err(error) => {
            notes.push(format!("no sweeps: {error:#}"));
            Err(Failure::unsupported(notes.join("; ")).into())
        }
    }
}
