//! gpureap: who holds the GPU, and how to get it back.

pub mod api;
pub mod blockers;
pub mod bpf;
pub mod check;
pub mod choose;
pub mod classify;
pub mod cli;
pub mod clock;
pub mod commands;
pub mod config;
pub mod daemon;
pub mod demo;
pub mod doctor;
pub mod error;
pub mod exit_code;
pub mod eyes;
pub mod fence;
pub mod footprint;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod gpu;
pub mod history;
pub mod holders;
pub mod host;
pub mod journal;
pub mod kernel;
pub mod library;
pub mod limits;
pub mod metrics;
pub mod model;
pub mod otlp;
pub mod out;
pub mod process;
pub mod reap;
pub mod recorder;
pub mod run;
#[cfg(test)]
mod schema_check;
pub mod top;
pub mod track;
pub mod trust;
pub mod watch;
pub mod when;

pub use self::{
    config::Config,
    library::{Holders, Journal, Reaper},
};
