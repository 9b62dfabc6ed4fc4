//! Families: who started whom, who is left, who holds.
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    super::{
        child::Child,
        sys::{self, Fd, O_CLOEXEC, O_RDWR, Pid, SIGKILL},
        truth::{Skip, Truth},
    },
    Kind, Report, Scene, hear_pid, tell_pid,
};

pub(super) const KINDS: &[Kind] =
    &[("ghost", ghost), ("orphans", orphans), ("subreaper", subreaper), ("tree", tree), ("respawn", respawn)];

/// A worker that inherits the descriptors of its parent, and tells its pid.
fn worker(tell: Fd) -> Pid {
    let pid = sys::fork();
    if pid == 0 {
        tell_pid(tell, sys::pid());
        sys::live();
    }
    pid
}

/// `ghost DEV [mapped]`: a child inherited the descriptor, and the mapping if there is one; the opener is killed. Fields
/// `dead`: the opener; `lineage`: the holder's ancestors by nearness.
fn ghost(scene: &Scene) -> Result<Report, Skip> {
    let (hear, tell) = sys::pipe();
    let mapped = scene.arguments.first() == Some(&"mapped");
    let opener = Child::fork(|_| {
        let fd = scene.open(O_RDWR);
        if mapped {
            sys::map(fd, libc::PROT_READ, libc::MAP_PRIVATE, 0).expect("map the device");
        }
        worker(tell);
        sys::live();
    });
    let child = hear_pid(hear);
    let dead = opener.pid;
    sys::kill(dead, SIGKILL);
    opener.reap();
    let truth = Truth::files(1).fds(child, 1);
    let report = scene.report(child, &if mapped { truth.maps(child, 1) } else { truth });
    Ok(report.with("dead", json!([dead])).with("lineage", json!([dead, sys::pid()])))
}

/// `orphans DEV N JOBS [COMM]`: N workers of JOBS launchers, which opened the device and were killed. COMM: what started the
/// launchers has this name, and they are called `launcher`. Fields `dead`: the launchers; `groups`: a launcher with its workers each.
fn orphans(scene: &Scene) -> Result<Report, Skip> {
    let (n, jobs): (usize, usize) = (scene.argument(0, "N")?, scene.argument(1, "JOBS")?);
    let comm = scene.arguments.get(2);
    if let Some(comm) = comm {
        sys::set_comm(comm.as_bytes());
    }
    let mut groups = BTreeMap::new();
    for job in 0..jobs {
        let (hear, tell) = sys::pipe();
        let count = n / jobs + usize::from(job < n % jobs);
        let launcher = Child::fork(|_| {
            if comm.is_some() {
                sys::set_comm(b"launcher");
            }
            scene.open(O_RDWR);
            for _ in 0..count {
                worker(tell);
            }
            sys::live();
        });
        let workers: Vec<Pid> = (0..count).map(|_| hear_pid(hear)).collect();
        groups.insert(launcher.pid, workers);
        sys::kill(launcher.pid, SIGKILL);
        launcher.reap();
        sys::close(hear);
        sys::close(tell);
    }
    let workers: Vec<Pid> = groups.values().flatten().copied().collect();
    let files = groups.values().filter(|workers| !workers.is_empty()).count();
    let truth = workers.iter().fold(Truth::files(files), |truth, pid| truth.fds(*pid, 1));
    let groups: Vec<Value> =
        groups.iter().map(|(launcher, workers)| json!({"launcher": launcher, "workers": workers})).collect();
    let dead: Vec<Pid> = groups.iter().filter_map(|group| group["launcher"].as_i64()).map(|pid| pid as Pid).collect();
    let first = workers.first().copied().ok_or("no worker asked for")?;
    Ok(scene.report(first, &truth).with("dead", json!(dead)).with("groups", groups))
}

