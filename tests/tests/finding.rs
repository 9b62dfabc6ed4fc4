//! Every way to hold a device is found: by the daemon's map, by a daemon started later, and without a daemon.
use gpureap_tests::harness::{Bench, Device, Pid, Scene, Seen, note, skip};
use serde_json::Value;

const DEV: &str = "/dev/zero";

/// When the scene started, as the tracer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// The daemon saw it happen.
    Traced,
    /// The daemon started later.
    Before,
    /// There is no daemon.
    Untraced,
}

/// Plays the scene in each of the three ways, compares the counts and then checks what is particular.
fn in_every_way(kind: &str, rest: &[&str], check: impl Fn(When, &Scene, &Seen)) {
    for when in [When::Traced, When::Before, When::Untraced] {
        note(&format!("{kind} {when:?}"));
        let bench = Bench::new(&[Device::zero()]);
        let mut daemon = (when == When::Traced).then(|| bench.daemon());
        let scene = match Scene::try_start(kind, DEV, rest) {
            Ok(scene) => scene,
            Err(reason) => return skip(kind, &reason),
        };
        if when == When::Before {
            daemon = Some(bench.daemon());
        }
        let seen = bench.expect_truth(&scene, &[]);
        assert_eq!(seen.source, if daemon.is_some() { "map" } else { "snapshot" });
        check(when, &scene, &seen);
    }
}

fn holder<'a>(scene: &Scene, seen: &'a Seen) -> &'a Value {
    seen.holder(scene.pid()).unwrap_or_else(|| panic!("{} is not found in {:#}", scene.pid(), seen.json))
}

fn has_how(holder: &Value, how: &str) -> bool {
    holder["how"].as_array().is_some_and(|list| list.iter().any(|entry| entry == how))
}

fn pids(lineage: &Value) -> Vec<Pid> {
    let list = lineage.as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(|entry| entry["pid"].as_i64()).map(|pid| pid as Pid).collect()
}

#[test]
fn f1_a_second_node_of_the_same_device() {
    in_every_way("alt-node", &[], |_, scene, seen| {
        assert!(has_how(holder(scene, seen), "fd"));
        assert_eq!(holder(scene, seen)["devices"][0]["node"], DEV, "the device, whatever node it was opened by");
    });
}

#[test]
fn f2_a_node_that_was_removed_and_made_again() {
    in_every_way("unlinked", &[], |_, scene, seen| assert!(has_how(holder(scene, seen), "deleted-node")));
}

#[test]
fn f3_a_mapping_without_a_descriptor() {
    in_every_way("map", &[], |_, scene, seen| {
        assert!(has_how(holder(scene, seen), "map"));
        assert!(!has_how(holder(scene, seen), "fd"), "there is no descriptor");
    });
}

#[test]
fn f4_a_thread_with_a_table_of_its_own() {
    in_every_way("private-table", &[], |_, scene, seen| {
        let holder = holder(scene, seen);
        assert!(has_how(holder, "private-fd-table"));
        let [tid] = scene.numbers("tids")[..] else { panic!("one thread") };
        assert!(mentions(holder, tid), "thread {tid} is named in {holder:#}");
    });
}

/// Whether the number stands anywhere in the value.
fn mentions(value: &Value, number: Pid) -> bool {
    match value {
        Value::Number(found) => found.as_i64() == Some(number.into()),
        Value::Array(list) => list.iter().any(|value| mentions(value, number)),
        Value::Object(map) => map.values().any(|value| mentions(value, number)),
        _ => false,
    }
}

