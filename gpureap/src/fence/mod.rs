//! Fences for people: what `gpureap fence` and `unfence` report, and what the daemon says of a fence that stands.
//! The fence itself is [`crate::bpf::fence`].

pub mod cgroup;
pub mod report;
pub mod text;
pub mod watch;

#[cfg(test)]
mod tests;
