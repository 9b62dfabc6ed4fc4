//! The flight recorder: what happened to every process that held a device, as plain events, the state that follows from
//! them, and the report that is made of it. No I/O here: the daemon feeds it, `journal/` keeps it.

pub mod event;
pub mod html;
pub mod report;
pub mod rows;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;
pub mod text;
mod told;

#[cfg(test)]
use crate::{holders, model};
