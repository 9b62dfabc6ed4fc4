//! Where the demo looks: a tracer of its own if the kernel lets it, else a sweep at each look.

use crate::{
    bpf,
    config::Config,
    error::Failure,
    gpu::devices::discover,
    model::{Eyes, Source},
    process::walk::ProcEyes,
};

/// A source that lives as long as the demo looks.
pub trait Watch {
    fn eyes(&self) -> &dyn Eyes;
    /// What it is, for the first line.
    fn describe(&self) -> String;
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
}

/// The best that this kernel allows; the sentences say why it is not the first choice.
pub fn start(config: &Config) -> anyhow::Result<(Box<dyn Watch>, Vec<String>)> {
    let mut notes = Vec::new();
    match tracer(config) {
        Ok(watch) => return Ok((watch, notes)),
        Err(error) => notes.push(format!("no tracer: {error:#}")),
    }
    let looks = match bpf::open_eyes(config, Some(Source::Snapshot)) {
        Ok(eyes) => Looks { eyes, name: "one-shot sweeps of the kernel" },
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

/// Replaced at merge by a watch over `bpf::Tracer::start(config)`, which detaches everything when dropped.
fn tracer(_config: &Config) -> anyhow::Result<Box<dyn Watch>> {
    Err(Failure::unsupported("the tracer is not in this build yet").into())
}