/// `subreaper DEV`: the launcher is gone, the worker belongs to a subreaper now. Fields `subreaper`, `dead`: the
/// launcher; `lineage` as of the fork.
fn subreaper(scene: &Scene) -> Result<Report, Skip> {
    let (hear, tell) = sys::pipe();
    let reaper = Child::fork(|cue| {
        sys::prctl(libc::PR_SET_CHILD_SUBREAPER, 1).expect("PR_SET_CHILD_SUBREAPER");
        let launcher = sys::fork();
        if launcher == 0 {
            let (ready, set) = sys::pipe();
            if sys::fork() == 0 {
                scene.open(O_RDWR);
                tell_pid(tell, sys::pid());
                sys::write_all(set, b"x");
                sys::live();
            }
            sys::wait_byte(ready);
            sys::exit(0);
        }
        sys::reap(launcher);
        tell_pid(tell, launcher);
        cue.done();
        sys::live();
    });
    let holder = hear_pid(hear);
    let launcher = hear_pid(hear);
    reaper.done();
    let report = scene.report(holder, &Truth::files(1).fds(holder, 1)).with("subreaper", reaper.pid);
    Ok(report.with("dead", json!([launcher])).with("lineage", json!([launcher, reaper.pid, sys::pid()])))
}

/// `tree DEV WORKERS`: a launcher that holds nothing, workers that open, one helper of each worker that holds
/// nothing, and a thread in each worker. `pid` is the first worker. Fields `launcher`, `workers`, `helpers`.
fn tree(scene: &Scene) -> Result<Report, Skip> {
    let count: usize = scene.argument(0, "WORKERS").unwrap_or(2);
    let (hear, tell) = sys::pipe();
    let launcher = Child::fork(|_| {
        for _ in 0..count {
            let (ready, set) = sys::pipe();
            if sys::fork() == 0 {
                sys::set_comm(b"tree-worker");
                scene.open(O_RDWR | O_CLOEXEC);
                let fd = scene.open(O_RDWR);
                let (closed, held) = sys::pipe();
                let helper = sys::fork();
                if helper == 0 {
                    sys::close_range(3, u32::MAX, 0).expect("close_range");
                    sys::set_comm(b"tree-helper");
                    sys::live();
                }
                sys::close(fd);
                std::thread::spawn(|| {
                    sys::set_comm(b"tree-thread");
                    sys::live();
                });
                // The pipe ends when the helper has closed its copies.
                sys::close(held);
                assert_eq!(sys::read(closed, &mut [0]), 0, "the helper writes nothing");
                sys::close(closed);
                tell_pid(tell, sys::pid());
                tell_pid(tell, helper);
                sys::write_all(set, b"x");
                sys::live();
            }
            sys::wait_byte(ready);
        }
        sys::live();
    });
    let pids: Vec<(Pid, Pid)> = (0..count).map(|_| (hear_pid(hear), hear_pid(hear))).collect();
    let (workers, helpers): (Vec<Pid>, Vec<Pid>) = pids.into_iter().unzip();
    let truth = workers.iter().fold(Truth::files(count), |truth, pid| truth.fds(*pid, 1));
    let first = workers.first().copied().ok_or("no worker asked for")?;
    let report = scene.report(first, &truth).with("launcher", launcher.pid);
    Ok(report.with("workers", json!(workers)).with("helpers", json!(helpers)))
}

/// `respawn DEV`: a supervisor starts its worker again at once, whatever ends it. `pid` is the first worker. Field
/// `supervisor`, which holds nothing.
fn respawn(scene: &Scene) -> Result<Report, Skip> {
    let (hear, tell) = sys::pipe();
    let dev = scene.dev.to_owned();
    let supervisor = Child::fork(|_| {
        sys::set_comm(b"supervisor");
        let mut first = true;
        while sys::stdin_closed_within(0).is_none() {
            let worker = sys::fork();
            if worker == 0 {
                sys::set_comm(b"worker");
                // While the device is fenced, the worker fails and is started again.
                if sys::try_open(&dev, O_RDWR).is_err() {
                    sys::sleep(10);
                    sys::exit(1);
                }
                if first {
                    tell_pid(tell, sys::pid());
                }
                sys::live();
            }
            first = false;
            sys::reap(worker);
        }
    });
    let worker = hear_pid(hear);
    Ok(scene.report(worker, &Truth::files(1).fds(worker, 1)).with("supervisor", supervisor.pid))
}
