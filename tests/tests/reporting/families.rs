//! Who came from whom, when the parents are long gone.
use std::collections::BTreeSet;

use gpureap_tests::harness::{Device, Pid, Scene, anybody, sys};
use serde_json::{Value, json};

use crate::{
    DEV, elsewhere,
    record::{dead, hold, incident, lineage, list, process, report, until, until_held},
    shared,
};

#[test]
fn f7_a_child_that_inherited_from_a_killed_parent() {
    let bench = shared();
    let scene = Scene::start("ghost", DEV, &[]);
    let [opener] = scene.numbers("dead")[..] else { panic!("one dead process") };
    let report_of = until_held(&bench, &[scene.pid()]);
    let found = hold(&report_of, scene.pid());
    assert_eq!((&found["origin"], &found["inherited_from"]), (&json!("inherited"), &json!(opener)), "{found:#}");
    let entry = process(&report_of, scene.pid()).expect("its entry");
    assert!(lineage(entry).starts_with(&scene.numbers("lineage")), "{entry:#}");
    assert_eq!(entry["death"], Value::Null);

    let parent = dead(&bench, opener, "killed-by");
    assert_eq!(parent["death"]["sender"]["pid"], scene.number("director"), "{parent:#}");
    assert_eq!(parent["death"]["signal"], "SIGKILL");

    sys::kill(scene.pid(), sys::SIGKILL);
    let child = dead(&bench, scene.pid(), "killed-by");
    assert_eq!(child["lineage"][0]["pid"], opener, "{child:#}");
    assert_eq!(child["lineage"][0]["exit"], json!({"signal": 9}), "{child:#}");
    let after = report(&bench, &[]);
    let (own, inherited) = (hold(&after, opener), hold(&after, scene.pid()));
    assert_eq!((&own["ended"], &inherited["ended"]), (&json!("exited"), &json!("exited")));
    let time = |hold: &Value| hold["released"].as_str().expect("a time").to_owned();
    assert!(time(own) < time(inherited), "the child held on: {own:#} {inherited:#}");
}

#[test]
fn f8_the_orphans_of_three_jobs_by_the_job_that_started_them() {
    if elsewhere("F8") || !Device::full().is_free("F8") {
        return;
    }
    let bench = shared();
    // What starts jobs is no part of any.
    let scene = Scene::start("orphans", DEV, &["126", "3", "slurmstepd"]);
    let groups: Vec<(Pid, Vec<Pid>)> = list(&scene.fields, "groups")
        .iter()
        .map(|group| {
            let workers = list(group, "workers").iter().map(|pid| pid.as_i64().expect("a pid") as Pid);
            (group["launcher"].as_i64().expect("a pid") as Pid, workers.collect())
        })
        .collect();
    let all: Vec<Pid> = groups.iter().flat_map(|(_, workers)| workers).copied().collect();
    assert_eq!(all.len(), 126);
    until_held(&bench, &all);
    bench.run(&["reap", "--now", "--yes"]).expect_code(0);
    let found = until(&bench, &[], "all are dead", |report| {
        all.iter().all(|pid| process(report, *pid).is_some_and(|process| process["death"]["cause"] == "reaped"))
    });
    let mut ids = BTreeSet::new();
    for (launcher, workers) in &groups {
        let of_launcher = incident(&found, *launcher);
        ids.insert(of_launcher["id"].as_u64().expect("a number"));
        assert_eq!(of_launcher["group"]["by"], "lineage", "{of_launcher:#}");
        let name = of_launcher["group"]["name"].as_str().expect("a name");
        assert!(name.ends_with(&format!("(pid {launcher})")), "{name}");
        let members: BTreeSet<Pid> =
            list(of_launcher, "processes").iter().map(|member| member["pid"].as_i64().expect("a pid") as Pid).collect();
        let expected: BTreeSet<Pid> = workers.iter().copied().chain([*launcher]).collect();
        assert_eq!(members, expected, "the launcher and its workers, and nobody else's");
        for worker in workers {
            let entry = process(&found, *worker).expect("its entry");
            assert_eq!(lineage(entry)[0], *launcher, "{entry:#}");
            assert_eq!(hold(&found, *worker)["inherited_from"], *launcher);
            assert_eq!(incident(&found, *worker)["id"], of_launcher["id"]);
        }
    }
    assert_eq!(ids.len(), 3, "three jobs");
    assert_eq!(anybody(&Device::full().key()), Vec::<Pid>::new());
}

#[test]
fn f9_the_lineage_is_that_of_the_fork() {
    if elsewhere("F9") {
        return;
    }
    let bench = shared();
    let scene = Scene::start("subreaper", DEV, &[]);
    let expected = scene.numbers("lineage");
    until_held(&bench, &[scene.pid()]);
    let gone = |report: &Value| {
        process(report, scene.pid()).is_some_and(|process| process["lineage"][0]["exit"] == json!({"code": 0}))
    };
    let found = until(&bench, &[], "its launcher is gone", gone);
    let entry = process(&found, scene.pid()).expect("its entry");
    assert!(lineage(entry).starts_with(&expected), "{expected:?} in {entry:#}");
    assert_eq!(entry["lineage"][1]["exit"], Value::Null, "the subreaper lives: {entry:#}");
    sys::kill(scene.pid(), sys::SIGTERM);
    let after = dead(&bench, scene.pid(), "killed-by");
    assert!(lineage(&after).starts_with(&expected), "{after:#}");
}
