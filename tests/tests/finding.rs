//! Every way to hold a device is found: by the daemon's map, by a daemon started later, and without a daemon.
use gpureap_tests::harness::{Bench, Device, Pid, Scene, Seen, Shared, note, skip};
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

/// A way to hold the device, and what is to be seen of it besides the counts.
struct Kind {
    name: &'static str,
    rest: &'static [&'static str],
    check: fn(When, &Scene, &Seen),
}

const fn kind(name: &'static str, rest: &'static [&'static str], check: fn(When, &Scene, &Seen)) -> Kind {
    Kind { name, rest, check }
}

const KINDS: &[Kind] = &[
    kind("alt-node", &[], alt_node),
    kind("unlinked", &[], unlinked),
    kind("map", &[], map),
    kind("private-table", &[], private_table),
    kind("zombie-leader", &[], zombie_leader),
    kind("ghost", &[], ghost),
    kind("orphans", &["126", "3"], orphans),
    kind("subreaper", &[], subreaper),
    kind("inherit-exec", &[], inherit_exec),
    kind("cloexec-exec", &[], cloexec_exec),
    kind("passed", &["keep"], passed_and_kept),
    kind("passed", &["close"], passed_and_closed),
    kind("pidns", &[], pidns),
    kind("hostile-name", &[], hostile_name),
    kind("plain", &[], plain),
];

/// Files in nobody's table, and the word for it.
const HIDDEN: &[(&str, &str)] =
    &[("in-flight", "in-flight"), ("in-flight-dead", "in-flight"), ("io-uring", "io_uring")];

fn devices() -> [Device; 3] {
    [Device::zero(), Device::full(), Device::new(1, 8, "/dev/random")]
}

/// The bench with the daemon that is there for all tests.
fn shared() -> Shared {
    Shared::new(&devices())
}

fn start(kind: &str, rest: &[&str]) -> Option<Scene> {
    Scene::try_start(kind, DEV, rest).map_err(|reason| skip(kind, &reason)).ok()
}

/// Plays every scene of this kind before the eyes of the daemon, compares the counts and checks what is particular.
fn traced(name: &str) {
    let bench = shared();
    let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| kind.name == name).collect();
    assert!(!kinds.is_empty(), "{name} is in the table");
    for Kind { name, rest, check } in kinds {
        note(&format!("{name} {rest:?}"));
        let Some(scene) = start(name, rest) else { continue };
        let seen = bench.expect_truth(&scene, &[]);
        assert_eq!(seen.source, "map");
        check(When::Traced, &scene, &seen);
    }
}

/// Starts the scenes of every kind, which all live at the same time.
fn start_all() -> (Vec<&'static Kind>, Vec<Scene>) {
    KINDS.iter().filter_map(|kind| Some((kind, start(kind.name, kind.rest)?))).unzip()
}

fn check_all(when: When, kinds: &[&Kind], scenes: &[Scene], seen: &Seen) {
    for (Kind { name, rest, check }, scene) in kinds.iter().zip(scenes) {
        note(&format!("{name} {rest:?} {when:?}"));
        check(when, scene, seen);
    }
}

#[test]
fn f10_every_kind_is_found_by_the_start_snapshot_and_marked() {
    let bench = Bench::new(&[Device::zero()]);
    let (kinds, mut scenes) = start_all();
    let _daemon = bench.daemon();
    let seen = bench.expect_truths(&scenes, &[]);
    assert_eq!(seen.source, "map");
    check_all(When::Before, &kinds, &scenes, &seen);
    for (kind, scene) in kinds.iter().zip(&scenes) {
        if ["plain", "map", "private-table", "zombie-leader"].contains(&kind.name) {
            let holder = holder(scene, &seen);
            assert_eq!(holder["origin"], "snapshot", "{}: {holder:#}", kind.name);
        }
    }
    scenes.push(Scene::start("plain", DEV, &[]));
    let seen = bench.expect_truths(&scenes, &[]);
    let later = holder(&scenes[kinds.len()], &seen);
    assert_ne!(later["origin"], "snapshot", "{later:#}");
}

