//! What /proc tells about processes, read from an injectable root. Whatever is missing or unreadable is `None`.

pub mod cgroup;
pub mod facts;
pub mod names;
pub mod pidfd;
pub mod place;
pub mod slurm;
pub mod stat;
pub mod table;
pub mod users;
pub mod walk;

pub use facts::{Facts, Thread};
pub use names::{ContainerNames, Runtimes};
pub use place::Place;
