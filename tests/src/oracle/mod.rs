//! Random workloads that know their own truth. A sequence of steps ([`step`]) is made from a seed ([`generate`]) over a model
//! of the kernel's tables ([`model`]), played by real processes ([`troupe`]) beside a running tracer ([`stage`]), and at
//! each pause compared with what gpureap sees ([`check`]). What fails is made short ([`shrink`]).
pub mod check;
pub mod generate;
pub mod model;
pub mod shrink;
pub mod stage;
pub mod step;
mod together;
pub mod troupe;
