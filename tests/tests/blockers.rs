//! V6: who stands in the way of a reset, an unload and a change of the MIG mode, with stand-ins and a sysfs of our own.
use std::{fs, os::unix::fs::symlink, path::PathBuf};

use gpureap_tests::harness::{Bench, Device, Output, Pid, Scene, skip};
use serde_json::Value;

const DEV: &str = "/dev/full";

fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(&[Device::full(), Device::zero()]);
    Device::full().is_free(test).then_some(bench)
}

/// The driver's modules as /sys shows them, beside what gpureap needs of the real one.
fn sysfs(bench: &Bench, modules: &[(&str, i64, &[&str])]) -> PathBuf {
    let sys = bench.path("sys");
    fs::create_dir_all(&sys).expect("a directory");
    for real in ["kernel", "fs"] {
        let place = sys.join(real);
        if !place.exists() {
            symlink(format!("/sys/{real}"), place).expect("a link");
        }
    }
    let place = sys.join("module");
    drop(fs::remove_dir_all(&place));
    for (name, refcnt, holders) in modules {
        let module = place.join(name);
        fs::create_dir_all(module.join("holders")).expect("a directory");
        fs::write(module.join("refcnt"), format!("{refcnt}\n")).expect("a file");
        for holder in *holders {
            symlink(format!("../../{holder}"), module.join("holders").join(holder)).expect("a link");
        }
    }
    sys
}

fn blockers(bench: &Bench, arguments: &[&str]) -> Output {
    let mut command = bench.command(&[&["blockers", "--json"], arguments].concat());
    command.env("GPUREAP_SYS", bench.path("sys"));
    gpureap_tests::harness::finish(command)
}

fn pids(report: &Value) -> Vec<Pid> {
    let list = report["blockers"].as_array().expect("blockers").iter();
    list.filter_map(|blocker| blocker["process"]["pid"].as_i64()).map(|pid| pid as Pid).collect()
}

fn commands(report: &Value) -> Vec<&str> {
    report["steps"].as_array().expect("steps").iter().filter_map(|step| step["command"].as_str()).collect()
}

#[test]
fn v6_a_job_is_in_the_way_until_it_has_gone() {
    let Some(bench) = bench("V6") else { return };
    let scene = Scene::start("plain", DEV, &[]);
    for daemon in [false, true] {
        let _daemon = daemon.then(|| bench.daemon());
        sysfs(&bench, &[]);
        for operation in ["reset", "mig"] {
            let report = blockers(&bench, &["--for", operation, "--gpu", DEV]).expect_code(3).json();
            assert_eq!(
                (report["schema"].as_str(), report["for"].as_str()),
                (Some("gpureap.blockers/1"), Some(operation))
            );
            assert_eq!(report["source"], if daemon { "map" } else { "snapshot" });
            assert_eq!((pids(&report), report["outcome"].as_str()), (vec![scene.pid()], Some("jobs")));
            assert_eq!(report["blockers"][0]["nodes"], serde_json::json!([DEV]));
            assert_eq!(report["blockers"][0]["standing"], "job");
            assert_eq!(report["nvml"], serde_json::json!({"asked": false, "trouble": null}));
        }
    }
    // Only the other GPU: the job is nobody's business there.
    let report = blockers(&bench, &["--for", "reset", "--gpu", "/dev/zero"]).json();
    assert!(!pids(&report).contains(&scene.pid()), "{report:#}");
    let pid = scene.pid();
    drop(scene);
    let report = blockers(&bench, &["--for", "reset", "--gpu", DEV]).expect_code(0).json();
    assert_eq!((report["outcome"].as_str(), pids(&report).contains(&pid)), (Some("clear"), false));
}

/// What is advised works: the job's own command, as printed, makes the way free.
#[test]
fn v6_the_advice_for_a_job_frees_the_gpu() {
    let Some(bench) = bench("V6 advice") else { return };
    sysfs(&bench, &[]);
    let scene = Scene::start("plain", DEV, &[]);
    let report = blockers(&bench, &["--for", "reset", "--gpu", DEV]).expect_code(3).json();
    let [command] = commands(&report)[..] else { panic!("{report:#}") };
    let Some(reap) = command.strip_prefix("gpureap ") else {
        return skip("V6 advice", &format!("the tests run as `{command}` would stop"));
    };
    assert_eq!(reap, format!("reap --gpu {DEV} --match any"));
    bench.run(&reap.split(' ').chain(["--yes"]).collect::<Vec<_>>()).expect_code(0);
    blockers(&bench, &["--for", "reset", "--gpu", DEV]).expect_code(0);
    drop(scene);
}

#[test]
fn v6_modules_stand_in_the_way_of_an_unload() {
    let Some(bench) = bench("V6 modules") else { return };
    // Stand-ins that somebody else holds would be jobs.
    bench.write_config("[[device]]\nkind = \"standin\"\nmajor = 1\nminor = 7\nnode = \"/dev/full\"\n");
    sysfs(
        &bench,
        &[
            ("nvidia", 9, &["nvidia_uvm", "nvidia_modeset", "nvidia_peermem"]),
            ("nvidia_uvm", 1, &["nvidia_peermem"]),
            ("nvidia_modeset", 1, &["nvidia_drm"]),
            ("nvidia_drm", 0, &[]),
            ("nvidia_peermem", 0, &[]),
        ],
    );
    let report = blockers(&bench, &["--for", "unload"]).expect_code(6).json();
    assert_eq!(report["outcome"], "kernel-reference");
    let order = ["nvidia_drm", "nvidia_peermem", "nvidia_modeset", "nvidia_uvm"];
    assert_eq!(commands(&report), order.map(|name| format!("modprobe -r {name}")));
    assert_eq!(report["then"], serde_json::json!(["modprobe -r nvidia"]));
    assert_eq!(report["modules"].as_array().map(Vec::len), Some(5));
    // Nobody has a file open, so what is left of the nine is the kernel's own.
    let last = report["blockers"].as_array().and_then(|list| list.last()).expect("blockers");
    assert_eq!((last["module"].as_str(), last["kind"].as_str()), (Some("nvidia"), Some("module")));

    let scene = Scene::start("plain", DEV, &[]);
    let report = blockers(&bench, &["--for", "unload"]).expect_code(3).json();
    assert_eq!(pids(&report), [scene.pid()]);
    drop(scene);
    // A module with nothing on top: free.
    sysfs(&bench, &[("nvidia", 0, &[])]);
    blockers(&bench, &["--for", "unload"]).expect_code(0);
}

#[test]
fn what_cannot_be_asked_is_refused_in_one_sentence() {
    let Some(bench) = bench("V6 refusals") else { return };
    sysfs(&bench, &[]);
    let output = blockers(&bench, &["--for", "unload", "--gpu", "0"]).expect_code(2);
    assert!(output.complaint().contains("every GPU"), "{output:#?}");
    // What the daemon traces can be asked for where nothing else is known.
    let daemon = bench.daemon();
    bench.write_config("");
    let scene = Scene::start("plain", DEV, &[]);
    let report = blockers(&bench, &["--for", "reset"]).expect_code(3).json();
    assert!(report["source"] == "map" && pids(&report).contains(&scene.pid()), "{report:#}");
    drop((scene, daemon));
    fs::remove_dir_all(bench.pins()).ok();
    let output = blockers(&bench, &["--for", "reset"]);
    if output.code != 8 {
        return skip("V6 without a driver", "this host has one");
    }
    assert!(output.complaint().contains("no NVIDIA device"), "{output:#?}");
}
