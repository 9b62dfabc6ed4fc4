//! Keys and values of the fence's maps. A fence has an instance of the object of its own; only its program looks at these.

use crate::abi::COMM_LEN;

/// `FENCE`: slot → until when opens of it are refused.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fence {
    pub raised_ns: u64,
    /// From this boottime on opens are let through; [`NO_DEADLINE`]: never.
    pub deadline_ns: u64,
}

pub const NO_DEADLINE: u64 = u64::MAX;

/// `FENCE_TALLY`: slot → what its fence did. Apart from [`Fence`], because user space replaces whole values.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub denied: u64,
    /// Opens of those who are exempt.
    pub exempted: u64,
}

/// Key of `EXEMPT`: who is let through. The value means nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exempt {
    /// Start of the process in [`ticks`], or the cgroup's id.
    pub id: u64,
    /// 0 for a cgroup.
    pub tgid: u32,
    /// An [`exempt`] kind.
    pub kind: u32,
}

/// Kinds of [`Exempt`].
pub mod exempt {
    pub const PROCESS: u32 = 1;
    /// With all cgroups below it.
    pub const CGROUP: u32 = 2;
}

/// Nanoseconds of the ticks in which /proc shows a start (`USER_HZ` is 100): a process that user space names by its pid is
/// known no better.
pub const TICK_NS: u64 = 10_000_000;

pub const fn ticks(start_ns: u64) -> u64 {
    start_ns / TICK_NS
}

/// Key of `DENIED`: a process that tried to open a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrierKey {
    pub start_ns: u64,
    pub tgid: u32,
    pub slot: u32,
}

/// `DENIED` (LRU): who tried. When it is full the one that tried longest ago is forgotten; [`Tally`] still counts it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trier {
    pub count: u64,
    pub first_ns: u64,
    pub last_ns: u64,
    pub cgroup_id: u64,
    pub uid: u32,
    pub pad: u32,
    /// The process's name, not the thread's.
    pub comm: [u8; COMM_LEN],
}

/// How deep a cgroup may lie for its ancestors to be asked whether they are exempt.
pub const LEVELS: i32 = 32;

const _: () = {
    assert!(size_of::<Fence>() == 16);
    assert!(size_of::<Tally>() == 16);
    assert!(size_of::<Exempt>() == 16);
    assert!(size_of::<TrierKey>() == 16);
    assert!(size_of::<Trier>() == 40 + COMM_LEN);
};

#[cfg(feature = "user")]
mod pod {
    use super::{Exempt, Fence, Tally, Trier, TrierKey};

    macro_rules! pod {
        ($($record:ty),*) => {
            $(
                // SAFETY: repr(C), every bit pattern is a value, no implicit padding (sizes are asserted above).
                unsafe impl aya::Pod for $record {}
            )*
        };
    }
    pod!(Fence, Tally, Exempt, TrierKey, Trier);
}
