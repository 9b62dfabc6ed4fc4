use std::{collections::BTreeMap, fs, time::Duration};

use proptest::{collection, prelude::*};

use super::{
    wish::{SlurmJob, Variable},
    *,
};
use crate::model::{Ancestor, Holder, How, NoLineage, Source};

fn text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn worker() -> Candidate {
    Candidate {
        pid: 10,
        uid: Some(1000),
        comm: text("python3"),
        container: text(ID),
        container_name: text("train"),
        job_known: true,
        slurm_job: text("123"),
        slurm_step: text("0"),
        cgroups: vec!["/system.slice/slurmstepd.scope/job_123/step_0".to_owned(), "/".to_owned()],
        environment: Some([("RANK".to_owned(), "0".to_owned())].into()),
        ancestors: [ProcKey::new(10, 10_000_000_000), ProcKey::new(5, 5_000_000_000), ProcKey::new(1, 0)].into(),
        age: Some(Duration::from_mins(1)),
    }
}

fn parse(line: &str) -> Filter {
    use clap::Parser as _;
    let words = std::iter::once("gpureap").chain(["holders"]).chain(line.split_whitespace());
    let crate::cli::Command::Holders(args) = crate::cli::Cli::try_parse_from(words).unwrap().command else {
        panic!("{line}")
    };
    // Nobody is alive there.
    Filter::new(&args.choosing, std::path::Path::new("/nonexistent")).unwrap()
}

#[test]
fn each_filter() {
    for (line, expected) in [
        ("", true),
        ("--pid 10", true),
        ("--pid 11", false),
        ("--pid 11 --pid 10", true),
        ("--user 1000", true),
        ("--user root", false),
        ("--user root --user 1000", true),
        ("--comm python3", true),
        ("--comm python", false),
        ("--container train", true),
        ("--container 0123", true),
        ("--container 1234", false),
        ("--slurm-job 123", true),
        ("--slurm-job 12", false),
        ("--slurm-job 123.0", true),
        ("--slurm-job 123.batch", false),
        ("--slurm-job any", true),
        ("--except-slurm-job 123", false),
        ("--except-slurm-job 12,124", true),
        ("--except-slurm-job 12,123", false),
        ("--except-slurm-job 123.1", true),
        ("--slurm-job any --except-slurm-job 122", true),
        ("--unit slurmstepd.scope", true),
        ("--unit slurmstepd", false),
        ("--unit system.slice", true),
        ("--cgroup /system.slice", true),
        ("--cgroup system.slice/slurmstepd.scope/", true),
        ("--cgroup /system", false),
        ("--cgroup /job_123", false),
        ("--cgroup /", true),
        ("--env RANK=0", true),
        ("--env RANK=1", false),
        ("--env RANK=1 --env RANK=0", true),
        ("--env RANK=0 --env WORLD_SIZE=8", false),
        ("--env RANK=", false),
        ("--tree-of 5", true),
        ("--tree-of 10", true),
        ("--tree-of 6", false),
        ("--tree-of 6 --tree-of 5", true),
        ("--older-than 60", true),
        ("--older-than 1m", true),
        ("--older-than 61s", false),
        // Different flags must all fit.
        ("--user 1000 --comm python3 --tree-of 5", true),
        ("--user 1000 --comm bash --tree-of 5", false),
    ] {
        assert_eq!(parse(line).matches(&worker()), expected, "{line}");
        // One of whom nothing is known fits nothing but what asks for nothing, or for its pid or age.
        let unknown = Candidate { pid: 10, ..Candidate::default() };
        let known = ["", "--pid 10", "--pid 11 --pid 10"].contains(&line);
        assert_eq!(parse(line).matches(&unknown), known, "{line}");
    }
}

#[test]
fn a_named_process_is_that_one_and_no_earlier_owner_of_its_number() {
    let tree = |start_ns| Filter { trees: vec![Tree { pid: 5, start_ns }], ..Filter::default() };
    assert!(tree(Some(5_000_000_001)).matches(&worker()), "a clock tick apart is the same start");
    assert!(!tree(Some(6_000_000_000)).matches(&worker()));
    assert!(tree(None).matches(&worker()));
}

