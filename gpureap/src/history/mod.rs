//! The flight recorder: what happened to every process that held a device, as plain events, the state that follows from
//! them, and the report that is made of it. No I/O here: the daemon feeds it, `journal/` keeps it.

pub mod build;
pub mod death;
pub mod event;
mod family;
pub mod html;
pub(crate) mod incident;
pub mod kmsg;
pub mod line;
pub mod replay;
pub mod report;
pub mod rows;
#[cfg(test)]
mod samples;
pub mod state;
#[cfg(test)]
mod tests;
pub mod text;
mod told;
pub mod xid;

#[cfg(test)]
use crate::{holders, model};
