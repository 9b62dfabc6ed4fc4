//! gpureap: who holds the GPU, and how to get it back.

pub mod config;
pub mod error;
pub mod exit_code;
pub mod gpu;
pub mod model;
pub mod reap;