#[test]
fn the_beginning_of_several_ids_is_refused() {
    let with = |id: &str, name: &str| Candidate { container: text(id), container_name: text(name), ..worker() };
    let candidates = [with(&format!("beef{ID}"), "a"), with(&format!("beef0{ID}"), "beef1"), with("beef", "")];
    let check = |wish: &str, count: usize| parse(wish).check_ambiguity(&candidates[..count].iter().collect::<Vec<_>>());
    let failure = check("--container beef", 2).unwrap_err();
    assert_eq!(failure.message, "--container beef fits more than one: beef00123456, beef01234567");
    assert_eq!(failure.exit, crate::exit_code::Exit::Usage);
    assert!(check("--container beef", 1).is_ok() && check("--container beef", 3).is_ok());
    assert!(check("--container beef1", 2).is_ok() && check("--container a", 2).is_ok());
}

#[test]
fn what_could_not_be_judged_is_told() {
    let hidden = Candidate { environment: None, ..worker() };
    let notes = |line: &str| parse(line).notes(&[&hidden, &worker()]);
    assert_eq!(notes("--env A=1"), ["the environment of 1 process may not be read, so --env leaves it out"]);
    assert_eq!(notes("--user 0"), <[&str; 0]>::default());
    assert!(notes("--tree-of 5")[0].contains("that process is dead"), "{:?}", notes("--tree-of 5"));
    assert!(notes("--tree-of 6")[0].contains("there is no such process"));
}

fn holder(pid: u32, start_ns: u64) -> Holder {
    Holder {
        key: ProcKey::new(pid, start_ns),
        usage: BTreeMap::new(),
        how: [How::Fd].into(),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    }
}

fn view(holders: Vec<Holder>) -> View {
    View {
        source: Source::Map,
        backend: None,
        complete: true,
        cannot_see: BTreeSet::new(),
        lost_events: 0,
        swept_ns: None,
        open_files: BTreeMap::new(),
        holders,
        orphans: Vec::new(),
        notes: Vec::new(),
    }
}

/// Remembers who forked whom.
struct Forks(Vec<(ProcKey, ProcKey)>);

impl LineageSource for Forks {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
        let (child, parent) = *self.0.iter().find(|(child, _)| *child == key)?;
        Some(Ancestor { key: child, parent: Some(parent), ..Ancestor::default() })
    }
}

