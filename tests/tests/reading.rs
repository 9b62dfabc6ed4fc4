//! Reading the maps takes no event away unseen: while bpf(2) looks at a map, the kernel skips the kprobe programs of that processor, and
//! where it preempts its own code others run there meanwhile.
use std::{
    fs::File,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use gpureap::bpf::handles::Handles;
use gpureap_tests::harness::{Bench, Device, PATIENCE, Scene, note, preemptible, record, settle, skip, to_be_refused};
use serde_json::json;

const DEV: &str = "/dev/zero";

#[test]
fn counts_are_exact_whoever_reads_meanwhile() {
    if to_be_refused() {
        skip("reading", "gpureap does not run this set on this kernel");
        return;
    }
    let bench = Bench::new(&[Device::zero()]);
    let _daemon = bench.daemon();
    let mut scene = Scene::start("churn", DEV, &["41", "1000"]);
    let mut lost = bench.look().lost_events;
    // Lost while nobody reads, and while two threads do.
    let mut losses = [0, 0];
    for readers in [0, 2, 0, 2] {
        let reads = while_others_read(&bench, readers, || {
            scene.resume();
            scene.pause();
        });
        assert!(reads >= 20 * readers, "{readers} readers read {reads} times");
        let seen = bench.expect_truth(&scene, &[]);
        assert_eq!(seen.source, "map");
        losses[usize::from(readers > 0)] += seen.lost_events - lost;
        lost = seen.lost_events;
    }
    let [alone, read] = losses;
    note(&format!("lost {alone} while nobody read, {read} while others did"));
    record(&json!({"kind": "reading", "alone": alone, "read": read}));
    assert!(preemptible() || lost == 0, "{lost} lost");
}

/// Does something while `readers` threads read a map without a break; how often they did.
fn while_others_read(bench: &Bench, readers: u64, act: impl FnOnce()) -> u64 {
    let set = bench.set();
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..readers {
            scope.spawn(|| {
                let handles = Handles::from_pins(&set).expect("the pins");
                while !stop.load(Ordering::Relaxed) {
                    handles.holders().expect("the holders");
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        act();
        stop.store(true, Ordering::Relaxed);
    });
    reads.into_inner()
}

/// Opens and closes alone: what the kernel skips of these leaves no contradiction behind that would give it away.
#[test]
fn no_close_is_forgotten_while_others_read() {
    if to_be_refused() {
        skip("reading", "gpureap does not run this set on this kernel");
        return;
    }
    let bench = Bench::new(&[Device::zero()]);
    let _daemon = bench.daemon();
    let reads = while_others_read(&bench, 2, || {
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            let files: Vec<File> = (0..50).map(|_| File::open(DEV).expect("the device")).collect();
            drop(files);
        }
    });
    assert!(reads >= 40, "2 readers read {reads} times");
    let me = std::process::id() as i32;
    let mut lost = 0;
    let outcome = settle(PATIENCE / 4, || {
        let seen = bench.look();
        lost = seen.lost_events;
        seen.holder(me).map(ToString::to_string)
    });
    note(&format!("closed while others read: {lost} lost"));
    assert_eq!(outcome, Ok(()), "nothing is open, {lost} lost");
    assert!(preemptible() || lost == 0, "{lost} lost");
}
