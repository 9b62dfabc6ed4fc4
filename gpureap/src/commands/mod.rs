//! One file per command that needs no module of its own.

pub mod completions;
pub mod holders;
pub mod man;
pub mod wait;
