//! What the user sees when something fails that gpureap stands on, and that the counts are right again afterwards.
//! `docs/faults.md` is the table of it.

mod clocks;
mod driver;
mod full;
mod killed;
mod limits;
mod places;

use std::path::Path;

use gpureap_tests::harness::{Bench, Device, Scene, skip, tests_named_by};

/// Opened by many, so that nothing here may kill who holds it.
const DEV: &str = "/dev/zero";

fn bench() -> Bench {
    Bench::new(&[Device::zero()])
}

/// Whether the machine is a virtual one and the test's own.
fn in_vm() -> bool {
    std::env::var_os("GPUREAP_TEST_VM").is_some()
}

/// The map, a sweep of all tasks and the truth are the same.
#[track_caller]
fn all_agree(bench: &Bench, scene: &Scene) {
    assert_eq!(bench.expect_truth(scene, &[]).source, "map");
    assert_eq!(bench.expect_truth(scene, &["--source", "snapshot"]).source, "snapshot");
}

#[test]
fn every_test_that_the_page_names_is_there() {
    if in_vm() {
        return skip("page", "the sources are not there");
    }
    let (all, missing) = tests_named_by(Path::new("docs/faults.md"));
    assert!(all.len() > 20, "{all:?}");
    assert!(missing.is_empty(), "{missing:?}");
}
