//! One file per command that needs no module of its own.

pub mod blockers;
pub mod check;
pub mod completions;
pub mod events;
pub mod fence;
pub mod holders;
pub mod man;
pub mod report;
pub mod wait;
