//! The story afterwards: what `report` and `events` tell of real processes that a real daemon has recorded.

mod deaths;
mod families;
mod jobs;
mod log;
mod memory;
mod record;
mod restarts;
mod stream;

use gpureap_tests::harness::{Bench, Device, Shared, anybody, skip};

/// Opened by next to nobody.
const DEV: &str = "/dev/full";

/// The bench with the daemon that is there for all tests.
fn shared() -> Shared {
    Shared::new(&[Device::full()])
}

/// A bench without a daemon.
fn bench() -> Bench {
    Bench::new(&[Device::full()])
}

/// Whether a test may kill everybody who holds the device; says so if not.
fn nobody_else(test: &str) -> bool {
    let others = anybody(&Device::full().key());
    if !others.is_empty() {
        skip(test, &format!("{DEV} is held by {others:?}, who might be killed"));
    }
    others.is_empty()
}
