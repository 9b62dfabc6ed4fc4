//! The filter: values of one flag are alternatives, different flags must all fit.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use super::{
    Candidate,
    wish::{ID_MIN, SlurmJob, Variable},
};
use crate::{
    cli::Choosing,
    error::Failure,
    model::ProcKey,
    process::stat::{self, Stat, Status},
};

/// `--tree-of`: a process and whoever descends from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    pub pid: u32,
    /// Of the process that had the number when it was named; `None`: nobody had, so a dead ancestor is meant.
    pub start_ns: Option<u64>,
}

impl Tree {
    fn is_root(&self, key: ProcKey) -> bool {
        let Self { pid, start_ns } = *self;
        key.tgid == pid && start_ns.is_none_or(|start_ns| stat::same_start(start_ns, key.start_ns))
    }
}

/// Everything that was asked of a process. Empty lists ask nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub pids: BTreeSet<u32>,
    pub users: BTreeSet<u32>,
    pub comms: BTreeSet<String>,
    pub containers: BTreeSet<String>,
    pub slurm_jobs: Vec<SlurmJob>,
    /// Whose processes are not meant.
    pub other_jobs: Vec<SlurmJob>,
    pub units: BTreeSet<String>,
    /// Below the root of a hierarchy.
    pub cgroups: BTreeSet<String>,
    /// By variable: several values of one are alternatives, several variables must all fit.
    pub environment: BTreeMap<String, BTreeSet<String>>,
    pub trees: Vec<Tree>,
    pub older_than: Option<Duration>,
}

impl Filter {
    pub fn new(choosing: &Choosing, proc: &Path) -> Result<Self, Failure> {
        let Choosing {
            gpu: _,
            by: _,
            pid,
            user,
            comm,
            container,
            slurm_job,
            except_slurm_job,
            unit,
            cgroup,
            env,
            tree_of,
            older_than,
        } = choosing;
        let mut environment: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for Variable { key, value } in env.iter().cloned() {
            environment.entry(key).or_default().insert(value);
        }
        for pid in pid {
            require_process("--pid", *pid, proc)?;
        }
        let mounts = if cgroup.is_empty() { String::new() } else { read_lossy(&proc.join("self/mountinfo")) };
        Ok(Self {
            pids: pid.iter().copied().collect(),
            users: user.iter().copied().collect(),
            comms: comm.iter().cloned().collect(),
            containers: container.iter().cloned().collect(),
            slurm_jobs: slurm_job.clone(),
            other_jobs: except_slurm_job.clone(),
            units: unit.iter().cloned().collect(),
            cgroups: cgroup.iter().map(|path| below_root(path, &mounts)).collect::<Result<_, _>>()?,
            environment,
            trees: tree_of.iter().map(|pid| tree(*pid, proc)).collect::<Result<_, _>>()?,
            older_than: *older_than,
        })
    }

    /// Lets everybody through.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether anything must be read to judge a process of which the pid is known.
    pub fn needs_facts(&self) -> bool {
        let Self { pids, older_than: _, trees: _, environment: _, .. } = self;
        *self != Self { pids: pids.clone(), ..Self::default() }
    }

