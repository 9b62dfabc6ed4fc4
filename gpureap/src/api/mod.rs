//! The daemon's read-only socket: one JSON line in, one JSON line out (docs/socket.md). Those who may not read the pins get
//! the same views through it.

pub mod budget;
pub mod client;
pub mod privacy;
pub mod server;
pub mod socket;
pub mod wire;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

/// Where the daemon of a run directory listens.
pub fn path(run: &Path) -> PathBuf {
    run.join("gpureap.sock")
}
