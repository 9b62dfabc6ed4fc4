//! What no test can make a real gpureap or slurmctld say is said to the scripts by other programs.
use std::{fs, path::Path, process::Command, time::Duration};

use gpureap_tests::harness::finish;

use crate::cluster::write;

/// The scripts with a scontrol and a gpureap that say what a test wants, and write down what they were asked.
struct Alone(tempfile::TempDir);

/// State and reason of the node are in files.
const SCONTROL: &str = r#"#!/bin/sh
here=${0%/*}
case $* in
    listpids) cat "$here/listpids" ;;
    "-o show node "*)
        reason=
        [ ! -s "$here/reason" ] || reason=" Reason=$(cat "$here/reason") [root@2026-12-01T13:04:12]"
        echo "NodeName=gpu1 OS=Linux 6.18 State=$(cat "$here/state") ThreadsPerCore=1$reason" ;;
    *State=RESUME) echo IDLE >"$here/state"; : >"$here/reason" ;;
    *State=DRAIN*) echo IDLE+DRAIN >"$here/state"; echo "${4#Reason=}" >"$here/reason" ;;
    *) exit 1 ;;
esac
"#;
const GPUREAP: &str = "#!/bin/sh\necho \"$*\" >>\"${0%/*}/asked\"\n. \"${0%/*}/answer\"\n";
const LOGGER: &str = "#!/bin/sh\necho \"$*\" >>\"${0%/*}/said\"\n";

impl Alone {
    /// `answer` is sh, with what gpureap was given in `$*`.
    fn new(answer: &str) -> Self {
        let place = tempfile::Builder::new().prefix("gpureap-slurm-").tempdir().expect("a directory");
        for (name, text) in [("scontrol", SCONTROL), ("gpureap", GPUREAP), ("logger", LOGGER)] {
            write(&place.path().join(name), text, 0o755);
        }
        let alone = Self(place);
        alone.put("state", "IDLE\n");
        alone.put("reason", "");
        alone.put("listpids", "");
        alone.put("answer", answer);
        alone.settings("");
        alone
    }

    fn settings(&self, more: &str) {
        self.put(
            "slurm.env",
            &format!("GPUREAP_WHOLE_NODE=no\nGPUREAP_STATE={}/kept\n{more}", self.0.path().display()),
        );
    }

    fn put(&self, name: &str, text: &str) {
        write(&self.0.path().join(name), text, 0o644);
    }

    fn get(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join(name)).unwrap_or_default()
    }

    /// The exit code.
    fn run(&self, script: &str) -> i32 {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/slurm").join(script));
        command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", self.0.path().display()));
        command.env("GPUREAP_SLURM_ENV", self.0.path().join("slurm.env"));
        command.envs([("SLURMD_NODENAME", "gpu1"), ("SLURM_JOB_ID", "7"), ("SLURM_JOB_GPUS", "0,2-3")]);
        finish(command).code
    }

    #[track_caller]
    fn expect_drained(&self, drained: bool) {
        assert_eq!(self.get("state").contains("DRAIN"), drained, "{}", self.get("said"));
    }
}

/// Answers on who holds GPU 0, to those who ask for all GPUs or this one, and not for a job.
fn held_by(holder: &str) -> String {
    format!(
        "case $* in *reap*|*--slurm-job*any*|'-q check') ;; *) echo '/dev/nvidia0 held by {holder}'; exit 3 ;; esac\n"
    )
}

#[test]
fn a_node_is_given_back_when_what_it_was_drained_for_is_over() {
    // Its name must not be taken for a field of what scontrol shows.
    let alone = Alone::new(&held_by("a State=X Reason=Y (pid 5, root)"));
    alone.put("listpids", "PID JOBID STEPID LOCALID GLOBALID\n100 41 0 0 0\n101 41 0 - -\n");
    assert_eq!(alone.run("prolog"), 1);
    alone.expect_drained(true);
    alone.put("asked", "");
    alone.put("listpids", "PID JOBID STEPID LOCALID GLOBALID\n102 42 0 0 0\n");
    for _ in 0..2 {
        assert_eq!(alone.run("health-check"), 0);
        alone.expect_drained(true);
    }
    let asked = alone.get("asked");
    let question = "-q check --free --gpu 0 --gpu 2 --gpu 3 --match attached --except-slurm-job 42";
    assert_eq!(asked.lines().filter(|line| *line == question).count(), 2, "{asked}");
    // Another one holds it now, and is named.
    alone.put("answer", &held_by("b (pid 6, root)"));
    assert_eq!(alone.run("health-check"), 0);
    assert!(alone.get("reason").contains("held by b (pid 6"), "{}", alone.get("reason"));
    alone.put("answer", "");
    assert_eq!(alone.run("health-check"), 0);
    alone.expect_drained(false);
    assert!(!alone.0.path().join("kept/drained").exists());
}

#[test]
fn an_operator_who_takes_a_node_back_is_not_overruled() {
    let alone = Alone::new(&held_by("a (pid 5, root)"));
    assert_eq!(alone.run("prolog"), 1);
    alone.put("state", "IDLE\n");
    alone.put("reason", "");
    assert_eq!(alone.run("health-check"), 0);
    alone.expect_drained(false);
    // Nor one who drains it.
    assert_eq!(alone.run("prolog"), 1);
    alone.put("reason", "not gpureap: fan\n");
    alone.put("answer", "");
    assert_eq!(alone.run("health-check"), 0);
    alone.expect_drained(true);
}

#[test]
fn settings_that_are_no_sh_fail_no_job() {
    let alone = Alone::new("");
    let scripts = ["prolog", "epilog", "health-check"];
    // Without settings a health check has its state in /var/lib.
    let cases = [
        ("GPUREAP_MATCH='any\n", &scripts[..2]),
        ("GPUREAP_LIMIT=09\n", &scripts),
        ("GPUREAP_DEADLINE=2m\n", &scripts),
    ];
    for (settings, scripts) in cases {
        alone.put("said", "");
        alone.settings(settings);
        for script in scripts {
            assert_eq!(alone.run(script), 0, "{script} with {settings}");
        }
        let said = alone.get("said");
        assert!(said.contains("is no sh; ") || said.contains("is no number of seconds; "), "{settings}: {said}");
        assert!(alone.get("asked").contains("-q check --free"), "with the defaults");
    }
}

#[test]
fn a_gpureap_that_hangs_is_given_up_at_the_deadline() {
    let alone = Alone::new("exec sleep 100\n");
    alone.settings("GPUREAP_DEADLINE=2\n");
    let begun = std::time::Instant::now();
    assert_eq!(alone.run("epilog"), 0);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(alone.get("asked").lines().count(), 1, "one call, and it took all the time: {}", alone.get("asked"));
    assert!(alone.get("said").contains("check ended with 124"), "{}", alone.get("said"));
    alone.expect_drained(false);
}

#[test]
fn a_job_that_is_suspended_for_one_with_a_whole_node_is_left_alone() {
    let alone = Alone::new("");
    alone.settings("GPUREAP_WHOLE_NODE=yes\n");
    alone.put("listpids", "PID JOBID STEPID LOCALID GLOBALID\n100 41 0 0 0\n");
    assert_eq!(alone.run("epilog"), 0);
    let asked = alone.get("asked");
    let on_all: Vec<&str> = asked.lines().filter(|line| !line.contains(" --slurm-job 7")).collect();
    assert_eq!(on_all.len(), 2, "{asked}");
    assert!(on_all.iter().all(|line| line.ends_with("--match any --except-slurm-job 41")), "{asked}");
}

#[test]
fn what_a_job_left_must_be_there_at_two_looks() {
    let left = |pid: u32, more: u32| {
        format!(
            "case $* in *any*) echo '/dev/nvidia0, /dev/nvidia1 held by a (pid {pid}, root, job 3); {more} more'; exit 3 ;; esac\n"
        )
    };
    let alone = Alone::new(&left(5, 1));
    let look = |drained: bool| {
        assert_eq!(alone.run("health-check"), 0);
        alone.expect_drained(drained);
    };
    look(false);
    // Another process.
    alone.put("answer", &left(6, 1));
    look(false);
    // The same, but an hour and more ago.
    let seen = alone.get("kept/seen");
    let (_, holder) = seen.split_once(' ').expect("a time and a holder");
    assert_eq!(holder, "/dev/nvidia0 6\n");
    alone.put("kept/seen", &format!("1700000000 {holder}"));
    look(false);
    // Whoever else comes and goes.
    alone.put("answer", &left(6, 2));
    look(true);
}
