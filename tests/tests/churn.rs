//! The churn oracle: random workloads of many processes, after each pause of which the map, a full sweep and the truth are
//! the same. `GPUREAP_CHURN_SEEDS=FROM..TO` plays other seeds than the few that are always played.
use std::{
    fs,
    path::{Path, PathBuf},
};

use gpureap::{bpf::resync::mark_mapped, model::ProcKey};
use gpureap_tests::{
    actor::ring::Ring,
    harness::{Bench, Device, Player, Shared, skip, sys},
    oracle::{
        generate::{Script, sequence},
        shrink::shrink,
        stage::{Run, Stage},
        step::{self, Act, Step},
    },
};

/// The first can be mapped.
fn devices() -> Vec<Device> {
    vec![Device::zero(), Device::full(), Device::new(1, 8, "/dev/random")]
}

/// How often a failing sequence is played to make it short.
const TRIES: usize = 300;

fn script() -> Script {
    let rings = Ring::new(0).map(Ring::end).is_ok();
    Script { devices: devices().len() as u32, rings, steps: 60 }
}

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("GPUREAP_CHURN_SEEDS") {
        Ok(text) => {
            let ends = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
            ends.unwrap_or_else(|| panic!("GPUREAP_CHURN_SEEDS is FROM..TO, not `{text}`"))
        }
        // An emulated processor needs seconds for each.
        Err(_) if std::env::var_os("GPUREAP_TEST_VM").is_some() => 0..4,
        Err(_) => 0..20,
    }
}

/// Past the test runner, which is silent until the end.
fn tell(text: &str) {
    sys::write_all(2, format!("{text}\n").as_bytes());
}

/// Plays the sequence and panics with the shortest one that shows a difference.
fn expect_truth(stage: &mut Stage, name: &str, steps: &[Step]) {
    let Err(fault) = stage.play(steps) else { return };
    tell(&format!("{name}, after {} of {} steps:\n{}", fault.after, steps.len(), fault.lines.join("\n")));
    let short = shrink(steps[..fault.after].to_vec(), TRIES, &mut |steps| stage.play(steps).is_err());
    let lines = stage.play(&short).err().map_or_else(|| vec!["not each time".to_owned()], |fault| fault.lines);
    panic!("{name}:\n{}\n{}", step::write(&short), lines.join("\n"));
}

#[test]
fn random_workloads_are_seen_as_they_are() {
    let bench = Shared::new(&devices());
    let mut stage = Stage::new(&bench);
    let (seeds, script) = (seeds(), script());
    for seed in seeds.clone() {
        if seed > seeds.start && (seed - seeds.start) % 20 == 0 {
            tell(&format!("seed {seed}, {}", stage.tally));
        }
        expect_truth(&mut stage, &format!("seed {seed}"), &sequence(seed, script));
    }
    let lost = stage.lost_events();
    tell(&format!("{}: seeds {seeds:?}, {}, {lost} lost events", bench.backend, stage.tally));
    assert!(bench.backend != "kprobe" || lost == 0, "{lost} lost events");
}

#[test]
fn what_once_went_wrong_is_right() {
    let bench = Shared::new(&devices());
    let mut stage = Stage::new(&bench);
    let rings = script().rings;
    let fixtures = std::env::var_os("GPUREAP_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"), PathBuf::from);
    let directory = fixtures.join("churn");
    let mut files: Vec<_> =
        fs::read_dir(&directory).expect("the sequences").flatten().map(|entry| entry.path()).collect();
    files.sort();
    assert!(!files.is_empty(), "there are sequences in {}", directory.display());
    for path in files {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(&path).expect("a sequence");
        let steps = step::read(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        if !rings && step::write(&steps).contains("ring") {
            skip(&name, "no io_uring here");
            continue;
        }
        // What depends on who comes first goes wrong only now and then.
        let times = if steps.iter().any(|step| matches!(step, Step::Together(_))) { 20 } else { 1 };
        for _ in 0..times {
            if let Err(fault) = stage.play(&steps) {
                panic!("{name}, after {} steps:\n{}", fault.after, fault.lines.join("\n"));
            }
        }
    }
}

/// A look at a process and its end may cross: then it is noted as one of interest after its exit was told.
#[test]
fn a_process_that_is_marked_while_it_ends_is_forgotten() {
    let bench = Shared::new(&devices());
    let stage = Stage::new(&bench);
    let mut player = Player::start();
    player.tell("exit 0");
    player.end();
    let (handles, tgid) = (stage.eyes().handles(), player.pid() as u32);
    mark_mapped(handles, ProcKey::new(tgid, 1), 0).expect("the program `fix`");
    assert!(handles.process(tgid).expect("the map PROCS").is_some(), "it was marked");
    stage.eyes().resync().expect("a resync");
    assert_eq!(handles.process(tgid).expect("the map PROCS"), None);
}

/// Nothing told the programs that two processes use one table: it had no device in it when they were attached.
#[test]
fn a_table_shared_before_the_attach_is_known_to_be_shared() {
    let bench = Bench::new(&devices());
    let mut run = Run::new(&bench.devices);
    for step in step::read("begin t0\nt0 share t1\n").expect("steps") {
        run.take(&step, true).expect("it is legal");
    }
    let _daemon = bench.daemon();
    let mut stage = Stage::new(&bench);
    let steps = step::read("t1 open d0 3\npause\nt0 close 3\npause\nt0 open d1 3\nkill t0\npause\n").expect("steps");
    stage.go_on(&mut run, &steps, &|_| false).expect("what is true is seen");
    stage.end(run).expect("nothing is left");
}

/// The oracle itself: when the truth is not told of one descriptor, it says so, and finds the step.
#[test]
fn a_wrong_count_is_found_and_made_short() {
    if std::env::var_os("GPUREAP_TEST_VM").is_some() {
        skip("a_wrong_count_is_found_and_made_short", "it asks nothing of the kernel");
        return;
    }
    let bench = Shared::new(&devices());
    let mut stage = Stage::new(&bench).impatient();
    let mut steps = sequence(3, Script { steps: 30, ..script() });
    let text = "begin t99\nt99 open d1 3\nt99 fcntl 3 77\npause\n";
    let middle = steps.len() / 2;
    steps.splice(middle..middle, step::read(text).expect("steps"));
    let untold = |step: &Step| matches!(step, Step::Do(_, Act::Fcntl { to: 77, .. }));
    let fault = stage.play_untold(&steps, &untold).expect_err("a wrong count is a difference");
    let short = shrink(steps[..fault.after].to_vec(), TRIES, &mut |steps| stage.play_untold(steps, &untold).is_err());
    assert_eq!(step::write(&short), text);
    let fault = stage.play_untold(&short, &untold).expect_err("it still is");
    let told = "holds d1 1 fds 0 maps, seen d1 2 fds 0 maps";
    assert!(fault.lines.iter().any(|line| line.starts_with("view: t99") && line.contains(told)), "{:?}", fault.lines);
    assert_eq!(stage.play(&short), Ok(()), "what is told is right");
}
