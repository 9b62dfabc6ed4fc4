//! The devices of this host.

pub mod devices;
pub mod modules;
pub mod nvml;
pub mod select;
