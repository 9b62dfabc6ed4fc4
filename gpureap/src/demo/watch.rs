//! Where the demo looks: a tracer of its own if the kernel lets it, else a sweep at each look.

use crate::{
    bpf,
    config::Config,
    error::Failure,
    model::{Eyes, Source},
};

/// A source that lives as long as the demo looks.
pub trait Watch {
    fn eyes(&self) -> &dyn Eyes;
    /// What it is, for the first line.
    fn describe(&self) -> String;
}

/// One-shot sweeps.
struct Sweeps(Box<dyn Eyes>);

impl Watch for Sweeps {
    fn eyes(&self) -> &dyn Eyes {
        self.0.as_ref()
    }
    fn describe(&self) -> String {
        "one-shot sweeps of the kernel's tables".to_owned()
    }
}

/// The best that this kernel allows; the sentences say why it is not the first choice.
pub fn start(config: &Config) -> anyhow::Result<(Box<dyn Watch>, Vec<String>)> {
    let mut notes = Vec::new();
    match tracer(config) {
        Ok(watch) => return Ok((watch, notes)),
        Err(error) => notes.push(format!("no tracer: {error:#}")),
    }
    match bpf::open_eyes(config, Some(Source::Snapshot)) {
        Ok(eyes) => Ok((Box::new(Sweeps(eyes)), notes)),
        Err(error) => {
            notes.push(format!("no sweeps: {error:#}"));
            Err(Failure::unsupported(notes.join("; ")).into())
        }
    }
}

/// Replaced at merge by a watch over `bpf::Tracer::start(config)`, which detaches everything when dropped.
fn tracer(_config: &Config) -> anyhow::Result<Box<dyn Watch>> {
    Err(Failure::unsupported("the tracer is not in this build yet").into())
}
