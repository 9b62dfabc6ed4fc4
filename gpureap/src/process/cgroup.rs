//! Cgroups as directories: which one is a job's, who is in it, and ending all of them in one step.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use super::Place;

/// Deeper trees are a mistake or an attack.
const MAX_DEPTH: usize = 64;

/// A mounted cgroup hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    at: PathBuf,
    /// The part of the hierarchy that the mount shows.
    root: String,
    /// Empty for version 2.
    controllers: Vec<String>,
}

/// The hierarchies that this process can reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hierarchies(Vec<Mount>);

/// What tells a job's cgroup from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A Slurm job's or a container's: whatever is in it belongs to the job or carries it.
    Job,
    /// A systemd unit's, or one that somebody made by hand: it may be a daemon's with jobs of many in it.
    Any,
}

/// The cgroup of a process's job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobCgroup {
    pub dir: PathBuf,
    /// As /proc/PID/cgroup has it.
    pub path: String,
    pub kind: Kind,
}

impl JobCgroup {
    /// Everybody in it and below. One that is gone has nobody.
    pub fn members(&self) -> BTreeSet<u32> {
        let mut pids = BTreeSet::new();
        collect(&self.dir, 0, &mut pids);
        pids
    }
}

fn collect(dir: &Path, depth: usize, pids: &mut BTreeSet<u32>) {
    if let Ok(text) = fs::read_to_string(dir.join("cgroup.procs")) {
        // 0 stands for a process of a pid namespace that is out of sight.
        pids.extend(text.lines().filter_map(|line| line.parse().ok()).filter(|pid: &u32| *pid != 0));
    }
    if depth == MAX_DEPTH {
        return;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), depth + 1, pids);
        }
    }
}

/// Kills everybody in a cgroup and below, children that are being forked included (version 2, since 5.14).
pub fn kill(dir: &Path) -> io::Result<()> {
    fs::OpenOptions::new()
        .write(true)
        .open(dir.join("cgroup.kill"))
        .and_then(|mut file| io::Write::write_all(&mut file, b"1"))
}

/// Whether [`kill`] can work there.
pub fn can_kill(dir: &Path) -> bool {
    dir.join("cgroup.kill").exists()
}

impl Hierarchies {
    pub fn read(proc_root: &Path) -> Self {
        Self::parse(&fs::read_to_string(proc_root.join("self/mountinfo")).unwrap_or_default())
    }

    pub(crate) fn parse(mountinfo: &str) -> Self {
        let mount = |line: &str| {
            let (before, after) = line.split_once(" - ")?;
            let mut before = before.split(' ').skip(3);
            let (root, at) = (unescape(before.next()?), unescape(before.next()?));
            let mut after = after.split(' ');
            let (kind, options) = (after.next()?, after.nth(1)?);
            let controllers = match kind {
                "cgroup2" => Vec::new(),
                "cgroup" => {
                    options.split(',').filter(|option| !matches!(*option, "rw" | "ro")).map(str::to_owned).collect()
                }
                _ => return None,
            };
            Some(Mount { at: at.into(), root, controllers })
        };
        Self(mountinfo.lines().filter_map(mount).collect())
    }

    /// Each of a process's cgroups that is mounted, with its path; version 2 first.
    pub(crate) fn of(&self, cgroup_file: &str) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for line in cgroup_file.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(number), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let version2 = number == "0" && controllers.is_empty();
            let fits = |mount: &&Mount| {
                if version2 {
                    mount.controllers.is_empty()
                } else {
                    mount.controllers.iter().any(|have| controllers.split(',').any(|wanted| wanted == have))
                }
            };
            // A bind mount of a part may stand beside that of the whole.
            let dir = self.0.iter().filter(fits).find_map(|mount| {
                let below = if mount.root == "/" { path } else { path.strip_prefix(mount.root.as_str())? };
                (below.is_empty() || below.starts_with('/')).then(|| mount.at.join(below.trim_start_matches('/')))
            });
            if let Some(dir) = dir {
                found.push((!version2, dir, path.to_owned()));
            }
        }
        found.sort_by_key(|(old, _, path)| (*old, std::cmp::Reverse(path.len())));
        found.into_iter().map(|(_, dir, path)| (dir, path)).collect()
    }

    fn of_process(&self, proc_root: &Path, pid: u32) -> Vec<(PathBuf, String)> {
        let file = fs::read(proc_root.join(pid.to_string()).join("cgroup")).unwrap_or_default();
        self.of(&String::from_utf8_lossy(&file))
    }

    /// The cgroup of the job that a process belongs to; an error says why there is none.
    pub fn job(&self, proc_root: &Path, pid: u32) -> Result<JobCgroup, String> {
        let all = self.of_process(proc_root, pid);
        for (dir, path) in &all {
            if let Some((job, kind)) = job_path(path) {
                let above = path[job.len()..].split('/').filter(|segment| !segment.is_empty()).count();
                let dir = dir.ancestors().nth(above).unwrap_or(dir).to_owned();
                return Ok(JobCgroup { dir, path: job.to_owned(), kind });
            }
        }
        Err(match all.first() {
            Some((_, path)) => format!("{path} is no job's cgroup"),
            None => "its cgroup is not mounted here".to_owned(),
        })
    }

    /// Whether a process is in a cgroup or below it.
    pub fn is_in(&self, proc_root: &Path, pid: u32, dir: &Path) -> bool {
        self.of_process(proc_root, pid).iter().any(|(own, _)| own.starts_with(dir))
    }
}

