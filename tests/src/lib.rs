//! Helpers for the kernel tests: real processes that hold devices ([`actor`]), what is needed to run gpureap beside
//! them and compare ([`harness`]), and random workloads with a truth of their own ([`oracle`]).
pub mod actor;
pub mod harness;
pub mod oracle;
pub mod random;
