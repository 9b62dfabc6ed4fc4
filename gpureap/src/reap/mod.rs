//! Free GPUs: choose, plan, signal, wait, prove.

pub mod ladder;
pub mod people;
pub mod pidfd;
pub mod plan;
pub mod reaper;
pub mod record;
pub mod report;
pub mod signaller;
pub mod stuck;
pub mod text;
pub mod verdict;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
