//! How long a look at the holders takes inside one process, without the start of one: prints nanoseconds of many looks as
//! JSON. `cargo xtask bench holders` runs it beside a daemon.

#![expect(clippy::print_stdout, reason = "the result")]

use std::{env, time::Instant};

use anyhow::{Context as _, anyhow};
use gpureap::{
    bpf::{eyes::from_pins, resync::read_maps},
    config::{Config, Overrides, Paths},
    gpu::devices::discover,
    model::Eyes as _,
};
use serde_json::json;

const ROUNDS: usize = 500;

fn main() -> anyhow::Result<()> {
    let config = Config::load(Paths::from_env(|name| env::var_os(name)), Overrides::default())?;
    let devices = discover(&config.paths, &config.devices)?;
    let open = || from_pins(&config, &devices)?.map_err(|notes| anyhow!("no tracer runs: {}", notes.join("; ")));
    let eyes = open()?;
    let view = eyes.view()?;

    let open_ns = times(ROUNDS / 10, || open().map(drop))?;
    let view_ns = times(ROUNDS, || eyes.view().map(drop))?;
    let read_maps_ns = times(ROUNDS, || read_maps(eyes.handles()).map(drop).context("read the maps"))?;
    let procs_ns = times(ROUNDS, || eyes.handles().procs().map(drop).context("read the map of processes"))?;
    let result = json!({
        "backend": view.backend,
        "holders": view.holders.len(),
        "open_ns": open_ns,
        "view_ns": view_ns,
        "read_maps_ns": read_maps_ns,
        "procs_ns": procs_ns,
    });
    println!("{result}");
    Ok(())
}

fn times(rounds: usize, mut look: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Vec<u64>> {
    (0..rounds)
        .map(|_| {
            let started = Instant::now();
            look()?;
            Ok(u64::try_from(started.elapsed().as_nanos())?)
        })
        .collect()
}
