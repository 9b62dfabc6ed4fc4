//! Who a process is, from /proc, at the moment of asking.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{
    plan::Subject,
    report::{Identity, Parent, People},
};
use crate::model::{ProcKey, View};

/// `PF_KTHREAD`, include/linux/sched.h.
const KERNEL_THREAD: u64 = 0x0020_0000;

#[derive(Clone, Debug)]
pub struct ProcPeople {
    proc_root: PathBuf,
}

/// Fields of a stat line.
struct Stat {
    comm: String,
    parent: u32,
    session: u32,
    flags: u64,
}

impl ProcPeople {
    pub fn new(proc_root: impl Into<PathBuf>) -> Self {
        Self { proc_root: proc_root.into() }
    }

    fn dir(&self, pid: u32) -> PathBuf {
        self.proc_root.join(pid.to_string())
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        let line = fs::read(self.dir(pid).join("stat")).ok()?;
        let line = String::from_utf8_lossy(&line);
        let (name, rest) = (line.find('(')? + 1, line.rfind(')')?);
        let fields: Vec<&str> = line.get(rest + 1..)?.split_ascii_whitespace().collect();
        Some(Stat {
            comm: line.get(name..rest)?.to_owned(),
            parent: fields.get(1)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            flags: fields.get(6)?.parse().ok()?,
        })
    }

    /// What the plan must know of the holders. A process that is gone is left out: it is not signalled anyway.
    pub fn subjects(&self, view: &View) -> BTreeMap<ProcKey, Subject> {
        let subject = |key: ProcKey| {
            let Stat { session, flags, .. } = self.stat(key.tgid)?;
            Some((key, Subject { session, kernel_thread: flags & KERNEL_THREAD != 0, ..Subject::default() }))
        };
        view.holders.iter().filter_map(|holder| subject(holder.key)).collect()
    }

    /// The parent, its parent, and so on.
    pub fn ancestors(&self, pid: u32) -> BTreeSet<u32> {
        let mut ancestors = BTreeSet::new();
        let mut next = self.stat(pid).map(|stat| stat.parent);
        while let Some(pid) = next.filter(|pid| *pid > 0 && ancestors.insert(*pid)) {
            next = self.stat(pid).map(|stat| stat.parent);
        }
        ancestors
    }

    pub fn session(&self, pid: u32) -> u32 {
        self.stat(pid).map_or(0, |stat| stat.session)
    }
}

/// The innermost systemd unit of a cgroup path.
fn unit(cgroup: &str) -> Option<String> {
    let is_unit = |part: &&str| part.ends_with(".service") || part.ends_with(".scope");
    cgroup.trim().rsplit('/').find(is_unit).map(str::to_owned)
}

fn arguments(path: &Path) -> Vec<String> {
    let text = fs::read(path).unwrap_or_default();
    let text = text.strip_suffix(b"\0").unwrap_or(&text);
    if text.is_empty() {
        return Vec::new();
    }
    text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

impl People for ProcPeople {
    fn identity(&self, key: ProcKey) -> Identity {
        let dir = self.dir(key.tgid);
        let stat = self.stat(key.tgid);
        let uid = fs::metadata(&dir).ok().map(|meta| meta.uid());
        let cgroup = fs::read_to_string(dir.join("cgroup")).unwrap_or_default();
        let parent = stat.as_ref().map(|stat| Parent {
            pid: stat.parent,
            comm: self.stat(stat.parent).map(|parent| parent.comm).unwrap_or_default(),
        });
        Identity {
            pid: key.tgid,
            start_ns: key.start_ns,
            comm: stat.map(|stat| stat.comm).unwrap_or_default(),
            argv: arguments(&dir.join("cmdline")),
            uid,
            user: uid.and_then(uzers::get_user_by_uid).map(|user| user.name().to_string_lossy().into_owned()),
            unit: cgroup.lines().find_map(|line| unit(line.rsplit(':').next()?)),
            container: None,
            parent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let people = ProcPeople::new("/proc");
        let identity = people.identity(ProcKey::new(std::process::id(), 5));
        assert_eq!((identity.pid, identity.start_ns), (std::process::id(), 5));
        assert!(!identity.comm.is_empty() && !identity.argv.is_empty());
        assert_eq!(identity.uid, Some(rustix::process::getuid().as_raw()));
        let parent = identity.parent.unwrap().pid;
        assert!(people.ancestors(std::process::id()).contains(&parent));
        assert_eq!(people.ancestors(u32::MAX), BTreeSet::new());
    }

    #[test]
    fn units_of_cgroups() {
        assert_eq!(unit("/system.slice/train.service\n").as_deref(), Some("train.service"));
        assert_eq!(unit("/user.slice/user-1.slice/session-4.scope").as_deref(), Some("session-4.scope"));
        assert_eq!(unit("/a.service/inner").as_deref(), Some("a.service"));
        assert_eq!(unit("/"), None);
    }
}
