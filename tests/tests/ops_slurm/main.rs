//! The scripts of packaging/slurm, run by a real slurmd: munged, slurmctld and slurmd on loopback, jobs of two users, and two
//! stand-in GPUs in gres.conf.
mod cluster;
mod scripts;

use std::{collections::BTreeSet, fs};

use gpureap_tests::harness::{Daemon, Freezer, NOBODY, Pid, settle, skip};

use self::cluster::{Broom, Cluster, NODE, PATIENCE, Respawning, Stray, alive, orphan, stage};

/// Debian's user with that number; Slurm takes jobs of users with a name alone.
const DAEMON: u32 = 1;

/// The case from the field, and all that follows from it, one after the other on one cluster, which takes seconds to start.
#[test]
fn a_node_of_a_cluster_that_tracks_processes_by_descent() {
    let test = "slurm";
    let Some((place, bench)) = stage(test) else { return };
    let freezer = match Freezer::new(&bench.path("freezer")) {
        Ok(freezer) => freezer,
        Err(error) => return skip(test, &format!("no freezer of version 1: {error}")),
    };
    let _broom = Broom(place.path());
    let _daemon = Daemon::start(&bench);
    let cluster = Cluster::start(place.path(), &bench, "proctrack/linuxproc");
    let gpu0 = cluster.gpu(0);

    // Two users' jobs. The one goes on, the other leaves processes behind, and one of those has no environment either.
    let hold = "\"$here/python3\" 600 <\"$here/gpu$SLURM_JOB_GPUS\" & echo $! >\"$here/pids/worker\"; wait\n";
    let ends = format!("{}{}", orphan("orphan", ""), orphan("hidden", "env -i"));
    let ended =
        cluster.submit(NOBODY, &["--gres=gpu:1"], &format!("{ends}until [ -e \"$here/go\" ]; do sleep 0.1; done"));
    let (left, hidden) = (cluster.pid("orphan"), cluster.pid("hidden"));
    let goes_on = cluster.submit(DAEMON, &["--gres=gpu:1"], &format!("{}{hold}", orphan("neighbour", "")));
    let (worker, neighbour) = (cluster.pid("worker"), cluster.pid("neighbour"));
    let cgroup = fs::read_to_string(format!("/proc/{left}/cgroup")).expect("its cgroups");
    assert!(!cgroup.contains("job_"), "no cgroup tells its job: {cgroup}");
    let job = |pid: Pid, job: Option<u32>| (pid, job.map(|job| job.to_string()));
    let expected: BTreeSet<_> =
        [job(left, Some(ended)), job(hidden, None), job(worker, Some(goes_on)), job(neighbour, Some(goes_on))].into();
    let seen = || -> BTreeSet<_> {
        let seen = bench.holders(&[]).json;
        let all = seen["holders"].as_array().expect("holders").iter();
        all.map(|one| {
            let pid = one["pid"].as_i64().and_then(|pid| pid.try_into().ok()).expect("a pid");
            (pid, one["slurm_job"].as_str().map(str::to_owned))
        })
        .collect()
    };
    let outcome = settle(PATIENCE, || Some(seen()).filter(|seen| *seen != expected));
    assert_eq!(outcome, Ok(()), "instead of {expected:?}");
    fs::write(cluster.path("go"), "").expect("let it end");
    cluster.wait_for_epilog(ended);
    assert!(!alive(left) && !alive(hidden), "{}", cluster.logs());
    assert!(alive(worker) && alive(neighbour), "the other user's are not touched: {}", cluster.logs());
    cluster.until("the job has ended well", || cluster.job(ended) == "COMPLETED");
    assert!(!cluster.is_drained(), "{}", cluster.node());

    // The prolog ends whoever holds the GPU that a job gets, and the job runs. The GPU of a running job is no business of it.
    let stray = Stray::start(&cluster, 0, &[]);
    let next = cluster.submit(NOBODY, &["--gres=gpu:1"], "exit 0");
    cluster.wait_for_epilog(next);
    assert_eq!(cluster.ran("prolog", next), ["0"], "{}", cluster.logs());
    cluster.until("the job has ended well", || cluster.job(next) == "COMPLETED");
    assert!(!alive(stray.pid()) && alive(worker) && !cluster.is_drained(), "{}", cluster.logs());
    drop(stray);

    // One that cannot die: the epilog drains the node, and says who it is.
    fs::remove_file(cluster.path("go")).expect("the next one waits");
    let stuck = cluster.submit(
        NOBODY,
        &["--gres=gpu:1"],
        &format!("{}until [ -e \"$here/go\" ]; do sleep 0.1; done", orphan("stuck", "")),
    );
    let pid = cluster.pid("stuck");
    freezer.freeze(pid);
    fs::write(cluster.path("go"), "").expect("let it end");
    cluster.wait_for_epilog(stuck);
    // Once its memory is taken nobody can read which job's it is.
    let begins = format!("gpureap: {gpu0} held by python3 (pid {pid}, nobody, ");
    let ends = [format!("{begins}job {stuck}, D state) ["), format!("{begins}D state) [")];
    let told = || cluster.is_drained() && ends.iter().any(|end| cluster.reason().starts_with(end));
    assert!(told(), "{ends:?}: {}", cluster.logs());
    assert_eq!(cluster.job(stuck), "COMPLETED", "the job itself is not to blame");
    // As long as that is so, it stays; then the health check takes it back.
    let reason = cluster.reason();
    cluster.health_checks(2);
    assert!(told(), "{}", cluster.node());
    assert_eq!(cluster.reason(), reason, "said once");
    freezer.thaw();
    cluster.until("it dies", || !alive(pid));
    cluster.until("the node is taken back", || !cluster.is_drained());
    assert!(alive(worker));

    // What an epilog has not seen, the health check finds: at the second look, for an epilog may be at work.
    let stray = Stray::start(&cluster, 0, &[("SLURM_JOB_ID", "999999")]);
    cluster.until("the node is drained", || cluster.is_drained());
    let expected = format!("gpureap: {gpu0} held by python3 (pid {}, root, job 999999) ", stray.pid());
    assert!(cluster.reason().starts_with(&expected), "{expected}: {}", cluster.node());
    drop(stray);
    cluster.until("the node is taken back", || !cluster.is_drained());

    // A node that an operator drained is the operator's.
    cluster
        .slurm(&["scontrol", "update", &format!("NodeName={NODE}"), "State=DRAIN", "Reason=broken fan"])
        .expect_code(0);
    let stray = Stray::start(&cluster, 0, &[("SLURM_JOB_ID", "999999")]);
    cluster.health_checks(2);
    assert!(cluster.reason().starts_with("broken fan"), "{}", cluster.node());
    drop(stray);
    cluster.health_checks(1);
    assert!(cluster.is_drained() && cluster.reason().starts_with("broken fan"), "{}", cluster.node());
    cluster.slurm(&["scontrol", "update", &format!("NodeName={NODE}"), "State=RESUME"]).expect_code(0);

    // A job does not begin on a GPU that cannot be freed.
    let stray = Stray::start(&cluster, 0, &[]);
    freezer.freeze(stray.pid());
    let waits = cluster.submit(NOBODY, &["--gres=gpu:1"], "echo >\"$here/pids/ran\"");
    cluster.until("the prolog has run", || !cluster.ran("prolog", waits).is_empty());
    assert_eq!(cluster.ran("prolog", waits), ["1"], "{}", cluster.logs());
    let expected = format!("gpureap: {gpu0} held by python3 (pid {}, root, D state) ", stray.pid());
    assert!(cluster.is_drained() && cluster.reason().starts_with(&expected), "{expected}: {}", cluster.node());
    assert!(!cluster.path("pids/ran").exists());
    // Slurm puts it back into the queue, where it waits for minutes before it is tried again.
    cluster.until("it is in the queue again", || cluster.job(waits) == "PENDING");
    assert!(!cluster.path("pids/ran").exists());
    cluster.slurm(&["scancel", &waits.to_string()]).expect_code(0);
    freezer.thaw();
    drop(stray);
    cluster.until("the node is taken back", || !cluster.is_drained());

    // Nor on one that somebody takes again and again, who is of no job: as long as that is so, no health check gives the node back.
    let stray = Respawning::start(&cluster, 0);
    let waits = cluster.submit(NOBODY, &["--gres=gpu:1"], "echo >\"$here/pids/ran\"");
    cluster.until("the prolog has run", || !cluster.ran("prolog", waits).is_empty());
    assert_eq!(cluster.ran("prolog", waits), ["1"], "{}", cluster.logs());
    let told = || cluster.is_drained() && cluster.reason().starts_with(&format!("gpureap: {gpu0} held by "));
    assert!(told(), "{}", cluster.logs());
    cluster.health_checks(2);
    assert!(told(), "{}", cluster.logs());
    cluster.slurm(&["scancel", &waits.to_string()]).expect_code(0);
    drop(stray);
    cluster.until("the node is taken back", || !cluster.is_drained());
    assert!(!cluster.path("pids/ran").exists() && alive(worker));

    // With a node to itself, a job leaves nobody on any GPU.
    cluster.slurm(&["scancel", &goes_on.to_string()]).expect_code(0);
    cluster.wait_for_epilog(goes_on);
    assert!(!alive(worker) && !alive(neighbour), "{}", cluster.logs());
    let exclusive = cluster.submit(NOBODY, &["--exclusive"], "until [ -e \"$here/stray\" ]; do sleep 0.1; done");
    cluster.until("it runs", || cluster.job(exclusive) == "RUNNING");
    let stray = Stray::start(&cluster, 1, &[]);
    fs::write(cluster.path("stray"), "").expect("let it end");
    cluster.wait_for_epilog(exclusive);
    assert!(!alive(stray.pid()), "{}", cluster.logs());
    drop(stray);

    // Without gpureap, and with one that does nothing, jobs run as before.
    for settings in ["GPUREAP=/nonexistent/gpureap\n", "GPUREAP=/bin/false\n"] {
        cluster.settings(settings);
        let job = cluster.submit(NOBODY, &["--gres=gpu:1"], "exit 0");
        cluster.wait_for_epilog(job);
        assert_eq!(cluster.ran("prolog", job), ["0"], "{}", cluster.logs());
        cluster.until("the job has ended well", || cluster.job(job) == "COMPLETED");
        assert!(!cluster.is_drained(), "{}", cluster.node());
    }
}
