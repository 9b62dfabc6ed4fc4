//! The story afterwards: what `report` and `events` tell of real processes that a real daemon has recorded.

mod deaths;
mod families;
mod fleet;
mod jobs;
mod log;
mod memory;
mod record;
mod restarts;
mod stream;

use gpureap_tests::harness::{Bench, Device, Shared, skip};

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

/// Whether the machine is a virtual one and the test's own.
fn in_vm() -> bool {
    std::env::var_os("GPUREAP_TEST_VM").is_some()
}

/// Whether to leave out, where a processor is emulated, what asks no more of the kernel than others that are run there do.
fn elsewhere(test: &str) -> bool {
    if in_vm() {
        skip(test, "the machine that we run on is as good for this, and quicker");
    }
    in_vm()
}
