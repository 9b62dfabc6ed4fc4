//! Pure state: the kernel's records joined into views, and the comparison of the map with a sweep. No I/O.

pub mod join;
pub mod resync;