/// F5, and its kin in an io_uring table: nobody's descriptor. A tracer of files sees it and names the last owner;
/// every other source says that it cannot.
fn in_nobodys_table(kind: &str, how: &str) {
    let bench = Bench::new(&[Device::zero()]);
    let daemon = bench.daemon();
    let scene = match Scene::try_start(kind, DEV, &[]) {
        Ok(scene) => scene,
        Err(reason) => return skip(kind, &reason),
    };
    let seen = bench.expect_truth(&scene, &[]);
    if seen.sees_files() {
        let orphan = &seen.json["orphans"][0];
        assert_eq!(orphan["how"], how, "{orphan:#}");
        assert_eq!(orphan["last_owner"]["pid"], scene.pid(), "{orphan:#}");
    } else {
        note(&format!("{kind}: {} says that it cannot see {}", seen.backend, seen.cannot_see));
        assert!(seen.cannot_see.contains(how), "{:#}", seen.json);
    }
    drop(daemon);
    for source in ["snapshot", "proc"] {
        let seen = bench.holders(&["--source", source]);
        assert!(seen.cannot_see.contains(how), "{source} says what it cannot see: {:#}", seen.json);
    }
}

#[test]
fn f5_a_descriptor_in_flight() {
    in_nobodys_table("in-flight", "in-flight");
}

#[test]
fn f5_a_descriptor_in_flight_from_a_dead_process() {
    in_nobodys_table("in-flight-dead", "in-flight");
}

#[test]
fn f5_a_file_in_an_io_uring_table() {
    in_nobodys_table("io-uring", "io_uring");
}

#[test]
fn f6_a_process_whose_main_thread_has_ended() {
    in_every_way("zombie-leader", &[], |_, scene, seen| {
        assert!(has_how(holder(scene, seen), "zombie-leader"));
        assert_eq!(holder(scene, seen)["state"], "Z");
    });
}

#[test]
fn f7_a_child_of_a_killed_opener() {
    in_every_way("ghost", &[], |when, scene, seen| {
        if when == When::Traced {
            let holder = holder(scene, seen);
            let [dead] = scene.numbers("dead")[..] else { panic!("one dead process") };
            assert_eq!(holder["devices"][0]["inherited_from"], dead, "{holder:#}");
            assert_eq!(holder["lineage"][0]["pid"], dead, "{holder:#}");
            assert_eq!(holder["lineage"][0]["alive"], false, "{holder:#}");
            assert_eq!(holder["lineage"][0]["exit"]["signal"], 9, "{holder:#}");
        }
    });
}

#[test]
fn f8_orphans_are_grouped_by_the_job_that_started_them() {
    in_every_way("orphans", &["126", "3"], |when, scene, seen| {
        if when == When::Traced {
            for group in scene.fields["groups"].as_array().expect("groups") {
                for worker in group["workers"].as_array().expect("workers") {
                    let worker = worker.as_i64().expect("a pid") as Pid;
                    let holder = seen.holder(worker).expect("the worker is found");
                    assert_eq!(holder["lineage"][0]["pid"], group["launcher"], "{holder:#}");
                    assert_eq!(holder["lineage"][0]["alive"], false, "{holder:#}");
                }
            }
        }
    });
}

#[test]
fn f9_the_lineage_is_that_of_the_fork() {
    in_every_way("subreaper", &[], |when, scene, seen| {
        let holder = holder(scene, seen);
        if when == When::Traced {
            let lineage = pids(&holder["lineage"]);
            let expected = scene.numbers("lineage");
            assert!(lineage.starts_with(&expected), "{lineage:?} begins with {expected:?}");
            assert_eq!(holder["lineage"][0]["alive"], false, "{holder:#}");
        }
        assert_eq!(holder["parent"]["pid"], scene.number("subreaper"), "its parent now: {holder:#}");
    });
}

#[test]
fn f10_what_was_held_before_is_marked() {
    for kind in ["plain", "map", "private-table", "zombie-leader"] {
        let bench = Bench::new(&[Device::zero()]);
        let scene = Scene::start(kind, DEV, &[]);
        let _daemon = bench.daemon();
        let seen = bench.expect_truth(&scene, &[]);
        assert_eq!(holder(&scene, &seen)["origin"], "snapshot", "{kind}: {:#}", holder(&scene, &seen));
        let later = Scene::start("plain", DEV, &[]);
        let seen = bench.expect_truth(&later, &[]);
        assert_ne!(holder(&later, &seen)["origin"], "snapshot", "{:#}", holder(&later, &seen));
    }
}

