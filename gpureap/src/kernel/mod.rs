//! What this kernel is: its types, and where the members are that the kernel programs read.

pub mod btf;
pub mod offsets;
pub mod preemption;
pub mod rights;