    pub fn matches(&self, candidate: &Candidate) -> bool {
        let Self {
            pids,
            users,
            comms,
            containers,
            slurm_jobs,
            other_jobs,
            units,
            cgroups,
            environment,
            trees,
            older_than,
        } = self;
        let Candidate {
            pid,
            uid,
            comm,
            container,
            container_name,
            job_known,
            slurm_job,
            slurm_step,
            cgroups: own_cgroups,
            environment: own_environment,
            ancestors,
            age,
        } = candidate;
        let is_job = |wish: &SlurmJob| match wish {
            SlurmJob::Any => slurm_job.is_some(),
            SlurmJob::One { job, step } => {
                slurm_job.as_ref() == Some(job) && step.as_ref().is_none_or(|step| slurm_step.as_ref() == Some(step))
            }
        };
        let has = |variable: (&String, &BTreeSet<String>)| {
            let (key, values) = variable;
            own_environment.as_ref().and_then(|own| own.get(key)).is_some_and(|value| values.contains(value))
        };
        (pids.is_empty() || pids.contains(pid))
            && (users.is_empty() || uid.is_some_and(|uid| users.contains(&uid)))
            && (comms.is_empty() || comm.as_ref().is_some_and(|comm| comms.contains(comm)))
            && (containers.is_empty()
                || containers.iter().any(|wish| is_container(wish, container.as_deref(), container_name.as_deref())))
            && (slurm_jobs.is_empty() || slurm_jobs.iter().any(is_job))
            && (other_jobs.is_empty() || *job_known && !other_jobs.iter().any(is_job))
            && (units.is_empty()
                || own_cgroups.iter().flat_map(|path| path.split('/')).any(|part| units.contains(part)))
            && (cgroups.is_empty() || cgroups.iter().any(|wish| own_cgroups.iter().any(|path| is_below(path, wish))))
            && environment.iter().all(has)
            && (trees.is_empty() || trees.iter().any(|tree| ancestors.iter().any(|key| tree.is_root(*key))))
            && older_than.is_none_or(|least| age.is_some_and(|age| age >= least))
    }

    /// Whether the environment alone decides, which tells a Slurm job too, and may not be read. A candidate without a name is gone.
    pub fn is_undecided(&self, candidate: &Candidate) -> bool {
        let of_environment = !self.environment.is_empty() && candidate.environment.is_none();
        let of_job = (!self.slurm_jobs.is_empty() || !self.other_jobs.is_empty()) && !candidate.job_known;
        let rest = || {
            let mut rest = self.clone();
            if of_environment {
                rest.environment.clear();
            }
            if of_job {
                rest.slurm_jobs.clear();
                rest.other_jobs.clear();
            }
            rest
        };
        (of_environment || of_job) && candidate.comm.is_some() && rest().matches(candidate)
    }

    /// Refuses the beginning of an id that fits several containers, unless it is the whole name or id of one: none of
    /// them can be told to be the one that was meant.
    pub fn check_ambiguity(&self, candidates: &[&Candidate]) -> Result<(), Failure> {
        let seen: BTreeSet<(&str, Option<&str>)> = candidates
            .iter()
            .filter_map(|candidate| Some((candidate.container.as_deref()?, candidate.container_name.as_deref())))
            .collect();
        for wish in &self.containers {
            let whole = seen.iter().any(|(id, name)| id == wish || *name == Some(wish));
            let fit: BTreeSet<&str> = seen.iter().map(|(id, _)| *id).filter(|id| begins(id, wish)).collect();
            if fit.len() > 1 && !whole {
                let ids: Vec<&str> = fit.iter().map(|id| id.get(..12).unwrap_or(id)).collect();
                return Err(Failure::usage(format!("--container {wish} fits more than one: {}", ids.join(", "))));
            }
        }
        Ok(())
    }

    /// What the operator should know of the judgement.
    pub fn notes(&self, candidates: &[&Candidate]) -> Vec<String> {
        let mut notes = Vec::new();
        match candidates.iter().filter(|candidate| self.is_undecided(candidate)).count() {
            0 => {}
            1 => notes.push("the environment of 1 process may not be read, so --env leaves it out".to_owned()),
            count => {
                notes.push(format!("the environment of {count} processes may not be read, so --env leaves them out"));
            }
        }
        for tree in self.trees.iter().filter(|tree| tree.start_ns.is_none()) {
            let pid = tree.pid;
            let descends = |candidate: &&Candidate| candidate.ancestors.iter().any(|key| tree.is_root(*key));
            notes.push(if candidates.iter().any(descends) {
                format!("--tree-of {pid}: that process is dead, its descendants are known by their recorded lineage")
            } else {
                format!("--tree-of {pid}: there is no such process, and no holder is known to descend from one")
            });
        }
        notes
    }
}

fn begins(id: &str, wish: &str) -> bool {
    wish.len() >= ID_MIN
        && wish.bytes().all(|byte| byte.is_ascii_hexdigit())
        && id.starts_with(&wish.to_ascii_lowercase())
}