/// A /proc whose processes are given as (pid, parent), each started at its pid in seconds.
fn proc_of(processes: &[(u32, u32)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (pid, ppid) in processes {
        let place = dir.path().join(pid.to_string());
        fs::create_dir(&place).unwrap();
        let stat = format!("{pid} (x) S {ppid} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid}00 0 0");
        fs::write(place.join("stat"), stat).unwrap();
        fs::write(place.join("status"), format!("Tgid:\t{pid}\nUid:\t{pid}\t{pid}\t{pid}\t{pid}\n")).unwrap();
        fs::write(place.join("environ"), format!("A=first\0A=second\0PID={pid}\0\0BROKEN")).unwrap();
    }
    dir
}

const fn at(pid: u32) -> ProcKey {
    ProcKey::new(pid, pid as u64 * 1_000_000_000)
}

#[test]
fn descendants_of_the_dead_and_of_new_parents() {
    // 20 forked 30 and died; 30 forked 40 and died; 40 lives under pid 1, and 50 was never seen to be forked.
    let proc = proc_of(&[(1, 0), (40, 1), (50, 40), (60, 1)]);
    let forks = Forks(vec![(at(40), at(30)), (at(30), at(20)), (at(20), at(10))]);
    let paths = Paths { proc: proc.path().into(), ..Paths::default() };
    let all = view([40, 50, 60].map(|pid| holder(pid, u64::from(pid) * 1_000_000_000)).into());
    let tree = |pid: u32, lineage: &dyn LineageSource| {
        let choosing = Choosing { tree_of: vec![pid], ..Choosing::default() };
        let chosen = Chooser::new(&choosing, &paths, lineage).unwrap().chosen(&all).unwrap();
        chosen.keys.unwrap().iter().map(|key| key.tgid).collect::<Vec<_>>()
    };
    for pid in [10, 20, 30, 40] {
        assert_eq!(tree(pid, &forks), [40, 50], "{pid}");
    }
    assert_eq!(tree(50, &forks), [50]);
    assert_eq!(tree(1, &forks), [40, 50, 60]);
    assert_eq!(tree(99, &forks), <[u32; 0]>::default());
    // Without a memory of forks, only present parents are known.
    assert_eq!((tree(20, &NoLineage), tree(40, &NoLineage)), (vec![], vec![40, 50]));
}

#[test]
fn a_thread_is_no_process() {
    let proc = proc_of(&[(7, 1)]);
    fs::write(proc.path().join("7/status"), "Tgid:\t5\n").unwrap();
    let paths = Paths { proc: proc.path().into(), ..Paths::default() };
    for (flag, choosing) in [
        ("--tree-of", Choosing { tree_of: vec![7], ..Choosing::default() }),
        ("--pid", Choosing { pid: vec![1, 7], ..Choosing::default() }),
    ] {
        let failure = Chooser::new(&choosing, &paths, &NoLineage).err().unwrap();
        assert_eq!(failure.message, format!("{flag} 7: it is a thread of process 5; name the process"));
    }
}

#[test]
fn the_environment_at_exec() {
    let proc = proc_of(&[(40, 1), (50, 1)]);
    fs::remove_file(proc.path().join("50/environ")).unwrap();
    let paths = Paths { proc: proc.path().into(), ..Paths::default() };
    let all = view(vec![holder(40, 40_000_000_000), holder(50, 50_000_000_000)]);
    let chosen = |env: &[&str]| {
        let env = env.iter().map(|text| text.parse::<Variable>().unwrap()).collect();
        let choosing = Choosing { env, ..Choosing::default() };
        let Chosen { keys, undecided, notes } =
            Chooser::new(&choosing, &paths, &NoLineage).unwrap().chosen(&all).unwrap();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert_eq!(undecided, [ProcKey::new(50, 50_000_000_000)].into());
        keys.unwrap().iter().map(|key| key.tgid).collect::<Vec<_>>()
    };
    assert_eq!(chosen(&["A=first"]), [40]);
    assert_eq!(chosen(&["A=second"]), <[u32; 0]>::default());
    assert_eq!(chosen(&["A=first", "PID=40"]), [40]);
    assert_eq!(chosen(&["A=first", "PID=41"]), <[u32; 0]>::default());
    assert_eq!(chosen(&["BROKEN="]), <[u32; 0]>::default());
}

#[test]
fn no_filter_reads_nothing_and_lets_all_through() {
    let paths = Paths { proc: "/nonexistent".into(), ..Paths::default() };
    let choosing = Choosing { gpu: vec!["0".to_owned()], ..Choosing::default() };
    let chosen = Chooser::new(&choosing, &paths, &NoLineage).unwrap().chosen(&view(vec![holder(7, 7)])).unwrap();
    assert_eq!(chosen, Chosen::default());
    // A pid alone needs no reading either: what /proc hides may still be named.
    let choosing = Choosing { pid: vec![7], ..Choosing::default() };
    let chosen = Chooser::new(&choosing, &paths, &NoLineage).unwrap().chosen(&view(vec![holder(7, 7), holder(8, 8)]));
    assert_eq!(chosen.unwrap().keys, Some([ProcKey::new(7, 7)].into()));
}

fn candidate() -> impl Strategy<Value = Candidate> {
    let word =
        || proptest::option::of(prop_oneof![Just("a".to_owned()), Just("beef1".to_owned()), Just("7".to_owned())]);
    let ids = (0..4u32, proptest::option::of(0..3u32), 0..90u64, collection::btree_set(0..4u32, 0..3));
    (ids, word(), word(), word(), word(), proptest::option::of(0..3u8)).prop_map(
        |((pid, uid, age, ancestors), comm, container, job, group, env)| Candidate {
            pid,
            uid,
            comm,
            container_name: container.clone(),
            container,
            job_known: true,
            slurm_job: job,
            slurm_step: None,
            cgroups: group.iter().map(|group| format!("/{group}/{group}.service")).collect(),
            environment: env.map(|value| [("K".to_owned(), value.to_string())].into()),
            ancestors: ancestors.into_iter().map(at).collect(),
            age: Some(Duration::from_secs(age)),
        },
    )
}

fn filter() -> impl Strategy<Value = Filter> {
    let words = || {
        collection::btree_set(prop_oneof![Just("a".to_owned()), Just("beef".to_owned()), Just("7".to_owned())], 0..3)
    };
    let numbers = || collection::btree_set(0..4u32, 0..3);
    let older = proptest::option::of(0..90u64);
    let jobs = || (words(), words());
    (numbers(), numbers(), words(), words(), jobs(), words(), collection::btree_set(0..3u8, 0..3), older).prop_map(
        |(pids, users, comms, containers, (jobs, others), groups, env, older)| Filter {
            trees: pids.iter().map(|pid| Tree { pid: *pid, start_ns: None }).collect(),
            pids,
            users,
            comms,
            containers,
            slurm_jobs: jobs.into_iter().map(|job| SlurmJob::One { job, step: None }).collect(),
            other_jobs: others.into_iter().map(|job| SlurmJob::One { job, step: None }).collect(),
            units: groups.iter().map(|group| format!("{group}.service")).collect(),
            cgroups: groups.iter().map(|group| format!("/{group}")).collect(),
            environment: if env.is_empty() {
                BTreeMap::new()
            } else {
                [("K".to_owned(), env.into_iter().map(|value| value.to_string()).collect())].into()
            },
            older_than: older.map(Duration::from_secs),
        },
    )
}

/// One of the parts of a filter in place of another's.
fn with_part_of(base: &Filter, other: &Filter, part: usize) -> Filter {
    let (mut result, other) = (base.clone(), other.clone());
    match part {
        0 => result.pids = other.pids,
        1 => result.users = other.users,
        2 => result.comms = other.comms,
        3 => result.containers = other.containers,
        4 => result.slurm_jobs = other.slurm_jobs,
        5 => result.units = other.units,
        6 => result.cgroups = other.cgroups,
        7 => result.environment = other.environment,
        8 => result.trees = other.trees,
        9 => result.other_jobs = other.other_jobs,
        _ => result.older_than = other.older_than,
    }
    result
}

proptest! {
    #[test]
    fn another_filter_lets_nobody_new_through(
        candidate in candidate(), base in filter(), other in filter(), part in 0..11usize,
    ) {
        // The flag was not given, then it was.
        let without = with_part_of(&base, &Filter::default(), part);
        let with = with_part_of(&base, &other, part);
        prop_assert!(without.matches(&candidate) || !with.matches(&candidate));
    }

    #[test]
    fn a_filter_is_all_of_its_parts(candidate in candidate(), filter in filter()) {
        let mut parts = (0..11).map(|part| with_part_of(&Filter::default(), &filter, part));
        prop_assert_eq!(parts.all(|part| part.matches(&candidate)), filter.matches(&candidate));
    }
}

#[test]
fn a_job_that_only_an_unreadable_environment_could_tell_is_undecided() {
    let proc = proc_of(&[(40, 1), (50, 1)]);
    fs::remove_file(proc.path().join("50/environ")).unwrap();
    let paths = Paths { proc: proc.path().into(), ..Paths::default() };
    let all = view(vec![holder(40, 40_000_000_000), holder(50, 50_000_000_000)]);
    let job = || vec!["41".parse::<SlurmJob>().unwrap()];
    for (choosing, fit) in [
        (Choosing { slurm_job: job(), ..Choosing::default() }, vec![]),
        (Choosing { except_slurm_job: job(), ..Choosing::default() }, vec![40]),
        (Choosing { except_slurm_job: job(), comm: vec!["nobody".to_owned()], ..Choosing::default() }, vec![]),
    ] {
        let is_named = !choosing.comm.is_empty();
        let chosen = Chooser::new(&choosing, &paths, &NoLineage).unwrap().chosen(&all).unwrap();
        assert_eq!(chosen.keys.unwrap().iter().map(|key| key.tgid).collect::<Vec<_>>(), fit, "{choosing:?}");
        // Who does not fit for another reason needs no decision.
        let undecided: Vec<u32> = chosen.undecided.iter().map(|key| key.tgid).collect();
        assert_eq!(undecided, if is_named { vec![] } else { vec![50] }, "{choosing:?}");
    }
}
