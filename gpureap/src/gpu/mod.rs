//! The devices of this host.

pub mod devices;
pub mod select;