fn is_container(wish: &str, id: Option<&str>, name: Option<&str>) -> bool {
    name == Some(wish) || id.is_some_and(|id| id == wish || begins(id, wish))
}

fn is_below(path: &str, wish: &str) -> bool {
    wish == "/" || path.strip_prefix(wish).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn read_lossy(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// A path as /proc/PID/cgroup has it, from one that may be below a mount: `/sys/fs/cgroup/system.slice`.
fn below_root(path: &str, mountinfo: &str) -> Result<String, Failure> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup").then_some(())?;
        let mut words = mount.split(' ').skip(3);
        let (root, place) = (words.next()?, words.next()?);
        is_below(path, place).then_some((root, place))
    });
    match mounts.max_by_key(|(_, place)| place.len()) {
        Some((root, place)) => {
            let whole = format!("{}{}", root.trim_end_matches('/'), &path[place.len()..]);
            Ok(if whole.is_empty() { "/".to_owned() } else { whole })
        }
        None if is_below(path, "/sys/fs/cgroup") => {
            Err(Failure::usage(format!("--cgroup {path}: no cgroup hierarchy is mounted there")))
        }
        None => Ok(path.to_owned()),
    }
}

/// Refuses the number of a thread: no process is found under it, and nothing would be said of the one that is meant.
pub fn require_process(flag: &str, pid: u32, proc: &Path) -> Result<(), Failure> {
    let tgid = Status::read(&proc.join(pid.to_string())).and_then(|status| status.tgid);
    match tgid.filter(|tgid| *tgid != pid) {
        Some(tgid) => Err(Failure::usage(format!("{flag} {pid}: it is a thread of process {tgid}; name the process"))),
        None => Ok(()),
    }
}

fn tree(pid: u32, proc: &Path) -> Result<Tree, Failure> {
    require_process("--tree-of", pid, proc)?;
    Ok(Tree { pid, start_ns: Stat::read(&proc.join(pid.to_string())).map(|stat| stat.start_ns()) })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro
31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:29 /part /mnt/part rw shared:7 - cgroup2 cgroup2 rw
34 23 0:30 / / rw - ext4 /dev/sda1 rw
";

    #[test]
    fn paths_below_a_mount() {
        for (path, expected) in [
            ("/system.slice", Some("/system.slice")),
            ("/sys/fs/cgroup/unified", Some("/")),
            ("/sys/fs/cgroup/unified/a/b", Some("/a/b")),
            ("/sys/fs/cgroup/memory/slurm/uid_1", Some("/slurm/uid_1")),
            ("/sys/fs/cgroup/memoryx", None),
            ("/sys/fs/cgroup", None),
            ("/mnt/part/x", Some("/part/x")),
            ("/mnt/partly", Some("/mnt/partly")),
        ] {
            assert_eq!(below_root(path, MOUNTS).ok().as_deref(), expected, "{path}");
        }
        let pure = "25 24 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
        assert_eq!(below_root("/sys/fs/cgroup/system.slice/a.service", pure).unwrap(), "/system.slice/a.service");
        assert_eq!(below_root("/sys/fs/cgroup", pure).unwrap(), "/");
        assert_eq!(below_root("/a", "garbage\n - cgroup\nx - cgroup2").unwrap(), "/a");
    }

    #[test]
    fn beginnings_of_ids() {
        for (wish, id, name, expected) in [
            ("0123", "0123456789ab", "", true),
            ("0123456789AB", "0123456789ab", "", true),
            ("012", "0123456789ab", "", false),
            ("1234", "0123456789ab", "", false),
            ("web", "web", "", true),
            ("we", "web", "", false),
            ("train", "0123456789ab", "train", true),
            ("trai", "0123456789ab", "train", false),
            ("beef", "0123456789ab", "beef", true),
        ] {
            assert_eq!(is_container(wish, Some(id), Some(name)), expected, "{wish} {id} {name}");
        }
        assert!(!is_container("web", None, None));
    }
}