#[test]
fn every_kind_is_found_without_a_daemon() {
    let bench = Bench::new(&[Device::zero()]);
    let (kinds, mut scenes) = start_all();
    let hidden: Vec<&str> = HIDDEN
        .iter()
        .filter_map(|(kind, how)| {
            scenes.push(start(kind, &[])?);
            Some(*how)
        })
        .collect();
    let snapshot = bench.expect_truths(&scenes, &[]);
    assert_eq!(snapshot.source, "snapshot");
    check_all(When::Untraced, &kinds, &scenes, &snapshot);
    let proc = bench.holders(&["--source", "proc"]);
    assert_eq!(proc.source, "proc");
    for seen in [snapshot, proc] {
        for how in &hidden {
            assert!(seen.cannot_see.contains(how), "{} says what it cannot see: {:#}", seen.source, seen.json);
        }
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

fn plain(_: When, scene: &Scene, seen: &Seen) {
    assert!(has_how(holder(scene, seen), "fd"));
}

#[test]
fn f0_a_descriptor() {
    traced("plain");
}

fn alt_node(_: When, scene: &Scene, seen: &Seen) {
    assert!(has_how(holder(scene, seen), "fd"));
    assert_eq!(holder(scene, seen)["devices"][0]["node"], DEV, "the device, whatever node it was opened by");
}

#[test]
fn f1_a_second_node_of_the_same_device() {
    traced("alt-node");
}

fn unlinked(_: When, scene: &Scene, seen: &Seen) {
    assert!(has_how(holder(scene, seen), "deleted-node"));
}

#[test]
fn f2_a_node_that_was_removed_and_made_again() {
    traced("unlinked");
}

fn map(_: When, scene: &Scene, seen: &Seen) {
    assert!(has_how(holder(scene, seen), "map"));
    assert!(!has_how(holder(scene, seen), "fd"), "there is no descriptor");
}

#[test]
fn f3_a_mapping_without_a_descriptor() {
    traced("map");
}

fn private_table(_: When, scene: &Scene, seen: &Seen) {
    let holder = holder(scene, seen);
    assert!(has_how(holder, "private-fd-table"));
    let [tid] = scene.numbers("tids")[..] else { panic!("one thread") };
    assert!(mentions(holder, tid), "thread {tid} is named in {holder:#}");
}

#[test]
fn f4_a_thread_with_a_table_of_its_own() {
    traced("private-table");
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
fn in_nobodys_table(kind: &str) {
    let (_, how) = HIDDEN.iter().find(|(name, _)| *name == kind).expect("a hidden kind");
    let bench = shared();
    let Some(scene) = start(kind, &[]) else { return };
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(seen.source, "map");
    if seen.sees_files() {
        let orphan = &seen.json["orphans"][0];
        assert_eq!(orphan["how"], *how, "{orphan:#}");
        assert_eq!(orphan["last_owner"]["pid"], scene.pid(), "{orphan:#}");
    } else {
        note(&format!("{kind}: {} says that it cannot see {}", seen.backend, seen.cannot_see));
        assert!(seen.cannot_see.contains(how), "{:#}", seen.json);
    }
}

#[test]
fn f5_a_descriptor_in_flight() {
    in_nobodys_table("in-flight");
}

#[test]
fn f5_a_descriptor_in_flight_from_a_dead_process() {
    in_nobodys_table("in-flight-dead");
}

#[test]
fn f5_a_file_in_an_io_uring_table() {
    in_nobodys_table("io-uring");
}

fn zombie_leader(_: When, scene: &Scene, seen: &Seen) {
    assert!(has_how(holder(scene, seen), "zombie-leader"));
    assert_eq!(holder(scene, seen)["state"], "Z");
}

#[test]
fn f6_a_process_whose_main_thread_has_ended() {
    traced("zombie-leader");
}

fn ghost(when: When, scene: &Scene, seen: &Seen) {
    if when == When::Traced {
        let holder = holder(scene, seen);
        let [dead] = scene.numbers("dead")[..] else { panic!("one dead process") };
        assert_eq!(holder["devices"][0]["inherited_from"], dead, "{holder:#}");
        assert_eq!(holder["lineage"][0]["pid"], dead, "{holder:#}");
        assert_eq!(holder["lineage"][0]["alive"], false, "{holder:#}");
        assert_eq!(holder["lineage"][0]["exit"]["signal"], 9, "{holder:#}");
    }
}

#[test]
fn f7_a_child_of_a_killed_opener() {
    traced("ghost");
}

fn orphans(when: When, scene: &Scene, seen: &Seen) {
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
}

#[test]
fn f8_orphans_are_grouped_by_the_job_that_started_them() {
    traced("orphans");
}

fn subreaper(when: When, scene: &Scene, seen: &Seen) {
    let holder = holder(scene, seen);
    if when == When::Traced {
        let lineage = pids(&holder["lineage"]);
        let expected = scene.numbers("lineage");
        assert!(lineage.starts_with(&expected), "{lineage:?} begins with {expected:?}");
        assert_eq!(holder["lineage"][0]["alive"], false, "{holder:#}");
    }
    assert_eq!(holder["parent"]["pid"], scene.number("subreaper"), "its parent now: {holder:#}");
}

#[test]
fn f9_the_lineage_is_that_of_the_fork() {
    traced("subreaper");
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

fn inherit_exec(_: When, scene: &Scene, seen: &Seen) {
    assert!(has_how(holder(scene, seen), "fd"));
}

#[test]
fn f13_what_an_exec_keeps() {
    traced("inherit-exec");
}

fn cloexec_exec(_: When, scene: &Scene, seen: &Seen) {
    assert_eq!(seen.holder(scene.pid()), None);
}

#[test]
fn f13_what_an_exec_closes() {
    traced("cloexec-exec");
}

fn passed_and_kept(_: When, scene: &Scene, seen: &Seen) {
    holder(scene, seen);
    assert!(seen.holder(scene.number("sender")).is_some());
}

fn passed_and_closed(_: When, scene: &Scene, seen: &Seen) {
    holder(scene, seen);
    assert!(seen.holder(scene.number("sender")).is_none());
}

#[test]
fn f13_a_descriptor_that_was_passed() {
    traced("passed");
}

fn pidns(_: When, scene: &Scene, seen: &Seen) {
    let nspids: Vec<Pid> = serde_json::from_value(holder(scene, seen)["nspids"].clone()).expect("numbers");
    assert_eq!(nspids, scene.numbers("nspids"));
}

#[test]
fn f14_pids_in_every_namespace() {
    traced("pidns");
}

fn hostile_name(_: When, scene: &Scene, seen: &Seen) {
    let holder = holder(scene, seen);
    assert_eq!(holder["comm"], scene.fields["comm"]);
    let argv = holder["argv"].as_array().expect("argv");
    let expected = scene.fields["argv"].as_array().expect("argv");
    assert!(argv.ends_with(expected), "{argv:?} ends with {expected:?}");
    assert_eq!(holder["state"], "S", "the fields behind a hostile name are read right");
}

#[test]
fn f15_names_are_data() {
    traced("hostile-name");
}

#[test]
fn f15_a_table_never_carries_control_characters() {
    let bench = shared();
    let scene = Scene::start("hostile-name", DEV, &[]);
    let output = bench.run(&["holders"]).expect_code(0);
    assert!(output.stdout.contains(&scene.pid().to_string()), "{output:#?}");
    let bad = |c: char| (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    assert!(!output.stdout.contains(bad), "{output:#?}");
    assert!(!output.stdout.lines().any(|line| line.starts_with("name) S 1")), "no line break from a name: {output:#?}");
}

#[test]
fn a_holder_is_gone_from_the_map_when_it_has_closed() {
    let bench = shared();
    let scene = Scene::start("quick-exit", DEV, &["300"]);
    gpureap_tests::harness::wait_for("the holder is gone", || bench.holders(&[]).holder(scene.pid()).is_none());
}

#[test]
fn several_devices_of_one_process_are_all_shown() {
    let bench = shared();
    let scene = Scene::start("three-nodes", DEV, &["/dev/full", "/dev/random"]);
    let seen = bench.expect_truth(&scene, &[]);
    assert_eq!(holder(&scene, &seen)["devices"].as_array().map(Vec::len), Some(3));
    let one = bench.holders(&["--gpu", "/dev/full"]);
    let found = one.holder(scene.pid()).expect("chosen by one of its devices");
    assert!(found["devices"].as_array().expect("devices").iter().any(|device| device["node"] == "/dev/full"));
}
