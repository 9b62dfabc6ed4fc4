//! Helpers for the kernel tests: real processes that hold devices ([`actor`]), and what is needed to run
//! gpureap beside them and compare ([`harness`]).
pub mod actor;
pub mod harness;
