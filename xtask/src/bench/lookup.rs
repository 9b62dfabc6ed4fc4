//! Looks at the holders through the library, inside one process.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{load::Load, place::Place, stats::Stats};
use crate::process;

/// The design's figure.
const LOOKUP_HOLDERS: u32 = 64;

/// Times of many looks through the library, in one process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Lookup {
    pub(super) holders: usize,
    /// `from_pins`: opens the pinned maps and programs.
    pub(super) open: Stats,
    /// `Eyes::view`: holders, verified.
    pub(super) view: Stats,
    /// `read_maps`: what the view starts from where the kernel counts.
    pub(super) read_maps: Stats,
    /// `Handles::procs`: what it starts from with the gate.
    pub(super) procs: Stats,
}

/// Beside the daemon of a place. `example` is gpureap's example `lookup_time`.
pub(super) fn look_up(place: &Place, example: &Path) -> Result<Lookup> {
    #[derive(Deserialize)]
    struct Told {
        holders: usize,
        open_ns: Vec<f64>,
        view_ns: Vec<f64>,
        read_maps_ns: Vec<f64>,
        procs_ns: Vec<f64>,
    }
    let load = Load::start(LOOKUP_HOLDERS, LOOKUP_HOLDERS, &place.node())?;
    let text = process::output(&mut place.command(example, &[]))?;
    let Told { holders, open_ns, view_ns, read_maps_ns, procs_ns } =
        serde_json::from_str(&text).context("lookup_time")?;
    ensure!(holders == load.holders.len(), "the library found {holders} holders of {}", load.holders.len());
    let stats =
        |ns: Vec<f64>| Stats::of_ms(ns.into_iter().map(|ns| ns / 1e6).collect()).context("lookup_time told no times");
    Ok(Lookup {
        holders,
        open: stats(open_ns)?,
        view: stats(view_ns)?,
        read_maps: stats(read_maps_ns)?,
        procs: stats(procs_ns)?,
    })
}