#[test]
fn f10_a_snapshot_says_that_it_cannot_find_what_is_in_flight() {
    let bench = Bench::new(&[Device::zero()]);
    let _scene = Scene::start("in-flight", DEV, &[]);
    let _daemon = bench.daemon();
    let seen = bench.holders(&[]);
    let notes = seen.json["notes"].to_string();
    let told = notes.contains("before the tracer was attached");
    assert!(seen.cannot_see.contains("in-flight") || told, "{:#}", seen.json);
}

#[test]
fn f13_what_an_exec_keeps() {
    in_every_way("inherit-exec", &[], |_, scene, seen| assert!(has_how(holder(scene, seen), "fd")));
}

#[test]
fn f13_what_an_exec_closes() {
    in_every_way("cloexec-exec", &[], |_, scene, seen| assert_eq!(seen.holder(scene.pid()), None));
}

#[test]
fn f13_a_descriptor_that_was_passed() {
    for keep in ["keep", "close"] {
        in_every_way("passed", &[keep], |_, scene, seen| {
            holder(scene, seen);
            assert_eq!(seen.holder(scene.number("sender")).is_some(), keep == "keep");
        });
    }
}

#[test]
fn f14_pids_in_every_namespace() {
    in_every_way("pidns", &[], |_, scene, seen| {
        let nspids: Vec<Pid> = serde_json::from_value(holder(scene, seen)["nspids"].clone()).expect("numbers");
        assert_eq!(nspids, scene.numbers("nspids"));
    });
}

#[test]
fn f15_names_are_data() {
    in_every_way("hostile-name", &[], |_, scene, seen| {
        let holder = holder(scene, seen);
        assert_eq!(holder["comm"], scene.fields["comm"]);
        let argv = holder["argv"].as_array().expect("argv");
        let expected = scene.fields["argv"].as_array().expect("argv");
        assert!(argv.ends_with(expected), "{argv:?} ends with {expected:?}");
        assert_eq!(holder["state"], "S", "the fields behind a hostile name are read right");
    });
}

#[test]
fn f15_a_table_never_carries_control_characters() {
    let bench = Bench::new(&[Device::zero()]);
    let scene = Scene::start("hostile-name", DEV, &[]);
    let output = bench.run(&["holders"]).expect_code(0);
    assert!(output.stdout.contains(&scene.pid().to_string()), "{output:#?}");
    let bad = |c: char| (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    assert!(!output.stdout.contains(bad), "{output:#?}");
    assert!(!output.stdout.lines().any(|line| line.starts_with("name) S 1")), "no line break from a name: {output:#?}");
}

#[test]
fn a_holder_is_gone_from_the_map_when_it_has_closed() {
    let bench = Bench::new(&[Device::zero()]);
    let _daemon = bench.daemon();
    let scene = Scene::start("quick-exit", DEV, &["300"]);
    gpureap_tests::harness::wait_for("the holder is gone", || bench.holders(&[]).holder(scene.pid()).is_none());
}

#[test]
fn several_devices_of_one_process_are_all_shown() {
    let devices = [Device::zero(), Device::full(), Device::new(1, 8, "/dev/random")];
    let bench = Bench::new(&devices);
    let _daemon = bench.daemon();
    let scene = Scene::start("three-nodes", DEV, &["/dev/full", "/dev/random"]);
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(holder(&scene, &seen)["devices"].as_array().map(Vec::len), Some(3));
    let one = bench.holders(&["--gpu", "/dev/full"]);
    let found = one.holder(scene.pid()).expect("chosen by one of its devices");
    assert!(found["devices"].as_array().expect("devices").iter().any(|device| device["node"] == "/dev/full"));
}
