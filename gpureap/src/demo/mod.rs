//! `gpureap demo`: the whole job with real processes, on stand-in devices or, with a driver, a look at the real holders.

pub mod actor;
pub mod cast;
pub mod play;
pub mod recording;
pub mod stage;
pub mod watch;

use std::{ffi::OsString, path::Path, time::Instant};

use self::{play::Story, stage::Stage};
use crate::{
    cli::{DemoArgs, HoldersArgs},
    commands,
    config::Config,
    exit_code::Exit,
    gpu::devices::discover,
    model::DeviceKind,
    out,
};

pub fn run(args: &DemoArgs, config: &Config) -> anyhow::Result<Exit> {
    let DemoArgs { standin } = args;
    let devices = discover(&config.paths, &[])?;
    let real = devices.list().iter().filter(|device| device.kind == DeviceKind::Gpu && device.minor.is_some()).count();
    if real > 0 && !standin {
        say(&format!(
            "This host has {real} GPUs: who holds them, read only. `gpureap demo --standin` shows a reap.\n"
        ))?;
        return commands::holders::run(&HoldersArgs::default(), config);
    }
    let begun = Instant::now();
    let stage = Stage::set(config, 3)?;
    let (watch, notes) = watch::start(&stage.config)?;
    for note in notes {
        say(&format!("  · {note}"))?;
    }
    let mut say = say;
    let mut story = Story::new(&mut say);
    play::perform(&stage, watch.as_ref(), Path::new("/proc/self/exe"), &mut story)?;
    drop(watch);
    let struck = stage.strike();
    play::close(&mut story, struck, begun.elapsed())
}

/// The word that makes this program one of the demo's processes.
pub const ACTOR: &str = "actor";

/// What follows it: the kind, then the nodes.
pub fn actor(words: &[OsString]) -> anyhow::Result<Exit> {
    let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    actor::play(&words)
}

fn say(text: &str) -> anyhow::Result<()> {
    out::raw(format!("{text}\n").as_bytes())
}
