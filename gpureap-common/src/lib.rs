//! The records that the kernel programs and user space share.
//!
//! Everything here is `repr(C)` plain data without bool, enum, `Option` or implicit padding: the kernel writes it, user
//! space (perhaps a later version of it) reads it from pinned maps. Any change of a size, an offset or a meaning raises
//! [`abi::ABI_VERSION`]; pins of another version are never adopted.
//!
//! Times are nanoseconds of `CLOCK_BOOTTIME`.

#![no_std]

pub mod abi;
pub mod counter;
pub mod event;
pub mod fence;
pub mod fix;
pub mod global;
pub mod record;
pub mod sweep;