/// The beginning of a cgroup path that stands for the whole job: the Slurm job before the container before the unit; a
/// cgroup that somebody made by hand is a job of its own. Roots, slices and login sessions are nobody's job.
pub(crate) fn job_path(path: &str) -> Option<(&str, Kind)> {
    let ends = path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0).chain([path.len()]);
    let prefixes: Vec<&str> = ends.map(|end| &path[..end]).collect();
    let whole = Place::of(path);
    let first = |has: &dyn Fn(&Place) -> bool| prefixes.iter().copied().find(|prefix| has(&Place::of(prefix)));
    if whole.slurm_job.is_some() {
        return first(&|place| place.slurm_job == whole.slurm_job).map(|path| (path, Kind::Job));
    }
    if whole.container.is_some() {
        return first(&|place| place.container == whole.container).map(|path| (path, Kind::Job));
    }
    let login = |unit: &str| {
        unit == "init.scope"
            || unit.starts_with("session-") && unit.strip_suffix(".scope").is_some()
            || unit.starts_with("user@")
    };
    match &whole.unit {
        Some(unit) if login(unit) => None,
        Some(_) => first(&|place| place.unit == whole.unit).map(|path| (path, Kind::Any)),
        None => (path.len() > 1 && path.strip_suffix(".slice").is_none()).then_some((path, Kind::Any)),
    }
}

/// `\040` and the like, as the kernel writes blanks in mountinfo.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        let octal = (*byte == b'\\').then(|| tail.get(..3)).flatten();
        let value = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(value.unwrap_or(*byte));
        rest = if value.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn what_a_job_is() {
        let docker = format!("/system.slice/docker-{ID}.scope");
        let inner = format!("{docker}/init/worker");
        let pod = format!("/kubepods/burstable/pod0a1b2c3d-1111-2222-3333-444455556666/{ID}");
        let by_containerd = format!("/system.slice/containerd.service/kubepods-x.slice:cri-containerd:{ID}");
        for (path, expected) in [
            ("/", None),
            ("/system.slice", None),
            ("/init.scope", None),
            ("/user.slice/user-1000.slice/session-3.scope", None),
            ("/user.slice/user-1000.slice/user@1000.service/init.scope", None),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/train.service/x",
                Some(("/user.slice/user-1000.slice/user@1000.service/app.slice/train.service", Kind::Any)),
            ),
            ("/system.slice/train.service", Some(("/system.slice/train.service", Kind::Any))),
            ("/system.slice/train.service/workers/3", Some(("/system.slice/train.service", Kind::Any))),
            ("/gpujobs/a", Some(("/gpujobs/a", Kind::Any))),
            ("/slurm/uid_1000/job_123/step_0/task_1", Some(("/slurm/uid_1000/job_123", Kind::Job))),
            (
                "/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0",
                Some(("/system.slice/slurmstepd.scope/job_42", Kind::Job)),
            ),
            (&inner, Some((docker.as_str(), Kind::Job))),
            (&pod, Some((pod.as_str(), Kind::Job))),
            (&by_containerd, Some((by_containerd.as_str(), Kind::Job))),
            ("/lxc.payload.web/system.slice/a.service", Some(("/lxc.payload.web", Kind::Job))),
        ] {
            assert_eq!(job_path(path), expected, "{path}");
        }
    }

    const MIXED: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
36 31 0:33 /part /mnt/with\\040blank rw - cgroup cgroup rw,devices
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    #[test]
    fn directories_of_a_mixed_host() {
        let found = Hierarchies::parse(MIXED)
            .of("7:devices:/part/a\n6:devices:/other\n2:cpuacct,cpu:/j\n1:name=systemd:/s/t\n0::/\nnonsense");
        let expected = [
            ("/sys/fs/cgroup/unified/", "/"),
            ("/mnt/with blank/a", "/part/a"),
            ("/sys/fs/cgroup/systemd/s/t", "/s/t"),
            ("/sys/fs/cgroup/cpu,cpuacct/j", "/j"),
        ];
        assert_eq!(found, expected.map(|(dir, path)| (PathBuf::from(dir), path.to_owned())));
    }

    #[test]
    fn a_job_s_members_and_where_it_is() {
        let root = tempfile::tempdir().unwrap();
        let (proc, at) = (root.path().join("proc"), root.path().join("cg"));
        let job = at.join("system.slice/train.service");
        fs::create_dir_all(job.join("workers")).unwrap();
        fs::write(job.join("cgroup.procs"), "7\n0\n").unwrap();
        fs::write(job.join("workers/cgroup.procs"), "9\n8\n").unwrap();
        for (pid, path) in
            [(8, "/system.slice/train.service/workers"), (10, "/system.slice"), (11, "/system.slice/training.service")]
        {
            fs::create_dir_all(proc.join(pid.to_string())).unwrap();
            fs::write(proc.join(pid.to_string()).join("cgroup"), format!("0::{path}\n")).unwrap();
        }
        let hierarchies = Hierarchies::parse(&format!("1 1 0:1 / {} rw - cgroup2 none rw\n", at.display()));
        let found = hierarchies.job(&proc, 8).unwrap();
        assert_eq!(
            found,
            JobCgroup { dir: job.clone(), path: "/system.slice/train.service".to_owned(), kind: Kind::Any }
        );
        assert_eq!(found.members(), [7, 8, 9].into());
        assert!(hierarchies.is_in(&proc, 8, &job) && !hierarchies.is_in(&proc, 11, &job));
        assert_eq!(hierarchies.job(&proc, 10).unwrap_err(), "/system.slice is no job's cgroup");
        assert_eq!(hierarchies.job(&proc, 12).unwrap_err(), "its cgroup is not mounted here");
        assert!(!can_kill(&job) && kill(&job).is_err());
        fs::write(job.join("cgroup.kill"), "").unwrap();
        kill(&job).unwrap();
        assert_eq!(fs::read_to_string(job.join("cgroup.kill")).unwrap(), "1");
    }
}
